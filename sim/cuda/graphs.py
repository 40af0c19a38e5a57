"""Graph capture with torch.cuda's own names: it is recorded, and the body runs as it always does.

On a GPU the body of a capture only writes down what a replay will do. Here it runs, so that code
under test gets values, and the trace says what was inside. A check judges whether a GPU would have
taken it; a replay has nothing to repeat and is refused.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

from real.trace import OpKind
from sim.cuda.device import FakeDevice, active_device
from sim.cuda.runtime import synchronize
from sim.cuda.streams import Stream, StreamContext


class CUDAGraph:
    """One capture; stands for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._device = active_device()
        self._number = self._device.new_graph_id()

    def capture_begin(
        self,
        pool: Any = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        """Begins a capture on the current stream."""
        self._record("begin", self._device.begin_capture())

    def capture_end(self) -> None:
        """Ends the capture that this graph began.

        Raises:
            RuntimeError: No capture is on its way.
        """
        self._record("end", self._device.end_capture())

    def _record(self, event: str, stream: int) -> None:
        self._device.recorder.record(OpKind.CAPTURE, event=event, graph=self._number, stream=stream)

    def pool(self) -> tuple[int, int]:
        """Returns the handle of this graph's memory pool."""
        return (0, self._number)

    def reset(self) -> None:
        """Does nothing: a capture holds nothing here."""

    def replay(self) -> NoReturn:
        """Refuses: a capture keeps no commands that could run again."""
        raise NotImplementedError(
            "torch.cuda.CUDAGraph.replay is not part of the fake CUDA runtime: a capture's body "
            "runs once, as it is captured."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"torch.cuda.CUDAGraph.{name} is not part of the fake CUDA runtime; "
            "give it a stand-in in sim/cuda/graphs.py."
        )


class graph:  # torch.cuda spells this class in lower case.
    """Captures what runs inside the block; stands for `torch.cuda.graph`."""

    default_capture_stream: Any = None  # torch shares one; here each device has its own

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Any = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
        enable_annotations: bool = False,
        check_input_liveness: bool = False,
    ) -> None:
        self.cuda_graph = cuda_graph
        self.capture_stream = stream or active_device().capture_stream()
        self.stream_ctx = StreamContext(self.capture_stream)

    def __enter__(self) -> None:
        synchronize()
        self.stream_ctx.__enter__()
        self.cuda_graph.capture_begin()

    def __exit__(self, *args: object) -> Literal[False]:
        self.cuda_graph.capture_end()
        self.stream_ctx.__exit__(*args)
        return False


def graph_pool_handle() -> tuple[int, int]:
    """Returns the handle of a new memory pool."""
    return (active_device().new_graph_id(), 0)


def is_current_stream_capturing() -> bool:
    """Whether the current stream takes part in a capture."""
    device: FakeDevice = active_device()
    return device.is_capturing(device.current_stream().stream_id)
