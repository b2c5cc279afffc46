"""`pmoe.program.bounded`: which rows of a call exist, compared with a loop over all pairs of all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pmoe.ordering.sorted import count_rows
from pmoe.program.bounded import DeviceRows, RowBounds, rows_on_device

TOP_K, LOCAL_EXPERTS = 2, 3


def bounds_of(*, ranks: int, n: int, slack: float, max_tokens: int = 9) -> RowBounds:
    return RowBounds.of(
        max_tokens=max_tokens, top_k=TOP_K, slack=slack, chunks=n, ranks=ranks, local_experts=LOCAL_EXPERTS
    )


def choices(tokens: list[int], seed: int) -> list[Tensor]:
    """Returns the experts of the tokens of each rank, (T, K)."""
    generator = torch.Generator().manual_seed(seed)
    experts = len(tokens) * LOCAL_EXPERTS
    return [torch.randint(experts, (count, TOP_K), generator=generator) for count in tokens]


def rows_of(chosen: list[Tensor], bounds: RowBounds, rank: int) -> DeviceRows:
    num_experts = bounds.ranks * bounds.local_experts
    counts = [count_rows(expert_TK, None, bounds.chunks, num_experts) for expert_TK in chosen]
    return rows_on_device(chosen[rank], torch.stack(counts), bounds, rank)


def pairs(expert_TK: Tensor, n: int, chunk: int) -> list[tuple[int, int]]:
    """Returns (expert, pair) of the pairs of a chunk, sorted by expert."""
    tokens = expert_TK.shape[0]
    first, end = chunk * tokens // n, (chunk + 1) * tokens // n
    return sorted(
        (int(expert_TK[t, k]), t * TOP_K + k) for t in range(first, end) for k in range(expert_TK.shape[1])
    )


@pytest.mark.parametrize("tokens", [[9, 4], [9, 0], [3, 9, 1], [0, 0]])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_rows_lie_where_a_loop_puts_them(tokens: list[int], n: int) -> None:
    ranks = len(tokens)
    bounds = bounds_of(ranks=ranks, n=n, slack=ranks)
    chosen = choices(tokens, seed=n)
    for rank in range(ranks):
        rows = rows_of(chosen, bounds, rank)
        assert bool(rows.fits)
        num_pairs = tokens[rank] * TOP_K
        position = [-1] * num_pairs
        pair_by_number = [num_pairs] * bounds.num_rows
        ends = []
        for chunk in range(n):
            own = pairs(chosen[rank], n, chunk)
            for part, room in ((False, bounds.sent), (True, bounds.stays)):
                found = [pair for expert, pair in own if (expert // LOCAL_EXPERTS == rank) == part]
                for row, pair in enumerate(found):
                    position[pair] = chunk * (bounds.sent + bounds.stays) + part * bounds.sent + row
                    pair_by_number[part * n * bounds.sent + chunk * room + row] = pair
            arrived = [
                expert
                for source in range(ranks)
                for expert, _ in pairs(chosen[source], n, chunk)
                if source != rank and expert // LOCAL_EXPERTS == rank
            ]
            ends.append(arrived)
            to_each = [sum(e // LOCAL_EXPERTS == other != rank for e, _ in own) for other in range(ranks)]
            from_each = [
                sum(e // LOCAL_EXPERTS == rank != other for e, _ in pairs(chosen[other], n, chunk))
                for other in range(ranks)
            ]
            assert rows.rows_by_rank[2 * chunk : 2 * chunk + 2].tolist() == [to_each, from_each]
            if rows.regroup is not None:
                index = rows.regroup[chunk].tolist()
                assert sorted(index) == list(range(bounds.received))
                assert [arrived[row] for row in index[: len(arrived)]] == sorted(arrived)
        ends += [
            [e for e, _ in pairs(chosen[rank], n, chunk) if e // LOCAL_EXPERTS == rank] for chunk in range(n)
        ]
        assert rows.position_TK.flatten().tolist() == position
        assert rows.pair_by_number.tolist() == pair_by_number
        experts = range(rank * LOCAL_EXPERTS, (rank + 1) * LOCAL_EXPERTS)
        assert rows.ends.tolist() == [[sum(e <= last for e in unit) for last in experts] for unit in ends]


def test_if_the_rows_of_any_rank_do_not_fit_no_rank_has_rows() -> None:
    """All tokens of rank 1 choose experts of rank 0, which has room for fewer rows."""
    bounds = bounds_of(ranks=2, n=2, slack=1.0)
    chosen = [torch.tensor([[0, 3]] * 9), torch.tensor([[0, 1]] * 9)]
    for rank in range(2):
        rows = rows_of(chosen, bounds, rank)
        assert not rows.fits
        assert (rows.position_TK == -1).all() and (rows.pair_by_number == 18).all()
        assert not rows.ends.any() and not rows.rows_by_rank.any()


@pytest.mark.parametrize("part", ["sent", "stays", "received"])
def test_each_bound_is_kept_to_the_row(part: str) -> None:
    """Rank 0 sends 4 rows to rank 1, and 2 of its rows stay. Rank 1 receives these 4 rows."""
    chosen = [torch.tensor([[3, 3], [3, 3], [0, 0]]), torch.tensor([[0, 0], [0, 3]])]
    exact = {"sent": 4, "stays": 2, "received": 4}
    for rows, fits in ((exact[part], True), (exact[part] - 1, False)):
        bounds = RowBounds(chunks=1, ranks=2, local_experts=LOCAL_EXPERTS, **{**exact, part: rows})
        assert bool(rows_of(chosen, bounds, 0).fits) is fits, rows


def test_bounds_are_slack_times_the_balanced_rows_and_at_most_all_rows() -> None:
    """16 pairs of a chunk: 4 stay on each of 4 ranks if routing is balanced, and 12 are sent."""
    balanced = bounds_of(ranks=4, n=2, slack=1.0, max_tokens=16)
    assert (balanced.sent, balanced.stays, balanced.received) == (12, 4, 12)
    more = bounds_of(ranks=4, n=2, slack=1.25, max_tokens=16)
    assert (more.sent, more.stays, more.received) == (15, 5, 15)
    largest = bounds_of(ranks=4, n=2, slack=9.0, max_tokens=16)
    assert (largest.sent, largest.stays, largest.received) == (16, 16, 48)


def test_the_counts_of_a_cut_have_rows_of_each_rank() -> None:
    bounds = RowBounds(chunks=2, ranks=4, local_experts=LOCAL_EXPERTS, sent=7, stays=5, received=9)
    for rank in range(4):
        for counts, rows in zip(bounds.counts(rank), (7, 9), strict=True):
            by_rank = counts.sum(2)
            assert (by_rank[:, rank] == 5).all() and (by_rank > 0).all()
            assert (by_rank.sum(1) - 5 == rows).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 1}, r"ranks \(1\) must be at least 2"),
        ({"ranks": 4, "received": 2}, r"received \(2\) must be at least ranks - 1 \(3\)"),
        ({"stays": 0}, r"stays \(0\) must be at least 1"),
    ],
)
def test_bounds_without_room_are_refused(change: dict[str, int], message: str) -> None:
    numbers = {"chunks": 2, "ranks": 2, "local_experts": 1, "sent": 4, "stays": 4, "received": 4, **change}
    with pytest.raises(ValueError, match=message):
        RowBounds(**numbers)


def test_bounds_hold_at_least_the_rows_of_balanced_routing() -> None:
    with pytest.raises(ValueError, match=r"slack \(0.9\) must be at least 1"):
        bounds_of(ranks=2, n=1, slack=0.9)
    assert bounds_of(ranks=4, n=1, slack=1.0, max_tokens=1).stays == 1
