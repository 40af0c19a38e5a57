"""Notes every collective in the active recorder by group and number, and nothing more.

This is what a report about a hang needs. It asks nothing of the device, so it runs on any backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch.distributed as dist

from real.gpu.communication import COLLECTIVES
from real.trace import OpKind, active_recorder

_MISSING: Final = object()


@contextmanager
def noted_collectives() -> Iterator[None]:
    """Wraps the methods of torch's process groups for the length of the block.

    Calls on a group are numbered from 0 in host order; the ranks of a group agree on the numbers
    as long as they agree on the calls.
    """
    numbers: Counter[str] = Counter()
    ranks: dict[str, list[int]] = {}
    owner: Any = dist.ProcessGroup
    # What the class itself has, not what it inherits: that is what has to come back.
    saved = {name: vars(owner).get(name, _MISSING) for name in COLLECTIVES if hasattr(owner, name)}
    try:
        for name in saved:
            setattr(
                owner, name, _noted(getattr(owner, name), COLLECTIVES[name].kind, numbers, ranks)
            )
        yield
    finally:
        for name, original in saved.items():
            if original is not _MISSING:
                setattr(owner, name, original)
            elif name in vars(owner):
                delattr(owner, name)


def _noted(
    original: Any, kind: str, numbers: Counter[str], ranks: dict[str, list[int]]
) -> Callable[..., Any]:
    def issue(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = str(self.group_name)
        if group not in ranks:
            ranks[group] = dist.get_process_group_ranks(self)
        recorder = active_recorder()
        recorder.record(
            OpKind.COLLECTIVE,
            group=group,
            n=numbers[group],
            kind=kind,
            unit=recorder.unit,
            ranks=ranks[group],
        )
        numbers[group] += 1
        return original(self, *args, **kwargs)

    return issue
