"""Exchange of row counts: the only communication before any row is sent.

1. One all-to-all sends each rank the counts that concern it, with a header about the sender (`HEADER`). The
   tokens of a rank are cut into F equal ranges, the bins, and rows are counted by bin. F is a multiple of
   every number of chunks (micro-batches) that may be needed. So sums over neighbouring bins give the counts
   of n chunks:

       F = 8 bins     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
       n = 4 chunks   |   0   |   1   |   2   |   3   |
       n = 2 chunks   |       0       |       1       |

2. One max-reduction of a few numbers follows in three cases:

   - Chunks take turns in buffers of fixed size (ring slots). All ranks must then cut their batches into the
     same number of chunks, so many that no chunk overflows a slot on any rank.
   - One buffer holds all rows of a rank. All ranks must then know the largest number of rows that any rank
     receives.
   - Busy experts may have copies on other ranks. All ranks must then know the load of each expert: its rows
     from all ranks.

No rank ever has the whole table of counts, from every rank to every rank.

Letters:

    W         ranks that share the layer's experts
    P         ranks among which rows are dispatched: W, or W / L if L ranks share each expert
    F, n      bins and chunks
    K         choices of a token
    E_local   experts of a rank
    X         counts for one rank in one bin: the rows for each of its experts. With send_once, a token is
              sent only once to a rank that holds several of its experts, so one more count follows: the
              number of rows that are sent
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pmoe.comm.base import Exchange, Traffic
from pmoe.comm.failures import at_stage, reduce_to_largest, wait_for
from pmoe.comm.grid import Grid
from pmoe.comm.group_record import MOST_LIVES
from pmoe.comm.meeting import CURE, other_passes
from pmoe.comm.ranks import Ranks
from pmoe.kernels.counts import FAULT, HEADER, Heading, Messages, refusal
from pmoe.warn import warn_of_fallback, warn_once


class Fault(enum.IntEnum):
    """A mistake on one rank. Its number is sent to all ranks, so that they raise an error together.

    The number is sent with the row counts. Without it, the other ranks would wait for rows that the faulty
    rank never sends.

    text: what is wrong on the faulty rank. The errors of the other ranks have this text after "rank 3: ".
    """

    text: str

    def __new__(cls, text: str) -> Fault:
        fault = int.__new__(cls, len(cls.__members__))
        fault._value_ = int(fault)
        fault.text = text
        return fault

    NONE = ""
    SHAPE = "the last dimension of its input is not d_model"
    DTYPE = "its input has another dtype than the layer's parameters"
    DEVICE = "its input is on another device than the layer's parameters"
    NOT_FINITE = "its gate logits are not finite (check_finite=False lets them pass)"
    ROUTING = "its gate returned expert indices outside 0..num_experts - 1"
    OTHER = "its gate raised an error, or its input is not a tensor"
    WEIGHT = "its gate returned weights that are not finite"
    TOKEN = "its gate returned a Routing.token that does not ascend, or lies outside 0..num_tokens - 1"
    CALLBACK = "a callback raised an error in before_moe_start"
    RECOMPUTED = (
        "routing changed in recomputation: pass context_fn=pmoe.checkpoint_contexts, use_reentrant=False to "
        "torch.utils.checkpoint.checkpoint, which then keeps the routing"
    )
    OTHER_CALL = (
        "it calls another layer than the other ranks, or the same layer in another gradient mode or pass"
    )
    LOADED = "its experts were loaded from a state dict"  # no error: see `pmoe.decide.stored_state`


class FaultError(ValueError):
    """The ValueError for a fault of one rank.

    fault: the `Fault`. Its number is sent to the other ranks with the row counts.
    """

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(kw_only=True)  # a frozen one would call a C function for each field
class RankCounts:
    """Row counts of one call, as one rank knows them after the exchange. Dropped rows are not counted.

    All counts are int64. F is the number of bins, which are equal ranges of a rank's tokens; after `joined`
    it is the number of chunks. P is the number of ranks to which this rank may send rows, and W the number of
    all ranks of the layer. W = P unless several ranks share each expert. Each rank has E_local experts.

    Counts of this rank, on the host unless the name says otherwise:

        send             (F, P, E_local) rows that this rank has for each expert of each rank
        recv             (F, W, E_local) rows that each rank has for each expert of this rank. The W ranks are
                         in the order of `Grid.by_arrival`
        recv_device      a copy of recv on the rows' device
        sent_once        (F, P) rows that are sent to each rank, if a token is sent only once to a rank that
                         holds several of its experts (`pmoe.engine.variants.send_once`); else None
        received_once    (F, W) rows that arrive from each rank, if tokens are sent only once; else None
        received_once_device
                         a copy of received_once on the rows' device; else None
        hosted_copies    number of copies of other ranks' experts that this rank hosts in the call. If any
                         rank hosts copies, all counts have more than E_local columns: the last ones are for
                         copies
        expert_messages  number of times that this rank sends one of its experts to a group of ranks that host
                         copies of it (`pmoe.planner.copy_groups`)
        messages         the messages of row counts of all ranks, on the rows' device, if kernels wrote them;
                         else None. If there are messages, `joined` leaves recv_device as it is, in bins
        relayed          with a hierarchical all-to-all, for dispatch and for combine: for each bin, numbers
                         of rows that this rank passes on for other ranks, (F, X) (`Exchange.relay_counts`). X
                         is 0 if it passes on none. None if neither all-to-all is hierarchical

    The following values are equal on all ranks, so decisions that follow from them are equal on all ranks,
    too:

        max_tokens       largest number of tokens of any rank
        needs_grad       whether any rank wants gradients
        depth            depth[n]: number of times that n chunks must be cut into smaller ones (`cuts`) until
                         the rows of each chunk fit into a ring slot, a buffer of fixed size, on every rank.
                         Chunks of a single bin are not cut. Empty if no chunks must be cut
        host_shortage    whether any rank lacks host memory for the rows that it receives
        sorts_results    whether any rank needs memory for results that are sorted by expert. False if the
                         kernels of all ranks store results in the order in which the rows arrived
        relays_copies    whether any expert has several copies in one group. The ranks with these copies then
                         pass the expert's weights on to each other
        copies_stay      whether the weights of copies stay until backward with every restore pair
                         (`pmoe.schedule.restore.fate_of_copies`)
        max_rows         largest number of rows that any rank receives, with its rows from itself. None if it
                         was not requested, or if a rank does not have exactly one row for each choice of its
                         tokens
        loads            (E,) load of each of the E experts: its rows from all ranks. () if not requested
        deviations       (E,) how uneven the ranks' rows for an expert are: the largest difference between the
                         expert's load and W times the rows of one rank. () if loads are not requested
        marks            maximum over all ranks of each number in `Loads.marks`, such as 1 if a rank's experts
                         have changed. () if not requested
    """

    send: Tensor
    recv: Tensor
    recv_device: Tensor
    max_tokens: int
    needs_grad: bool
    depth: dict[int, int] = field(default_factory=dict)
    host_shortage: bool = False
    sorts_results: bool = True
    max_rows: int | None = None
    sent_once: Tensor | None = None
    received_once: Tensor | None = None
    received_once_device: Tensor | None = None
    messages: Messages | None = None
    relayed: tuple[Tensor, Tensor] | None = None
    hosted_copies: int = 0
    expert_messages: int = 0
    relays_copies: bool = False
    copies_stay: bool = False
    loads: tuple[int, ...] = ()
    deviations: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()

    @property
    def sent_rows(self) -> Tensor:
        """The number of rows that go to each rank, this rank included: (F, P).

        There are F bins, which are equal ranges of the rank's tokens, and P ranks to which this rank may
        send.
        """
        return self.send.sum(2) if self.sent_once is None else self.sent_once

    @property
    def received_rows(self) -> Tensor:
        """The number of rows that come from each rank, this rank included: (F, W).

        There are F bins, which are equal ranges of a rank's tokens, and W ranks.
        """
        return self.recv.sum(2) if self.received_once is None else self.received_once

    def on_host(self) -> RankCounts:
        """Returns the counts with tensors on the host also in the fields ``..._device``."""
        if self.recv_device is self.recv and self.received_once is None:
            return self  # a call on the CPU
        changes = {"recv_device": self.recv, "received_once_device": self.received_once, "messages": None}
        # Not by `dataclasses.replace`, which calls a C function for each field.
        return RankCounts(**{**vars(self), **changes})

    def travelling(self, rank: int, num_staying: int | None = None) -> RankCounts:
        """Returns a copy in which the rows from this rank to itself count as 0, because they are not sent.

        rank: this rank's number, which is also the index of its own rows in the counts.
        num_staying: the number of this rank's own experts, if only their rows count as 0. The experts after
            them are copies of other ranks' experts. None if the rows of all experts count as 0.
        """

        def cleared(counts: Tensor | None) -> Tensor | None:
            return None if counts is None else without_own(counts, rank)

        return RankCounts(
            send=without_own(self.send, rank, num_staying),
            recv=without_own(self.recv, rank, num_staying),
            recv_device=without_own(self.recv_device, rank, num_staying),
            max_tokens=self.max_tokens,
            needs_grad=self.needs_grad,
            sent_once=cleared(self.sent_once),
            received_once=cleared(self.received_once),
        )

    def joined(self, n: int) -> RankCounts:
        """Returns the counts of the same rows for n chunks instead of F bins.

        Bins are equal ranges of a rank's tokens. Each chunk consists of F / n neighbouring bins, and its
        counts are sums over these bins. n must divide F.
        """
        if n == self.send.shape[0]:
            return self

        def join(value: Any) -> Any:
            return by_chunk(value, n) if isinstance(value, Tensor) else value

        # The first axis of each tensor is that of the bins.
        kept = {} if self.messages is None else {"recv_device": self.recv_device}
        tables = {name: join(value) for name, value in vars(self).items() if name not in kept}
        relayed = None if self.relayed is None else tuple(by_chunk(counts, n) for counts in self.relayed)
        return RankCounts(**{**tables, **kept, "relayed": relayed})


def by_chunk(counts: Tensor, n: int) -> Tensor:
    """Returns the row counts of n chunks, (n, ...), from those of F bins; ``counts`` itself if n is F.

    Bins are equal ranges of a rank's tokens. Each chunk consists of F / n neighbouring bins.

    counts: (F, ...), row counts by bin. n must divide F.
    """
    if counts.shape[0] == n:
        return counts
    return counts.view(n, counts.shape[0] // n, *counts.shape[1:]).sum(1)


def without_own(counts: Tensor, rank: int, num_staying: int | None = None) -> Tensor:
    """Returns a copy of ``counts`` in which the rows from this rank to itself count as 0.

    counts: (n, W, ...), for each of n bins or chunks the counts of W ranks.
    rank: this rank.
    num_staying: the number of this rank's own experts, if only their rows count as 0. The experts after them
        are copies of other ranks' experts. None if the rows of all experts count as 0.
    """
    counts = counts.clone()
    counts[:, rank][..., :num_staying] = 0
    return counts


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Limits of the rows that a rank receives: the rows that a ring slot holds, and the free host memory.

    A ring slot is a buffer of fixed size that chunks use in turn.

    slack: a slot holds ceil(slack * max_tokens * top_k / n) rows (`slot_rows`). With slack = 1 these are the
        rows of one of n chunks under even routing.
    top_k: rows that a rank receives for each of its tokens under even routing: the choices of a token, times
        the number of ranks that share an expert.
    degrees: the numbers of chunks n for which `RankCounts.depth` is computed. Each divides the number of bins
        (equal ranges of a rank's tokens, by which rows are counted).
    own_rank: this rank's number, if its rows to itself are not counted, because they are not sent. None
        counts all rows.
    host_rows: number of received rows for which this rank has host memory; None checks nothing.
    num_staying: the number of this rank's own experts, if the experts after them are copies of other ranks'
        experts. Only rows for its own experts stay on the rank; rows for copies are sent. None if there are
        no copies.
    total_slack: None if only the rows that arrive are limited. In layers with copies of busy experts it is a
        number, and three more numbers of rows are limited:

            rows of a chunk that this rank sends       must fit into a slot
            rows of a chunk that stay on this rank     must fit into a slot
            A + S                                      <= ceil(total_slack * max_tokens * top_k / n)

        A is the number of arriving rows in the chunk with the most of them, S the number of rows that stay in
        the chunk with the most of these.
    """

    slack: float
    top_k: int
    degrees: tuple[int, ...]
    own_rank: int | None
    host_rows: int | None = None
    num_staying: int | None = None
    total_slack: float | None = None

    @functools.cached_property
    def ratios(self) -> list[tuple[int, float]]:
        """Pairs (n, rows of a slot divided by the largest number of tokens), for each number of chunks n."""
        return [(n, self.slack * self.top_k / n) for n in self.degrees]

    def may_cut(self, num_bins: int) -> bool:
        """Returns whether any chunks can be cut finer: not if each consists of a single bin."""
        return any(n != num_bins for n in self.degrees)

    def depths(self, recv_FWE: Tensor, max_tokens: Tensor, own_F: Tensor | None = None) -> list[Tensor]:
        """Returns, for each n in ``degrees``, how often n chunks must be cut finer to fit on this rank.

        A chunk fits if the rows that it brings to this rank fit into a ring slot, a buffer of fixed size. If
        a chunk does not fit, the batch is cut into more and smaller chunks; `cuts` lists the numbers of
        chunks. The smallest possible chunk is one bin (a range of tokens for which rows are counted), even if
        it does not fit. The results are int64 scalars on the device.

        recv_FWE: (F, W, E_local) int64 on the device: the rows in each of F bins from each of W ranks for
            each expert.
        max_tokens: int64 scalar on the device, the largest number of tokens of any rank.
        own_F: (F,) int64 on the device: the rows of this rank's tokens in each bin. Only read with
            ``total_slack``, if rows stay on this rank.
        """
        rows_GF = recv_FWE.sum((1, 2)).unsqueeze(0)
        if self.own_rank is not None:
            staying_GF = recv_FWE[:, self.own_rank, : self.num_staying].sum(1).unsqueeze(0)
            rows_GF = rows_GF - staying_GF
            if self.total_slack is not None:
                assert own_F is not None
                rows_GF = torch.cat([rows_GF, staying_GF, own_F - staying_GF])
        # For each number of chunks, the most rows of any chunk: rows that arrive; and, with total_slack, rows
        # that stay and rows that are sent. They are cached, because several n are cut into the same chunks.
        largest: dict[int, Tensor] = {}
        depths = []
        for n in self.degrees:
            # In float64, as `slot_rows` does on the host. float32 would round large numbers of tokens.
            limit = (max_tokens.double() * (self.slack * self.top_k / n)).ceil()
            total_limit = None
            if self.total_slack is not None:
                total_limit = (max_tokens.double() * (self.total_slack * self.top_k / n)).ceil()
            depth: Tensor | None = None
            # Finer chunks never have more rows, and the limit stays. So the first cuts overflow, and all
            # later cuts fit: the depth is the number of cuts that overflow. The last cut is not tested,
            # because no cut is finer.
            for chunks in cuts(n, rows_GF.shape[1])[:-1]:
                if chunks not in largest:
                    largest[chunks] = rows_GF.unflatten(1, (chunks, -1)).sum(2).amax(1)
                overflows = (largest[chunks] > limit).any()
                if total_limit is not None:
                    overflows |= largest[chunks][:2].sum() > total_limit
                number = overflows.to(max_tokens.dtype)
                depth = number if depth is None else depth + number
            depths.append(torch.zeros_like(max_tokens) if depth is None else depth)
        return depths

    def agreed(self, depths: Sequence[int]) -> dict[int, int]:
        """Returns `RankCounts.depth`: how often the chunks are cut finer, for each n in ``degrees``.

        In a layer with copies, a batch of one chunk may not fit. It is then cut as a batch of two chunks,
        which needs no more memory:

            one chunk         1 slot for a whole batch in each ring
            several chunks    2 slots for half a batch in each ring

        depths: for each n in ``degrees``, the largest of the depths of all ranks (`depths`).
        """
        depth = dict(zip(self.degrees, depths, strict=False))
        if self.total_slack is not None and depth.get(1):
            depth[1] = 1 + depth[2]
        return depth


@dataclass(frozen=True, kw_only=True)
class Loads:
    """A request to the exchange of row counts: for the load of each expert, and maxima of other numbers.

    The load of an expert is the number of rows that all W ranks together have for it. The deviation of the
    expert says how unevenly the ranks have these rows: it is the largest |load - W * rows of a rank| of any
    rank, and 0 if all ranks have equally many. When the row counts have arrived, each rank knows the loads
    and deviations of its own experts. A max-reduction then gives all of them to all ranks: each rank passes
    its own numbers, and 0 for the experts of other ranks.

    own_place: this rank's number in `Grid.ep`, the ranks over which experts are spread. If each rank has
        E_local experts, expert i of this rank has the number own_place * E_local + i among the E experts. If
        each expert is split over several ranks, these ranks have the same own_place and pass the same loads.
    num_experts: E, the experts of all ranks.
    marks: other non-negative numbers, such as 1 if this rank's experts have changed. All ranks have the same
        number of marks, and get the maximum of each mark over all ranks.

    Example: 2 ranks with 2 experts each, loads (5, 3) and (0, 7). One rank passes (5, 3, 0, 0), the other (0,
    0, 0, 7). Both get the maximum: (5, 3, 0, 7).
    """

    own_place: int
    num_experts: int
    marks: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of values that the loads and marks add to the max-reduction of the exchange."""
        return 2 * self.num_experts + len(self.marks)

    def write(self, recv_FWE: Tensor, out: Tensor) -> None:
        """Writes this rank's input of a max-reduction: numbers of its experts, and the object's ``marks``.

        recv_FWE: (F, W, E_local) int64: the rows in each of F bins from each of W ranks for each expert of
            this rank.
        out: (`size`,) int64, memory for all numbers, filled with zeros. It has the loads of all E experts,
            then the deviations of all E experts, then the marks. The loads and deviations of this rank's
            experts are written at the experts' indices.
        """
        num_ranks, num_local = recv_FWE.shape[1:]
        first = self.own_place * num_local
        rows_WE = recv_FWE.sum(0)
        loads_E = rows_WE.sum(0)
        of_experts = out[: 2 * self.num_experts].view(2, -1)[:, first : first + num_local]
        of_experts[0] = loads_E
        of_experts[1] = (rows_WE * num_ranks - loads_E).abs().amax(0)
        for at, mark in enumerate(self.marks, start=2 * self.num_experts):
            out[at] = mark

    def read(self, counts: RankCounts, agreed: Sequence[int]) -> RankCounts:
        """Returns a copy of the row counts with each expert's load and deviation, and the largest marks.

        Each rank has written the numbers of its own experts and 0 for the other experts (`write`), so the
        maximum over ranks is the number of each expert.

        counts: the row counts.
        agreed: the result of the max-reduction. Its last `size` numbers are the maxima of what `write` wrote.
        """
        numbers = tuple(agreed[len(agreed) - self.size :])
        ends = (self.num_experts, 2 * self.num_experts)
        return replace(
            counts, loads=numbers[: ends[0]], deviations=numbers[slice(*ends)], marks=numbers[ends[1] :]
        )


@functools.lru_cache(maxsize=1024)
def cuts(n: int, bins: int) -> tuple[int, ...]:
    """Returns the numbers of chunks into which n chunks may be cut, in rising order: n, ..., ``bins``.

    Each number is the number before times a factor, so finer chunks are parts of the coarser chunks. The
    factor is the smallest prime factor of (bins / number), which is 2 as long as possible.

    n: number of chunks. It divides ``bins``.
    bins: number of bins, the equal ranges of a rank's tokens by which rows are counted.

    Example: 4 chunks, 48 bins -> (4, 8, 16, 48).
    """
    chunks = [n]
    factor = 2
    while chunks[-1] < bins:
        if bins // chunks[-1] % factor:
            factor += 1
        else:
            chunks.append(chunks[-1] * factor)
    return tuple(chunks)


def slack_with_copies(slack: float, num_ranks: int, *, bypass_local: bool) -> float:
    """Returns the slack of ring slots in a layer where busy experts may have copies on other ranks.

    A ring slot is a buffer of fixed size that chunks use in turn. The slack is the number of rows for which a
    slot has room, divided by the number of rows of a chunk under even routing. The result is

        rows stay on their rank (bypass_local)   slack * (W - 1) / W
        all rows are sent                        slack

    With bypass_local and even routing, 1 / W of a chunk's rows stay on their rank, and take no place in a
    slot.

    - Layers without copies use ``slack`` itself. The places of the rows that stay are a reserve: they take
      additional rows that arrive if the routing is uneven.
    - Layers with copies use the result of this function, which leaves out this reserve. A rank that hosts
      copies receives more rows, and would fill the reserve in every call.

    In both kinds of layers, chunks that have too many rows for a slot are cut into smaller chunks.

    slack: the option ``slack``.
    num_ranks: W, the ranks among which rows are sent.
    bypass_local: whether rows stay on their rank if their expert is there.
    """
    return slack * (num_ranks - 1) / num_ranks if bypass_local else slack


def slot_rows(slack: float, top_k: int, max_tokens: int, n: int) -> int:
    """Returns the number of rows that a ring slot holds: ceil(slack * max_tokens * top_k / n).

    Under even routing, a rank receives max_tokens * top_k / n rows in each of n chunks. A ring slot is a
    buffer with room for ``slack`` times this number. `Slots.depths` computes the same number on the device.

    slack: the number of rows for which a slot has room, divided by the rows of a chunk under even routing.
    top_k: K, the number of experts of a token.
    max_tokens: the largest number of tokens of any rank.
    n: the number of chunks.

    Example: slack 1.25, top_k 2, 1000 tokens in 4 chunks -> 625.
    """
    return math.ceil(max_tokens * (slack * top_k / n))


def with_two(degrees: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of chunks that a layer with copies checks against its ring slots.

    If one chunk does not fit, it is cut into two chunks (`Slots.agreed`). So 2 is added if ``degrees`` has 1
    but not 2.

    degrees: the numbers of chunks that may be chosen.
    """
    return (*degrees, 2) if 1 in degrees and 2 not in degrees else tuple(degrees)


def num_bins(degrees: Sequence[int], num_ranks: int, num_experts: int, slack: float = 1.0) -> int:
    """Returns F = lcm(degrees) * 2**k, the number of bins in which rows are counted.

    Bins are equal ranges of a rank's tokens, and a chunk consists of neighbouring bins. Finer bins allow
    finer chunks. k is the smallest number for which

        F >= lcm(degrees) * num_ranks / min(slack, 1)

    With so many bins, even a batch that sends all rows to one rank can be cut into chunks that fit into ring
    slots (buffers of fixed size). But if F would be larger than `max_bins`, k is smaller: the message of row
    counts must stay small.

    degrees: the numbers of chunks that may be chosen.
    num_ranks: number of ranks of the layer.
    num_experts: number of experts of all ranks.
    slack: the rows of a slot, divided by the rows of a chunk under even routing. Above 1 it counts as 1.

    Example: degrees (4, 2) on 3 ranks -> 16, and with slack 0.6 -> 32.
    """
    finest = math.lcm(*degrees)
    bins = finest
    while bins * min(slack, 1.0) < finest * num_ranks and 2 * bins <= max_bins(num_experts):
        bins *= 2
    return bins


def max_bins(num_experts: int) -> int:
    """Returns the number of bins up to which the function `num_bins` may double its result.

        limit = min(MAX_BINS, MAX_COUNTS // num_experts)

    Bins are equal ranges of a rank's tokens, for which rows are counted. A message of row counts has one
    count for each bin and each expert, so this limit keeps messages small. The number that is doubled is the
    least common multiple of the numbers of chunks. If it is larger than the limit, it stays as it is.

    num_experts: number of experts of all ranks.
    """
    return min(MAX_BINS, MAX_COUNTS // num_experts)


_in_steps = operator.attrgetter("in_steps")
"""Returns whether an exchange sends rows in several collectives (`Exchange.in_steps`).

It is a C function, so it needs no Python call.
"""

MAX_BINS, MAX_COUNTS = 256, 2**16
"""Upper bounds of the number of bins F, and of the number of counts F * E for E experts.

A rank then sends at most 2**16 counts of four bytes, 256 KiB, to all others together. This is less than a
hundredth of 4,096 rows of 4,096 columns with two bytes each.
"""

"""The `HEADER` int32 values before the counts in each message describe the sender:

    tokens       number of its tokens
    fault        number of its `Fault`
    mode         LIFE * `GroupRecord.life_and_passes` plus the bits that are set, such as TRAINING. The life
                 is the number of the default process group in this job. It distinguishes groups of the same
                 name. The passes are a digest of the backward passes that the rank has run
    type, layer  LAYER * the layer's number (`Ranks.number`) + TYPE * the index of the rows' dtype in TYPES,
                 plus SORTS_RESULTS if the rank sorts results
"""

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of rows. A header has their index in this tuple, or 4 for any other dtype."""

LIFE = 8
LAYER = 16
TYPE = 2
"""Factors that leave the lowest bits of a number in a header free for other values.

In the number ``mode``, the lowest three bits are flags. In the last number of the header, the lowest bit is a
flag, and the next three are the index of the rows' dtype.
"""

SORTS_RESULTS = 1
"""The flag in a header's last number: this rank needs memory for results that are sorted by expert.

All else in this number is equal on all ranks. So the maximum of all ranks' numbers shows whether any rank has
set the flag.
"""


TRAINING, GRAD_ENABLED, IN_BACKWARD, WANTS_GRADIENTS = 1, 2, 4, 1 << 30
"""Flags in a header's mode, which say what kind of call a rank makes.

WANTS_GRADIENTS is the highest bit, so the maximum of all ranks' modes shows whether any rank has set it. If
it is set, GRAD_ENABLED is set, too. IN_BACKWARD is set in the second pass of activation checkpointing, which
runs inside a backward pass.
"""


def heading(
    ranks: Ranks,
    num_tokens: int,
    dtype: torch.dtype,
    num_degrees: int,
    *,
    needs_grad: bool,
    training: bool,
    sorts_results: bool,
) -> Heading:
    """Returns the heading of this rank's messages of row counts, for a rank without a fault.

    ranks: the ranks of the layer.
    num_tokens: number of this rank's tokens.
    dtype: dtype of the rows that will be sent.
    num_degrees: the number of degrees (numbers of chunks) for which `Slots` computes whether chunks fit.
    needs_grad: whether this rank wants gradients.
    training: whether the layer is in training mode.
    sorts_results: whether this rank needs memory for results that are sorted by expert.
    """
    dtype_index = TYPES.index(dtype) if dtype in TYPES else len(TYPES)
    kind = LAYER * ranks.number + TYPE * dtype_index + SORTS_RESULTS * sorts_results
    mode = (TRAINING if training else 0) + (ranks.record.life_and_passes * LIFE if ranks.size > 1 else 0)
    if needs_grad:
        mode |= WANTS_GRADIENTS | GRAD_ENABLED
    elif torch.is_grad_enabled():
        mode |= GRAD_ENABLED
    if torch._C._current_graph_task_id() != -1:  # autograd is running a backward pass
        mode |= IN_BACKWARD
    return Heading(ranks.size, num_degrees, (num_tokens, 0, mode, kind))


class EarlyMessages(NamedTuple):
    """Messages of row counts that the routing kernels have written, before the exchange began.

    heading: the numbers in front of the counts, and the sizes of the messages.
    fault: the fault of this rank in the messages: an int64 scalar on the device, or `Fault.NONE`.
    counts_FE: the row counts of the messages.
    memory: the device memory that has the messages (`Messages`).
    """

    heading: Heading
    fault: Tensor | Fault
    counts_FE: Tensor
    memory: Tensor


class CountsExchange:
    """One exchange of row counts. It begins when the object is built and ends with `finish`.

    Between the beginning and `finish` the caller may do other work, such as sorting rows. `finish` contains
    the only host synchronisation of a layer's forward pass.

    The message to each rank is int32. A rank's tokens are cut into F equal ranges, the bins. For each bin the
    message has X counts: the rows for each expert of the receiving rank. One more count follows in layers
    that send a token only once to a rank with several of its experts: the number of rows that are sent.

        header (HEADER)  |  bin 0: X counts  |  bin 1: X counts  |  ...  |  bin F - 1: X counts

    tokens_W: (W,) the number of tokens of each of W ranks, valid after `finish`.
    num_staying: used with ``bypass_local``: for how many of a rank's first experts its rows to itself are not
        sent. The first experts are its own experts; after them come copies of other ranks' experts. None
        means all. The caller may set the number before `finish`.
    """

    tokens_W: Tensor
    num_staying: int | None = None

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
        sorts_results: bool = True,
        loads: Loads | None = None,
        early: EarlyMessages | None = None,
    ) -> None:
        """Sends this rank's row counts to all ranks, without waiting for theirs. A collective.

        grid: the ranks of the layer.
        counts_FE: (F, E) int64 on the rows' device: this rank's rows in each of F bins (equal ranges of its
            tokens) for each of the E experts of all ranks. Dropped rows are not counted.
        num_tokens: number of this rank's tokens.
        fault: a `Fault` that says what is wrong with this rank's call; `Fault.NONE` if nothing is wrong. Or
            its number, an int64 scalar on the rows' device.
        needs_grad: whether this rank wants gradients.
        training: whether the layer is in training mode.
        dtype: dtype of the rows that will be sent.
        traffic: where the bytes of the exchange are counted.
        slots: two limits of the rows that a rank receives: the room in a ring slot (a buffer of fixed size),
            and the free memory of the host. The row counts that `finish` returns say whether all ranks stay
            within both limits (`RankCounts.depth`, `RankCounts.host_shortage`). None checks nothing. It must
            be None on all ranks or on none.
        once_FP: (F, P) int64 on the rows' device: rows for each of P ranks, if a token is sent only once to a
            rank (`RankCounts.sent_once`); else None.
        exchanges: dispatch and combine, if one of them sends rows through other ranks; else ().
        bypass_local: whether rows from a rank to itself are not sent.
        asks_max_rows: whether `RankCounts.max_rows` is computed; the same on all ranks.
        one_row_a_choice: whether this rank has exactly one row for each choice of its tokens. If this is
            False on any rank, `RankCounts.max_rows` is None on all ranks.
        sorts_results: whether this rank needs memory for results that are sorted by expert. If it is True on
            any rank, `RankCounts.sorts_results` is True on all ranks.
        loads: a request for the loads of all experts. It must be None on all ranks or on none.
        early: messages that the routing kernels have already written in this call. They are sent if they have
            the same fault and counts as the other arguments; otherwise new messages are written.
        """
        counts_FPX = counts_FE.view(counts_FE.shape[0], grid.ep.size, -1)
        self._counted_once = once_FP is not None
        if once_FP is not None:
            counts_FPX = torch.cat([counts_FPX, once_FP.unsqueeze(2)], dim=2)
        self._grid = grid
        self._ranks = grid.all
        self._exchanges = exchanges
        self._own_FPX = counts_FPX
        ranks = grid.all
        self._bypass_local = bypass_local
        self._slots = slots
        self._traffic = traffic
        self._asks_max_rows = asks_max_rows
        self._one_row_a_choice = one_row_a_choice
        self._loads = loads
        num_degrees = 0 if slots is None else len(slots.degrees)
        # With ``loads`` a call may exchange counts twice, and the first changes numbers of the heading.
        # `LoadedExchange` also begins twice, but its first exchange ends in an error, and changes none.
        if early is not None and loads is None and early.fault is fault:
            head = early.heading
        else:
            head = heading(
                ranks,
                num_tokens,
                dtype,
                num_degrees,
                needs_grad=needs_grad,
                training=training,
                sorts_results=sorts_results,
            )
        if ranks.size > 1:
            ranks.count_exchange()
        self._received: Tensor | None = None  # the messages of all ranks; None on one rank, which sends none
        self._work: dist.Work | None = None
        self._messages = self._packed(head, fault, early) if counts_FE.is_cuda else None
        if self._messages is None:
            # From pinned memory, because any other copy of Python's numbers to a GPU makes the host wait.
            header = torch.tensor(head.header, dtype=torch.int32, pin_memory=counts_FE.is_cuda)
            header = header.to(counts_FE.device, non_blocking=True)
            if fault is not Fault.NONE:
                header[FAULT] = fault
            self._header = header
            self.tokens_W = header[:1]  # this rank's alone, until `finish`
        if ranks.size > 1:
            if self._messages is None:
                counts_FWX = grid.to_owners(counts_FPX) if grid.is_sharded else counts_FPX
                by_rank = counts_FWX.transpose(0, 1).reshape(ranks.size, -1)
                # 32 bits suffice, because a rank has fewer than 2**31 rows.
                self._sent = torch.cat([header.expand(ranks.size, HEADER), by_rank], dim=1).int()
                self._received = torch.empty_like(self._sent)
            traffic.counts += self._sent[1:].numel() * self._sent.element_size()
            with at_stage("the exchange of row counts", ranks):
                self._work = dist.all_to_all_single(
                    self._received, self._sent, group=ranks.group, async_op=True
                )

    def finish(self) -> RankCounts:
        """Waits for the counts of the other ranks, and returns the row counts of the call.

        Raises FaultError on every rank if any rank has reported a fault, or if the ranks do not make the same
        call.
        """
        if self._work is None:  # a single rank, which waits for no other
            device_FWX, on_host = self._to_host()
        else:
            stage = "the exchange of row counts"
            with at_stage(stage, self._ranks):
                wait_for(self._work, self._ranks.group, self._own_FPX.is_cuda)
            # Ranks in different layers would reduce different numbers in `_agree`, so all ranks raise their
            # error before that. On a GPU they raise it later, because the host would have to wait for the
            # headers.
            assert self._received is not None
            if not self._received.is_cuda:
                self._check(self._received[:, :HEADER])
            with at_stage(stage, self._ranks):
                device_FWX, on_host = self._to_host()
        own, arrived, headers, numbers, *counts = on_host
        max_tokens, fault, mode, kind, host_shortage, max_rows, irregular, *others = numbers.tolist()
        if fault or device_FWX.is_cuda:  # on the CPU several ranks have compared their headers before
            self._check(headers)
        if self._ranks.size > 1 and not self._ranks.number:
            self._ranks.take_number(self._sent[0].nbytes)
        self.tokens_W = headers[:, 0]
        once: dict[str, Any] = {}
        if self._counted_once:  # of each rank's counts, the last is that of rows that are sent only once
            once["sent_once"] = own[..., -1]
            once["received_once"] = arrived[..., -1]
            once["received_once_device"] = device_FWX[..., -1]
            own = own[..., :-1]
            arrived = arrived[..., :-1]
            device_FWX = device_FWX[..., :-1]
        shared = RankCounts(
            send=own,
            recv=arrived,
            recv_device=device_FWX,
            max_tokens=max_tokens,
            needs_grad=mode >= WANTS_GRADIENTS,
            depth={} if self._slots is None else self._slots.agreed(others),
            host_shortage=bool(host_shortage),
            sorts_results=bool(kind & SORTS_RESULTS),
            max_rows=max_rows if self._asks_max_rows and not irregular else None,
            messages=self._messages,
            relayed=(counts[0], counts[1]) if counts else None,
            **once,
        )
        return shared if self._loads is None else self._loads.read(shared, others)

    def _check(self, headers: Tensor) -> None:
        """Raises FaultError on every rank if any rank has a fault, or if the ranks do not make the same call.

        headers: (W, HEADER) on the host, the headers of all ranks.
        """
        codes = headers[:, 1].tolist()
        if any(codes):
            faults = [f"rank {rank}: {Fault(code).text}" for rank, code in enumerate(codes) if code]
            raise FaultError(Fault(max(codes)), "; ".join(faults))
        if self._ranks.size > 1:
            modes, kinds = headers[:, 2:].t().tolist()
            check_headers(modes, kinds, self._ranks)

    def _to_host(self) -> tuple[Tensor, list[Tensor]]:
        """Computes on the device all numbers that the host needs, and copies them to the host.

        With several ranks the method is a collective. The messages of the other ranks must have arrived
        before.

        Returns two values:

        - (F, W, X) on the device: the counts that this rank received from each of W ranks for each of F bins
          (equal ranges of tokens). The X counts are the rows for each expert of this rank. If a token is sent
          only once to a rank, one more count follows: the number of rows that are sent.
        - A list of tensors on the host: the counts that this rank sent; the counts that it received; the
          headers (`HEADER` numbers about each rank, such as its number of tokens and its fault); the numbers
          on which ranks agree (`_agree`); and the numbers of rows that this rank passes on (`_relay`).
        """
        if self._messages is not None:
            return self._by_kernels(self._messages)
        if self._received is None:
            device_FWX = self._own_FPX.long()
            headers = self._header.unsqueeze(0)
        else:
            messages = self._received[:, HEADER:].view(self._ranks.size, -1, self._own_FPX.shape[2])
            device_FWX = messages.transpose(0, 1)
            if self._grid.is_sharded:
                device_FWX = self._grid.by_arrival(device_FWX)
            device_FWX = device_FWX.long()
            headers = self._received[:, :HEADER]
        recv_FWE = device_FWX[..., :-1] if self._counted_once else device_FWX
        agreed = self._agree(recv_FWE, headers)
        relayed = self._relay(device_FWX)
        on_device = [self._own_FPX, device_FWX, headers, agreed, *relayed]
        if not device_FWX.is_cuda:
            return device_FWX, on_device
        # All numbers reach the host in one copy, because each copy is a synchronisation.
        flat = torch.cat([tensor.reshape(-1) for tensor in on_device]).cpu()
        on_host = flat.split([tensor.numel() for tensor in on_device])
        return device_FWX, [values.view_as(tensor) for values, tensor in zip(on_host, on_device, strict=True)]

    def _relay(self, device_FWX: Tensor) -> list[Tensor]:
        """Returns how many rows this rank passes on for other ranks in dispatch and in combine.

        A hierarchical all-to-all sends rows through other ranks, which must know how many rows will arrive.
        Rows are counted in F bins, equal ranges of a rank's tokens.

        Without a hierarchical all-to-all, the result is []. Otherwise it is a list of two int64 tensors on
        the device, the results of `Exchange.relay_counts` for dispatch and for combine. Each is (F, R), with
        R numbers for each bin. R is 0 if this rank passes on no rows.

        device_FWX: (F, W, X), the counts that this rank received from each of W ranks, in the order in which
            rows arrive (`Grid.by_arrival`). The X counts of a bin are rows for each expert of this rank. If a
            token is sent only once to a rank that holds several of its experts, one more count follows: the
            number of rows that are sent.
        """
        if not any(map(_in_steps, self._exchanges)):
            return []
        rows = [self._own_FPX, self._grid.of_own_place(device_FWX)]
        if self._bypass_local:
            rows = [without_own(counts, self._ranks.rank, self.num_staying) for counts in rows]
        rows = [counts[..., -1].contiguous() if self._counted_once else counts.sum(2) for counts in rows]
        send_FP, recv_FP = rows
        dispatch, combine = self._exchanges
        # Results travel the other way: combine sends the rows that dispatch received.
        relayed = (dispatch.relay_counts(send_FP, recv_FP), combine.relay_counts(recv_FP, send_FP))
        return [send_FP.new_empty(send_FP.shape[0], 0) if counts is None else counts for counts in relayed]

    def _agree(self, recv_FWE: Tensor, headers: Tensor) -> Tensor:
        """Returns the numbers on which all ranks must agree: each is the maximum over all ranks.

        The numbers are on the device:

            index   0 .. 3    4               5               6            7, 8, ...
            number  header    host shortage   rows received   irregular    depth of each degree, then `Loads`

            header          the numbers in front of the row counts (`HEADER`)
            host shortage   1 if the host does not have enough memory for the received rows
            irregular       1 if a rank does not have exactly one row for each choice of its tokens
            depth           for each degree, how many more times the chunks must be cut (`Slots.depths`)

        Every rank has received all headers, so their maximum needs no communication. The other numbers are
        computed from the counts. They need a max-reduction, but only if the constructor got `Slots`, `Loads`
        or ``asks_max_rows``; otherwise they are 0.

        recv_FWE: (F, W, E_local) int64: the rows in each of F bins from each of W ranks for each expert of
            this rank.
        headers: (W, HEADER), the headers of all ranks.
        """
        header = headers.amax(0)
        slots = self._slots
        if slots is None and self._loads is None and not self._asks_max_rows:
            return F.pad(header, (0, 3))
        loads = self._loads
        first_load = HEADER + 3 + (0 if slots is None else len(slots.degrees))
        agreed = recv_FWE.new_zeros(first_load + (0 if loads is None else loads.size))
        agreed[:HEADER] = header
        if loads is not None:
            loads.write(recv_FWE, agreed[first_load:])
        if self._asks_max_rows:
            agreed[HEADER + 1] = recv_FWE.sum()
            agreed[HEADER + 2] = not self._one_row_a_choice
        if slots is not None:
            if slots.host_rows is not None:
                agreed[HEADER] = recv_FWE.sum() > slots.host_rows
            if slots.may_cut(recv_FWE.shape[0]):
                own_F = None if slots.total_slack is None else self._own_FPX.sum((1, 2))
                for i, depth in enumerate(slots.depths(recv_FWE, header[0], own_F)):
                    agreed[HEADER + 3 + i] = depth
        if self._ranks.size > 1:
            self._traffic.counts += agreed.numel() * agreed.element_size()
            reduce_to_largest(agreed, self._ranks.group)
        return agreed

    # ---- by kernels, on a GPU

    def _packed(self, head: Heading, fault: Tensor | Fault, early: EarlyMessages | None) -> Messages | None:
        """Returns this rank's messages: the messages that the routing kernels wrote, or new messages.

        New messages are written by a kernel. Returns None, and launches nothing, if the kernel cannot write
        them. It cannot if the layer has any of these:

        - sharded experts;
        - rows that are sent once for several experts;
        - ranks that pass on rows of other ranks;
        - a request for the loads of experts, or copies of experts.

        If it cannot because of sizes, dtype or device, a warning says why, once for each reason.

        head: the numbers in front of the counts, without the fault, and the sizes of the messages.
        fault, early: the arguments of the constructor.
        """
        if self._counted_once or self._grid.is_sharded or any(map(_in_steps, self._exchanges)):
            return None
        if self._loads is not None or (self._slots is not None and self._slots.total_slack is not None):
            return None
        counts_FE = self._own_FPX.flatten(1)
        size = head.num_ranks
        why = refusal(counts_FE, size, head.num_degrees)
        if why is not None:
            # Counts are int64 if PyTorch operators have counted: the gate has no kernels, or was warned of.
            if counts_FE.dtype == torch.int32:
                warn_of_fallback("row counts are exchanged", why)
            return None
        is_early = early is not None and early.heading is head
        if early is not None and is_early and early.counts_FE.data_ptr() == counts_FE.data_ptr():
            messages = Messages.new(counts_FE, size, head.num_degrees, early.memory)
        else:
            messages = Messages.new(counts_FE, size, head.num_degrees)
            messages.pack(head.with_fault(fault), fault if isinstance(fault, Tensor) else None, counts_FE)
        self._sent, self._received = messages.both
        if size == 1:
            self._received = self._sent
        return messages

    def _by_kernels(self, messages: Messages) -> tuple[Tensor, list[Tensor]]:
        """Computes the numbers that the host needs by kernels, and copies them to the host. A collective.

        Returns the same two values as `_to_host`:

        - (F, W, X) on the device, the X counts that this rank received from each of W ranks for each of F
          bins (equal ranges of tokens).
        - A list of tensors on the host: sent counts, received counts, headers, and the numbers on which ranks
          agree.

        messages: the messages of all ranks.
        """
        received_WL = self._received
        assert received_WL is not None
        slots = self._slots
        messages.agree(
            received_WL,
            own_rank=None if slots is None else slots.own_rank,
            host_rows=None if slots is None else slots.host_rows,
            asks_rows=self._asks_max_rows,
            irregular=self._asks_max_rows and not self._one_row_a_choice,
            limits=() if slots is None else slots.ratios,
        )
        if self._ranks.size > 1 and (slots is not None or self._asks_max_rows):
            agreed = messages.agreed
            self._traffic.counts += agreed.numel() * agreed.element_size()
            reduce_to_largest(agreed, self._ranks.group)
        on_host = messages.on_host()
        sent_WL, host_received_WL = on_host.both
        if self._ranks.size == 1:
            host_received_WL = sent_WL
        own = on_host.counts(sent_WL).long()
        arrived = own if self._ranks.size == 1 else on_host.counts(host_received_WL).long()
        return messages.counts(received_WL), [own, arrived, host_received_WL[:, :HEADER], on_host.agreed]


# ---- ranks that make different calls: every rank has all headers, so all ranks raise the same error


def check_headers(modes: Sequence[int], kinds: Sequence[int], ranks: Ranks) -> None:
    """Sets `Ranks.any_trains` and `Ranks.grad_modes_differ`, and compares headers if they differ.

    modes, kinds, ranks: the arguments of `compare_headers`.

    Raises what `compare_headers` raises.
    """
    any_modes = functools.reduce(operator.or_, modes)
    ranks.any_trains = bool(any_modes & TRAINING)
    ranks.grad_modes_differ = False
    if modes.count(modes[0]) < len(modes) or kinds.count(kinds[0]) < len(kinds):
        ranks.grad_modes_differ = bool((any_modes & ~functools.reduce(operator.and_, modes)) & GRAD_ENABLED)
        compare_headers(modes, kinds, ranks)


def compare_headers(modes: Sequence[int], kinds: Sequence[int], ranks: Ranks) -> None:
    """Raises FaultError, on every rank, if the ranks do not make the same call.

    Each rank has sent a header of four numbers in front of its row counts. If some ranks are in training mode
    and others are not, the function only warns.

    The headers also have two numbers of each rank's record:

    - `GroupRecord.life`: 1 for the first default process group of this job, 2 for the second, and so on. The
      function sets this rank's ``life`` to the largest one of all ranks, so that all ranks use the same keys
      in the store.
    - `GroupRecord.passes`, a digest of the rank's backward passes. If it differs, ranks have taken rows of
      one call for rows of another. No collective noticed it, because the messages had equal sizes.

    modes: for each rank, the third number of its header: LIFE * `GroupRecord.life_and_passes` plus the bits
        that are set, such as TRAINING.
    kinds: for each rank, the fourth number of its header: LAYER * the layer's number + TYPE * the index of
        the rows' dtype, and a flag that may differ.
    ranks: the ranks of the layer.
    """
    record = ranks.record
    lives_and_passes = [mode % WANTS_GRADIENTS // LIFE for mode in modes]
    record.life = max(number % MOST_LIVES for number in lives_and_passes)  # now equal on all ranks
    passes_differ = len({number // MOST_LIVES for number in lives_and_passes}) > 1
    # All ranks compare their digests here, and begin new ones, so that one difference raises only once.
    record.passes = 0

    def with_and_without(flag: int) -> tuple[str, str]:
        """Returns two texts for messages: the ranks that have set the flag, and the other ranks.

        A text is "" if there is no rank in it.

        flag: a bit of the mode that each rank has sent with its row counts, such as TRAINING.
        """
        having = [rank for rank, mode in enumerate(modes) if mode & flag]
        lacking = [rank for rank in range(len(modes)) if rank not in having]
        return ranks_in_words(having), ranks_in_words(lacking)

    called = ranks.layer or "a MoELayer"
    in_layer = [kind // LAYER for kind in kinds]
    if len(set(in_layer)) > 1:
        names = [f"number {number}" if number else "a layer at its first call" for number in in_layer]
        raise FaultError(
            Fault.OTHER_CALL,
            "every rank must call the layers of a group in the same order and equally often, but at this "
            f"call the ranks are in different layers, numbered by their first calls: {_by_rank(names)}",
        )
    again, first = with_and_without(IN_BACKWARD)
    if again and first:
        raise FaultError(
            Fault.OTHER_CALL,
            f"{called} runs again for a checkpoint in the backward pass of {again}, and is called in a "
            f"forward pass of {first}: {CURE}",
        )
    if passes_differ:
        raise FaultError(Fault.OTHER_CALL, other_passes(record))
    wanting, _ = with_and_without(WANTS_GRADIENTS)
    _, disabled = with_and_without(GRAD_ENABLED)
    if wanting and disabled:
        raise FaultError(
            Fault.OTHER_CALL,
            f"{called} is called without gradients (torch.no_grad or inference_mode) on {disabled}, and with "
            f"them on {wanting}: all ranks must call it in the same mode, because its backward pass needs "
            "all of them; a rank whose loss is not needed calls the layer with gradients too, and calls "
            "backward",
        )
    types = [kind % LAYER // TYPE for kind in kinds]
    if len(set(types)) > 1:
        names = [(*map(str, TYPES), "another type")[kind] for kind in types]
        rule = f"rows must have one dtype on all ranks (autocast on all or on none): {_by_rank(names)}"
        raise FaultError(Fault.DTYPE, rule)
    training, evaluating = with_and_without(TRAINING)
    if training and evaluating:
        warn_once(
            f"{called} is in training mode on {training} and in evaluation mode on {evaluating}: if this is "
            "not intended, call model.train() or model.eval() on all ranks"
        )


def _by_rank(values: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Returns a list of ranks as a text for messages; "" for no ranks.

    The text names at most eight ranks, and then has the number of the others.

    Examples: (0, 2, 3) -> "ranks 0, 2, 3"; (1,) -> "rank 1".
    """
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
