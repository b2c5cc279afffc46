"""Fused layers on several ranks, with all-to-alls and plain products in the place of their kernels.

They equal the plain definition to 1e-12, give the same bits every time, and decide the same on every rank.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import pmoe
from pmoe import warn
from pmoe.comm.ranks import Ranks
from pmoe.kernels.comet.operators import FusedRouting
from pmoe.runners import fused_steps
from pmoe.runners.fused_steps import Request
from tests.gloo import flexible
from tests.plain_steps import PlainSteps, plain_steps, using
from tests.pool import ranks
from tests.reference import Definition, relative_error
from tests.spread import spread

D_MODEL, D_HIDDEN, AUX = 6, 10, 0.37
TOKENS = {2: (9, 0), 4: (5, 0, 11, 2)}
PAIRS = [pmoe.Restore(d, h) for d in ("keep", "communicate") for h in ("keep", "recompute")]


@dataclass(frozen=True)
class Case:
    top_k: int = 2
    local_experts: int = 2
    load: str = "mixed"
    max_rows: int = 1000  # of a rank, that the steps take
    options: dict[str, Any] = field(default_factory=lambda: {"fused": True})


def build(case: Case, world: int, **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(7)
    layer = pmoe.MoELayer(
        D_MODEL,
        D_HIDDEN,
        case.local_experts * world,
        case.top_k,
        dtype=torch.float64,
        **{**case.options, **options},
    )
    with torch.no_grad():
        layer.gate.weight *= 3
        if case.load == "one expert":
            layer.gate.weight[-1, 0] += 40
        if case.load == "some experts get none":
            layer.gate.weight[::2, 0] -= 40
    return layer


def inputs(world: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    xs, grads = [], []
    for count in TOKENS[world]:
        x = torch.randn(count, D_MODEL, generator=generator, dtype=torch.float64)
        x[:, 0] = x[:, 0].abs() + 1
        xs.append(x)
        grads.append(torch.randn(count, D_MODEL, generator=generator, dtype=torch.float64))
    return xs, grads


class Taking:
    """Runs the steps of a case, and records for which calls."""

    def __init__(self, max_rows: int = 1000) -> None:
        self.max_rows, self.fused = max_rows, list[bool]()

    def __call__(self, request: Request) -> PlainSteps | str:
        self.fused.append(request.max_rows <= self.max_rows)
        if self.fused[-1]:
            return plain_steps(request)
        return f"more rows arrive than memory holds: {request.max_rows} on a rank, of {self.max_rows}"


def step(layer: pmoe.MoELayer, rank: int, world: int) -> dict[str, Any]:
    layer.zero_grad(set_to_none=True)
    xs, grads = inputs(world)
    x = xs[rank].requires_grad_()
    y = layer(x)
    ((y * grads[rank]).sum() + AUX * layer.l_aux).backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "l_aux": layer.l_aux.detach(), "x": x.grad, **found}


def run(rank: int, world: int, case: Case) -> tuple[dict[str, Tensor], list[bool]]:
    taking = Taking(case.max_rows)
    with using(taking):
        return step(build(case, world), rank, world), taking.fused


def check(world: int, case: Case) -> None:
    alone = replace(case, local_experts=case.local_experts * world)
    whole = build(alone, 1, fused=False)
    definition = Definition(
        {name: value.detach() for name, value in whole.named_parameters()},
        case.top_k,
        case.options.get("expert", "ffn"),
        case.options.get("activation", "gelu"),
        None,
        case.options.get("capacity_factor"),
    )
    ys, aux, gradients = definition.gradients(*inputs(world), AUX)
    most = max_rows(world, case)
    for rank, (got, fused) in enumerate(ranks(world).run(run, case)):
        assert fused == [most <= case.max_rows], rank
        mine = slice(rank * case.local_experts, (rank + 1) * case.local_experts)
        expected = {"y": ys[rank], "l_aux": aux[rank], **gradients[rank]}
        assert set(got) == set(expected)
        for name, value in expected.items():
            value = value[mine] if name.startswith("experts.") else value
            assert got[name] is not None, (rank, name)
            error = relative_error(got[name], value)
            assert error < 1e-12, f"rank {rank}, {name}: {error}"


def max_rows(world: int, case: Case) -> int:
    """Returns the most rows that any rank receives, computed from the gate only."""
    if case.max_rows == 1000:
        return 0
    layer = build(replace(case, local_experts=case.local_experts * world), 1, fused=False)
    received = torch.zeros(world, dtype=torch.int64)
    for x in inputs(world)[0]:
        layer(x)
        received += layer.tokens_per_expert.view(world, -1).sum(1)
    return int(received.max())


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "way, pair, world, top_k, load",
    spread(
        [True, "forward"], PAIRS, [2, 4], [1, 2, 4], ["mixed", "one expert", "some experts get none"], every=7
    ),
)
def test_output_and_gradients_equal_the_definition(
    way: bool | str, pair: pmoe.Restore, world: int, top_k: int, load: str
) -> None:
    for capacity in (None, 0.6):
        options = {"fused": way, "memory_reuse": pair, "capacity_factor": capacity}
        check(world, Case(top_k, 2, load, options=options))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [True, "forward"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [{"activation": "relu"}, {"activation": "silu"}, {"expert": "swiglu"}])
def test_every_expert_equals_the_definition(
    kind: dict[str, str], bias: bool, way: bool | str, world: int
) -> None:
    check(world, Case(2, 3, options={"fused": way, "bias": bias, **kind}))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "n, n_backward, world, pair",
    spread([1, 2, 4], [None, 1, 2, 4], [2, 4], [False, True, *PAIRS], every=13),
)
def test_forward_alone_fits_the_engines_backward(
    n: int, n_backward: int | None, world: int, pair: Any
) -> None:
    options = {"fused": "forward", "pipeline": n, "pipeline_backward": n_backward, "memory_reuse": pair}
    for load in ("mixed", "one expert"):  # the second cuts into finer chunks where buffers rotate
        check(world, Case(2, 2, load, options={**options, "capacity_factor": 0.8}))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", [True, "forward"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("reuse", [False, "S4"])
def test_more_rows_than_memory_holds_go_through_the_engine_on_every_rank(
    way: bool | str, world: int, reuse: bool | str
) -> None:
    options = {"fused": way, "memory_reuse": reuse, "pipeline": 2}
    case = Case(2, 2, "one expert", options=options)
    most = max_rows(world, replace(case, max_rows=0))
    check(world, replace(case, max_rows=most))
    check(world, replace(case, max_rows=most - 1))


def again_job(rank: int, world: int, case: Case) -> list[dict[str, Tensor]]:
    with using(plain_steps):
        layer = build(case, world)
        return [step(layer, rank, world) for _ in range(2)]


@pytest.mark.parametrize("way", [True, "forward"])
@pytest.mark.parametrize("world", [2, 4])
def test_two_runs_give_the_same_bits(way: bool | str, world: int) -> None:
    for first, second in ranks(world).run(again_job, Case(4, 2, options={"fused": way})):
        for name, value in first.items():
            assert torch.equal(value, second[name]), name


def order_job(rank: int, world: int, expert_TK: list[list[int]]) -> list[float]:
    """Returns by how many s the sums of `gradient_combine` are above 1.

    Rank 0's rows have one column: 1 for expert 0, s = 2**-24 for all others.
    """
    small = 2.0**-24
    of_rank_0 = torch.tensor(expert_TK)
    expert = of_rank_0 if rank == 0 else of_rank_0[:0]
    flat, rows = expert.view(-1), torch.bincount(of_rank_0.view(-1), minlength=4).view(2, 2)
    slot = flat.argsort(stable=True)
    fused_routing = FusedRouting(
        rank=rank,
        expert_TK=expert.int(),
        position_TK=slot.argsort().view(-1, 3).int(),
        slot_S=slot.int(),
        send_WE=(rows if rank == 0 else 0 * rows).int(),
        recv_WE=torch.stack([rows[rank], 0 * rows[rank]]).int(),
        num_received=int(rows[rank].sum()),
    )
    steps = PlainSteps(Ranks())
    steps.dispatch(fused_routing, torch.ones(expert.shape[0], 1), torch.ones(expert.shape))
    w1 = torch.tensor([1.0 if rank == 0 else small, small]).view(2, 1, 1)
    grad, dots = torch.ones(fused_routing.num_received, 1), torch.zeros(1, fused_routing.num_received)
    y_TM, _ = steps.gradient_combine(fused_routing, grad, w1, dots)
    return ((y_TM.flatten() - 1) / small).tolist()


def test_ranks_sum_their_own_rows_before_the_owner_sums_theirs() -> None:
    """Experts 0 and 1 are on rank 0, 2 and 3 on rank 1. 1 + s is rounded to 1, and 1 + 2s is not."""
    tokens = [[0, 2, 3], [2, 0, 3], [0, 2, 1], [1, 2, 0], [2, 1, 0]]
    # (1) + (s + s);  (s + s) + (1);  (1 + s) + (s);  (s + 1) + (s);  (s) + (s + 1)
    assert ranks(2).run(order_job, tokens) == [[2.0, 2.0, 0.0, 0.0, 0.0], []]


# ---- what ranks may have different


def different_job(rank: int, world: int, way: bool | str, pair: pmoe.Restore) -> dict[str, Any]:
    """Runs a step in which rank 0's experts are frozen, and only rank 1's input needs a gradient."""
    layer = build(Case(options={"fused": way, "memory_reuse": pair}), world)
    if rank == 0:
        layer.requires_grad_(False)
    xs, _ = inputs(world)
    x = xs[rank].requires_grad_(rank == 1)
    with using(plain_steps):
        layer(x).sum().backward()
    return {"x": x.grad is not None, "w1": layer.experts.w1.grad is not None}


@pytest.mark.parametrize("way", [True, "forward"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_ranks_may_freeze_different_parameters(way: bool | str, pair: pmoe.Restore) -> None:
    first, second = ranks(2).run(different_job, way, pair)
    assert first == {"x": False, "w1": False} and second == {"x": True, "w1": True}


def no_grad_job(rank: int, world: int) -> bool:
    layer, (xs, _) = build(Case(), world), inputs(world)
    with using(plain_steps):
        expected = layer(xs[rank])
        with torch.no_grad():
            y = layer(xs[rank])
    return torch.equal(y, expected) and expected.requires_grad and not y.requires_grad


def test_without_gradients_the_result_is_the_same() -> None:
    assert ranks(4).run(no_grad_job) == [True] * 4


def mixed_job(rank: int, world: int, way: bool | str) -> Tensor:
    """Runs a step in which everything is frozen on rank 0 only."""
    layer, (xs, _) = build(Case(options={"fused": way, "pipeline": 2}), world), inputs(world)
    layer.requires_grad_(rank != 0)
    with using(plain_steps):
        return layer(xs[rank].detach().requires_grad_(rank != 0)).detach()


@pytest.mark.parametrize("way", [True, "forward"])
def test_a_rank_without_gradients_takes_the_same_steps_forward(way: bool | str) -> None:
    xs, _ = inputs(2)
    whole = build(Case(local_experts=4), 1, fused=False)
    for x, y in zip(xs, ranks(2).run(mixed_job, way), strict=True):
        assert relative_error(y, whole(x).detach()) < 1e-12


def refused_job(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "esp"))
    warn.GIVEN.clear()
    with using(plain_steps), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sharded = {"mesh": mesh, "fused": "persistent"}
        for options in (sharded, {"dispatch": "hierarchical_1d", "nodes": 1}):
            build(Case(), world, **options)(inputs(world)[0][rank]).sum().backward()
    return [str(each.message).partition(" because ")[2] for each in told]


def test_the_persistent_kernel_takes_no_shards_and_no_kernel_takes_hierarchies() -> None:
    expected = ["experts are sharded over the ranks of a node", "rows do not travel by flat all-to-alls"]
    assert ranks(2).run(refused_job) == [expected] * 2


# ---- experts split over the ranks of a node, shared experts, and callbacks outside of the layer


def whole_job(rank: int, world: int, case: flexible.Case) -> tuple[dict[str, Tensor], list[bool]]:
    taking = Taking()
    with using(taking):
        return flexible.run(rank, world, case), taking.fused


def check_whole(world: int, case: flexible.Case) -> None:
    wanted = flexible.expected(world, replace(case, options={**case.options, "fused": False}))
    for rank, (got, fused) in enumerate(ranks(world).run(whole_job, case)):
        assert fused == [True], rank
        assert set(got) == set(wanted[rank])
        for name, value in wanted[rank].items():
            if name.startswith("experts."):
                value = flexible.part_of(name, value, case, rank, world)
            assert got[name] is not None, (rank, name)
            error = relative_error(got[name], value)
            assert error < 1e-12, f"rank {rank}, {name}: {error}"


MESHES = [(2, 1, 2, False), (4, 2, 2, False), (4, 2, 2, True), (4, 1, 4, False)]
"""World size, "ep", "esp", and whether "esp" is the outer dimension of the mesh."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "way, pair, world, ep, esp, is_reversed, kind",
    spread(
        [True, "forward"],
        PAIRS,
        MESHES,
        [{}, {"capacity_factor": 0.6}, {"expert": "swiglu"}, {"pipeline": 4, "pipeline_backward": 2}],
        every=5,
    ),
)
@pytest.mark.parametrize("shared", [None, 5])
def test_rows_go_to_each_shard_of_an_expert(
    way: bool | str,
    pair: pmoe.Restore,
    world: int,
    ep: int,
    esp: int,
    is_reversed: bool,
    kind: dict[str, Any],
    shared: int | None,
) -> None:
    options = {"fused": way, "memory_reuse": pair, **kind}
    check_whole(world, flexible.Case(4, 2, ep, esp, is_reversed, shared=shared, options=options))


@pytest.mark.parametrize("way", [True, "forward", "persistent"])
@pytest.mark.parametrize("shared", [5, "module"])
def test_a_shared_expert_is_computed_beside_the_kernels(way: bool | str, shared: int | str) -> None:
    for world in (1, 2):
        check_whole(world, flexible.Case(4, 2, shared=shared, options={"fused": way, "memory_reuse": "S4"}))


def hooked_job(rank: int, world: int) -> Tensor:
    """One rank alone has a hook, for which its layer calls the shared expert as a module."""
    layer = flexible.build(flexible.Case(4, 2, shared=5, options={"fused": "auto"}), world)
    if rank == 0:
        layer.experts.register_forward_hook(lambda *_: None)
    with using(plain_steps):
        return layer(inputs(world)[0][rank]).detach()


def test_a_hook_of_one_rank_changes_no_decision_of_all() -> None:
    case = flexible.Case(4, 2, shared=5)
    for y, wanted in zip(ranks(2).run(hooked_job), flexible.expected(2, case), strict=True):
        assert relative_error(y, wanted["y"]) < 1e-12


@pytest.mark.slow
def test_shards_of_a_busy_expert_and_of_experts_without_rows() -> None:
    for way in (True, "forward"):
        for top_k in (1, 3):
            options = {"fused": way, "memory_reuse": "S4"}
            check_whole(4, flexible.Case(4, top_k, 2, 2, load="one expert", options=options))


class Uneven(nn.Module):
    """A gate that says, on one rank only, which token each of its rows belongs to."""

    def __init__(self, gate: nn.Module, says: bool) -> None:
        super().__init__()
        self.gate, self.says = gate, says

    def forward(self, x: Tensor) -> pmoe.Routing:
        if x.shape[0] == 3:
            raise ArithmeticError("three tokens")
        routing = self.gate(x)
        return replace(routing, token=torch.arange(x.shape[0])) if self.says else routing


def uneven_job(rank: int, world: int) -> tuple[list[str], bool, str]:
    torch.manual_seed(7)
    taking, gate = Taking(), pmoe.gates.TopKGate(D_MODEL, 4, dtype=torch.float64)
    warn.GIVEN.clear()
    layer = pmoe.MoELayer(
        D_MODEL, D_HIDDEN, 4, 1, gate=Uneven(gate, rank == 1), fused=True, dtype=torch.float64
    )
    with using(taking), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        layer(torch.ones(4, D_MODEL, dtype=torch.float64)).sum().backward()
        try:
            layer(torch.ones(3 + rank, D_MODEL, dtype=torch.float64))
            failed = ""
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
    return [str(each.message) for each in told], bool(taking.fused), failed


def test_a_routing_that_does_not_fit_on_one_rank_is_fused_on_none() -> None:
    message = (
        "pmoe: fused (True) falls back to the unfused layer because the gate (Uneven) does not give every "
        "token top_k (1) rows"
    )
    first, second = ranks(2).run(uneven_job)
    assert first[:2] == second[:2] == ([message], False)
    assert first[2] == "ArithmeticError: three tokens"
    assert second[2] == "FaultError: rank 0: its gate raised an error, or its input is not a tensor"


def missing_job(rank: int, world: int) -> tuple[list[str], bool]:
    """Runs a layer on ranks of which rank 1 has no kernels."""
    layer, (xs, _) = build(Case(), world), inputs(world)
    asked: list[Request] = []
    warn.GIVEN.clear()
    with warnings.catch_warnings(record=True) as told, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(fused_steps, "_agreed", {})
        patch.setattr(fused_steps, "refusal", lambda *_, **__: "no kernels here" if rank == 1 else None)
        patch.setattr(fused_steps, "ranks_refusal", lambda *_: None)
        patch.setattr(fused_steps, "_kernel_steps", asked.append)
        for _ in range(2):
            layer(xs[rank]).sum().backward()
    return [str(each.message) for each in told], bool(asked)


def test_kernels_that_one_rank_lacks_are_taken_on_none() -> None:
    start = "pmoe: fused (True) falls back to the unfused layer because "
    assert ranks(2).run(missing_job) == [
        ([start + "another rank refuses the fused kernels: that rank warns of the reason"], False),
        ([start + "no kernels here"], False),
    ]


def nodes_job(rank: int, world: int, hosts: list[str]) -> list[str]:
    """Returns which kind of heap a layer asks for."""
    layer, (xs, _) = build(Case(), world), inputs(world)
    warn.GIVEN.clear()

    def no(*_: object) -> NoReturn:
        raise RuntimeError("none of one node")

    def none_beyond(*_: object) -> NoReturn:
        raise RuntimeError("none of several nodes")

    with warnings.catch_warnings(record=True) as told, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(fused_steps, "_agreed", {})
        patch.setattr(fused_steps, "refusal", lambda *_, **__: None)
        patch.setattr(fused_steps, "ranks_refusal", lambda *_: None)
        patch.setattr(fused_steps, "host_name", lambda: hosts[rank])
        patch.setattr(fused_steps, "process_heap", no)
        patch.setattr(fused_steps, "nvshmem_heap", none_beyond)
        for _ in range(2):
            layer(xs[rank]).sum().backward()
    return [str(each.message) for each in told]


@pytest.mark.parametrize(
    ("hosts", "wanted"), [("aa", "none of one node"), ("ab", "none of several nodes")], ids=["one", "two"]
)
def test_the_heap_follows_from_the_nodes_that_the_ranks_are_on(hosts: str, wanted: str) -> None:
    message = f"pmoe: fused (True) falls back to the unfused layer because there is no heap: {wanted}"
    assert ranks(2).run(nodes_job, list(hosts)) == [[message]] * 2


def worth_job(rank: int, world: int) -> tuple[int, int]:
    taking, layer = Taking(), build(Case(options={"fused": "auto"}), world)
    xs, worth = inputs(world)[0], fused_steps.is_faster
    try:
        with using(taking):
            layer(xs[rank])
            before = len(taking.fused)
            fused_steps.is_faster = lambda request: request.max_tokens == 9
            layer(xs[rank])
    finally:
        fused_steps.is_faster = worth
    return before, len(taking.fused)


def test_auto_is_fused_where_that_was_measured_to_be_faster() -> None:
    assert ranks(2).run(worth_job) == [(0, 1)] * 2
