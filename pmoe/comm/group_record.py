"""This rank's record of a process group: who uses it, and whether its collectives still match.

Nothing in this file waits for another rank. Layers that share a group share its `Standing`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass(eq=False)
class Standing:
    """One process group, as this rank knows it.

    A group is whole while its collectives match on all ranks. A rank that leaves a pass in the middle (by an
    error) leaves collectives undone for which its peers wait.

    name: the group's name, the same on all its ranks.
    life: the number of the default group to which it belongs, counted over this job. torchrun's store
        outlives a group that is destroyed and made again under the same name. This number in the keys of the
        store separates new groups from old ones.
    left: why this rank left a pass in the middle; "" while the group is whole.
    left_with: the error text that peers get.
    left_at: `place` when this rank left by an error of its own; "" when an error of a peer or of a collective
        was the cause. Ranks that all left by errors of their own, at the same place, are in step.
    settled_at: `left_at` of the last time that all ranks left in step.
    num_layers: how many layers have exchanged row counts over the group. Equal on all of its ranks.
    exchanges: how many exchanges of row counts this rank has begun. A call has the number of its exchange.
    begun_before: `Collectives.begun` when the last exchange began.
    open_calls: numbers of the calls, on the CPU, whose backward pass may follow and has not begun. Only the
        last `MOST_OPEN` are kept, because some calls never have a backward pass. A dict serves as an ordered
        set.
    backward_of: the number of the call whose backward pass is running; 0 if none is.
    backward_of_layer: the name of that call's layer.
    meetings: how many meetings this rank has come to (`pmoe.comm.meeting`).
    last_meeting: the number of the call that followed the last meeting.
    """

    name: str = ""
    life: int = 0
    left: str = ""
    left_with: str = ""
    left_at: str = ""
    settled_at: str = ""
    num_layers: int = 0
    exchanges: int = 0
    begun_before: int = 0
    open_calls: dict[int, None] = field(default_factory=dict)
    backward_of: int = 0
    backward_of_layer: str = ""
    meetings: int = 0
    last_meeting: int = 0

    def place(self) -> str:
        """Returns where this rank is among the collectives of its layers. Ranks in step get the same text."""
        return f"{self.exchanges} {collectives.begun - self.begun_before} {self.backward_of}"

    def open_call(self, number: int) -> None:
        """Records that a backward pass may follow the call of this number."""
        self.open_calls[number] = None
        if len(self.open_calls) > MOST_OPEN:
            del self.open_calls[next(iter(self.open_calls))]

    @contextlib.contextmanager
    def backward_pass(self, number: int, layer: str) -> Iterator[None]:
        """Records that the block is the backward pass of a call.

        number: the call's number; 0 if `open_call` has not recorded the call.
        layer: the name of the call's layer.
        """
        self.open_calls.pop(number, None)
        before = self.backward_of, self.backward_of_layer
        self.backward_of = number
        self.backward_of_layer = layer
        try:
            yield
        finally:
            self.backward_of, self.backward_of_layer = before


class Collectives:
    """Counter of the collectives that this process's layers have begun, over all groups."""

    begun = 0


collectives: Collectives = Collectives()

MOST_OPEN = 1024
"""The largest number of `Standing.open_calls`."""

_standings: weakref.WeakKeyDictionary[dist.ProcessGroup, Standing] = weakref.WeakKeyDictionary()


def standing_of(group: dist.ProcessGroup) -> Standing:
    """Returns this rank's record of a group that torch.distributed knows. The first request makes it."""
    standing = _standings.get(group)
    if standing is None:
        standing = Standing(name=str(group.group_name), life=_life())
        _standings[group] = standing
    return standing


def is_known(group: dist.ProcessGroup) -> bool:
    """Returns whether torch.distributed still knows a group. It does not after destroy_process_group."""
    return group in dist.distributed_c10d._world.pg_map


def names_of_left_groups() -> set[str]:
    """Returns the names of the groups that this rank has left in the middle of a pass."""
    return {standing.name for standing in _standings.values() if standing.left}


_lives: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""The life (`Standing.life`) of each default group."""

MOST_LIVES = 1 << 10
"""Lives are counted modulo this number, because they travel in a few bits of a header."""


def _life() -> int:
    """Returns the number of default groups with which this rank has used layers, the present one included.

    It is counted in the default group's store, which is asked once for each default group. 0 if there is no
    default group, no store, or no answer within 5 seconds.
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
