"""Schedules without rings: every buffer has memory of its own, so every S is issued first."""

from __future__ import annotations

import functools

from pmoe.schedule.tasks import (
    Kind,
    Schedule,
    Stages,
    Task,
    check_degree,
    close_tasks,
    combine_tasks,
    dispatch_tasks,
    finished,
    local_pieces,
    make_task,
    open_tasks,
    piece_of,
    return_weights,
    send_weights,
    shared_backward,
    with_gradients,
)


@functools.lru_cache(maxsize=64)
def forward_schedule(n: int, stages: Stages, ahead: int | None = None) -> Schedule:
    """The forward pass in n chunks.

    S of chunk i + ahead is issued before R of chunk i; ahead=1 is MPipeMoE's Fig. 7a. None issues every S
    first: nothing that is kept until backward gains from waiting, and the link never idles while S remain.
    Local rows fill the time until the first chunk arrives, in one piece, for products should not be cut
    smaller than they must be; the last chunk's are left for the end, where they cover the drain of the
    last R.
    """
    check_degree(n, ahead)
    local, remote = stages.local, stages.remote
    m = local_pieces(n, local=local, remote=remote)
    early = m - 1 if remote and m > 1 else m
    tasks: list[Task] = []
    if remote:
        tasks += _communication_first(n, ahead, stages, source="T_I", received="T_DI")
        tasks[1:1] = send_weights(stages)
    if stages.shared:
        tasks.append(make_task(Kind.SHARED, -1, ["T_I"], ["T_S"]))
    if local:
        tasks += [_local_forward(j) for j in range(early)]
    if remote:
        for i in range(n):
            tasks += _open_for(i, n, ahead, stages, "T_DI")
            tasks.append(make_task(Kind.COMPUTE, i, [f"T_DI.{i}", "weight_DI"], [f"T_M.{i}", f"T_DO.{i}"]))
            tasks += _after_compute(
                i, n, ahead, stages, source="T_I", received="T_DI", result="T_DO", home="home"
            )
    if local:
        tasks += [_local_forward(j) for j in range(early, m)]
    for i in range(n):
        home = [f"home_L.{piece_of(i, n, m)}"] * local + [f"home.{i}"] * remote + ["T_S"] * stages.shared
        tasks.append(make_task(Kind.OUTPUT, i, home, [f"T_O.{i}"]))
    return finished("forward", tasks, stages)


@functools.lru_cache(maxsize=64)
def backward_schedule(n: int, stages: Stages, ahead: int | None = None) -> Schedule:
    """The backward pass, mirrored: gradients of T_O are dispatched, those of T_DI return.

    Weight gradients are tasks of their own. Those of local rows fill the time until the first gradients
    arrive. Those of received rows come one chunk late: the last two fill the drain of the last R, and what
    they need is held for two chunks at most. All of them add to one sum, in list order. Other layers'
    gradients follow the last S (FSMoE, Fig. 3d).
    """
    check_degree(n, ahead)
    local, remote = stages.local, stages.remote
    m = local_pieces(n, local=local, remote=remote)
    tasks: list[Task] = []
    if remote:
        tasks += _communication_first(n, ahead, stages, source="dT_O", received="dT_DO")
    if stages.shared:
        tasks += shared_backward()
    for j in range(m):
        reads = [f"dT_O_L.{j}", f"T_DI_L.{j}", f"T_M_L.{j}"]
        tasks.append(make_task(Kind.LOCAL, j, reads, [f"dhome_L.{j}", f"pending_L.{j}"]))
        tasks.append(make_task(Kind.LOCAL_WGRAD, j, [f"pending_L.{j}", "dw"], ["dw"]))
    if remote:
        for i in range(n):
            tasks += _open_for(i, n, ahead, stages, "dT_DO")
            reads = [f"dT_DO.{i}", f"T_DI.{i}", f"T_M.{i}"]
            tasks.append(make_task(Kind.COMPUTE, i, reads, [f"dT_DI.{i}", f"pending.{i}", f"dweight_DI.{i}"]))
            tasks += _after_compute(
                i, n, ahead, stages, source="dT_O", received="dT_DO", result="dT_DI", home="dhome"
            )
            if i > 0:
                tasks.append(_weight_gradient(i - 1))
        tasks += return_weights(range(n), stages)
        tasks.append(_weight_gradient(n - 1))
    for i in range(n):
        home = [f"dhome_L.{piece_of(i, n, m)}"] * local + [f"dhome.{i}"] * remote + ["dT_S"] * stages.shared
        tasks.append(make_task(Kind.OUTPUT, i, home, [f"dT_I.{i}"]))
    if stages.gradients:
        tasks = with_gradients(tasks)
    return finished("backward", tasks, stages)


def _local_forward(j: int) -> Task:
    return make_task(Kind.LOCAL, j, [f"T_I_L.{j}", "weight"], [f"T_DI_L.{j}", f"T_M_L.{j}", f"home_L.{j}"])


def _weight_gradient(i: int) -> Task:
    return make_task(Kind.WGRAD, i, [f"pending.{i}", "dw"], ["dw"])


def _communication_first(n: int, ahead: int | None, stages: Stages, source: str, received: str) -> list[Task]:
    """G and S of the chunks that are issued before anything is computed."""
    first = n if ahead is None else min(ahead + 1, n)
    return [task for i in range(first) for task in dispatch_tasks(i, stages, source, received)]


def _after_compute(
    i: int, n: int, ahead: int | None, stages: Stages, *, source: str, received: str, result: str, home: str
) -> list[Task]:
    """R of chunk i, and behind it the next S that ``ahead`` allows. Callbacks between RS and R come a chunk
    later: the experts do not wait for the sums."""
    tasks = combine_tasks(i, stages, result, home)
    if stages.hooked:
        late = range(max(i - 1, 0), i) if ahead != 0 else ()
        last = (i,) if i == n - 1 or ahead == 0 else ()
        tasks += [task for each in (*late, *last) for task in close_tasks(each, home)]
    if ahead is not None and i + ahead + 1 < n:
        tasks += dispatch_tasks(i + ahead + 1, stages, source, received)
    return tasks


def _open_for(i: int, n: int, ahead: int | None, stages: Stages, received: str) -> list[Task]:
    """Callbacks and AG, before the experts of chunk i and a chunk ahead of them where S is."""
    if not stages.hooked:
        return []
    if ahead == 0:
        return open_tasks(i, received)
    chunks = range(i + 1, min(i + 2, n)) if i else range(min(2, n))
    return [task for each in chunks for task in open_tasks(each, received)]
