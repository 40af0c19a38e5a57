"""Cases of group E: gradient accumulation and `no_sync`."""

from __future__ import annotations

from typing import Final

from sim.cases import faults_e as faults
from sim.cases.base import Case, Shown
from sim.cases.ordering import OVERLAP
from sim.cases.worlds import clean, run_ranks, run_scenario

CASES: Final[tuple[Case, ...]] = (
    Case(
        id="E1",
        source="https://github.com/NVIDIA/Megatron-LM/pull/7186",
        title="Only the last microbatch's gradient survives under hybrid data parallelism.",
        rules=("I13",),
        unit="decoder.layers.0",
        shown=Shown.SCENARIO,
        defect="no_sync() does nothing: each backward finishes the window and clears it",
        twin="no_sync() marks every backward but the last",
        faulty=lambda: run_scenario(faults.HYBRID, defect=faults.every_backward_is_last),
        correct=lambda: list(clean(faults.HYBRID)),
    ),
    Case(
        id="E2",
        source="https://github.com/NVIDIA/Megatron-LM/issues/6660",
        title="Gradients double with each microbatch when a group has one rank.",
        rules=("I13",),
        unit="decoder.layers.0.mlp.experts",
        shown=Shown.SCENARIO,
        defect="with as many expert-parallel as data-parallel ranks, an accumulator adds itself",
        twin="a reduction in a group of one copies",
        faulty=lambda: run_scenario(faults.THREE, defect=faults.group_of_one_adds_to_itself),
        correct=lambda: list(clean(faults.THREE)),
    ),
    Case(
        id="E4",
        source="https://github.com/microsoft/DeepSpeed/issues/6793",
        title="no_sync() with partitioned gradients.",
        rules=("I5",),
        unit="decoder.layers.0",
        shown=Shown.KERNEL,
        defect="no_sync() leaves the reductions of a microbatch out",
        twin="each microbatch is reduced",
        faulty=lambda: faults.judged(faults.window(defect=faults.no_reduction_in_no_sync)),
        correct=lambda: faults.judged(faults.window()),
    ),
    Case(
        id="E6",
        source="baidu-baige/LoongForge#163",
        title="no_sync() around the backward alone, where the decision is taken in forward.",
        rules=("I13",),
        unit="decoder.layers.0",
        shown=Shown.KERNEL,
        defect="the flag is read in forward",
        twin="it is read at the reduction",
        faulty=lambda: faults.judged(
            faults.window(
                num_outer=2, defect=faults.decided_in_forward, drive=faults.no_sync_around_backward
            )
        ),
        correct=lambda: faults.judged(
            faults.window(num_outer=2, drive=faults.no_sync_around_backward)
        ),
    ),
    Case(
        id="E7",
        source="https://github.com/pytorch/pytorch/pull/134052",
        title="The last backward is found by counting calls, and a split backward makes two.",
        rules=("I13",),
        unit="decoder.layers.0",
        shown=Shown.KERNEL,
        defect="call number N - 1 is taken as the last",
        twin="the schedule says which microbatch is the last",
        faulty=lambda: faults.judged(faults.window(num_outer=2, defect=faults.calls_are_counted)),
        correct=lambda: faults.judged(faults.window(num_outer=2)),
    ),
    Case(
        id="E9",
        source="https://github.com/pytorch/pytorch/issues/196640",
        title="FSDP's finaliser releases a stage that the pipeline runtime takes as gathered.",
        rules=("I1",),
        unit="decoder.layers.0",
        shown=Shown.KERNEL,
        defect="the runtime keeps a record of its own and is not told",
        twin="the finaliser tells it",
        faulty=lambda: run_ranks(2, faults.outer_accumulation(tells=False)).violations(),
        correct=lambda: run_ranks(2, faults.outer_accumulation(tells=True)).violations(),
    ),
    Case(
        id="E11",
        source="https://github.com/pytorch/pytorch/issues/165106",
        title="A wait for each reduction inside the pipeline step exposes it.",
        rules=(OVERLAP,),
        unit="decoder.layers.1",
        shown=Shown.KERNEL,
        defect="the compute stream waits right after each launch",
        twin="it waits at the end of the window",
        faulty=lambda: faults.exposed(faults.step_waits_for_each_reduction),
        correct=lambda: faults.exposed(),
    ),
    Case(
        id="E12",
        source="https://github.com/pytorch/pytorch/issues/160320",
        title="no_sync() keeps full gradients, and memory runs out.",
        rules=("I20",),
        unit="decoder.layers.1",
        shown=Shown.KERNEL,
        defect="no_sync() leaves reductions out, so the gradients of all units stay",
        twin="each unit's gradients go when it is complete",
        faulty=lambda: faults.kept(faults.gradients_named_and_kept),
        correct=lambda: faults.kept(faults.gradients_named),
    ),
    Case(
        id="E15",
        source="https://github.com/NVIDIA/Megatron-LM/pull/7112",
        title="One flag for the last microbatch is shared by virtual pipeline chunks.",
        rules=("I13",),
        unit="decoder.layers.1",
        shown=Shown.KERNEL,
        defect="the chunk that ends first is never told that a backward is its last",
        twin="each chunk has its own flag",
        faulty=faults.two_chunks(share_flag=True),
        correct=faults.two_chunks(share_flag=False),
    ),
    Case(
        id="E16",
        source="https://github.com/NVIDIA/Megatron-LM/pull/7112",
        title="Recipes with one microbatch never run a forward against a backward.",
        rules=("coverage",),
        unit=None,
        shown=Shown.SCENARIO,
        defect="one microbatch",
        twin="three",
        faulty=lambda: faults.covered(1),
        correct=lambda: faults.covered(3),
    ),
)
