"""The rows of a call, sorted by chunk and expert for each number of chunks, and plans made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from pmoe.comm.counts import RankCounts
from pmoe.engine.cut import Ordered, make_plan
from pmoe.engine.plan import Modules, Plan
from pmoe.ordering.sorted import Tokens, count_rows, sort_rows
from pmoe.schedule.restore import Restore

if TYPE_CHECKING:
    from pmoe.engine.padding import Padding

PlanFor = Callable[[int, int, Restore], Plan]
"""From n of the forward and of the backward pass, and the restore pair."""


class Orders:
    """The slots of a call sorted by chunk and expert, once for each number of chunks.

    expert_TK: (T, K) int64. keep_TK: (T, K) bool, None where all slots are kept.
    """

    def __init__(self, modules: Modules, expert_TK: Tensor, keep_TK: Tensor | None, tokens: Tokens) -> None:
        self.expert_TK, self.keep_TK, self.tokens = expert_TK, keep_TK, tokens
        self.modules = modules
        self._sorted: dict[int, Ordered] = {}
        self._counted: dict[int, Tensor] = {}

    def of(self, n: int) -> Ordered:
        """For n chunks."""
        if n not in self._sorted:
            self._sorted[n] = self._sort(n)
        return self._sorted[n]

    def count(self, bins: int) -> Tensor:
        """(bins, E) rows"""
        if bins not in self._counted:
            num_experts = self.modules.num_experts
            self._counted[bins] = count_rows(self.expert_TK, self.keep_TK, bins, num_experts, self.tokens)
        return self._counted[bins]

    def count_once(self, bins: int) -> Tensor | None:
        """(bins, ranks) rows, where a token goes once to a rank (`pmoe.engine.once`); else None."""
        return None

    def _sort(self, n: int) -> Ordered:
        """All kept slots by chunk and expert."""
        modules, expert_TK, keep_TK, tokens = self.modules, self.expert_TK, self.keep_TK, self.tokens
        pieces = modules.num_pieces(n)
        slots = sort_rows(expert_TK, keep_TK, n, modules.num_experts, modules.staying, pieces, tokens)
        return Ordered(
            n=n,
            pieces=pieces,
            expert_TK=expert_TK,
            tokens=tokens,
            has_drops=keep_TK is not None,
            slots=slots,
            sent=slots,
        )

    def plans(self, counts: RankCounts, padding: Padding | None = None) -> PlanFor:
        """What cuts these rows into chunks, for any degrees and pair."""

        def plan_for(forward: int, backward: int, restore: Restore) -> Plan:
            forward, backward = self._deep_enough(forward, backward, restore, counts.depth)
            plan = make_plan(self.modules, self.of(forward), self.of(backward), counts, restore)
            return plan if padding is None else replace(plan, padding=padding)

        return plan_for

    def _deep_enough(
        self, forward: int, backward: int, restore: Restore, depth: dict[int, int]
    ) -> tuple[int, int]:
        """Numbers of chunks, as deep as every rank's slots need them."""
        if depth:
            forward, backward = forward << depth[forward], backward << depth[backward]
        if forward % backward and self.modules.experts.are_modules and restore.hidden != "recompute":
            backward = forward  # a saved graph cannot be split
        return forward, backward if self.modules.hooks is None else forward
