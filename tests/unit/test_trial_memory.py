"""How many tokens trials run on, and the predicted peak of a step with trials, from numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pmoe
from pmoe.choose.part_of_batch import share_of_tokens
from pmoe.choose.trials import TrialBatch, own_memory, routing_bytes
from pmoe.comm.counts import RankCounts
from pmoe.planner.degree import DEGREES, all_choices
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.memory import bytes_before_rows
from pmoe.planner.priced_choices import bound
from pmoe.planner.trial_memory import ALIKE, fraction_of_tokens, peak_of_passes, searching_peak
from pmoe.schedule.restore import STRATEGIES


def test_a_trial_takes_the_free_bytes_but_for_some_room() -> None:
    assert fraction_of_tokens(peak=1540, free=1000, routing=0, gradients=100) == pytest.approx(0.5)


def test_the_routing_of_all_tokens_and_a_trial_on_some_of_them_fit_together() -> None:
    fraction = fraction_of_tokens(peak=1630, free=1000, routing=400, gradients=100)
    assert 400 + 100 + fraction * 1530 == pytest.approx(ALIKE * 1000)
    assert fraction_of_tokens(peak=1630, free=1000, routing=1000, gradients=100) == 0


def test_gradients_need_no_room() -> None:
    """Before, 15 % of all free bytes stayed free: with 900 bytes of gradients, no trial could run."""
    assert fraction_of_tokens(peak=1500, free=1000, routing=10, gradients=900) == pytest.approx(80 / 600)


SIZES = sizes_from_options(64, 256, 4, num_ranks=2)
CALL = SIZES.call(4096)
CANDIDATES = {
    choice: bound(SIZES, CALL, choice, 1.25)
    for choice in all_choices([(n, n) for n in DEGREES], [STRATEGIES["S4"]])
}


def test_a_step_with_trials_needs_at_most_a_tenth_more_than_one_with_their_choice() -> None:
    for memory in CANDIDATES.values():
        most = searching_peak(memory, SIZES, CALL, CANDIDATES.values())
        assert memory.peak <= most <= 1.1 * memory.peak


def test_trials_take_the_memory_of_the_step_without_its_output() -> None:
    """A rank with few tokens, which computes the rows of others, has a small output."""
    smallest = replace(min(CANDIDATES.values(), key=peak_of_passes), peak=4_600_000, backward_peak=4_600_000)
    few_tokens = replace(CALL, tokens=16, inner=16, slots=16)
    assert searching_peak(smallest, SIZES, CALL, CANDIDATES.values()) == 4_600_000
    assert searching_peak(smallest, SIZES, few_tokens, CANDIDATES.values()) == 4_963_577


def test_a_step_needs_no_more_than_the_largest_trial_and_the_routing() -> None:
    memory = next(iter(CANDIDATES.values()))
    lower = replace(memory, peak=0, backward_peak=28_000_000)
    tried = replace(memory, backward_peak=27_900_000)
    # The routing: for each of 4,096 tokens, a choice, a weight, and the scores of 4 experts.
    assert bytes_before_rows(SIZES, CALL) == 4096 * (8 + 4 + 4 * 4) == 114_688
    assert searching_peak(lower, SIZES, CALL, [tried]) == 28_014_688


def test_with_a_budget_any_choice_within_it_may_be_tried() -> None:
    memory = CANDIDATES[next(reversed(CANDIDATES))]
    largest = max(map(peak_of_passes, CANDIDATES.values()))
    budget = (memory.peak + largest) // 2
    assert searching_peak(memory, SIZES, CALL, CANDIDATES.values(), budget) == budget
    assert searching_peak(memory, SIZES, CALL, CANDIDATES.values(), 2 * largest) == largest
    assert searching_peak(memory, SIZES, CALL, CANDIDATES.values(), 1) == memory.peak


def routed(layer: pmoe.MoELayer, num_tokens: int, dtype: torch.dtype, bins: int = 16) -> TrialBatch:
    """Returns a batch of one rank whose rows are routed evenly to the experts."""
    modules: Any = layer.layer_modules
    num_experts = modules.options.num_experts
    rows = torch.full((bins, 1, num_experts), num_tokens // (bins * num_experts))
    counts = RankCounts(
        send=rows, recv=rows, recv_device=rows, max_tokens=num_tokens, needs_grad=True, sorts_results=False
    )
    inputs: Any = SimpleNamespace(x_TM=torch.empty(num_tokens, 64, dtype=dtype))
    return TrialBatch(modules, counts, inputs, SimpleNamespace(modules=SimpleNamespace(copies=None)))  # type: ignore[arg-type]


def test_the_routing_of_padded_rows_is_that_of_the_numbers_of_chunks_that_were_counted() -> None:
    """Before, with the solver's n from 1 to 16, rows were padded for lcm(1, ..., 16) = 720,720 parts."""
    options: dict[str, Any] = {"pad_to_capacity": True, "capacity_factor": 1.0}
    of_pipeline = [
        routing_bytes(routed(pmoe.MoELayer(64, 256, 4, pipeline=pipeline, **options), 4096, torch.float32))
        for pipeline in (True, "solve")
    ]
    assert of_pipeline[0] == of_pipeline[1] < 1_000_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_count_as_in_the_predicted_peak(dtype: torch.dtype) -> None:
    """Before, the float32 sums of bfloat16 gradients counted 2 bytes an element.

    And gradients of the shared expert did not count. So trials were planned on too many tokens.
    """
    layer = pmoe.MoELayer(64, 256, 4, memory_reuse="S4", pipeline=4, shared_expert=128, dtype=dtype)
    batch = routed(layer, 4096, dtype)
    [choice] = all_choices([(4, 4)], [STRATEGIES["S4"]])
    [memory] = own_memory(batch, [choice])
    experts = sum(parameter.numel() for parameter in layer.experts.parameters())
    shared = sum(parameter.numel() for parameter in layer.shared_expert.parameters())
    assert memory.gradients == 4 * experts + shared * dtype.itemsize
    # A part of the tokens fits into 70 % of the memory: the gradients, and 80 % of the rest.
    free = 0.7 * memory.peak
    share = share_of_tokens(batch, [choice], free + batch.inputs.x_TM.nbytes)
    assert share == pytest.approx(0.8 * (free - memory.gradients) / (memory.peak - memory.gradients))
