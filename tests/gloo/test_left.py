"""A pass that one rank leaves, by an error or because it skips its backward pass.

Every rank gets an error, none waits for the group's timeout, and no process is aborted.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.comm import failures, meeting
from pmoe.comm.agreement import largest
from pmoe.comm.group_record import MOST_OPEN, GroupRecord
from pmoe.comm.ranks import Ranks
from pmoe.engine.plan import make_plan
from pmoe.engine.variants.trial import is_out_of_memory
from tests.gloo.kit import error_of
from tests.pool import Pool, ranks

M, H, E = 6, 8, 4
TIMEOUT_SECONDS = 30.0
"""The groups' timeout. A rank that waits so long has not seen another rank's report."""


class PlantedError(Exception):
    """The error that users' code raises in these tests."""


class Expert(nn.Module):
    """An expert that raises in a forward pass while ``fails`` is True."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fails = nn.Linear(M, M), False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise PlantedError("out of memory")
        return self.inner(x)


def build(group: Any = None, **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(3)
    return pmoe.MoELayer(M, H, E, 2, group=group, **options)


def tokens(rank: int) -> Tensor:
    return torch.randn(5, M, generator=torch.Generator().manual_seed(rank))


def step(layer: nn.Module, rank: int) -> None:
    layer(tokens(rank)).sum().backward()


def set_failing(layer: pmoe.MoELayer, fails: bool) -> None:
    for module in layer.modules():
        if isinstance(module, Expert):
            module.fails = fails


# ---- an error that is caught, and the batch skipped


def skipping_job(rank: int, world: int, options: dict[str, Any], folder: str) -> dict[str, list[str]]:
    """Returns the messages of a script that skips batches which fail, as the second one does on rank 0.

    The last ones are those of steps in a new default group.
    """
    layer = build(expert=Expert, **options)
    other = build(group=dist.new_group(list(range(world))))
    steps = []
    for at in range(5):
        set_failing(layer, at == 1 and rank == 0)
        steps.append(error_of(lambda: step(layer, rank)))
    others = [error_of(lambda: step(other, rank))]  # which nobody has left
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/again", world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS),
    )
    again = [error_of(lambda: step(layer, rank)) for _ in range(2)]
    return {"steps": steps, "others": others, "again": again}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "world, options",
    [
        (2, {"pipeline": 2}),
        (2, {"dispatch": "hierarchical_2d", "nodes": 1, "memory_reuse": "S4"}),
        (4, {"pipeline": 2}),
        (4, {"dispatch": "hierarchical_1d", "nodes": 2}),
    ],
)
def test_after_an_error_in_the_middle_of_a_pass_every_rank_raises_until_the_group_is_made_again(
    world: int, options: dict[str, Any], tmp_path: Any
) -> None:
    with Pool(world, TIMEOUT_SECONDS) as pool:
        found = pool.run(skipping_job, options, str(tmp_path), timeout=100)
    own = "PlantedError in a forward pass of MoELayer 1: out of memory"
    cure = "end all processes and start again from the last checkpoint, or call destroy_process_group()"
    for rank, by_part in enumerate(found):
        steps = by_part["steps"]
        assert steps[0] == ""
        assert all(steps[2:]), steps
        for message in steps[2:]:
            assert "took longer than the group's timeout" not in message
        for message in steps[3:]:
            start = (
                f"RuntimeError: pmoe: rank {rank} of {world} left its process group in the middle of a pass ("
            )
            assert message.startswith(start) and cure in message, message
        if rank == 0:
            assert steps[1] == "PlantedError: out of memory"
            assert own in steps[2]
        else:
            assert "global rank 0 raised PlantedError: out of memory" in (steps[1] or steps[2])
        assert by_part["others"] == [""]
        assert by_part["again"] == ["", ""]


def plan_job(rank: int, world: int) -> list[str]:
    """Two steps, of which rank 0 cannot plan the first."""

    def failing(*_: Any) -> Any:
        raise PlantedError("out of memory")

    layer = build(group=dist.new_group(list(range(world))), pipeline=2)
    step(layer, rank)
    with mock.patch.object(make_plan, "_cut", failing if rank == 0 else make_plan._cut):
        steps = [error_of(lambda: step(layer, rank))]
    return [*steps, error_of(lambda: step(layer, rank))]


def test_a_plan_that_one_rank_cannot_make_is_told_to_all() -> None:
    with Pool(2, TIMEOUT_SECONDS) as pool:
        first, second = pool.run(plan_job, timeout=100)
    assert first[0] == "PlantedError: out of memory"
    assert "PlantedError in the plan of a pass of MoELayer 1: out of memory" in first[1]
    assert "global rank 0 raised PlantedError: out of memory" in second[0]


def memory_job(rank: int, world: int, error: RuntimeError) -> str:
    """Returns the error of ranks of which one runs out of memory when it begins a collective."""
    of_layer = Ranks(dist.new_group(list(range(world))))

    def failing(*_: Any, **__: Any) -> Any:
        raise error

    with mock.patch.object(failures, "wait_for", failing) if rank == 0 else contextlib.nullcontext():
        return error_of(lambda: largest(of_layer, torch.device("cpu"), [1.0], stage="a test"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["GPU", "CPU"],
)
def test_a_rank_without_memory_for_a_collective_blames_no_peer(error: RuntimeError) -> None:
    """The error said that a peer had died, or never arrived.

    It is no OutOfMemoryError: a search would go on after it, without the collective that failed.
    """
    first, _ = ranks(2).run(memory_job, error)
    why = "this rank has too little memory for the messages (the error before this one says how much)"
    assert first == f"RuntimeError: pmoe: rank 0 of 2 failed in a test; {why}"


def test_a_peers_lack_of_memory_is_not_taken_for_this_ranks_own() -> None:
    quoted = failures.PeerError("global rank 1 raised RuntimeError: can't allocate memory")
    assert not is_out_of_memory(quoted)
    assert failures._why_failed(quoted, Ranks.single()) == str(quoted)


def freed_job(rank: int, world: int) -> list[str]:
    """Returns the errors of two steps. Rank 0 alone asks for the first backward pass again between them."""
    layer = build(group=dist.new_group(list(range(world))))
    loss = layer(tokens(rank)).sum()
    found = [error_of(loss.backward)]
    if rank == 0:
        found.append(error_of(loss.backward))
    return [*found, error_of(lambda: step(layer, rank))]


def test_a_second_backward_pass_that_torch_refuses_on_one_rank_ends_no_group() -> None:
    first, other = ranks(2).run(freed_job)
    assert "through the graph a second time" in first.pop(1)
    assert first == other == ["", ""]


def budget_job(rank: int, world: int) -> list[str]:
    """Returns the errors of steps of a layer whose budget is too small, and of another layer after it."""
    group = dist.new_group(list(range(world)))
    small = build(group=group, pipeline=True, memory_reuse=True, memory_budget=1000)
    found = [error_of(lambda: step(small, rank)) for _ in range(2)]
    return [*found, error_of(lambda: step(build(group=group), rank))]


def test_a_budget_that_is_too_small_on_every_rank_ends_no_group() -> None:
    for *refused, after in ranks(2).run(budget_job):
        assert all("memory_budget" in text for text in refused), refused
        assert after == ""


def together_job(rank: int, world: int) -> list[str]:
    layer = build(group=dist.new_group(list(range(world))), expert=Expert, pipeline=2)
    found = []
    for at in range(4):
        set_failing(layer, at in (1, 2))
        if at == 2 and rank == 0:
            time.sleep(1.5)  # the others look for what is told meanwhile
        found.append(error_of(lambda: step(layer, rank)))
    return found


def test_a_group_stays_whole_where_every_rank_leaves_a_pass_by_itself_at_the_same_place() -> None:
    planted = "PlantedError: out of memory"
    for found in ranks(2).run(together_job):
        assert found == ["", planted, planted, ""]


def apart_job(rank: int, world: int) -> list[str]:
    """Each rank has its own error, one in forward and one in backward."""
    layer = build(group=dist.new_group(list(range(world))), expert=Expert)
    step(layer, rank)
    set_failing(layer, rank == 0)
    found = [error_of(lambda: step(layer, rank))]
    set_failing(layer, False)
    return [*found, error_of(lambda: step(layer, rank))]


def test_a_group_is_left_where_ranks_leave_it_at_different_places() -> None:
    for rank, (first, then) in enumerate(ranks(2).run(apart_job)):
        assert "out of memory" in first
        assert f"rank {rank} of 2 left its process group in the middle of a pass" in then


def backward_job(rank: int, world: int) -> str:
    """After an error in a second layer's forward pass, rank 0 runs the backward pass of the first layer."""
    group = dist.new_group(list(range(world)))
    first, second = build(group), build(group, expert=Expert)
    set_failing(second, rank == 0)
    y = first(tokens(rank))
    error_of(lambda: second(y))
    return error_of(y.sum().backward)


def test_a_backward_pass_over_a_group_that_was_left_raises_too() -> None:
    for told_here in ranks(2).run(backward_job):
        assert "left its process group in the middle of a pass" in told_here


# ---- a backward pass that one rank leaves out


class TwoLayers(nn.Module):
    def __init__(self, group: Any, **options: Any) -> None:
        super().__init__()
        self.first, self.second = build(group, **options), build(group, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).sin())
        return y


def left_out_job(rank: int, world: int, options: dict[str, Any]) -> list[str]:
    """Returns the errors of the ranks, by step, if the last rank skips its third backward pass."""
    model = TwoLayers(dist.new_group(list(range(world))), **options)
    found = []
    for at in range(5):
        if at == 2 and rank == world - 1:
            found.append(error_of(lambda: model(tokens(rank))))
        else:
            found.append(error_of(lambda: step(model, rank)))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "world, options",
    [
        (2, {}),
        (2, {"pipeline": 4, "memory_reuse": "S1"}),
        (2, {"pad_to_capacity": True, "capacity_factor": 1.0}),
        (2, {"dispatch": "hierarchical_2d", "nodes": 1}),
        pytest.param(4, {"pipeline": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_backward_pass_that_one_rank_leaves_out_is_told_to_all(world: int, options: dict[str, Any]) -> None:
    with Pool(world, TIMEOUT_SECONDS) as pool:
        found = pool.run(left_out_job, options, timeout=100)
    for rank, steps in enumerate(found):
        assert steps[:2] == ["", ""]
        told_here = steps[2] or steps[3]
        assert "took longer than the group's timeout" not in told_here
        assert f"rank {world - 1} goes on without the backward pass of MoELayer 2" in told_here
        assert "adds 0 * y.sum() to it" in told_here
        assert bool(steps[2]) == (rank < world - 1)
        assert "left its process group in the middle of a pass" in steps[4]


def without_rows_job(rank: int, world: int) -> list[str]:
    """Does the same as `left_out_job`, but no rows are sent for which others would wait.

    Rank 0's backward pass ends by itself.
    """
    layer = build(dist.new_group(list(range(world))))
    found = []
    for at in range(3):
        y = layer(tokens(rank)[:0])
        found.append(error_of((lambda: None) if at == 1 and rank == 1 else y.sum().backward))
    return found


@pytest.mark.slow
def test_a_backward_pass_without_rows_that_one_rank_leaves_out_hangs_nobody() -> None:
    with Pool(2, TIMEOUT_SECONDS) as pool:
        pool.start(without_rows_job)
        outcomes = []
        for rank in range(2):
            try:
                outcomes.append(str(pool.answer(rank, timeout=20)))
            except AssertionError as error:  # the job itself raised
                outcomes.append(str(error))
    for outcome in outcomes:
        assert "died with exit code" not in outcome and "no answer" not in outcome
        assert "backward pass" in outcome


# ---- what all ranks may do together


def legitimate(layer: pmoe.MoELayer, rank: int) -> dict[str, Callable[[], object]]:
    """Returns programs in which all ranks skip the same backward passes, or run them in the same order."""

    def x() -> Tensor:
        return tokens(rank).requires_grad_()

    def validation() -> None:
        for _ in range(3):
            layer(x())

    def pipelined() -> None:
        outputs = [layer(x()) for _ in range(4)]
        for at in (2, 0, 3, 1):
            outputs[at].sum().backward()

    def chained() -> None:
        layer(layer(layer(x()).sin()).sin()).sum().backward()

    def retained() -> None:
        y = layer(x()).sum()
        y.backward(retain_graph=True)
        y.backward()

    def of_inputs() -> None:
        inputs = x()
        torch.autograd.grad(layer(inputs).sum(), [inputs])

    def of_the_loss_alone() -> None:
        layer(x())
        assert layer.l_aux is not None
        layer.l_aux.backward()

    def checkpointed(**kind: Any) -> None:
        for _ in range(2):
            y = checkpoint(lambda inputs: layer(layer(inputs).sin()), x(), **kind)
            y.sum().backward()

    def copied() -> None:
        layer(x())
        other = copy.deepcopy(layer)
        for _ in range(2):
            other(x()).sum().backward()
            layer(x())

    def dropped() -> None:
        y: Any = layer(x())
        layer.last = type(layer.last)()
        if rank == 0:
            del y  # the graph goes on one rank, and lives on the other
        layer(x()).sum().backward()

    def late() -> None:
        layer(x())
        if rank == 0:
            time.sleep(1.3)  # the other waits, and tells that it does
        y = layer(x())
        if rank == 1:
            time.sleep(1.3)
        y.sum().backward()

    return {
        "validation with gradients": validation,
        "pipelined": pipelined,
        "chained": chained,
        "retained": retained,
        "gradients of inputs": of_inputs,
        "of l_aux alone": of_the_loss_alone,
        "older checkpoint": lambda: checkpointed(use_reentrant=True),
        "newer checkpoint": lambda: checkpointed(use_reentrant=False),
        "pmoe's checkpoint": lambda: checkpointed(use_reentrant=False, context_fn=pmoe.checkpoint_contexts),
        "deep copies": copied,
        "a graph that goes on one rank": dropped,
        "late ranks": late,
    }


def legitimate_job(rank: int, world: int, options: dict[str, Any]) -> dict[str, str]:
    layer = build(dist.new_group(list(range(world))), **options)
    found = {}
    for name, program in legitimate(layer, rank).items():
        found[name] = error_of(program)
        step(layer, rank)
    assert layer.ranks.record.last_meeting  # some of these meet
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"dispatch": "hierarchical_2d", "nodes": 1, "pipeline": 2}], ids=str)
def test_programs_that_all_ranks_run_alike_go_on(world: int, options: dict[str, Any]) -> None:
    for found in ranks(world).run(legitimate_job, options):
        assert not any(found.values()), found


def threads_job(rank: int, world: int) -> list[str]:
    """Two threads, each with a layer and a group of its own, never run a backward pass."""
    layers = [build(dist.new_group(list(range(world)))) for _ in range(2)]
    found = ["", ""]

    def run(at: int) -> None:
        found[at] = error_of(lambda: [layers[at](tokens(rank)) for _ in range(5)])

    running = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return found


def test_layers_of_several_threads_meet_in_groups_of_their_own() -> None:
    assert ranks(2).run(threads_job) == [["", ""]] * 2


def meetings_job(rank: int, world: int) -> list[int]:
    """Returns the numbers of meetings of a training loop, with and without a checkpoint.

    The last number is that of a validation of two calls.
    """
    layer = build(dist.new_group(list(range(world))))
    met: list[int] = []
    original = failures.meet
    count = 0

    def counted(*args: Any, **options: Any) -> bool:
        nonlocal count
        count += 1
        return original(*args, **options)

    failures.meet = counted
    try:
        for _ in range(3):
            step(layer, rank)
        met.append(count)
        for reentrant in (True, False):
            checkpoint(layer, tokens(rank).requires_grad_(), use_reentrant=reentrant).sum().backward()
        with torch.no_grad():
            layer(tokens(rank))
        met.append(count)
        layer(tokens(rank))
        layer(tokens(rank))
        met.append(count)
    finally:
        failures.meet = original
    return met


def test_a_loop_whose_backward_passes_run_never_meets() -> None:
    assert ranks(2).run(meetings_job) == [[0, 0, 1]] * 2


def test_open_calls_are_kept_up_to_a_number() -> None:
    record = GroupRecord()
    for number in range(1, MOST_OPEN + 10):
        record.open_call(number, "a layer")
    assert list(record.open_calls) == list(range(10, MOST_OPEN + 10))
    with record.backward_pass(12, "a layer"):
        assert record.backward_of == 12 and 12 not in record.open_calls
    assert record.backward_of == 0


def keys_job(rank: int, world: int) -> list[int]:
    """Returns the numbers of keys in the ranks' store before and after many meetings."""
    layer = build(dist.new_group(list(range(world))))
    for _ in range(3):
        layer(tokens(rank))
    dist.barrier()
    before = dist.distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    for _ in range(20):
        layer(tokens(rank))
    dist.barrier()
    return [before, dist.distributed_c10d._get_default_store().num_keys()]


def test_meetings_leave_no_keys_behind() -> None:
    assert meeting.CURE
    for before, after in ranks(2).run(keys_job):
        assert after - before <= 2


# ---- options that are set later


OPTIONS: dict[str, tuple[str, Any, str]] = {
    "chunks": ("pipeline", 4, "pipeline (4)"),
    "restore pair": ("memory_reuse", "S1", "memory_reuse (offload/offload)"),
    "rows that travel once": ("send_once", True, "send_once (True)"),
    "what is checked": ("check_finite", True, "check_finite (True)"),
    "a reducer": ("gradients", "stands for a GradientReducer", "a GradientReducer (True)"),
}


def setting_job(rank: int, world: int, name: str, value: object) -> list[str]:
    """Sets an option on the last rank only."""
    layer = build(dist.new_group(list(range(world))), pipeline=2)
    step(layer, rank)
    if rank == world - 1:
        setattr(layer, name, value)
    return [error_of(lambda: step(layer, rank)) for _ in range(2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, value, shown", OPTIONS.values(), ids=OPTIONS)
def test_an_option_that_one_rank_sets_in_the_middle_of_training_is_told_to_all(
    name: str, value: object, shown: str
) -> None:
    with Pool(2, TIMEOUT_SECONDS) as pool:
        found = pool.run(setting_job, name, value, timeout=100)
    for first, second in found:
        assert "rank 1 has set " in first and " of MoELayer 1 since its last call" in first, first
        assert shown in first, first
        assert "left its process group in the middle of a pass" in second


def all_set_job(rank: int, world: int) -> list[str]:
    """Sets options on all ranks: to equal values, to the old ones, to different ones, and to equal ones
    again.
    """
    layer = build(pipeline=2)
    step(layer, rank)
    found = []
    layer.pipeline = 4
    layer(tokens(rank))  # and goes nowhere: the next call has two reasons to meet
    for values in ((1, 1), (1, 1), (2, 4), (4, 4)):
        layer.pipeline = values[rank]
        found.append(error_of(lambda: step(layer, rank)))
    return found


def test_options_that_all_ranks_set_are_compared_again_and_the_layer_goes_on() -> None:
    differ = (
        "ValueError: pipeline must be the same on every rank of a MoELayer, and differs: rank 0: 2; rank 1: 4"
    )
    assert ranks(2).run(all_set_job) == [["", "", differ, ""]] * 2


LATER: dict[str, tuple[Any, str]] = {
    "balance": (1, "1"),
    "capacity_factor": (1.5, "1.5"),
    "check_finite": (True, "True"),
    "memory_budget": ("1GB", "1GB"),
    "memory_reuse": ("S4", "communicate/recompute"),
    "pipeline": (4, "4"),
    "pipeline_backward": (4, "4"),
    "products": ("e4m3", "e4m3"),
    "send_once": (True, "True"),
    "slack": (2.0, "2.0"),
    "wire": ("e4m3", "e4m3"),
    "wire_backward": ("bfloat16", "bfloat16"),
    "wire_combine": ("bfloat16", "bfloat16"),
    "gate.top_k": (1, "TopKGate(normalize=True, top_k=1"),
    "gate.z_loss_weight": (0.5, "TopKGate(normalize=True, top_k=2, weight=torch.float32, z_loss_weight=0.5"),
    "experts.activation": ("relu", "FFNExperts(activation='relu'"),
}
"""Options and settings of modules, with a value that is set later, and how an error shows this value."""


def without_backward_job(rank: int, world: int) -> dict[str, list[str]]:
    """Sets each option on one rank between calls without a backward pass. Returns the errors of each rank.

    All ranks wait for each other before each call: one because of the option, the others because they have
    not run the last call's backward pass.
    """
    layer = build(dist.new_group(list(range(world))), pipeline=2)
    layer(tokens(rank))
    messages: dict[str, list[str]] = {}
    for at, (name, (value, _)) in enumerate(LATER.items()):
        module, _, setting = name.rpartition(".")
        owner = layer.get_submodule(module)
        before = getattr(owner, setting)
        if rank == at % world:
            setattr(owner, setting, value)
        messages[name] = [error_of(lambda: layer(tokens(rank)))]
        setattr(owner, setting, before)
        messages[name].append(error_of(lambda: layer(tokens(rank))))
    return messages


def test_an_option_that_one_rank_sets_is_named_where_no_rank_runs_backward() -> None:
    """The rank that set it compared options while the others sent row counts, until the group's timeout.

    Here the group stays whole.
    """
    for messages in ranks(2).run(without_backward_job):
        for name, (_, shown) in LATER.items():
            error, after = messages[name]
            option = name.partition(".")[0]
            assert error.startswith(f"ValueError: {option} must be the same on every rank of a MoELayer")
            assert f": {shown}" in error, error
            assert after == "", name


def own_copy_job(rank: int, world: int) -> list[str]:
    """Rank 0 evaluates a copy of its layer, and the others go on with theirs. Returns the errors."""
    messages = []
    for runs_backward in (False, True):
        layer = build(dist.new_group(list(range(world))))
        for _ in range(1 if runs_backward else 2):
            y = layer(tokens(rank))
            if runs_backward:
                y.sum().backward()
        own = copy.deepcopy(layer) if rank == 0 else layer
        messages.append(error_of(lambda own=own: own(tokens(rank))))
        if not runs_backward:
            messages.append(error_of(lambda layer=layer: layer(tokens(rank))))
    return messages


def test_a_copy_of_a_layer_that_one_rank_calls_alone_is_named() -> None:
    """The rank compared options while the others sent row counts, until the timeout of the group.

    A copy of a layer that was called once only did so the longest.
    """
    for met, after, waited in ranks(2).run(own_copy_job):
        assert met.startswith("FaultError: every rank must call the layers of a group in the same"), met
        assert "rank 0: a layer at its first call; rank 1: number 1" in met
        assert after == ""  # the group is whole
        assert (
            "rank 0 calls a layer for the first time, and other ranks call a layer that they have" in waited
        )
        assert "took longer than the group's timeout" not in waited
