"""Experts: activations, stacked experts against autograd, and initial values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pmoe
from pmoe.experts import FFNExperts, launched
from pmoe.experts.base import ExpertRows
from pmoe.experts.ffn import ACTIVATIONS, find_activation
from pmoe.experts.products import GradientSum
from pmoe.experts.stacked import StackedExperts
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.kernels.registry import LOOP, PMOE, PRODUCTS
from tests.kit import D_HIDDEN, D_MODEL
from tests.own_experts import mlp
from tests.reference import relative_error
from tests.unit.test_experts_products import groups_of, path  # noqa: F401 (a fixture)

NAN = float("nan")


# ---- activations and stacked experts

OF_AUTOGRAD = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_an_activation_and_its_gradient_equal_autograd(name: str) -> None:
    hidden = torch.cat([torch.linspace(-9, 9, 181, dtype=torch.float64), torch.tensor([-0.0, -40, 40])])
    hidden.requires_grad_()
    grad = torch.linspace(-2, 3, hidden.numel(), dtype=torch.float64)
    expected = OF_AUTOGRAD[name](hidden)
    (expected_grad,) = torch.autograd.grad(expected, hidden, grad)
    activation, plain = find_activation(name), hidden.detach()
    torch.testing.assert_close(activation.value(plain, torch.empty_like(plain)), expected.detach())
    got = grad.clone()
    assert activation.gradient_(got, plain).data_ptr() == got.data_ptr()
    torch.testing.assert_close(got, expected_grad)
    in_place = plain.clone()
    activation.value(in_place, in_place)
    torch.testing.assert_close(in_place, expected.detach())


def test_an_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"activation \('tanh'\) must be one of gelu, relu, silu"):
        find_activation("tanh")


def plain_expert(
    kind: str, x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None
) -> Tensor:
    hidden = F.linear(x, w1, b1)
    if kind == "swiglu":
        gate, up = hidden[:, :D_HIDDEN], hidden[:, D_HIDDEN:]
        return F.linear(F.silu(gate) * up, w2, b2)
    return F.linear(OF_AUTOGRAD[kind](hidden), w2, b2)


def stacked_experts(kind: str, bias: bool) -> StackedExperts:
    torch.manual_seed(1)
    if kind == "swiglu":
        experts: StackedExperts = SwiGLUExperts(D_MODEL, D_HIDDEN, 4, bias=bias, dtype=torch.float64)
    else:
        experts = FFNExperts(D_MODEL, D_HIDDEN, 4, activation=kind, bias=bias, dtype=torch.float64)
    for expert in range(4):
        experts.initialise_expert(expert)
    return experts


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("path", [LOOP, PMOE], indirect=True)
@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 0, 0)])
def test_stacked_experts_equal_autograd(kind: str, bias: bool, counts: tuple[int, ...]) -> None:
    experts, groups = stacked_experts(kind, bias), groups_of(*counts)
    rows = torch.randn(sum(counts), D_MODEL, dtype=torch.float64)
    weight = torch.rand(sum(counts), dtype=torch.float64)
    grad = torch.randn(sum(counts), D_MODEL, dtype=torch.float64)

    leaves = [rows.clone().requires_grad_(), weight.clone().requires_grad_()]
    named = {name: p.detach().clone().requires_grad_() for name, p in experts.named_parameters()}
    out = torch.zeros_like(rows)
    for e, at in groups.slices():
        each = [named[name][e] if name in named else None for name in ("w1", "w2", "b1", "b2")]
        out = out.index_add(
            0,
            torch.arange(sum(counts))[at],
            plain_expert(kind, leaves[0][at], *each) * leaves[1][at, None],
        )
    expected = torch.autograd.grad(
        (out * grad).sum() + 0 * sum(p.sum() for p in [*leaves, *named.values()]), [*leaves, *named.values()]
    )

    with torch.no_grad():
        parameters = list(experts.parameters())
        given = ExpertRows(rows, groups, parameters)
        got_out, hidden = experts.compute(given, weight)
        kept = [tensor.clone() for tensor in hidden.tensors]
        assert relative_error(got_out, out.detach()) < 1e-13
        thrown_away, nothing = experts.compute(given, weight, keep=False)
        assert torch.equal(thrown_away, got_out)
        assert nothing is None
        for _ in range(2):  # a second backward finds everything as the first did
            sums = [GradientSum(parameter, 1) for parameter in parameters]
            grad_rows, grad_weight, pending = experts.input_gradient(grad.clone(), given, weight, hidden)
            experts.weight_gradient(pending, groups, sums)
            got = [grad_rows, grad_weight, *(s.result() for s in sums)]
            for name, a, b in zip(["rows", "weight", *named], got, expected, strict=True):
                assert relative_error(a, b) < 1e-13, name
        assert all(torch.equal(a, b) for a, b in zip(hidden.tensors, kept, strict=True))


def a_step(experts: StackedExperts, dtype: torch.dtype, expendable: bool) -> list[Tensor]:
    """Returns the output and all gradients of 9 rows, which were drawn in bfloat16.

    Backward has two chunks.
    """
    torch.manual_seed(2)
    rows, grad = (torch.randn(9, experts.w1.shape[2]).bfloat16().to(dtype) for _ in range(2))
    weight = torch.rand(9).to(torch.promote_types(dtype, torch.float32))
    parameters = [parameter.detach().bfloat16().to(dtype) for parameter in experts.parameters()]
    groups, halves = groups_of(3, 0, 5, 1), (groups_of(3, 0, 1, 0), groups_of(0, 0, 4, 1))
    given = ExpertRows(rows, groups, parameters)
    out, kept = experts.compute(given, weight)
    again = experts.recompute(given, None)
    assert torch.equal(again.tensors[0], kept.tensors[0])
    sums = [GradientSum(parameter, 2) for parameter in parameters]
    found = [out]
    for at, half in ((slice(0, 4), halves[0]), (slice(4, 9), halves[1])):
        hidden = experts.join([(kept, [(at, slice(0, half.num_rows))])], half.num_rows)
        hidden = type(hidden)(tensors=hidden.tensors, expendable=expendable)
        given = ExpertRows(rows[at], half, parameters)
        *grads, pending = experts.input_gradient(grad[at].clone(), given, weight[at], hidden)
        experts.weight_gradient(pending, half, sums)
        found += grads
    return [*found, *(each.result() for each in sums)]


@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("expendable", [True, False])
def test_pmoes_kernels_are_at_least_as_exact_as_the_loop(kind: str, bias: bool, expendable: bool) -> None:
    experts = stacked_experts(kind, bias)
    with torch.no_grad():
        exact, loop = (a_step(experts, dtype, expendable) for dtype in (torch.float64, torch.bfloat16))
        with PRODUCTS.forcing(PMOE):
            wide, narrow = (a_step(experts, dtype, expendable) for dtype in (torch.float64, torch.bfloat16))
    for i, expected in enumerate(exact):
        assert relative_error(wide[i], expected) < 1e-13, i
        assert narrow[i].dtype == loop[i].dtype
        error, allowed = (relative_error(found[i].double(), expected) for found in (narrow, loop))
        assert error <= max(2 * allowed, 2.0**-8), i


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_one_launch_makes_the_hidden_and_the_activated_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = stacked_experts(kind, bias=True)
    for name in ("activate", "activation_gradient"):
        monkeypatch.setattr(experts, name, None)  # of the object: the class has its own still
    with PRODUCTS.forcing(PMOE), torch.no_grad():
        a_step(experts, torch.float64, expendable=True)


def test_a_nonlinearity_of_ones_own_is_computed_apart_from_the_products() -> None:
    class Squared(FFNExperts):
        def activate(self, hidden_NG: Tensor, active_NH: Tensor) -> None:
            torch.square(hidden_NG, out=active_NH)

        def activation_gradient(self, grad_NG: Tensor, hidden_NG: Tensor) -> None:
            grad_NG.mul_(2 * hidden_NG)

    experts = Squared(D_MODEL, D_HIDDEN, 4, dtype=torch.float64)
    for expert in range(4):
        experts.initialise_expert(expert)
    assert experts.fused_activation is None
    with torch.no_grad():
        expected = a_step(experts, torch.float64, expendable=False)
        with PRODUCTS.forcing(PMOE):
            got = a_step(experts, torch.float64, expendable=False)
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-13


@pytest.mark.parametrize("name", [*sorted(launched.COMPUTING), "activate", "activation_gradient"])
def test_kernels_are_not_launched_after_a_tool_has_replaced_a_method_of_the_class(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer for a class was cached, and kernels went on computing what the tool had replaced."""
    monkeypatch.setattr(launched, "path_for", lambda device, dtype: "sm_90a")
    experts = FFNExperts(64, 128, 2)
    device = torch.device("cuda", 0)
    assert launched.kernels_for(experts, device, torch.bfloat16) == "sm_90a"
    with monkeypatch.context() as tool:
        tool.setattr(FFNExperts, name, lambda *arguments, **options: None)
        assert launched.kernels_for(experts, device, torch.bfloat16) is None
    assert launched.kernels_for(experts, device, torch.bfloat16) == "sm_90a"


def test_a_hidden_that_is_not_kept_is_not_stored() -> None:
    experts, asked = stacked_experts("swiglu", bias=False), []
    rows, weight = torch.ones(4, D_MODEL, dtype=torch.float64), torch.ones(4, dtype=torch.float64)

    def space(name: str, rows: int, columns: int) -> Tensor:
        asked.append(name)
        return torch.full((rows, columns), NAN, dtype=torch.float64)

    experts._activates_in_place = lambda device_type: False  # as on a GPU
    with PRODUCTS.forcing(PMOE), torch.no_grad():
        given = ExpertRows(rows, groups_of(4, 0, 0, 0), list(experts.parameters()), space)
        out, hidden = experts.compute(given, weight, keep=False)
    assert asked == ["active", "T_DO"]
    assert hidden is None and out.isfinite().all()


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("memory_reuse", [False, "S1", "S2", "S3", "S4"])
def test_a_layer_is_the_same_by_pmoes_kernels(expert: str, memory_reuse: bool | str) -> None:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(
        6, 10, 4, 2, expert=expert, pipeline=3, memory_reuse=memory_reuse, dtype=torch.float64
    )
    x = torch.randn(17, 6, dtype=torch.float64, requires_grad=True)

    def step() -> list[Tensor]:
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]

    expected = step()
    with PRODUCTS.forcing(PMOE):
        got = step()
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("n", [1, 2])
def test_the_layer_passes_gradcheck(expert: str, n: int) -> None:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(
        3, 4, 2, 2, expert=expert, activation="silu", pipeline=n, dtype=torch.float64, z_loss_weight=0.1
    )
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return y, layer.l_aux

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()))


def test_the_columns_of_swiglu_are_the_gate_first() -> None:
    experts = stacked_experts("swiglu", bias=False)
    with torch.no_grad():
        experts.w1[:, :D_HIDDEN] = 0  # silu(0) = 0 whatever the other half holds
        rows = torch.randn(4, D_MODEL, dtype=torch.float64)
        given = ExpertRows(rows, groups_of(1, 1, 1, 1), list(experts.parameters()))
        out, _ = experts.compute(given, torch.ones(4))
    assert not out.any()


# ---- initial values


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_initial_values_are_bounded_as_those_of_linear(expert: str) -> None:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(64, 256, 4, expert=expert)
    for name, fan_in in (("w1", 64), ("b1", 64), ("w2", 256), ("b2", 256)):
        values = getattr(layer.experts, name)
        bound = fan_in**-0.5
        assert values.abs().max() <= bound
        assert values.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
        assert not torch.equal(values[0], values[1])
    assert layer.gate.weight.abs().max() <= 64**-0.5


@pytest.mark.parametrize("expert", ["ffn", mlp])
def test_building_takes_one_seed_from_the_generator_and_no_more(expert: object) -> None:
    """All ranks draw the same numbers after building a layer, even with different numbers of experts."""
    states = []
    for num_experts in (2, 8):
        torch.manual_seed(0)
        pmoe.MoELayer(6, 10, num_experts, gate=nn.Identity(), expert=expert)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_the_same_seed_gives_the_same_layer_and_the_next_layer_differs() -> None:
    torch.manual_seed(0)
    first, second = pmoe.MoELayer(6, 10, 4), pmoe.MoELayer(6, 10, 4)
    torch.manual_seed(0)
    again = pmoe.MoELayer(6, 10, 4)
    for (name, a), b, c in zip(
        first.named_parameters(), again.parameters(), second.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name


def test_a_narrow_layer_starts_from_the_rounded_values_of_a_wide_one() -> None:
    torch.manual_seed(0)
    wide = pmoe.MoELayer(6, 10, 4)
    torch.manual_seed(0)
    narrow = pmoe.MoELayer(6, 10, 4, dtype=torch.bfloat16)
    for name in ("w1", "w2", "b1", "b2"):
        assert torch.equal(getattr(wide.experts, name).bfloat16(), getattr(narrow.experts, name))
