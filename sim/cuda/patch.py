"""The one table of swapped names, and the context manager that swaps and restores them.

Three kinds of names of `torch.cuda`: swapped for a stand-in, left alone because they need no
device, and all others, which are replaced by something that fails with its own name. So code under
test cannot wander into a real CUDA call or a silent no-op.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import torch

# DTensor imports it at first use, and at import it looks into torch.cuda's own functions.
import torch._dynamo

from sim.cuda import autograd, graphs, runtime, streams, tensors

_MISSING: Final = object()


class Swap(NamedTuple):
    """One name to swap: `owner.name` becomes `stand_in`."""

    owner: Any
    name: str
    stand_in: Any


_RNG = ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "initial_seed")

_CUDA_STAND_INS: Final[dict[str, Any]] = {
    "CUDAGraph": graphs.CUDAGraph,
    "Event": streams.Event,
    "Stream": streams.Stream,
    "StreamContext": streams.StreamContext,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
    "stream": streams.stream,
    "current_device": runtime.current_device,
    "device": runtime.device,
    "default_generators": runtime.default_generators,
    "device_count": runtime.device_count,
    "empty_cache": runtime.empty_cache,
    "graph": graphs.graph,
    "graph_pool_handle": graphs.graph_pool_handle,
    "get_device_capability": runtime.get_device_capability,
    "get_device_name": runtime.get_device_name,
    "get_device_properties": runtime.get_device_properties,
    "init": runtime.init,
    "is_available": runtime.is_available,
    "is_current_stream_capturing": graphs.is_current_stream_capturing,
    "is_initialized": runtime.is_initialized,
    "reset_peak_memory_stats": runtime.reset_peak_memory_stats,
    "set_device": runtime.set_device,
    "synchronize": runtime.synchronize,
    "_lazy_call": runtime.lazy_call,
    "_lazy_init": runtime.lazy_init,
    "_sleep": runtime.sleep,
    **{name: getattr(runtime, name) for name in _RNG},
}

_ACCELERATOR_STAND_INS: Final[dict[str, Any]] = {
    "current_accelerator": runtime.current_accelerator,
    "current_device_index": runtime.current_device,
    "current_stream": streams.accelerator_current_stream,
    "device_count": runtime.device_count,
    "is_available": runtime.is_available,
    "set_stream": streams.set_stream,
    "synchronize": runtime.accelerator_synchronize,
}

_NEED_NO_DEVICE: Final = frozenset(
    {
        "CudaError",
        "DeferredCudaCallError",
        "OutOfMemoryError",
        "cudaStatus",
        "custom_bwd",
        "custom_fwd",
        "get_arch_list",
        "get_gencode_flags",
        "has_half",
        "has_magma",
        "is_bf16_supported",
        "is_tf32_supported",
    }
)
"""Names of torch.cuda that neither touch a device nor depend on one."""


def _refuse(qualified_name: str) -> type:
    """Makes a class that stands where a name is not modelled: using it fails with that name.

    A class and not a function, so that annotations and isinstance still accept it.
    """

    def fail(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{qualified_name} is not part of the fake CUDA runtime; "
            "give it a stand-in in sim/cuda/patch.py."
        )

    return type(qualified_name.rpartition(".")[2], (), {"__new__": fail})


def _not_modelled(module: ModuleType, stand_ins: dict[str, Any]) -> Iterator[Swap]:
    for name, value in vars(module).items():
        if name.startswith("_") or name in stand_ins or name in _NEED_NO_DEVICE:
            continue
        if not isinstance(value, (type, FunctionType)):
            continue
        if not str(getattr(value, "__module__", "")).startswith("torch"):
            continue  # typing and standard library names that the module happens to import
        yield Swap(module, name, _refuse(f"{module.__name__}.{name}"))


def swap_table() -> list[Swap]:
    """Returns every name that `fake_cuda` swaps, in order."""
    nvtx: ModuleType = torch.cuda.nvtx
    rng: ModuleType = torch.cuda.random
    table = [Swap(torch.cuda, name, value) for name, value in _CUDA_STAND_INS.items()]
    table += [Swap(torch.accelerator, name, v) for name, v in _ACCELERATOR_STAND_INS.items()]
    table += [*_not_modelled(torch.cuda, _CUDA_STAND_INS)]
    table += [*_not_modelled(torch.accelerator, _ACCELERATOR_STAND_INS)]
    table += [Swap(rng, name, getattr(runtime, name)) for name in _RNG]
    table += [
        Swap(nvtx, "range_push", runtime.range_push),
        Swap(nvtx, "range_pop", runtime.range_pop),
        Swap(nvtx, "mark", runtime.mark),
        Swap(nvtx, "range", runtime.nvtx_range),
        Swap(torch, "get_rng_state", runtime.get_host_rng_state),
        Swap(torch, "set_rng_state", runtime.set_host_rng_state),
        Swap(torch.random, "get_rng_state", runtime.get_host_rng_state),
        Swap(torch.random, "set_rng_state", runtime.set_host_rng_state),
        Swap(torch, "Generator", tensors.Generator),
        Swap(torch.autograd.Variable, "_execution_engine", autograd.Engine()),
        Swap(torch.Tensor, "to", tensors.to),
        Swap(torch.Tensor, "cuda", tensors.cuda),
        Swap(torch.Tensor, "type", tensors.tensor_type),
        Swap(torch.Tensor, "record_stream", tensors.record_stream),
        Swap(torch.Tensor, "is_cuda", tensors.is_cuda),
        Swap(torch.UntypedStorage, "resize_", tensors.resize_),
        *(Swap(torch.UntypedStorage, name, tensors.nbytes) for name in ("nbytes", "size")),
    ]
    for owner, names in ((torch, tensors.FACTORIES), (torch.Tensor, tensors.NEW_METHODS)):
        table += [
            Swap(owner, name, tensors.with_cpu_device(getattr(owner, name))) for name in names
        ]
    return [*table, *_aliases(table)]


def _aliases(table: list[Swap]) -> Iterator[Swap]:
    """Finds second names: in torch.cuda's submodules, and what Megatron imports from it."""
    stand_in_of = {id(getattr(swap.owner, swap.name)): swap.stand_in for swap in table}
    known = {(id(swap.owner), swap.name) for swap in table}
    for module_name, module in sorted(sys.modules.items()):
        if not module_name.startswith(("megatron.", "torch.cuda.")):
            continue
        for name, value in list(vars(module).items()):
            if not isinstance(value, (type, FunctionType)) or (id(module), name) in known:
                continue
            if id(value) in stand_in_of:
                yield Swap(module, name, stand_in_of[id(value)])


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Swaps every name of the table for the length of the block and restores each one after it.

    The swap is for the whole process; which device a call acts on is the calling thread's
    (`use_device`).
    """
    saved: list[tuple[Swap, Any]] = []
    try:
        for swap in swap_table():
            saved.append((swap, vars(swap.owner).get(swap.name, _MISSING)))
            setattr(swap.owner, swap.name, swap.stand_in)
        # Megatron compiles small functions at first call; a compiler would ask for a real device.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for swap, original in reversed(saved):
            if vars(swap.owner).get(swap.name, _MISSING) is original:
                continue  # the swap that failed
            if original is _MISSING:
                delattr(swap.owner, swap.name)
            else:
                setattr(swap.owner, swap.name, original)
