"""Experts as users write them: modules of every kind that memory reuse must get right."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp(d_model: int, d_hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d_model, d_hidden), nn.GELU(), nn.Linear(d_hidden, d_model))


def dropping(d_model: int, d_hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d_model, d_hidden), nn.Dropout(0.4), nn.Linear(d_hidden, d_model))


def normed(d_model: int, d_hidden: int) -> nn.Module:
    return nn.Sequential(mlp(d_model, d_hidden), nn.LayerNorm(d_model))


def changing(d_model: int, d_hidden: int) -> nn.Module:
    """Its first operation writes over its input."""
    return nn.Sequential(nn.ReLU(inplace=True), mlp(d_model, d_hidden))


def identity(d_model: int, d_hidden: int) -> nn.Module:
    return nn.Identity()


class Counting(nn.Module):
    """Multiplies by one buffer, and counts in others: one in place, one as a new tensor."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.inner = mlp(d_model, d_hidden)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, d_model))
        self.register_buffer("mean", torch.zeros(d_model))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.calls = self.calls + 1
        return self.inner(x * self.scale)


EXPERTS = {
    "mlp": mlp,
    "dropout": dropping,
    "norm at the end": normed,
    "buffers": Counting,
    "in place": changing,
    "identity": identity,
}
