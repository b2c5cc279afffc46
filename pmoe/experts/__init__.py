"""Experts: the networks that rows are routed to, as grouped products. One kind a file.

Modules of a user's own are imported when they are asked for.

Letters of this folder: N rows, E experts of this rank, M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pmoe.experts.base import WHOLE, Experts, Shard

if TYPE_CHECKING:
    from pmoe.experts.ffn import FFNExperts
    from pmoe.experts.modules import ModuleExperts
    from pmoe.experts.stacked import StackedExperts
    from pmoe.experts.swiglu import SwiGLUExperts

_FILES = {
    "FFNExperts": "ffn",
    "ModuleExperts": "modules",
    "StackedExperts": "stacked",
    "SwiGLUExperts": "swiglu",
}

__all__ = [
    "Experts",
    "FFNExperts",
    "ModuleExperts",
    "Shard",
    "StackedExperts",
    "SwiGLUExperts",
    "make_stacked",
]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'pmoe.experts' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pmoe.experts.{_FILES[name]}"), name)


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
        from pmoe.experts.ffn import FFNExperts

        return FFNExperts(*sizes, activation=activation, bias=bias, shard=shard, **options)
    if kind == "swiglu":
        from pmoe.experts.swiglu import SwiGLUExperts

        return SwiGLUExperts(*sizes, bias=bias, shard=shard, **options)
    raise ValueError(f"expert ({kind!r}) must be ffn, swiglu, or a callable that builds a module")
