"""A layer that another package made, and pmoe's with the same weights: the same output, and the bits back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pmoe
from pmoe.convert import from_pmoe, to_pmoe

E, M, H, K, T = 4, 16, 24, 2, 32
"""Of every layer: experts, widths, choices, and tokens of a rank."""


@contextmanager
def group() -> Iterator[tuple[int, int]]:
    """This rank and the number of ranks, as ``python -m MODULE FILE RANK RANKS`` says."""
    file, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    yield rank, ranks
    dist.barrier()
    dist.destroy_process_group()


def randomise(module: nn.Module, seed: int) -> None:
    """Biases and buffers, too. Routed experts of another rank are others."""
    common = torch.Generator().manual_seed(seed)
    of_rank = torch.Generator().manual_seed(seed + 1 + dist.get_rank())
    with torch.no_grad():
        for name, each in module.state_dict().items():
            if isinstance(each, Tensor) and each.is_floating_point():
                is_own = "experts." in name and "shared" not in name
                each.copy_(0.3 * torch.randn(each.shape, generator=of_rank if is_own else common))


class BiasedGate(pmoe.Gate):
    """A softmax of the top_k logits, to which a bias is added."""

    def __init__(self, d_model: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.zeros(num_experts, d_model))
        self.logit_bias = nn.Parameter(torch.zeros(num_experts))

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        logits_TE = torch.nn.functional.linear(x_TM, self.weight, self.logit_bias)
        logits_TK, expert_TK = logits_TE.topk(self.top_k)
        return pmoe.Routing(expert=expert_TK, weight=logits_TK.softmax(-1), l_aux=logits_TE.new_zeros(()))


def check(theirs: nn.Module, y: Tensor, x: Tensor, layout: str, /, names: Any = None, **options: Any) -> None:
    """theirs: the layer that made y of x. options: of pmoe's."""
    layer = pmoe.MoELayer(M, H, **{"num_experts": E, "top_k": K, **options})
    own = range(layer.first_expert, layer.first_expert + layer.num_local_experts)
    state = {name: each for name, each in theirs.state_dict().items() if isinstance(each, Tensor)}
    ours = to_pmoe(state, layout, experts=own, names=names)
    layer.load_state_dict(ours)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), y, rtol=1e-5, atol=1e-5)
    assert y.abs().max() > 0.1
    back = from_pmoe(layer.state_dict(), layout, experts=own, names=names)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], each) for name, each in state.items())
    print(f"{layout}: {len(state)} tensors, the same output", flush=True)
