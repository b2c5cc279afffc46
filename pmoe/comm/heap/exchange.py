"""The exchange between ranks while a heap is made: all take each step, whatever fails on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from pmoe.comm.agree import gathered
from pmoe.comm.heap.device_memory import HeapMemory
from pmoe.comm.heap.shape import HeapShape
from pmoe.comm.heap.waits import wait_seconds
from pmoe.comm.ranks import Ranks
from pmoe.kernels.comet import spare_blocks


class CollectiveSteps:
    """Steps that every rank takes, whether or not the one before failed on some."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device

    def gather(self, value: object) -> list[Any]:
        """The value of every rank, by rank. A collective, also a barrier."""
        on_cuda = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_cuda else contextlib.nullcontext():  # NCCL gathers there
            return gathered(self.ranks, value, stage="the exchange about a symmetric heap")

    def attempt(self, work: Callable[[], object]) -> tuple[list[Any], list[str]]:
        """The result of work() of every rank, and a sentence for each rank where it raised."""
        mine: tuple[object, str | None]
        try:
            mine = (work(), None)
        except Exception as error:
            mine = (None, str(error))
        everyone = self.gather(mine)
        troubles = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(everyone) if why is not None]
        return [value for value, _ in everyone], troubles


def agree_on_shape(steps: CollectiveSteps, shape: HeapShape, memory: HeapMemory, *, one_node: bool) -> float:
    """For how long this rank waits. Raises on every rank where the ranks do not fit together."""
    ranks = steps.ranks
    facts: dict[str, object] = asdict(shape) | {"dtype": str(shape.dtype).removeprefix("torch.")}
    host, bound, trouble = "", 0.0, None
    try:
        place, bound = memory.place(steps.device), wait_seconds(ranks)
        spare_blocks()  # raises for a bad number, while the other ranks still listen
        host = place.host
        facts |= {"bytes": shape.bytes, "kernels": place.kernels}
    except Exception as error:
        trouble = (isinstance(error, ValueError), str(error))
    everyone = steps.gather((facts, host, trouble))
    _raise_troubles([each for _, _, each in everyone])
    _check_same([each for each, _, _ in everyone])
    if shape.num_ranks != ranks.size:
        raise ValueError(f"num_ranks ({shape.num_ranks}) must be the size of the group ({ranks.size})")
    hosts = [each for _, each, _ in everyone]
    if one_node and len(set(hosts)) > 1:
        nodes = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(hosts))
        raise ValueError(
            f"all ranks of a symmetric heap must be on one node (nvshmem_heap goes further), not {nodes}"
        )
    return bound


def _raise_troubles(troubles: Sequence[tuple[bool, str] | None]) -> None:
    """troubles: by rank, whether its error was a ValueError, and its text."""
    failed = [(rank, *each) for rank, each in enumerate(troubles) if each is not None]
    if failed:
        sentences = "; ".join(f"rank {rank}: {text}" for rank, _, text in failed)
        kind = ValueError if any(is_value for _, is_value, _ in failed) else RuntimeError
        raise kind(f"pmoe: no symmetric heap: {sentences}")


def _check_same(facts: Sequence[dict[str, object]]) -> None:
    """facts: by rank."""
    differing = [name for name in facts[0] if len({each[name] for each in facts}) > 1]
    if differing:
        numbers = "; ".join(
            f"rank {rank}: {', '.join(f'{name} {each[name]}' for name in differing)}"
            for rank, each in enumerate(facts)
        )
        raise ValueError(
            f"all ranks of a symmetric heap must have the same shape, type and loaded kernels, not {numbers}"
        )
