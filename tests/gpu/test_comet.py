"""The fused kernels by virtual ranks in one cooperative launch: every element of both passes against float64,
bits, refused operands, launches. test_comet_protocol.py has the sleeps and the planted mistakes.

Where a GPU runs Hopper's kernels, those of sm_80 run there too, and every test runs with each.

Letters: T tokens, K choices, W ranks, E experts of a rank, M = d_model.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.virtual_ranks import FusedParameters, VirtualRanks, routes_of
from pmoe.gates.logits import router_logits
from pmoe.kernels import extension, route
from pmoe.kernels.comet import launcher
from pmoe.kernels.comet import operators as comet_operators
from pmoe.kernels.comet.launcher import Division
from tests.faults import InjectedFaults
from tests.gpu.fused import CPU, Case, World, need_kernels, play, virtual
from tests.gpu.support import DEVICE, NEEDS_GPU, poison_memory
from tests.gpu.test_alone import device_work
from tests.gpu.test_ptx import INSIDE

pytestmark = NEEDS_GPU

MAX_KERNELS = 6
"""Of a forward pass: the gate's product, the routing, counts and memsets included."""


@pytest.fixture(params=["sm_90a", "sm_80"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose kernels run."""
    need_kernels()
    own, wanted = extension.path(DEVICE)[0], str(request.param)
    if wanted == "sm_90a" and own != wanted:
        pytest.skip(f"this device runs {own}")
    monkeypatch.setattr(launcher, "path", lambda _: (wanted, None))
    return wanted


CASES = {
    "two ranks": Case(),
    "one rank": Case(tokens=(150,), experts=3, top_k=3, d_model=264, activation="silu", bias=False),
    "one rank, one expert": Case(tokens=(77,), experts=1, top_k=1, activation="relu"),
    "four ranks": Case(tokens=(300, 1, 170, 260), top_k=3, activation="swiglu"),
    "a rank without tokens": Case(tokens=(0, 130), top_k=1, activation="silu"),
    "two of four without tokens": Case(tokens=(200, 0, 130, 0), activation="swiglu", bias=False),
    "no tokens at all": Case(tokens=(0, 0)),
    "one token": Case(tokens=(0, 1, 0, 0), top_k=3, activation="relu"),
    "all to one expert": Case(tokens=(90, 140), favoured=3, top_k=1, activation="gelu"),
    "most to one of four ranks": Case(tokens=(90, 20, 140, 60), favoured=2, experts=1, top_k=3),
    "experts without rows": Case(tokens=(130, 90), experts=4, idle=(0, 3, 4, 5, 6), activation="swiglu"),
    "a rank without rows": Case(tokens=(130, 90), idle=(0, 1), activation="silu"),
    "drops": Case(tokens=(130, 0, 90, 33), dropped=0.4, top_k=3, activation="swiglu"),
    "all dropped": Case(tokens=(50, 60), dropped=1.1),
    "many columns": Case(
        tokens=(33, 170), d_model=520, top_k=1, activation="relu", division=Division(1, 256)
    ),
    "few columns in, many out": Case(tokens=(133, 17), d_model=1032, d_hidden=8, division=Division(12, 512)),
    "columns of one vector": Case(tokens=(33, 17), d_model=8, d_hidden=8, activation="swiglu"),
    "all columns at once": Case(tokens=(70, 60), d_model=520, bias=False, division=Division(12, 1024)),
    "pieces that end with a tile": Case(tokens=(128, 256), experts=1, top_k=1, d_hidden=256, d_model=256),
    "many experts": Case(tokens=(250, 300), experts=64, top_k=3, activation="relu", spare=100),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_element_of_both_passes(random: torch.Generator, case: Case, dtype: torch.dtype) -> None:
    poison_memory()
    play(replace(case, dtype=dtype), random)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
def test_every_element_with_each_nonlinearity(
    random: torch.Generator, activation: str, bias: bool, num_ranks: int
) -> None:
    tokens = (170, 3, 60, 129)[:num_ranks]
    poison_memory()
    play(Case(tokens=tokens, activation=activation, bias=bias, d_model=520, dropped=0.05), random)


@pytest.mark.parametrize("n_c, chunk_columns", [(1, 256), (4, 512), (12, 1024), (12, 256), (1000, 256)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_element_with_each_division(
    random: torch.Generator, num_ranks: int, n_c: int, chunk_columns: int
) -> None:
    """Of more communicating blocks than there are, one is left to compute."""
    tokens = (410, 260, 33, 129)[:num_ranks]
    division = Division(n_c, chunk_columns)
    poison_memory()
    play(Case(tokens=tokens, activation="swiglu", d_model=1288, division=division), random)


@pytest.mark.parametrize("tokens", [(5000,), (3000, 2600), (900, 2100, 1500, 1000)], ids=len)
def test_every_element_where_blocks_compute_many_tiles(
    random: torch.Generator, tokens: tuple[int, ...]
) -> None:
    case = Case(
        tokens=tokens, experts=8 // len(tokens), d_model=1032, d_hidden=1416, activation="swiglu", bias=False,
        division=Division(12 // len(tokens), 512),
    )  # fmt: skip
    poison_memory()
    play(case, random)


@pytest.mark.sanitize
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_few_rows_by_every_role(random: torch.Generator, activation: str) -> None:
    case = Case(
        tokens=(40, 21),
        activation=activation,
        d_model=264,
        d_hidden=72,
        dropped=0.1,
        bias=activation == "gelu",
    )
    for dtype, seed in ((torch.bfloat16, 0), (torch.float16, 5)):
        play(replace(case, dtype=dtype), random, make=InjectedFaults(delay_seed=seed).launcher)


@INSIDE
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_both_kernels_both_ways_from_ptx(random: torch.Generator, activation: str) -> None:
    """Without biases, whose part of the weights' gradients is PyTorch's."""
    play(Case(tokens=(40, 130), activation=activation, bias=False, d_model=264), random, where=CPU)


# ---- routing


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_ranks_are_routed_by_one_launch(random: torch.Generator, top_k: int, num_ranks: int) -> None:
    """By what the routing kernel says of as many chunks, with its weights."""
    num_tokens = 301
    bounds = [rank * num_tokens // num_ranks for rank in range(num_ranks + 1)]
    tokens = tuple(end - begin for begin, end in zip(bounds, bounds[1:], strict=False))
    case = Case(tokens=tokens, experts=8 // num_ranks, top_k=top_k, activation="swiglu", bias=False)
    logits = torch.randn(num_tokens, 8, generator=random).to(DEVICE)
    assert route.refusal(logits, top_k, num_ranks) is None
    routes = route.route(logits, top_k, normalize=True, num_chunks=num_ranks)
    keep = torch.ones_like(routes.expert_TK, dtype=torch.bool)
    world = World(case, random, routed=(routes.expert_TK, keep, routes.weight_TK))
    assert torch.equal(routes.position_TK.cpu(), world.position_TK)
    assert torch.equal(routes.slot_N.cpu(), world.slot_N)
    owner = VirtualRanks(
        num_ranks, case.experts, rows=world.max_received, home_rows=world.max_sent, d_model=case.d_model,
        dtype=case.dtype, device=DEVICE,
    )  # fmt: skip
    fused_routings = owner.fused_routings(routes)
    owner.close()
    with virtual(case, world, fused_routings=fused_routings) as player:
        forward = player.forward()
        world.check_forward(forward)
        world.check_backward(player.backward(forward.hidden), forward.hidden)
        player.check()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_dropped_rows_as_routes_of_tells_them(random: torch.Generator, num_ranks: int) -> None:
    num_tokens = 203
    bounds = [rank * num_tokens // num_ranks for rank in range(num_ranks + 1)]
    tokens = tuple(end - begin for begin, end in zip(bounds, bounds[1:], strict=False))
    case = Case(tokens=tokens, dropped=0.3, top_k=3)
    world = World(case, random)
    routes = routes_of(world.expert_TK.to(DEVICE), world.keep_TK.to(DEVICE), num_ranks, case.num_experts)
    for found, wanted in ((routes.position_TK, world.position_TK), (routes.counts_nE, world.counts)):
        assert torch.equal(found.cpu(), wanted)
    owner = VirtualRanks(
        num_ranks, case.experts, rows=world.max_received, home_rows=world.max_sent, d_model=case.d_model,
        dtype=case.dtype, device=DEVICE,
    )  # fmt: skip
    fused_routings = owner.fused_routings(routes)
    owner.close()
    with virtual(case, world, fused_routings=fused_routings) as player:
        forward = player.forward()
        world.check_forward(forward)
        world.check_backward(player.backward(forward.hidden), forward.hidden)
        player.check()


# ---- bits


def results(case: Case, world: World, division: Division, delay_seed: int) -> dict[str, torch.Tensor]:
    """Copies of all that both passes give."""
    poison_memory()
    make = InjectedFaults(delay_seed=delay_seed).launcher
    with virtual(case, world, division=division, make=make) as player:
        forward = player.forward()
        backward = player.backward(forward.hidden)
        player.check()
        found = {"y": forward.y, "of_x": backward.of_x, "of_weight": backward.of_weight}
        for name, by_rank in (
            ("hidden", forward.hidden),
            ("active", forward.active),
            ("of_hidden", backward.of_hidden),
            ("weighted", backward.weighted),
        ):
            found |= {f"{name} of rank {rank}": world.cut(rank, each) for rank, each in enumerate(by_rank)}
        return {name: each.clone() for name, each in found.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bits_do_not_depend_on_who_is_late_nor_on_the_division(
    random: torch.Generator, dtype: torch.dtype
) -> None:
    case = Case(tokens=(700, 330), top_k=3, d_model=1032, d_hidden=520, activation="swiglu", dtype=dtype)
    world = World(case, random)
    for weights in (world.w1, world.w2):
        weights.mul_(2.0**-4)  # or results are more than float16 holds
    first = results(case, world, Division(4, 256), 0)
    assert all(each.isfinite().all() for each in first.values())
    for division, delay_seed in (
        (Division(4, 256), 0),
        (Division(4, 256), 7),
        (Division(1, 512), 0),
        (Division(12, 1024), 8),
    ):
        for name, found in results(case, world, division, delay_seed).items():
            assert torch.equal(found, first[name]), f"{name} by {division}, delays {delay_seed}"


def test_without_t_m_the_activated_hidden_is_the_same(random: torch.Generator) -> None:
    case = Case(tokens=(130, 90), activation="swiglu")
    world = World(case, random)
    with virtual(case, world) as player:
        forward = player.forward()
        player.poison()
        hidden, active = comet_operators.dispatch_hidden(
            player.launcher, player.fused_routings, player.x_TM, player.weight_TK, player.given.w1,
            player.given.b1, activation=case.activation, keep=False,
        )  # fmt: skip
        player.check()
        assert hidden is None
        for rank, each in enumerate(active):
            assert torch.equal(world.cut(rank, each), world.cut(rank, forward.active[rank]))


# ---- before any launch


def test_operands_that_do_not_fit_are_a_value_error_before_any_launch(
    random: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case()
    world = World(case, random)
    with virtual(case, world) as player:
        monkeypatch.setattr(player.launcher, "launch", lambda *_, **__: pytest.fail("a launch"))
        x, weight, given = player.x_TM, player.weight_TK, player.given

        def dispatch(x: torch.Tensor = x, weight: torch.Tensor = weight) -> None:
            comet_operators.dispatch(player.launcher, player.fused_routings, x, weight)

        def hidden(w1: list[torch.Tensor]) -> None:
            comet_operators.dispatch_hidden(
                player.launcher, player.fused_routings, x, weight, w1, given.b1, activation="gelu", keep=True
            )

        for call, told in (
            (lambda: dispatch(x.float()), "rows of dtype torch.float32"),
            (lambda: dispatch(x[:-1]), r"rows of shape \(109, 72\)"),
            (lambda: dispatch(x[:, :64].contiguous()), r"rows of shape \(110, 64\)"),
            (lambda: dispatch(x.t().contiguous().t()), "must be contiguous"),
            (lambda: dispatch(x.cpu()), "rows on cpu"),
            (lambda: dispatch(weight=weight.double()), "weight of dtype torch.float64"),
            (lambda: dispatch(weight=weight[:, :1].contiguous()), r"weight of shape \(110, 1\)"),
            (lambda: hidden([each[:1] for each in given.w1]), r"w1 of shape \(1, 136, 72\)"),
            (lambda: hidden([each.transpose(1, 2) for each in given.w1]), "must be contiguous"),
        ):
            with pytest.raises(ValueError, match=told):
                call()


def test_rows_that_a_heap_cannot_hold_are_a_value_error(random: torch.Generator) -> None:
    case = Case(tokens=(60, 70))
    world = World(case, random)
    for rows, home_rows, told in (
        (world.max_received - 1, world.max_sent, "num_received"),
        (world.max_received, world.max_sent - 1, "home_rows|may be sent"),
    ):
        owner = VirtualRanks(
            2, case.experts, rows=rows, home_rows=home_rows, d_model=case.d_model, dtype=case.dtype,
            device=DEVICE,
        )  # fmt: skip
        fused_routings = world.fused_routings()
        with pytest.raises(ValueError, match=told):
            comet_operators.dispatch(
                owner.launcher, fused_routings, world.x_TM.to(DEVICE), world.weight_TK.to(DEVICE)
            )
        owner.close()


# ---- kernels


def test_a_forward_pass_of_virtual_ranks_is_six_kernels_at_most(path: str) -> None:
    """By the profiler, from the tokens on; virtual ranks share the gate's and the routing's."""
    num_ranks, experts, top_k, num_tokens, d_model = 2, 4, 2, 2000, 512
    x = torch.randn(num_tokens, d_model, dtype=torch.bfloat16, device=DEVICE)
    gate = torch.randn(num_ranks * experts, d_model, dtype=torch.bfloat16, device=DEVICE)
    owner = VirtualRanks(
        num_ranks, experts, rows=num_tokens * top_k, home_rows=num_tokens * top_k, d_model=d_model,
        dtype=torch.bfloat16, device=DEVICE, division=Division(8, 512),
    )  # fmt: skip
    given = FusedParameters.random(num_ranks, experts, d_model, 768, "swiglu", bias=False, like=x)

    def forward() -> torch.Tensor:
        logits = router_logits(x, gate)
        routes = route.route(logits, top_k, normalize=True, num_chunks=num_ranks)
        return owner.forward(x, routes.weight_TK, owner.fused_routings(routes), given)[0]

    for _ in range(2):
        forward()
    device_work(forward)  # what the profiler sets up at first use
    found = device_work(forward)
    for heap in owner.heaps:
        heap.check()
    owner.close()
    print(f"{path}: {len(found)} kernels, copies and memsets", *found, sep="\n  ")
    fused = [name for name in found if "dispatch_gemm" in name or "gemm_combine" in name]
    assert len(fused) == 2, found
    assert len(found) <= MAX_KERNELS, "\n".join([f"{len(found)}:", *found])
