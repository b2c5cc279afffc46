"""Hierarchical all-to-alls give what the flat one gives, bit by bit, on every topology.

They send as many rows as formulas by hand say.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.base import Combine, Dispatch, Exchange, FlatAllToAll, Traffic
from pmoe.comm.hierarchical_1d import HierarchicalAllToAll1D
from pmoe.comm.hierarchical_2d import HierarchicalAllToAll2D
from pmoe.comm.ranks import Ranks
from pmoe.comm.topology import Nodes, Topology, find_topology
from tests.gloo.kit import counted_collectives, error_of
from tests.pool import GROUP_TIMEOUT_SECONDS, Pool, ranks

KINDS = {
    "1D": HierarchicalAllToAll1D,
    "2D": HierarchicalAllToAll2D,
}
EVEN: list[tuple[int, Nodes]] = [
    (2, None),  # one node
    (2, 1),
    (2, 2),
    (4, 1),
    (4, 2),
    (4, 4),
    (4, (0, 1, 0, 1)),  # nodes take turns
    (4, ("b", "a", "a", "b")),  # and the ranks at one place are not in the order of their nodes
]
UNEVEN: list[tuple[int, Nodes]] = [(4, 3), (4, (0, 1, 1, 1)), (4, (0, 1, 2, 0))]
CASES = [(kind, *case) for kind in KINDS for case in EVEN] + [("1D", *case) for case in UNEVEN]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64]
LOADS = ["uneven", "one sends nothing", "all to one", "nothing", "own rows stay"]
WIDTH = 3


def table(load: str, world: int, bins: int, seed: int) -> Tensor:
    """Returns the rows of each bin that each rank has for each rank, (F, W, W). Many are zero."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 6, (bins, world, world), generator=generator)
    counts *= torch.rand(counts.shape, generator=generator) < 0.6
    if load == "one sends nothing":
        counts[:, world - 1] = 0
    elif load == "all to one":
        counts[:, :, :-1] = 0
        counts[:, :, -1] += 1
    elif load == "nothing":
        counts.zero_()
    elif load == "own rows stay":
        counts *= 1 - torch.eye(world, dtype=torch.int64)
    return counts


def payload(rank: int, count: int, dtype: torch.dtype, width: int | None) -> Tensor:
    """Returns rows whose bytes say which rank they belong to, so that wrong destinations are seen."""
    shape = (count,) if width is None else (count, width)
    numbers = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=seeded(rank, count)
    )
    return numbers.view(dtype).view(shape)


def seeded(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers))


def as_bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)


def bound(kind: type[Exchange], group_ranks: Ranks, *args: Any) -> Exchange:
    exchange = kind(*args)
    exchange.bind(group_ranks, Traffic())
    return exchange


def carried(
    exchange: Exchange, counts_WW: Tensor, rows: Tensor, relayed: list[int] | tuple[()] = ()
) -> Tensor:
    """Exchanges rows, and returns what this rank receives."""
    rank = exchange.ranks.rank
    recv = counts_WW[:, rank].tolist()
    out = torch.zeros(
        (sum(recv), *rows.shape[1:]), dtype=torch.uint8 if rows.element_size() == 1 else rows.dtype
    )
    out = out.view(rows.dtype)
    work = exchange.exchange(rows, counts_WW[rank].tolist(), out, recv, relayed)
    assert work is None or not exchange.in_steps
    if work is not None:
        work.wait()
    return out


def relayed_by(exchange: Exchange, counts_FWW: Tensor) -> Tensor:
    rank = exchange.ranks.rank
    numbers = exchange.relay_counts(counts_FWW[:, rank].contiguous(), counts_FWW[:, :, rank].contiguous())
    return counts_FWW.new_empty((counts_FWW.shape[0], 0)) if numbers is None else numbers


# ---- equal to flat --------------------------------------------------------------------------------


def equal_job(
    rank: int, world: int, kind: str, nodes: Nodes, loads: list[str], dtypes: list[Any]
) -> list[str]:
    """Returns the cases in which an exchange differs from the flat one; [] if there are none.

    A case is a direction, load, dtype and number of dimensions.
    """
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    group_ranks, wrong = Ranks(), []
    for direction in ("dispatch", "combine"):
        flat, hierarchical = bound(FlatAllToAll, group_ranks), bound(KINDS[kind], group_ranks, nodes)
        for seed, load in enumerate(loads):
            counts_FWW = table(load, world, 4, seed)
            if direction == "combine":
                counts_FWW = counts_FWW.transpose(1, 2)
            relayed = relayed_by(hierarchical, counts_FWW)
            for start, end in ((0, 1), (1, 4)):  # numbers relayed add up over bins
                counts_WW, numbers = counts_FWW[start:end].sum(0), relayed[start:end].sum(0).tolist()
                for dtype in dtypes:
                    for width in (None, WIDTH):
                        rows = payload(rank, int(counts_WW[rank].sum()), dtype, width)
                        want = carried(flat, counts_WW, rows)
                        got = carried(hierarchical, counts_WW, rows, numbers)
                        if not torch.equal(as_bytes(got), as_bytes(want)):
                            wrong.append(f"{direction} {load} {dtype} {width}")
    return wrong


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind, world, nodes", CASES)
def test_any_counts_arrive_as_by_the_flat_all_to_all(kind: str, world: int, nodes: Nodes) -> None:
    for wrong in ranks(world).run(equal_job, kind, nodes, LOADS, [torch.float32]):
        assert wrong == []


@pytest.mark.parametrize("kind, world, nodes", [case for case in CASES if case[1:] in [(2, 1), (4, 2)]])
def test_any_type_arrives_as_by_the_flat_all_to_all(kind: str, world: int, nodes: Nodes) -> None:
    for wrong in ranks(world).run(equal_job, kind, nodes, ["uneven"], DTYPES):
        assert wrong == []


def test_each_serves_both_directions() -> None:
    for kind in KINDS.values():
        assert issubclass(kind, Dispatch) and issubclass(kind, Combine) and kind.in_steps


# ---- what travels, and how ------------------------------------------------------------------------


def traffic_job(rank: int, world: int, kind: str, nodes: Nodes, width: int | None) -> dict[str, int]:
    exchange = bound(KINDS[kind], Ranks(), nodes)
    counts_FWW = table("uneven", world, 2, 9)
    relayed = relayed_by(exchange, counts_FWW).sum(0).tolist()
    counts_WW = counts_FWW.sum(0)
    carried(exchange, counts_WW, payload(rank, int(counts_WW[rank].sum()), torch.bfloat16, width), relayed)
    return vars(exchange.traffic)


def rows_sent(kind: str, at: Topology, rank: int, counts: list[list[int]]) -> tuple[int, int]:
    """Returns (rows that a rank sends inside its node, rows that it sends across nodes), by hand."""
    everyone, node, place = range(len(counts)), at.inside(rank), at.place(rank)
    if at.is_level:
        sent = sum(counts[rank][d] for d in everyone if d != rank)
        return (sent, 0) if at.num_nodes == 1 else (0, sent)
    if kind == "2D":
        inside = sum(counts[rank][d] for d in everyone if at.place(d) != place)
        across = sum(counts[s][d] for s in node for d in everyone if at.place(d) == place and d not in node)
        return inside, across
    if place:
        return sum(counts[rank]), 0
    scattered = sum(counts[s][d] for s in everyone for d in node if d != rank)
    return scattered, sum(counts[s][d] for s in node for d in everyone if d not in node)


def counts_sent(kind: str, at: Topology, rank: int, world: int, bins: int) -> int:
    if at.is_level:
        return 0
    if kind == "2D":
        return bins * (len(at.inside(rank)) - 1) * at.num_nodes * 8
    return bins * 2 * world * 8 if at.place(rank) else 0


@pytest.mark.parametrize("kind, world, nodes", CASES)
def test_every_rank_counts_the_bytes_that_it_sends_its_own_and_others(
    kind: str, world: int, nodes: Nodes
) -> None:
    ids = [r // nodes for r in range(world)] if isinstance(nodes, int) else nodes or [0] * world
    at, counts = Topology.of_nodes(ids, range(world)), table("uneven", world, 2, 9).sum(0).tolist()
    for width, name, other in ((None, "scalars", "rows"), (WIDTH, "rows", "scalars")):
        for rank, got in enumerate(ranks(world).run(traffic_job, kind, nodes, width)):
            inside, across = rows_sent(kind, at, rank, counts)
            row_bytes = 2 * (width or 1)
            assert got == {
                name: (inside + across) * row_bytes,
                other: 0,
                "weights": 0,
                "inside": inside * row_bytes,
                "counts": counts_sent(kind, at, rank, world, 2),
            }


def test_as_many_rows_cross_nodes_as_by_the_flat_all_to_all() -> None:
    """Hierarchical exchanges save messages, not bytes."""
    at, counts = Topology.of_nodes([0, 0, 1, 1], range(4)), table("uneven", 4, 2, 9).sum(0).tolist()
    across = sum(counts[s][d] for s in range(4) for d in range(4) if at.node(s) != at.node(d))
    assert across > 0
    for kind in KINDS:
        assert sum(rows_sent(kind, at, rank, counts)[1] for rank in range(4)) == across


def collectives_job(rank: int, world: int, kind: str, nodes: Nodes, load: str) -> list[list[str]]:
    exchange = bound(KINDS[kind], Ranks(), nodes)
    counts_FWW = table(load, world, 1, 3)
    with counted_collectives() as before:
        relayed = relayed_by(exchange, counts_FWW)[0].tolist()
    counts_WW = counts_FWW[0]
    with counted_collectives() as during:
        carried(exchange, counts_WW, payload(rank, int(counts_WW[rank].sum()), torch.float32, WIDTH), relayed)
    return [before, during]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    "kind, nodes, steps", [("2D", 2, 2), ("1D", 2, 3), ("1D", 3, 3), ("2D", 1, 1), ("2D", 4, 1), ("1D", 4, 1)]
)
def test_every_rank_issues_the_same_collectives_whatever_its_rows(
    kind: str, nodes: int, steps: int, load: str
) -> None:
    for before, during in ranks(4).run(collectives_job, kind, nodes, load):
        assert before == ["all_to_all_single"] * (steps > 1)
        assert during == ["all_to_all_single"] * steps


def thread_job(rank: int, world: int, kind: str, nodes: int) -> bool:
    """Exchanges rows in a lane's thread, while this thread sends other rows in the layer's group.

    Each rank has its own pace: in one group the two kinds of messages would be confused.
    """
    group_ranks = Ranks()
    flat = bound(FlatAllToAll, group_ranks)
    exchanges = [bound(KINDS[kind], group_ranks, nodes) for _ in range(2)]
    counts_WW = table("uneven", world, 1, 5)[0]
    rows = payload(rank, int(counts_WW[rank].sum()), torch.float32, WIDTH)
    others = payload(rank, int(counts_WW[:, rank].sum()), torch.int64, None)
    want, want_others = carried(flat, counts_WW, rows), carried(flat, counts_WW.t(), others)
    relayed = [relayed_by(each, counts_WW[None])[0].tolist() for each in exchanges]

    def slowly(pace: int, *args: Any) -> Tensor:
        time.sleep(0.002 * pace)
        return carried(*args)

    with ThreadPoolExecutor(1) as lane:
        futures = [
            lane.submit(slowly, rank % 2, exchanges[i % 2], counts_WW, rows, relayed[i % 2])
            for i in range(12)
        ]
        meanwhile = [slowly(1 - rank % 2, flat, counts_WW.t(), others) for _ in range(12)]
        found = [future.result() for future in futures]
    return all(torch.equal(as_bytes(each), as_bytes(want)) for each in found) and all(
        torch.equal(each, want_others) for each in meanwhile
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_another_thread_may_use_the_layers_group_meanwhile(kind: str, nodes: int) -> None:
    assert ranks(4).run(thread_job, kind, nodes) == [True] * 4


# ---- topologies and groups ------------------------------------------------------------------------


@contextlib.contextmanager
def local_world_size(value: str | None) -> Iterator[None]:
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if value is not None:
        os.environ["LOCAL_WORLD_SIZE"] = value
    try:
        yield
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)


def environment_job(rank: int, world: int, values: list[str | None]) -> Any:
    with local_world_size(values[rank]):
        return error_of(lambda: find_topology(Ranks())) or find_topology(Ranks()).members


def test_the_topology_comes_from_the_launcher() -> None:
    assert ranks(4).run(environment_job, ["2"] * 4) == [((0, 1), (2, 3))] * 4
    assert ranks(4).run(environment_job, [None] * 4) == [((0, 1, 2, 3),)] * 4


def test_ranks_that_are_told_different_things_raise_together() -> None:
    rule = "ValueError: LOCAL_WORLD_SIZE ('2') must be the same on every rank of the group: rank 3 has "
    for message in ranks(4).run(environment_job, ["2", "2", "2", "4"]):
        assert message == rule + "LOCAL_WORLD_SIZE ('4')"
    for message in ranks(4).run(environment_job, ["2", "2", "2", None]):
        assert message == rule + "LOCAL_WORLD_SIZE (None)"


def refused_job(rank: int, world: int, kind: str, nodes: list[Any]) -> tuple[str, int]:
    before = len(dist.distributed_c10d._world.pg_names)
    message = error_of(lambda: bound(KINDS[kind], Ranks(), nodes[rank]))
    return message, len(dist.distributed_c10d._world.pg_names) - before


@pytest.mark.parametrize(
    "kind, nodes, message",
    [
        (
            "2D",
            [3] * 4,
            "ValueError: nodes (3) must put equally many of the group's 4 ranks on each node for the "
            "2D hierarchical all-to-all, not 1 or 3",
        ),
        (
            "2D",
            [(0, 1, 2, 0)] * 4,
            "ValueError: nodes ((0, 1, 2, 0)) must put equally many of the group's 4 ",
        ),
        ("1D", [0] * 4, "ValueError: nodes (0) must be at least 1 rank a node"),
        (
            "1D",
            [(0, 1)] * 4,
            "ValueError: nodes ((0, 1)) must have 4 entries, one for each rank of the group",
        ),
        ("1D", ["x"] * 4, "TypeError: nodes ('x') must be a number of ranks, or an id of its node for each"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank_before_any_group_is_made(
    kind: str, nodes: list[Any], message: str
) -> None:
    for got, made in ranks(4).run(refused_job, kind, nodes):
        assert got.startswith(message)
        assert made == 0


def sharing_job(rank: int, world: int) -> tuple[int, bool, list[datetime.timedelta]]:
    group_ranks = Ranks()
    links = bound(HierarchicalAllToAll2D, group_ranks, 2).connect()
    before = len(dist.distributed_c10d._world.pg_names)
    others = [bound(kind, group_ranks, [0, 0, 1, 1]) for kind in (*KINDS.values(), *KINDS.values())]
    are_shared = all(each.connect() is links for each in others)
    made = len(dist.distributed_c10d._world.pg_names) - before
    timeouts = [g._get_backend(torch.device("cpu")).options._timeout for g in (links.inside, links.across)]
    return made, are_shared, timeouts


def test_all_layers_share_two_process_groups_with_the_layers_timeout() -> None:
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_SECONDS)
    assert ranks(4).run(sharing_job) == [(0, True, [timeout] * 2)] * 4


def copies_job(rank: int, world: int, kind: str) -> bool:
    exchange = bound(KINDS[kind], Ranks(), 2)
    counts_WW = table("uneven", world, 1, 7)[0]
    rows = payload(rank, int(counts_WW[rank].sum()), torch.float32, WIDTH)
    loaded = pickle.loads(pickle.dumps(exchange))
    loaded.ranks.reconnect()
    found = []
    for each in (exchange, copy.deepcopy(exchange), loaded):
        found.append(carried(each, counts_WW, rows, relayed_by(each, counts_WW[None])[0].tolist()))
    return all(torch.equal(as_bytes(each), as_bytes(found[0])) for each in found)


@pytest.mark.parametrize("kind", KINDS)
def test_exchanges_can_be_copied_and_pickled(kind: str) -> None:
    assert ranks(4).run(copies_job, kind) == [True] * 4


# ---- groups of some ranks -------------------------------------------------------------------------


def subset_job(rank: int, world: int) -> list[str] | None:
    """Ranks 1 to 3 make layers. Rank 0 only takes part in making their group."""
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return None
    group_ranks, wrong = Ranks(group), []
    flat = bound(FlatAllToAll, group_ranks)
    counts_WW = table("uneven", 3, 1, 11)[0]
    rows = payload(rank, int(counts_WW[rank - 1].sum()), torch.float32, WIDTH)
    want = carried(flat, counts_WW, rows)
    for kind, nodes in (("1D", 2), ("1D", [0, 1, 1]), ("1D", 1), ("2D", 1), ("2D", 4)):
        exchange = bound(KINDS[kind], group_ranks, nodes)
        relayed = relayed_by(exchange, counts_WW[None])[0].tolist()
        if not torch.equal(as_bytes(carried(exchange, counts_WW, rows, relayed)), as_bytes(want)):
            wrong.append(f"{kind} {nodes}")
    return wrong


def in_more_groups_job(rank: int, world: int) -> str | None:
    group = dist.new_group([1, 2, 3])
    dist.new_group([0, 1])
    return None if rank == 0 else error_of(bound(HierarchicalAllToAll1D, Ranks(group), 2).connect)


def test_a_group_of_some_ranks_needs_no_others() -> None:
    pool = Pool(4)  # its own: the groups that are left would be other tests'
    try:
        assert pool.run(subset_job) == [None, [], [], []]
        rule = (
            r"ValueError: group \(3 of 4 processes\) must have processes that are in equally many process "
            r"groups, not in \[(\d+), (\d+), \2\]"
        )
        for message in pool.run(in_more_groups_job)[1:]:
            with pytest.raises(ValueError, match=rule):
                raise ValueError(message)
    finally:
        pool.stop()
