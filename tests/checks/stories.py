"""Stories: small traces, one record a line, for checks that need no run.

Line n is record n. A line that begins with a number and a colon happens on that stream:

    0: mm 7 8 -> 9                     a kernel reads 7 and 8 and writes 9
    1: all_gather of layers.0 6 -> 7   a collective of a unit; `in tp` names another group than dp,
                                       `async all_gather` is one that somebody has to wait for,
                                       `sized 32 bfloat16` says bytes and element type
    0: send to 1 in pp 6               a message to rank 1; `recv from 1 in pp -> 6` takes one
    0: joins dp 3                      waits for collective 3 of group dp
    0: joins pp 0 send to 1            waits for message 0 to rank 1
    1: record 5 / 0: wait 5            event 5
    0: wait stream 1
    1: allocate 7 64 / 1: resize 7 64 0 / 0: record_stream 7
    0: optimizer / 0: grad_read / 0: fence
    1: unshard layers.0 / 1: again layers.0 / 1: reshard layers.0 / 1: reduce layers.0
    2: capture begin / 2: capture end

The others are the host's:

    host waits stream 1 / host waits event 5 / host waits device
    free 7 / name 7 layers.0:full weight / name 7 layers.0:full weight = 64
    group dp 0 1 / role 2 all-gather
    node mlp backward layers.2 1 / end mlp backward
    hook pre_forward layers.0          `of a` for another unit than the module, `inside` for one
                                       that runs inside a backward
    step begin 0 / push text / pop
    install 0 / remove 0
    unit layers.0                      `ranks 0 1`, `divisor 2`, `bytes 64` and `frozen` may follow
    parameter layers.0.w of layers.0 x 1      `delayed` and `named a b` may follow; ? for unknown
    phase layers.0 resting > forward by use in forward
    zero_fill layers.0.w of layers.0 / gradients layers.0 present a b missing c
    version layers.0 3

A unit in another model chunk than the first one is layers.0@1.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from real.trace import Trace
from real.trace.record import validate_record

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all_single", "broadcast")
_MESSAGES = ("send", "recv")

Fields = dict[str, Any]


def story(
    text: str = "", *, rank: int = 0, world_size: int = 1, scenario: Fields | None = None
) -> Trace:
    """Makes a trace of one rank from the lines of a text."""
    parser = _Parser()
    records = []
    for line in filter(None, map(str.strip, text.splitlines())):
        record = {"seq": len(records) + 1, **parser.parse(line, len(records) + 1)}
        record = _in_its_chunk(record)
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
        self._calls: Counter[tuple[str, ...]] = Counter()

    def parse(self, line: str, seq: int) -> Fields:
        stream, colon, rest = line.partition(": ")
        if colon and stream.isdecimal():
            return {"stream": int(stream), **self._on_stream(rest.split(), seq)}
        return self._on_host(line.split())

    def _on_stream(self, words: list[str], seq: int) -> Fields:
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
            case ["fence"]:
                return {"op": "fence"}
            case ["grad_read"]:
                return {"op": "grad_read", "by": "gradients"}
            case ["unshard" | "again" as how, unit]:
                return {"op": "unshard", "unit": unit, "gathered": how == "unshard"}
            case ["reshard", unit]:
                return {"op": "reshard", "unit": unit}
            case ["reduce", unit]:
                return {"op": "reduce", "unit": unit, "last": True, "zero_filled": 0}
            case ["capture", event]:
                return {"op": "capture", "event": event, "graph": 0}
            case ["joins", group, call]:
                return {"op": "collective_wait", "group": group, "n": int(call)}
            case ["joins", group, call, kind, _, peer]:
                return {
                    "op": "collective_wait",
                    "group": group,
                    "n": int(call),
                    "kind": kind,
                    "peer": int(peer),
                }
            case ["async", kind, *words] if kind in _COLLECTIVES:
                return self._collective(kind, words) | {"async": True}
            case [kind, *words] if kind in _COLLECTIVES:
                return self._collective(kind, words)
            case [kind, _, peer, *words] if kind in _MESSAGES:
                return self._collective(kind, words, peer=int(peer)) | {"async": True}
            case [name, *words]:
                return {"op": "kernel", "name": name, **_uses(words)}
        raise ValueError(f"Expected a story line, got {words}.")

    def _collective(self, kind: str, words: list[str], peer: int | None = None) -> Fields:
        unit, group, size, dtype = None, "dp", 64, "float32"
        while words and words[0] in ("of", "in", "sized"):
            preposition, name, *words = words
            if preposition == "of":
                unit = name
            elif preposition == "in":
                group = name
            else:
                size, dtype, words = int(name), words[0], words[1:]
        counted = (group,) if peer is None else (group, kind, str(peer))
        call = self._calls[counted]
        self._calls[counted] += 1
        return {
            "op": "collective",
            "group": group,
            "n": call,
            "kind": kind,
            "bytes": size,
            "dtype": dtype,
            "async": False,
            "unit": unit,
            **_uses(words),
            **({} if peer is None else {"peer": peer}),
        }

    def _on_host(self, words: list[str]) -> Fields:
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
            case ["name", storage, *name, "=", size]:
                return {**_name(storage, name), "bytes": int(size)}
            case ["name", storage, *name]:
                return _name(storage, name)
            case ["group", name, *ranks]:
                return {"op": "group", "group": name, "ranks": _numbers(ranks)}
            case ["role", stream, role]:
                return {"op": "stream_role", "stream": int(stream), "role": role}
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
            case ["step", event, step]:
                return {"op": "step", "step": int(step), "event": event}
            case ["push", text]:
                return {"op": "nvtx_push", "text": text}
            case ["pop"]:
                return {"op": "nvtx_pop"}
        return _of_hooks(words)


def _name(storage: str, words: list[str]) -> Fields:
    unit, _, kind = " ".join(words).partition(":")
    return {"op": "name", "storage": int(storage), "unit": unit, "kind": kind}


def _in_its_chunk(record: Fields) -> Fields:
    """Returns a record with the chunk that its unit's name ends in, as in layers.0@1."""
    name, at, chunk = str(record.get("unit")).partition("@")
    return {**record, "unit": name, "chunk": int(chunk)} if at else record


def _of_hooks(words: list[str]) -> Fields:
    match words:
        case ["hook", point, module, *rest]:
            unit = rest[1] if rest[:1] == ["of"] else module
            fields = {"op": "hook", "point": point, "module": module, "unit": unit}
            return {**fields, **({"in_backward": True} if "inside" in rest else {})}
        case ["install", model]:
            return {"op": "install", "model": int(model), "hooks": 1}
        case ["remove", model]:
            return {"op": "remove", "model": int(model)}
        case ["unit", unit, *rest]:
            return _unit("" if unit == "<root>" else unit, rest)
        case ["parameter", name, "of", unit, "x", fires, *rest]:
            return {
                "op": "parameter",
                "parameter": name,
                "unit": None if unit == "nobody" else unit,
                "fires": None if fires == "?" else int(fires),
                "delayed": "delayed" in rest,
                "names": rest[rest.index("named") + 1 :] if "named" in rest else [name],
                "shape": [4, 4],
                "dtype": "bfloat16",
            }
        case ["phase", unit, *rest]:
            before, _, rest_of_it = " ".join(rest).partition(" > ")
            after, _, event = rest_of_it.partition(" by ")
            return {"op": "phase", "unit": unit, "event": event, "before": before, "after": after}
        case ["zero_fill", parameter, "of", unit]:
            return {"op": "zero_fill", "unit": unit, "parameter": parameter}
        case ["gradients", unit, "present", *rest]:
            at = rest.index("missing") if "missing" in rest else len(rest)
            return {
                "op": "gradients",
                "unit": unit,
                "present": rest[:at],
                "missing": rest[at + 1 :],
            }
        case ["version", unit, version]:
            return {"op": "weight_version", "unit": unit, "version": int(version)}
    raise ValueError(f"Expected a story line, got {words}.")


def _unit(unit: str, words: list[str]) -> Fields:
    fields: Fields = {"op": "unit", "unit": unit, "parameters": 1, "trainable": 1, "bytes": 0}
    while words:
        match words:
            case ["frozen", *words]:
                fields["trainable"] = 0
            case ["divisor" | "bytes" as name, value, *words]:
                fields[name] = int(value)
            case ["ranks", *words]:
                numbers = list(itertools.takewhile(str.isdecimal, words))
                fields["ranks"], words = _numbers(numbers), words[len(numbers) :]
            case _:
                raise ValueError(f"Expected more of a unit, got {words}.")
    return fields


def _uses(words: list[str]) -> dict[str, list[int]]:
    arrow = words.index("->") if "->" in words else len(words)
    return {"reads": _numbers(words[:arrow]), "writes": _numbers(words[arrow + 1 :])}


def _numbers(words: Iterable[str]) -> list[int]:
    return [int(word) for word in words]
