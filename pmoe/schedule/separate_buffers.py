"""Schedules in which every buffer has memory of its own, so that all dispatches are issued first.

`pmoe.schedule.tasks` has pictures of these schedules, and `Kind` explains the letters of tasks.
"""

from __future__ import annotations

import functools

from pmoe.schedule.tasks import Kind, PassBuilder, Schedule, Stages, local_pieces, piece_of


@functools.lru_cache(maxsize=64)
def forward_schedule(n: int, stages: Stages) -> Schedule:
    """Returns the schedule of a forward pass in n chunks, in which every buffer has memory of its own.

    The dispatch all-to-alls (S) of all chunks are issued first. All received rows are kept, so waiting would
    save no memory, and the link never idles while an S remains.

    Rows that stay on this rank, because their expert is on it, fill the time until the first chunk arrives.
    They are computed as one piece, because small products are slow. Only those of the last chunk are a piece
    of their own, which is computed at the end, while the last combine all-to-all (R) runs.

    stages: the stages that the layer has.
    """
    tasks = PassBuilder("forward", n, stages)
    local, remote = stages.local, stages.remote
    m = local_pieces(n, local=local, remote=remote)
    chunks = range(n if remote else 0)
    early = m - 1 if remote and m > 1 else m

    def stay(pieces: range) -> None:
        """Adds a task of the experts for each of these pieces of the rows that stay on this rank."""
        for j in pieces:
            writes = [f"T_DI_L.{j}", f"T_M_L.{j}", f"home_L.{j}"]
            tasks.add(Kind.LOCAL, j, [f"T_I_L.{j}", "weight"], writes)

    for i in chunks:
        tasks.gather(i)
        if i == 0:
            tasks.send_weights()
        tasks.send(i)
    tasks.shared()
    stay(range(early))
    for i in chunks:
        _through_experts(tasks, i, [f"T_DI.{i}", "weight_DI"], [f"T_M.{i}", f"T_DO.{i}"])
    stay(range(early, m))
    for i in range(n):
        tasks.output(i, piece_of(i, n, m))
    return tasks.finish()


@functools.lru_cache(maxsize=64)
def backward_schedule(n: int, stages: Stages) -> Schedule:
    """Returns the schedule of a backward pass in n chunks, in which every buffer has memory of its own.

    The dispatch all-to-alls (S) carry gradients of the layer's output to the experts, and the combine
    all-to-alls (R) carry gradients of the experts' input back.

    Gradients of parameters are tasks of their own, which all add to one sum, in list order. The tasks for
    rows that stay on this rank fill the time until the first gradients arrive. The tasks for received rows
    come one chunk late, so that the last two fill the time while the last R runs. The tensors that they read
    are held for at most two chunks.

    The reduction of other layers' gradients (GAR), if there is one, follows the last S (FSMoE, Fig. 3d).

    stages: the stages that the layer has.
    """
    tasks = PassBuilder("backward", n, stages)
    local, remote = stages.local, stages.remote
    m = local_pieces(n, local=local, remote=remote)
    chunks = range(n if remote else 0)

    def add_weight_gradients(i: int) -> None:
        """Adds the task that computes the gradients of parameters from chunk i's received rows."""
        tasks.add(Kind.WGRAD, i, [f"pending.{i}", "dw"], ["dw"])

    for i in chunks:
        tasks.dispatch(i)
    tasks.shared()
    for j in range(m):
        reads = [f"dT_O_L.{j}", f"T_DI_L.{j}", f"T_M_L.{j}"]
        tasks.add(Kind.LOCAL, j, reads, [f"dhome_L.{j}", f"pending_L.{j}"])
        tasks.add(Kind.LOCAL_WGRAD, j, [f"pending_L.{j}", "dw"], ["dw"])
    for i in chunks:
        writes = [f"dT_DI.{i}", f"pending.{i}", f"dweight_DI.{i}"]
        _through_experts(tasks, i, [f"dT_DO.{i}", f"T_DI.{i}", f"T_M.{i}"], writes)
        if i > 0:
            add_weight_gradients(i - 1)
    if remote:
        tasks.return_weights(range(n))
        add_weight_gradients(n - 1)
    for i in range(n):
        tasks.output(i, piece_of(i, n, m))
    return tasks.finish()


def _through_experts(tasks: PassBuilder, i: int, reads: list[str], writes: list[str]) -> None:
    """Adds the task of the experts for chunk i, then the tasks that send the results back.

    With sharded experts these are a reduce-scatter inside the node and the combine all-to-all. If callbacks
    come between the two, they and the combine of a chunk are added one chunk late, because the experts need
    not wait for the reduce-scatter. The callbacks and the all-gather of the next chunk are added before the
    experts' task.

    reads, writes: the buffers of the experts' task.
    """
    if i == 0:
        tasks.open(0)
    tasks.open(i + 1)
    tasks.add(Kind.COMPUTE, i, reads, writes)
    tasks.combine(i)
    tasks.close(i - 1)
    if i == tasks.n - 1:
        tasks.close(i)
