"""What ranks must agree on: every rank takes part once in each, with as many values as the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from pmoe.comm.ranks import Ranks, at_stage, reduce_to_largest

T = TypeVar("T")

Agree = Callable[[Sequence[float]], list[float]]
"""`largest` of some ranks: of each value the largest that a rank has, exactly (float64). Collective."""


def digest(parts: Iterable[str]) -> int:
    """48 bits of texts, which ranks compare in place of them: a float holds them exactly."""
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:6], "big")


def largest(ranks: Ranks, device: torch.device, values: Sequence[float], *, stage: str) -> list[float]:
    """Of each value the largest that any rank has. Also a barrier: no rank returns before all have come.

    One all-reduce of ``len(values)`` float64 on ``device``, read by the host.

    Example: ranks with (1, 5) and (3, 4) -> [3, 5].
    """
    if ranks.size == 1:
        return list(values)
    with at_stage(stage, ranks):
        agreed = torch.tensor(values, dtype=torch.float64, device=device)
        reduce_to_largest(agreed, ranks.group)
        return [float(value) for value in agreed.tolist()]


def same(ranks: Ranks, device: torch.device, values: Sequence[float], *, stage: str) -> list[bool]:
    """Of each value whether every rank has the same one. One `largest` of twice as many numbers.

    Example: ranks with (1, 5) and (3, 5) -> [False, True].
    """
    found = largest(ranks, device, [*values, *(-value for value in values)], stage=stage)
    highest, minus_lowest = found[: len(values)], found[len(values) :]
    return [high == -low for high, low in zip(highest, minus_lowest, strict=True)]


def gathered(ranks: Ranks, value: T, *, stage: str) -> list[T]:
    """Every rank's value, by rank. Any value that can be pickled; it may be of another size on each rank."""
    if ranks.size == 1:
        return [value]
    found = [value] * ranks.size
    with at_stage(stage, ranks):
        dist.all_gather_object(found, value, group=ranks.group)
    return found


def from_first(ranks: Ranks, value: T, *, stage: str) -> T:
    """The first rank's value. Any value that can be pickled; those of other ranks are not looked at."""
    found = [value]
    if ranks.size > 1:
        with at_stage(stage, ranks):
            dist.broadcast_object_list(found, group_src=0, group=ranks.group)
    return found[0]
