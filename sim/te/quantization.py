"""The quantization surface of Transformer Engine, permanently switched off.

Megatron asks on many paths whether FP8 is enabled, opens contexts with `enabled=False`, and tests
tensors with `isinstance`. All of these work; switching anything on is refused.

Source: transformer_engine 2.17.1, `pytorch/quantization.py`, `common/recipe/__init__.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from sim.te.refusal import not_modelled, refuse_if, refusing_class


class FP8GlobalStateManager:
    """Answers that quantization is off."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Returns False."""
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Returns False."""
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Returns False."""
        return False

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Returns False."""
        return False

    @classmethod
    def reset(cls) -> None:
        """Does nothing: there is no state."""

    @classmethod
    def get_fp8_recipe(cls) -> None:
        """Refuses.

        Raises:
            NotImplementedError: always.
        """
        raise not_modelled("FP8")


@contextmanager
def autocast(enabled: bool = True, **_options: object) -> Iterator[None]:
    """Does nothing when not `enabled`.

    Raises:
        NotImplementedError: `enabled`.
    """
    refuse_if(enabled, "FP8")
    yield


@contextmanager
def quantized_model_init(enabled: bool = True, **_options: object) -> Iterator[None]:
    """Does nothing when not `enabled`.

    Raises:
        NotImplementedError: `enabled`.
    """
    refuse_if(enabled, "quantized parameters")
    yield


fp8_autocast = autocast
fp8_model_init = quantized_model_init


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Does nothing: what it marks concerns the scaling factors of FP8 alone."""
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    """Returns False."""
    return False


def in_fp8_activation_recompute_phase() -> bool:
    """Returns False."""
    return False


class Format(Enum):
    """Names of FP8 formats; Megatron passes them to recipes, which are refused."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


RECIPES = {
    name: refusing_class(name, f"the {name} recipe")
    for name in (
        "Recipe",
        "DelayedScaling",
        "Float8CurrentScaling",
        "Float8BlockScaling",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
        "CustomRecipe",
    )
}

# Shared between modules that export the same class, so that isinstance agrees.
TENSOR_CLASSES = {
    name: refusing_class(name, f"{name} tensors")
    for name in (
        "QuantizedTensor",
        "Float8Tensor",
        "MXFP8Tensor",
        "Float8BlockwiseQTensor",
        "NVFP4Tensor",
        "GroupedTensor",
    )
}
