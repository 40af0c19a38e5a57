"""The transport between ranks that share this process: calls meet in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from sim.cuda.device import active_device
from sim.faults import Fault
from sim.hollow import is_hollow, mark_hollow
from sim.world import collectives
from sim.world.collectives import Call
from sim.world.faults import Disturber
from sim.world.place import Place, mismatch, place_of, waits_for
from sim.world.process_group import FakeProcessGroup, Handle
from sim.world.world import World


class Meeting:
    """One collective of one group: who has arrived, and with what."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.calls: dict[int, Call] = {}
        self.is_done = False

    def missing(self) -> list[int]:
        """Returns the global ranks that have not arrived."""
        return [rank for i, rank in enumerate(self.place.ranks) if i not in self.calls]

    def left_over(self) -> str:
        """Says who never came."""
        came = [rank for i, rank in enumerate(self.place.ranks) if i in self.calls]
        return (
            f"rank {', '.join(map(str, came))} issued {self.place}, "
            f"rank {', '.join(map(str, self.missing()))} never did"
        )


class _MeetingHandle:
    def __init__(self, world: World, rank: int, meeting: Meeting, *, is_lost: bool) -> None:
        self._world = world
        self._rank = rank
        self._meeting = meeting
        self._is_lost = is_lost

    def is_done(self) -> bool:
        if not self._has_ended():
            self._world.give_turn(self._rank, self.standing)
        return self._has_ended()

    def wait(self) -> None:
        if not self._has_ended():
            self._world.wait_until(self._rank, self._has_ended, self.standing)

    def _has_ended(self) -> bool:
        return self._meeting.is_done and not self._is_lost

    def standing(self) -> str:
        if self._is_lost:
            return f"in {self._meeting.place}, whose completion was lost"
        if self._meeting.is_done:
            return f"about to go on after {self._meeting.place}"
        return waits_for(self._meeting.place, self._meeting.missing())


class Message:
    """A copy on its way from one rank to another."""

    def __init__(self, place: Place, tensor: torch.Tensor, target: int) -> None:
        self.place = place
        self.tensor = tensor
        self.target = target

    def left_over(self) -> str:
        """Says who never took it."""
        return f"rank {self.target} never received {self.place}"


class _MessageHandle:
    def __init__(
        self, world: World, rank: int, key: tuple[Any, ...], place: Place, tensor: torch.Tensor
    ) -> None:
        self._world = world
        self._rank = rank
        self._key = key
        self._place = place
        self._tensor: torch.Tensor | None = tensor

    def is_done(self) -> bool:
        if not self._has_come():
            self._world.give_turn(self._rank, self.standing)
        if self._tensor is not None and self._has_come():
            self._take()
        return self._tensor is None

    def wait(self) -> None:
        self._world.wait_until(self._rank, self._has_come, self.standing)
        if self._tensor is not None:
            self._take()

    def standing(self) -> str:
        if self._has_come():
            return f"about to go on after {self._place}"
        return f"in {self._place}, waits for the message"

    def _has_come(self) -> bool:
        return self._tensor is None or self._key in self._world.rendezvous

    def _take(self) -> None:
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        message: Message = self._world.rendezvous.pop(self._key)
        if (message.tensor.dtype, message.tensor.numel()) != (tensor.dtype, tensor.numel()):
            raise self._world.mismatch(
                self._rank,
                f"Message {self._place} does not match: it has {message.tensor.numel()} elements "
                f"of {message.tensor.dtype}, rank {self._rank} expects {tensor.numel()} of "
                f"{tensor.dtype}.",
            )
        with torch.no_grad(), torch._C._DisableTorchDispatch():  # no kernel of this rank
            tensor.detach().copy_(message.tensor.view_as(tensor))


class InProcess:
    """Matches the calls of ranks that share this process."""

    def __init__(self, world: World, rank: int, faults: Sequence[Fault]) -> None:
        self.disturber = Disturber(faults, rank)
        self._world = world
        self._rank = rank

    def open(self, group: FakeProcessGroup) -> None:
        """Does nothing: ranks meet by the group's name."""

    def start(self, group: FakeProcessGroup, n: int, call: Call) -> Handle:
        """Joins the meeting of collective `n`, and completes it when this rank is the last."""
        key = ("collective", group.group_name, tuple(group.ranks), n)
        place = place_of(group, n, call)
        self._world.note(self._rank, place)
        meeting: Meeting | None = self._world.rendezvous.get(key)
        if meeting is None:
            meeting = self._world.rendezvous[key] = Meeting(place)
        else:
            self._compare(meeting, place, call)
        meeting.calls[group.group_rank] = call
        if len(meeting.calls) == len(group.ranks):
            del self._world.rendezvous[key]
            self._complete(meeting)
        is_lost = self.disturber.loses_completion()
        return _MeetingHandle(self._world, self._rank, meeting, is_lost=is_lost)

    def _compare(self, meeting: Meeting, place: Place, call: Call) -> None:
        # Those who arrived are equal: one stands for all.
        first, other = next(iter(meeting.calls.items()))
        problem = mismatch(
            place,
            rank=self._rank,
            mine=call.signature(),
            other_rank=place.ranks[first],
            theirs=other.signature(),
        )
        if problem is not None:
            raise self._world.mismatch(self._rank, problem)

    def _complete(self, meeting: Meeting) -> None:
        calls = [meeting.calls[i] for i in range(len(meeting.calls))]
        problem = collectives.check_between_ranks(calls, meeting.place.ranks)
        if problem is not None:
            raise self._world.mismatch(
                self._rank, f"Sizes do not match in {meeting.place}: {problem}."
            )
        # An asynchronous call moved the version of its outputs when it was issued, as on a GPU.
        blanked = tuple(tensor for call in calls for tensor in call.blanked)
        with (
            torch._C._DisableTorchDispatch(),  # what moves the data is no kernel of any rank
            _unsafe_preserve_version_counter(blanked),
        ):
            if any(is_hollow(tensor) for call in calls for tensor in call.inputs):
                for call in calls:
                    for tensor in call.outputs:
                        mark_hollow(tensor)
            else:
                collectives.complete([collectives.with_memory(call) for call in calls])
        meeting.is_done = True
        meeting.calls = {}  # a Work that is kept keeps no tensors
        self._world.wake(meeting.place.ranks)

    def send(self, group: FakeProcessGroup, n: int, tensor: torch.Tensor, target: int) -> None:
        """Leaves a copy for the receiver."""
        place = self._message("send", group, n)
        self._world.note(self._rank, place)
        receiver = group.ranks[target]
        self._world.rendezvous[_message_key(group, group.group_rank, target, n)] = Message(
            place, tensor.detach().clone(), receiver
        )
        self._world.wake([receiver])

    def receive(self, group: FakeProcessGroup, n: int, tensor: torch.Tensor, source: int) -> Handle:
        """Takes the copy that the sender left, or waits for it."""
        place = self._message(f"recv from rank {group.ranks[source]}", group, n)
        self._world.note(self._rank, place)
        key = _message_key(group, source, group.group_rank, n)
        return _MessageHandle(self._world, self._rank, key, place, tensor)

    def _message(self, kind: str, group: FakeProcessGroup, n: int) -> Place:
        unit = active_device().recorder.unit
        return Place(kind=kind, n=n, group=group.group_name, ranks=group.ranks, unit=unit)


def _message_key(group: FakeProcessGroup, source: int, target: int, n: int) -> tuple[Any, ...]:
    return ("message", group.group_name, tuple(group.ranks), source, target, n)
