"""The transition table of a unit's life, written down a second time."""

import pytest

from real.hooks.lifecycle import IllegalStep, UnitEvent, UnitLifecycle, UnitPhase

LEGAL = {
    ("resting", "use in forward"): "forward",
    ("resting", "use in backward"): "backward",
    ("resting", "release after forward"): "resting",
    ("forward", "use in forward"): "forward",
    ("forward", "use in backward"): "forward and backward",
    ("forward", "release after forward"): "resting",
    ("backward", "use in forward"): "forward and backward",
    ("backward", "use in backward"): "backward",
    ("backward", "release after forward"): "backward",
    ("backward", "gradient"): "backward",
    ("backward", "end of backward"): "resting",
    ("forward and backward", "use in forward"): "forward and backward",
    ("forward and backward", "use in backward"): "forward and backward",
    ("forward and backward", "release after forward"): "backward",
    ("forward and backward", "gradient"): "forward and backward",
    ("forward and backward", "end of backward"): "forward",
}
EVERY_STEP = [(phase.value, event.value) for phase in UnitPhase for event in UnitEvent]


def in_phase(phase: str) -> UnitLifecycle:
    lifecycle = UnitLifecycle("layers.3")
    lifecycle.phase = UnitPhase(phase)
    return lifecycle


@pytest.mark.parametrize(("phase", "event"), LEGAL)
def test_a_legal_step_leads_to_the_phase_of_the_table(phase: str, event: str) -> None:
    """Each open interval must survive the other one's opening and closing."""
    lifecycle = in_phase(phase)
    assert lifecycle.step(UnitEvent(event)).value == LEGAL[phase, event]
    assert lifecycle.phase.value == LEGAL[phase, event]


@pytest.mark.parametrize(("phase", "event"), [step for step in EVERY_STEP if step not in LEGAL])
def test_an_illegal_step_names_itself_and_changes_nothing(phase: str, event: str) -> None:
    """Who reads the message has no debugger on the rank that failed."""
    lifecycle = in_phase(phase)
    with pytest.raises(IllegalStep) as raised:
        lifecycle.step(UnitEvent(event), "layers.3.weight")
    assert str(raised.value) == (
        f"Cannot take step '{event}' by layers.3.weight of FSDP unit 'layers.3': "
        f"its phase is '{phase}'."
    )
    assert lifecycle.phase.value == phase


def test_the_root_has_a_name_in_messages() -> None:
    """Its full name is the empty string."""
    with pytest.raises(IllegalStep, match="FSDP unit '<root>'"):
        UnitLifecycle("").step(UnitEvent.GRADIENT)


def test_two_microbatches_in_flight_keep_the_unit_open_until_both_are_done() -> None:
    """The forward of one microbatch runs between the pieces of another one's backward."""
    lifecycle = UnitLifecycle("layers.0")
    steps = [
        UnitEvent.FORWARD_USE,  # microbatch 0
        UnitEvent.FORWARD_RELEASE,
        UnitEvent.BACKWARD_USE,
        UnitEvent.FORWARD_USE,  # microbatch 1 begins inside the backward of 0
        UnitEvent.GRADIENT,
        UnitEvent.FORWARD_RELEASE,
        UnitEvent.FORWARD_USE,
        UnitEvent.BACKWARD_END,  # of 0, while the forward of 1 goes on
        UnitEvent.FORWARD_RELEASE,
    ]
    assert [lifecycle.step(event).value for event in steps] == [
        "forward",
        "resting",
        "backward",
        "forward and backward",
        "forward and backward",
        "backward",
        "forward and backward",
        "forward",
        "resting",
    ]
