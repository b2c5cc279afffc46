"""The one exchange before any payload: row counts, and what all ranks must know of each other.

Row counts travel in bins, finer than chunks where chunks may have to be cut finer: the cuttings that join
neighbouring bins form chains, each cutting refining the last. Where chunks may be cut so, one max-reduction
of a few numbers then carries everything that ranks must share; no rank holds a table of all ranks.

Letters: W ranks, F bins, n chunks, K choices, E_local experts a rank.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pmoe.comm.base import Traffic
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
    """What a rank knows after the exchange.

    send: (F, W, E_local) kept rows that this rank has for each rank's experts; recv: the same, rows that
    each rank has for this one's; both on the host. recv_device: recv where the rows are.
    The rest is the same on every rank, and so are decisions taken from it.
    depth: for each n asked for, how often it must be doubled until no chunk brings any rank more rows than
    `slot_rows`, or as often as the bins allow. host_shortage: whether any rank lacks host memory.
    """

    send: Tensor
    recv: Tensor
    recv_device: Tensor
    max_tokens: int
    needs_grad: bool
    depth: dict[int, int] = field(default_factory=dict)
    host_shortage: bool = False

    def joined(self, n: int) -> Shared:
        """The same rows in n chunks, each of as many neighbouring bins; n divides the number of bins."""

        def join(counts: Tensor) -> Tensor:
            bins: Tensor = counts.unflatten(0, (n, -1))
            return bins.sum(1)

        return replace(self, send=join(self.send), recv=join(self.recv), recv_device=join(self.recv_device))


@dataclass(frozen=True, kw_only=True)
class Slots:
    """How many rows a chunk may bring, and the numbers of chunks for which to ask.

    slack: rows of a slot over the balanced share. degrees: those n for which `Shared.depth` is wanted.
    own_rank: rows from there stay and are not counted; None counts all. host_rows: received rows for which
    this rank has host memory left.
    """

    slack: float
    top_k: int
    degrees: tuple[int, ...]
    own_rank: int | None
    host_rows: int | None = None

    def depths(self, recv_FWE: Tensor, max_tokens: Tensor) -> list[Tensor]:
        """The depth that this rank needs for each degree, as scalars on the device."""
        by_source = recv_FWE.sum(2)
        rows_F = by_source.sum(1) if self.own_rank is None else by_source.sum(1) - by_source[:, self.own_rank]
        most: dict[int, Tensor] = {}  # rows of the largest of n chunks: degrees have cuttings in common
        depths = []
        for n in self.degrees:
            # In float64, as on the host: float32 would round large numbers of tokens.
            limit = (max_tokens.double() * (self.slack * self.top_k / n)).ceil()
            depth = torch.zeros_like(max_tokens)
            while rows_F.shape[0] % (2 * n) == 0:
                if n not in most:
                    most[n] = rows_F.view(n, -1).sum(1).max()
                depth = depth + (most[n] > limit)
                n *= 2
            depths.append(depth)
        return depths


def slot_rows(slack: float, top_k: int, max_tokens: int, n: int) -> int:
    """Rows that a slot holds at most, as `Slots.depths` has it on the device.

    Example: slack 1.25, K = 2, 1000 tokens in 4 chunks -> 625.
    """
    return math.ceil(max_tokens * (slack * top_k / n))


def num_bins(degrees: Sequence[int], num_ranks: int) -> int:
    """F: the least common multiple of the degrees times a power of two, enough to cut even a batch whose rows
    all go to one rank, but few enough that the counts stay a small message.

    Example: degrees (4, 2) on 3 ranks -> 16.
    """
    most = math.lcm(*degrees)
    bins = most
    while bins < most * num_ranks and 2 * bins <= MOST_BINS:
        bins *= 2
    return bins


MOST_BINS = 256

HEADER = 4
"""Integers before the counts in each message: the sender's tokens, fault, needs_grad, type of rows."""

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CountsExchange:
    """Started as soon as the counts exist and finished when they are needed; `finish` holds the one host
    synchronisation of a layer's forward."""

    def __init__(
        self,
        ranks: Ranks,
        counts_FE: Tensor,
        *,
        num_tokens: int,
        fault: Tensor | Fault,
        needs_grad: bool,
        dtype: torch.dtype,
        traffic: Traffic,
        slots: Slots | None = None,
    ) -> None:
        """counts_FE: (F, E) int64 on the rows' device. fault: a `Fault`, or one as an int64 scalar there.
        dtype: of the rows that will travel."""
        bins, num_experts = counts_FE.shape
        self._ranks, self._shape = ranks, (bins, ranks.size, num_experts // ranks.size)
        self._slots, self._traffic = slots, traffic
        header = counts_FE.new_empty(HEADER)
        # Filled by kernels: a tensor built from Python numbers would be a synchronising copy on CUDA.
        kind = TYPES.index(dtype) if dtype in TYPES else len(TYPES)
        for i, value in enumerate((num_tokens, fault, needs_grad, kind)):
            header[i] = value if isinstance(value, Tensor) else int(value)
        by_rank = counts_FE.view(self._shape).transpose(0, 1).reshape(ranks.size, -1)
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
        bins, size, local = self._shape

        def by_bin(messages: Tensor) -> Tensor:
            by_rank: Tensor = messages[:, HEADER:].unflatten(1, (bins, local))
            return by_rank.transpose(0, 1)

        with at_stage("the exchange of row counts", self._ranks):
            if self._work is not None:
                self._work.wait()
            recv_device = by_bin(self._received)
            agreed = self._agree(recv_device)
            counts = torch.cat([self._sent.view(-1), self._received.view(-1), agreed]).cpu()
        sent, received, numbers = counts.split([self._sent.numel()] * 2 + [agreed.numel()])
        max_tokens, fault, needs_grad, _, host_shortage, *depths = numbers.tolist()
        if fault:
            codes = received.view_as(self._sent)[:, 1].tolist()
            told = [f"rank {rank}: {FAULTS[Fault(code)]}" for rank, code in enumerate(codes) if code]
            raise FaultError(Fault(fault), "; ".join(told))
        kinds = received.view_as(self._sent)[:, 3].tolist()
        if len(set(kinds)) > 1:
            names = [*(str(dtype) for dtype in TYPES), "another type"]
            told = [f"rank {rank}: {names[kind]}" for rank, kind in enumerate(kinds)]
            raise FaultError(
                Fault.DTYPE,
                f"rows must be of one type on all ranks (autocast on all or none): {'; '.join(told)}",
            )
        return Shared(
            send=by_bin(sent.view_as(self._sent)),
            recv=by_bin(received.view_as(self._sent)),
            recv_device=recv_device,
            max_tokens=max_tokens,
            needs_grad=bool(needs_grad),
            depth={} if self._slots is None else dict(zip(self._slots.degrees, depths, strict=True)),
            host_shortage=bool(host_shortage),
        )

    def _agree(self, recv_FWE: Tensor) -> Tensor:
        """The largest over all ranks of: the header's numbers, host shortage, and the depths. The former came
        with the counts; only what follows from the counts must be asked for after them."""
        told = self._received[:, :HEADER].amax(0)
        if self._slots is None:
            return F.pad(told, (0, 1))
        agreed = recv_FWE.new_zeros(HEADER + 1 + len(self._slots.degrees))
        agreed[:HEADER] = told
        if self._slots.host_rows is not None:
            agreed[HEADER] = recv_FWE.sum() > self._slots.host_rows
        for i, depth in enumerate(self._slots.depths(recv_FWE, told[0])):
            agreed[HEADER + 1 + i] = depth
        if self._ranks.size > 1:
            self._traffic.counts += agreed.numel() * agreed.element_size()
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._ranks.group)
        return agreed


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
