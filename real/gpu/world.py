"""Starts and ends one rank of a GPU job that torchrun has launched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from real.config import Scenario, ScenarioError
from real.gpu.preflight import missing_gpus, missing_packages


class Unready(RuntimeError):
    """This machine or launch cannot run the job; the message lists everything that is missing."""


def preflight(scenario: Scenario) -> None:
    """Checks driver, GPUs, launch and packages before anything starts.

    Raises:
        Unready: Something is missing.
    """
    missing: list[str] = []
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    missing += missing_gpus(local_size)
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        missing.append("expected a launch by torchrun (RANK and MASTER_ADDR set), got none")
    elif int(os.environ["WORLD_SIZE"]) != scenario.world_size:
        missing.append(
            f"expected {scenario.world_size} processes (world-size), "
            f"got {os.environ['WORLD_SIZE']} of torchrun"
        )
    missing += missing_packages(has_te=scenario.transformer_impl == "transformer_engine")
    if missing:
        raise Unready("; ".join(missing) + ".")


@contextmanager
def gpu_world(scenario: Scenario) -> Iterator[int]:
    """Makes this process a rank of the job for the length of the block; yields its number."""
    preflight(scenario)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    from real.mcore.model import initialize_parallel

    initialize_parallel(scenario)
    yield torch.distributed.get_rank()
    # Not after a failure: it waits for what was issued, and the others may never join in.
    torch.distributed.destroy_process_group()


def scenario_of_launch(scenario: Scenario) -> Scenario:
    """Returns the scenario with torchrun's number of processes.

    Raises:
        ScenarioError: The number does not fit the scenario's parallel sizes.
    """
    size = os.environ.get("WORLD_SIZE")
    if size is None:
        return scenario
    try:
        return scenario.changed(world_size=int(size))
    except ScenarioError as error:
        raise ScenarioError(f"{error} The number of ranks is torchrun's.") from None
