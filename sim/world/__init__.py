"""Many ranks in one process: deterministic order, real data, loud mismatches."""

from sim.faults import Fault, SkipCollective, SwapCollectives
from sim.world.errors import ErrorKind, MismatchError, WorldError
from sim.world.process_group import init_process_group
from sim.world.state import RankState, torch_state
from sim.world.world import World, current_world

__all__ = [
    "ErrorKind",
    "Fault",
    "MismatchError",
    "RankState",
    "SkipCollective",
    "SwapCollectives",
    "World",
    "WorldError",
    "current_world",
    "init_process_group",
    "torch_state",
]
