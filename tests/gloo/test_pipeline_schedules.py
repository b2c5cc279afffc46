"""All schedules of torch.distributed.pipelining on 2 x 2 ranks: two ranks share the experts of a stage."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

import pmoe
from pmoe import MoELayer
from pmoe.engine.passes.backward import Backward
from pmoe.experts.marks import is_expert
from tests.gloo.kit import watched_all_to_alls
from tests.kit import D_HIDDEN, D_MODEL
from tests.pool import ranks
from tests.reference import relative_error

BATCHES, TOKENS = 4, 6
SINGLE = (ScheduleGPipe, Schedule1F1B)
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
SEVERAL = (ScheduleLoopedBFS, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
SPLIT = (ScheduleInterleavedZeroBubble, *V_SHAPED)
"""Schedules that ask for gradients of inputs and of parameters apart."""


class Stage(nn.Module):
    def __init__(self, seed: int, group: dist.ProcessGroup, options: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(D_MODEL, D_MODEL).double()
        self.layer = MoELayer(D_MODEL, D_HIDDEN, 4, 2, dtype=torch.float64, group=group, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.linear(x))


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCHES * TOKENS, D_MODEL, dtype=torch.float64, generator=generator)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def tasks_of(run: Any) -> Counter[str]:
    """Runs a function, and counts the tasks of its backward passes by kind, and this rank's all-to-alls."""
    counts: Counter[str] = Counter()
    plain = Backward.run_schedule

    def run_schedule(self: Backward) -> None:
        counts.update(task.kind.value for task in self.schedule.tasks)
        plain(self)

    def count_all_to_all(out: Tensor, rows: Tensor) -> None:
        counts["all-to-all"] += 1

    with mock.patch.object(Backward, "run_schedule", run_schedule), watched_all_to_alls(count_all_to_all):
        run()
    return counts


def job(rank: int, world: int, schedule: Any, options: dict[str, Any], frozen: tuple[int, ...] = ()) -> None:
    """Ranks 0 and 1 share the experts of the first stages, ranks 2 and 3 those of the last ones.

    frozen: experts of each layer that are frozen.
    """
    experts = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    pipeline = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    place = rank // 2
    num_stages = 2 if schedule in SINGLE else 4
    own = (
        [place] if schedule in SINGLE else [place, 3 - place] if schedule in V_SHAPED else [place, place + 2]
    )
    modules = {at: Stage(at, experts, options) for at in own}
    for module in modules.values():
        pmoe.freeze_experts(module, frozen)
    stages = [
        PipelineStage(module, at, num_stages, torch.device("cpu"), group=pipeline)
        for at, module in modules.items()
    ]
    runs = schedule(stages[0] if schedule in SINGLE else stages, n_microbatches=BATCHES, loss_fn=loss_of)

    def step(seed: int) -> None:
        for module in modules.values():
            module.zero_grad()
        has_last = num_stages - 1 in own
        inputs = (batch(seed + rank % 2),) if 0 in own else ()
        runs.step(*inputs, **({"target": batch(9 + rank % 2)} if has_last else {}))

    step(20)  # torch infers shapes in the first step
    counts = tasks_of(lambda: step(30))
    got = {
        f"{at}.{name}": value.grad
        for at, module in modules.items()
        for name, value in module.named_parameters()
    }
    # The same model without a pipeline. Both groups of two compute it.
    plain = nn.Sequential(*(Stage(at, experts, options) for at in range(num_stages)))
    pmoe.freeze_experts(plain, frozen)
    pairs = zip(batch(30 + rank % 2).chunk(BATCHES), batch(9 + rank % 2).chunk(BATCHES), strict=True)

    def plain_step() -> None:
        for x, target in pairs:
            (loss_of(plain(x), target) / BATCHES).backward()

    plain_counts = tasks_of(plain_step)
    wanted = dict(plain.named_parameters())
    for name, value in got.items():
        expected = wanted[name].grad
        assert value is not None and expected is not None, name
        assert relative_error(value, expected) < 1e-12, name
        if is_expert(wanted[name]):
            own_rows = [expert % 2 for expert in frozen if expert // 2 == rank % 2]
            assert not value[own_rows].any() and not expected[own_rows].any(), name
    share = num_stages // len(own)
    assert counts == Counter({kind: count // share for kind, count in plain_counts.items()})
    dist.barrier()


SLOW = [(each, {"pipeline": 2}) for each in (*SINGLE, *SEVERAL)] + [
    (each, {"pipeline": 2, "memory_reuse": "S4"}) for each in SPLIT
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", [*SINGLE, *SEVERAL, *V_SHAPED])
def test_a_schedule_gives_the_gradients_of_no_pipeline_by_as_many_tasks(schedule: Any) -> None:
    ranks(4).run(job, schedule, {})


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "options"), SLOW)
def test_a_schedule_with_chunks_does_so_too(schedule: Any, options: dict[str, Any]) -> None:
    ranks(4).run(job, schedule, options)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Schedule1F1B, *SPLIT])
def test_a_schedule_gives_frozen_experts_gradients_of_zero(schedule: Any) -> None:
    ranks(4).run(job, schedule, {}, (1, 2, 3))
