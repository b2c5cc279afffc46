"""Plans of a call: for any n and restore pair, what the engine needs to know of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from pmoe.comm.counts import Shared
from pmoe.engine.padded import Padding
from pmoe.engine.plan import Degrees, Modules, Ordered, Plan, make_plan
from pmoe.experts import ModuleExperts
from pmoe.ordering.once import carriers
from pmoe.ordering.sorted import LocalExperts, Tokens, count_rows, sort_rows
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Stages

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


PlanFor = Callable[[int, int, Restore], Plan]
"""From n of the forward and of the backward pass, and the restore pair."""


class Orders:
    """The slots of a call sorted by chunk and expert, for each number of chunks once."""

    def __init__(
        self, layer: MoELayer, stages: Stages, expert_TK: Tensor, keep_TK: Tensor | None, tokens: Tokens
    ) -> None:
        self.expert_TK, self.keep_TK, self.tokens = expert_TK, keep_TK, tokens
        self._layer, self._num_ranks = layer, layer.grid.across.size
        # The experts whose rows of this rank's do not travel.
        end = layer.first_expert + layer.num_local_experts * stages.local
        self._stay = LocalExperts(layer.first_expert, end)
        self._rank_TK: Tensor | None = None
        self._carrier_TK: Tensor | None = None
        self._carries_TK: Tensor | None = None
        if layer.send_once:
            self._rank_TK = expert_TK // layer.num_local_experts
            self._carrier_TK, self._carries_TK = carriers(self._rank_TK, keep_TK)
        self._made: dict[int, Ordered] = {}

    def of(self, n: int) -> Ordered:
        if n not in self._made:
            self._made[n] = self._sort(n)
        return self._made[n]

    def count(self, bins: int) -> Tensor:
        """(bins, E) rows"""
        return count_rows(self.expert_TK, self.keep_TK, bins, self._layer.num_experts, self.tokens)

    def count_once(self, bins: int) -> Tensor | None:
        """(bins, ranks) rows, where a token goes once to a rank; else None."""
        if self._rank_TK is None:
            return None
        return count_rows(self._rank_TK, self._carries_TK, bins, self._num_ranks, self.tokens)

    def _sort(self, n: int) -> Ordered:
        layer, tokens = self._layer, self.tokens
        pieces = layer.num_pieces(n)
        slots = sort_rows(self.expert_TK, self.keep_TK, n, layer.num_experts, self._stay, pieces, tokens)
        if self._rank_TK is None:
            return Ordered(slots=slots, sent=slots)
        nowhere = LocalExperts(0, 0)
        return Ordered(
            slots=slots,
            sent=sort_rows(self._rank_TK, self._carries_TK, n, self._num_ranks, nowhere, 0, tokens),
            carrier_TK=self._carrier_TK,
            sent_nP=self.count_once(n),
        )


def plans_of(
    layer: MoELayer, modules: Modules, orders: Orders, shared: Shared, padding: Padding | None = None
) -> PlanFor:
    def plan_for(forward: int, backward: int, restore: Restore) -> Plan:
        degrees = _degrees(layer, forward, backward, restore, shared.depth)
        plan = make_plan(
            modules,
            order=orders.of(degrees.forward),
            backward_order=orders.of(degrees.backward),
            expert_TK=orders.expert_TK,
            tokens=orders.tokens,
            shared=shared,
            degrees=degrees,
            restore=restore,
            has_drops=orders.keep_TK is not None,
        )
        return plan if padding is None else replace(plan, padding=padding)

    return plan_for


def _degrees(
    layer: MoELayer, forward: int, backward: int, restore: Restore, depth: dict[int, int]
) -> Degrees:
    """Numbers of chunks, as deep as every rank's slots need them."""
    if depth:
        forward, backward = forward << depth[forward], backward << depth[backward]
    if forward % backward and isinstance(layer.experts, ModuleExperts) and restore.hidden != "recompute":
        backward = forward  # a saved graph cannot be split
    if layer.hooks or layer.send_once:
        backward = forward
    return Degrees(forward=forward, backward=backward, pieces=layer.num_pieces(forward))
