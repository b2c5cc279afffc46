"""The branches for CUDA of the layer of several ranks, on the CPU: its plan and its passes.

Streams are stand-ins, and PyTorch expressions compute what the kernels would (`bench.bench_device_calls`).
The result must be that of the CPU's own branches, which other tests compare to the plain definition.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from bench.bench_device_calls import as_cuda
from pmoe.call.sizes import memory_shape
from pmoe.choose import open_choice
from pmoe.choose.trials import TrialBatch
from pmoe.comm import counts as comm_counts
from pmoe.decide import route as decide_route
from pmoe.engine.buffers import arena
from pmoe.experts.stacked import StackedExperts
from pmoe.kernels import permute
from pmoe.ordering.sorted import SortedOrder
from pmoe.planner.degree import Choice
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.rows_per_pass import counted_rows
from pmoe.schedule.buffer_sizes import (
    SORTED_RESULTS,
    BufferSizes,
    SlotLayout,
    slot_elements,
    slot_layout,
)
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES, Restore
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.tasks import Schedule
from pmoe.warn import GIVEN, warn_of_fallback
from tests.gloo.kit import TOKENS, backward, build, counted_collectives, error_of, inputs, one_step
from tests.kit import tokens
from tests.pool import ranks
from tests.reference import relative_error

LIMIT = 1e-12


def both_branches(rank: int, world: int, options: dict[str, Any]) -> dict[str, float]:
    """Returns the relative difference of each result between the two branches."""

    def step() -> dict[str, Any]:
        layer = build(**options)
        if options.get("pad_to_capacity"):  # all ranks have equally many tokens
            return backward(layer, tokens(8, 10 + rank).requires_grad_(), tokens(8, 20 + rank))
        return one_step(layer, rank, world)

    on_cpu = step()
    with as_cuda(computes=True):
        on_cuda = step()
    assert on_cuda.keys() == on_cpu.keys()
    assert all(torch.isfinite(value).all() for value in on_cuda.values())
    return {name: float(relative_error(on_cuda[name], value)) for name, value in on_cpu.items()}


CASES: dict[str, dict[str, Any]] = {
    "separate buffers": {"pipeline": 2},
    "one chunk": {"pipeline": 1},
    "other chunks in backward": {"pipeline": 4, "pipeline_backward": 2, "memory_reuse": "S4"},
    "dropped": {"pipeline": 2, "capacity_factor": 0.6, "memory_reuse": "S4"},
    "dropped, separate buffers": {"pipeline": 2, "capacity_factor": 0.6},
    "gated": {"pipeline": 2, "expert": "swiglu", "memory_reuse": "S4"},
    "gated without biases": {"pipeline": 2, "expert": "swiglu", "bias": False, "memory_reuse": "S4"},
    "all rows are sent": {"pipeline": 2, "bypass_local": False, "memory_reuse": "S4"},
    "a shared expert": {"pipeline": 2, "shared_expert": 6, "memory_reuse": "S4"},
    "einsum": {"pipeline": 2, "order": "einsum", "memory_reuse": "S4"},
    "sent once": {"pipeline": 2, "send_once": True},
    "padded": {"pipeline": 2, "pad_to_capacity": True, "capacity_factor": 1.0},
    **{f"{pair.dispatched}, {pair.hidden}": {"pipeline": 3, "memory_reuse": pair} for pair in ALL_PAIRS},
}


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_the_branches_for_cuda_give_the_results_of_the_cpu(case: str, world: int) -> None:
    for found in ranks(world).run(both_branches, CASES[case]):
        assert max(found.values()) <= LIMIT, found


# ---- memory


@contextlib.contextmanager
def recorded_slots() -> Iterator[dict[str, dict[str, int]]]:
    """Yields a dict to which each pass in the block adds the elements of its ring slots, by its direction."""
    allocated: dict[str, dict[str, int]] = {}

    def recording(schedule: Schedule, sizes: BufferSizes, element_size: int) -> SlotLayout:
        allocated[schedule.direction] = slot_elements(schedule, sizes)
        return slot_layout(schedule, sizes, element_size)

    with mock.patch.object(arena, "slot_layout", recording):
        yield allocated


def sorted_elements(allocated: dict[str, dict[str, int]]) -> int:
    """Returns the elements of the ring slots for sorted results, of both passes together."""
    of_results = [
        elements
        for slots in allocated.values()
        for slot, elements in slots.items()
        if slot.partition("[")[0] in SORTED_RESULTS
    ]
    assert len(of_results) == 2
    return sum(of_results)


def ring_slots(rank: int, world: int, options: dict[str, Any]) -> tuple[bool, int, int]:
    """Compares the ring slots of both passes with the predicted ones.

    Returns whether results are stored in the order of arrival by prediction, the elements of slots for sorted
    results, and the number of chunks whose rows were sorted.
    """
    with as_cuda(computes=True), recorded_slots() as allocated:
        layer = build(**options)
        one_step(layer, rank, world)
        sizes = memory_shape(layer.layer_modules)
    pair = layer.layer_modules.options.restore
    assert layer.row_counts is not None and isinstance(pair, Restore)
    rows = counted_rows(sizes, layer.row_counts, rank, options["pipeline"], 0)
    for direction, slots in allocated.items():
        schedule = rotating(direction, options["pipeline"], sizes.stages, restore=pair)
        buffers = sizes.buffer_sizes(direction=direction, extent=rows.extent, restore=pair)
        assert slots == slot_elements(schedule, buffers), direction
    return sizes.places, sorted_elements(allocated), sum(rows.extent.regrouped)


@pytest.mark.parametrize("options", [{}, {"send_once": True}], ids=str)
def test_results_that_are_stored_in_the_order_of_arrival_have_no_sorted_form(options: dict[str, Any]) -> None:
    """The engine allocates what is predicted: nothing for sorted results, unless they must be copied."""
    found = ranks(4).run(ring_slots, {"pipeline": 2, "memory_reuse": STRATEGIES["S4"], **options})
    assert sum(is_sorted for _, _, is_sorted in found) > 0, "some chunk's rows are sorted"
    for places, elements, is_sorted in found:
        assert places is not bool(options)
        assert (elements > 0) == (bool(options) and is_sorted > 0)


def chosen_from(rank: int, world: int) -> list[tuple[LayerSizes, int]]:
    """Makes two steps. Before the second, a tool takes kernels from the experts of rank 1 alone.

    Returns for each step the sizes from which the ranks choose, and the elements of slots for sorted results.
    """
    sizes: list[LayerSizes] = []
    elements: list[int] = []

    def choose_among(batch: TrialBatch, restore: Restore | None) -> Choice:
        sizes.append(batch.sizes)
        return Choice(forward=2, backward=2, restore=STRATEGIES["S4"])

    with as_cuda(computes=True), mock.patch.object(open_choice, "choose_among", choose_among):
        layer = build(memory_reuse=True)
        for loses_kernels in (False, rank == 1):
            if loses_kernels:
                layer.experts.compute = functools.partial(StackedExperts.compute, layer.experts)
            with recorded_slots() as allocated:
                one_step(layer, rank, world)
            elements.append(sorted_elements(allocated))
    return list(zip(sizes, elements, strict=True))


def test_ranks_choose_from_the_memory_that_the_engine_holds() -> None:
    """The common choice counted a slot for sorted results on every rank, also where no rank has one."""
    found = ranks(4).run(chosen_from)
    with_kernels, without_on_one = zip(*found, strict=True)
    assert {(sizes.places, elements) for sizes, elements in with_kernels} == {(True, 0)}
    assert {sizes.places for sizes, _ in without_on_one} == {False}
    assert [elements > 0 for _, elements in without_on_one] == [False, True, False, False]
    for step in (with_kernels, without_on_one):
        assert len({sizes for sizes, _ in step}) == 1, "the sizes are the same on all ranks"


# ---- rows in a narrower number format

WIRED: dict[str, dict[str, Any]] = {
    "one pass": {"wire": "e4m3"},
    "both passes": {"wire": "e4m3", "wire_backward": "e4m3", "memory_reuse": "S4", "pipeline": 3},
    "offloaded": {"wire": "e4m3", "wire_backward": "e4m3", "memory_reuse": "S1"},
    "backward alone": {"wire_backward": "e4m3", "memory_reuse": "S2"},
    "other chunks in backward": {
        **{"wire": "e4m3", "wire_backward": "e4m3", "memory_reuse": "S2"},
        **{"pipeline": 4, "pipeline_backward": 2},
    },
    "bfloat16": {"wire": "bfloat16", "wire_backward": "bfloat16"},
    "all rows are sent": {"wire": "e4m3", "bypass_local": False},
    "sent once": {"wire": "e4m3", "send_once": True, "memory_reuse": "S4"},
    "einsum": {"wire": "e4m3", "order": "einsum"},
    "dropped": {"wire": "e4m3", "capacity_factor": 0.6, "memory_reuse": "S4"},
    "padded": {"wire": "e4m3", "pad_to_capacity": True, "capacity_factor": 1.0},
    "a width that kernels refuse": {"wire": "e4m3", "wire_backward": "e4m3", "d_model": 130},
}

HIDDEN: dict[str, dict[str, Any]] = {
    "T_M in e4m3": {"pipeline": 2, "d_hidden": 260},
    "gated, other chunks in backward": {
        **{"expert": "swiglu", "d_hidden": 24, "pipeline": 4, "pipeline_backward": 2},
    },
    "a width that kernels refuse": {"d_hidden": 25},
}
"""Layers that keep T_M in e4m3, which the same kernels pack and unpack."""


def wired_branches(rank: int, world: int, options: dict[str, Any]) -> tuple[dict[str, float], str, list[str]]:
    """Returns relative differences between the branches, the launched kernels of the wire, and warnings."""
    options = {"d_model": 264, "dtype": torch.float32, **options}
    count = 8 if "pad_to_capacity" in options else TOKENS[world][rank]
    x, dy = (tokens(count, seed + rank, torch.float32, options["d_model"]) for seed in (10, 20))

    def step() -> dict[str, Any]:
        return backward(build(**options), x.clone().requires_grad_(), dy)

    on_cpu = step()
    GIVEN.clear()
    with as_cuda(computes=True) as device, device, warnings.catch_warnings(record=True) as warned:
        on_cuda = step()
        on_cuda = step()
    launched = {name.split()[-1] for name in device.calls.where}
    told = " ".join(sorted(name for name in launched if name.startswith("wire")))
    found = {name: float(relative_error(on_cuda[name], value)) for name, value in on_cpu.items()}
    return found, told, [str(each.message) for each in warned if "PyTorch operations" in str(each.message)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", WIRED)
def test_kernels_of_a_wire_give_the_rows_of_the_cpu(case: str, world: int) -> None:
    """The numbers differ by the order of float32 sums only: rows of another rounding would differ by 2 %."""
    is_refused = "d_model" in WIRED[case]
    results = ranks(world).run(wired_branches, WIRED[case])
    for (found, launched, warned), count in zip(results, TOKENS[world], strict=True):
        assert max(found.values()) <= 1e-5, found
        has_rows = count > 0 or "pad_to_capacity" in WIRED[case]
        expected = "wire_pack wire_unpack" if has_rows else "wire_unpack"  # nothing to pack without tokens
        assert launched == ("" if is_refused else expected)
        assert len(warned) == is_refused, warned  # once, in two steps of two passes with several chunks
        for message in warned:
            assert "without pmoe's kernels: a row's bytes (130 x 4 = 520) must be a multiple of 16" in message


@pytest.mark.parametrize("case", HIDDEN)
def test_kernels_of_a_wire_pack_the_hidden_activation(case: str) -> None:
    """A T_M that differs in its last bit may be rounded to another number: 2e-3 allows some of these."""
    options = {"memory_reuse": Restore("keep", "e4m3"), **HIDDEN[case]}
    is_refused = case == "a width that kernels refuse"
    for found, launched, warned in ranks(2).run(wired_branches, options):
        assert max(found.values()) <= 2e-3, found
        assert launched == ("" if is_refused else "wire_pack wire_unpack")
        assert len(warned) == is_refused, warned
        for message in warned:
            assert "pack T_M to e4m3, without pmoe's kernels: a row's bytes (25 x 4 = 100)" in message


def branches_of_bfloat16(rank: int, world: int) -> tuple[dict[str, float], list[str]]:
    """Returns the differences between the two branches, and the engine's own operators in that for CUDA."""

    def step() -> dict[str, Any]:
        layer = build(memory_reuse="S4", bias=False, expert="swiglu").bfloat16()
        x, dy = (each.bfloat16() for each in inputs(rank, world))
        return backward(layer, x.requires_grad_(), dy)

    on_cpu = step()
    with as_cuda(computes=True) as device, device:
        on_cuda = step()
    found = {name: float(relative_error(on_cuda[name].double(), value)) for name, value in on_cpu.items()}
    return found, [place for place in device.calls.where if place.startswith("engine/")]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_kernel_takes_the_routing_weights_in_the_order_in_which_they_are_sent(world: int) -> None:
    """Routing weights are float32 only if rows are narrower, as in this layer."""
    for found, operators in ranks(world).run(branches_of_bfloat16):
        assert max(found.values()) <= 0.02, found
        copies = [place for place in operators if place.split()[-1] in ("index_select", "index_put_", "cat")]
        # Those that sort what arrives, where the kernels that move rows do not take so few columns.
        sorting = ("sorted_weights", "in_expert_order")
        assert [place for place in copies if not any(name in place for name in sorting)] == []


def refused(rank: int, world: int, dtype: torch.dtype) -> str:
    layer = build(memory_reuse="S4").to(dtype)
    x = inputs(rank, world)[0].to(dtype)
    if rank == 0:
        x[0, 0] = math.nan
    with as_cuda(computes=True):
        return error_of(lambda: layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world", [1, 2])
def test_logits_that_are_not_finite_are_refused_on_all_ranks(world: int, dtype: torch.dtype) -> None:
    for error in ranks(world).run(refused, dtype):
        assert "rank 0: its gate logits are not finite" in error


# ---- what the kernels refuse

WORKS = {
    "route": ("tokens are routed", decide_route),
    "permute": ("rows are copied and summed", permute),
    "counts": ("row counts are exchanged", comm_counts),
}
"""The beginning of each warning, and the module whose function `refusal` decides."""


def with_refusals(
    rank: int, world: int, refused_on: list[list[str]]
) -> tuple[dict[str, float], list[str], list[str]]:
    """Makes two steps in which kernels refuse the sizes on some ranks.

    refused_on: for each rank the keys of `WORKS` that are refused there.

    Returns the relative differences from the branches for the CPU, the warnings, and the collectives of the
    second step.
    """

    def step() -> dict[str, Any]:
        return one_step(build(memory_reuse="S4"), rank, world)

    on_cpu = step()
    GIVEN.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_cuda(computes=True))
        warned = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for name in refused_on[rank]:
            reason = f"the sizes of {name}"
            stack.enter_context(mock.patch.object(WORKS[name][1], "refusal", lambda *_, why=reason: why))
        layer = build(memory_reuse="S4")
        one_step(layer, rank, world)
        with counted_collectives() as collectives:
            on_cuda = one_step(layer, rank, world)
    found = {name: float(relative_error(on_cuda[name], value)) for name, value in on_cpu.items()}
    messages = [str(each.message) for each in warned if "without pmoe's kernels" in str(each.message)]
    return found, messages, collectives


@pytest.mark.parametrize(
    "refused_on",
    [
        [["route"], ["route"]],
        [["permute"], ["permute"]],
        [["counts"], ["counts"]],
        [["route", "permute", "counts"], []],
        [[], ["permute", "counts"]],
    ],
    ids=str,
)
def test_what_kernels_refuse_is_computed_by_pytorch_and_told_once(refused_on: list[list[str]]) -> None:
    """Products told their reasons. Routing, copies of rows and the exchange of row counts told nothing."""
    results = ranks(2).run(with_refusals, refused_on)
    for (found, messages, _), refused_here in zip(results, refused_on, strict=True):
        assert max(found.values()) <= LIMIT, found
        told = [name for name in refused_here if name != "counts" or "route" not in refused_here]
        assert sorted(messages) == sorted(
            f"pmoe: {WORKS[name][0]} without pmoe's kernels: the sizes of {name}" for name in told
        )
    assert results[0][2] == results[1][2], "ranks with and without the kernels call the same collectives"


def test_one_reason_for_several_kernels_is_told_once() -> None:
    GIVEN.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for work in ("tokens are routed", "rows are copied and summed", "products are computed"):
            warn_of_fallback(work, "pmoe._cuda is not built")
        warn_of_fallback("products are computed", "dtype torch.float64")
    assert [str(each.message) for each in warned] == [
        "pmoe: tokens are routed without pmoe's kernels: pmoe._cuda is not built",
        "pmoe: products are computed without pmoe's kernels: dtype torch.float64",
    ]


def test_rows_of_a_width_that_kernels_do_not_take_are_told() -> None:
    GIVEN.clear()
    order = SortedOrder()
    with as_cuda(), pytest.warns(UserWarning, match=r"rows of 3 columns have 12 bytes, no multiple of 16"):
        assert not order.runs_kernels(torch.zeros(2, 3), 2)
    with as_cuda():
        assert order.runs_kernels(torch.zeros(2, 4), 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not order.runs_kernels(torch.zeros(2, 0), 2), "rows of no columns need no kernel"
    assert not order.runs_kernels(torch.zeros(2, 4), 2), "nothing is told of the CPU"


# ---- layers that choose the number of chunks


def chosen_chunks(rank: int, world: int, degrees: list[int]) -> tuple[list[dict[str, float]], list[int]]:
    """Makes a step for each number of chunks, which the layer chooses.

    Returns for each step the relative differences from a layer with that number on the CPU, and how many
    operators of the branches for CUDA sort numbers.
    """
    taken = iter(degrees)

    def choose_among(batch: TrialBatch, restore: Restore | None) -> Choice:
        n = next(taken)
        return Choice(forward=n, backward=n, restore=STRATEGIES["S4"])

    x, dy = (torch.cat([each] * 4) for each in inputs(rank, world))
    expected = [
        backward(build(pipeline=n, memory_reuse="S4"), x.clone().requires_grad_(), dy) for n in degrees
    ]
    found = []
    sorts = []
    with mock.patch.object(open_choice, "choose_among", choose_among):
        layer = build(pipeline=True, memory_reuse="S4", slack=8.0)
        for values in expected:
            with as_cuda(computes=True) as device, device:
                step = backward(layer, x.clone().requires_grad_(), dy)
            found.append({name: float(relative_error(step[name], value)) for name, value in values.items()})
            operators = [place.split()[-1] for place in device.calls.where]
            sorts.append(sum(name in ("sort", "argsort") for name in operators))
    return found, sorts


def test_routing_kernels_sort_the_rows_for_the_number_of_chunks_of_the_last_call() -> None:
    """In layers that choose the number of chunks, PyTorch operators sorted the rows of every call."""
    for found, sorts in ranks(2).run(chosen_chunks, [4, 4, 2, 2]):
        assert max(max(step.values()) for step in found) <= LIMIT, found
        assert [number > 0 for number in sorts] == [True, False, True, False], sorts
