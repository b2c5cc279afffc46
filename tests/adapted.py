"""Layers with low-rank adapters, and the weights that they stand for: W[e] + alpha / R * B[e] @ A[e]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import pmoe
from pmoe.experts.lora import Adapter
from tests import kit
from tests.reference import Definition

RANK, ALPHA = 2, 3.0
EXPERTS = 8
HIDDEN = {"w1_B": -2, "w2_A": -1}


def whole_layer(**options: Any) -> pmoe.MoELayer:
    """Returns a layer of one rank with all experts."""
    return kit.build(EXPERTS, group=pmoe.comm.ranks.Ranks.single(), **options)


def fill(adapter: Adapter, first: int = 0, seed: int = 5, halves: int = 1) -> None:
    """Gives A and B values that depend on the seed, the expert's number among all, and the hidden column.

    first: the number of the rank's first expert. halves: 2 for gated experts that are split over ranks.
    """
    for number, (name, parameter) in enumerate(sorted(adapter.named_parameters())):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        shape = [*local.shape] if adapter.shared else [EXPERTS, *local.shape[1:]]
        if name in HIDDEN:
            shape[HIDDEN[name]] *= adapter.shard.count
        generator = torch.Generator().manual_seed(seed + number)
        values = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            values = columns(name, values, adapter.shard.index, adapter.shard.count, halves)
            local.copy_(values if adapter.shared else values[first : first + local.shape[0]])


def columns(name: str, values: Tensor, part: int, count: int, halves: int) -> Tensor:
    """One part of the hidden columns of a matrix of an adapter, or all of a matrix that has none."""
    if name not in HIDDEN:
        return values
    length = values.shape[HIDDEN[name]] // (halves if name == "w1_B" else 1)
    width = length // count
    starts = range(part * width, values.shape[HIDDEN[name]], length)
    return values.index_select(
        HIDDEN[name], torch.tensor([start + at for start in starts for at in range(width)])
    )


def changed(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """The weights of all experts with the adapter's change: loops over experts."""
    pairs = [(down, up)] * weight.shape[0] if down.dim() == 2 else list(zip(down, up, strict=True))
    return torch.stack([w + scale * (b @ a) for w, (a, b) in zip(weight, pairs, strict=True)])


def expected(
    layer: pmoe.MoELayer, xs: list[Tensor], dys: list[Tensor], aux_weight: float
) -> tuple[list[Tensor], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Returns what a layer of one rank with an adapter computes by the definition, for all ranks' tokens.

    It returns the outputs of all ranks, each rank's gradients of x and of the gate, and the adapter's
    gradients, all of the sum of the ranks' losses.
    """
    adapter = layer.experts.adapter(layer.experts.active)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in adapter.named_parameters()}
    state = {name: value.detach() for name, value in layer.named_parameters() if ".adapters." not in name}
    for weight in adapter.targets:
        down, up = leaves[f"{weight}_A"], leaves[f"{weight}_B"]
        state[f"experts.{weight}"] = changed(
            state[f"experts.{weight}"], down, up, adapter.alpha / adapter.rank
        )
    plain = Definition(state, layer.top_k, "swiglu" if layer.experts.hidden_factor == 2 else "ffn")
    xs = [x.detach().clone().requires_grad_() for x in xs]
    gates = [state["gate.weight"].clone().requires_grad_() for _ in xs]
    outs = [plain.rank(x, gate) for x, gate in zip(xs, gates, strict=True)]
    loss = sum((y * dy).sum() + aux_weight * aux for (y, aux), dy in zip(outs, dys, strict=True))
    found = torch.autograd.grad(loss, [*xs, *gates, *leaves.values()], allow_unused=True)
    world = len(xs)
    of_ranks = [{"x": found[rank], "gate.weight": found[world + rank]} for rank in range(world)]
    of_adapter = {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found[2 * world :], strict=True)
    }
    return [y.detach() for y, _ in outs], of_ranks, of_adapter
