"""Exact row counts of a layer that asks for fused kernels: the kernels take a call, or it runs in chunks."""

from __future__ import annotations

from dataclasses import replace

from pmoe.call.call import Call
from pmoe.call.decision import Agreed, CallCounts, Decision
from pmoe.call.modules import Parts
from pmoe.choose.choose import choose
from pmoe.comm.counts import RankCounts
from pmoe.decide.exact_counts import ExactCounts
from pmoe.decide.fused_choice import find_steps, fused_pair, is_persistent, kernels_runner, may_fuse
from pmoe.engine.autograd import Runner
from pmoe.engine.passes.base import Inputs
from pmoe.kernels.comet.operators import Journey
from pmoe.kernels.flashdmoe import Chosen
from pmoe.ordering.sorted import SortedRows
from pmoe.runners import fused
from pmoe.runners.fused import FusedForwardRunner, FusedRunner


class FusedCounts(ExactCounts):
    """A call whose row counts are exchanged, and which fused kernels may compute."""

    def __init__(self, call: Call) -> None:
        self._sorted: SortedRows | None = None
        super().__init__(call)

    def kernels_may_take_it(self) -> bool:
        return may_fuse(self.call.parts, self.routed.x_TM.device, self.routed.dtype)

    def sort_early(self) -> None:
        if self.fuses and not is_persistent(self.call.parts):
            self._sort_for_kernels()
        elif not (self.fuses or self.call.replay.is_replay):
            super().sort_early()

    def _sort_for_kernels(self) -> SortedRows:
        """The kept slots by expert, as COMET's kernels take them."""
        if self._sorted is None:
            orders = self.orders
            num_experts = self.call.parts.spec.num_experts
            self._sorted = fused.sort(orders.expert_TK, orders.keep_TK, num_experts)
        return self._sorted

    def agree(self, parts: Parts, inputs: Inputs) -> Agreed:
        own_parts = self.call.parts
        self.orders.modules = parts
        counts = self.finish_exchange()
        steps = find_steps(own_parts, inputs, counts) if self.fuses else None
        if steps is not None and not (own_parts.spec.fused == "forward" and counts.needs_grad):
            return Agreed(counts=counts, steps=steps)
        restore = None if steps is None else fused_pair(own_parts)
        choice = choose(own_parts, counts, inputs, self.orders, restore)
        return Agreed(counts=counts, steps=steps, choice=choice)

    def decision(self, parts: Parts, inputs: Inputs, agreed: Agreed) -> Decision:
        if agreed.steps is None:
            return super().decision(parts, inputs, agreed)
        assert agreed.counts is not None
        self.orders.modules = parts
        counts = agreed.counts
        chosen = Chosen(expert_TK=self.orders.expert_TK, keep_TK=self.orders.keep_TK)
        by_kernels = kernels_runner(self.call.parts, agreed.steps, chosen, lambda: self._journey(counts))
        runner: Runner = by_kernels
        plan = None
        if agreed.choice is not None:  # the pipeline engine computes the backward pass
            assert isinstance(by_kernels, FusedRunner)
            plan = self.orders.plan(counts, replace(agreed.choice, forward=agreed.choice.backward))
            runner = FusedForwardRunner(by_kernels, plan, counts.recv_device)
        return Decision(
            call=self.call,
            routed=self.routed,
            inputs=inputs,
            runner=runner,
            counts=CallCounts(counts.on_host(), counts.max_tokens),
            plan=plan,
            restore=by_kernels.restore,
        )

    def _journey(self, shared: RankCounts) -> Journey:
        parts = self.call.parts
        expert_TK = self.orders.expert_TK
        rows = self._sort_for_kernels()
        return Journey(
            rank=parts.ranks.rank,
            expert_TK=expert_TK.int(),
            position_TK=rows.position.view_as(expert_TK),
            slot_S=rows.slot[: int(shared.send.sum())],
            send_WE=self.orders.count(parts.num_bins).sum(0).view(shared.recv.shape[1:]).int(),
            recv_WE=shared.recv_device.sum(0).int(),
            num_received=int(shared.recv.sum()),
        )
