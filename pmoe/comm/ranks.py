"""The ranks that share a layer's experts: a process group, or one rank without a group."""

from __future__ import annotations

import copy
from typing import NoReturn

import torch
import torch.distributed as dist

from pmoe.comm.group_record import (
    GroupRecord,
    collectives,
    is_known,
    record_of_group,
    serial_of_group,
)


class Ranks:
    """The ranks that share a layer's experts: a process group, or a single rank without a group.

    A single rank does not communicate. A copy of the object has the same group. A pickled object has no
    group; after loading, `reconnect` takes the default group.

    group: the process group. None for the default group if torch.distributed is initialised, or for a single
        rank if it is not.
    size, rank: the number of ranks in the group, and this rank's number in it.
    layer: the name that errors give the layer that owns this object; "" before the layer's first call.
    takes_default: whether the group is the default group. If the default group is destroyed, a new default
        group may replace it.
    by_default: whether the user passed no group or mesh. The first call then warns if the layer has one rank
        and torch.distributed has more.
    number: the layer's number among the group's layers, from its first exchange of row counts on; 0 before.
    call: the number of the layer's last exchange of row counts, among all exchanges over the group.
    any_trains: whether any rank was in training mode at the layer's last exchange of row counts.
    grad_modes_differ: whether autograd was on for some ranks and off for others at that exchange. The same on
        all ranks.
    open_call: the number of the layer's last call for which a backward pass may come
        (`GroupRecord.open_calls`).

    Raises ValueError if this rank is not in ``group``, or if ``group`` was destroyed.
    """

    size: int
    rank: int
    layer: str

    layer = ""
    takes_default: bool = False
    by_default: bool = False
    number: int = 0
    call: int = 0
    any_trains: bool = False
    grad_modes_differ: bool = False
    open_call: int = 0
    _record: GroupRecord | None = None

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.size = 1
        self.rank = 0
        if group is not None:
            candidate: object = group
            # On a rank that is not in the new group, torch.distributed.new_group returns an integer and no
            # group.
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
        """Returns a single rank without a group, even if torch.distributed is initialised."""
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
        """A text that identifies the group in this process; "" without a group.

        A process keeps the results of its measurements and choices under this text. A group that is made
        again, after destroy_process_group, has another text. So its ranks use no earlier results: one of them
        may be a new process, which has none, and would wait alone in a measurement.
        """
        if self.group is None:
            return ""
        return f"{self.group.group_name} {self.members} {serial_of_group(self.group)}"

    @property
    def record(self) -> GroupRecord:
        """This rank's record of the group: the calls that have used it, and the errors that ended a pass.

        A single rank has no group and no record.
        """
        if self._record is None:
            assert self.group is not None
            self._record = record_of_group(self.group)
        return self._record

    def reconnect(self) -> bool:
        """Takes the default group if this object has lost its group.

        A group is lost by pickling the object. A default group is also lost if it is destroyed.

        Returns whether the new group replaces a destroyed group.

        Raises RuntimeError if the group was destroyed and no other can replace it. Raises ValueError if the
        default group has another size than the old group, or if this rank has another number in it.
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
        self._record = None
        return was_destroyed

    def _refuse_destroyed(self) -> NoReturn:
        """Raises the RuntimeError for a group that was destroyed. Its text says what the user can do."""
        assert self.group is not None
        cure = "build the model again on groups that exist, and load its checkpoint (pmoe.load_checkpoint)"
        if self.takes_default:
            place = f"rank {self.rank} of {self.size}"
            cure = f"call torch.distributed.init_process_group again, as {place}, and go on"
        raise RuntimeError(
            f"the process group of {self.layer or 'a MoELayer'} ({self.group.group_name}, {self}) was "
            f"destroyed (torch.distributed.destroy_process_group): {cure}"
        )

    def count_exchange(self) -> None:
        """Gives the next number to the exchange of row counts that begins now.

        The exchanges of a group are numbered one after another. A call of a layer has the number of the
        exchange that it starts.
        """
        record = self.record
        record.exchanges += 1
        record.begun_before = collectives.begun
        self.call = record.exchanges

    def expect_backward(self, device: torch.device) -> int:
        """Records that the layer's current call may have a backward pass later. Returns the call's number.

        The backward pass gives the number to `pmoe.comm.failures.backward_pass`.

        In three cases the method records nothing and returns 0: for a single rank, for passes on a GPU, and
        for the second pass of activation checkpointing.

        device: the device of the rows.
        """
        if self.size == 1 or device.type != "cpu" or torch._C._current_graph_task_id() != -1:
            return 0
        self.open_call = self.call
        self.record.open_call(self.call, self.layer)
        return self.call

    def count_backward(self, number: int) -> None:
        """Counts a backward pass that all ranks run together (`GroupRecord.count_pass`).

        number: the number of the call, which `expect_backward` has returned in forward.
        """
        if self.size > 1:
            self.record.count_pass(number, self.layer, self.number)

    def take_number(self, message_bytes: int) -> None:
        """Gives the layer its number among the layers of the group, after its first exchange of row counts.

        The number is the same on all ranks, because all take part in the exchange. In later exchanges ranks
        compare it, to find out whether all ranks call the same layer.

        message_bytes: bytes of the message of row counts to each rank in that exchange.
        """
        self.record.num_layers += 1
        self.record.message_bytes.add(message_bytes)
        self.number = self.record.num_layers

    def of_layer(self, name: str) -> Ranks:
        """Returns a copy of these ranks for a layer of this name, with the same group."""
        named = copy.copy(self)  # copies what __getstate__ returns: not the group, and not the flags below
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
