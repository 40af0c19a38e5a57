"""What happened on one rank, in host order: the records both modes write and the tools read."""

from real.trace.jsonl import (
    JsonlSink,
    Trace,
    read_trace,
    read_traces,
    trace_of,
    trace_path,
    why_not_whole,
)
from real.trace.record import SCHEMA_VERSION, OpKind, TraceError, validate_record
from real.trace.recorder import MemorySink, Recorder, Sink, active_recorder, recording

__all__ = [
    "SCHEMA_VERSION",
    "JsonlSink",
    "MemorySink",
    "OpKind",
    "Recorder",
    "Sink",
    "Trace",
    "TraceError",
    "active_recorder",
    "read_trace",
    "read_traces",
    "recording",
    "trace_of",
    "trace_path",
    "validate_record",
    "why_not_whole",
]
