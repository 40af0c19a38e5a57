"""Makes device and link costs of raw measurements (`real calibrate`).

Everything that was not measured keeps the value and the source that it has in another cost file.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sim.timing.costs.costfile import KERNEL_CLASSES
from sim.timing.costs.kernels import variant_of, work_of
from sim.timing.fit.accuracy import SHARDING_CALLS, Factors

Content = dict[str, Any]
"""A cost file as `tomllib` reads it."""

Leaf = dict[str, Any]

_RING: Final = ("all_gather", "reduce_scatter", "all_reduce")
_BINS_PER_DOUBLING: Final = 1


def source_of(measured: Mapping[str, Any]) -> str:
    """Says where measured numbers come from."""
    machine = measured["machine"]
    packages = machine["packages"]
    return (
        f"measured: `real calibrate`, {machine['num_devices']} x {machine['device']}, "
        f"torch {packages['torch']}, Transformer Engine {packages['transformer-engine-torch']}, "
        f"{machine['date']}"
    )


def device_costs(measured: Mapping[str, Any], base: Content) -> Content:
    """Returns a cost file's content with measured kernels, links and contention.

    Args:
        measured: What `real calibrate` wrote.
        base: A cost file to take the rest from.
    """
    content: Content = {key: _copied(value) for key, value in base.items()}
    source = source_of(measured)
    if "kernels" in measured:
        _set_kernels(content, measured["kernels"], source)
    if "collectives" in measured:
        _set_links(content, measured["collectives"], source)
    if "contention" in measured:
        _set_contention(content, measured["contention"], source)
    return content


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def _number(value: float, source: str) -> Leaf:
    return {"value": _rounded(value), "source": source}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


# -- kernels ----------------------------------------------------------------------------------


def _set_kernels(content: Content, kernels: Sequence[Mapping[str, Any]], source: str) -> None:
    device = content["device"]
    bandwidth: float = device["memory_bandwidth_gbs"]["value"]
    rate: float = device["tflops"]["bfloat16"]["value"] * 1e3
    by_name: dict[str, list[tuple[float, float]]] = defaultdict(list)
    by_class: dict[str, list[tuple[float, float]]] = defaultdict(list)
    timed = [entry for entry in kernels if "us" in entry]
    for entry in timed:
        work = work_of(entry["name"], entry["shapes"])
        if not work.kind:
            continue
        nanoseconds = 1e3 * entry["us"]
        if work.flops:
            point = (work.flops, work.flops / rate / nanoseconds)
        else:
            point = (work.num_bytes, work.num_bytes / bandwidth / nanoseconds)
        by_name[variant_of(entry["name"], entry["shapes"])].append(point)
        by_class[work.kind].append(point)
    floor = min(1e3 * entry["us"] for entry in timed)
    device["kernel_floor_ns"] = _number(floor, source)
    efficiency = content["efficiency"]
    for kind in KERNEL_CLASSES:
        if by_class[kind]:
            efficiency[kind] = _curve(by_class[kind], source)
    efficiency["kernels"] = {
        name: _curve(points, source) for name, points in sorted(by_name.items())
    }


def _curve(points: Sequence[tuple[float, float]], source: str) -> Leaf:
    """Returns the median efficiency of each doubling of the size."""
    bins: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for size, value in points:
        bins[round(math.log2(size) * _BINS_PER_DOUBLING)].append((size, value))
    sizes, values = [], []
    for _, members in sorted(bins.items()):
        sizes.append(_rounded(statistics.geometric_mean(size for size, _ in members)))
        values.append(_rounded(min(statistics.median(value for _, value in members), 1.0)))
    return {"sizes": sizes, "values": values, "source": source}


# -- links ------------------------------------------------------------------------------------


def _set_links(content: Content, collectives: Sequence[Mapping[str, Any]], source: str) -> None:
    link = content["link"]["node"]
    bandwidth: float = link["bandwidth_gbs"]["value"]
    smallest = min(entry["bytes"] for entry in collectives)
    shortest = statistics.median(
        1e3 * entry["us"] for entry in collectives if entry["bytes"] == smallest
    )
    hop: float = link["hop_ns"]["value"]
    link["latency_ns"] = _number(max(shortest - hop, 0.0), source)
    for traffic, kinds in (("ring", _RING), ("all_to_all", ("all_to_all_single",))):
        points = []
        for entry in collectives:
            moving = 1e3 * entry["us"] - shortest
            if entry["kind"] in kinds and moving > 0.3 * shortest:
                sent = _bytes_sent(entry["kind"], entry["bytes"])
                points.append((sent, sent / bandwidth / moving))
        if points:
            link["efficiency"][traffic] = _curve(points, source)


def _bytes_sent(kind: str, num_bytes: float, ranks: int = 2) -> float:
    """Returns what a rank sends, as `sim.timing.costs.collectives` counts it."""
    whole = num_bytes * ranks if kind == "all_gather" else num_bytes
    if kind == "all_reduce":
        whole *= 2
    return whole * (ranks - 1) / ranks


def _set_contention(content: Content, pairs: Sequence[Mapping[str, Any]], source: str) -> None:
    beside = [pair for pair in pairs if "kernel_beside_us" in pair]
    if not beside:
        return
    for key, name in (("compute_slowdown", "kernel"), ("communication_slowdown", "collective")):
        factor = statistics.mean(
            max(pair[f"{name}_beside_us"] / pair[f"{name}_us"], 1.0) for pair in beside
        )
        content["contention"][key] = _number(factor, source)


# -- factors ----------------------------------------------------------------------------------


def apply_factors(content: Content, factors: Factors) -> None:
    """Changes a content by factors that were fitted to measured steps; each source says so."""
    host = content["host"]
    for name, leaf in host.items():
        if "value" in leaf:
            is_sharding = name in SHARDING_CALLS
            _scale(leaf, factors.host * (factors.sharding if is_sharding else 1.0))
    for section in ("nodes", "kernels"):
        for leaf in host.get(section, {}).values():
            _scale(leaf, factors.host)
    efficiency = content["efficiency"]
    for name, leaf in (*efficiency.items(), *efficiency.get("kernels", {}).items()):
        if "values" in leaf:
            _scale(leaf, factors.of(name))


def _scale(leaf: Leaf, factor: float) -> None:
    if factor == 1.0:
        return
    if "values" in leaf:
        leaf["values"] = [_rounded(min(value * factor, 1.0)) for value in leaf["values"]]
    else:
        leaf["value"] = round(leaf["value"] * factor)
    leaf["source"] += f"; times {factor:.3f}, fitted to measured steps"


# -- writing ----------------------------------------------------------------------------------


def to_toml(content: Content, title: str) -> str:
    """Writes a cost file's content as TOML."""
    lines = [f"# {title}", "# Every number stands beside its source.", ""]
    lines += [f'{key} = "{value}"' for key, value in content.items() if isinstance(value, str)]
    _write_section(lines, "", content)
    return "\n".join(lines) + "\n"


def _write_section(lines: list[str], name: str, section: Content) -> None:
    leaves = {k: v for k, v in section.items() if isinstance(v, dict) and "source" in v}
    if name:
        lines += ["", f"[{name}]"]
    lines += [f"{_key(key)} = {_inline(leaf)}" for key, leaf in leaves.items()]
    for key, value in section.items():
        if isinstance(value, dict) and key not in leaves:
            _write_section(lines, f"{name}.{key}" if name else key, value)


def _key(key: str) -> str:
    return key if key.replace("_", "a").isalnum() else f'"{key}"'


def _inline(leaf: Leaf) -> str:
    parts = [f"{key} = {_value(value)}" for key, value in leaf.items()]
    return "{ " + ", ".join(parts) + " }"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return f"{value:.10g}" if isinstance(value, float) else str(value)
