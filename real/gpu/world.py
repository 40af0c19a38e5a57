"""Starts and ends one rank of a GPU job that torchrun has launched, or that stands alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from real.config import Scenario, ScenarioError
from real.gpu.loopback import Seat, init_loopback
from real.gpu.preflight import missing_gpus, missing_packages
from real.targets import find_target
from real.targets.tree import check_origin, first_on_path


class Unready(RuntimeError):
    """This machine or launch cannot run the job; the message lists everything that is missing."""


def preflight(scenario: Scenario, seat: Seat | None = None, tree: Path | None = None) -> None:
    """Checks driver, GPUs, launch and packages before anything starts.

    A tree needs no release of Megatron beside it: its target says whether it fits.

    Raises:
        Unready: Something is missing.
    """
    missing: list[str] = []
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    missing += missing_gpus(local_size)
    if seat is None:
        missing += _missing_launch(scenario)
    missing += missing_packages(
        has_te=scenario.transformer_impl == "transformer_engine", has_tree=tree is not None
    )
    if missing:
        raise Unready("; ".join(missing) + ".")


def _missing_launch(scenario: Scenario) -> list[str]:
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return ["expected a launch by torchrun (RANK and MASTER_ADDR set), got none"]
    launched = int(os.environ["WORLD_SIZE"])
    if launched != scenario.world_size:
        wanted = scenario.world_size
        return [f"expected {wanted} processes (world-size), got {launched} of torchrun"]
    return []


@contextmanager
def gpu_world(
    scenario: Scenario,
    seat: Seat | None = None,
    *,
    tree: Path | None = None,
    targets: Iterable[str] = (),
) -> Iterator[int]:
    """Makes this process a rank of the job for the length of the block; yields its number.

    Args:
        scenario: The run.
        seat: The rank that this process stands for, alone; None for one that torchrun launched.
        tree: The folder that holds `megatron`; None for the installed one.
        targets: Names of targets that have to fit it.

    Raises:
        Unready: This machine or launch cannot run it.
        ScenarioError: Another Megatron than the tree's is imported.
        TargetError: A target does not fit the imported tree.
    """
    preflight(scenario, seat, tree)
    with first_on_path(tree):
        check_origin(tree)
        for name in targets:
            find_target(name)
        yield from _started(scenario, seat)


def _started(scenario: Scenario, seat: Seat | None) -> Iterator[int]:
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if seat is None:
        torch.distributed.init_process_group("nccl", device_id=device)
    else:
        torch.cuda.init()  # or a device mesh chooses a device by the rank's number
        init_loopback(seat)
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
