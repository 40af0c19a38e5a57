"""A cost file made of measurements says again what was measured."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from real.config import Scenario
from real.trace import Trace
from sim.cli import main
from sim.timing.costs.costfile import Cluster, load_cluster
from sim.timing.costs.model import CostModel
from sim.timing.fit.accuracy import Factors, Measured, Prediction, fit, judge, predict
from sim.timing.fit.hostfit import least_squares
from sim.timing.fit.reconcile import SmallModel, reconcile
from sim.timing.fit.small import small_models, traces_of
from sim.timing.replay.fold import replay_folded


@pytest.fixture(scope="module")
def fitted(measurements: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The cost file that `sim fit` makes of the measurements."""
    folder = tmp_path_factory.mktemp("fit")
    (folder / "raw.json").write_text(json.dumps(measurements))
    assert main(["fit", str(folder / "raw.json"), "--out", str(folder / "costs.toml")]) == 0
    return load_cluster(str(folder / "costs.toml"))


@pytest.mark.slow
def test_kernels_and_links_cost_what_was_measured(
    fitted: Cluster, measurements: dict[str, Any]
) -> None:
    """Each point of a curve is there again, within its rounding."""
    model = CostModel(fitted)
    for entry in measurements["kernels"]:
        again = model.kernel_ns(entry["name"], entry["shapes"]) / 1e3
        assert again == pytest.approx(entry["us"], rel=0.02), entry
    placement = model.placement((0, 1))
    for entry in measurements["collectives"]:
        again = model.collective_ns(entry["kind"], entry["bytes"], placement) / 1e3
        assert again == pytest.approx(entry["us"], rel=0.12, abs=0.5), entry
    assert fitted.compute_slowdown == pytest.approx(1.1)
    assert fitted.communication_slowdown == pytest.approx(1.2)
    assert fitted.is_measured()


@pytest.mark.slow
def test_host_costs_are_found_again(fitted: Cluster, measurements: dict[str, Any]) -> None:
    """Units, hooks and autograd's kernels, and what is left of each node."""
    host, calls = fitted.host, measurements["calls"]
    assert host["kernel"] == pytest.approx(1e3 * calls["kernel_new"])
    assert host["nvtx"] == pytest.approx(500 * calls["nvtx_push_pop"])
    assert host["unshard"] == pytest.approx(200e3, rel=0.02)
    assert host["reduce"] == pytest.approx(700e3, rel=0.02)
    assert host["reduce_last"] == pytest.approx(900e3, rel=0.02)
    assert host["hook"] == pytest.approx(12e3, rel=0.1)
    assert host["kernel_backward"] == pytest.approx(3e3, rel=0.1)
    assert fitted.host_node["mlp forward"] == pytest.approx(50e3, rel=0.05)
    assert fitted.host_node["mlp backward"] == pytest.approx(50e3, rel=0.2)
    for first in ("pre_process forward", "model backward"):
        assert fitted.host_node[first] == pytest.approx(450e3, rel=0.1)


@pytest.mark.slow
def test_whole_steps_of_small_models_come_out_as_measured(
    measurements: dict[str, Any], tmp_path: Path
) -> None:
    """Nodes that were timed too short, by a watch that was started late, are scaled up."""
    late = copy.deepcopy(measurements)
    for variants in late["nodes"].values():
        for part in variants["no_fsdp_combined"]["parts"].values():
            part["own_us"] *= 0.8
    (tmp_path / "raw.json").write_text(json.dumps(late))
    out = tmp_path / "costs.toml"
    assert main(["fit", str(tmp_path / "raw.json"), "--out", str(out)]) == 0
    costs = CostModel(load_cluster(str(out)))
    found = small_models(late, Scenario(**late["small"]))
    variants = ["no_fsdp_plain", "no_fsdp_combined", "mfsdp_combined"]
    assert sorted({model.variant for model in found.models}) == sorted(variants)
    for model in found.models:
        step_ns = replay_folded(model.traces, costs).replay.step_ns
        assert step_ns == pytest.approx(model.step_ns, rel=0.02), model.variant
    assert "for whole steps of small models" in out.read_text()


@pytest.mark.slow
def test_costs_that_no_factor_can_mend_stay_as_they_are(
    small: Scenario, published: Cluster
) -> None:
    """A step of another machine, or of another model, says nothing about a node."""
    traces = traces_of(small, "no_fsdp_combined")
    content = {"host": {"nodes": {"mlp forward": {"value": 5000, "source": "measured"}}}}
    for step_ns in (1.0, 1e12):
        before = copy.deepcopy(content)
        model = SmallModel(variant="no_fsdp_combined", traces=traces, step_ns=step_ns)
        reconcile(content, published.changed(host_node={"mlp forward": 5000.0}), [model])
        assert content == before


def test_factors_in_a_file_are_those_in_a_model() -> None:
    """The file that comes with the project holds the factors; a fit applies them in memory."""
    import tomllib

    from sim.commands.common import FIXTURES
    from sim.timing.fit.measured import apply_factors, to_toml

    factors = Factors(host=1.1, sharding=0.9, matrix=0.8, memory=1.2)
    path = FIXTURES / "costs" / "h200.toml"
    content = tomllib.loads(path.read_text())
    apply_factors(content, factors)
    written = tomllib.loads(to_toml(content, "a machine"))
    applied = factors.apply(load_cluster("h200"))
    assert written["host"]["reduce"]["value"] == pytest.approx(applied.host["reduce"], rel=1e-3)
    assert written["host"]["kernel"]["value"] == pytest.approx(applied.host["kernel"], rel=1e-3)
    for kind in ("matrix", "copy"):
        assert written["efficiency"][kind]["values"] == pytest.approx(
            applied.efficiency[kind].values, rel=1e-3
        )
    assert "fitted" in written["host"]["kernel"]["source"]


def test_least_squares_leaves_out_what_would_be_negative() -> None:
    """A cost below zero would make a longer trace faster."""
    import numpy as np

    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert least_squares(matrix, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0], abs=1e-6)
    falling = least_squares(matrix, np.array([3.0, 2.0, 1.0]))
    assert falling == pytest.approx([2.0, 0.0], abs=1e-6)


@pytest.mark.slow
def test_fit_finds_the_factor_of_a_slower_host(small: Scenario, published: Cluster) -> None:
    """Two configurations are enough for one factor, and the others are predicted."""
    known: dict[str, list[Trace]] = {}

    def traces(one: Measured) -> list[Trace]:
        if one.variant not in known:
            known[one.variant] = traces_of(small, one.variant)
        return known[one.variant]

    truth = Factors(host=1.2).apply(published)
    names = ("no_fsdp_plain", "no_fsdp_combined", "mfsdp_combined")
    blank = [Measured(config="m", variant=name, step_ms=1.0, peak_bytes=1) for name in names]
    measured = [
        Measured(config="m", variant=p.measured.variant, step_ms=p.step_ms, peak_bytes=p.peak_bytes)
        for p in predict(blank, traces, truth)
    ]
    factors = fit(measured[:2], traces, published)
    assert factors.host == pytest.approx(1.2, rel=0.03)
    predictions = list(
        predict(measured, traces, factors.apply(published), fitted=[m.name for m in measured[:2]])
    )
    verdict = judge(predictions)
    assert verdict.worst_error < 0.03
    assert verdict.worst_peak_error == 0
    assert verdict.num_right == verdict.num_pairs


def test_a_verdict_counts_wrong_orders_and_leaves_fitted_ones_out() -> None:
    """The better schedule named wrong is worse than a step time that is off."""

    def one(variant: str, measured: float, predicted: float, *, is_fitted: bool) -> Prediction:
        return Prediction(
            measured=Measured(config="m", variant=variant, step_ms=measured, peak_bytes=100),
            step_ms=predicted,
            peak_bytes=104,
            is_fitted=is_fitted,
        )

    verdict = judge(
        [
            one("no_fsdp_plain", 100.0, 104.0, is_fitted=False),
            one("no_fsdp_combined", 110.0, 103.0, is_fitted=False),
            one("mfsdp_plain", 100.0, 200.0, is_fitted=True),
            one("mfsdp_combined", 101.0, 99.0, is_fitted=False),
        ]
    )
    assert verdict.num_pairs == 1
    assert verdict.wrong_pairs == ("m: no_fsdp_plain against no_fsdp_combined",)
    assert verdict.worst_error == pytest.approx(7 / 110)
    assert verdict.worst_peak_error == pytest.approx(0.04)
