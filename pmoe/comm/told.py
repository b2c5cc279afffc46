"""What a rank tells of its failure, in the store where ranks met: on the CPU, where the host waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch.distributed as dist

from pmoe.comm.agreement import gathered
from pmoe.comm.ranks import LOOK_AFTER, Ranks, has_told

FAILED = "pmoe/failed"
"""The key that says that some rank has failed; each rank's own is below it, empty once the rank goes on."""


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


def tell(error: BaseException | None) -> None:
    """None takes back what was told."""
    if not dist.is_initialized():
        return
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()

    def write() -> None:
        with contextlib.suppress(RuntimeError):
            text = "" if error is None else f"global rank {rank} raised {type(error).__name__}: {error}"
            store.set(f"{FAILED}/{rank}", text[:4000])
            store.set(FAILED, "")

    has_told.set() if error is not None else has_told.clear()
    writer = threading.Thread(target=write, daemon=True)  # the store may be on a rank that has stopped
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
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):
        if store.check([FAILED]):
            keys = [f"{FAILED}/{rank}" for rank in dist.get_process_group_ranks(group)]
            told += filter(None, (store.get(key).decode() for key in keys if store.check([key])))
