"""Cost files say where every number is from, and what is wrong with them in one line."""

from pathlib import Path

import pytest

from sim.timing.costs.costfile import COSTS, CostError, Curve, cluster_names, load_cluster


@pytest.mark.parametrize("name", cluster_names())
def test_cost_files_name_a_source_for_each_number(name: str) -> None:
    cluster = load_cluster(name)
    words = ("measured", "published", "assumed", "counted")
    assert all(source.split(":")[0].split()[0] in words for source in cluster.sources.values())
    assert len(cluster.sources) >= 50


def changed(tmp_path: Path, old: str, new: str) -> str:
    text = (COSTS / "h100.toml").read_text()
    assert text.count(old) == 1, old
    path = tmp_path / "own.toml"
    path.write_text(text.replace(old, new))
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bandwidth_gbs =", "memory_bandwith_gbs =",
         "expected device.memory_bandwidth_gbs, got none. Did you mean 'memory_bandwith_gbs'?"),
        ("ranks_per_node = { value = 8", "ranks_per_node = { value = -8",
         "expected a number of 1 or more for topology.ranks_per_node, got -8."),
        ("ranks_per_node = { value = 8", "ranks_per_node = { value = nan",
         "expected a number of 1 or more for topology.ranks_per_node, got nan."),
        ("ranks_per_node = { value = 8, source", "ranks_per_node = { value = 8, sauce",
         "expected value, source for topology.ranks_per_node"),
        ("[host.nodes]", "[host.nodes]\n\"mlp forward\" = { value = -1, source = \"x\" }",
         "expected a number of 0 or more for host.nodes.mlp forward, got -1."),
        ("[topology]", "[topology]\nrank_per_node = 3",
         "expected a known key, got 'topology.rank_per_node'. Did you mean 'ranks_per_node'?"),
        ("[topology]", "[topolgy]\n[topology]", "expected a known key, got 'topolgy'."),
        ("[topology]", "[[topology]]", "expected a section [topology], got"),
        ("kernel_floor_ns = { value = 2500", "kernel_floor_ns = { value = \"2500\"",
         "expected a number of 0 or more for device.kernel_floor_ns, got '2500'."),
        ("grouped_matrix = { sizes = [1e7", "grouped_matrix = { sizes = [1e13",
         "expected one value for each of growing sizes above 0 for efficiency.grouped_matrix"),
        ("values = [0.005", "values = [1.5",
         "expected values above 0 and at most 1 for efficiency.matrix"),
        ("[error]", "[error", "expected TOML, got"),
    ],
)  # fmt: skip
def test_a_bad_cost_file_is_told_in_one_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(CostError) as caught:
        load_cluster(changed(tmp_path, old, new))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_cluster_names_the_known_ones() -> None:
    with pytest.raises(CostError, match=r"one of b200, h100, .*; got 'h10'. Did you mean 'h100'"):
        load_cluster("h10")


def test_a_missing_file_is_told() -> None:
    with pytest.raises(CostError, match="cannot read the cost file: No such file"):
        load_cluster("nowhere.toml")


def test_a_curve_is_linear_over_the_logarithm_of_the_size() -> None:
    curve = Curve(sizes=(1e2, 1e4), values=(0.2, 0.6))
    assert [curve.at(size) for size in (1, 1e2, 1e4, 1e9)] == [0.2, 0.2, 0.6, 0.6]
    assert curve.at(1e3) == pytest.approx(0.4)
