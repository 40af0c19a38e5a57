"""Stories: small traces, one record a line, for checks that need no run.

Line n is record n. A line that begins with a number and a colon happens on that stream:

    0: mm 7 8 -> 9                     a kernel reads 7 and 8 and writes 9
    1: all_gather of layers.0 6 -> 7   a collective of a unit; `in tp` names another group than dp
    1: record 5 / 0: wait 5            event 5
    0: wait stream 1 / 0: joins dp 3   the latter waits for collective 3 of group dp
    1: allocate 7 64 / 1: resize 7 64 0 / 0: record_stream 7
    0: optimizer / 0: grad_read
    1: unshard layers.0 / 1: again layers.0 / 1: reshard layers.0 / 1: reduce layers.0

The others are the host's:

    host waits stream 1 / host waits event 5 / host waits device
    free 7 / name 7 layers.0:weights / group dp 0 1
    node mlp backward layers.2 1 / end mlp backward / hook pre_forward layers.0
    step begin 0 / push text / pop
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from real.trace import Trace
from real.trace.record import validate_record

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "send", "recv")


@pytest.fixture
def story() -> Callable[..., Trace]:
    """Makes a trace of one rank from the lines of a text."""
    return _story


def _story(
    text: str = "", *, rank: int = 0, world_size: int = 1, scenario: dict[str, Any] | None = None
) -> Trace:
    parser = _Parser()
    records = []
    for line in filter(None, map(str.strip, text.splitlines())):
        record = {"seq": len(records) + 1, **parser.parse(line, len(records) + 1)}
        validate_record(record)
        records.append(record)
    return Trace(
        rank=rank,
        world_size=world_size,
        scenario=scenario or {},
        records=records,
        is_complete=True,
    )


class _Parser:
    """Knows the newest record of each event and the number of calls of each group."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._calls: Counter[str] = Counter()

    def parse(self, line: str, seq: int) -> dict[str, Any]:
        stream, colon, rest = line.partition(": ")
        if colon and stream.isdecimal():
            return {"stream": int(stream), **self._on_stream(rest.split(), seq)}
        return self._on_host(line.split())

    def _on_stream(self, words: list[str], seq: int) -> dict[str, Any]:
        match words:
            case ["record", event]:
                self._newest[int(event)] = seq
                return {"op": "event_record", "event": int(event)}
            case ["wait", "stream", other]:
                return {"op": "stream_wait", "on": int(other)}
            case ["wait", event]:
                newest = self._newest.get(int(event))
                return {"op": "event_wait", "event": int(event), "record": newest}
            case ["allocate", storage, size]:
                return {"op": "allocate", "storage": int(storage), "bytes": int(size)}
            case ["resize", storage, was, size]:
                return {
                    "op": "resize",
                    "storage": int(storage),
                    "bytes": int(size),
                    "was": int(was),
                }
            case ["record_stream", storage]:
                return {"op": "record_stream", "storage": int(storage)}
            case ["optimizer"]:
                return {"op": "optimizer_step"}
            case ["grad_read"]:
                return {"op": "grad_read", "by": "gradients"}
            case ["unshard" | "again" as how, unit]:
                return {"op": "unshard", "unit": unit, "gathered": how == "unshard"}
            case ["reshard", unit]:
                return {"op": "reshard", "unit": unit}
            case ["reduce", unit]:
                return {"op": "reduce", "unit": unit, "last": True, "zero_filled": 0}
            case ["joins", group, call]:
                return {"op": "collective_wait", "group": group, "n": int(call)}
            case [kind, *words] if kind in _COLLECTIVES:
                return self._collective(kind, words)
            case [name, *words]:
                return {"op": "kernel", "name": name, **_uses(words)}
        raise ValueError(f"Expected a story line, got {words}.")

    def _collective(self, kind: str, words: list[str]) -> dict[str, Any]:
        unit, group = None, "dp"
        while words and words[0] in ("of", "in"):
            preposition, name, *words = words
            unit, group = (name, group) if preposition == "of" else (unit, name)
        call = self._calls[group]
        self._calls[group] += 1
        return {
            "op": "collective",
            "group": group,
            "n": call,
            "kind": kind,
            "bytes": 64,
            "dtype": "float32",
            "async": False,
            "unit": unit,
            **_uses(words),
        }

    def _on_host(self, words: list[str]) -> dict[str, Any]:
        match words:
            case ["host", "waits", "device"]:
                return {"op": "host_sync", "what": "device", "on": None}
            case ["host", "waits", "stream", stream]:
                return {"op": "host_sync", "what": "stream", "on": int(stream)}
            case ["host", "waits", "event", event]:
                newest = self._newest.get(int(event))
                return {"op": "host_sync", "what": "event", "on": newest}
            case ["free", storage]:
                return {"op": "free", "storage": int(storage)}
            case ["name", storage, name]:
                return {"op": "name", "storage": int(storage), "name": name}
            case ["group", name, *ranks]:
                return {"op": "group", "group": name, "ranks": _numbers(ranks)}
            case ["node", name, direction, layer, microbatch]:
                return {
                    "op": "node",
                    "name": name,
                    "direction": direction,
                    "layer": layer,
                    "microbatch": int(microbatch),
                    "chunk": 0,
                    "phase": None,
                    "stream": 0,
                }
            case ["end", name, direction]:
                return {"op": "node_end", "name": name, "direction": direction}
            case ["hook", point, module]:
                return {"op": "hook", "point": point, "module": module, "unit": module}
            case ["step", event, step]:
                return {"op": "step", "step": int(step), "event": event}
            case ["push", text]:
                return {"op": "nvtx_push", "text": text}
            case ["pop"]:
                return {"op": "nvtx_pop"}
        raise ValueError(f"Expected a story line, got {words}.")


def _uses(words: list[str]) -> dict[str, list[int]]:
    arrow = words.index("->") if "->" in words else len(words)
    return {"reads": _numbers(words[:arrow]), "writes": _numbers(words[arrow + 1 :])}


def _numbers(words: Iterable[str]) -> list[int]:
    return [int(word) for word in words]
