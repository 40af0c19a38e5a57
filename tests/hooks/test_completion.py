"""The countdown over one unit's gradients."""

import pytest

from real.hooks.completion import GradientCountdown


def test_the_last_declared_gradient_completes_the_unit() -> None:
    """A weight that two nodes use accumulates twice."""
    countdown = GradientCountdown("layers.0", {"a": 2, "b": 1})
    assert [countdown.count(name) for name in ["a", "b", "a"]] == [False, False, True]


def test_a_complete_countdown_is_armed_for_the_next_microbatch() -> None:
    """Nobody else would arm it."""
    countdown = GradientCountdown("layers.0", {"a": 2, "b": 1})
    once = [countdown.count(name) for name in ["b", "a", "a"]]
    again = [countdown.count(name) for name in ["a", "a", "b"]]
    assert once == again == [False, False, True]


def test_one_gradient_too_many_is_named_with_those_that_have_none() -> None:
    """Both sides are needed to find the wrong declaration."""
    countdown = GradientCountdown("layers.0", {"a": 1, "b": 1, "c": 2})
    countdown.count("a")
    countdown.count("c")
    with pytest.raises(RuntimeError) as raised:
        countdown.count("a")
    assert str(raised.value) == (
        "Expected 1 gradient(s) of 'a' per microbatch in FSDP unit 'layers.0', "
        "got one more while b had none."
    )


def test_one_gradient_too_many_changes_no_count() -> None:
    """The state after an error is the state before it."""
    countdown = GradientCountdown("", {"a": 1, "b": 1})
    countdown.count("a")
    with pytest.raises(RuntimeError, match="'<root>'"):
        countdown.count("a")
    assert countdown.missing() == ["b"]
    assert countdown.count("b")


def test_missing_has_no_gradient_and_short_has_too_few() -> None:
    """The first may be an unused weight and is filled with zeros; the second is an error."""
    countdown = GradientCountdown("layers.0", {"a": 2, "b": 2, "c": 1})
    countdown.count("a")
    countdown.count("c")
    assert (countdown.missing(), countdown.short()) == (["b"], ["a"])


def test_a_countdown_is_started_between_its_first_and_its_last_gradient() -> None:
    """Before and after, a unit owes nothing."""
    countdown = GradientCountdown("layers.0", {"a": 1, "b": 1})
    seen = [countdown.is_started]
    for name in ["a", "b"]:
        countdown.count(name)
        seen.append(countdown.is_started)
    assert seen == [False, True, False]


def test_rearming_forgets_what_came() -> None:
    """The schedule's edge ends a microbatch whose last gradients never come."""
    countdown = GradientCountdown("layers.0", {"a": 1, "b": 1})
    countdown.count("a")
    countdown.rearm()
    assert countdown.missing() == ["a", "b"]
