"""Streams that only keep clocks, on the CPU, and what is found wrong in the order of their operators.

Operators run here one after another, so a race cannot show in values. Instead each operator is noted with
the stream it would run on, the bytes it reads and writes, and a vector clock: what of every other stream
has surely ended by then. Streams learn of each other only by waiting, as on a GPU. Two findings are errors:

- a race: two accesses to the same bytes, at least one a write, where the later one's stream has not waited
  for the earlier one;
- a free that comes early: memory is released while the stream that allocated it, which may fill it anew at
  once, has not waited for an access of another stream. CudaLanes says that its buffers need no
  record_stream; this is why that holds. (`hold_for` stands for it where there is one.)

Memory is told apart by its bytes: ring slots are parts of one buffer, and the blocks of the host pool are
known by their addresses. Whoever is handed a block that another had must wait for that other's copies.

As with NCCL, a message runs on a stream of its own, which starts after the one that issued it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pmoe.comm import base, expert_sharding, hierarchical
from pmoe.comm.base import all_to_all
from pmoe.comm.ranks import Ranks
from pmoe.engine.buffers import arena
from pmoe.engine.buffers.host_pool import HostPool
from pmoe.engine.lanes import cuda as cuda_lanes
from pmoe.engine.lanes import run as lanes_run
from pmoe.engine.lanes.base import Action
from pmoe.engine.lanes.cuda import CudaLanes
from pmoe.engine.variants import offload
from pmoe.schedule.tasks import Lane, Schedule, Task

# ---- streams that only keep clocks


@dataclass(eq=False)
class Event:
    clock: Counter[Stream] = field(default_factory=Counter)

    def record(self, stream: Stream) -> None:
        self.clock = stream.clock.copy()


@dataclass(eq=False)
class Stream:
    """A stream that only has a clock.

    clock: clock[s] is the number of operators of stream s that have ended before the next one of this stream
        starts.
    before_wait: called before the stream waits, while the clock still shows what was known without the wait.
    """

    before_wait: Callable[[], None]
    clock: Counter[Stream] = field(default_factory=Counter)

    def advance(self) -> None:
        self.clock[self] += 1

    def wait_event(self, event: Event) -> None:
        self.before_wait()
        self.clock |= event.clock  # the later of the two, stream by stream

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(Event(other.clock))


@dataclass
class Message:
    """The Work of a collective. Its wait blocks the current stream, as NCCL's does."""

    work: dist.Work
    end: Event
    watch: Watch

    def wait(self) -> None:
        self.work.wait()
        self.watch.current.wait_event(self.end)


# ---- what is noted, and what is found


@dataclass(frozen=True, kw_only=True)
class Access:
    """Operator number ``time`` of ``stream`` reads or writes bytes [start, end) of a buffer."""

    stream: Stream
    time: int
    task: str
    operator: str
    writes: bool
    start: int
    end: int

    def meets(self, other: Access) -> bool:
        """Returns whether the order of two accesses matters."""
        return (self.writes or other.writes) and self.start < other.end and other.start < self.end

    def is_over_for(self, stream: Stream) -> bool:
        return stream.clock[self.stream] >= self.time

    def stands_for(self, before: Access) -> bool:
        """Returns whether waiting for this access includes waiting for ``before``.

        A stream that must wait for ``before`` must then wait for this access, too.
        """
        covers = self.start <= before.start and before.end <= self.end
        return covers and (self.writes or not before.writes) and before.is_over_for(self.stream)


@dataclass
class Buffer:
    """The memory of some tensors.

    home: the stream that allocated it. None for a block of the host pool, which any stream may get next:
        accesses are then those of the whole pool, and start is the block's address.
    """

    memory: StorageWeakRef
    home: Stream | None
    start: int = 0
    accesses: list[Access] = field(default_factory=list)
    held_for: list[Stream] = field(default_factory=list)


FREE = "free"
COPY_LANES = (Lane.COPY_OUT, Lane.COPY_IN)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A missing wait: task ``then`` must wait for task ``first``, and does not.

    ``then`` may be FREE: the memory that ``first`` uses is freed.

    example: the operators of one such case.
    """

    first: str
    then: str
    example: str = field(default="", compare=False)


OUTSIDE = "outside"
"""Stands for a task if an operator runs outside the schedules of a layer."""


class Watch(TorchDispatchMode):
    """Records every operator with the current stream and task, and collects the findings."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream(self.look_for_frees)
        self.wires: dict[dist.ProcessGroup, Stream] = {}
        self.task = OUTSIDE
        self.buffers: dict[int, Buffer] = {}
        self.host_accesses: list[Access] = []
        self.findings: set[Finding] = set()
        self.num_messages = 0
        self.copied_rows = 0
        self.copy_tasks: Counter[Lane] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returns = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        is_view |= func.overloadpacket is torch.ops.aten.set_  # reads and writes nothing, like a view
        if is_view or func.namespace == "c10d":  # `message` notes those that the lanes order
            return result
        self.current.advance()
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        # These two read the rows that they pick: others of the same tensor may still be on their way.
        if func.overloadpacket is torch.ops.aten.index_select and given["dim"] == 0:
            given["self"] = [given["self"][at] for at in runs(given["index"])]
        if func.overloadpacket is torch.ops.aten._embedding_bag_forward_only:
            given["weight"] = [given["weight"][at] for at in runs(given["indices"])]
        if func.overloadpacket is torch.ops.aten.copy_:
            self.copied_rows += given["self"].shape[0] if given["self"].dim() else 1
        for argument in func._schema.arguments:
            alias = argument.alias_info
            self.touch(given.get(argument.name), func.__name__, alias is not None and alias.is_write)
        if all(alias is None for alias in returns):
            # An allocation counts as a write: before it, the memory may be in use by its home's earlier work.
            self.touch(result, func.__name__, True)
        return result

    def touch(self, tensors: object, operator: str, writes: bool) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and tensor.numel():
                self.note(tensor, operator, writes)

    def note(self, tensor: Tensor, operator: str, writes: bool) -> None:
        storage, size = tensor.untyped_storage(), tensor.element_size()
        # The weak reference keeps the key from being used again.
        if storage._cdata not in self.buffers:
            self.buffers[storage._cdata] = Buffer(StorageWeakRef(storage), self.current)
        buffer = self.buffers[storage._cdata]
        start = buffer.start + tensor.storage_offset() * size
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        now = Access(
            stream=self.current,
            time=self.current.clock[self.current],
            task=self.task,
            operator=operator,
            writes=writes,
            start=start,
            end=start + (last + 1) * size,
        )
        for before in buffer.accesses:
            if now.meets(before) and not before.is_over_for(self.current):
                self.find(before, now.task, now.operator)
        buffer.accesses[:] = [before for before in buffer.accesses if not now.stands_for(before)]
        buffer.accesses.append(now)

    def find(self, first: Access, then: str, what: str) -> None:
        self.findings.add(Finding(first=first.task, then=then, example=f"{first.operator}, {what}"))

    def look_for_frees(self) -> None:
        """Looks for buffers that were freed. Called before any stream waits, and at the end.

        Until then, a free counts as if it came now.
        """
        for key in [key for key, buffer in self.buffers.items() if buffer.memory.expired()]:
            buffer = self.buffers.pop(key)
            if buffer.home is None:
                continue  # whoever is handed it next must wait
            for access in buffer.accesses:
                if access.stream not in buffer.held_for and not access.is_over_for(buffer.home):
                    self.find(access, FREE, FREE)

    def hold_for(self, stream: Stream, tensor: Tensor) -> None:
        self.buffers[tensor.untyped_storage()._cdata].held_for.append(stream)

    def host_block(self, block: Tensor) -> None:
        storage = block.untyped_storage()
        self.buffers[storage._cdata] = Buffer(
            StorageWeakRef(storage), None, storage.data_ptr(), self.host_accesses
        )

    def message(self, rows: Tensor, out: Tensor, work: dist.Work, group: dist.ProcessGroup) -> Message:
        """Records a collective. The messages of each group run on a stream of the group's own, as NCCL's
        do.
        """
        self.num_messages += 1
        wire = self.wires.setdefault(group, Stream(self.look_for_frees))
        wire.wait_stream(self.current)
        with self.on(wire):
            wire.advance()
            self.touch(rows, "exchange", False)
            self.touch(out, "exchange", True)
        return Message(work, Event(wire.clock.copy()), self)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer


def runs(index: Tensor) -> list[slice]:
    """Returns the rows that ``index`` names, as slices."""
    rows = index.unique()
    if not rows.numel():
        return []
    gap = (rows.diff() > 1).nonzero().flatten()
    first, last = torch.cat([rows[:1], rows[gap + 1]]), torch.cat([rows[gap], rows[-1:]])
    return [slice(start, stop + 1) for start, stop in zip(first.tolist(), last.tolist(), strict=True)]


class WatchedLanes(CudaLanes):
    """CudaLanes that report each running task to the watch, and count the tasks that copied."""

    def __init__(self, schedule: Schedule, group: Ranks, device: torch.device, watch: Watch) -> None:
        super().__init__(schedule, group, device)
        self._watch = watch

    def run(self, task: Task, action: Action) -> None:
        self._watch.task = f"{task.name} {self._schedule.direction}"
        before = self._watch.copied_rows
        try:
            super().run(task, action)
            if task.lane in COPY_LANES and self._watch.copied_rows > before:
                self._watch.copy_tasks[task.lane] += 1
        finally:
            self._watch.task = OUTSIDE


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Runs layers in the block on CudaLanes with streams of this file. Yields the watch."""
    watch = Watch()
    cuda = SimpleNamespace(
        Event=Event,
        Stream=lambda device: Stream(watch.look_for_frees),
        current_stream=lambda device: watch.current,
        stream=watch.on,
    )
    take = HostPool.take

    def watched_take(self: HostPool, *args: Any) -> Tensor:
        block = take(self, *args)
        watch.host_block(block)
        return block

    def watched_lanes(rows: Tensor, schedule: Schedule, group: Ranks, in_steps: bool) -> WatchedLanes:
        return WatchedLanes(schedule, group, rows.device, watch)

    def watched_message(rows: Tensor, send: Any, out: Tensor, recv: Any, group: dist.ProcessGroup) -> Message:
        return watch.message(rows, out, all_to_all(rows, send, out, recv, group), group)

    with (
        mock.patch.object(cuda_lanes, "torch", SimpleNamespace(cuda=cuda)),  # torch itself stays as it is
        mock.patch.object(CudaLanes, "_streams", {}),
        mock.patch.object(lanes_run, "lanes_for", watched_lanes),
        mock.patch.object(base, "all_to_all", watched_message),
        mock.patch.object(expert_sharding, "all_to_all", watched_message),
        mock.patch.object(hierarchical, "all_to_all", watched_message),
        mock.patch.object(HostPool, "take", watched_take),
        mock.patch.object(arena, "LARGE_BYTES", 1 << 62),  # on a GPU all memory is torch's
        mock.patch.object(offload, "current_stream", lambda tensor: watch.current),
        mock.patch.object(offload, "hold_for", watch.hold_for),
        watch,
    ):
        yield watch


@dataclass(frozen=True)
class Report:
    """The findings of a job, and numbers that show that it looked at something.

    copy_tasks: number of tasks of each copy lane that copied.
    """

    findings: set[Finding]
    num_messages: int
    copy_tasks: Counter[Lane]

    @staticmethod
    def of(watch: Watch) -> Report:
        watch.look_for_frees()
        return Report(watch.findings, watch.num_messages, watch.copy_tasks)
