"""An error that users' code raises on one rank is raised on the others too.

They raise it long before the group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pmoe
from pmoe.comm.base import FlatAllToAll
from tests.gloo.kit import error_of
from tests.pool import Pool

M, H, E = 6, 8, 4
TIMEOUT_SECONDS = 30.0
"""The groups' timeout. A rank that waits so long has not seen another rank's report."""


class PlantedError(Exception):
    """The error that users' code raises in these tests."""


class Breaks(torch.autograd.Function):
    """An autograd function that raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, does: bool) -> Tensor:
        ctx.does = does
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.does:
            raise PlantedError("in backward")
        return grad, None


class Expert(nn.Module):
    """An expert that raises in the pass named by ``where``, if any."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.inner = where, nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise PlantedError("in forward")
        return Breaks.apply(self.inner(x), self.where == "backward")


def callback(point: str, raises: bool) -> pmoe.Callback:
    def hook(self: Any, rows: Tensor, *_: Any) -> Tensor:
        if raises:
            raise PlantedError(f"in {point}")
        return rows

    return type("Broken", (pmoe.Callback,), {point: hook})()


class BrokenDispatch(FlatAllToAll):
    def exchange(self, *args: Any) -> Any:
        if self.breaks:
            raise PlantedError("in dispatch")
        return super().exchange(*args)


def dispatch(breaks: bool) -> BrokenDispatch:
    found = BrokenDispatch()
    found.breaks = breaks
    return found


def without_memory(layer: pmoe.MoELayer) -> pmoe.MoELayer:
    def compute(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("in compute")

    layer.experts.compute = compute
    return layer


def build(group: Any, **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(3)
    return pmoe.MoELayer(M, H, E, 2, group=group, **{"pipeline": 2, **options})


CASES: dict[str, Callable[[Any, bool], pmoe.MoELayer]] = {
    "an expert in forward": lambda group, here: build(
        group, expert=lambda: Expert("forward" if here else "")
    ),
    "an expert in backward": lambda group, here: build(
        group, expert=lambda: Expert("backward" if here else ""), memory_reuse="S1"
    ),
    "before_dispatch": lambda group, here: build(group, callbacks=[callback("before_dispatch", here)]),
    "after_combine": lambda group, here: build(group, callbacks=[callback("after_combine", here)]),
    "before_moe_end": lambda group, here: build(group, callbacks=[callback("before_moe_end", here)]),
    "a dispatch": lambda group, here: build(group, dispatch=dispatch(here)),
    "in steps": lambda group, here: build(
        group, dispatch="hierarchical_2d", nodes=1, expert=lambda: Expert("forward" if here else "")
    ),
    "an allocation": lambda group, here: without_memory(build(group)) if here else build(group),
}


def told_job(rank: int, world: int) -> dict[str, str]:
    """Returns this rank's error by case. In each case rank 1's code raises, in a group that is then
    given up.
    """
    found = {}
    for name, make in CASES.items():
        layer = make(dist.new_group(list(range(world))), rank == 1)
        x = torch.randn(5, M, generator=torch.Generator().manual_seed(rank))

        def step(layer: pmoe.MoELayer = layer, x: Tensor = x) -> None:
            for _ in range(2):  # who has all it needs gets through the first
                layer(x.requires_grad_()).sum().backward()

        found[name] = error_of(step)
        if "raised" not in found[name] and rank != 1:
            return found
        dist.barrier()  # all are back, and call again
    layer = build(None)
    layer(x).sum().backward()
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_one_ranks_code_raises_is_told_to_the_others_before_they_wait_for_long(world: int) -> None:
    with Pool(world, TIMEOUT_SECONDS) as pool:
        told = pool.run(told_job, timeout=100)
    for name in CASES:
        own = told[1][name]
        assert own.startswith(("PlantedError: in ", "OutOfMemoryError: in ")), own
        for rank in {*range(world)} - {1}:
            message = told[rank][name]
            assert message.startswith(f"RuntimeError: pmoe: rank {rank} of {world} failed in "), (
                name,
                message,
            )
            assert f"global rank 1 raised {own}" in message and " of MoELayer " in message, (name, message)
