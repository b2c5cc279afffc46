"""Layers with every option on meshes of ranks, and the plain definition's result for the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import pmoe
from pmoe.planner.costs import Fit, LineCost
from pmoe.planner.profile import Operations
from tests.pool import ranks
from tests.reference import Definition, relative_error
from tests.switched import switched_layer

D_MODEL, D_HIDDEN, AUX = 6, 12, 0.37
TOKENS = {1: (13,), 2: (9, 0), 4: (5, 0, 11, 2)}


@dataclass(frozen=True)
class Case:
    """A layer and its ranks.

    ep, esp: sizes of the mesh; None for a process group.
    options: options of MoELayer.
    """

    num_experts: int = 4
    top_k: int = 2
    ep: int | None = None
    esp: int | None = None
    reversed_mesh: bool = False
    shared: int | str | None = None
    load: str = "mixed"
    options: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(repr(self))


_meshes: dict[tuple[int, int, bool], DeviceMesh] = {}


def mesh_of(ep: int, esp: int, is_reversed: bool) -> DeviceMesh:
    key = (ep, esp, is_reversed)
    if key not in _meshes:
        names = ("esp", "ep") if is_reversed else ("ep", "esp")
        _meshes[key] = init_device_mesh("cpu", (esp, ep) if is_reversed else (ep, esp), mesh_dim_names=names)
    return _meshes[key]


def lines(alpha: float, message: float, compute: float) -> Operations:
    """Returns costs as if they had been measured: seconds of a launch, of a sent byte, and of a
    multiplication.
    """

    def fit(beta: float) -> Fit:
        return Fit(line=LineCost(alpha, beta), r_squared=1.0, num_sizes=3)

    return Operations(
        num_across=2,
        num_inside=2,
        gemm=fit(compute),
        all_to_all=fit(message),
        all_gather=fit(message),
        reduce_scatter=fit(message),
        all_reduce=fit(message),
        seconds=0.0,
    )


class Doubling(pmoe.Callback):
    """A callback whose hooks each change values in another way; sent rows have two columns more."""

    def before_moe_start(self, x: Tensor) -> Tensor:
        return x.sin()

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return torch.cat([rows * 2, rows[:, :2].exp()], dim=1)

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows[:, :-2] + rows[:, -1:].tanh()

    def before_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.square()

    def after_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.cos()

    def before_moe_end(self, y: Tensor) -> Tensor:
        return y * 3


def build(case: Case, world: int) -> pmoe.MoELayer:
    torch.manual_seed(7)
    mesh = {}
    if case.ep is not None and case.esp is not None and world > 1:
        mesh = {"mesh": mesh_of(case.ep, case.esp, case.reversed_mesh)}
    shared = Gated() if case.shared == "module" else case.shared
    layer = switched_layer(
        D_MODEL,
        D_HIDDEN,
        case.num_experts,
        case.top_k,
        dtype=torch.float64,
        shared_expert=shared,
        shared_gate=case.shared is not None,
        **mesh,
        **case.options,
    )
    with torch.no_grad():
        layer.gate.weight *= 3
        if case.load == "one expert":
            layer.gate.weight[-1, 0] += 40
    return layer


class Gated(nn.Module):
    """A shared expert of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D_MODEL, D_MODEL, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a(x).sigmoid()


def inputs(world: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    xs, grads = [], []
    for count in TOKENS[world]:
        x = torch.randn(count, D_MODEL, generator=generator, dtype=torch.float64)
        x[:, 0] = x[:, 0].abs() + 1
        xs.append(x)
        grads.append(torch.randn(count, D_MODEL, generator=generator, dtype=torch.float64))
    return xs, grads


def run(rank: int, world: int, case: Case) -> dict[str, Any]:
    layer = build(case, world)
    xs, grads = inputs(world)
    x = xs[rank].requires_grad_()
    y = layer(x)
    ((y * grads[rank]).sum() + AUX * layer.l_aux).backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "l_aux": layer.l_aux.detach(), "x": x.grad, **found}


class WithMore(Definition):
    """The plain definition with a shared expert and `Doubling` around it, for one rank at a time."""

    shared: Any = None
    doubling: bool = False

    def run_expert(self, e: int, token: Tensor) -> Tensor:
        if self.doubling:
            rows = torch.cat([token * 2, token[:2].exp()])
            token = rows[:-2] + rows[-1:].tanh()
        return super().run_expert(e, token)


def expected(world: int, case: Case) -> list[dict[str, Tensor]]:
    """Returns for each rank what `run` must return, computed by loops and autograd.

    The gradients of the shared expert are each rank's own.
    """
    alone = {
        name: value for name, value in case.options.items() if name not in ("dispatch", "combine", "nodes")
    }
    whole = build(replace(case, ep=None, esp=None, options=alone), 1)
    parameters = {name: value.detach().clone() for name, value in whole.named_parameters()}
    xs, grads = inputs(world)
    doubling = bool(case.options.get("callbacks"))
    kind = case.options.get("expert", "ffn")
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    own = [
        {name: value.clone().requires_grad_() for name, value in parameters.items() if "experts." not in name}
        for _ in range(world)
    ]
    experts = {name: value for name, value in leaves.items() if name.startswith("experts.")}
    rank_xs = [x.clone().requires_grad_() for x in xs]
    ys, auxes = [], []
    loss = torch.zeros((), dtype=torch.float64)
    for x, grad, dense in zip(rank_xs, grads, own, strict=True):
        y, aux = by_hand(case, kind, experts, dense, x, doubling)
        ys.append(y)
        auxes.append(aux)
        loss = loss + (y * grad).sum() + AUX * aux
    loss.backward()
    found = []
    for rank in range(world):
        gradients = {name: value.grad for name, value in experts.items()}
        gradients |= {name: value.grad for name, value in own[rank].items()}
        gradients["x"] = rank_xs[rank].grad
        gradients = {
            name: torch.zeros_like(parameters.get(name, xs[rank])) if value is None else value
            for name, value in gradients.items()
        }
        found.append({"y": ys[rank].detach(), "l_aux": auxes[rank].detach(), **gradients})
    return found


def by_hand(
    case: Case, kind: str, experts: dict[str, Tensor], dense: dict[str, Tensor], x: Tensor, doubling: bool
) -> tuple[Tensor, Tensor]:
    definition = WithMore(experts, case.top_k, kind, "gelu", None, case.options.get("capacity_factor"))
    if doubling:
        definition.doubling = True
        x = x.sin()
    if not doubling:
        y, aux = definition.rank(x, dense["gate.weight"])
    else:
        y, aux = doubled(definition, case, x, dense["gate.weight"])
    if case.shared is not None:
        gate = torch.sigmoid(x @ dense["shared_gate.weight"].t())
        y = y + gate * shared_by_hand(case, kind, dense, x)
    return (y * 3 if doubling else y), aux


def doubled(definition: WithMore, case: Case, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the plain definition with `Doubling`: results are squared before they return, and their
    cosines summed.

    Each row is computed by itself.
    """
    probability = torch.softmax(x @ gate.t(), dim=-1)
    _, aux = definition.rank(x, gate)
    rows = []
    for t in range(x.shape[0]):
        top = probability[t].topk(case.top_k).indices.tolist()
        weights = [probability[t, e] for e in top]
        total = sum(weights) if case.top_k > 1 else 1.0
        row = torch.zeros_like(x[t])
        for e, w in zip(top, weights, strict=True):
            row = row + (w / total * definition.run_expert(e, x[t])).square().cos()
        rows.append(row)
    return (torch.stack(rows) if rows else x * 1.0), aux


def shared_by_hand(case: Case, kind: str, dense: dict[str, Tensor], x: Tensor) -> Tensor:
    p = {name.removeprefix("shared_expert."): value for name, value in dense.items()}
    if case.shared == "module":
        return x * F.linear(x, p["local.0.a.weight"], p["local.0.a.bias"]).sigmoid()
    hidden = x @ p["w1"][0].t() + p["b1"][0]
    if kind == "swiglu":
        half = hidden.shape[1] // 2
        active = F.silu(hidden[:, :half]) * hidden[:, half:]
    else:
        active = F.gelu(hidden)
    return active @ p["w2"][0].t() + p["b2"][0]


def part_of(name: str, value: Tensor, case: Case, rank: int, world: int) -> Tensor:
    """Returns the part of a parameter of all experts that a rank holds."""
    ep, esp = (case.ep, case.esp) if case.ep is not None and case.esp is not None else (world, 1)
    at, shard = (rank % ep, rank // ep) if case.reversed_mesh else (rank // esp, rank % esp)
    local = case.num_experts // ep
    value = value[at * local : (at + 1) * local]
    width = D_HIDDEN // esp
    columns = slice(shard * width, (shard + 1) * width)
    if name == "experts.b2":
        return value
    if name == "experts.w2":
        return value[:, :, columns]
    halves = value.unflatten(1, (-1, D_HIDDEN))
    return halves[:, :, columns].flatten(1, 2)


def check(world: int, case: Case, tolerance: float = 1e-12) -> None:
    wanted = expected(world, case)
    for rank, got in enumerate(ranks(world).run(run, case)):
        assert set(got) == set(wanted[rank])
        for name, value in wanted[rank].items():
            value = part_of(name, value, case, rank, world) if name.startswith("experts.") else value
            assert got[name] is not None, f"rank {rank}, {name}: no gradient"
            error = relative_error(got[name], value)
            assert error < tolerance, f"rank {rank}, {name}: {error}"
