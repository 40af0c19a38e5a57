"""A scenario: everything that fixes one training run, read from a small TOML file.

Keys are Megatron's own flag names without the leading dashes. Both modes read the same files.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final


class ScenarioError(ValueError):
    """A scenario that cannot be run; the message says what was expected and what was got."""


def _key(
    default: Any,  # noqa: ANN401
    section: str,
    text: str,
    *,
    choices: tuple[str, ...] = (),
) -> Any:  # noqa: ANN401 - a dataclass field stands for its default
    return field(default=default, metadata={"section": section, "help": text, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One training run of a small GPT MoE model.

    Sizes are element counts, `seq_length` counts tokens, `lr` is per step. Fields carry their
    section and meaning as metadata; `describe_keys` lists them.
    """

    # model
    num_layers: int = _key(4, "model", "transformer layers")
    hidden_size: int = _key(32, "model", "width of the residual stream")
    ffn_hidden_size: int = _key(64, "model", "width of a dense layer's MLP")
    num_attention_heads: int = _key(4, "model", "attention heads")
    seq_length: int = _key(16, "model", "tokens of one sequence")
    vocab_size: int = _key(64, "model", "padded vocabulary size")
    num_experts: int = _key(4, "model", "experts of a MoE layer")
    moe_ffn_hidden_size: int = _key(32, "model", "width of one expert")
    moe_router_topk: int = _key(2, "model", "experts per token")
    transformer_impl: str = _key(
        "local", "model", "layer spec", choices=("local", "transformer_engine")
    )
    attention_backend: str = _key(
        "unfused",
        "model",
        "Transformer Engine's attention kernels",
        choices=("auto", "flash", "fused", "unfused"),
    )
    moe_layer_freq: str = _key(
        "1", "model", "1: every layer is MoE; or one 0 (dense) or 1 (MoE) per layer, as 0,1,1,1"
    )
    hybrid_layer_pattern: str = _key(
        "", "model", "HybridModel's layers, as *E*-: attention, experts, MLP; empty: GPTModel"
    )
    moe_shared_expert_intermediate_size: int = _key(
        0, "model", "width of the shared expert; 0: none"
    )
    untie_embeddings_and_output_weights: bool = _key(
        True, "model", "false: the output layer uses the embedding's weight"
    )
    mtp_num_layers: int = _key(0, "model", "multi-token prediction layers, 0 or 1")
    freeze: str = _key(
        "", "model", "patterns of parameters without a gradient, as *.router.weight,*.layers.1.*"
    )
    recompute_granularity: str = _key(
        "none", "model", "activation recompute", choices=("none", "selective", "full")
    )
    recompute_modules: str = _key(
        "core_attn", "model", "what selective recompute covers, as core_attn,layernorm"
    )
    # parallel
    world_size: int = _key(4, "parallel", "ranks")
    expert_model_parallel_size: int = _key(2, "parallel", "ranks that share a layer's experts")
    num_distributed_optimizer_instances: int = _key(
        1, "parallel", "size of the outer data-parallel axis of a hybrid mesh"
    )
    outer_dp_sharding_strategy: str = _key(
        "no_shard",
        "parallel",
        "outer axis: replicas (HSDP) or sharded optimizer state (HFSDP)",
        choices=("no_shard", "optim"),
    )
    # schedule
    num_microbatches: int = _key(4, "schedule", "microbatches of one optimizer step")
    overlap_moe_expert_parallel_comm: bool = _key(
        True, "schedule", "combined 1F1B with our hooks; false: plain schedule, MFSDP's own hooks"
    )
    fine_grained_hooks: bool = _key(False, "schedule", "our hooks under the plain schedule too")
    delay_wgrad_compute: bool = _key(False, "schedule", "weight gradients in calls of their own")
    prefetch: str = _key(
        "none", "schedule", "gathers issued one unit ahead", choices=("none", "forward", "both")
    )
    # training
    micro_batch_size: int = _key(1, "training", "sequences of one microbatch on one rank")
    train_iters: int = _key(3, "training", "optimizer steps")
    seed: int = _key(1234, "training", "seed of weights and data")
    optimizer: str = _key("adam", "training", "optimizer", choices=("adam", "sgd"))
    lr: float = _key(1e-3, "training", "learning rate")
    clip_grad: float = _key(0.0, "training", "largest gradient norm; 0: no clipping")

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check_type(spec, getattr(self, spec.name))
        _check_sizes(self)

    @property
    def expert_data_parallel_size(self) -> int:
        """Ranks that hold the same experts."""
        return self.world_size // self.expert_model_parallel_size

    @property
    def moe_layers(self) -> list[int]:
        """One entry a layer: 1 for a MoE layer, 0 for a dense one."""
        if self.moe_layer_freq == "1":
            return [1] * self.num_layers
        return [int(part) for part in self.moe_layer_freq.split(",")]

    @property
    def freeze_patterns(self) -> list[str]:
        """Patterns of frozen parameters."""
        return split_list(self.freeze)

    def as_dict(self) -> dict[str, Any]:
        """Returns all keys with their values, in order, for a trace header."""
        return dataclasses.asdict(self)

    def changed(self, **overrides: object) -> Scenario:
        """Returns a scenario with some keys replaced; None leaves a key as it is."""
        values: dict[str, Any] = {n: value for n, value in overrides.items() if value is not None}
        return dataclasses.replace(self, **values)


_MAY_BE_ZERO: Final = frozenset({"seed", "moe_shared_expert_intermediate_size", "mtp_num_layers"})
_RECOMPUTE_MODULES: Final = ("core_attn", "layernorm")


def split_list(text: str) -> list[str]:
    """Splits a comma-separated value; empty text has no parts."""
    return [part.strip() for part in text.split(",") if part.strip()]


_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}


def flag(name: str) -> str:
    """Returns Megatron's flag for a field, without the dashes in front."""
    return name.replace("_", "-")


def _check_type(spec: dataclasses.Field[Any], value: object) -> None:
    wanted = _TYPES[str(spec.type)]
    is_bool = isinstance(value, bool)
    if not isinstance(value, wanted) or (is_bool and bool not in wanted):
        raise ScenarioError(f"Expected {spec.type} for {flag(spec.name)}, got {value!r}.")
    choices = spec.metadata["choices"]
    if choices and value not in choices:
        raise ScenarioError(
            f"Expected {flag(spec.name)} to be one of {', '.join(choices)}; got {value!r}."
        )


def _check_sizes(s: Scenario) -> None:
    for spec in fields(s):
        least = 0 if spec.name in _MAY_BE_ZERO or spec.type == "float" else 1
        if spec.type in ("int", "float") and not getattr(s, spec.name) >= least:
            raise ScenarioError(
                f"Expected {flag(spec.name)} of {least} or more, got {getattr(s, spec.name)}."
            )
    for whole, part in (
        ("world_size", "expert_model_parallel_size"),
        ("num_experts", "expert_model_parallel_size"),
        ("hidden_size", "num_attention_heads"),
    ):
        if getattr(s, whole) % getattr(s, part):
            raise ScenarioError(
                f"Expected {flag(whole)} to be a multiple of {flag(part)}, "
                f"got {getattr(s, whole)} and {getattr(s, part)}."
            )
    if s.expert_data_parallel_size % s.num_distributed_optimizer_instances:
        raise ScenarioError(
            "Expected the expert-data-parallel size (world-size over expert-model-parallel-size) "
            "to be a multiple of num-distributed-optimizer-instances, got "
            f"{s.expert_data_parallel_size} and {s.num_distributed_optimizer_instances}."
        )
    if s.moe_layer_freq != "1" and (
        len(split_list(s.moe_layer_freq)) != s.num_layers
        or set(split_list(s.moe_layer_freq)) - {"0", "1"}
    ):
        raise ScenarioError(
            f"Expected moe-layer-freq of 1 or {s.num_layers} comma-separated 0 or 1, "
            f"got {s.moe_layer_freq!r}."
        )
    if s.hybrid_layer_pattern:
        _check_hybrid(s)
    if s.mtp_num_layers > 1:
        raise ScenarioError(f"Expected mtp-num-layers of 0 or 1, got {s.mtp_num_layers}.")
    for name in split_list(s.recompute_modules):
        if name not in _RECOMPUTE_MODULES:
            raise ScenarioError(
                f"Expected recompute-modules among {', '.join(_RECOMPUTE_MODULES)}, got {name!r}."
            )
    if s.recompute_granularity == "full" and s.overlap_moe_expert_parallel_comm:
        raise ScenarioError(
            "Expected recompute-granularity of none or selective with "
            "overlap-moe-expert-parallel-comm, got full."
        )
    if s.delay_wgrad_compute and not s.overlap_moe_expert_parallel_comm:
        raise ScenarioError(
            "Expected overlap-moe-expert-parallel-comm with delay-wgrad-compute, got it off."
        )
    if s.delay_wgrad_compute and s.transformer_impl != "transformer_engine":
        raise ScenarioError(
            "Expected transformer-impl of transformer_engine with delay-wgrad-compute, "
            f"got {s.transformer_impl}."
        )
    if s.moe_router_topk > s.num_experts:
        raise ScenarioError(
            f"Expected moe-router-topk of at most num-experts, "
            f"got {s.moe_router_topk} and {s.num_experts}."
        )
    if s.overlap_moe_expert_parallel_comm and s.expert_model_parallel_size < 2:
        raise ScenarioError(
            "Expected expert-model-parallel-size of 2 or more with "
            f"overlap-moe-expert-parallel-comm, got {s.expert_model_parallel_size}."
        )


def _check_hybrid(s: Scenario) -> None:
    """HybridModel of release 0.19 builds no schedule plan, and has its own specs."""
    if set(s.hybrid_layer_pattern) - set("*-E") or len(s.hybrid_layer_pattern) != s.num_layers:
        raise ScenarioError(
            f"Expected hybrid-layer-pattern of {s.num_layers} symbols among * - E (the others need "
            f"further packages), got {s.hybrid_layer_pattern!r}."
        )
    if s.overlap_moe_expert_parallel_comm:
        raise ScenarioError(
            "Expected no-overlap-moe-expert-parallel-comm with hybrid-layer-pattern: HybridModel "
            "of megatron-core 0.19 builds no plan for the combined schedule."
        )
    if s.transformer_impl != "transformer_engine" or s.mtp_num_layers:
        raise ScenarioError(
            "Expected transformer-impl of transformer_engine and no mtp-num-layers with "
            f"hybrid-layer-pattern, got {s.transformer_impl} and {s.mtp_num_layers}."
        )


def load_scenario(path: Path) -> Scenario:
    """Reads a scenario file.

    Raises:
        ScenarioError: The file is missing, is no TOML, has an unknown section or key, or a value
            that does not fit. The message names the file.
    """
    try:
        with path.open("rb") as file:
            sections = tomllib.load(file)
    except OSError as error:
        raise ScenarioError(f"{path}: cannot read the scenario: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: expected TOML, got: {error}.") from None
    known = {flag(spec.name): spec for spec in fields(Scenario)}
    section_names = list(dict.fromkeys(spec.metadata["section"] for spec in fields(Scenario)))
    values: dict[str, Any] = {}
    for section, content in sections.items():
        if section not in section_names or not isinstance(content, dict):
            expected = ", ".join(f"[{name}]" for name in section_names)
            raise ScenarioError(f"{path}: expected the sections {expected}; got {section!r}.")
        for key, value in content.items():
            spec = known.get(key)
            if spec is None or spec.metadata["section"] != section:
                raise ScenarioError(f"{path}: {_unknown_key(section, key, known)}")
            values[spec.name] = value
    try:
        return Scenario(**values)
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from None


def _unknown_key(section: str, key: str, known: dict[str, dataclasses.Field[Any]]) -> str:
    if key in known:
        right = known[key].metadata["section"]
        return f"expected {key!r} in section [{right}], got it in [{section}]."
    in_section = [name for name, spec in known.items() if spec.metadata["section"] == section]
    near = difflib.get_close_matches(key, in_section, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"expected a known key in [{section}], got {key!r}.{hint}"
