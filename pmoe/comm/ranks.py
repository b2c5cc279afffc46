"""The ranks that share a layer's experts: a process group, or one rank without a group; their grid."""

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

from pmoe.comm.group_record import Standing, collectives, is_known, standing_of
from pmoe.warn import warn_once


class Ranks:
    """One rank's place in its expert-parallel group. A single rank has no group and does not communicate.

    Copies share the group. Pickling leaves the group out; `reconnect` then takes the default group.

    group: None takes the default group if torch.distributed is initialised, else there is a single rank.
    size, rank: the number of ranks in the group, and this rank's number in it.
    layer: the name, in errors, of the layer that owns this object; "" before the layer's first call.
    takes_default: whether the group is the default one. A new default group may then take its place.
    by_default: whether the user passed no group or mesh. A layer of one rank may then be an oversight, so its
        first call warns if there are other ranks.
    number: the layer's number among the group's layers, from its first exchange of row counts on; 0 before.
    call: the number of the layer's last exchange of row counts, among all exchanges over the group.
    open_call: the number of the last call whose backward pass may follow (`Standing.open_calls`).

    Raises ValueError if this rank is not in ``group``, or if ``group`` was destroyed.
    """

    size: int
    rank: int
    layer: str

    layer = ""
    _first_calls = itertools.count(1)
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
            candidate: object = group
            # To a rank outside of a new group, torch.distributed.new_group returns an integer in its place.
            if not isinstance(candidate, dist.ProcessGroup):
                name = (
                    "GroupMember.NON_GROUP_MEMBER" if isinstance(candidate, int) else type(candidate).__name__
                )
                rank = dist.get_rank() if dist.is_initialized() else 0
                raise ValueError(f"group ({name}) must contain this rank (global rank {rank})")
            if not is_known(group):
                raise ValueError(f"group ({group.group_name}) must not be destroyed (destroy_process_group)")
            self.takes_default = group is dist.group.WORLD
            self.rank = dist.get_rank(group)
            self.size = dist.get_world_size(group)

    @staticmethod
    def single() -> Ranks:
        """Returns a single rank without a group, also if torch.distributed is initialised."""
        ranks = Ranks.__new__(Ranks)
        ranks.group = None
        ranks.size = 1
        ranks.rank = 0
        return ranks

    @property
    def members(self) -> list[int]:
        """The global ranks of the group, in group order; [] without a group.

        Raises RuntimeError if the group was destroyed.
        """
        if self.group is None:
            return []
        try:
            return dist.get_process_group_ranks(self.group)
        except KeyError:
            self._refuse_destroyed()

    @property
    def name(self) -> str:
        """A text for each group of this process, the same on all ranks of the group; "" without a group."""
        return "" if self.group is None else f"{self.group.group_name} {self.members}"

    @property
    def standing(self) -> Standing:
        """This rank's record of the group. There must be a group."""
        if self._standing is None:
            assert self.group is not None
            self._standing = standing_of(self.group)
        return self._standing

    def reconnect(self) -> bool:
        """Takes the default group if the group was lost by pickling, or was a destroyed default group.

        Returns whether the new group replaces a destroyed one.

        Raises RuntimeError if the group was destroyed and no other can replace it, and ValueError if the
        default group has another size, or this rank another place in it, than before.
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
                f"group (the default one, with this process as rank {default.rank} of {default.size}) must "
                f"have it as rank {self.rank} of {self.size}, as {before}: call init_process_group with that "
                "rank and world_size, or build the layer again"
            )
        self.group = default.group
        self.takes_default = True
        # The new group has made no calls yet.
        self.number = 0
        self.call = 0
        self.open_call = 0
        self._standing = None
        return was_destroyed

    def _refuse_destroyed(self) -> NoReturn:
        """Raises RuntimeError, which says what to do after the group was destroyed."""
        assert self.group is not None
        cure = "build the model again on groups that exist, and load its checkpoint (pmoe.load_checkpoint)"
        if self.takes_default:
            place = f"rank {self.rank} of {self.size}"
            cure = f"call torch.distributed.init_process_group again, as {place}, and go on"
        raise RuntimeError(
            f"the process group of {self.layer or 'a MoELayer'} ({self.group.group_name}, {self}) was "
            f"destroyed (torch.distributed.destroy_process_group): {cure}"
        )

    def begin_call(self, changed: str = "") -> None:
        """Begins a call: checks the group, meets the peers if their calls may differ, names the layer.

        A layer without a name gets "MoELayer N", if N - 1 layers of this process were named before.

        changed: the options that were changed since the last call, in words; "" for none. If there are any,
            all ranks meet (`pmoe.comm.meeting`).

        Raises RuntimeError, also on the peers, if this rank has left a pass of the group in the middle.
        """
        if self.size > 1:
            self.check_whole()
            is_open = self.open_call in self.standing.open_calls and torch._C._current_graph_task_id() == -1
            if changed or is_open:
                from pmoe.comm import failures as told
                from pmoe.comm import meeting

                told.meet(self, changed or meeting.IS_OPEN)
        elif self.by_default:
            self._warn_alone()
        if has_told.is_set():
            from pmoe.comm import failures as told

            told.take_back()
        self.layer = self.layer or f"MoELayer {next(self._first_calls)}"

    def _warn_alone(self) -> None:
        """Warns at the first call of a layer of one rank, if torch.distributed knows other ranks by now."""
        self.by_default = False
        is_initialized = dist.is_available() and dist.is_initialized()
        if self.group is None and is_initialized and dist.get_world_size() > 1:
            warn_once(
                "a MoELayer that was built before init_process_group holds all of its experts on this rank "
                f"of {dist.get_world_size()}: spread them with pmoe.parallelize(model, mesh), before the "
                "optimizer and wrappers are made. If one rank is intended, build the layer with "
                "group=pmoe.comm.ranks.Ranks.single()"
            )

    def count_exchange(self) -> None:
        """Gives a number to the exchange of row counts that begins now, and so to the layer's call."""
        self.standing.exchanges += 1
        self.standing.begun_before = collectives.begun
        self.call = self.standing.exchanges

    def expect_backward(self, device: torch.device) -> int:
        """Records that a backward pass may follow this forward pass. Returns the number for `backward_pass`.

        Records nothing and returns 0 for a single rank, for passes on a GPU, and for the second pass of
        activation checkpointing, which runs inside a backward pass.
        """
        if self.size == 1 or device.type != "cpu" or torch._C._current_graph_task_id() != -1:
            return 0
        self.open_call = self.call
        self.standing.open_call(self.call)
        return self.call

    def backward_pass(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context for the backward pass of a call. number: as `expect_backward` returned it.

        Raises RuntimeError if this rank has left a pass of the group in the middle.
        """
        if self.size == 1:
            return contextlib.nullcontext()
        self.check_whole()
        return self.standing.backward_pass(number, self.layer)

    def take_number(self) -> None:
        """Numbers the layer, after its first exchange of row counts.

        All ranks take part in the same exchange, so they give the layer the same number.
        """
        self.standing.num_layers += 1
        self.number = self.standing.num_layers

    def check_whole(self) -> None:
        """Raises RuntimeError, and publishes the failure, if this rank has left a pass in the middle.

        It does not raise if all ranks left the pass after the same collectives. To find that out, it may wait
        some seconds.
        """
        if self.size == 1 or not self.standing.left:
            return
        from pmoe.comm import failures as told

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
        """Returns a copy of these ranks for a layer of this name, with the same group."""
        named = copy.copy(self)  # what __getstate__ returns: neither the group nor the following flags
        named.group = self.group
        named.layer = name
        named.takes_default = self.takes_default
        named.by_default = self.by_default
        return named

    def __deepcopy__(self, memo: dict[int, object]) -> Ranks:
        # A copied layer has not been called, so it has no name. A process group cannot be copied.
        return self.of_layer("")

    def __getstate__(self) -> dict[str, object]:
        return {"group": None, "size": self.size, "rank": self.rank}

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"


def at_stage(stage: str, ranks: Ranks) -> contextlib.AbstractContextManager[None]:
    """Adds the stage and this rank to errors of collectives in the block, and publishes every failure.

    A RuntimeError is taken for a collective's: a peer has died or did not come in time. It is raised again
    with the stage. Other errors are this rank's own and pass unchanged. Both are published for the peers, who
    may wait for this rank (`pmoe.comm.failures.leave`).

    stage: what the block does, in words.
    """
    return contextlib.nullcontext() if ranks.size == 1 else _at_stage(stage, ranks)


@contextlib.contextmanager
def _at_stage(stage: str, ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        from pmoe.comm import failures as told

        late = "a peer has died, never arrived, or took longer than the group's timeout: "
        failed = RuntimeError(
            f"pmoe: {ranks} failed in {stage}{' of ' if ranks.layer else ''}{ranks.layer}; "
            f"{'' if isinstance(error, told.PeerError) else late}{error}"
        )
        told.leave(failed, ranks, stage="", by_itself=False)
        raise failed from error
    except BaseException as error:
        from pmoe.comm import failures as told

        told.leave(error, ranks, stage)
        raise


# ---- waiting for peers, and publishing failures for them (`pmoe.comm.failures`)


LOOK_AFTER = datetime.timedelta(seconds=0.5)
"""How long this rank waits for a collective before it looks for peers that failed, and between looks."""

has_told: threading.Event = threading.Event()
"""Set when this rank publishes a failure. Its next call over a group that is whole clears it."""


def telling(ranks: Ranks, stage: str) -> contextlib.AbstractContextManager[None]:
    """Publishes an error of the block, by which this rank leaves a pass in the middle.

    It is for errors that one rank alone may raise (users' code, a failed allocation) while its peers wait for
    it. Errors that all ranks raise together must not be published.

    stage: what the block does, in words, for the message of this rank's next call.
    """
    return contextlib.nullcontext() if ranks.size == 1 else _telling(ranks, stage)


@contextlib.contextmanager
def _telling(ranks: Ranks, stage: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        from pmoe.comm import failures as told

        told.leave(error, ranks, stage)
        raise


def wait_for(work: dist.Work, group: dist.ProcessGroup | None, on_gpu: bool = False) -> None:
    """Waits for a collective. On a GPU the current stream waits, and the host does not.

    On the CPU it raises PeerError if a rank of the group has published a failure meanwhile.
    """
    if group is None or on_gpu or not hasattr(work, "is_completed"):
        work.wait()
        return
    with contextlib.suppress(RuntimeError):
        work.wait(LOOK_AFTER)
        return
    from pmoe.comm import failures as told

    told.wait_and_look(work, group)


def reduce_to_largest(values: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replaces each value by its maximum over the ranks of the group. Collective; waits as `wait_for`."""
    collectives.begun += 1
    wait_for(dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True), group, values.is_cuda)


# ---- the grid of a layer's W = P * L ranks (FSMoE): experts are spread over P ranks across nodes (EP), and
# the hidden columns of each expert are split over L ranks inside a node (ESP)


@dataclass(frozen=True)
class Grid:
    """The W = P * L ranks of a layer, and the two groups in which this rank is.

    all: the W ranks, which exchange row counts.
    across: the P ranks that hold the same part of other experts. Rows are dispatched among them.
    inside: the L ranks that hold the other parts of the same experts. Rows are gathered among them.
    order: (W,), the rank in ``all`` of each place of the grid, line by line. Gathered rows lie in this order.

    Example: P = 3, L = 2, and a rank's place in ``order`` is inside.rank * P + across.rank:

        inside 0    order[0]   order[1]   order[2]
        inside 1    order[3]   order[4]   order[5]
                    across 0   across 1   across 2
    """

    all: Ranks
    across: Ranks
    inside: Ranks
    order: tuple[int, ...] = ()

    @staticmethod
    def of_group(group: dist.ProcessGroup | Ranks | None) -> Grid:
        """Returns the grid of a group whose experts are not sharded: all ranks across, this one inside."""
        ranks = group if isinstance(group, Ranks) else Ranks(group)
        return Grid(ranks, ranks, Ranks.single(), tuple(range(ranks.size)))

    @functools.cached_property
    def is_sharded(self) -> bool:
        """Whether several ranks share each expert (L > 1)."""
        return self.inside.size > 1

    def to_owners(self, counts_FPX: Tensor) -> Tensor:
        """Repeats counts for P places (F, P, X) as counts for W ranks (F, W, X).

        All L ranks at a place hold a part of the same experts, so all of them get the place's counts.
        """
        if not self.is_sharded:
            return counts_FPX
        across = {rank: at % self.across.size for at, rank in enumerate(self.order)}
        places = tuple(across[rank] for rank in range(self.all.size))
        return counts_FPX.index_select(1, _index(places, counts_FPX.device))

    def by_arrival(self, recv_FWX: Tensor) -> Tensor:
        """Reorders counts (F, W, X): from the order of ranks to the order in which gathered rows lie."""
        if not self.is_sharded:
            return recv_FWX
        return recv_FWX.index_select(1, _index(self.order, recv_FWX.device))

    def of_own_place(self, arrival_FWX: Tensor) -> Tensor:
        """Returns the part (F, P, X) of `by_arrival` that is dispatched to this rank itself.

        The rest (F, W - P, X) is dispatched to the other ranks inside, and gathered from them.
        """
        start = self.inside.rank * self.across.size
        return arrival_FWX[:, start : start + self.across.size]

    def reconnect(self) -> bool:
        """Takes the default group again after unpickling, or after it was destroyed: see `Ranks.reconnect`.

        Raises ValueError if the grid is of a mesh, which pickling loses: the layer must be built again.
        """
        if self.is_sharded and self.all.group is None:
            raise ValueError(
                "mesh (lost by pickling) must be passed again: build the layer, and load its state"
            )
        return self.all.reconnect()


@functools.lru_cache(maxsize=64)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns places as a tensor. Cached, because each copy to a GPU would be a synchronisation."""
    return torch.tensor(places, device=device)
