"""The swap covers what Megatron uses, fails loudly for the rest, and is undone completely."""
# ruff: noqa: ANN401 - bodies return, and torch takes, anything

from __future__ import annotations

import ast
import functools
import inspect
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sim.cuda import FakeDevice, fake_cuda, patch, use_device
from sim.session.megatron import megatron_on_fake_cuda, rank_state

_OWNERS = (torch, torch.Tensor, torch.UntypedStorage, torch.random, torch.autograd.Variable)


def _names() -> dict[tuple[str, str], Any]:
    """Returns every name that a swap may touch, with its value."""
    owners = [*_OWNERS, torch.accelerator]
    owners += [
        m for n, m in sorted(sys.modules.items()) if n.startswith(("torch.cuda", "megatron"))
    ]
    return {
        (repr(owner), name): value
        for owner in owners
        for name, value in list(vars(owner).items())
        if not name.startswith("__")
    }


def _same(before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    return before.keys() == after.keys() and all(after[key] is before[key] for key in before)


def test_every_name_is_restored() -> None:
    before = _names()
    with fake_cuda():
        assert not _same(before, _names())
    assert _same(before, _names())


def test_every_name_is_restored_after_an_error_inside() -> None:
    before = _names()
    with pytest.raises(ValueError, match="inside"), fake_cuda():
        raise ValueError("inside")
    assert _same(before, _names())


def test_every_name_is_restored_after_a_swap_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that cannot be set leaves none of the others swapped."""
    table = patch.swap_table()
    refused = patch.Swap(int, "bit_length", None)  # attributes of int cannot be set
    monkeypatch.setattr(patch, "swap_table", lambda: [*table[:20], refused, *table[20:]])
    before = _names()
    with pytest.raises(TypeError), fake_cuda():
        pass
    assert _same(before, _names())


def test_swap_can_be_entered_twice_in_a_row_and_nested() -> None:
    before = _names()
    for _ in range(2):
        with fake_cuda(), use_device(FakeDevice(0, _recorder())):
            outer = _names()
            with fake_cuda():
                assert torch.zeros(1, device="cuda").is_cuda
                torch.cuda.current_stream().synchronize()
            assert _same(outer, _names())
            assert torch.cuda.is_available()
        assert _same(before, _names())


def _recorder() -> Any:
    from real.trace import Recorder

    return Recorder()


def test_table_names_each_name_once() -> None:
    with fake_cuda():
        pass  # loads what torch loads late
    keys = [(id(swap.owner), swap.name) for swap in patch.swap_table()]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.cuda.memory_allocated(),
        lambda: torch.cuda.memory.memory_allocated(),
        lambda: torch.cuda.make_graphed_callables(None, ()),
        lambda: torch.cuda.graphs.make_graphed_callables(None, ()),
        lambda: torch.cuda.FloatTensor(2),
        lambda: torch.cuda.memory.MemPool(),
    ],
)
@pytest.mark.usefixtures("device")
def test_name_without_a_stand_in_fails_with_its_name(use: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.cuda\.\w+ is not part of the fake"):
        use()


def test_device_is_needed_before_use() -> None:
    with fake_cuda(), pytest.raises(RuntimeError, match=r"before use_device\(\)"):
        torch.cuda.current_stream()


def test_devices_of_blocks_nest() -> None:
    first, second = FakeDevice(0, _recorder()), FakeDevice(1, _recorder())
    with fake_cuda(), use_device(first):
        with use_device(second):
            assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0


# -- what Megatron uses -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def megatron_modules() -> Iterator[list[ModuleType]]:
    """All modules of Megatron that a default run imports, while torch.cuda is swapped."""
    with megatron_on_fake_cuda():
        yield [
            module
            for name, module in sorted(sys.modules.items())
            if name.startswith("megatron.") and getattr(module, "__file__", None)
        ]


def _dotted(node: ast.AST) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


@functools.cache
def _tree(module: ModuleType) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # escapes in Megatron's docstrings
        return ast.parse(Path(str(module.__file__)).read_text())


def _used_names(module: ModuleType) -> set[str]:
    """Returns the names of torch.cuda and torch.accelerator in a module's source."""
    used = set()
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Attribute):
            used.add(_dotted(node) or "")
        elif isinstance(node, ast.ImportFrom) and node.module:
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in used if name.startswith(("torch.cuda.", "torch.accelerator."))}


def test_no_name_of_torch_cuda_that_megatron_uses_is_silently_real(
    megatron_modules: list[ModuleType],
) -> None:
    """Each one has a stand-in, needs no device, or fails with its name."""
    used = set().union(*(_used_names(module) for module in megatron_modules))
    assert "torch.cuda.current_stream" in used
    real = set()
    for name in used:
        value: Any = torch
        for part in name.split(".")[1:]:
            value = getattr(value, part)
        origin = getattr(value, "__module__", "") or type(value).__module__
        is_swapped = origin.startswith("sim.cuda")
        needs_no_device = name.rpartition(".")[2] in patch._NEED_NO_DEVICE
        if not (is_swapped or needs_no_device or inspect.ismodule(value)):
            real.add(name)
    assert real == set()


def test_no_module_of_megatron_keeps_a_real_name_of_torch_cuda(
    megatron_modules: list[ModuleType],
) -> None:
    """Names taken with `from torch.cuda import ...` at import are swapped in place."""
    kept = {
        f"{module.__name__}.{name}"
        for module in megatron_modules
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith(("torch.cuda", "torch.accelerator"))
        and value.__name__ not in patch._NEED_NO_DEVICE
    }
    assert kept == set()


# -- what Megatron keeps once per process -----------------------------------------------------

_LANGUAGE_MODULE = "models.common.language_module.language_module.LanguageModule"
_FIRST_MFSDP = "distributed.fsdp.src.megatron_fsdp"
_SAME_ON_ALL_RANKS = {
    "config.ENABLE_EXPERIMENTAL": "a flag of the process",
    "config_logger.__config_logger_path_counts": "counts files of a debugging aid",
    "dist_checkpointing.strategies.torch._logged_mcore_async_deprecation": "warn once",
    "jit.jit_fuser": "chosen by torch's version",
    "models.backends.LNImpl": "chosen by what is installed",
    "models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb": "imported late",
    "models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb_thd": "imported late",
    f"{_LANGUAGE_MODULE}.embedding_warning_printed": "warn once",
    "tensor_parallel.random._DATA_PARALLEL_RNG_TRACKER_NAME": "a constant",
    "tensor_parallel.random._EXPERT_PARALLEL_RNG_TRACKER_NAME": "a constant",
    "tensor_parallel.random._share_storage_ext": "a compiled extension",
    "models.hybrid.hybrid_model.HybridModel.mup_warning_printed": "warn once",
    "utils._ASYNC_IO_LOOP": "asynchronous checkpoints",
    "utils._causal_conv1d_version": "an installed version",
    "utils._fa_version": "an installed version",
    "utils._flashinfer_version": "an installed version",
    "utils._mamba_ssm_version": "an installed version",
    "utils._nvtx_enabled": "a flag of the process",
    "utils._te_version": "an installed version",
    "utils._torch_version": "an installed version",
    "transformer.utils._sequence_parallel_attr_cache": "keyed by the model, one a rank",
    "transformer.utils.cuda_graph_attr_cache": "keyed by the model, one a rank",
}
"""Globals that ranks may share, and why."""

_NEVER_USED_HERE = {
    "dist_checkpointing.": "a run writes no checkpoint",
    f"{_FIRST_MFSDP}.param_and_grad_buffer.NCCL_MEMORY_POOL": "memory pools are refused",
    f"{_FIRST_MFSDP}.utils.": "of the first MFSDP; the second has none",
    "extensions.transformer_engine.TEDotProductAttention.cp_stream": "context parallelism",
    "full_cuda_graph.": "graph capture is refused",
    "inference.": "a run trains",
    "nccl_allocator.": "memory pools are refused",
    "pipeline_parallel.fine_grained_activation_offload.": "offloading is off",
    "ssm.ops.": "a run has no state-space layers",
    "tensor_parallel.generalized_tensor_parallelism.": "it is off",
    "transformer.experimental_attention_variant.": "another attention",
    "transformer.cuda_graphs.": "graph capture is refused",
    "transformer.moe.paged_stash.": "it is off",
    "transformer.moe.token_dispatcher._NCCLEPManager.": "another dispatcher",
    "transformer.moe.token_dispatcher_inference.": "a run trains",
    "utils.StragglerDetector.": "it is off",
}
"""Globals that nothing in a scenario assigns: a name, or a prefix that ends with a dot."""


def _assigned_globals(module: ModuleType) -> Iterator[str]:
    """Yields what functions of a module assign in the module or in its classes."""
    for function, owner in _functions(_tree(module), None):
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield from node.names
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
                targets = [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    name = target.value.id
                    if name == "cls" and owner is not None:
                        yield f"{owner}.{target.attr}"
                    elif inspect.isclass(getattr(module, name, None)):
                        yield f"{name}.{target.attr}"


def _functions(tree: ast.AST, owner: str | None) -> Iterator[tuple[ast.AST, str | None]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, owner
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, node.name)
        else:
            yield from _functions(node, owner)


def _all_assigned(modules: list[ModuleType]) -> set[str]:
    return {
        f"{module.__name__}.{name}".removeprefix("megatron.core.")
        for module in modules
        for name in _assigned_globals(module)
        if module.__name__.startswith("megatron.core.")
    }


def _per_rank() -> set[str]:
    names = set()
    for state in rank_state():
        module = state.owner if inspect.ismodule(state.owner) else None
        owner = (
            module.__name__
            if module is not None
            else f"{state.owner.__module__}.{state.owner.__qualname__}"
        )
        names.add(f"{owner}.{state.name}".removeprefix("megatron.core."))
    return names


def _is_never_used(name: str) -> bool:
    return any(
        name.startswith(prefix) if prefix.endswith(".") else name == prefix
        for prefix in _NEVER_USED_HERE
    )


def test_every_global_that_megatron_assigns_is_per_rank_or_harmless(
    megatron_modules: list[ModuleType],
) -> None:
    """A new one in another release has to be judged before ranks may share it."""
    unknown = {
        name
        for name in _all_assigned(megatron_modules) - _per_rank() - _SAME_ON_ALL_RANKS.keys()
        if not _is_never_used(name)
    }
    assert unknown == set()


def _value(name: str) -> Any:
    path = f"megatron.core.{name}"
    module_name = path
    while module_name not in sys.modules:
        module_name = module_name.rpartition(".")[0]
    value: Any = sys.modules[module_name]
    for part in path.removeprefix(module_name + ".").split("."):
        value = getattr(value, part, None)
    return value


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_globals_that_are_called_unused_keep_their_values_in_a_run(
    megatron_modules: list[ModuleType],
) -> None:
    """The allow list is checked against a small scenario."""
    from real.config import load_scenario
    from sim.commands.common import DEFAULT_SCENARIO
    from sim.session.run import run_in_process

    names = {n for n in _all_assigned(megatron_modules) - _per_rank() if _is_never_used(n)}
    before = {name: _value(name) for name in names}
    scenario = load_scenario(DEFAULT_SCENARIO)
    run_in_process(scenario.changed(num_layers=1, num_microbatches=1, train_iters=1))
    assert {name for name in names if _value(name) is not before[name]} == set()
