"""Failure reports: a rank that fails publishes its error, so that its peers stop waiting for it.

Reports are written to the default group's store. A rank that waits on the CPU for a collective looks there
every `LOOK_AFTER`, and raises `PeerError` if it finds a report that concerns it:

    rank 0   collective: waits ... looks into the store: raises PeerError with rank 1's error
    rank 1   raises an error: writes it into the store, and never comes to the collective

On a GPU the host does not wait for collectives, so nothing looks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from pmoe.comm.agreement import gathered
from pmoe.comm.group_record import Standing, is_known, names_of_left_groups, standing_of
from pmoe.comm.meeting import Meeting, left_out
from pmoe.comm.ranks import LOOK_AFTER, Ranks, at_stage, has_told

FAILED = "pmoe/failed"
"""Beginning of all keys of failure reports. LIFE is `Standing.life`, RANK a global rank:

    pmoe/failed/LIFE              set when any rank has failed; while it is missing, no other key is read
    pmoe/failed/LIFE/RANK         three lines: the name of the group that the rank left, `Standing.left_at`,
                                  and its error; empty when the rank has gone on
    pmoe/failed/LIFE/RANK/GROUP   two lines: `Standing.left_at` and the error with which the rank left that
                                  group; it stays
"""


@contextlib.contextmanager
def all_fail_together(ranks: Ranks, *, stage: str) -> Iterator[None]:
    """Raises on every rank if the block raises on any rank. Collective.

    The failed rank raises its own error. The others raise one with its text and the number of the failed
    rank: a TypeError, ValueError, ImportError, OSError or an error of its class if it was one, else a
    RuntimeError.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    known = (kind for kind in (TypeError, ValueError, ImportError) if isinstance(failed, kind))
    error_type = type(failed) if isinstance(failed, OSError) else next(known, RuntimeError)
    failures = gathered(ranks, None if failed is None else (error_type, str(failed)), stage=stage)
    if failed is not None:
        raise failed
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise failure[0](f"rank {rank}: {failure[1]}")


class PeerError(RuntimeError):
    """Raised by a rank that waits for a peer which has published its failure."""


def leave(error: BaseException, ranks: Ranks, stage: str, *, by_itself: bool = True) -> None:
    """Records that this rank leaves a pass over ``ranks`` in the middle, and publishes the failure.

    Only the first error by which it leaves the group is recorded.

    stage: where it leaves, in words; "" if the error's own text says so.
    by_itself: whether the error is this rank's own, not caused by a peer or a collective.
    """
    from torch.utils.checkpoint import _StopRecomputationError

    if isinstance(error, _StopRecomputationError):
        return  # no failure: torch raises it on all ranks, to end a checkpoint's second pass early
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
    """Publishes the error with which this rank has left a pass over a group.

    The store holds it under two keys (`FAILED`). The one with the group's name stays, because ranks that wait
    in that group wait in vain until it is destroyed. The other one is for ranks that wait for this rank in
    any group; this rank's next call empties it.
    """
    rank = dist.get_rank()
    text = standing.left_with[:4000]
    has_told.set()
    _to_take_back.add(_key(standing, rank))
    in_store = {
        _key(standing, rank): f"{standing.name}\n{standing.left_at}\n{text}",
        f"{_key(standing, rank)}/{standing.name}": f"{standing.left_at}\n{text}",
        _any_failed(standing): "",
    }
    _write(in_store)


def announce(error: BaseException) -> None:
    """Publishes an error outside of any pass. The rank leaves no group; its next call empties the report."""
    world = dist.group.WORLD
    if world is None:
        return
    standing = standing_of(world)
    rank = dist.get_rank()
    text = f"global rank {rank} raised {type(error).__name__}: {error}"[:4000]
    has_told.set()
    _to_take_back.add(_key(standing, rank))
    _write({_key(standing, rank): f"\n\n{text}", _any_failed(standing): ""})


PATIENCE_SECONDS = 3.0
"""How long a rank waits for its peers to report where they left. A peer that waits leaves in a second."""


def settle(ranks: Ranks) -> bool:
    """Returns whether all ranks left the last pass by errors of their own, after the same collectives.

    If so, they are in step, and the group is whole again: this rank's record of leaving is cleared. Each rank
    reads in the store where the others left, for at most `PATIENCE_SECONDS`.

    A rank that gets False must call `tell` again. That publishes an empty place, so that the others see that
    they are not in step and stop waiting.
    """
    group = ranks.group
    standing = ranks.standing
    assert group is not None
    store = dist.distributed_c10d._get_default_store()
    end = time.monotonic() + PATIENCE_SECONDS
    keys = [f"{_key(standing, rank)}/{standing.name}" for rank in dist.get_process_group_ranks(group)]
    while standing.left_at:
        values = [store.get(key).decode() if store.check([key]) else "" for key in keys]
        places = [value.partition("\n")[0] for value in values if value]
        # Reports stay in the store. A rank whose place is still that of the last time has not left again.
        new_places = [place for place in places if not place or place != standing.settled_at]
        if new_places == [standing.left_at] * ranks.size:
            standing.settled_at = standing.left_at
            standing.left = standing.left_with = standing.left_at = ""
            return True
        if set(new_places) - {standing.left_at} or time.monotonic() > end:
            standing.left_at = ""
        time.sleep(0.01)
    return False


_to_take_back: set[str] = set()
"""Keys of this rank's reports that its next call empties."""


def take_back() -> None:
    """Empties this rank's reports, when it goes on in a whole group.

    A report for the ranks that wait in a group that this rank has left stays.
    """
    has_told.clear()
    if dist.is_initialized():
        _write(dict.fromkeys(_to_take_back, ""))
    _to_take_back.clear()


def _key(standing: Standing, rank: int) -> str:
    return f"{FAILED}/{standing.life}/{rank}"


def _any_failed(standing: Standing) -> str:
    return f"{FAILED}/{standing.life}"


def _write(values: dict[str, str]) -> None:
    """Writes values into the store, in their order. Returns after 2 seconds at the latest.

    The store may be on a rank that has stopped, and never answer.
    """
    store = dist.distributed_c10d._get_default_store()

    def write() -> None:
        with contextlib.suppress(RuntimeError):
            for key, value in values.items():
                store.set(key, value)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(2)


def wait_and_look(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Goes on with `pmoe.comm.ranks.wait_for` on the CPU, and looks in between for reports of failures.

    Raises PeerError if there is one. A thread looks, because the store may not answer.
    """
    reports = list[str]()
    looker = None
    while not reports:
        if work.is_completed():
            work.wait()  # raises the collective's error, if it has failed
            return
        if looker is None or not looker.is_alive():
            looker = threading.Thread(target=_look, args=(group, reports), daemon=True)
            looker.start()
        with contextlib.suppress(RuntimeError):
            work.wait(LOOK_AFTER)
            return
    raise PeerError(min(reports, key=len))  # the shortest is the cause: peers' errors quote each other's


def _look(group: dist.ProcessGroup, told: list[str]) -> None:
    """Adds to ``told`` the reports, and else the meetings, that show that a collective will not end."""
    with contextlib.suppress(RuntimeError):
        told += failures(group) or left_out(standing_of(group), group.rank(), range(group.size()))


def failures(group: dist.ProcessGroup) -> list[str]:
    """Returns published errors of a group's ranks because of which waiting in the group is in vain."""
    store = dist.distributed_c10d._get_default_store()
    standing = standing_of(group)
    if not store.check([_any_failed(standing)]):
        return []

    def value_of(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    texts = []
    known_here = names_of_left_groups() - {standing.name}
    for rank in dist.get_process_group_ranks(group):
        # The rank has left this group, and not in step with all others (`settle`).
        place, _, in_group = value_of(f"{_key(standing, rank)}/{standing.name}").partition("\n")
        if in_group and not (place and place == standing.settled_at):
            texts.append(in_group)
        left, _, rest = value_of(_key(standing, rank)).partition("\n")
        # The rank has left another group, or no group (`announce`). If this rank has left that group too, the
        # report says nothing about the present group.
        if rest and left != standing.name and left not in known_here:
            texts.append(rest.partition("\n")[2])
    return texts


def meet(ranks: Ranks, why: str) -> None:
    """Waits until all ranks have come to the same call (`pmoe.comm.meeting`).

    why: as in `Meeting`.

    Raises RuntimeError if a peer has failed or publishes that it will not come, and after the group's
    timeout.
    """
    from pmoe.comm.topology import timeout_of

    group = ranks.group
    assert group is not None
    with at_stage("waiting for the other ranks before a call", ranks):
        began = time.monotonic()
        timeout = timeout_of(group) or dist.default_pg_timeout
        meeting = Meeting(group, ranks.standing, why)
        while not (meeting.is_complete or meeting.has_all(wait_for=LOOK_AFTER)):
            texts = failures(group)
            if texts:
                raise PeerError(min(texts, key=len))
            if time.monotonic() - began > timeout.total_seconds():
                raise RuntimeError(f"not all ranks have begun this call within {timeout}: this rank {why}")
            meeting.publish()
        meeting.leave()
