"""Which stream was current when a parameter's gradient accumulator was made.

[Note: the stream of an accumulator]
Torch makes the node that accumulates into a parameter at the parameter's first use in a graph, and
on a GPU runs it on the stream that was current then. The node carries no number of its own, but
whatever used the parameter first does: the smallest number among the nodes that lead to it. They
are found by a walk from where the running backward began, at the first question of that backward.
An accumulator that an older graph keeps alive counts here as made by the running graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

ACCUMULATOR_SEQUENCE: Final = 2**64 - 1
"""What torch gives as number of every accumulator."""

_engine = torch.autograd.Variable._execution_engine


class GraphTask:
    """One call of backward on its way.

    Args:
        outputs: The tensors, or gradient edges, that it began with.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self._outputs = outputs
        self._first_use: dict[Any, int] | None = None

    def first_use(self, accumulator: object) -> int | None:
        """Returns the number of the first node that used an accumulator's parameter, or None."""
        if self._first_use is None:
            self._first_use = _first_uses(self._outputs)
        return self._first_use.get(accumulator)


def _first_uses(outputs: Sequence[Any]) -> dict[Any, int]:
    """Walks a graph and returns the smallest number among the users of each accumulator."""
    first: dict[Any, int] = {}
    roots = (
        getattr(output, "node", None) or getattr(output, "grad_fn", None) for output in outputs
    )
    pending = [root for root in roots if root is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        sequence = node._sequence_nr()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following._sequence_nr() == ACCUMULATOR_SEQUENCE:
                first[following] = min(sequence, first.get(following, sequence))
            elif following not in seen:
                seen.add(following)
                pending.append(following)
    return first


class Engine:
    """Stands for torch's autograd engine: remembers what each backward began with."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a backward; its first argument is also called `tensors`."""
        from sim.cuda.device import find_device

        device = find_device()
        if device is None:
            return _engine.run_backward(*args, **kwargs)
        device.graph_tasks.append(GraphTask(args[0] if args else kwargs["tensors"]))
        try:
            return _engine.run_backward(*args, **kwargs)
        finally:
            device.graph_tasks.pop()

    def __getattr__(self, name: str) -> Any:
        return getattr(_engine, name)
