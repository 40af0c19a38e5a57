"""One body per scenario, two backends: what the laptop records is what two GPUs record.

The golden trace of a scenario is its canonical form, the same for every rank. It is written by the
simulation (fixtures/traces/README.md) and held against both.
"""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING

import pytest

from real.trace import Trace
from sim.checks import check_traces
from sim.diff import canonical_text
from tests.conformance.conftest import CONFIGS, ROOT

if TYPE_CHECKING:
    from tests.conformance.conftest import Backends

GOLDEN = ROOT / "fixtures" / "traces"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml"))
MOST_LINES = 40


def differences(golden: str, trace: Trace) -> list[str]:
    """Returns the first lines in which a trace is not its golden one."""
    mine = canonical_text(trace)
    if mine == golden:
        return []
    lines = difflib.unified_diff(
        golden.splitlines(), mine.splitlines(), "golden", f"rank {trace.rank}", lineterm=""
    )
    return list(lines)[:MOST_LINES]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["simulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_scenario_does_what_its_golden_trace_says(
    backend: str, name: str, backends: Backends
) -> None:
    """Nodes, hooks, gathers, reductions, collectives and waits, on their streams and in order."""
    traces = getattr(backends, backend)(name)
    path = GOLDEN / f"{name}.txt"
    if backend == "simulated" and os.environ.get("REGENERATE_GOLDEN"):
        path.write_text(canonical_text(traces[0]))
    golden = path.read_text()
    assert len(traces) == 2
    for trace in traces:
        assert trace.is_complete
        assert differences(golden, trace) == []
    assert [str(violation) for violation in check_traces(traces)] == []


def test_a_golden_trace_holds_what_it_is_for() -> None:
    """An empty golden trace would agree with an empty run."""
    golden = (GOLDEN / "combined-2-delayed.txt").read_text()
    for word in ("node mlp wgrad layer 2", "hook post_gradient", "reduce <root> last", "@comm"):
        assert word in golden
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == NAMES
