"""Policies of selective activation checkpointing as models use them, with a block and its steps."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.kit import AUX, D_MODEL, tokens

aten = torch.ops.aten


def by_name(_: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    is_product = "mm" in operator.name()
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def always(answer: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    return lambda *_, **__: answer


def every_second_product() -> Any:
    """As torchtitan does it: a count of products for each checkpoint, every second of which is not saved."""
    counts: defaultdict[str, int] = defaultdict(int)
    saved = {aten.mm.default, aten.addmm.default, aten.bmm.default}

    def policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        name = "recompute" if context.is_recompute else "forward"
        counts[name] += operator is aten.mm.default
        is_second = operator is aten.mm.default and counts[name] % 2 == 0
        saves = operator in saved and not is_second
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def made_of(policy: Any) -> Callable[[], Any]:
    return functools.partial(create_selective_checkpoint_contexts, policy)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "products by name": made_of(by_name),
    "a list": made_of([aten.mm.default, aten.addmm.default]),
    "every second product": every_second_product,
    **{answer.name: made_of(always(answer)) for answer in CheckpointPolicy},
}


class Block(nn.Module):
    """Products before, in and behind a layer, whose results a selective checkpoint may keep."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D_MODEL, dtype=dtype)
        self.into = nn.Linear(D_MODEL, D_MODEL, dtype=dtype)
        self.out = nn.Linear(D_MODEL, D_MODEL, bias=False, dtype=dtype)
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.out(self.layer(self.into(self.norm(x)).tanh()))
        return (x + y).cos(), self.layer.l_aux


def step(block: nn.Module, run: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor | None = None) -> Any:
    """y, l_aux and every gradient, from one seed."""
    block.zero_grad(set_to_none=True)
    for name, buffer in block.named_buffers():
        if name.endswith("load"):  # what the deepseek gate has counted
            buffer.zero_()
    x = (tokens() if x is None else x).clone().requires_grad_()
    torch.manual_seed(5)
    y, l_aux = run(x)
    (y.square().sum() + AUX * l_aux).backward()
    gradients = {name: each.grad for name, each in block.named_parameters() if each.grad is not None}
    return {"y": y.detach(), "l_aux": l_aux.detach(), "x": x.grad, **gradients}
