"""Options that ask for each feature of `pmoe.runners.features`, and a definition of such layers.

The definition takes the gate's own routing, which tests of the gates hold, and loops over ranks and experts
in float64 under autograd.

Letters: T tokens of a rank, K choices, E experts, M = d_model, H = d_hidden.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import pmoe
from pmoe.comm.base import FlatAllToAll
from pmoe.experts import FFNExperts
from pmoe.experts.base import WHOLE, Shard
from pmoe.gates import TopKGate
from pmoe.gates.external import ExternalGate
from pmoe.runners.features import Feature
from tests.kit import AUX
from tests.own_experts import mlp
from tests.reference import relative_error
from tests.switched import switched_layer

M, H, E, K, T, SHARED, LATENT = 4, 6, 4, 2, 7, 5, 3
FACTOR = 0.7
"""The capacity factor of layers that have one: it drops some rows."""
F64 = torch.float64

Features = Collection[Feature]


class OwnDispatch(FlatAllToAll):
    """An exchange of a user's own, which does what the flat one does."""


class OwnExperts(FFNExperts):
    """Experts of a user's own, which compute what feed-forward experts do."""


class OwnGate(nn.Module):
    """A gate of a user's own: no subclass of pmoe.Gate, with logits of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(M, 5, dtype=F64), nn.Linear(5, E, dtype=F64)

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        logits = self.second(self.first(x_TM).tanh())
        weight, expert = logits.softmax(-1).topk(K)
        return pmoe.Routing(expert=expert, weight=weight, l_aux=logits.square().sum(), logits=logits)


class Outside(pmoe.Callback):
    """Changes the input and the output of the layer."""

    def before_moe_start(self, x: Tensor) -> Tensor:
        return x.sin()

    def before_moe_end(self, y: Tensor) -> Tensor:
        return y * 3


class Around(Outside):
    """Changes rows inside the layer, too."""

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * 2


class Carried:
    """Other layers' gradients, as `pmoe.GradientReducer` sets them: none, but the task is there."""

    t_gar = 0.0

    def begins(self) -> None:
        pass

    def inside(self) -> dist.Work | None:
        return None

    def ends(self) -> None:
        pass


@dataclass(frozen=True)
class Recipe:
    """How to ask for a feature. argument: what it sets; two recipes for one argument cannot be combined."""

    argument: str
    options: Callable[[], dict[str, Any]]


def sets(argument: str, value: Any, **others: Any) -> Recipe:
    """A recipe of plain values."""
    return Recipe(argument, lambda: {argument: value, **others})


RECIPES: dict[Feature, Recipe] = {
    Feature.RANKS: Recipe("ranks", dict),
    Feature.SHARDED: Recipe("mesh", dict),
    Feature.HIERARCHICAL: sets("dispatch", "hierarchical_1d", nodes=1),
    Feature.OWN_EXCHANGE: Recipe("dispatch", lambda: {"dispatch": OwnDispatch(), "combine": "flat"}),
    Feature.SEND_ONCE: sets("send_once", True),
    Feature.WIRE: sets("wire", "e4m3"),
    Feature.WIRE_COMBINE: sets("wire_combine", "e4m3"),
    Feature.TO_OWN_RANK: sets("bypass_local", False),
    Feature.CALLBACKS: Recipe("callbacks", lambda: {"callbacks": [Outside()]}),
    Feature.HOOKS: Recipe("callbacks", lambda: {"callbacks": [Around()]}),
    Feature.SHARED_EXPERT: sets("shared_expert", SHARED, shared_gate=True),
    Feature.GRADIENTS: Recipe("gradients", dict),
    Feature.ROTATES: sets("memory_reuse", "S4"),
    Feature.OFFLOADS: sets("memory_reuse", "S1"),
    Feature.MESSAGES: sets("memory_reuse", pmoe.Restore("message", "recompute"), wire="e4m3"),
    Feature.HIDDEN_E4M3: sets("memory_reuse", pmoe.Restore("communicate", "e4m3")),
    Feature.PRODUCTS: sets("products", "e4m3"),
    Feature.CHUNKS: sets("pipeline", 2),
    Feature.BUDGET: sets("memory_budget", "1MiB"),
    Feature.CAPACITY: sets("capacity_factor", FACTOR),
    Feature.NO_CAPACITY: sets("capacity_factor", None),
    Feature.PADDED: sets("pad_to_capacity", True),
    Feature.CHECK_FINITE: sets("check_finite", True),
    Feature.FUSED: sets("fused", True),
    Feature.PERSISTENT: sets("fused", "persistent"),
    Feature.PROGRAM: sets("program", True),
    Feature.SEQUENTIAL: sets("sequential", True),
    Feature.ONE_LANE: sets("one_lane", True),
    Feature.OWN_ORDER: sets("order", "einsum"),
    Feature.PICKS_TOKENS: sets("gate", "expert_choice"),
    Feature.KEEPS_ITSELF: sets("gate", "batch_prioritised"),
    Feature.OTHER_GATE: sets("gate", "sigmoid"),
    Feature.OWN_GATE: Recipe("gate", lambda: {"gate": OwnGate()}),
    Feature.GATE_MODULE: Recipe("gate", lambda: {"gate": TopKGate(M, E, K, dtype=F64)}),
    Feature.EXTERNAL_ROUTING: Recipe("gate", lambda: {"gate": ExternalGate()}),
    Feature.MODULE_EXPERTS: sets("expert", mlp),
    Feature.OTHER_EXPERTS: Recipe("expert", lambda: {"expert": OwnExperts}),
    # Experts of one's own have the layer's width here, so these recipes are not combined.
    Feature.LATENT: Recipe("expert", lambda: {"d_latent": LATENT}),
    Feature.COPIES: sets("balance", 1),
    Feature.ADAPTERS: Recipe("expert", dict),
}


def fit(features: Features) -> bool:
    """Whether a layer can ask for all of them: no two set one argument."""
    arguments = [RECIPES[feature].argument for feature in features]
    return len(set(arguments)) == len(arguments)


_meshes: list[DeviceMesh] = []


def build(features: Features) -> pmoe.MoELayer:
    """The layer that asks for these features. Sharded experts are split over two ranks."""
    options: dict[str, Any] = {}
    if Feature.PADDED in features:
        options["capacity_factor"] = FACTOR
    for feature in features:
        options |= RECIPES[feature].options()
    world = dist.get_world_size() if dist.is_initialized() else 1
    shard = WHOLE
    if Feature.SHARDED in features:
        if not _meshes:
            _meshes.append(init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ep", "esp")))
        options["mesh"] = _meshes[0]
        shard = Shard(_meshes[0].get_local_rank("esp"), 2)
    if options.get("expert") is OwnExperts:
        options["expert"] = OwnExperts(M, H, E * shard.count // world, shard=shard, dtype=F64)
    layer = switched_layer(M, H, E, K, dtype=F64, **options)
    if Feature.ADAPTERS in features:
        pmoe.add_lora(layer, rank=1, alpha=2)
        layer.experts.requires_grad_()  # the weights are trained too, as those of all layers here
    fill(layer)
    if Feature.GRADIENTS in features:
        layer.gradients = Carried()
    return layer


# ---- values


def values(name: str, *shape: int) -> Tensor:
    """Values that are the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=F64)


def whole_experts(layer: pmoe.MoELayer) -> dict[str, Tensor]:
    """Parameters of all experts, and of adapters of rank 1 if the layer has them."""
    width = layer.options.row_columns
    shapes = {"w1": (E, H, width), "b1": (E, H), "w2": (E, width, H), "b2": (E, width)}
    if is_adapted(layer):
        shapes |= {"w1_A": (E, 1, width), "w1_B": (E, H, 1), "w2_A": (E, 1, H), "w2_B": (E, width, 1)}
    return {name: values(name, *shape) for name, shape in shapes.items()}


def is_adapted(layer: pmoe.MoELayer) -> bool:
    return Feature.ADAPTERS in layer.layer_modules.features


def tokens(rank: int) -> tuple[Tensor, Tensor]:
    """x and dy of a rank, (T, M) both."""
    return values(f"x{rank}", T, M), values(f"dy{rank}", T, M)


def own_part(layer: pmoe.MoELayer, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of tensors of all experts, those of this rank, by the names of the layer's parameters."""
    first, width = layer.first_expert, H // layer.shard.count
    local = slice(first, first + layer.num_local_experts)
    columns = slice(layer.shard.index * width, (layer.shard.index + 1) * width)
    own = {
        "w1": whole["w1"][local, columns],
        "b1": whole["b1"][local, columns],
        "w2": whole["w2"][local, :, columns],
        "b2": whole["b2"][local],
    }
    if is_adapted(layer):
        factors = {
            "w1_A": whole["w1_A"][local],
            "w1_B": whole["w1_B"][local, columns],
            "w2_A": whole["w2_A"][local, :, columns],
            "w2_B": whole["w2_B"][local],
        }
        own |= {f"adapters.default.{name}": value for name, value in factors.items()}
    if not layer.experts.are_modules:
        return {f"experts.{name}": value for name, value in own.items()}
    names = {"w1": "0.weight", "b1": "0.bias", "w2": "2.weight", "b2": "2.bias"}
    return {
        f"experts.local.{e}.{names[name]}": value[e]
        for name, value in own.items()
        for e in range(layer.num_local_experts)
    }


@torch.no_grad()
def fill(layer: pmoe.MoELayer) -> None:
    """Gives a layer the values that all layers here have. Gates are bent to be uneven."""
    experts = own_part(layer, whole_experts(layer))
    layer.to(F64)
    for name, parameter in layer.named_parameters():
        parameter.copy_(experts[name] if name in experts else values(name, *parameter.shape))


# ---- the layer, and what it should give


def given(gate: nn.Module, rank: int) -> tuple[Tensor | None, Any]:
    """The routing weights of an `ExternalGate` as a leaf, and the block in which the layer is called."""
    if not isinstance(gate, ExternalGate):
        return None, contextlib.nullcontext()
    expert_TK = (torch.arange(T)[:, None] ** 2 + torch.arange(K) + rank) % E
    weight_TK = values("weight", T, K).abs().requires_grad_()
    return weight_TK, gate.routing(expert_TK, weight_TK)


def found(layer: pmoe.MoELayer, call: Any = None) -> dict[str, Tensor | None]:
    """y, l_aux and every gradient of one step of this rank. call: of the layer, where it is not itself."""
    rank = layer.ranks.rank
    x, dy = tokens(rank)
    x.requires_grad_()
    weight_TK, routing = given(layer.gate, rank)
    layer.zero_grad(set_to_none=True)
    with routing:
        y = (layer if call is None else call)(x)
    ((y * dy).sum() + AUX * layer.l_aux).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    own = {} if weight_TK is None else {"weight": weight_TK.grad}
    return {"y": y.detach(), "l_aux": layer.l_aux.detach(), "x": x.grad, **gradients, **own}


def expected(layer: pmoe.MoELayer) -> dict[str, Tensor]:
    """The same by the plain definition. Experts' gradients are sums over all ranks' tokens."""
    whole = {name: value.requires_grad_() for name, value in whole_experts(layer).items()}
    loss, own = torch.zeros((), dtype=F64), {}
    for other in range(layer.ranks.size):
        x, dy = tokens(other)
        x.requires_grad_()
        names = ("gate", "shared_expert", "shared_gate", "latent")
        modules = nn.ModuleDict(
            {name: copy.deepcopy(each) for name in names if (each := getattr(layer, name))}
        )
        weight_TK, routing = given(modules["gate"], other)
        with routing:
            y, l_aux = _of_rank(layer, modules, whole, x)
        loss = loss + (y * dy).sum() + AUX * l_aux
        if other == layer.ranks.rank:
            leaves = {"x": x, **dict(modules.named_parameters())}
            leaves |= {} if weight_TK is None else {"weight": weight_TK}
            own = {"y": y.detach(), "l_aux": l_aux.detach()}
    loss.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    experts = own_part(layer, {name: value.grad for name, value in whole.items()})
    return {**own, **gradients, **experts}


def _of_rank(
    layer: pmoe.MoELayer, modules: nn.ModuleDict, whole: dict[str, Tensor], x: Tensor
) -> tuple[Tensor, Tensor]:
    hooked = bool(layer.callbacks)
    doubles = any(isinstance(callback, Around) for callback in layer.callbacks)
    x = x.sin() if hooked else x
    routing = modules["gate"](x)
    decides = getattr(modules["gate"], "decides_capacity", False)
    combine_TE = _combine(routing, None if decides else layer.capacity_factor)
    latent = dict(modules.items()).get("latent")
    rows = x if latent is None else x @ latent.down.weight.t()
    rows = rows * 2 if doubles else rows
    y = torch.zeros_like(rows)
    for e in range(E):
        of_expert = {name: value[e] for name, value in whole.items()}
        y = y + combine_TE[:, e, None] * _feed_forward(rows, **of_expert)
    y = y if latent is None else y @ latent.up.weight.t()
    if "shared_expert" in modules:
        shared = {name: value[0] for name, value in modules["shared_expert"].named_parameters()}
        y = y + modules["shared_gate"](x).sigmoid() * _feed_forward(x, **shared)
    return (y * 3 if hooked else y), routing.l_aux


def _feed_forward(rows: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, **adapter: Tensor) -> Tensor:
    if adapter:  # alpha / rank is 2
        w1 = w1 + 2 * adapter["w1_B"] @ adapter["w1_A"]
        w2 = w2 + 2 * adapter["w2_B"] @ adapter["w2_A"]
    return F.gelu(rows @ w1.t() + b1) @ w2.t() + b2


def _combine(routing: pmoe.Routing, capacity_factor: float | None) -> Tensor:
    """(T, E): the weight of each expert for each token, 0 where the row is dropped."""
    token_S = torch.arange(T) if routing.token is None else routing.token
    combine_TE, used = torch.zeros(T, E, dtype=F64), [0] * E
    most = math.inf
    if capacity_factor is not None and routing.keep is None:
        most = math.ceil(capacity_factor * T * routing.expert.shape[1] / E)
    for s, k in torch.cartesian_prod(*map(torch.arange, routing.expert.shape)).tolist():
        if routing.keep is not None and not routing.keep[s, k]:
            continue
        e = int(routing.expert[s, k])
        used[e] += 1
        if used[e] <= most:
            place = (torch.tensor(int(token_S[s])), torch.tensor(e))
            combine_TE = combine_TE.index_put(place, routing.weight[s, k], accumulate=True)
    return combine_TE


def differences(got: dict[str, Tensor | None], wanted: dict[str, Tensor]) -> Iterator[str]:
    """What is wrong of a step, in words."""
    if set(got) != set(wanted):
        yield f"other names: {set(got) ^ set(wanted)}"
    for name in set(got) & set(wanted):
        if got[name] is None:
            yield f"{name}: no gradient"
        elif not (error := relative_error(got[name], wanted[name])) <= 1e-12:
            yield f"{name}: {error}"


def sentence(feature: Feature) -> str:
    """A regular expression of the refusal that names a feature."""
    return re.sub(r"\\\{\w+\\\}", ".+", re.escape(feature.value))
