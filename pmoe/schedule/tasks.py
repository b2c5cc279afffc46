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


def check_degree(n: int) -> None:
    """Raises ValueError for what no schedule can be built of."""
    if n < 1:
        raise ValueError(f"n ({n}) must be at least 1")


def make_task(kind: Kind, chunk: int, reads: Sequence[str], writes: Sequence[str]) -> Task:
    """A task on its kind's lane, not yet linked."""
    lane = _LANES.get(kind.value, Lane.COMPUTE)
    return Task(kind=kind, chunk=chunk, lane=lane, reads=tuple(reads), writes=tuple(writes))


def dispatch_tasks(i: int, stages: Stages, source: str, received: str, again: bool = False) -> list[Task]:
    """G and S of a chunk, and AG where experts are sharded. again: of T_DI in backward."""
    suffix = "_again" * again
    send, arrived = f"send{suffix}", f"arrived{suffix}"
    gather, dispatch, all_gather = (
        (Kind.GATHER_AGAIN, Kind.DISPATCH_AGAIN, Kind.ALL_GATHER_AGAIN)
        if again
        else (Kind.GATHER, Kind.DISPATCH, Kind.ALL_GATHER)
    )
    here = arrived if stages.sharded else received
    tasks = [
        make_task(gather, i, [f"{source}.{i}"], [f"{send}.{i}"]),
        make_task(dispatch, i, [f"{send}.{i}"], [f"{here}.{i}"]),
    ]
    if stages.sharded and not stages.hooked:
        tasks.append(make_task(all_gather, i, [f"{here}.{i}"], [f"{received}.{i}", f"copies{suffix}.{i}"]))
    return tasks


def open_tasks(i: int, received: str, again: bool = False) -> list[Task]:
    """What a hooked layer does with the rows that S brought: callbacks, then AG."""
    suffix = "_again" * again
    open_, all_gather = (Kind.OPEN_AGAIN, Kind.ALL_GATHER_AGAIN) if again else (Kind.OPEN, Kind.ALL_GATHER)
    return [
        make_task(open_, i, [f"arrived{suffix}.{i}"], [f"opened{suffix}.{i}"]),
        make_task(all_gather, i, [f"opened{suffix}.{i}"], [f"{received}.{i}", f"copies{suffix}.{i}"]),
    ]


def combine_tasks(i: int, stages: Stages, result: str, home: str) -> list[Task]:
    """R of a chunk, after RS where experts are sharded; `close_tasks` has R where callbacks come between."""
    if not stages.sharded:
        return [make_task(Kind.COMBINE, i, [f"{result}.{i}"], [f"{home}.{i}"])]
    summed = make_task(Kind.REDUCE_SCATTER, i, [f"{result}.{i}"], [f"leaving.{i}", f"parts.{i}"])
    if stages.hooked:
        return [summed]
    return [summed, make_task(Kind.COMBINE, i, [f"leaving.{i}"], [f"{home}.{i}"])]


def close_tasks(i: int, home: str) -> list[Task]:
    """What a hooked layer does with the sums of RS: callbacks, then R."""
    return [
        make_task(Kind.CLOSE, i, [f"leaving.{i}"], [f"closed.{i}"]),
        make_task(Kind.COMBINE, i, [f"closed.{i}"], [f"{home}.{i}"]),
    ]


def send_weights(stages: Stages) -> list[Task]:
    """The routing weights of all chunks in one message."""
    if not stages.sharded:
        return [make_task(Kind.WEIGHTS, -1, ["weight"], ["weight_DI"])]
    return [
        make_task(Kind.WEIGHTS, -1, ["weight"], ["weight_arrived"]),
        make_task(Kind.SHARE_WEIGHTS, -1, ["weight_arrived"], ["weight_DI"]),
    ]


def return_weights(chunks: Iterable[int], stages: Stages) -> list[Task]:
    """The routing weights' gradients of all chunks in one message."""
    parts = [f"dweight_DI.{i}" for i in chunks]
    if not stages.sharded:
        return [make_task(Kind.WEIGHTS, -1, parts, ["dweight"])]
    return [
        make_task(Kind.SHARE_WEIGHTS, -1, parts, ["dweight_leaving"]),
        make_task(Kind.WEIGHTS, -1, ["dweight_leaving"], ["dweight"]),
    ]


def shared_backward() -> list[Task]:
    """The shared expert's part, where the link has work and the experts have none yet."""
    return [
        make_task(Kind.SHARED, -1, ["dT_O"], ["dT_S", "pending_S"]),
        make_task(Kind.SHARED_WGRAD, -1, ["pending_S"], ["dw_S"]),
    ]


def output_task(result: str, i: int, piece: int, stages: Stages) -> Task:
    """O of a chunk. piece: which of the pieces has its rows that stay."""
    home, shared = ("dhome", "dT_S") if result == "dT_I" else ("home", "T_S")
    reads = [f"{home}_L.{piece}"] * stages.local + [f"{home}.{i}"] * stages.remote + [shared] * stages.shared
    return make_task(Kind.OUTPUT, i, reads, [f"{result}.{i}"])
