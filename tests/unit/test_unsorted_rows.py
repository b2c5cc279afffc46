"""On a GPU, rows stay in their order of arrival only if the kernels can read them and write the results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from pmoe.engine.passes.base import SavedUnit
from pmoe.engine.variants.cuda_kernels import CudaForward
from pmoe.kernels.operands import VECTOR_BYTES


def takes(num_rows: int, rows: Tensor, out_NM: Tensor) -> bool:
    """`LaunchedExperts.takes`: tensors begin at a multiple of a vector's bytes."""
    return num_rows > 0 and all(tensor.data_ptr() % VECTOR_BYTES == 0 for tensor in (rows, out_NM))


@pytest.mark.parametrize(
    ("shift", "index", "gathers"),
    [(0, torch.int32, True), (1, torch.int32, False), (0, torch.int64, False)],
    ids=["all fit", "results are misplaced", "a wide index"],
)
def test_rows_stay_unsorted_only_if_the_memory_of_the_results_fits_too(
    shift: int, index: torch.dtype, gathers: bool
) -> None:
    """Products write results where they are sent from; if no kernel can write there, PyTorch computes."""
    arrived = torch.zeros(4, 8)
    out_NM = torch.zeros(4 * 8 + 1)[shift : 4 * 8 + shift].view(4, 8)
    forward = SimpleNamespace(
        reader_of_arrived=SimpleNamespace(takes=takes),
        received="T_DI",
        buffer=lambda name, i: arrived,
        places_results=True,
        leaving_buffer=lambda i: out_NM,
    )
    regroup = torch.arange(4, dtype=index)
    assert CudaForward._gathers(cast(Any, forward), regroup, arrived, 0) == gathers
    assert not CudaForward._gathers(cast(Any, forward), regroup, arrived.clone(), 0), "replaced by a callback"


def test_a_record_of_saved_rows_cannot_change() -> None:
    """Copies of a forward pass's state share the records that have no tensors."""
    with pytest.raises(AttributeError):
        SavedUnit().rows_NM = torch.zeros(1, 1)  # type: ignore[misc]
