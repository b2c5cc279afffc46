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
