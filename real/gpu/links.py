"""Times collectives between all GPUs, and how they and kernels slow each other down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from real.gpu.measure import SLEEP_CYCLES, device_us

BYTES: Final = tuple(4096 * 4**i for i in range(9))
"""Bytes that a rank gives: 4 KiB to 256 MiB."""

_Collective = Callable[[], object]


def time_collectives(device: torch.device, num_bytes: Sequence[int] = BYTES) -> Iterator[Any]:
    """Yields kind, bytes that a rank gives, and microseconds of each collective at each size."""
    for size in num_bytes:
        for kind, collective in _collectives(device, size).items():
            dist.barrier()
            work = [collective, collective]
            microseconds = device_us(work, device=device, repeats=10 if size < 2**26 else 5)
            yield {"kind": kind, "bytes": size, "us": round(microseconds, 2)}


def _collectives(device: torch.device, num_bytes: int) -> dict[str, _Collective]:
    """Returns every collective; each is given `num_bytes` by each rank."""
    ranks = dist.get_world_size()
    count = num_bytes // 2
    given = torch.ones(count, device=device, dtype=torch.bfloat16)
    same = torch.empty_like(given)
    whole = torch.empty(count * ranks, device=device, dtype=torch.bfloat16)
    wide = torch.ones(num_bytes // 4, device=device, dtype=torch.float32)
    part = torch.empty(num_bytes // 4 // ranks, device=device, dtype=torch.float32)
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, given),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, wide),
        "all_reduce": lambda: dist.all_reduce(wide),
        "all_to_all_single": lambda: dist.all_to_all_single(same, given),
    }


def time_contention(device: torch.device, size: int = 4096, num_bytes: int = 2**26) -> Any:
    """Times matrix products and copies beside collectives, each also alone.

    Returns:
        One entry for each pair: microseconds of the kernel and of the collective, alone and beside
        each other. "Beside" is measured on the one while the other runs longer.
    """
    weight = torch.randn(size, size, device=device).bfloat16()
    rows = torch.randn(2 * size, size, device=device).bfloat16()
    other = torch.empty_like(rows)
    kernels: dict[str, Callable[[], object]] = {
        "mm": lambda: torch.mm(rows, weight),
        "copy_": lambda: other.copy_(rows),
    }
    collectives = _collectives(device, num_bytes)
    pairs = []
    for kind in ("all_to_all_single", "all_gather", "reduce_scatter"):
        for name, kernel in kernels.items():
            pairs.append(_time_pair(name, kernel, kind, collectives[kind], device))
    return pairs


def _time_pair(
    name: str,
    kernel: Callable[[], object],
    kind: str,
    collective: Callable[[], object],
    device: torch.device,
) -> dict[str, Any]:
    kernel_alone = device_us([kernel], device=device, repeats=20)
    dist.barrier()
    collective_alone = device_us([collective], device=device, repeats=20)
    result = {
        "kernel": name,
        "collective": kind,
        "kernel_us": round(kernel_alone, 2),
        "collective_us": round(collective_alone, 2),
    }
    if device.type != "cuda":
        return result
    # About six milliseconds of the one that is timed, and twice as much of the other. How many is
    # the first rank's decision: counts of collectives must agree.
    counts = [int(6e3 / kernel_alone) + 1, int(6e3 / collective_alone) + 1]
    dist.broadcast_object_list(counts, src=0)
    num_kernels, num_collectives = min(counts[0], 200), min(counts[1], 200)
    kernel_beside, _ = _run_beside(kernel, num_kernels, collective, 2 * num_collectives)
    _, collective_beside = _run_beside(kernel, 2 * num_kernels, collective, num_collectives)
    result["kernel_beside_us"] = round(kernel_beside, 2)
    result["collective_beside_us"] = round(collective_beside, 2)
    return result


def _run_beside(
    kernel: Callable[[], object],
    num_kernels: int,
    collective: Callable[[], object],
    num_collectives: int,
) -> tuple[float, float]:
    """Runs both at once; returns the microseconds of one kernel and of one collective."""
    compute, communication = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    times = []
    for stream, work, count in (
        (communication, collective, num_collectives),
        (compute, kernel, num_kernels),
    ):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(count):
                work()
            end.record()
            times.append((begin, end, count))
    torch.cuda.synchronize()
    collective_us, kernel_us = (1e3 * b.elapsed_time(e) / n for b, e, n in times)
    return kernel_us, collective_us
