"""Writes fixtures/broken: small traces with one known fault each, told as stories.

A folder's name begins with the one rule that a check must find broken in it, or with `unreadable`.
Run from the root of the repository, it replaces all of them:

    .venv/bin/python -m tests.checks.broken
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from real.trace import SCHEMA_VERSION, trace_path
from tests.checks.stories import story

FOLDER: Final = Path(__file__).parents[2] / "fixtures" / "broken"

COMBINED: Final[dict[str, Any]] = {
    "expert_model_parallel_size": 2,
    "num_microbatches": 2,
    "overlap_moe_expert_parallel_comm": True,
    "prefetch": "none",
}

_ROLES: Final = "role 0 compute\nrole 1 all-gather\nrole 2 reduce-scatter\nrole 3 communication"
_GATHER: Final = """
    name 7 decoder.layers.2:full weight
    node pre_dispatch_computation forward decoder.layers.2 0
    hook pre_forward decoder.layers.2
    1: resize 7 0 64
    1: all_gather of decoder.layers.2 6 -> 7
    1: record 5
    1: unshard decoder.layers.2
"""
_RELEASE: Final = "1: reshard decoder.layers.2\n1: resize 7 64 0"
_DECLARED: Final = """
    unit decoder.layers.2
    parameter decoder.layers.2.w of decoder.layers.2 x {fires}
    step begin 0
    node mlp backward decoder.layers.2 0
"""
_FIRE: Final = "hook post_gradient decoder.layers.2.w of decoder.layers.2"
_STEP_OF_TWO: Final = """
    name 7 decoder.layers.2:main gradient
    step begin 0
    node mlp backward decoder.layers.2 0
    2: reduce decoder.layers.2
    2: reduce_scatter of decoder.layers.2 6 -> 8
    2: copy_ 8 -> 7
    end mlp backward
    node mlp backward decoder.layers.2 1
    2: reduce decoder.layers.2
    2: reduce_scatter of decoder.layers.2 6 -> 9
    2: {second} 9 -> 7
    end mlp backward
"""

STORIES: Final[dict[str, str | Sequence[str]]] = {
    "I1-read-before-its-gather": f"{_ROLES}{_GATHER}\n0: mm 7 8 -> 9",
    "I1-asynchronous-gather-not-waited-for": f"""
        {_ROLES}
        name 7 decoder.layers.2:full weight
        node mlp forward decoder.layers.2 0
        0: async all_gather of decoder.layers.2 6 -> 7
        0: mm 7 8 -> 9
    """,
    "I2-gathered-twice": f"""
        1: unshard decoder.layers.2
        1: unshard decoder.layers.2
        {_RELEASE.splitlines()[0]}
    """,
    "I3-never-released": f"step begin 0\n{_GATHER}\n0: wait 5\n0: mm 7 8 -> 9\nstep end 0",
    "I3-bytes-never-released": """
        unit decoder.layers.2 bytes 64
        name 7 decoder.layers.2:full weight = 0
        step begin 0
        1: resize 7 0 64
        1: unshard decoder.layers.2
        1: reshard decoder.layers.2
        step end 0
    """,
    "I4-released-before-last-read": f"""
        {_ROLES}
        {_GATHER}
        0: wait 5
        0: mm 7 8 -> 9
        end pre_dispatch_computation forward
        {_RELEASE}
    """,
    "I5-one-gradient-too-many": f"""
        {_DECLARED.format(fires=1)}
        {_FIRE}
        {_FIRE}
        2: reduce decoder.layers.2
    """,
    "I5-reduced-before-the-second-gradient": f"""
        {_DECLARED.format(fires=2)}
        {_FIRE}
        2: reduce decoder.layers.2
    """,
    "I6-reduced-without-a-gradient": f"""
        {_DECLARED.format(fires=1)}
        {_FIRE}
        2: reduce decoder.layers.2
        gradients decoder.layers.2 present missing decoder.layers.2.w
    """,
    "I7-reduced-before-backward-dw": """
        unit decoder.layers.2
        parameter decoder.layers.2.w of decoder.layers.2 x 1 delayed
        node mlp backward decoder.layers.2 0
        hook pre_backward decoder.layers.2
        2: reduce decoder.layers.2
        end mlp backward
        node mlp wgrad decoder.layers.2 0
        end mlp wgrad
    """,
    "I8-norm-before-the-last-reduction": f"""
        {_ROLES}
        2: reduce_scatter of decoder.layers.2 6 -> 7
        0: grad_read
    """,
    "I8-asynchronous-reduction-not-waited-for": f"""
        {_ROLES}
        name 7 decoder.layers.2:main gradient
        2: async reduce_scatter of decoder.layers.2 6 -> 7
        0: wait stream 2
        0: norm 7 -> 9
    """,
    "I9-gathered-before-the-optimizer": f"""
        {_ROLES}
        0: optimizer
        1: all_gather of decoder.layers.2 6 -> 7
    """,
    "I10-given-out-while-another-stream-reads": f"""
        {_ROLES}
        0: allocate 7 64
        0: cast 6 -> 7
        3: wait stream 0
        3: all_to_all_single 7 -> 8
        free 7
        0: allocate 9 64
    """,
    "I11-two-units-in-another-order": [
        (
            "group dp 0 1\n"
            "1: all_gather of decoder.layers.0 6 -> 7\n1: all_gather of decoder.layers.1 8 -> 9"
        ),
        (
            "group dp 0 1\n"
            "1: all_gather of decoder.layers.1 8 -> 9\n1: all_gather of decoder.layers.0 6 -> 7"
        ),
    ],
    "I11-shards-of-another-size": [
        "group dp 0 1\n1: all_gather of decoder.layers.0 sized 64 bfloat16 6 -> 7",
        "group dp 0 1\n1: all_gather of decoder.layers.0 sized 32 bfloat16 6 -> 7",
    ],
    "I11-message-never-received": ["group pp 0 1\n0: send to 1 in pp 6", "group pp 0 1"],
    "I12-one-rank-calls-once-less": [
        "group dp 0 1\n0: all_reduce 6 -> 6\n0: all_reduce 6 -> 6",
        "group dp 0 1\n0: all_reduce 6 -> 6",
    ],
    "I13-the-last-microbatch-only": _STEP_OF_TWO.format(second="copy_"),
    "I14-experts-without-a-divisor": [
        "unit decoder.layers.2.mlp.experts ranks 0 divisor 1",
        "unit decoder.layers.2.mlp.experts ranks 1 divisor 2",
    ],
    "I15-expert-owned-by-its-layer": """
        unit decoder.layers.2
        unit decoder.layers.2.mlp.experts
        parameter decoder.layers.2.mlp.experts.w of decoder.layers.2 x 1
    """,
    "I16-installed-twice": "install 0\ninstall 0",
    "I16-a-hook-fires-twice": """
        node mlp forward decoder.layers.2 0
        hook pre_forward decoder.layers.2
        1: unshard decoder.layers.2
        hook pre_forward decoder.layers.2
        1: again decoder.layers.2
        1: reshard decoder.layers.2
    """,
    "I17-recomputed-forward-prefetches": """
        node mlp backward decoder.layers.1 0
        hook pre_forward decoder.layers.1 inside
        1: unshard decoder.layers.2
        end mlp backward
        1: reshard decoder.layers.2
    """,
    "I18-released-while-backward-needs-it": """
        1: unshard decoder.layers.2
        phase decoder.layers.2 resting > backward by use in backward
        1: reshard decoder.layers.2
        phase decoder.layers.2 backward > resting by end of backward
    """,
    "I18-profiler-range-left-open": "push unshard\nstep end 0",
    "I19-forked-stream-not-joined": f"""
        {_ROLES}
        0: capture begin
        2: wait stream 0
        2: mm 6 -> 7
        0: capture end
    """,
    "I19-waits-for-an-event-from-before": """
        1: record 5
        0: capture begin
        0: wait 5
        0: capture end
    """,
    "I20-four-units-at-once": "\n".join(f"1: unshard decoder.layers.{n}" for n in range(4)),
    "I21-gather-moves-the-version": "version decoder.layers.2 3\nversion decoder.layers.2 4",
}


def files_of(name: str) -> dict[Path, bytes]:
    """Returns the files of one folder, by path inside it."""
    told = STORIES[name]
    ranks = [told] if isinstance(told, str) else list(told)
    files = {}
    for rank, lines in enumerate(ranks):
        header = {
            "seq": 0,
            "op": "header",
            "schema": SCHEMA_VERSION,
            "rank": rank,
            "world_size": len(ranks),
            "scenario": COMBINED,
        }
        trace = story(lines, rank=rank, world_size=len(ranks), scenario=COMBINED)
        end = {"seq": len(trace.records) + 1, "op": "end", "records": len(trace.records) + 1}
        records = [header, *trace.records, end]
        content = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        files[trace_path(Path(), rank)] = content.encode("ascii")
    return files


def unreadable() -> dict[str, dict[Path, bytes]]:
    """Returns folders that hold no trace, by name."""
    path = trace_path(Path(), 0)
    good = files_of("I16-installed-twice")[path]
    lines = good.splitlines(keepends=True)
    newer = good.replace(b'"schema":%d' % SCHEMA_VERSION, b'"schema":%d' % (SCHEMA_VERSION + 1))
    two_ranks = good.replace(b'"world_size":1', b'"world_size":2')
    return {
        "unreadable-empty": {path: b""},
        "unreadable-headless": {path: b"".join(lines[1:])},
        "unreadable-newer-schema": {path: newer},
        "unreadable-garbage": {path: lines[0] + b"\x00\xff\n" + b"".join(lines[2:])},
        "unreadable-line-lost": {path: b"".join([lines[0], *lines[2:]])},
        "unreadable-unknown-operation": {path: good.replace(b'"op":"install"', b'"op":"instal"')},
        "unreadable-wait-for-nothing": {
            path: lines[0] + b'{"seq":1,"op":"event_wait","stream":0,"event":5,"record":77}\n'
        },
        "unreadable-rank-missing": {path: two_ranks},
    }


def main() -> None:
    """Replaces all folders."""
    for old in FOLDER.glob("*-*"):
        shutil.rmtree(old)
    for name, files in {**{n: files_of(n) for n in STORIES}, **unreadable()}.items():
        (FOLDER / name).mkdir(parents=True)
        for path, content in files.items():
            (FOLDER / name / path).write_bytes(content)


if __name__ == "__main__":
    main()
