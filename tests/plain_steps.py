"""The steps of a fused layer from all-to-alls and plain products: the definition that the kernels are held
to, for any type and device.

Sums are in the order that `Steps` says: each rank adds its own rows of a token, choices ascending; the
token's owner adds the ranks' sums, in the order of the first choice on each. What the kernels leave in the
heap is spoilt here when it may be there no more.

Letters: T tokens, K choices, S rows that leave, N rows that arrive, W ranks, E experts of a rank, P parts,
M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.base import FlatAllToAll, Traffic
from pmoe.comm.failures import at_stage
from pmoe.comm.ranks import Ranks
from pmoe.decide import fused_choice
from pmoe.engine.autograd import Path
from pmoe.engine.variants.send_once import carriers
from pmoe.gates.capacity import within_capacity
from pmoe.kernels import grouped_gemm
from pmoe.kernels.comet.backend import Steps
from pmoe.kernels.comet.operators import FusedRouting
from pmoe.kernels.flashdmoe import RoutingInput
from pmoe.kernels.heap import Heap
from pmoe.ordering.sorted import count_rows
from pmoe.runners import fused_steps
from pmoe.runners.fused import FusedRunner, sort
from pmoe.runners.fused_steps import Request


@dataclass(frozen=True, kw_only=True)
class _Arrived:
    """What the last dispatch brought, in the order of the fused kernels. source_N: the rank; slot_N: the slot
    there. order_N: which of the rows stands where, as they came: by source rank."""

    rows_NM: Tensor
    weight_N: Tensor
    source_N: Tensor
    slot_N: Tensor
    order_N: Tensor

    def spoil(self) -> None:
        self.rows_NM.fill_(torch.nan)
        self.weight_N.fill_(torch.nan)


class PlainSteps(Steps):
    """See `pmoe.kernels.comet.Steps`.

    traffic: counts what is sent.
    experts: the number of a rank's experts, for `fused_routing`.
    room: the most rows that may arrive at a rank, as in a heap; None for no limit.
    """

    def __init__(
        self, ranks: Ranks, traffic: Traffic | None = None, experts: int = 0, room: int | None = None
    ) -> None:
        self._experts, self._ranks, self._exchange = experts, ranks, FlatAllToAll()
        self._room = room
        self._exchange.bind(ranks, Traffic() if traffic is None else traffic)
        self._arrived: _Arrived | None = None

    def fused_routing(self, chosen: RoutingInput) -> FusedRouting:
        """Collective: ranks tell each other how many rows come."""
        if chosen.deferred is not None:
            chosen.deferred.keep()
        expert_TK, keep_TK, ranks = chosen.expert_TK.long(), chosen.keep_TK, self._ranks
        num_experts = self._experts * ranks.size
        if chosen.capacity is not None:
            used_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_TK.device)
            keep_TK = within_capacity(expert_TK, chosen.capacity, used_E)[0]
        sent = sort(expert_TK, keep_TK, num_experts)
        send_WE = count_rows(expert_TK, keep_TK, 1, num_experts).view(ranks.size, -1).int()
        if chosen.counts_A is not None:
            chosen.counts_A.copy_(send_WE.view(-1))
        recv_WE = send_WE
        if ranks.size > 1:
            recv_WE = torch.empty_like(send_WE)
            dist.all_to_all_single(recv_WE, send_WE, group=ranks.group)
        # The kernels would write rows beyond the heap's room into other memory.
        arriving = int(recv_WE.sum())
        assert self._room is None or arriving <= self._room, f"{arriving} rows, room for {self._room}"
        return FusedRouting(
            rank=ranks.rank,
            expert_TK=expert_TK.int(),
            position_TK=sent.position.view_as(expert_TK),
            slot_S=sent.slot[: int(send_WE.sum())],
            send_WE=send_WE,
            recv_WE=recv_WE,
            num_received=arriving,
        )

    def dispatch(self, fused_routing: FusedRouting, x_TM: Tensor, weight_TK: Tensor) -> None:
        self._dispatch(fused_routing, x_TM, weight_TK)

    def _dispatch(self, fused_routing: FusedRouting, x_TM: Tensor, weight_TK: Tensor) -> _Arrived:
        if self._arrived is not None:
            self._arrived.spoil()
        slot_S = fused_routing.slot_S.long()
        num_ranks, num_experts = fused_routing.recv_WE.shape
        # By expert, then by source from this rank upwards.
        nearness_W = (torch.arange(num_ranks, device=x_TM.device) - fused_routing.rank) % num_ranks
        expert_E = torch.arange(num_experts, device=x_TM.device)
        order_N = _by_row(expert_E * num_ranks + nearness_W.unsqueeze(1), fused_routing.recv_WE).argsort(
            stable=True
        )
        source_N = _by_row(torch.arange(num_ranks, device=x_TM.device), fused_routing.recv_WE.sum(1))
        wide = torch.promote_types(x_TM.dtype, torch.float32)
        leaving = (
            x_TM.index_select(0, slot_S // fused_routing.top_k),
            weight_TK.reshape(-1).index_select(0, slot_S).to(wide),
            slot_S,
        )
        sent, come = fused_routing.send_WE.sum(1).tolist(), fused_routing.recv_WE.sum(1).tolist()
        rows_NM, weight_N, slot_N = (self._sent(each, sent, come)[order_N] for each in leaving)
        self._arrived = _Arrived(
            rows_NM=rows_NM, weight_N=weight_N, source_N=source_N[order_N], slot_N=slot_N, order_N=order_N
        )
        return self._arrived

    def all_or_give_up(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is shared with later rounds."""
        return contextlib.nullcontext()

    def repeatable(self) -> tuple[Heap, ...]:
        return ()

    is_repeatable = True

    def rows(self, fused_routing: FusedRouting) -> Tensor:
        return self._last.rows_NM

    def row_weight(self, fused_routing: FusedRouting) -> Tensor:
        return self._last.weight_N

    def dispatch_hidden(
        self,
        fused_routing: FusedRouting,
        x_TM: Tensor,
        weight_TK: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        *,
        activation: str,
        keep: bool,
    ) -> tuple[Tensor | None, Tensor]:
        rows_NM = self._dispatch(fused_routing, x_TM, weight_TK).rows_NM
        return grouped_gemm.hidden(
            rows_NM, w1, fused_routing.ends_E, activation=activation, bias_EG=b1, keep=keep
        )

    def product_combine(
        self, fused_routing: FusedRouting, active_NH: Tensor, w2: Tensor, b2: Tensor | None
    ) -> Tensor:
        out_NM = grouped_gemm.product(
            active_NH, w2, fused_routing.ends_E, bias_EO=b2, scale=self._last.weight_N
        )
        return self._combine(fused_routing, out_NM)

    def dispatch_hidden_gradient(
        self,
        fused_routing: FusedRouting,
        grad_TM: Tensor,
        weight_TK: Tensor,
        w2: Tensor,
        b2: Tensor | None,
        hidden_NG: Tensor,
        *,
        activation: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        arrived = self._dispatch(fused_routing, grad_TM, weight_TK)
        rows_NM = arrived.rows_NM
        grad_hidden_NG, active_NH, dot_N = grouped_gemm.hidden_gradient(
            rows_NM, w2, hidden_NG, arrived.weight_N, fused_routing.ends_E,
            activation=activation, weighs_active=True,
        )  # fmt: skip
        parts = [dot_N]
        if b2 is not None:
            experts_E = torch.arange(b2.shape[0], device=b2.device)
            b2_NM = b2.index_select(0, _by_row(experts_E, fused_routing.recv_WE.sum(0)))
            parts.append((rows_NM.to(dot_N.dtype) * b2_NM.to(dot_N.dtype)).sum(1))
        return grad_hidden_NG, active_NH, torch.stack(parts)

    def gradient_combine(
        self, fused_routing: FusedRouting, grad_hidden_NG: Tensor, w1: Tensor, dots_PN: Tensor
    ) -> tuple[Tensor, Tensor]:
        dot_N = dots_PN[0]
        for part_N in dots_PN[1:]:
            dot_N = dot_N + part_N
        sent, come = fused_routing.send_WE.sum(1).tolist(), fused_routing.recv_WE.sum(1).tolist()
        dot_S = self._sent(self._in_source_order(dot_N), come, sent)
        of_weight = dot_S.new_zeros(fused_routing.expert_TK.numel()).index_copy_(
            0, fused_routing.slot_S.long(), dot_S
        )
        of_rows_NM = grouped_gemm.input_gradient(grad_hidden_NG, w1, fused_routing.ends_E)
        return self._combine(fused_routing, of_rows_NM), of_weight.view(fused_routing.expert_TK.shape)

    @property
    def _last(self) -> _Arrived:
        assert self._arrived is not None, "nothing has been dispatched"
        return self._arrived

    def _sent(self, per_row: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> Tensor:
        out = per_row.new_empty(sum(recv_rows), *per_row.shape[1:])
        with at_stage("a fused layer's exchange", self._ranks):
            work = self._exchange.exchange(per_row.contiguous(), send_rows, out, recv_rows)
            if work is not None:
                work.wait()
        return out

    def _in_source_order(self, per_row: Tensor) -> Tensor:
        return torch.empty_like(per_row).index_copy_(0, self._last.order_N, per_row)

    def _combine(self, fused_routing: FusedRouting, rows_NM: Tensor) -> Tensor:
        """(T, M): what the rows of each token add up to, on its rank."""
        last, top_k = self._last, fused_routing.top_k
        wide = torch.promote_types(rows_NM.dtype, torch.float32)
        # Here: rows by source and slot, so that those of a token follow each other, choices ascending.
        key_N = last.source_N * 2**32 + last.slot_N
        order_N = key_N.argsort()
        token_N = (last.source_N * 2**32 + last.slot_N // top_k)[order_N]
        token_U, sum_N, counts_U = token_N.unique_consecutive(return_inverse=True, return_counts=True)
        nth_N = torch.arange(token_N.shape[0], device=token_N.device) - (counts_U.cumsum(0) - counts_U)[sum_N]
        sums_UM = rows_NM.new_zeros(token_U.shape[0], rows_NM.shape[1], dtype=wide)
        for nth in range(top_k):
            of = nth_N == nth
            sums_UM[sum_N[of]] += rows_NM[order_N[of]].to(wide)
        leave = torch.bincount(token_U // 2**32, minlength=len(fused_routing.recv_WE)).tolist()
        # There: a sum for each rank that any kept choice of the token is on, at the first of them.
        rank_TK = fused_routing.expert_TK.long() // fused_routing.recv_WE.shape[1]
        _, carries_TK = carriers(rank_TK, fused_routing.position_TK >= 0)
        slot_V = carries_TK.view(-1).nonzero().squeeze(1)
        rank_V = rank_TK.view(-1)[slot_V]
        come = torch.bincount(rank_V, minlength=len(fused_routing.recv_WE)).tolist()
        home_VM = self._sent(sums_UM.to(rows_NM.dtype), leave, come)
        place_V = torch.empty_like(slot_V)
        place_V[rank_V.argsort(stable=True)] = torch.arange(slot_V.shape[0], device=slot_V.device)
        y_TM = rows_NM.new_zeros(rank_TK.shape[0], rows_NM.shape[1], dtype=wide)
        for k in range(top_k):
            of = slot_V % top_k == k
            y_TM[slot_V[of] // top_k] += home_VM[place_V[of]].to(wide)
        last.spoil()
        return y_TM.to(rows_NM.dtype)


def plain_steps(request: Request) -> PlainSteps:
    """For `using`."""
    return PlainSteps(request.ranks, experts=request.experts)


def steps_in_a_heap(request: Request) -> PlainSteps:
    """For `using`. No more rows may arrive than a heap for this request has room for. A call whose counts are
    known to exceed the room is not limited: the kernels would refuse it, and `using` asks no refusals."""
    room = fused_steps.room_for_rows(request)
    is_refused = request.max_rows > room
    return PlainSteps(request.ranks, experts=request.experts, room=None if is_refused else room)


class PlainPasses(FusedRunner):
    name: ClassVar[Path] = "persistent"


def plain_passes(*, steps: PlainSteps, chosen: RoutingInput, **options: Any) -> PlainPasses:
    """Takes the place of `pmoe.runners.fused.PersistentRunner`, by `PlainSteps`. Ranks tell their counts."""
    return PlainPasses(steps=steps, fused_routing=steps.fused_routing(chosen), **options)


@contextlib.contextmanager
def using(make_steps: Callable[[Request], Steps | str]) -> Iterator[None]:
    """In the block, steps come from ``make_steps`` and not from the kernels, whose refusals are not asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_steps, "steps_for", make_steps)
        patch.setattr(fused_steps, "refusal", lambda *_, **__: None)
        patch.setattr(fused_choice, "PersistentRunner", plain_passes)
        yield


def _by_row(values: Tensor, counts: Tensor) -> Tensor:
    """Each value as often as counts says, in the order of both."""
    return values.reshape(-1).repeat_interleave(counts.reshape(-1).long())
