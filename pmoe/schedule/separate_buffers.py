"""Schedules without rings: every buffer has memory of its own, so every S is issued first.

`pmoe.schedule.tasks` has pictures of them.
"""

from __future__ import annotations

import functools

from pmoe.schedule.tasks import Kind, PassBuilder, Schedule, Stages, local_pieces, piece_of


@functools.lru_cache(maxsize=64)
def forward_schedule(n: int, stages: Stages) -> Schedule:
    """Returns the schedule of a forward pass in n chunks.

    Every S is issued first. All of T_DI is kept, so waiting would save no memory, and the link never idles
    while an S remains.

    Rows that stay fill the time until the first chunk arrives. They are one piece, because small products are
    slow. Those of the last chunk are computed at the end, while the last R runs.
    """
    tasks = PassBuilder("forward", n, stages)
    local, remote = stages.local, stages.remote
    m = local_pieces(n, local=local, remote=remote)
    chunks = range(n if remote else 0)
    early = m - 1 if remote and m > 1 else m

    def stay(pieces: range) -> None:
        """Adds L of some pieces of the rows that stay."""
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
    """Returns the schedule of a backward pass in n chunks: S carries gradients of T_O, R those of T_DI.

    Gradients of parameters are tasks of their own, which all add to one sum, in list order. Those from rows
    that stay fill the time until the first gradients arrive. Those from received rows come one chunk late, so
    that the last two fill the time while the last R runs. Their operands are held for two chunks at most.

    Gradients of other layers (GAR) follow the last S (FSMoE, Fig. 3d).
    """
    tasks = PassBuilder("backward", n, stages)
    local, remote = stages.local, stages.remote
    m = local_pieces(n, local=local, remote=remote)
    chunks = range(n if remote else 0)

    def add_weight_gradients(i: int) -> None:
        """Adds W of chunk i."""
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
    """Adds C of chunk i, then RS and R.

    In a hooked layer, HA and AG of the next chunk come before. HB and R come a chunk late, because the
    experts need not wait for the sums of RS.
    """
    if i == 0:
        tasks.open(0)
    tasks.open(i + 1)
    tasks.add(Kind.COMPUTE, i, reads, writes)
    tasks.combine(i)
    tasks.close(i - 1)
    if i == tasks.n - 1:
        tasks.close(i)
