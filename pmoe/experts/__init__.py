"""Experts: the networks that compute the routed rows, as grouped matrix products.

    base             `Experts`, the interface between the engine and any kind of experts
    stacked          `StackedExperts`, two-layer experts with one tensor for all experts' weights
    ffn              feed-forward experts, and the nonlinearities
    swiglu           gated experts
    modules          experts that are a user's own modules
    expert_autograd  the autograd graphs of such modules, kept from forward to backward
    operands         the tensors with which a call computes
    dtensor_layout   parameters on a device mesh
    products         grouped products: rows sorted by expert times that expert's matrix
    wrapper_checks   refuses data-parallel wrappers around experts

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
"""Names that MoELayer's argument ``expert`` takes: experts that the layer builds itself."""

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
    """Builds uninitialised experts by the name of their kind.

    Raises ValueError for a name that is not in `STACKED`.
    """
    sizes = (d_model, d_hidden, num_local_experts)
    if kind == "ffn":
        return FFNExperts(*sizes, activation=activation, bias=bias, **options)
    if kind == "swiglu":
        from pmoe.experts.swiglu import SwiGLUExperts

        return SwiGLUExperts(*sizes, bias=bias, **options)
    raise ValueError(f"expert ({kind!r}) must be ffn, swiglu, or a callable that builds a module")


def initialise(experts: StackedExperts, *, first_expert: int) -> None:
    """Fills the stacked parameters with random values; does nothing on the meta device.

    first_expert: global number of local expert 0, so that local expert i has the number first_expert + i.
    """
    count = 0 if next(experts.parameters()).is_meta else experts.num_local_experts
    seeded(experts.initialise_expert, first_expert=first_expert, count=count)


def seeded(draw: Callable[[int], T], *, first_expert: int, count: int) -> list[T]:
    """Returns [draw(0), ..., draw(count - 1)], each drawn under a seed of its global expert's number.

    first_expert: global number of local expert 0; draw(i) runs under seed + first_expert + i.
    count: number of local experts.

    An expert's values therefore do not depend on the number of ranks. Every rank draws exactly one number
    from the CPU's default generator. So ranks that build a model under one seed stay in step, however many
    experts each has.
    """
    # device="cpu" because under `with torch.device("meta")` the number would have no value.
    drawn_seed = torch.randint(2**62, (), device="cpu")
    seed = int(drawn_seed) if has_values(drawn_seed) else 0
    values = []
    for i in range(count):
        # Not torch.manual_seed: it would also seed CUDA generators that fork_rng does not restore. The
        # current device's generator takes part only if CUDA is in use already: asking for it starts CUDA.
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(seed + first_expert + i)
            if devices:
                torch.cuda.manual_seed(seed + first_expert + i)
            values.append(draw(i))
    return values
