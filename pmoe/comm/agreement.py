"""Agreement among ranks: collectives that give every rank the same numbers or values.

All ranks must call them equally often, in the same order, and with the same number of values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from pmoe.comm.ranks import Ranks, at_stage, reduce_to_largest

T = TypeVar("T")

Agree = Callable[[Sequence[float]], list[float]]
"""Type of `largest` with its ranks bound: it returns the maximum of each value over all ranks.

Collective. Values travel as float64, so they come back exactly.
"""


def digest(parts: Iterable[str]) -> int:
    """Returns 48 bits of a hash of texts. Ranks compare this number instead of the texts.

    Numbers are compared as float64 (`same`), which holds 48 bits exactly.
    """
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:6], "big")


def largest(ranks: Ranks, device: torch.device, values: Sequence[float], *, stage: str) -> list[float]:
    """Returns the maximum of each value over all ranks.

    Costs one all-reduce of ``len(values)`` float64 numbers on ``device``, and the host waits for its result.
    It is also a barrier: no rank returns before all ranks have called it.

    stage: a name of this collective, for errors.

    Example: ranks with (1, 5) and (3, 4) -> [3, 5].
    """
    if ranks.size == 1:
        return list(values)
    with at_stage(stage, ranks):
        agreed = torch.tensor(values, dtype=torch.float64, device=device)
        reduce_to_largest(agreed, ranks.group)
        return [float(value) for value in agreed.tolist()]


def same(ranks: Ranks, device: torch.device, values: Sequence[float], *, stage: str) -> list[bool]:
    """Returns, for each value, whether all ranks have the same one.

    All ranks have the same v if max(v) == -max(-v), so this costs one `largest` of twice as many numbers.

    Example: ranks with (1, 5) and (3, 5) -> [False, True].
    """
    maxima = largest(ranks, device, [*values, *(-value for value in values)], stage=stage)
    highest = maxima[: len(values)]
    minus_lowest = maxima[len(values) :]
    return [high == -low for high, low in zip(highest, minus_lowest, strict=True)]


def gathered(ranks: Ranks, value: T, *, stage: str) -> list[T]:
    """Returns the values of all ranks, in order of rank.

    value: anything that can be pickled. Its size may differ between ranks.
    """
    if ranks.size == 1:
        return [value]
    values = [value] * ranks.size
    with at_stage(stage, ranks):
        dist.all_gather_object(values, value, group=ranks.group)
    return values


def from_first(ranks: Ranks, value: T, *, stage: str) -> T:
    """Returns the value of rank 0 of the group, on every rank.

    value: anything that can be pickled. The values of the other ranks are ignored.
    """
    values = [value]
    if ranks.size > 1:
        with at_stage(stage, ranks):
            dist.broadcast_object_list(values, group_src=0, group=ranks.group)
    return values[0]
