"""torch.compile(model, backend="pmoe") beside data parallelism: gradients are reduced inside the graph."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import pmoe
from pmoe import warn
from pmoe.comm.group_record import collectives
from pmoe.experts.marks import is_expert
from pmoe.graph import hand_over, reductions, run
from pmoe.graph.buckets import UnsentBuckets
from pmoe.planner.gradient_partition import Partition
from pmoe.training import gradient_partitioning
from pmoe.training.reducer import PartitionedStep
from tests.gloo.test_whole_graph import SEQUENCES, SIZES, UNEVEN, batch, build, layers, loss_of
from tests.gloo.test_whole_graph_use import compile_for_pmoe, fresh, wrong_gradients
from tests.pool import Pool, ranks

STEPS = 5
AS_TRACED = {"parts": 1, "weight_gradients": False}
"""Options that keep the order of the trace, so that the order does not depend on measured costs."""


class Begun:
    """A hook of DistributedDataParallel: records how many all-to-alls have begun before each bucket."""

    def __init__(self) -> None:
        self.before = 0
        self.found: list[int] = []

    def reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
        self.found.append(collectives.begun - self.before)
        return allreduce_hook(state, bucket)

    def backward(self, loss: Tensor) -> tuple[list[int], int]:
        """Runs a backward pass. Returns the record of each bucket, and the number of all all-to-alls."""
        self.before = collectives.begun
        self.found.clear()
        loss.backward()
        return [*self.found], collectives.begun - self.before


def in_ddp(
    mesh: Any, compile_first: bool, bucket_mb: float = 1e-3, **options: Any
) -> tuple[nn.Module, Any, DistributedDataParallel]:
    """A compiled model in DistributedDataParallel: the model, what is called, and the wrapper."""
    model = pmoe.parallelize(build(top_k=2), mesh)
    if compile_first:
        inner = pmoe.parallelize(compile_for_pmoe(model, **options), mesh)
        wrapper = DistributedDataParallel(inner, bucket_cap_mb=bucket_mb)
        return model, wrapper, wrapper
    wrapper = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    return model, compile_for_pmoe(wrapper, **options), wrapper


def ranked(numbers: list[int]) -> list[int]:
    """How many smaller values there are for each number: [0, 3, 3, 6] -> [0, 1, 1, 2]."""
    return [sorted(set(numbers)).index(number) for number in numbers]


def planned_places() -> list[int]:
    """For each bucket of the plan, how many all-to-alls begin before it.

    An all-to-all of the plan may be several collectives, of rows and of their routing weights.
    """
    (program,) = (program for key, program in run.PROGRAMS.items() if key[0] == "backward")
    unsent = UnsentBuckets(program.reductions)
    begun = 0
    places = []
    for instruction in program.instructions:
        begun += instruction.communicates
        if instruction.hands_over:
            places += [begun] * len(unsent.add(instruction.name.removeprefix("gradient of ")))
    return places


def begun_in_ddp(
    rank: int, world: int, compile_first: bool, bucket_mb: float
) -> tuple[list[int], int, list[int]]:
    fresh()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    with mock.patch.dict(SIZES, layers=4):  # two of them with an MoE layer
        model, call, wrapper = in_ddp(mesh, compile_first, bucket_mb, options=AS_TRACED)
    hook = Begun()
    wrapper.register_comm_hook(None, hook.reduce)
    with mock.patch.object(reductions, "SHARES", (float("-inf"),)):
        for step in range(STEPS):
            found, all_to_alls = hook.backward(loss_of(model, call, batch(rank, step, 4)))
    return found, all_to_alls, planned_places()


@pytest.mark.slow
@pytest.mark.parametrize(("compile_first", "bucket_mb"), [(False, 1e-3), (True, 1e-3), (False, 4e-3)])
def test_reductions_of_ddp_begin_between_the_all_to_alls_of_the_graph(
    compile_first: bool, bucket_mb: float
) -> None:
    """Those of the head begin before any, those of the first block behind all.

    Each bucket begins between the all-to-alls between which the plan says. The plan must know which gradients
    the wrapper puts into which bucket: once it was made for gradients that are reduced one by one.
    """
    for found, all_to_alls, planned in ranks(2).run(begun_in_ddp, compile_first, bucket_mb):
        assert all_to_alls > 2
        assert found == sorted(found) and found[-1] == all_to_alls, found
        assert found[0] == 0 or bucket_mb > 1e-3, found
        assert len(set(found)) >= 3, found
        assert ranked(found) == ranked(planned)


def steps_of(
    rank: int,
    mesh: Any,
    steps: list[tuple[int, ...]],
    compile_first: bool,
    accumulate: bool,
    **options: Any,
) -> tuple[list[float], list[list[Tensor]]]:
    """The largest error of each step beside eager DistributedDataParallel, and the gradients."""
    model, call, wrapper = in_ddp(mesh, compile_first, **options)
    plain = pmoe.parallelize(build(top_k=2), mesh)
    eager = DistributedDataParallel(plain, bucket_cap_mb=1e-3)
    errors, gradients = [], []
    for step, counts in enumerate(steps):
        x = batch(rank, step, counts[rank])
        for each, run_it, outer in ((plain, eager, eager), (model, call, wrapper)):
            each.zero_grad()
            if accumulate:
                with outer.no_sync():
                    loss_of(each, run_it, x).backward()
            loss_of(each, run_it, x).backward()
        errors.append(wrong_gradients(plain, model))
        gradients.append([each.grad.clone() for each in model.parameters() if not is_expert(each)])
    return errors, gradients


def same_bits(rank: int, world: int) -> tuple[float, bool]:
    """The error beside eager, and whether the bits are those of gradients that are handed over at the end."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    found = []
    for stops in (True, False):
        fresh()
        names = hand_over.GraphInputs.names_of
        with mock.patch.object(hand_over.GraphInputs, "names_of", names if stops else lambda *_: {}):
            found.append(steps_of(rank, mesh, [SEQUENCES[world]] * STEPS, False, False, options=AS_TRACED))
    (errors, first), (_, second) = found
    pairs = (pair for step in zip(first, second, strict=True) for pair in zip(*step, strict=True))
    return max(errors), all(torch.equal(*pair) for pair in pairs)


@pytest.mark.slow
def test_gradients_are_the_same_to_the_bit_whenever_they_are_handed_over() -> None:
    for error, same in ranks(2).run(same_bits):
        assert error < 1e-12 and same


def uneven(rank: int, world: int, parts: bool, accumulate: bool) -> tuple[list[float], list[tuple[str, int]]]:
    """Ranks with other numbers of sequences have other graphs, and reduce on the group of the all-to-alls.

    parts: cuts everything that can be cut into two parts.
    """
    fresh()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    steps = [SEQUENCES[world], *UNEVEN[world]] * 2
    patches: dict[str, Any] = {}
    if parts:
        patches = {
            "solve": lambda graph, costs: (0.0, run.whole_ranges(graph, 2)),
            "total_seconds": lambda instructions: -len(instructions),
            "peak_bytes": lambda *_: 0,
            "BACKWARD_PARTS": (2,),
        }
    with mock.patch.multiple(run, **patches) if patches else mock.patch.object(run, "PARTS", run.PARTS):
        errors, _ = steps_of(rank, mesh, steps, False, accumulate)
    (program,) = (each for key, each in run.PROGRAMS.items() if key[0] == "backward")
    assert bool(program.plan.ranges) or not parts
    assert program.reductions and program.places.keys() >= set().union(*program.reductions)
    return errors, sorted(program.places.items())


@pytest.mark.nightly
@pytest.mark.parametrize(("parts", "accumulate"), [(True, False), (False, False), (True, True)])
def test_ranks_with_other_graphs_reduce_between_the_same_all_to_alls(parts: bool, accumulate: bool) -> None:
    (errors, places), (others, other_places) = ranks(2).run(uneven, parts, accumulate)
    assert max(*errors, *others) < 1e-12
    assert places == other_places


# ---- GradientReducer


def step_with(model: nn.Module, call: Any, rank: int, step: int) -> None:
    model.zero_grad()
    loss_of(model, call, batch(rank, step, 4)).backward()


def by_reducer(rank: int, world: int, partition: Partition | None) -> tuple[list[float], list[int], Any]:
    """Errors beside plain all-reduces; minus the all-to-alls behind each piece of the last step; warnings."""
    fresh()
    warn.GIVEN.clear()
    plain = build(top_k=2)
    model = copy.deepcopy(plain)
    begun: list[int] = []
    send: Callable[[PartitionedStep, Tensor], dist.Work] = PartitionedStep._all_reduce

    def counted(self: PartitionedStep, memory: Tensor) -> dist.Work:
        begun.append(collectives.begun)
        return send(self, memory)

    errors = []
    with (
        mock.patch.object(PartitionedStep, "_all_reduce", counted),
        mock.patch.object(gradient_partitioning, "PIECE_BYTES", 1 << 10),
        mock.patch.object(reductions, "SHARES", (float("-inf"),)),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        reducer = pmoe.GradientReducer(model, partition=partition)
        call = compile_for_pmoe(model, options=AS_TRACED)
        for step in range(STEPS):
            step_with(plain, plain, rank, step)
            for each in plain.parameters():
                if not is_expert(each):
                    dist.all_reduce(each.grad)
                    each.grad /= world
            begun.clear()
            step_with(model, call, rank, step)
            reducer.finish()
            errors.append(wrong_gradients(plain, model))
        reducer.remove()
    assert all(each.ran.path == "whole graph" for each in layers(model))
    (program,) = (each for key, each in run.PROGRAMS.items() if key[0] == "backward")
    assert sum(map(len, program.reductions)) == len(reducer.parameters)
    assert reducer.partition is None
    left = [each - collectives.begun for each in begun]
    return errors, left, [str(each.message) for each in told]


@pytest.mark.slow
def test_a_reducer_sends_pieces_while_the_graph_runs() -> None:
    for errors, begun, _ in ranks(2).run(by_reducer, None):
        assert max(errors) < 1e-12, errors
        assert begun == sorted(begun) and len(begun) > 3
        assert begun[0] < -2 and begun[-1] == 0, begun


@pytest.mark.slow
def test_a_partition_is_not_used_for_layers_in_a_graph_and_a_warning_says_so() -> None:
    nothing = Partition(shares=(), end_bytes=0, plain_seconds=0.0, filled_seconds=0.0, exposed_seconds=0.0)
    for errors, _, messages in ranks(2).run(by_reducer, nothing):
        assert max(errors) < 1e-12, errors
        assert any("partition is not used, because the model's layers are in" in each for each in messages)


# ---- what goes wrong


def failing_hook(rank: int, world: int) -> list[str]:
    """A hook of rank 1 fails between two all-to-alls of the graph."""
    fresh()
    model = build(top_k=2)
    call = compile_for_pmoe(model, options=AS_TRACED)
    for step in range(4):
        step_with(model, call, rank, step)

    def fails(_: Tensor) -> None:
        raise RuntimeError("the hook has failed")

    if rank == 1:
        model.head.weight.register_post_accumulate_grad_hook(fails)
    errors = []
    for step in range(2):
        try:
            step_with(model, call, rank, step)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@pytest.mark.slow
def test_a_hook_that_fails_inside_the_graph_lets_nobody_wait_longer_than_the_timeout() -> None:
    with Pool(2, timeout_seconds=10) as pool:  # a rank may compile for seconds longer than the other
        pool.start(failing_hook)
        first, second = (pool.answer(rank, 100) for rank in range(2))
    assert second[0] == "the hook has failed"
    assert len(first) == len(second) == 2, (first, second)
    assert "autograd left the backward graph before its end" in second[1]
