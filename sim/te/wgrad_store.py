"""Queue of weight gradients that the backward has put off.

Source: transformer_engine 2.17.1, `pytorch/module/_common.py`.
"""

import queue
from collections.abc import Callable, Sequence

import torch

from sim.te.refusal import refuse_if

TensorList = Sequence[object]
WeightGradient = Callable[..., tuple[object, ...]]


class WeightGradStore:
    """First in, first out: several microbatches may be between `backward` and `backward_dw`.

    An entry is the list of tensors that the weight gradient reads, and the function that computes
    it. The tensors stay alive until the entry is popped; the weight is not among them.
    """

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        """Makes a queue when `delay_wgrad_compute`, else a disabled store without one."""
        refuse_if(delay_wgrad_compute and ub_bulk_wgrad, "delayed wgrad with userbuffers")
        self.context: queue.Queue[tuple[TensorList, WeightGradient]] | None = (
            queue.Queue() if delay_wgrad_compute else None
        )
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        """Returns whether the backward puts weight gradients here."""
        return self.enabled

    def enable_delay_wgrad_compute(self) -> None:
        """Lets the next backward put its weight gradient here."""
        self.enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        """Lets the next backward compute its weight gradient itself."""
        self.enabled = False

    def put(self, tensor_list: TensorList, func: WeightGradient) -> None:
        """Appends an entry.

        Raises:
            RuntimeError: the store is disabled.
        """
        self._enabled_queue().put((tensor_list, func))

    def pop(self) -> tuple[tuple[object, ...], TensorList]:
        """Computes the oldest entry; returns (its result, its tensors).

        Raises:
            RuntimeError: the store is disabled, or nothing was put.
        """
        context = self._enabled_queue()
        if context.empty():
            raise RuntimeError(f"Pop empty queue. {_whereabouts()}")
        tensor_list, func = context.get()
        return func(*tensor_list), tensor_list

    def assert_empty(self) -> None:
        """Checks that every put was popped.

        Raises:
            RuntimeError: the store is disabled, or entries are left.
        """
        if not self._enabled_queue().empty():
            raise RuntimeError(f"Queue is not empty. {_whereabouts()}")

    def _enabled_queue(self) -> "queue.Queue[tuple[TensorList, WeightGradient]]":
        if not self.enabled or self.context is None:
            raise RuntimeError("delay_wgrad_compute is not enabled.")
        return self.context


def _whereabouts() -> str:
    if torch.distributed.is_initialized():
        return f"rank {torch.distributed.get_rank()}."
    return "No distributed environment detected."
