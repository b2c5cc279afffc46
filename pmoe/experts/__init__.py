"""Experts: the networks that rows are routed to, as grouped products. One kind a file."""

from __future__ import annotations

from typing import Any

from pmoe.experts.base import WHOLE, Experts, Shard
from pmoe.experts.ffn import FFNExperts
from pmoe.experts.modules import ModuleExperts
from pmoe.experts.stacked import StackedExperts
from pmoe.experts.swiglu import SwiGLUExperts

__all__ = [
    "Experts",
    "FFNExperts",
    "ModuleExperts",
    "Shard",
    "StackedExperts",
    "SwiGLUExperts",
    "make_stacked",
]


def make_stacked(
    kind: str,
    d_model: int,
    d_hidden: int,
    num_local_experts: int,
    activation: str,
    bias: bool,
    shard: Shard = WHOLE,
    **options: Any,
) -> StackedExperts:
    """Experts by the name of their kind, uninitialised. Raises ValueError for another name."""
    sizes = (d_model, d_hidden, num_local_experts)
    if kind == "ffn":
        return FFNExperts(*sizes, activation=activation, bias=bias, shard=shard, **options)
    if kind == "swiglu":
        return SwiGLUExperts(*sizes, bias=bias, shard=shard, **options)
    raise ValueError(f"expert ({kind!r}) must be ffn, swiglu, or a callable that builds a module")
