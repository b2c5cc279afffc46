"""Experts: the networks that rows are routed to, as grouped products. One kind a file.

`pmoe.experts.swiglu` has gated experts, `pmoe.experts.modules` those made of a user's own modules.

Letters of this folder: N rows, E experts of this rank, M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""

from __future__ import annotations

from typing import Any

from pmoe.experts.base import WHOLE, Experts, Shard
from pmoe.experts.ffn import FFNExperts
from pmoe.experts.stacked import StackedExperts

__all__ = ["Experts", "FFNExperts", "Shard", "StackedExperts", "make_stacked"]


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
        from pmoe.experts.swiglu import SwiGLUExperts

        return SwiGLUExperts(*sizes, bias=bias, shard=shard, **options)
    raise ValueError(f"expert ({kind!r}) must be ffn, swiglu, or a callable that builds a module")
