"""The small case with which pmoe checks its kernels. Here their plain definitions run in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pmoe.experts import products
from pmoe.kernels import grouped_gemm
from pmoe.kernels.registry import PMOE, PRODUCTS
from pmoe.measure.kernel_check import KernelCase, mismatch
from pmoe.runners import one_rank
from pmoe.runners.one_rank import one_rank_mismatch
from pmoe.warn import GIVEN
from tests.unit.test_kernels_registry import (
    FASTER,
    FORWARD,
    INPUT,
    WEIGHT,
    Alone,
    FakeBench,
    make_registry,
    no_warning_was_given,
)

__all__ = ["no_warning_was_given"]

CPU = torch.device("cpu")
NONLINEAR = ["relu", "gelu", "silu", "swiglu"]


def case(activation: str = "gelu", dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> KernelCase:
    return KernelCase(CPU, dtype, activation, bias)


def test_a_backward_pass_that_gathers_tokens_for_the_first_weight_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With kernels that store boxes, the first weight's gradient reads tokens, and no permute copies them."""
    permuted = []
    permute = one_rank.permute.permute_directly

    def counted(x_TM: Tensor, *others: Any) -> Tensor:
        permuted.append(x_TM)
        return permute(x_TM, *others)

    monkeypatch.setattr(one_rank.permute, "permute_directly", counted)
    monkeypatch.setattr(one_rank, "gathers_for_weights", lambda device, dtype, columns, top_k: True)
    for top_k in (1, 3):
        assert one_rank_mismatch(case("swiglu"), top_k, True) is None
    assert len(permuted) == 2 * 3, "each of three passes a case copies the gradient only"


def spoilt(found: Any) -> Any:
    """Changes one element of the last result, as a race or a wrong tile would."""
    if isinstance(found, Tensor):
        found.view(-1)[found.numel() // 2] += found.detach().abs().max() * 3 + 1
    else:
        spoilt([each for each in found if each is not None][-1])
    return found


def spoil(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    right: Callable[..., Any] = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: spoilt(right(*args, **options)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", NONLINEAR)
def test_what_is_right_is_found_right(activation: str, bias: bool, dtype: torch.dtype) -> None:
    state = torch.get_rng_state()
    with torch.no_grad():
        assert mismatch(case(activation, dtype, bias)) is None
    for top_k, normalize in ((1, False), (2, True), (6, True)):
        assert one_rank_mismatch(case(activation, dtype, bias), top_k, normalize) is None
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers have moved"
    assert PRODUCTS.forced is None


@pytest.mark.parametrize(
    "name", ["product", "hidden", "hidden_gradient", "input_gradient", "weight_gradient"]
)
def test_one_wrong_element_of_any_kernel_is_told_with_the_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, grouped_gemm, name)
    with torch.no_grad():
        why = mismatch(case())
    assert why is not None and "in torch.bfloat16 has a relative error of 0." in why and "is allowed" in why


def test_a_result_that_is_no_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = products.expert_product

    def poisoned(*args: Any, **options: Any) -> Tensor:
        found = right(*args, **options)
        return found.mul_(float("nan")) if PRODUCTS.forced and PRODUCTS.forced.name == PMOE else found

    monkeypatch.setattr("pmoe.experts.stacked.StackedExperts.product", staticmethod(poisoned))
    with torch.no_grad():
        assert "has a relative error of nan" in (mismatch(case()) or "")


class Gate:
    top_k, normalize = 2, True


def test_one_ranks_kernels_are_checked_once_and_a_mismatch_is_a_warning_and_the_plain_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    wrong = "T_O in torch.bfloat16 has a relative error of 0.5, where 0.016 is allowed"
    monkeypatch.setattr("pmoe.runners.one_rank.one_rank_mismatch", lambda *key: asked.append(key) or wrong)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(one_rank, "_checked", {})
    GIVEN.clear()
    gate: Any = Gate()
    with pytest.warns(
        UserWarning, match="one rank's kernels are not used: T_O .* relative error of 0.5"
    ) as caught:
        assert [one_rank._wrong_kernels(gate, case()) for _ in range(2)] == [wrong] * 2
    assert asked == [(case(), 2, True)] and len(caught) == 1
    with PRODUCTS.forcing(PMOE):  # asked for by name
        assert one_rank._wrong_kernels(gate, case()) is None


def test_what_was_not_checked_before_a_capture_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(one_rank, "_checked", {})
    gate: Any = Gate()
    assert one_rank._wrong_kernels(gate, case()) == "one rank's kernels were not checked before the capture"
    assert not one_rank._checked


@pytest.mark.parametrize("name", ["product", "hidden", "hidden_gradient", "weight_gradient", "sum_by_expert"])
def test_one_ranks_wrong_results_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check computes the case three times: twice for the expected result, then with the kernels.

    On the CPU all three use the same functions. They give wrong results in the third computation only.
    """
    right, counted = getattr(grouped_gemm, name), []

    def third_time_wrong(*args: Any, **options: Any) -> Any:
        counted.append(name)
        found = right(*args, **options)
        return spoilt(found) if len(counted) > calls - calls // 3 else found

    calls = 3 * calls_of(name, monkeypatch)
    monkeypatch.setattr(grouped_gemm, name, third_time_wrong)
    assert "relative error" in (one_rank_mismatch(case(), 2, True) or "")


def calls_of(name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns how often one forward and one backward pass call the function ``name``."""
    right, counted = getattr(grouped_gemm, name), []
    with monkeypatch.context() as patch:
        patch.setattr(grouped_gemm, name, lambda *a, **b: counted.append(name) or right(*a, **b))
        assert one_rank_mismatch(case(), 2, True) is None
    return len(counted) // 3


# ---- in the registry: its candidates, clocks and devices are fakes


WRONG = "T_DO in torch.bfloat16 has a relative error of 0.5, where 0.016 is allowed"


def test_kernels_are_checked_once_for_each_nonlinearity_before_they_are_measured() -> None:
    bench = FakeBench(FASTER)
    found = make_registry(bench)
    for _ in range(2):
        found.measure([FORWARD], Alone())
        found.measure([INPUT], Alone(), bias=True)
    assert [(each.activation, each.bias) for each in bench.checked] == [("gelu", False), ("gelu", True)]


@pytest.mark.parametrize("wrong", [WRONG, RuntimeError("an illegal memory access")])
def test_a_mismatch_is_a_warning_with_the_numbers_and_the_plain_way_from_then_on(wrong: Any) -> None:
    bench = FakeBench(FASTER)
    found = make_registry(bench)
    found.measure([FORWARD], Alone())
    assert found.choose(FORWARD) == "pmoe"
    bench.wrong = wrong
    found.measure([INPUT], Alone(), "swiglu")
    assert len(bench.measured) == 2, "what computes wrongly is not timed"
    with pytest.warns(UserWarning, match=f"without pmoe's kernels: .*{wrong}"):
        assert found.choose(FORWARD) == "grouped_mm"
    bench.wrong = None
    found.measure([FORWARD, INPUT], Alone(), "relu")
    for request in (FORWARD, INPUT, WEIGHT):
        assert found.choose(request) == "grouped_mm"
        assert str(wrong) in found.explain(request)
    other = replace(FORWARD, dtype=torch.float16)
    found.measure([other], Alone(), "relu")
    assert found.choose(other) == "pmoe"


def test_kernels_that_compute_wrongly_on_another_rank_are_taken_on_none() -> None:
    bench = FakeBench(FASTER)
    found = make_registry(bench)

    def agree(values: Sequence[float]) -> list[float]:
        return [*values[:5], 1.0, *values[6:]]

    found.measure([FORWARD], agree)
    with pytest.warns(UserWarning, match="wrongly on another rank"):
        assert found.choose(FORWARD) == "grouped_mm"
    assert bench.measured == []
