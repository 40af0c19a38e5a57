"""Runs a function in a forked copy of this process, on another core, while the caller goes on."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def can_fork() -> bool:
    """Tells whether a second core is there and the platform can fork."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return hasattr(os, "fork") and (num_cores or 1) > 1


class Aside:
    """A function on its way in a forked process.

    The copy starts with everything that is imported and swapped, so it costs no second start. Its
    result must be plain data and tensors; an exception is raised again by `result`.

    Args:
        function: What to run. Its side effects stay in the copy.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        # Nothing is ever written: its end is the end of this process.
        lifeline, write_end = os.pipe()
        self._lifeline: int | None = write_end
        not_ours = (self._receiver.fileno(), write_end)
        self._process = context.Process(
            target=_run, args=(function, sender, lifeline, not_ours), daemon=True
        )
        with warnings.catch_warnings(), _ctrl_c_later(self.stop):
            # torch keeps idle threads; the copy uses one thread and none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
            sender.close()
            os.close(lifeline)

    def fileno(self) -> int:
        """Returns what can be read when the result is there, for those who wait for several."""
        return self._receiver.fileno()

    def result(self) -> Any:
        """Waits and returns what the function returned.

        Raises:
            Exception: What the function raised.
            RuntimeError: The process died without an answer.
        """
        try:
            error, value = pickle.loads(self._receiver.recv_bytes())
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"Expected an answer of the forked process, got exit {self._process.exitcode}."
            ) from None
        self._process.join()
        if error is not None:
            raise error
        return value

    def stop(self) -> None:
        """Ends the process if it still runs."""
        self._process.kill()
        self._process.join()
        self._receiver.close()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


@contextmanager
def _ctrl_c_later(undo: Callable[[], None]) -> Iterator[None]:
    """Keeps ctrl-C for the end of the block, and then calls `undo` and raises.

    Python runs functions of its own right after a fork, and an exception in one of them is lost.
    """
    came: list[int] = []
    is_ours = threading.current_thread() is threading.main_thread() and callable(
        signal.getsignal(signal.SIGINT)
    )
    previous = signal.signal(signal.SIGINT, lambda *_: came.append(1)) if is_ours else None
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, previous)
    if came:
        undo()
        raise KeyboardInterrupt


def _run(
    function: Callable[[], Any], sender: Any, lifeline: int, not_ours: tuple[int, ...]
) -> None:
    for descriptor in not_ours:
        os.close(descriptor)
    # A fork copies the calling thread alone: a pool of workers would be waited for without end.
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_original, args=(lifeline,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the original, which calls stop()
    answer: tuple[Exception | None, Any]
    try:
        answer = (None, function())
    except Exception as error:  # noqa: BLE001 - it is raised again on the other side
        answer = (_sendable(error), None)
    sender.send_bytes(_dumps(answer))
    sender.close()
    os._exit(0)  # no clean-up of what belongs to the original process


def _exit_with_original(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the original process is gone
    os._exit(1)


class _Pickler(pickle.Pickler):
    """Sends the values of tensors; torch would share memory that ends with this process."""

    def reducer_override(self, value: Any) -> Any:
        """Says how a tensor is made again on the other side."""
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(_dumps(error))
    except Exception:  # noqa: BLE001 - anything may go wrong with a foreign exception
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
