"""The lanes of a GPU order everything that they must: found on the CPU, with streams that only keep clocks.

Operators run here one after another, so a race cannot show in values. Instead each operator is noted with
the stream it would run on, the bytes it reads and writes, and a vector clock: what of every other stream
has surely ended by then. Streams learn of each other only by waiting, as on a GPU. Two findings are errors:

- a race: two accesses to the same bytes, at least one a write, where the later one's stream has not waited
  for the earlier one;
- a free that comes early: memory is released while the stream that allocated it, which may fill it anew at
  once, has not waited for an access of another stream. CudaLanes says that it needs no record_stream; this
  is why that holds.

As with NCCL, a message runs on a third stream, which starts after the one that issued it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pmoe import MoELayer
from pmoe.comm.flat import FlatAllToAll
from pmoe.comm.ranks import Ranks
from pmoe.pipeline import Lane, Schedule, engine, lanes, passes
from pmoe.pipeline.lanes import Action, CudaLanes
from pmoe.pipeline.schedule import Task
from tests.pool import ranks

D_MODEL, D_HIDDEN, NUM_EXPERTS, TOP_K = 8, 12, 4, 2
TOKENS = 1024  # enough rows for pipeline=True to choose two chunks on two ranks
STEPS = 2  # the second finds memory and streams that the first has used


# ---- streams that only keep clocks ----------------------------------------------------------------


@dataclass(eq=False)
class Event:
    clock: Counter[Stream] = field(default_factory=Counter)

    def record(self, stream: Stream) -> None:
        self.clock = stream.clock.copy()


@dataclass(eq=False)
class Stream:
    """clock[s] is the number of operators of stream s that have ended before the next one of this stream
    starts. before_wait is called while the clock still shows what was known without the wait."""

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
    """The Work of a collective: its wait holds up the current stream, as NCCL's does."""

    work: dist.Work
    end: Event
    watch: Watch

    def wait(self) -> None:
        self.work.wait()
        self.watch.current.wait_event(self.end)


# ---- what is noted, and what is found -------------------------------------------------------------


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
        """Whether the order of the two matters."""
        return (self.writes or other.writes) and self.start < other.end and other.start < self.end

    def is_over_for(self, stream: Stream) -> bool:
        return stream.clock[self.stream] >= self.time


@dataclass
class Buffer:
    """The memory of some tensors. home: the stream that allocated it."""

    memory: StorageWeakRef
    home: Stream
    accesses: list[Access] = field(default_factory=list)


FREE = "free"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Task ``then``, or FREE, does not wait for task ``first``. example: the operators of one such case."""

    first: str
    then: str
    example: str = field(default="", compare=False)


OUTSIDE = "outside"
"""Stands for a task where an operator runs outside the schedules of a layer."""


class Watch(TorchDispatchMode):
    """Notes every operator under the current stream and task, and collects the findings."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream(self.look_for_frees)
        self.wire = Stream(self.look_for_frees)
        self.task = OUTSIDE
        self.buffers: dict[int, Buffer] = {}
        self.findings: set[Finding] = set()
        self.num_messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returns = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        if is_view or func.namespace == "c10d":  # `message` notes those that the lanes order
            return result
        self.current.advance()
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        if func.overloadpacket is torch.ops.aten.index_select and given["dim"] == 0:
            # It reads the rows that it picks: others of the same tensor may still be on their way.
            given["self"] = [given["self"][row] for row in given["index"].unique().tolist()]
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
        start = tensor.storage_offset() * size
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
        accesses = self.buffers[storage._cdata].accesses
        for before in accesses:
            if now.meets(before) and not before.is_over_for(self.current):
                self.find(before, now.task, now.operator)
        accesses.append(now)

    def find(self, first: Access, then: str, what: str) -> None:
        self.findings.add(Finding(first=first.task, then=then, example=f"{first.operator}, {what}"))

    def look_for_frees(self) -> None:
        """Called before any stream waits, and at the end: until then a free counts as it did when it came."""
        for key in [key for key, buffer in self.buffers.items() if buffer.memory.expired()]:
            buffer = self.buffers.pop(key)
            for access in buffer.accesses:
                if not access.is_over_for(buffer.home):
                    self.find(access, FREE, FREE)

    def message(self, rows: Tensor, out: Tensor, work: dist.Work) -> Message:
        self.num_messages += 1
        self.wire.wait_stream(self.current)
        with self.on(self.wire):
            self.wire.advance()
            self.touch(rows, "exchange", False)
            self.touch(out, "exchange", True)
        return Message(work, Event(self.wire.clock.copy()), self)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer


class WatchedLanes(CudaLanes):
    """CudaLanes that tell the watch which task they run."""

    def __init__(self, schedule: Schedule, group: Ranks, device: torch.device, watch: Watch) -> None:
        super().__init__(schedule, group, device)
        self._watch = watch

    def run(self, task: Task, action: Action) -> None:
        self._watch.task = f"{task.name} {self._schedule.direction}"
        try:
            super().run(task, action)
        finally:
            self._watch.task = OUTSIDE


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """In the block layers run on CudaLanes, whose streams are ours."""
    watch = Watch()
    cuda = SimpleNamespace(
        Event=Event,
        Stream=lambda device: Stream(watch.look_for_frees),
        current_stream=lambda device: watch.current,
        stream=watch.on,
    )
    exchange = FlatAllToAll.exchange

    def watched_lanes(rows: Tensor, schedule: Schedule, group: Ranks) -> WatchedLanes:
        return WatchedLanes(schedule, group, rows.device, watch)

    def watched_exchange(self: FlatAllToAll, rows: Tensor, send: Any, out: Tensor, recv: Any) -> Message:
        return watch.message(rows, out, exchange(self, rows, send, out, recv))

    with (
        mock.patch.object(lanes, "torch", SimpleNamespace(cuda=cuda)),  # torch itself stays as it is
        mock.patch.object(CudaLanes, "_streams", {}),
        mock.patch.object(engine, "lanes_for", watched_lanes),
        mock.patch.object(FlatAllToAll, "exchange", watched_exchange),
        watch,
    ):
        yield watch


# ---- mistakes planted on purpose ------------------------------------------------------------------


@contextlib.contextmanager
def without_waits(lane: Lane) -> Iterator[None]:
    """Schedules where no task of ``lane`` waits for anything."""
    plan_schedule = passes.plan_schedule

    def careless(*args: Any) -> Schedule:
        schedule = plan_schedule(*args)
        tasks = [replace(task, waits=()) if task.lane is lane else task for task in schedule.tasks]
        return replace(schedule, tasks=tuple(tasks))

    with mock.patch.object(passes, "plan_schedule", careless):
        yield


def nothing(self: CudaLanes) -> None:
    pass


MISTAKES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "compute waits for no message": lambda: without_waits(Lane.COMPUTE),
    "messages wait for no compute": lambda: without_waits(Lane.COMMUNICATE),
    "finish does nothing": lambda: mock.patch.object(CudaLanes, "finish", nothing),
    "abandon does nothing": lambda: mock.patch.object(CudaLanes, "abandon", nothing),
    "messages end unseen": lambda: mock.patch.object(Message, "wait", lambda self: self.work.wait()),
}


# ---- jobs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a job found; num_messages shows that it looked at something."""

    findings: set[Finding]
    num_messages: int


def linear() -> nn.Module:
    return nn.Linear(D_MODEL, D_MODEL)


def build(options: dict[str, Any]) -> MoELayer:
    torch.manual_seed(7)
    return MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, TOP_K, **options)


def step(layer: MoELayer, rank: int) -> None:
    x = torch.randn(TOKENS - 5 * rank, D_MODEL).requires_grad_()
    (layer(x).sum() + layer.l_aux).backward()


def steps_job(rank: int, world: int, options: dict[str, Any], mistake: str = "none") -> Report:
    with watching() as watch, MISTAKES[mistake]():
        layer = build(options)
        for _ in range(STEPS):
            step(layer, rank)
        watch.look_for_frees()
    return Report(watch.findings, watch.num_messages)


def failing_job(rank: int, world: int, method: str, mistake: str = "none") -> Report:
    """The experts' ``method`` fails on every rank; a step that does not fail comes after."""

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("this expert fails")

    with watching() as watch, MISTAKES[mistake]():
        layer = build({"pipeline": 3, "bypass_local": False})
        with mock.patch.object(layer.experts, method, fail), pytest.raises(RuntimeError, match="this expert"):
            step(layer, rank)
        watch.look_for_frees()
        step(layer, rank)
        watch.look_for_frees()
    return Report(watch.findings, watch.num_messages)


# ---- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bypass_local", [True, False], ids=["bypass", "all rows travel"])
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": 1},
        {"pipeline": 3},
        {"pipeline": 4},
        {"pipeline": True},
        {"pipeline": 3, "capacity_factor": 0.6},
        {"pipeline": 3, "expert": "swiglu", "bias": False},
        {"pipeline": 3, "expert": linear},
        {"pipeline": 3, "sequential": True},
    ],
    ids=["n=1", "n=3", "n=4", "adaptive", "capacity", "swiglu", "module", "sequential"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_streams_never_race_and_no_buffer_is_freed_early(
    world: int, options: dict[str, Any], bypass_local: bool
) -> None:
    n = world if options["pipeline"] is True else options["pipeline"]
    messages_a_pass = 0 if world == 1 and bypass_local else 2 * n + 1  # S and R of each chunk, and P
    for report in ranks(world).run(steps_job, {**options, "bypass_local": bypass_local}):
        assert report.findings == set()
        assert report.num_messages == STEPS * 2 * messages_a_pass


@pytest.mark.parametrize("method", ["compute", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("world", [1, 2])
def test_an_error_in_an_expert_leaves_no_message_in_freed_buffers(world: int, method: str) -> None:
    for report in ranks(world).run(failing_job, method):
        assert report.findings == set()
        assert report.num_messages > 0


@pytest.mark.parametrize(
    "mistake, first, then",
    [
        ("compute waits for no message", "S0 forward", "C0 forward"),
        ("messages wait for no compute", "G0 forward", "S0 forward"),
        ("messages end unseen", "S0 forward", "C0 forward"),
        ("finish does nothing", "P backward", OUTSIDE),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_planted_race_is_found(world: int, mistake: str, first: str, then: str) -> None:
    for report in ranks(world).run(steps_job, {"pipeline": 3, "bypass_local": False}, mistake):
        assert Finding(first=first, then=then) in report.findings


@pytest.mark.parametrize(
    "method, first",
    [
        ("compute", "S2 forward"),
        ("input_gradient", "S2 backward"),
        ("weight_gradient", "R1 backward"),  # the first comes right after R1
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_an_error_that_abandons_nothing_is_found_to_free_early(world: int, method: str, first: str) -> None:
    for report in ranks(world).run(failing_job, method, "abandon does nothing"):
        assert Finding(first=first, then=FREE) in report.findings
