"""Layers of DeepSpeed, whose experts are modules of the user's: of Megatron-DeepSpeed's names, or others."""

from __future__ import annotations

import deepspeed
import deepspeed.comm.torch
import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.nn import functional as F

from tests.convert.compare import E, H, K, M, T, check, group, randomise


class Expert(nn.Module):
    def __init__(self, first: str, second: str, has_bias: bool) -> None:
        super().__init__()
        self.names = (first, second)
        self.add_module(first, nn.Linear(M, H, bias=has_bias))
        self.add_module(second, nn.Linear(H, M, bias=has_bias))

    def forward(self, x: Tensor) -> Tensor:
        first, second = map(self.get_submodule, self.names)
        y: Tensor = second(F.gelu(first(x)))
        return y


def main(rank: int, ranks: int) -> None:
    deepspeed.comm.torch.build_shm_op = lambda: None  # a shortcut of its collectives, which it would compile
    deepspeed.init_distributed(dist_backend="gloo")
    x = torch.randn(2, T, M, generator=torch.Generator().manual_seed(rank))
    for top_k, has_bias, first, second in (
        (K, True, "dense_h_to_4h", "dense_4h_to_h"),
        (K, False, "dense_h_to_4h", "dense_4h_to_h"),
        (1, True, "fc1", "fc2"),
    ):
        options = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
        layer = MoE(M, Expert(first, second, has_bias), E, ep_size=ranks, k=top_k, **options)
        layer.set_deepspeed_parallelism()
        randomise(layer, 1)
        with torch.no_grad():
            y, *_ = layer.eval()(x)
        names = None if first == "dense_h_to_4h" else {"dense_h_to_4h": first, "dense_4h_to_h": second}
        check(layer, y, x, "deepspeed-moe", names=names, top_k=top_k, activation="gelu", bias=has_bias)


if __name__ == "__main__":
    with group() as (rank, ranks):
        main(rank, ranks)
