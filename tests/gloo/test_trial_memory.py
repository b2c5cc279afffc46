"""A rank that runs out of memory in a trial: the choice is dropped on all ranks, and training goes on."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import pmoe
from pmoe.choose import open_choice, part_of_batch, search, solve, trials
from pmoe.engine.plan import make_plan
from pmoe.engine.variants import trial
from pmoe.measure import profile
from pmoe.planner.granularity import BatchRange, Excess, PassDegrees
from pmoe.warn import GIVEN
from tests.failing_trials import ERRORS, Failing, FailingOperators
from tests.pool import ranks

TOKENS, D_MODEL, D_HIDDEN = 2048, 32, 128


def few_fast(parts: Any) -> Any:
    """Stands in for `part_of_batch.times_of_whole`: the fewer chunks, the faster."""
    return {
        choice: replace(timed, step=float(choice.forward))
        for part in parts
        for choice, timed in part.times.items()
    }


def many_hardly_faster(parts: Any) -> Any:
    """Stands in for `part_of_batch.times_of_whole`: many chunks are faster, but by less than the noise."""
    return {
        choice: replace(timed, step=1.0 - 0.001 * choice.forward, noise=0.5)
        for part in parts
        for choice, timed in part.times.items()
    }


def step(layer: pmoe.MoELayer, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, D_MODEL, generator=generator).requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = layer(x)
    y.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
    return [y.detach(), x.grad, *gradients]  # type: ignore[list-item]


def job(
    rank: int,
    world: int,
    name: str,
    at: int | None,
    most: float,
    options: dict[str, Any],
    times_of_whole: Any = None,
    known: int | None = None,
) -> dict[str, Any]:
    """Runs a step in which allocations of rank 1 fail in trials.

    times_of_whole: stands in for the function of this name; None for that of pmoe.
    known: number of chunks of a range of batch sizes that earlier trials found; None for no trials before.
    """
    search._LEARNED.clear()
    GIVEN.clear()
    failing = Failing(rank, ERRORS[name], at, most)
    torch.manual_seed(0)
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, top_k=2, **({"pipeline": True} | options))
    with (
        tempfile.TemporaryDirectory() as folder,  # no stored profile says which n to try
        mock.patch.dict(os.environ, PMOE_CACHE=folder),
        mock.patch.dict(profile.PROFILES, clear=True),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        patches = failing.patches()
        if times_of_whole is not None:
            patches.append(mock.patch.object(part_of_batch, "times_of_whole", times_of_whole))
        for patch in patches:
            patch.start()
        if known is not None:
            fastest = {PassDegrees(known, known): Excess(0.0, 0.0)}
            table = search.learned_degrees(layer.layer_modules).table(torch.float32)
            table.ranges[TOKENS // 2] = BatchRange(TOKENS // 2, 2 * TOKENS, 2, fastest)
        try:
            got = step(layer, rank)
            error = ""
        except RuntimeError as failure:
            got, error = [], f"{type(failure).__name__}: {failure}"
        finally:
            for patch in patches:
                patch.stop()
    ran = layer.ran
    answer = {
        "ran": None if ran is None else (ran.forward, ran.backward),
        "error": error,
        "warned": [str(each.message) for each in caught if "ran out of memory" in str(each.message)],
        "allocations": failing.count,
        "in_use": pmoe.pool("cpu").device.bytes_in_use,
    }
    if got:
        fixed = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, top_k=2, **(options | {"pipeline": ran.forward}))  # type: ignore[union-attr]
        fixed.load_state_dict(layer.state_dict())
        expected = step(fixed, rank)
        answer["same"] = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))
    search._LEARNED.clear()
    return answer


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ERRORS)
def test_a_choice_that_is_too_large_for_one_rank_is_dropped_on_all(name: str) -> None:
    """Larger chunks have larger ring slots: those of n = 1 and 2 are above the limit, those of n = 8 below.

    Few chunks count as the fastest.
    """
    first, second = ranks(2).run(job, name, None, 1_200_000, {"memory_reuse": "S4"}, few_fast)
    assert first["ran"] == second["ran"] and first["ran"][0] >= 4, first["error"]
    assert first["same"] and second["same"]
    assert first["warned"] and not second["warned"]
    assert "n=1 " in first["warned"][0] or "n=2 " in first["warned"][0]
    assert first["in_use"] == second["in_use"] == 0


def test_fewer_chunks_that_are_about_as_fast_are_not_taken_where_they_are_too_large() -> None:
    """A search takes the smallest n of those that are about as fast, but has tested only the fastest n."""
    first, second = ranks(2).run(job, "torch", None, 1_200_000, {"memory_reuse": "S4"}, many_hardly_faster)
    assert first["ran"] == second["ran"] and first["ran"][0] >= 4, first["error"]
    assert first["same"] and second["same"]
    for got in ranks(2).run(job, "torch", None, float("inf"), {"memory_reuse": "S4"}, many_hardly_faster):
        assert got["ran"][0] <= 2


def test_an_n_of_other_batch_sizes_is_not_taken_where_it_is_too_large_for_one_rank() -> None:
    """A range from 1,024 to 4,096 tokens has n = 1, whose ring slots are above rank 1's limit here."""
    first, second = ranks(2).run(job, "torch", None, 1_200_000, {"memory_reuse": "S4"}, None, 1)
    assert first["ran"] == second["ran"] and first["ran"][0] >= 4, first["error"]
    assert first["same"] and second["same"]
    assert "n=1 " in first["warned"][0] and not second["warned"]
    for got in ranks(2).run(job, "torch", None, float("inf"), {"memory_reuse": "S4"}, None, 1):
        assert got["ran"] == (1, 1) and got["allocations"] > 0 and not got["warned"]


def test_if_no_n_has_room_for_a_batch_of_a_known_range_all_ranks_raise_one_error() -> None:
    first, second = ranks(2).run(job, "torch", None, 0.0, {"memory_reuse": "S4"}, None, 1)
    assert first["error"] == second["error"]
    assert "n=16 with communicate/recompute: about" in first["error"]


def predicting_job(rank: int, world: int) -> list[tuple[int, tuple[int, int]]]:
    """Returns (number of the batch, chunks) of each prediction of a peak in a step that searches."""
    predicted = []
    batches: list[Any] = []
    predicted_memory = trials.predicted_memory

    def noted(batch: Any, choice: Any) -> trials.StepMemory:
        if not any(batch is each for each in batches):
            batches.append(batch)
        number = next(at for at, each in enumerate(batches) if each is batch)
        predicted.append((number, (choice.forward, choice.backward)))
        return predicted_memory(batch, choice)

    with mock.patch.object(trials, "predicted_memory", noted):
        job(rank, world, "torch", None, float("inf"), {"memory_reuse": "S4"})
    return predicted


def test_a_search_predicts_the_peak_of_each_choice_once() -> None:
    first, second = ranks(2).run(predicting_job)
    assert first == second and len(first) == len(set(first))
    assert {(0, (n, n)) for n in (1, 2, 4, 8, 16)} <= set(first)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", range(1, 61))
@pytest.mark.parametrize(
    "options",
    [{}, {"memory_reuse": "S1"}, {"memory_reuse": "S4"}, {"memory_reuse": "S4", "shared_expert": 16}],
    ids=["no reuse", "S1", "S4", "shared expert"],
)
def test_an_allocation_that_fails_at_any_point_of_a_trial_drops_the_choice(
    at: int, options: dict[str, Any]
) -> None:
    first, second = ranks(2).run(job, "torch", at, float("inf"), options)
    assert first["ran"] == second["ran"] and not first["error"] and not second["error"]
    assert first["same"] and second["same"]
    assert len(first["warned"]) == (second["allocations"] >= at)


def test_if_every_choice_is_too_large_all_ranks_raise_one_error_that_names_the_least() -> None:
    first, second = ranks(2).run(job, "torch", None, 0.0, {"memory_reuse": "S4"})
    assert first["error"] == second["error"]
    assert "n=16 with communicate/recompute: about" in first["error"] and "MiB" in first["error"]


def test_the_solver_takes_no_n_that_is_too_large_for_one_rank() -> None:
    """Before, it took n = 1 even if the trial with n = 1 had run out of memory, and tested nothing."""
    options = {"pipeline": "solve", "memory_reuse": "S4"}
    for got in ranks(2).run(solved_job, 1_200_000.0, options):
        assert got["ran"][0] >= 4 and not got["error"]
    for got in ranks(2).run(solved_job, float("inf"), options):
        assert got["ran"] == (1, 1) and not got["error"]
    first, second = ranks(2).run(solved_job, 0.0, options)
    assert first["error"] == second["error"]
    assert "n=16 with communicate/recompute: about" in first["error"]


def solved_job(rank: int, world: int, most: float, options: dict[str, Any]) -> dict[str, Any]:
    """As `job`, with a solver for which n = 1 is the fastest."""
    with mock.patch.object(solve, "first_of_fastest", lambda seconds: min(seconds, key=sum)):
        return job(rank, world, "torch", None, most, options)


@pytest.mark.parametrize(
    "options, least",
    [
        ({"pipeline": 4, "memory_reuse": True}, "n=4 with "),
        ({"memory_reuse": True, "memory_budget": "8MiB"}, "n=16 with "),
    ],
    ids=["a fixed n", "a budget"],
)
def test_if_no_trial_of_a_pair_has_memory_all_ranks_raise_one_error(
    options: dict[str, Any], least: str
) -> None:
    """Before, the pair was taken that was predicted to be the fastest, and its memory was not tested."""
    first, second = ranks(2).run(job, "torch", None, 0.0, options)
    assert first["error"] == second["error"] and least in first["error"], first
    for got in ranks(2).run(job, "torch", None, float("inf"), options):
        assert not got["error"] and not got["warned"]


def predicted_job(rank: int, world: int, limit: float) -> dict[str, Any]:
    """Does the same as `job`, with predictions that leave only n = 1 and 2 to try."""
    predicted = {1: 1e-3, 2: 1.1e-3, 4: 9e-3, 8: 9e-3, 16: 9e-3}
    with mock.patch.object(search, "predicted_seconds", lambda *_: predicted):
        return job(rank, world, "torch", None, limit, {"memory_reuse": "S4"}, few_fast)


def test_if_all_that_is_predicted_to_be_fast_is_too_large_the_other_choices_are_tried() -> None:
    first, second = ranks(2).run(predicted_job, 1_200_000)
    assert first["ran"] == second["ran"] and first["ran"][0] >= 4, first["error"]
    assert first["same"] and second["same"]
    warned = " ".join(first["warned"])
    assert "n=1 " in warned and not second["warned"]
    for got in ranks(2).run(predicted_job, 0.0):
        assert "n=16 with communicate/recompute: about" in got["error"]


def plan_job(rank: int, world: int) -> dict[str, Any]:
    """As `job`, but rank 1 runs out of memory in the first plan of a trial."""
    plan = make_plan.make_plan
    calls = itertools.count()

    def failing(*given: Any) -> Any:
        if rank == 1 and next(calls) == 0:
            raise ERRORS["torch"]
        return plan(*given)

    with mock.patch.object(make_plan, "make_plan", failing):
        return job(rank, world, "torch", None, float("inf"), {})


def test_a_plan_that_fails_in_a_trial_drops_the_choice_and_training_goes_on() -> None:
    first, second = ranks(2).run(plan_job)
    assert first["ran"] == second["ran"] and not first["error"] and not second["error"]
    assert first["same"] and second["same"]
    assert len(first["warned"]) == 1


def compared_job(rank: int, world: int, at: int) -> dict[str, Any]:
    """Runs a step in which rank 1 runs out of memory while the profile is compared with a step.

    at: the number of the allocation that fails.
    """
    failing = Failing(rank, ERRORS["torch"], at, float("inf"))
    comparisons = []
    run_trials = open_choice.run_trials

    def failing_trials(*given: Any) -> Any:
        comparisons.append(given)
        with contextlib.ExitStack() as stack:
            for patch in failing.patches():
                stack.enter_context(patch)
            return run_trials(*given)

    GIVEN.clear()
    open_choice._compared.clear()
    torch.manual_seed(0)
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, top_k=2, pipeline=2, memory_reuse=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, PMOE_CACHE=folder),
        mock.patch.dict(profile.PROFILES, clear=True),
        mock.patch.object(open_choice, "run_trials", failing_trials),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        got = step(layer, rank)
    assert layer.ran is not None
    fixed = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, top_k=2, pipeline=2, memory_reuse=layer.ran.restore)
    fixed.load_state_dict(layer.state_dict())
    expected = step(fixed, rank)
    return {
        "comparisons": len(comparisons),
        "allocations": failing.count,
        "restore": str(layer.ran.restore),
        "same": all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True)),
        "warned": [str(each.message) for each in caught if "memory" in str(each.message)],
    }


@pytest.mark.parametrize("at", [1, 6])
def test_a_comparison_of_the_profile_that_lacks_memory_is_left_out_and_training_goes_on(at: int) -> None:
    """Before, all ranks raised an error that no choice was left, although nothing was to be chosen."""
    first, second = ranks(2).run(compared_job, at)
    assert first["comparisons"] == second["comparisons"] == 1
    assert second["allocations"] >= at
    assert first["restore"] == second["restore"]
    assert first["same"] and second["same"]
    assert not first["warned"] and not second["warned"]


def cutting_job(rank: int, world: int, at: int) -> dict[str, Any]:
    """As `job`, but rank 1 runs out of memory when it cuts off the first tokens for a trial.

    at: which time it cuts tokens off, counted from 1.
    """
    first_inputs = part_of_batch.first_inputs
    calls = itertools.count(1)

    def failing(*given: Any) -> Any:
        if next(calls) == at and rank == 1:
            raise ERRORS["torch"]
        return first_inputs(*given)

    with mock.patch.object(part_of_batch, "first_inputs", failing):
        answer = job(rank, world, "torch", None, float("inf"), {"memory_reuse": "S4"})
    return answer | {"cuts": next(calls) - 1}


@pytest.mark.parametrize("at", [1, 2])
def test_a_rank_that_lacks_memory_for_the_first_tokens_ends_the_search_and_training_goes_on(at: int) -> None:
    """Before, all ranks raised an error."""
    first, second = ranks(2).run(cutting_job, at)
    assert second["cuts"] >= at
    assert first["ran"] == second["ran"] and not first["error"] and not second["error"]
    assert first["same"] and second["same"]


def measuring_job(
    rank: int, world: int, options: dict[str, Any], at: range, most: float = float("inf")
) -> dict[str, Any]:
    """Runs a step in which operators of rank 1 fail while the speed of this machine is measured.

    at, most: which operators fail (`FailingOperators`). They are counted over all measurements.
    """
    search._LEARNED.clear()
    GIVEN.clear()
    failing = FailingOperators(at, most)
    measures = {
        (profile, "measure"): profile.measure,
        (profile, "measure_operations"): profile.measure_operations,
        (solve, "order_lines"): solve.order_lines,
        (solve, "gate_lines"): solve.gate_lines,
    }

    def in_failing(function: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            with failing if rank == 1 else contextlib.nullcontext():
                return function(*given, **options)

        return call

    torch.manual_seed(0)
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, top_k=2, **options)
    error = ""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, PMOE_CACHE=folder))
        for memo in (profile.PROFILES, profile._limits, solve._operations):
            stack.enter_context(mock.patch.dict(memo, clear=True))
        for (module, name), function in measures.items():
            stack.enter_context(mock.patch.object(module, name, in_failing(function)))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        try:
            got = step(layer, rank)
        except RuntimeError as failure:
            error = f"{type(failure).__name__}: {failure}"
    search._LEARNED.clear()
    answer = {
        "error": error,
        "operators": failing.count,
        "warned": [str(each.message) for each in caught if "smaller tensors" in str(each.message)],
    }
    if error:
        return answer
    assert layer.ran is not None
    fixed = pmoe.MoELayer(
        D_MODEL,
        D_HIDDEN,
        4,
        top_k=2,
        pipeline=layer.ran.forward,
        pipeline_backward=layer.ran.backward,
        memory_reuse=layer.ran.restore or False,
    )
    fixed.load_state_dict(layer.state_dict())
    same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, step(fixed, rank), strict=True))
    return answer | {"ran": str(layer.ran), "same": same}


AUTOMATIC = [{"pipeline": True, "memory_reuse": True}, {"pipeline": "solve", "memory_reuse": "S4"}]


@pytest.mark.parametrize("at", [1, 2, 6, 40, 90])
@pytest.mark.parametrize("options", AUTOMATIC, ids=["trials", "solver"])
def test_a_rank_that_lacks_memory_in_a_measurement_measures_smaller_tensors_with_all(
    options: dict[str, Any], at: int
) -> None:
    """Before, all ranks raised an error."""
    first, second = ranks(2).run(measuring_job, options, range(at, at + 1))
    assert second["operators"] >= at
    assert not first["error"] and not second["error"]
    assert first["ran"] == second["ran"] and first["same"] and second["same"]
    assert len(first["warned"]) == 1 and not second["warned"]


def test_tensors_that_are_too_large_for_one_rank_are_measured_smaller_on_all() -> None:
    first, second = ranks(2).run(measuring_job, AUTOMATIC[0], range(0), 20_000.0)
    assert not first["error"] and not second["error"]
    assert first["ran"] == second["ran"] and first["same"] and second["same"]
    assert len(first["warned"]) == 1


def test_a_measurement_that_never_has_enough_memory_is_one_error_on_all_ranks() -> None:
    first, second = ranks(2).run(measuring_job, AUTOMATIC[0], range(1, 10**9))
    assert first["error"] == second["error"]
    assert "TooLittleMemoryError" in first["error"] and "`pmoe profile`" in first["error"]


@pytest.mark.parametrize("name", ["order_lines", "gate_lines"])
def test_a_rank_that_lacks_memory_to_time_a_module_takes_the_costs_of_the_others(name: str) -> None:
    first, second = ranks(2).run(module_job, name)
    assert not first["error"] and not second["error"]
    assert first["ran"] == second["ran"] and first["same"] and second["same"]


def module_job(rank: int, world: int, name: str) -> dict[str, Any]:
    """As `measuring_job`, but only the timing of one module of the layer fails, on rank 1."""

    def failing(*_: Any) -> Any:
        raise ERRORS["the CPU's allocator"]

    with mock.patch.object(solve, name, failing) if rank == 1 else contextlib.nullcontext():
        return measuring_job(rank, world, AUTOMATIC[1], range(0))


def test_errors_of_other_kinds_are_none_of_memory() -> None:
    assert not trial.is_out_of_memory(RuntimeError("shapes do not match"))
    assert not trial.is_out_of_memory(OSError(28, "No space left on device"))
    assert not trial.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    # Before, only torch's own allocators were known: the rank raised, and the others waited for it.
    assert all(map(trial.is_out_of_memory, ERRORS.values()))
