"""Topologies: which ranks share a node, wrong arguments, and a hierarchical exchange on one rank."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from pmoe.comm.base import Traffic
from pmoe.comm.hierarchical import in_order
from pmoe.comm.hierarchical_1d import HierarchicalAllToAll1D
from pmoe.comm.hierarchical_2d import HierarchicalAllToAll2D
from pmoe.comm.ranks import Ranks
from pmoe.comm.topology import Topology, find_topology, node_ids


def topology(ids: list[object], global_ranks: list[int] | None = None) -> Topology:
    return Topology.of_nodes(ids, global_ranks or range(len(ids)))


def test_ranks_know_their_node_their_place_and_their_peers() -> None:
    found = topology([0, 0, 0, 1, 1, 1])
    assert found.members == ((0, 1, 2), (3, 4, 5))
    assert [found.node(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [found.place(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert found.inside(4) == (3, 4, 5)
    assert found.across(4) == (1, 4)


def test_nodes_are_numbered_by_their_first_rank_whatever_they_are_called() -> None:
    assert topology(["b", "a", "b", "a"]) == topology([0, 1, 0, 1])
    assert topology(["b", "a", "b", "a"]).members == ((0, 2), (1, 3))


def test_peers_stand_in_the_order_of_their_process_group() -> None:
    assert topology([0, 1, 1, 0]).across(3) == (2, 3)  # of nodes 1 and 0
    turned = topology([0, 0, 1, 1], [7, 6, 5, 4])  # a group whose ranks are not sorted
    assert turned.members == ((1, 0), (3, 2))
    assert turned.across(0) == (2, 0)


def test_a_node_may_have_fewer_ranks_than_others() -> None:
    found = topology([0, 0, 0, 1])
    assert [found.across(rank) for rank in range(4)] == [(0, 3), (1,), (2,), (0, 3)]


@pytest.mark.parametrize(
    "ids, level",
    [([0, 0, 0], True), ([0, 1, 2], True), ([0], True), ([0, 0, 1, 1], False), ([0, 1, 1], False)],
)
def test_one_node_or_one_rank_a_node_is_a_single_level(ids: list[object], level: bool) -> None:
    assert topology(ids).is_level == level


def test_a_topology_is_a_value() -> None:
    one = topology([0, 0, 1, 1])
    for other in (
        copy.deepcopy(one),
        pickle.loads(pickle.dumps(one)),
        Topology.of_nodes("aabb", range(4), "x"),
    ):
        assert other == one
        assert hash(other) == hash(one)
    assert topology([0, 0, 1, 1], [4, 5, 6, 7]) != one


# ---- what the launcher or the user says -----------------------------------------------------------


def test_the_launchers_variable_counts_global_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert node_ids(None, [2, 3, 4, 9]) == [0, 0, 1, 2]
    assert node_ids(2, [2, 3, 4, 9]) == [1, 1, 2, 4]
    assert node_ids(["x", "x", "y", "y"], [2, 3, 4, 9]) == ["x", "x", "y", "y"]


def test_without_the_variable_there_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert node_ids(None, [0, 5]) == [0, 0]


@pytest.mark.parametrize("text", ["0", "-2", "two", "", "1.5"])
def test_a_variable_that_is_no_number_of_ranks_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(
        ValueError, match=rf"LOCAL_WORLD_SIZE \('{text}'\) must be a number of ranks, at least 1"
    ):
        find_topology(Ranks.single())


@pytest.mark.parametrize(
    "nodes, error, rule",
    [
        (0, ValueError, r"nodes \(0\) must be at least 1 rank a node"),
        ([0, 1], ValueError, r"nodes \(\[0, 1\]\) must have 3 entries, one for each rank of the group"),
        (True, TypeError, r"nodes \(True\) must be a number of ranks, or an id of its node for each rank"),
        ("abc", TypeError, r"nodes \('abc'\) must be a number of ranks"),
        (1.5, TypeError, r"nodes \(1.5\) must be a number of ranks"),
    ],
)
def test_nodes_that_cannot_be_are_refused(nodes: object, error: type[Exception], rule: str) -> None:
    with pytest.raises(error, match=rule):
        node_ids(nodes, [0, 1, 2])  # type: ignore[arg-type]


# ---- one rank, and the order of blocks --------------------------------------------------------------


@pytest.mark.parametrize("kind", [HierarchicalAllToAll1D, HierarchicalAllToAll2D])
def test_one_rank_alone_copies_its_rows(kind: type) -> None:
    exchange = kind()
    exchange.bind(Ranks.single(), Traffic())
    rows = torch.randn(3, 2)
    out = torch.empty_like(rows)
    assert exchange.relay_counts(torch.tensor([[3]]), torch.tensor([[3]])) is None
    assert exchange.exchange(rows, [3], out, [3]) is None
    assert torch.equal(out, rows)
    assert exchange.traffic.total == 0


def test_blocks_move_in_one_copy_and_stay_where_nothing_moves() -> None:
    rows = torch.arange(6)
    assert in_order(rows, [1, 2, 0, 3], [1, 2, 0, 3]).tolist() == [1, 2, 0, 3, 4, 5]
    assert in_order(rows, [1, 0, 2, 3], [1, 0, 2, 3]) is rows  # only an empty block changes its place
    assert in_order(rows[:0], [0, 0], [1, 0]).shape == (0,)
