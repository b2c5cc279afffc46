"""The sizes of a layer that nobody has built, for `pmoe plan` and `pmoe memory`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pmoe.arguments import check_count
from pmoe.experts import FFNExperts
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.planner.layer_sizes import LayerSizes

STACKED: dict[str, Callable[..., FFNExperts | SwiGLUExperts]] = {"ffn": FFNExperts, "swiglu": SwiGLUExperts}
"""Experts that a layer makes itself, by the name in its options."""


def sizes_from_options(
    d_model: int,
    d_hidden: int,
    num_experts: int,
    *,
    top_k: int = 1,
    num_ranks: int = 1,
    expert: str = "ffn",
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    device_type: str = "cpu",
) -> LayerSizes:
    """What MoELayer(d_model, d_hidden, num_experts, ...) would have; the arguments are the layer's.

    num_ranks: that share the experts. device_type: "cpu" or "cuda"; experts hold more for a row on one.

    Raises TypeError for a number that is no int; ValueError for one below 1, top_k above num_experts,
    num_experts that num_ranks does not divide, and an unknown expert.
    """
    check_count(d_model=d_model, d_hidden=d_hidden, num_experts=num_experts, top_k=top_k, num_ranks=num_ranks)
    if top_k > num_experts:
        raise ValueError(f"top_k ({top_k}) must be at most num_experts ({num_experts})")
    if num_experts % num_ranks:
        raise ValueError(f"num_experts ({num_experts}) must be divisible by num_ranks ({num_ranks})")
    if expert not in STACKED:
        raise ValueError(f"expert ({expert!r}) must be one of {', '.join(STACKED)}")
    local = num_experts // num_ranks
    experts = STACKED[expert](d_model, d_hidden, local, bias=bias, device="meta", dtype=dtype)
    return LayerSizes(
        d_model=d_model,
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
        columns=experts.columns(device_type),
        element_size=dtype.itemsize,
        weight_size=max(4, dtype.itemsize),
        expert_parameters=sum(parameter.numel() for parameter in experts.parameters()),
        gate_parameters=num_experts * d_model,
    )
