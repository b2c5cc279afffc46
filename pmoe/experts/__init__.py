"""Experts: the networks that compute the routed rows, as grouped matrix products.

    base              `Experts`, the interface between the engine and every class of experts
    stacked           `StackedExperts`: two-layer experts; one tensor holds a weight of all experts of a rank
    ffn               feed-forward experts, and the nonlinearities
    swiglu            gated experts
    lora              low-rank adapters of stacked experts
    batch_invariant   stacked experts whose results for a row do not depend on other rows, bit by bit
    launched          stacked experts on a GPU, with fewer checks at each launch of a kernel
    with_copies       a rank's experts together with its copies of other ranks' busy experts
    borrowed          experts that compute with another module's parameters
    few_rows          the outputs of experts for a call of few rows without gradients
    modules           experts that are a user's own modules
    expert_autograd   the autograd graphs of a user's modules, kept from forward to backward
    operands          reads the values that a call computes with: parameters, also pruned or parametrized
    dtensor_layout    expert parameters that are DTensors on a device mesh
    columns           cuts tensors of experts into parts of their hidden columns, and joins parts
    products          grouped products: each expert's rows times that expert's matrix
    rounded_products  grouped products of operands rounded to float8; a pass rounds each weight once
    marks             attributes of expert parameters that other tools read
    values            distinguishes tensors that hold numbers from meta and fake tensors
    wrapper_checks    refuses data-parallel wrappers around experts

Letters of this folder: N rows, E experts of this rank, M = d_model, H = d_hidden, and G columns of T_M, the
hidden activation before the nonlinearity: H, or 2H for gated experts.
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
"""Names that MoELayer's argument ``expert`` accepts. The layer builds these experts itself."""

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
    """Builds feed-forward or SwiGLU experts, with parameters that have no values yet.

    One tensor holds a parameter of all experts ("stacked"); its dimension 0 indexes the experts of this rank.

    kind: "ffn" or "swiglu".
    d_model, d_hidden: columns of a row, and hidden columns of an expert.
    num_local_experts: number of experts of this rank.
    activation: nonlinearity of "ffn" experts; "swiglu" has its own.
    bias: whether the experts have biases.
    options: further arguments of the experts' class: shard, device and dtype.

    Raises ValueError for any other ``kind``.
    """
    sizes = (d_model, d_hidden, num_local_experts)
    if kind == "ffn":
        return FFNExperts(*sizes, activation=activation, bias=bias, **options)
    if kind == "swiglu":
        from pmoe.experts.swiglu import SwiGLUExperts

        return SwiGLUExperts(*sizes, bias=bias, **options)
    raise ValueError(f"expert ({kind!r}) must be ffn, swiglu, or a callable that builds a module")


def initialise(experts: StackedExperts, *, first_expert: int) -> None:
    """Draws random values for all local experts' parameters, in place. Does nothing on the meta device.

    experts: experts whose parameters are stacked: dimension 0 of each tensor indexes the experts.
    first_expert: global index of local expert 0. The random seed of an expert follows from its global index,
        so its values do not depend on the number of ranks (`seeded`).
    """
    count = 0 if next(experts.parameters()).is_meta else experts.num_local_experts
    seeded(experts.initialise_expert, first_expert=first_expert, count=count)


def seeded(draw: Callable[[int], T], *, first_expert: int, count: int) -> list[T]:
    """Calls draw(i) for each local expert i under a random seed of its own, and returns the results.

    draw: a function that builds local expert i, or fills its parameters, with random values.
    first_expert: global index of local expert 0.
    count: number of local experts.

    The seed of local expert i is s + first_expert + i, where s is a number drawn from the CPU's default
    generator. So an expert's values do not depend on the number of ranks.

    Drawing s is the only lasting change of the generators. So ranks that build a model under one seed have
    equal generators afterwards, even if they hold different numbers of experts.
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
