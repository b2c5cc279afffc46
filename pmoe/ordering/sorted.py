"""The sorted ordering: sorts a rank's rows by chunk and expert.

A slot is one of the T * K (token, choice) pairs. A chunk holds the slots of a range of tokens. Its rows that
travel are one contiguous block, sorted by expert and so by destination rank.

Rows whose expert is on this rank stay. They can be cut more coarsely, because nothing has to arrive before
they are computed: a piece holds those of one chunk or of several. With a piece for each chunk, a piece
follows its chunk, so that all rows of a chunk are one block. With fewer pieces, they follow all chunks:

    n = 2, m = 2    chunk 0 travels | piece 0 stays | chunk 1 travels | piece 1 stays | dropped slots
    n = 3, m = 2    chunk 0 travels | chunk 1 travels | chunk 2 travels | piece 0 | piece 1 | dropped slots

The last m - 1 pieces are of one chunk each, the first is of all other chunks: see
`pmoe.schedule.tasks.piece_of`.

Letters: T tokens, K choices, E experts, n chunks, m pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.ordering import Order


def chunk_bounds(num_tokens: int, n: int) -> list[int]:
    """Returns the bounds of n chunks of T tokens: floor(i * T / n) for i = 0 .. n.

    Chunk i has the tokens from bound i up to bound i + 1. Sizes differ by at most one, and some chunks are
    empty if T < n. The bounds of 2 n, 3 n, ... chunks include those of n chunks.

    Example: (10, 4) -> [0, 2, 5, 7, 10].
    """
    return [i * num_tokens // n for i in range(n + 1)]


@dataclass(frozen=True, kw_only=True)
class SortedRows:
    """A permutation of the T * K slots, and its inverse.

    slot: (T * K,) int64, the slots in sorted order, dropped ones last.
    position: (T * K,) int64, the place of each slot in that order.
    """

    slot: Tensor
    position: Tensor


@dataclass(frozen=True)
class Tokens:
    """The tokens of a call's slots.

    count: T, the number of tokens.
    of_slot: (S,) int64 ascending, the token of each slot, if tokens have different numbers of slots (K is 1
        then). None if each token has K slots.
    """

    count: int
    of_slot: Tensor | None = None


def count_rows(
    expert_TK: Tensor, keep_TK: Tensor | None, n: int, num_experts: int, tokens: Tokens | None = None
) -> Tensor:
    """Returns the number of kept slots of each chunk and expert, (n, E) int64. The host does not wait.

    expert_TK: (T, K) int64, global expert indices.
    keep_TK: (T, K) bool, slots that are kept; None keeps all.
    n: number of chunks.
    num_experts: E, experts of all ranks.
    tokens: None if each token has K slots.
    """
    key = expert_TK.reshape(-1)
    chunk = _chunks(expert_TK, n, tokens)
    if chunk is not None:
        key = chunk * num_experts + key
    if keep_TK is not None:
        key = torch.where(keep_TK.reshape(-1), key, n * num_experts)
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
    """Sorts the slots by (chunk, expert), those that stay by (piece, expert), dropped ones last.

    Slots with the same sort key stay in token order.

    expert_TK, keep_TK, n, num_experts, tokens: as in `count_rows`.
    local: the experts whose rows stay on this rank; empty if all rows travel.
    m: number of pieces.
    """
    expert = expert_TK.reshape(-1)
    chunk = _chunks(expert_TK, n, tokens)
    block: Tensor | None = chunk
    if local:
        stays = (expert >= local.start) & (expert < local.stop)
        if m == n:
            block = stays.long() if chunk is None else 2 * chunk + stays
        elif chunk is not None:
            block = torch.where(stays, n + (chunk - (n - m)).clamp(min=0), chunk)  # `piece_of`
    key = expert if block is None else block * num_experts + expert
    if keep_TK is not None:
        key = torch.where(keep_TK.reshape(-1), key, 2 * (n + m) * num_experts)
    slot = key.argsort(stable=True)
    position = torch.empty_like(slot)
    position[slot] = torch.arange(slot.numel(), device=slot.device)
    return SortedRows(slot=slot, position=position)


def _chunks(expert_TK: Tensor, n: int, tokens: Tokens | None) -> Tensor | None:
    """Returns the chunk of each slot, (T * K,) int64; None if there is only one chunk."""
    if n == 1:
        return None
    # Token t is in chunk floor(((t + 1) * n - 1) / T), the inverse of `chunk_bounds`.
    num_tokens, top_k = expert_TK.shape
    if tokens is not None and tokens.of_slot is not None:
        chunk_T = ((tokens.of_slot + 1) * n - 1) // max(tokens.count, 1)
    else:
        ends_T = torch.arange(n - 1, n * num_tokens + n - 1, n, device=expert_TK.device)
        chunk_T = ends_T // max(num_tokens, 1)
    return chunk_T if top_k == 1 else chunk_T.repeat_interleave(top_k)


class SortedOrder(Order):
    """Copies rows by an index, and sums them by an index. It computes what `EinsumOrder` defines."""

    def order(self, tokens_TM: Tensor, token_N: Tensor, out: Tensor) -> None:
        torch.index_select(tokens_TM, 0, token_N, out=out)

    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        if token_S is not None and not rows_NM.shape[0]:
            out.zero_()
        elif token_S is not None:
            # A bag for each token, whose rows are summed in order. index_add_ takes four times as long on a
            # CPU, and on a GPU it adds in any order.
            first_T = torch.searchsorted(token_S, torch.arange(out.shape[0], device=token_S.device))
            out.copy_(F.embedding_bag(row_SK.view(-1), rows_NM, first_T, mode="sum"))
        elif row_SK.shape[1] == 1:
            torch.index_select(rows_NM, 0, row_SK.view(-1), out=out)
        else:
            chosen = rows_NM.index_select(0, row_SK.view(-1)).view(*row_SK.shape, rows_NM.shape[1])
            torch.sum(chosen, dim=1, out=out)
