"""The grouped products on a GPU: every element against float64, over poison, whatever the groups.

Where a GPU runs Hopper's kernels, those of sm_80 run there too, and every test runs with each, and with pairs
of blocks. Operands are drawn on the CPU, and results are compared there: the device runs nothing but the
kernels, so that test_ptx.py can run the tests named every_element where PyTorch's own cannot be loaded.

Letters: N rows, E experts, K choices, S slots, I in-features, O out-features, M = d_model, H = d_hidden,
G = H or 2H rows of w1.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pmoe.kernels import grouped_gemm
from pmoe.kernels.gemm import FORWARD
from pmoe.kernels.gemm import INPUT as INPUT_FORM
from pmoe.kernels.grouped_gemm import RowSlots, launch
from pmoe.kernels.operands import at
from tests.gpu.grouped import (
    ACTIVATE,
    DTYPES,
    GROUPS,
    HIDDEN,
    HIDDEN_GRADIENT,
    INPUT,
    NAN,
    PRODUCT,
    ROUNDING,
    SIZES,
    SUMS,
    WEIGHT,
    Case,
    assert_near,
    check_hidden,
    check_hidden_gradient,
    check_input_gradient,
    check_product,
    check_weight_gradient,
    everything,
    path,  # noqa: F401 (a fixture)
    sums_without_pytorch_kernels,  # noqa: F401 (a fixture)
)
from tests.gpu.support import DEVICE, NEEDS_GPU, poison_memory, relative_norm

pytestmark = NEEDS_GPU


# ---- every element

by_groups = pytest.mark.parametrize("counts", GROUPS.values(), ids=GROUPS.keys())
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_size = pytest.mark.parametrize("sizes", SIZES, ids=str)
by_activation = pytest.mark.parametrize("activation", list(ACTIVATE))
MIXED = (130, 0, 257, 3)


@by_groups
@by_dtype
def test_every_element_of_a_product(
    random: torch.Generator, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    for of_case, options in PRODUCT:
        check_product(Case(random, counts, dtype, **of_case), 72, 264, **options)


@by_size
def test_every_element_of_a_product_of_any_size(random: torch.Generator, sizes: tuple[int, int]) -> None:
    for of_case, options in PRODUCT:
        check_product(Case(random, MIXED, **of_case), *sizes, **options)


@by_groups
@by_activation
def test_every_element_of_the_hidden(
    random: torch.Generator, counts: tuple[int, ...], activation: str
) -> None:
    for dtype, (of_case, options) in zip(itertools.cycle(DTYPES), HIDDEN):
        check_hidden(Case(random, counts, dtype, **of_case), 72, 136, activation, **options)


@by_size
@by_dtype
def test_every_element_of_the_hidden_of_any_size(
    random: torch.Generator, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    for activation, (of_case, options) in itertools.product(("gelu", "swiglu"), HIDDEN):
        check_hidden(Case(random, MIXED, dtype, **of_case), *sizes, activation, **options)


@by_groups
@by_dtype
def test_every_element_of_the_input_gradient(
    random: torch.Generator, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    for of_case, options in INPUT:
        check_input_gradient(Case(random, counts, dtype, **of_case), 264, 72, **options)


@by_size
def test_every_element_of_the_input_gradient_of_any_size(
    random: torch.Generator, sizes: tuple[int, int]
) -> None:
    for of_case, options in INPUT:
        check_input_gradient(Case(random, MIXED, **of_case), *sizes, **options)


@by_groups
@by_activation
def test_every_element_of_the_hidden_gradient(
    random: torch.Generator, counts: tuple[int, ...], activation: str
) -> None:
    for dtype, (of_case, options) in zip(itertools.cycle(DTYPES), HIDDEN_GRADIENT):
        check_hidden_gradient(Case(random, counts, dtype, **of_case), 72, 264, activation, **options)


@by_size
@by_dtype
def test_every_element_of_the_hidden_gradient_of_any_size(
    random: torch.Generator, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    for activation, (of_case, options) in itertools.product(("gelu", "swiglu"), HIDDEN_GRADIENT):
        check_hidden_gradient(Case(random, MIXED, dtype, **of_case), *sizes, activation, **options)


@by_groups
@by_dtype
def test_every_element_of_the_weight_gradient(
    random: torch.Generator, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    for of_case, options in WEIGHT:
        check_weight_gradient(Case(random, counts, dtype, **of_case), 72, 136, **options)


@by_size
def test_every_element_of_the_weight_gradient_of_any_size(
    random: torch.Generator, sizes: tuple[int, int]
) -> None:
    for of_case, options in WEIGHT:
        check_weight_gradient(Case(random, MIXED, **of_case), *sizes, **options)


@pytest.mark.sanitize
def test_few_rows_by_every_kernel(random: torch.Generator) -> None:
    counts, sizes = (3, 0, 130), (72, 136)
    for dtype in DTYPES:
        for of_case, options in (PRODUCT[1], PRODUCT[-1]):
            check_product(Case(random, counts, dtype, **of_case), *sizes, **options)
        for activation, (of_case, options) in itertools.product(("gelu", "swiglu"), HIDDEN[1:]):
            check_hidden(Case(random, counts, dtype, **of_case), *sizes, activation, **options)
        for of_case, options in INPUT[1:]:
            check_input_gradient(Case(random, counts, dtype, **of_case), *sizes, **options)
        for activation, (of_case, options) in itertools.product(("relu", "swiglu"), HIDDEN_GRADIENT[1::2]):
            check_hidden_gradient(Case(random, counts, dtype, **of_case), *sizes, activation, **options)
        for of_case, options in WEIGHT:
            check_weight_gradient(Case(random, counts, dtype, **of_case), *sizes, **options)


@pytest.mark.sanitize
def test_a_stage_is_used_again_and_again(random: torch.Generator) -> None:
    """Sums of more than twice as many steps as the ring has stages, in few tiles."""
    check_product(Case(random, (9, 5), top_k=2), 584, 8, gathered=True)
    check_product(Case(random, (9, 5)), 584, 8)
    check_weight_gradient(Case(random, (3, 585)), 8, 8)


# ---- many tiles a block, checked on the device


def drawn_counts(random: torch.Generator, rows: int, experts: int) -> tuple[int, ...]:
    expert_N = torch.randint(experts, (rows,), generator=random)
    return tuple(torch.bincount(expert_N, minlength=experts).tolist())


@by_dtype
def test_blocks_that_compute_many_tiles(random: torch.Generator, dtype: torch.dtype) -> None:
    def case(**options: Any) -> Case:
        return Case(random, drawn_counts(random, 6000, 16), dtype, where=DEVICE, **options)

    check_product(case(), 1024, 1408, bias=True, scaled=True)
    check_hidden(case(top_k=2), 1024, 1408, "swiglu", gathered=True)
    check_input_gradient(case(), 1024, 1408)
    check_hidden_gradient(case(), 1024, 1408, "swiglu", weighs_active=True)
    check_weight_gradient(case(), 1024, 1408)
    check_weight_gradient(case(), 1024, 1408, wide=True, accumulate=True)


@by_dtype
@pytest.mark.parametrize("width", [64, 2048])
def test_permuted_rows_give_the_same_bits_as_gathered_ones(
    random: torch.Generator, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule gathers with 64 hidden columns, and permutes with 2048 on Hopper: either is forced here."""
    tokens, top_k, experts = 500, 2, 4
    x_TM = torch.randn(tokens, 128, generator=random).to(DEVICE, dtype)
    w1 = torch.randn(experts, 2 * width, 128, generator=random).to(DEVICE, dtype)
    position_TK = torch.randperm(tokens * top_k, generator=random).view(tokens, top_k)
    slots = RowSlots(position_TK.view(-1).argsort().int().to(DEVICE), top_k, position_TK.int().to(DEVICE))
    ends_E = torch.tensor([300, 300, 431, tokens * top_k], dtype=torch.int32).to(DEVICE)
    found = []
    for forced in (True, False, None):
        monkeypatch.setattr(launch, "GATHERING", forced)
        poison_memory()
        found.append(grouped_gemm.hidden(x_TM, w1, ends_E, activation="swiglu", slots=slots))
    for hidden_NG, active_NH in found[1:]:
        assert found[0][0] is not None and hidden_NG is not None
        assert torch.equal(hidden_NG, found[0][0]) and torch.equal(active_NH, found[0][1])


@by_dtype
@pytest.mark.parametrize("form", [FORWARD, INPUT_FORM])
def test_a_result_that_is_stored_at_its_place_has_the_bits_of_one_in_order(
    random: torch.Generator, dtype: torch.dtype, form: int
) -> None:
    case = Case(random, MIXED, dtype, where=DEVICE)
    num_rows = sum(MIXED)
    rows_NI = torch.randn(num_rows, 136, generator=random).to(DEVICE, dtype)
    shape = (264, 136) if form == FORWARD else (136, 264)
    weight = torch.randn(len(MIXED), *shape, generator=random).to(DEVICE, dtype)
    expected = grouped_gemm.product(rows_NI, weight, case.ends, form=form)
    place_N = torch.randperm(num_rows, generator=random).int().to(DEVICE)
    kernels = launch.path_for(rows_NI.device, dtype)
    assert kernels is not None
    poison_memory()
    found = torch.empty_like(expected)
    launch.launch(
        kernels, form, rows_NI, case.ends, None, **at(a=rows_NI, d=found), a_rows=num_rows,
        b=weight.data_ptr(), rows=num_rows, n=264, k=136, place=place_N.data_ptr(),
    )  # fmt: skip
    assert torch.equal(found[place_N.long()], expected)


def test_a_row_of_nan_spoils_no_other_expert(random: torch.Generator) -> None:
    """Tiles reach into the neighbours' rows."""
    case = Case(random, (3, 70, 5))
    grad, rows = (case.draw(78, columns) for columns in (136, 72))
    grad[5], rows[7] = NAN, float("inf")
    found = grouped_gemm.weight_gradient(grad.to(DEVICE), rows.to(DEVICE), case.ends).cpu()
    assert found[[0, 2]].isfinite().all() and not found[1].isfinite().any()
    weight, _ = case.weight(64, 72)
    found = grouped_gemm.product(rows.to(DEVICE), weight, case.ends).cpu()
    spoilt = ~found.isfinite().all(1)
    assert spoilt.nonzero().flatten().tolist() == [7]


# ---- bits


@by_dtype
def test_three_runs_give_the_same_bits(random: torch.Generator, dtype: torch.dtype) -> None:
    run = everything(Case(random, drawn_counts(random, 3000, 8), dtype, top_k=2), 512, 712)
    first = run()
    for _ in range(2):
        poison_memory()
        for found, expected in zip(run(), first, strict=True):
            assert torch.equal(found, expected)
    assert all(each.isfinite().all() for each in first)


# ---- far apart


def room_for(num_bytes: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < num_bytes + 2**31:
        pytest.skip(f"{num_bytes} bytes are needed, {free} are free")


def far_rows(count: int, columns: int) -> Tensor:
    """Rows more than 2**31 elements apart. Only they are ever read or written."""
    stride = 2**31 + 64
    memory = torch.empty((count - 1) * stride + columns, dtype=torch.bfloat16, device=DEVICE)
    return memory.as_strided((count, columns), (stride, 1))


def test_row_strides_past_2_to_the_31(random: torch.Generator) -> None:
    room_for(2 * 2 * (2**31 + 128))
    case = Case(random, (0, 2))
    values, weight = case.draw(2, 72), case.draw(2, 136, 72)
    x, out = far_rows(2, 72), far_rows(2, 136)
    x.copy_(values)
    out.fill_(NAN)
    grouped_gemm.product(x, weight.to(DEVICE), case.ends, out=out)
    w = weight.double()
    size = case.times(values.double().abs(), w.abs())
    assert_near(out.cpu(), case.times(values.double(), w), SUMS * size)
    found = grouped_gemm.weight_gradient(out, x, case.ends).cpu()
    g, rows = out.cpu().double(), values.double()
    assert_near(found, case.gradient(g, rows), SUMS * case.gradient(g.abs(), rows.abs()))


def test_experts_past_2_to_the_31(random: torch.Generator) -> None:
    experts, num_in, num_out = 17, 8192, 16384
    room_for(2 * 2 * experts * num_in * num_out)
    case = Case(random, (1,) + (0,) * (experts - 2) + (40,))
    values, last = case.draw(41, num_in), case.draw(num_out, num_in)
    weight = torch.empty(experts, num_out, num_in, dtype=torch.bfloat16, device=DEVICE)
    weight[[0, -1]] = last.to(DEVICE)
    assert weight.numel() > 2**31
    x = values.to(DEVICE)
    y = grouped_gemm.product(x, weight, case.ends)
    assert relative_norm(y, x.double() @ last.to(DEVICE).double().t()) < ROUNDING[torch.bfloat16]
    back = grouped_gemm.input_gradient(y, weight, case.ends)
    assert relative_norm(back, y.double() @ last.to(DEVICE).double()) < ROUNDING[torch.bfloat16]
    grouped_gemm.weight_gradient(y, x, case.ends, out=weight.fill_(NAN))
    assert relative_norm(weight[-1], y[1:].double().t() @ x[1:].double()) < ROUNDING[torch.bfloat16]
    for expert in range(1, experts - 1):
        assert not weight[expert].any(), f"expert {expert} has no rows"
