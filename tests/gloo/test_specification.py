"""The specification: for every number of ranks and chunks the layer equals the plain definition to 1e-12."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

import pmoe
from tests.pool import ranks
from tests.reference import Definition, relative_error
from tests.spread import named, spread
from tests.switched import switched_layer

D_MODEL, D_HIDDEN, AUX = 6, 10, 0.37
TOKENS = {1: (13,), 2: (9, 0), 4: (5, 0, 11, 2)}


@dataclass(frozen=True)
class Case:
    n: int | bool
    top_k: int
    local_experts: int
    capacity_factor: float | None = None
    load: str = "mixed"
    expert: str = "ffn"
    activation: str = "gelu"
    bias: bool = True
    gate: str = "topk"
    bypass_local: bool = True
    sequential: bool = False
    memory_reuse: bool | str | pmoe.Restore = False
    n_backward: int | None = None


def build(case: Case, world: int) -> pmoe.MoELayer:
    """Builds the layer under one seed. ``load`` changes the gate's weight: x's first column is positive."""
    torch.manual_seed(7)
    layer = switched_layer(
        D_MODEL,
        D_HIDDEN,
        case.local_experts * world,
        case.top_k,
        gate=case.gate,
        expert=case.expert,
        activation=case.activation,
        bias=case.bias,
        capacity_factor=case.capacity_factor,
        pipeline=case.n,
        dtype=torch.float64,
        bypass_local=case.bypass_local,
        sequential=case.sequential,
        memory_reuse=case.memory_reuse,
        pipeline_backward=case.n_backward,
    )
    with torch.no_grad():
        layer.gate.weight *= 3
        if case.load == "one expert":
            layer.gate.weight[-1, 0] += 40
        if case.load == "some experts get none":
            layer.gate.weight[::2, 0] -= 40
    return layer


def inputs(world: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    xs, grads = [], []
    for count in TOKENS[world]:
        x = torch.randn(count, D_MODEL, generator=generator, dtype=torch.float64)
        x[:, 0] = x[:, 0].abs() + 1
        xs.append(x)
        grads.append(torch.randn(count, D_MODEL, generator=generator, dtype=torch.float64))
    return xs, grads


def run(rank: int, world: int, case: Case) -> dict[str, torch.Tensor]:
    layer = build(case, world)
    xs, grads = inputs(world)
    x = xs[rank].requires_grad_()
    y = layer(x)
    ((y * grads[rank]).sum() + AUX * layer.l_aux).backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "l_aux": layer.l_aux.detach(), "x": x.grad, **found}


def check(world: int, case: Case, tolerance: float = 1e-12) -> None:
    whole = build(Case(**{**case.__dict__, "local_experts": case.local_experts * world}), 1)
    definition = Definition(
        {name: value.detach() for name, value in whole.named_parameters()},
        case.top_k,
        case.expert,
        case.activation,
        False if case.gate == "switch" else None,
        case.capacity_factor,
    )
    ys, aux, gradients = definition.gradients(*inputs(world), AUX)
    got_by_rank = ranks(world).run(run, case)
    for rank, got in enumerate(got_by_rank):
        mine = slice(rank * case.local_experts, (rank + 1) * case.local_experts)
        expected = {"y": ys[rank], "l_aux": aux[rank], **gradients[rank]}
        assert set(got) == set(expected)
        for name, value in expected.items():
            value = value[mine] if name.startswith("experts.") else value
            error = relative_error(got[name], value)
            assert error < tolerance, f"rank {rank}, {name}: {error}"


SIZES = [
    (world, top_k, local_experts)
    for world, top_k, local_experts in itertools.product([1, 2, 4], [1, 2, 4], [1, 4])
    if top_k <= world * local_experts
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("world, top_k, local_experts, n", spread(SIZES, [1, 2, 3, 8], every=3))
def test_output_and_gradients_equal_the_definition(
    world: int, top_k: int, local_experts: int, n: int
) -> None:
    for capacity_factor in (None, 0.6):
        check(world, Case(n, top_k, local_experts, capacity_factor))


@pytest.mark.parametrize(
    "world, n, capacity_factor, load",
    spread([1, 2, 4], [1, 3], [None, 0.5], ["one expert", "some experts get none"], every=5),
)
def test_skewed_routing_equals_the_definition(
    world: int, n: int, capacity_factor: float | None, load: str
) -> None:
    for top_k in (1, 2):
        check(world, Case(n, top_k, 2, capacity_factor, load))


@pytest.mark.parametrize(
    "world, expert, activation, bias",
    spread([1, 2, 4], [("ffn", "relu"), ("ffn", "silu"), ("swiglu", "gelu")], [True, False], every=3),
)
def test_every_expert_equals_the_definition(world: int, expert: str, activation: str, bias: bool) -> None:
    check(world, Case(2, 2, 2, expert=expert, activation=activation, bias=bias))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 2])
def test_switch_gate_equals_the_definition(world: int, n: int) -> None:
    check(world, Case(n, 1, 2, gate="switch"))


@pytest.mark.parametrize(
    "world, n, bypass_local, sequential",
    spread([1, 2, 4], [1, 2, True], [(False, False), (True, True), (False, True)], every=5),
)
def test_rows_sent_to_oneself_and_sequential_runs_change_nothing(
    world: int, n: int, bypass_local: bool, sequential: bool
) -> None:
    check(world, Case(n, 2, 2, 0.8, bypass_local=bypass_local, sequential=sequential))


# ---- memory reuse ---------------------------------------------------------------------------------

PAIRS = [
    pmoe.Restore(d, h) for d in ("keep", "offload", "communicate") for h in ("keep", "offload", "recompute")
]


@pytest.mark.parametrize("pair, world, n", spread(PAIRS, [1, 2, 4], [1, 2, 3, 8], every=9), ids=named)
def test_every_restore_pair_equals_the_definition(pair: pmoe.Restore, world: int, n: int) -> None:
    check(world, Case(n, 2, 2, memory_reuse=pair))
    check(world, Case(n, 1, 4, 0.6, memory_reuse=pair, expert="swiglu"))


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "pair, world, n, n_backward",
    spread(PAIRS, [1, 2, 4], [(1, 4), (4, 1), (2, 6), (6, 2), (3, 1), (1, 3), (3, 2), (4, 6)], every=7),
    ids=named,
)
def test_backward_may_have_other_chunks_than_forward(
    pair: pmoe.Restore, world: int, n: int, n_backward: int
) -> None:
    check(world, Case(n, 2, 2, memory_reuse=pair, n_backward=n_backward))


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    "pair, world, n, n_backward, load",
    spread(
        PAIRS,
        [1, 2, 4],
        [(2, 2), (4, 2), (3, 1), (1, 3)],
        ["one expert", "some experts get none"],
        every=5,
    ),
    ids=named,
)
def test_skew_cuts_finer_and_changes_no_result(
    pair: pmoe.Restore, world: int, n: int, n_backward: int, load: str
) -> None:
    check(world, Case(n, 2, 2, load=load, memory_reuse=pair, n_backward=n_backward))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "pair, world, bypass_local, sequential",
    spread(PAIRS, [1, 2, 4], [(False, False), (True, True), (False, True)], every=7),
    ids=named,
)
def test_reuse_with_rows_sent_to_oneself_and_in_sequence_changes_nothing(
    pair: pmoe.Restore, world: int, bypass_local: bool, sequential: bool
) -> None:
    case = Case(2, 2, 2, 0.8, bypass_local=bypass_local, sequential=sequential, memory_reuse=pair)
    check(world, case)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "pair, world, activation", spread(PAIRS, [1, 2, 4], ["relu", "silu"], every=4), ids=named
)
def test_every_activation_is_restored(pair: pmoe.Restore, world: int, activation: str) -> None:
    check(world, Case(2, 2, 2, activation=activation, memory_reuse=pair))
    check(world, Case(True, 2, 2, activation=activation, memory_reuse=pair))
