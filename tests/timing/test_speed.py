"""The engine stays fast: measured against a bare SimPy loop in the same process."""

from sim.bench.timing import figures, make_dag
from sim.timing.replay.engine import run_program


def test_an_operation_costs_no_more_than_a_few_bare_timeouts() -> None:
    found = {figure["unit"]: figure for figure in figures(((8, 2812),))}
    assert found["operations/s"]["ratio"] > 1 / 8
    assert found["s"]["peer_value"] == 0.15


def test_the_dag_of_the_bench_has_the_sizes_it_names() -> None:
    program = make_dag(8, 2812)
    assert abs(program.num_ops - 22_500) < 100
    assert run_program(program).end > 0
