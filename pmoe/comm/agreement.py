"""Agreement among ranks: collectives that give every rank the same numbers or values.

Each call is a collective. So all ranks must make the same calls in the same order, and pass the same number
of values to a call.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from pmoe.comm.failures import at_stage, reduce_to_largest
from pmoe.comm.ranks import Ranks

T = TypeVar("T")

Agree = Callable[[Sequence[float]], list[float]]
"""The type of a function that returns the maximum of each value over all ranks. Collective.

It is `largest` with the arguments ``ranks``, ``device`` and ``stage`` filled in. Values are sent as float64,
so they come back exactly.
"""


def digest(parts: Iterable[str]) -> int:
    """Returns a number of 48 bits from a hash of texts. Ranks compare this number instead of the texts.

    The number is exact as a float64, in which ranks compare it (`same`).
    """
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:6], "big")


def largest(ranks: Ranks, device: torch.device, values: Sequence[float], *, stage: str) -> list[float]:
    """Returns the maximum of each value over all ranks.

    Costs one all-reduce of ``len(values)`` float64 numbers on ``device``, and the host waits for the result.
    The call is also a barrier: no rank returns before all ranks have called.

    stage: what the values are for, in words, for error messages.

    Example: ranks with (1, 5) and (3, 4) -> [3, 5].
    """
    if ranks.size == 1:
        return list(values)
    with at_stage(stage, ranks):
        agreed = torch.tensor(values, dtype=torch.float64, device=device)
        reduce_to_largest(agreed, ranks.group)
        return [float(value) for value in agreed.tolist()]


def smallest(ranks: Ranks, device: torch.device, value: float, *, stage: str) -> float:
    """Returns the smallest value that any rank passes.

    Costs one all-reduce of one float64 number (`largest`).

    stage: what the value is for, in words, for error messages.

    Example: ranks with 1 and 3 -> 1.
    """
    [negated] = largest(ranks, device, [-value], stage=stage)
    return -negated


def same(ranks: Ranks, device: torch.device, values: Sequence[float], *, stage: str) -> list[bool]:
    """Returns a bool for each value: True if the value is equal on all ranks.

    Costs one all-reduce of ``2 * len(values)`` numbers, because a value v is equal on all ranks if max(v) ==
    -max(-v).

    ranks: the ranks.
    device: the device on which the numbers are reduced.
    stage: what the values are for, in words, for error messages.

    Example: ranks with (1, 5) and (3, 5) -> [False, True].
    """
    maxima = largest(ranks, device, [*values, *(-value for value in values)], stage=stage)
    highest = maxima[: len(values)]
    minus_lowest = maxima[len(values) :]
    return [high == -low for high, low in zip(highest, minus_lowest, strict=True)]


def gathered(ranks: Ranks, value: T, *, stage: str) -> list[T]:
    """Returns the values of all ranks, in order of rank. A collective.

    value: this rank's value: anything that can be pickled. Its size may differ between ranks.
    stage: what the values are for, in words, for error messages.
    """
    if ranks.size == 1:
        return [value]
    values = [value] * ranks.size
    with at_stage(stage, ranks):
        dist.all_gather_object(values, value, group=ranks.group)
    return values


def check_same(ranks: Ranks, values: Mapping[str, object], *, stage: str, cure: str) -> None:
    """Raises ValueError on every rank if a value differs between ranks. A collective.

    The error names the first value that differs, and shows it on rank 0 and on a rank where it differs. Ranks
    send a digest of their values, and the values themselves only if digests differ.

    ranks: the ranks.
    values: this rank's values by the names that the error shows. They can be pickled, and values that differ
        have different texts by ``repr``. Other ranks may have values with other names.
    stage: what is compared, in words, for error messages.
    cure: what to do, as the end of the error's text.
    """
    own = digest(f"{name}: {value!r}" for name, value in values.items())
    if len(set(gathered(ranks, own, stage=stage))) == 1:
        return
    of_ranks = gathered(ranks, dict(values), stage=stage)
    for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
        of_name = [of_rank.get(name, "missing") for of_rank in of_ranks]
        for rank, value in enumerate(of_name):
            if value != of_name[0]:
                raise ValueError(
                    f"{name} must be the same on every rank, and differs: rank 0: {of_name[0]}; rank {rank}: "
                    f"{value}. {cure}"
                )


def from_first(ranks: Ranks, value: T, *, stage: str) -> T:
    """Returns the value of the group's rank 0 on every rank. A collective.

    value: anything that can be pickled. The values of the other ranks are ignored.
    stage: what the value is for, in words, for error messages.
    """
    values = [value]
    if ranks.size > 1:
        with at_stage(stage, ranks):
            dist.broadcast_object_list(values, group_src=0, group=ranks.group)
    return values[0]


@contextlib.contextmanager
def all_fail_together(ranks: Ranks, *, stage: str) -> Iterator[None]:
    """Raises on every rank if the block raises on any rank. A collective at the end of the block.

    The failed rank raises its own error. Every other rank raises a new error with the number of the failed
    rank and the text of its error. The class of the new error depends on the failed rank's error:

    - TypeError, ValueError or ImportError, if the failed rank's error is an instance of one of these;
    - the class of the failed rank's error, if that is OSError or a subclass of it;
    - RuntimeError otherwise.

    ranks: the ranks.
    stage: what the block does, in words, for error messages.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    known = (kind for kind in (TypeError, ValueError, ImportError) if isinstance(failed, kind))
    error_type = type(failed) if isinstance(failed, OSError) else next(known, RuntimeError)
    failures = gathered(ranks, None if failed is None else (error_type, str(failed)), stage=stage)
    if failed is not None:
        raise failed
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise failure[0](f"rank {rank}: {failure[1]}")
