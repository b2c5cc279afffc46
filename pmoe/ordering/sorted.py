"""The sorted ordering: sorts a rank's rows by chunk (micro-batch), then by expert.

A slot is one of a rank's T * K (token, choice) pairs. A slot that the gate keeps has a row, the copy of its
token for the chosen expert; a dropped slot has none. Chunk i has the slots of a range of consecutive tokens.
Its rows are of two sorts:

- rows for experts on other ranks are sent. They are one contiguous block, sorted by expert. Each rank has
  consecutive experts, so the block is also sorted by destination rank;
- local rows, for experts on this rank, are not sent. They do not wait for other ranks, so they may be
  computed in m <= n parts. A part is called a piece: piece 0 has the local rows of the first n - m + 1
  chunks, and each other piece has the local rows of one chunk (`pmoe.schedule.tasks.piece_of`).

If m = n, each piece follows the sent rows of its chunk, so that all rows of a chunk are contiguous. If m < n,
all pieces follow the last chunk. Dropped slots come last:

    n = 2 chunks, m = 2 pieces   chunk 0 sent | piece 0 | chunk 1 sent | piece 1 | dropped
    n = 3 chunks, m = 2 pieces   chunk 0 sent | chunk 1 sent | chunk 2 sent | piece 0 | piece 1 | dropped

Letters: T tokens, K choices of a token, E experts of all ranks, n chunks, m pieces. Some gates give tokens
different numbers of experts; S is then the number of slots of all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels import permute
from pmoe.kernels.operands import VECTOR_BYTES
from pmoe.ordering.base import Order
from pmoe.warn import warn_of_fallback

MAX_INT16 = 2**15 - 1


def chunk_bounds(num_tokens: int, n: int) -> list[int]:
    """Returns the bounds at which T tokens are divided into n chunks: floor(i * T / n) for i = 0 .. n.

    Chunk i has the tokens from bound i up to but not including bound i + 1. The numbers of tokens of any two
    chunks differ by at most one. If T < n, some chunks are empty. The bounds of 2 n, 3 n, ... chunks include
    those of n chunks, so each chunk can be divided further without moving tokens between chunks.

    num_tokens: T, the number of this rank's tokens.
    n: number of chunks.

    Example: (10, 4) -> [0, 2, 5, 7, 10].
    """
    return [i * num_tokens // n for i in range(n + 1)]


@dataclass(frozen=True, kw_only=True)
class SortedRows:
    """The order in which (token, choice) pairs are dispatched, and the inverse of this order.

    A pair is called a slot. For T tokens with K choices each, its number is token * K + choice.

    slot: (T * K,) int64, the numbers of the slots in sorted order, dropped slots last.
    position: (T * K,) int64, the index of each slot in ``slot``: slot[position[s]] = s.

    Both are int32 if the kernels of `pmoe.kernels.route` have sorted the slots.
    """

    slot: Tensor
    position: Tensor


@dataclass(frozen=True)
class Tokens:
    """Number of tokens, and which token each (token, choice) pair belongs to. A pair is called a slot.

    count: T, the number of tokens.
    of_slot: None if all tokens have the same number of experts. Else (S,) int64 ascending, the token of each
        of the S slots. The expert indices are then (S, 1).
    """

    count: int
    of_slot: Tensor | None = None


def count_rows(
    expert_TK: Tensor, keep_TK: Tensor | None, n: int, num_experts: int, tokens: Tokens | None = None
) -> Tensor:
    """Returns the number of rows of each chunk for each expert, (n, E) int64. Dropped choices have no row.

    The result is on the device, and the host does not wait for it.

    expert_TK: (T, K) int64 or int32, global expert indices of the K choices of T tokens. If tokens have
        different numbers of experts: (S, 1), one line for each of the S (token, choice) pairs.
    keep_TK: bool, of the shape of expert_TK, False for choices that are dropped; None keeps all.
    n: number of chunks, which are ranges of consecutive tokens.
    num_experts: E, the number of experts of all ranks.
    tokens: the token of each line of expert_TK, if tokens have different numbers of experts; None if line t
        is token t.
    """
    key = expert_TK.reshape(-1).long()
    chunk = _chunks(expert_TK, n, tokens)
    if chunk is not None:
        key = chunk * num_experts + key
    if keep_TK is not None:
        key = torch.where(keep_TK.reshape(-1), key, n * num_experts)
    # A mode that records operators, such as a selective checkpoint, would not see NumPy's.
    if type(key) is Tensor and key.device.type == "cpu" and not torch._C._len_torch_dispatch_stack():
        counts = torch.from_numpy(np.bincount(key.numpy(), minlength=n * num_experts + 1))
    else:
        counts = torch.zeros(n * num_experts + 1, dtype=torch.int64, device=key.device)
        counts.scatter_add_(0, key, torch.ones_like(key))
    return counts[:-1].view(n, num_experts)


def sort_rows(
    expert_TK: Tensor,
    keep_TK: Tensor | None,
    n: int,
    num_experts: int,
    local: range,
    m: int,
    tokens: Tokens | None = None,
) -> SortedRows:
    """Sorts the (token, choice) pairs in the order of their rows: by chunk, then by expert.

    Rows for experts on this rank are not sent. They are cut into m parts, called pieces: piece 0 has the rows
    of the first n - m + 1 chunks, and each other piece has the rows of one chunk. Each piece is sorted by
    expert, too. If m = n, piece i follows the sent rows of chunk i; if m < n, all pieces follow the last
    chunk. Pairs of the same chunk or piece and the same expert stay in token order. Dropped pairs come last:

        n = 2, m = 2   chunk 0 sent | piece 0 | chunk 1 sent | piece 1 | dropped
        n = 3, m = 2   chunk 0 sent | chunk 1 sent | chunk 2 sent | piece 0 | piece 1 | dropped

    expert_TK: (T, K) int64, global expert indices of the K choices of T tokens. If tokens have different
        numbers of experts: (S, 1), one line for each of the S (token, choice) pairs.
    keep_TK: bool, of the shape of expert_TK, False for choices that are dropped; None keeps all.
    n: number of chunks, which are ranges of consecutive tokens.
    num_experts: E, the number of experts of all ranks.
    local: the experts on this rank; empty if their rows are to be sent like all others.
    m: number of pieces, at most n.
    tokens: the token of each line of expert_TK, if tokens have different numbers of experts; None if line t
        is token t.
    """
    expert = expert_TK.reshape(-1)
    chunk = _chunks(expert_TK, n, tokens)
    block: Tensor | None = chunk
    if local and (len(local) < num_experts or m < n):  # else all rows stay, in the order of their chunks
        stays = (expert >= local.start) & (expert < local.stop)
        if m == n:
            block = stays.long() if chunk is None else 2 * chunk + stays
        elif chunk is not None:
            block = torch.where(stays, n + (chunk - (n - m)).clamp(min=0), chunk)  # as `piece_of` does
    key = expert if block is None else block * num_experts + expert
    if keep_TK is not None:
        key = torch.where(keep_TK.reshape(-1), key, 2 * (n + m) * num_experts)
    if type(key) is Tensor and key.device.type == "cpu" and 2 * (n + m) * num_experts <= MAX_INT16:
        # numpy sorts keys of 16 bits digit by digit, in a fifth of the time of torch's sort. The copy lies in
        # memory of torch, so that its bytes are counted.
        slot = torch.from_numpy(np.argsort(key.to(torch.int16).numpy(), kind="stable")).clone()
    else:
        slot = key.argsort(stable=True)
    position = torch.empty_like(slot)
    if type(slot) is Tensor and slot.device.type == "cpu":
        position.numpy()[slot.numpy()] = np.arange(slot.numel())
    else:
        position.scatter_(0, slot, torch.arange(slot.numel(), device=slot.device))
    return SortedRows(slot=slot, position=position)


def _chunks(expert_TK: Tensor, n: int, tokens: Tokens | None) -> Tensor | None:
    """Returns the chunk of each (token, choice) pair; None if there is only one chunk.

    The result is (T * K,) int64, or (S,) if tokens have different numbers of experts.

    expert_TK: (T, K) for T tokens with K choices each. If tokens have different numbers of experts: (S, 1),
        one row for each of the S (token, choice) pairs. Only its shape and device are used.
    n: number of chunks.
    tokens: the token to which each row of expert_TK belongs, if tokens have different numbers of experts.
        None if row t belongs to token t.
    """
    if n == 1:
        return None
    # Token t is in chunk floor(((t + 1) * n - 1) / T), the inverse of `chunk_bounds`.
    num_tokens, top_k = expert_TK.shape
    if tokens is not None and tokens.of_slot is not None:
        chunk_T = ((tokens.of_slot + 1) * n - 1) // max(tokens.count, 1)
    elif expert_TK.device.type == "cpu":  # numpy takes a third of the time of torch if there are few tokens
        chunk_T = torch.from_numpy(np.arange(n - 1, n * num_tokens + n - 1, n) // max(num_tokens, 1))
    else:
        ends_T = torch.arange(n - 1, n * num_tokens + n - 1, n, device=expert_TK.device)
        chunk_T = ends_T // max(num_tokens, 1)
    return chunk_T if top_k == 1 else chunk_T.repeat_interleave(top_k)


class SortedOrder(Order):
    """Copies tokens into rows and sums rows with index_select: the default, and faster than `EinsumOrder`.

    If `runs_kernels` returns True, the engine uses the CUDA kernels of `pmoe.kernels.permute` in place of
    these methods. The kernels take the positions of a token's rows, read each token once, and add in float32.
    """

    def runs_kernels(self, rows: Tensor, top_k: int) -> bool:
        """Returns whether the kernels of `pmoe.kernels.permute` can copy and sum rows like ``rows``.

        If rows on a GPU do not suit the kernels, a warning says why, once for each reason.

        rows: a tensor (..., M), M = d_model. Only its width, dtype and device matter.
        top_k: K, the number of choices of a token.
        """
        columns = rows.shape[-1]
        if not rows.is_cuda or columns == 0:  # without columns there is nothing to copy
            return False
        row_bytes = columns * rows.element_size()
        why = permute.refusal(rows.device, rows.dtype, top_k)
        if why is None and row_bytes % VECTOR_BYTES:
            why = f"rows of {columns} columns have {row_bytes} bytes, no multiple of {VECTOR_BYTES}"
        if why is not None:
            warn_of_fallback("rows are copied and summed", why)
        return why is None

    def order(self, tokens_TM: Tensor, token_N: Tensor, out: Tensor) -> None:
        torch.index_select(tokens_TM, 0, token_N, out=out)

    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        if token_S is not None and not rows_NM.shape[0]:
            out.zero_()
        elif token_S is not None:
            # embedding_bag sums the rows of each token in order. index_add_ would take four times as long on
            # a CPU, and would add in any order on a GPU.
            first_T = torch.searchsorted(token_S, torch.arange(out.shape[0], device=token_S.device))
            out.copy_(F.embedding_bag(row_SK.view(-1), rows_NM, first_T, mode="sum"))
        elif row_SK.shape[1] == 1:
            torch.index_select(rows_NM, 0, row_SK.view(-1), out=out)
        elif rows_NM.is_cuda or rows_NM.element_size() < 4:
            chosen = rows_NM.index_select(0, row_SK.view(-1)).view(*row_SK.shape, rows_NM.shape[1])
            torch.sum(chosen, dim=1, out=out)
        else:
            # One operation reads each row once, and adds the rows of a token in the order of its choices.
            out.copy_(F.embedding_bag(row_SK, rows_NM, mode="sum"))


def copies_bytes(order: Order) -> bool:
    """Returns whether an order's method `Order.order` copies rows of any dtype, also messages of bytes.

    `SortedOrder` and its subclasses do. A user's class, or a subclass with an `order` of its own, may compute
    with the values of rows.
    """
    return type(order).order is SortedOrder.order
