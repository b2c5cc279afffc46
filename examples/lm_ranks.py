"""Ranks of train_lm.py: experts are spread over them (expert parallel), the rest is data-parallel.

Every rank computes the mean loss of its slice of the batch. All slices have the same size, so the loss of one
process is the mean of the ranks' losses. With W ranks, each rank divides its loss by W before backward. After
backward:

| parameters | their .grad | to get the gradient of one process |
|---|---|---|
| dense (a copy on each rank) | gradient of this rank's loss / W | all-reduce |
| experts (``allreduce = False``) | sum over ranks of the gradients of their losses / W | nothing |

The load-balance loss is different: it is not a mean over tokens, and each rank balances its own tokens. With
W ranks it is the mean of W losses, which is close to that of all tokens, but not equal. Everything else
equals one process, up to rounding.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.training.parallel import make_meshes, reduce_gradients


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all processes of the run.

    rank: number of this process.
    world: number of processes.
    device: device on which this process computes.
    """

    rank: int
    world: int
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """Sums a tensor of any shape over the ranks, in place, and returns it."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: float) -> float:
        """Returns the largest value that any rank has."""
        values = torch.tensor([value], dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.item()

    def wait(self) -> None:
        """Returns when every rank has called it."""
        self.sum(torch.zeros(1, device=self.device)).item()

    def slice(self, batch: Tensor) -> Tensor:
        """Returns this rank's part of a batch of all ranks: equal slices along dimension 0."""
        return batch.chunk(self.world)[self.rank]


def start_ranks(timeout_seconds: float = 300) -> Ranks:
    """Joins the process group that torchrun describes. Without torchrun, this process is the only rank.

    It uses one GPU a rank if the machine has GPUs, else the CPU with gloo.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return Ranks(rank=0, world=1, device=device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    return Ranks(rank=dist.get_rank(), world=dist.get_world_size(), device=device)


def may_restart() -> bool:
    """Returns whether torchrun starts this process again when it fails."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def stop_ranks() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave(code: int = 0) -> NoReturn:
    """Ends this process without the interpreter's cleanup.

    Threads of gloo may outlive the process group. In about one of a hundred runs such a thread was still
    there during the interpreter's cleanup, and the process aborted after everything had been written.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def share_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Turns the gradients that backward left into those of one process (see the table of this module).

    Each rank has divided its loss by the number of ranks, so the gradients are not divided here.
    """
    if ranks.world > 1:
        reduce_gradients(model, make_meshes(ep=ranks.world), divide_by=1)


def squared_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """Returns the sum of squares of the gradients: a float64 scalar, 0 without parameters.

        norm of the whole model = sqrt(squares of dense parameters + sum over ranks of the squares of their
        experts)

    Every rank has the gradients of all dense parameters, so these are not summed over the ranks.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        total += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
    return total
