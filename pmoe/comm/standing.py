"""What this rank remembers of a process group: who uses it, and whether its collectives still match.

Nothing here communicates. Layers that share a group share its `Standing`.
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

    name: the group's, the same on all its ranks.
    life: the number of the default group to which it belongs, counted over this job. torchrun's store
        outlives a group that is destroyed and made again under the same name. This number in the keys of the
        store tells old groups from new ones.
    left: why this rank left a pass in the middle; "" while the group is whole.
    left_with: the error text that peers get.
    left_at: `place` when it left, where an error of its own was the cause; "" where an error of a peer or of
        a collective was. Ranks that all left by their own errors, at the same place, are in step.
    settled_at: `left_at` of the last time that all ranks left in step.
    num_layers: how many layers have exchanged row counts over the group, on all of its ranks.
    exchanges: how many exchanges of row counts this rank has begun. A call has the number of its exchange.
    begun_before: `Collectives.begun` when the last exchange began.
    open_calls: numbers of the calls, on the CPU, whose backward pass may follow and has not begun. Only the
        last `MOST_OPEN` are kept, for some calls never have one.
    backward_of: the number of the call whose backward pass is running; 0 outside of them.
    backward_of_layer: the layer of that call.
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
        """Where this rank is among the collectives of its layers; the same text on ranks that are in step."""
        return f"{self.exchanges} {collectives.begun - self.begun_before} {self.backward_of}"

    def open_call(self, number: int) -> None:
        """Notes that a backward pass may follow a call."""
        self.open_calls[number] = None
        if len(self.open_calls) > MOST_OPEN:
            del self.open_calls[next(iter(self.open_calls))]

    @contextlib.contextmanager
    def backward_pass(self, number: int, layer: str) -> Iterator[None]:
        """The block is the backward pass of the call of that number; 0 if `open_call` did not note it."""
        self.open_calls.pop(number, None)
        before = self.backward_of, self.backward_of_layer
        self.backward_of, self.backward_of_layer = number, layer
        try:
            yield
        finally:
            self.backward_of, self.backward_of_layer = before


class Collectives:
    """How many collectives this process's layers have begun, over all groups."""

    begun = 0


collectives: Collectives = Collectives()

MOST_OPEN = 1024

_standings: weakref.WeakKeyDictionary[dist.ProcessGroup, Standing] = weakref.WeakKeyDictionary()


def standing_of(group: dist.ProcessGroup) -> Standing:
    """The record of a group that torch.distributed knows, made at the first request."""
    found = _standings.get(group)
    if found is None:
        found = Standing(name=str(group.group_name), life=_life())
        _standings[group] = found
    return found


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed still knows a group: destroy_process_group forgets it."""
    return group in dist.distributed_c10d._world.pg_map


def names_of_left_groups() -> set[str]:
    """Names of the groups that this rank has left in the middle of a pass."""
    return {standing.name for standing in _standings.values() if standing.left}


_lives: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""The life of each default group."""

MOST_LIVES = 1 << 10
"""Lives are counted modulo this: they travel in a few bits."""


def _life() -> int:
    """The number of default groups under which this rank has used layers, counted in the ranks' store. Asks
    the store once for each default group; 0 where it gives no answer."""
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

        asking = threading.Thread(target=ask, daemon=True)  # the store may be on a rank that has stopped
        asking.start()
        asking.join(5)
        _lives[world] = answer[0]
    return _lives[world]
