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


def _key(default: Any, section: str, text: str, *, choices: tuple[str, ...] = ()) -> Any:
    return field(
        default=default, metadata={"section": section, "help": text, "choices": choices}
    )


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
    # parallel
    world_size: int = _key(4, "parallel", "ranks")
    expert_model_parallel_size: int = _key(2, "parallel", "ranks that share a layer's experts")
    # schedule
    num_microbatches: int = _key(4, "schedule", "microbatches of one optimizer step")
    overlap_moe_expert_parallel_comm: bool = _key(
        True, "schedule", "combined 1F1B with our hooks; false: plain schedule, MFSDP's own hooks"
    )
    prefetch: str = _key(
        "none", "schedule", "gathers issued one unit ahead", choices=("none", "forward", "both")
    )
    # training
    micro_batch_size: int = _key(1, "training", "sequences of one microbatch on one rank")
    train_iters: int = _key(3, "training", "optimizer steps")
    seed: int = _key(1234, "training", "seed of weights and data")
    optimizer: str = _key("adam", "training", "optimizer", choices=("adam", "sgd"))
    lr: float = _key(1e-3, "training", "learning rate")

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check_type(spec, getattr(self, spec.name))
        _check_sizes(self)

    @property
    def expert_data_parallel_size(self) -> int:
        """Ranks that hold the same experts."""
        return self.world_size // self.expert_model_parallel_size

    def as_dict(self) -> dict[str, Any]:
        """Returns all keys with their values, in order, for a trace header."""
        return dataclasses.asdict(self)

    def changed(self, **overrides: Any) -> Scenario:
        """Returns a scenario with some keys replaced; None leaves a key as it is."""
        given = {name: value for name, value in overrides.items() if value is not None}
        return dataclasses.replace(self, **given)


_POSITIVE: Final = tuple(
    spec.name for spec in fields(Scenario) if spec.type == "int" and spec.name != "seed"
)


def flag(name: str) -> str:
    """Returns Megatron's flag for a field, without the dashes in front."""
    return name.replace("_", "-")


def _check_type(spec: dataclasses.Field[Any], value: Any) -> None:
    wanted = {"int": int, "float": (int, float), "bool": bool, "str": str}[str(spec.type)]
    is_bool = isinstance(value, bool)
    if not isinstance(value, wanted) or (is_bool and wanted is not bool):
        raise ScenarioError(f"Expected {spec.type} for {flag(spec.name)}, got {value!r}.")
    choices = spec.metadata["choices"]
    if choices and value not in choices:
        raise ScenarioError(
            f"Expected {flag(spec.name)} to be one of {', '.join(choices)}; got {value!r}."
        )


def _check_sizes(s: Scenario) -> None:
    for name in _POSITIVE:
        if getattr(s, name) < 1:
            raise ScenarioError(f"Expected {flag(name)} of 1 or more, got {getattr(s, name)}.")
    if s.lr < 0:
        raise ScenarioError(f"Expected lr of 0 or more, got {s.lr}.")
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
    except tomllib.TOMLDecodeError as error:
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
