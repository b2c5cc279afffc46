"""Schedules without rings: every buffer has memory of its own, so every S is issued first."""

from __future__ import annotations

import functools

from pmoe.schedule.tasks import Kind, PassBuilder, Schedule, Stages, local_pieces, piece_of


@functools.lru_cache(maxsize=64)
def forward_schedule(n: int, stages: Stages) -> Schedule:
    """The forward pass in n chunks.

    Every S is issued first: nothing that is kept until backward gains from waiting, and the link never idles
    while S remain. Local rows fill the time until the first chunk arrives, in one piece, for products should
    not be cut smaller than they must be; the last chunk's are left for the end, where they cover the drain of
    the last R.
    """
    tasks = PassBuilder("forward", n, stages)
    local, remote = stages.local, stages.remote
    m, chunks = local_pieces(n, local=local, remote=remote), range(n if remote else 0)
    early = m - 1 if remote and m > 1 else m

    def stay(pieces: range) -> None:
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
    """The backward pass, mirrored: gradients of T_O are dispatched, those of T_DI return.

    Weight gradients are tasks of their own. Those of local rows fill the time until the first gradients
    arrive. Those of received rows come one chunk late: the last two fill the drain of the last R, and what
    they need is held for two chunks at most. All of them add to one sum, in list order. Other layers'
    gradients follow the last S (FSMoE, Fig. 3d).
    """
    tasks = PassBuilder("backward", n, stages)
    local, remote = stages.local, stages.remote
    m, chunks = local_pieces(n, local=local, remote=remote), range(n if remote else 0)

    def add_weight_gradients(i: int) -> None:
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
    """A chunk's experts, and R. Callbacks and AG of the next chunk come before them; callbacks between RS and
    R come a chunk later, for the experts do not wait for the sums."""
    if i == 0:
        tasks.open(0)
    tasks.open(i + 1)
    tasks.add(Kind.COMPUTE, i, reads, writes)
    tasks.combine(i)
    tasks.close(i - 1)
    if i == tasks.n - 1:
        tasks.close(i)
