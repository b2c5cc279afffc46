"""The sorted ordering and the capacity, against small tables written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pmoe.engine.variants.send_once import carriers
from pmoe.gates.capacity import expert_capacity, within_capacity
from pmoe.ordering.sorted import SortedOrder, chunk_bounds, count_rows, sort_rows
from pmoe.schedule.tasks import piece_of

NONE_LOCAL = range(0, 0)


@pytest.mark.parametrize(
    "num_tokens, n, expected",
    [
        (10, 4, [0, 2, 5, 7, 10]),
        (8, 4, [0, 2, 4, 6, 8]),
        (7, 3, [0, 2, 4, 7]),
        (7, 1, [0, 7]),
        (2, 4, [0, 0, 1, 1, 2]),
        (1, 3, [0, 0, 0, 1]),
        (0, 3, [0, 0, 0, 0]),
    ],
)
def test_chunks_of_tokens_are_bounded_so(num_tokens: int, n: int, expected: list[int]) -> None:
    assert chunk_bounds(num_tokens, n) == expected


def test_chunks_differ_by_one_token_at_most_and_finer_chunks_refine_coarser_ones() -> None:
    for num_tokens in range(40):
        for n in range(1, 9):
            bounds = chunk_bounds(num_tokens, n)
            sizes = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
            assert sum(sizes) == num_tokens
            assert max(sizes) - min(sizes) <= 1
            assert set(bounds) <= set(chunk_bounds(num_tokens, 2 * n))


# Three tokens with two choices each; the slots count through them: 0 1 | 2 3 | 4 5.
EXPERTS = torch.tensor([[2, 0], [1, 3], [0, 2]])


@pytest.mark.parametrize(
    "local, n, m, expected",
    [
        # Nothing stays: by expert, then token.
        (NONE_LOCAL, 1, 0, [1, 4, 2, 0, 5, 3]),
        (range(4, 4), 1, 0, [1, 4, 2, 0, 5, 3]),
        (range(2, 2), 1, 0, [1, 4, 2, 0, 5, 3]),
        # Experts 2 and 3 stay, or 0 and 1: their rows come last.
        (range(2, 4), 1, 1, [1, 4, 2, 0, 5, 3]),
        (range(0, 2), 1, 1, [0, 5, 3, 1, 4, 2]),
        (range(1, 2), 1, 1, [1, 4, 0, 5, 3, 2]),
        (range(0, 4), 1, 1, [1, 4, 2, 0, 5, 3]),
        # Two chunks: token 0, then tokens 1 and 2. Two pieces: each follows what its chunk sends.
        (NONE_LOCAL, 2, 0, [1, 0, 4, 2, 5, 3]),
        (range(2, 4), 2, 2, [1, 0, 4, 2, 5, 3]),
        (range(0, 2), 2, 2, [0, 1, 5, 3, 4, 2]),
        (range(0, 4), 2, 2, [1, 0, 4, 2, 5, 3]),
        # A token a chunk. Fewer pieces come last: all tokens, or tokens 0 and 1 before 2.
        (range(0, 2), 3, 1, [0, 3, 5, 1, 4, 2]),
        (range(0, 2), 3, 2, [0, 3, 5, 1, 2, 4]),
        (range(0, 3), 3, 2, [3, 1, 2, 0, 4, 5]),
        (range(0, 3), 3, 3, [1, 0, 3, 2, 4, 5]),
    ],
)
def test_rows_are_sorted_by_chunk_those_that_stay_by_piece(
    local: range, n: int, m: int, expected: list[int]
) -> None:
    order = sort_rows(EXPERTS, None, n, 4, local, m)
    assert order.slot.tolist() == expected
    assert order.position[order.slot].tolist() == list(range(6))


def test_the_last_chunks_are_pieces_of_their_own() -> None:
    assert [piece_of(chunk, 4, 1) for chunk in range(4)] == [0, 0, 0, 0]
    assert [piece_of(chunk, 4, 2) for chunk in range(4)] == [0, 0, 0, 1]
    assert [piece_of(chunk, 4, 4) for chunk in range(4)] == [0, 1, 2, 3]


def test_positions_are_where_the_slots_stand() -> None:
    assert sort_rows(EXPERTS, None, 2, 4, NONE_LOCAL, 0).position.tolist() == [1, 0, 3, 5, 2, 4]
    assert sort_rows(EXPERTS, None, 1, 4, range(0, 2), 1).position.tolist() == [0, 3, 5, 2, 4, 1]


def test_experts_between_those_of_other_ranks_move_behind_them() -> None:
    order = sort_rows(torch.tensor([[5, 4, 3, 2, 1, 0]]), None, 1, 6, range(2, 4), 1)
    assert order.slot.tolist() == [5, 4, 1, 0, 3, 2]


def test_dropped_rows_stand_last_in_slot_order() -> None:
    keep = torch.tensor([[True, False], [False, True], [True, True]])
    order = sort_rows(EXPERTS, keep, 1, 4, range(0, 2), 1)
    assert order.slot.tolist() == [0, 5, 3, 4, 1, 2]
    assert order.position.tolist() == [0, 4, 5, 2, 3, 1]
    order = sort_rows(EXPERTS, keep, 2, 4, NONE_LOCAL, 0)
    assert order.slot.tolist() == [0, 4, 5, 3, 1, 2]


def test_rows_of_one_expert_keep_the_order_of_their_tokens() -> None:
    order = sort_rows(torch.zeros(50, 1, dtype=torch.int64), None, 3, 2, NONE_LOCAL, 0)
    assert order.slot.tolist() == list(range(50))


@pytest.mark.parametrize(
    "keep, n, expected",
    [
        (None, 1, [[2, 1, 2, 1]]),
        (None, 2, [[1, 0, 1, 0], [1, 1, 1, 1]]),
        (None, 4, [[0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]),
        ([[1, 0], [0, 1], [1, 1]], 1, [[1, 0, 2, 1]]),
        ([[1, 0], [0, 1], [1, 1]], 2, [[0, 0, 1, 0], [1, 0, 1, 1]]),
        ([[0, 0], [0, 0], [0, 0]], 2, [[0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_kept_rows_are_counted_by_chunk_and_expert(
    keep: list[list[int]] | None, n: int, expected: list[list[int]]
) -> None:
    counts = count_rows(EXPERTS, None if keep is None else torch.tensor(keep) > 0, n, 4)
    assert counts.tolist() == expected
    assert counts.dtype == torch.int64


def test_counting_and_sorting_cut_tokens_where_chunk_bounds_does() -> None:
    for num_tokens in range(20):
        for n in range(1, 9):
            for top_k in (1, 3):
                expert = torch.zeros(num_tokens, top_k, dtype=torch.int64)
                bounds = chunk_bounds(num_tokens, n)
                sizes = [top_k * (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
                assert count_rows(expert, None, n, 1).flatten().tolist() == sizes


def test_no_tokens_are_sorted_and_counted() -> None:
    expert = torch.empty(0, 2, dtype=torch.int64)
    keep = torch.empty(0, 2, dtype=torch.bool)
    for kept in (None, keep):
        order = sort_rows(expert, kept, 3, 4, range(2, 4), 2)
        assert order.slot.shape == order.position.shape == (0,)
        assert count_rows(expert, kept, 3, 4).tolist() == [[0] * 4] * 3
    found, used = within_capacity(expert, 2, torch.tensor([1, 0, 0, 0]))
    assert found.shape == (0, 2)
    assert used.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    "factor, num_tokens, top_k, num_experts, expected",
    [(1.25, 16, 2, 8, 5), (1.0, 16, 1, 8, 2), (0.1, 1, 1, 8, 1), (1.0, 0, 2, 8, 0), (100, 3, 1, 2, 150)],
)
def test_capacity_is_this_many_rows_an_expert(
    factor: float, num_tokens: int, top_k: int, num_experts: int, expected: int
) -> None:
    assert expert_capacity(factor, num_tokens, top_k, num_experts) == expected


@pytest.mark.parametrize(
    "experts, capacity, used, keep, used_after",
    [
        ([[0], [1], [0], [0], [1]], 2, [0, 0], [[1], [1], [1], [0], [1]], [3, 2]),
        ([[0], [1], [0], [0], [1]], 2, [1, 2], [[1], [0], [0], [0], [0]], [4, 4]),
        ([[0], [1], [0]], 2, [5, 0], [[0], [1], [0]], [7, 1]),
        ([[0, 1], [1, 0], [1, 0]], 2, [0, 0], [[1, 1], [1, 1], [0, 0]], [3, 3]),
        ([[0, 1], [1, 0], [1, 0]], 0, [0, 0], [[0, 0], [0, 0], [0, 0]], [3, 3]),
        ([[1, 2], [1, 2]], 1, [0, 0, 0, 0], [[1, 1], [0, 0]], [0, 2, 2, 0]),
    ],
)
def test_the_first_rows_of_an_expert_are_kept_in_token_order(
    experts: list[list[int]], capacity: int, used: list[int], keep: list[list[int]], used_after: list[int]
) -> None:
    found, after = within_capacity(torch.tensor(experts), capacity, torch.tensor(used))
    assert found.int().tolist() == keep
    assert after.tolist() == used_after


def test_capacity_carried_between_parts_drops_what_the_whole_batch_drops() -> None:
    generator = torch.Generator().manual_seed(0)
    for capacity in (1, 3, 7):
        expert = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(23)])
        whole, used_whole = within_capacity(expert, capacity, torch.zeros(5, dtype=torch.int64))
        for n in range(1, 9):
            parts: list[Tensor] = []
            used = torch.zeros(5, dtype=torch.int64)
            bounds = chunk_bounds(23, n)
            for start, end in zip(bounds, bounds[1:], strict=False):
                keep, used = within_capacity(expert[start:end], capacity, used)
                parts.append(keep)
            assert torch.equal(torch.cat(parts), whole)
            assert torch.equal(used, used_whole)


def test_a_token_goes_once_to_a_rank_in_the_row_of_its_first_kept_choice() -> None:
    ranks = torch.tensor([[2, 0, 2], [1, 1, 1], [0, 1, 0]])
    keep = torch.tensor([[True, True, True], [False, True, True], [False, True, False]])
    carrier, carries = carriers(ranks, keep)
    assert carrier[:2].tolist() == [[0, 1, 0], [1, 1, 1]]
    assert carries.tolist() == [[True, True, False], [False, True, False], [False, True, False]]
    carrier, carries = carriers(ranks, None)
    assert carrier.tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]
    assert carries.tolist() == [[True, True, False], [True, False, False], [True, True, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_rows_of_a_token_are_summed_in_the_order_of_its_choices(top_k: int, dtype: torch.dtype) -> None:
    """Rows of four bytes or more are added one by one, so no copy is larger than the result."""
    torch.manual_seed(0)
    rows_NM = torch.randn(300 * top_k, 64).to(dtype)
    row_SK = torch.randperm(300 * top_k).view(300, top_k)
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    expected = torch.zeros(300, 64, dtype=wide)
    for choice in range(top_k):
        expected += rows_NM[row_SK[:, choice]].to(wide)
    out = torch.empty(300, 64, dtype=dtype)
    with torch.profiler.profile(profile_memory=True) as profile:
        SortedOrder().restore(rows_NM, row_SK, out)
    assert torch.equal(out, expected.to(dtype))
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    if dtype.itemsize >= 4:
        assert largest <= out.nbytes
