"""The one exchange before any payload: row counts, and what all ranks must know of each other.

Letters: W ranks, n chunks (or finer bins), E_local experts a rank.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.flat import Traffic
from pmoe.comm.ranks import Ranks


class Fault(enum.IntEnum):
    """What can be wrong on one rank alone; it travels with the counts so that all ranks raise together."""

    NONE = 0
    SHAPE = 1
    DTYPE = 2
    DEVICE = 3
    NOT_FINITE = 4
    ROUTING = 5
    OTHER = 6


FAULTS = {
    Fault.SHAPE: "the last dimension of its input is not d_model",
    Fault.DTYPE: "its input has another dtype than the layer's parameters",
    Fault.DEVICE: "its input is on another device than the layer's parameters",
    Fault.NOT_FINITE: "its gate logits are not finite (check_finite=True)",
    Fault.ROUTING: "its gate returned expert indices outside 0..num_experts - 1",
    Fault.OTHER: "its gate raised an error",
}


class FaultError(ValueError):
    """A ValueError that knows which `Fault` the other ranks are told."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What every rank knows after the exchange.

    send: (n, W, E_local) kept rows that this rank has for each rank's experts; recv: the same, rows that
    each rank has for this one's; both on the host. recv_device: recv where the rows are.
    max_tokens, needs_grad: over all ranks, so decisions taken from them are the same everywhere.
    """

    send: Tensor
    recv: Tensor
    recv_device: Tensor
    max_tokens: int
    needs_grad: bool

    def joined(self, n: int) -> Shared:
        """The same rows in n chunks, each of as many neighbouring bins; n divides the number of bins."""

        def join(counts: Tensor) -> Tensor:
            bins: Tensor = counts.unflatten(0, (n, -1))
            return bins.sum(1)

        return replace(self, send=join(self.send), recv=join(self.recv), recv_device=join(self.recv_device))


HEADER = 3
"""Integers before the counts in each message: tokens, fault, needs_grad."""


class CountsExchange:
    """Started as soon as the counts exist and finished when they are needed; `finish` holds the one host
    synchronisation of a layer's forward."""

    def __init__(
        self,
        ranks: Ranks,
        counts_nE: Tensor,
        *,
        num_tokens: int,
        fault: Tensor | Fault,
        needs_grad: bool,
        traffic: Traffic,
    ) -> None:
        """counts_nE: (n, E) int64 on the rows' device. fault: a `Fault`, or one as an int64 scalar there."""
        n, num_experts = counts_nE.shape
        self._ranks, self._shape = ranks, (n, ranks.size, num_experts // ranks.size)
        header = counts_nE.new_empty(HEADER)
        # Filled by kernels: a tensor built from Python numbers would be a synchronising copy on CUDA.
        for i, value in enumerate((num_tokens, fault, needs_grad)):
            header[i] = value if isinstance(value, Tensor) else int(value)
        by_rank = counts_nE.view(self._shape).transpose(0, 1).reshape(ranks.size, -1)
        self._sent = torch.cat([header.expand(ranks.size, HEADER), by_rank], dim=1)
        self._received = self._sent
        self._work: dist.Work | None = None
        if ranks.size > 1:
            self._received = torch.empty_like(self._sent)
            traffic.counts += self._sent[1:].numel() * self._sent.element_size()
            with at_stage("the exchange of row counts", ranks):
                self._work = dist.all_to_all_single(
                    self._received, self._sent, group=ranks.group, async_op=True
                )

    def finish(self) -> Shared:
        """Waits for the counts. Raises FaultError on every rank where any rank reported a fault."""
        with at_stage("the exchange of row counts", self._ranks):
            if self._work is not None:
                self._work.wait()
            sent, received = torch.stack([self._sent, self._received]).cpu()
        faults = {rank: Fault(int(code)) for rank, code in enumerate(received[:, 1]) if code}
        if faults:
            told = "; ".join(f"rank {rank}: {FAULTS[fault]}" for rank, fault in faults.items())
            raise FaultError(next(iter(faults.values())), told)
        n, size, local = self._shape

        def by_chunk(messages: Tensor) -> Tensor:
            by_rank: Tensor = messages[:, HEADER:].unflatten(1, (n, local))
            return by_rank.transpose(0, 1)

        return Shared(
            send=by_chunk(sent),
            recv=by_chunk(received),
            recv_device=by_chunk(self._received),
            max_tokens=int(received[:, 0].max()),
            needs_grad=bool(received[:, 2].any()),
        )


@contextlib.contextmanager
def at_stage(stage: str, ranks: Ranks) -> Iterator[None]:
    """Names the stage and this rank in whatever a collective raises: a peer that died or never came."""
    try:
        yield
    except RuntimeError as error:
        if ranks.size == 1:
            raise
        raise RuntimeError(
            f"pmoe: {ranks} failed in {stage}; a peer has died, never arrived, or took longer than the "
            f"group's timeout: {error}"
        ) from error
