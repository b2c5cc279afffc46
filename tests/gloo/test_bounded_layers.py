"""pmoe.BoundedSteps with layers whose passes run in chunks as programs: no padding, no counts on the host.

The recorded calls of the programs compute in float64 (`tests.programs`). The reference is the same model,
trained in a plain loop by programs with exact row counts, and bits are compared. `tests.captured` takes the
place of CUDA graphs.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import warn
from pmoe.call.options import Switches
from pmoe.call.row_bound import ProgramBound
from pmoe.decide import bounded_program_counts
from pmoe.decide.bounded_program_counts import program_graph_refusal
from pmoe.experts.marks import is_expert
from pmoe.program.bounded import RowBounds
from pmoe.training import bounded_steps
from tests.captured import Graph
from tests.gloo.kit import counted_collectives, error_of
from tests.gloo.test_bounded_rows import (
    BATCHES,
    CASES,
    EXPERTS,
    FREEZES,
    OPTIMIZERS,
    TOP_K,
    Case,
    Freezes,
    M,
    Model,
    batch,
    run_step,
    state,
)
from tests.pool import GROUP_TIMEOUT_SECONDS, SHORT_TIMEOUT_SECONDS, Pool, ranks
from tests.programs import CpuBackend, on_cpu

BY_PROGRAMS = Switches(program=True, program_heaps=True)
IN_CHUNKS: dict[str, Any] = {"pipeline": 2, "memory_reuse": "S4"}


def build(**options: Any) -> Model:
    """Returns a model of two layers that run by programs. Rows of the first hardly fit."""
    torch.manual_seed(5)
    model = Model(**{**IN_CHUNKS, **options})
    for layer in (model.first, model.second):
        layer.switches = BY_PROGRAMS
    return model


def layer_of(**options: Any) -> pmoe.MoELayer:
    """Returns a layer whose gate sends column e of a token to expert e."""
    torch.manual_seed(5)
    sizes = {"dtype": torch.float64, "slack": 1.0, **IN_CHUNKS}
    layer = pmoe.MoELayer(M, 8, EXPERTS, TOP_K, **{**sizes, **options})
    layer.switches = BY_PROGRAMS
    with torch.no_grad():
        layer.gate.weight.copy_(8 * torch.eye(EXPERTS, M))
    return layer


def unlike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Returns the names of the values that differ in any bit."""
    assert set(found) == set(expected)
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]


# ---- steps without a graph


def train(
    rank: int, world: int, case: Case, bounded: bool, options: dict[str, Any]
) -> tuple[dict[str, Tensor], int, list[list[str]], set[object]]:
    """Trains a model. Returns its state, the repeated steps, the collectives of steps, and how calls ran."""
    model = build(**options)
    optimizer = OPTIMIZERS[case.kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    steps = pmoe.BoundedSteps(model, optimizer, lambda x: run_step(model, optimizer, x)) if bounded else None
    calls = []
    ran = set[object]()
    for index in range(BATCHES):
        last = case.num_parts - 1
        is_skewed = rank in case.skewed.get(index, ())
        parts = [
            batch(rank, world, index + 60 * part, is_skewed and part == last, case.grows)
            for part in range(case.num_parts)
        ]
        with counted_collectives() as collectives:
            if steps is None:
                run_step(model, optimizer, parts)
                optimizer.step()
            else:
                steps.step(parts)
        calls.append(collectives)
        assert model.second.ran is not None
        ran.add((model.second.ran.path, model.second.ran.forward, model.second.ran.backward))
        scheduler.step()
    if steps is not None:
        steps.finish()
    return state(model, optimizer), 0 if steps is None else steps.repeated, calls, ran


def job(
    rank: int, world: int, case: Case, options: dict[str, Any]
) -> tuple[list[str], int, list[list[str]], set[object]]:
    with on_cpu(CpuBackend(seed=rank)):
        expected, *_ = train(rank, world, case, False, options)
        found, repeated, calls, ran = train(rank, world, case, True, options)
    return unlike(found, expected), repeated, calls, ran


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_are_those_of_exact_programs_to_the_bit(world: int, name: str) -> None:
    """Batches whose rows do not fit are among them, and ranks without tokens."""
    case = CASES[name]
    for wrong, repeated, calls, ran in ranks(world).run(job, case, {}):
        assert not wrong
        assert repeated == case.repeated
        assert ran == {("program", 2, 2)}
        # A step that is neither the first nor repeated: each layer's call gathers counts once.
        assert calls[1].count("all_gather_into_tensor") == 2 * case.num_parts


OTHERS: dict[str, dict[str, Any]] = {
    "four chunks of SwiGLU": {"pipeline": 4, "expert": "swiglu"},
    "one chunk": {"pipeline": 1, "bias": False},
    "kept": {"memory_reuse": pmoe.Restore("keep", "keep")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_values_are_those_of_exact_programs_for_other_chunks_and_pairs(name: str) -> None:
    case = CASES["several steps, the last among them"]
    for wrong, repeated, _, _ in ranks(2).run(job, case, OTHERS[name]):
        assert not wrong
        assert repeated >= case.repeated  # smaller chunks are less even


def test_rows_of_one_rank_that_do_not_fit_are_dropped_on_all_ranks_together() -> None:
    """Rows of rank 1 do not fit on rank 0. Ranks 2 and 3 have nothing to do with them."""
    for wrong, repeated, _, _ in ranks(4).run(job, Case(skewed={3: (1,)}), {}):
        assert not wrong
        assert repeated == 1


def dropped_job(rank: int, world: int) -> list[bool]:
    """Runs a bounded call whose rows do not fit on rank 0. Returns which results are all 0."""
    with on_cpu(CpuBackend(seed=rank)):
        layer = layer_of()
        steps = pmoe.BoundedSteps(layer, OPTIMIZERS["AdamW"](layer.parameters()), layer)
        results = []
        for is_skewed in (False, True):
            x = batch(rank, world, 0, is_skewed and rank == 1, False).requires_grad_()
            layer.zero_grad()
            with steps.bounded_calls():
                y = layer(x)
            y.square().sum().backward()
            results = [y, x.grad, *(parameter.grad for parameter in layer.experts.parameters())]
        bound = layer.cache.row_bound
        assert bound is not None and bound.exceeded == 1
    return [bool((result == 0).all()) for result in results]


def test_a_call_whose_rows_do_not_fit_gives_zeros_on_all_ranks() -> None:
    for zeros in ranks(2).run(dropped_job):
        assert all(zeros) and len(zeros) == 6


def frozen_job(rank: int, world: int, case: Freezes) -> tuple[list[str], list[bool]]:
    """Returns what differs from training without a bound, and whether each step exchanged counts exactly."""
    found = []
    exact = []
    for bounded in (False, True):
        with on_cpu(CpuBackend(seed=rank)):
            model = layer_of(slack=4.0)
            scale = nn.Parameter(torch.ones(M, dtype=torch.float64))  # every rank has a gradient
            optimizer = OPTIMIZERS["fused AdamW"]([scale, *model.parameters()])

            def run(
                x: Tensor, model: pmoe.MoELayer = model, scale: Any = scale, optimizer: Any = optimizer
            ) -> None:
                optimizer.zero_grad()
                ((scale * model(x)).square().sum() + 0.01 * model.l_aux).backward()

            steps = pmoe.BoundedSteps(model, optimizer, run) if bounded else None
            values: dict[str, Tensor] = {}
            for index, frozen in enumerate(case.frozen):
                x = batch(rank, world, index, False, False)
                with counted_collectives() as calls:
                    if frozen is None:
                        with torch.no_grad():
                            values[f"output {index}"] = model(x)
                        continue
                    model.requires_grad_(rank not in frozen)
                    if steps is not None:
                        steps.step(x)
                    else:
                        run(x)
                        optimizer.step()
                exact.append("all_gather_into_tensor" not in calls)
            if steps is not None:
                steps.finish()
            found.append(values | {name: value.clone() for name, value in model.named_parameters()})
    expected, result = found
    return unlike(result, expected), exact[len(exact) // 2 :]


@pytest.mark.parametrize("name", FREEZES)
def test_ranks_may_freeze_parameters_of_their_own(name: str) -> None:
    for wrong, exact in ranks(2).run(frozen_job, FREEZES[name]):
        assert not wrong
        assert exact[0] and not any(exact[1:])


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "with pmoe's contexts": {"use_reentrant": False, "context_fn": pmoe.checkpoint_contexts},
    "without contexts": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}


def checkpoint_job(rank: int, world: int, name: str) -> tuple[list[str], int, bool]:
    """Returns what differs from training without a bound, if a checkpoint is around the layer.

    Also returns the repeated steps, and whether the second step gathered row counts.
    """
    found = []
    repeated = 0
    calls: list[str] = []
    checkpointed = partial(checkpoint, **CHECKPOINTS[name])
    for bounded in (False, True):
        with on_cpu(CpuBackend(seed=rank)):
            layer = layer_of()
            optimizer = OPTIMIZERS["fused AdamW"](layer.parameters())

            def run(x: Tensor, layer: pmoe.MoELayer = layer, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                checkpointed(layer, x.requires_grad_()).square().sum().backward()

            steps = pmoe.BoundedSteps(layer, optimizer, run) if bounded else None
            for index in range(BATCHES):
                x = batch(rank, world, index, rank == 1 and index == 3, False)
                with counted_collectives() as calls_of_step:
                    if steps is not None:
                        steps.step(x)
                    else:
                        run(x)
                        optimizer.step()
                if index == 1:
                    calls = calls_of_step
            if steps is not None:
                steps.finish()
                repeated = steps.repeated
            found.append({name: value.clone() for name, value in layer.named_parameters()})
    expected, result = found
    return unlike(result, expected), repeated, "all_gather_into_tensor" in calls


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_may_be_around_the_layer(name: str) -> None:
    """In the first step both passes of a checkpoint exchange row counts, so they save the same tensors."""
    for wrong, repeated, is_bounded in ranks(2).run(checkpoint_job, name):
        assert not wrong
        assert repeated == 1
        assert is_bounded


# ---- steps that a graph repeats

TOKENS = (16, 0, 9, 16)
"""Tokens of the ranks in a graph. Rank 1 has none."""
SKEWED = {1: (0,), 2: (2, 0), 4: (0,)}
"""Batches whose rows go to the first two experts, and the ranks on which they do."""
STEPS = 6


def graph_batch(rank: int, index: int, repeats: int = 1) -> Tensor:
    """(T, M): tokens for two neighbouring experts, which go through all experts; or for the first two."""
    generator = torch.Generator().manual_seed(10 * index + rank)
    token = torch.arange(repeats * TOKENS[rank])
    x = torch.rand(len(token), M, generator=generator, dtype=torch.float64)
    first = (token + index) % EXPERTS * (rank not in SKEWED.get(index, ()))
    x[token, first] += 3
    x[token, (first + 1) % EXPERTS] += 2
    return x


def compute(layer: pmoe.MoELayer, x: Tensor, *, frees: bool = True) -> None:
    """Computes gradients, and reduces those that do not belong to experts.

    frees: whether the memory of the gradients before is freed. Several graphs write into the same gradients,
        so they do not free it.
    """
    layer.zero_grad(set_to_none=frees)
    (layer(x).square().sum() + 0.01 * layer.l_aux).backward()
    for parameter in layer.parameters():
        if not is_expert(parameter):
            dist.all_reduce(parameter.grad)


def values(layer: pmoe.MoELayer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in layer.state_dict().items()}
    for index, slots in optimizer.state_dict()["state"].items():
        found |= {f"{index} {name}": value.clone() for name, value in slots.items()}
    return found


def graph_job(rank: int, world: int, repeats: tuple[int, ...], n: int) -> tuple[list[str], int, int]:
    """Trains by graphs that take turns. Returns the values that differ from those of a loop without graphs.

    Also returns the repeated steps, and the number of batches that do not fit.

    repeats: for each graph, how many times as many tokens it has.
    """
    slack = 1.0 if n == 2 else 1.75
    with on_cpu(CpuBackend(seed=rank)):
        layer = layer_of(pipeline=n, slack=slack)
        optimizer = OPTIMIZERS["fused AdamW"](layer.parameters())
        frees = len(repeats) == 1

        def batch_of(index: int) -> Tensor:
            return graph_batch(rank, index, repeats[index % len(repeats)])

        for index in range(STEPS):
            compute(layer, batch_of(index), frees=frees)
            optimizer.step()
        expected = values(layer, optimizer)

        layer = layer_of(pipeline=n, slack=slack)
        optimizer = OPTIMIZERS["fused AdamW"](layer.parameters())
        inputs = [batch_of(index) for index in range(len(repeats))]
        graphs = [Graph() for _ in repeats]

        def replay(index: int) -> None:
            inputs[index % len(graphs)].copy_(batch_of(index))
            graphs[index % len(graphs)].replay()

        steps = pmoe.BoundedSteps(
            layer, optimizer, replay, lambda index: compute(layer, batch_of(index), frees=frees)
        )
        for graph, x in zip(graphs, inputs, strict=True):
            compute(layer, x, frees=frees)  # ranks agree on the bound
            if frees:
                layer.zero_grad()
            with steps.bounded_calls(), graph.capture():
                compute(layer, x, frees=frees)
        for index in range(STEPS):
            steps.step(index)
        steps.finish()
        found = values(layer, optimizer)
    return unlike(found, expected), steps.repeated, len(SKEWED)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_graph_trains_as_a_loop_without_it(world: int, n: int) -> None:
    """Rank 1 has no tokens, and takes part in the replays of the others."""
    for wrong, repeated, skewed in ranks(world).run(graph_job, (1,), n):
        assert not wrong
        assert repeated == skewed


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_graphs_in_turn_with_other_numbers_of_tokens_train_as_a_loop_without_them(world: int) -> None:
    """Each repeated step is a call without a graph, between two replays."""
    for wrong, repeated, skewed in ranks(world).run(graph_job, (1, 2), 2):
        assert not wrong
        assert repeated == skewed


# ---- refusals and failures


def refusal_job(rank: int, world: int) -> list[str | None]:
    """Returns why a graph cannot hold calls."""
    with on_cpu(CpuBackend()):
        layer = layer_of()
        steps = pmoe.BoundedSteps(layer, OPTIMIZERS["fused AdamW"](layer.parameters()), layer)
        bound = layer.cache.row_bound
        assert bound is not None
        x = batch(rank, world, 0, False, False)

        def refusal(x: Tensor) -> str | None:
            return program_graph_refusal(
                layer.layer_modules, bound, x, layer.layer_modules.asks_for_gradients(x)
            )

        layer.requires_grad_(False)
        with steps.bounded_calls():
            told = [refusal(x)]
        layer(x)
        told += [refusal(x)]
        with steps.bounded_calls():
            layer.requires_grad_(True)
            told += [refusal(x)]
            layer.requires_grad_(False)
            told += [refusal(x), refusal(x.new_ones(33, M))]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ProgramBound, "is_repeatable", False)
                told += [refusal(x)]
            layer.pipeline = 4
            told += [refusal(x)]
            layer(x)  # the ranks agree again
            told += [refusal(x)]
    return told


def test_a_refusal_says_what_to_do() -> None:
    for told in ranks(2).run(refusal_job):
        assert told == [
            "no call with torch.float64 and has_grad=True was made before: make one, outside of the capture",
            "its rows are not bounded here: capture it within BoundedSteps.bounded_calls()",
            "no rank needed gradients in the calls before: make one that does, outside of the capture",
            None,
            "x has 33 tokens, and the heap has room for 16: call the layer once with as many tokens before "
            "the capture",
            "its heap was closed after the last call of its kind: make one more call before the capture",
            "the experts, the gate, pipeline, memory_reuse or slack were changed after the last call of its "
            "kind: make one more call before the capture",
            None,
        ]


def widen(layer: pmoe.MoELayer) -> None:
    layer.experts = pmoe.MoELayer(M, 16, EXPERTS, TOP_K, dtype=torch.float64).experts


def drop_biases(layer: pmoe.MoELayer) -> None:
    layer.experts.b1 = layer.experts.b2 = None


def set_activation(layer: pmoe.MoELayer) -> None:
    layer.experts.activation = "relu"


def choose_one(layer: pmoe.MoELayer) -> None:
    layer.gate.top_k = 1


CHANGES = {change.__name__: change for change in (widen, drop_biases, set_activation, choose_one)}


def change_job(rank: int, world: int, name: str) -> tuple[bool, list[bool]]:
    """Changes a layer's modules between two calls. Returns whether results are those of the engine.

    Also returns whether each of the two calls after the change gathered row counts on the device.
    """
    x = batch(rank, world, 0, False, False)
    found = []
    is_bounded = []
    for bounded in (False, True):
        with on_cpu(CpuBackend(seed=rank)):
            layer = layer_of(slack=4.0)
            steps = pmoe.BoundedSteps(layer, OPTIMIZERS["AdamW"](layer.parameters()), layer)
            layer(x)
            torch.manual_seed(6)
            CHANGES[name](layer)
            for _ in range(2):
                block = steps.bounded_calls() if bounded else contextlib.nullcontext()
                with block, counted_collectives() as calls:
                    y = layer(x)
                y.square().sum().backward()
                is_bounded.append("all_gather_into_tensor" in calls)
            gradients = [parameter.grad for parameter in layer.experts.parameters()]
            found.append([y.detach(), *gradients])
    return all(map(torch.equal, *found)), is_bounded[2:]


@pytest.mark.parametrize("name", CHANGES)
def test_other_experts_or_choices_get_other_programs(name: str) -> None:
    """The programs on which the ranks agreed before would read the memory of the new experts wrongly."""
    for is_same, is_bounded in ranks(2).run(change_job, name):
        assert is_same
        assert is_bounded == [False, True]


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another dtype": (lambda x: x.float(), "x of dtype torch.float32 must be of the layer's dtype"),
    "no tensor": (lambda x: None, f"x (NoneType) must be a torch.Tensor of shape (..., {M})"),
}


def wrong_job(rank: int, world: int, name: str) -> str:
    """Returns the error of a bounded step in which rank 1 passes a wrong input."""
    with on_cpu(CpuBackend(seed=rank)):
        layer = layer_of()
        optimizer = OPTIMIZERS["fused AdamW"](layer.parameters())
        steps = pmoe.BoundedSteps[Any, None](layer, optimizer, lambda x: layer(x).sum().backward())
        x = batch(rank, world, 0, False, False)
        steps.step(x)
        return error_of(lambda: steps.step(WRONG[name][0](x) if rank == 1 else x))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_of_one_rank_is_named_on_all(name: str) -> None:
    """The rank's call is of no kind that was made before, and the other rank waits in a bounded call."""
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        for told in pool.run(wrong_job, name):
            assert WRONG[name][1] in told


# ---- ranks that make calls of different kinds


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """Calls of which rank 1 makes another kind than rank 0.

    knows: the autograd modes of calls outside of steps that all ranks make first.
    other: what rank 1 does in place of ``step``.
    told: what the errors of both ranks say.
    """

    knows: tuple[bool, ...] = (True,)
    other: Callable[[pmoe.BoundedSteps[Tensor, Any], pmoe.MoELayer, Tensor], object]
    told: str


def step_without_autograd(steps: Any, layer: pmoe.MoELayer, x: Tensor) -> None:
    with torch.no_grad():
        steps._run_bounded(bounded_steps._Step(1, x, [], bounded_steps._Flags([], []), [], []))


def evaluate(steps: Any, layer: pmoe.MoELayer, x: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def train_outside(steps: Any, layer: pmoe.MoELayer, x: Tensor) -> None:
    layer(x).sum().backward()


def call_another_layer(steps: Any, layer: pmoe.MoELayer, x: Tensor) -> None:
    with steps.bounded_calls():
        steps.model[1](x).sum().backward()


MIXED = {
    "a step without autograd, for the first time": Mixed(
        other=step_without_autograd,
        told="rank 1 calls MoELayer 1 within the steps of BoundedSteps, with autograd off (torch.no_grad), "
        "and exchanges its row counts, and other ranks do not: every rank must call a layer with autograd on",
    ),
    "a step without autograd": Mixed(
        knows=(True, False),
        other=step_without_autograd,
        told="is called without gradients (torch.no_grad or inference_mode) on rank 1, and with them on rank "
        "0",
    ),
    "an evaluation": Mixed(
        knows=(True, False),
        other=evaluate,
        told="rank 1 calls MoELayer 1 outside of the steps of BoundedSteps, with autograd off",
    ),
    "training outside of a step": Mixed(
        other=train_outside,
        told="rank 1 calls MoELayer 1 outside of the steps of BoundedSteps, with autograd on",
    ),
    "another layer of the same sizes": Mixed(
        other=call_another_layer,
        told="at this call the ranks are in different layers, numbered by their first calls: rank 0: number "
        "1; rank 1: number 2",
    ),
}


def mixed_job(rank: int, world: int, name: str) -> tuple[str, float]:
    """Returns the error of a rank, and after how many seconds it came."""
    case = MIXED[name]
    with on_cpu(CpuBackend(seed=rank)):
        model = nn.Sequential(layer_of(), layer_of())
        layer = model[0]
        assert isinstance(layer, pmoe.MoELayer)
        x = batch(rank, world, 0, False, False)
        steps = pmoe.BoundedSteps(
            model, OPTIMIZERS["fused AdamW"](model.parameters()), lambda x: layer(x).sum().backward()
        )
        for has_grad in case.knows:
            with torch.set_grad_enabled(has_grad):
                model(x)
        for _ in range(2):
            with steps.bounded_calls():
                model(x).sum().backward()
        dist.barrier()
        began = time.monotonic()
        told = error_of(lambda: case.other(steps, layer, x) if rank == 1 else steps.step(x))
    return told, time.monotonic() - began


@pytest.mark.parametrize("name", MIXED)
def test_ranks_whose_calls_differ_all_raise_long_before_the_timeout(name: str) -> None:
    """They would wait for each other in different collectives, or in a backward pass."""
    with Pool(2) as pool:
        for told, seconds in pool.run(mixed_job, name):
            assert MIXED[name].told in told
            assert "timeout" not in told
            assert seconds < GROUP_TIMEOUT_SECONDS / 2


class OverNccl(CpuBackend):
    """A backend whose programs do not run over heaps."""

    def bounded_refusal(self, communicator: object) -> str | None:
        return "rows of its programs travel by NCCL"


def with_callbacks(layer: pmoe.MoELayer) -> None:
    layer.callbacks = (pmoe.Callback(),)


def without_heaps(layer: pmoe.MoELayer) -> None:
    layer.switches = Switches(program=True)


UNBOUNDED: dict[str, tuple[dict[str, Any], Callable[[pmoe.MoELayer], None] | None, str]] = {
    "a feature": ({}, with_callbacks, "there are callbacks"),
    "offloading": ({"memory_reuse": "S2"}, None, "may offload"),
    "chunks to choose": (
        {"pipeline": True},
        None,
        'set pipeline to a number of chunks, and memory_reuse to one pair, such as "S4"',
    ),
    "no heaps": ({}, without_heaps, "program_heaps=False"),
}


def unbounded_job(rank: int, world: int, name: str) -> tuple[list[str], list[list[str]], str, str]:
    """Trains a layer that cannot be bounded. Returns the warnings and the collectives of two steps.

    Also returns the error of a capture, and how the last call ran.
    """
    options, change, _ = UNBOUNDED[name]
    with on_cpu(CpuBackend()), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn.GIVEN.clear()
        layer = layer_of(**options)
        optimizer = OPTIMIZERS["fused AdamW"](layer.parameters())

        def run(x: Tensor) -> None:
            optimizer.zero_grad()
            layer(x).sum().backward()

        steps = pmoe.BoundedSteps(layer, optimizer, run)
        if change is not None:
            change(layer)
        collectives = []
        for index in range(2):
            with counted_collectives() as calls:
                steps.step(batch(rank, world, index, False, False))
            collectives.append(calls)
        steps.finish()
        assert layer.ran is not None
        path = layer.ran.path
        with steps.bounded_calls(), Graph().capture():
            captured = error_of(lambda: layer(batch(rank, world, 0, False, False)))
    return [str(each.message) for each in told if "bound" in str(each.message)], collectives, captured, path


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_layer_that_cannot_be_bounded_runs_exactly_and_says_why_once(name: str) -> None:
    for told, collectives, captured, path in ranks(2).run(unbounded_job, name):
        (message,) = told
        assert "BoundedSteps does not bound a layer, and the host reads row counts, because" in message
        assert UNBOUNDED[name][2] in message
        assert path == "program"
        assert all("all_gather_into_tensor" not in calls for calls in collectives)
        assert "RuntimeError: pmoe: a CUDA graph cannot hold this call of a MoELayer" in captured
        assert UNBOUNDED[name][2] in captured


def nccl_job(rank: int, world: int, most_rows: int | None) -> tuple[list[str], str]:
    """Makes two steps over NCCL, or with room for too many rows. Returns warnings, and a capture's error."""
    backend = CpuBackend() if most_rows else OverNccl()
    with (
        on_cpu(backend),
        warnings.catch_warnings(record=True) as told,
        pytest.MonkeyPatch.context() as patch,
    ):
        warnings.simplefilter("always")
        warn.GIVEN.clear()
        if most_rows:
            patch.setattr(bounded_program_counts, "MOST_ROWS", most_rows)
        layer = layer_of()
        optimizer = OPTIMIZERS["fused AdamW"](layer.parameters())
        steps = pmoe.BoundedSteps(layer, optimizer, lambda x: layer(x).sum().backward())
        for index in range(2):
            steps.step(batch(rank, world, index, False, False))
        steps.finish()
        with steps.bounded_calls(), Graph().capture():
            captured = error_of(lambda: layer(batch(rank, world, 0, False, False)))
    return [str(each.message) for each in told if "bound" in str(each.message)], captured


def test_programs_over_nccl_cannot_be_bounded() -> None:
    for told, captured in ranks(2).run(nccl_job, None):
        (message,) = told
        assert "because rows of its programs travel by NCCL" in message
        assert "no call with torch.float64 and has_grad=True was made before" in captured


def test_too_many_rows_are_refused_with_their_number_and_what_to_do() -> None:
    """Room for 8 rows that are received, sent, and stay, in each of 2 chunks."""
    for told, _ in ranks(2).run(nccl_job, 47):
        (message,) = told
        assert message.endswith(
            "indices of rows are int32: slack makes room for 48 rows, at most 47; lower slack, or call the "
            "layer with fewer tokens"
        )


def test_bounds_name_a_wrong_slack() -> None:
    with pytest.raises(ValueError, match=r"slack \(0.5\) must be at least 1"):
        RowBounds.of(max_tokens=4, top_k=1, slack=0.5, chunks=1, ranks=2, local_experts=1)
    layer = pmoe.MoELayer(M, 8, EXPERTS, TOP_K)
    layer.switches = Switches(program=True)  # without heaps, slack bounds nothing
    with pytest.raises(ValueError, match=r"Switches\(program=True, program_heaps=True\)"):
        pmoe.BoundedSteps(layer, OPTIMIZERS["AdamW"](layer.parameters()), layer)


def dying_job(rank: int, world: int, in_graph: bool) -> str:
    """Returns the error of a rank whose peer's process ends in the third step."""
    with on_cpu(CpuBackend()):
        layer = layer_of()
        optimizer = OPTIMIZERS["fused AdamW"](layer.parameters())
        x = batch(rank, world, 0, False, False)
        graph = Graph()

        def run(index: int) -> None:
            if rank == 1 and index == 2:
                graph.replay(leaves_out=end) if in_graph else os._exit(3)
            if in_graph:
                graph.replay()
            else:
                compute(layer, x)

        def end(work: object) -> bool:
            """Ends this process before the second piece of work that issues a pass: in backward."""
            nonlocal passes
            passes += getattr(getattr(work, "func", None), "__name__", "") == "issue"
            if passes == 2:
                os._exit(3)
            return False

        passes = 0
        steps = pmoe.BoundedSteps(layer, optimizer, run, lambda _: compute(layer, x))
        compute(layer, x)
        if in_graph:
            layer.zero_grad()
            with steps.bounded_calls(), graph.capture():
                compute(layer, x)
        try:
            for index in range(4):
                steps.step(index)
            steps.finish()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("in_graph", [False, True], ids=["in a step", "in a replay"])
def test_a_process_that_ends_in_a_bounded_step_ends_the_others(in_graph: bool) -> None:
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        pool.start(dying_job, in_graph)
        told = pool.answer(0, 60)
    assert told
    if not in_graph:
        assert "rank 0 of 2 failed in the exchange of bounded row counts of MoELayer" in told
        assert "a peer has died" in told


# ---- the order of steps


class Stream:
    """A stand-in for a CUDA stream, which writes down the events for which it waits."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for the step on {event.recorded_on}")


class Event:
    """A stand-in for a CUDA event."""

    recorded_on = ""

    def record(self, stream: Stream) -> None:
        self.recorded_on = stream.name


@pytest.mark.parametrize("raises", [False, True], ids=["", "that raises"])
def test_a_step_waits_for_the_step_before_on_any_stream(
    monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """Two steps may replay two graphs over one heap, which are not ordered against each other."""
    log: list[str] = []
    first, second = Stream("stream 1", log), Stream("stream 2", log)
    current = first
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    order = bounded_steps._StepOrder(torch.device("cuda", 0))
    for current in (first, second, first):
        block = pytest.raises(ValueError) if raises else contextlib.nullcontext()
        with block, order.one_step():
            log.append(f"replay on {current.name}")
            if raises:
                raise ValueError("after the replay")
    assert log == [
        "replay on stream 1",
        "stream 2 waits for the step on stream 1",
        "replay on stream 2",
        "stream 1 waits for the step on stream 2",
        "replay on stream 1",
    ]
