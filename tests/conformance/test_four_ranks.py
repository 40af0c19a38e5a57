"""Expert parallel 2 with expert data parallel 2: four fake ranks, and four GPUs where there are.

Two GPUs cannot show that expert shards travel: their expert data parallel group has one rank.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from real.config import load_scenario
from real.trace import Trace, read_traces
from sim.checks import check_traces
from sim.diff import canonical_text
from tests.conformance.conftest import ROOT, launch
from tests.conformance.test_conformance import differences

if TYPE_CHECKING:
    from tests.conformance.conftest import Backends

CONFIGS = ROOT / "fixtures" / "configs" / "four"
GOLDEN = ROOT / "fixtures" / "traces" / "four"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml"))
HYBRID = ["--num-distributed-optimizer-instances=2", "--outer-dp-sharding-strategy=optim"]


@pytest.fixture
def on_four_gpus() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program under torchrun on four GPUs."""
    import torch

    num_gpus = int(os.environ.get("GPUS") or torch.cuda.device_count())
    if num_gpus < 4:
        pytest.skip(f"needs four GPUs, may use {num_gpus}")
    return lambda *words: launch(*words, num_ranks=4)


def seen_from(rank: int, golden: str) -> str:
    """Returns the golden trace, which is rank 0's, with the groups that another rank is in.

    Bit 0 of a rank is its place among experts, bit 1 its place among their copies: the groups of a
    rank are those of rank 0 with the bits flipped in which the two differ.
    """

    def flipped(group: re.Match[str]) -> str:
        ranks = sorted(int(member) ^ rank for member in group[1].split(","))
        return f" in {','.join(map(str, ranks))}/"

    return re.sub(r" in ([0-9,]+)/", flipped, golden)


def agree(name: str, traces: list[Trace]) -> None:
    """Asserts that four traces do what the golden one says, and break no rule."""
    golden = (GOLDEN / f"{name}.txt").read_text()
    assert [trace.rank for trace in traces] == [0, 1, 2, 3]
    for trace in traces:
        assert trace.is_complete
        assert differences(seen_from(trace.rank, golden), trace) == []
    assert [str(violation) for violation in check_traces(traces)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_four_fake_ranks_do_what_the_golden_trace_says(name: str, backends: Backends) -> None:
    """One text for all four, but for the ranks in their groups."""
    traces = backends.simulated.trace(load_scenario(CONFIGS / f"{name}.toml"))
    if os.environ.get("REGENERATE_GOLDEN"):
        (GOLDEN / f"{name}.txt").write_text(canonical_text(traces[0]))
    agree(name, traces)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_four_gpus_do_what_the_golden_trace_says(
    name: str, on_four_gpus: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """What the laptop recorded is what NCCL does."""
    run = on_four_gpus("-m", "real", "trace", CONFIGS / f"{name}.toml", "--out", tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    agree(name, read_traces(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [[], HYBRID], ids=["expert data parallel", "hybrid"])
def test_twenty_steps_agree_with_the_distributed_optimizer_on_four_gpus(
    flags: list[str], on_four_gpus: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The upstream parity test: last loss within 2e-5, every step within 1e-3."""
    run = on_four_gpus("-m", "real", "parity", "--json", *flags)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.strip().splitlines()[-1])
    assert result["passed"]
    assert len(result["losses"]) == 20
    pairs = zip(result["losses"], result["reference_losses"], strict=True)
    relative = [abs(mine / theirs - 1.0) for mine, theirs in pairs]
    assert relative[-1] <= 2e-5
    assert max(relative) <= 1e-3


def test_golden_traces_of_four_ranks_hold_what_they_are_for() -> None:
    """Expert shards travel in a group of two; with hybrid sharding weights do in the outer one."""
    plain = (GOLDEN / "ep2-dp2.txt").read_text()
    hybrid = (GOLDEN / "ep2-dp2-hybrid.txt").read_text()
    experts = " of decoder.layers.1.mlp.experts bfloat16 in 0,2/"
    assert f"all_gather{experts}" in plain
    assert f"reduce_scatter{experts}" in plain
    assert "in 0,1,2,3/" in seen_from(3, plain)
    assert " of decoder.layers.1.mlp.experts bfloat16 in alone/" in hybrid
    outer = "all_gather bfloat16 in 0,2/"
    assert (outer in hybrid, outer in plain) == (True, False)
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == NAMES
