"""Gradients that are all-reduced inside the backward pass equal those of plain all-reduces.

This holds for any division into pieces.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import pmoe
from pmoe.choose import solve
from pmoe.comm.ranks import Ranks
from pmoe.engine.lanes.recorder import recording
from pmoe.planner.costs import Fit, LineCost, Share
from pmoe.planner.gradient_partition import Partition
from pmoe.planner.profile import Operations
from pmoe.schedule.tasks import Kind
from pmoe.training import gradient_partitioning
from pmoe.training.reducer import PartitionedStep
from tests.gloo.kit import error_of
from tests.pool import ranks
from tests.spread import named, spread
from tests.switched import switched_layer

D_MODEL, LAYERS = 8, 3


class Block(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(D_MODEL, 16), nn.GELU(), nn.Linear(16, D_MODEL))
        self.moe = switched_layer(D_MODEL, 12, 4, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x)
        return x + self.moe(x)


class Model(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.first = nn.Linear(D_MODEL, D_MODEL)
        self.blocks = nn.ModuleList(Block(options) for _ in range(LAYERS))
        self.unused = nn.Linear(D_MODEL, 2)
        self.last = nn.Linear(D_MODEL, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(options: dict[str, Any]) -> Model:
    torch.manual_seed(5)
    return Model({"dtype": torch.float64, **options}).double()


def operations() -> Operations:
    def fit(beta: float) -> Fit:
        return Fit(line=LineCost(1e-5, beta), r_squared=1.0, num_sizes=3)

    return Operations(
        num_across=2,
        num_inside=1,
        gemm=fit(1e-6),
        all_to_all=fit(1e-8),
        all_gather=fit(1e-8),
        reduce_scatter=fit(1e-8),
        all_reduce=fit(1e-7),
        seconds=0.0,
    )


def step(model: Model, rank: int, at: int) -> None:
    generator = torch.Generator().manual_seed(10 * at + rank)
    x = torch.randn(6 + rank, D_MODEL, dtype=torch.float64, generator=generator)
    y = model(x)
    (y.square().sum() + sum(block.moe.l_aux for block in model.blocks)).backward()


def plain(model: Model, world: int) -> None:
    for parameter in model.parameters():
        if getattr(parameter, "allreduce", True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def job(
    rank: int, world: int, options: dict[str, Any], partition: Partition | bool | None, accumulate: bool
) -> dict[str, Any]:
    """Returns the largest difference between both ways in three steps, and what was sent inside the
    layers.
    """
    if options.pop("esp", None):
        mesh = dist.device_mesh.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ep", "esp"))
        options["mesh"] = mesh
    ours, theirs = build(options), build(options)
    inside: list[int] = []

    real = PartitionedStep._all_reduce

    def counted(self: PartitionedStep, sent: Tensor) -> dist.Work:
        inside.append(sent.nbytes)
        return real(self, sent)

    with (
        mock.patch.object(solve, "module_lines", lambda *_: (operations(), solve.ModuleLines())),
        mock.patch.object(gradient_partitioning, "all_reduce_line", lambda *_: LineCost(1e-5, 1e-7)),
        mock.patch.object(PartitionedStep, "_all_reduce", counted),
    ):
        hook = pmoe.GradientReducer(ours, partition=partition)
        worst = 0.0
        for at in range(3):
            for model in (ours, theirs):
                model.zero_grad(set_to_none=at != 1)
            if accumulate:
                with hook.no_sync():
                    step(ours, rank, 50 + at)
                step(theirs, rank, 50 + at)
            step(ours, rank, at)
            step(theirs, rank, at)
            hook.finish()
            plain(theirs, world)
            for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                if getattr(a, "allreduce", True):
                    assert a.grad is not None, name
                    worst = max(worst, float((a.grad - b.grad).abs().max()))
    found = hook.partition
    return {"worst": worst, "messages": len(inside), "bytes": sum(inside), "found": found}


OPTIONS = [
    {"pipeline": 2},
    {"pipeline": 3, "memory_reuse": "S4"},
    {"pipeline": "solve", "memory_reuse": "S4"},
    {"pipeline": 2, "esp": True, "shared_expert": 6},
    {"pipeline": 2, "dispatch": "hierarchical_2d", "nodes": 1},
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "world, options, accumulate", spread([2, 4], OPTIONS, [False, True], every=3), ids=named
)
def test_gradients_equal_plain_all_reduces(world: int, options: dict[str, Any], accumulate: bool) -> None:
    dense = sum(p.numel() * 8 for p in build({}).parameters() if getattr(p, "allreduce", True))
    for found in ranks(world).run(job, dict(options), None, accumulate):
        assert found["worst"] < 1e-12
        assert found["found"] is not None
        if "shared_expert" not in options:
            assert found["bytes"] == 3 * dense, "every byte once a step"


def pieces(*sizes: int) -> Partition:
    """Returns a partition from the bytes of each place.

    The places are dense parts and MoE layers in turn, the last layer's dense part, and the end.
    """
    *shares, end = sizes
    return Partition(
        shares=tuple(
            Share(moe_bytes=size if at % 2 else 0, dense_bytes=0 if at % 2 else size, t_gar=0.0, degree=2)
            for at, size in enumerate(shares)
        ),
        end_bytes=end,
        plain_seconds=1.0,
        filled_seconds=1.0,
        exposed_seconds=1.0,
    )


@pytest.mark.parametrize("sizes", [(0, 100, 0, 1000, 200, 700, 500, 0), (0, 216, 0, 900, 301, 2001, 7, 0)])
def test_pieces_may_be_cut_anywhere(sizes: tuple[int, ...]) -> None:
    for found in ranks(2).run(job, {"pipeline": 2}, pieces(*sizes), False):
        assert found["worst"] < 1e-12
        assert found["messages"] > 3 * 2


def test_without_a_partition_all_is_sent_at_the_end() -> None:
    for found in ranks(2).run(job, {"pipeline": 2}, False, False):
        assert found["worst"] < 1e-12
        assert found["found"] is None
        assert found["messages"] == 3


def lane_job(rank: int, world: int) -> list[list[str]]:
    """Returns the names of the tasks of the lane between nodes, in the order in which they ran."""
    model = build({"pipeline": 2, "bypass_local": False})
    with (
        mock.patch.object(solve, "module_lines", lambda *_: (operations(), solve.ModuleLines())),
        mock.patch.object(gradient_partitioning, "all_reduce_line", lambda *_: LineCost(1e-5, 1e-7)),
    ):
        hook = pmoe.GradientReducer(model, partition=pieces(0, 216, 0, 1000, 0, 1000, 0, 0))
        step(model, rank, 0)
        hook.finish()
        with recording() as journal:
            step(model, rank, 1)
        hook.finish()
    spans = [
        span for span in journal.spans if span.direction == "backward" and span.lane.value == "communicate"
    ]
    spans.sort(key=lambda span: span.start)
    assert any(span.kind is Kind.GRADIENTS for span in spans)
    return [[span.name for span in spans]]


def test_gradients_travel_behind_the_last_dispatch_and_before_the_first_combine() -> None:
    for ((names),) in ranks(2).run(lane_job):
        assert names == ["S0", "S1", "GAR", "R0", "R1", "P"] * LAYERS


def changing_job(rank: int, world: int) -> str:
    model = build({"pipeline": 2})
    with mock.patch.object(solve, "module_lines", lambda *_: (operations(), solve.ModuleLines())):
        hook = pmoe.GradientReducer(model, partition=pieces(0, 216, 0, 1000, 0, 1000, 0, 0))
        step(model, rank, 0)
        hook.finish()
        weight, bias = (parameter.detach() for parameter in model.last.parameters())
        model.last.forward = lambda x: F.linear(x, weight, bias)
        try:
            step(model, rank, 1)
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_a_gradient_that_does_not_come_is_named() -> None:
    for message in ranks(2).run(changing_job):
        assert "the gradient of last." in message


def twice_job(rank: int, world: int, partition: Partition | bool) -> tuple[str, float]:
    """Two backward passes in a step, without `no_sync`: the error of the second step, and what differs."""
    ours, theirs = build({"pipeline": 2}), build({"pipeline": 2})
    worst = 0.0
    with mock.patch.object(solve, "module_lines", lambda *_: (operations(), solve.ModuleLines())):
        hook = pmoe.GradientReducer(ours, partition=partition)
        for _ in range(2):
            ours.zero_grad()
            theirs.zero_grad()
            try:
                for part in range(2):
                    step(theirs, rank, 7 + part)
                for part in range(2):
                    step(ours, rank, 7 + part)
            except RuntimeError as error:
                return str(error), worst
            hook.finish()
            plain(theirs, world)
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                if getattr(a, "allreduce", True):
                    worst = max(worst, float((a.grad - b.grad).abs().max()))
    return "no error", worst


def test_a_gradient_is_not_added_to_after_it_was_sent() -> None:
    """A second backward pass without no_sync added to sums over ranks, which nothing reduced again."""
    early = pieces(0, 216, *[0] * 12)  # the gradients of `last`, in the first of six passes of layers
    for message, worst in ranks(2).run(twice_job, early):
        assert "to the gradient of last." in message
        assert worst < 1e-12
    for message, worst in ranks(2).run(twice_job, False):
        assert message == "no error"
        assert worst < 1e-12


def frozen_job(rank: int, world: int, partition: Any) -> tuple[list[bool], str]:
    """A parameter that is frozen after the first step, then one that is trained only after it."""
    model = build({"pipeline": 2})
    model.first.weight.requires_grad_(False)
    hook = pmoe.GradientReducer(model, partition=partition)
    have_gradients = []
    for requires in (True, False, True):
        model.zero_grad()
        model.last.weight.requires_grad_(requires)
        step(model, rank, 0)
        hook.finish()
        have_gradients.append(model.last.weight.grad is not None)
    model.first.weight.requires_grad_(True)
    step(model, rank, 0)
    try:
        hook.finish()
    except ValueError as error:
        return have_gradients, str(error)
    return have_gradients, "no error"


@pytest.mark.parametrize("partition", [False, None])
def test_parameters_may_be_frozen_later_but_not_be_trained_only_later(partition: Any) -> None:
    """Zeros in place of no gradient let an optimizer with momentum move a frozen parameter. A parameter that
    was frozen when the reducer was made was never reduced, so ranks drifted apart."""
    for have_gradients, message in ranks(2).run(frozen_job, partition):
        assert have_gradients == [True, False, True]
        assert "first.weight (requires_grad=True) must require a gradient when the GradientR" in message


def unfrozen_job(rank: int, world: int) -> tuple[str, bool]:
    """Trains a frozen parameter on rank 1 alone. Returns the error, and whether another reducer works."""
    model = build({"pipeline": 2})
    model.first.weight.requires_grad_(False)
    hook = pmoe.GradientReducer(model, partition=False)
    model.first.weight.requires_grad_(rank == 1)
    step(model, rank, 0)
    message = error_of(hook.finish)
    hook.remove()
    model.first.weight.requires_grad_(True)
    model.zero_grad()
    hook = pmoe.GradientReducer(model, partition=False)
    step(model, rank, 0)
    hook.finish()
    sums = model.first.weight.grad.clone()
    dist.all_reduce(sums)
    return message, torch.allclose(sums, world * model.first.weight.grad)


def test_a_parameter_that_one_rank_trains_only_later_is_named_on_all_ranks() -> None:
    """The other ranks waited for that rank's gradients until the group's timeout."""
    (other, is_reduced), (own, _) = ranks(2).run(unfrozen_job)
    cause = "ValueError: first.weight (requires_grad=True) must require a gradient when the GradientReducer"
    assert own.startswith(cause) and "on all ranks" in own
    assert "failed in GradientReducer.finish" in other and f"global rank 1 raised {cause}" in other
    assert is_reduced


def test_a_copy_of_the_model_carries_no_gradients_and_remove_takes_the_hooks_off() -> None:
    model = build({"pipeline": 2})
    hook = pmoe.GradientReducer(model)
    assert all(block.moe.gradients is None for block in copy.deepcopy(model).blocks)
    assert all(block.moe.gradients is not None for block in model.blocks)
    hook.remove()
    assert all(block.moe.gradients is None for block in model.blocks)
    step(model, 0, 0)


def test_a_model_without_dense_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="has nothing to reduce"):
        pmoe.GradientReducer(pmoe.MoELayer(D_MODEL, 12, 4, gate="random"))


def test_one_rank_alone_needs_no_group_and_bad_partitions_are_refused() -> None:
    model = build({"pipeline": 2})
    hook = pmoe.GradientReducer(model)
    for at in range(2):
        step(model, 0, at)
        hook.finish()
    assert hook.partition is None
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(TypeError, match=r"partition \('x'\) must be None, False or a Partition"):
        pmoe.GradientReducer(model, partition="x")  # type: ignore[arg-type]


def refused_job(rank: int, world: int, partition: Partition) -> str:
    model = build({"pipeline": 2})
    with mock.patch.object(solve, "module_lines", lambda *_: (operations(), solve.ModuleLines())):
        hook = pmoe.GradientReducer(model, partition=partition)
        step(model, rank, 0)
        try:
            hook.finish()
        except ValueError as error:
            return str(error)
    return "no error"


def test_a_partition_of_another_model_is_refused() -> None:
    for message in ranks(2).run(refused_job, pieces(0, 216, 0, 0)):
        assert "partition (of 3 layers) must have 7" in message


def test_a_partition_that_sends_gradients_before_any_is_made_is_refused() -> None:
    for message in ranks(2).run(refused_job, pieces(80, 216, 0, 1000, 0, 1000, 0, 0)):
        assert message == (
            "partition (80 bytes in the first dense part) must leave it empty: no gradient exists before it"
        )


def measured_job(rank: int, world: int) -> LineCost:
    return gradient_partitioning.all_reduce_line(Ranks(), torch.zeros(3, dtype=torch.float64))


def test_all_ranks_measure_one_line_of_an_all_reduce() -> None:
    first, second = ranks(2).run(measured_job)
    assert first == second
    assert first.alpha_seconds >= 0 and first.beta_seconds >= 0
