"""The routing kernels equal the PyTorch stages: choices, places and counts exactly, numbers to a few
roundings.

Letters: T tokens, K choices, E experts, N slots, n chunks.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent

from pmoe.kernels.route import Routes, refusal, route
from pmoe.kernels.route import reference as plain
from pmoe.kernels.route.launches import launch_route
from pmoe.kernels.route.operators import route_backward
from pmoe.kernels.route.reference import empty_routes
from pmoe.warn import GIVEN
from tests.gpu.support import DEVICE, NEEDS_GPU, poison_memory, relative_norm, synchronisations

pytestmark = NEEDS_GPU

PLACES = ("expert_TK", "position_TK", "slot_N", "counts_nE", "ends_nE", "fault")

SMALL = [
    (0, 4, 2, 3),
    (1, 1, 1, 1),
    (5, 3, 3, 4),
    (77, 8, 2, 1),
    (130, 16, 4, 2),
    (100, 30, 3, 1),
    (90, 64, 2, 4),
    (40, 70, 6, 1),
    (60, 61, 8, 1),
    (50, 128, 16, 2),
    (45, 128, 20, 1),
    (33, 250, 8, 2),
    (31, 256, 16, 1),
    (21, 500, 2, 1),
    (19, 1024, 32, 1),
]
"""(T, E, K, n): every kernel, none without padding."""

LARGE = [
    (32768, 64, 2, 1),
    (32768, 64, 8, 4),
    (1 << 20, 8, 2, 3),
    (20011, 1000, 4, 64),
    (4099, 256, 17, 2),
    (65536, 128, 1, 1),
]


@pytest.fixture(autouse=True)
def kernels_run() -> Iterator[None]:
    """Every test sees the kernels: a fall to PyTorch fails it."""
    reason = refusal(torch.empty(0, 8, device=DEVICE), 2)
    if reason is not None:
        if os.environ.get("PMOE_CUDA") == "0":
            pytest.skip(f"PMOE_CUDA=0: {reason}")
        pytest.fail(reason)
    GIVEN.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="pmoe: tokens are routed without")
        yield


def draw_logits(num_tokens: int, num_experts: int, values: str = "distinct", seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_tokens, num_experts, generator=generator)
    if values != "distinct":
        logits = logits.round()
    if values == "strange":
        dice = torch.rand(num_tokens, num_experts, generator=generator)
        lowest = torch.finfo(torch.float32).min
        for i, value in enumerate((math.nan, math.inf, -math.inf, -math.inf, lowest, -0.0, 1e-42)):
            logits[(dice >= i / 20) & (dice < (i + 1) / 20)] = value
        logits[: num_tokens // 4].clamp_(max=3)  # NaN stays
        logits[: num_tokens // 8] = logits[: num_tokens // 8].nan_to_num()
    return logits.to(DEVICE)


def check_routes(found: Routes, logits: Tensor, top_k: int, **options: Any) -> None:
    expected = plain.route(logits, top_k, **options)
    for name in PLACES:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.weight_TK, expected.weight_TK, rtol=2e-6, atol=1e-37, equal_nan=True)
    torch.testing.assert_close(found.l_aux, expected.l_aux, rtol=2e-5, atol=0, equal_nan=True)


def poisoned(logits: Tensor, top_k: int, num_chunks: int) -> Routes:
    routes = empty_routes(logits, top_k, num_chunks)
    for each in routes:
        each.fill_(math.nan if each.is_floating_point() else -(2**31))
    return routes


# ---- forward


@pytest.mark.sanitize
@pytest.mark.parametrize("num_tokens, num_experts, top_k, num_chunks", SMALL)
@pytest.mark.parametrize("values", ["distinct", "tied", "strange"])
@pytest.mark.parametrize("normalize, z_loss_weight", [(True, 0.25), (False, 0.0)])
def test_the_kernel_equals_the_stages(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    num_chunks: int,
    values: str,
    normalize: bool,
    z_loss_weight: float,
) -> None:
    logits = draw_logits(num_tokens, num_experts, values)
    assert refusal(logits, top_k, num_chunks) is None
    routes = poisoned(logits, top_k, num_chunks)
    options: dict[str, Any] = {"normalize": normalize, "z_loss_weight": z_loss_weight, "not_finite": 4}
    launch_route(logits, routes, **options)
    check_routes(routes, logits, top_k, num_chunks=num_chunks, **options)


@pytest.mark.parametrize("num_tokens, num_experts, top_k, num_chunks", LARGE)
@pytest.mark.parametrize("values", ["distinct", "tied"])
def test_the_kernel_equals_the_stages_on_many_blocks(
    num_tokens: int, num_experts: int, top_k: int, num_chunks: int, values: str
) -> None:
    logits = draw_logits(num_tokens, num_experts, values)
    routes = poisoned(logits, top_k, num_chunks)
    launch_route(logits, routes, normalize=True, z_loss_weight=0.1)
    check_routes(routes, logits, top_k, normalize=True, num_chunks=num_chunks, z_loss_weight=0.1)


@pytest.mark.sanitize
def test_logits_may_begin_on_any_number() -> None:
    memory = draw_logits(1, 50 * 64 + 1).view(-1)
    logits = memory[1:].view(50, 64)
    assert logits.data_ptr() % 16
    check_routes(route(logits, 2, normalize=True), logits, 2, normalize=True)
    given = logits.detach().requires_grad_()
    found = route(given, 2, normalize=False)
    found.weight_TK.sum().backward()
    assert torch.equal(given.grad, gradient_of(logits.clone(), 2, normalize=False))


def gradient_of(logits: Tensor, top_k: int, **options: Any) -> Tensor:
    logits = logits.detach().requires_grad_()
    route(logits, top_k, **options).weight_TK.sum().backward()
    return logits.grad


def test_all_tokens_may_choose_one_expert() -> None:
    logits = torch.zeros(10_000, 64, device=DEVICE)
    found = route(logits, 2, normalize=True)
    assert found.counts_nE.tolist() == [[10_000, 10_000] + [0] * 62]
    assert torch.equal(
        found.position_TK[:, 1], torch.arange(10_000, 20_000, device=DEVICE, dtype=torch.int32)
    )
    torch.testing.assert_close(found.l_aux.item(), 1.0)


# ---- backward


def check_gradient(got: Tensor, given: dict[str, Any], logits: Tensor, routes: Routes) -> None:
    """At most twice the error of PyTorch in float32, against float64. Terms of l_aux's size may cancel: their
    rounding is nothing beside it."""

    def reference(dtype: torch.dtype) -> Tensor:
        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        weight = plain.route(cast(logits), routes.expert_TK.shape[1], normalize=given["normalize"]).weight_TK
        options = {name: cast(value) for name, value in given.items()}
        return plain.route_backward(cast(logits), routes.expert_TK, weight, routes.counts_nE, **options)

    exact = reference(torch.float64)
    if not exact.numel():
        assert got.shape == exact.shape
        return
    least = given["grad_l_aux"].item()
    allowed = 2 * relative_norm(reference(torch.float32), exact, least) + 1e-7
    assert relative_norm(got, exact, least) <= allowed


@pytest.mark.sanitize
@pytest.mark.parametrize("num_tokens, num_experts, top_k, num_chunks", [*SMALL, LARGE[0]])
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("normalize, z_loss_weight", [(True, 0.25), (False, 0.0)])
def test_the_gradient_equals_that_of_the_stages(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    num_chunks: int,
    with_weight: bool,
    normalize: bool,
    z_loss_weight: float,
) -> None:
    logits = draw_logits(num_tokens, num_experts)
    routes = route(logits, top_k, normalize=normalize, num_chunks=num_chunks)
    given: dict[str, Any] = {"normalize": normalize, "z_loss_weight": z_loss_weight}
    given["grad_l_aux"] = torch.tensor(3.0, device=DEVICE)
    if with_weight:
        given["grad_weight_TK"] = torch.randn_like(routes.weight_TK)
    poison_memory()
    got = route_backward(logits, routes.expert_TK, routes.weight_TK, routes.counts_nE, **given)
    check_gradient(got, given, logits, routes)


def test_autograd_reaches_the_kernel() -> None:
    logits = draw_logits(500, 64)
    grad = draw_logits(500, 2, seed=2)

    def gradient(function: Callable[..., Routes], dtype: torch.dtype) -> Tensor:
        given = logits.to(dtype).requires_grad_()
        found = function(given, 2, normalize=True, z_loss_weight=0.1)
        return torch.autograd.grad((found.weight_TK * grad.to(dtype)).sum() + 0.3 * found.l_aux, given)[0]

    assert relative_norm(gradient(route, torch.float32), gradient(plain.route, torch.float64)) < 1e-5


@pytest.mark.parametrize("num_tokens", [0, 10])
def test_the_operations_keep_the_rules_of_torch(num_tokens: int) -> None:
    logits = draw_logits(num_tokens, 6)
    found = route(logits, 2, normalize=True, num_chunks=3)
    torch.library.opcheck(torch.ops.pmoe.route.default, (logits.clone().requires_grad_(), 2, True, 3, 0.3))
    given = (logits, found.expert_TK, found.weight_TK, found.counts_nE)
    options = {"normalize": True, "z_loss_weight": 0.3, "grad_weight_TK": torch.randn_like(found.weight_TK)}
    torch.library.opcheck(torch.ops.pmoe.route_backward.default, given, options)


# ---- the same every time, and side by side


def bits(routes: Routes) -> list[Tensor]:
    return [each.clone().view(torch.int32) for each in routes]


def test_the_same_bits_come_every_time() -> None:
    logits = draw_logits(5000, 64)
    grad = torch.randn(5000, 2, device=DEVICE)
    first: list[Tensor] = []
    for _ in range(30):
        routes = route(logits, 2, normalize=True, num_chunks=3, z_loss_weight=0.1)
        gradient = route_backward(
            logits,
            routes.expert_TK,
            routes.weight_TK,
            routes.counts_nE,
            normalize=True,
            grad_weight_TK=grad,
            grad_l_aux=routes.l_aux,
        )
        found = [*bits(routes), gradient.view(torch.int32)]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def test_streams_do_not_disturb_each_other() -> None:
    sizes = [(3000, 64, 2, 1), (900, 128, 4, 2), (5000, 8, 1, 4), (257, 1000, 3, 1)]
    given = [draw_logits(size[0], size[1], seed=i) for i, size in enumerate(sizes)]
    streams = [torch.cuda.Stream(DEVICE) for _ in sizes]
    torch.cuda.synchronize()
    results: list[list[Routes]] = [[] for _ in sizes]
    for _ in range(25):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                routes = poisoned(given[i], *sizes[i][2:])
                launch_route(given[i], routes, normalize=True)
                results[i].append(routes)
    torch.cuda.synchronize()
    for size, logits, found in zip(sizes, given, results, strict=True):
        for routes in found:
            check_routes(routes, logits, size[2], normalize=True, num_chunks=size[3])


def test_a_captured_graph_repeats_it_on_any_stream() -> None:
    logits = draw_logits(2000, 64)
    route(logits, 2, normalize=True)
    graphs, results = [], []
    for _ in range(2):  # both are captured on one stream, and replayed on two
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(route(logits, 2, normalize=True))
        graphs.append(graph)
    for seed in range(5):
        logits.copy_(draw_logits(2000, 64, seed=seed))
        torch.cuda.synchronize()
        for graph in graphs:
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
                graph.replay()
        torch.cuda.synchronize()
        for routes in results:
            check_routes(routes, logits, 2, normalize=True)


# ---- launches


def device_work(function: Callable[[], object]) -> list[str]:
    """Names of the kernels, copies and memsets that ``function`` runs."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    events: list[FunctionEvent] = profile.events()
    return [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_forward_is_two_kernels_and_backward_is_one(num_chunks: int) -> None:
    logits = draw_logits(4096, 64)
    routes = route(logits, 2, normalize=True, num_chunks=num_chunks, z_loss_weight=0.1)
    grad, one = torch.randn_like(routes.weight_TK), torch.ones((), device=DEVICE)
    given = (logits, routes.expert_TK, routes.weight_TK, routes.counts_nE)

    def forward() -> Routes:
        return route(logits, 2, normalize=True, num_chunks=num_chunks, z_loss_weight=0.1)

    def backward() -> Tensor:
        return route_backward(*given, normalize=True, z_loss_weight=0.1, grad_weight_TK=grad, grad_l_aux=one)

    for function, names in (
        (forward, ["choose_kernel", "place_kernel"]),
        (backward, ["backward_kernel"]),
    ):
        found = device_work(function)
        assert len(found) == len(names), found
        assert all(name in each for name, each in zip(names, found, strict=True)), found


def test_nothing_waits_for_the_device() -> None:
    one = torch.ones((), device=DEVICE)
    assert synchronisations(one.item) == 1, "torch no longer reports synchronisations"
    logits = draw_logits(4096, 64).requires_grad_()

    def step() -> None:
        routes = route(logits, 2, normalize=True, num_chunks=2)
        (routes.weight_TK.sum() + routes.l_aux).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        awake = torch.cuda.Event()
        torch.cuda._sleep(50_000_000)
        awake.record()
        step()
        assert not awake.query(), "the host came back only after the device had caught up"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


# ---- where there is no kernel


def test_what_the_kernel_refuses_is_routed_by_pytorch_and_told_once() -> None:
    logits = draw_logits(20, 1025)
    assert refusal(logits, 2) == "num_experts (1025) must be 1 to 1024"
    with pytest.warns(UserWarning, match=r"num_experts \(1025\)") as told:
        for _ in range(2):
            check_routes(route(logits, 2, normalize=True), logits, 2, normalize=True)
    assert len(told) == 1


def test_float64_is_routed_by_pytorch() -> None:
    logits = draw_logits(20, 8).double()
    assert refusal(logits, 2) == "logits are torch.float64, not torch.float32"
    assert route(logits, 2, normalize=True).weight_TK.dtype == torch.float64


def test_tensors_of_two_devices_are_refused() -> None:
    logits = draw_logits(4, 3)
    found = route(logits, 2, normalize=True)
    with pytest.raises(ValueError, match="weight on cpu must be on cuda:0"):
        route_backward(logits, found.expert_TK, found.weight_TK.cpu(), found.counts_nE, normalize=True)
