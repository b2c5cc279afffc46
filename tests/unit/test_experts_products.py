"""The grouped products of experts: every way to compute them, and which way is taken."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pmoe.experts.products import (
    GradientSum,
    RowGroups,
    choice,
    expert_input_gradient,
    expert_product,
)
from pmoe.kernels import grouped_gemm, registry
from pmoe.kernels.registry import GROUPED_MM, LOOP, PMOE, PRODUCTS, ProductOperands, ProductRequest, Registry
from pmoe.measure.product_choices import compute, random_operands
from pmoe.warn import GIVEN
from tests.reference import relative_error

NAN = float("nan")


def groups_of(*counts: int) -> RowGroups:
    return RowGroups(counts=counts, ends=torch.tensor(counts).cumsum(0).int())


@pytest.fixture(params=[LOOP, GROUPED_MM, PMOE])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with every way to compute a grouped product.

    The CPU has grouped_mm, but the layer does not use it there. In the place of pmoe's kernels runs their
    plain definition, which is called as the kernels are.
    """
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
    rows = torch.arange(10).view(5, 2)
    several = [
        (expert, a.tolist(), b.tolist())
        for expert, a, b in RowGroups(counts=(2, 0, 3)).rows_by_expert(rows, rows[:, 0])
    ]
    assert several == [(0, [[0, 1], [2, 3]], [0, 2]), (2, [[4, 5], [6, 7], [8, 9]], [4, 6, 8])]
    assert [(expert, a is rows) for expert, a in RowGroups(counts=(0, 5)).rows_by_expert(rows)] == [(1, True)]
    assert list(RowGroups(counts=(0, 0)).rows_by_expert(rows[:0])) == []


def test_a_weight_gradient_transposes_once_for_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop over experts made a view for each of them: 64 in a backward pass of 32 experts."""
    counts = (3, 0, 5, 1, 2)
    grad, rows = torch.randn(11, 4), torch.randn(11, 6)
    transposed: list[Tensor] = []
    view = Tensor.t

    def counted(tensor: Tensor) -> Tensor:
        transposed.append(tensor)
        return view(tensor)

    monkeypatch.setattr(Tensor, "t", counted)
    gradient = GradientSum(torch.zeros(5, 4, 6), 2)
    for _ in range(2):  # the second addition adds to the first
        gradient.add_weight(grad, rows, groups_of(*counts), method=LOOP)
    assert [tensor is grad for tensor in transposed] == [True, True]
    starts = [0, 3, 3, 8, 9]
    for total, start, count in zip(gradient.result(), starts, counts, strict=True):
        own = slice(start, start + count)
        expected = 2 * torch.einsum("no,ni->oi", grad[own].double(), rows[own].double())
        torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


CUDA = torch.device("cuda", 0)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def grouped_mm_reasons(
    form: str = "forward", dtype: torch.dtype = torch.bfloat16, **changes: int
) -> list[str]:
    sizes = {"experts": 8, "rows": 100, "in_features": 64, "out_features": 96, "bias": False} | changes
    [candidate] = [each for each in PRODUCTS.candidates if each.name == GROUPED_MM]
    return candidate.reasons(ProductRequest(form=form, device=CUDA, dtype=dtype, **sizes))


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
    """Returns a fake with those attributes of a bfloat16 CUDA tensor that are read before a launch."""
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
    return {candidate.name: candidate.layout_problem(operands) for candidate in PRODUCTS.candidates}


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
    sizes = {"device": CUDA, "dtype": torch.bfloat16, "rows": 100, "in_features": 64, "out_features": 96}
    of_experts = functools.partial(ProductRequest, form="forward", **sizes)
    registry = Registry(PRODUCTS.candidates)
    GIVEN.clear()
    with pytest.warns(UserWarning, match=f"without pmoe's kernels: {why}") as caught:
        for experts in (4, 8):
            request = of_experts(experts=experts)
            assert registry.choose(request) == GROUPED_MM
    assert len(caught) == 1
    request = of_experts(experts=8, bias=True)
    assert registry.choose(request) == LOOP


@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("form", ["forward", "input", "weight"])
def test_what_is_measured_has_every_row_and_one_expert_without_any(form: str, experts: int) -> None:
    state = torch.get_rng_state()
    sizes = {"experts": experts, "rows": 100, "in_features": 16, "out_features": 8}
    request = ProductRequest(form=form, device=torch.device("cpu"), dtype=torch.bfloat16, **sizes)
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
