"""What a watched call of an FSDP implementation or of an optimizer records, for any tree.

A tree's table says which methods do what and how to ask its units (`UnitView`); the records, their
place before or after the call and the attribution of collectives are the same for all trees.
Nothing is asked of a unit when nobody records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from real.trace import OpKind, Recorder, active_recorder
from real.watch.points import Call, Point


def _none_filled(_: Any) -> int:
    return 0


def _is_always_last(_: Any) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class UnitView:
    """How to ask a tree about one of its units.

    Attributes:
        name: Full name under the root; the root's is the empty string.
        is_gathered: Whether its full parameters are there, or on their way.
        is_last_microbatch: Whether a reduction now is the last one before the optimizer.
        gradients: Whether each trainable parameter has a gradient now, by full name. Without it no
            GRADIENTS are recorded.
        version: Sum of the version counters of the full parameters. Without it no WEIGHT_VERSION is
            recorded.
        num_zero_filled: How many gradients of the reduction that begins were filled with zeros.
    """

    name: Callable[[Any], str]
    is_gathered: Callable[[Any], bool]
    is_last_microbatch: Callable[[Any], bool] = _is_always_last
    gradients: Callable[[Any], Mapping[str, bool]] | None = None
    version: Callable[[Any], int] | None = None
    num_zero_filled: Callable[[Any], int] = _none_filled


FindUnit = Callable[[Call], Any]
"""Returns the unit that a call works on, in the words of the tree; None for no unit at all."""


def subject_of(call: Call) -> Any:
    """Returns the object whose method is called: it is the unit itself."""
    return call.subject


def unshard_point(
    owner: Any, name: str, view: UnitView, *, unit_of: FindUnit = subject_of
) -> Point:
    """Watches a method that makes a unit's full parameters usable, or finds that they are.

    After the call it records WEIGHT_VERSION, when something was gathered, and UNSHARD, whose
    `gathered` is whether the unit was sharded before the call. Collectives inside are the unit's.
    """

    def before(call: Call, unit: Any) -> None:
        call.noted["is_needed"] = not view.is_gathered(unit)

    def after(call: Call, unit: Any, recorder: Recorder) -> None:
        is_needed, unit_name = call.noted["is_needed"], view.name(unit)
        if is_needed and view.version is not None:
            recorder.record(OpKind.WEIGHT_VERSION, unit=unit_name, version=view.version(unit))
        recorder.record(OpKind.UNSHARD, unit=unit_name, stream=_stream(), gathered=is_needed)

    return _unit_point(owner, name, view, unit_of, before, after)


def reshard_point(
    owner: Any, name: str, view: UnitView, *, unit_of: FindUnit = subject_of
) -> Point:
    """Watches a method that releases a unit's full parameters: RESHARD before the call."""

    def before(call: Call, unit: Any) -> None:
        active_recorder().record(OpKind.RESHARD, unit=view.name(unit), stream=_stream())

    return _unit_point(owner, name, view, unit_of, before)


def reduce_point(owner: Any, name: str, view: UnitView, *, unit_of: FindUnit = subject_of) -> Point:
    """Watches a method that packs and reduces a unit's gradients: REDUCE and GRADIENTS before it.

    Collectives inside are the unit's.
    """

    def before(call: Call, unit: Any) -> None:
        recorder, unit_name = active_recorder(), view.name(unit)
        recorder.record(
            OpKind.REDUCE,
            unit=unit_name,
            stream=_stream(),
            last=view.is_last_microbatch(unit),
            zero_filled=view.num_zero_filled(unit),
        )
        if view.gradients is not None:
            has_gradient = view.gradients(unit)
            recorder.record(
                OpKind.GRADIENTS,
                unit=unit_name,
                present=[parameter for parameter, has in has_gradient.items() if has],
                missing=[parameter for parameter, has in has_gradient.items() if not has],
            )

    return _unit_point(owner, name, view, unit_of, before)


def fence_point(owner: Any, name: str) -> Point:
    """Watches what makes the current stream wait for every reduction: FENCE after the call."""
    return Point(owner=owner, name=name, after=_says(OpKind.FENCE))


def optimizer_point(owner: Any, name: str) -> Point:
    """Watches what updates the weights on the current stream: OPTIMIZER_STEP before the call."""
    return Point(owner=owner, name=name, before=_says(OpKind.OPTIMIZER_STEP))


def gradient_read_point(owner: Any, name: str, *, by: str) -> Point:
    """Watches what reads reduced gradients on the current stream: GRAD_READ before the call.

    Args:
        owner: The class or module that has it.
        name: Its name there.
        by: Who reads, for a message.
    """
    return Point(owner=owner, name=name, before=_says(OpKind.GRAD_READ, by=by))


def record_stream_role(stream: torch.cuda.Stream, role: str) -> None:
    """Records what a stream is for: "compute", "communication", "all-gather", "reduce-scatter"."""
    active_recorder().record(OpKind.STREAM_ROLE, stream=stream.stream_id, role=role)


def _stream() -> int:
    return int(torch.cuda.current_stream().stream_id)


def _says(op: OpKind, **fields: object) -> Callable[[Call], None]:
    def record(_: Call) -> None:
        recorder = active_recorder()
        if recorder.is_recording:
            recorder.record(op, stream=_stream(), **fields)

    return record


def _unit_point(
    owner: Any,
    name: str,
    view: UnitView,
    unit_of: FindUnit,
    before: Callable[[Call, Any], None],
    after: Callable[[Call, Any, Recorder], None] | None = None,
) -> Point:
    """Watches work on a unit; what is recorded meanwhile is the unit's."""

    def begin(call: Call) -> None:
        recorder = active_recorder()
        unit = unit_of(call) if recorder.is_recording else None
        if unit is None:
            return
        before(call, unit)
        call.noted.update(unit=unit, recorder=recorder, previous=recorder.unit)
        recorder.unit = view.name(unit)

    def finish(call: Call) -> None:
        if after is not None and "recorder" in call.noted:
            after(call, call.noted["unit"], call.noted["recorder"])

    def end(call: Call) -> None:
        if "recorder" in call.noted:
            call.noted["recorder"].unit = call.noted["previous"]

    return Point(owner=owner, name=name, before=begin, after=finish, always=end)
