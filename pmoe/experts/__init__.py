"""Experts: the networks that rows are routed to, as grouped products. One kind a file.

`pmoe.experts.swiglu` has gated experts, `pmoe.experts.modules` those made of a user's own modules.

Letters of this folder: N rows, E experts of this rank, M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch

from pmoe.experts.base import Experts, Shard
from pmoe.experts.ffn import ActivationName as ActivationName
from pmoe.experts.ffn import FFNExperts
from pmoe.experts.stacked import StackedExperts
from pmoe.experts.values import has_values

__all__ = ["Experts", "FFNExperts", "Shard", "StackedExperts"]

ExpertName = Literal["ffn", "swiglu"]
"""What MoELayer's argument ``expert`` takes, beside modules: experts that the layer makes itself."""

STACKED: tuple[ExpertName, ...] = get_args(ExpertName)

T = TypeVar("T")


def make_stacked(
    kind: ExpertName,
    d_model: int,
    d_hidden: int,
    num_local_experts: int,
    activation: ActivationName,
    bias: bool,
    **options: Any,
) -> StackedExperts:
    """Experts by the name of their kind, uninitialised. Raises ValueError for another name."""
    sizes = (d_model, d_hidden, num_local_experts)
    if kind == "ffn":
        return FFNExperts(*sizes, activation=activation, bias=bias, **options)
    if kind == "swiglu":
        from pmoe.experts.swiglu import SwiGLUExperts

        return SwiGLUExperts(*sizes, bias=bias, **options)
    raise ValueError(f"expert ({kind!r}) must be ffn, swiglu, or a callable that builds a module")


def initialise(experts: StackedExperts, *, first_expert: int) -> None:
    """Fills the stacked parameters; local expert i is global expert first_expert + i."""
    count = 0 if next(experts.parameters()).is_meta else experts.num_local_experts
    seeded(experts.initialise_expert, first_expert=first_expert, count=count)


def seeded(draw: Callable[[int], T], *, first_expert: int, count: int) -> list[T]:
    """draw(i) of each local expert i, the default generators at a seed of its global expert's own.

    So its values are the same whatever the number of ranks. Every rank draws one number from the default
    generator of the CPU: a model built under one seed on all ranks stays in step.
    """
    drawn_seed = torch.randint(2**62, (), device="cpu")  # not what torch.device("meta") would make of it
    seed = int(drawn_seed) if has_values(drawn_seed) else 0
    drawn = []
    for i in range(count):
        # torch.manual_seed would seed CUDA's generator for good: it takes part where CUDA is in use already.
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(seed + first_expert + i)
            if devices:
                torch.cuda.manual_seed(seed + first_expert + i)
            drawn.append(draw(i))
    return drawn
