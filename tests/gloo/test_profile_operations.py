"""FSMoE's lines on real groups: all ranks have the same lines, whatever the nodes are.

The two operations inside a node do what they are named for. No time is asserted: a busy machine may take any.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pmoe.comm.base import Traffic
from pmoe.comm.expert_sharding import ShardCollectives
from pmoe.comm.ranks import Ranks
from pmoe.measure import profile as profile_module
from pmoe.measure.operations import measure_operations
from pmoe.measure.profile import load_or_measure, load_profile
from pmoe.planner.profile import Operations, Profile
from tests.gloo.test_profile import kept_in
from tests.pool import ranks
from tests.unit.test_profile import Counted
from tests.unit.test_profile_operations import assert_lines


def nodes_of(world: int, size: int) -> dict[str, Ranks]:
    """Returns the ranks across and inside nodes, each of ``size`` consecutive ranks."""
    nodes = [list(range(first, first + size)) for first in range(0, world, size)]
    lines = [list(line) for line in zip(*nodes, strict=True)]
    return {
        "across": Ranks(dist.new_subgroups_by_enumeration(lines)[0]),
        "inside": Ranks(dist.new_subgroups_by_enumeration(nodes)[0]),
    }


def measured(rank: int, world: int, size: int | None) -> Operations:
    found = measure_operations(Ranks(), "cpu", quick=True, **nodes_of(world, size) if size else {})
    total = [None] * world
    dist.all_gather_object(total, rank)  # no rank is out of step
    assert total == list(range(world))
    return found


@pytest.mark.slow
def test_both_ranks_have_the_same_lines_of_all_operations() -> None:
    first, second = ranks(2).run(measured, None)
    assert first == second
    assert_lines(first, 2, 2)


@pytest.mark.slow
def test_four_ranks_in_two_nodes_have_the_same_lines_of_both_links() -> None:
    found = ranks(4).run(measured, 2)
    assert found == [found[0]] * 4
    assert_lines(found[0], 2, 2)


def test_where_nodes_have_one_rank_nothing_is_shared_inside() -> None:
    found = ranks(2).run(measured, 1)
    assert found == [found[0]] * 2
    assert_lines(found[0], 2, 1)


def kept(rank: int, world: int, folder: str) -> tuple[Profile, Profile, int]:
    """Returns the profile without and with operations, and how often it was measured. Other fields are
    invented.
    """
    counted, real = Counted(), profile_module.measure
    profile_module.measure = counted  # type: ignore[assignment]
    try:
        with kept_in(folder):
            plain = load_or_measure(Ranks(), "cpu")
            dist.barrier()  # rank 0 has saved it
            return plain, load_or_measure(Ranks(), "cpu", operations=True), counted.calls
    finally:
        profile_module.measure = real


@pytest.mark.slow
def test_operations_join_the_profile_in_its_file(tmp_path: Path) -> None:
    first, second = ranks(2).run(kept, str(tmp_path))
    assert first == second
    plain, found, calls = first
    assert plain.operations is None and found.operations is not None
    assert calls == 1
    assert_lines(found.operations, 2, 2)
    [path] = tmp_path.iterdir()
    assert load_profile(path) == found
    assert ranks(2).run(kept, str(tmp_path)) == [(found, found, 0)] * 2


def refused(rank: int, world: int) -> list[str]:
    """Returns the errors for a node with a rank that is not the layer's, and for uneven nodes."""
    layer = Ranks(dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0])
    uneven = Ranks(dist.new_subgroups_by_enumeration([[0], [1, 2, 3]])[0])
    told = []
    for everybody, inside in ((layer, nodes_of(world, 2)["across"]), (Ranks(), uneven)):
        try:
            measure_operations(everybody, "cpu", quick=True, inside=inside)
        except ValueError as error:
            told.append(str(error))
    return told


def test_nodes_that_are_no_part_of_the_layer_or_of_unlike_sizes_are_refused_by_all_ranks() -> None:
    for rank, (no_part, unlike) in enumerate(ranks(4).run(refused)):
        layer = [0, 1] if rank < 2 else [2, 3]
        assert no_part == f"inside (ranks {[rank % 2, rank % 2 + 2]}) must have only ranks of {layer}"
        assert (
            unlike == f"inside ({3 if rank else 1} ranks) must have as many ranks on every rank, not 1 to 3"
        )


def shared(rank: int, world: int) -> tuple[list[float], list[float]]:
    """Returns gathered and summed rows.

    Rows 10 * rank and 10 * rank + 1 are gathered. Two rows of 100 * rank + r for each rank r are summed
    there.
    """
    sharing, counts = ShardCollectives(Ranks(), Traffic()), [2] * world
    rows = torch.tensor([[10.0 * rank], [10.0 * rank + 1]])
    gathered, out = torch.zeros(2 * world, 1), torch.zeros(2, 1)
    sharing.all_gather(rows, gathered, counts, torch.zeros(sharing.copies(2), 1))
    parts = torch.tensor([[100.0 * rank + each] for each in range(world) for _ in range(2)])
    sharing.reduce_scatter(parts, out, counts, torch.zeros(2 * world, 1))
    return gathered.flatten().tolist(), out.flatten().tolist()


def test_what_is_measured_gathers_and_sums() -> None:
    for world in (2, 4):
        for rank, (gathered, summed) in enumerate(ranks(world).run(shared)):
            assert gathered == [10.0 * each + i for each in range(world) for i in (0, 1)]
            assert summed == [100.0 * sum(range(world)) + world * rank] * 2
