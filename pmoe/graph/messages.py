"""A layer's messages as functional ``torch.library`` operators, and the start and the wait that each becomes.

`exchange_counts` tells the ranks how many rows come, `exchange_rows` carries them: Lancet's irregular
all-to-all (section 6, Fig. 10), its own gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pmoe.comm.counts import CountsExchange, RankCounts, without_own
from pmoe.comm.ranks import at_stage
from pmoe.graph.operators import parts_of

# ---- the exchange of counts


def start_counts(counts: Tensor, slot: Tensor, dtype: torch.dtype, layer: int) -> CountsExchange:
    parts = parts_of(layer)
    parts.ranks.check_whole()
    return CountsExchange(
        parts.grid,
        counts[:-1].unsqueeze(0),
        num_tokens=slot.shape[0] // parts.spec.top_k,
        fault=counts[-1],
        needs_grad=True,
        training=True,
        dtype=dtype,
        traffic=parts.traffic,
        bypass_local=parts.stages.local,
    )


def wait_counts(exchange: CountsExchange, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found: RankCounts = exchange.finish()
    rank = parts_of(layer).ranks.rank
    own_1E, tokens_W = found.send[0, rank : rank + 1].clone(), exchange.tokens_W.long()
    return without_own(found.send, rank)[0], without_own(found.recv, rank)[0], own_1E, tokens_W


@torch.library.custom_op("pmoe_graph::exchange_counts", mutates_args=())
def exchange_counts(
    counts: Tensor, slot: Tensor, dtype: torch.dtype, layer: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(send_WE, recv_WE, own_1E, tokens_W), on the host: rows for each rank's experts, from each rank, and
    those that stay, which the others leave out; and every rank's tokens. slot: of `order`. Raises FaultError
    on every rank where any rank's routing is at fault."""
    return wait_counts(start_counts(counts, slot, dtype, layer), layer)


@exchange_counts.register_fake
def _(counts: Tensor, slot: Tensor, dtype: torch.dtype, layer: int) -> tuple[Tensor, ...]:
    ranks = parts_of(layer).ranks.size
    experts = (counts.shape[0] - 1) // ranks
    sizes = ((ranks, experts), (ranks, experts), (1, experts), (ranks,))
    return tuple(torch.empty(size, dtype=torch.int64, device="cpu") for size in sizes)


# ---- rows between ranks


def regrouped(rows: Sequence[Tensor], counts_WE: Tensor, *, back: bool) -> list[Tensor]:
    """Rows (N, ...) that lie by (rank, expert), by (expert, rank); ``back``, the other way round."""
    ranks, experts = counts_WE.shape
    group = torch.arange(experts).repeat(ranks).repeat_interleave(counts_WE.flatten())
    index = group.argsort(stable=True)
    if back:
        index = torch.empty_like(index).scatter_(0, index, torch.arange(index.numel()))
    index = index.to(rows[0].device, non_blocking=True)
    return [each.index_select(0, index) for each in rows]


class Exchanging:
    """Rows under way. They come by expert, and leave so on the way home. Arguments are `exchange_rows`'s."""

    out: list[Tensor]

    def __init__(
        self,
        rows: Sequence[Tensor],
        send_WE: Tensor,
        recv_WE: Tensor,
        num_out: int | None,
        returns: bool,
        layer: int,
    ) -> None:
        parts = parts_of(layer)
        self._ranks = parts.ranks
        self._stage = f"{'combine' if returns else 'dispatch'} (layer {layer})"
        way = parts.combine if returns else parts.dispatch
        send, recv = send_WE.sum(1).tolist(), recv_WE.sum(1).tolist()
        self._by_expert = None if returns else recv_WE
        if returns and len(send_WE) > 2:  # of one other rank they lie so already
            rows = regrouped(rows, send_WE, back=True)
        self._rows = [each.contiguous() for each in rows]  # until they have been sent
        self.out = [each.new_empty(sum(recv), *each.shape[1:]) for each in rows]
        with at_stage(self._stage, self._ranks):
            self._works = [
                way.exchange(each, send, out, recv) for each, out in zip(self._rows, self.out, strict=True)
            ]

    def wait(self, layer: int) -> list[Tensor]:
        with at_stage(self._stage, self._ranks):
            for work in self._works:
                if work is not None:
                    work.wait()
        self._rows.clear()
        if self._by_expert is not None and len(self._by_expert) > 2:
            self.out = regrouped(self.out, self._by_expert, back=False)
        return self.out


@torch.library.custom_op("pmoe_graph::exchange", mutates_args=())
def exchange_rows(
    rows: Sequence[Tensor], send_WE: Tensor, recv_WE: Tensor, num_out: int | None, returns: bool, layer: int
) -> list[Tensor]:
    """One all-to-all of each tensor (N, ...). num_out: rows that come, where they are known in the graph.
    returns: whether it is the way home, of rows that lie by expert here; those that come do so too."""
    return Exchanging(rows, send_WE, recv_WE, num_out, returns, layer).wait(layer)


@exchange_rows.register_fake
def _(rows: Sequence[Tensor], send_WE: Tensor, recv_WE: Tensor, num_out: Any, *_: Any) -> list[Tensor]:
    count = torch.library.get_ctx().new_dynamic_size() if num_out is None else num_out
    return [each.new_empty(count, *each.shape[1:]) for each in rows]


def _exchange_setup(ctx: Any, inputs: Any, output: Any) -> None:
    rows, send_WE, recv_WE, _, ctx.returns, ctx.layer = inputs
    ctx.save_for_backward(send_WE, recv_WE)
    ctx.num_rows = rows[0].shape[0]


def _exchange_backward(ctx: Any, grads: list[Tensor]) -> Any:
    send_WE, recv_WE = ctx.saved_tensors
    back = exchange_rows(grads, recv_WE, send_WE, ctx.num_rows, not ctx.returns, ctx.layer)
    return back, None, None, None, None, None


exchange_rows.register_autograd(_exchange_backward, setup_context=_exchange_setup)
