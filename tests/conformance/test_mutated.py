"""Hooks with one duty taken away are found out, on the laptop and on two GPUs alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

import pytest

from real.trace import read_traces
from sim.checks import check_traces
from sim.world import WorldError
from tests.conformance.conftest import CONFIGS, ROOT
from tests.conformance.mutated import MUTANTS

if TYPE_CHECKING:
    from tests.conformance.conftest import Backends

Launch = Callable[..., CompletedProcess[str]]
SCRIPT = ROOT / "tests" / "conformance" / "mutated.py"
LATE_HOOK = "got it unsharded again: a backward hook ran late"
WAITS = {"without-wait-for-gather": "I1", "without-wait-for-reductions": "I8"}


@pytest.mark.parametrize("mutant", WAITS)
def test_a_lost_wait_is_reported_from_a_simulated_trace(mutant: str, backends: Backends) -> None:
    """Without kernels in the trace, and by the rule that the wait is for."""
    traces = backends.simulated("combined-1", MUTANTS[mutant])
    found = check_traces(traces)
    assert found
    assert {violation.rule for violation in found} == {WAITS[mutant]}


@pytest.mark.gpu
@pytest.mark.parametrize("mutant", WAITS)
def test_a_lost_wait_is_reported_from_a_trace_of_two_gpus(
    mutant: str, on_two_gpus: Launch, tmp_path: Path
) -> None:
    """Timing hides it on the GPU, so the run ends well; the trace shows it."""
    run = on_two_gpus(SCRIPT, mutant, "trace", CONFIGS / "combined-1.toml", "--out", tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    found = check_traces(read_traces(tmp_path))
    assert {violation.rule for violation in found} == {WAITS[mutant]}


def test_hooks_on_every_submodule_gather_a_finished_unit_again(backends: Backends) -> None:
    """A module without parameters, whose backward comes last, has the unit gathered for nobody.

    The loss of that step is right; without the error its gradients would drift from then on.
    """
    with pytest.raises(WorldError, match=LATE_HOOK):
        backends.simulated("combined-3-forward", MUTANTS["hooks-on-every-submodule"])


def test_module_backward_hooks_on_owners_alone_do_no_harm(backends: Backends) -> None:
    """What goes wrong there is the missing owner rule, not the kind of hook."""
    traces = backends.simulated("combined-1", MUTANTS["module-backward-hooks"])
    assert check_traces(traces) == []


@pytest.mark.gpu
def test_hooks_on_every_submodule_fail_on_two_gpus_too(on_two_gpus: Launch, tmp_path: Path) -> None:
    """The same error names the unit, instead of a gradient that drifts."""
    mutant = "hooks-on-every-submodule"
    scenario = CONFIGS / "combined-3-forward.toml"
    run = on_two_gpus(SCRIPT, mutant, "trace", scenario, "--out", tmp_path)
    assert run.returncode != 0
    assert LATE_HOOK in run.stderr
