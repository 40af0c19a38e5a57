"""Measures what the timing model has to know of a machine: kernels, links and host calls."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Final

import torch
import torch.distributed as dist

from real.config import Scenario
from real.gpu import host, kernels, links, profiles
from real.gpu.world import gpu_world

FORMAT: Final = 1

PROFILED: Final = ("no_fsdp_plain", "no_fsdp_combined", "mfsdp_combined")


def run_calibration(
    scenario: Scenario,
    *,
    report: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measures this machine on all ranks and returns this rank's results.

    A part that fails is left out, and what went wrong is under "errors": the rest is still of use.

    Args:
        scenario: Its layer spec and parallel sizes are those of the small models that are timed.
        report: Told what is measured next.
        save: Given what there is after each part, in case that a later one never ends.
    """
    started = time.perf_counter()
    results: dict[str, Any] = {"format": FORMAT, "machine": _machine(), "errors": {}}
    with gpu_world(scenario):
        device = torch.device("cuda", torch.cuda.current_device())
        small = {
            f"{layers} layers": scenario.changed(**host.SMALL, num_layers=layers)
            for layers in (2, 4)
        }
        profiled = scenario.changed(num_layers=2, num_microbatches=3)
        parts: dict[str, Callable[[], Any]] = {
            "nodes": lambda: host.time_nodes(small),
            "small": lambda: small["2 layers"].as_dict(),
            "calls": lambda: host.time_calls(device),
            "collective_calls": lambda: host.time_collective_calls(device),
            "kernels": lambda: list(kernels.time_kernels(device, kernels.Sizes())),
            "collectives": lambda: list(links.time_collectives(device)),
            "contention": lambda: links.time_contention(device),
            "profiled": lambda: profiled.as_dict(),
            "profiles": lambda: {name: profiles.profile_nodes(profiled, name) for name in PROFILED},
        }
        for name, part in parts.items():
            report(name)
            begun = time.perf_counter()
            try:
                results[name] = part()
            except Exception as error:  # noqa: BLE001 - the other parts are worth having
                results["errors"][name] = f"{type(error).__name__}: {error}"[:2000]
            torch.cuda.empty_cache()
            dist.barrier()
            results.setdefault("seconds", {})[name] = round(time.perf_counter() - begun, 1)
            results["wall_s"] = round(time.perf_counter() - started, 1)
            save(results)
    return results


def _machine() -> dict[str, Any]:
    packages = ("torch", "megatron-core", "transformer-engine-torch")
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "num_devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "packages": {name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
