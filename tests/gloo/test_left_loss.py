"""A loss that, on one rank, needs no output of a layer: its peers wait in the layer's backward pass.

The rank goes on without an error. Errors of all ranks then name the layer, the pass, the rank and the cure.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.comm import failures
from pmoe.training.parallel import Meshes, make_meshes, reduce_gradients
from tests.gloo.kit import error_of
from tests.gloo.test_left import TIMEOUT_SECONDS, M, build, tokens
from tests.pool import SHORT_TIMEOUT_SECONDS, Pool, ranks

CURE = "a rank whose loss does not need the output y adds 0 * y.sum() to its loss"
REDUCTIONS = ("clip", "clip a list", "reduce", "unscale", "step")
"""What waits for the other ranks before it reduces gradients."""


class Branches(nn.Module):
    """A dense module, and two layers beside each other, whose messages all have the same size."""

    def __init__(self, is_padded: bool = True, **where: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        options = {"pad_to_capacity": True, "capacity_factor": 1.0} if is_padded else {"pipeline": 2}
        self.dense = nn.Linear(M, M)
        self.first, self.second = (pmoe.MoELayer(M, 8, 4, 2, **where, **options) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.dense(x)
        return h, self.first(h), self.second(h)


def reduced(model: Branches, meshes: Meshes, then: str, loss: Tensor) -> None:
    """Runs the backward pass of a loss, and then reduces, clips or scales the gradients."""
    scaler = pmoe.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(loss).backward()
    if then == "reduce":
        reduce_gradients(model, meshes)
    if then == "clip":
        pmoe.clip_grad_norm_(model, 1.0)
    if then == "clip a list":
        pmoe.clip_grad_norm_(list(model.dense.parameters()), 1.0)
    if then == "unscale":
        scaler.unscale_(optimizer)
    if then == "step":
        scaler.step(optimizer)


def omits_job(rank: int, world: int, then: str, ep: int = 0) -> list[str]:
    """Returns the errors of three steps. The loss of the last rank leaves out a layer in the second one."""
    meshes = make_meshes(ep=ep or world)
    model = Branches(mesh=meshes.experts)
    found = []
    for at in range(3):

        def step(leaves_out: bool = at == 1 and rank == world - 1) -> None:
            h, first, second = model(tokens(rank))
            loss = h.sum() if leaves_out and then != "the other layer" else h.sum() + first.sum()
            reduced(model, meshes, then, loss if leaves_out else loss + second.sum())

        found.append(error_of(step))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("then", [*REDUCTIONS, "call", "the other layer"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_loss_that_leaves_out_a_layer_on_one_rank_is_told_to_all(world: int, then: str) -> None:
    with Pool(world, TIMEOUT_SECONDS) as pool:
        found = pool.run(omits_job, then, timeout=100)
    for rank, (first, second, third) in enumerate(found):
        message = second or third
        assert first == "" and "took longer than the group's timeout" not in message
        assert f"rank {world - 1} goes on without the backward pass of MoELayer 2, which rank" in message
        assert CURE in message
        assert bool(second) == (rank < world - 1 or then in REDUCTIONS), (then, found)


@pytest.mark.slow
@pytest.mark.parametrize("then", REDUCTIONS)
def test_ranks_of_another_group_of_experts_are_told_too(then: str) -> None:
    """Ranks 0 and 1 hold copies of the experts of ranks 2 and 3. Rank 3 leaves out a layer."""
    assert_all_are_told(omits_job, then, "goes on without the backward pass of MoELayer 2")


def assert_all_are_told(job: Callable[..., Any], then: str, cause: str) -> None:
    """Checks that all of four ranks, in two groups of experts, raise an error with the cause in time."""
    with Pool(4, TIMEOUT_SECONDS) as pool:
        found = pool.run(job, then, 2, timeout=100)
    for first, second, _ in found:
        assert first == "" and "took longer than the group's timeout" not in second
        assert cause in second and CURE in second


def absent_job(rank: int, world: int) -> tuple[str, list[str]]:
    """The last rank leaves the layer out, and stays where pmoe sees nothing. Returns error and warnings."""
    layer = build()
    layer(tokens(rank)).sum().backward()
    y = layer(tokens(rank))
    if rank == world - 1:
        time.sleep(3 * SHORT_TIMEOUT_SECONDS)
        return "", []
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(failures, "WARN_AFTER_SECONDS", 1.0),
    ):
        warnings.simplefilter("always")
        message = error_of(y.sum().backward)
    return message, [str(each.message) for each in caught]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_waiting_ranks_name_the_layer_the_pass_and_the_rank_that_stays_away(world: int) -> None:
    with Pool(world, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        pool.start(absent_job)
        found = [pool.answer(rank) for rank in range(world - 1)]
    for rank, (message, warned) in enumerate(found):
        assert f"rank {rank} of {world} failed in dispatch (S0) of chunk 0, backward of MoELayer 1" in message
        assert f"(rank {world - 1} has not reported to wait in this backward pass: every rank must" in message
        assert CURE in message
        (warning,) = (text for text in warned if "waits for more than 1 s" in text)
        assert f"rank {rank} of {world} waits for more than 1 s in the backward pass of MoELayer 1" in warning
        assert f"and rank {world - 1} has not reported the same" in warning and CURE in warning


def aborted_job(rank: int, world: int) -> str:
    """Rank 1 leaves out the layer that it called last, and gloo ends rank 0. Returns an error."""
    layers = [build(), build()]
    for layer in layers:
        layer(tokens(rank)).sum().backward()
    x = tokens(rank)
    y = layers[0](torch.cat(3 * [x])).sum()
    later = layers[1](x).sum()
    return error_of((y + later if rank == 0 else y).backward)


def test_a_layer_that_is_left_out_is_named_where_gloo_ends_a_peer() -> None:
    """The error said only "Connection reset by peer"."""
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        pool.start(aborted_job)
        message = pool.answer(1)
    assert "of chunk 0, backward of MoELayer 1" in message
    assert "has not run the backward pass of MoELayer 2, which it called after MoELayer 1: if gloo" in message
    assert CURE in message


def alike_job(rank: int, world: int) -> list[str]:
    """All ranks leave out the same layer, clip, call again, and run the left out pass later."""
    meshes = make_meshes(ep=world)
    model = Branches(mesh=meshes.experts)

    def leaving_out() -> None:
        for _ in range(2):
            h, first, second = model(tokens(rank))
            (h.sum() + first.sum()).backward(retain_graph=True)
            pmoe.clip_grad_norm_(model, 1.0)
            second.sum().backward()
        for _ in range(3):
            model(tokens(rank))[1].sum().backward()

    return [error_of(leaving_out)]


def test_ranks_that_leave_out_the_same_layer_go_on() -> None:
    assert ranks(2).run(alike_job) == [[""], [""]]


# ---- ranks that run different backward passes, whose messages have equal sizes


def crossed_job(rank: int, world: int, then: str, ep: int = 0) -> list[str]:
    """Returns the errors of three steps. In the second one each of the last two ranks leaves out a layer.

    The last rank leaves out the second layer, and the rank before it the first one.
    """
    meshes = make_meshes(ep=ep or world)
    model = Branches(mesh=meshes.experts)
    found = []
    for at in range(3):

        def step(crosses: bool = at == 1) -> None:
            h, first, second = model(tokens(rank))
            loss = h.sum()
            if not (crosses and rank == world - 2):
                loss = loss + first.sum()
            if not (crosses and rank == world - 1):
                loss = loss + second.sum()
            reduced(model, meshes, then, loss)

        found.append(error_of(step))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("then", [*REDUCTIONS, "call"])
def test_ranks_that_leave_out_different_layers_raise_before_the_reduction(then: str) -> None:
    """Each took the rows of the other's layer for its own: gradients were wrong, and nothing was said."""
    with Pool(2, TIMEOUT_SECONDS) as pool:
        found = pool.run(crossed_job, then, timeout=100)
    for rank, (first, second, third) in enumerate(found):
        message = third if then == "call" else second
        assert first == "" and bool(second) == (then in REDUCTIONS), found
        assert "took longer than the group's timeout" not in message
        left_out = f"rank {1 - rank} goes on without the backward pass of MoELayer {2 - rank}"
        assert f"{left_out}, which rank {rank} has run" in message, message
        assert CURE in message


@pytest.mark.slow
@pytest.mark.parametrize("then", REDUCTIONS)
def test_ranks_of_another_group_learn_of_ranks_that_leave_out_different_layers(then: str) -> None:
    """Ranks 0 and 1 hold copies of the experts of ranks 2 and 3, and run all passes."""
    assert_all_are_told(crossed_job, then, "goes on without the backward pass of MoELayer")


OTHER_PASSES = {
    "calls of one layer": ([2, 0], [1, 0]),
    "twice on one rank": ([2, 1, 1], [2, 1, 0]),
    "order": ([2, 0, 1], [2, 1, 0]),
    "twice": ([2, 1, 1, 0], [2, 1, 0, 0]),
}
"""The passes of ranks 0 and 1: 0 of the first layer's call, 1 and 2 of the second layer's two calls."""


def passes_job(rank: int, world: int, case: str) -> list[str]:
    """Returns the errors of three steps. In the second one the ranks run different passes, equally many.

    Rows travel in another group than the sum of `pmoe.clip_grad_norm_`.
    """
    model = Branches(group=dist.new_group(list(range(world))))
    found = []
    for at in range(3):

        def step(passes: list[int] = OTHER_PASSES[case][rank] if at == 1 else [2, 1, 0]) -> None:
            _, first, second = model(tokens(rank))
            outputs = [first, second, model.second(tokens(rank))]
            for output in passes:
                outputs[output].sum().backward(retain_graph=True)
            pmoe.clip_grad_norm_(model, 1.0)

        found.append(error_of(step))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ["calls of one layer", "twice on one rank"])
def test_ranks_that_run_different_passes_and_leave_one_out_raise_before_the_reduction(case: str) -> None:
    with Pool(2, TIMEOUT_SECONDS) as pool:
        found = pool.run(passes_job, case, timeout=100)
    for first, second, _ in found:
        assert first == "" and "took longer than the group's timeout" not in second
        assert "goes on without the backward pass of MoELayer" in second and CURE in second, found


LAST = {
    "order": ["MoELayer 1, MoELayer 2)", "MoELayer 2, MoELayer 1)"],
    "twice": ["MoELayer 2, MoELayer 2, MoELayer 1)", "MoELayer 2, MoELayer 1, MoELayer 1)"],
}
"""The last passes of both ranks, as the error shows them, by the case of `passes_job`."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", LAST)
def test_ranks_that_leave_out_nothing_but_differ_in_their_passes_raise_at_the_next_call(case: str) -> None:
    """No rank has a reason to meet. The header of the next row counts shows it, and the group stays whole."""
    with Pool(2, TIMEOUT_SECONDS) as pool:
        found = pool.run(passes_job, case, timeout=100)
    for (first, second, third), layers in zip(found, LAST[case], strict=True):
        assert first == "" and second == ""
        assert third.startswith("FaultError: the ranks have run backward passes of different calls, or in a")
        assert layers in third and CURE in third, found


def after_other_order_job(rank: int, world: int) -> list[str]:
    """The ranks run passes in different orders once, and go on after the error."""
    model = Branches(mesh=make_meshes(ep=world).experts)

    def step(is_swapped: bool = False) -> None:
        _, first, second = model(tokens(rank))
        for output in (first, second) if is_swapped else (second, first):
            output.sum().backward(retain_graph=True)

    return [error_of(lambda: step(is_swapped=rank == 0)), *(error_of(step) for _ in range(3))]


def test_after_passes_in_another_order_the_group_can_be_used() -> None:
    for first, second, *others in ranks(2).run(after_other_order_job):
        assert first == "" and "in a different order, so gradients are wrong" in second
        assert others == ["", ""]


# ---- what all ranks may do


def programs(model: Branches, rank: int) -> dict[str, Callable[[], object]]:
    """Returns programs that run, or leave out, the same backward passes on all ranks.

    Rank 1 has no tokens.
    """
    x = tokens(rank)[:0] if rank == 1 else tokens(rank)

    def leaving_out() -> None:
        h, first, _ = model(x)
        (h.sum() + first.sum()).backward()

    def accumulating() -> None:
        leaving_out()
        for _ in range(2):
            sum(output.sum() for output in model(x)).backward()

    def calling_twice() -> None:
        model.second(x)
        y = model.second(x)
        y.sum().backward()

    def evaluating() -> None:
        sum(output.sum() for output in model(x)).backward()
        model(x)

    def freezing() -> None:
        model.second.requires_grad_(False)
        h, first, _ = model(x)
        (h.sum() + first.sum()).backward()
        model.second.requires_grad_()

    def frozen_below() -> None:
        model.second.requires_grad_(False)
        model.first(model.second(x)).sum().backward()
        model.second.requires_grad_()

    def without_loss() -> None:
        model(x)

    def checkpointing(**kind: Any) -> None:
        h, first, second = checkpoint(model, x.clone().requires_grad_(), **kind)
        (h.sum() + second.sum()).backward()

    return {
        "a layer left out by all": leaving_out,
        "accumulated": accumulating,
        "called twice": calling_twice,
        "evaluated with gradients": evaluating,
        "frozen and left out": freezing,
        "frozen below": frozen_below,
        "no backward pass": without_loss,
        "reentrant checkpoint": lambda: checkpointing(use_reentrant=True),
        "checkpoint": lambda: checkpointing(use_reentrant=False),
        "pmoe's checkpoint": lambda: checkpointing(use_reentrant=False, context_fn=pmoe.checkpoint_contexts),
    }


MET = [
    "a layer left out by all",
    "accumulated",
    "called twice",
    "evaluated with gradients",
    "frozen and left out",
    "no backward pass",
    "checkpoint",
    "pmoe's checkpoint",
]
"""The programs whose reductions meet: some of their calls have not run a backward pass."""


def ordinary(model: Branches, rank: int) -> None:
    """Runs a step in which no pass is left out: two backward passes, an evaluation, a checkpoint."""
    x = tokens(rank)[:0] if rank == 1 else tokens(rank)
    for _ in range(2):
        sum(output.sum() for output in model(x)).backward()
    with torch.no_grad():
        model(x)
    checkpoint(model.second, x.clone().requires_grad_(), use_reentrant=False).sum().backward()


def programs_job(rank: int, world: int) -> dict[str, tuple[str, int]]:
    """Returns the error of each program with its reductions, and how often the rank met in the reductions."""
    meshes = make_meshes(ep=world)
    model = Branches(is_padded=False, mesh=meshes.experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def reduce() -> None:
        pmoe.clip_grad_norm_(model, 1.0)
        reduce_gradients(model, meshes)
        scaler = pmoe.GradScaler("cpu")
        scaler.scale(torch.zeros(1))
        scaler.step(optimizer)

    def reduce_once(run: Callable[[], object]) -> tuple[str, int]:
        message = error_of(run)
        with mock.patch.object(failures, "meet", wraps=failures.meet) as meet:
            scaled = error_of(reduce)
        return message or scaled, meet.call_count

    reduce()  # after this meeting no call of an earlier job of these ranks has to meet
    found = {"ordinary": reduce_once(lambda: ordinary(model, rank))}
    for name, program in programs(model, rank).items():
        found[name] = reduce_once(program)
    found["ordinary again"] = reduce_once(lambda: ordinary(model, rank))
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_programs_that_all_ranks_run_go_on_and_meet_once_where_a_pass_is_left_out(world: int) -> None:
    for found in ranks(world).run(programs_job):
        assert {name for name, (message, _) in found.items() if message} == set(), found
        met = [name for name, (_, meetings) in found.items() if meetings]
        assert met == MET
        assert all(meetings <= 1 for _, meetings in found.values())
