"""Traces written out by hand, a record a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from real.trace import SCHEMA_VERSION, Trace
from real.trace.jsonl import JsonlSink, trace_path

SCENARIO: dict[str, Any] = {"expert_model_parallel_size": 2}


class Rank:
    """One rank's records; `step` begins one and `done` ends it."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.records: list[dict[str, Any]] = []

    def add(self, op: str, **fields: object) -> int:
        seq = len(self.records) + 1
        self.records.append({"seq": seq, "op": op, **fields})
        return seq

    def step(self, number: int = 0) -> None:
        self.add("step", step=number, event="begin")

    def done(self, number: int = 0) -> None:
        self.add("step", step=number, event="end")

    def group(self, name: str, *ranks: int) -> None:
        self.add("group", group=name, ranks=list(ranks))

    def kernel(self, stream: int = 0, name: str = "add", elements: int = 1 << 20) -> int:
        shapes = [["bf16", elements], ["bf16", elements]]
        return self.add("kernel", stream=stream, name=name, reads=[0], writes=[1], shapes=shapes)

    def node(self, name: str, direction: str, *, microbatch: int = 0) -> None:
        self.add(
            "node", name=name, direction=direction, layer="layer 1", microbatch=microbatch,
            chunk=0, phase="steady", stream=0,
        )  # fmt: skip

    def node_end(self, name: str, direction: str) -> None:
        self.add("node_end", name=name, direction=direction)

    def event_record(self, stream: int, event: int) -> int:
        return self.add("event_record", stream=stream, event=event)

    def event_wait(self, stream: int, event: int, record: int | None) -> int:
        return self.add("event_wait", stream=stream, event=event, record=record)

    def collective(
        self,
        group: str,
        n: int,
        kind: str = "all_gather",
        *,
        stream: int = 2,
        num_bytes: int = 1 << 24,
        unit: str | None = "layer",
        is_async: bool = False,
    ) -> int:
        return self.add(
            "collective", stream=stream, group=group, n=n, kind=kind, bytes=num_bytes,
            dtype="bfloat16", unit=unit, reads=[5], writes=[6], **{"async": is_async},
        )  # fmt: skip

    def trace(self, scenario: dict[str, Any] | None = None) -> Trace:
        return Trace(
            rank=self.rank,
            world_size=self.world_size,
            scenario=SCENARIO if scenario is None else scenario,
            records=self.records,
            is_complete=True,
        )


def layer_trace(world_size: int = 2, layers: int = 3) -> list[Trace]:
    """Returns some layers of FSDP with expert parallelism over pairs of ranks."""
    traces = []
    for rank in range(world_size):
        story = Rank(rank, world_size)
        pair = rank - rank % 2
        story.group("w", *range(world_size))
        story.group(f"e{pair}", pair, pair + 1)
        story.step()
        for layer in range(layers):
            for direction in ("forward", "backward"):
                story.node("pre_dispatch_computation", direction)
                story.add("stream_wait", stream=2, on=0)
                story.collective("w", 3 * layer + (direction == "backward"))
                gathered = story.event_record(2, 10)
                story.event_wait(0, 10, gathered)
                story.kernel(elements=1 << 26)
                sent = story.event_record(0, 0)
                story.node_end("pre_dispatch_computation", direction)
                story.node("moe_dispatch", direction)
                story.event_wait(4, 0, sent)
                n = 2 * layer + (direction == "backward")
                story.collective(f"e{pair}", n, "all_to_all_single", stream=4, unit=None)
                there = story.event_record(4, 0)
                story.node_end("moe_dispatch", direction)
                story.node("mlp", direction)
                story.kernel(elements=1 << 24)
                story.event_wait(0, 0, there)
                story.kernel(elements=1 << 26)
                story.node_end("mlp", direction)
            story.add("stream_wait", stream=3, on=0)
            story.collective("w", 3 * layer + 2, "reduce_scatter", stream=3)
        story.done()
        traces.append(story.trace())
    return traces


def write_traces(folder: Path, traces: list[Trace]) -> None:
    """Writes traces as a run does."""
    folder.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        sink = JsonlSink(trace_path(folder, trace.rank))
        sink.write(
            {
                "seq": 0, "op": "header", "schema": SCHEMA_VERSION, "rank": trace.rank,
                "world_size": trace.world_size, "scenario": trace.scenario,
            }
        )  # fmt: skip
        for record in trace.records:
            sink.write(record)
        count = len(trace.records) + 1
        sink.write({"seq": count, "op": "end", "records": count})
        sink.close()
