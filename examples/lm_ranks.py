"""How the ranks of train_lm.py work together: experts parallel, the rest data-parallel.

Every rank computes the mean loss of its own slice of the batch, all slices being equal, so the loss of one
process is the mean over the ranks. Hence, with W ranks, after backward:

| parameters | their .grad holds | to get the gradient of one process |
|---|---|---|
| dense (a copy on each rank) | d(this rank's mean loss) | all-reduce, divide by W |
| experts (``allreduce = False``) | the sum over all ranks of d(that rank's mean loss) | divide by W |

The load-balance loss is no mean over tokens: each rank balances its own. With W ranks it is the mean of W
such losses, which differs a little from the one of all tokens. All else equals one process to rounding.
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
    """This process among its peers, and the device it computes on."""

    rank: int
    world: int
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: float) -> float:
        values = torch.tensor([value], dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.item()

    def wait(self) -> None:
        """Returns when every rank has come here."""
        self.sum(torch.zeros(1, device=self.device)).item()

    def slice(self, batch: Tensor) -> Tensor:
        """This rank's equal part of the batch of all ranks."""
        return batch.chunk(self.world)[self.rank]


def start_ranks(timeout_seconds: float = 300) -> Ranks:
    """Joins the process group that torchrun describes; without torchrun, one process alone.

    One rank a GPU where there are GPUs, else gloo on the CPU.
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
    """Whether torchrun starts this process again when it fails."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def stop_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def leave(code: int = 0) -> NoReturn:
    """Ends this process, without the interpreter's teardown.

    Threads of gloo may outlive the group; once in about a hundred runs one was still there when the
    interpreter came down, and the process aborted after everything had been written.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def share_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Turns the gradients that backward left into those of one process; see the table above."""
    if ranks.world > 1:
        reduce_gradients(model, make_meshes(ep=ranks.world))


def squared_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """The sum of squares of the gradients, a scalar in float64 (0 without parameters).

    The norm of the whole model is the root of that of the dense parameters, which every rank knows, plus
    that of the experts summed over the ranks.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        total += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
    return total
