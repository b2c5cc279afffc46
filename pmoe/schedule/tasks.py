"""The schedule of a micro-batched layer, as data: a list of tasks in the order they are issued.

Everything else interprets this list: the engine runs it, the simulator times it, the timeline draws it.
A task starts when its lane is free (a lane runs its tasks in list order) and the tasks it waits for have
ended. What it waits for follows from the buffers it reads and writes, so an order that reuses a buffer
too early cannot be written down by mistake.

Forward, n = 3 (a column is not a clock tick; link and compute lane run side by side):

    communicate  S0 S1 S2 . . . . . R0 . . R1 . . R2
    compute      G0 G1 G2 L0 . . C0 . C1 . C2 . L1 . . O0 O1 O2

Where experts are sharded over the ranks of a node (FSMoE's ESP) there is a second link, with a lane of its
own: what S brings is gathered inside the node before C (AG), partial outputs are summed there before R (RS),
and AG of one chunk runs beside S of another (FSMoE, Fig. 3c):

    communicate  S0 S1 S2 . . . . . . . . R0 R1 . R2
    intra-node   . . AG0 AG1 AG2 . . . RS0 RS1 . RS2
    compute      G0 G1 G2 X . . C0 C1 . C2 . . . . O0 O1 O2
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

PassDirection = Literal["forward", "backward"]


class Lane(str, enum.Enum):
    """Who runs a task. Tasks of one lane run one after another, in list order."""

    COMPUTE = "compute"
    COMMUNICATE = "communicate"
    INTRA_NODE = "intra-node"
    COPY_OUT = "copy out"
    COPY_IN = "copy in"


class Kind(str, enum.Enum):
    """What a task does to its chunk."""

    GATHER = "G"  # arrange the rows that travel: T_I (or dT_O) into the send buffer
    WEIGHTS = "P"  # routing weights travel, or their gradients return: all chunks in one message
    DISPATCH = "S"  # all-to-all towards the experts
    LOCAL = "L"  # experts on rows that stay on this rank; gradient of their inputs in backward
    COMPUTE = "C"  # experts on received rows; gradient of their inputs in backward
    LOCAL_WGRAD = "LW"  # weight gradients from the rows that stayed
    WGRAD = "W"  # weight gradients from received rows
    COMBINE = "R"  # all-to-all back to the owners of the tokens
    ALL_GATHER = "AG"  # the ranks that share experts give each other the rows that S brought them
    REDUCE_SCATTER = "RS"  # they sum what each made of all rows, and each takes its own rows' sums
    SHARE_WEIGHTS = "PG"  # the same two of routing weights and of their gradients
    OPEN = "HA"  # callbacks see rows between S and AG, and what returns between RS and R: where experts are
    CLOSE = "HB"  # sharded these are tasks of their own, elsewhere a part of C
    OPEN_AGAIN = "HAI"
    SHARED = "X"  # the shared expert on all tokens; gradient of its input in backward
    SHARED_WGRAD = "XW"  # its weight gradients
    GRADIENTS = "GAR"  # data-parallel gradients of other layers, as many as hide here
    OUTPUT = "O"  # each token sums its returned rows: T_O (or dT_I)
    COPY_ROWS_OUT = "DI"  # D of T_DI, device to host
    COPY_HIDDEN_OUT = "DM"  # D of T_M
    LOCAL_COPY_ROWS_OUT = "LDI"
    LOCAL_COPY_HIDDEN_OUT = "LDM"
    COPY_ROWS_IN = "HI"  # H of T_DI, host to device
    COPY_HIDDEN_IN = "HM"  # H of T_M
    LOCAL_COPY_ROWS_IN = "LHI"
    LOCAL_COPY_HIDDEN_IN = "LHM"
    GATHER_AGAIN = "GI"  # backward: T_I into the send buffer, for
    DISPATCH_AGAIN = "SI"  # the dispatch that restores T_DI
    ALL_GATHER_AGAIN = "AGI"
    RECOMPUTE = "M"  # backward: T_M made again from T_DI
    LOCAL_RECOMPUTE = "LM"

    # An enum's own is a function of Python, and every task is looked up by its kind.
    __hash__ = str.__hash__

    def at(self, place: str) -> Kind:
        """What does the same to rows that stay, where ``place`` is "_L"."""
        return Kind("L" + self.value) if place else self

    def again(self, is_again: bool) -> Kind:
        """What does the same to T_DI, where backward sends it again."""
        return Kind(self.value + "I") if is_again else self


@dataclass(frozen=True, kw_only=True)
class Task:
    """One step of a pass. chunk is -1 for a task that serves all chunks, and the piece for rows that stay.

    waits: names of earlier tasks. reads, writes: names of buffers.
    """

    kind: Kind
    chunk: int
    lane: Lane
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    waits: tuple[str, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        return self.kind.value + ("" if self.chunk < 0 else str(self.chunk))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The tasks of one pass ("forward" or "backward"), in the order they are issued.

    slots: buffer -> the ring slot that it lies in; the others have memory of their own.
    """

    direction: str
    tasks: tuple[Task, ...]
    slots: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def lanes(self) -> frozenset[Lane]:
        """Those that have tasks."""
        return frozenset(task.lane for task in self.tasks)

    @functools.cached_property
    def kinds(self) -> frozenset[Kind]:
        """Of its tasks."""
        return frozenset(task.kind for task in self.tasks)

    @functools.cached_property
    def turns(self) -> dict[str, list[tuple[str, int, str]]]:
        """By name, the buffers that take turns in slots: (buffer, its chunk, its slot).

        Example: "T_M_L" -> [("T_M_L.3", 3, "T_M[0]")].
        """
        found: dict[str, list[tuple[str, int, str]]] = {}
        for buffer, slot in self.slots.items():
            name, _, chunk = buffer.rpartition(".")
            found.setdefault(name, []).append((buffer, int(chunk), slot))
        return found

    @functools.cached_property
    def num_weight_gradients(self) -> int:
        """Tasks that each add to the gradients of the experts' parameters."""
        return sum(task.kind in (Kind.WGRAD, Kind.LOCAL_WGRAD) for task in self.tasks)

    def __str__(self) -> str:
        from pmoe.text import table

        rows = [("task", "lane", "waits for", "reads", "writes")]
        rows += [
            (t.name, t.lane.value, " ".join(t.waits), " ".join(t.reads), " ".join(t.writes))
            for t in self.tasks
        ]
        return table(rows, left=range(5))


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Which stages a layer has beside its experts' own: the same on every rank.

    local: rows may stay on their rank. remote: rows may travel. sharded: experts are split over the ranks of
    a node. hooked: and callbacks see them there. shared: there is a shared expert. gradients: backward
    carries other layers' gradients. one_lane: what is sent inside the node waits for what is sent between
    nodes (what FSMoE is measured against)."""

    local: bool
    remote: bool
    sharded: bool = False
    hooked: bool = False
    shared: bool = False
    gradients: bool = False
    one_lane: bool = False

    def __post_init__(self) -> None:
        if not (self.local or self.remote):
            raise ValueError("local (False) or remote (False) must be True: a layer's rows stay or travel")


def finished(
    direction: str, tasks: list[Task], stages: Stages, slots: Mapping[str, str] | None = None
) -> Schedule:
    """The schedule of these tasks, with GAR where backward has it, linked, on as many communication lanes as
    there are."""
    if stages.gradients and direction == "backward":
        # Behind the last S, before any R that is issued later: there the link waits for the experts.
        last = max((at for at, task in enumerate(tasks) if task.kind is Kind.DISPATCH), default=-1)
        tasks[last + 1 : last + 1] = [make_task(Kind.GRADIENTS, -1, [], ["gradients"])]
    if stages.one_lane:
        one = Lane.COMMUNICATE
        tasks = [replace(task, lane=one) if task.lane is Lane.INTRA_NODE else task for task in tasks]
    return Schedule(direction=direction, tasks=link(tasks, slots), slots=slots or {})


def local_pieces(n: int, *, local: bool, remote: bool) -> int:
    """m, into how many pieces the rows that stay are cut: the chunks where nothing travels, else the last
    chunk's rows and the rest (`piece_of`)."""
    if not local:
        return 0
    return min(n, 2) if remote else n


def piece_of(chunk: int, n: int, m: int) -> int:
    """Which of the m pieces holds the rows of a chunk that stay: the last m - 1 chunks have one each, the
    first piece holds those of all others. Example: n = 4, m = 2 -> 0, 0, 0, 1."""
    return max(chunk - (n - m), 0)


def sequential(schedule: Schedule) -> Schedule:
    """The same tasks with every one waiting for the one before: what overlap is measured against."""
    chained: list[Task] = []
    for task in schedule.tasks:
        waits = (*task.waits, chained[-1].name) if chained else task.waits
        chained.append(replace(task, waits=tuple(dict.fromkeys(waits))))
    return replace(schedule, tasks=tuple(chained))


def link(tasks: Iterable[Task], slots: Mapping[str, str] | None = None) -> tuple[Task, ...]:
    """Fills in ``waits``: the last writer of whatever a task reads or writes, and the readers since then of
    whatever it writes. Buffers of one slot are one memory: who writes one awaits the readers of the other.

    Raises ValueError where a task reads a buffer whose slot has been written for another.
    """
    slots = slots or {}
    writer: dict[str, str] = {}
    holds: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    linked = []
    for task in tasks:
        for b in task.reads:
            if holds.get(slots.get(b, b), b) != b:
                raise ValueError(f"task {task.name} reads {b}, but {slots[b]} holds {holds[slots[b]]}")
        reads = [slots.get(b, b) for b in task.reads]
        writes = [slots.get(b, b) for b in task.writes]
        waits = [writer[b] for b in (*reads, *writes) if b in writer]
        waits += [reader for b in writes for reader in readers.get(b, ())]
        linked.append(replace(task, waits=tuple(dict.fromkeys(waits))))
        for b in reads:
            readers.setdefault(b, []).append(task.name)
        for b in writes:
            writer[b], readers[b] = task.name, []
        holds |= {slots.get(b, b): b for b in task.writes}
    return tuple(linked)


_LANES = {
    **dict.fromkeys(("P", "S", "SI", "R", "GAR"), Lane.COMMUNICATE),
    **dict.fromkeys(("AG", "AGI", "RS", "PG"), Lane.INTRA_NODE),
    **dict.fromkeys(("DI", "DM", "LDI", "LDM"), Lane.COPY_OUT),
    **dict.fromkeys(("HI", "HM", "LHI", "LHM"), Lane.COPY_IN),
}
"""By the kind of a task; all others compute."""


def make_task(kind: Kind, chunk: int, reads: Sequence[str], writes: Sequence[str]) -> Task:
    """A task on its kind's lane, not yet linked."""
    lane = _LANES.get(kind.value, Lane.COMPUTE)
    return Task(kind=kind, chunk=chunk, lane=lane, reads=tuple(reads), writes=tuple(writes))


ENDS_OF_STAGES: dict[PassDirection, tuple[str, ...]] = {
    "forward": ("T_I", "T_DI", "T_DO", "home", "T_O"),
    "backward": ("dT_O", "dT_DO", "dT_DI", "dhome", "dT_I"),
}
"""Buffers that S is sent from and brings, that R is sent from and brings, and what O sums."""


class PassBuilder:
    """Puts the tasks of a pass together, in the order that they are issued.

    Stages that the layer does not have, and chunks before the first or behind the last, add nothing.
    Raises ValueError for an n below 1.
    """

    n: int
    stages: Stages

    def __init__(self, direction: PassDirection, n: int, stages: Stages) -> None:
        if n < 1:
            raise ValueError(f"n ({n}) must be at least 1")
        self.direction, self.n, self.stages = direction, n, stages
        self.tasks: list[Task] = []
        buffers = ENDS_OF_STAGES[direction]
        self._source, self._received, self._result, self._home, self._output = buffers

    def add(self, kind: Kind, chunk: int, reads: Sequence[str], writes: Sequence[str]) -> None:
        self.tasks.append(make_task(kind, chunk, reads, writes))

    def finish(self, slots: Mapping[str, str] | None = None) -> Schedule:
        return finished(self.direction, self.tasks, self.stages, slots)

    def dispatch(self, i: int, *, again: bool = False) -> None:
        """G and S of a chunk, and AG where experts are sharded. again: of T_DI in backward."""
        if 0 <= i < self.n:
            self.gather(i, again=again)
            self.send(i, again=again)

    def gather(self, i: int, *, again: bool = False) -> None:
        """G of a chunk."""
        source = "T_I" if again else self._source
        self.add(Kind.GATHER.again(again), i, [f"{source}.{i}"], [f"send{'_again' * again}.{i}"])

    def send(self, i: int, *, again: bool = False) -> None:
        """S of a chunk, and AG where experts are sharded and no callbacks come between (`open`)."""
        suffix = "_again" * again
        here = f"arrived{suffix}" if self.stages.sharded else "T_DI" if again else self._received
        self.add(Kind.DISPATCH.again(again), i, [f"send{suffix}.{i}"], [f"{here}.{i}"])
        if self.stages.sharded and not self.stages.hooked:
            self._all_gather(i, here, again)

    def open(self, i: int, *, again: bool = False) -> None:
        """What a hooked layer does with the rows that S brought: callbacks, then AG."""
        if self.stages.hooked and 0 <= i < self.n:
            arrived, opened = (f"{name}{'_again' * again}" for name in ("arrived", "opened"))
            self.add(Kind.OPEN.again(again), i, [f"{arrived}.{i}"], [f"{opened}.{i}"])
            self._all_gather(i, opened, again)

    def _all_gather(self, i: int, source: str, again: bool) -> None:
        writes = [f"{'T_DI' if again else self._received}.{i}", f"copies{'_again' * again}.{i}"]
        self.add(Kind.ALL_GATHER.again(again), i, [f"{source}.{i}"], writes)

    def combine(self, i: int) -> None:
        """R of a chunk, after RS where experts are sharded; `close` has R where callbacks come between."""
        leaving = "leaving" if self.stages.sharded else self._result
        if self.stages.sharded:
            self.add(Kind.REDUCE_SCATTER, i, [f"{self._result}.{i}"], [f"leaving.{i}", f"parts.{i}"])
        if not self.stages.hooked:
            self.add(Kind.COMBINE, i, [f"{leaving}.{i}"], [f"{self._home}.{i}"])

    def close(self, i: int) -> None:
        """What a hooked layer does with the sums of RS: callbacks, then R."""
        if self.stages.hooked and 0 <= i < self.n:
            self.add(Kind.CLOSE, i, [f"leaving.{i}"], [f"closed.{i}"])
            self.add(Kind.COMBINE, i, [f"closed.{i}"], [f"{self._home}.{i}"])

    def send_weights(self) -> None:
        """The routing weights of all chunks in one message."""
        arrived = "weight_arrived" if self.stages.sharded else "weight_DI"
        self.add(Kind.WEIGHTS, -1, ["weight"], [arrived])
        if self.stages.sharded:
            self.add(Kind.SHARE_WEIGHTS, -1, [arrived], ["weight_DI"])

    def return_weights(self, chunks: Iterable[int]) -> None:
        """The routing weights' gradients of all chunks in one message."""
        leaving = [f"dweight_DI.{i}" for i in chunks]
        if self.stages.sharded:
            self.add(Kind.SHARE_WEIGHTS, -1, leaving, ["dweight_leaving"])
            leaving = ["dweight_leaving"]
        self.add(Kind.WEIGHTS, -1, leaving, ["dweight"])

    def shared(self) -> None:
        """The shared expert's part, where the link has work and the experts have none yet."""
        if self.stages.shared and self.direction == "forward":
            self.add(Kind.SHARED, -1, ["T_I"], ["T_S"])
        elif self.stages.shared:
            self.add(Kind.SHARED, -1, ["dT_O"], ["dT_S", "pending_S"])
            self.add(Kind.SHARED_WGRAD, -1, ["pending_S"], ["dw_S"])

    def output(self, i: int, piece: int | None = None) -> None:
        """O of a chunk. piece: which of the pieces has its rows that stay; None is that of its number."""
        if 0 <= i < self.n:
            stays, shared = i if piece is None else piece, "T_S" if self.direction == "forward" else "dT_S"
            reads = [f"{self._home}_L.{stays}"] * self.stages.local
            reads += [f"{self._home}.{i}"] * self.stages.remote + [shared] * self.stages.shared
            self.add(Kind.OUTPUT, i, reads, [f"{self._output}.{i}"])
