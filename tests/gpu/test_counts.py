"""The kernels of row counts on a GPU: every number against `bench.kernels_on_cpu`.

Letters: W ranks, F bins, E experts of a rank.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench import kernels_on_cpu
from pmoe.kernels import extension
from pmoe.kernels.counts import Messages, Sent
from tests.gpu.support import DEVICE, NEEDS_GPU

pytestmark = NEEDS_GPU

SIZES = {
    "one rank": (1, 4, 8),
    "two": (2, 8, 4),
    "eight": (8, 32, 1),
    "many": (64, 64, 2),
    "one bin": (3, 1, 5),
}


def exchanged(counts_FE: Tensor, num_ranks: int, n: int, fault: Tensor | None) -> list[Tensor]:
    """Returns what the three kernels write, on the CPU. Every rank sends what this one does."""
    degrees = [d for d in range(1, counts_FE.shape[0] + 1) if counts_FE.shape[0] % d == 0]
    messages = Messages.new(counts_FE, num_ranks, len(degrees))
    sent_WL, received_WL = messages.both
    messages.pack([9, 0, 1, 2], fault, counts_FE)
    received_WL.copy_(sent_WL)
    messages.agree(
        received_WL,
        own_rank=num_ranks - 1,
        host_rows=50,
        asks_rows=True,
        irregular=True,
        limits=[(d, 2.5 / d) for d in degrees],
    )
    counts_FWE = messages.counts(messages.both[num_ranks > 1])
    num_rows = int(counts_FWE[:, 1:].sum())
    generator = torch.Generator().manual_seed(1)
    slot = torch.randperm(int(counts_FE.sum()), generator=generator).int()
    weight = torch.rand(slot.numel(), generator=generator)
    sent = Sent(slot.to(counts_FE.device), weight.to(counts_FE.device))
    order = messages.order(n, counts_FE.shape[0], 0, n, num_rows, sent, 9)
    written = [each for each in vars(order).values() if each is not None]
    return [each.cpu() for each in (messages.memory, *written)]


@pytest.mark.parametrize("fault", [None, 0, 5])
@pytest.mark.parametrize("name", SIZES)
def test_row_counts_are_those_of_the_plain_definition(
    name: str, fault: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_ranks, num_bins, num_experts = SIZES[name]
    generator = torch.Generator().manual_seed(0)
    shape = (num_bins, num_ranks * num_experts)
    counts_FE = torch.randint(0, 9, shape, dtype=torch.int32, generator=generator)
    told = None if fault is None else torch.tensor(fault)
    n = 2 if num_bins % 2 == 0 else 1
    device_told = None if told is None else told.to(DEVICE)
    found = exchanged(counts_FE.to(DEVICE), num_ranks, n, device_told)
    monkeypatch.setattr(extension, "load", lambda: kernels_on_cpu)
    monkeypatch.setattr(
        Messages, "_where", lambda self: {"device": 0, "stream": 0, "sizes": list(self.sizes)}
    )
    expected = exchanged(counts_FE, num_ranks, n, told)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
