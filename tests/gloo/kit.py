"""As tests/kit.py for layers on several ranks: their tokens, steps, collectives and errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from pmoe import MoELayer
from pmoe.call.modules import Parts
from pmoe.decide import rank_consistency
from pmoe.decide.rank_consistency import check_alike
from tests import kit
from tests.kit import AUX, tokens

NUM_EXPERTS = 8
TOKENS = {1: (13,), 2: (9, 4), 4: (5, 0, 11, 2)}
"""By number of ranks, how many each has."""


def build(**options: Any) -> MoELayer:
    """As `tests.kit.build`: 8 experts in all, two micro-batches."""
    return kit.build(NUM_EXPERTS, **{"pipeline": 2, **options})


def inputs(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's x and dy."""
    count = TOKENS[world][rank]
    return tokens(count, 10 + rank), tokens(count, 20 + rank)


def backward(layer: MoELayer, x: Tensor, dy: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> dict:
    """y and every gradient of one forward and backward."""
    layer.zero_grad(set_to_none=True)
    y = (run or layer)(x)
    ((y * dy).sum() + AUX * layer.l_aux).backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **found}


def one_step(layer: MoELayer, rank: int, world: int, run: Callable[[Tensor], Tensor] | None = None) -> dict:
    x, dy = inputs(rank, world)
    return backward(layer, x.requires_grad_(), dy, run)


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """The names of all collectives that this rank issues in the block, in their order; but not the one with
    which a layer compares its options at its first call (tests/gloo/test_alike.py)."""
    names = [
        n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier"))
    ]
    names += ["send", "recv", "isend", "irecv", "batch_isend_irecv"]
    originals = {name: getattr(dist, name) for name in names if callable(getattr(dist, name))}
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **options)

        return call

    def compared(parts: Parts) -> None:
        before = len(calls)
        check_alike(parts)
        del calls[before:]

    for name in originals:
        setattr(dist, name, counted(name))
    try:
        with mock.patch.object(rank_consistency, "check_alike", compared):
            yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def error_of(function: Callable[[], object]) -> str:
    """The type and text of what ``function`` raises, '' where it raises nothing."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def part_of(whole: dict[str, Tensor], name: str, rank: int, world: int) -> Tensor:
    """What rank ``rank`` of ``world`` calls ``name``, in the values of one rank that holds all experts."""
    local = NUM_EXPERTS // world
    numbered = re.fullmatch(r"experts\.local\.(\d+)(.*)", name)
    if numbered:
        return whole[f"experts.local.{int(numbered[1]) + rank * local}{numbered[2]}"]
    return whole[name][rank * local : (rank + 1) * local] if name.startswith("experts.") else whole[name]
