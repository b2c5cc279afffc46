"""What a rank tells of its failure, in the store where ranks met: on the CPU, where the host waits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from pmoe.comm.agreement import gathered
from pmoe.comm.meeting import Meeting, left_out
from pmoe.comm.ranks import LOOK_AFTER, Ranks, at_stage, has_told
from pmoe.comm.standing import Standing, is_known, names_of_left_groups, standing_of

FAILED = "pmoe/failed"
"""Keys in the store of the ranks, by life (`pmoe.comm.standing.Standing`):

    pmoe/failed/LIFE              some rank has failed; without it nothing else is looked at
    pmoe/failed/LIFE/RANK         the group that the rank left, where (`Standing.left_at`), what it raised;
                                  empty once it goes on
    pmoe/failed/LIFE/RANK/GROUP   where the rank left that group, and what it raised; never emptied
"""


@contextlib.contextmanager
def all_fail_together(ranks: Ranks, *, stage: str) -> Iterator[None]:
    """Raises on every rank where the block raises on any: there its own error, elsewhere one that names the
    rank. Collective."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    known = (each for each in (TypeError, ValueError, ImportError) if isinstance(failed, each))
    kind = type(failed) if isinstance(failed, OSError) else next(known, RuntimeError)
    found = gathered(ranks, None if failed is None else (kind, str(failed)), stage=stage)
    if failed is not None:
        raise failed
    for rank, each in enumerate(found):
        if each is not None:
            raise each[0](f"rank {rank}: {each[1]}")


class PeerError(RuntimeError):
    """Another rank, which is waited for, has told what it raised."""


def leave(error: BaseException, ranks: Ranks, stage: str, *, by_itself: bool = True) -> None:
    """Records that this rank leaves a pass over ``ranks`` in the middle, and tells the peers.

    stage: where it leaves; "" where the error's own text says it. by_itself: whether the error is this rank's
    own, and not caused by a peer or a collective.
    """
    from torch.utils.checkpoint import _StopRecomputationError

    if isinstance(error, _StopRecomputationError):
        return  # torch raises it on all ranks, to end a checkpoint's second pass early
    if not dist.is_initialized() or ranks.group is None or not is_known(ranks.group):
        return
    standing = ranks.standing
    if not standing.left:
        where = f" in {stage}{' of ' if ranks.layer else ''}{ranks.layer}" if stage else ""
        standing.left = f"{type(error).__name__}{where}: {error}"
        standing.left_with = f"global rank {dist.get_rank()} raised {type(error).__name__}: {error}"
        standing.left_at = standing.place() if by_itself else ""
    tell(standing)


def tell(standing: Standing) -> None:
    """Tells peers the error with which this rank has left a pass over a group.

    The store holds it twice: for ranks that wait in the same group, as long as the group lasts, and for ranks
    that wait for this rank in any group, until this rank's next call.
    """
    rank, text = dist.get_rank(), standing.left_with[:4000]
    has_told.set()
    _to_take_back.add(_key(standing, rank))
    in_store = {
        _key(standing, rank): f"{standing.name}\n{standing.left_at}\n{text}",
        f"{_key(standing, rank)}/{standing.name}": f"{standing.left_at}\n{text}",
        _any_failed(standing): "",
    }
    _write(in_store)


def announce(error: BaseException) -> None:
    """Tells peers of an error outside of any pass, until this rank's next call. The rank leaves no group."""
    world = dist.group.WORLD
    if world is None:
        return
    standing, rank = standing_of(world), dist.get_rank()
    text = f"global rank {rank} raised {type(error).__name__}: {error}"[:4000]
    has_told.set()
    _to_take_back.add(_key(standing, rank))
    _write({_key(standing, rank): f"\n\n{text}", _any_failed(standing): ""})


PATIENCE_SECONDS = 3.0
"""How long a rank waits to hear where its peers left. A peer that waits for it leaves within a second."""


def settle(ranks: Ranks) -> bool:
    """Whether all ranks left the last pass by their own errors and after the same collectives.

    Then they are in step, and the group is whole again. Each rank reads where the others left. A rank that
    returns False must `tell` again, without a place: the others then stop waiting for it.
    """
    group, standing = ranks.group, ranks.standing
    assert group is not None
    store, end = dist.distributed_c10d._get_default_store(), time.monotonic() + PATIENCE_SECONDS
    keys = [f"{_key(standing, rank)}/{standing.name}" for rank in dist.get_process_group_ranks(group)]
    while standing.left_at:
        values = [store.get(key).decode() if store.check([key]) else "" for key in keys]
        places = [value.partition("\n")[0] for value in values if value]
        # A rank whose place is still that of the last time has not left again.
        told_now = [place for place in places if not place or place != standing.settled_at]
        if told_now == [standing.left_at] * ranks.size:
            standing.settled_at = standing.left_at
            standing.left = standing.left_with = standing.left_at = ""
            return True
        if set(told_now) - {standing.left_at} or time.monotonic() > end:
            standing.left_at = ""
        time.sleep(0.01)
    return False


_to_take_back: set[str] = set()


def take_back() -> None:
    """Empties what this rank has told, when it goes on in a whole group. Ranks that wait in a group that it
    has left are still told."""
    has_told.clear()
    if dist.is_initialized():
        _write(dict.fromkeys(_to_take_back, ""))
    _to_take_back.clear()


def _key(standing: Standing, rank: int) -> str:
    return f"{FAILED}/{standing.life}/{rank}"


def _any_failed(standing: Standing) -> str:
    return f"{FAILED}/{standing.life}"


def _write(values: dict[str, str]) -> None:
    """Writes values in their order. Waits 2 s at most: the store may be on a rank that has stopped."""
    store = dist.distributed_c10d._get_default_store()

    def write() -> None:
        with contextlib.suppress(RuntimeError):
            for key, value in values.items():
                store.set(key, value)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(2)


def wait_and_look(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Goes on waiting for a collective, as `pmoe.comm.ranks.wait_for`, and looks what peers have told."""
    told, looker = list[str](), None
    while not told:
        if work.is_completed():
            work.wait()  # raises again what it met
            return
        if looker is None or not looker.is_alive():
            looker = threading.Thread(target=_look, args=(group, told), daemon=True)
            looker.start()
        with contextlib.suppress(RuntimeError):
            work.wait(LOOK_AFTER)
            return
    raise PeerError(min(told, key=len))  # the others' tell of it in turn


def _look(group: dist.ProcessGroup, told: list[str]) -> None:
    with contextlib.suppress(RuntimeError):
        told += failures(group) or left_out(standing_of(group), group.rank(), range(group.size()))


def failures(group: dist.ProcessGroup) -> list[str]:
    """The failures that ranks of a group have told and that concern a rank that waits in the group."""
    store = dist.distributed_c10d._get_default_store()
    standing = standing_of(group)
    if not store.check([_any_failed(standing)]):
        return []

    def value_of(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    texts = []
    known_here = names_of_left_groups() - {standing.name}
    for rank in dist.get_process_group_ranks(group):
        place, _, in_group = value_of(f"{_key(standing, rank)}/{standing.name}").partition("\n")
        if in_group and not (place and place == standing.settled_at):
            texts.append(in_group)
        left, _, rest = value_of(_key(standing, rank)).partition("\n")
        # A failure in another group that this rank has left too says nothing about this one.
        if rest and left != standing.name and left not in known_here:
            texts.append(rest.partition("\n")[2])
    return texts


def meet(ranks: Ranks, why: str) -> None:
    """Waits until all ranks have come to the same call. why: as in `pmoe.comm.meeting.Meeting`.

    Raises RuntimeError where a peer tells that it will not come, or where the group's timeout passes.
    """
    from pmoe.comm.topology import timeout_of

    group = ranks.group
    assert group is not None
    with at_stage("waiting for the other ranks before a call", ranks):
        began, timeout = time.monotonic(), timeout_of(group) or dist.default_pg_timeout
        meeting = Meeting(group, ranks.standing, why)
        while not (meeting.is_complete or meeting.has_all(wait_for=LOOK_AFTER)):
            texts = failures(group)
            if texts:
                raise PeerError(min(texts, key=len))
            if time.monotonic() - began > timeout.total_seconds():
                raise RuntimeError(f"not all ranks have begun this call in {timeout}: this rank {why}")
            meeting.publish()
        meeting.leave()
