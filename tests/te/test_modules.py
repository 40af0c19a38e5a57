"""Installation in `sys.modules`, missing names, and what is refused."""

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from packaging.version import Version

from sim.te import installed, stand_in_modules
from sim.te.attention import DotProductAttention
from sim.te.gemm import general_gemm
from sim.te.grouped_linear import GroupedLinear
from sim.te.layernorm_linear import LayerNormLinear
from sim.te.linear import Linear
from sim.te.modules import MEGATRON_EXTENSION
from sim.te.quantization import FP8GlobalStateManager, fp8_autocast, quantized_model_init


@pytest.fixture(autouse=True)
def _nothing_imported_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the same process may have imported Megatron, with the stand-in or without."""
    for name in list(sys.modules):
        if name.split(".")[0] == "transformer_engine" or name == MEGATRON_EXTENSION:
            monkeypatch.delitem(sys.modules, name)


def installed_names() -> set[str]:
    return {name for name in sys.modules if name.split(".")[0] == "transformer_engine"}


def test_installed_makes_imports_find_the_stand_in() -> None:
    with installed():
        module = importlib.import_module("transformer_engine.pytorch.module.base")
        assert hasattr(module, "TransformerEngineBaseModule")
        assert importlib.util.find_spec("transformer_engine") is not None
    assert installed_names() == set()


def test_installed_restores_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ModuleType("transformer_engine")
    monkeypatch.setitem(sys.modules, "transformer_engine", before)

    def fail_inside() -> None:
        with installed():
            assert sys.modules["transformer_engine"] is not before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert sys.modules["transformer_engine"] is before
    assert installed_names() == {"transformer_engine"}


def test_installed_hides_a_compiled_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real kernels beside stand-in modules would be a mixture that nobody has tried."""
    compiled = ModuleType("transformer_engine_torch")
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", compiled)
    with installed(), pytest.raises(ImportError):
        importlib.import_module("transformer_engine_torch")
    assert sys.modules["transformer_engine_torch"] is compiled


def test_installed_refuses_a_megatron_that_found_no_transformer_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extension = ModuleType(MEGATRON_EXTENSION)
    extension.HAVE_TE = False
    monkeypatch.setitem(sys.modules, extension.__name__, extension)
    with pytest.raises(RuntimeError, match="before the first import of megatron"), installed():
        pass


def test_building_modules_installs_nothing() -> None:
    modules = stand_in_modules()
    assert installed_names() == set()
    assert modules["transformer_engine"].pytorch is modules["transformer_engine.pytorch"]


def test_classes_are_shared_between_two_sets_of_modules() -> None:
    first, second = stand_in_modules(), stand_in_modules()
    name = "transformer_engine.pytorch"
    assert first[name].Linear is second[name].Linear is Linear


def test_version_counts_as_2_17_1_and_says_what_it_is() -> None:
    version = Version(stand_in_modules()["transformer_engine"].__version__)
    assert version >= Version("2.17.1")
    assert version < Version("2.17.2")
    assert version.local == "cpu.standin"


@pytest.mark.parametrize(
    ("module", "name"),
    [("attention", "_SplitAlongDim"), ("module.base", "get_workspace")],
)
def test_names_that_2_17_1_dropped_are_absent(module: str, name: str) -> None:
    """Megatron must take the branch it takes with the real package."""
    with installed() as modules:
        assert not hasattr(modules[f"transformer_engine.pytorch.{module}"], name)


def test_missing_name_is_named_and_fails_an_import_as_import_error() -> None:
    with installed() as modules:
        with pytest.raises(AttributeError, match=r"has no transformer_engine\.pytorch\.Nothing\."):
            _ = modules["transformer_engine.pytorch"].Nothing
        with pytest.raises(ImportError, match="Nothing"):
            exec("from transformer_engine.pytorch import Nothing")
        with pytest.raises(ImportError):
            importlib.import_module("transformer_engine.pytorch.nothing")


def layer(kind: type, *sizes: int, **options: object) -> Callable[[], object]:
    return lambda: kind(*sizes, device="cpu", **options)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "linear_tp": (layer(Linear, 2, 2, tp_size=2), "tensor parallelism"),
    "linear_fusion": (
        layer(Linear, 2, 2, fuse_wgrad_accumulation=True),
        "fuse_wgrad_accumulation",
    ),
    "linear_overlap": (layer(Linear, 2, 2, ub_overlap_ag=True), "userbuffers overlap"),
    "linear_split": (layer(Linear, 2, 2, parameters_split=("q", "k")), "parameters_split"),
    "linear_symmetric": (
        layer(Linear, 2, 2, symmetric_ar_type="one_shot"),
        "symmetric memory all-reduce",
    ),
    "linear_fp8": (
        lambda: Linear(2, 2, device="cpu")(torch.ones(1, 2), fp8_output=True),
        "FP8",
    ),
    "norm_linear_output": (
        layer(LayerNormLinear, 2, 2, return_layernorm_output=True),
        "return_layernorm_output",
    ),
    "grouped_fusion": (
        layer(GroupedLinear, 1, 2, 2, fuse_wgrad_accumulation=True),
        "fuse_wgrad_accumulation",
    ),
    "grouped_single": (
        layer(GroupedLinear, 1, 2, 2, single_grouped_weight=True),
        "single grouped parameters",
    ),
    "attention_cp": (
        lambda: DotProductAttention(2, 2, cp_group=object()),
        "context parallelism",
    ),
    "attention_sink": (
        lambda: DotProductAttention(2, 2, softmax_type="learnable"),
        "softmax_type 'learnable'",
    ),
    "attention_thd": (
        lambda: DotProductAttention(2, 2)(*[torch.ones(2, 2, 2)] * 3, qkv_format="thd"),
        "qkv_format 'thd'",
    ),
    "gemm_quantized": (
        lambda: general_gemm(torch.ones(1, 1), torch.ones(1, 1), quantization_params=object()),
        "quantized GEMM output",
    ),
    "extra_state": (
        lambda: Linear(2, 2, device="cpu").set_extra_state(torch.ones(1)),
        "quantization state in checkpoints",
    ),
    "recipe": (FP8GlobalStateManager.get_fp8_recipe, "FP8"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refusal_names_the_feature(case: str) -> None:
    use, feature = REFUSED[case]
    with pytest.raises(NotImplementedError) as refusal:
        use()
    assert str(refusal.value) == f"The Transformer Engine stand-in does not model {feature}."


@pytest.mark.parametrize("context", [fp8_autocast, quantized_model_init])
def test_quantization_contexts_work_only_switched_off(context: Callable[..., object]) -> None:
    """Megatron opens them with `enabled=False` in a bf16 run."""
    assert not FP8GlobalStateManager.is_fp8_enabled()
    with context(enabled=False):
        pass
    with pytest.raises(NotImplementedError, match="does not model"), context(enabled=True):
        pass


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("permutation", "moe_permute"),
        ("cross_entropy", "parallel_cross_entropy"),
        ("router", "fused_moe_aux_loss"),
        ("ops", "Sequential"),
        ("graph", "make_graphed_callables"),
        ("distributed", "checkpoint"),
    ],
)
def test_importable_names_refuse_when_used(module: str, name: str) -> None:
    use = getattr(stand_in_modules()[f"transformer_engine.pytorch.{module}"], name)
    with pytest.raises(NotImplementedError, match="The Transformer Engine stand-in does not model"):
        use()


def test_offload_context_does_nothing_when_disabled() -> None:
    """Megatron's transformer block opens it around every layer."""
    module = stand_in_modules()["transformer_engine.pytorch.cpu_offload"]
    context, synchronize = module.get_cpu_offload_context(False, 1, 1, True, False, False)
    with context:
        assert synchronize("tensor") == "tensor"


MEGATRON_PROGRAM = """
from sim.te import installed
with installed():
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec as spec,
    )
    from megatron.core.optimizer import Adam
    from megatron.core.transformer import cuda_graphs
    from megatron.core.utils import is_te_min_version
assert extension.HAVE_TE and cuda_graphs.HAVE_TE_GRAPHS
assert is_te_min_version("2.17.1") and not is_te_min_version("2.18.0")
assert extension.SplitAlongDim is None and extension.te_general_gemm is not None
assert Adam.__module__ == "sim.te.optimizers"
spec(num_experts=4, moe_grouped_gemm=True, qk_layernorm=True)
"""


@pytest.mark.slow
def test_megatron_accepts_the_stand_in_as_transformer_engine() -> None:
    """In a process of its own: Megatron decides once, when it is first imported."""
    command = [sys.executable, "-W", "ignore", "-c", MEGATRON_PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
