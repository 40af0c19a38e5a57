"""The simulation against a step that two H200 really ran, under an earlier version of the hooks.

That step was written by another program, one list a line (fixtures/traces/README.md). Its hooks and
its recorder differ from today's in known ways; each is undone in one place here, with the reason,
and the test says how often. What is left must be equal line by line: nodes, gathers,
releases, reductions, collectives and stream waits, in order and on their streams.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from real.config import load_scenario
from real.trace import Trace
from sim.diff.canonical import stream_roles
from tests.conformance.conftest import ROOT

if TYPE_CHECKING:
    from tests.conformance.conftest import Backends

FOLDER = ROOT / "fixtures" / "traces" / "h200-host-order"
SCENARIO = {
    "world_size": 2,
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 16,
    "seq_length": 64,
    "num_microbatches": 4,
    "train_iters": 1,
}
STREAMS = {
    "compute": "comp",
    "comm": "comm",
    "all_gather": "ag",
    "reduce_scatter": "rs",
    # The other program knew four streams and took the dispatcher's copy stream for compute.
    "side1": "comp",
}
CALLS = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}

Lines = list[list[str]]


def read_real(name: str) -> Lines:
    """Reads the real step without its event lines, which it shows twice, and without sizes.

    Sizes follow from the model, which had LayerNorm and GELU, and from the routing.
    """
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt") as file:
        lines: list[list[Any]] = [json.loads(line) for line in file]
    kept = [line for line in lines if line[0] not in ("record", "wait_event")]
    return [line[:3] if line[0] == "coll" else line for line in kept]


def simulated_lines(trace: Trace, undone: Counter[str]) -> Iterator[list[str]]:
    """Writes the simulated step as the other program would have, and counts what it left out."""
    streams = {number: STREAMS[role] for number, role in stream_roles(trace.records).items()}
    is_inside = False
    for r in trace.records:
        op = r["op"]
        stream = streams.get(r.get("stream", -1), "")
        if op == "step":
            is_inside = r["event"] == "begin"
        elif op == "grad_read":
            is_inside = False  # the other program ended with the gradient synchronization
        if not is_inside:
            continue
        if op == "node" and r["direction"] == "wgrad":
            undone["no node lines of delayed weight gradients"] += 1
        elif op == "node":
            # The other program wrote the caller's stream; today's record has the node's own.
            yield ["node", f"_{r['direction']}", r["name"], "comp"]
        elif op == "nvtx_push" and r["text"].endswith(" unshard"):
            # Today's record of a gather follows it; the other program's line came first.
            unit = r["text"].split()[1].replace("<root>", "")
            yield ["unit", "unshard", unit, "comp"]
        elif op == "unshard" and not r["gathered"]:
            yield ["unit", "unshard_noop", r["unit"], stream]
        elif op == "reshard":
            yield ["unit", "_reshard_parameter_groups", r["unit"], stream]
        elif op == "reduce":
            yield ["unit", "_reduce_gradient_groups", r["unit"], stream]
        elif op == "collective" and r["kind"] == "all_gather" and r["unit"] is None:
            # Megatron calls it by a name of its own, which the other program had not wrapped.
            undone["no line for the gather of tokens per expert"] += 1
        elif op == "collective":
            yield ["coll", CALLS.get(r["kind"], r["kind"]), stream]
        elif op == "stream_wait":
            yield ["wait_stream", stream, streams[r["on"]]]


def without_root_forks(lines: Lines) -> tuple[Lines, int]:
    """Drops the all-gather stream's wait before each use of the root.

    The other hooks waited at every use; today's wait once a gather, when there is one.
    """
    kept: Lines = []
    dropped = 0
    for line, following in zip(lines, [*lines[1:], ["end"]], strict=True):
        is_use = following[0] == "unit" and following[1].startswith("unshard")
        if line[:2] == ["wait_stream", "ag"] and is_use and following[2] == "":
            dropped += 1
        else:
            kept.append(line)
    return kept, dropped


def with_release_before_reduction(lines: Lines) -> tuple[Lines, int]:
    """Moves the release of a unit before its reduction.

    The other hooks reduced first, as MFSDP's own do; then full weights and packed gradients are
    alive at once.
    """
    result: Lines = []
    moved = 0
    start = 0
    for number, line in enumerate(lines):
        if line[:2] == ["unit", "_reduce_gradient_groups"]:
            start = len(result)
        is_release = line[:2] == ["unit", "_reshard_parameter_groups"]
        if is_release and _is_reduction(result[start:], line[2]):
            result[start:start] = [line, lines[number + 1]]
            lines[number + 1] = []
            moved += 1
        elif line:
            result.append(line)
    return result, moved


def _is_reduction(lines: Lines, unit: str) -> bool:
    """Whether lines are a whole reduction of a unit and nothing else."""
    return (
        bool(lines)
        and lines[0][:3] == ["unit", "_reduce_gradient_groups", unit]
        and all(line[0] in ("wait_stream", "coll") for line in lines[1:])
    )


def without_loss_average(lines: Lines) -> Lines:
    """Drops the last all_reduce: today's step also averages the loss it reports."""
    last = max(n for n, line in enumerate(lines) if line[:2] == ["coll", "all_reduce"])
    return lines[:last] + lines[last + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_delayed"), [("fsdp_0", False), ("fsdp_1", True)])
def test_the_simulated_step_is_the_real_one(
    name: str, is_delayed: bool, backends: Backends
) -> None:
    """The standard for the simulated mode."""
    scenario = load_scenario(ROOT / "fixtures" / "configs" / "parity.toml").changed(
        **SCENARIO, delay_wgrad_compute=is_delayed
    )
    real = read_real(name)
    assert len(real) == 865
    undone: Counter[str] = Counter()
    simulated = list(simulated_lines(backends.simulated.trace(scenario)[0], undone))
    assert undone == {
        "no line for the gather of tokens per expert": 16,
        **({"no node lines of delayed weight gradients": 32} if is_delayed else {}),
    }
    real, real_forks = without_root_forks(real)
    simulated, forks = without_root_forks(simulated)
    assert (real_forks, forks) == (24, 4)
    real, moved = with_release_before_reduction(real)
    assert moved == 36
    assert without_loss_average(simulated) == real
