"""The flexible layer equals the plain definition to 1e-12 (FSMoE).

Its features are combined: sharded experts, rows that are sent only once or in a hierarchy, shared experts,
orders and callbacks.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import pmoe
import pmoe.engine.plan.make_plan
import pmoe.gates
from pmoe.choose import solve
from pmoe.engine.plan.make_plan import make_plan
from pmoe.planner.profile import Operations
from tests.gloo.flexible import (
    D_HIDDEN,
    D_MODEL,
    Case,
    Doubling,
    Gated,
    check,
    expected,
    inputs,
    lines,
    mesh_of,
    part_of,
    run,
)
from tests.pool import ranks
from tests.reference import relative_error
from tests.spread import named, spread

MESHES = [(2, 1, 2), (2, 2, 1), (4, 2, 2), (4, 1, 4), (4, 4, 1)]
"""(world, ep, esp)"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world, ep, esp, expert, n", spread(MESHES, ["ffn", "swiglu"], [1, 2, 3], every=4))
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


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "pair, world, ep, esp, n, n_backward",
    spread(PAIRS, [(2, 1, 2), (4, 2, 2), (4, 1, 4)], [(1, None), (3, None), (2, 4), (4, 2), (3, 2)], every=9),
)
def test_sharded_experts_with_memory_reuse_equal_the_definition(
    pair: pmoe.Restore, world: int, ep: int, esp: int, n: int, n_backward: int | None
) -> None:
    for load in ("mixed", "one expert"):
        options = {"pipeline": n, "pipeline_backward": n_backward, "memory_reuse": pair}
        check(world, Case(4, 2, ep, esp, load=load, options=options))


HIERARCHIES = [("hierarchical_1d", 1), ("hierarchical_1d", 2), ("hierarchical_2d", 1), ("hierarchical_2d", 2)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "world, name, nodes, send_once, bypass_local, reuse",
    spread([2, 4], HIERARCHIES, [False, True], [False, True], [False, "S4"], every=9),
)
def test_hierarchical_collectives_equal_the_definition(
    world: int, name: str, nodes: int, send_once: bool, bypass_local: bool, reuse: bool | str
) -> None:
    options = {"dispatch": name, "nodes": nodes, "send_once": send_once, "bypass_local": bypass_local}
    check(world, Case(8, 3, options={**options, "pipeline": 2, "memory_reuse": reuse}))


@pytest.mark.parametrize("combine", ["flat", "hierarchical_1d", "hierarchical_2d"])
def test_dispatch_and_combine_may_differ(combine: str) -> None:
    options = {"dispatch": "hierarchical_2d", "combine": combine, "nodes": [0, 1, 0, 1], "pipeline": 2}
    check(4, Case(4, 2, options=options))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world, top_k, n", spread([1, 2, 4], [1, 2, 4, 8], [1, 2, 3], every=7))
def test_rows_that_travel_once_equal_the_definition(world: int, top_k: int, n: int) -> None:
    for capacity, load in ((None, "mixed"), (0.6, "mixed"), (None, "one expert")):
        options = {"send_once": True, "pipeline": n, "capacity_factor": capacity}
        check(world, Case(8, top_k, load=load, options=options))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pair, world, ep, esp", spread(PAIRS, [(2, 1, 2), (4, 2, 2)], every=2), ids=named)
def test_rows_that_travel_once_with_memory_reuse_and_shards(
    pair: pmoe.Restore, world: int, ep: int, esp: int
) -> None:
    options = {"send_once": True, "pipeline": 3, "memory_reuse": pair}
    check(world, Case(8, 4, options=options))
    check(world, Case(4, 3, ep, esp, options=options))


@pytest.mark.parametrize(
    "world, shared, expert", spread([1, 2, 4], [5, "module"], ["ffn", "swiglu"], every=4)
)
def test_shared_experts_equal_the_definition(world: int, shared: int | str, expert: str) -> None:
    for reuse in (False, "S1", "S4"):
        options = {"pipeline": 2, "memory_reuse": reuse, "expert": expert}
        check(world, Case(4, 2, shared=shared, options=options))
        if world == 4:
            check(world, Case(4, 2, 2, 2, shared=shared, options=options))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world, reuse, shared",
    spread([1, 2, 4], [False, "S4", pmoe.Restore("offload", "keep")], [None, 5], every=3),
    ids=named,
)
def test_callbacks_equal_the_definition(world: int, reuse: Any, shared: int | None) -> None:
    for n in (1, 3):
        options = {"pipeline": n, "memory_reuse": reuse, "callbacks": (Doubling(),)}
        check(world, Case(4, 2, shared=shared, options=options))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "reuse, world, ep, esp, n, one_lane",
    spread(
        [False, "S4", pmoe.Restore("offload", "keep")],
        [(2, 1, 2), (4, 2, 2), (4, 1, 4)],
        [1, 2, 3],
        [False, True],
        every=7,
    ),
)
def test_callbacks_of_sharded_experts_equal_the_definition(
    world: int, ep: int, esp: int, reuse: Any, n: int, one_lane: bool
) -> None:
    options = {"pipeline": n, "memory_reuse": reuse, "callbacks": (Doubling(),), "one_lane": one_lane}
    check(world, Case(4, 2, ep, esp, shared=5, options=options))


class Sine(pmoe.Callback):
    """A callback with one hook; the others are not even called."""


def sine(point: str) -> pmoe.Callback:
    return type(f"Sine_{point}", (Sine,), {point: lambda self, rows, chunk: rows.sin()})()


def sine_job(
    rank: int, world: int, point: str, esp: int, reuse: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compares a layer with one hook with the flat layer: a hook on all rows of a chunk is the same
    everywhere.
    """
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


POINTS = ["before_dispatch", "after_dispatch", "before_combine", "after_combine"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("point, reuse", spread(POINTS, [False, "S4"], every=2))
def test_one_hook_alone_is_the_same_for_sharded_experts(point: str, reuse: Any) -> None:
    for y, dx, y_flat, dx_flat in ranks(4).run(sine_job, point, 2, reuse):
        assert relative_error(y, y_flat) < 1e-12
        assert relative_error(dx, dx_flat) < 1e-12


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_the_einsum_order_equals_the_definition(world: int, n: int) -> None:
    for once, capacity in ((False, 0.6), (True, None)):
        options = {"pipeline": n, "order": "einsum", "send_once": once, "capacity_factor": capacity}
        check(world, Case(4, 2, options=options))


# ---- gates: a layer with any gate is the sum of its experts' outputs times the gate's own weights

GATES = [name for name in pmoe.gates.GATES if name not in ("noisy_topk", "random")] + ["noisy_topk"]


def gated_job(rank: int, world: int, gate: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Returns outputs and gradients of the layer, and those of a loop over its gate's routing.

    The tokens are this rank's.
    """
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
    """Returns a group with this rank only."""
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


@pytest.mark.parametrize("world, gate, options", spread([1, 2, 4], GATES, OPTIONS, every=9))
def test_every_gate_runs_in_every_layer(world: int, gate: str, options: dict[str, Any]) -> None:
    for found in ranks(world).run(gated_job, gate, options):
        for name, difference in found.items():
            assert difference.numel() == 0 or difference.abs().max() < 1e-11, name


# ---- pipeline="solve"


def solved_job(rank: int, world: int, case: Case, operations: Operations) -> tuple[dict[str, Any], list[int]]:
    seen = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        plan = make_plan(*args, **kwargs)
        seen.extend([len(plan.forward.chunks), len(plan.backward.chunks)])
        return plan

    with (
        mock.patch.object(solve, "module_lines", lambda *_: (operations, solve.ModuleLines())),
        mock.patch.object(pmoe.engine.plan.make_plan, "make_plan", noted),
    ):
        return run(rank, world, case), seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "reuse, world, ep, esp",
    spread(
        [False, pmoe.Restore("keep", "keep"), "S4"],
        [(2, None, None), (2, 1, 2), (4, 2, 2)],
        every=2,
    ),
    ids=named,
)
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
    # Where rows stay, computing them is enough to hide behind from some n on; of equals the fewest chunks.
    assert min(degrees["chunks cost nothing"]) == 16 if esp else min(degrees["chunks cost nothing"]) > 1
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


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a cache for all tests, so that this machine is measured only once."""
    return tmp_path_factory.mktemp("measured")


def chosen_job(rank: int, world: int, folder: str, options: dict[str, Any]) -> float:
    """Compares a sharded layer that makes its own choices with one that does not."""
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


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": True},
        {"pipeline": True, "memory_reuse": True},
        {"pipeline": 2, "memory_reuse": True, "memory_budget": "64MiB"},
    ],
    ids=str,
)
def test_sharded_layers_choose_for_themselves(options: dict[str, Any], measured: Path) -> None:
    assert max(ranks(2).run(chosen_job, str(measured), options)) < 1e-12
