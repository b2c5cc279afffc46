"""Wrong input of the flexible layer: refused when it is built, or raised by every rank before rows are sent.

An error that comes later is raised where it happens, and the peers fail within the timeout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import pmoe
import pmoe.experts
import pmoe.gates
from pmoe.gates import Routing
from tests.pool import SHORT_TIMEOUT_SECONDS, Pool, ranks

D_MODEL, D_HIDDEN = 6, 12


class Broken(nn.Module):
    """A gate whose routing is spoilt by ``break_`` on one rank."""

    def __init__(self, fault: str, who: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, D_MODEL))
        self.fault, self.who = fault, who

    def forward(self, x: Tensor) -> Any:
        weight, expert = (x @ self.weight.t()).softmax(-1).max(-1, keepdim=True)
        given: dict[str, Any] = {"expert": expert, "weight": weight, "l_aux": weight.sum() * 0}
        if torch.distributed.get_rank() != self.who:
            return Routing(**given)
        num_tokens = x.shape[0]
        if self.fault == "index":
            given["expert"] = expert + 4
        elif self.fault == "nan":
            given["weight"] = weight * float("nan")
        elif self.fault == "shape":
            given["weight"] = weight[:-1]
        elif self.fault == "keep":
            given["keep"] = torch.ones(num_tokens + 1, 1, dtype=torch.bool)
        elif self.fault == "token":
            given["token"] = torch.arange(num_tokens).flip(0)
        elif self.fault == "float keep":
            given["keep"] = torch.ones(num_tokens, 1)
        elif self.fault == "float token":
            given["token"] = torch.arange(num_tokens).float()
        elif self.fault == "int weight":
            given["weight"] = expert
        elif self.fault == "wide weight":
            given["weight"] = weight.double()
        elif self.fault == "no weight":
            given["weight"] = None
        elif self.fault == "no loss":
            given["l_aux"] = None
        elif self.fault == "nothing":
            return expert
        return Routing(**given)


def message_of(call: Any) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def gate_job(rank: int, world: int, fault: str, who: int, options: dict[str, Any]) -> tuple[str, int, float]:
    options = dict(options)
    if options.pop("esp", False):
        options["mesh"] = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ep", "esp"))
    torch.manual_seed(1)
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 1, gate=Broken(fault, who), **options)
    told = message_of(lambda: layer(torch.randn(7, D_MODEL)))
    sent = layer.traffic.rows
    layer.gate.fault = "none"
    return told, sent, float(layer(torch.randn(7, D_MODEL)).sum().detach().isfinite())


GATES = {
    "index": ("indices outside 0..num_experts - 1", "indices outside 0..num_experts - 1"),
    "nan": ("weights that are not finite", "weights that are not finite"),
    "shape": ("gate (Broken) returned weight of shape (6, 1)", "its gate raised an error"),
    "keep": ("gate (Broken) returned keep of shape (8, 1)", "its gate raised an error"),
    "token": ("Routing.token that does not ascend", "Routing.token that does not ascend"),
    "float keep": (
        "gate (Broken) returned keep of shape (7, 1) and dtype torch.float32",
        "its gate raised an error",
    ),
    "float token": ("gate (Broken) returned token of shape (7,) and dtype", "its gate raised an error"),
    "int weight": ("gate (Broken) returned weight of dtype torch.int64", "its gate raised an error"),
    "no weight": ("gate (Broken): weight (None) must be a tensor", "its gate raised an error"),
    "no loss": ("gate (Broken): l_aux (None) must be a tensor", "its gate raised an error"),
    "nothing": ("gate (Broken) must return a pmoe.Routing", "its gate raised an error"),
}


@pytest.mark.parametrize("options", [{}, {"send_once": True}, {"esp": True}, {"memory_reuse": "S4"}], ids=str)
@pytest.mark.parametrize("fault", GATES)
def test_a_malformed_routing_of_one_rank_is_raised_by_all_before_any_row_travels(
    fault: str, options: dict[str, Any]
) -> None:
    own, others = GATES[fault]
    for rank, (told, sent, next_step) in enumerate(ranks(2).run(gate_job, fault, 1, options)):
        assert (own if rank == 1 else others) in told, (rank, told)
        assert "rank 1" in told or rank == 1
        assert sent == 0 and next_step == 1.0


def test_weights_that_one_rank_has_wider_travel_in_the_type_of_all() -> None:
    for told, sent, next_step in ranks(2).run(gate_job, "wide weight", 1, {}):
        assert told == "no error" and sent > 0 and next_step == 1.0


class Hooked(pmoe.Callback):
    def __init__(self, point: str, change: str) -> None:
        def hook(rows: Tensor, chunk: int = 0) -> Any:
            if change == "rows":
                return rows[:-1] if rows.shape[0] else torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            if change == "columns":
                return rows[:, :-1]
            if change == "raises":
                raise ValueError("this hook fails")
            return None

        self.hook, self.point = hook, point


def hooked(point: str, change: str) -> pmoe.Callback:
    kind = type("Spoiling", (Hooked,), {point: lambda self, *given: self.hook(*given)})
    made: pmoe.Callback = kind(point, change)
    return made


def hook_job(rank: int, world: int, point: str, change: str) -> str:
    torch.manual_seed(1)
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 1, pipeline=2, callbacks=[hooked(point, change)])
    return message_of(lambda: layer(torch.randn(7, D_MODEL)))


POINTS = ["before_dispatch", "after_dispatch", "before_combine", "after_combine"]


@pytest.mark.parametrize(
    "change, rule",
    [
        ("rows", "it must return as many rows as it was given"),
        ("columns", "it must return rows like the layer's"),
        ("nothing", "must return a tensor, not NoneType"),
    ],
)
@pytest.mark.parametrize("point", POINTS)
def test_what_a_hook_may_not_do_is_told_by_its_name(point: str, change: str, rule: str) -> None:
    # Every rank fails at the same place: none is out of step afterwards.
    for told in ranks(2).run(hook_job, point, change):
        assert f"Spoiling.{point}" in told and rule in told, told


def one_hook_job(rank: int, world: int, point: str) -> str:
    torch.manual_seed(1)
    callbacks = [hooked(point, "raises")] if rank == 0 else [pmoe.Callback()]
    kind = type("Plain", (pmoe.Callback,), {point: lambda self, rows, *chunk: rows})
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 1, pipeline=2, callbacks=[*callbacks, kind()])
    return message_of(lambda: layer(torch.randn(7, D_MODEL)))


@pytest.mark.parametrize("point", [POINTS[0], *(pytest.param(p, marks=pytest.mark.slow) for p in POINTS[1:])])
def test_a_hook_that_fails_on_one_rank_raises_there_and_its_peers_name_a_stage(point: str) -> None:
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        first, second = pool.run(one_hook_job, point)
        assert first == "ValueError: this hook fails"
        # A peer that has all it needs of this chunk may get through.
        assert second == "no error" or ("RuntimeError" in second and "rank 1 of 2 failed in" in second)


def test_a_start_hook_that_fails_on_one_rank_is_raised_by_all() -> None:
    first, second = ranks(2).run(start_job)
    assert "before_moe_start" in first and "this hook fails" in first
    assert second == "FaultError: rank 0: a callback raised an error in before_moe_start"


def start_job(rank: int, world: int) -> str:
    callbacks = [hooked("before_moe_start", "raises")] if rank == 0 else [pmoe.Callback()]
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 1, callbacks=callbacks)
    return message_of(lambda: layer(torch.randn(7, D_MODEL)))


def build_job(rank: int, world: int) -> list[str]:
    """Returns the errors of layers that are refused when they are built, the same on every rank."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "esp"))
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def build(**options: Any) -> str:
        sizes = {"d_model": D_MODEL, "d_hidden": D_HIDDEN, "num_experts": 4, "top_k": 2, **options}
        return message_of(lambda: pmoe.MoELayer(**sizes))

    return [
        build(mesh=mesh, d_hidden=9),
        build(mesh=other),
        build(mesh=mesh, group=torch.distributed.group.WORLD),
        build(mesh=mesh, expert=nn.Identity),
        build(num_experts=1, top_k=1),
        build(dispatch="hierarchical_2d", nodes=[0]),
        build(dispatch="tree"),
        build(combine=3),
        build(order="random"),
        build(callbacks=[3]),
        build(shared_gate=True),
        build(shared_expert=0),
        build(gate="soft", capacity_factor=1.0),
        build(gate="hash", z_loss_weight=0.1),
        build(gate="soft", shared_expert=8),
        build(gate=pmoe.gates.ExpertChoiceGate(D_MODEL, 4, 2), capacity_factor=1.0),
        build(gate=pmoe.gates.TopKGate(D_MODEL, 4, 2), memory_budget="1GiB"),
        build(mesh=mesh, expert=pmoe.experts.FFNExperts(D_MODEL, D_HIDDEN, 4)),
        build(mesh=3),
        build(callbacks=pmoe.Callback()),
        build(send_once="yes"),
        build(shared_expert="ffn"),
        build(send_once=True, pipeline=2, pipeline_backward=4),
        build(send_once=True, memory_budget="1GiB"),
        build(pipeline="fast"),
    ]


BUILT = [
    'd_hidden (9) must be divisible by the size of the mesh\'s "esp" (2)',
    "mesh (dimensions ('tp',)) must have the dimensions",
    "group and mesh must not both be given",
    "must be ffn or swiglu, or a pmoe.experts.Experts of this rank's columns",
    'num_experts (1) must be divisible by the size of group (2); split fewer by a mesh with "esp"',
    "nodes ([0]) must have 2 entries",
    "dispatch ('tree') must be a pmoe.Dispatch or one of flat, hierarchical_1d, hierarchical_2d",
    "combine (3) must be a pmoe.Combine",
    "order ('random') must be a pmoe.Order or one of sorted, einsum",
    "callbacks (3) must be pmoe.Callback objects",
    "shared_gate (True) must be False without a shared_expert",
    "shared_expert (0) must be at least 1",
    "capacity_factor (1.0) must be None: SoftMoE drops nothing",
    "z_loss_weight (0.1) must be left out with gate='hash'",
    "shared_expert (8) must be None with SoftMoE",
    "capacity_factor (1.0) must be given to the gate (ExpertChoiceGate)",
    "memory_budget ('1GiB') must be left out where gate (TopKGate) is a module",
    "must hold this rank's part of the hidden columns",
    "mesh (3) must be a torch.distributed.device_mesh.DeviceMesh",
    "must be a list of pmoe.Callback objects",
    "send_once ('yes') must be True or False",
    "shared_expert ('ffn') must be None, an int or a torch.nn.Module",
    "pipeline_backward (4) must be pipeline (2) or None if rows travel once",
    "memory_budget ('1GiB') must be left out where rows travel once",
    "pipeline ('fast') must be False, True",
]


def test_what_cannot_be_built_is_refused_alike_on_every_rank() -> None:
    for messages in ranks(2).run(build_job):
        for message, rule in zip(messages, BUILT, strict=True):
            assert rule in message, message


def ids_job(rank: int, world: int) -> list[str]:
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 1, gate="hash")
    x = torch.randn(3, D_MODEL)
    ids = [None, torch.arange(2), torch.arange(3)] if rank == 0 else [torch.arange(3)] * 3
    return [message_of(lambda given=given: layer(x, token_ids=given)) for given in ids]


def test_token_ids_that_are_missing_on_one_rank_are_told_by_all() -> None:
    first, second = ranks(2).run(ids_job)
    assert "token_ids (None) must be given, one for each of the 3 tokens" in first[0]
    assert "token_ids ((2,)) must be given" in first[1]
    assert all("rank 0: its gate raised an error" in told for told in second[:2])
    assert first[2] == second[2] == "no error"
