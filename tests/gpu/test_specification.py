"""The specification on a GPU: every case of it that one rank can run, in float64, float32 and bfloat16.

The cases are those of tests/gloo/test_specification.py, found there; the collective is NCCL's.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import pmoe
from tests.gloo import test_specification as specification
from tests.gpu.support import AUX, DEVICE, NEEDS_GPU, ROUNDED, plain_step, relative_norm
from tests.reference import Definition, relative_error

pytestmark = [*NEEDS_GPU, pytest.mark.usefixtures("nccl")]

TOLERANCE = {
    torch.float64: 1e-12,
    # 1700 roundings. TF32, with 2^-11 a rounding, would not pass.
    torch.float32: 1e-4,
}

LEAST = {"gate.weight": 1.0}
"""A gate that is sure has gradients far below the numbers near 1 whose difference they are: its error is
measured against those."""

MIN_MARGIN = 1e-4
"""Between the last probability that is chosen and the first that is not: float32 flips no choice."""


def one_rank_cases() -> Iterator[Any]:
    """(test, arguments) for each test of the specification and each of its rows with one rank."""
    for name, test in vars(specification).items():
        if not name.startswith("test_"):
            continue
        tables = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
        for row in itertools.product(*(values for _, values in tables)):
            arguments: dict[str, Any] = {}
            for (names, _), value in zip(tables, row, strict=True):
                split = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
                if isinstance(value, type(pytest.param())):  # one row of `spread`, slow or not
                    value = value.values if len(split) > 1 else value.values[0]
                arguments.update(zip(split, value if len(split) > 1 else (value,), strict=True))
            if arguments.get("world") == 1 and arguments.keys() == inspect.signature(test).parameters.keys():
                shown = "-".join(f"{k}={v}" for k, v in arguments.items() if k != "world")
                yield pytest.param(test, arguments, id=f"{name.removeprefix('test_')}-{shown}")


CASES = list(one_rank_cases())


def definition_of(case: specification.Case, parameters: dict[str, torch.Tensor]) -> Definition:
    return Definition(
        parameters,
        case.top_k,
        case.expert,
        case.activation,
        False if case.gate == "switch" else None,
        case.capacity_factor,
    )


def margin(gate_weight: torch.Tensor, x: torch.Tensor, top_k: int) -> float:
    """The smallest gap between a probability that is chosen and one that is not; 1 where all are chosen."""
    ranked = torch.softmax(x @ gate_weight.t(), -1).sort(-1, descending=True).values
    if top_k == ranked.shape[1] or not x.shape[0]:
        return 1.0
    return (ranked[:, top_k - 1] - ranked[:, top_k]).min().item()


def check(case: specification.Case, dtype: torch.dtype) -> None:
    """The layer on the GPU equals the definition in float64 on the CPU, for the same rounded numbers."""
    layer = specification.build(case, 1).to(DEVICE, dtype)
    (x,), (grad,) = ([t.to(DEVICE, dtype) for t in ts] for ts in specification.inputs(1))
    exact = {name: value.detach().cpu().double() for name, value in layer.named_parameters()}
    exact_x, exact_grad = x.cpu().double(), grad.cpu().double()
    if dtype != torch.float64:
        assert margin(exact["gate.weight"], exact_x, case.top_k) > MIN_MARGIN, "the inputs leave a near tie"
    ys, l_aux, gradients = definition_of(case, exact).gradients([exact_x], [exact_grad], AUX)
    expected = {"y": ys[0], "l_aux": l_aux[0], **gradients[0]}

    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    ((y * grad).sum() + AUX * layer.l_aux).backward()
    assert y.dtype == dtype and leaf.grad is not None
    got = {"y": y.detach(), "l_aux": layer.l_aux.detach(), "x": leaf.grad}
    got |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert set(got) == set(expected)

    if dtype == torch.bfloat16:
        check_against_plain(case, layer, x, grad, got, expected)
        return
    for name, value in expected.items():
        scale = max(1.0, LEAST[name] / max(value.abs().max().item(), 1e-30)) if name in LEAST else 1.0
        error = relative_error(got[name].cpu().double(), value) / scale
        assert error < TOLERANCE[dtype], f"{name}: {error}"


def check_against_plain(
    case: specification.Case,
    layer: torch.nn.Module,
    x: torch.Tensor,
    grad: torch.Tensor,
    got: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
) -> None:
    """At most twice the error of the plain computation; where luck makes that one better, three roundings:
    of an activation, of its gradient and of the stored result."""
    capacity = None
    if case.capacity_factor is not None:
        num_experts = layer.num_experts
        capacity = math.ceil(case.capacity_factor * x.shape[0] * case.top_k / num_experts)
    plain = plain_step(
        layer,
        x,
        grad,
        torch.bfloat16,
        layer.gate(x).expert,
        kind=case.expert,
        activation=case.activation,
        normalize=False if case.gate == "switch" else None,
        capacity=capacity,
    )
    for name, value in expected.items():
        least = LEAST.get(name, 1e-30)
        error, allowed = (relative_norm(found[name], value, least) for found in (got, plain))
        allowed = max(2 * allowed, 3 * ROUNDED[torch.bfloat16])
        assert error <= allowed, f"{name}: {error} against {allowed}"


def count_grouped_products(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    count, grouped_mm = 0, F.grouped_mm

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return grouped_mm(*args, **options)

    monkeypatch.setattr(F, "grouped_mm", counted)
    return lambda: count


def test_the_cases_of_the_specification_are_found() -> None:
    assert len(CASES) >= 40
    assert len({case.values[0] for case in CASES}) >= 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("test, arguments", CASES)
def test_case_of_the_specification(
    monkeypatch: pytest.MonkeyPatch, test: Callable[..., None], arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    """Columns of 6 and 10 elements, which the grouped product refuses: the loop over experts runs."""
    monkeypatch.setattr(specification, "check", lambda world, case, *_: check(case, dtype))
    launches = count_grouped_products(monkeypatch)
    test(**arguments)
    assert launches() == 0


@pytest.mark.parametrize("test, arguments", CASES)
def test_case_of_the_specification_in_one_launch(
    monkeypatch: pytest.MonkeyPatch, test: Callable[..., None], arguments: dict[str, Any]
) -> None:
    """bfloat16 in sizes that the grouped product takes."""
    monkeypatch.setattr(specification, "check", lambda world, case, *_: check(case, torch.bfloat16))
    monkeypatch.setattr(specification, "D_MODEL", 64)
    monkeypatch.setattr(specification, "D_HIDDEN", 96)
    monkeypatch.setitem(specification.TOKENS, 1, (72,))
    launches = count_grouped_products(monkeypatch)
    test(**arguments)
    if torch.cuda.get_device_capability()[0] in (9, 10):
        assert launches() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("bypass_local", [True, False])
def test_fewer_tokens_than_chunks_and_none_at_all(
    monkeypatch: pytest.MonkeyPatch, bypass_local: bool, n: int, num_tokens: int, dtype: torch.dtype
) -> None:
    """NCCL gets messages without rows."""
    monkeypatch.setitem(specification.TOKENS, 1, (num_tokens,))
    check(specification.Case(n, 2, 4, bypass_local=bypass_local), dtype)
    check(specification.Case(n, 2, 4, 0.6, bypass_local=bypass_local), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("bypass_local", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("pair", specification.PAIRS, ids=str)
def test_every_restore_pair_with_rows_that_stay_and_rows_that_travel(
    pair: pmoe.Restore, n: int, bypass_local: bool, dtype: torch.dtype
) -> None:
    reuse = {"bypass_local": bypass_local, "memory_reuse": pair}
    check(specification.Case(n, 2, 4, **reuse), dtype)
    check(specification.Case(n, 2, 4, 0.6, expert="swiglu", **reuse), dtype)
    check(specification.Case(n, 1, 4, load="one expert", **reuse), dtype)
    check(specification.Case(n, 2, 4, n_backward=4 // n, **reuse), dtype)


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("bypass_local", [True, False])
@pytest.mark.parametrize("pair", specification.PAIRS, ids=str)
def test_every_restore_pair_with_chunks_without_rows(
    monkeypatch: pytest.MonkeyPatch, pair: pmoe.Restore, bypass_local: bool, num_tokens: int
) -> None:
    monkeypatch.setitem(specification.TOKENS, 1, (num_tokens,))
    case = specification.Case(4, 2, 4, bypass_local=bypass_local, memory_reuse=pair)
    check(case, torch.float64)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pair", ["S1", "S4"])
def test_small_layer_that_reuses_memory(pair: str, dtype: torch.dtype) -> None:
    check(specification.Case(3, 2, 4, bypass_local=False, memory_reuse=pair), dtype)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n, capacity_factor", [(1, None), (3, 0.6)])
def test_small_layer_whose_rows_travel(n: int, capacity_factor: float | None, dtype: torch.dtype) -> None:
    check(specification.Case(n, 2, 4, capacity_factor, bypass_local=False), dtype)
