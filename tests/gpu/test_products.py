"""Grouped products in one launch equal a loop over the experts, whatever the groups, and leave no gap. Which
of the ways is taken is measured on the device, and remembered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from pmoe.comm.agreement import largest
from pmoe.comm.ranks import Ranks
from pmoe.experts import FFNExperts, StackedExperts, products
from pmoe.experts.base import ExpertRows
from pmoe.experts.products import GradientSum, RowGroups
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.kernels.extension import loaded_architecture
from pmoe.kernels.registry import GROUPED_MM, LOOP, PMOE, PRODUCTS, ProductOperands, ProductRequest, Registry
from pmoe.measure import product_choices
from pmoe.measure.kernel_check import KernelCase, mismatch
from pmoe.measure.product_choices import measure_choices
from pmoe.measure.products import product_requests
from pmoe.runners.one_rank import one_rank_mismatch
from tests.gpu.support import DEVICE, NEEDS_GPU, ROUNDED, poison_memory, relative_norm

pytestmark = NEEDS_GPU

IN, OUT = 64, 96

GROUPS = {
    "even": (32, 32, 32, 32),
    "uneven": (1, 77, 13, 200),
    "first empty": (0, 40, 3, 9),
    "middle empty": (17, 0, 0, 31),
    "last empty": (25, 6, 30, 0),
    "one expert has all": (0, 0, 129, 0),
    "one row": (0, 1, 0, 0),
    "many experts": tuple((7 * e) % 5 for e in range(64)),
    "one group": (300,),
}


def make_groups(counts: tuple[int, ...]) -> RowGroups:
    ends = torch.tensor(counts).cumsum(0).to(DEVICE, torch.int32)
    return RowGroups(counts=counts, ends=ends)


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, torch.bfloat16)


def all_products(counts: tuple[int, ...]) -> dict[str, Tensor]:
    """Every function of `pmoe.experts.products`, in bfloat16."""
    groups, rows, grad = make_groups(counts), draw(sum(counts), IN, seed=1), draw(sum(counts), OUT, seed=2)
    weight, bias = draw(len(counts), OUT, IN, seed=3), draw(len(counts), OUT, seed=4)
    found = {}
    for name, one in {"without bias": None, "with bias": bias}.items():
        poison_memory()
        found[f"product {name}"] = products.expert_product(rows, weight, groups, one)
        into = torch.full_like(grad, float("nan"))
        found[f"product {name}, into a buffer"] = products.expert_product(rows, weight, groups, one, out=into)
    poison_memory()
    found["input_gradient"] = products.expert_input_gradient(grad, weight, groups)
    into = torch.full_like(rows, float("nan"))
    found["input_gradient, into a buffer"] = products.expert_input_gradient(grad, weight, groups, out=into)
    for times in (1, 2):
        poison_memory()
        w, b = GradientSum(weight, times), GradientSum(bias, times)
        for _ in range(times):
            w.add_weight(grad, rows, groups)
            b.add_bias(grad, groups)
        found[f"{times} x add_weight"], found[f"{times} x add_bias"] = w.result(), b.result()
    return found


def expected_products(counts: tuple[int, ...]) -> dict[str, Tensor]:
    """The same on the CPU in float64, by loops."""
    rows, grad = draw(sum(counts), IN, seed=1).cpu().double(), draw(sum(counts), OUT, seed=2).cpu().double()
    weight = draw(len(counts), OUT, IN, seed=3).cpu().double()
    bias = draw(len(counts), OUT, seed=4).cpu().double()
    forward, backward = torch.empty_like(grad), torch.empty_like(rows)
    grad_weight, grad_bias, biased = torch.zeros_like(weight), torch.zeros_like(bias), torch.empty_like(grad)
    start = 0
    for e, count in enumerate(counts):
        at = slice(start, start + count)
        forward[at], backward[at] = rows[at] @ weight[e].t(), grad[at] @ weight[e]
        biased[at] = forward[at] + bias[e]
        grad_weight[e], grad_bias[e] = grad[at].t() @ rows[at], grad[at].sum(0)
        start += count
    found = {
        "product without bias": forward,
        "product without bias, into a buffer": forward,
        "product with bias": biased,
        "product with bias, into a buffer": biased,
        "input_gradient": backward,
        "input_gradient, into a buffer": backward,
    }
    for times in (1, 2):
        found |= {f"{times} x add_weight": times * grad_weight, f"{times} x add_bias": times * grad_bias}
    return found


def skip_unless_willing(way: str, dtype: torch.dtype = torch.bfloat16) -> None:
    sizes = {"experts": 4, "rows": 100, "in_features": IN, "out_features": OUT}
    request = ProductRequest(form="forward", device=DEVICE, dtype=dtype, **sizes)
    [candidate] = [each for each in PRODUCTS.candidates if each.name == way]
    if reasons := candidate.reasons(request):
        pytest.skip(f"{way} refuses: {'; '.join(reasons)}")


@pytest.mark.sanitize
@pytest.mark.parametrize("way", [GROUPED_MM, PMOE])
@pytest.mark.parametrize("counts", GROUPS.values(), ids=GROUPS.keys())
def test_one_launch_equals_the_loop(counts: tuple[int, ...], way: str) -> None:
    skip_unless_willing(way)
    expected = expected_products(counts)
    with PRODUCTS.forcing(way):
        got = all_products(counts)
    with PRODUCTS.forcing(LOOP):
        loop = all_products(counts)
    assert set(got) == set(expected) == set(loop)
    for name, value in expected.items():
        error, allowed = (relative_norm(found[name], value) for found in (got, loop))
        assert error <= max(2 * allowed, 2 * ROUNDED[torch.bfloat16]), f"{name}: {error} against {allowed}"


@pytest.mark.sanitize
@pytest.mark.parametrize("way", [GROUPED_MM, PMOE, LOOP])
@pytest.mark.parametrize("counts", GROUPS.values(), ids=GROUPS.keys())
def test_experts_without_rows_get_a_gradient_of_exactly_zero(counts: tuple[int, ...], way: str) -> None:
    skip_unless_willing(way)
    with PRODUCTS.forcing(way):
        got = all_products(counts)
    for name in ("1 x add_weight", "2 x add_weight", "1 x add_bias", "2 x add_bias"):
        for e, count in enumerate(counts):
            assert count or not got[name][e].any(), f"{name} of expert {e}"


@pytest.mark.parametrize("columns_out", [1, 7, 100])
def test_out_features_of_any_number(columns_out: int) -> None:
    """The grouped product pads its result's rows to 16 bytes; the layer must not see that."""
    counts = GROUPS["uneven"]
    groups, rows = make_groups(counts), draw(sum(counts), IN, seed=1)
    weight = draw(len(counts), columns_out, IN, seed=3)
    expected, start = [], 0
    for e, count in enumerate(counts):
        expected.append(rows[start : start + count].cpu().double() @ weight[e].cpu().double().t())
        start += count
    got = products.expert_product(rows, weight, groups)
    assert got.is_contiguous()
    assert relative_norm(got, torch.cat(expected)) <= 2 * ROUNDED[torch.bfloat16]


MISFITS: dict[str, Callable[[], Tensor]] = {
    "columns": lambda: draw(16, 60, seed=0),
    "address": lambda: draw(16 * IN + 1, seed=0)[1:].view(16, IN),
    "rows apart": lambda: draw(16, IN + 1, seed=0)[:, :IN],
    "transposed": lambda: draw(IN, 16, seed=0).t(),
    "dtype": lambda: draw(16, IN, seed=0).float(),
}


@pytest.mark.parametrize("make", MISFITS.values(), ids=MISFITS.keys())
@pytest.mark.filterwarnings("ignore:pmoe. products are computed without")
def test_operands_that_no_launch_can_take_are_computed_by_the_loop(make: Callable[[], Tensor]) -> None:
    rows = make()
    weight = draw(2, OUT, rows.shape[1], seed=3).to(rows.dtype)
    operands = ProductOperands("forward", rows, weight, 2)
    assert PRODUCTS.choose(operands.request, operands) == LOOP
    got = products.expert_product(rows, weight, make_groups((9, 7)))
    wide, of = rows.cpu().double(), weight.cpu().double()
    expected = torch.cat([wide[:9] @ of[0].t(), wide[9:] @ of[1].t()])
    assert relative_norm(got, expected) <= 2 * ROUNDED[torch.bfloat16]


def test_rows_with_gaps_are_no_reason_for_a_loop() -> None:
    skip_unless_willing(PMOE)
    rows, weight = draw(16, 2 * IN, seed=0)[:, :IN], draw(2, OUT, IN, seed=3)
    operands = ProductOperands("forward", rows, weight, 2)
    with PRODUCTS.forcing(PMOE):
        assert PRODUCTS.choose(operands.request, operands) == PMOE


# ---- experts, by the launches that fuse both products with what lies between


def experts_step(experts: StackedExperts, dtype: torch.dtype, expendable: bool, keep: bool) -> list[Tensor]:
    """Output and every gradient, in ``dtype``, of operands drawn in bfloat16; T_M is kept or made again."""
    device = torch.device("cpu") if dtype == torch.float64 else DEVICE
    counts = GROUPS["uneven"]
    num_rows, d_model = sum(counts), experts.w1.shape[2]
    ends = torch.tensor(counts).cumsum(0).to(DEVICE, torch.int32) if device == DEVICE else None
    groups = RowGroups(counts=counts, ends=ends)
    rows, grad = (draw(num_rows, d_model, seed=seed).to(device, dtype) for seed in (1, 2))
    weight = draw(num_rows, seed=3).to(device, torch.promote_types(dtype, torch.float32))
    parameters = [each.detach().to(device, dtype) for each in experts.parameters()]
    poison_memory()
    with torch.no_grad():
        given = ExpertRows(rows, groups, parameters)
        out, hidden = experts.compute(given, weight, keep=keep)
        again = experts.recompute(given, None)
        if hidden is None:
            hidden = again
        assert torch.equal(hidden.tensors[0], again.tensors[0]), "what is made again is not what was there"
        hidden = type(hidden)(tensors=hidden.tensors, expendable=expendable)
        sums = [GradientSum(parameter, 2) for parameter in parameters]
        *grads, pending = experts.input_gradient(grad, given, weight, hidden)
        for _ in range(2):
            experts.weight_gradient(pending, groups, sums)
    return [out, *grads, *(each.result() for each in sums)]


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_fused_experts_are_at_least_as_exact_as_the_loop(kind: str, bias: bool, keep: bool) -> None:
    skip_unless_willing(PMOE)
    if kind == "swiglu":
        experts: StackedExperts = SwiGLUExperts(IN, OUT, 4, bias=bias, dtype=torch.bfloat16)
    else:
        experts = FFNExperts(IN, OUT, 4, activation=kind, bias=bias, dtype=torch.bfloat16)
    torch.manual_seed(0)
    for expert in range(4):
        experts.initialise_expert(expert)
    exact = experts_step(experts, torch.float64, expendable=not keep, keep=keep)
    with PRODUCTS.forcing(LOOP):
        loop = experts_step(experts, torch.bfloat16, expendable=not keep, keep=keep)
    with PRODUCTS.forcing(PMOE):
        got = experts_step(experts, torch.bfloat16, expendable=not keep, keep=keep)
    for i, expected in enumerate(exact):
        error, allowed = (relative_norm(found[i], expected) for found in (got, loop))
        assert error <= max(2 * allowed, 2 * ROUNDED[torch.bfloat16]), f"{i}: {error} against {allowed}"


# ---- the choice


def test_what_is_measured_here_is_taken_where_it_is_faster_and_known_then() -> None:
    skip_unless_willing(PMOE)
    skip_unless_willing(GROUPED_MM)
    experts = SwiGLUExperts(256, 512, 4, bias=False, dtype=torch.bfloat16, device=DEVICE)
    requests = product_requests(experts, torch.bfloat16, DEVICE, 500, needs_grad=True)
    before, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    found = Registry(PRODUCTS.candidates)
    case = KernelCase.of(experts, DEVICE, torch.bfloat16)
    measure_choices(found, requests, partial(largest, Ranks.single(), DEVICE, stage="a test"), case)
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(torch.cuda.get_rng_state(), state), "the caller's random numbers have moved"
    for request in requests:
        measured = found.measured.get(request)
        assert measured is not None and found.choose(request) == measured.choice
        seconds = measured.seconds
        assert all(1e-7 < each < 1 for each in seconds.values()), seconds
        assert (measured.choice == PMOE) == (seconds[PMOE] < 0.99 * seconds[GROUPED_MM])
    with mock.patch.object(product_choices, "candidate_seconds", None):  # nothing is measured again
        measure_choices(found, requests, partial(largest, Ranks.single(), DEVICE, stage="a test"), case)
    print("\n".join(found.explain(each) for each in requests))


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_small_case_by_the_kernels_is_right(activation: str, dtype: torch.dtype, bias: bool) -> None:
    skip_unless_willing(PMOE, dtype)
    case = KernelCase(DEVICE, dtype, activation, bias)
    with torch.no_grad():
        assert mismatch(case) is None
    assert one_rank_mismatch(case, 2, True) is None


def test_the_loaded_code_is_that_of_this_device() -> None:
    skip_unless_willing(PMOE)
    found, (major, minor) = loaded_architecture(DEVICE), torch.cuda.get_device_capability(DEVICE)
    assert found.capability == 10 * major + minor
    assert 80 <= found.ptx_version <= found.binary_version <= found.capability
