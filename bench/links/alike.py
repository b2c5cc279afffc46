"""A process group of W ranks of which only one exists. Its collectives return at once.

The other ranks are assumed to route as this one does, but shifted in a circle: what rank r sends to this rank
is what this rank sends to the rank that is r places before itself. So loads are even if this rank spreads its
rows evenly.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.futures import Future

from pmoe.comm import failures
from pmoe.comm.ranks import Ranks


class _Done(Work):
    """A Work of torch.distributed that is complete from the start."""

    def __init__(self, output: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._output = list(output)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._output

    def get_future(self) -> Future:
        future: Future = Future()
        future.set_result(self._output)
        return future


class AlikeGroup(dist.ProcessGroup):
    """The process group, as rank 0 of W ranks.

    Reduced and broadcast tensors keep their values. An all-to-all of equal parts returns what ranks like this
    one would send. An all-to-all with splits, which carries rows, does not write the received rows, because
    no time depends on their values.
    """

    def __init__(self, options: Any, backend_options: Any = None) -> None:
        super().__init__(options.group_rank, options.group_size)
        gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options.timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:
        return "alike"

    def alltoall_base(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        if not received_splits:
            parts = sent.view(self.size(), -1)
            received.view(self.size(), -1).copy_(parts.flip(0).roll(1, 0))
        return _Done([received])

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        return _Done(tensors)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        return _Done(tensors)

    def _allgather_base(self, gathered: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Work:
        gathered.view(self.size(), -1).copy_(own.reshape(1, -1).expand(self.size(), -1))
        return _Done([gathered])

    def allgather(
        self, gathered: Sequence[Sequence[torch.Tensor]], own: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        for tensor in gathered[0]:
            tensor.copy_(own[0])
        return _Done(gathered[0])

    def barrier(self, opts: Any = None) -> Work:
        return _Done([])


def start(num_ranks: int) -> None:
    """Makes a group of ``num_ranks`` ranks, of which only this one exists, the process's default group."""
    if "alike" not in dist.Backend.backend_list:
        dist.Backend.register_backend("alike", AlikeGroup, extended_api=True, devices=["cpu"])
    dist.init_process_group("alike", store=dist.HashStore(), rank=0, world_size=num_ranks)
    failures.meet = _meet  # type: ignore[assignment]


def _meet(ranks: Ranks, why: str, *, compares: bool) -> bool:
    """Stands in for `pmoe.comm.failures.meet`. The other ranks do what this rank does, so nobody waits."""
    return compares
