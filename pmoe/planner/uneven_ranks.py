"""Simulates all ranks together in passes in which they compute different numbers of rows.

The other simulations of this folder simulate one rank, and assume that all ranks are equal. In this file each
rank has its own tasks on its compute lane. A collective is one task of all ranks: it starts when all ranks
have reached it, and takes as long as its busiest rank needs. So the simulation shows how ranks wait for the
rank with most rows, and how much copies of busy experts (`pmoe.planner.copies`) help.

Assumptions: all ranks have equally many tokens, and an expert gets the same number of rows from every rank.
Gathering and summing rows within a rank takes no time. Sending routing weights takes no time.

Letters: W ranks, n chunks, M = d_model.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pmoe.planner.cluster import Cluster
from pmoe.planner.copies import CopyPlan
from pmoe.planner.copy_groups import host_groups
from pmoe.planner.copy_price import copy_prices
from pmoe.planner.copy_rows import WHOLE, RankNodes, shares_of_source
from pmoe.planner.simulator import Simulated, makespan, simulate
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, Lane, Schedule, Stages, Task, local_pieces


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """A task of one rank, or a collective of all ranks.

    task: the task of the schedule.
    rank: the rank; -1 for a collective.
    name, lane, waits: name of the task, name of its lane (a queue of tasks), and names of the tasks that it
        waits for. The simulator reads them (`Timed`). If the task belongs to one rank, its name and its lane
        end in "@" and the number of the rank, such as "G0@1".
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
    are_modules: whether experts are a user's modules. Autograd then computes the gradients of parameters in
        the same task as the gradients of rows, not in tasks of their own.
    """

    loads: Sequence[int]
    row_bytes: int
    multiply_adds: int
    expert_bytes: int
    are_modules: bool = False

    def owners(self, num_ranks: int) -> list[int]:
        """Returns for each expert the rank that holds its parameters."""
        return [expert * num_ranks // len(self.loads) for expert in range(len(self.loads))]

    def copy_prices(self, cluster: Cluster, *, trains: bool) -> tuple[int, int]:
        """Returns the prices of a copy on its owner's node and on another node, in rows.

        cluster: the machines.
        trains: whether a backward pass follows. The copies of the forward pass are then kept for it.
        """
        return copy_prices(
            cluster.profile("flat", 1, ""),
            cluster.links,
            multiply_adds=self.multiply_adds,
            row_bytes=self.row_bytes,
            expert_bytes=self.expert_bytes,
            num_ranks=cluster.num_ranks,
            trains=trains,
        )


def nodes_of(cluster: Cluster) -> list[int]:
    """Returns for each rank the index of its machine. Ranks of one machine have consecutive numbers."""
    return [rank // cluster.ranks_per_machine for rank in range(cluster.num_ranks)]


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
        groups = host_groups(plan.hosts, nodes_of(cluster)).values()
        relays = any(len(group) > 1 for of_expert in groups for group in of_expert)
        stages = Stages(local=True, remote=True, copies="keep", local_copies=True, relays_copies=relays)
    schedule = forward_schedule(n, stages) if direction == "forward" else backward_schedule(n, stages)
    costs = _task_costs(layer, cluster, n, direction, plan)
    return simulate(tasks_of_ranks(schedule, cluster.num_ranks), costs)


_Traffic = defaultdict[tuple[int, int], float]
"""What ranks send each other: for pairs (sending rank, receiving rank) a number of rows or of bytes."""


def _task_costs(
    layer: UnevenLayer, cluster: Cluster, n: int, direction: str, plan: CopyPlan | None
) -> Callable[[RankTask], float]:
    """Returns a function that gives the seconds of a task in a pass of n chunks.

    A rank that hosts a copy of an expert computes rows of its own tokens for that expert itself, up to its
    share, and does not send them. It computes them in tasks of their own.

    layer: sizes of the layer, and the loads of its experts.
    cluster: the machines.
    n: number of chunks.
    direction: "forward" or "backward".
    plan: copies of busy experts; None if no expert has copies.
    """
    plan = plan or CopyPlan(hosts={}, before=0, after=0)
    pieces = local_pieces(n, local=True, remote=True)
    of_experts, of_copies = _rows(layer, RankNodes(tuple(nodes_of(cluster))), plan)
    chunk_bytes = _Traffic(float)
    for rows in (of_experts, of_copies):
        for pair, count in rows.items():
            chunk_bytes[pair] += count * layer.row_bytes / n
    dispatch = _seconds(chunk_bytes, cluster)
    scattered, relayed = (_seconds(traffic, cluster) for traffic in _weights(layer, cluster, plan))
    collectives = {
        **dict.fromkeys((Kind.DISPATCH, Kind.COMBINE), dispatch),
        **dict.fromkeys((Kind.COPY_WEIGHTS, Kind.COPY_GRADIENTS), scattered),
        **dict.fromkeys((Kind.RELAY_WEIGHTS, Kind.RELAY_GRADIENTS), relayed),
    }
    own_arriving, copies_arriving = (_arriving(rows) for rows in (of_experts, of_copies))

    # A task computes the products of a row once; twice if it computes gradients of rows and of parameters.
    in_one_task = 2 if layer.are_modules and direction == "backward" else 1

    def products(rows: float, times: int) -> float:
        return cluster.compute(rows * layer.multiply_adds * times) if rows and times else 0.0

    def seconds(of: RankTask) -> float:
        kind = of.task.kind
        rank = of.rank
        if rank < 0:
            return collectives.get(kind, 0.0)
        if kind in (Kind.LOCAL, Kind.LOCAL_WGRAD, Kind.LOCAL_COPY_WGRAD):
            chunks = n - pieces + 1 if of.task.chunk % pieces == 0 else 1
            staying = of_experts if of.task.chunk < pieces else of_copies
            times = in_one_task if kind is Kind.LOCAL else 2 - in_one_task
            return products(staying[rank, rank] * chunks / n, times)
        if kind is Kind.COMPUTE:
            return products((own_arriving[rank] + copies_arriving[rank]) / n, in_one_task)
        if kind in (Kind.WGRAD, Kind.COPY_WGRAD):
            arriving = own_arriving if kind is Kind.WGRAD else copies_arriving
            return products(arriving[rank] / n, 2 - in_one_task)
        return 0.0

    return seconds


def _rows(layer: UnevenLayer, nodes: RankNodes, plan: CopyPlan) -> tuple[_Traffic, _Traffic]:
    """Returns the rows that ranks send: (rows for the experts of a rank, rows for its copies).

    Rows from a rank to itself count, too. Rows for an expert with copies are divided near first: they stay on
    their rank and on their node as far as the plan allows (`pmoe.planner.copy_rows`).

    layer: sizes of the layer, and the loads of its experts.
    nodes: the nodes of the ranks.
    plan: copies of busy experts.
    """
    of_experts = _Traffic(float)
    of_copies = _Traffic(float)
    num_ranks = len(nodes.of_rank)
    for expert, (load, owner) in enumerate(zip(layer.loads, layer.owners(num_ranks), strict=True)):
        hosts = plan.hosts.get(expert)
        for source in range(num_ranks):
            if hosts is None:
                of_experts[source, owner] += load / num_ranks
                continue
            shares = shares_of_source(hosts, source, nodes, WHOLE)
            of_source = load / num_ranks / sum(shares)
            for (rank, _), share in zip(hosts, shares, strict=True):
                if share:
                    (of_experts if rank == owner else of_copies)[source, rank] += share * of_source
    return of_experts, of_copies


def _arriving(rows: _Traffic) -> defaultdict[int, float]:
    """Returns the rows that each rank receives from other ranks.

    rows: the rows that ranks send each other.
    """
    arriving = defaultdict[int, float](float)
    for (source, rank), count in rows.items():
        if source != rank:
            arriving[rank] += count
    return arriving


def _weights(layer: UnevenLayer, cluster: Cluster, plan: CopyPlan) -> tuple[_Traffic, _Traffic]:
    """Returns the bytes of copies' weights that ranks send: (owners to hosts, hosts to each other).

    The owner of an expert sends each host of a group of C hosts one of C parts (V), and each host sends its
    part to the other hosts of the group (VR), as `pmoe.engine.plan.copies` says. Gradients are sent in the
    opposite direction.

    layer: sizes of the layer.
    cluster: the machines.
    plan: copies of busy experts.
    """
    scattered = _Traffic(float)
    relayed = _Traffic(float)
    for expert, groups in host_groups(plan.hosts, nodes_of(cluster)).items():
        owner = plan.hosts[expert][0][0]
        for group in groups:
            part_bytes = layer.expert_bytes / len(group)
            for rank in group:
                scattered[owner, rank] += part_bytes
            for pair in itertools.permutations(group, 2):
                relayed[pair] += part_bytes
    return scattered, relayed


def _seconds(num_bytes: _Traffic, cluster: Cluster) -> float:
    """Returns the seconds of an all-to-all: the largest time of any rank on any of its links.

    A rank has two links: to the ranks of its machine, and to other machines. Each link sends and receives at
    the same time. Bytes from a rank to itself take no time.

    num_bytes: the bytes that ranks send each other.
    cluster: the machines.
    """
    nodes = nodes_of(cluster)
    peers = Counter[tuple[int, str, bool]]()
    of_link = defaultdict[tuple[int, str, bool], float](float)
    for (source, target), count in num_bytes.items():
        if source != target and count:
            is_far = nodes[source] != nodes[target]
            for key in ((source, "sends", is_far), (target, "receives", is_far)):
                peers[key] += 1
                of_link[key] += count
    slowest = 0.0
    for key, count in of_link.items():
        link = cluster.outside if key[2] else cluster.inside
        slowest = max(slowest, link.alpha_seconds * peers[key] + link.beta_seconds * count)
    return slowest
