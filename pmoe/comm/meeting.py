"""Ranks meet in their store before a call that one of them may make otherwise than the others.

A rank may leave out the backward pass of a layer's last call and call that layer again. Its row counts would
then meet rows of that backward pass, which its peers are in. Ranks that do the same are in the same state
before each call: the backward pass of the layer's last call has run on all of them or on none. So they meet
before a call only in the second state. A rank that waits there while a peer is in that backward pass has left
it out:

    rank 0   call 1   backward of call 1: waits for rows        looks in the store: both raise
    rank 1   call 1   call 2: waits in the meeting before it

A rank whose options were changed since its last call meets the others too, for messages of other sizes would
abort their processes. Where all ranks have changed them, all come.

Calls are numbered by their exchanges of row counts. These are collectives: numbers are the same on all ranks.
Nothing here is for groups that wait on a GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from pmoe.comm.standing import Standing

CURE = (
    "every rank must call backward on every output of the layer that any rank calls it on; a rank whose loss "
    "does not need the output y adds 0 * y.sum() to it"
)


IS_OPEN = f"has not run the backward pass of a layer's last call, which has run on other ranks: {CURE}"
"""Why a rank meets the others, in the words of those who do not."""

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1e-4, 0.05
"""Between looks into the store: first a rank that is nearly there, last one that is late, at little cost."""


class Meeting:
    """One rank's part in the meeting before its next call.

    Its keys in the store are below pmoe/meet/LIFE/GROUP:

        NUMBER        of the meeting: how many ranks have come
        NUMBER/all    set when all have come
        waiting       set when a rank has waited for long in any meeting of the group
        waiting/RANK  where that rank waits, three lines: the number of the call, `Standing.open_calls`, why

    why: the rest of a sentence that begins with this rank, and tells the others what they should have done.
    """

    def __init__(self, group: dist.ProcessGroup, standing: Standing, why: str) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._standing, self._folder, self._rank = standing, _folder(standing), dist.get_rank(group)
        self._call, self._why = standing.exchanges + 1, why
        standing.meetings += 1
        self._number = standing.meetings
        self._is_published = False
        size = dist.get_world_size(group)
        self.is_complete: bool = int(self._store.add(f"{self._folder}/{self._number}", 1)) >= size
        if self.is_complete:
            self._store.set(self._key_of_all(self._number), "")
            self._remove_keys_of(self._number - 1)  # which all have left

    def _key_of_all(self, number: int) -> str:
        return f"{self._folder}/{number}/all"

    def _remove_keys_of(self, number: int) -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can
            self._store.delete_key(f"{self._folder}/{number}")
            self._store.delete_key(self._key_of_all(number))

    def has_all(self, wait_for: timedelta) -> bool:
        """Whether all ranks have come, for which it waits at most so long."""
        end, pause = time.monotonic() + wait_for.total_seconds(), FIRST_PAUSE_SECONDS
        keys = [self._key_of_all(self._number)]
        while not self._store.check(keys):  # the store's own wait would print that it timed out
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, LAST_PAUSE_SECONDS)
        return True

    def publish(self) -> None:
        """Tells peers that look why they wait for this rank, and for which call."""
        if not self._is_published:
            numbers = ",".join(map(str, self._standing.open_calls))
            self._store.set(f"{self._folder}/waiting/{self._rank}", f"{self._call}\n{numbers}\n{self._why}")
            self._store.set(f"{self._folder}/waiting", "")
            self._is_published = True

    def leave(self) -> None:
        """After all ranks have come."""
        self._standing.last_meeting = self._call
        if self._is_published:
            self._store.set(f"{self._folder}/waiting/{self._rank}", "")


def left_out(standing: Standing, own_rank: int, ranks: Sequence[int]) -> list[str]:
    """Sentences about peers that wait in a meeting to which this rank will not come.

    Each proves that one of the two does something else than the other. own_rank, ranks: in the group.
    """
    store, folder = dist.distributed_c10d._get_default_store(), _folder(standing)
    if not store.check([f"{folder}/waiting"]):
        return []
    sentences = []
    for rank in ranks:
        key = f"{folder}/waiting/{rank}"
        text = store.get(key).decode() if store.check([key]) else ""
        if not text:
            continue
        call, numbers, why = text.split("\n", 2)
        without_backward = set(map(int, filter(None, numbers.split(","))))
        if standing.backward_of in without_backward and int(call) > standing.exchanges:
            sentences.append(
                f"rank {rank} begins its next call without the backward pass of {standing.backward_of_layer} "
                f"that rank {own_rank} is in: {CURE}"
            )
        elif standing.last_meeting < int(call) <= standing.exchanges:
            sentences.append(f"rank {rank} {why}")
    return sentences


def _folder(standing: Standing) -> str:
    return f"pmoe/meet/{standing.life}/{standing.name}"
