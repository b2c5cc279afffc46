"""Experts that use another module's tensors, on one rank, against the plain definition in float64.

Both layouts of the tensors are tried, with several activations and behind a normalisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.experts.base import Experts
from pmoe.experts.borrowed import (
    BorrowedActivation,
    BorrowedFFN,
    BorrowedSwiGLU,
    NormedExperts,
    Stacks,
)
from pmoe.gates import ExternalGate
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES
from tests.allocated import Allocated
from tests.switched import switched_layer

TOKENS, TOP_K, EXPERTS, D_MODEL, D_HIDDEN = 14, 3, 5, 8, 12


def clamped(gate_up: Tensor) -> Tensor:
    """gpt-oss's activation: columns of the gate and of the other factor alternate."""
    gate, up = gate_up[..., ::2].clamp(max=0.7), gate_up[..., 1::2].clamp(-0.5, 0.5)
    return (up + 1) * gate * torch.sigmoid(1.7 * gate)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def squared(hidden: Tensor) -> Tensor:
    return F.relu(hidden) ** 2


def made(kind: str, stacks: Stacks) -> tuple[Experts, Callable[[Tensor], Tensor]]:
    """Returns the experts of a kind, and a plain function that computes their activation."""
    if kind == "swiglu":
        return BorrowedSwiGLU(stacks), swiglu
    if kind == "gelu":
        return BorrowedFFN(replace(stacks, activation="gelu")), F.gelu
    function = squared if kind == "squared" else clamped
    return BorrowedActivation(replace(stacks, activation=function)), function


class Case:
    """The parameters, the input and the routing of one comparison. All of them require gradients."""

    def __init__(self, kind: str, *, transposed: bool, bias: bool, normed: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)

        def leaf(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator))

        wide = D_HIDDEN * (1 if kind in ("gelu", "squared") else 2)
        up, down = (D_MODEL, wide), (D_HIDDEN, D_MODEL)
        w1 = leaf(EXPERTS, *(up if transposed else up[::-1]))
        w2 = leaf(EXPERTS, *(down if transposed else down[::-1]))
        b1, b2 = (leaf(EXPERTS, wide), leaf(EXPERTS, D_MODEL)) if bias else (None, None)
        self.stacks = Stacks(w1=w1, w2=w2, b1=b1, b2=b2, transposed=transposed)
        self.experts, self.activation = made(kind, self.stacks)
        self.norm = nn.LayerNorm(D_MODEL, dtype=torch.float64) if normed else None
        if self.norm is not None:
            with torch.no_grad():
                self.norm.weight.copy_(1 + 0.1 * leaf(D_MODEL))
            self.experts = NormedExperts(replace(self.stacks, activation=self.activation, norm=self.norm))
        self.x, self.weight = leaf(TOKENS, D_MODEL), leaf(TOKENS, TOP_K)
        # The last expert gets nothing.
        self.expert = torch.rand(TOKENS, EXPERTS - 1, generator=generator).argsort(1)[:, :TOP_K]
        self.keep = torch.rand(TOKENS, TOP_K, generator=generator) < 0.8
        self.dy = torch.randn(TOKENS, D_MODEL, dtype=torch.float64, generator=generator)

    @property
    def leaves(self) -> dict[str, Tensor]:
        norm = {} if self.norm is None else dict(self.norm.named_parameters(prefix="norm"))
        return {"x": self.x, "weight": self.weight, **self.stacks.named, **norm}

    def definition(self) -> Tensor:
        rows = []
        for t in range(TOKENS):
            total = torch.zeros(D_MODEL, dtype=torch.float64)
            for k in range(TOP_K):
                if self.keep[t, k]:
                    total = total + self.weight[t, k] * self.expert_of(int(self.expert[t, k]), self.x[t])
            rows.append(total)
        return torch.stack(rows)

    def expert_of(self, e: int, x: Tensor) -> Tensor:
        held = {name: each[e] for name, each in self.stacks.named.items()}
        w1, w2 = (held[name].t() if self.stacks.transposed else held[name] for name in ("w1", "w2"))
        out = w2 @ self.activation(w1 @ x + held.get("b1", 0.0)) + held.get("b2", 0.0)
        return out if self.norm is None else self.norm(out)

    def gradients(self, y: Tensor) -> dict[str, Tensor]:
        named = self.leaves
        found = torch.autograd.grad(y, list(named.values()), self.dy)
        return dict(zip(named, found, strict=True))

    def layer(self, **options: Any) -> tuple[pmoe.MoELayer, ExternalGate]:
        gate = ExternalGate()
        layer = switched_layer(
            D_MODEL, D_HIDDEN, EXPERTS, TOP_K, gate=gate, expert=self.experts, group=Ranks.single(), **options
        )
        return layer, gate


def assert_equal(case: Case, **options: Any) -> None:
    layer, gate = case.layer(**options)
    with gate.routing(case.expert, case.weight, case.keep):
        y = layer(case.x)
    wanted = case.definition()
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    found, plain = case.gradients(y), case.gradients(wanted)
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["swiglu", "gelu", "squared", "clamped"])
def test_every_layout_equals_the_definition(kind: str, transposed: bool, bias: bool) -> None:
    assert_equal(Case(kind, transposed=transposed, bias=bias))
    assert_equal(Case(kind, transposed=transposed, bias=bias), pipeline=3, bypass_local=False)


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_every_way_to_restore_equals_the_definition(pair: pmoe.Restore, normed: bool) -> None:
    for backward in (None, 4, 1):
        case = Case("clamped", transposed=True, bias=True, normed=normed)
        options = {"pipeline": 2, "pipeline_backward": backward, "memory_reuse": pair}
        if normed and backward == 4 and pair.hidden != "recompute":  # autograd's graphs cannot be split
            with pytest.raises(ValueError, match=r"pipeline_backward \(4\) must divide pipeline \(2\)"):
                case.layer(**options)
        else:
            assert_equal(case, **options)


def test_the_parameters_are_the_owners_own_and_gradients_lie_as_they_do() -> None:
    case = Case("clamped", transposed=True, bias=True)
    held = case.stacks.named
    parameters = list(case.experts.parameters())
    assert all(a is b for a, b in zip(parameters, held.values(), strict=True))
    assert not case.experts.state_dict() and not hasattr(parameters[0], "allreduce")
    layer, gate = case.layer()
    with gate.routing(case.expert, case.weight, case.keep):
        layer(case.x).sum().backward()
    for each in held.values():
        assert each.grad is not None and each.grad.stride() == each.stride()
    left = type(case.experts)(case.stacks.stand_ins())
    for each, other in zip(left.parameters(), held.values(), strict=True):
        assert each.shape == other.shape and each.untyped_storage().nbytes() == each.element_size()


@pytest.mark.parametrize("frozen", ["w1", "w2", "b1", "b2"])
def test_a_frozen_parameter_gets_no_gradient_and_the_others_keep_theirs(frozen: str) -> None:
    case = Case("clamped", transposed=True, bias=True)
    wanted = case.gradients(case.definition())
    case.stacks.named[frozen].requires_grad_(False)
    layer, gate = case.layer()
    with gate.routing(case.expert, case.weight, case.keep):
        layer(case.x).backward(case.dy)
    for name, each in case.leaves.items():
        if name == frozen:
            assert each.grad is None
        else:
            torch.testing.assert_close(each.grad, wanted[name], rtol=1e-11, atol=1e-12)


def test_a_layer_that_is_given_no_routing_says_so() -> None:
    case = Case("swiglu", transposed=False, bias=False)
    layer, gate = case.layer()
    with pytest.raises(RuntimeError, match=r"inside `with gate.routing"):
        layer(case.x)
    with (
        pytest.raises(ValueError, match=r"expert of shape .* to fit T = 14 tokens"),
        gate.routing(case.expert[:9], case.weight),
    ):
        layer(case.x)
    with pytest.raises(ValueError, match=r"expert"), gate.routing(case.expert + EXPERTS, case.weight):
        layer(case.x)


SIZES = (64, 128, 8, 2)


@pytest.mark.parametrize("pair", [KEEP, STRATEGIES["S4"]], ids=str)
@pytest.mark.parametrize("kind", ["swiglu", "clamped"])
def test_memory_is_predicted_exactly_with_pmoes_kernels_and_bounded_with_other_functions(
    kind: str, pair: pmoe.Restore
) -> None:
    d_model, d_hidden, num_experts, top_k = SIZES
    tokens, generator = 4096, torch.Generator().manual_seed(0)
    w1 = nn.Parameter(0.1 * torch.randn(num_experts, 2 * d_hidden, d_model, generator=generator))
    w2 = nn.Parameter(0.1 * torch.randn(num_experts, d_model, d_hidden, generator=generator))
    experts, _ = made(kind, Stacks(w1=w1, w2=w2))
    gate = ExternalGate()
    layer = pmoe.MoELayer(
        *SIZES, gate=gate, expert=experts, group=Ranks.single(), pipeline=4, memory_reuse=pair,
        memory_budget="100MiB",
    )  # fmt: skip
    expert = torch.rand(tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    x = torch.randn(tokens, d_model, generator=generator).requires_grad_()
    weight, keep = torch.rand(tokens, top_k).requires_grad_(), torch.ones(tokens, top_k, dtype=torch.bool)
    dy = torch.ones(tokens, d_model)

    def step(mark: Callable[[], None]) -> Tensor:
        with gate.routing(expert, weight, keep):
            y: Tensor = layer(x)
        mark()
        y.backward(dy)
        return y

    step(lambda: None)
    for each in (x, weight, w1, w2):
        each.grad = None
    found = Allocated(step)
    predicted = layer.predict_memory(tokens, layer.row_counts).peak / found.peak
    assert 0.995 < predicted < (1.02 if kind == "swiglu" else 1.12)


@pytest.mark.parametrize("pair", [False, *ALL_PAIRS], ids=str)
def test_an_activation_may_write_over_what_it_is_given(pair: Any) -> None:
    """An activation that works in place (inplace=True) must not spoil T_M, which backward needs."""
    case = Case("squared", transposed=True, bias=True)
    stacks = replace(case.stacks, activation=lambda hidden: F.relu(hidden, inplace=True) ** 2)
    case.experts = BorrowedActivation(stacks)
    assert_equal(case, pipeline=2, memory_reuse=pair)
