"""Routing as one operation: its PyTorch reference equals the stages of a layer.

The kernels' source, run on the CPU, equals plain loops.

Letters: T tokens, K choices, E experts, N slots, n chunks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pmoe
from bench import kernels_on_cpu
from pmoe.comm.counts import MAX_BINS, num_bins
from pmoe.gates.logits import router_loss
from pmoe.kernels.counts import Heading, Messages
from pmoe.kernels.extension import load
from pmoe.kernels.route import (
    Routes,
    deferred_routing,
    gate_operands,
    launches,
    operators,
    reference,
    refusal,
    route,
)
from pmoe.kernels.route.operators import route_backward
from pmoe.kernels.route.reference import ROUNDS, check_logits_memory
from pmoe.ordering.sorted import chunk_bounds, count_rows, sort_rows
from pmoe.planner.degree import DEGREES
from pmoe.warn import GIVEN, warn_of_fallback
from tests.cuda.compiled import compile_and_run
from tests.cuda.disassembly import archs, count, declared, sass

# ---- the kernels


@pytest.mark.slow
def test_the_kernels_equal_plain_loops_on_the_cpu() -> None:
    assert compile_and_run("route_test.cpp", "10", flags=("-O2",)) == "route: all right\n"


# ---- the reference


def draw_logits(
    num_tokens: int, num_experts: int, *, tied: bool = False, dtype: torch.dtype = torch.float64
) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens * 1000 + num_experts)
    if tied:
        return torch.randint(3, (num_tokens, num_experts), generator=generator).to(dtype)
    return torch.randn(num_tokens, num_experts, generator=generator, dtype=dtype)


def gate_of(logits_TE: Tensor, top_k: int, **options: Any) -> Callable[[Tensor], pmoe.Routing]:
    """Returns a function from tokens to a routing: that of a TopKGate with these logits."""
    num_experts = logits_TE.shape[1]
    gate = pmoe.gates.TopKGate(num_experts, num_experts, top_k, dtype=logits_TE.dtype, **options)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(num_experts))
    return gate


SIZES = [(37, 8, 2), (5, 1, 1), (64, 5, 5), (3, 70, 1), (33, 40, ROUNDS + 4), (1, 6, 3), (0, 6, 2)]


@pytest.mark.parametrize("num_tokens, num_experts, top_k", SIZES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 3, 4])
@pytest.mark.parametrize("normalize, z_loss_weight", [(True, 0.25), (False, 0.0)])
def test_routing_equals_the_stages_of_a_layer_bit_for_bit(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    tied: bool,
    num_chunks: int,
    normalize: bool,
    z_loss_weight: float,
) -> None:
    logits = draw_logits(num_tokens, num_experts, tied=tied)
    found = route(logits, top_k, normalize=normalize, num_chunks=num_chunks, z_loss_weight=z_loss_weight)
    gate = gate_of(logits, top_k, normalize=normalize, z_loss_weight=z_loss_weight)
    expected = gate(logits)
    assert torch.equal(found.expert_TK, expected.expert)
    assert torch.equal(found.weight_TK, expected.weight)
    assert torch.equal(found.l_aux, expected.l_aux)
    order = sort_rows(expected.expert, None, num_chunks, num_experts, range(0, 0), 0)
    assert torch.equal(found.slot_N, order.slot)
    assert torch.equal(found.position_TK.reshape(-1), order.position)
    counts = count_rows(expected.expert, None, num_chunks, num_experts)
    assert torch.equal(found.counts_nE, counts)
    assert torch.equal(found.ends_nE.reshape(-1), counts.reshape(-1).cumsum(0))
    assert found.weight_TK.dtype == found.l_aux.dtype == torch.float64
    places = (found.expert_TK, found.position_TK, found.slot_N, found.counts_nE, found.ends_nE)
    assert all(each.dtype == torch.int32 for each in places)


def test_the_example_of_the_docstring() -> None:
    found = route(torch.tensor([[0.0, 2, 1], [3, 0, 0]]), 2, normalize=True)
    assert found.expert_TK.tolist() == [[1, 2], [0, 1]]
    assert found.position_TK.tolist() == [[1, 3], [0, 2]]
    assert found.slot_N.tolist() == [2, 0, 3, 1]
    assert found.counts_nE.tolist() == [[1, 2, 1]]
    assert found.ends_nE.tolist() == [[1, 3, 4]]


@pytest.mark.parametrize("num_tokens, n", [(10, 4), (3, 5), (0, 2), (64, 64)])
def test_chunks_are_those_of_the_ordering(num_tokens: int, n: int) -> None:
    found = route(draw_logits(num_tokens, 4), 2, normalize=False, num_chunks=n)
    bounds = chunk_bounds(num_tokens, n)
    expected = [2 * (end - begin) for begin, end in itertools.pairwise(bounds)]
    assert found.counts_nE.sum(1).tolist() == expected


def test_what_is_no_number_is_routed_first_and_gives_weights_that_are_none() -> None:
    logits = torch.tensor([[0.0, math.nan, math.inf, math.nan], [1.0, -math.inf, -math.inf, 0.0]])
    found = route(logits, 3, normalize=True)
    assert found.expert_TK.tolist() == [[1, 3, 2], [0, 3, 1]]
    assert found.weight_TK[0].isnan().all() and found.weight_TK[1].isfinite().all()


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_one_logit_that_is_not_finite_is_a_fault(strange: float) -> None:
    logits = draw_logits(9, 4)
    assert route(logits, 2, normalize=True, not_finite=7).fault.item() == 0
    logits[8, 3] = strange
    assert route(logits, 2, normalize=True, not_finite=7).fault.item() == 7


@pytest.mark.parametrize("is_finite", [True, False])
def test_messages_of_row_counts_are_those_of_the_launch_that_packs_them(
    is_finite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = draw_logits(9, 6)
    logits[0, 5] = 1.0 if is_finite else math.nan
    head = Heading(num_ranks=3, num_degrees=2, header=(9, 0, 33, 44))
    found = route(logits, 2, normalize=True, num_chunks=4, not_finite=7, heading=head)
    written = Messages.new(found.counts_nE, 3, 2, found.messages)
    packed = Messages.new(found.counts_nE, 3, 2)
    monkeypatch.setattr(operators.extension, "module", lambda: kernels_on_cpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    packed.pack(head.with_fault(found.fault), found.fault, found.counts_nE)
    assert torch.equal(written.both[0], packed.both[0])
    assert written.both[0][:, :4].tolist() == [[9, 0 if is_finite else 7, 33, 44]] * 3


def test_messages_for_ranks_without_equal_numbers_of_experts_are_refused() -> None:
    head = Heading(num_ranks=4, num_degrees=0, header=(5, 0, 0, 0))
    with pytest.raises(ValueError, match=r"num_ranks \(4\) of the heading must divide num_experts \(6\)"):
        route(draw_logits(5, 6), 2, normalize=True, heading=head)


# ---- gradients


def outputs(**options: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def both(logits: Tensor) -> tuple[Tensor, Tensor]:
        found = route(logits, 2, **options)
        return found.weight_TK, found.l_aux

    return both


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("z_loss_weight", [0.0, 0.5])
def test_the_gradient_is_that_of_differences(normalize: bool, z_loss_weight: float) -> None:
    logits = draw_logits(7, 5).requires_grad_()
    function = outputs(normalize=normalize, z_loss_weight=z_loss_weight, num_chunks=2)
    assert torch.autograd.gradcheck(function, (logits,))


@pytest.mark.parametrize("num_tokens, num_experts, top_k", SIZES)
@pytest.mark.parametrize("normalize", [True, False])
def test_the_gradient_is_that_of_the_stages(
    num_tokens: int, num_experts: int, top_k: int, normalize: bool
) -> None:
    logits = draw_logits(num_tokens, num_experts).requires_grad_()
    found = route(logits, top_k, normalize=normalize, num_chunks=3, z_loss_weight=0.25)
    probability = logits.softmax(-1)
    weight = probability.gather(-1, found.expert_TK.long())
    weight = weight / weight.sum(-1, keepdim=True) if normalize else weight
    l_aux = router_loss(probability, found.expert_TK.long(), logits, 0.25)
    grad = torch.randn_like(weight)

    def gradient(weight: Tensor, l_aux: Tensor) -> Tensor:
        return torch.autograd.grad((weight * grad).sum() + 0.37 * l_aux, logits)[0]

    expected = gradient(weight, l_aux)
    torch.testing.assert_close(gradient(found.weight_TK, found.l_aux), expected, rtol=1e-11, atol=1e-13)


def test_results_that_are_not_used_need_no_gradient() -> None:
    logits = draw_logits(6, 4).requires_grad_()
    for use in (lambda found: found.weight_TK.square().sum(), lambda found: found.l_aux):
        (got,) = torch.autograd.grad(use(route(logits, 2, normalize=True)), logits)
        (expected,) = torch.autograd.grad(use(reference.route(logits, 2, normalize=True)), logits)
        torch.testing.assert_close(got, expected)
    found = route(logits, 2, normalize=True)
    assert not any(each.requires_grad for each in found[1:-1])


def test_results_without_a_gradient_give_the_logits_a_zero_one() -> None:
    logits = draw_logits(9, 5)
    found = route(logits, 3, normalize=True, num_chunks=2)
    given = (logits, found.expert_TK, found.weight_TK, found.counts_nE)
    assert torch.equal(route_backward(*given, normalize=True), torch.zeros_like(logits))


def test_backward_saves_logits_and_eight_bytes_a_slot() -> None:
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    logits = draw_logits(50, 6, dtype=torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        route(logits, 2, normalize=True, num_chunks=2)
    assert kept == 4 * 50 * 6 + 8 * 50 * 2 + 4 * 2 * 6


# ---- the operations


class Sees(TorchDispatchMode):
    """A dispatch mode that notes the operators of pmoe."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "pmoe":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"num_chunks": 4, "sorted_chunks": 2, "last": range(2, 4)}], ids=str)
def test_layers_route_without_the_dispatch_of_an_operator(options: dict[str, Any]) -> None:
    """The operator's wrappers in Python took longer than both launches. A dispatch mode still sees it."""
    found = []
    for mode in (contextlib.nullcontext(), Sees()):
        logits = draw_logits(33, 6, dtype=torch.float32).requires_grad_()
        with mode:
            routes = route(logits, 2, normalize=True, z_loss_weight=0.25, **options)
            ((routes.weight_TK * torch.arange(66.0).view(33, 2)).sum() + 3 * routes.l_aux).backward()
        assert routes.weight_TK.grad_fn is not None and logits.grad is not None
        is_operator = isinstance(mode, Sees)
        assert ("RouteDirectly" in routes.weight_TK.grad_fn.name()) is not is_operator
        if isinstance(mode, Sees):
            assert mode.names == ["route", "route_backward"]
        found.append((*routes, logits.grad))
    for direct, by_operator in zip(*found, strict=True):
        assert torch.equal(direct, by_operator) and direct.dtype == by_operator.dtype


def test_a_loss_alone_or_the_weights_alone_give_a_gradient() -> None:
    logits = draw_logits(9, 6, dtype=torch.float64).requires_grad_()
    routes = route(logits, 2, normalize=True)
    of_weights, of_loss = (
        torch.autograd.grad(of.sum(), logits, retain_graph=True)[0]
        for of in (routes.weight_TK[:, 0], routes.l_aux)
    )
    both = torch.autograd.grad(routes.weight_TK[:, 0].sum() + routes.l_aux, logits)[0]
    torch.testing.assert_close(of_weights + of_loss, both)
    with torch.no_grad():
        assert not route(logits, 2, normalize=True).weight_TK.requires_grad


def sample_routes(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Routes]:
    logits = draw_logits(num_tokens, 6, dtype=dtype)
    return logits, route(logits, 2, normalize=True, num_chunks=3, z_loss_weight=0.3)


@pytest.mark.parametrize("num_tokens", [0, 1, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_operations_keep_the_rules_of_torch(num_tokens: int, dtype: torch.dtype) -> None:
    logits, found = sample_routes(num_tokens, dtype)
    learns = logits.clone().requires_grad_()
    torch.library.opcheck(torch.ops.pmoe.route.default, (learns, 2, True, 3, 0.3))
    given = (logits, found.expert_TK, found.weight_TK, found.counts_nE)
    options = {"normalize": True, "z_loss_weight": 0.3}
    grad, one = torch.randn_like(found.weight_TK), torch.ones((), dtype=dtype)
    gradients = {"grad_weight_TK": grad, "grad_l_aux": one}
    torch.library.opcheck(torch.ops.pmoe.route_backward.default, given, options | gradients)
    torch.library.opcheck(torch.ops.pmoe.route_backward.default, given, options)


@pytest.mark.parametrize("normalize, z_loss_weight", [(True, 0.25), (False, 0.0)])
def test_a_deferred_routing_that_is_kept_has_the_routes_and_the_gradient_of_route(
    normalize: bool, z_loss_weight: float
) -> None:
    found = []
    for is_deferred in (True, False):
        logits = draw_logits(33, 6, dtype=torch.float32).requires_grad_()
        options: dict[str, Any] = {"normalize": normalize, "z_loss_weight": z_loss_weight}
        deferred = deferred_routing(logits, 2, **options) if is_deferred else None
        routes = route(logits, 2, **options) if deferred is None else deferred.routes
        if deferred is not None:
            deferred.keep()
        ((routes.weight_TK * torch.arange(66.0).view(33, 2)).sum() + 3 * routes.l_aux).backward()
        assert logits.grad is not None
        found.append((*(each.detach() for each in routes), logits.grad))
    assert all(map(torch.equal, *found))


def test_a_compiled_graph_is_whole_and_gives_the_same() -> None:
    def loss(logits: Tensor) -> Tensor:
        found = route(logits, 2, normalize=True, num_chunks=2, z_loss_weight=0.1)
        return (found.weight_TK * found.position_TK).sum() + found.l_aux

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    results = []
    for function in (loss, compiled):
        logits = draw_logits(11, 5).requires_grad_()
        value = function(logits)
        value.backward()
        results.append((value.detach(), logits.grad))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize(
    "logits, options, match",
    [
        (
            torch.zeros(4, 3, dtype=torch.bfloat16),
            {},
            "dtype torch.bfloat16 must be torch.float32 or torch.float64",
        ),
        (torch.zeros(2, 4, 3), {}, r"shape \(2, 4, 3\) must have the shape \(T, E\)"),
        (torch.zeros(3, 4).t(), {}, r"shape \(4, 3\) and strides \(1, 4\) must be contiguous"),
        (torch.zeros(4, 6)[:, :3], {}, r"strides \(6, 1\) must be contiguous"),
        (torch.zeros(4, 0), {}, r"num_experts \(0\)"),
        (torch.zeros(4, 3), {"top_k": 0}, r"top_k \(0\) must be 1 to num_experts \(3\)"),
        (torch.zeros(4, 3), {"top_k": 4}, r"top_k \(4\) must be 1 to num_experts \(3\)"),
        (torch.zeros(4, 3), {"num_chunks": 0}, r"num_chunks \(0\) must be at least 1"),
        (torch.zeros(4, 3), {"z_loss_weight": -1.0}, r"z_loss_weight \(-1.0\)"),
        (torch.zeros(4, 3), {"z_loss_weight": math.nan}, r"z_loss_weight \(nan\)"),
    ],
)
def test_bad_input_is_refused_with_its_numbers(logits: Tensor, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        route(logits, **{"top_k": 2, "normalize": True, **options})


def test_more_slots_than_places_are_refused() -> None:
    logits = torch.empty(2**30, 4, device="meta")
    with pytest.raises(
        ValueError, match=r"num_tokens \(1073741824\) \* top_k \(2\) must be at most 2147483647"
    ):
        check_logits_memory(logits, 2)


@pytest.mark.parametrize(
    "change, match",
    [
        (
            {"expert_TK": torch.zeros(4, 2, dtype=torch.int64)},
            "expert of dtype torch.int64 must be torch.int32",
        ),
        (
            {"expert_TK": torch.zeros(4, dtype=torch.int32)},
            r"expert of shape \(4,\) must have the shape \(T, K\)",
        ),
        ({"weight_TK": torch.zeros(4, 3)}, r"weight of shape \(4, 3\) .*\(4, 2\)"),
        ({"counts_nE": torch.zeros(1, 4, dtype=torch.int32)}, r"counts of shape \(1, 4\) .*\(1, 3\)"),
        ({"grad_weight_TK": torch.zeros(2, 4).t()}, r"grad_weight .*strides \(1, 4\)"),
        ({"grad_l_aux": torch.zeros(1)}, r"grad_l_aux of shape \(1,\) must have the shape \(\)"),
    ],
)
def test_backward_refuses_what_is_not_of_one_routing(change: dict[str, Tensor], match: str) -> None:
    logits = draw_logits(4, 3, dtype=torch.float32)
    found = route(logits, 2, normalize=True)
    given = {"expert_TK": found.expert_TK, "weight_TK": found.weight_TK, "counts_nE": found.counts_nE}
    with pytest.raises(ValueError, match=match):
        route_backward(logits, normalize=True, **{**given, **change})


# ---- which runs


def test_a_refusal_says_why() -> None:
    assert refusal(torch.zeros(4, 3), 2) == "logits are on cpu, not on a CUDA device"


def test_float64_and_the_cpu_are_the_reference_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        route(draw_logits(4, 3), 2, normalize=True)
        route(draw_logits(4, 3, dtype=torch.float32), 2, normalize=True)


def test_a_refusal_of_the_kernel_is_told_once() -> None:
    class OnCuda(Tensor):
        is_cuda = True  # type: ignore[assignment]

    logits = torch.zeros(4, 3).as_subclass(OnCuda)
    GIVEN.clear()
    with pytest.warns(UserWarning, match="are routed without pmoe's kernels: logits are on cpu") as told:
        assert not operators._runs_kernel(logits, 2, 1)
        assert not operators._runs_kernel(logits, 2, 1)
    assert len(told) == 1
    GIVEN.clear()


def test_a_reason_that_a_layer_has_told_is_not_told_by_the_operator() -> None:
    """Both warned of the same reason, in other words."""

    class OnCuda(Tensor):
        is_cuda = True  # type: ignore[assignment]

    logits = torch.zeros(4, 3).as_subclass(OnCuda)
    GIVEN.clear()
    with pytest.warns(UserWarning, match="copied and summed"):
        warn_of_fallback("rows are copied and summed", str(refusal(logits, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not operators._runs_kernel(logits, 2, 1)
    GIVEN.clear()


@pytest.mark.usefixtures("extension_built")
def test_the_extension_refuses_sizes_with_their_numbers() -> None:
    built = load()
    assert built is not None
    assert built.route_refusal(100, 64, 2, 4) == ""
    assert built.route_refusal(0, 1024, 32, 256) == ""
    assert built.route_refusal(100, 1025, 2, 4) == "num_experts (1025) must be 1 to 1024"
    assert built.route_refusal(100, 64, 33, 4) == "top_k (33) must be 1 to 32"
    assert built.route_refusal(100, 8, 9, 4) == "top_k (9) must be 1 to 8"
    assert built.route_refusal(100, 64, 2, 257) == "num_chunks (257) must be 1 to 256"
    assert "num_tokens (1073741824)" in built.route_refusal(2**30, 64, 2, 1)


def test_the_kernels_count_as_many_bins_as_a_layer_may_have() -> None:
    """They took 64. A layer that chooses among 1 to 16 chunks counts rows in 128 bins on 8 ranks.

    PyTorch operators then counted and sorted the rows of such layers, on any number of ranks from 8 on.
    """
    source = (Path(__file__).resolve().parents[2] / "cuda" / "route" / "layout.h").read_text(encoding="utf-8")
    found = re.search(r"kMostChunks = (\d+);", source)
    assert found is not None and int(found[1]) == MAX_BINS
    for num_ranks in (2, 8, 64):
        assert num_bins(DEGREES, num_ranks, 256) <= MAX_BINS
    assert num_bins(DEGREES, 8, 256) == 128


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
def test_logits_are_read_and_gradients_written_16_bytes_at_a_time() -> None:
    """A thread has 4, 8, 16 or 32 logits. Forward loads the next row while it works on one."""
    names = [name for name in declared() if name.split(".")[0] in ("route_choose", "route_backward")]
    assert len(names) == 17
    for arch in archs():
        for name in names:
            code, backward = sass(arch)[name], name.startswith("route_backward")
            fours = {"512": 4, "1024": 8}.get(name.split(".")[1], 1 if name == "route_choose.128.many" else 2)
            assert count(code, "LDG.E.128") == fours * (1 if backward else 2), (arch, name)
            assert count(code, "STG.E.128") == (fours if backward else 0), (arch, name)


@pytest.mark.parametrize(("sorted_chunks", "last"), [(1, range(2, 4)), (3, range(0)), (6, range(0, 2))])
def test_rows_can_be_sorted_by_groups_of_chunks_with_some_experts_last(
    sorted_chunks: int, last: range
) -> None:
    """The order is that of `sort_rows`, in which rows for experts on the own rank follow the others."""
    logits = torch.randn(25, 5, generator=torch.Generator().manual_seed(0))
    options = {"normalize": True, "num_chunks": 6}
    plain = route(logits, 2, **options)
    found = route(logits, 2, **options, sorted_chunks=sorted_chunks, last=last)
    n = 6 // sorted_chunks
    rows = sort_rows(plain.expert_TK.long(), None, n, 5, last, n if last else 0)
    assert torch.equal(found.slot_N.long(), rows.slot)
    assert torch.equal(found.position_TK.view(-1).long(), rows.position)
    for name in ("weight_TK", "expert_TK", "counts_nE", "ends_nE", "l_aux"):
        assert torch.equal(getattr(found, name), getattr(plain, name)), name


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"sorted_chunks": 4}, r"sorted_chunks \(4\) must divide num_chunks \(6\)"),
        ({"last": range(3, 6)}, r"last \(range\(3, 6\)\) must be a range of the 5 experts"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(order: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(torch.randn(4, 5), 2, normalize=True, num_chunks=6, **order)


# ---- the operands of the gate's products of backward


@pytest.mark.parametrize(("num_tokens", "columns"), [(0, 8), (7, 24)])
def test_the_operands_of_the_gate_are_the_same_by_a_launch_and_by_operators(
    num_tokens: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad = torch.randn(num_tokens, 5)
    weight = torch.randn(5, columns).bfloat16()
    halves, twice = gate_operands(grad, weight)
    assert halves.shape == (num_tokens, 10) and torch.equal(twice, torch.cat([weight, weight]))
    rebuilt = halves[:, :5].double() + halves[:, 5:].double()
    assert ((rebuilt - grad.double()).abs() <= 2**-17 * grad.double().abs()).all()
    monkeypatch.setattr(launches, "path", lambda device: ("sm_90a", None))
    monkeypatch.setattr(launches, "cuda_index", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(operators.extension, "module", lambda: kernels_on_cpu)
    for launched, computed in zip(gate_operands(grad, weight), (halves, twice), strict=True):
        assert torch.equal(launched, computed)
