"""The MoE layer written plainly with autograd and torch's operations, for comparison.

It uses nothing of pmoe but the values of a layer's parameters.

The first spelling that comes to mind is not the fastest one. If a stacked parameter is indexed for each
expert, then each of these has a gradient as large as all experts, and all of them are added up. So there are
several spellings of the same layer. A benchmark runs and prints all of them, and compares with the fastest:

    indexed   one stacked parameter; each expert picks its rows, and adds its results to a copy of the output
    unbound   the same, but the parameters are unbound once
    listed    one parameter for each expert; rows are sorted by expert once, and results are added in place
    grouped   as listed, but with stacked parameters and torch's one product for all experts (on some GPUs)

Letters: T tokens, K choices, N = T*K rows, E experts, M = d_model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import pmoe
from bench.timing import Timing

SPELLINGS = ("indexed", "unbound", "listed")
GROUPED = "grouped"
NAMES = ("w1", "b1", "w2", "b2")


class PlainExperts(nn.Module):
    """Copies of the parameters of a layer's experts, in the form that one of the plain layers needs.

    spelling: "indexed", "unbound", "listed" or "grouped", as the module's text explains.
    """

    def __init__(self, layer: pmoe.MoELayer, spelling: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.spelling, self.num_experts = spelling, layer.num_local_experts
        for name in NAMES:
            values = getattr(layer.experts, name)
            if values is None:  # without biases
                setattr(self, name, None)
                continue
            values = values.detach().to(dtype or values.dtype, copy=True)
            listed = nn.ParameterList(expert.clone() for expert in values)
            setattr(self, name, listed if spelling == "listed" else nn.Parameter(values))

    def per_expert(self) -> list[tuple[Tensor | None, ...]]:
        """Returns (w1, b1, w2, b2) of every expert."""
        parameters = [getattr(self, name) for name in NAMES]
        if self.spelling == "unbound":
            parameters = [None if values is None else values.unbind() for values in parameters]
        return [
            tuple(None if values is None else values[e] for values in parameters)
            for e in range(self.num_experts)
        ]

    def gradient(self, name: str) -> Tensor:
        """Returns the gradient of a parameter, stacked over the experts.

        name: the parameter's name, such as "w1".
        """
        parameter = getattr(self, name)
        return (
            parameter.grad
            if isinstance(parameter, nn.Parameter)
            else torch.stack([expert.grad for expert in parameter])
        )


class PlainMoE(nn.Module):
    """A plain layer of one rank, with copies of the parameters of ``layer``.

    dtype: dtype of the copies; None keeps that of the layer.
    """

    def __init__(self, layer: pmoe.MoELayer, spelling: str, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if spelling not in (*SPELLINGS, GROUPED):
            raise ValueError(f"spelling ({spelling!r}) must be one of {(*SPELLINGS, GROUPED)}")
        self.spelling, self.top_k = spelling, layer.top_k
        weight = layer.gate.weight
        self.gate_weight = nn.Parameter(weight.detach().to(dtype or weight.dtype, copy=True))
        self.experts = PlainExperts(layer, spelling, dtype)

    def forward(self, x_TM: Tensor, expert_TK: Tensor | None = None) -> Tensor:
        """Returns the output (T, M).

        expert_TK: experts to use in place of the gate's choice, for comparisons in which no choice may
            differ.
        """
        weight_TK, expert_TK = self.route(x_TM, expert_TK)
        if self.spelling in ("indexed", "unbound"):
            return self.picked(x_TM, weight_TK, expert_TK)
        return self.sorted(x_TM, weight_TK, expert_TK)

    def route(self, x_TM: Tensor, expert_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x_TM.dtype, torch.float32)
        probability_TE = F.linear(x_TM.to(wide), self.gate_weight.to(wide)).softmax(-1)
        if expert_TK is None:
            expert_TK = probability_TE.topk(self.top_k).indices
        weight_TK = probability_TE.gather(1, expert_TK)
        if self.top_k > 1:
            weight_TK = weight_TK / weight_TK.sum(1, keepdim=True)
        return weight_TK, expert_TK

    def picked(self, x_TM: Tensor, weight_TK: Tensor, expert_TK: Tensor) -> Tensor:
        y_TM = torch.zeros_like(x_TM)
        for e, parameters in enumerate(self.experts.per_expert()):
            token, choice = (expert_TK == e).nonzero(as_tuple=True)
            out = of_expert(x_TM[token], *parameters) * weight_TK[token, choice].unsqueeze(1)
            y_TM = y_TM.index_add(0, token, out.to(x_TM.dtype))
        return y_TM

    def sorted(self, x_TM: Tensor, weight_TK: Tensor, expert_TK: Tensor) -> Tensor:
        chosen_N = expert_TK.flatten()
        slot_N = chosen_N.argsort(stable=True)
        token_N = slot_N // self.top_k
        counts_E = counted(chosen_N, self.experts.num_experts)
        out_NM = self.outputs(x_TM.index_select(0, token_N), counts_E)
        out_NM = (out_NM * weight_TK.flatten().index_select(0, slot_N).unsqueeze(1)).to(x_TM.dtype)
        y_TM = torch.zeros_like(x_TM)
        return (
            y_TM.index_copy_(0, token_N, out_NM) if self.top_k == 1 else y_TM.index_add_(0, token_N, out_NM)
        )

    def outputs(self, rows_NM: Tensor, counts_E: Tensor) -> Tensor:
        """Returns the experts' outputs, (N, M), of N rows (N, M) that are sorted by expert.

        counts_E: (E,), the number of rows of each expert.
        """
        if self.spelling != GROUPED:
            parts = rows_NM.split(counts_E.tolist())
            pairs = zip(parts, self.experts.per_expert(), strict=True)
            return torch.cat([of_expert(rows, *parameters) for rows, parameters in pairs])
        ends_E = counts_E.cumsum(0).int()
        w1, w2 = self.experts.w1, self.experts.w2
        hidden_NG = F.grouped_mm(rows_NM, w1.transpose(1, 2), offs=ends_E)
        active_NH = activated(hidden_NG, w2.shape[2])
        return F.grouped_mm(active_NH, w2.transpose(1, 2), offs=ends_E)

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of all parameters, under the names that they have in the layer."""
        names = [name for name in NAMES if getattr(self.experts, name) is not None]
        return {
            "gate.weight": self.gate_weight.grad,
            **{f"experts.{name}": self.experts.gradient(name) for name in names},
        }


class PlainOverRanks(PlainMoE):
    """The plain layer over all ranks, for top-1 routing (K = 1), with one all-to-all each way.

    The message contains the rows of this rank's own experts, too, but these cross no link.
    """

    def forward(self, x_TM: Tensor, expert_TK: Tensor | None = None) -> Tensor:
        weight_TK, expert_TK = self.route(x_TM, expert_TK)
        expert_N, local, world = expert_TK[:, 0], self.experts.num_experts, dist.get_world_size()
        order_N = expert_N.argsort(stable=True)
        counts = counted(expert_N, local * world)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        send, by_source = counts.view(world, local).sum(1).tolist(), received.view(world, local)
        recv = by_source.sum(1).tolist()
        arrived = Exchange.apply(x_TM.index_select(0, order_N), send, recv)
        blocks = arrived.split(by_source.flatten().tolist())
        outs = []
        for e, parameters in enumerate(self.experts.per_expert()):
            own = blocks[e::local]
            out = of_expert(torch.cat(own), *parameters)
            outs.append(out.split([len(block) for block in own]))
        back = torch.cat([outs[e][source] for source in range(world) for e in range(local)])
        home = Exchange.apply(back, recv, send)
        if self.spelling == "listed":
            weighted = home * weight_TK.index_select(0, order_N)
            return torch.zeros_like(x_TM).index_copy_(0, order_N, weighted)
        position = torch.empty_like(order_N)
        position[order_N] = torch.arange(len(order_N))
        return home[position] * weight_TK


class Exchange(torch.autograd.Function):
    """An all-to-all as an autograd function: its gradient is the all-to-all in the other direction."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
        ctx.send, ctx.recv = send, recv
        out = rows.new_empty(sum(recv), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Exchange.apply(grad, ctx.recv, ctx.send), None, None


def of_expert(rows: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
    return F.linear(activated(F.linear(rows, w1, b1), w2.shape[1]), w2, b2)


def activated(hidden_NG: Tensor, width: int) -> Tensor:
    """Returns the activation after the nonlinearity, (N, width): gelu, or SwiGLU if G is 2 * width.

    hidden_NG: (N, G), the activation of N rows before the nonlinearity. SwiGLU's first half is its gate.
    """
    if hidden_NG.shape[1] == width:
        return F.gelu(hidden_NG)
    gate_NH, up_NH = hidden_NG.chunk(2, dim=1)
    return F.silu(gate_NH) * up_NH


def counted(chosen_N: Tensor, num_experts: int) -> Tensor:
    """Returns (E,), the number of rows of each expert. The host does not wait for the device."""
    zeros_E = torch.zeros(num_experts, dtype=torch.int64, device=chosen_N.device)
    return zeros_E.scatter_add_(0, chosen_N, torch.ones_like(chosen_N))


def name_of(spelling: str) -> str:
    return f"plain {spelling}"


def fastest(times: Mapping[str, Timing]) -> str:
    """Returns the name of the plain layer with the smallest median time.

    times: by name; other runs than plain layers may be among them, and are ignored.
    """
    return min((name for name in times if name.startswith("plain ")), key=lambda name: times[name].median)
