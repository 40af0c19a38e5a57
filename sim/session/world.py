"""Assembles the world of ranks that all runs in one process share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from real.config import Scenario
from real.trace import Sink
from sim.faults import DelayRank, Fault
from sim.session.megatron import rank_state
from sim.session.options import Progress, no_progress
from sim.session.rank import RankPlan, run_rank
from sim.world import World

if TYPE_CHECKING:
    from real.output import JobOutput


@dataclass(frozen=True, kw_only=True)
class WorldOptions:
    """In which order ranks take turns, and what disturbs them; see `World`."""

    schedule_seed: int = 0
    faults: Sequence[Fault] = ()
    delays: Sequence[DelayRank] = ()
    switch_chance: float = 0.0
    replay: str = ""


UNDISTURBED: Final = WorldOptions()


def make_world(num_ranks: int, options: WorldOptions = UNDISTURBED) -> World:
    """Returns a world whose ranks have Megatron's globals for themselves.

    Megatron must be importable (`megatron_on_fake_cuda`).
    """
    return World(
        num_ranks,
        schedule_seed=options.schedule_seed,
        state=rank_state(),
        faults=options.faults,
        delays=options.delays,
        switch_chance=options.switch_chance,
        replay=options.replay,
    )


def train(
    world: World,
    scenario: Scenario,
    plan: RankPlan,
    *,
    sinks: Sequence[Sink | None],
    progress: Progress = no_progress,
) -> list[JobOutput]:
    """Trains a scenario on all ranks of a world, watched as its subject asks for.

    Raises:
        WorldError: A rank failed, the ranks do not agree, or a fault never came up.
    """

    def body(rank: int) -> JobOutput:
        shown = progress if rank == 0 else no_progress
        return run_rank(scenario, plan, rank, sink=sinks[rank], progress=shown)

    with plan.subject.watching():
        return world.run(body)
