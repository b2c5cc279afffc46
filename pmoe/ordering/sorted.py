"""The sorted ordering: rows that travel by chunk and expert, and rows that stay by piece and expert.

A slot is one of the T*K (token, choice) pairs. A chunk holds the slots of a range of tokens; what it sends
is one contiguous block, by destination rank. Rows whose expert is on this rank may be cut more coarsely, for
nothing has to arrive before they are computed: a piece holds those of one chunk or of several. Where there is
a piece for each chunk it follows the rows that its chunk sends, so that a chunk's rows are one block;
fewer pieces come after all chunks.

Letters: T tokens, K choices, E experts, n chunks, m pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.ordering import Order


def chunk_bounds(num_tokens: int, n: int) -> list[int]:
    """n + 1 token boundaries floor(i * T / n): sizes differ by one at most, a multiple of n refines n.

    Example: (10, 4) -> [0, 2, 5, 7, 10]; with T < n some chunks are empty.
    """
    return [i * num_tokens // n for i in range(n + 1)]


@dataclass(frozen=True, kw_only=True)
class SortedRows:
    """slot: (T*K,) the slots in sorted order, dropped ones last.
    position: (T*K,) its inverse: where each slot's row stands; a dropped slot's is the number kept or more.
    """

    slot: Tensor
    position: Tensor


@dataclass(frozen=True)
class Tokens:
    """How many tokens the slots are of. of_slot: (S,) ascending, the token of each slot, where tokens do not
    all have K of them; then K is 1."""

    count: int
    of_slot: Tensor | None = None


def count_rows(
    expert_TK: Tensor, keep_TK: Tensor | None, n: int, num_experts: int, tokens: Tokens | None = None
) -> Tensor:
    """Kept rows by chunk and global expert, (n, E) int64, without a host synchronisation."""
    key, chunk = expert_TK.reshape(-1), _chunks(expert_TK, n, tokens)
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
    """Sorts the slots by (chunk, expert), those that stay by (piece, expert), dropped ones last; token order
    within. local: the experts that this rank computes without sending; empty where all rows travel."""
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
    """The chunk of each slot (T*K,), as in `chunk_bounds`; None where there is only one."""
    if n == 1:
        return None
    num_tokens, top_k = expert_TK.shape
    if tokens is not None and tokens.of_slot is not None:
        chunk_T = ((tokens.of_slot + 1) * n - 1) // max(tokens.count, 1)
    else:
        ends_T = torch.arange(n - 1, n * num_tokens + n - 1, n, device=expert_TK.device)
        chunk_T = ends_T // max(num_tokens, 1)
    return chunk_T if top_k == 1 else chunk_T.repeat_interleave(top_k)


class SortedOrder(Order):
    """Rows are copied to where they go, and summed from where they are."""

    def order(self, tokens_TM: Tensor, token_N: Tensor, out: Tensor) -> None:
        torch.index_select(tokens_TM, 0, token_N, out=out)

    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        if token_S is not None and not rows_NM.shape[0]:
            out.zero_()
        elif token_S is not None:
            # One bag of rows a token, summed in order: index_add_ takes four times as long on a CPU, and on a
            # GPU adds in any order.
            first_T = torch.searchsorted(token_S, torch.arange(out.shape[0], device=token_S.device))
            out.copy_(F.embedding_bag(row_SK.view(-1), rows_NM, first_T, mode="sum"))
        elif row_SK.shape[1] == 1:
            torch.index_select(rows_NM, 0, row_SK.view(-1), out=out)
        else:
            chosen = rows_NM.index_select(0, row_SK.view(-1)).view(*row_SK.shape, rows_NM.shape[1])
            torch.sum(chosen, dim=1, out=out)
