"""Schedules in which every buffer has memory of its own, so that all dispatches are issued first.

No dispatch waits until an earlier chunk has left its buffer. `pmoe.schedule.tasks` has pictures of these
schedules, and `Kind` explains the letters of tasks.
"""

from __future__ import annotations

import functools

from pmoe.schedule.tasks import (
    Kind,
    PassBuilder,
    Schedule,
    Stages,
    local_pieces,
    local_tasks_of,
    pieces_for_copies,
)


@functools.lru_cache(maxsize=64)
def forward_schedule(n: int, stages: Stages) -> Schedule:
    """Returns the schedule of a forward pass in n chunks, in which every buffer has memory of its own.

    The dispatch all-to-alls (S) of all chunks are issued first. All received rows are kept, so issuing an S
    later would save no memory. In this order the link between ranks never idles while an S remains.

    MPipeMoE alternates S with the combine all-to-alls (R), as in Fig. 7a: S0 S1 R0 S2 R1 S3 R2 R3. With
    separate buffers the alternating order is never faster. Take an R that is followed by an S, and swap the
    two. The S now ends earlier. The R now ends at the time at which the S ended before the swap. The later
    end of R does no harm, because only the sums of tokens (O) wait for R, and the sums come after all
    experts. `bench/bench_alternate.py` simulates and measures both orders.

    Some rows stay on this rank, because their expert is on it. If there are several chunks, and rows are also
    sent, two tasks L compute the rows that stay (`local_pieces`). The first L has the rows of all chunks but
    the last, because small products are slow. It fills the time until the first chunk arrives. The second L
    has the rows of the last chunk. It fills the time while the last combine all-to-all (R) runs. Rows that
    stay because a copy of their expert is on this rank have tasks L of their own. These follow the other L,
    and wait for the copy's weights.

    n: number of chunks.
    stages: the stages that the layer has.
    """
    tasks = PassBuilder("forward", n, stages)
    local, remote = stages.local, stages.remote
    m = local_pieces(n, local=local, remote=remote)
    chunks = range(n if remote else 0)
    early = m - 1 if remote and m > 1 else m
    for_copies = pieces_for_copies(m, stages)

    def stay(pieces: range) -> None:
        """Adds tasks L, in which the experts compute rows that stay on this rank.

        pieces: the indices of these tasks. Each task computes one part of the rows.
        """
        for j in pieces:
            reads = [f"T_I_L.{j}", "weight", *(tasks.copied if j in for_copies else ())]
            writes = [f"T_DI_L.{j}", f"T_M_L.{j}", f"home_L.{j}"]
            tasks.add(Kind.LOCAL, j, reads, writes)

    tasks.copy_weights()
    for i in chunks:
        tasks.gather(i)
        if i == 0:
            tasks.send_weights()
        tasks.send(i)
        if i == 0:
            tasks.relay_weights()
    tasks.shared()
    stay(range(early))
    stay(for_copies[:early])
    for i in chunks:
        reads = [f"T_DI.{i}", "weight_DI", *tasks.copied]
        _through_experts(tasks, i, reads, [f"T_M.{i}", f"T_DO.{i}"])
    stay(range(early, m))
    stay(for_copies[early:])
    for i in range(n):
        tasks.output(i, *local_tasks_of(i, n, m, stages))
    return tasks.finish()


@functools.lru_cache(maxsize=64)
def backward_schedule(n: int, stages: Stages) -> Schedule:
    """Returns the schedule of a backward pass in n chunks, in which every buffer has memory of its own.

    The dispatch all-to-alls (S) send gradients of the layer's output to the experts, and the combine
    all-to-alls (R) send gradients of the experts' input back.

    Gradients of parameters are computed by separate tasks (LW, W). All of them add to the same sums, in the
    order of the list. The tasks LW, for rows that stay on this rank, fill the time until the first gradients
    arrive. A task W, for the received rows of a chunk, comes after the experts' task (C) of the next chunk.
    So the W of the last two chunks fill the time while the last R runs, and the tensors that a W reads are in
    memory for at most two chunks.

    A rank may also host copies of busy experts, which compute some of the rows that stay. Other ranks wait
    for the gradients of the copies, which can be sent only after the last task C. So, with several chunks,
    the last task L for the rank's own experts is moved to the end: it runs after all tasks C. The last C then
    ends earlier, and the gradients of the copies are sent earlier (VG, or VGR if an expert has several
    copies). After this L come VA, which adds the gradients of copies to those of the experts, and O.

    The task GAR reduces gradients of other layers. If there is one, it follows the last S (FSMoE, Fig. 3d).

    n: number of chunks.
    stages: the stages that the layer has.
    """
    tasks = PassBuilder("backward", n, stages)
    local, remote = stages.local, stages.remote
    m = local_pieces(n, local=local, remote=remote)
    for_copies = pieces_for_copies(m, stages)
    chunks = range(n if remote else 0)

    # On a rank with copies, the last L for own experts runs at the end: other ranks wait for the gradients of
    # the copies, which can be sent only after the last C.
    early = m - 1 if stages.local_copies and m > 1 else m

    def add_weight_gradients(i: int) -> None:
        """Adds the task that computes the gradients of parameters from chunk i's received rows."""
        tasks.add(Kind.WGRAD, i, [f"pending.{i}", "dw"], ["dw"])

    def stay(pieces: range) -> None:
        """Adds tasks L and LW (LKW for copies), which compute gradients from rows that stay on this rank.

        pieces: the indices of these tasks. Each task L has one part of the rows.
        """
        for j in pieces:
            reads = [f"dT_O_L.{j}", f"T_DI_L.{j}", f"T_M_L.{j}", *(tasks.copied if j in for_copies else ())]
            tasks.add(Kind.LOCAL, j, reads, [f"dhome_L.{j}", f"pending_L.{j}"])
            if j not in for_copies:
                tasks.add(Kind.LOCAL_WGRAD, j, [f"pending_L.{j}", "dw"], ["dw"])
            elif tasks.learns_copies:
                tasks.add(Kind.LOCAL_COPY_WGRAD, j, [f"pending_L.{j}", "dw_K"], ["dw_K"])

    tasks.copy_weights()
    for i in chunks:
        tasks.dispatch(i)
        if i == 0:
            tasks.relay_weights()
    tasks.shared()
    stay(range(early))
    stay(for_copies)
    for i in chunks:
        writes = [f"dT_DI.{i}", f"pending.{i}", f"dweight_DI.{i}"]
        reads = [f"dT_DO.{i}", f"T_DI.{i}", f"T_M.{i}", *tasks.copied]
        _through_experts(tasks, i, reads, writes)
        tasks.copy_wgrad(i, [f"pending.{i}"], is_last=i == n - 1)
        if i > 0:
            add_weight_gradients(i - 1)
    if remote:
        tasks.return_weights(range(n))
        add_weight_gradients(n - 1)
    stay(range(early, m))
    tasks.add_gradients()
    for i in range(n):
        tasks.output(i, *local_tasks_of(i, n, m, stages))
    return tasks.finish()


def _through_experts(tasks: PassBuilder, i: int, reads: list[str], writes: list[str]) -> None:
    """Adds the task of the experts for chunk i, and the tasks that send its results back.

    Usually the order is: the experts on chunk i; with sharded experts, the reduce-scatter of chunk i inside
    the node; the combine all-to-all of chunk i.

    With sharded experts and callbacks (`Stages.hooked`), the order is:

    1. callbacks on the dispatched rows of chunk i + 1, and their all-gather;
    2. the experts on chunk i;
    3. the reduce-scatter of chunk i inside the node;
    4. callbacks on the results of chunk i - 1, and their combine all-to-all.

    Step 4 is one chunk late, because its callbacks share a lane with the experts. The callbacks on the
    results of chunk i must wait for the reduce-scatter of chunk i. If these callbacks were added right after
    the reduce-scatter, the experts of chunk i + 1 would come after them in the lane, and would wait, too.

    With i = 0, step 1 is also added for chunk 0. With the last i, step 4 is also added for the last chunk.

    tasks: the builder of the pass, to which tasks are added.
    i: index of the chunk.
    reads, writes: the names of the buffers that the experts' task reads and writes.
    """
    if i == 0:
        tasks.open(0)
    tasks.open(i + 1)
    tasks.add(Kind.COMPUTE, i, reads, writes)
    tasks.combine(i)
    tasks.close(i - 1)
    if i == tasks.n - 1:
        tasks.close(i)
