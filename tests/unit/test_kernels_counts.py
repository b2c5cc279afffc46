"""The kernels of row counts: what they take, and their source on the CPU.

A stand-in for the kernels runs in layers in tests/gloo/test_kernel_branches.py. tests/unit/test_cuda_host.py
compares it to the kernels.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from pmoe.kernels import counts
from tests.cuda.compiled import CUDA, compile_and_run


@pytest.mark.parametrize(
    ("counts_FE", "num_ranks", "num_degrees", "why"),
    [
        (torch.zeros(2, 4), 2, 1, "torch.float32 must be contiguous torch.int32"),
        (torch.zeros(2, 4, dtype=torch.int32).t(), 2, 1, "must be contiguous"),
        (torch.zeros(2, 4, dtype=torch.int32), 4096, 1, "4096 ranks, 2 bins and 1 degrees must be at most"),
        (torch.zeros(2, 4, dtype=torch.int32), 2, 17, "17 degrees"),
        (torch.zeros(5000, 4, dtype=torch.int32), 2, 1, "5000 bins"),
        (torch.zeros(2, 4, dtype=torch.int32), 2, 1, "not built"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(
    counts_FE: torch.Tensor, num_ranks: int, num_degrees: int, why: str
) -> None:
    with mock.patch.object(counts, "path", lambda device: (None, "not built")):
        assert why in str(counts.refusal(counts_FE, num_ranks, num_degrees))


def test_what_the_kernels_take_is_not_refused() -> None:
    with mock.patch.object(counts, "path", lambda device: ("sm_80", None)):
        assert counts.refusal(torch.zeros(2, 4, dtype=torch.int32), 2, 16) is None


def test_the_limits_are_those_of_the_source() -> None:
    layout = (CUDA / "counts" / "layout.h").read_text(encoding="utf-8")
    assert "kMostDegrees = 16;" in layout and counts.MAX_DEGREES == 16
    assert "kMostBins = 1 << 12;" in layout and counts.MAX_BINS == 1 << 12
    assert "kMostRanks = 1 << 11;" in layout and counts.MAX_RANKS == 1 << 11
    assert "kHeader = 4;" in layout and counts.HEADER == 4


@pytest.mark.slow
def test_the_kernels_source_on_the_cpu() -> None:
    compile_and_run("counts_test.cpp")
