"""The processes that run a command: a single one, or all that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from pmoe.arguments import ranks_in_environment
from pmoe.cli.arguments import parse_device
from pmoe.comm.ranks import Ranks


def world_size() -> int:
    """Returns the number of processes that torchrun started; 1 without torchrun.

    Raises ValueError if WORLD_SIZE is not a number of at least 1.
    """
    return ranks_in_environment("WORLD_SIZE", 1)


def own_device(text: str) -> torch.device:
    """Returns the device of this process.

    text: the option --device. "cuda" without a number is the GPU with this process's number on its node.

    Raises ValueError if the device is not present.
    """
    if text == "cuda":
        text = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return parse_device(text, must_exist=True)


@contextmanager
def all_ranks(device: torch.device) -> Iterator[Ranks]:
    """Yields the ranks of all processes, so that the block can run collectives.

    If there is no process group, the context makes one, and destroys it after the block.

    device: the device of this process. The group uses NCCL for a CUDA device, gloo for the CPU.
    """
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
    """Returns two groups of ranks: one rank of each node, and all ranks of this rank's node. Collective.

    All ranks of the first group have the same position on their nodes. Returns (None, None) if all ranks are
    on one node.

    ranks: all ranks.
    size: number of consecutive ranks that form a node. None takes the number of processes that torchrun
        started on a node.

    Raises ValueError if ``size`` does not divide the number of ranks.
    """
    if size is None:
        local = ranks_in_environment("LOCAL_WORLD_SIZE", ranks.size)
        size = ranks.size if ranks.size % local else local
    if ranks.size % size:
        raise ValueError(f"--inside ({size}) must divide the number of ranks ({ranks.size})")
    if size == ranks.size:
        return None, None
    nodes = [list(range(first, first + size)) for first in range(0, ranks.size, size)]
    inside, _ = dist.new_subgroups_by_enumeration(nodes)
    across, _ = dist.new_subgroups_by_enumeration([list(line) for line in zip(*nodes, strict=True)])
    return Ranks(across), Ranks(inside)
