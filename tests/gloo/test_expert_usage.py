"""Numbers about the load of a step over ranks: one reduction, the same numbers on every rank."""

from __future__ import annotations

import pytest
import torch

import pmoe
from tests.gloo.kit import NUM_EXPERTS, build, counted_collectives
from tests.kit import TOP_K, tokens
from tests.pool import ranks

COUNTS = {1: [(7, 5)], 2: [(9, 4), (0, 3)], 4: [(5, 0), (0, 0), (11, 2), (2, 6)]}
"""Tokens of each micro-batch of each rank, by the number of ranks."""


def job(rank: int, world: int) -> tuple[dict[str, float], int, list[list[int]]]:
    """Returns the numbers of a step, the collectives that reading them took, and the rows of each call."""
    layer = build()
    usage = pmoe.ExpertUsage(layer)
    rows = []
    for at, count in enumerate(COUNTS[world][rank]):
        layer(tokens(count, 10 * at + rank)).sum().backward()
        rows.append(layer.tokens_per_expert.tolist())
    with counted_collectives() as calls:
        scalars = pmoe.stats(layer, all_ranks=True, usage=usage).scalars()
    return scalars, len(calls), rows


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_ranks_have_the_numbers_of_the_global_batch_after_one_reduction(world: int) -> None:
    results = ranks(world).run(job)
    calls = [torch.tensor(rows) for _, _, of_rank in results for rows in of_rank]
    total = torch.stack(calls).sum(0).double()
    assert total.sum() == sum(map(sum, COUNTS[world])) * TOP_K
    busy = [rows.double() for rows in calls if rows.any()]
    shares = (total / total.sum()).clamp(min=1e-300)
    by_rank = total.view(world, -1).sum(1)
    wanted = {
        "entropy": -(shares * shares.log()).sum() / torch.tensor(float(NUM_EXPERTS)).log(),
        "max_share": total.max() / total.sum(),
        "active_fraction": (total > 0).double().mean(),
        "max_vio_micro": torch.stack([rows.max() / rows.mean() - 1 for rows in busy]).mean(),
        "max_vio_global": total.max() / total.mean() - 1,
        "drop_rate": torch.zeros(()),
        "rank_imbalance": by_rank.max() / by_rank.mean(),
    }
    if world == 1:
        del wanted["rank_imbalance"]
    for scalars, num_collectives, _ in results:
        assert num_collectives == (1 if world > 1 else num_collectives)
        for name, value in wanted.items():
            assert scalars[f"moe/{name}_mean"] == pytest.approx(value.item(), rel=1e-6, abs=1e-12), name
