"""Ranks agree on which kernels they take, whatever each of them measures, remembers or lacks.

Clocks and devices are fakes, the agreement is real.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pmoe.comm.agreement import largest
from pmoe.comm.ranks import Ranks
from pmoe.experts import FFNExperts, StackedExperts
from pmoe.experts.base import Shard
from pmoe.experts.modules import ModuleExperts
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.kernels import registry as kernel_registry
from pmoe.kernels.extension import Architecture
from pmoe.kernels.registry import GROUPED_MM, PRODUCTS, MeasuredChoice, Registry
from pmoe.measure import products as products_module
from pmoe.measure.products import measure_products, product_requests
from pmoe.warn import GIVEN
from tests.pool import ranks
from tests.unit.test_kernels_registry import (
    CUDA,
    FASTER,
    FORWARD,
    INPUT,
    SLOWER,
    WEIGHT,
    FakeBench,
    MeasuredRegistry,
    make_registry,
)

CPU = torch.device("cpu")
HOPPER, AMPERE, BY_DRIVER, NO_KERNELS, NO_KERNELS_AMPERE = (
    Architecture(binary_version=binary, ptx_version=ptx, capability=capability)
    for binary, ptx, capability in ((90, 90, 90), (80, 80, 80), (90, 80, 90), (0, 0, 90), (0, 0, 80))
)


@dataclass
class Report:
    """The results of a rank: choices, what it measured, its number of reductions, warnings, and its error."""

    choices: list[str]
    measured: int
    reductions: int
    told: list[str]
    error: str | None


@contextmanager
def counted_reductions() -> Iterator[list[int]]:
    sizes, real = [], dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return real(tensor, *args, **options)

    dist.all_reduce = counted
    try:
        yield sizes
    finally:
        dist.all_reduce = real


_registries: dict[str, MeasuredRegistry] = {}


def measured(rank: int, world: int, test: str, given: list[dict[str, Any]]) -> Report:
    """Lets each rank measure what ``given`` says: times, architecture, free memory, requests.

    A rank knows what it has found before in the same ``test``, except for the requests that it is to forget.
    """
    mine = given[rank]
    GIVEN.clear()
    bench = FakeBench(mine.get("times", FASTER), mine.get("architecture", HOPPER))
    bench.free = mine.get("free", bench.free)
    bench.wrong = mine.get("wrong")
    registry = _registries.setdefault(test, make_registry(bench, mine.get("refusals")))
    registry.bench = bench
    for each in mine.get("forgets", ()):
        registry.learn_failure(each, "forgotten")
    for each, choice in mine.get("knows", {}).items():
        registry.learn(each, MeasuredChoice(choice=choice, seconds=FASTER, when="before"))
    requests = mine.get("requests", [FORWARD, INPUT])
    error = None
    with warnings.catch_warnings(record=True) as caught, counted_reductions() as reductions:
        warnings.simplefilter("always")
        try:
            registry.measure(requests, partial(largest, Ranks(), CPU, stage="a test"))
        except ValueError as failure:
            error = str(failure)
        choices = [registry.choose(each) for each in (FORWARD, INPUT)]
    dist.barrier()  # no rank is out of step
    told = [str(each.message) for each in caught]
    return Report(choices, len(bench.measured) // 2, len(reductions), told, error)


def run(test: str, *given: dict[str, Any]) -> list[Report]:
    return ranks(len(given)).run(measured, test, list(given))


@pytest.fixture
def test(request: pytest.FixtureRequest) -> str:
    """Returns a name that no other test has."""
    return str(request.node.nodeid)


@pytest.mark.parametrize(
    ("first", "second", "choice"),
    [
        ({"pmoe": 1.0, "grouped_mm": 2.0}, {"pmoe": 3.0, "grouped_mm": 2.0}, "grouped_mm"),
        ({"pmoe": 1.0, "grouped_mm": 9.0}, {"pmoe": 3.0, "grouped_mm": 2.0}, "pmoe"),
    ],
)
def test_ranks_of_unlike_clocks_agree_by_the_slowest(
    test: str, first: dict[str, float], second: dict[str, float], choice: str
) -> None:
    for report in run(test, {"times": first}, {"times": second}):
        warned_of_slower = report.told.pop() if choice == "grouped_mm" else "slower"
        assert "slower" in warned_of_slower
        assert report == Report([choice, choice], 2, 2, [], None)


def test_what_all_ranks_know_costs_one_reduction(test: str) -> None:
    run(test, {}, {})
    for report in run(test, {"times": SLOWER}, {"times": SLOWER}):
        assert report == Report(["pmoe", "pmoe"], 0, 1, [], None)


def test_where_one_rank_knows_nothing_all_measure(test: str) -> None:
    run(test, {}, {})
    for report in run(test, {"times": SLOWER}, {"times": SLOWER, "forgets": [FORWARD, INPUT]}):
        assert "slower" in report.told.pop()
        assert report == Report(["grouped_mm", "grouped_mm"], 2, 3, [], None)
    for report in run(test, {}, {}):
        assert report == Report(["grouped_mm", "grouped_mm"], 0, 1, [], None)


def test_where_a_rank_knows_another_choice_that_request_is_measured_again(test: str) -> None:
    run(test, {}, {})
    for report in run(test, {"times": SLOWER}, {"times": FASTER, "knows": {INPUT: "grouped_mm"}}):
        assert report == Report(["pmoe", "grouped_mm"], 1, 3, [], None)
    for report in run(test, {}, {}):
        assert report == Report(["pmoe", "grouped_mm"], 0, 1, [], None)


@pytest.mark.parametrize(("first", "second"), [(HOPPER, AMPERE), (HOPPER, BY_DRIVER), (NO_KERNELS, HOPPER)])
def test_mixed_architectures_are_an_error_on_every_rank(
    test: str, first: Architecture, second: Architecture
) -> None:
    found = run(test, {"architecture": first}, {"architecture": second})
    for report, here in zip(found, (first, second), strict=True):
        assert report.error is not None
        assert report.error.startswith("mixed architectures: the kernels of this rank's ")
        assert f"({here}) must be those of all ranks" in report.error
        assert "put GPUs of one compute capability in a group" in report.error
        assert (report.measured, report.reductions) == (0, 1)
        for low, high in (
            sorted((first.binary_version, second.binary_version)),
            sorted((first.ptx_version, second.ptx_version)),
            sorted((first.capability, second.capability)),
        ):
            assert f" {low} to {high}" in report.error


def test_without_kernels_on_any_rank_unlike_devices_are_no_error(test: str) -> None:
    refusals = {"pmoe": ["not built"]}
    reports = run(
        test,
        {"architecture": NO_KERNELS, "refusals": refusals},
        {"architecture": NO_KERNELS_AMPERE, "refusals": refusals},
    )
    for report in reports:
        assert (report.choices, report.measured, report.error) == (["grouped_mm"] * 2, 0, None)


def test_where_one_rank_cannot_measure_nothing_is_settled_and_that_rank_tells(test: str) -> None:
    fine, full = run(test, {}, {"free": 1000})
    assert fine == Report(["grouped_mm", "grouped_mm"], 2, 2, [], None)
    assert (full.choices, full.measured, full.reductions) == (["grouped_mm", "grouped_mm"], 0, 2)
    assert full.told and all("bytes are needed, but only half of the 1000" in each for each in full.told)


def test_where_one_rank_refuses_nothing_is_measured(test: str) -> None:
    for report in run(test, {}, {"refusals": {"pmoe": ["no"]}}):
        assert (report.choices, report.measured, report.reductions) == (["grouped_mm"] * 2, 0, 2)


def test_where_one_rank_computes_wrongly_all_take_the_plain_way_and_are_told(test: str) -> None:
    fine, wrong = run(test, {}, {"wrong": "T_M is wrong by 0.5 of its size"})
    for report in (fine, wrong):
        assert (report.choices, report.measured, report.reductions) == (["grouped_mm"] * 2, 0, 1)
    assert ["wrong by 0.5 of its size" in each for each in wrong.told] == [True]
    assert ["wrongly on another rank" in each for each in fine.told] == [True]


def test_ranks_that_come_with_unlike_requests_settle_nothing_and_do_not_hang(test: str) -> None:
    for report in run(test, {}, {"requests": [WEIGHT]}):
        assert (report.choices, report.measured, report.reductions) == (["grouped_mm"] * 2, 0, 1)
        assert report.told == [
            "pmoe: other ranks have experts of other sizes, so it is not measured which kernels are faster"
        ]


# ---- of a layer's experts


def test_the_requests_of_a_layer_are_its_products_in_buckets_of_rows() -> None:
    experts = SwiGLUExperts(64, 96, 4, bias=False, dtype=torch.bfloat16)
    found = product_requests(experts, torch.bfloat16, CPU, 1000, needs_grad=True)
    products_of = {(each.form, each.in_features, each.out_features) for each in found}
    assert products_of == {
        (form, *of) for form in ("forward", "input", "weight") for of in ((64, 192), (96, 64))
    }
    assert sorted({each.rows for each in found}) == [32, 64, 128, 256, 512, 1024, 2048]
    assert len(found) == len(set(found)) == 6 * 7
    assert {each.experts for each in found} == {4}
    assert {each.form for each in product_requests(experts, torch.bfloat16, CPU, 9, needs_grad=False)} == {
        "forward"
    }
    assert sorted(
        {each.rows for each in product_requests(experts, torch.bfloat16, CPU, 3, needs_grad=True)}
    ) == [1, 2, 4, 8]


def test_products_that_pmoe_does_not_compute_are_not_asked_for() -> None:
    with_bias = FFNExperts(64, 96, 4, dtype=torch.bfloat16)
    found = {
        (each.form, each.bias)
        for each in product_requests(with_bias, torch.bfloat16, CPU, 9, needs_grad=True)
    }
    assert found == {("forward", True), ("input", False), ("weight", False)}
    assert product_requests(with_bias, torch.float32, CPU, 9, needs_grad=True) == []
    assert product_requests(FFNExperts(60, 96, 4), torch.bfloat16, CPU, 9, needs_grad=True) == []


@pytest.mark.parametrize("bias", [True, False])
def test_all_shards_of_an_expert_ask_alike(bias: bool) -> None:
    first, second = (
        product_requests(
            FFNExperts(64, 96, 4, bias=bias, shard=Shard(i, 2)), torch.bfloat16, CPU, 9, needs_grad=True
        )
        for i in range(2)
    )
    assert first == second
    forward = {(each.in_features, each.bias) for each in first if each.form == "forward"}
    assert forward == {(64, bias), (48, False), (48, bias)}


EXPERTS = {
    "swiglu": lambda: SwiGLUExperts(64, 96, 4, bias=False),
    "modules": lambda: ModuleExperts([torch.nn.Identity()]),
}


def reductions_of_layers(rank: int, world: int) -> dict[str, int]:
    """Returns the number of reductions of several calls, on devices that pass for CUDA's."""
    found: dict[str, int] = {}
    bench, experts = FakeBench(FASTER), EXPERTS["swiglu"]()
    group, capturing = Ranks(), [False]

    def call(
        name: str,
        of: StackedExperts | ModuleExperts = experts,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device = CUDA,
        max_rows: int = 1000,
        needs_grad: bool = True,
    ) -> None:
        with counted_reductions() as sizes:
            measure_products(of, group, dtype, device, max_rows, needs_grad=needs_grad)
        found[name] = len(sizes)

    bench.seconds = lambda request, names: [1.0] * len(names)  # type: ignore[method-assign]
    patched = pytest.MonkeyPatch()
    with patched.context() as patch, bench.patched():
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
        patch.setattr(kernel_registry, "device_name", lambda device: "NVIDIA H200")
        patch.setattr(
            products_module,
            "largest",
            lambda ranks, device, values, **how: largest(ranks, CPU, values, **how),
        )
        willing = [replace(each, reasons=lambda request: []) for each in PRODUCTS.candidates]
        registry = Registry(willing)
        patch.setattr(products_module, "_measured", set())
        patch.setattr(products_module, "PRODUCTS", registry)
        call("on the CPU", device=CPU)
        call("no rows", max_rows=0)
        call("modules", of=EXPERTS["modules"]())
        call("float32", dtype=torch.float32)
        torch.use_deterministic_algorithms(True)
        call("deterministic")
        torch.use_deterministic_algorithms(False)
        capturing[0] = True
        call("captured")
        capturing[0] = False
        call("first")
        call("again")
        call("in the same bucket", max_rows=513)
        call("an equal layer", of=EXPERTS["swiglu"]())
        call("in the next bucket", max_rows=1025)
        call("without a backward", needs_grad=False)
        [request, *_] = product_requests(experts, torch.bfloat16, CUDA, 1000, needs_grad=True)
        assert registry.measured[request].choice == GROUPED_MM
    dist.barrier()
    return found


def test_a_layer_settles_once_and_adds_no_collective_later(test: str) -> None:
    first, second = ranks(2).run(reductions_of_layers)
    assert first == second
    assert first == {
        "on the CPU": 0,
        "no rows": 0,
        "modules": 0,
        "float32": 0,
        "deterministic": 0,
        "captured": 0,
        "first": 2,
        "again": 0,
        "in the same bucket": 0,
        "an equal layer": 0,
        "in the next bucket": 2,
        "without a backward": 1,
    }
