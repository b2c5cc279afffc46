"""The ranks that share the experts: a process group, or one rank without any; and their grid."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """One rank's place in its expert-parallel group. group=None and size 1 mean no communication.

    Copies share the group; pickling leaves it out, and `reconnect` finds the default group again.

    layer: whose messages they carry, for errors; "" of no layer, and of one that was not called yet.
    """

    size: int
    rank: int
    layer: str

    layer, _first_calls = "", itertools.count(1)

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.size = 1
        self.rank = 0
        if group is not None:
            given: object = group
            if not isinstance(given, dist.ProcessGroup):  # who is no member has a number of `new_group`
                name = "GroupMember.NON_GROUP_MEMBER" if isinstance(given, int) else type(given).__name__
                rank = dist.get_rank() if dist.is_initialized() else 0
                raise ValueError(f"group ({name}) must contain this rank (global rank {rank})")
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @staticmethod
    def single() -> Ranks:
        """One rank, whatever torch.distributed knows of others."""
        ranks = Ranks.__new__(Ranks)
        ranks.group, ranks.size, ranks.rank = None, 1, 0
        return ranks

    @property
    def members(self) -> list[int]:
        """Global ranks; none without a group."""
        return [] if self.group is None else dist.get_process_group_ranks(self.group)

    @property
    def name(self) -> str:
        """Tells groups of this process apart; the same on all their ranks."""
        return "" if self.group is None else f"{self.group.group_name} {self.members}"

    def reconnect(self) -> None:
        """Takes the default group after unpickling; ValueError where it is not of the size it was."""
        if self.group is not None or self.size == 1:
            return  # one rank alone needs no group
        found = Ranks()
        if (found.rank, found.size) != (self.rank, self.size):
            raise ValueError(
                f"group (rank {found.rank} of {found.size} by default) must be rank {self.rank} of "
                f"{self.size}, as when the layer was pickled; initialise torch.distributed so, or build anew"
            )
        self.group = found.group

    def begin_call(self) -> None:
        """A layer that nobody named is known by its number among the process's first calls."""
        if has_told.is_set():
            from pmoe.comm import told

            told.tell(None)
        self.layer = self.layer or f"MoELayer {next(self._first_calls)}"

    def of_layer(self, name: str) -> Ranks:
        named = copy.copy(self)
        named.group, named.layer = self.group, name  # a copy is made as a pickle is
        return named

    def __deepcopy__(self, memo: dict[int, object]) -> Ranks:
        return self.of_layer("")

    def __getstate__(self) -> dict[str, object]:
        return {"group": None, "size": self.size, "rank": self.rank}

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"


@contextlib.contextmanager
def at_stage(stage: str, ranks: Ranks) -> Iterator[None]:
    """Names the stage and this rank in whatever a collective raises: a peer that died or never came."""
    try:
        yield
    except RuntimeError as error:
        if ranks.size == 1:
            raise
        from pmoe.comm import told

        late = "a peer has died, never arrived, or took longer than the group's timeout: "
        failed = RuntimeError(
            f"pmoe: {ranks} failed in {stage}{' of ' if ranks.layer else ''}{ranks.layer}; "
            f"{'' if isinstance(error, told.PeerError) else late}{error}"
        )
        told.tell(failed)
        raise failed from error


# ---- waiting for peers, and telling them of a failure (`pmoe.comm.told`)


LOOK_AFTER = datetime.timedelta(seconds=0.5)
"""How long a collective is waited for before this rank looks whether a peer has failed, and between looks."""

has_told: threading.Event = threading.Event()
"""Set where peers have been told that this rank failed, until its next call."""


@contextlib.contextmanager
def telling(ranks: Ranks) -> Iterator[None]:
    """Tells peers, which may wait for this rank, what is raised in here. It is for what one rank alone may
    raise (users' code, a failed allocation); what all ranks raise together must not be told."""
    try:
        yield
    except BaseException as error:
        if ranks.size > 1:
            from pmoe.comm import told

            told.tell(error)
        raise


def wait_for(work: dist.Work, group: dist.ProcessGroup | None, on_gpu: bool = False) -> None:
    """Waits for a collective. On the CPU it raises PeerError where a rank of the group has told that it
    failed; on a GPU the current stream waits."""
    if group is None or on_gpu or not hasattr(work, "is_completed"):
        work.wait()
        return
    with contextlib.suppress(RuntimeError):
        work.wait(LOOK_AFTER)
        return
    from pmoe.comm import told

    told.wait_and_look(work, group)


def reduce_to_largest(values: Tensor, group: dist.ProcessGroup | None) -> None:
    """Makes each value the largest that a rank of the group has. Collective, waited for as by `wait_for`."""
    wait_for(dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True), group, values.is_cuda)


# ---- where a rank stands among a layer's W = P * L ranks: P across the nodes (EP), over which experts are
# spread, and L inside its node (ESP), over which each expert's hidden columns are split


@dataclass(frozen=True)
class Grid:
    """all: the W ranks, who exchange row counts. across: those P that hold the same part of other experts,
    among whom rows are dispatched. inside: the L that hold the other parts of the same experts.

    order: (W,) the rank in ``all`` of each place, by (inside, across): the order in which gathered rows lie.
    """

    all: Ranks
    across: Ranks
    inside: Ranks
    order: tuple[int, ...] = ()

    @staticmethod
    def of_group(group: dist.ProcessGroup | Ranks | None) -> Grid:
        """All ranks across, none inside."""
        ranks = group if isinstance(group, Ranks) else Ranks(group)
        return Grid(ranks, ranks, Ranks.single(), tuple(range(ranks.size)))

    @functools.cached_property
    def is_sharded(self) -> bool:
        return self.inside.size > 1

    def to_owners(self, counts_FPX: Tensor) -> Tensor:
        """What each of the W ranks is told, (F, W, X), of counts for the P places across: every rank that
        holds a part of an expert hears of its rows."""
        if not self.is_sharded:
            return counts_FPX
        across = {rank: at % self.across.size for at, rank in enumerate(self.order)}
        places = tuple(across[rank] for rank in range(self.all.size))
        return counts_FPX.index_select(1, _index(places, counts_FPX.device))

    def by_arrival(self, recv_FWX: Tensor) -> Tensor:
        """What each of the W ranks has for this one, in the order in which gathered rows lie."""
        if not self.is_sharded:
            return recv_FWX
        return recv_FWX.index_select(1, _index(self.order, recv_FWX.device))

    def of_own_place(self, arrival_FWX: Tensor) -> Tensor:
        """Of `by_arrival`, what comes to this rank itself, (F, P, X), before it is gathered."""
        start = self.inside.rank * self.across.size
        return arrival_FWX[:, start : start + self.across.size]

    def reconnect(self) -> None:
        """After unpickling: see `Ranks.reconnect`. A layer of a mesh must be built anew."""
        if self.is_sharded and self.all.group is None:
            raise ValueError("mesh (lost by pickling) must be given anew: build the layer and load its state")
        self.all.reconnect()


@functools.lru_cache(maxsize=64)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once: each copy to a GPU would be a synchronisation."""
    return torch.tensor(places, device=device)
