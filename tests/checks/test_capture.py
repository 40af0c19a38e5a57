"""What a capture may not do, told and played on the fake runtime."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from real.trace import MemorySink, Recorder, Trace
from sim.checks.capture import check_capture
from sim.cuda import FakeDevice, fake_cuda, use_device
from sim.cuda.kernels import KernelRecorder

Story = Callable[..., Trace]

FORKED = """
    2: capture begin
    2: record 5
    3: wait 5
    3: allocate 7 64
    3: mm -> 7
    {join}
    2: capture end
"""


def _messages(trace: Trace) -> list[str]:
    found = check_capture([trace])
    assert {v.rule for v in found} <= {"I19"}
    return [v.message for v in found]


@pytest.mark.parametrize("join", ["3: record 6\n2: wait 6", "2: wait stream 3"])
def test_a_forked_and_joined_stream_is_part_of_the_capture(story: Story, join: str) -> None:
    """What it allocates comes from the graph's pool."""
    assert _messages(story(FORKED.format(join=join))) == []


def test_a_stream_that_is_not_joined_is_found(story: Story) -> None:
    """CUDA ends such a capture with an error."""
    assert _messages(story(FORKED.format(join=""))) == [
        "Stream 3 is not joined before the capture ends."
    ]


@pytest.mark.parametrize(
    ("before", "inside", "message"),
    [
        (
            "",
            "4: allocate 8 64",
            (
                "64 bytes are allocated outside the graph's pool: Stream 4 takes no part in the "
                "capture."
            ),
        ),
        ("", "4: resize 8 64 0", None),
        ("", "2: allocate 8 64", None),
        (
            "4: record 9",
            "2: wait 9",
            "Stream 2 waits for an event that was recorded outside the capture, in record 1.",
        ),
        ("4: record 9", "4: wait 9", None),
        (
            "",
            "2: wait stream 4",
            "Stream 2 waits for Stream 4, which takes no part in the capture.",
        ),
        ("", "host waits device", "The host waits for work that is only being captured."),
        ("", "host waits stream 2", "The host waits for work that is only being captured."),
        (
            "name 8 layers.0:main gradient",
            "name 9 layers.0:main gradient",
            (
                "A gradient is bound to new memory inside the capture: replays write there and the "
                "optimizer reads elsewhere."
            ),
        ),
        ("name 8 layers.0:main gradient", "name 8 layers.0:main gradient", None),
    ],
)
def test_what_a_capture_may_not_do(
    story: Story, before: str, inside: str, message: str | None
) -> None:
    """Each has its good twin here or outside the capture."""
    trace = story(f"{before}\n2: capture begin\n{inside}\n2: capture end")
    assert _messages(trace) == ([message] if message else [])
    assert _messages(story(f"{before}\n{inside}\n2: capture begin\n2: capture end")) == []


def test_a_capture_ends_before_the_next_begins(story: Story) -> None:
    """And before the trace does."""
    assert _messages(story("2: capture begin")) == ["The capture never ends."]
    twice = "2: capture begin\n3: capture begin\n3: capture end"
    assert _messages(story(twice)) == ["A capture begins inside another one."]


def _recorded(body: Callable[[], object]) -> list[str]:
    sink = MemorySink()
    device = FakeDevice(0, Recorder(sink))
    with fake_cuda(), use_device(device), KernelRecorder(device):
        body()
    records = sink.records
    return _messages(Trace(rank=0, world_size=1, scenario={}, records=records, is_complete=True))


@pytest.mark.parametrize("is_joined", [True, False])
def test_a_body_on_two_streams_is_captured(is_joined: bool) -> None:
    """The body runs, so it has values, and its streams know that they are captured."""

    def body() -> None:
        weight, side = torch.ones(4, 4), torch.cuda.Stream()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            captured = torch.cuda.current_stream()
            assert torch.cuda.is_current_stream_capturing()
            assert not side.is_capturing()
            side.wait_stream(captured)
            with torch.cuda.stream(side):
                assert torch.cuda.is_current_stream_capturing()
                product = weight @ weight
            if is_joined:
                captured.wait_stream(side)
        assert not torch.cuda.is_current_stream_capturing()
        assert product[0, 0] == 4

    messages = _recorded(body)
    assert messages == ([] if is_joined else ["Stream 1 is not joined before the capture ends."])


def test_an_item_inside_a_capture_is_found() -> None:
    """The host would have to wait for a kernel that is not running."""

    def body() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(4).sum().item()

    assert _recorded(body) == ["The host waits for work that is only being captured."]


def test_a_replay_is_refused() -> None:
    """It would leave the values of the capture in place and look like a success."""
    with fake_cuda(), use_device(FakeDevice(0, Recorder())):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pass
        with pytest.raises(NotImplementedError, match=r"CUDAGraph\.replay is not part"):
            graph.replay()
        with pytest.raises(NotImplementedError, match=r"CUDAGraph\.debug_dump is not part"):
            graph.debug_dump("file")  # type: ignore[no-untyped-call]
