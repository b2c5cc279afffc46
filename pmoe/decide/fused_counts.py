"""Row counts of a layer that asks for fused kernels: all ranks exchange the counts.

Calls that fused kernels cannot compute run in chunks (micro-batches). A row is a copy of a token for one of
its experts. The row counts say how many rows each rank sends to each expert of the other ranks.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import AgreedChoice, Decision, HostRowCounts
from pmoe.call.modules import LayerModules
from pmoe.choose.choose import choose
from pmoe.comm.counts import RankCounts
from pmoe.decide.exact_counts import ExactCounts
from pmoe.decide.fused_choice import find_steps, fused_pair, is_persistent, kernels_runner, may_fuse
from pmoe.decide.solver_counts import SolverCounts
from pmoe.engine.autograd import Runner
from pmoe.engine.passes.base import Inputs
from pmoe.kernels.comet.operators import FusedRouting
from pmoe.kernels.flashdmoe import RoutingInput
from pmoe.ordering.sorted import SortedRows
from pmoe.planner.degree import Choice
from pmoe.runners import fused
from pmoe.runners.fused import FusedForwardRunner, FusedRunner
from pmoe.schedule.restore import Restore


class FusedCounts(ExactCounts):
    """Gets the row counts of a layer that asks for fused kernels, by an exchange among all ranks.

    The class implements `CountsSource`, the interface of all sources of row counts. `agree` returns an
    `AgreedChoice`, in which two fields say what computes the call. ``steps`` are the operators of the fused
    kernels; ``choice`` has the number of chunks for the pipeline engine. Either may be None:

        steps   choice   forward            backward
        set     None     fused kernels      fused kernels
        set     set      fused kernels      pipeline engine (with fused="forward")
        None    set      pipeline engine    pipeline engine
    """

    def __init__(self, call: Call, degrees: tuple[int, ...] | None = None) -> None:
        self._sorted: SortedRows | None = None
        super().__init__(call, degrees)

    def kernels_may_take_it(self) -> bool:
        """Returns whether fused kernels may compute the call. The row counts are not known yet.

        The final answer is in the result of `agree`, which has the row counts.
        """
        return may_fuse(self.call.scheduled, self.routed.x_TM.device, self.routed.dtype)

    def sort_early(self) -> None:
        """Sorts the rows while the counts are exchanged: by expert for COMET's kernels, else by chunk.

        Nothing is sorted in two cases:

        - the persistent kernel may compute the call, and then sorts the rows itself;
        - this is the second pass of activation checkpointing, which exchanges no counts.
        """
        if self.fuses and not is_persistent(self.call.modules):
            self._sort_for_kernels()
        elif not (self.fuses or self.call.replay.is_replay):
            super().sort_early()

    def _sort_for_kernels(self) -> SortedRows:
        """Returns the (token, choice) slots sorted by expert, as COMET's kernels need them.

        Slots over the capacity have no row, and come last. The slots are sorted only once in a call.
        """
        if self._sorted is None:
            modules = self.call.modules
            keep_TK = self.orders.keep_TK
            if keep_TK is not None:
                keep_TK = keep_TK.repeat_interleave(modules.grid.esp.size, 1)
            num_shards = modules.experts.num_local_experts * modules.ranks.size
            self._sorted = fused.sort(self._shard_TK, keep_TK, num_shards)
        return self._sorted

    @functools.cached_property
    def _shard_TK(self) -> Tensor:
        """The shards of each token's chosen experts, (T, K * L): K choices, L shards of an expert.

        With expert-sharding parallelism (ESP) each expert is split over L ranks. For COMET's kernels each
        shard is an expert of its own: they send a row to every shard of its expert, and add the results of
        the shards. Without ESP, L is 1 and a shard is a whole expert.
        """
        modules = self.call.modules
        expert_TK = self.orders.expert_TK
        if not modules.grid.is_sharded:
            return expert_TK
        return modules.grid.shards(expert_TK, modules.experts.num_local_experts)

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        """Waits for the row counts, then chooses fused kernels, the pipeline engine, or both.

        If both are chosen, the fused kernels compute the forward pass, and the pipeline engine computes the
        backward pass. All ranks make the same choice.

        modules: the layer's modules, with the experts to compute. A tool such as PEFT may have replaced the
            layer's own experts by these.
        inputs: the rows and parameters of the call.
        """
        own_modules = self.call.modules
        self.orders.modules = modules
        counts = self.finish_exchange()
        steps = find_steps(own_modules, inputs, counts) if self.fuses else None
        if steps is not None and not (own_modules.options.fused == "forward" and counts.needs_grad):
            return AgreedChoice(counts=counts, steps=steps)
        restore = None if steps is None else fused_pair(own_modules)
        return AgreedChoice(counts=counts, steps=steps, choice=self.choose(counts, inputs, restore))

    @property
    def _in_chunks(self) -> LayerModules:
        """The modules that count when n and the restore pair are chosen, the same on every rank.

        n is the number of chunks. The restore pair says how backward gets the experts' input and hidden
        activation.

        The shared expert is left out if fused kernels may compute some calls of the layer. The layer then
        calls the shared expert as a module in every call, outside of the chunks.
        """
        modules = self.call.modules
        calls_shared = modules.shared_expert is not None and modules.may_use_kernels
        return modules.without_shared_expert if calls_shared else modules

    def choose(self, counts: RankCounts, inputs: Inputs, restore: Restore | None) -> Choice:
        """Chooses the numbers of chunks and the restore pair for a pass that the pipeline engine computes.

        counts: the row counts, after the ranks have exchanged them.
        inputs: the rows and parameters of the call.
        restore: the restore pair of the fused kernels (`fused_pair`), if they compute the forward pass and
            the engine computes the backward pass. None if the engine computes both passes: the options then
            decide the pair.
        """
        return choose(self._in_chunks, counts, inputs, self.orders, restore)

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        """Returns the decision to run by fused kernels, by the pipeline engine, or by both.

        modules: the layer's modules, with the experts to compute. A tool such as PEFT may have replaced the
            layer's own experts by these.
        inputs: the rows and parameters of the call.
        agreed: the result of `agree`, which says what computes each pass.
        """
        if agreed.steps is None:
            return super().decision(modules, inputs, agreed)
        assert agreed.counts is not None
        self.orders.modules = modules
        counts = agreed.counts
        chosen = RoutingInput(expert_TK=self.orders.expert_TK, keep_TK=self.orders.keep_TK)
        by_kernels = kernels_runner(
            self.call.modules, agreed.steps, chosen, lambda: self._fused_routing(counts)
        )
        runner: Runner = by_kernels
        plan = None
        if agreed.choice is not None:  # the pipeline engine computes the backward pass
            assert isinstance(by_kernels, FusedRunner)
            plan = self.orders.plan(counts, replace(agreed.choice, forward=agreed.choice.backward))
            grid = self.call.modules.grid
            runner = FusedForwardRunner(by_kernels, plan, counts.recv_device, grid)
        return Decision(
            call=self.call,
            routed=self.routed,
            inputs=inputs,
            runner=runner,
            counts=HostRowCounts(counts.on_host(), counts.max_tokens),
            plan=plan,
            restore=by_kernels.restore,
        )

    def _fused_routing(self, shared: RankCounts) -> FusedRouting:
        """Returns where this rank's rows are sent, and which rows it receives, for COMET's kernels.

        shared: the exchanged row counts.
        """
        modules = self.call.modules
        grid = modules.grid
        shard_TK = self._shard_TK
        rows = self._sort_for_kernels()
        num_bins = shared.send.shape[0]
        counts_1PE = self.orders.count(num_bins).sum(0, keepdim=True).view(1, grid.ep.size, -1)
        return FusedRouting(
            rank=modules.ranks.rank,
            expert_TK=shard_TK.int(),
            position_TK=rows.position.view_as(shard_TK),
            slot_S=rows.slot[: int(shared.send.sum()) * grid.esp.size],
            send_WE=grid.to_owners(counts_1PE).squeeze(0).int(),
            recv_WE=grid.by_rank(shared.recv_device).sum(0).int(),
            num_received=int(shared.recv.sum()),
        )


class FusedSolverCounts(SolverCounts, FusedCounts):
    """Gets the row counts of a layer with ``pipeline="solve"`` that asks for fused kernels.

    If the pipeline engine computes a pass, the solver chooses the number of chunks.
    """

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        agreed = FusedCounts.agree(self, modules, inputs)
        return agreed if agreed.choice is None else self.counted(agreed)

    def choose(self, counts: RankCounts, inputs: Inputs, restore: Restore | None) -> Choice:
        return choose(self._in_chunks, counts, inputs, self.orders, restore, self.rows_for)
