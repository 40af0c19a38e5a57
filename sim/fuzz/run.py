"""Runs many seeds on several cores, and shrinks the first failure."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from sim.fuzz.seeds import Baseline, Failure, SeedResult, Setting, frozen_heap, make_baseline
from sim.fuzz.seeds import run_seed as _run_seed
from sim.fuzz.shrink import Shrunk, shrink
from sim.session.aside import Aside
from sim.session.megatron import megatron_on_fake_cuda

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class FuzzResult:
    """What became of all seeds.

    Attributes:
        num_seeds: Seeds that were run to the end, failed ones included.
        num_turn_orders: Different orders of the ranks' turns among them.
        num_device_orders: Different orders of the devices among them.
        failures: In seed order.
        shrunk: The first failure's shortest scenario, or None.
        is_interrupted: Whether ctrl-C ended it early.
    """

    num_seeds: int
    num_turn_orders: int
    num_device_orders: int
    failures: tuple[Failure, ...]
    shrunk: Shrunk | None
    wall_s: float
    is_interrupted: bool = False


def fuzz(
    setting: Setting,
    seeds: Sequence[int],
    *,
    jobs: int = 1,
    max_failures: int = 1,
    shrinks: bool = True,
    progress: Progress = lambda _: None,
) -> FuzzResult:
    """Runs seeds until all are done or enough have failed.

    Args:
        setting: What the seeds have in common.
        seeds: The seeds, ascending.
        jobs: Processes at the same time.
        max_failures: Failures after which no further seed is run.
        shrinks: Whether the first failure is shrunk.
        progress: Shown one line of text now and then.
    """
    started = time.perf_counter()
    failures: list[Failure] = []
    results: list[SeedResult] = []
    shrunk = None
    is_interrupted = False

    def run() -> None:
        first = make_baseline(setting, progress)
        if isinstance(first, Failure):
            failures.append(first)
            return
        with frozen_heap():
            for result in _in_order(setting, first, seeds, jobs):
                results.append(result)
                failures.extend([] if result.failure is None else [result.failure])
                progress(_state(len(results), len(seeds), len(failures), started))
                if len(failures) >= max_failures:
                    return

    with megatron_on_fake_cuda():
        try:
            run()
            if failures and shrinks:
                shrunk = shrink(setting, failures[0], progress=progress)
        except KeyboardInterrupt:
            is_interrupted = True
    return FuzzResult(
        num_seeds=len(results),
        num_turn_orders=len({result.turns for result in results if result.turns}),
        num_device_orders=len({order for result in results for order in result.orders}),
        failures=tuple(failures),
        shrunk=shrunk,
        wall_s=time.perf_counter() - started,
        is_interrupted=is_interrupted,
    )


def _state(done: int, of: int, failed: int, started: float) -> str:
    passed = time.perf_counter() - started
    left = passed / done * (of - done)
    return f"seed {done} of {of}, {failed} failed, about {left:.0f} s left"


def _in_order(
    setting: Setting, baseline: Baseline, seeds: Sequence[int], jobs: int
) -> Iterator[SeedResult]:
    """Yields results in the order of the seeds, each from a forked copy of its own.

    A copy begins with all that is imported and ends with what it broke: a seed that kills its
    process is a failure of that seed alone.
    """
    waiting = iter(seeds)
    running: dict[Aside, int] = {}
    done: dict[int, SeedResult] = {}
    try:
        for seed in seeds:
            while seed not in done:
                _fill(running, waiting, jobs, setting, baseline)
                by_descriptor = {aside.fileno(): aside for aside in running}
                ready: list[Any] = wait(list(by_descriptor))
                for aside in (by_descriptor[descriptor] for descriptor in ready):
                    done[running[aside]] = _result(aside, running[aside])
                    del running[aside]
                    aside.stop()
            yield done.pop(seed)
    finally:
        for aside in running:
            aside.stop()


def _fill(
    running: dict[Aside, int],
    waiting: Iterator[int],
    jobs: int,
    setting: Setting,
    baseline: Baseline,
) -> None:
    while len(running) < jobs:
        seed = next(waiting, None)
        if seed is None:
            return
        running[_start(setting, baseline, seed)] = seed


def _start(setting: Setting, baseline: Baseline, seed: int) -> Aside:
    return Aside(lambda: dataclasses.asdict(_run_seed(setting, baseline, seed)))


def _result(aside: Aside, seed: int) -> SeedResult:
    try:
        plain = aside.result()
    except RuntimeError as error:
        problem = str(error)
        return SeedResult(
            seed=seed, failure=Failure(seed=seed, kind="process ended", problem=problem)
        )
    failure = plain.pop("failure")
    return SeedResult(**plain, failure=None if failure is None else Failure(**failure))
