"""Experts: grouped products, activations, stacked experts against autograd, and users' own modules."""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import pmoe
from pmoe.experts import FFNExperts, ModuleExperts, SwiGLUExperts
from pmoe.experts.activations import ACTIVATIONS, find_activation
from pmoe.experts.products import (
    GradientSum,
    RowGroups,
    choice,
    expert_input_gradient,
    expert_product,
)
from pmoe.experts.stacked import StackedExperts
from pmoe.kernels import grouped_gemm, product_request
from pmoe.kernels.candidates import GROUPED_MM, LOOP, PMOE, PRODUCTS
from pmoe.kernels.product_request import ProductOperands, ProductRequest
from pmoe.measure.product_bench import compute, random_operands
from pmoe.warn import GIVEN
from tests.reference import relative_error

D_MODEL, D_HIDDEN = 6, 10
NAN = float("nan")


def groups_of(*counts: int) -> RowGroups:
    return RowGroups(counts=counts, ends=torch.tensor(counts).cumsum(0).int())


# ---- products -------------------------------------------------------------------------------------


@pytest.fixture(params=[LOOP, GROUPED_MM, PMOE])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every way of computing a grouped product. The CPU has grouped_mm, only no use for it; what is forced to
    be pmoe's is there the plain definition, called as the kernels are."""
    with PRODUCTS.forcing(request.param):
        yield request.param


def error_limit(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]


COUNTS = [(3, 0, 5, 1), (0, 0, 9, 0), (1, 2, 3, 4), (0, 0, 0, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_multiplies_each_row_with_its_experts_matrix(
    path: str, counts: tuple[int, ...], dtype: torch.dtype, bias: bool
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 16, dtype=dtype)
    weight = torch.randn(4, 8, 16, dtype=dtype)
    b = torch.randn(4, 8, dtype=dtype) if bias else None
    expert = torch.arange(4).repeat_interleave(torch.tensor(counts))
    expected = torch.einsum("ni,noi->no", rows.double(), weight.double()[expert])
    if b is not None:
        expected = expected + b.double()[expert]
    got = expert_product(rows, weight, groups_of(*counts), b)
    assert got.dtype == dtype
    assert relative_error(got.double(), expected) < error_limit(dtype)
    out = torch.full((sum(counts) + 2, 8), NAN, dtype=dtype)[1:-1]
    assert expert_product(rows, weight, groups_of(*counts), b, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS)
def test_the_input_gradient_multiplies_with_the_untransposed_matrix(
    path: str, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    grad = torch.randn(sum(counts), 8, dtype=dtype)
    weight = torch.randn(4, 8, 16, dtype=dtype)
    expert = torch.arange(4).repeat_interleave(torch.tensor(counts))
    expected = torch.einsum("no,noi->ni", grad.double(), weight.double()[expert])
    got = expert_input_gradient(grad, weight, groups_of(*counts))
    assert relative_error(got.double(), expected) < error_limit(dtype)
    out = torch.full((sum(counts), 16), NAN, dtype=dtype)
    assert expert_input_gradient(grad, weight, groups_of(*counts), out=out) is out
    assert torch.equal(out, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [[c] for c in COUNTS] + [[COUNTS[0], COUNTS[3], COUNTS[1], COUNTS[2]]])
def test_a_gradient_sum_adds_the_chunks_and_experts_without_rows_have_zero(
    path: str, chunks: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight_sum = GradientSum(torch.empty(4, 8, 16, dtype=dtype), len(chunks))
    bias_sum = GradientSum(torch.empty(4, 8, dtype=dtype), len(chunks))
    weight_sum.total.fill_(NAN)  # what the first contribution overwrites
    bias_sum.total.fill_(NAN)
    expected_weight = torch.zeros(4, 8, 16, dtype=torch.float64)
    expected_bias = torch.zeros(4, 8, dtype=torch.float64)
    for counts in chunks:
        grad = torch.randn(sum(counts), 8, dtype=dtype)
        rows = torch.randn(sum(counts), 16, dtype=dtype)
        weight_sum.add_weight(grad, rows, groups_of(*counts))
        bias_sum.add_bias(grad, groups_of(*counts))
        for expert, at in groups_of(*counts).slices():
            expected_weight[expert] += grad[at].double().t() @ rows[at].double()
            expected_bias[expert] += grad[at].double().sum(0)
    for got, expected in ((weight_sum, expected_weight), (bias_sum, expected_bias)):
        assert got.result().dtype == dtype
        assert relative_error(got.result().double(), expected) < error_limit(dtype)
        without_rows = [e for e in range(4) if not any(counts[e] for counts in chunks)]
        assert not got.result()[without_rows].any()


def test_a_gradient_sum_that_nothing_was_added_to_is_zero() -> None:
    for contributions in (0, 1, 3):
        gradient = GradientSum(torch.empty(3, 2), contributions)
        gradient.total.fill_(NAN)
        assert torch.equal(gradient.result(), torch.zeros(3, 2))


def test_narrow_gradients_are_summed_in_float32_and_rounded_once() -> None:
    gradient = GradientSum(torch.empty(1, dtype=torch.bfloat16), 3)
    for value in (256, 1, 1):  # 257 is no bfloat16: it would be rounded back to 256, twice
        gradient.add(torch.tensor([value], dtype=torch.bfloat16))
    assert gradient.result().dtype == torch.bfloat16
    assert gradient.result().item() == 258


def test_groups_give_the_rows_of_each_expert_that_has_some() -> None:
    assert list(RowGroups(counts=(2, 0, 3)).slices()) == [(0, slice(0, 2)), (2, slice(2, 5))]
    assert list(RowGroups(counts=(0, 0)).slices()) == []
    assert RowGroups(counts=(2, 0, 3)).num_rows == 5


CUDA = torch.device("cuda", 0)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_request, "device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def grouped_mm_reasons(
    form: str = "forward", dtype: torch.dtype = torch.bfloat16, **changes: int
) -> list[str]:
    sizes = {"experts": 8, "rows": 100, "in_features": 64, "out_features": 96, "bias": False} | changes
    [candidate] = [each for each in PRODUCTS.candidates if each.name == GROUPED_MM]
    return candidate.reasons(ProductRequest.of(form, CUDA, dtype, **sizes))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": torch.float32}, "dtype torch.float32"),
        ({"dtype": torch.float64}, "dtype torch.float64"),
        ({"bias": True}, "bias: grouped_mm has none"),
        ({"experts": 1024}, "1024 experts: grouped_mm takes fewer than 1024"),
        ({"in_features": 60}, "in_features: a row of 60 elements is no multiple of 16 bytes"),
        (
            {"out_features": 60, "form": "input"},
            "out_features: a row of 60 elements is no multiple of 16 bytes",
        ),
        ({"out_features": 60, "form": "weight"}, "out_features: a row of 60 elements is no multiple of 16"),
    ],
)
def test_grouped_mm_is_refused_for_a_reason(changes: dict[str, int], reason: str, h200: None) -> None:
    [found] = grouped_mm_reasons(**changes)
    assert found.startswith(reason)


@pytest.mark.parametrize("capability", [(8, 9), (12, 0)])
def test_grouped_mm_is_refused_where_it_would_loop(
    capability: tuple[int, int], h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    [found] = grouped_mm_reasons()
    assert found.startswith("compute capability {}.{}".format(*capability))


def test_grouped_mm_takes_bfloat16_and_results_of_any_number_of_columns(h200: None) -> None:
    assert grouped_mm_reasons() == grouped_mm_reasons(out_features=7) == []


def cuda_operand(
    *shape: int, address: int = 256, stride: int | None = None, contiguous: bool = True
) -> Tensor:
    """As much of a bfloat16 CUDA tensor as is looked at before a launch."""
    stride = shape[-1] if stride is None else stride
    return SimpleNamespace(
        is_cuda=True,
        device=CUDA,
        dtype=torch.bfloat16,
        shape=shape,
        element_size=lambda: 2,
        numel=lambda: math.prod(shape),
        data_ptr=lambda: address,
        stride=lambda dim=None: (stride, 1) if dim is None else (stride, 1)[dim],
        is_contiguous=lambda: contiguous and stride == shape[-1],
    )


def forward_operands(**changes: Tensor) -> ProductOperands:
    operands = {"first": cuda_operand(100, 64), "second": cuda_operand(8, 96, 64)} | changes
    return ProductOperands("forward", experts=8, **operands)


def misfits(operands: ProductOperands) -> dict[str, str | None]:
    return {candidate.name: candidate.misfit(operands) for candidate in PRODUCTS.candidates}


def test_operands_as_they_should_be_fit_every_way() -> None:
    out = cuda_operand(100, 96)
    assert misfits(forward_operands(out=out)) == {PMOE: None, GROUPED_MM: None, LOOP: None}


ROWS_APART = "rows of shape (100, 64) and strides (128, 1) must be contiguous"


def test_rows_with_gaps_fit_pmoe_alone() -> None:
    found = misfits(forward_operands(first=cuda_operand(100, 64, stride=128)))
    assert found == {PMOE: None, GROUPED_MM: ROWS_APART, LOOP: None}


@pytest.mark.parametrize(
    "changes, of_pmoe, of_grouped_mm",
    [
        (
            {"first": cuda_operand(100, 64, address=258)},
            "rows at address 0x102 must",
            "rows at address 0x102 must be al",
        ),
        (
            {"second": cuda_operand(8, 96, 64, address=8)},
            "weight at address 0x8",
            "weight at address 0x8 must be al",
        ),
        (
            {"second": cuda_operand(8, 96, 64, contiguous=False)},
            "weight of shape (8, 96, 64)",
            "weight of shape",
        ),
        (
            {"first": cuda_operand(100, 64, stride=66)},
            "rows of shape (100, 64) and strides (66, 1)",
            "rows of",
        ),
        ({"out": cuda_operand(100, 96, address=8)}, "out at address 0x8 must be aligned to 16 bytes", None),
        (
            {"bias": cuda_operand(8, 96, address=8)},
            "bias at address 0x8 must be aligned to 16 bytes",
            "bias: grouped_mm has none",
        ),
    ],
)
def test_operands_that_one_launch_cannot_take_are_refused(
    changes: dict[str, Tensor], of_pmoe: str, of_grouped_mm: str | None
) -> None:
    found = misfits(forward_operands(**changes))
    assert found[LOOP] is None
    assert (found[PMOE] or "").startswith(of_pmoe)
    assert (found[GROUPED_MM] or "None").startswith(str(of_grouped_mm))


def test_the_cpu_loops_without_asking_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PRODUCTS, "choose", None)
    rows, weight = torch.ones(3, 16), torch.ones(2, 8, 16)
    assert choice("forward", rows, weight, groups_of(1, 2)) == LOOP
    assert torch.equal(expert_product(rows, weight, groups_of(1, 2)), torch.full((3, 8), 16.0))


def test_on_a_gpu_the_registry_is_asked_with_the_rows_in_a_bucket(
    h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(PRODUCTS, "choose", lambda request, operands: asked.append(request) or PMOE)
    rows, grad, weight = cuda_operand(100, 64), cuda_operand(100, 96), cuda_operand(8, 96, 64)
    groups = RowGroups(counts=(100,) + (0,) * 7)
    assert choice("forward", rows, weight, groups, cuda_operand(8, 96)) == PMOE
    choice("input", grad, weight, groups)
    choice("weight", grad, rows, groups)
    sizes = {(each.experts, each.rows, each.in_features, each.out_features) for each in asked}
    assert sizes == {(8, 128, 64, 96)}
    assert [(each.form, each.bias) for each in asked] == [
        ("forward", True),
        ("input", False),
        ("weight", False),
    ]
    assert choice("forward", rows, weight, RowGroups(counts=(0,) * 8)) == LOOP, "there is nothing to launch"


def test_without_the_extension_grouped_mm_computes_and_a_warning_says_so_once(
    h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "pmoe._cuda is not built"
    monkeypatch.setattr(grouped_gemm, "refusal", lambda device, dtype, **columns: why)
    sizes = {"rows": 100, "in_features": 64, "out_features": 96}
    of_experts = functools.partial(ProductRequest.of, "forward", CUDA, torch.bfloat16, **sizes)
    PRODUCTS.forget()
    GIVEN.clear()
    try:
        with pytest.warns(UserWarning, match=f"without pmoe's kernels: {why}") as caught:
            for experts in (4, 8):
                request = of_experts(experts=experts)
                assert PRODUCTS.choose(request) == GROUPED_MM
        assert len(caught) == 1
        request = of_experts(experts=8, bias=True)
        assert PRODUCTS.choose(request) == LOOP
    finally:
        PRODUCTS.forget()


@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("form", ["forward", "input", "weight"])
def test_what_is_measured_has_every_row_and_one_expert_without_any(form: str, experts: int) -> None:
    state = torch.get_rng_state()
    sizes = {"experts": experts, "in_features": 16, "out_features": 8}
    request = ProductRequest.of(form, torch.device("cpu"), torch.bfloat16, rows=100, **sizes)
    operands, groups = random_operands(request)
    assert operands.request == request
    counts = groups.counts
    assert sum(counts) == 128 == operands.first.shape[0]
    assert (len(counts), counts.count(0), min(counts)) == (
        experts,
        int(experts > 1),
        0 if experts > 1 else 128,
    )
    assert groups.ends.tolist()[-1] == 128
    for candidate in PRODUCTS.candidates:
        if operands.out is not None:
            operands.out.fill_(NAN)
        compute(candidate.name, operands, groups)
        assert operands.out is None or operands.out.isfinite().all()
    assert torch.equal(torch.get_rng_state(), state)


# ---- activations and stacked experts --------------------------------------------------------------

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


@pytest.mark.parametrize("path", [LOOP, PMOE], indirect=True)
@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 0, 0)])
def test_stacked_experts_equal_autograd(path: str, kind: str, bias: bool, counts: tuple[int, ...]) -> None:
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
        got_out, hidden = experts.compute(rows, weight, groups, parameters)
        kept = [tensor.clone() for tensor in hidden.tensors]
        assert relative_error(got_out, out.detach()) < 1e-13
        thrown_away, nothing = experts.compute(rows, weight, groups, parameters, keep=False)
        assert torch.equal(thrown_away, got_out)
        assert nothing is None
        for _ in range(2):  # a second backward finds everything as the first did
            sums = [GradientSum(parameter, 1) for parameter in parameters]
            grad_rows, grad_weight, pending = experts.input_gradient(
                grad.clone(), rows, weight, hidden, groups, parameters
            )
            experts.weight_gradient(pending, groups, sums)
            got = [grad_rows, grad_weight, *(s.result() for s in sums)]
            for name, a, b in zip(["rows", "weight", *named], got, expected, strict=True):
                assert relative_error(a, b) < 1e-13, name
        assert all(torch.equal(a, b) for a, b in zip(hidden.tensors, kept, strict=True))


def a_step(experts: StackedExperts, dtype: torch.dtype, expendable: bool) -> list[Tensor]:
    """Output and every gradient, of 9 rows drawn in bfloat16, by two chunks of backward."""
    torch.manual_seed(2)
    rows, grad = (torch.randn(9, experts.w1.shape[2]).bfloat16().to(dtype) for _ in range(2))
    weight = torch.rand(9).to(torch.promote_types(dtype, torch.float32))
    parameters = [parameter.detach().bfloat16().to(dtype) for parameter in experts.parameters()]
    groups, halves = groups_of(3, 0, 5, 1), (groups_of(3, 0, 1, 0), groups_of(0, 0, 4, 1))
    out, kept = experts.compute(rows, weight, groups, parameters)
    again = experts.recompute(rows, groups, parameters, None)
    assert torch.equal(again.tensors[0], kept.tensors[0])
    sums = [GradientSum(parameter, 2) for parameter in parameters]
    found = [out]
    for at, half in ((slice(0, 4), halves[0]), (slice(4, 9), halves[1])):
        hidden = experts.join([(kept, [(at, slice(0, half.num_rows))])], half.num_rows)
        hidden = type(hidden)(tensors=hidden.tensors, expendable=expendable)
        *grads, pending = experts.input_gradient(
            grad[at].clone(), rows[at], weight[at], hidden, half, parameters
        )
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


def test_a_hidden_that_is_not_kept_is_not_stored() -> None:
    experts, asked = stacked_experts("swiglu", bias=False), []
    rows, weight = torch.ones(4, D_MODEL, dtype=torch.float64), torch.ones(4, dtype=torch.float64)

    def space(name: str, rows: int, columns: int) -> Tensor:
        asked.append(name)
        return torch.full((rows, columns), NAN, dtype=torch.float64)

    experts._activates_in_place = lambda device_type: False  # as on a GPU
    with PRODUCTS.forcing(PMOE), torch.no_grad():
        parameters = list(experts.parameters())
        out, hidden = experts.compute(
            rows, weight, groups_of(4, 0, 0, 0), parameters, space=space, keep=False
        )
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
        out, _ = experts.compute(rows, torch.ones(4), groups_of(1, 1, 1, 1), list(experts.parameters()))
    assert not out.any()


# ---- users' own modules ---------------------------------------------------------------------------


def mlp(d_model: int, d_hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d_model, d_hidden), nn.Tanh(), nn.Linear(d_hidden, d_model)).double()


def mlp_without_arguments() -> nn.Module:
    return mlp(D_MODEL, D_HIDDEN)


def module_layer(expert: object, *, top_k: int = 2, n: int = 1, num_experts: int = 4) -> pmoe.MoELayer:
    torch.manual_seed(5)
    layer = pmoe.MoELayer(
        D_MODEL, D_HIDDEN, num_experts, top_k, expert=expert, pipeline=n, dtype=torch.float64
    )
    with torch.no_grad():
        layer.gate.weight *= 3
    return layer


def tokens(count: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, D_MODEL, generator=generator, dtype=torch.float64)
    x[:, 0] = x[:, 0].abs() + 1
    return x


def by_the_definition(layer: pmoe.MoELayer, x: Tensor, parameters: list[Tensor]) -> Tensor:
    """Loops over tokens and choices, calling the modules one row at a time, under autograd."""
    routing = layer.gate(x)
    rows = []
    for t in range(x.shape[0]):
        outs = [
            weight * layer.experts.local[expert](x[t : t + 1])[0]
            for expert, weight in zip(routing.expert[t], routing.weight[t], strict=True)
        ]
        rows.append(sum(outs))
    return torch.stack(rows)


@pytest.mark.parametrize("expert", [mlp, mlp_without_arguments, lambda *sizes: mlp(*sizes)])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("top_k", [1, 2])
def test_modules_equal_the_definition(expert: Callable[..., nn.Module], n: int, top_k: int) -> None:
    layer = module_layer(expert, n=n, top_k=top_k)
    x, dy = tokens().requires_grad_(), tokens() - 1
    leaves = [x, *layer.parameters()]
    expected = by_the_definition(layer, x, leaves)
    expected_grads = torch.autograd.grad((expected * dy).sum(), leaves, allow_unused=True)
    y = layer(x)
    grads = torch.autograd.grad((y * dy).sum(), leaves)
    assert relative_error(y, expected) < 1e-12
    for got, want in zip(grads, expected_grads, strict=True):
        assert relative_error(got, torch.zeros_like(got) if want is None else want) < 1e-12


def test_each_local_expert_is_an_instance_of_its_own_with_its_own_weights() -> None:
    layer = module_layer(mlp)
    modules = list(layer.experts.local)
    assert len(modules) == len(set(modules)) == 4
    first = [module[0].weight for module in modules]
    assert all(not torch.equal(a, b) for a, b in zip(first, first[1:], strict=False))


def test_each_row_reaches_the_module_of_its_expert() -> None:
    class Times(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

        def forward(self, rows: Tensor) -> Tensor:
            return rows * self.factor

    layer = module_layer(nn.ModuleList(Times(i + 1.0) for i in range(4)), top_k=1, n=2)
    x = tokens()
    routing = layer.gate(x)
    assert len(routing.expert.unique()) > 1
    torch.testing.assert_close(layer(x), x * (routing.expert + 1) * routing.weight)


def test_an_expert_runs_once_a_chunk_in_forward_and_never_in_backward() -> None:
    layer = module_layer(mlp, n=3)
    calls: list[int] = []
    for i, module in enumerate(layer.experts.local):
        module.register_forward_hook(lambda _, args, out, i=i: calls.append(i))
    x = tokens(12).requires_grad_()
    y = layer(x)
    expert_T = layer.gate(x).expert
    per_chunk = [sorted(set(expert_T[start : start + 4].flatten().tolist())) for start in (0, 4, 8)]
    assert calls == sum(per_chunk, [])
    y.sum().backward()
    assert calls == sum(per_chunk, [])


@pytest.mark.parametrize("n", [1, 2])
def test_experts_without_rows_have_zero_gradients_not_none(n: int) -> None:
    layer = module_layer(mlp, top_k=1, n=n)
    with torch.no_grad():
        layer.gate.weight[2, 0] = 40  # every token's first column is positive
    layer(tokens()).sum().backward()
    assert layer.tokens_per_expert.tolist() == [0, 0, 11, 0]
    for i, module in enumerate(layer.experts.local):
        for parameter in module.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.any()) == (i == 2)


def test_frozen_parameters_have_no_gradient_and_the_others_their_own() -> None:
    layer, whole = module_layer(mlp), module_layer(mlp)
    for module in layer.experts.local:
        module[0].weight.requires_grad_(False)
    x, x_whole = tokens().requires_grad_(), tokens().requires_grad_()
    layer(x).sum().backward()
    whole(x_whole).sum().backward()
    assert torch.equal(x.grad, x_whole.grad)
    for (name, a), (_, b) in zip(layer.named_parameters(), whole.named_parameters(), strict=True):
        if name.endswith("0.weight") and name.startswith("experts"):
            assert a.grad is None
        else:
            assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("module", [nn.Identity, lambda: nn.Tanh(), lambda: nn.Flatten()])
def test_modules_without_parameters_pass_the_gradient_on(module: Callable[[], nn.Module]) -> None:
    layer = module_layer(module, top_k=1, n=2)
    x, x_plain = tokens().requires_grad_(), tokens().requires_grad_()
    layer(x).sum().backward()
    (module()(x_plain) * layer.gate(x_plain).weight).sum().backward()
    torch.testing.assert_close(x.grad, x_plain.grad)


def test_modules_that_cut_the_graph_give_no_gradient_to_their_rows() -> None:
    class Constant(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return torch.ones_like(rows)

    layer = module_layer(lambda: Constant(), top_k=1)
    x, x_plain = tokens().requires_grad_(), tokens().requires_grad_()
    layer(x).sum().backward()
    (D_MODEL * layer.gate(x_plain).weight.sum()).backward()
    torch.testing.assert_close(x.grad, x_plain.grad)


def test_one_module_shared_by_all_experts_sums_their_gradients() -> None:
    shared = mlp_without_arguments()
    layer = module_layer(nn.ModuleList([shared] * 4), n=2)
    x = tokens()
    layer(x).sum().backward()
    got = [parameter.grad.clone() for parameter in shared.parameters()]
    shared.zero_grad()
    shared(x).sum().backward()  # the weights of a token sum to 1
    for a, b in zip(got, shared.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad)


def test_dropout_is_drawn_once_and_the_same_under_one_seed() -> None:
    def dropping(d_model: int, d_hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(d_model, d_hidden), nn.Dropout(0.5), nn.Linear(d_hidden, d_model))

    layer = module_layer(dropping, top_k=1, n=2)
    x = tokens().requires_grad_()
    runs = []
    for _ in range(2):
        torch.manual_seed(11)
        y = layer(x)
        runs.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_one_backward_frees_what_the_modules_saved() -> None:
    """The graphs outlive a backward as long as y does, so they must not hold their tensors."""
    seen: list[weakref.ref[Tensor]] = []

    class Remember(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            square = rows * 2
            seen.append(weakref.ref(square.untyped_storage()))
            return square.square()  # saves its input

    layer = module_layer(lambda: Remember(), top_k=1)
    y = layer(tokens())
    assert seen
    assert all(ref() is not None for ref in seen)
    y.sum().backward()
    assert all(ref() is None for ref in seen)
    seen.clear()
    y = layer(tokens())
    del y  # without a backward: no cycle that only the garbage collector would find
    layer.l_aux = None
    assert all(ref() is None for ref in seen)


def test_outer_hooks_see_what_the_modules_save() -> None:
    """Checkpointing and offloading work by such hooks; were they blind to modules, both would do nothing."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    layer = module_layer(mlp, top_k=1)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(tokens())
    hidden_rows = sum(
        t.shape[0] for t in packed if t.dim() == 2 and t.shape[1] == D_HIDDEN and t.shape[0] <= 11
    )
    assert hidden_rows >= 11


@pytest.mark.parametrize(
    "expert, error, match",
    [
        ("moe", ValueError, r"expert \('moe'\) must be ffn, swiglu, or a callable"),
        (nn.Linear(6, 6), TypeError, r"expert \(Linear.*must be a name, a callable that builds one expert"),
        (3, TypeError, r"expert \(3\) must be a name, a callable"),
        (lambda a, b, c: None, ValueError, r"must be callable as expert\(d_model, d_hidden\) or expert\(\)"),
        (lambda a: None, ValueError, r"must be callable as expert\(d_model, d_hidden\) or expert\(\)"),
        (lambda: "no module", TypeError, "must build a torch.nn.Module, not str"),
        (
            nn.ModuleList([nn.Identity()] * 3),
            ValueError,
            r"ModuleList of 3\) must hold this rank's 4 experts",
        ),
        (FFNExperts(6, 10, 2), ValueError, r"FFNExperts of 2\) must hold this rank's 4 experts"),
    ],
)
def test_what_is_no_expert_is_refused_when_built(expert: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        module_layer(expert)


def test_modules_that_return_something_else_are_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match=r"Linear returned shape \(\d+, 7\); it must be that of its rows"):
        module_layer(lambda: nn.Linear(6, 7))(tokens())
    with pytest.raises(TypeError, match="LSTM must return a tensor, not tuple"):
        module_layer(lambda: nn.LSTM(6, 6))(tokens())


def test_given_experts_are_taken_as_they_are() -> None:
    experts = ModuleExperts(mlp_without_arguments() for _ in range(4))
    assert module_layer(experts).experts is experts
    modules = nn.ModuleList(mlp_without_arguments() for _ in range(4))
    before = copy.deepcopy(modules.state_dict())
    layer = module_layer(modules)
    assert list(layer.experts.local) == list(modules)
    assert all(torch.equal(a, b) for a, b in zip(modules.state_dict().values(), before.values(), strict=True))


# ---- initial values -------------------------------------------------------------------------------


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
    """So a model built under one seed stays in step on all ranks, however many experts each holds."""
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
