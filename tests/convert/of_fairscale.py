"""A layer of fairscale, with experts that have fairseq's names.

fairseq's MoE branch says that it mirrors this layer.
"""

from __future__ import annotations

import torch
from fairscale.nn.moe import MOELayer, Top2Gate
from torch import Tensor, nn
from torch.nn import functional as F

from tests.convert.compare import H, K, M, T, check, group, randomise

FEW = 2
"""Experts: as many as a token's choices, for fairscale draws the second one at random and drops rows."""


class FeedForwardNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(M, H), nn.Linear(H, M)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(F.relu(self.fc1(x)))
        return y


def main(rank: int, ranks: int) -> None:
    own = nn.ModuleList([FeedForwardNetwork() for _ in range(FEW // ranks)])
    layer = MOELayer(Top2Gate(M, FEW), own)
    randomise(layer, 1)
    x = torch.randn(2, T, M, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        y = layer(x)
    check(layer, y, x, "fairseq", num_experts=FEW, top_k=K, activation="relu", bias=True)


if __name__ == "__main__":
    with group() as (rank, ranks):
        main(rank, ranks)
