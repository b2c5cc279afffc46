"""Schedules without rings: every buffer has memory of its own, so every S is issued first."""

from __future__ import annotations

import functools
from collections.abc import Sequence

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
    output_task,
    piece_of,
    return_weights,
    send_weights,
    shared_backward,
)


@functools.lru_cache(maxsize=64)
def forward_schedule(n: int, stages: Stages) -> Schedule:
    """The forward pass in n chunks.

    Every S is issued first: nothing that is kept until backward gains from waiting, and the link never idles
    while S remain. Local rows fill the time until the first chunk arrives, in one piece, for products should
    not be cut smaller than they must be; the last chunk's are left for the end, where they cover the drain of
    the last R.
    """
    check_degree(n)
    local, remote = stages.local, stages.remote
    m = local_pieces(n, local=local, remote=remote)
    early = m - 1 if remote and m > 1 else m
    tasks: list[Task] = []
    if remote:
        tasks += [task for i in range(n) for task in dispatch_tasks(i, stages, "T_I", "T_DI")]
        tasks[1:1] = send_weights(stages)
    if stages.shared:
        tasks.append(make_task(Kind.SHARED, -1, ["T_I"], ["T_S"]))
    stay = [
        make_task(Kind.LOCAL, j, [f"T_I_L.{j}", "weight"], [f"T_DI_L.{j}", f"T_M_L.{j}", f"home_L.{j}"])
        for j in range(m)
    ]
    tasks += stay[:early]
    if remote:
        for i in range(n):
            compute = make_task(Kind.COMPUTE, i, [f"T_DI.{i}", "weight_DI"], [f"T_M.{i}", f"T_DO.{i}"])
            tasks += _through_experts(compute, n, stages, names=("T_DI", "T_DO", "home"))
    tasks += stay[early:]
    tasks += [output_task("T_O", i, piece_of(i, n, m), stages) for i in range(n)]
    return finished("forward", tasks, stages)


@functools.lru_cache(maxsize=64)
def backward_schedule(n: int, stages: Stages) -> Schedule:
    """The backward pass, mirrored: gradients of T_O are dispatched, those of T_DI return.

    Weight gradients are tasks of their own. Those of local rows fill the time until the first gradients
    arrive. Those of received rows come one chunk late: the last two fill the drain of the last R, and what
    they need is held for two chunks at most. All of them add to one sum, in list order. Other layers'
    gradients follow the last S (FSMoE, Fig. 3d).
    """
    check_degree(n)
    local, remote = stages.local, stages.remote
    m = local_pieces(n, local=local, remote=remote)
    tasks: list[Task] = []
    if remote:
        tasks += [task for i in range(n) for task in dispatch_tasks(i, stages, "dT_O", "dT_DO")]
    if stages.shared:
        tasks += shared_backward()
    for j in range(m):
        reads = [f"dT_O_L.{j}", f"T_DI_L.{j}", f"T_M_L.{j}"]
        tasks.append(make_task(Kind.LOCAL, j, reads, [f"dhome_L.{j}", f"pending_L.{j}"]))
        tasks.append(make_task(Kind.LOCAL_WGRAD, j, [f"pending_L.{j}", "dw"], ["dw"]))
    if remote:
        late = [make_task(Kind.WGRAD, i, [f"pending.{i}", "dw"], ["dw"]) for i in range(n)]
        for i in range(n):
            reads = [f"dT_DO.{i}", f"T_DI.{i}", f"T_M.{i}"]
            writes = [f"dT_DI.{i}", f"pending.{i}", f"dweight_DI.{i}"]
            compute = make_task(Kind.COMPUTE, i, reads, writes)
            tasks += _through_experts(compute, n, stages, names=("dT_DO", "dT_DI", "dhome"))
            if i > 0:
                tasks.append(late[i - 1])
        tasks += [*return_weights(range(n), stages), late[-1]]
    tasks += [output_task("dT_I", i, piece_of(i, n, m), stages) for i in range(n)]
    return finished("backward", tasks, stages)


def _through_experts(compute: Task, n: int, stages: Stages, names: Sequence[str]) -> list[Task]:
    """A chunk's experts, and R. Callbacks and AG of the next chunk come before them; callbacks between RS and
    R come a chunk later, for the experts do not wait for the sums.

    names: of the buffers of what arrives, of the experts' result, and of what comes home."""
    i, (received, result, home) = compute.chunk, names
    tasks = [compute, *combine_tasks(i, stages, result, home)]
    if stages.hooked:
        ahead = range(i + 1 if i else 0, min(i + 2, n))
        tasks = [task for each in ahead for task in open_tasks(each, received)] + tasks
        behind = range(max(i - 1, 0), n if i == n - 1 else i)
        tasks += [task for each in behind for task in close_tasks(each, home)]
    return tasks
