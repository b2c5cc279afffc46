"""Meetings: before some calls, a rank waits until all ranks of its group have come to that call.

The rank reads in the store (torch.distributed's key-value store) whether all ranks have come.

There are three reasons for a meeting.

1. Skipped backward passes. A rank may skip the backward pass of a layer's last call and call the layer again,
   while its peers run that pass. Its row counts would then be paired with rows of the peers' backward pass.
   So a rank that has not run the backward pass of the last call waits in a meeting before the next call. If
   no rank has run the pass, all ranks come to the meeting. If a peer runs the pass, it reads in the store
   that the rank waits, and both raise:

      rank 0   call 1   backward of call 1: waits for rows        reads the store: both raise
      rank 1   call 1   call 2: waits in the meeting before it

   For the same reason the rank waits before it reduces or clips gradients, and before a call if its last
   backward pass has left out a call of another layer.

   Two ranks may skip the passes of different layers. If the messages of both passes have equal sizes, each
   rank takes the rows of one layer for rows of the other, and both passes end without an error:

      rank 0   call 1   call 2   backward of call 1     waits in the meeting before a reduction: both raise
      rank 1   call 1   call 2   backward of call 2     waits in the same meeting

   So in each meeting the ranks compare a digest of the backward passes that they have run, in their order
   (`GroupRecord.passes`). If no pass was skipped, there may be no meeting. Passes in another order are
   found at the next call: the header of its row counts has the digest, too (`pmoe.comm.counts`).

2. Comparisons of options. A rank may compare its options in a call while its peers do not. Their messages
   would have different sizes, which would abort processes. So the rank waits in a meeting before it compares
   its options, in two cases:

   - An option of the layer was set since the layer's last call. The other ranks may not have set it.
   - The layer is called for the first time, and may exist on this rank only, such as a copy that one rank
     evaluates alone. This is possible if layers of the group were called repeatedly before, or if the layer
     is a copy (copy.deepcopy) of a layer that was called.

3. Calls in hooks of a backward pass. A rank may have a hook that calls a layer in a backward pass, while its
   peers run that pass without such a hook. Its row counts would then be paired with rows of the pass. If the
   messages had different sizes, processes would abort. So the rank waits in a meeting before such a call.

Ranks come to a meeting for different reasons. If any of them compares its options, all of them compare
theirs.

The number of a call is the number of its exchange of row counts. The exchange is a collective, so a call has
the same number on all ranks. Passes on a GPU are not recorded (`Ranks.expect_backward`), so no rank waits for
the first reason there. A rank waits for the second and third reason there, too. If the others do not come, it
raises an error after the group's timeout.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from pmoe.comm.group_record import GroupRecord, known_groups

CURE = (
    "every rank must call backward on the same outputs of the layer as the other ranks, in the same order "
    "and equally often; a rank whose loss does not need the output y adds 0 * y.sum() to its loss"
)
"""The end of messages about ranks that run different backward passes. It says what all ranks must do."""


IS_OPEN = f"has not run the backward pass of a layer's last call, which other ranks may be running: {CURE}"
"""Why a rank waits that has not run a backward pass. In an error it follows the rank, such as "rank 3"."""

IN_HOOK = (
    "calls a layer in a hook of a backward pass, and other ranks do not: every rank must call the layers of "
    "a group in the same order and equally often, also in hooks"
)
"""Why a rank waits before a call in a hook. Errors put it after the rank: "rank 3 calls a layer ..."."""

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1e-4, 0.05
"""The first and the longest pause between two readings of the store.

Pauses are short at first, because a peer may come soon. They grow, so that waiting for a late peer costs
little.
"""


class Meeting:
    """One rank's part in a meeting: before a call or a reduction, it waits until all ranks have come.

    The keys of a meeting in the store begin with pmoe/meet/LIFE/GROUP. LIFE is a number that changes if the
    job makes its process groups again (`GroupRecord.life`), and GROUP is the name of the group. The meetings
    of a group are numbered 1, 2, 3, ..., and NUMBER is the number of the meeting. The rest of a key is:

        NUMBER            a counter: how many ranks have come to this meeting
        NUMBER/all        is set when all ranks have come to this meeting
        NUMBER/compare    is set if a rank has come to this meeting because it compares its options
        NUMBER/passes     `GroupRecord.passes` of the first rank that came to this meeting
        NUMBER/differ     is set if a rank has come whose digest of passes is a different one
        waiting           is set when a rank has waited for long in any meeting of the group
        waiting/RANK      is written by a rank that waits, and emptied when the rank goes on. It has five
                          lines: the call's number, NUMBER, the layers of `GroupRecord.open_calls` in JSON,
                          the sum in which the rank waits (`waiting_in_sum`; "" for none), and why it waits

    record: this rank's record of the group.
    why: why this rank waits and what all ranks must do, as the end of a sentence that begins with "rank 3".
    compares: whether this rank compares its options with the other ranks in this call.
    is_complete: whether this rank is the last one to come. Otherwise `has_all` waits for the others.
    """

    def __init__(self, group: dist.ProcessGroup, record: GroupRecord, why: str, *, compares: bool) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._record = record
        self._folder = _folder(record)
        self._rank = dist.get_rank(group)
        self._call = record.exchanges + 1
        self._why = why
        record.meetings += 1
        self._number = record.meetings
        self._is_published = False
        size = dist.get_world_size(group)
        # Written before this rank is counted, so that all ranks see it when the meeting is complete.
        if compares:
            self._store.set(self._key_of_comparison(self._number), "")
        own_passes = str(record.passes)
        passes = self._store.compare_set(self._key_of_passes(self._number), "", own_passes)
        if passes.decode() != own_passes:
            self._store.set(self._key_of_difference(self._number), "")
        self.is_complete: bool = int(self._store.add(f"{self._folder}/{self._number}", 1)) >= size
        if self.is_complete:
            self._store.set(self._key_of_all(self._number), "")
            self._remove_keys_of(self._number - 1)  # all ranks have left the meeting before this one

    def _key_of_all(self, number: int) -> str:
        return f"{self._folder}/{number}/all"

    def _key_of_comparison(self, number: int) -> str:
        return f"{self._folder}/{number}/compare"

    def _key_of_passes(self, number: int) -> str:
        return f"{self._folder}/{number}/passes"

    def _key_of_difference(self, number: int) -> str:
        return f"{self._folder}/{number}/differ"

    def _remove_keys_of(self, number: int) -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can delete
            self._store.delete_key(f"{self._folder}/{number}")
            self._store.delete_key(self._key_of_all(number))
            self._store.delete_key(self._key_of_comparison(number))
            self._store.delete_key(self._key_of_passes(number))
            self._store.delete_key(self._key_of_difference(number))

    def has_all(self, wait_for: timedelta) -> bool:
        """Returns whether all ranks have come to the meeting, after a wait of at most ``wait_for``."""
        end = time.monotonic() + wait_for.total_seconds()
        pause = FIRST_PAUSE_SECONDS
        keys = [self._key_of_all(self._number)]
        while not self._store.check(keys):  # the store's own wait would print that it timed out
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, LAST_PAUSE_SECONDS)
        return True

    def publish(self) -> None:
        """Writes into the store which call this rank is about to make, and why it waits for the other ranks.

        Peers read this record with `left_out`. A peer that will not make that call raises an error.
        """
        if not self._is_published:
            for key, text in _waiting(self._record, self._rank, self._call, self._number, self._why).items():
                self._store.set(key, text)
            self._is_published = True

    @property
    def passes_differ(self) -> bool:
        """Whether the ranks have not run the same backward passes in the same order; the same on all ranks.

        Read it only after all ranks have come to the meeting.
        """
        return bool(self._store.check([self._key_of_difference(self._number)]))

    def leave(self) -> bool:
        """Ends this rank's part in the meeting. Call it only after all ranks have come to the meeting.

        Returns True if any rank has come because it compares its options. All ranks must then compare their
        options. The result is the same on all ranks.
        """
        self._record.last_meeting = self._call
        self._record.left_meetings = self._number
        if self._is_published:
            self._store.set(f"{self._folder}/waiting/{self._rank}", "")
        return bool(self._store.check([self._key_of_comparison(self._number)]))


def _waiting(
    record: GroupRecord, rank: int, call: int, meeting: int, why: str, in_sum: str = ""
) -> dict[str, str]:
    """Returns what a rank writes into the store while it waits, by the keys (`Meeting`).

    record: this rank's record of the group.
    rank: this rank's number in the group.
    call, meeting: the numbers of the next call and of the meeting.
    why: why this rank waits.
    in_sum: the sum in which this rank waits (`waiting_in_sum`); "" for a meeting.
    """
    folder = _folder(record)
    calls = json.dumps({number: open_call.layer for number, open_call in record.open_calls.items()})
    text = f"{call}\n{meeting}\n{calls}\n{in_sum}\n{why}"
    return {f"{folder}/waiting/{rank}": text, f"{folder}/waiting": ""}


def waiting_in_sum(record: GroupRecord, rank: int, of_sum: GroupRecord, why: str) -> dict[str, str]:
    """Returns what a rank writes into the store while it waits in a sum between calls of layers.

    A peer that makes a call in the meantime reads it (`left_out`): neither of the two would ever go on.

    record: this rank's record of a group of layers, whose ranks all take part in the sum.
    rank: this rank's number in the group.
    of_sum: this rank's record of the group of the sum.
    why: what this rank waits for, as the end of a sentence that begins with "rank 3".
    """
    in_sum = f"{of_sum.sums} {of_sum.name}"
    return _waiting(record, rank, record.exchanges + 1, record.meetings + 1, why, in_sum)


def not_waiting(record: GroupRecord, rank: int) -> dict[str, str]:
    """Returns what a rank writes into the store when it goes on after `waiting_in_sum`."""
    return {f"{_folder(record)}/waiting/{rank}": ""}


def _has_come(in_sum: str) -> bool:
    """Returns whether this rank has begun the sum in which a peer waits.

    in_sum: the number of the sum, and the name of its group; "" for no sum.
    """
    number, _, name = in_sum.partition(" ")
    return any(record.name == name and record.sums >= int(number) for _, record in known_groups())


def left_out(record: GroupRecord, own_rank: int, ranks: Sequence[int]) -> list[str]:
    """Returns a sentence about each peer that waits for a call in which this rank will not take part.

    There are two cases: this rank runs or has run a backward pass to which the peer has not come, or this
    rank has already made the call for which the peer waits.

    record: this rank's record of the group.
    own_rank: this rank's number in the group.
    ranks: the peers to look at, by their numbers in the group.
    """
    store = dist.distributed_c10d._get_default_store()
    folder = _folder(record)
    if not store.check([f"{folder}/waiting"]):
        return []
    sentences = []
    for rank in ranks:
        key = f"{folder}/waiting/{rank}"
        text = store.get(key).decode() if store.check([key]) else ""
        if not text:
            continue
        call, meeting, calls, in_sum, why = text.split("\n", 4)
        if int(meeting) <= record.left_meetings or _has_come(in_sum):
            continue  # all ranks came to that meeting or sum: the peer is slow to leave it, and will come
        layers = {int(number): layer for number, layer in json.loads(calls).items()}
        skipped = [number for number in layers if record.has_closed(number)]
        if skipped and int(call) > record.exchanges and why == IN_HOOK:
            sentences.append(f"rank {rank} {why}")
        elif skipped and int(call) > record.exchanges:
            number = record.backward_of if record.backward_of in skipped else skipped[-1]
            verb = "is running" if number == record.backward_of else "has run"
            sentences.append(
                f"rank {rank} goes on without the backward pass of {layers[number]}, which rank {own_rank} "
                f"{verb}: {CURE}"
            )
        elif record.last_meeting < int(call) <= record.exchanges:
            sentences.append(f"rank {rank} {why}")
    return sentences


def other_passes(record: GroupRecord) -> str:
    """Returns a sentence for ranks that have not run the same backward passes in the same order.

    record: this rank's record of the group.
    """
    layers = ", ".join(record.last_passes) or "none"
    return (
        "the ranks have run backward passes of different calls, or in a different order, so gradients are "
        f"wrong (the last passes of this rank: {layers}): {CURE}"
    )


def _folder(record: GroupRecord) -> str:
    return f"pmoe/meet/{record.life}/{record.name}"
