"""Which kernels each schedule node launches on a GPU, from torch's profiler."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from real.config import Scenario
from real.gpu.variants import make_job


def profile_nodes(scenario: Scenario, variant: str) -> dict[str, Any]:
    """Returns the kernels of one step by node: short name, launches, and microseconds in all.

    A kernel belongs to the innermost of our ranges that was open on the host when it was launched.
    """
    from torch.profiler import ProfilerActivity, profile

    from real.mcore import internals

    job: Any = make_job(scenario, variant)
    open_ranges: list[Any] = []

    def begin(name: str, kind: str) -> None:
        span = torch.profiler.record_function(f"node:{name} {kind}".strip())
        span.__enter__()
        open_ranges.append(span)

    def end(_: str, __: str) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for step in range(2):
        job.forward_backward(step)
        job.clear_gradients()
    torch.cuda.synchronize()
    with (
        internals.observed_nodes(
            lambda call: begin(call.name, call.direction),
            lambda call: end(call.name, call.direction),
        ),
        internals.watched_layers(job.model.module, begin, end),
        internals.watched_backwards(begin, end),
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as session,
    ):
        job.forward_backward(2)
        torch.cuda.synchronize()
    job.clear_gradients()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        session.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summarise(events)


def summarise(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Sorts the kernels of a Chrome trace by the range in which the host launched them."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix("node:"))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("node:")
    )
    starts = [span[0] for span in spans]
    launched_at = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
    }
    runs: dict[str, int] = defaultdict(int)
    for _, _, name in spans:
        runs[name] += 1
    kernels: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at = launched_at.get(event["args"].get("correlation"))
        node = "" if at is None else _innermost(spans, starts, at)
        entry = kernels[node][_short(event["name"])]
        entry[0] += 1
        entry[1] += event["dur"]
    return {
        node or "(outside)": {
            "runs": runs[node],
            "kernels": {
                name: [int(count), round(total, 1)]
                for name, (count, total) in sorted(by_name.items(), key=lambda item: -item[1][1])
            },
        }
        for node, by_name in sorted(kernels.items())
    }


def _innermost(spans: list[tuple[float, float, str]], starts: list[float], at: float) -> str:
    place = bisect_right(starts, at) - 1
    while place >= 0 and place > bisect_right(starts, at) - 50:
        begin, end, name = spans[place]
        if begin <= at <= end:
            return name
        place -= 1
    return ""


def _short(name: str) -> str:
    """Cuts template arguments short: they fill pages."""
    name = name.replace("void ", "").replace("at::native::", "")
    return name if len(name) <= 110 else f"{name[:80]}...{name[-27:]}"
