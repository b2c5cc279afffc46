"""Compares the device meshes that ranks pass to `pmoe.parallelize`, without any collective.

Ranks with different meshes would start collectives over different groups, and wait for each other. So the
comparison uses no group, only the default group's store, which every rank can read:

    last/RANK               the last call of a rank: its mesh, the call's number, the mesh's ranks
    come/MESH/NUMBER        how many ranks have come to the call with this mesh and number
    refused/MESH/NUMBER     the `Refusal` of this call, written by the first rank that refuses it

All keys begin with pmoe/mesh/LIFE/ (`GroupRecord.life`). MESH is a digest of the mesh's text, and NUMBER
counts the calls with one mesh. A refused call ends with an error on all of its ranks. A rank that comes late
to a refused call raises the error, too (`_next_call`).

A rank waits until all ranks of its mesh have come. Meanwhile it reads the last call of each of these ranks.
If the last call of another rank has a different mesh or number, the first case that applies decides:

    the other rank's last call            what follows
    was refused                           This rank raises an error, unless the other rank makes a new call
                                          within `PATIENCE_SECONDS`.
    has a mesh that contains this rank    The meshes differ: the ranks of both calls raise an error. But if
                                          all ranks have come to this rank's call by now, or it was refused,
                                          then the other rank has left it, and this rank leaves it, too.
    has a mesh without this rank          This rank waits for the next call of the other rank.

Ranks outside the mesh may call `pmoe.parallelize` with meshes of their own, so their calls are not read.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pmoe.comm.agreement import digest
from pmoe.comm.group_options import has_peers, timeout_of
from pmoe.comm.group_record import record_of_group

T = TypeVar("T")

PATIENCE_SECONDS = 5.0
"""How long a waiting rank gives a peer whose call was refused to make its next call."""

LONGEST_PAUSE_SECONDS = 0.5
"""Longest pause of a waiting rank between two readings of the store."""

READ_AT_ONCE = 16
"""How many ranks' last calls a waiting rank reads in one turn.

It limits the load of the store in jobs of thousands of ranks.
"""

MeshCall = tuple[str, int]
"""A call of `pmoe.parallelize`: its mesh in words, and its number among a rank's calls with this mesh."""


@dataclass(frozen=True)
class Refusal:
    """A record that a call of `pmoe.parallelize` is refused: all ranks of the call raise its error.

    The first rank that finds an error, such as a different mesh on another rank, writes it into the store.

    error: the text of the error.
    num_calls: number of calls, with any mesh, that the writer of this refusal had made when it wrote it.
    calls: the refused calls: one, or two if the meshes of two calls differ.
    """

    error: str
    num_calls: int
    calls: frozenset[MeshCall]


@dataclass
class OwnCalls:
    """A record of this rank's own calls of `pmoe.parallelize` under one default process group.

    num_calls: the number of calls that this rank has made, with any mesh, including the present one.
    agreed: {mesh as text: number of the last call with this mesh in which all ranks agreed}.
    left: the refused calls whose errors this rank has raised.
    """

    num_calls: int = 0
    agreed: dict[str, int] = field(default_factory=dict)
    left: set[MeshCall] = field(default_factory=set)


_own_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, OwnCalls] = weakref.WeakKeyDictionary()
"""This rank's calls, by default group."""


def agree_on_mesh(text: str, members: Sequence[int], check: Callable[[], T]) -> T:
    """Waits until all ranks of a mesh have passed the same mesh. Returns the result of ``check``.

    text: the mesh in words, by which ranks compare it.
    members: the global ranks of the mesh.
    check: a function that checks this rank's mesh. It runs before the other ranks can read of the call.

    Raises the errors of ``check``. Also raises ValueError, on all ranks that wait for each other, if

    - a rank of the mesh has passed a different mesh, of which this rank is a part, or
    - the call of a rank of the mesh was refused.

    If a rank does not come within the timeout of the default group, the first rank that notices raises
    RuntimeError. The ranks that read this error in the store raise ValueError.
    """
    world = dist.group.WORLD
    assert world is not None
    if not has_peers(world):
        return check()
    own_calls = _own_calls.setdefault(world, OwnCalls())
    own_calls.num_calls += 1
    # The number is 0 if the store was slow to answer this rank; most jobs have one default group only.
    life = record_of_group(world).life or 1
    board = _Board(dist.distributed_c10d._get_default_store(), f"pmoe/mesh/{life}")
    own = _next_call(board, text, own_calls)
    try:
        result = check()
        board.announce(own, members)
        board.come(own)
        _wait(board, own, members, own_calls, timeout_of(world))
    except BaseException as error:
        own_calls.left.add(own)
        with contextlib.suppress(RuntimeError):  # the store itself may have failed
            reason = f"rank {dist.get_rank()}: {error}"
            refusal = board.refuse(own, Refusal(reason, own_calls.num_calls, frozenset([own])))
            own_calls.left.update(refusal.calls)
            # The call may not be announced yet (`check` has failed). It is announced after its refusal, so
            # that a rank which reads the call finds the refusal, too, and does not wait for this rank.
            board.announce(own, members)
        raise
    own_calls.agreed[text] = own[1]
    return result


def _next_call(board: _Board, text: str, own_calls: OwnCalls) -> MeshCall:
    """Returns the call that this rank makes now with the mesh ``text``.

    The calls with one mesh are numbered. The result has the next number after the last call in which all
    ranks agreed. But refused calls are skipped in two cases:

    - This rank has raised the error of the refusal already, maybe in a call with another mesh.
    - This rank has made more calls, with any mesh, than the writer of the refusal had made when it wrote it
      (`Refusal.num_calls`).

    If the result is a refused call, this rank comes late to it, and `_wait` raises the error of the refusal.
    """
    number = own_calls.agreed.get(text, 0) + 1
    while refusal := board.refusal((text, number)):
        if refusal.num_calls >= own_calls.num_calls and not refusal.calls & own_calls.left:
            break
        number += 1
    return text, number


@dataclass(frozen=True)
class _Board:
    """Reads and writes the keys of the store by which ranks compare their calls.

    store: the default group's store.
    start: the beginning of all keys.
    """

    store: Any
    start: str

    def announce(self, call: MeshCall, members: Sequence[int]) -> None:
        """Publishes the call that this rank makes now, and the ranks of its mesh."""
        self.store.set(f"{self.start}/last/{dist.get_rank()}", json.dumps([*call, list(members)]))

    def last_call(self, rank: int) -> tuple[MeshCall, list[int]] | None:
        """Returns the last call of a rank, and the ranks of its mesh; None if it has made none."""
        key = f"{self.start}/last/{rank}"
        if not self.store.check([key]):
            return None
        text, number, members = json.loads(self.store.get(key))
        return (text, number), members

    def come(self, call: MeshCall) -> None:
        """Counts this rank among those that have come to a call."""
        self.store.add(self._key("come", call), 1)

    def num_come(self, call: MeshCall) -> int:
        """Returns how many ranks have come to a call."""
        return int(self.store.add(self._key("come", call), 0))

    def refuse(self, call: MeshCall, refusal: Refusal) -> Refusal:
        """Publishes a refusal for all ranks that come to a call, unless the call has a refusal already.

        Returns the refusal that the store then has, which is the first one.
        """
        published = json.dumps([refusal.error, refusal.num_calls, sorted(refusal.calls)])
        return _refusal_of(self.store.compare_set(self._key("refused", call), "", published))

    def refusal(self, call: MeshCall) -> Refusal | None:
        """Returns the refusal of a call that was refused; None for any other call."""
        key = self._key("refused", call)
        return _refusal_of(self.store.get(key)) if self.store.check([key]) else None

    def _key(self, kind: str, call: MeshCall) -> str:
        text, number = call
        return f"{self.start}/{kind}/{digest([text])}/{number}"


def _refusal_of(published: bytes) -> Refusal:
    """Returns the refusal that a rank has written into the store."""
    error, num_calls, calls = json.loads(published)
    return Refusal(error, num_calls, frozenset((text, number) for text, number in calls))


def _wait(
    board: _Board, own: MeshCall, members: Sequence[int], own_calls: OwnCalls, timeout: timedelta | None
) -> None:
    """Waits until all ranks of the mesh have made the same call as this rank.

    board: reads and writes the store by which ranks compare their calls.
    own: this rank's call.
    members: the global ranks of the mesh.
    own_calls: the record of this rank's calls.
    timeout: the timeout of the default group; None waits without a limit.

    Raises ValueError if any rank has refused the call. A rank that finds an error, such as a different mesh
    on another rank, refuses the call: it writes a `Refusal` into the store, and all ranks of the call raise.
    Raises RuntimeError if a rank has not come within the timeout.
    """
    begin = time.monotonic()
    pause = 0.001
    refused_since = dict[MeshCall, float]()
    groups = _groups_to_read([rank for rank in members if rank != dist.get_rank()])
    # The refusal comes first: the last rank of a mesh may come after the others have left.
    while (refusal := board.refusal(own)) is None and board.num_come(own) < len(members):
        refusal = _contradiction(board, own, len(members), next(groups), own_calls, refused_since)
        if refusal is not None:
            board.refuse(own, refusal)
            break
        if timeout is not None and time.monotonic() - begin > timeout.total_seconds():
            raise RuntimeError(_late(board, own, members, timeout.total_seconds()))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    if refusal is not None:
        raise ValueError(refusal.error)


def _groups_to_read(ranks: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yields the ranks in groups of at most `READ_AT_ONCE`, again and again without an end."""
    while True:
        for start in range(0, max(len(ranks), 1), READ_AT_ONCE):
            yield ranks[start : start + READ_AT_ONCE]


def _contradiction(
    board: _Board,
    own: MeshCall,
    num_members: int,
    ranks: Sequence[int],
    own_calls: OwnCalls,
    refused_since: dict[MeshCall, float],
) -> Refusal | None:
    """Returns a refusal of this rank's call, if the last call of another rank contradicts it; else None.

    The other rank's last call contradicts this rank's call in two cases:

    - It has a different mesh that contains this rank. The function then refuses the other rank's call, too.
    - It was refused, and the other rank has made no new call within `PATIENCE_SECONDS`.

    board: the keys of the store.
    own: this rank's call.
    num_members: number of ranks of this rank's mesh.
    ranks: the global ranks whose last calls are read.
    own_calls: the record of this rank's calls.
    refused_since: {refused call: time at which this rank first read of its refusal}. The function adds new
        entries.
    """
    for rank in ranks:
        last = board.last_call(rank)
        if last is None or last[0] == own:
            continue
        other, members = last
        refusal = board.refusal(other)
        if refusal:
            since = refused_since.setdefault(other, time.monotonic())
            if time.monotonic() - since > PATIENCE_SECONDS:
                late = f"rank {rank} has not come again within {PATIENCE_SECONDS:g} seconds"
                return Refusal(f"{refusal.error} ({late})", own_calls.num_calls, refusal.calls | {own})
        elif dist.get_rank() in members and own_calls.agreed.get(other[0], 0) < other[1]:
            # The other rank may have left this rank's call since `_wait` has read who has come to it. Then
            # the other rank's last call is its next one, and contradicts nothing.
            if board.refusal(own) is not None or board.num_come(own) == num_members:
                return None
            pair = sorted([(dist.get_rank(), own[0]), (rank, other[0])])
            texts = "; ".join(f"rank {number}: {text}" for number, text in pair)
            mismatch = Refusal(
                f"mesh must be the same on every rank, and differs: {texts}. Call init_device_mesh with the "
                "same arguments on all ranks, and pass the same part of the mesh",
                own_calls.num_calls,
                frozenset([own, other]),
            )
            board.refuse(other, mismatch)
            return mismatch
    return None


def _late(board: _Board, own: MeshCall, members: Sequence[int], seconds: float) -> str:
    """Returns an error message that names a rank that has not come to this rank's call.

    board: the keys of the store.
    own: this rank's call.
    members: the global ranks of the mesh.
    seconds: how long this rank has waited.
    """
    for rank in members:
        last = board.last_call(rank)
        if last is None or last[0] != own:
            instead = "none" if last is None else last[0][0]
            return (
                f"rank {rank} has not called pmoe.parallelize within {seconds:g} seconds with the mesh "
                f"{own[0]} of rank {dist.get_rank()}; the mesh of its last call: {instead}. Every rank of a "
                "mesh must call it with this mesh"
            )
    return f"pmoe.parallelize has waited for {seconds:g} seconds for the ranks of the mesh {own[0]}"
