"""Compares the device meshes that ranks pass to `pmoe.parallelize`, without any collective.

Ranks with different meshes would start collectives over different groups, and wait for each other. So the
comparison uses no group, only the default group's store, which every rank can read:

    last/RANK               the last call of a rank: its mesh, the call's number, the mesh's ranks
    come/MESH/NUMBER        how many ranks have come to the call with this mesh and number
    refused/MESH/NUMBER     the error with which the ranks leave this call
    refusing/MESH/NUMBER    how many ranks have refused the call; the first of them writes the error

All keys begin with pmoe/mesh/LIFE/ (`GroupRecord.life`). MESH is a digest of the mesh's text, and NUMBER
counts the calls with one mesh; a refused call counts for all ranks. A rank waits until all ranks of its mesh
have come. Meanwhile it reads the last calls of these ranks:

    another mesh with this rank      the meshes differ: an error for the ranks of both calls
    a call that was refused          an error, unless another call follows within `PATIENCE_SECONDS`
    another mesh without this rank   an earlier call of that rank with other ranks: waits

Ranks outside the mesh are not asked, because they may call `pmoe.parallelize` with meshes of their own.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pmoe.comm.agreement import digest
from pmoe.comm.group_options import timeout_of
from pmoe.comm.group_record import record_of_group

T = TypeVar("T")

PATIENCE_SECONDS = 5.0
"""How long a rank whose call was refused may take until its next call, before others raise an error."""

LONGEST_PAUSE_SECONDS = 0.5
"""Longest pause of a waiting rank between two readings of the store."""

READ_AT_ONCE = 16
"""How many ranks' last calls a waiting rank reads in one turn.

It limits the load of the store in jobs of thousands of ranks.
"""

MeshCall = tuple[str, int]
"""A call of `pmoe.parallelize`: its mesh in words, and its number among a rank's calls with this mesh."""


_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = weakref.WeakKeyDictionary()
"""The number of this rank's last call in which all ranks agreed, by default group and by mesh."""


def agree_on_mesh(text: str, members: Sequence[int], check: Callable[[], T]) -> T:
    """Waits until all ranks of a mesh have come with the same mesh. Returns the result of ``check``.

    text: the mesh in words, by which ranks compare it.
    members: the global ranks of the mesh.
    check: checks this rank's mesh by itself, before this rank waits for others.

    Raises ValueError, on all ranks that wait for each other, if a rank of the mesh passes another mesh that
    contains this rank, or if its call was refused. Raises the errors of ``check``. If a rank does not come
    within the timeout of the default group, the first rank that notices raises RuntimeError, and ranks that
    read of it raise ValueError.
    """
    world = dist.group.WORLD
    assert world is not None
    if dist.get_backend(world) == "fake":
        return check()  # torch's group for tests in one process, to which no other rank ever comes
    agreed = _agreed.setdefault(world, {})
    # The number is 0 if the store was slow to answer this rank; most jobs have one default group only.
    life = record_of_group(world).life or 1
    board = _Board(dist.distributed_c10d._get_default_store(), f"pmoe/mesh/{life}")
    own = (text, agreed.get(text, 0) + 1)
    while board.refusal(own):
        own = (text, own[1] + 1)
    board.announce(own, members)
    try:
        result = check()
        board.come(own)
        _wait(board, own, members, agreed, timeout_of(world))
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store itself may have failed
            board.refuse(own, f"rank {dist.get_rank()}: {error}")
        raise
    agreed[text] = own[1]
    return result


@dataclass(frozen=True)
class _Board:
    """The keys of the store by which ranks compare their calls. Everyone can read all of them.

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

    def refuse(self, call: MeshCall, error: str) -> None:
        """Publishes an error for all ranks that come to a call, if no rank has published one for it."""
        if self.store.add(self._key("refusing", call), 1) == 1:
            self.store.set(self._key("refused", call), error)

    def refusal(self, call: MeshCall) -> str:
        """Returns the error of a call that was refused; "" for any other call."""
        key = self._key("refused", call)
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""

    def _key(self, kind: str, call: MeshCall) -> str:
        text, number = call
        return f"{self.start}/{kind}/{digest([text])}/{number}"


def _wait(
    board: _Board, own: MeshCall, members: Sequence[int], agreed: Mapping[str, int], timeout: timedelta | None
) -> None:
    """Waits until all ranks of the mesh have come to this rank's call.

    board: the keys of the store.
    own: this rank's call.
    members: the global ranks of the mesh.
    agreed: the number of this rank's last call in which all ranks agreed, by mesh.
    timeout: the timeout of the default group; None waits without a limit.

    Raises ValueError if the call is refused, RuntimeError after the timeout.
    """
    begin = time.monotonic()
    pause = 0.001
    refused_since = dict[MeshCall, float]()
    turns = _in_turns([rank for rank in members if rank != dist.get_rank()])
    while board.num_come(own) < len(members):
        refusal = board.refusal(own) or _contradiction(board, own, next(turns), agreed, refused_since)
        if refusal:
            board.refuse(own, refusal)
            raise ValueError(refusal)
        if timeout is not None and time.monotonic() - begin > timeout.total_seconds():
            raise RuntimeError(_late(board, own, members, timeout.total_seconds()))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _in_turns(ranks: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yields parts of ``ranks`` of at most `READ_AT_ONCE` each, in turn and without an end."""
    while True:
        for start in range(0, max(len(ranks), 1), READ_AT_ONCE):
            yield ranks[start : start + READ_AT_ONCE]


def _contradiction(
    board: _Board,
    own: MeshCall,
    ranks: Sequence[int],
    agreed: Mapping[str, int],
    refused_since: dict[MeshCall, float],
) -> str:
    """Returns the error that the last calls of some ranks mean for this rank's call; "" for none.

    If a rank has another mesh that contains this rank, its call is refused, too.

    board, own, agreed: the arguments of `_wait`.
    ranks: the global ranks whose last calls are read.
    refused_since: when this rank has first read that other ranks' calls were refused; it is updated.
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
                return f"{refusal} (rank {rank} has not come again within {PATIENCE_SECONDS:g} seconds)"
        elif dist.get_rank() in members and agreed.get(other[0], 0) < other[1]:
            pair = sorted([(dist.get_rank(), own[0]), (rank, other[0])])
            texts = "; ".join(f"rank {number}: {text}" for number, text in pair)
            message = (
                f"mesh must be the same on every rank, and differs: {texts}. Call init_device_mesh with the "
                "same arguments on all ranks, and pass the same part of the mesh"
            )
            board.refuse(other, message)
            return message
    return ""


def _late(board: _Board, own: MeshCall, members: Sequence[int], seconds: float) -> str:
    """Returns the error for ranks that have not come to this rank's call within some seconds.

    The other arguments are those of `_wait`.
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
