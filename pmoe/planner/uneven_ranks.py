"""Simulates passes in which ranks compute different numbers of rows. It simulates all ranks together.

The other simulations of this folder simulate one rank, and assume that all ranks are equal. In this file each
rank has its own tasks on its compute lane. A collective is one task of all ranks: it starts when all ranks
have reached it, and takes as long as its busiest rank needs. So the simulation shows how ranks wait for the
rank with most rows, and how much copies of busy experts (`pmoe.planner.copies`) help.

Assumptions: all ranks have equally many tokens, and send each expert the same fraction of their rows.
Gathering and summing rows within a rank takes no time. Sending routing weights takes no time. A broadcast of
weights is pipelined in pieces, so it takes as long as its busiest link.

Letters: W ranks, n chunks, M = d_model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pmoe.planner.cluster import Cluster
from pmoe.planner.copies import CopyPlan
from pmoe.planner.simulator import Simulated, makespan, simulate
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, Lane, Schedule, Stages, Task, local_pieces


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """A task of one rank, or a collective of all ranks.

    task: the task of the schedule.
    rank: the rank; -1 for a collective.
    name, lane, waits: name, lane (a queue of tasks) and names of awaited tasks, for the simulator (`Timed`).
        If the task belongs to one rank, its name and its lane end in "@" and the number of the rank.
    """

    task: Task
    rank: int
    name: str
    lane: str
    waits: tuple[str, ...]


def tasks_of_ranks(schedule: Schedule, num_ranks: int) -> list[RankTask]:
    """Returns the tasks of all ranks in one list. All ranks run the same schedule.

    A collective is one task of all ranks. If it waits for a task in the schedule, it waits for the task of
    every rank.

    schedule: the tasks of one rank.
    num_ranks: number of ranks.

    Example: a task G0 and a collective S0 on 2 ranks -> G0 of rank 0, G0 of rank 1, and one S0, which waits
    for both.
    """
    lanes = {task.name: task.lane for task in schedule.tasks}
    ranks = range(num_ranks)
    tasks = []
    for task in schedule.tasks:
        if task.lane is not Lane.COMPUTE:
            waits = [f"{name}@{rank}" for name in task.waits for rank in ranks if lanes[name] is Lane.COMPUTE]
            waits += [name for name in task.waits if lanes[name] is not Lane.COMPUTE]
            tasks.append(
                RankTask(task=task, rank=-1, name=task.name, lane=task.lane.value, waits=tuple(waits))
            )
            continue
        for rank in ranks:
            own = tuple(f"{name}@{rank}" if lanes[name] is Lane.COMPUTE else name for name in task.waits)
            lane = f"{task.lane.value}@{rank}"
            tasks.append(RankTask(task=task, rank=rank, name=f"{task.name}@{rank}", lane=lane, waits=own))
    return tasks


@dataclass(frozen=True, kw_only=True)
class UnevenLayer:
    """Sizes of a layer, and the loads of its experts in one call.

    loads: rows of each expert, from all ranks together. Experts are spread over the ranks in order.
    row_bytes: bytes of a row that is sent: d_model times the bytes of an element.
    multiply_adds: multiply-adds of a row in the forward pass. The gradients of the row and the gradients of
        the parameters each take the same number again.
    expert_bytes: bytes of one expert's parameters. The gradients of an expert have as many bytes.
    are_modules: whether experts are a user's modules. Autograd then computes the gradients of parameters
        together with those of rows, so they take time in other tasks.
    """

    loads: Sequence[int]
    row_bytes: int
    multiply_adds: int
    expert_bytes: int
    are_modules: bool = False

    def owners(self, num_ranks: int) -> list[int]:
        """Returns for each expert the rank that holds its parameters."""
        return [expert * num_ranks // len(self.loads) for expert in range(len(self.loads))]


def nodes_of(cluster: Cluster) -> list[int]:
    """Returns the number of the machine of each rank. Ranks of one machine have consecutive numbers."""
    return [rank // cluster.ranks_per_machine for rank in range(cluster.num_ranks)]


def copy_prices(layer: UnevenLayer, cluster: Cluster, *, trains: bool) -> tuple[int, int]:
    """Returns the prices of a copy on its owner's node and on a different node, in rows, rounded up.

    The price is the number of rows that a rank could compute while the copy's weights are sent, and also its
    gradients if the layer is trained. The time of a row is that of its products, or of its messages if these
    are slower.

    layer: sizes of the layer.
    cluster: the machines.
    trains: whether a backward pass follows.
    """
    num_ranks = cluster.num_ranks
    times_sent, passes = (2, 2) if trains else (1, 1)
    products = layer.multiply_adds * cluster.compute.beta_seconds * (3 if trains else 1)
    inside = (cluster.ranks_per_machine - 1) / num_ranks * cluster.inside.beta_seconds
    outside = (num_ranks - cluster.ranks_per_machine) / num_ranks * cluster.outside.beta_seconds
    messages = 2 * passes * layer.row_bytes * max(inside, outside)
    rates = (cluster.inside.beta_seconds, cluster.outside.beta_seconds)
    near, far = (times_sent * layer.expert_bytes * rate / max(products, messages) for rate in rates)
    return -int(-near // 1), max(-int(-near // 1), -int(-far // 1))


def uneven_pass_seconds(
    layer: UnevenLayer, cluster: Cluster, n: int, direction: str, plan: CopyPlan | None = None
) -> float:
    """Returns the simulated seconds of a pass of n chunks, from its start until all ranks have finished.

    layer: sizes of the layer, and the loads of its experts.
    cluster: the machines.
    n: number of chunks.
    direction: "forward" or "backward".
    plan: copies of busy experts; None if no expert has copies.
    """
    return makespan(uneven_pass(layer, cluster, n, direction, plan))


def uneven_pass(
    layer: UnevenLayer, cluster: Cluster, n: int, direction: str, plan: CopyPlan | None = None
) -> list[Simulated[RankTask]]:
    """Returns the tasks of all ranks in a pass of n chunks, with their simulated start and end.

    Chunks do not share buffers (no ring slots). Copies of busy experts stay on their hosts between the
    passes, so backward does not send them again.

    layer: sizes of the layer, and the loads of its experts.
    cluster: the machines.
    n: number of chunks.
    direction: "forward" or "backward".
    plan: copies of busy experts; None if no expert has copies.
    """
    stages = Stages(local=True, remote=True)
    if plan is not None and plan.hosts:
        stages = Stages(local=True, remote=True, copies="keep", local_copies=True)
    schedule = forward_schedule(n, stages) if direction == "forward" else backward_schedule(n, stages)
    costs = _task_costs(layer, cluster, n, direction, plan)
    return simulate(tasks_of_ranks(schedule, cluster.num_ranks), costs)


def _task_costs(
    layer: UnevenLayer, cluster: Cluster, n: int, direction: str, plan: CopyPlan | None
) -> Callable[[RankTask], float]:
    """Returns a function that gives the seconds of a task in a pass of n chunks.

    If a rank hosts a copy of an expert, it does not send its own tokens' rows for that expert. It computes
    them in tasks of their own, as the rows that stay for its own experts.

    layer: sizes of the layer, and the loads of its experts.
    cluster: the machines.
    n: number of chunks.
    direction: "forward" or "backward".
    plan: copies of busy experts; None if no expert has copies.
    """
    num_ranks = cluster.num_ranks
    own_rows, copy_rows = _rows(layer, num_ranks, plan)
    pieces = local_pieces(n, local=True, remote=True)
    dispatch = _exchange(layer, cluster, [a + b for a, b in zip(own_rows, copy_rows, strict=True)], n)
    weights = _broadcast(layer, cluster, plan)
    collectives = {Kind.DISPATCH: dispatch, Kind.COMBINE: dispatch}
    collectives |= {Kind.COPY_WEIGHTS: weights, Kind.COPY_GRADIENTS: weights}

    # Times the products of a row: gradients of rows, and of parameters if the same task computes them.
    in_one_task = 2 if layer.are_modules and direction == "backward" else 1

    def products(rows: float, times: int) -> float:
        return cluster.compute(rows * layer.multiply_adds * times) if rows and times else 0.0

    def seconds(of: RankTask) -> float:
        kind = of.task.kind
        if of.rank < 0:
            return collectives.get(kind, 0.0)
        own = own_rows[of.rank]
        copied = copy_rows[of.rank]
        if kind in (Kind.LOCAL, Kind.LOCAL_WGRAD, Kind.LOCAL_COPY_WGRAD):
            chunks = n - pieces + 1 if of.task.chunk % pieces == 0 else 1
            staying = own if of.task.chunk < pieces else copied
            times = in_one_task if kind is Kind.LOCAL else 2 - in_one_task
            return products(staying / num_ranks * chunks / n, times)
        travelling = (num_ranks - 1) / num_ranks / n  # fraction of the rows that one task receives
        if kind is Kind.COMPUTE:
            return products((own + copied) * travelling, in_one_task)
        if kind in (Kind.WGRAD, Kind.COPY_WGRAD):
            return products((own if kind is Kind.WGRAD else copied) * travelling, 2 - in_one_task)
        return 0.0

    return seconds


def _rows(layer: UnevenLayer, num_ranks: int, plan: CopyPlan | None) -> tuple[list[int], list[int]]:
    """Returns the rows of each rank: (rows for its own experts, rows for copies of other ranks' experts).

    layer: sizes of the layer, and the loads of its experts.
    num_ranks: number of ranks.
    plan: copies of busy experts; None if no expert has copies.
    """
    own_rows = [0] * num_ranks
    copy_rows = [0] * num_ranks
    for expert, (load, owner) in enumerate(zip(layer.loads, layer.owners(num_ranks), strict=True)):
        own, *copies = ((owner, load),) if plan is None else plan.hosts.get(expert, ((owner, load),))
        own_rows[owner] += own[1]
        for rank, rows in copies:
            copy_rows[rank] += rows
    return own_rows, copy_rows


def _exchange(layer: UnevenLayer, cluster: Cluster, rows: Sequence[int], n: int) -> float:
    """Returns the seconds of one chunk's all-to-all, dispatch or combine.

    layer: sizes of the layer.
    cluster: the machines.
    rows: for each rank, the rows that its experts and copies compute in the whole pass. Each of the W ranks
        sends 1 / W of these rows.
    n: number of chunks.
    """
    num_ranks = cluster.num_ranks
    local = cluster.ranks_per_machine
    total = sum(rows)
    slowest = 0.0
    for first in range(0, num_ranks, local):
        of_node = sum(rows[first : first + local])
        for own in rows[first : first + local]:
            inside = max(of_node - own, own * (local - 1)) / num_ranks
            outside = max(total - of_node, own * (num_ranks - local)) / num_ranks
            for link, part, peers in (
                (cluster.inside, inside, local - 1),
                (cluster.outside, outside, num_ranks - local),
            ):
                if peers:
                    of_link = link.alpha_seconds * peers + link.beta_seconds * part * layer.row_bytes / n
                    slowest = max(slowest, of_link)
    return slowest


def _broadcast(layer: UnevenLayer, cluster: Cluster, plan: CopyPlan | None) -> float:
    """Returns the seconds to send the weights of all copies to their hosts, or their gradients back.

    A rank receives the weights of the copies that it hosts. If one of its own experts has copies, the rank
    sends the expert's weights once over each link (inside the node, between nodes) that leads to a host.

    layer: sizes of the layer.
    cluster: the machines.
    plan: copies of busy experts; None if no expert has copies.
    """
    nodes = nodes_of(cluster)
    received: Counter[tuple[int, bool]] = Counter()
    sent: Counter[tuple[int, bool]] = Counter()
    for hosts in plan.hosts.values() if plan is not None else ():
        owner = hosts[0][0]
        are_far = [nodes[rank] != nodes[owner] for rank, _ in hosts[1:]]
        for (rank, _), is_far in zip(hosts[1:], are_far, strict=True):
            received[rank, is_far] += 1
        for is_far in set(are_far):
            sent[owner, is_far] += 1
    seconds = 0.0
    for key in received.keys() | sent.keys():
        link = cluster.outside if key[1] else cluster.inside
        num_copies = max(received[key], sent[key])
        seconds = max(seconds, num_copies * link(layer.expert_bytes))
    return seconds
