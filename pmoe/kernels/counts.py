"""Launches of the kernels with which ranks exchange row counts on a GPU (cuda/counts).

Three launches replace some thirty PyTorch operations:

    pack     writes this rank's messages: for each rank a header and the row counts of that rank's experts.
             The kernels of `pmoe.kernels.route` do the same if they get the header (`Heading`)
    agree    computes, from the messages that arrived, the numbers that this rank puts into a
             max-reduction. The reduction then gives all ranks the same numbers, for example the largest
             number of tokens of a rank
    order    computes the orders of rows and of their routing weights, and where the rows of each expert end

`pmoe.comm.counts` computes these numbers by PyTorch expressions, and explains each of them.

Letters: W ranks, F bins (equal ranges of a rank's tokens, by which rows are counted), E experts of a rank, L
= HEADER + F * E numbers of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.extension import path

HEADER = 4
"""Number of int32 values that precede the counts in a message: kHeader of cuda/counts/layout.h."""

FAULT = 1
"""Index in a header: header[FAULT] is the code of the sender's fault. kFault of cuda/counts/layout.h."""

MAX_RANKS, MAX_BINS, MAX_DEGREES = 1 << 11, 1 << 12, 16
"""The most ranks, bins and degrees (numbers of chunks) that the kernels can handle.

They are the constants kMost... of cuda/counts/layout.h.
"""


def refusal(counts_FE: Tensor, num_ranks: int, num_degrees: int) -> str | None:
    """Returns the reason why the kernels cannot exchange these row counts; None if they can.

    counts_FE: (F, W * E), this rank's rows in each of F bins (equal ranges of its tokens) for each of E
        experts of each of W ranks.
    num_ranks: W.
    num_degrees: the number of degrees that may be chosen; a degree is a number of chunks. For each degree the
        ranks agree on a number: how many more times the chunks must be cut to fit into every rank's buffers.
    """
    if counts_FE.dtype != torch.int32 or not counts_FE.is_contiguous():
        return f"counts of dtype {counts_FE.dtype} must be contiguous {torch.int32}"
    if num_ranks > MAX_RANKS or counts_FE.shape[0] > MAX_BINS or num_degrees > MAX_DEGREES:
        return (
            f"{num_ranks} ranks, {counts_FE.shape[0]} bins and {num_degrees} degrees must be at most "
            f"{MAX_RANKS}, {MAX_BINS} and {MAX_DEGREES}"
        )
    return path(counts_FE.device)[1]


class Heading(NamedTuple):
    """The header of a rank's messages of row counts, and the sizes with which kernels write the messages.

    num_ranks: W.
    num_degrees: the number of degrees that may be chosen; a degree is a number of chunks. For each degree the
        ranks agree on a number: how many more times the chunks must be cut to fit into every rank's buffers.
    header: the HEADER numbers in front of each message. The second is the code of a fault of this rank.
    """

    num_ranks: int
    num_degrees: int
    header: tuple[int, ...]

    def with_fault(self, fault: int | Tensor) -> list[int]:
        """Returns the header with the code of a fault.

        If the code is a tensor, the header has 0 in its place, and the kernel writes the code.
        """
        header = list(self.header)
        header[FAULT] = 0 if isinstance(fault, Tensor) else int(fault)
        return header


class Sent(NamedTuple):
    """This rank's rows in sorted order, with their routing weights.

    Some rows are sent to other ranks, others stay on this rank.

    slot: (S,) int32, the (token, choice) pair of each row, sorted by chunk, then by rank. Rows that stay on
        this rank are the last rows of their chunk.
    weight: (T * K,) the routing weight of each pair, in the order of the pairs. The kernel "order" puts the
        weights into the order in which they are sent; None if this is not needed. Kernels read float32 only.
    """

    slot: Tensor
    weight: Tensor | None = None


class RowOrder(NamedTuple):
    """The results of the kernel "order" for the n chunks of a pass.

    ends: (n + pieces, E) int32, where each expert's rows end. The first n lines are for the rows that arrive
        in each chunk. The other lines are for the pieces: blocks of rows that stay on this rank.
    of_chunks: (N,) int32, for each chunk the index that sorts its arrived rows (`Chunk.regroup`), one chunk
        after the other; None if it was not wanted.
    of_all: (N,) int64, the index that sorts the routing weights of all rows, which arrive in one message for
        all chunks (`WeightMessage.regroup`); None if it was not wanted.
    number_slot: (S,) int64, the (token, choice) pairs of `Sent.slot` in the order in which their routing
        weights are sent: sorted by destination rank, then by chunk. The pairs of rows that stay on this rank
        come last. None if it was not wanted.
    number_weight: (S,) float32, the routing weights of the pairs in ``number_slot``; None if not wanted.
    zeros: (num_zeros,) int32 zeros, for counters of tiles.
    """

    ends: Tensor
    of_chunks: Tensor | None
    of_all: Tensor | None
    number_slot: Tensor | None
    number_weight: Tensor | None
    zeros: Tensor


class Messages(NamedTuple):
    """The messages of one exchange of row counts, and the agreed numbers, in one allocation.

    The agreed numbers are the results of a max-reduction, which are equal on all ranks. A single copy brings
    the messages and the agreed numbers to the host.

    memory: one int64 tensor. The agreed numbers come first, as int64. Then come the W messages that are sent,
        and the W messages that arrive. Their memory is read as int32: a message has L = HEADER + F * E
        numbers, a header and then the F * E row counts.
    num_agreed: the number of agreed numbers.
    sizes: the tuple (W, F, E): ranks, bins (equal ranges of tokens), experts of a rank.
    """

    memory: Tensor
    num_agreed: int
    sizes: tuple[int, int, int]

    @staticmethod
    def new(counts_FE: Tensor, num_ranks: int, num_degrees: int, memory: Tensor | None = None) -> Messages:
        """Returns messages on the device of the counts, uninitialised unless their memory is given.

        counts_FE: (F, W * E), this rank's rows in each of F bins (equal ranges of its tokens) for each of E
            experts of each of W ranks.
        num_ranks: W.
        num_degrees: the number of degrees that may be chosen; a degree is a number of chunks. For each degree
            the ranks agree on a number: how many more times the chunks must be cut to fit into every rank's
            buffers.
        memory: the memory of messages of these sizes; None allocates it.
        """
        num_bins = counts_FE.shape[0]
        num_experts = counts_FE.shape[1] // num_ranks
        num_agreed = HEADER + 3 + num_degrees
        if memory is None:
            numbers = num_agreed + num_ranks * (HEADER + num_bins * num_experts)
            memory = torch.empty(numbers, dtype=torch.int64, device=counts_FE.device)
        return Messages(memory, num_agreed, (num_ranks, num_bins, num_experts))

    @property
    def agreed(self) -> Tensor:
        """The numbers that all ranks have after the max-reduction, (HEADER + 3 + number of degrees,) int64.

        Each is the largest number of any rank:

            how many               what
            HEADER                 the numbers of the header that each rank puts in front of its messages
            1                      1 if a rank lacks host memory for the rows that it receives, else 0
            1                      rows that a rank receives; 0 if this was not asked
            1                      1 if some choices of a rank's tokens have no row, or several, else 0
            one for each degree    how often chunks must be cut to fit into buffers (degree: number of chunks)
        """
        return self.memory[: self.num_agreed]

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """The messages that are sent and the messages that arrive, (W, L) int32 each.

        W is the number of ranks. A message has L numbers.
        """
        halves = self.memory[self.num_agreed :].view(torch.int32).view(2, self.sizes[0], -1)
        return halves[0], halves[1]

    def on_host(self) -> Messages:
        """Returns a copy on the host. The host waits for the device."""
        return Messages(self.memory.cpu(), self.num_agreed, self.sizes)

    def counts(self, messages_WL: Tensor) -> Tensor:
        """Returns the row counts of messages without their headers, (F, W, E): a view of ``messages_WL``.

        There is a count for each of F bins (equal ranges of tokens), W ranks, and E experts of a rank.

        messages_WL: (W, L) int32, one message of L numbers for each rank, or from each rank.
        """
        num_ranks, num_bins, num_experts = self.sizes
        counts_WFE = messages_WL[:, HEADER:].view(num_ranks, num_bins, num_experts)
        return counts_WFE.transpose(0, 1)

    def pack(self, header: Sequence[int], fault: Tensor | None, counts_FE: Tensor) -> None:
        """Launches the kernel that writes this rank's messages.

        header: the HEADER numbers in front of each message. The second is the code of a fault of this rank.
        fault: the code of the fault, an int64 scalar on the device; None to send the code in ``header``.
        counts_FE: (F, W * E) int32, contiguous: the row counts to send, for each of F bins (equal ranges of
            tokens) and each of E experts of W ranks.
        """
        sent_WL, _ = self.both
        checked = {} if fault is None else {"fault": fault.data_ptr()}
        extension.module().counts_pack(
            **self._where(), header=list(header), counts=counts_FE.data_ptr(), sent=sent_WL.data_ptr(),
            **checked,
        )  # fmt: skip

    def agree(
        self,
        received_WL: Tensor,
        *,
        own_rank: int | None,
        host_rows: int | None,
        asks_rows: bool,
        irregular: bool,
        limits: Sequence[tuple[int, float]],
    ) -> None:
        """Launches the kernel that computes this rank's input of the max-reduction.

        After the max-reduction the agreed numbers are equal on all ranks.

        received_WL: (W, L) int32, the messages that arrived from W ranks, L numbers each.
        own_rank: this rank, if rows that it sends to itself do not count for ``limits``; else None.
        host_rows: the number of rows for which this rank has host memory; None if this is not checked.
        asks_rows: whether ranks must know the largest number of rows of a rank.
        irregular: whether some choices of this rank's tokens have no row, or more than one.
        limits: for each degree (number of chunks) a pair (degree, ratio): a chunk may bring a rank at most
            ratio * (largest number of tokens of any rank) rows.
        """
        extension.module().counts_agree(
            **self._where(), received=received_WL.data_ptr(), agreed=self.memory.data_ptr(),
            own_rank=-1 if own_rank is None else own_rank, host_rows=-1 if host_rows is None else host_rows,
            asks_rows=asks_rows, irregular=irregular, degrees=list(limits),
        )  # fmt: skip

    def order(
        self,
        n: int,
        num_bins: int,
        own_rank: int | None,
        num_pieces: int,
        num_rows: int | None,
        sent: Sent | None,
        num_zeros: int = 0,
    ) -> RowOrder:
        """Launches the kernel that computes the orders of rows and of their routing weights.

        n: number of chunks.
        num_bins: the number of bins (equal ranges of tokens) by which an expert's rows of a chunk are sorted.
            This number is a multiple of n, and divides the number of bins in which rows were counted.
        own_rank: this rank, if rows that it sends to itself do not arrive by a message; else None.
        num_pieces: the number of blocks of rows that stay on this rank, at most n.
        num_rows: N, the number of rows that arrive; None if their order is not wanted.
        sent: this rank's sorted rows; None if their routing weights need not be put into an order.
        num_zeros: the number of zeros to write into `RowOrder.zeros`.
        """
        num_ranks, _, num_experts = self.sizes
        sent_WL, received_WL = self.both
        if num_ranks == 1:  # a single rank sends no messages
            received_WL = sent_WL
        ends = received_WL.new_empty(n + num_pieces, num_experts)
        zeros = received_WL.new_empty(num_zeros)
        of_chunks = of_all = number_slot = number_weight = None
        fields: dict[str, object] = {}
        if num_rows:
            of_chunks = received_WL.new_empty(num_rows)
            of_all = received_WL.new_empty(num_rows, dtype=torch.int64)
            fields |= {"of_chunks": of_chunks.data_ptr(), "of_all": of_all.data_ptr()}
        if sent is not None:
            number_slot = sent.slot.new_empty(sent.slot.numel(), dtype=torch.int64)
            fields |= {"slot": sent.slot.data_ptr(), "number_slot": number_slot.data_ptr()}
            if sent.weight is not None and sent.weight.dtype == torch.float32:
                number_weight = sent.weight.new_empty(sent.slot.numel())
                fields |= {"weight": sent.weight.data_ptr(), "number_weight": number_weight.data_ptr()}
        extension.module().counts_order(
            **self._where(), received=received_WL.data_ptr(), sent=sent_WL.data_ptr(), chunks=n,
            joined=self.sizes[1] // num_bins, own_rank=-1 if own_rank is None else own_rank,
            pieces=num_pieces, ends=ends.data_ptr(), zeros=zeros.data_ptr(), num_zeros=num_zeros, **fields,
        )  # fmt: skip
        return RowOrder(ends, of_chunks, of_all, number_slot, number_weight, zeros)

    def _where(self) -> dict[str, object]:
        """Returns the arguments of all launches: the device's number, the current stream and the sizes."""
        device = self.memory.device
        stream = torch.cuda.current_stream(device).cuda_stream
        return {"device": device.index, "stream": stream, "sizes": list(self.sizes)}
