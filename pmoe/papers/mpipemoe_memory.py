"""The schedules that MPipeMoE's memory formulas (Eq. 2-5) are about: no layer runs them.

`pmoe.papers.lifetimes.held` says what they hold, and tests/unit/test_memory_model.py that this is Eq. 2-6
(`pmoe.planner.theory`), and that the slots of this layer's own schedules are the paper's.

They differ from this layer's own (`pmoe.schedule.rings`) in what they keep: T_DO and T_O are activations,
and all rows travel. Tasks are those of Fig. 7a: S of chunk i + 1 before R of chunk i.

    forward    S: T_I -> T_DI      C: T_DI -> T_M, T_DO                 R: T_DO -> T_O
    backward   S: dT_O -> dT_DO    C: dT_DO, T_DI, T_M -> dT_M, dT_DI   R: dT_DI -> dT_I

Without reuse every chunk of every tensor has memory of its own. With reuse the chunks of T_DI and of T_DO,
and of their gradients, share two slots, those of T_M and of its gradient one.
"""

from __future__ import annotations

from pmoe.schedule.tasks import Kind, Schedule, Task, check_degree, link, make_task

RINGS = {"T_DI": 2, "T_DO": 2, "T_M": 1, "dT_DI": 2, "dT_DO": 2, "dT_M": 1}
"""Slots of each tensor with reuse (section III.D)."""


def paper_forward(n: int, *, reuse: bool) -> Schedule:
    """Reads T_I, and T_O is its result. Without reuse Eq. 2 and 4, with reuse Eq. 4 less Eq. 5."""
    check_degree(n)
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
    check_degree(n)
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
