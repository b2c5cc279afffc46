"""torch.distributed.pipelining: stages with layers start, whatever values torch uses to find their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, _utils
from torch.distributed.pipelining import stage as torch_stage
from torch.utils.checkpoint import checkpoint

from pmoe import MoELayer, Routing
from pmoe.call.shape_run import INFERENCE, STAGE
from pmoe.comm.counts import FaultError
from pmoe.comm.ranks import Ranks
from tests.kit import D_HIDDEN, D_MODEL
from tests.pool import ranks
from tests.reference import relative_error

BATCHES, TOKENS = 4, 8


class Stage(nn.Module):
    def __init__(self, seed: int, is_checkpointed: bool, name: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(D_MODEL, D_MODEL).double()
        group, options = Ranks.single(), dict(OPTIONS[name])
        if name == "own gate":
            options["gate"] = WeighingGate()
        self.layer = MoELayer(D_MODEL, D_HIDDEN, 4, 2, dtype=torch.float64, group=group, **options)
        self.is_checkpointed = is_checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return x + self.layer(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.is_checkpointed else self.inner(x)


@contextmanager
def garbage() -> Iterator[list[Tensor]]:
    """Fills with NaN what torch allocates to find shapes, because uninitialised memory may contain NaN."""
    made: list[Tensor] = []
    empty = _utils._make_tensor_from_meta

    def filled(meta: Any, device: Any) -> Tensor:
        found = empty(meta, device)
        with torch.no_grad():
            made.append(found.fill_(float("nan")))
        return found

    with (
        mock.patch.object(_utils, "_make_tensor_from_meta", filled),
        mock.patch.object(torch_stage, "_make_tensor_from_meta", filled),
    ):
        yield made


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCHES * TOKENS, D_MODEL, dtype=torch.float64, generator=generator)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def schedule_job(rank: int, world: int, schedule: Any, name: str, is_checkpointed: bool) -> None:
    stages = [Stage(at, is_checkpointed, name) for at in range(world)]
    mine = stages[rank]
    stage = PipelineStage(mine, rank, world, torch.device("cpu"))
    runs = schedule(stage, n_microbatches=BATCHES, loss_fn=loss_of)
    with garbage() as made:
        for step in range(2):
            mine.zero_grad()
            given = (batch(step),) if rank == 0 else ()
            runs.step(*given, **({"target": batch(9)} if rank == world - 1 else {}))
            if step == 0:
                assert made, "torch learnt the shapes from these"
        got = {which: each.grad.clone() for which, each in mine.named_parameters() if each.grad is not None}
    plain = nn.Sequential(*stages)
    plain.zero_grad()
    pairs = zip(batch(1).chunk(BATCHES), batch(9).chunk(BATCHES), strict=True)
    for x, target in pairs:
        (loss_of(plain(x), target) / BATCHES).backward()
    wanted = {which: each.grad for which, each in mine.named_parameters() if each.grad is not None}
    assert got.keys() == wanted.keys()
    for which, value in wanted.items():
        assert relative_error(got[which], value) < 1e-12, which


class WeighingGate(nn.Module):
    """A gate without logits, whose weights are NaN if its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D_MODEL, 4).double()

    def forward(self, x_TM: Tensor) -> Routing:
        weight, expert = self.linear(x_TM).softmax(-1).topk(2)
        return Routing(expert=expert, weight=weight, l_aux=weight.sum() * 0.0)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "two chunks": {"pipeline": 2, "memory_reuse": "S4"},
    "checked": {"check_finite": True, "gate": "sigmoid"},
    "own gate": {},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_a_schedule_starts_from_nan(schedule: Any, name: str, is_checkpointed: bool) -> None:
    ranks(2).run(schedule_job, schedule, name, is_checkpointed)


class Poisoned(Stage):
    """A module whose n-th call returns NaN; the first call is torch's, to find shapes.

    It goes on after errors, because other ranks wait.
    """

    calls, bad_call = 0, 0
    error = ""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        try:
            return super().forward(x * float("nan") if self.calls == self.bad_call else x)
        except FaultError as error:
            self.error = f"call {self.calls}: {error}"
            return x


def real_job(rank: int, world: int, bad_call: int) -> str:
    module = Poisoned(rank, False, "default")
    module.bad_call = bad_call if rank == 1 else 0
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    runs = ScheduleGPipe(stage, n_microbatches=BATCHES)
    for step in range(2):
        runs.step(*((batch(step),) if rank == 0 else ()))
    return module.error


@pytest.mark.parametrize("bad_call", [1, 2, BATCHES + 2])
def test_nan_of_the_training_itself_still_stops_it(bad_call: int) -> None:
    first, second = ranks(2).run(real_job, bad_call)
    assert not first
    if bad_call == 1:
        assert not second
    else:
        assert f"call {bad_call}: rank 0: its gate logits are not finite" in second


def test_torch_learns_shapes_where_a_layer_looks() -> None:
    """The layer must know in which call torch infers shapes.

    Otherwise it would take uninitialized memory for values.
    """
    assert any(hasattr(PipelineStage, name) for name in INFERENCE)
    assert torch_stage.__name__ == STAGE
