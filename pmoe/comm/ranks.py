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
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.standing import Standing, collectives, is_known, standing_of
from pmoe.warn import warn_once


class Ranks:
    """One rank's place in its expert-parallel group. group=None and size 1 mean no communication.

    Copies share the group; pickling leaves it out, and `reconnect` finds the default group again.

    layer: whose messages they carry, for errors; "" of no layer, and of one that was not called yet.
    takes_default: whether their group is the default one. A new default group may then take its place.
    by_default: whether no group or mesh was passed. A layer of one rank may then be an oversight, and its
        first call warns.
    number: the layer's number among the group's layers, from its first exchange of row counts on; 0 before.
    call: the number of the layer's last exchange of row counts, among all exchanges over the group.
    open_call: the number of the last call whose backward pass may follow (`Standing.open_calls`).
    """

    size: int
    rank: int
    layer: str

    layer, _first_calls = "", itertools.count(1)
    takes_default: bool = False
    by_default: bool = False
    number: int = 0
    call: int = 0
    open_call: int = 0
    _standing: Standing | None = None

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
            if not is_known(group):
                raise ValueError(f"group ({group.group_name}) must not be destroyed (destroy_process_group)")
            self.takes_default = group is dist.group.WORLD
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
        if self.group is None:
            return []
        try:
            return dist.get_process_group_ranks(self.group)
        except KeyError:
            self._refuse_destroyed()

    @property
    def name(self) -> str:
        """Tells groups of this process apart; the same on all their ranks."""
        return "" if self.group is None else f"{self.group.group_name} {self.members}"

    @property
    def standing(self) -> Standing:
        """This rank's record of the group, which must have several ranks."""
        if self._standing is None:
            assert self.group is not None
            self._standing = standing_of(self.group)
        return self._standing

    def reconnect(self) -> bool:
        """Takes the default group after unpickling, or after that group was destroyed and made again.

        Returns whether the new group replaces a destroyed one. Raises RuntimeError where the group was
        destroyed and none replaces it, ValueError where the default group has another size than before.
        """
        if self.size == 1 or (self.group is not None and is_known(self.group)):
            return False  # one rank alone needs no group
        was_destroyed = self.group is not None
        if was_destroyed and not (self.takes_default and dist.is_initialized()):
            self._refuse_destroyed()
        default = Ranks()
        if (default.rank, default.size) != (self.rank, self.size):
            before = "before it was destroyed" if was_destroyed else "when the layer was pickled"
            raise ValueError(
                f"group (rank {default.rank} of {default.size} by default) must be rank {self.rank} of "
                f"{self.size}, as {before}; initialise torch.distributed so, or build anew"
            )
        self.group, self.takes_default = default.group, True
        self.number, self.call, self.open_call, self._standing = 0, 0, 0, None
        return was_destroyed

    def _refuse_destroyed(self) -> NoReturn:
        assert self.group is not None
        cure = "build the model anew on groups that exist, and load its checkpoint (pmoe.load_checkpoint)"
        if self.takes_default:
            place = f"rank {self.rank} of {self.size}"
            cure = f"call torch.distributed.init_process_group again, as {place}, and go on"
        raise RuntimeError(
            f"the process group of {self.layer or 'a MoELayer'} ({self.group.group_name}, {self}) was "
            f"destroyed (torch.distributed.destroy_process_group): {cure}"
        )

    def begin_call(self, changed: str = "") -> None:
        """Begins a call. A layer without a name is called by its number among the process's first calls.

        changed: the options that were changed since the last call, in words; all ranks meet for them. "" for
        none.

        Raises RuntimeError, and tells the peers, where this rank has left a pass of the group in the middle.
        """
        if self.size > 1:
            self.check_whole()
            is_open = self.open_call in self.standing.open_calls and torch._C._current_graph_task_id() == -1
            if changed or is_open:
                from pmoe.comm import meeting, told

                told.meet(self, changed or meeting.IS_OPEN)
        elif self.by_default:
            self._warn_alone()
        if has_told.is_set():
            from pmoe.comm import told

            told.take_back()
        self.layer = self.layer or f"MoELayer {next(self._first_calls)}"

    def _warn_alone(self) -> None:
        """At the first call of a layer of one rank, warns if there are other ranks by now."""
        self.by_default = False
        is_initialized = dist.is_available() and dist.is_initialized()
        if self.group is None and is_initialized and dist.get_world_size() > 1:
            warn_once(
                "a MoELayer that was built before init_process_group holds all of its experts on this rank "
                f"of {dist.get_world_size()}: spread it by pmoe.parallelize(model, mesh), before the "
                "optimizer and wrappers are made. If one rank is meant, build it with "
                "group=pmoe.comm.ranks.Ranks.single()"
            )

    def count_exchange(self) -> None:
        """Counts an exchange of row counts, when it begins."""
        self.standing.exchanges += 1
        self.standing.begun_before = collectives.begun
        self.call = self.standing.exchanges

    def expect_backward(self, device: torch.device) -> int:
        """Notes that a backward pass may follow this forward pass. Returns the number for `backward_pass`.

        Notes nothing and returns 0 for passes on a GPU, and for a checkpoint's second passes, which run in a
        backward pass.
        """
        if self.size == 1 or device.type != "cpu" or torch._C._current_graph_task_id() != -1:
            return 0
        self.open_call = self.call
        self.standing.open_call(self.call)
        return self.call

    def backward_pass(self, number: int) -> contextlib.AbstractContextManager[None]:
        """A context for the backward pass of the call for which `expect_backward` gave this number.

        Raises as `begin_call` does.
        """
        if self.size == 1:
            return contextlib.nullcontext()
        self.check_whole()
        return self.standing.backward_pass(number, self.layer)

    def take_number(self) -> None:
        """Numbers a layer after its first exchange of row counts, which is the same one on all ranks."""
        self.standing.num_layers += 1
        self.number = self.standing.num_layers

    def check_whole(self) -> None:
        """Raises RuntimeError, and tells the peers, where this rank has left a pass in the middle.

        Returns if all ranks left it after the same collectives; to find out, it may wait some seconds.
        """
        if self.size == 1 or not self.standing.left:
            return
        from pmoe.comm import told

        standing = self.standing
        if told.settle(self):
            return
        cure = "end all processes and start again from the last checkpoint"
        if self.takes_default:
            cure += (
                ", or call destroy_process_group() and init_process_group() of torch.distributed on all "
                "ranks, with a new store under torchrun (docs/troubleshooting.md), and go on"
            )
        error = RuntimeError(
            f"pmoe: {self} left its process group in the middle of a pass ({standing.left}), and the group's "
            f"collectives do not match any more: {cure}"
        )
        told.tell(standing)
        raise error

    def of_layer(self, name: str) -> Ranks:
        named = copy.copy(self)
        named.group, named.layer = self.group, name  # a copy is made as a pickle is
        named.takes_default, named.by_default = self.takes_default, self.by_default
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
        told.leave(failed, ranks, stage="", by_itself=False)
        raise failed from error
    except BaseException as error:
        if ranks.size > 1:
            from pmoe.comm import told

            told.leave(error, ranks, stage)
        raise


# ---- waiting for peers, and telling them of a failure (`pmoe.comm.told`)


LOOK_AFTER = datetime.timedelta(seconds=0.5)
"""How long a collective is waited for before this rank looks whether a peer has failed, and between looks."""

has_told: threading.Event = threading.Event()
"""Set where peers have been told that this rank failed, until its next call over a group that is whole."""


@contextlib.contextmanager
def telling(ranks: Ranks, stage: str) -> Iterator[None]:
    """Tells peers of an error in the block, by which this rank leaves a pass in the middle.

    Peers may wait for this rank. The block is for errors that one rank alone may raise (users' code, a failed
    allocation). Errors that all ranks raise together must not be told.

    stage: a name of the block, for the message of this rank's next call.
    """
    try:
        yield
    except BaseException as error:
        if ranks.size > 1:
            from pmoe.comm import told

            told.leave(error, ranks, stage)
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
    collectives.begun += 1
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

    def reconnect(self) -> bool:
        """Finds a group again after unpickling, or after it was destroyed: see `Ranks.reconnect`.

        A layer of a mesh must be built anew.
        """
        if self.is_sharded and self.all.group is None:
            raise ValueError("mesh (lost by pickling) must be given anew: build the layer and load its state")
        return self.all.reconnect()


@functools.lru_cache(maxsize=64)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once: each copy to a GPU would be a synchronisation."""
    return torch.tensor(places, device=device)
