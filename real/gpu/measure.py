"""Times device work and host work, each without the other.

[Note: device time] Small kernels are over before the host has launched the next one. So the device
first sleeps while the host queues all repeats, and runs them back to back afterwards: what is timed
is kernels and the gaps between them, as on a device that is never idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

SLEEP_CYCLES: Final = 20_000_000
"""About ten milliseconds: long enough to queue the repeats of anything that is timed here."""

Work = Callable[[], object]


def device_us(work: Sequence[Work], *, device: torch.device, repeats: int = 12) -> float:
    """Returns the microseconds of one piece of work on the device.

    Args:
        work: Equal pieces on different memory, taken by turns, so that caches help no more than
            they would in a model.
        device: Where it runs; on a CPU the wall clock is read instead.
        repeats: How many are timed.
    """
    for piece in work:
        piece()
    if device.type != "cuda":
        started = time.perf_counter_ns()
        for i in range(repeats):
            work[i % len(work)]()
        return (time.perf_counter_ns() - started) / repeats / 1e3
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    for i in range(repeats):
        work[i % len(work)]()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / repeats


def host_us(work: Work, *, device: torch.device, repeats: int = 500) -> float:
    """Returns the microseconds that the host spends on a call; the device is kept short of work."""
    for _ in range(20):
        work()
    best = float("inf")
    for _ in range(3):
        wait(device)
        started = time.perf_counter_ns()
        for _ in range(repeats):
            work()
        best = min(best, (time.perf_counter_ns() - started) / repeats / 1e3)
    wait(device)
    return best


def wait(device: torch.device) -> None:
    """Waits until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()
