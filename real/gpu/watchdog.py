"""Ends a rank that makes no progress, after it has said where it stands.

A thread of its own waits for the next sign of progress. When none comes in time it writes the last
records and the stacks of all threads to a file of this rank and to standard error, and ends the
process with status 1, so that the launcher ends the others.

[Note: a thread that never runs]
Code that hangs inside a library may hold Python's lock, and then no other Python thread runs. So a
timer of `faulthandler`, which needs no lock, is set a little later: it writes the stacks to the
same file and ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from real.gpu.calls import noted_collectives
from real.trace import OpKind, Recorder, recording
from real.trace.recent import RecentSink, record_text

_STDERR: Final = 2
_SPARE_S: Final = 5.0
"""How much later the timer that needs no Python fires."""


class Watchdog:
    """Watches the progress of this process; `start` and `stop` once each.

    Args:
        rank: This rank.
        timeout_s: Seconds without progress after which the process ends.
        path: The file of the report; it is removed when there is nothing to report.
        recent: Holds the last records.
    """

    def __init__(self, *, rank: int, timeout_s: float, path: Path, recent: RecentSink) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._path = path
        self._recent = recent
        self._last = "start"
        self._deadline = 0.0
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Opens the report and begins to watch."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w")
        self.progress(self._last)
        self._thread.start()

    def progress(self, what: str) -> None:
        """Notes that something has ended, and gives the process the whole time again."""
        self._last = what
        self._deadline = time.monotonic() + self._timeout_s
        # [Note: a thread that never runs]
        faulthandler.dump_traceback_later(
            self._timeout_s + _SPARE_S, exit=True, file=self._file.fileno()
        )

    def stop(self) -> None:
        """Ends the watch and removes the empty report."""
        faulthandler.cancel_dump_traceback_later()
        self._has_stopped.set()
        self._thread.join()
        self._file.close()
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # another rank's report is there, or the last rank was quicker
            self._path.parent.rmdir()

    def _watch(self) -> None:
        while not self._has_stopped.wait(max(0.0, self._deadline - time.monotonic())):
            if time.monotonic() >= self._deadline:
                self._report()
                os._exit(1)

    def _report(self) -> None:
        head = (
            f"real: rank {self._rank} made no progress for {self._timeout_s:g} s after "
            f"{self._last}.\n"
        )
        standing = "".join(f"{line}\n" for line in standing_lines(self._rank, self._recent))
        records = "".join(f"  {line}\n" for line in self._recent.lines())
        self._file.write(f"{head}{standing}last records:\n{records}")
        self._file.flush()
        faulthandler.dump_traceback(file=self._file, all_threads=True)
        # Ranks share standard error: one write each, so that they do not mix.
        os.write(_STDERR, f"{head}{standing}see {self._path}\n".encode())


def standing_lines(rank: int, recent: RecentSink) -> list[str]:
    """Returns where a rank stands: its newest collective, node, hook and unit."""
    named = {
        "collective": OpKind.COLLECTIVE,
        "node": OpKind.NODE,
        "hook": OpKind.HOOK,
        "unshard": OpKind.UNSHARD,
        "reduce": OpKind.REDUCE,
    }
    lines = []
    for label, op in named.items():
        record = recent.newest(op)
        if record is not None:
            lines.append(f"  rank {rank}, last {label}: {record_text(record)}")
    return lines or [f"  rank {rank}: no record yet"]


@contextmanager
def watched(
    *, timeout_s: float, folder: Path, has_records: bool = True
) -> Iterator[Callable[[str], None]]:
    """Watches this rank for the length of the block; yields what to call at each progress.

    A failure inside goes on with a note of where the rank stood.

    Args:
        timeout_s: Seconds without progress after which the process ends; 0 for no watch.
        folder: Where the report of each rank goes.
        has_records: Keep the last records, and note collectives for them; else stacks only.
    """
    if not timeout_s:
        yield lambda _: None
        return
    rank = int(os.environ.get("RANK", "0"))
    recent = RecentSink()
    watchdog = Watchdog(
        rank=rank, timeout_s=timeout_s, path=folder / f"rank{rank:04d}.txt", recent=recent
    )
    with ExitStack() as stack:
        if has_records:
            stack.enter_context(recording(Recorder(recent)))
            stack.enter_context(noted_collectives())
        watchdog.start()
        stack.callback(watchdog.stop)
        try:
            yield watchdog.progress
        except Exception as error:
            error.add_note("\n".join(standing_lines(rank, recent)))
            raise
