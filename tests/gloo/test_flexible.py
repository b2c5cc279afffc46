"""The flexible layer equals the plain definition to 1e-12: experts sharded over the ranks of a node, rows
that travel once or in a hierarchy, shared experts, orders, and callbacks, in combination (FSMoE)."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import pmoe
import pmoe.gates
import pmoe.layer.orders
from pmoe.engine.plan import make_plan
from pmoe.planner.costs import Fit, LineCost
from pmoe.planner.profile import Operations
from pmoe.runners import solved as solve
from tests.pool import ranks
from tests.reference import Definition, relative_error
from tests.spread import spread

D_MODEL, D_HIDDEN, AUX = 6, 12, 0.37
TOKENS = {1: (13,), 2: (9, 0), 4: (5, 0, 11, 2)}


@dataclass(frozen=True)
class Case:
    """ep, esp: the mesh, None for a group. options: of MoELayer."""

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


class Doubling(pmoe.Callback):
    """Each hook changes values in a way of its own; what is sent has two columns more."""

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
    layer = pmoe.MoELayer(
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
    """A user's shared expert."""

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
    """The definition with a shared expert and `Doubling` around it, one rank at a time."""

    shared: Any = None
    doubling: bool = False

    def run_expert(self, e: int, token: Tensor) -> Tensor:
        if self.doubling:
            rows = torch.cat([token * 2, token[:2].exp()])
            token = rows[:-2] + rows[-1:].tanh()
        return super().run_expert(e, token)


def expected(world: int, case: Case) -> list[dict[str, Tensor]]:
    """By rank what `run` finds, from loops and autograd; the shared expert's gradients are each rank's
    own."""
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
    """Results are squared before they return and their cosines summed: every row by itself."""
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
    """What of the whole experts' parameter rank holds."""
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


MESHES = [(2, 1, 2), (2, 2, 1), (4, 2, 2), (4, 1, 4), (4, 4, 1)]
"""world, ep, esp"""


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("world, ep, esp", MESHES)
def test_sharded_experts_equal_the_definition(world: int, ep: int, esp: int, expert: str, n: int) -> None:
    for top_k, capacity in ((1, None), (2, 0.6)):
        options = {"pipeline": n, "expert": expert, "capacity_factor": capacity}
        check(world, Case(4, top_k, ep, esp, options=options))


@pytest.mark.parametrize("one_lane", [False, True])
def test_fewer_experts_than_ranks_and_any_order_of_the_mesh(one_lane: bool) -> None:
    options = {"pipeline": 2, "one_lane": one_lane}
    check(4, Case(2, 1, 2, 2, options=options))
    check(4, Case(2, 2, 2, 2, reversed_mesh=True, options=options))
    check(4, Case(1, 1, 1, 4, options=options))


PAIRS = [
    pmoe.Restore(d, h) for d in ("keep", "offload", "communicate") for h in ("keep", "offload", "recompute")
]


@pytest.mark.parametrize(
    "pair, world, ep, esp, n, n_backward",
    spread(PAIRS, [(2, 1, 2), (4, 2, 2), (4, 1, 4)], [(1, None), (3, None), (2, 4), (4, 2)], every=4),
)
def test_sharded_experts_with_memory_reuse_equal_the_definition(
    pair: pmoe.Restore, world: int, ep: int, esp: int, n: int, n_backward: int | None
) -> None:
    for load in ("mixed", "one expert"):
        options = {"pipeline": n, "pipeline_backward": n_backward, "memory_reuse": pair}
        check(world, Case(4, 2, ep, esp, load=load, options=options))


HIERARCHIES = [("hierarchical_1d", 1), ("hierarchical_1d", 2), ("hierarchical_2d", 1), ("hierarchical_2d", 2)]


@pytest.mark.parametrize("send_once", [False, True])
@pytest.mark.parametrize("name, nodes", HIERARCHIES)
@pytest.mark.parametrize("bypass_local", [False, True])
def test_hierarchical_collectives_equal_the_definition(
    name: str, nodes: int, send_once: bool, bypass_local: bool
) -> None:
    for world, reuse in itertools.product((2, 4), (False, "S4")):
        options = {"dispatch": name, "nodes": nodes, "send_once": send_once, "bypass_local": bypass_local}
        check(world, Case(8, 3, options={**options, "pipeline": 2, "memory_reuse": reuse}))


@pytest.mark.parametrize("combine", ["flat", "hierarchical_1d", "hierarchical_2d"])
def test_dispatch_and_combine_may_differ(combine: str) -> None:
    options = {"dispatch": "hierarchical_2d", "combine": combine, "nodes": [0, 1, 0, 1], "pipeline": 2}
    check(4, Case(4, 2, options=options))


@pytest.mark.parametrize("world, top_k, n", spread([1, 2, 4], [1, 2, 4, 8], [1, 2, 3], every=2))
def test_rows_that_travel_once_equal_the_definition(world: int, top_k: int, n: int) -> None:
    for capacity, load in ((None, "mixed"), (0.6, "mixed"), (None, "one expert")):
        options = {"send_once": True, "pipeline": n, "capacity_factor": capacity}
        check(world, Case(8, top_k, load=load, options=options))


@pytest.mark.parametrize("world, ep, esp", [(2, 1, 2), (4, 2, 2)])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_rows_that_travel_once_with_memory_reuse_and_shards(
    pair: pmoe.Restore, world: int, ep: int, esp: int
) -> None:
    options = {"send_once": True, "pipeline": 3, "memory_reuse": pair}
    check(world, Case(8, 4, options=options))
    check(world, Case(4, 3, ep, esp, options=options))


@pytest.mark.parametrize("shared", [5, "module"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_shared_experts_equal_the_definition(world: int, shared: int | str, expert: str) -> None:
    for reuse in (False, "S1", "S4"):
        options = {"pipeline": 2, "memory_reuse": reuse, "expert": expert}
        check(world, Case(4, 2, shared=shared, options=options))
        if world == 4:
            check(world, Case(4, 2, 2, 2, shared=shared, options=options))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("reuse", [False, "S4", pmoe.Restore("offload", "keep")], ids=str)
@pytest.mark.parametrize("shared", [None, 5])
def test_callbacks_equal_the_definition(world: int, reuse: Any, shared: int | None) -> None:
    for n in (1, 3):
        options = {"pipeline": n, "memory_reuse": reuse, "callbacks": (Doubling(),)}
        check(world, Case(4, 2, shared=shared, options=options))


@pytest.mark.parametrize(
    "reuse, world, ep, esp, n, one_lane",
    spread(
        [False, "S4", pmoe.Restore("offload", "keep")],
        [(2, 1, 2), (4, 2, 2), (4, 1, 4)],
        [1, 2, 3],
        [False, True],
        every=3,
    ),
)
def test_callbacks_of_sharded_experts_equal_the_definition(
    world: int, ep: int, esp: int, reuse: Any, n: int, one_lane: bool
) -> None:
    options = {"pipeline": n, "memory_reuse": reuse, "callbacks": (Doubling(),), "one_lane": one_lane}
    check(world, Case(4, 2, ep, esp, shared=5, options=options))


class Sine(pmoe.Callback):
    """One hook alone: the others are not even called."""


def sine(point: str) -> pmoe.Callback:
    return type(f"Sine_{point}", (Sine,), {point: lambda self, rows, chunk: rows.sin()})()


def sine_job(
    rank: int, world: int, point: str, esp: int, reuse: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Against the flat layer's: a hook on all rows of a chunk is the same wherever rows go."""
    xs, grads = inputs(world)
    found = []
    for sharded in (True, False):
        torch.manual_seed(7)
        mesh = {"mesh": mesh_of(world // esp, esp, False)} if sharded else {}
        layer = pmoe.MoELayer(
            D_MODEL,
            D_HIDDEN,
            4,
            2,
            dtype=torch.float64,
            pipeline=2,
            memory_reuse=reuse,
            callbacks=[sine(point)],
            **mesh,
        )
        x = xs[rank].clone().requires_grad_()
        y = layer(x)
        (y * grads[rank]).sum().backward()
        found += [y.detach(), x.grad]
    return tuple(found)


@pytest.mark.parametrize("reuse", [False, "S4"])
@pytest.mark.parametrize("point", ["before_dispatch", "after_dispatch", "before_combine", "after_combine"])
def test_one_hook_alone_is_the_same_for_sharded_experts(point: str, reuse: Any) -> None:
    for y, dx, y_flat, dx_flat in ranks(4).run(sine_job, point, 2, reuse):
        assert relative_error(y, y_flat) < 1e-12
        assert relative_error(dx, dx_flat) < 1e-12


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_the_einsum_order_equals_the_definition(world: int, n: int) -> None:
    for once, capacity in ((False, 0.6), (True, None)):
        options = {"pipeline": n, "order": "einsum", "send_once": once, "capacity_factor": capacity}
        check(world, Case(4, 2, options=options))


# ---- gates: a layer with any gate is the sum of its experts' outputs times the gate's own weights -----


GATES = [name for name in pmoe.gates.GATES if name not in ("noisy_topk", "random")] + ["noisy_topk"]


def gated_job(rank: int, world: int, gate: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs and gradients of the layer, and of a loop over what its gate says, on this rank's tokens."""
    torch.manual_seed(7)
    capacity, top_k = None if gate == "soft" else 0.9, 1 if gate == "switch" else 2
    layer = pmoe.MoELayer(
        D_MODEL, D_HIDDEN, 4, top_k, gate=gate, capacity_factor=capacity, dtype=torch.float64, **options
    ).eval()
    whole = pmoe.MoELayer(
        D_MODEL, D_HIDDEN, 4, top_k, gate=gate, capacity_factor=capacity, dtype=torch.float64, group=alone()
    ).eval()
    whole.gate.load_state_dict(layer.gate.state_dict())
    whole.experts.load_state_dict(gathered(layer, world))
    xs, grads = inputs(world)
    ids = torch.arange(xs[rank].shape[0]) * 7 + rank
    x = xs[rank].requires_grad_()
    y = layer(x, token_ids=ids)
    (y * grads[rank]).sum().backward()
    x_plain = xs[rank].detach().clone().requires_grad_()
    y_plain = plainly(whole, x_plain, ids)
    (y_plain * grads[rank]).sum().backward()
    found = {"y": y.detach() - y_plain.detach(), "x": x.grad - x_plain.grad}
    for name, parameter in layer.gate.named_parameters():
        other = dict(whole.gate.named_parameters())[name].grad
        other = torch.zeros_like(parameter) if other is None else other
        found[name] = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad) - other
    return found


_alone: list[torch.distributed.ProcessGroup] = []


def alone() -> torch.distributed.ProcessGroup:
    """A group of this rank only."""
    if not _alone:
        groups = [torch.distributed.new_group([rank]) for rank in range(torch.distributed.get_world_size())]
        _alone.append(groups[torch.distributed.get_rank()])
    return _alone[0]


def gathered(layer: pmoe.MoELayer, world: int) -> dict[str, Tensor]:
    found = {}
    for name, value in layer.experts.state_dict().items():
        parts = [torch.empty_like(value) for _ in range(world)]
        torch.distributed.all_gather(parts, value.contiguous())
        found[name] = torch.cat(parts)
    return found


def plainly(layer: pmoe.MoELayer, x: Tensor, ids: Tensor) -> Tensor:
    """The definition over a `Routing`: every named row through its expert, times its weight, to its token."""
    gate = layer.gate
    routing = gate(x, ids) if gate.needs_token_ids else gate(x)
    rows = x if routing.mix is None else routing.mix.dispatch.t() @ x
    keep = routing.keep
    if keep is None and layer.capacity_factor is not None and not gate.decides_capacity:
        keep = kept_in_order(routing.expert, layer.capacity_factor, layer.num_experts)
    outs = [torch.zeros(D_MODEL, dtype=torch.float64) for _ in range(rows.shape[0])]
    experts = layer.experts
    for s in range(routing.expert.shape[0]):
        t = s if routing.token is None else int(routing.token[s])
        for k in range(routing.expert.shape[1]):
            if keep is not None and not keep[s, k]:
                continue
            e = int(routing.expert[s, k])
            hidden = F.gelu(experts.w1[e] @ rows[t] + experts.b1[e])
            outs[t] = outs[t] + routing.weight[s, k] * (experts.w2[e] @ hidden + experts.b2[e])
    y = torch.stack(outs) if outs else rows * 0.0
    return y if routing.mix is None else routing.mix.combine @ y


def kept_in_order(expert_TK: Tensor, factor: float, num_experts: int) -> Tensor:
    capacity = math.ceil(factor * expert_TK.numel() / num_experts)
    used = [0] * num_experts
    keep = torch.zeros_like(expert_TK, dtype=torch.bool)
    for s, k in itertools.product(range(expert_TK.shape[0]), range(expert_TK.shape[1])):
        e = int(expert_TK[s, k])
        keep[s, k] = used[e] < capacity
        used[e] += 1
    return keep


OPTIONS = [{"pipeline": 1}, {"pipeline": 3, "memory_reuse": "S4"}, {"pipeline": 2, "send_once": True}]


@pytest.mark.parametrize("world, gate, options", spread([1, 2, 4], GATES, OPTIONS, every=3))
def test_every_gate_runs_in_every_layer(world: int, gate: str, options: dict[str, Any]) -> None:
    for found in ranks(world).run(gated_job, gate, options):
        for name, difference in found.items():
            assert difference.numel() == 0 or difference.abs().max() < 1e-11, name


# ---- pipeline="solve" -----------------------------------------------------------------------------


def lines(alpha: float, message: float, compute: float) -> Operations:
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


def solved_job(rank: int, world: int, case: Case, operations: Operations) -> tuple[dict[str, Any], list[int]]:
    seen = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        plan = make_plan(*args, **kwargs)
        seen.extend([len(plan.forward.chunks), len(plan.backward.chunks)])
        return plan

    with (
        mock.patch.object(solve, "operations_of", lambda *_: operations),
        mock.patch.object(pmoe.layer.orders, "make_plan", noted),
    ):
        return run(rank, world, case), seen


@pytest.mark.parametrize("reuse", [False, pmoe.Restore("keep", "keep"), "S4"], ids=str)
@pytest.mark.parametrize("world, ep, esp", [(2, None, None), (2, 1, 2), (4, 2, 2)])
def test_solved_degrees_follow_the_costs_and_change_no_result(
    world: int, ep: int | None, esp: int | None, reuse: Any
) -> None:
    case = Case(4, 2, ep, esp, options={"pipeline": "solve", "memory_reuse": reuse})
    wanted = expected(world, replace(case, options={"memory_reuse": reuse}))
    degrees = {}
    for name, costs in {
        "messages cost nothing": lines(1e-3, 0.0, 1e-9),
        "chunks cost nothing": lines(0.0, 1e-6, 1e-6),
        "backward alone is worth a second chunk": lines(2e-4, 1.5e-6, 1e-6),
    }.items():
        for rank, (got, seen) in enumerate(ranks(world).run(solved_job, case, costs)):
            degrees.setdefault(name, seen)
            assert seen == degrees[name], "the same on every rank"
            for key, value in wanted[rank].items():
                value = part_of(key, value, case, rank, world) if key.startswith("experts.") else value
                assert relative_error(got[key], value) < 1e-12, f"{name}: rank {rank}, {key}"
    assert degrees["messages cost nothing"] == [1, 1]
    assert degrees["chunks cost nothing"] == [16, 16]
    if reuse is False:
        assert len(set(degrees["backward alone is worth a second chunk"])) == 1


def measured_job(rank: int, world: int, folder: str) -> bool:
    os.environ["PMOE_CACHE"] = folder
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, pipeline="solve", mesh=mesh_of(1, 2, False))
    layer(torch.randn(64, D_MODEL)).sum().backward()
    user = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, pipeline="solve", expert=Gated)
    user(torch.randn(64, D_MODEL, dtype=torch.float64)).sum().backward()
    return all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.slow
def test_solved_degrees_are_measured_on_the_live_groups(tmp_path: Any) -> None:
    assert all(ranks(2).run(measured_job, str(tmp_path)))


def chosen_job(rank: int, world: int, folder: str, options: dict[str, Any]) -> float:
    """A sharded layer that chooses for itself, against one that does not."""
    os.environ["PMOE_CACHE"] = folder
    found = []
    for given in ({"pipeline": 1}, options):
        torch.manual_seed(7)
        layer = pmoe.MoELayer(
            D_MODEL, D_HIDDEN, 4, 2, dtype=torch.float64, mesh=mesh_of(world // 2, 2, False), **given
        )
        x = torch.randn(1500 + rank, D_MODEL, dtype=torch.float64, requires_grad=True)
        layer(x).square().sum().backward()
        found.append(torch.cat([x.grad.flatten(), *(p.grad.flatten() for p in layer.parameters())]))
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": True},
        {"pipeline": True, "memory_reuse": True},
        {"pipeline": 2, "memory_reuse": True, "memory_budget": "64MiB"},
    ],
    ids=str,
)
def test_sharded_layers_choose_for_themselves(options: dict[str, Any], tmp_path: Any) -> None:
    assert max(ranks(2).run(chosen_job, str(tmp_path), options)) < 1e-12
