"""Balance losses of pipeline stages: schedules give the gradients of the model without a pipeline."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import warn
from tests.kit import D_HIDDEN, D_MODEL
from tests.pool import ranks
from tests.reference import relative_error

BATCHES, TOKENS, LENGTH = 4, 6, 4
FACTOR, Z = 0.3, 0.2
SINGLE = (ScheduleGPipe, Schedule1F1B)


class Stage(nn.Module):
    """A stage whose loss is attached to its output, once it has a `BalanceLoss`."""

    def __init__(self, seed: int, group: Any, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(D_MODEL, D_MODEL).double()
        self.layer = pmoe.MoELayer(
            D_MODEL, D_HIDDEN, 4, 2, dtype=torch.float64, group=group, pipeline=2, bias=False
        )
        self.recomputes = recomputes
        self.balance: pmoe.BalanceLoss | None = None
        self.totals: pmoe.StepTotals | None = None

    def inner(self, x: Tensor) -> Tensor:
        return x + self.layer(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)
        return y if self.balance is None else self.balance.attach(y, FACTOR * BATCHES, self.totals)


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCHES * TOKENS, D_MODEL, dtype=torch.float64, generator=generator)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def balanced(module: nn.Module, over: str, group: Any) -> pmoe.BalanceLoss:
    options = {"sequence_length": LENGTH} if over == "sequence" else {}
    if over == "window":
        options = {"window": 2}
    return pmoe.BalanceLoss(module, over=over, z_loss_weight=Z, averaged=False, group=group, **options)


def job(rank: int, world: int, schedule: Any, over: str, recomputes: bool) -> None:
    """Half of the ranks share the experts of the first stages, the other half those of the last ones."""
    width = world // 2
    experts = [dist.new_group([*range(half, half + width)]) for half in (0, width)][rank // width]
    pipeline = [dist.new_group([at, at + width]) for at in range(width)][rank % width]
    place = rank // width
    num_stages = 2 if schedule in SINGLE else 4
    own = [place] if schedule in SINGLE else [place, place + 2]
    modules = {at: Stage(at, experts, recomputes) for at in own}
    for module in modules.values():
        module.balance = balanced(module, over, experts)
    stages = [
        PipelineStage(module, at, num_stages, torch.device("cpu"), group=pipeline)
        for at, module in modules.items()
    ]
    runs = schedule(stages[0] if schedule in SINGLE else stages, n_microbatches=BATCHES, loss_fn=loss_of)
    plain = nn.Sequential(*(Stage(at, experts) for at in range(num_stages)))
    whole = balanced(plain, over, experts)
    known = pmoe.StepTotals(
        num_tokens=BATCHES * TOKENS * width, num_sequences=BATCHES * width * -(-TOKENS // LENGTH)
    )
    for step in range(3 if over == "window" else 2):
        x, target = batch(20 + 2 * step + rank % width), batch(9 + rank % width)
        inputs = (x,) if 0 in own else ()
        named = {"target": target} if num_stages - 1 in own else {}
        for module in modules.values():
            module.zero_grad()
            module.totals = known
        if over == "batch":  # a forward pass of the whole schedule, without gradients
            with torch.no_grad():
                runs.eval(*inputs, **named)
            for module in modules.values():
                assert module.balance is not None
                module.totals = module.balance.totals()
                assert module.totals.num_tokens == known.num_tokens
        runs.step(*inputs, **named)
        totals = known
        if over == "batch":
            with torch.no_grad():
                plain(x)
            totals = whole.totals()
        plain.zero_grad()
        for part, wanted in zip(x.chunk(BATCHES), target.chunk(BATCHES), strict=True):
            (loss_of(plain(part), wanted) / BATCHES + FACTOR * whole.loss(totals)).backward()
        if over == "window":
            whole.end_step()
            for module in modules.values():
                assert module.balance is not None
                module.balance.end_step()
        expected = dict(plain.named_parameters())
        for at, module in modules.items():
            for name, parameter in module.named_parameters():
                assert relative_error(parameter.grad, expected[f"{at}.{name}"].grad) <= 1e-12, (at, name)
    gc.collect()
    unused = [module.balance._attached._unused for module in modules.values() if module.balance is not None]
    assert not any(unused), "a loss that a schedule differentiated counts as dropped"
    assert not any("BalanceLoss.attach" in start for start in warn.GIVEN)
    dist.barrier()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("over", ["batch", "sequence", "window"])
@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleInterleavedZeroBubble])
@pytest.mark.parametrize("world", [2, 4])
def test_stages_get_the_gradients_of_no_pipeline(world: int, schedule: Any, over: str) -> None:
    ranks(world).run(job, schedule, over, False)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [ScheduleGPipe, ScheduleInterleaved1F1B])
def test_stages_with_checkpoints_do_so_too(schedule: Any) -> None:
    ranks(2).run(job, schedule, "window", True)


def test_a_loss_scale_is_a_factor_of_the_attached_loss_too() -> None:
    """The scale multiplies the task's loss alone. Without it in the factor, the balance loss is too small."""
    found = []
    for scale in (1.0, 1024.0):
        stage = Stage(0, None)
        stage.balance = balanced(stage, "batch", None)
        x = batch(5)
        (scale * stage.balance.attach(stage.inner(x), scale * FACTOR, None).square().mean()).backward()
        found.append(stage.layer.gate.weight.grad / scale)
    assert relative_error(found[1], found[0]) <= 1e-12
