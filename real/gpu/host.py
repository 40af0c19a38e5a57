"""Times host work: single calls, and the nodes and units of small models that the host limits."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist

from real.config import Scenario
from real.gpu.jobs import make_job
from real.gpu.measure import host_us, wait
from real.hooks.weak import WeakHook
from real.variants import MAIN_VARIANTS

SMALL: Final[dict[str, object]] = {
    "hidden_size": 256,
    "ffn_hidden_size": 256,
    "moe_ffn_hidden_size": 256,
    "num_attention_heads": 2,
    "seq_length": 128,
    "micro_batch_size": 1,
    "vocab_size": 1024,
    "num_microbatches": 4,
}
"""What makes any scenario so small that a GPU waits for its host."""


# -- single calls -----------------------------------------------------------------------------


def time_calls(device: torch.device, repeats: int = 500) -> dict[str, float]:
    """Returns the microseconds that the host spends on single calls."""
    small = torch.ones(64, device=device)
    weight = torch.ones(64, device=device, requires_grad=True)
    calls: dict[str, Callable[[], object]] = {
        "kernel_in_place": lambda: small.add_(1.0),
        "kernel_new": lambda: small + 1.0,
        "kernel_autograd": lambda: weight * 2.0,
        "matrix_product": _product(device),
        "allocate": lambda: torch.empty(1024, device=device),
        "view": lambda: small.view(8, 8),
    }
    if device.type == "cuda":
        calls |= _stream_calls()
    times = {
        name: round(host_us(call, device=device, repeats=repeats), 3)
        for name, call in calls.items()
    }
    times["autograd_node"] = round(_autograd_node_us(weight, device), 3)
    return times


def _product(device: torch.device) -> Callable[[], object]:
    square = torch.ones(64, 64, device=device).bfloat16()
    return lambda: torch.mm(square, square)


def _stream_calls() -> dict[str, Callable[[], object]]:
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    current = torch.cuda.current_stream()
    tensor = torch.ones(64, device="cuda")

    def enter() -> None:
        with torch.cuda.stream(stream):
            pass

    def nvtx() -> None:
        torch.cuda.nvtx.range_push("x")
        torch.cuda.nvtx.range_pop()

    def sync_idle() -> None:
        event.record()
        event.synchronize()

    return {
        "event_record": lambda: event.record(current),
        "event_wait": lambda: stream.wait_event(event),
        "stream_wait": lambda: stream.wait_stream(current),
        "stream_context": enter,
        "current_stream": torch.cuda.current_stream,
        "record_stream": lambda: tensor.record_stream(stream),
        "nvtx_push_pop": nvtx,
        "event_synchronize": sync_idle,
        "item": lambda: tensor[0].item(),
    }


def _autograd_node_us(weight: torch.Tensor, device: torch.device, length: int = 300) -> float:
    """Returns the microseconds of one multiplication in a backward: a node and its kernel."""
    best = float("inf")
    for _ in range(4):
        result = weight
        for _ in range(length):
            result = result * 1.0
        total = result.sum()
        wait(device)
        started = time.perf_counter_ns()
        torch.autograd.grad(total, weight)
        best = min(best, (time.perf_counter_ns() - started) / length / 1e3)
        wait(device)
    return best


def time_collective_calls(device: torch.device, repeats: int = 50) -> dict[str, float]:
    """Returns the microseconds that the host spends on issuing a collective."""
    ranks = dist.get_world_size()
    given = torch.ones(64 * ranks, device=device)
    same = torch.empty_like(given)
    part = torch.empty(64, device=device)
    splits = [64] * ranks

    def gather_and_wait() -> None:
        work = dist.all_gather_into_tensor(given, part, async_op=True)
        assert work is not None
        work.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(given, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, given),
        "all_reduce": lambda: dist.all_reduce(given),
        "all_to_all_single": lambda: dist.all_to_all_single(same, given, splits, splits),
        "all_gather_async": gather_and_wait,
    }
    times = {}
    for name, call in calls.items():
        dist.barrier()
        times[name] = round(host_us(call, device=device, repeats=repeats), 3)
    return times


# -- nodes and units --------------------------------------------------------------------------


class Stopwatch:
    """Adds up how long things take on the host, without what is timed inside them."""

    def __init__(self) -> None:
        self._open: list[list[Any]] = []
        self._own: dict[str, int] = defaultdict(int)
        self._whole: dict[str, int] = defaultdict(int)
        self._count: dict[str, int] = defaultdict(int)

    def begin(self, key: str) -> None:
        """Starts the clock of `key`."""
        self._open.append([key, time.perf_counter_ns(), 0])

    def end(self) -> None:
        """Stops the clock that was started last."""
        now = time.perf_counter_ns()
        key, started, inside = self._open.pop()
        whole = now - started
        self._whole[key] += whole
        self._own[key] += whole - inside
        self._count[key] += 1
        if self._open:
            self._open[-1][2] += whole

    def read(self) -> dict[str, tuple[int, float, float]]:
        """Returns count, own and whole microseconds by key, and starts anew."""
        result = {
            key: (count, self._own[key] / 1e3, self._whole[key] / 1e3)
            for key, count in self._count.items()
        }
        self.__init__()  # type: ignore[misc]
        return result


@contextmanager
def _watched(job: Any, watch: Stopwatch) -> Iterator[None]:
    """Times every node, layer, backward and unit of a job."""
    from real.mcore import internals

    def begin(name: str, kind: str, _: str = "") -> None:
        watch.begin(f"{name} {kind}".strip())

    def end(*_: str) -> None:
        watch.end()

    with ExitStack() as stack:
        stack.enter_context(
            internals.observed_nodes(
                lambda call: watch.begin(f"{call.name} {call.direction}"),
                lambda call: watch.end(),
            )
        )
        stack.enter_context(internals.watched_layers(job.model.module, begin, end))
        stack.enter_context(internals.watched_backwards(begin, end))
        stack.enter_context(internals.watched_finalize(job.model.config, begin, end))
        stack.enter_context(internals.watched_units(begin, end))
        yield


def _hook_types(base: type[Any]) -> Iterator[type[Any]]:
    """Yields every kind of hook that can be called."""
    if "__call__" in base.__dict__:
        yield base
    for kind in base.__subclasses__():
        yield from _hook_types(kind)


@contextmanager
def _watched_hooks(watch: Stopwatch) -> Iterator[None]:
    """Times every call of a hook of ours that torch or Transformer Engine calls, as "hook"."""

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            watch.begin("hook")
            try:
                return call(*args, **kwargs)
            finally:
                watch.end()

        return run

    with ExitStack() as stack:
        for kind in [*_hook_types(WeakHook)]:
            original = vars(kind)["__call__"]
            stack.callback(type.__setattr__, kind, "__call__", original)
            type.__setattr__(kind, "__call__", timed(original))
        yield


def time_hooks_and_units(step: Callable[[], object]) -> dict[str, dict[str, float]]:
    """Returns how often a step calls our hooks and MFSDP's work on units, and for how long each.

    Hooks are those that torch or Transformer Engine calls. What the schedule calls, as the end of a
    backward, is not among them; what arms a hook for the backward is, though no trace has it.

    Keys are "hook", "unshard gathered", "unshard noop", "reshard", "reduce" and "reduce last", as
    far as they occur; values are `count` and `own_us`, what is timed inside left out.
    """
    from real.mcore import internals

    watch = Stopwatch()

    def begin(name: str, kind: str, _: str = "") -> None:
        watch.begin(f"{name} {kind}".strip())

    with _watched_hooks(watch), internals.watched_units(begin, lambda *_: watch.end()):
        step()
    return {
        key: {"count": count, "own_us": round(own / count, 2)}
        for key, (count, own, _) in sorted(watch.read().items())
    }


def time_nodes(
    scenarios: Mapping[str, Scenario],
    variants: Sequence[str] = MAIN_VARIANTS,
    *,
    repeats: int = 10,
    warmup: int = 4,
    synchronize: Callable[[], None] = torch.cuda.synchronize,
) -> dict[str, dict[str, Any]]:
    """Returns what the host spends on the parts of a step, by scenario and variant.

    All jobs are built first and take turns, so that a host whose speed drifts is fair to all. Each
    turn is one step with nothing else timed, and one with all parts timed.

    Args:
        scenarios: Small ones, by name.
        variants: Names of `real.variants.VARIANTS`.
        repeats: Turns of each job.
        warmup: Turns before that are not timed.
        synchronize: Waits for the device.
    """
    jobs = {
        (name, variant): make_job(scenario, variant)
        for name, scenario in scenarios.items()
        for variant in variants
    }
    turns: dict[tuple[str, str], _Turns] = {key: _Turns() for key in jobs}
    step = 0
    gc.disable()
    try:
        for turn in range(warmup + repeats):
            for key in rotated(list(jobs), turn):
                if key == rotated(list(jobs), turn)[0]:
                    # Collecting gives memory back; whoever runs next takes it again, page by page.
                    gc.collect()
                    _step_us(jobs[key], step, synchronize)
                plain = _step_us(jobs[key], step, synchronize)
                watch = Stopwatch()
                with _watched(jobs[key], watch):
                    watch.begin("step")
                    whole = _step_us(jobs[key], step, synchronize, watch.end)
                step += 1
                if turn >= warmup:
                    turns[key].add(plain, whole, watch.read())
    finally:
        gc.enable()
    for job in jobs.values():
        job.release()
    results: dict[str, dict[str, Any]] = {name: {} for name in scenarios}
    for (name, variant), found in turns.items():
        results[name][variant] = found.summary()
    return results


def rotated[Item](items: Sequence[Item], turn: int) -> list[Item]:
    """Returns the items in an order that starts with another one each turn."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


class _Turns:
    """What was timed of one job."""

    def __init__(self) -> None:
        self._plain: list[float] = []
        self._whole: list[float] = []
        self._parts: list[dict[str, tuple[int, float, float]]] = []

    def add(self, plain: float, whole: float, parts: dict[str, tuple[int, float, float]]) -> None:
        """Adds one turn: microseconds of both steps, and the parts of the second."""
        self._plain.append(plain)
        self._whole.append(whole)
        self._parts.append(parts)

    def summary(self) -> dict[str, Any]:
        """Returns medians over all turns."""
        keys = sorted({key for part in self._parts for key in part})
        return {
            "step_us": round(statistics.median(self._plain), 1),
            "step_min_us": round(min(self._plain), 1),
            "step_with_parts_us": round(statistics.median(self._whole), 1),
            "parts": {
                key: {
                    "count": self._parts[-1].get(key, (0, 0, 0))[0],
                    "own_us": round(_median(self._parts, key, 1), 2),
                    "whole_us": round(_median(self._parts, key, 2), 2),
                }
                for key in keys
            },
        }


def _median(parts: list[dict[str, tuple[int, float, float]]], key: str, place: int) -> float:
    """Returns the median over steps of a step's mean."""
    means = [part[key][place] / part[key][0] for part in parts if key in part]
    return statistics.median(means)


def _step_us(
    job: Any, step: int, synchronize: Callable[[], None], done: Callable[[], None] = lambda: None
) -> float:
    synchronize()
    dist.barrier()
    synchronize()
    started = time.perf_counter_ns()
    job.forward_backward(step)
    done()
    synchronize()
    elapsed = (time.perf_counter_ns() - started) / 1e3
    job.clear_gradients()
    return elapsed
