"""Grouped products in one launch equal a loop over the experts, whatever the groups, and leave no gap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pmoe.experts import products
from pmoe.experts.products import GradientSum, RowGroups
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
        found[f"product {name}"] = products.product(rows, weight, groups, one)
        into = torch.full_like(grad, float("nan"))
        found[f"product {name}, into a buffer"] = products.product(rows, weight, groups, one, out=into)
    poison_memory()
    found["input_gradient"] = products.input_gradient(grad, weight, groups)
    into = torch.full_like(rows, float("nan"))
    found["input_gradient, into a buffer"] = products.input_gradient(grad, weight, groups, out=into)
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


def takes_one_launch() -> bool:
    operand = draw(16, IN, seed=0)
    return products.refusal(operand, operand) is None


@pytest.mark.sanitize
@pytest.mark.parametrize("counts", GROUPS.values(), ids=GROUPS.keys())
def test_one_launch_equals_the_loop(monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]) -> None:
    if not takes_one_launch():
        pytest.skip("this device has no grouped product in one launch")
    expected, got = expected_products(counts), all_products(counts)
    monkeypatch.setattr(products, "refusal", lambda *_: "the test wants the loop")
    loop = all_products(counts)
    assert set(got) == set(expected) == set(loop)
    for name, value in expected.items():
        error, allowed = (relative_norm(found[name], value) for found in (got, loop))
        assert error <= max(2 * allowed, 2 * ROUNDED[torch.bfloat16]), f"{name}: {error} against {allowed}"


@pytest.mark.sanitize
@pytest.mark.parametrize("counts", GROUPS.values(), ids=GROUPS.keys())
def test_experts_without_rows_get_a_gradient_of_exactly_zero(counts: tuple[int, ...]) -> None:
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
    got = products.product(rows, weight, groups)
    assert got.is_contiguous()
    assert relative_norm(got, torch.cat(expected)) <= 2 * ROUNDED[torch.bfloat16]


@pytest.mark.parametrize(
    "make",
    [
        lambda: draw(16, 60, seed=0),
        lambda: draw(16 * IN + 1, seed=0)[1:].view(16, IN),
        lambda: draw(16, IN, seed=0).float(),
        lambda: draw(16, IN, seed=0).cpu(),
    ],
    ids=["columns", "address", "dtype", "device"],
)
def test_operands_that_one_launch_cannot_take_are_refused(make: Callable[[], Tensor]) -> None:
    fine = draw(16, IN, seed=0)
    assert products.refusal(make(), fine) is not None
