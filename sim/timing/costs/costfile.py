"""Reads cost files: what a kernel, a message and a host call take on one kind of cluster.

Every number of a cost file stands beside its source, `{ value = 3350, source = "published: X" }`,
and every curve too, `{ sizes = [...], values = [...], source = "measured by COMMAND" }`. A key that
is missing, unknown or negative is an error that names it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

COSTS: Final = Path(__file__).parents[3] / "fixtures" / "costs"

KERNEL_CLASSES: Final = (
    "matrix",
    "grouped_matrix",
    "attention",
    "elementwise",
    "reduction",
    "copy",
)
LINKS: Final = ("node", "network")
TRAFFIC: Final = ("ring", "all_to_all")
HOST_CALLS: Final = (
    "kernel",
    "kernel_backward",
    "collective",
    "collective_wait",
    "event_record",
    "event_wait",
    "stream_wait",
    "host_sync",
    "record_stream",
    "resize",
    "allocate",
    "free",
    "hook",
    "unshard",
    "unshard_noop",
    "reshard",
    "reduce",
    "reduce_last",
    "fence",
    "optimizer_step",
    "grad_read",
    "nvtx",
    "node",
)
"""Host calls with a cost, in nanoseconds, beside what they call."""


class CostError(ValueError):
    """A cost file that cannot be used: the message names the file and the key."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """An efficiency by size, linear between points over the logarithm of the size.

    Attributes:
        sizes: Growing sizes, in flops or bytes.
        values: The efficiency at each, above 0 and at most 1.
    """

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, size: float) -> float:
        """Returns the efficiency at a size; beyond the ends, that of the end."""
        place = bisect_right(self.sizes, size)
        if place == 0:
            return self.values[0]
        if place == len(self.sizes):
            return self.values[-1]
        low, high = self.sizes[place - 1], self.sizes[place]
        share = math.log(size / low) / math.log(high / low)
        return self.values[place - 1] + share * (self.values[place] - self.values[place - 1])


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects ranks: one tier of the network.

    Attributes:
        bandwidth_gbs: Bytes per nanosecond that one rank sends, and receives at the same time.
        latency_ns: Time of an empty collective.
        hop_ns: More for each doubling of the group.
        efficiency: Share of the bandwidth that is reached, by kind of traffic and bytes sent.
    """

    bandwidth_gbs: float
    latency_ns: float
    hop_ns: float
    efficiency: Mapping[str, Curve]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The content of a cost file.

    Attributes:
        name: Name of the file without its ending.
        description: What it stands for.
        step_error: Relative error to expect of a step time.
        difference_error: Relative error to expect of a difference between two variants.
        memory_bandwidth_gbs: Bytes per nanosecond of device memory.
        memory_bytes: Size of device memory.
        tflops: Dense matrix rate by element type, in 10^12 operations a second.
        kernel_floor_ns: Time of the smallest kernel.
        launch_latency_ns: From the return of a launch until an idle device starts.
        efficiency: Share of the device's rate that is reached, by class and by flops or bytes.
        kernel_efficiency: The same for kernels by name, where that of their class does not fit.
        host: Cost of a host call, in nanoseconds.
        host_node: Cost of a schedule node by "name direction", where `host["node"]` does not fit.
        host_kernel: Cost of a launch by kernel name, where `host["kernel"]` does not fit.
        links: Links by tier.
        ranks_per_node: Ranks that share the link "node".
        compute_slowdown: How many times longer a kernel takes while a collective runs beside it.
        communication_slowdown: How many times longer a collective takes while kernels run.
        sources: Where each number comes from, by its dotted key.
    """

    name: str
    description: str
    step_error: float
    difference_error: float
    memory_bandwidth_gbs: float
    memory_bytes: float
    tflops: Mapping[str, float]
    kernel_floor_ns: float
    launch_latency_ns: float
    efficiency: Mapping[str, Curve]
    kernel_efficiency: Mapping[str, Curve]
    host: Mapping[str, float]
    host_node: Mapping[str, float]
    host_kernel: Mapping[str, float]
    links: Mapping[str, Link]
    ranks_per_node: int
    compute_slowdown: float
    communication_slowdown: float
    sources: Mapping[str, str]

    def changed(self, **values: object) -> Cluster:
        """Returns a cluster with some attributes replaced."""
        return dataclasses.replace(self, **values)  # type: ignore[arg-type]

    def scaled(self, *, bandwidth: float = 1.0, latency: float = 1.0, host: float = 1.0) -> Cluster:
        """Returns a cluster with all links and all host calls scaled by a factor."""
        links = {
            tier: dataclasses.replace(
                link,
                bandwidth_gbs=link.bandwidth_gbs * bandwidth,
                latency_ns=link.latency_ns * latency,
                hop_ns=link.hop_ns * latency,
            )
            for tier, link in self.links.items()
        }
        return dataclasses.replace(
            self,
            links=links,
            host={name: cost * host for name, cost in self.host.items()},
            host_node={name: cost * host for name, cost in self.host_node.items()},
            host_kernel={name: cost * host for name, cost in self.host_kernel.items()},
        )

    def is_measured(self) -> bool:
        """Whether any number was measured by this project."""
        return any(source.startswith("measured") for source in self.sources.values())


def cluster_names() -> list[str]:
    """Returns the names of the clusters that come with the project."""
    return sorted(path.stem for path in COSTS.glob("*.toml"))


def load_cluster(name: str) -> Cluster:
    """Reads a cost file, given its path or the name of one that comes with the project.

    Raises:
        CostError: There is no such file, or something in it does not fit.
    """
    path = Path(name)
    if not path.suffix and not path.exists():
        path = COSTS / f"{name}.toml"
        if not path.exists():
            names = cluster_names()
            raise CostError(
                f"Expected a cost file or one of {', '.join(names)}; got {name!r}."
                f"{_hint(name, names)}"
            )
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise CostError(f"{path}: cannot read the cost file: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CostError(f"{path}: expected TOML, got: {error}.") from None
    return parse_cluster(content, path)


def parse_cluster(content: dict[str, Any], path: Path) -> Cluster:
    """Takes the content of a cost file apart.

    Args:
        content: As `tomllib` reads it.
        path: The file, which errors name.

    Raises:
        CostError: Something in it does not fit.
    """
    return _Reader(path, content).cluster()


def _hint(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


class _Reader:
    """Takes a file apart; what is left over at the end is unknown."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path = path
        self._content = content
        self._known: dict[str, set[str]] = {}
        self._sources: dict[str, str] = {}

    def cluster(self) -> Cluster:
        error, device, contention = "error", "device", "contention"
        result = Cluster(
            name=self._path.stem,
            description=self._text("description"),
            step_error=self._number(error, "step"),
            difference_error=self._number(error, "difference"),
            memory_bandwidth_gbs=self._number(device, "memory_bandwidth_gbs", least=1e-9),
            memory_bytes=self._number(device, "memory_bytes", least=1),
            tflops=self._numbers("device.tflops", ("bfloat16", "float32"), least=1e-9),
            kernel_floor_ns=self._number(device, "kernel_floor_ns"),
            launch_latency_ns=self._number(device, "launch_latency_ns"),
            efficiency={name: self._curve("efficiency", name) for name in KERNEL_CLASSES},
            kernel_efficiency=self._curves("efficiency.kernels"),
            host={name: self._number("host", name) for name in HOST_CALLS},
            host_node=self._numbers("host.nodes"),
            host_kernel=self._numbers("host.kernels"),
            links={tier: self._link(f"link.{tier}") for tier in LINKS},
            ranks_per_node=int(self._number("topology", "ranks_per_node", least=1)),
            compute_slowdown=self._number(contention, "compute_slowdown", least=1),
            communication_slowdown=self._number(contention, "communication_slowdown", least=1),
            sources=self._sources,
        )
        self._refuse_unknown("", self._content)
        return result

    def _link(self, section: str) -> Link:
        return Link(
            bandwidth_gbs=self._number(section, "bandwidth_gbs", least=1e-9),
            latency_ns=self._number(section, "latency_ns"),
            hop_ns=self._number(section, "hop_ns"),
            efficiency={name: self._curve(f"{section}.efficiency", name) for name in TRAFFIC},
        )

    def _section(self, section: str) -> dict[str, Any]:
        content = self._content
        parent = ""
        for part in section.split("."):
            self._known.setdefault(parent, set()).add(part)
            parent = f"{parent}.{part}" if parent else part
            content = content.get(part, {})
            if not isinstance(content, dict):
                raise CostError(f"{self._path}: expected a section [{parent}], got {content!r}.")
        self._known.setdefault(section, set())
        return content

    def _text(self, key: str) -> str:
        self._known.setdefault("", set()).add(key)
        value = self._content.get(key)
        if not isinstance(value, str):
            raise CostError(f"{self._path}: expected text for {key}, got {value!r}.")
        return value

    def _leaf(self, section: str, key: str, fields: tuple[str, ...]) -> dict[str, Any]:
        content = self._section(section)
        self._known[section].add(key)
        name = f"{section}.{key}"
        if key not in content:
            hint = _hint(key, [word for word in content if word not in self._known[section]])
            raise CostError(f"{self._path}: expected {name}, got none.{hint}")
        leaf = content[key]
        if not isinstance(leaf, dict) or sorted(leaf) != sorted(fields):
            raise CostError(f"{self._path}: expected {', '.join(fields)} for {name}, got {leaf!r}.")
        if not isinstance(leaf["source"], str) or not leaf["source"]:
            raise CostError(
                f"{self._path}: expected text for the source of {name}, got {leaf['source']!r}."
            )
        self._sources[name] = leaf["source"]
        return leaf

    def _number(self, section: str, key: str, *, least: float = 0) -> float:
        value = self._leaf(section, key, ("value", "source"))["value"]
        if not _is_number(value) or value < least:
            bound = (
                "0 or more" if least == 0 else "more than 0" if least < 1 else f"{least} or more"
            )
            raise CostError(
                f"{self._path}: expected a number of {bound} for {section}.{key}, got {value!r}."
            )
        return float(value)

    def _numbers(
        self, section: str, required: tuple[str, ...] = (), *, least: float = 0
    ) -> dict[str, float]:
        names = dict.fromkeys((*required, *self._section(section)))
        return {name: self._number(section, name, least=least) for name in names}

    def _curves(self, section: str) -> dict[str, Curve]:
        return {name: self._curve(section, name) for name in self._section(section)}

    def _curve(self, section: str, key: str) -> Curve:
        leaf = self._leaf(section, key, ("sizes", "values", "source"))
        sizes, values = leaf["sizes"], leaf["values"]
        name = f"{self._path}: expected {{}} for {section}.{key}, got {{}}."
        for given in (sizes, values):
            if not isinstance(given, list) or not given or not all(map(_is_number, given)):
                raise CostError(name.format("lists of numbers", repr(given)))
        if len(sizes) != len(values) or sorted(set(sizes)) != sizes or sizes[0] <= 0:
            raise CostError(name.format("one value for each of growing sizes above 0", repr(sizes)))
        if not all(0 < value <= 1 for value in values):
            raise CostError(name.format("values above 0 and at most 1", repr(values)))
        return Curve(sizes=tuple(map(float, sizes)), values=tuple(map(float, values)))

    def _refuse_unknown(self, section: str, content: dict[str, Any]) -> None:
        known = self._known[section]
        for key, value in content.items():
            name = f"{section}.{key}" if section else key
            if key not in known:
                raise CostError(
                    f"{self._path}: expected a known key, got {name!r}.{_hint(key, sorted(known))}"
                )
            if name in self._known:
                self._refuse_unknown(name, value)


def _is_number(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]
