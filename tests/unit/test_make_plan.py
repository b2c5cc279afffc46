"""The plan of a call: the index that sorts arrived rows by expert is the same for the CPU and for CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pmoe.engine.plan import make_plan


@pytest.mark.parametrize("shape", [(3, 4, 2, 2), (4, 1, 3, 1), (2, 3, 1, 2)])
def test_one_sort_of_all_chunks_gives_the_index_of_each(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(1))
    fine[:, 0] *= shape[1] == 1  # a chunk without rows
    come_by_chunk = fine.sum((2, 3)).t().tolist()
    several = [True] * (shape[1] - 1) + [shape[1] == 1]
    expected = make_plan._regroup_chunks(fine, come_by_chunk, several)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    found = make_plan._regroup_chunks(fine, come_by_chunk, several)
    assert len(found) == len(expected) == shape[1]
    for ours, one in zip(found, expected, strict=True):
        assert (ours is None) == (one is None)
        assert one is None or torch.equal(ours, one)


@pytest.mark.parametrize("is_joined", [True, False])
def test_slots_are_brought_into_the_order_of_destination_chunk_and_expert(
    is_joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few slices are joined by one operation; for many, an index of the slots is computed."""
    monkeypatch.setattr(make_plan, "FEW_RUNS", 9 if is_joined else 8)
    # Three chunks of rows for rank 0 and rank 1, and of rows that stay. One number is a slot.
    slot = torch.tensor([4, 0, 7, 2, 9, 5, 1, 8, 3, 6])
    sizes = [[2, 1, 1], [0, 2, 1], [1, 0, 0]]
    assert make_plan._by_destination(slot, sizes).tolist() == [4, 0, 8, 7, 9, 5]
    assert make_plan._by_destination(slot, sizes[:1]).tolist() == [4, 0, 7]
    assert make_plan._by_destination(slot[:0], [[0, 0, 0]] * 3).tolist() == []
