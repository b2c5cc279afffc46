"""The one exchange before any payload: row counts, and what all ranks must know of each other.

Row counts travel in bins, finer than chunks where chunks may have to be cut finer: the cuttings that join
neighbouring bins form chains, each cutting refining the last. Where chunks may be cut so, or all rows must
find room at once, one max-reduction of a few numbers then carries everything that ranks must share; no rank
holds a table of all ranks.

Letters: W ranks, P of them across nodes, F bins, n chunks, K choices, E_local experts a rank.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pmoe.comm.base import Exchange, Traffic
from pmoe.comm.meeting import CURE
from pmoe.comm.ranks import Grid, Ranks, at_stage, reduce_to_largest, wait_for
from pmoe.warn import warn_once


class Fault(enum.IntEnum):
    """What can be wrong on one rank alone; it travels with the counts so that all ranks raise together.

    text: what the others are told of that rank.
    """

    text: str

    def __new__(cls, text: str) -> Fault:
        fault = int.__new__(cls, len(cls.__members__))
        fault._value_, fault.text = int(fault), text
        return fault

    NONE = ""
    SHAPE = "the last dimension of its input is not d_model"
    DTYPE = "its input has another dtype than the layer's parameters"
    DEVICE = "its input is on another device than the layer's parameters"
    NOT_FINITE = "its gate logits are not finite (check_finite=False lets them pass)"
    ROUTING = "its gate returned expert indices outside 0..num_experts - 1"
    OTHER = "its gate raised an error, or its input was no tensor"
    WEIGHT = "its gate returned weights that are not finite"
    TOKEN = "its gate returned tokens that do not ascend from 0 to the number of tokens less 1"
    CALLBACK = "a callback raised an error in before_moe_start"
    RECOMPUTED = (
        "routing changed in recomputation: give its checkpoint context_fn=pmoe.checkpoint_contexts (and "
        "use_reentrant=False), which keeps the routing"
    )
    OTHER_CALL = (
        "it makes another call than the others: in another gradient mode or pass, or of another layer"
    )
    LOADED = "its experts were loaded from a state dict"  # no error: see `pmoe.decide.stored_state`


class FaultError(ValueError):
    """A ValueError that knows which `Fault` the other ranks are told."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True, kw_only=True)
class RankCounts:
    """What a rank knows after the exchange.

    send: (F, P, E_local) kept rows that this rank has for each rank's experts; recv: (F, W, E_local), rows
    that each rank has for this one's, in the order in which they lie once they are here (`pmoe.comm.ranks`);
    both on the host. recv_device: recv where the rows are. Where P ranks are all W, these are the same ranks.
    sent_once, received_once: (F, P) and (F, W), rows that travel where a token goes only once to a rank that
    holds several of its experts; None where each row does. relayed: (F, X) of `Exchange.relay_counts`, for
    dispatch and for combine. The rest is the same on every rank, and so are decisions taken from it. depth:
    for each n asked for, how often it must be doubled until no chunk brings any rank more rows than
    `slot_rows`, or as often as the bins allow. host_shortage: whether any rank lacks host memory. max_rows:
    the largest number of rows that any rank receives, its own among them; None where it was not asked for, or
    where some rank has other rows than one for each kept choice of its tokens."""

    send: Tensor
    recv: Tensor
    recv_device: Tensor
    max_tokens: int
    needs_grad: bool
    depth: dict[int, int] = field(default_factory=dict)
    host_shortage: bool = False
    max_rows: int | None = None
    sent_once: Tensor | None = None
    received_once: Tensor | None = None
    received_once_device: Tensor | None = None
    relayed: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def sent_rows(self) -> Tensor:
        """(F, P) rows that leave for each rank."""
        return self.send.sum(2) if self.sent_once is None else self.sent_once

    @property
    def received_rows(self) -> Tensor:
        """(F, W) rows that come from each rank."""
        return self.recv.sum(2) if self.received_once is None else self.received_once

    def on_host(self) -> RankCounts:
        """The same without memory of the device."""
        return replace(self, recv_device=self.recv, received_once_device=self.received_once)

    def travelling(self, rank: int) -> RankCounts:
        """The counts of rows that leave ``rank``, this rank: rows between it and itself count as 0."""

        def cleared(counts: Tensor | None) -> Tensor | None:
            return None if counts is None else without_own(counts, rank)

        return RankCounts(
            send=without_own(self.send, rank),
            recv=without_own(self.recv, rank),
            recv_device=without_own(self.recv_device, rank),
            max_tokens=self.max_tokens,
            needs_grad=self.needs_grad,
            sent_once=cleared(self.sent_once),
            received_once=cleared(self.received_once),
        )

    def joined(self, n: int) -> RankCounts:
        """The same rows in n chunks, each of as many neighbouring bins; n divides the number of bins."""
        if n == self.send.shape[0]:
            return self

        def join(value: Any) -> Any:
            return value.unflatten(0, (n, -1)).sum(1) if isinstance(value, Tensor) else value

        by_chunk = {name: join(value) for name, value in vars(self).items()}  # each tensor is by bin
        return RankCounts(**{**by_chunk, "relayed": tuple(map(join, self.relayed))})


def without_own(counts: Tensor, rank: int) -> Tensor:
    """counts (n, W, ...) with the rows between ``rank`` and itself set to none."""
    counts = counts.clone()
    counts[:, rank] = 0
    return counts


@dataclass(frozen=True, kw_only=True)
class Slots:
    """How many rows a chunk may bring, and the numbers of chunks for which to ask.

    slack: rows of a slot over the balanced share. degrees: those n for which `RankCounts.depth` is wanted.
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
        largest: dict[int, Tensor] = {}  # rows of the largest of n chunks: degrees have cuttings in common
        depths = []
        for n in self.degrees:
            # In float64, as on the host: float32 would round large numbers of tokens.
            limit = (max_tokens.double() * (self.slack * self.top_k / n)).ceil()
            depth = torch.zeros_like(max_tokens)
            while rows_F.shape[0] % (2 * n) == 0:
                if n not in largest:
                    largest[n] = rows_F.view(n, -1).sum(1).max()
                depth = depth + (largest[n] > limit)
                n *= 2
            depths.append(depth)
        return depths


def slot_rows(slack: float, top_k: int, max_tokens: int, n: int) -> int:
    """Rows that a slot holds at most, as `Slots.depths` has it on the device.

    Example: slack 1.25, K = 2, 1000 tokens in 4 chunks -> 625.
    """
    return math.ceil(max_tokens * (slack * top_k / n))


def num_bins(degrees: Sequence[int], num_ranks: int, num_experts: int) -> int:
    """F: the least common multiple of the degrees times a power of two, enough to cut even a batch whose rows
    all go to one rank, but few enough that the counts stay a small message.

    Example: degrees (4, 2) on 3 ranks -> 16.
    """
    finest = math.lcm(*degrees)
    bins, most = finest, min(MAX_BINS, MAX_COUNTS // num_experts)
    while bins < finest * num_ranks and 2 * bins <= most:
        bins *= 2
    return bins


MAX_BINS, MAX_COUNTS = 256, 2**16
"""Bins, and counts of all ranks together where bins could be fewer: with these a rank's message is at most
256 KiB, a hundredth of 4,096 rows of 4,096 columns in two bytes each, on thousands of ranks."""

HEADER = 4
"""Integers before the counts in each message:

    tokens       of the sender
    fault        a `Fault`
    mode         the sum of bits (TRAINING ...) and LIFE times the life of the group (`pmoe.comm.standing`)
    type, layer  the sum of the rows' type, as its place in TYPES, and LAYER times the layer's `Ranks.number`
"""

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

LIFE = 8
LAYER = 8


TRAINING, GRAD_ENABLED, IN_BACKWARD, WANTS_GRADIENTS = 1, 2, 4, 1 << 30
"""Bits of a mode. WANTS_GRADIENTS implies GRAD_ENABLED. WANTS_GRADIENTS is the highest bit, so the largest of
all ranks' modes tells whether any rank has it. IN_BACKWARD is set in a checkpoint's second pass."""


def mode_of_call(*, needs_grad: bool, training: bool) -> int:
    """The mode of a call that begins now. training: whether its layer is in training mode."""
    mode = TRAINING if training else 0
    if needs_grad:
        mode |= WANTS_GRADIENTS | GRAD_ENABLED
    elif torch.is_grad_enabled():
        mode |= GRAD_ENABLED
    if torch._C._current_graph_task_id() != -1:
        mode |= IN_BACKWARD
    return mode


class CountsExchange:
    """Started as soon as the counts exist and finished when they are needed; `finish` holds the one host
    synchronisation of a layer's forward."""

    tokens_W: Tensor

    def __init__(
        self,
        grid: Grid,
        counts_FE: Tensor,
        *,
        num_tokens: int,
        fault: Tensor | Fault,
        needs_grad: bool,
        training: bool,
        dtype: torch.dtype,
        traffic: Traffic,
        slots: Slots | None = None,
        once_FP: Tensor | None = None,
        exchanges: Sequence[Exchange] = (),
        bypass_local: bool = False,
        asks_max_rows: bool = False,
        one_row_a_choice: bool = True,
    ) -> None:
        """counts_FE: (F, E) int64 on the rows' device. fault: a `Fault`, or one as an int64 scalar there.
        training: whether the layer is in training mode. dtype: of the rows that will travel. once_FP: see
        `RankCounts`. exchanges: the dispatch and the combine, where they have counts to relay. bypass_local:
        rows between a rank and itself do not travel. asks_max_rows: whether `RankCounts.max_rows` is wanted,
        the same on all ranks; one_row_a_choice: whether it makes sense for this rank's rows."""
        counts_FPX = counts_FE.unflatten(1, (grid.across.size, -1))
        self._counted_once = once_FP is not None
        if once_FP is not None:
            counts_FPX = torch.cat([counts_FPX, once_FP.unsqueeze(2)], dim=2)
        self._grid, self._ranks, self._exchanges = grid, grid.all, exchanges
        self._own_FPX, ranks, self._bypass_local = counts_FPX, grid.all, bypass_local
        self._slots, self._traffic = slots, traffic
        self._asks_max_rows, self._one_row_a_choice = asks_max_rows, one_row_a_choice
        kind = TYPES.index(dtype) if dtype in TYPES else len(TYPES)
        kind += ranks.number * LAYER
        told = 0 if isinstance(fault, Tensor) else fault.value
        mode = mode_of_call(needs_grad=needs_grad, training=training)
        if ranks.size > 1:
            ranks.count_exchange()
            mode += ranks.standing.life * LIFE
        # From pinned memory: another copy of Python's numbers to a GPU would make the host wait.
        header = torch.tensor([num_tokens, told, mode, kind], pin_memory=counts_FE.is_cuda)
        header = header.to(counts_FE.device, non_blocking=True)
        if isinstance(fault, Tensor):
            header[1] = fault
        by_rank = grid.to_owners(counts_FPX).transpose(0, 1).reshape(ranks.size, -1)
        # In 32 bits: a rank has fewer slots than that.
        self._sent = torch.cat([header.expand(ranks.size, HEADER), by_rank], dim=1).int()
        self._received = self._sent
        self.tokens_W = header[:1]  # of every rank, once finished
        self._work: dist.Work | None = None
        if ranks.size > 1:
            self._received = torch.empty_like(self._sent)
            traffic.counts += self._sent[1:].numel() * self._sent.element_size()
            with at_stage("the exchange of row counts", ranks):
                self._work = dist.all_to_all_single(
                    self._received, self._sent, group=ranks.group, async_op=True
                )

    def finish(self) -> RankCounts:
        """Waits for the counts. Raises FaultError on every rank where any rank reported a fault."""
        with at_stage("the exchange of row counts", self._ranks):
            if self._work is not None:
                wait_for(self._work, self._ranks.group, self._received.is_cuda)
            messages = self._received[:, HEADER:].unflatten(1, (-1, self._own_FPX.shape[2]))
            device_FWX = self._grid.by_arrival(messages.transpose(0, 1)).long()
            recv_device, received_once = self._split(device_FWX)
            agreed = self._agree(recv_device)
            relayed = self._relay(device_FWX)
            headers = self._received[:, :HEADER]
            on_device = [self._own_FPX, device_FWX, headers, agreed, *relayed]
            flat = torch.cat([each.reshape(-1) for each in on_device]).cpu()
        on_host = flat.split([each.numel() for each in on_device])
        own, arrived, headers, numbers, *counts = (
            found.view_as(each) for found, each in zip(on_host, on_device, strict=True)
        )
        max_tokens, fault, mode, _, host_shortage, max_rows, irregular, *depths = numbers.tolist()
        if fault:
            codes = enumerate(headers[:, 1].tolist())
            told = [f"rank {rank}: {Fault(code).text}" for rank, code in codes if code]
            raise FaultError(Fault(fault), "; ".join(told))
        if self._ranks.size > 1:
            modes, kinds = headers[:, 2:].t().tolist()
            if modes.count(modes[0]) < len(modes) or kinds.count(kinds[0]) < len(kinds):
                compare_headers(modes, kinds, self._ranks)
            if not self._ranks.number:
                self._ranks.take_number()
        self.tokens_W = headers[:, 0]
        send, sent_once = self._split(own)
        recv, received_once_host = self._split(arrived)
        return RankCounts(
            send=send,
            recv=recv,
            recv_device=recv_device,
            max_tokens=max_tokens,
            needs_grad=mode >= WANTS_GRADIENTS,
            depth={} if self._slots is None else dict(zip(self._slots.degrees, depths, strict=True)),
            host_shortage=bool(host_shortage),
            max_rows=max_rows if self._asks_max_rows and not irregular else None,
            sent_once=sent_once,
            received_once=received_once_host,
            received_once_device=received_once,
            relayed=(counts[0], counts[1]) if counts else (None, None),
        )

    def _split(self, counts_FRX: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows by expert, and rows that travel once for several of them."""
        if not self._counted_once:
            return counts_FRX, None
        return counts_FRX[..., :-1], counts_FRX[..., -1]

    def _relay(self, device_FWX: Tensor) -> list[Tensor]:
        """What dispatch and combine must know of rows that pass through this rank; empty where they do
        not."""
        if not any(exchange.in_steps for exchange in self._exchanges):
            return []
        rows = [self._own_FPX, self._grid.of_own_place(device_FWX)]
        rows = [each[..., -1].contiguous() if self._counted_once else each.sum(2) for each in rows]
        if self._bypass_local:
            rows = [without_own(each, self._ranks.rank) for each in rows]
        (send_FP, recv_FP), (dispatch, combine) = rows, self._exchanges
        found = (dispatch.relay_counts(send_FP, recv_FP), combine.relay_counts(recv_FP, send_FP))
        return [send_FP.new_empty(send_FP.shape[0], 0) if each is None else each for each in found]

    def _agree(self, recv_FWE: Tensor) -> Tensor:
        """The largest over all ranks of: the header's numbers, host shortage, rows received and whether they
        are irregular, and the depths. The first came with the counts; only what follows from the counts must
        be asked for after them."""
        told = self._received[:, :HEADER].amax(0)
        slots = self._slots
        if slots is None and not self._asks_max_rows:
            return F.pad(told, (0, 3))
        agreed = recv_FWE.new_zeros(HEADER + 3 + (0 if slots is None else len(slots.degrees)))
        agreed[:HEADER] = told
        if self._asks_max_rows:
            agreed[HEADER + 1] = recv_FWE.sum()
            agreed[HEADER + 2] = not self._one_row_a_choice
        if slots is not None:
            if slots.host_rows is not None:
                agreed[HEADER] = recv_FWE.sum() > slots.host_rows
            for i, depth in enumerate(slots.depths(recv_FWE, told[0])):
                agreed[HEADER + 3 + i] = depth
        if self._ranks.size > 1:
            self._traffic.counts += agreed.numel() * agreed.element_size()
            reduce_to_largest(agreed, self._ranks.group)
        return agreed


# ---- ranks that make different calls


def compare_headers(modes: Sequence[int], kinds: Sequence[int], ranks: Ranks) -> None:
    """Raises FaultError on all ranks where they do not make the same call.

    Warns where some are in training mode and others are not. modes, kinds: each rank's, from the headers of
    one exchange.
    """
    ranks.standing.life = max(mode % WANTS_GRADIENTS // LIFE for mode in modes)  # now equal on all ranks

    def with_and_without(flag: int) -> tuple[str, str]:
        """The ranks whose mode has the flag, and the others, in words; "" where there are none."""
        having = [rank for rank, mode in enumerate(modes) if mode & flag]
        lacking = [rank for rank in range(len(modes)) if rank not in having]
        return ranks_in_words(having), ranks_in_words(lacking)

    called = ranks.layer or "a MoELayer"
    in_layer = [kind // LAYER for kind in kinds]
    if len(set(in_layer)) > 1:
        names = [f"number {number}" if number else "one that was not called before" for number in in_layer]
        raise FaultError(
            Fault.OTHER_CALL,
            "every rank must call the layers of a group in the same order and equally often; these were "
            f"called together, numbered by their first calls: {_by_rank(names)}",
        )
    again, first = with_and_without(IN_BACKWARD)
    if again and first:
        raise FaultError(
            Fault.OTHER_CALL,
            f"{called} runs again for a checkpoint in the backward pass of {again}, and is called in a "
            f"forward pass of {first}: {CURE}",
        )
    wanting, _ = with_and_without(WANTS_GRADIENTS)
    _, disabled = with_and_without(GRAD_ENABLED)
    if wanting and disabled:
        raise FaultError(
            Fault.OTHER_CALL,
            f"{called} is called without gradients (torch.no_grad or inference_mode) on {disabled}, and with "
            f"them on {wanting}: all ranks must call it in the same mode, for its backward pass needs all of "
            "them; a rank whose loss is not needed calls the layer with gradients too, and calls backward",
        )
    types = [kind % LAYER for kind in kinds]
    if len(set(types)) > 1:
        names = [(*map(str, TYPES), "another type")[kind] for kind in types]
        rule = f"rows must be of one type on all ranks (autocast on all or none): {_by_rank(names)}"
        raise FaultError(Fault.DTYPE, rule)
    training, evaluating = with_and_without(TRAINING)
    if training and evaluating:
        warn_once(
            f"{called} is in training mode on {training} and in evaluation mode on {evaluating}: if that is "
            "not meant, call model.train() or model.eval() on all ranks"
        )


def _by_rank(values: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Example: (0, 2, 3) -> "ranks 0, 2, 3"; (1,) -> "rank 1"; more than eight are counted."""
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
