"""Helpers for tests of layers on several ranks: tokens, steps, collectives and errors (see tests/kit.py)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe import MoELayer
from pmoe.call.modules import LayerModules
from pmoe.decide import rank_consistency
from pmoe.decide.rank_consistency import compare_options
from tests import kit
from tests.kit import AUX, tokens

NUM_EXPERTS = 8
TOKENS = {1: (13,), 2: (9, 4), 4: (5, 0, 11, 2)}
"""Number of tokens of each rank, by the number of ranks."""


def build(**options: Any) -> MoELayer:
    """Returns a layer with 8 experts in all and two micro-batches, made by `tests.kit.build`."""
    return kit.build(NUM_EXPERTS, **{"pipeline": 2, **options})


def inputs(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Returns (x, dy) of this rank."""
    count = TOKENS[world][rank]
    return tokens(count, 10 + rank), tokens(count, 20 + rank)


def backward(layer: MoELayer, x: Tensor, dy: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> dict:
    """Runs one forward and one backward pass. Returns y and every gradient."""
    layer.zero_grad(set_to_none=True)
    y = (run or layer)(x)
    ((y * dy).sum() + AUX * layer.l_aux).backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **found}


def one_step(layer: MoELayer, rank: int, world: int, run: Callable[[Tensor], Tensor] | None = None) -> dict:
    x, dy = inputs(rank, world)
    return backward(layer, x.requires_grad_(), dy, run)


@contextlib.contextmanager
def watched_all_to_alls(watch: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Calls watch(out, rows) before each all-to-all with one tensor that this rank starts in the block."""
    start = dist.ProcessGroup.all_to_all_single

    def watched(group: dist.ProcessGroup, out: Tensor, rows: Tensor, *options: Any) -> Any:
        watch(out, rows)
        return start(group, out, rows, *options)

    with mock.patch.object(dist.ProcessGroup, "all_to_all_single", watched):
        yield


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """Yields a list of the names of all collectives that this rank starts in the block, in their order.

    The collective with which a layer compares its options at its first call is left out
    (tests/gloo/test_alike.py).
    """
    names = [
        n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier"))
    ]
    names += ["send", "recv", "isend", "irecv", "batch_isend_irecv"]
    names.remove("all_to_all_single")  # pmoe calls the group's method, as this function of torch does
    originals = {name: getattr(dist, name) for name in names if callable(getattr(dist, name))}
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **options)

        return call

    def note_all_to_all(out: Tensor, rows: Tensor) -> None:
        calls.append("all_to_all_single")

    def compared(parts: LayerModules) -> None:
        before = len(calls)
        compare_options(parts)
        del calls[before:]

    for name in originals:
        setattr(dist, name, counted(name))
    try:
        with (
            mock.patch.object(rank_consistency, "compare_options", compared),
            watched_all_to_alls(note_all_to_all),
        ):
            yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def error_of(function: Callable[[], object]) -> str:
    """Calls a function. Returns the type and text of the error that it raises; "" for none."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def part_of(whole: dict[str, Tensor], name: str, rank: int, world: int) -> Tensor:
    """Returns what one rank calls ``name``, from the values of one rank that holds all experts."""
    local = NUM_EXPERTS // world
    numbered = re.fullmatch(r"experts\.local\.(\d+)(.*)", name)
    if numbered:
        return whole[f"experts.local.{int(numbered[1]) + rank * local}{numbered[2]}"]
    return whole[name][rank * local : (rank + 1) * local] if name.startswith("experts.") else whole[name]


@torch.no_grad()
def take_all_experts(whole: MoELayer, layer: MoELayer, world: int) -> None:
    """Copies the gate and the experts of all ranks into a layer that has all experts. Collective."""
    whole.gate.weight.copy_(layer.gate.weight)
    for name, parameter in whole.experts.named_parameters():
        own = layer.experts.get_parameter(name).detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own)
        parameter.copy_(torch.cat(parts))
