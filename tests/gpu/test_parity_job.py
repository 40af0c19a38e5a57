"""`real parity` compares any target, here on two fake ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import pytest

from real.config import Scenario, load_scenario
from real.reference import Reference
from real.result import RunResult
from real.targets import Hosted
from real.trace import Recorder
from sim.cuda import FakeDevice, active_device, use_device
from tests.conformance.conftest import CONFIGS


def compare(target: str, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> RunResult | None:
    """Runs what `real parity` runs and returns what the first rank has to say."""
    from sim.quiet import quiet
    from sim.session.megatron import megatron_on_fake_cuda

    scenario = load_scenario(CONFIGS / "combined-2-delayed.toml").changed(num_layers=2)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        quiet()
        stack.enter_context(megatron_on_fake_cuda())
        from real.gpu import parity
        from real.mcore import observe
        from real.mcore.model import initialize_parallel
        from sim.session.world import make_world
        from sim.world import init_process_group

        @contextmanager
        def world(scenario: Scenario, **_: object) -> Iterator[int]:
            rank = active_device().index
            init_process_group(rank, scenario.world_size)
            initialize_parallel(scenario)
            yield rank

        monkeypatch.setattr(parity, "gpu_world", world)
        # It is for the watch over a process, and here all ranks are one.
        monkeypatch.setattr(observe, "recorded_nodes", lambda _: nullcontext())

        def body(rank: int) -> RunResult | None:
            with use_device(FakeDevice(rank, Recorder())):
                return parity.run_parity(
                    scenario, reference, hosted=Hosted(target), on_progress=lambda _: None
                )

        first, *others = make_world(scenario.world_size).run(body)
    assert others == [None]
    return first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "title"),
    [("mfsdp1", "MFSDP v1 (optim_grads_params)"), ("mfsdp2", "MFSDP v2")],
)
def test_a_target_agrees_with_itself_under_its_plain_schedule(
    target: str, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = compare(target, Reference.PLAIN, monkeypatch)
    assert result is not None
    assert (result.target, result.reference) == (title, Reference.PLAIN)
    assert result.problems() == []
    assert result.losses[0] == result.reference_losses[0]


@pytest.mark.slow
def test_what_another_target_does_to_experts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """MFSDP v1 with one rank a copy of experts (docs/findings.md): losses agree in the first step.

    The plain schedule of the same target has it too, so only a reference without FSDP shows it.
    """
    result = compare("mfsdp1", Reference.DISTOPT, monkeypatch)
    assert result is not None
    assert result.losses[0] == result.reference_losses[0]
    loss, gradient, norm = result.problems()
    assert "the loss of step 1" in loss
    assert "mlp.experts" in gradient
    assert "gradient norms" in norm
