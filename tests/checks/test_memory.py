"""Bytes of FSDP buffers: told, and to the byte on the default scenario."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from real.config import Scenario, load_scenario
from real.trace import MemorySink, Trace
from sim.checks import fsdp_bytes, judge
from sim.checks.memory import check_memory
from sim.quiet import quiet
from sim.session.options import RunOptions
from sim.session.run import run_in_process

Story = Callable[..., Trace]

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"

BUFFERS = """
    unit layers.0 bytes 64
    name 1 layers.0:model weight = 32
    name 2 layers.0:full weight = 0
    step begin 0
    1: resize 2 0 64
    {used}
    {released}
    step end 0
"""
REDUCED = """
    1: allocate 3 64
    1: allocate 4 32
    1: reduce_scatter of layers.0 3 -> 4
    free 3
    free 4
"""


def test_buffers_are_counted_from_their_first_to_their_last_record(story: Story) -> None:
    """Weights by resize, gradients by allocation."""
    trace = story(BUFFERS.format(used=REDUCED, released="1: resize 2 64 0"))
    counted = fsdp_bytes(trace)
    assert counted is not None
    assert counted.resting == {"model weight": 32}
    assert counted.at_peak == {
        "full weight": 64,
        "model weight": 32,
        "packed gradient": 64,
        "reduced gradient": 32,
    }
    assert (counted.resting_bytes, counted.peak_bytes, counted.peak_seq) == (32, 192, 7)
    assert check_memory([trace]) == []


def test_a_trace_that_names_no_storage_has_no_bytes(story: Story) -> None:
    """None is not the same as nothing held."""
    assert fsdp_bytes(story("0: allocate 3 64\nstep begin 0")) is None


@pytest.mark.parametrize(
    ("used", "released", "kind"),
    [
        ("", "", "64 bytes of full weight"),
        (REDUCED.replace("free 3", ""), "1: resize 2 64 0", "64 bytes of packed gradient"),
        (REDUCED.replace("free 4", ""), "1: resize 2 64 0", "32 bytes of reduced gradient"),
    ],
)
def test_what_is_not_released_by_the_end_of_a_step_is_found(
    story: Story, used: str, released: str, kind: str
) -> None:
    """Also when the unit itself was said to be released."""
    [violation] = check_memory([story(BUFFERS.format(used=used, released=released))])
    assert (violation.rule, violation.unit) == ("I3", "layers.0")
    assert violation.message.startswith(kind)


@pytest.mark.parametrize(("num_units", "rules"), [(3, []), (4, ["I20"])])
def test_full_weights_are_bounded_in_bytes(story: Story, num_units: int, rules: list[str]) -> None:
    """By the largest units that the prefetch policy allows at once."""
    lines = []
    for unit in range(num_units):
        lines += [f"unit layers.{unit} bytes 64", f"name {unit} layers.{unit}:full weight = 0"]
    lines += [f"1: resize {unit} 0 64" for unit in range(num_units)]
    scenario = {"overlap_moe_expert_parallel_comm": True, "prefetch": "none"}
    found = check_memory([story("\n".join(lines), scenario=scenario)])
    assert [violation.rule for violation in found] == rules


def test_packed_gradients_of_two_units_at_once_are_found(story: Story) -> None:
    """One buffer at a time is what MFSDP promises."""
    both = "1: reduce_scatter of layers.0 3 -> 4\n1: reduce_scatter of layers.1 5 -> 6"
    apart = f"1: allocate 3 64\nfree 3\n1: allocate 5 64\nfree 5\n{both}"
    assert check_memory([story(apart)]) == []
    [violation] = check_memory([story(f"1: allocate 3 64\n1: allocate 5 64\n{both}")])
    assert violation.rule == "I20"
    assert violation.message.endswith("got those of layers.0, layers.1.")


def _padded(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> int:
    """Elements of a buffer that keeps whole rows on each rank, for rows that divide each other."""
    chunk = math.lcm(*(math.prod(shape[1:]) for shape in shapes))
    assert all(math.prod(shape) % chunk == 0 for shape in shapes), "no gaps between tensors"
    return math.ceil(sum(map(math.prod, shapes)) / (chunk * num_ranks)) * chunk * num_ranks


def _expected(scenario: Scenario) -> tuple[int, int]:
    """Resting and peak bytes of one rank in the default scenario, from its sizes alone.

    Weights and packed gradients are bfloat16, main weights and main gradients float32. At rest
    there are the shards. The peak is the reduction of a layer's experts: their own weights are
    released by then, and those of the root and of the other microbatch's layer are there.
    """
    hidden, vocab = scenario.hidden_size, scenario.vocab_size
    num_local_experts = scenario.num_experts // scenario.expert_model_parallel_size
    num_expert_ranks = scenario.world_size // scenario.expert_model_parallel_size
    root = _padded([(vocab, hidden), (hidden,), (vocab, hidden)], scenario.world_size)
    layer = _padded(
        [
            (hidden,),
            (hidden, hidden),
            (3 * hidden, hidden),
            (hidden,),
            (scenario.num_experts, hidden),
        ],
        scenario.world_size,
    )
    expert = [(2 * scenario.moe_ffn_hidden_size, hidden), (hidden, scenario.moe_ffn_hidden_size)]
    experts = _padded(expert * num_local_experts, num_expert_ranks)
    shards = (root + scenario.num_layers * layer) // scenario.world_size
    shards += scenario.num_layers * experts // num_expert_ranks
    resting = (2 + 4 + 4) * shards
    return resting, resting + 2 * (root + layer + experts + experts // num_expert_ranks)


@pytest.mark.slow
def test_bytes_of_zero_3_are_those_of_the_closed_form() -> None:
    """To the byte, on every rank: what a user plans with."""
    scenario = load_scenario(CONFIGS / "default.toml").changed(train_iters=1, num_microbatches=2)
    sinks = [MemorySink() for _ in range(scenario.world_size)]
    with warnings.catch_warnings():
        quiet()
        run_in_process(scenario, sinks=sinks, options=RunOptions(kernel_steps=None))
    for rank, sink in enumerate(sinks):
        trace = Trace(
            rank=rank,
            world_size=scenario.world_size,
            scenario=scenario.as_dict(),
            records=sink.records[1:],
            is_complete=True,
        )
        counted = fsdp_bytes(trace)
        assert counted is not None
        assert (counted.resting_bytes, counted.peak_bytes) == _expected(scenario)


PACKED_TWICE = """
    unit a bytes 64
    unit b bytes 64
    1: allocate 3 64
    1: reduce_scatter of a 3 -> 4
    1: allocate 5 64
    1: reduce_scatter of b 5 -> 6
"""


def test_packed_gradients_are_bounded_by_what_the_target_declares(story: Story) -> None:
    """One unit's at a time is the policy of our hooks; others have theirs or say nothing."""
    ours = story(PACKED_TWICE)
    assert [violation.rule for violation in check_memory([ours])] == ["I20"]
    silent = dataclasses.replace(ours, header={"target": "mfsdp1"})
    assert check_memory([silent]) == []
    two = dataclasses.replace(ours, header={"target": "mfsdp1", "bounds": {"packed": 2}})
    assert check_memory([two]) == []
    one = dataclasses.replace(ours, header={"target": "mfsdp1", "bounds": {"packed": 1}})
    [violation] = check_memory([one])
    assert violation.message == (
        "Expected packed gradients of one unit at a time, got those of a, b."
    )


def test_a_kept_unit_may_stay_over_the_border_of_a_step(story: Story) -> None:
    """What belongs to no unit of MFSDP v1 is gathered once and never released."""
    trace = story(BUFFERS.format(used="", released=""))
    assert [violation.rule for violation in check_memory([trace])] == ["I3"]
    kept = [
        {**record, "kept": True} if record["op"] == "unit" else record for record in trace.records
    ]
    silent = dataclasses.replace(trace, records=kept)
    assert check_memory([silent]) == []
    assert judge([silent]).reach.partly["I3"].endswith("the target keeps layers.0 gathered")
