"""COMET's fused kernels called from Python, on the CPU: the emulator runs every thread of each launch.

The launches get the tensors and the heap of a real layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pmoe
from bench.virtual_ranks import FusedParameters, VirtualRanks, routes_of
from pmoe.comm.heap import close_heaps
from pmoe.comm.ranks import Ranks
from pmoe.kernels.comet import operators as comet_operators
from pmoe.kernels.comet.launcher import Division
from pmoe.kernels.heap import HeapError
from tests.emulated import emulated
from tests.faults import InjectedFaults
from tests.reference import relative_error
from tests.spread import named, spread

BF16 = torch.bfloat16


def step(layer: pmoe.MoELayer, count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    dtype = next(layer.experts.parameters()).dtype
    x = torch.randn(count, layer.d_model, generator=generator, dtype=torch.float64).to(BF16).to(dtype)
    grad = torch.randn(count, layer.d_model, generator=generator, dtype=torch.float64).to(BF16).to(dtype)
    x.requires_grad_()
    layer.zero_grad()
    y = layer(x)
    (y * grad).sum().backward()
    assert x.grad is not None
    found = {"y": y.detach(), "x": x.grad}
    return found | {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}


def layers(count: int, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Returns the results of a fused layer, of the unfused one, and of the unfused one in float64.

    All three have the same parameters.
    """
    found = []
    state: dict[str, Tensor] = {}
    for fused, dtype in ((options.pop("fused"), BF16), (False, BF16), (False, torch.float64)):
        torch.manual_seed(3)
        layer = pmoe.MoELayer(72, 64, 4, 2, dtype=dtype, fused=fused, **options)
        state = state or layer.state_dict()
        layer.load_state_dict({name: each.to(dtype) for name, each in state.items()})
        found.append(step(layer, count))
    return found[0], found[1], found[2]


@pytest.mark.parametrize(
    "hopper, options",
    spread(
        [True, False],
        [
            {"fused": True, "expert": "swiglu", "bias": False},
            {"fused": True, "activation": "gelu", "memory_reuse": "S4"},
            {"fused": "forward", "activation": "silu", "pipeline": 2, "capacity_factor": 0.8},
            {"fused": True, "expert": "swiglu", "capacity_factor": 0.6, "memory_reuse": "S4"},
        ],
        every=2,
    ),
    ids=named,
)
def test_a_layer_of_one_rank_is_as_near_to_float64_as_unfused(
    kernels: Path, options: dict[str, Any], hopper: bool, recwarn: pytest.WarningsRecorder
) -> None:
    with emulated(kernels, hopper=hopper):
        fused, plain, exact = layers(37, **options)
        close_heaps(Ranks())
    assert not [each for each in recwarn if "falls back" in str(each.message)]
    for name, wanted in exact.items():
        error = relative_error(fused[name].double(), wanted)
        assert error <= 2 * relative_error(plain[name].double(), wanted) + 4e-3, (name, error)
        assert fused[name].dtype == plain[name].dtype


def test_a_heap_that_grew_between_the_passes_serves_both(kernels: Path) -> None:
    """Another layer runs forward between a layer's passes, with more tokens, so that a larger heap is
    made.
    """
    torch.manual_seed(3)
    first, second = (pmoe.MoELayer(72, 64, 4, 2, dtype=BF16, fused=True) for _ in range(2))
    x = torch.randn(9, 72).to(BF16)
    with emulated(kernels):
        first(x).float().sum().backward()
        wanted = {name: each.grad.clone() for name, each in first.named_parameters() if each.grad is not None}
        first.zero_grad()
        y = first(x)
        z = second(torch.randn(60, 72).to(BF16))
        z.float().sum().backward()
        y.float().sum().backward()
        close_heaps(Ranks())
    for name, each in first.named_parameters():
        assert each.grad is not None and torch.equal(each.grad, wanted[name]), name


@pytest.mark.parametrize("where", ["product_combine", "dispatch_hidden_gradient", "gradient_combine"])
def test_a_round_that_is_left_in_the_middle_leaves_a_heap_that_says_so(
    kernels: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed launch the heap may not be used: late flags would be taken for those of a later
    launch.
    """
    layer = pmoe.MoELayer(72, 64, 4, 2, dtype=BF16, fused=True)

    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("no memory for this")

    with emulated(kernels):
        with monkeypatch.context() as patch:
            patch.setattr(comet_operators, where, fail)
            with pytest.raises(torch.OutOfMemoryError):
                layer(torch.ones(3, 72, dtype=BF16)).float().sum().backward()
        with pytest.raises(HeapError, match="given up in round .*no memory for this; make a new heap"):
            layer(torch.ones(3, 72, dtype=BF16))
        close_heaps(Ranks())
        layer(torch.ones(3, 72, dtype=BF16)).float().sum().backward()
        close_heaps(Ranks())


def test_no_tokens_at_all(kernels: Path) -> None:
    with emulated(kernels):
        fused, plain, _ = layers(0, fused=True, bias=True)
        close_heaps(Ranks())
    for name, wanted in plain.items():
        assert torch.equal(fused[name], wanted), name


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_virtual_ranks_equal_the_definition_round_after_round(kernels: Path, num_ranks: int) -> None:
    experts, tokens, top_k, d_model, d_hidden = 2, 41, 2, 72, 40
    generator = torch.Generator().manual_seed(num_ranks)
    like = torch.empty(0, dtype=BF16)
    with emulated(kernels, virtual_ranks=num_ranks, division=Division(1, 256)):
        world = VirtualRanks(
            num_ranks, experts, rows=tokens * top_k, home_rows=tokens * top_k, d_model=d_model, dtype=BF16,
            device=torch.device("cpu"), division=Division(1, 256),
            make_launcher=InjectedFaults(delay_seed=5).launcher,
        )  # fmt: skip
        for turn in range(2):
            given = FusedParameters.random(
                num_ranks, experts, d_model, d_hidden, "swiglu", bias=bool(turn), like=like
            )
            choice = torch.rand(tokens, num_ranks * experts, generator=generator).argsort(1)[:, :top_k]
            keep = torch.rand(tokens, top_k, generator=generator) < 0.9
            routes = routes_of(choice, keep, num_ranks, num_ranks * experts)
            weight = torch.rand(tokens, top_k, generator=generator)
            x = torch.randn(tokens, d_model, generator=generator).to(BF16)
            dy = torch.randn(tokens, d_model, generator=generator).to(BF16)
            fused_routings = world.fused_routings(routes)
            y, hidden = world.forward(x, weight, fused_routings, given)
            assert hidden is not None
            of_x, of_weight, _, _ = world.backward(dy, weight, fused_routings, given, hidden)
            wanted = defined(x, weight, dy, choice, keep, given)
            for name, found, exact in zip(
                ["y", "of_x", "of_weight"], (y, of_x, of_weight), wanted, strict=True
            ):
                assert relative_error(found.double(), exact) < 1e-2, (turn, name)
        world.check()
        world.close()


def defined(
    x: Tensor, weight: Tensor, dy: Tensor, choice: Tensor, keep: Tensor, given: FusedParameters
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the output and the gradients of tokens and weights in float64, token by token."""
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    w1, w2 = torch.cat(list(given.w1)).double(), torch.cat(list(given.w2)).double()
    b1 = None if given.b1[0] is None else torch.cat([each for each in given.b1 if each is not None]).double()
    b2 = None if given.b2[0] is None else torch.cat([each for each in given.b2 if each is not None]).double()
    rows = []
    for t in range(x.shape[0]):
        total = x64[t] * 0
        for k in range(choice.shape[1]):
            if not keep[t, k]:
                continue
            e = int(choice[t, k])
            hidden = w1[e] @ x64[t] + (0 if b1 is None else b1[e])
            gate, up = hidden.chunk(2)
            out = w2[e] @ (torch.nn.functional.silu(gate) * up) + (0 if b2 is None else b2[e])
            total = total + weight64[t, k] * out
        rows.append(total)
    y = torch.stack(rows)
    of_x, of_weight = torch.autograd.grad((y * dy.double()).sum(), (x64, weight64))
    return y.detach(), of_x, of_weight


@pytest.mark.parametrize(
    ("spare", "told"),
    [("2", "1 blocks of cpu"), ("many", r"PMOE_SPARE_BLOCKS \('many'\) must be a whole number")],
)
def test_blocks_that_are_left_to_others(
    kernels: Path, spare: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = pmoe.MoELayer(72, 64, 4, 2, dtype=BF16, fused=True)
    with emulated(kernels):
        monkeypatch.setenv("PMOE_SPARE_BLOCKS", "1")
        layer(torch.ones(3, 72, dtype=BF16))
        monkeypatch.setenv("PMOE_SPARE_BLOCKS", spare)
        with pytest.raises(ValueError, match=told):
            layer(torch.ones(3, 72, dtype=BF16))
        close_heaps(Ranks())
