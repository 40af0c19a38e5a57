"""Compares predicted with measured step times and peak memory of a grid of configurations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from real.trace import Trace
from real.trace.recorder import Record
from sim.timing.costs.costfile import Cluster, Curve
from sim.timing.costs.model import CostModel
from sim.timing.replay.fold import replay_folded
from sim.timing.replay.memory import memory_timeline

PAIRS: Final = (
    ("no_fsdp_plain", "no_fsdp_combined"),
    ("mfsdp_plain", "mfsdp_combined"),
    ("mfsdp_combined", "mfsdp_combined_dw"),
)
"""Variants of one model whose order a prediction has to get right."""

SHARDING_CALLS: Final = ("unshard", "unshard_noop", "reshard", "reduce", "reduce_last", "hook")
"""Host costs that only a model under MFSDP has."""

PRICES: Final = {"host": 0.05, "sharding": 0.5, "matrix": 0.01, "memory": 0.5}
"""What it costs to move a factor away from 1, in squared relative errors of one configuration.

A calibration measures MFSDP's calls and single kernels well. Not so the speed of a host, which
drifts, and matrix products, which slow down when a whole step of them runs.
"""

DIFFERENCE: Final = 0.02
"""Relative difference of two measured step times from which their order counts."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One line of a measured grid.

    Attributes:
        config: Name of the model.
        variant: Name of the variant.
        step_ms: Median step time.
        peak_bytes: Most memory during a step, above what the idle job holds.
        world_size: Number of ranks; None for that of the model's file.
    """

    config: str
    variant: str
    step_ms: float
    peak_bytes: int
    world_size: int | None = None

    @property
    def name(self) -> str:
        """Model and variant."""
        return f"{self.config}:{self.variant}"

    @property
    def model(self) -> tuple[str, int | None]:
        """What its variants have in common."""
        return (self.config, self.world_size)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A measured configuration and what the model says of it.

    Attributes:
        measured: What was measured.
        step_ms: Predicted step time.
        peak_bytes: Predicted most memory during a step, above what the idle job holds.
        is_fitted: Whether the model was fitted to it.
    """

    measured: Measured
    step_ms: float
    peak_bytes: int
    is_fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the step time; above 0 when the prediction is too long."""
        return self.step_ms / self.measured.step_ms - 1.0

    @property
    def peak_error(self) -> float:
        """Relative error of the peak memory."""
        return self.peak_bytes / self.measured.peak_bytes - 1.0


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What is fitted to a few configurations: factors on parts of a cost file.

    Attributes:
        host: On every host cost.
        sharding: On the host costs of MFSDP's calls and our hooks, besides.
        matrix: On the speed of matrix products.
        memory: On the speed of all other kernels.
    """

    host: float = 1.0
    sharding: float = 1.0
    matrix: float = 1.0
    memory: float = 1.0

    def apply(self, cluster: Cluster) -> Cluster:
        """Returns the cluster with these factors."""
        scaled = cluster.scaled(host=self.host)
        sharding = {name: scaled.host[name] * self.sharding for name in SHARDING_CALLS}
        return replace(
            scaled,
            host={**scaled.host, **sharding},
            efficiency={
                name: _faster(curve, self.of(name)) for name, curve in cluster.efficiency.items()
            },
            kernel_efficiency={
                name: _faster(curve, self.of(name))
                for name, curve in cluster.kernel_efficiency.items()
            },
        )

    def of(self, name: str) -> float:
        """Returns the factor of a kernel or a class of kernels."""
        is_matrix = "gemm" in name or "matrix" in name or name.endswith("mm")
        return self.matrix if is_matrix else self.memory


def _faster(curve: Curve, factor: float) -> Curve:
    return replace(curve, values=tuple(min(value * factor, 1.0) for value in curve.values))


Traces = Callable[[Measured], Sequence[Trace]]
"""Returns the traces of a configuration, with kernels and their shapes."""


def predict(
    measured: Sequence[Measured],
    traces: Traces,
    cluster: Cluster,
    *,
    fitted: Sequence[str] = (),
) -> Iterator[Prediction]:
    """Yields a prediction for each configuration."""
    for one in measured:
        replay = replay_folded(traces(one), CostModel(cluster)).replay
        ranks = range(len(replay.times.ranks))
        # A later step begins with what the one before has left on the modules, and replaces it.
        peaks = (
            memory_timeline(replay, rank).peak_bytes - left_over(replay.records[rank])
            for rank in ranks
        )
        yield Prediction(
            measured=one,
            step_ms=replay.step_ns / 1e6,
            peak_bytes=max(peaks),
            is_fitted=one.name in fitted,
        )


def left_over(records: Sequence[Record]) -> int:
    """Returns the bytes that a step has allocated and not given back at its end."""
    sizes: dict[int, int] = {}
    for record in records:
        if record["op"] == "allocate":
            sizes[record["storage"]] = record["bytes"]
        elif record["op"] == "resize" and record["storage"] in sizes:
            sizes[record["storage"]] = record["bytes"]
        elif record["op"] == "free":
            sizes.pop(record["storage"], None)
    return sum(sizes.values())


def fit(
    measured: Sequence[Measured],
    traces: Traces,
    cluster: Cluster,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Factors:
    """Returns the factors with which the model comes closest to some configurations.

    One factor after another is moved by ever smaller steps, as long as that helps.
    """

    def loss(factors: Factors) -> float:
        changed = CostModel(factors.apply(cluster))
        errors = (
            math.log(replay_folded(traces(one), changed).replay.step_ns / 1e6 / one.step_ms)
            for one in measured
        )
        price = sum(PRICES[name] * math.log(value) ** 2 for name, value in vars(factors).items())
        return sum(error**2 for error in errors) + price

    best, least = Factors(), loss(Factors())
    for size in (1.2, 1.07, 1.025):
        has_moved = True
        while has_moved:
            has_moved = False
            for name in vars(best):
                for factor in (size, 1 / size):
                    trial = replace(best, **{name: getattr(best, name) * factor})
                    found = loss(trial)
                    progress(f"fit: {trial} {found:.5f}")
                    if found < least:
                        best, least, has_moved = trial, found, True
                        break
    return best


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How good predictions are, without the configurations that were fitted.

    Attributes:
        median_error: Median of the absolute relative errors of step times.
        worst_error: Largest of them.
        worst_peak_error: Largest absolute relative error of peak memory.
        num_pairs: Pairs of variants whose measured times differ by more than `DIFFERENCE`.
        num_right: Those of them of which the faster variant is predicted to be faster.
        wrong_pairs: The others.
    """

    median_error: float
    worst_error: float
    worst_peak_error: float
    num_pairs: int
    num_right: int
    wrong_pairs: tuple[str, ...]


def judge(predictions: Sequence[Prediction]) -> Verdict:
    """Sums predictions up."""
    fresh = [one for one in predictions if not one.is_fitted]
    errors = [abs(one.error) for one in fresh]
    by_name = {(one.measured.model, one.measured.variant): one for one in predictions}
    num_pairs, wrong = 0, []
    for model in dict.fromkeys(one.measured.model for one in predictions):
        for first, second in PAIRS:
            if (model, first) not in by_name or (model, second) not in by_name:
                continue
            left, right = by_name[model, first], by_name[model, second]
            measured = right.measured.step_ms / left.measured.step_ms - 1.0
            if abs(measured) > DIFFERENCE:
                num_pairs += 1
                if (right.step_ms > left.step_ms) != (measured > 0):
                    wrong.append(f"{model[0]}: {first} against {second}")
    return Verdict(
        median_error=statistics.median(errors),
        worst_error=max(errors),
        worst_peak_error=max(abs(one.peak_error) for one in fresh),
        num_pairs=num_pairs,
        num_right=num_pairs - len(wrong),
        wrong_pairs=tuple(wrong),
    )


def as_table(predictions: Sequence[Prediction], factors: Mapping[str, float]) -> str:
    """Returns predictions and verdict as text."""
    heading = (
        f"{'model':<24} {'variant':<18} {'measured':>9} {'predicted':>10} {'error':>7} "
        f"{'peak GiB':>9} {'predicted':>10} {'error':>7}"
    )
    lines = [heading]
    for one in predictions:
        measured = one.measured
        lines.append(
            f"{measured.config:<24} {measured.variant:<18} {measured.step_ms:>9.1f} "
            f"{one.step_ms:>10.1f} {one.error:>+7.1%} {measured.peak_bytes / 2**30:>9.2f} "
            f"{one.peak_bytes / 2**30:>10.2f} {one.peak_error:>+7.1%}"
            f"{'  fitted' if one.is_fitted else ''}"
        )
    verdict = judge(predictions)
    if factors:
        named = ", ".join(f"{name} {value:.3f}" for name, value in factors.items())
        lines.append(f"fitted factors: {named}")
    num_fresh = sum(not one.is_fitted for one in predictions)
    lines.append(
        f"step time of the {num_fresh} that were not fitted: median error "
        f"{verdict.median_error:.1%}, worst {verdict.worst_error:.1%}"
    )
    lines.append(f"peak memory: worst error {verdict.worst_peak_error:.1%}")
    lines.append(
        f"faster variant named right: {verdict.num_right} of {verdict.num_pairs} pairs that "
        f"differ by more than {DIFFERENCE:.0%}"
    )
    lines += [f"  wrong: {pair}" for pair in verdict.wrong_pairs]
    return "\n".join(lines)
