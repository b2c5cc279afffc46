"""All-to-alls of a MoELayer as functional ``torch.library`` operators, each with a start and a wait.

Together they are Lancet's irregular all-to-all (section 6, Fig. 10), in which the routing decides how many
rows each rank sends:

    exchange_counts   every rank gets the numbers of rows that it will receive
    exchange_rows     sends the rows; its gradient is the same exchange in the other direction

Each of the two is one operator when a graph is traced. `pmoe.graph.lower` then replaces the operator by a
start and a wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pmoe.comm.counts import CountsExchange, RankCounts, without_own
from pmoe.comm.failures import at_stage, check_whole
from pmoe.graph.operators import modules_of

# ---- the exchange of counts


def start_counts(counts: Tensor, slot: Tensor, dtype: torch.dtype, layer: int) -> CountsExchange:
    """Starts the exchange of row counts, without waiting for it. Returns the exchange, for `wait_counts`.

    counts: (E + 1,), as `order` returns them: this rank's number of rows for each of the E experts of all
        ranks. The last element is the code of a fault in this rank's routing, or 0 for no fault.
    slot: (S,), the sorted slots (a slot is one choice of one token). Only their number S is read.
    dtype: dtype of the rows that will be sent.
    layer: the number that stands for the layer (`number_of`).
    """
    modules = modules_of(layer)
    check_whole(modules.ranks)
    return CountsExchange(
        modules.grid,
        counts[:-1].unsqueeze(0),
        num_tokens=slot.shape[0] // modules.options.top_k,
        fault=counts[-1],
        needs_grad=True,
        training=True,
        dtype=dtype,
        traffic=modules.traffic,
        bypass_local=modules.stages.local,
    )


def wait_counts(exchange: CountsExchange, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Waits until the row counts have arrived on the host. Returns the four results of `exchange_counts`.

    exchange: the exchange that `start_counts` began.
    layer: the number that stands for the layer (`number_of`).
    """
    counts: RankCounts = exchange.finish()
    rank = modules_of(layer).ranks.rank
    own_1E = counts.send[0, rank : rank + 1].clone()
    tokens_W = exchange.tokens_W.long()
    return without_own(counts.send, rank)[0], without_own(counts.recv, rank)[0], own_1E, tokens_W


@torch.library.custom_op("pmoe_graph::exchange_counts", mutates_args=())
def exchange_counts(
    counts: Tensor, slot: Tensor, dtype: torch.dtype, layer: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exchanges row counts among the ranks; returns four int64 tensors on the host.

    E is the number of experts of all ranks, E_local of one rank, and W the number of ranks. S is the number
    of slots (a slot is one choice of one token).

    counts: (E + 1,), as `order` returns them: this rank's number of rows for each expert. The last element is
        the code of a fault in this rank's routing, or 0 for no fault.
    slot: (S,), the sorted slots, as `order` returns them. Only the length is read: it gives the number of
        tokens.
    dtype: dtype of the rows that will be sent.
    layer: the number that stands for the layer (`number_of`).

    Returns

        send_WE   (W, E_local) number of rows that this rank sends to each expert of each rank; 0 to itself
        recv_WE   (W, E_local) number of rows that come from each rank for each expert of this rank; 0 from
                  itself
        own_1E    (1, E_local) number of rows that stay on this rank, for each of its experts
        tokens_W  (W,) number of tokens of each rank

    If the routing of any rank has a fault, such as logits that are not finite, FaultError is raised on every
    rank.
    """
    return wait_counts(start_counts(counts, slot, dtype, layer), layer)


@exchange_counts.register_fake
def _(counts: Tensor, slot: Tensor, dtype: torch.dtype, layer: int) -> tuple[Tensor, ...]:
    ranks = modules_of(layer).ranks.size
    experts = (counts.shape[0] - 1) // ranks
    sizes = ((ranks, experts), (ranks, experts), (1, experts), (ranks,))
    return tuple(torch.empty(size, dtype=torch.int64, device="cpu") for size in sizes)


# ---- rows between ranks


def regrouped(rows: Sequence[Tensor], counts_WE: Tensor, *, back: bool) -> list[Tensor]:
    """Sorts rows from the order (rank, expert) into the order (expert, rank), or back.

    Rows arrive from an all-to-all sorted by rank. Experts need them sorted by expert. N is the number of
    rows, W the number of ranks, E_local the number of experts of one rank.

    rows: tensors (N, ...). The rows of all tensors have the same order.
    counts_WE: (W, E_local), number of rows for each pair of rank and expert.
    back: False sorts from (rank, expert) to (expert, rank), True from (expert, rank) to (rank, expert).

    Returns the sorted tensors.
    """
    ranks, experts = counts_WE.shape
    expert_of_row = torch.arange(experts).repeat(ranks).repeat_interleave(counts_WE.flatten())
    index = expert_of_row.argsort(stable=True)
    if back:
        index = torch.empty_like(index).scatter_(0, index, torch.arange(index.numel()))
    index = index.to(rows[0].device, non_blocking=True)
    return [tensor.index_select(0, index) for tensor in rows]


class Exchanging:
    """An all-to-all of rows that has been started. The constructor starts it, `wait` returns received rows.

    The constructor has the same arguments as the operator `exchange_rows`, which starts an exchange and waits
    for it:

    rows: the tensors to send, (N, ...) each for N rows.
    send_WE, recv_WE: (W, E_local) int64 on the host, numbers of rows to and from each of W ranks, for each of
        E_local experts of a rank.
    num_out: not read. Only tracing needs this argument.
    returns: True for a combine, False for a dispatch.
    layer: the number that stands for the layer (`number_of`).

    The only attribute is

    out: the rows that arrive, one tensor for each tensor that is sent. They are complete only after `wait`.
    """

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
        modules = modules_of(layer)
        self._ranks = modules.ranks
        self._stage = f"{'combine' if returns else 'dispatch'} (layer {layer})"
        exchange = modules.combine if returns else modules.dispatch
        send, recv = send_WE.sum(1).tolist(), recv_WE.sum(1).tolist()
        self._by_expert = None if returns else recv_WE
        # With two ranks all rows come from the one other rank, so the orders (rank, expert) and (expert,
        # rank) are the same.
        if returns and len(send_WE) > 2:
            rows = regrouped(rows, send_WE, back=True)
        self._rows = [tensor.contiguous() for tensor in rows]  # kept alive until they have been sent
        self.out = [tensor.new_empty(sum(recv), *tensor.shape[1:]) for tensor in rows]
        with at_stage(self._stage, self._ranks):
            self._works = [
                exchange.exchange(tensor, send, out, recv)
                for tensor, out in zip(self._rows, self.out, strict=True)
            ]

    def wait(self, layer: int) -> list[Tensor]:
        """Waits until the rows have arrived, and returns them: one tensor for each tensor that was sent.

        Dispatched rows arrive sorted by (rank, expert), and are sorted by (expert, rank) before they are
        returned.

        layer: not read. `pmoe.graph.lower` calls every function that waits with this argument.
        """
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
    """Sends rows to other ranks, and returns the rows that come from them: one all-to-all for each tensor.

    N is the number of rows, W the number of ranks, E_local the number of experts of one rank. The exchange is
    a layer's dispatch or its combine:

        dispatch   sends rows sorted by (rank, expert), returns rows sorted by (expert, rank)
        combine    sends rows sorted by (expert, rank), returns rows sorted by (rank, expert)

    rows: tensors (N, ...). The rows of all tensors have the same order (see the table). N is the sum of
        send_WE.
    send_WE, recv_WE: (W, E_local) int64 on the host, numbers of rows to and from each of W ranks, for each of
        E_local experts of a rank.
    num_out: number of rows that arrive; None if it is not known when the graph is traced. Only tracing reads
        this argument.
    returns: True for a combine, False for a dispatch.
    layer: the number that stands for the layer (`number_of`).
    """
    return Exchanging(rows, send_WE, recv_WE, num_out, returns, layer).wait(layer)


@exchange_rows.register_fake
def _(rows: Sequence[Tensor], send_WE: Tensor, recv_WE: Tensor, num_out: Any, *_: Any) -> list[Tensor]:
    count = torch.library.get_ctx().new_dynamic_size() if num_out is None else num_out
    return [tensor.new_empty(count, *tensor.shape[1:]) for tensor in rows]


def _exchange_setup(ctx: Any, inputs: Any, output: Any) -> None:
    rows, send_WE, recv_WE, _, ctx.returns, ctx.layer = inputs
    ctx.save_for_backward(send_WE, recv_WE)
    ctx.num_rows = rows[0].shape[0]


def _exchange_backward(ctx: Any, grads: list[Tensor]) -> Any:
    """Returns the gradients of sent rows: the gradients of the received rows, sent back to the senders."""
    send_WE, recv_WE = ctx.saved_tensors
    back = exchange_rows(grads, recv_WE, send_WE, ctx.num_rows, not ctx.returns, ctx.layer)
    return back, None, None, None, None, None


exchange_rows.register_autograd(_exchange_backward, setup_context=_exchange_setup)
