"""Device, random state, memory and profiler functions under torch.cuda's names and signatures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, Literal

import torch

from real.trace import OpKind
from sim.cuda.device import active_device

# A Hopper-like part: what Megatron asks for when it chooses a code path.
_CAPABILITY: Final = (9, 0)
_NAME: Final = "fake CUDA device"

# Taken before any swap. Every tensor of a rank stands for device memory, so torch's CPU generator
# is the device's; the host's own state is a value that nothing draws from.
_get_cpu_rng_state = torch.get_rng_state
_set_cpu_rng_state = torch.set_rng_state
_cpu_manual_seed = torch.default_generator.manual_seed  # torch.manual_seed calls back into CUDA


class _Generators:
    """One generator for every device index: a rank has one device."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


default_generators: Final = _Generators()


class device:  # torch.cuda spells this class in lower case.
    """Context manager that selects a device; a rank has only one, so nothing changes."""

    def __init__(self, device: Any) -> None:
        self.idx = active_device().index
        self.prev_idx = self.idx

    def __enter__(self) -> None:
        return None

    def __exit__(self, type: Any, value: Any, traceback: Any) -> Literal[False]:
        return False


def is_available() -> bool:
    """Returns True: code under test takes the path that it takes on a GPU."""
    return True


def is_initialized() -> bool:
    """Returns True."""
    return True


def init() -> None:
    """Does nothing."""


def device_count() -> int:
    """Returns the number of devices of the world, the same on all its ranks."""
    return active_device().num_devices


def current_device() -> int:
    """Returns the number of the calling rank's device."""
    return active_device().index


def current_accelerator(check_available: bool = False) -> torch.device:
    """Returns the kind of device: CUDA."""
    return torch.device("cuda")


def set_device(device: Any) -> None:
    """Does nothing: a rank owns one device."""


def synchronize(device: Any = None) -> None:
    """Makes the host wait for the whole device."""
    active_device().recorder.record(OpKind.HOST_SYNC, what="device", on=None)


def accelerator_synchronize(device: Any = None, /) -> None:
    """Makes the host wait for the whole device; stands for `torch.accelerator.synchronize`."""
    synchronize()


def get_device_name(device: Any = None) -> str:
    """Returns a name that says that the device is no GPU."""
    return _NAME


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Returns (9, 0)."""
    return _CAPABILITY


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Returns the properties that choose code paths; there is no memory size to be had."""
    major, minor = _CAPABILITY
    return SimpleNamespace(
        name=_NAME, major=major, minor=minor, multi_processor_count=132, warp_size=32
    )


def empty_cache() -> None:
    """Does nothing."""


def reset_peak_memory_stats(device: Any = None) -> None:
    """Does nothing."""


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """Returns the calling rank's random state, a byte tensor."""
    return _get_cpu_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Sets the calling rank's random state."""
    _set_cpu_rng_state(new_state)


def get_host_rng_state() -> torch.Tensor:
    """Returns the calling rank's host random state; stands for `torch.get_rng_state`.

    It is in host memory: what is done with it launches no kernel.
    """
    state = active_device().host_rng_state.clone()
    state.untyped_storage().is_host = True  # type: ignore[attr-defined]
    return state


def set_host_rng_state(new_state: torch.Tensor) -> None:
    """Sets the calling rank's host random state; stands for `torch.set_rng_state`."""
    active_device().host_rng_state = new_state.clone()


def manual_seed(seed: int) -> None:
    """Seeds the calling rank's random state."""
    _cpu_manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds the calling rank's random state."""
    _cpu_manual_seed(seed)


def initial_seed() -> int:
    """Returns the seed last set."""
    return torch.initial_seed()


def range_push(msg: str) -> int:
    """Opens a profiler range and returns its zero-based depth."""
    fake = active_device()
    fake.recorder.record(OpKind.NVTX_PUSH, text=str(msg))
    fake.nvtx_depth += 1
    return fake.nvtx_depth - 1


def range_pop() -> int:
    """Closes the newest profiler range and returns its zero-based depth.

    A pop without a push is recorded like any other: a check judges it.
    """
    fake = active_device()
    fake.recorder.record(OpKind.NVTX_POP)
    fake.nvtx_depth -= 1
    return fake.nvtx_depth


def mark(msg: str) -> None:
    """Does nothing: an instant mark orders nothing."""


@contextmanager
def nvtx_range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Opens a profiler range for the length of a block."""
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()


def lazy_init() -> None:
    """Does nothing: there is no context to create."""


def lazy_call(callable: Any, **kwargs: Any) -> None:
    """Calls at once what torch would queue until CUDA starts."""
    callable()


def sleep(cycles: int) -> None:
    """Does nothing: the fake runtime has no clock."""
