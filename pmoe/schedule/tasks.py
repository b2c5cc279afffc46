"""The schedule of a pass as data: a list of tasks in the order in which they are issued.

Everything else interprets this list: the engine runs it, the simulator times it, the timeline draws it.

A task starts when its lane is free and the tasks for which it waits have ended. A lane runs its tasks in list
order. The tasks for which a task waits follow from the buffers that it reads and writes (`link`), so no
schedule can reuse a buffer too early by mistake.

Forward, n = 3 (a column is no clock tick; lanes run side by side):

    communicate  S0 S1 S2 . . . . . R0 . . R1 . . R2
    compute      G0 G1 G2 L0 . . C0 . C1 . C2 . L1 . . O0 O1 O2

If experts are sharded over the ranks of a node (FSMoE's ESP), the link inside the node has a lane of its own.
AG gathers the rows that S brought before C; RS sums partial outputs before R. AG of one chunk runs beside S
of another (FSMoE, Fig. 3c; X is the shared expert):

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

from pmoe.text import table

PassDirection = Literal["forward", "backward"]
"""The direction of a pass."""


class Lane(str, enum.Enum):
    """The lanes that run tasks. Tasks of one lane run one after another, in list order."""

    COMPUTE = "compute"
    COMMUNICATE = "communicate"
    INTRA_NODE = "intra-node"
    COPY_OUT = "copy out"
    COPY_IN = "copy in"


class Kind(str, enum.Enum):
    """The kinds of tasks. A comment says what a task of each kind does."""

    GATHER = "G"  # copies the rows that leave from T_I (or dT_O) to the send buffer
    WEIGHTS = "P"  # sends the routing weights, or returns their gradients: all chunks in one message
    DISPATCH = "S"  # all-to-all to the ranks of the experts
    LOCAL = "L"  # experts on rows that stay on this rank; in backward the gradients of their inputs
    COMPUTE = "C"  # experts on received rows; in backward the gradients of their inputs
    LOCAL_WGRAD = "LW"  # gradients of parameters from rows that stay
    WGRAD = "W"  # gradients of parameters from received rows
    COMBINE = "R"  # all-to-all back to the ranks of the tokens
    ALL_GATHER = "AG"  # all-gather of the rows that S brought, among the ranks that share experts
    REDUCE_SCATTER = "RS"  # sums the partial outputs of these ranks, each rank for its own rows
    SHARE_WEIGHTS = "PG"  # AG of the routing weights, or RS of their gradients
    OPEN = "HA"  # callbacks between S and AG; if experts are not sharded they are a part of C
    CLOSE = "HB"  # callbacks between RS and R; if experts are not sharded they are a part of C
    OPEN_AGAIN = "HAI"  # HA of T_DI that is sent again
    SHARED = "X"  # the shared expert on all tokens; in backward the gradient of its input
    SHARED_WGRAD = "XW"  # gradients of the shared expert's parameters
    GRADIENTS = "GAR"  # reduces the data-parallel gradients of other layers that hide behind the pass
    OUTPUT = "O"  # sums the returned rows of each token: T_O (or dT_I)
    COPY_ROWS_OUT = "DI"  # D of T_DI: device to host
    COPY_HIDDEN_OUT = "DM"  # D of T_M
    LOCAL_COPY_ROWS_OUT = "LDI"  # D of T_DI, of rows that stay
    LOCAL_COPY_HIDDEN_OUT = "LDM"  # D of T_M, of rows that stay
    COPY_ROWS_IN = "HI"  # H of T_DI: host to device
    COPY_HIDDEN_IN = "HM"  # H of T_M
    LOCAL_COPY_ROWS_IN = "LHI"  # H of T_DI, of rows that stay
    LOCAL_COPY_HIDDEN_IN = "LHM"  # H of T_M, of rows that stay
    GATHER_AGAIN = "GI"  # backward: G of T_I, for SI
    DISPATCH_AGAIN = "SI"  # backward: the S that sends T_DI again
    ALL_GATHER_AGAIN = "AGI"  # backward: AG of T_DI that is sent again
    RECOMPUTE = "M"  # backward: recomputes T_M from T_DI
    LOCAL_RECOMPUTE = "LM"  # backward: recomputes T_M of rows that stay

    # Kinds are looked up for every task, and the hash of enum is slow: it runs as Python code.
    __hash__ = str.__hash__

    def at(self, place: str) -> Kind:
        """Returns the kind of the same task for rows that stay if ``place`` is "_L", else this kind."""
        return Kind("L" + self.value) if place else self

    def again(self, is_again: bool) -> Kind:
        """Returns the kind of the same task for T_DI that is sent again if ``is_again``, else this kind."""
        return Kind(self.value + "I") if is_again else self


@dataclass(frozen=True, kw_only=True)
class Task:
    """One step of a pass.

    kind: the work that it does.
    chunk: the chunk; the piece for rows that stay; -1 for a task of all chunks.
    lane: the lane that runs it.
    reads, writes: names of buffers, "T_DI.0" say.
    waits: names of earlier tasks, which must end before it starts.
    """

    kind: Kind
    chunk: int
    lane: Lane
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    waits: tuple[str, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        """The kind and the chunk, "S0" say."""
        return self.kind.value + ("" if self.chunk < 0 else str(self.chunk))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The tasks of one pass, in the order in which they are issued.

    direction: "forward" or "backward".
    tasks: the tasks, linked.
    slots: the ring slot of each buffer that lies in one; all other buffers have memory of their own.
    """

    direction: str
    tasks: tuple[Task, ...]
    slots: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def lanes(self) -> frozenset[Lane]:
        """The lanes that have tasks."""
        return frozenset(task.lane for task in self.tasks)

    @functools.cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its tasks."""
        return frozenset(task.kind for task in self.tasks)

    @functools.cached_property
    def turns(self) -> dict[str, list[tuple[str, int, str]]]:
        """The buffers in ring slots by name: (buffer, its chunk, its slot) for each.

        Example: "T_M_L" -> [("T_M_L.3", 3, "T_M[0]")].
        """
        turns: dict[str, list[tuple[str, int, str]]] = {}
        for buffer, slot in self.slots.items():
            name, _, chunk = buffer.rpartition(".")
            turns.setdefault(name, []).append((buffer, int(chunk), slot))
        return turns

    @functools.cached_property
    def num_weight_gradients(self) -> int:
        """The number of tasks that add to the gradients of the experts' parameters."""
        return sum(task.kind in (Kind.WGRAD, Kind.LOCAL_WGRAD) for task in self.tasks)

    def __str__(self) -> str:
        rows = [("task", "lane", "waits for", "reads", "writes")]
        rows += [
            (t.name, t.lane.value, " ".join(t.waits), " ".join(t.reads), " ".join(t.writes))
            for t in self.tasks
        ]
        return table(rows, left=range(5))


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages that a layer has beside its experts. The same on every rank.

    local: whether rows may stay on their rank.
    remote: whether rows may travel.
    sharded: whether experts are split over the ranks of a node.
    hooked: whether they are, and callbacks see rows between S and AG or between RS and R.
    shared: whether there is a shared expert.
    gradients: whether backward carries gradients of other layers.
    one_lane: whether messages inside a node wait for those between nodes, the baseline that FSMoE is measured
        against.

    Raises ValueError if rows neither stay nor travel.
    """

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
    """Returns the schedule of ``tasks``, linked. Adds GAR in backward if the layer has it.

    With ``stages.one_lane`` the tasks inside a node are put on the communication lane.
    """
    if stages.gradients and direction == "backward":
        # Behind the last S and before the next R, while the link would wait for the experts.
        last = max((at for at, task in enumerate(tasks) if task.kind is Kind.DISPATCH), default=-1)
        tasks[last + 1 : last + 1] = [make_task(Kind.GRADIENTS, -1, [], ["gradients"])]
    if stages.one_lane:
        shared_lane = Lane.COMMUNICATE
        tasks = [replace(task, lane=shared_lane) if task.lane is Lane.INTRA_NODE else task for task in tasks]
    return Schedule(direction=direction, tasks=link(tasks, slots), slots=slots or {})


def local_pieces(n: int, *, local: bool, remote: bool) -> int:
    """Returns m, the number of pieces into which the rows that stay are cut (`piece_of`).

    m is 0 if no rows stay, and n if none travel. Otherwise it is 2: a piece for the last chunk, and one for
    all chunks before it; 1 if n = 1.
    """
    if not local:
        return 0
    return min(n, 2) if remote else n


def piece_of(chunk: int, n: int, m: int) -> int:
    """Returns the number of the piece that holds a chunk's rows that stay: max(chunk - (n - m), 0).

    Each of the last m - 1 chunks has a piece of its own; the first piece holds the rows of all others.
    Example: n = 4, m = 2 -> 0, 0, 0, 1.
    """
    return max(chunk - (n - m), 0)


def sequential(schedule: Schedule) -> Schedule:
    """Returns the schedule in which every task waits for the one before: the baseline without overlap."""
    chained: list[Task] = []
    for task in schedule.tasks:
        waits = (*task.waits, chained[-1].name) if chained else task.waits
        chained.append(replace(task, waits=tuple(dict.fromkeys(waits))))
    return replace(schedule, tasks=tuple(chained))


def link(tasks: Iterable[Task], slots: Mapping[str, str] | None = None) -> tuple[Task, ...]:
    """Returns the tasks with ``waits`` filled in.

    A task waits for the last writer of every buffer that it reads or writes, and for all readers, since that
    write, of every buffer that it writes. Buffers of one slot count as one buffer, because they share memory.

    slots: the ring slot of each buffer that lies in one.

    Raises ValueError if a task reads a buffer after its slot was written for another buffer.
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
            writer[b] = task.name
            readers[b] = []
        holds |= {slots.get(b, b): b for b in task.writes}
    return tuple(linked)


_LANES = {
    **dict.fromkeys(("P", "S", "SI", "R", "GAR"), Lane.COMMUNICATE),
    **dict.fromkeys(("AG", "AGI", "RS", "PG"), Lane.INTRA_NODE),
    **dict.fromkeys(("DI", "DM", "LDI", "LDM"), Lane.COPY_OUT),
    **dict.fromkeys(("HI", "HM", "LHI", "LHM"), Lane.COPY_IN),
}
"""The lane of each kind of task. Kinds that are not listed run on the compute lane."""


def make_task(kind: Kind, chunk: int, reads: Sequence[str], writes: Sequence[str]) -> Task:
    """Returns a task on the lane of its kind, not yet linked."""
    lane = _LANES.get(kind.value, Lane.COMPUTE)
    return Task(kind=kind, chunk=chunk, lane=lane, reads=tuple(reads), writes=tuple(writes))


ENDS_OF_STAGES: dict[PassDirection, tuple[str, ...]] = {
    "forward": ("T_I", "T_DI", "T_DO", "home", "T_O"),
    "backward": ("dT_O", "dT_DO", "dT_DI", "dhome", "dT_I"),
}
"""The names of five buffers: the source of G, the results of S, C and R, and the result of O."""


class PassBuilder:
    """Builds the list of tasks of a pass. Each method appends tasks, in the order of the calls.

    A method appends nothing for stages that the layer does not have, and for chunks below 0 or beyond n - 1.

    direction: "forward" or "backward".
    n: number of chunks.
    stages: the layer's stages.
    tasks: the list so far.

    Raises ValueError for an n below 1.
    """

    n: int
    stages: Stages

    def __init__(self, direction: PassDirection, n: int, stages: Stages) -> None:
        if n < 1:
            raise ValueError(f"n ({n}) must be at least 1")
        self.direction = direction
        self.n = n
        self.stages = stages
        self.tasks: list[Task] = []
        buffers = ENDS_OF_STAGES[direction]
        self._source, self._received, self._result, self._home, self._output = buffers

    def add(self, kind: Kind, chunk: int, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Appends one task."""
        self.tasks.append(make_task(kind, chunk, reads, writes))

    def finish(self, slots: Mapping[str, str] | None = None) -> Schedule:
        """Returns the schedule of all tasks. slots: the ring slot of each buffer that lies in one."""
        return finished(self.direction, self.tasks, self.stages, slots)

    def dispatch(self, i: int, *, again: bool = False) -> None:
        """Appends G and S of chunk i, and AG if experts are sharded.

        again: whether backward sends T_DI again, so GI, SI and AGI.
        """
        if 0 <= i < self.n:
            self.gather(i, again=again)
            self.send(i, again=again)

    def gather(self, i: int, *, again: bool = False) -> None:
        """Appends G of chunk i; GI if ``again``."""
        source = "T_I" if again else self._source
        self.add(Kind.GATHER.again(again), i, [f"{source}.{i}"], [f"send{'_again' * again}.{i}"])

    def send(self, i: int, *, again: bool = False) -> None:
        """Appends S of chunk i, and AG if experts are sharded and no callbacks come between (`open`)."""
        suffix = "_again" * again
        arrived = f"arrived{suffix}" if self.stages.sharded else "T_DI" if again else self._received
        self.add(Kind.DISPATCH.again(again), i, [f"send{suffix}.{i}"], [f"{arrived}.{i}"])
        if self.stages.sharded and not self.stages.hooked:
            self._all_gather(i, arrived, again)

    def open(self, i: int, *, again: bool = False) -> None:
        """Appends HA and AG of chunk i in a hooked layer: callbacks, then the all-gather."""
        if self.stages.hooked and 0 <= i < self.n:
            arrived, opened = (f"{name}{'_again' * again}" for name in ("arrived", "opened"))
            self.add(Kind.OPEN.again(again), i, [f"{arrived}.{i}"], [f"{opened}.{i}"])
            self._all_gather(i, opened, again)

    def _all_gather(self, i: int, source: str, again: bool) -> None:
        """Appends AG of chunk i, which reads the buffer ``source``."""
        writes = [f"{'T_DI' if again else self._received}.{i}", f"copies{'_again' * again}.{i}"]
        self.add(Kind.ALL_GATHER.again(again), i, [f"{source}.{i}"], writes)

    def combine(self, i: int) -> None:
        """Appends R of chunk i, after RS if experts are sharded. In a hooked layer `close` appends R."""
        leaving = "leaving" if self.stages.sharded else self._result
        if self.stages.sharded:
            self.add(Kind.REDUCE_SCATTER, i, [f"{self._result}.{i}"], [f"leaving.{i}", f"parts.{i}"])
        if not self.stages.hooked:
            self.add(Kind.COMBINE, i, [f"{leaving}.{i}"], [f"{self._home}.{i}"])

    def close(self, i: int) -> None:
        """Appends HB and R of chunk i in a hooked layer: callbacks on the sums of RS, then R."""
        if self.stages.hooked and 0 <= i < self.n:
            self.add(Kind.CLOSE, i, [f"leaving.{i}"], [f"closed.{i}"])
            self.add(Kind.COMBINE, i, [f"closed.{i}"], [f"{self._home}.{i}"])

    def send_weights(self) -> None:
        """Appends P, which sends the routing weights of all chunks, and PG if experts are sharded."""
        arrived = "weight_arrived" if self.stages.sharded else "weight_DI"
        self.add(Kind.WEIGHTS, -1, ["weight"], [arrived])
        if self.stages.sharded:
            self.add(Kind.SHARE_WEIGHTS, -1, [arrived], ["weight_DI"])

    def return_weights(self, chunks: Iterable[int]) -> None:
        """Appends P, which returns the gradients of the routing weights; PG before it if experts are sharded.

        chunks: the order in which their gradients are computed.
        """
        leaving = [f"dweight_DI.{i}" for i in chunks]
        if self.stages.sharded:
            self.add(Kind.SHARE_WEIGHTS, -1, leaving, ["dweight_leaving"])
            leaving = ["dweight_leaving"]
        self.add(Kind.WEIGHTS, -1, leaving, ["dweight"])

    def shared(self) -> None:
        """Appends the tasks of the shared expert. Called while the link has work, the experts none."""
        if self.stages.shared and self.direction == "forward":
            self.add(Kind.SHARED, -1, ["T_I"], ["T_S"])
        elif self.stages.shared:
            self.add(Kind.SHARED, -1, ["dT_O"], ["dT_S", "pending_S"])
            self.add(Kind.SHARED_WGRAD, -1, ["pending_S"], ["dw_S"])

    def output(self, i: int, piece: int | None = None) -> None:
        """Appends O of chunk i.

        piece: the piece that holds the chunk's rows that stay; None for the piece with the chunk's number.
        """
        if 0 <= i < self.n:
            own_piece = i if piece is None else piece
            shared = "T_S" if self.direction == "forward" else "dT_S"
            reads = [f"{self._home}_L.{own_piece}"] * self.stages.local
            reads += [f"{self._home}.{i}"] * self.stages.remote + [shared] * self.stages.shared
            self.add(Kind.OUTPUT, i, reads, [f"{self._output}.{i}"])
