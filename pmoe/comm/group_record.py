"""This rank's record of a process group: which calls used it, and whether its collectives still match.

Nothing in this file waits for another rank. Layers that share a group share its `GroupRecord`.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist


class OpenCall(NamedTuple):
    """A call that may still have a backward pass.

    layer: the name of the call's layer.
    order: how many calls, over all groups, this process had recorded before.
    """

    layer: str
    order: int


@dataclass(eq=False)
class GroupRecord:
    """A rank's record of a process group: the calls that have used it, and the errors that ended a pass.

    A group is whole while its collectives match on all ranks. If an error makes a rank leave a forward or
    backward pass in the middle, the group is not whole: peers wait for collectives that the rank never
    starts.

    name: the group's name, the same on all its ranks.
    life: the number of the default group under which the group was made: 1 for the first default group that
        layers used in this job, 2 for the second. The keys in the store contain this number, because a group
        may be destroyed and made again under the same name, while torchrun's store goes on.
    reason_left: why this rank left a pass in the middle; "" while the group is whole.
    left_with: the text of the error by which this rank left, as peers read it.
    times_left: how often this rank has left a pass in the middle.
    left_at: the text of `place` (collectives begun, and the running pass) and `times_left`, when this rank
        left by an error of its own; "" if a peer or a collective caused the error. If all ranks left by
        errors of their own at the same place, the group can be used again.
    settled_at: `left_at` of the last time that all ranks left at the same place.
    num_layers: how many layers have exchanged row counts over the group. Equal on all of its ranks.
    message_bytes: the sizes in bytes of the layers' messages of row counts to one rank.
    exchanges: how many exchanges of row counts this rank has begun over the group. The number of a call is
        the number of its exchange.
    steps: how many steps of all `pmoe.BoundedSteps` this rank has begun over the group. Equal on all of its
        ranks.
    sums: how many sums between calls of layers this rank has begun over the group. Equal on all of its ranks.
    begun_before: how many collectives the layers of this process had begun before the group's last exchange
        of row counts.
    open_calls: the calls on the CPU that may still have a backward pass, by their numbers. Numbers ascend.
        Only the last `MOST_OPEN` are kept, because some calls never have a backward pass.
    thread: the thread that made the last of these calls; None before the first one.
    passes: a digest of all backward passes over the group, in their order. It is equal on all ranks, because
        each pass is a sequence of collectives. If it differs, ranks have taken the rows of one call for rows
        of another call, which no collective notices if the messages have equal sizes.
    last_passes: the names of the layers of the last backward passes, at most `MOST_SHOWN`.
    last_backward: the number of the group's last call when its last backward pass began. If a call with a
        number up to this one is still open, that pass has left it out.
    backward_of: the number of the call whose backward pass is running; 0 if there is none, or if the call has
        no number.
    backward_of_layer: the name of that call's layer; "" if no backward pass is running.
    meetings: how often this rank has waited for all ranks before a call or a reduction
        (`pmoe.comm.meeting`). This is also the number of the last meeting.
    left_meetings: the number of the last meeting that this rank has left, after all ranks had come to it.
    last_meeting: the number of the call that followed the last of these waits, or will follow it.
    reduced_after: the number of the last call that was made before this rank last waited for all ranks
        because of a reduction of gradients. Calls up to this number that are still open probably never have a
        backward pass, so they do not make the next reduction wait. 0 if one of them has one after all.
    waits_in: `place_of_pass` of the pass in which this rank has reported that it waits; "" when the wait has
        ended.
    """

    name: str = ""
    life: int = 0
    reason_left: str = ""
    left_with: str = ""
    times_left: int = 0
    left_at: str = ""
    settled_at: str = ""
    num_layers: int = 0
    message_bytes: set[int] = field(default_factory=set)
    exchanges: int = 0
    steps: int = 0
    sums: int = 0
    begun_before: int = 0
    open_calls: dict[int, OpenCall] = field(default_factory=dict)
    thread: threading.Thread | None = None
    passes: int = 0
    last_passes: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=MOST_SHOWN))
    last_backward: int = 0
    backward_of: int = 0
    backward_of_layer: str = ""
    meetings: int = 0
    left_meetings: int = 0
    last_meeting: int = 0
    reduced_after: int = 0
    waits_in: str = ""

    @property
    def place_of_pass(self) -> str:
        """A text that identifies the pass that this rank is running; the same on all ranks that run it.

        It consists of the number of the last exchange of row counts, the number of the call whose backward
        pass is running, and the direction. The second number is 0 if no backward pass is running, and for
        calls inside of a reentrant checkpoint, which have no number.
        """
        return f"{self.exchanges} {self.backward_of} {'backward' if self.backward_of_layer else 'forward'}"

    def place(self) -> str:
        """Returns a text that says how many collectives this rank has begun, and which pass it is running.

        Ranks that have begun the same collectives get the same text.
        """
        return f"{self.exchanges} {collectives.begun - self.begun_before} {self.backward_of}"

    @property
    def life_and_passes(self) -> int:
        """The sum `life` + `MOST_LIVES` * (`passes` % `MOST_PASSES`), a number of 27 bits for headers."""
        return self.life + MOST_LIVES * (self.passes % MOST_PASSES)

    @property
    def has_repeated(self) -> bool:
        """Whether a layer of the group was called more than once; the same on all ranks.

        While this is False, each call is the first one of its layer, in which all ranks compare the options.
        """
        return self.exchanges > self.num_layers

    def open_call(self, number: int, layer: str) -> None:
        """Records that the call with this number may have a backward pass later.

        At most `MOST_OPEN` calls are kept; the oldest call is dropped.

        number: the call's number.
        layer: the name of the call's layer.
        """
        self.open_calls[number] = OpenCall(layer, next(_orders))
        self.thread = threading.current_thread()
        if len(self.open_calls) > MOST_OPEN:
            del self.open_calls[next(iter(self.open_calls))]

    @property
    def last_open_call(self) -> OpenCall | None:
        """The last open call; None if there is none, or if a reduction has waited for all ranks since.

        If it is not None, the next reduction of gradients must wait for all ranks.
        """
        number = next(reversed(self.open_calls), 0)
        return self.open_calls[number] if number > self.reduced_after else None

    @property
    def leaves_call_out(self) -> bool:
        """Whether a backward pass has left out an open call, and no meeting of all ranks has followed.

        A loss may leave out one of two layers on this rank, while the peers run the backward passes of both.
        """
        return any(self.last_meeting <= number <= self.last_backward for number in self.open_calls)

    def has_closed(self, number: int) -> bool:
        """Returns whether the backward pass of a call has begun on this rank.

        number: the number of a call that was open on a peer. It was open on this rank, too.
        """
        oldest = next(iter(self.open_calls)) if len(self.open_calls) == MOST_OPEN else 0
        return oldest <= number <= self.exchanges and number not in self.open_calls

    @contextlib.contextmanager
    def backward_pass(self, number: int, layer: str) -> Iterator[None]:
        """Records, as long as the block runs, that the backward pass of a call is running.

        number: the call's number; 0 if `open_call` has not recorded the call.
        layer: the name of the call's layer.
        """
        if self.open_calls.pop(number, None) is not None and number <= self.reduced_after:
            self.reduced_after = 0
        self.last_backward = self.exchanges
        before = self.backward_of, self.backward_of_layer
        passes = self.passes
        last_passes = self.last_passes.copy()
        self.backward_of = number
        self.backward_of_layer = layer
        try:
            yield
        except BaseException:
            # Ranks may fail at different points of a pass. So no rank counts a pass that has failed.
            self.passes = passes
            self.last_passes = last_passes
            raise
        finally:
            self.backward_of, self.backward_of_layer = before

    def count_pass(self, number: int, layer: str, layer_number: int) -> None:
        """Adds a backward pass to `passes`. Nothing may fail between this and the pass's first message.

        number: the call's number; 0 if `open_call` has not recorded the call.
        layer: the name of the call's layer.
        layer_number: the number of the layer among the layers of the group; 0 if it has none.
        """
        # A layer may have other names on other ranks, but it has the same number on all ranks. The hash of
        # integers is the same in all processes.
        self.passes = hash((self.passes, number, layer_number))
        self.last_passes.append(layer)


class Collectives:
    """Counter of the collectives that the layers of this process have begun, over all groups."""

    begun = 0


collectives: Collectives = Collectives()

MOST_OPEN = 1024
"""The most call numbers that `GroupRecord.open_calls` keeps."""

MOST_SHOWN = 8
"""The most names that `GroupRecord.last_passes` keeps."""

_orders = itertools.count()
"""The numbers of `OpenCall.order`."""

_records: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupRecord] = weakref.WeakKeyDictionary()


def record_of_group(group: dist.ProcessGroup) -> GroupRecord:
    """Returns this rank's record of a process group. The first call for a group makes the record.

    group: a group that torch.distributed knows (`is_known`).
    """
    record = _records.get(group)
    if record is None:
        record = GroupRecord(name=str(group.group_name), life=_life())
        _records[group] = record
    return record


_next_serial = itertools.count(1)
_serials: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""The number of each group that has asked for one (`serial_of_group`)."""


def serial_of_group(group: dist.ProcessGroup) -> int:
    """Returns a number that no other process group of this process has, 1 for the first group that asks.

    A group may be destroyed and made again under the same name. It then has another number. The number may be
    different on each rank.
    """
    if group not in _serials:
        _serials[group] = next(_next_serial)
    return _serials[group]


def is_known(group: dist.ProcessGroup) -> bool:
    """Returns whether torch.distributed knows a group: False after destroy_process_group has destroyed it."""
    return group in dist.distributed_c10d._world.pg_map


def known_groups() -> list[tuple[dist.ProcessGroup, GroupRecord]]:
    """Returns the groups that layers of this process have used and that still exist, with their records."""
    return [(group, record) for group, record in list(_records.items()) if is_known(group)]


def names_of_left_groups() -> set[str]:
    """Returns the names of the groups in which an error made this rank leave a pass before its end."""
    return {record.name for record in _records.values() if record.reason_left}


_lives: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Maps each default process group of this job to its number, counted from 1 (`GroupRecord.life`)."""

MOST_LIVES = 1 << 10
"""Default process groups are numbered modulo this number, because a header has only a few bits for it."""

MOST_PASSES = 1 << 17
"""Headers have `GroupRecord.passes` modulo this number. Two different digests are equal there by a chance of
1 in 131,072."""


def _life() -> int:
    """Returns the number of the present default process group: 1, 2, ..., modulo `MOST_LIVES`.

    The first default group with which this rank uses pmoe has number 1, the next one number 2. The number is
    a part of all keys in the store, because torchrun's store outlives a group, and a later group may have the
    same name.

    The counter is in the default group's store, and is read once for each default group. The result is 0 if
    there is no counter to read: no default group, no store, or no answer within 5 seconds.
    """
    world = dist.group.WORLD
    if world is None:
        return 0
    if world not in _lives:
        answer = [0]

        def ask() -> None:
            with contextlib.suppress(
                RuntimeError, AttributeError, ValueError
            ):  # not every backend has a store
                store = dist.distributed_c10d._get_default_store()
                answer[0] = int(store.add(f"pmoe/lives/{dist.get_rank()}", 1)) % MOST_LIVES

        # In a thread, because the store may be on a rank that has stopped and never answer.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(5)
        _lives[world] = answer[0]
    return _lives[world]
