"""A block whose second pass in a checkpoint must repeat the first, and what such tests run with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import MoELayer
from tests import kit
from tests.kit import AUX, D_MODEL, TOKENS, TOP_K, tokens
from tests.own_experts import dropping

FROZEN = {"context_fn": pmoe.checkpoint_contexts}
OPTIONS: dict[str, dict[str, Any]] = {
    "swiglu": {"expert": "swiglu"},
    "dropping experts": {"expert": dropping, "memory_reuse": "S4"},
    "capacity": {"capacity_factor": 0.7, "pipeline": 2},
    "padded": {"capacity_factor": 0.7, "pad_to_capacity": True, "pipeline": 2},
    "padded, S4": {"capacity_factor": 1.0, "pad_to_capacity": True, "memory_reuse": "S4"},
    "shared expert": {"shared_expert": 5, "shared_gate": True, "memory_reuse": "S2"},
    "budget": {"memory_budget": "1MiB", "pipeline": True},
    "solve": {"pipeline": "solve", "memory_reuse": True},
    "all rows travel": {"bypass_local": False, "send_once": True},
    "checked": {"check_finite": True, "z_loss_weight": 0.1},
    "einsum": {"order": "einsum"},
}


def build(**options: Any) -> MoELayer:
    """As `tests.kit.build`, with the one choice of the switch gate."""
    return kit.build(**{"top_k": 1 if options.get("gate") == "switch" else TOP_K, **options})


class Block(nn.Module):
    """A norm, dropout before the gate, a layer that is called twice, and dropout and losses behind it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(D_MODEL, dtype=torch.float64), nn.Dropout(0.3)
        self.layer = layer
        self.options: dict[str, Any] = {}
        if getattr(layer.gate, "needs_token_ids", False):
            self.options["token_ids"] = torch.arange(TOKENS) % 5

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.layer(self.drop(self.norm(x)), **self.options)
        l_aux = self.layer.l_aux.exp()  # which saves it
        y = y + self.drop(self.layer(y.sin(), **self.options))
        return y.exp().cos(), l_aux + self.layer.l_aux


Run = Callable[[Tensor], tuple[Tensor, Tensor]]


def frozen(function: Run, **options: Any) -> Run:
    return lambda x: checkpoint(function, x, use_reentrant=False, **FROZEN, **options)


def step(block: nn.Module, run: Run, x: Tensor | None = None) -> dict[str, Tensor]:
    """y, loss, every gradient that is not None, every buffer, and the next random number."""
    block.zero_grad(set_to_none=True)
    x = (tokens() if x is None else x).clone().requires_grad_()
    torch.manual_seed(5)
    y, l_aux = run(x)
    (y.square().sum() + AUX * l_aux).backward()
    parameters = [*block.named_parameters()]
    found = {name: each.grad for name, each in parameters if each.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in block.named_buffers()}
    random = torch.rand(1, dtype=torch.float64)
    return {"y": y.detach(), "l_aux": l_aux.detach(), "x": x.grad, **found, **buffers, "random": random}


def counted(layer: MoELayer) -> list[int]:
    """One entry for each run of the gate."""
    runs: list[int] = []
    layer.gate.register_forward_hook(lambda *_: runs.append(1))
    return runs
