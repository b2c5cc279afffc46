"""The schedules that MPipeMoE's memory formulas (Eq. 2-5) are about, and what they hold: no layer runs them.

`held` counts as the paper does: a buffer lives from the first task that writes it to the last that reads or
writes it, in list order; buffers of one slot are one memory, which lives from the first of them to the last.
tests/unit/test_memory_model.py shows that this is Eq. 2-6 (`pmoe.papers.mpipemoe_memory`), and that the slots
of this layer's own schedules, whose bytes are `pmoe.planner.memory`'s, are the paper's.

They differ from this layer's own (`pmoe.schedule.ring_buffers`) in what they keep: T_DO and T_O are
activations, and all rows travel. Tasks are those of Fig. 7a: S of chunk i + 1 before R of chunk i.

    forward    S: T_I -> T_DI      C: T_DI -> T_M, T_DO                 R: T_DO -> T_O
    backward   S: dT_O -> dT_DO    C: dT_DO, T_DI, T_M -> dT_M, dT_DI   R: dT_DI -> dT_I

Without reuse every chunk of every tensor has memory of its own. With reuse the chunks of T_DI and of T_DO,
and of their gradients, share two slots, those of T_M and of its gradient one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pmoe.schedule.tasks import Kind, Schedule, Task, link, make_task

RINGS = {"T_DI": 2, "T_DO": 2, "T_M": 1, "dT_DI": 2, "dT_DO": 2, "dT_M": 1}
"""Slots of each tensor with reuse (section III.D)."""


def paper_forward(n: int, *, reuse: bool) -> Schedule:
    """Reads T_I, and T_O is its result. Without reuse Eq. 2 and 4, with reuse Eq. 4 less Eq. 5."""
    tasks: list[Task] = []

    def dispatch(i: int) -> None:
        if i < n:
            tasks.append(make_task(Kind.DISPATCH, i, [f"T_I.{i}"], [f"T_DI.{i}"]))

    dispatch(0)
    dispatch(1)
    for i in range(n):
        tasks.append(make_task(Kind.COMPUTE, i, [f"T_DI.{i}"], [f"T_M.{i}", f"T_DO.{i}"]))
        tasks.append(make_task(Kind.COMBINE, i, [f"T_DO.{i}"], [f"T_O.{i}"]))
        dispatch(i + 2)
    return _scheduled("forward", tasks, reuse)


def paper_backward(n: int, *, reuse: bool) -> Schedule:
    """Reads dT_O, and dT_I is its result. With reuse T_DI is sent and T_M made again (S4), into slots."""
    tasks: list[Task] = []

    def dispatch(i: int) -> None:
        if i >= n:
            return
        if reuse:
            tasks.append(make_task(Kind.DISPATCH_AGAIN, i, [f"T_I.{i}"], [f"T_DI.{i}"]))
        tasks.append(make_task(Kind.DISPATCH, i, [f"dT_O.{i}"], [f"dT_DO.{i}"]))

    dispatch(0)
    dispatch(1)
    for i in range(n):
        if reuse:
            tasks.append(make_task(Kind.RECOMPUTE, i, [f"T_DI.{i}"], [f"T_M.{i}"]))
        reads = [f"dT_DO.{i}", f"T_DI.{i}", f"T_M.{i}"]
        tasks.append(make_task(Kind.COMPUTE, i, reads, [f"dT_M.{i}", f"dT_DI.{i}"]))
        tasks.append(make_task(Kind.COMBINE, i, [f"dT_DI.{i}"], [f"dT_I.{i}"]))
        dispatch(i + 2)
    return _scheduled("backward", tasks, reuse)


def paper_sequential_backward() -> Schedule:
    """Eq. 3: one chunk, one operation after another. C0 and C1 are the backward of the experts' second and
    first product, so that no more than two neighbouring gradients are alive."""
    tasks = [
        make_task(Kind.DISPATCH, 0, ["dT_O.0"], ["dT_DO.0"]),
        make_task(Kind.COMPUTE, 0, ["dT_DO.0", "T_M.0"], ["dT_M.0"]),
        make_task(Kind.COMPUTE, 1, ["dT_M.0", "T_DI.0"], ["dT_DI.0"]),
        make_task(Kind.COMBINE, 0, ["dT_DI.0"], ["dT_I.0"]),
    ]
    return Schedule(direction="backward", tasks=link(tasks))


def _scheduled(direction: str, tasks: list[Task], reuse: bool) -> Schedule:
    slots = {}
    for buffer in {buffer: None for task in tasks for buffer in (*task.reads, *task.writes)}:
        tensor, _, i = buffer.partition(".")
        if reuse and tensor in RINGS:
            slots[buffer] = f"{tensor}[{int(i) % RINGS[tensor]}]"
    return Schedule(direction=direction, tasks=link(tasks, slots), slots=slots)


# ---- what a schedule holds


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a pass holds.

    peak_bytes: the most at once, be it before a task, within one or after it.
    during: by task in list order, the bytes of each memory (a slot, or a buffer that has none) while it runs.
    after: the same once everything that the task was the last to use is given back.
    """

    peak_bytes: int
    during: tuple[dict[str, int], ...]
    after: tuple[dict[str, int], ...]


def held(
    tasks: Iterable[Task],
    bytes_of: Callable[[str], int],
    slots: Mapping[str, str] | None = None,
    *,
    before: Iterable[str] = (),
    after: Iterable[str] = (),
) -> Held:
    """The lifetimes of all buffers that ``tasks`` read and write, and the bytes that follow from them.

    bytes_of: from a buffer's name. slots: buffer -> the slot that it lies in; a slot is as large as the
    largest of its buffers. before: buffers that exist when the pass starts, whether or not it uses them.
    after: those that must outlive it.

    Example: A writes x (2 bytes), B reads x and writes y (3 bytes), y must outlive them -> peak 5,
    after A {x: 2}, after B {y: 3}.

    Raises ValueError for a task that reads what is neither there before the pass nor written by an earlier
    task, and for a buffer that should outlive the pass and never exists.
    """
    tasks, slots = list(tasks), slots or {}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    size: dict[str, int] = {}
    exists: set[str] = set()

    def use(buffer: str, at: int) -> None:
        memory = slots.get(buffer, buffer)
        exists.add(buffer)
        size[memory] = max(size.get(memory, 0), bytes_of(buffer))
        first.setdefault(memory, at)
        last[memory] = at

    for buffer in before:
        use(buffer, -1)
    for at, task in enumerate(tasks):
        for buffer in task.reads:
            if buffer not in exists:
                raise ValueError(f"task {task.name} reads {buffer}, which no task before it writes")
        for buffer in (*task.reads, *task.writes):
            use(buffer, at)
    for buffer in after:
        if buffer not in exists:
            raise ValueError(f"after: {buffer} must be there before the pass or written by a task")
        use(buffer, len(tasks))

    def living(begin: int, end: int) -> dict[str, int]:
        """First used by ``begin``, and last used at ``end`` or later."""
        return {m: size[m] for m in size if first[m] <= begin and last[m] >= end}

    during = tuple(living(at, at) for at in range(len(tasks)))
    left = tuple(living(at, at + 1) for at in range(len(tasks)))
    peak = max(sum(memories.values()) for memories in (living(-1, -1), *during))
    return Held(peak_bytes=peak, during=during, after=left)
