"""The definition of a layer as a module: it takes a built layer's gate and shared expert, holds all ranks'
experts, and loops over the rows of its own rank's tokens in float64.

Letters: T tokens, S rows of the routing, K choices, E experts, M = d_model, H = d_hidden.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pmoe
from tests import featured
from tests.reference import ACTIVATIONS

F64 = torch.float64
Weights = dict[str, Tensor]


def values(name: str, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal float64 values that are the same wherever they are asked for."""
    return scale * featured.values(name, *shape)


def whole_experts(layer: pmoe.MoELayer, kind: str, bias: bool) -> Weights:
    """Parameters of all experts, by `pmoe.experts`' names."""
    e, m, h = layer.num_experts, layer.d_model, layer.d_hidden
    shapes = {"w1": (e, h * (2 if kind == "swiglu" else 1), m), "w2": (e, m, h)}
    if bias:
        shapes |= {"b1": shapes["w1"][:2], "b2": (e, m)}
    if kind == "normed":
        shapes |= {"scale": (e, m), "shift": (e, m)}
    return {name: values(name, *shape, scale=0.5) for name, shape in shapes.items()}


MODULE_NAMES = {
    "mlp": {"w1": "0.weight", "b1": "0.bias", "w2": "2.weight", "b2": "2.bias"},
    "normed": {
        **{"w1": "0.0.weight", "b1": "0.0.bias", "w2": "0.2.weight", "b2": "0.2.bias"},
        **{"scale": "1.weight", "shift": "1.bias"},
    },
}
"""Of the parameters in a module of one expert."""


def own_part(layer: pmoe.MoELayer, kind: str, whole: Weights) -> Weights:
    """Of tensors of all experts those of this rank, by the names of the layer's parameters."""
    local = slice(layer.first_expert, layer.first_expert + layer.num_local_experts)
    own = {name: value[local] for name, value in whole.items()}
    width = layer.d_hidden // layer.shard.count
    columns = torch.arange(layer.shard.index * width, (layer.shard.index + 1) * width)
    rows = torch.cat([columns, layer.d_hidden + columns]) if kind == "swiglu" else columns
    split = {"w1": (1, rows), "b1": (1, rows), "w2": (2, columns)}
    own = {n: v.index_select(*split[n]) if n in split else v for n, v in own.items()}
    if not layer.layer_modules.experts.are_modules:
        return {f"experts.{name}": value for name, value in own.items()}
    names = MODULE_NAMES["normed" if kind == "normed" else "mlp"]
    return {
        f"experts.local.{e}.{names[name]}": value[e]
        for name, value in own.items()
        for e in range(layer.num_local_experts)
    }


class PlainLayer(nn.Module):
    """What ``layer`` computes. kind, activation: what it was asked for."""

    l_aux: Tensor

    def __init__(self, layer: pmoe.MoELayer, whole: Weights, kind: str, activation: str) -> None:
        super().__init__()
        for name in ("gate", "shared_expert", "shared_gate", "callback_modules"):
            setattr(self, name, copy.deepcopy(getattr(layer, name)))
        self.whole = nn.ParameterDict(whole)
        # Modules have an activation of their own, the shared expert beside them the layer's.
        self.of_experts = (kind, "gelu" if layer.layer_modules.experts.are_modules else activation)
        self.of_shared = ("swiglu" if kind == "swiglu" else "ffn", activation)
        self.treated: dict[str, Callable[[Tensor], Tensor]] = {}  # of `whole`: what was done to a parameter
        self.factor = 1.0  # by which a hook of the experts multiplies what they return
        self.capacity_factor, self.num_experts = layer.capacity_factor, layer.num_experts

    def forward(self, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            mask = mask.bool()
            y = self(x[mask], None if token_ids is None else token_ids[mask])
            return y.new_zeros(x.shape).index_put((mask,), y)
        flat = x.reshape(-1, x.shape[-1])
        hooked = self.callback_modules[0] if len(self.callback_modules) else None
        flat = flat if hooked is None else hooked.before_moe_start(flat)
        routing = self.gate(flat, *(() if token_ids is None else (token_ids.reshape(-1),)))
        shared = self._shared(flat)
        self.l_aux = routing.l_aux
        with torch.autocast("cpu", enabled=False):
            rows = flat.to(F64) if hooked is None else hooked.before_dispatch(flat.to(F64), 0)
            y = self._routed(rows, routing) * self.factor
        y = y if shared is None else y + shared
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        y = y.to(kind)
        return y if y.shape == x.shape else y.view(x.shape)  # a view, where the layer gives one

    def _routed(self, x: Tensor, routing: pmoe.Routing) -> Tensor:
        rows = x if routing.mix is None else routing.mix.dispatch.to(F64).t() @ x
        token_S = torch.arange(routing.expert.shape[0]) if routing.token is None else routing.token
        token_S = torch.arange(len(rows)) if routing.mix is not None else token_S
        y = torch.zeros_like(rows)
        for s, k in self._kept(routing):
            t, e = int(token_S[s]), int(routing.expert[s, k])
            weights = {name: self.treated.get(name, same)(value)[e] for name, value in self.whole.items()}
            row = expert(weights, rows[t], *self.of_experts)
            y = y.index_add(0, torch.tensor([t]), (routing.weight[s, k].to(F64) * row)[None])
        return y if routing.mix is None else routing.mix.combine.to(F64) @ y

    def _kept(self, routing: pmoe.Routing) -> list[tuple[int, int]]:
        """(row, choice) of those that are within capacity."""
        places = [(s, k) for s in range(routing.expert.shape[0]) for k in range(routing.expert.shape[1])]
        if routing.keep is not None:
            return [place for place in places if routing.keep[place]]
        if self.capacity_factor is None or getattr(self.gate, "decides_capacity", False):
            return places
        most = math.ceil(self.capacity_factor * len(places) / self.num_experts)
        used, kept = [0] * self.num_experts, []
        for place in places:
            e = int(routing.expert[place])
            used[e] += 1
            kept += [place] if used[e] <= most else []
        return kept

    def _shared(self, x: Tensor) -> Tensor | None:
        if self.shared_expert is None:
            return None
        if self.shared_expert.are_modules:  # under the user's autocast
            y = self.shared_expert.local[0](x).to(F64)
        else:
            present = {name: getattr(self.shared_expert, name) for name in ("w1", "w2", "b1", "b2")}
            p = {name: value[0].to(F64) for name, value in present.items() if value is not None}
            y = (
                torch.stack([expert(p, row, *self.of_shared) for row in x.to(F64)])
                if len(x)
                else x.to(F64) * 1
            )
        return y if self.shared_gate is None else self.shared_gate(x).to(F64).sigmoid() * y


def same(value: Tensor) -> Tensor:
    return value


def expert(p: Weights, row: Tensor, kind: str, activation: str) -> Tensor:
    """One expert on one row (M,)."""
    hidden = p["w1"] @ row + p.get("b1", 0)
    if kind == "swiglu":
        half = hidden.shape[0] // 2
        active = F.silu(hidden[:half]) * hidden[half:]
    else:
        active = ACTIVATIONS[activation](hidden)
    y = p["w2"] @ active + p.get("b2", 0)
    return F.layer_norm(y, y.shape, p["scale"], p["shift"]) if kind == "normed" else y
