"""The processes that a command runs in: one, or as many as torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from pmoe.cli.arguments import parse_device
from pmoe.comm.ranks import Ranks


def world_size() -> int:
    """The number of processes that torchrun started, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_device(text: str) -> torch.device:
    """As `parse_device`, of a device that torch sees. "cuda" alone is the one of this process on its node."""
    if text == "cuda":
        text = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return parse_device(text, must_exist=True)


@contextmanager
def all_ranks(device: torch.device) -> Iterator[Ranks]:
    """The ranks of all processes, in a process group that ends with the block unless there was one before."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    joins = world_size() > 1 and not dist.is_initialized()
    if joins:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks()
    finally:
        if joins:
            dist.destroy_process_group()


def split_by_node(ranks: Ranks, size: int | None) -> tuple[Ranks | None, Ranks | None]:
    """The ranks across nodes and those inside this one's; None, None where all are one node. Collective.

    A node is ``size`` consecutive ranks; None takes as many as torchrun started on each. Raises ValueError
    where ``size`` does not divide the number of ranks.
    """
    if size is None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
        size = ranks.size if ranks.size % local else local
    if ranks.size % size:
        raise ValueError(f"--inside ({size}) must divide the number of ranks ({ranks.size})")
    if size == ranks.size:
        return None, None
    nodes = [list(range(first, first + size)) for first in range(0, ranks.size, size)]
    inside, _ = dist.new_subgroups_by_enumeration(nodes)
    across, _ = dist.new_subgroups_by_enumeration([list(line) for line in zip(*nodes, strict=True)])
    return Ranks(across), Ranks(inside)
