"""What is under test: our hooks, Megatron's own, or those of a tree that joins them itself."""

from real.targets.base import DEFAULT, Target, TargetError, check_target_name, find_target
from real.targets.identity import RELEASED, Hosted

__all__ = [
    "DEFAULT",
    "RELEASED",
    "Hosted",
    "Target",
    "TargetError",
    "check_target_name",
    "find_target",
]
