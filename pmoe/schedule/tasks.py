"""The schedule of a pass as data: a list of tasks in the order in which they are issued.

The engine runs this list, the simulator predicts its time, and the timeline draws it.

A task starts when its lane is free and the tasks for which it waits have ended. A lane runs its tasks in list
order. `link` finds the tasks for which a task must wait: it compares the buffers that tasks read and write.
So no schedule can reuse a buffer too early by mistake.

Forward, n = 3 chunks (columns show the order, not the time; lanes run side by side). The name of a task is a
letter (`Kind` lists all letters) and the index of its chunk:

    G  copies rows to the send buffer            S  dispatch all-to-all
    L  experts on rows that stay on this rank    C  experts on rows that other ranks sent
    R  combine all-to-all                        O  sums the results of each token

L0 computes the rows of chunks 0 and 1 that stay, and L1 the rows of chunk 2 that stay:

    communicate  S0 S1 S2 . . . . . R0 . . R1 . . R2
    compute      G0 G1 G2 L0 . . C0 . C1 . C2 . L1 . . O0 O1 O2

If experts are sharded over the ranks of a node (FSMoE's ESP), collectives inside the node have a lane of
their own. Between S and C, the all-gather AG gathers the rows that S brought. Between C and R, the
reduce-scatter RS sums partial outputs. AG of one chunk runs beside S of another (FSMoE, Fig. 3c; X is the
shared expert):

    communicate  S0 S1 S2 . . . . . . . . R0 R1 . R2
    intra-node   . . AG0 AG1 AG2 . . . RS0 RS1 . RS2
    compute      G0 G1 G2 X . . C0 C1 . C2 . . . . O0 O1 O2
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pmoe.schedule.restore import CopiesFate
from pmoe.text import table

PassDirection = Literal["forward", "backward"]
"""The two passes of a training step."""


class Lane(str, enum.Enum):
    """The lanes of a schedule. A lane is a queue: its tasks run one after another, in list order.

    Lanes run side by side. On a GPU each lane is a CUDA stream.
    """

    COMPUTE = "compute"
    COMMUNICATE = "communicate"
    INTRA_NODE = "intra-node"
    COPY_OUT = "copy out"
    COPY_IN = "copy in"


class Kind(str, enum.Enum):
    """The kinds of tasks, by the letters that schedules and timelines show.

    The main kinds are S, the dispatch all-to-all; C, the experts; and R, the combine all-to-all. A comment
    beside each kind says what a task of this kind does. "Rows that stay" are not sent, because their expert,
    or a copy of it, is on the rank of their token.
    """

    GATHER = "G"  # copies the rows to be sent from T_I (in backward dT_O) to the send buffer
    WEIGHTS = "P"  # sends the routing weights, or returns their gradients: all chunks in one message
    DISPATCH = "S"  # all-to-all to the ranks of the experts
    LOCAL = "L"  # experts on rows that stay on this rank; in backward the gradients of these rows
    COMPUTE = "C"  # experts on received rows; in backward the gradients of these rows
    LOCAL_WGRAD = "LW"  # gradients of the experts' parameters from rows that stay
    WGRAD = "W"  # gradients of the experts' parameters from received rows
    COMBINE = "R"  # all-to-all back to the ranks of the tokens
    ALL_GATHER = "AG"  # all-gather of the rows that S brought, among the ranks that share experts
    REDUCE_SCATTER = "RS"  # sums partial outputs among the ranks that share experts; each gets its own rows
    SHARE_WEIGHTS = "PG"  # among these ranks: all-gather of routing weights, or reduce-scatter of gradients
    OPEN = "HA"  # callbacks between S and AG; a part of C if experts are not sharded
    CLOSE = "HB"  # callbacks between RS and R; a part of C if experts are not sharded
    OPEN_AGAIN = "HAI"  # backward: HA for a T_DI that is sent again
    SHARED = "X"  # the shared expert on all tokens; in backward the gradient of its input
    SHARED_WGRAD = "XW"  # gradients of the shared expert's parameters
    GRADIENTS = "GAR"  # reduces data-parallel gradients of other layers while this layer's experts compute
    OUTPUT = "O"  # sums the returned rows of each token: T_O (in backward dT_I)
    COPY_ROWS_OUT = "DI"  # copies T_DI of received rows from the device to the host
    COPY_HIDDEN_OUT = "DM"  # copies T_M of received rows to the host
    LOCAL_COPY_ROWS_OUT = "LDI"  # copies T_DI of rows that stay to the host
    LOCAL_COPY_HIDDEN_OUT = "LDM"  # copies T_M of rows that stay to the host
    COPY_ROWS_IN = "HI"  # copies T_DI of received rows from the host to the device
    COPY_HIDDEN_IN = "HM"  # copies T_M of received rows to the device
    LOCAL_COPY_ROWS_IN = "LHI"  # copies T_DI of rows that stay to the device
    LOCAL_COPY_HIDDEN_IN = "LHM"  # copies T_M of rows that stay to the device
    GATHER_AGAIN = "GI"  # backward: copies rows of T_I to a send buffer, for SI
    DISPATCH_AGAIN = "SI"  # backward: all-to-all that sends T_DI again
    ALL_GATHER_AGAIN = "AGI"  # backward: AG for a T_DI that is sent again
    RECOMPUTE = "M"  # backward: recomputes T_M from T_DI
    LOCAL_RECOMPUTE = "LM"  # backward: recomputes T_M of rows that stay
    COPY_WEIGHTS = "V"  # sends the weights of busy experts to the ranks of their copies
    RELAY_WEIGHTS = "VR"  # ranks with copies of one expert send each other the parts that V brought
    COPY_WGRAD = "KW"  # backward: gradients of the copies' parameters from received rows
    LOCAL_COPY_WGRAD = "LKW"  # backward: gradients of the copies' parameters from rows that stay
    # backward: ranks with copies of one expert exchange parts of its gradients; each rank sums one part
    RELAY_GRADIENTS = "VGR"
    COPY_GRADIENTS = "VG"  # backward: sends the gradients of copies to the ranks of their experts
    ADD_GRADIENTS = "VA"  # backward: adds copies' gradients to the experts' gradients, in order of the ranks

    # Kinds are looked up for every task, and the hash of enum is slow: it runs as Python code.
    __hash__ = str.__hash__

    def at(self, place: str) -> Kind:
        """Returns the kind of task that does the same work on another part of a chunk's rows.

        place: "_L" for the rows that stay on this rank, because their expert is on it; "" returns this kind.

        Example: W, the gradients of parameters from received rows, becomes LW for "_L".
        """
        return Kind("L" + self.value) if place else self

    def again(self, is_again: bool) -> Kind:
        """Returns the kind of task that does this work again in backward, for forward's dispatched rows.

        Backward has such tasks if the restore pair sends these rows (T_DI) again. Example: S, the dispatch
        all-to-all, becomes SI.

        is_again: False returns this kind.
        """
        return Kind(self.value + "I") if is_again else self


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a pass: some work on one chunk, on one lane.

    kind: the work.
    chunk: the index of the chunk; -1 if the task is for all chunks. In a task for rows that stay on this
        rank, it is the index of the task among these tasks (`piece_of`), because one of them may compute rows
        of several chunks.
    lane: the queue in which the task runs.
    reads, writes: names of the buffers that the task reads and writes, such as "T_DI.0".
    waits: names of earlier tasks that must end before this task starts.
    """

    kind: Kind
    chunk: int
    lane: Lane
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    waits: tuple[str, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        """The letters of the kind and the chunk, such as "S0"; only the letters for a task of all chunks."""
        return self.kind.value + ("" if self.chunk < 0 else str(self.chunk))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The tasks of one pass, in the order in which they are issued.

    direction: "forward" or "backward".
    tasks: the tasks, with ``waits`` filled in.
    slots: the ring slot of each buffer that is in one, such as {"T_DI.2": "T_DI[0]"} for the experts' input
        T_DI of chunk 2. A ring slot is memory that buffers use in turn. All other buffers have memory of
        their own.
    """

    direction: str
    tasks: tuple[Task, ...]
    slots: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def lanes(self) -> frozenset[Lane]:
        """The lanes (queues, such as CUDA streams) on which tasks of this schedule run."""
        return frozenset(task.lane for task in self.tasks)

    @functools.cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of tasks that this schedule has."""
        return frozenset(task.kind for task in self.tasks)

    @functools.cached_property
    def turns(self) -> dict[str, list[tuple[str, int, str]]]:
        """The buffers that are in ring slots: for each name, a list of (buffer, chunk, slot).

        A ring slot is memory that buffers use in turn. Example: "T_M_L" (hidden activation of rows that stay)
        -> [("T_M_L.3", 3, "T_M[0]")].
        """
        turns: dict[str, list[tuple[str, int, str]]] = {}
        for buffer, slot in self.slots.items():
            name, _, chunk = buffer.rpartition(".")
            turns.setdefault(name, []).append((buffer, int(chunk), slot))
        return turns

    @functools.cached_property
    def layouts(self) -> dict[Any, Any]:
        """A cache: the layouts of ring slots that `pmoe.schedule.buffer_sizes.slot_layout` has computed."""
        return {}

    @functools.cached_property
    def waits_beside_compute(self) -> dict[str, tuple[str, ...]]:
        """Maps each task's name to those tasks in its ``waits`` that are not on the compute lane.

        Only these need a wait on the CPU. There the calling thread runs the tasks of the compute lane itself,
        so earlier tasks of this lane have always ended.
        """
        computing = {task.name for task in self.tasks if task.lane is Lane.COMPUTE}
        return {task.name: tuple(name for name in task.waits if name not in computing) for task in self.tasks}

    @functools.cached_property
    def lane_waits(self) -> dict[str, tuple[str, ...]]:
        """Maps each task's name to tasks of other lanes: the task's lane must wait for these before the task.

        These are the task's ``waits``, without those that need no wait of their own. A task X in ``waits`` is
        left out in three cases:

        - X is in the same lane, which runs its tasks in order.
        - Another task in ``waits`` can end only after X has ended.
        - Before an earlier task, the lane has already waited for X, or for a task that ends after X.

        Example: S0 and S1 run in one lane, in this order. Task C of another lane has both in ``waits``. C's
        lane waits for S1 only, because S1 runs after S0. If an earlier task in C's lane has already waited
        for S1, the lane waits for nothing before C.
        """
        place = {task.name: place for place, task in enumerate(self.tasks)}
        # Indices of tasks that have surely ended, the last one of each lane: before a lane's next task, and
        # at the end of each task.
        ended_before: dict[Lane, dict[Lane, int]] = {lane: {} for lane in self.lanes}
        ended_at_end: dict[str, dict[Lane, int]] = {}
        waits: dict[str, tuple[str, ...]] = {}
        for task in self.tasks:
            ended = ended_before[task.lane]
            needed = []
            # The newest first: when a newer task has ended, an older one may have ended, too, but never the
            # other way round.
            for earlier in sorted(map(place.__getitem__, task.waits), reverse=True):
                awaited = self.tasks[earlier]
                if awaited.lane is task.lane or ended.get(awaited.lane, -1) >= earlier:
                    continue
                needed.append(awaited.name)
                for lane, last in ended_at_end[awaited.name].items():
                    ended[lane] = max(ended.get(lane, -1), last)
            waits[task.name] = tuple(needed)
            ended[task.lane] = place[task.name]
            ended_at_end[task.name] = ended.copy()
        return waits

    @functools.cached_property
    def joint_copies(self) -> dict[str, tuple[Task, ...]]:
        """Maps the name of each task GI to later tasks whose row copies can run in GI's kernel launch.

        GI gathers rows that backward sends again. Two other kinds of tasks begin by copying rows: G copies
        gradients to be sent, and LM copies the rows that stay before it recomputes their T_M. A G or LM joins
        the launch of GI only if it waits for no task of another lane. The memory that it writes is then
        already free when GI runs.

        The search begins with the task that follows GI in the compute lane. It can take a G first, then pass
        over tasks O, and then take an LM. Without a G it passes over no O. The first other task ends the
        search. The tasks O do not join the launch, and do not use the memory that LM's copy writes.

        Example: GI0 G0 O3 LM1 in the compute lane -> {"GI0": (G0, LM1)}.
        """
        computing = [task for task in self.tasks if task.lane is Lane.COMPUTE]
        names = {task.name for task in computing}
        joint: dict[str, tuple[Task, ...]] = {}
        for place, task in enumerate(computing):
            if task.kind is not Kind.GATHER_AGAIN:
                continue
            following: list[Task] = []
            for later in computing[place + 1 :]:
                if later.kind is Kind.GATHER and not following and not self.lane_waits[later.name]:
                    following.append(later)
                elif later.kind is Kind.LOCAL_RECOMPUTE and names.issuperset(later.waits):
                    following.append(later)
                    break
                elif later.kind is not Kind.OUTPUT or not following:
                    break
            joint[task.name] = tuple(following)
        return joint

    @functools.cached_property
    def awaited(self) -> frozenset[str]:
        """The names of all tasks for which another lane waits (`lane_waits`)."""
        return frozenset(name for names in self.lane_waits.values() for name in names)

    @functools.cached_property
    def num_weight_gradients(self) -> int:
        """The number of tasks that add to the gradients of the experts' parameters."""
        kinds = (Kind.WGRAD, Kind.LOCAL_WGRAD, Kind.ADD_GRADIENTS)
        return sum(task.kind in kinds for task in self.tasks)

    @functools.cached_property
    def frozen(self) -> Schedule:
        """This schedule for frozen experts: without the gradients of the experts' parameters (W, LW).

        If a task waited for a removed task X, it now waits for the tasks for which X waited.
        """
        kinds = (Kind.WGRAD, Kind.LOCAL_WGRAD)
        waits_of: dict[str, tuple[str, ...]] = {}
        tasks = []
        for task in self.tasks:
            waits = dict.fromkeys(name for before in task.waits for name in waits_of.get(before, (before,)))
            if task.kind in kinds:
                waits_of[task.name] = tuple(waits)
            else:
                tasks.append(replace(task, waits=tuple(waits)))
        return replace(self, tasks=tuple(tasks))

    @functools.cached_property
    def halves(self) -> tuple[Schedule, Schedule]:
        """This schedule divided into two: one without and one with the gradients of parameters.

        The second schedule has the tasks W, LW and XW, which compute gradients of parameters. The first
        schedule has all other tasks.

        No task may wait for a task of the other schedule. If a task waited for a task X of the other
        schedule, it now waits for those tasks of its own schedule for which X waited.

        A schedule with ring slots (memory that chunks use in turn) cannot be divided, because the next chunk
        would overwrite tensors before W reads them.
        """
        assert not self.slots
        kinds = (Kind.WGRAD, Kind.LOCAL_WGRAD, Kind.SHARED_WGRAD)
        parts: tuple[list[Task], list[Task]] = ([], [])
        # For each task X and each half: the tasks of this half for which a task must wait if it waits for X.
        reached: dict[str, list[tuple[str, ...]]] = {}
        for task in self.tasks:
            own = task.kind in kinds
            waits = [
                tuple(dict.fromkeys(name for before in task.waits for name in reached[before][half]))
                for half in (False, True)
            ]
            parts[own].append(replace(task, waits=waits[own]))
            waits[own] = (task.name,)
            reached[task.name] = waits
        inputs, parameters = (replace(self, tasks=tuple(tasks)) for tasks in parts)
        return inputs, parameters

    def __str__(self) -> str:
        rows = [("task", "lane", "waits for", "reads", "writes")]
        rows += [
            (t.name, t.lane.value, " ".join(t.waits), " ".join(t.reads), " ".join(t.writes))
            for t in self.tasks
        ]
        return table(rows, left=range(5))


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The optional stages of a layer, from which its schedules are built. They are the same on every rank.

    local: whether rows may stay on their rank, because their expert is on it.
    remote: whether rows may be sent by all-to-alls, usually to other ranks.
    sharded: whether experts are split over the ranks of a node.
    hooked: whether experts are sharded and, in addition, callbacks run inside the layer. Callbacks then run
        between the dispatch and the all-gather inside the node, or between the reduce-scatter and the
        combine.
    shared: whether there is a shared expert, which computes all tokens.
    gradients: whether the backward pass also reduces data-parallel gradients of other layers.
    one_lane: whether collectives inside a node and between nodes share one lane, so that they never run at
        the same time. This is the baseline that FSMoE is measured against.
    copies: how ranks that host copies of busy experts get the weights: "keep" (sent in forward and kept),
        "communicate" (sent again in backward), "present" (kept from an earlier call); None for no copies.
    local_copies: whether rows stay on their rank if a copy of their expert is on it; only with ``local`` and
        copies. Separate tasks L compute these rows. If False, rows for a copy count as received (task C),
        even if their token is on the same rank.
    relays_copies: whether some expert has several copies. The expert's owner then sends the rank of each copy
        a different part of the weights (V), and these ranks send their parts to each other (VR). Gradients go
        the opposite way.
    frozen_copies: whether no gradients of copies are computed, because the experts are frozen on all ranks.

    Raises ValueError if ``local`` and ``remote`` are False, or if ``copies`` is set and ``remote`` is False.
    """

    local: bool
    remote: bool
    sharded: bool = False
    hooked: bool = False
    shared: bool = False
    gradients: bool = False
    one_lane: bool = False
    copies: CopiesFate | None = None
    relays_copies: bool = False
    frozen_copies: bool = False
    local_copies: bool = False

    def __post_init__(self) -> None:
        if not (self.local or self.remote):
            raise ValueError("local (False) or remote (False) must be True: a layer's rows stay or travel")
        if self.copies is not None and not self.remote:
            raise ValueError(f"copies ({self.copies!r}) must be None where no rows travel (remote=False)")

    def sends_copies(self, direction: PassDirection) -> bool:
        """Returns whether a pass sends weights of busy experts to their copies; False without copies.

        Forward sends them, unless they were kept from an earlier call. Backward sends them only if they were
        not kept since forward.

        direction: "forward" or "backward".
        """
        return self.copies == "communicate" or (self.copies == "keep" and direction == "forward")


def finished(
    direction: str, tasks: list[Task], stages: Stages, slots: Mapping[str, str] | None = None
) -> Schedule:
    """Makes a schedule from a list of tasks: fills in the tasks for which each task waits (`link`).

    If ``stages.gradients`` is set, it adds to a backward pass the task that reduces other layers' gradients.
    If ``stages.one_lane`` is set, it moves the tasks of the intra-node lane to the communication lane.

    direction: "forward" or "backward".
    tasks: the tasks in the order in which they are issued.
    stages: the stages that the layer has.
    slots: the ring slot (reused memory) of each buffer that is in one; None if all buffers have memory of
        their own.
    """
    if stages.gradients and direction == "backward":
        # After the last S and before the next R: there the link would otherwise idle until the experts end.
        last = max((at for at, task in enumerate(tasks) if task.kind is Kind.DISPATCH), default=-1)
        tasks[last + 1 : last + 1] = [make_task(Kind.GRADIENTS, -1, [], ["gradients"])]
    if stages.one_lane:
        shared_lane = Lane.COMMUNICATE
        tasks = [replace(task, lane=shared_lane) if task.lane is Lane.INTRA_NODE else task for task in tasks]
    return Schedule(direction=direction, tasks=link(tasks, slots), slots=slots or {})


def local_pieces(n: int, *, local: bool, remote: bool) -> int:
    """Returns m, the number of tasks that compute the rows that stay on this rank.

    Rows stay if their expert is on this rank. If rows are also sent, there are 2 tasks (1 if n = 1): one for
    all chunks but the last, and one for the last chunk. Fewer tasks have larger products, which are faster.
    If no rows are sent, there are n tasks, one for each chunk. If no rows stay, m is 0.

    n: number of chunks.
    local, remote: whether rows may stay on their rank, and whether rows may be sent.
    """
    if not local:
        return 0
    return min(n, 2) if remote else n


def piece_of(chunk: int, n: int, m: int) -> int:
    """Returns the index of the task L that computes a chunk's rows which stay: max(chunk - (n - m), 0).

    Rows stay if their expert is on this rank. In n chunks, m tasks L compute the rows that stay. The first
    task has the rows of the first n - m + 1 chunks. Each of the last m - 1 chunks has a task of its own.

    chunk: index of the chunk.
    n: number of chunks.
    m: number of tasks L (`local_pieces`).

    Example: n = 4, m = 2 -> chunks 0 to 3 are computed by tasks 0, 0, 0, 1.
    """
    return max(chunk - (n - m), 0)


def pieces_for_copies(m: int, stages: Stages) -> range:
    """Returns the indices of the tasks L that run this rank's copies of busy experts on rows that stay.

    The tasks L with the indices 0 to m - 1 run the rank's own experts. Task m + j takes the same chunks as
    task j, but only those of their rows that are for a copy. If ``stages.local_copies`` is False, the range
    is empty. Rows for a copy then count as received (task C), even if their token is on the same rank.

    m: the number of tasks for own experts (`local_pieces`).
    stages: the stages of the layer.

    Example: m = 2 -> tasks 2 and 3.
    """
    return range(m, m + m * stages.local_copies)


def local_tasks_of(chunk: int, n: int, m: int, stages: Stages) -> tuple[int, ...]:
    """Returns the indices of all tasks L that compute rows of a chunk which stay on this rank.

    There is one task for own experts (`piece_of`), and, with ``stages.local_copies``, one for copies
    (`pieces_for_copies`).

    chunk: index of the chunk.
    n: number of chunks.
    m: the number of tasks for own experts.
    stages: the stages of the layer.
    """
    own = piece_of(chunk, n, m)
    return (own, m + own) if stages.local_copies else (own,)


def sequential(schedule: Schedule) -> Schedule:
    """Returns a schedule in which every task waits for the task before it, so that nothing overlaps.

    It is the baseline against which measurements compare other schedules.
    """
    chained: list[Task] = []
    for task in schedule.tasks:
        waits = (*task.waits, chained[-1].name) if chained else task.waits
        chained.append(replace(task, waits=tuple(dict.fromkeys(waits))))
    return replace(schedule, tasks=tuple(chained))


def link(tasks: Iterable[Task], slots: Mapping[str, str] | None = None) -> tuple[Task, ...]:
    """Returns the tasks with ``waits`` filled in: the names of the earlier tasks that must end first.

    For each buffer that a task reads or writes, the task waits for the last task that wrote this buffer. For
    each buffer that it writes, it also waits for all tasks that have read the buffer since it was last
    written. Buffers in one ring slot count as one buffer, because they use the same memory.

    tasks: the tasks in the order in which they are issued.
    slots: the ring slot (reused memory) of each buffer that is in one; None if all buffers have memory of
        their own.

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
    **dict.fromkeys(("P", "S", "SI", "R", "GAR", "V", "VR", "VG", "VGR"), Lane.COMMUNICATE),
    **dict.fromkeys(("AG", "AGI", "RS", "PG"), Lane.INTRA_NODE),
    **dict.fromkeys(("DI", "DM", "LDI", "LDM"), Lane.COPY_OUT),
    **dict.fromkeys(("HI", "HM", "LHI", "LHM"), Lane.COPY_IN),
}
"""The lane of each kind of task. Kinds that are not listed run on the compute lane."""


def make_task(kind: Kind, chunk: int, reads: Sequence[str], writes: Sequence[str]) -> Task:
    """Returns a task on the lane of its kind. Its ``waits`` are empty: `link` fills them in.

    kind: the work of the task.
    chunk: index of the chunk; -1 for all chunks.
    reads, writes: names of the buffers that the task reads and writes.
    """
    lane = _LANES.get(kind.value, Lane.COMPUTE)
    return Task(kind=kind, chunk=chunk, lane=lane, reads=tuple(reads), writes=tuple(writes))


ENDS_OF_STAGES: dict[PassDirection, tuple[str, ...]] = {
    "forward": ("T_I", "T_DI", "T_DO", "home", "T_O"),
    "backward": ("dT_O", "dT_DO", "dT_DI", "dhome", "dT_I"),
}
"""The names of five buffers of each pass, in the order in which rows pass through them.

The gather (G) copies rows from the first buffer. The others hold the results of the dispatch (S), of the
experts (C), of the combine (R), and of the output task (O).
"""


class PassBuilder:
    """Builds the list of tasks of a pass. Each method appends tasks, so the list has the order of the calls.

    The methods for optional stages append nothing if the layer does not have the stage. `dispatch`, `open`,
    `close` and `output` also append nothing for a chunk below 0 or beyond n - 1.

    direction: "forward" or "backward".
    n: number of chunks.
    stages: the layer's stages.
    tasks: the tasks that were appended so far.

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
        """Appends one task.

        kind: the work of the task.
        chunk: index of the chunk; -1 for all chunks.
        reads, writes: names of the buffers that the task reads and writes, such as "T_DI.0" (T_DI is the
            experts' input).
        """
        self.tasks.append(make_task(kind, chunk, reads, writes))

    def finish(self, slots: Mapping[str, str] | None = None) -> Schedule:
        """Returns the schedule of all tasks that were appended.

        slots: the ring slot (reused memory) of each buffer that is in one; None if all buffers have memory of
            their own.
        """
        return finished(self.direction, self.tasks, self.stages, slots)

    def dispatch(self, i: int, *, again: bool = False) -> None:
        """Appends the tasks that gather and send the rows of chunk i to the experts' ranks.

        These are G (gather), S (the dispatch all-to-all), and, if experts are sharded and the layer has no
        callbacks, AG (an all-gather inside the node).

        i: index of the chunk.
        again: whether backward sends forward's rows (T_DI) again. The tasks are then GI, SI and AGI.
        """
        if 0 <= i < self.n:
            self.gather(i, again=again)
            self.send(i, again=again)

    def gather(self, i: int, *, again: bool = False) -> None:
        """Appends task G of chunk i, which copies the rows to be sent into the send buffer.

        i: index of the chunk.
        again: whether backward sends forward's rows (T_DI) again. The task is then GI.
        """
        source = "T_I" if again else self._source
        self.add(Kind.GATHER.again(again), i, [f"{source}.{i}"], [f"send{'_again' * again}.{i}"])

    def send(self, i: int, *, again: bool = False) -> None:
        """Appends task S, the dispatch all-to-all of chunk i.

        If experts are sharded, it also appends AG, the all-gather inside the node, unless callbacks run
        between S and AG (`Stages.hooked`): `open` then appends the callbacks and AG.

        i: index of the chunk.
        again: whether backward sends forward's rows (T_DI) again. The tasks are then SI and AGI.
        """
        suffix = "_again" * again
        arrived = f"arrived{suffix}" if self.stages.sharded else "T_DI" if again else self._received
        self.add(Kind.DISPATCH.again(again), i, [f"send{suffix}.{i}"], [f"{arrived}.{i}"])
        if self.stages.sharded and not self.stages.hooked:
            self._all_gather(i, arrived, again)

    def open(self, i: int, *, again: bool = False) -> None:
        """Appends task HA, the callbacks on chunk i's dispatched rows, and AG, the all-gather of these rows.

        The all-gather is inside the node. Nothing is appended unless the layer has sharded experts and
        callbacks (`Stages.hooked`).

        i: index of the chunk.
        again: whether the rows are forward's rows (T_DI), which backward sends again. The tasks are then HAI
            and AGI.
        """
        if self.stages.hooked and 0 <= i < self.n:
            arrived, opened = (f"{name}{'_again' * again}" for name in ("arrived", "opened"))
            self.add(Kind.OPEN.again(again), i, [f"{arrived}.{i}"], [f"{opened}.{i}"])
            self._all_gather(i, opened, again)

    def _all_gather(self, i: int, source: str, again: bool) -> None:
        """Appends task AG of chunk i, the all-gather of rows inside the node.

        i: index of the chunk.
        source: the name of the buffer with this rank's own rows.
        again: whether the rows are forward's rows (T_DI), which backward sends again. The task is then AGI.
        """
        writes = [f"{'T_DI' if again else self._received}.{i}", f"copies{'_again' * again}.{i}"]
        self.add(Kind.ALL_GATHER.again(again), i, [f"{source}.{i}"], writes)

    def combine(self, i: int) -> None:
        """Appends task R, the combine all-to-all of chunk i, which sends results back to the tokens' ranks.

        If experts are sharded, it appends RS before R: a reduce-scatter of partial results inside the node.
        If callbacks run between RS and R (`Stages.hooked`), it appends only RS: `close` then appends the
        callbacks and R.

        i: index of the chunk.
        """
        leaving = "leaving" if self.stages.sharded else self._result
        if self.stages.sharded:
            self.add(Kind.REDUCE_SCATTER, i, [f"{self._result}.{i}"], [f"leaving.{i}", f"parts.{i}"])
        if not self.stages.hooked:
            self.add(Kind.COMBINE, i, [f"{leaving}.{i}"], [f"{self._home}.{i}"])

    def close(self, i: int) -> None:
        """Appends task HB, the callbacks on chunk i's results, and R, which sends these results back.

        Appends nothing unless the layer has sharded experts and callbacks (`Stages.hooked`).

        i: index of the chunk.
        """
        if self.stages.hooked and 0 <= i < self.n:
            self.add(Kind.CLOSE, i, [f"leaving.{i}"], [f"closed.{i}"])
            self.add(Kind.COMBINE, i, [f"closed.{i}"], [f"{self._home}.{i}"])

    def send_weights(self) -> None:
        """Appends task P, which sends the routing weights of all chunks to the experts' ranks in one message.

        If experts are sharded, it appends PG, too: an all-gather of the weights inside the node.
        """
        arrived = "weight_arrived" if self.stages.sharded else "weight_DI"
        self.add(Kind.WEIGHTS, -1, ["weight"], [arrived])
        if self.stages.sharded:
            self.add(Kind.SHARE_WEIGHTS, -1, [arrived], ["weight_DI"])

    def return_weights(self, chunks: Iterable[int]) -> None:
        """Appends task P, which in backward returns the gradients of all routing weights in one message.

        If experts are sharded, PG comes before P: a reduce-scatter of these gradients inside the node.

        chunks: the indices of the chunks, in the order in which their gradients are computed.
        """
        leaving = [f"dweight_DI.{i}" for i in chunks]
        if self.stages.sharded:
            self.add(Kind.SHARE_WEIGHTS, -1, leaving, ["dweight_leaving"])
            leaving = ["dweight_leaving"]
        self.add(Kind.WEIGHTS, -1, leaving, ["dweight"])

    def copy_weights(self) -> None:
        """Appends task V, which sends the weights of busy experts to the ranks of their copies.

        V is the first task of the pass. While the weights are sent, the rank gathers the first chunk, and
        computes rows that stay. Nothing is appended if this pass sends no weights (`Stages.sends_copies`).
        """
        if self.stages.sends_copies(self.direction):
            self.add(Kind.COPY_WEIGHTS, -1, ["w"], ["w_V" if self.stages.relays_copies else "w_K"])

    def relay_weights(self) -> None:
        """Appends task VR, in which ranks with copies of one expert send each other parts of its weights.

        In task V, the owner of the expert has sent each of these ranks a different part. VR comes after the
        first chunk's dispatch, so that this dispatch does not wait for V. Nothing is appended if V sends
        whole experts.
        """
        if self.stages.sends_copies(self.direction) and self.stages.relays_copies:
            self.add(Kind.RELAY_WEIGHTS, -1, ["w_V"], ["w_K"])

    @property
    def copied(self) -> list[str]:
        """The names of the buffers that hold weights of copies of busy experts: ["w_K"]; [] without copies.

        The experts' tasks read these buffers in addition to their other buffers.
        """
        return ["w_K"] * (self.stages.copies is not None)

    @property
    def learns_copies(self) -> bool:
        """Whether the pass computes gradients of parameters for copies of busy experts."""
        return self.stages.copies is not None and not self.stages.frozen_copies

    def copy_wgrad(self, i: int, reads: Sequence[str], *, is_last: bool) -> None:
        """Appends task KW of chunk i: gradients of the parameters of copies of busy experts.

        Appends nothing if no such gradients are computed (`learns_copies`). After the last chunk, the method
        also appends a task that sends these gradients:

            VG    if every expert has at most one copy: sends the gradients to the ranks that own the experts
            VGR   if an expert has several copies: the ranks of the copies exchange gradients, so that each
                  of these ranks can sum one part. `add_gradients` then appends VG

        The caller appends task W afterwards, the weight gradients of the rank's own experts. So W runs while
        gradients of copies are sent.

        i: index of the chunk.
        reads: the buffers that task KW reads. Task W reads the same buffers.
        is_last: whether this is the last chunk.
        """
        if not self.learns_copies:
            return
        self.add(Kind.COPY_WGRAD, i, [*reads, "dw_K"], ["dw_K"])
        if is_last and self.stages.relays_copies:
            self.add(Kind.RELAY_GRADIENTS, -1, ["dw_K"], ["dw_V"])
        elif is_last:
            self.add(Kind.COPY_GRADIENTS, -1, ["dw_K"], ["dw_home"])

    def add_gradients(self) -> None:
        """Appends task VA, which adds the gradients from copies of experts to the experts' own gradients.

        VA comes after all other tasks that add to the experts' gradients, so that the order of the sum is
        fixed. If an expert has several copies, this method first appends VG, which sends the gradients of the
        copies to the ranks that own the experts. Otherwise `copy_wgrad` has already appended VG. Nothing is
        appended without copies, or if no gradients of copies are computed.
        """
        if self.learns_copies:
            if self.stages.relays_copies:
                self.add(Kind.COPY_GRADIENTS, -1, ["dw_K", "dw_V"], ["dw_home"])
            self.add(Kind.ADD_GRADIENTS, -1, ["dw_home", "dw"], ["dw"])

    def shared(self) -> None:
        """Appends the tasks of the shared expert, which computes all tokens, if the layer has one.

        The caller adds these tasks at a point of the list at which rows are being sent, and the other experts
        have nothing to compute.
        """
        if self.stages.shared and self.direction == "forward":
            self.add(Kind.SHARED, -1, ["T_I"], ["T_S"])
        elif self.stages.shared:
            self.add(Kind.SHARED, -1, ["dT_O"], ["dT_S", "pending_S"])
            self.add(Kind.SHARED_WGRAD, -1, ["pending_S"], ["dw_S"])

    def output(self, i: int, *pieces: int) -> None:
        """Appends task O of chunk i, which sums the results of each of the chunk's tokens.

        i: index of the chunk.
        pieces: the indices of the tasks L that have computed this chunk's rows that stay on this rank
            (`local_tasks_of`). Without this argument, there is one such task, which has the chunk's index.
        """
        if 0 <= i < self.n:
            own_pieces = pieces or (i,)
            shared = "T_S" if self.direction == "forward" else "dT_S"
            reads = [f"{self._home}_L.{j}" for j in own_pieces] * self.stages.local
            reads += [f"{self._home}.{i}"] * self.stages.remote + [shared] * self.stages.shared
            self.add(Kind.OUTPUT, i, reads, [f"{self._output}.{i}"])
