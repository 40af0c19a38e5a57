"""The knobs of `sim whatif`: what each one changes, and in what.

A knob of the costs changes the cost file, a knob of the trace rewrites records, a condition is a
setting of the replay. A knob of the scenario changes what is recorded, so the scenario runs again.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from real.config import Scenario, flag
from sim.timing.answers.rewrite import COMMUNICATORS, EVENTS, STREAMS, Rewrite
from sim.timing.costs.costfile import Cluster
from sim.timing.replay.lower import Conditions

Value = float | int | str | bool


class KnobError(ValueError):
    """A knob or a value that does not exist: the message says what does."""


class Part(StrEnum):
    """What a knob changes."""

    COSTS = "costs"
    TRACE = "trace"
    CONDITIONS = "conditions"
    SCENARIO = "scenario"
    RANKS = "ranks"


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One thing that can be varied.

    Attributes:
        name: As it is written on the command line.
        part: What it changes.
        key: The attribute that it changes there.
        help: What its values mean.
        parse: Makes a value of a word; raises `ValueError` with what was expected.
    """

    name: str
    part: Part
    key: str
    help: str
    parse: Callable[[str], Value]


def _factor(word: str) -> float:
    value = _number(word)
    if not value > 0:
        raise ValueError("a factor above 0")
    return value


def _slowdown(word: str) -> float:
    value = _number(word)
    if not value >= 1:
        raise ValueError("a factor of 1 or more")
    return value


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError("a number") from None


def _count(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise ValueError("a whole number of 1 or more")
    return int(word)


def _index(word: str) -> int:
    if not word.isdigit():
        raise ValueError("a whole number of 0 or more")
    return int(word)


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(word: str) -> str:
        if word not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return word

    return parse


def _switch(word: str) -> bool:
    known = {"on": True, "true": True, "off": False, "false": False}
    if word not in known:
        raise ValueError("on or off")
    return known[word]


def _scenario_knob(spec: dataclasses.Field[Any]) -> Knob:
    parsers: dict[str, Callable[[str], Value]] = {
        "int": _index,
        "float": _number,
        "bool": _switch,
        "str": _one_of(*spec.metadata["choices"]) if spec.metadata["choices"] else str,
    }
    return Knob(
        name=flag(spec.name),
        part=Part.SCENARIO,
        key=spec.name,
        help=spec.metadata["help"],
        parse=parsers[str(spec.type)],
    )


def _own_knobs() -> list[Knob]:
    costs, trace, conditions = Part.COSTS, Part.TRACE, Part.CONDITIONS
    rows: list[tuple[str, Part, str, str, Callable[[str], Value]]] = [
        ("link-bandwidth", costs, "bandwidth", "factor on the bandwidth of all links", _factor),
        ("link-latency", costs, "latency", "factor on the latency of all links", _factor),
        ("host-cost", costs, "host", "factor on every cost of the host", _factor),
        ("sm-contention", costs, "contention", "slowdown of kernels beside collectives", _slowdown),
        ("comm-stream", trace, "streams", "streams of gathers and reductions", _one_of(*STREAMS)),
        (
            "communicator",
            trace,
            "communicators",
            "communicators of gathers and reductions",
            _one_of(*COMMUNICATORS),
        ),
        ("event", trace, "events", "events between schedule nodes", _one_of(*EVENTS)),
        ("connections", conditions, "connections", "CUDA_DEVICE_MAX_CONNECTIONS", _count),
        ("queue-depth", conditions, "queue_depth", "launches that a stream holds", _count),
        (
            "imbalance",
            conditions,
            "imbalance",
            "tokens of each expert group's first rank over the mean",
            _slowdown,
        ),
        ("straggler", conditions, "straggler", "slowdown of one rank's kernels", _slowdown),
        ("straggler-rank", conditions, "straggler_rank", "which rank that is", _index),
        ("dp", Part.RANKS, "world_size", "data-parallel ranks (all ranks)", _count),
    ]
    return [
        Knob(name=name, part=part, key=key, help=text, parse=parse)
        for name, part, key, text, parse in rows
    ]


def _knobs() -> dict[str, Knob]:
    specs = {spec.name: _scenario_knob(spec) for spec in dataclasses.fields(Scenario)}
    del specs["world_size"]  # `dp` repeats the trace where it can
    short = {"ep": "expert_model_parallel_size", "delay-wgrad": "delay_wgrad_compute"}
    named = [dataclasses.replace(specs[key], name=name) for name, key in short.items()]
    knobs = [*_own_knobs(), *named, *specs.values()]
    return {knob.name: knob for knob in knobs}


KNOBS: Final[Mapping[str, Knob]] = _knobs()
"""All knobs by name: this module's own, two short names, and every key of a scenario."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One setting of some knobs.

    Attributes:
        values: Values by knob; knobs that are left out stay as recorded.
    """

    values: Mapping[str, Value]

    def _of(self, part: Part) -> dict[str, Any]:
        return {
            KNOBS[name].key: value
            for name, value in self.values.items()
            if KNOBS[name].part == part
        }

    def cluster(self, cluster: Cluster) -> Cluster:
        """Returns the cluster with this variant's costs."""
        changes = self._of(Part.COSTS)
        contention = changes.pop("contention", None)
        scaled = cluster.scaled(**changes)
        return scaled if contention is None else scaled.changed(compute_slowdown=contention)

    def conditions(self) -> Conditions:
        """Returns the conditions of the replay."""
        return Conditions(**self._of(Part.CONDITIONS))

    def rewrite(self) -> Rewrite:
        """Returns what happens to the records."""
        return Rewrite(**self._of(Part.TRACE))

    def scenario_changes(self) -> dict[str, Any]:
        """Returns the scenario keys that differ from the recorded scenario."""
        return self._of(Part.SCENARIO)

    def num_ranks(self) -> int | None:
        """Returns the number of ranks to time as, or None for those of the trace."""
        ranks: int | None = self._of(Part.RANKS).get("world_size")
        return ranks

    def __str__(self) -> str:
        return " ".join(f"{name}={_word(value)}" for name, value in self.values.items())


def _word(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_setting(text: str) -> tuple[str, list[Value]]:
    """Reads "knob=v1,v2".

    Raises:
        KnobError: There is no such knob, or it cannot have such a value.
    """
    name, _, words = text.partition("=")
    knob = KNOBS.get(name)
    if knob is None:
        near = difflib.get_close_matches(name, KNOBS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise KnobError(f"Expected --set KNOB=VALUE,... with a known knob, got {text!r}.{hint}")
    values = []
    for word in words.split(","):
        try:
            values.append(knob.parse(word.strip()))
        except ValueError as error:
            raise KnobError(f"Expected {error} for {name}, got {word.strip()!r}.") from None
    return name, list(dict.fromkeys(values))
