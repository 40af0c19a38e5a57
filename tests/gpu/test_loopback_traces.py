"""Traces of ranks that stood alone: no file of a peer is missing, because there was no peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from real.trace import JsonlSink, Recorder, TraceError, read_traces, trace_path
from sim.diff import compare


def write(folder: Path, ranks: Sequence[int], *, world_size: int, peers: str | None) -> Path:
    """Writes a trace of one step a rank."""
    folder.mkdir(exist_ok=True)
    for rank in ranks:
        recorder = Recorder(JsonlSink(trace_path(folder, rank)))
        recorder.header(rank=rank, world_size=world_size, scenario={}, peers=peers)
        recorder.begin_step(0)
        recorder.close()
    return folder


def test_some_ranks_of_a_job_are_a_whole_trace(tmp_path: Path) -> None:
    """Each says in its header that it stood alone."""
    traces = read_traces(write(tmp_path / "a", [1, 700], world_size=1024, peers="loopback"))
    assert [(trace.rank, trace.peers) for trace in traces] == [(1, "loopback"), (700, "loopback")]


def test_a_rank_whose_peers_were_there_is_not_read_without_them(tmp_path: Path) -> None:
    """Nor beside one that stood alone."""
    folder = write(tmp_path / "a", [1], world_size=3, peers="loopback")
    write(folder, [0], world_size=3, peers=None)
    with pytest.raises(TraceError, match=r"expected the ranks 0 to 2, got \[0, 1\]"):
        read_traces(folder)


def test_a_header_of_a_whole_world_says_nothing_of_peers(tmp_path: Path) -> None:
    """Traces of before are read as they were."""
    folder = write(tmp_path / "a", [0], world_size=1, peers=None)
    assert '"peers"' not in trace_path(folder, 0).read_text()
    assert read_traces(folder)[0].peers is None


def test_runs_are_compared_in_the_ranks_that_both_have(tmp_path: Path) -> None:
    """The simulation has all of them."""
    simulated = read_traces(write(tmp_path / "a", range(4), world_size=4, peers=None))
    alone = read_traces(write(tmp_path / "b", [3], world_size=4, peers="loopback"))
    for pair in ((simulated, alone), (alone, simulated)):
        result = compare(*pair, is_canonical=True)
        assert result.is_equal
        assert (result.num_ranks, result.as_dict()["num_ranks"]) == (1, 1)


def test_runs_without_a_common_rank_are_refused(tmp_path: Path) -> None:
    """Nothing compared is not equal."""
    one = read_traces(write(tmp_path / "a", [0], world_size=4, peers="loopback"))
    other = read_traces(write(tmp_path / "b", [3], world_size=4, peers="loopback"))
    with pytest.raises(ValueError, match=r"that both runs have, got \[0\] and \[3\]"):
        compare(one, other, is_canonical=True)
