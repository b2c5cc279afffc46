"""Row counts by one exchange among all ranks. Each rank sorts its rows while the counts are exchanged.

A row is a copy of a token for one of its experts. The row counts say how many rows each rank sends to each
expert of the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import AgreedChoice, CountsSource, Decision, HostRowCounts
from pmoe.call.modules import LayerModules
from pmoe.call.routed import RoutedBatch
from pmoe.checkpointing.replay import hidden_from_checkpoints
from pmoe.choose.choose import choose
from pmoe.choose.slots import requested_slots
from pmoe.comm.counts import CountsExchange, Fault, FaultError, Loads, RankCounts
from pmoe.comm.failures import leave
from pmoe.decide.route import route_batch, sorts_results
from pmoe.decide.stored_state import check_loaded
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.make_plan import SortedSlots
from pmoe.engine.variants.send_once import DeduplicatedSlots
from pmoe.experts.base import FEW_ROWS
from pmoe.ordering.sorted import Tokens
from pmoe.planner.degree import Choice
from pmoe.runners.pipeline import PipelineRunner


class ExactCounts:
    """Gets a call's row counts by an exchange among all ranks.

    The call then runs in chunks (micro-batches) on the pipeline engine. A subclass may choose fused kernels
    instead (`FusedCounts`). The class implements `CountsSource`, the interface of all sources of row counts.

    call     the call
    routed   the call's tokens with their routing
    orders   sorts the (token, choice) slots of the call by chunk and expert, for any number of chunks
    fuses    whether fused kernels may compute the call instead of the engine (`kernels_may_take_it`)
    loads    a request to the exchange for the load of each expert: the number of rows that all ranks together
             routed to it. Only a layer that copies busy experts needs it; None otherwise
    """

    loads: Loads | None = None
    call: Call
    routed: RoutedBatch
    orders: SortedSlots
    fuses: bool
    _exchange: LoadedExchange | None
    _degrees: tuple[int, ...]
    _once_FP: Tensor | None
    _counts_FE: Tensor

    def __init__(
        self,
        call: Call,
        degrees: tuple[int, ...] | None = None,
    ) -> None:
        """Routes the call, starts the exchange of its row counts, and sorts its rows if n is already known.

        n is the number of chunks. Activation checkpointing runs a call twice. The second pass exchanges
        nothing, because it uses the counts of the first pass.

        call: the call.
        degrees: the numbers of chunks that may be chosen, the same on all ranks. None for all numbers that
            the options allow.
        """
        self.call = call
        self.routed = route_batch(call)
        modules = call.modules
        routing = self.routed.gated.routing
        count = routing.expert.shape[0] if routing.token is None else self.routed.num_tokens
        orders_type = DeduplicatedSlots if modules.options.send_once else SortedSlots
        self.fuses = False
        self._exchange = None
        try:
            # Activation checkpointing runs a call twice, and expects both passes to save the same tensors.
            # Only the first pass has an exchange. So the exchange is hidden from checkpointing.
            with hidden_from_checkpoints():
                self.orders = orders_type(
                    call.scheduled, routing.expert, routing.keep, Tokens(count, routing.token)
                )
                routes = self.routed.gated.kernel_routes
                if routes is not None:
                    self.orders.take_routes(routes, self.routed.gated.sorted_for)
                if not call.replay.is_replay:
                    self._degrees = degrees or modules.options.degrees
                    bins = modules.bins_for(degrees) if degrees else modules.num_bins
                    self._once_FP = self.orders.count_once(bins)
                    self._counts_FE = self.orders.count(bins)
                    self.fuses = self.kernels_may_take_it()
                    self._exchange = LoadedExchange(modules, self.routed, self._begin_exchange)
                if self.fuses or not modules.rotates:
                    self.sort_early()
        except BaseException as error:
            leave(error, modules.ranks, "the exchange of row counts")
            raise

    def kernels_may_take_it(self) -> bool:
        """Returns whether fused kernels may compute the call. The row counts are not known yet.

        All ranks get the same answer. This class always returns False; `FusedCounts` overrides the method.
        """
        return False

    def _begin_exchange(self, fault: Tensor | Fault) -> CountsExchange:
        """Starts the exchange of row counts and returns it. Collective.

        Rows are counted in bins: equal parts of the batch. The number of chunks is chosen later. Each chunk
        is one bin, or several neighbouring bins.

        fault: a `Fault` that says what is wrong with this rank's call, or its number as an int64 scalar on
            the device. The exchange reports it to the other ranks. `Fault.NONE` if nothing is wrong.
        """
        modules = self.call.modules
        routed = self.routed
        routing = routed.gated.routing
        has_k_choices = routing.expert.shape[1] == modules.options.top_k  # dropped choices count as well
        return CountsExchange(
            modules.grid,
            self._counts_FE,
            num_tokens=self.orders.tokens.count,
            fault=fault,
            needs_grad=routed.needs_grad,
            training=self.call.layer.training,
            dtype=routed.autocast or routed.x_TM.dtype,
            traffic=modules.traffic,
            slots=requested_slots(modules, routed.x_TM, self._degrees) if modules.limits_rows else None,
            once_FP=self._once_FP,
            exchanges=(modules.dispatch, modules.combine),
            bypass_local=modules.stages.local,
            asks_max_rows=self.fuses,
            one_row_a_choice=has_k_choices and routing.mix is None and routing.token is None,
            sorts_results=sorts_results(modules, routed.x_TM) if routed.x_TM.is_cuda else True,
            loads=self.loads,
            early=routed.gated.early,
        )

    def sort_early(self) -> None:
        """Sorts the rows while the counts are exchanged, if the counts cannot change the number of chunks n.

        The counts can change n in two cases:

        - the options allow several n, and the choice depends on the counts;
        - chunks share buffers of fixed size (ring slots). If a chunk has too many rows for a slot, the batch
          is cut into more chunks.
        """
        if not self.call.modules.rotates and len(self.call.modules.options.degrees) == 1:
            (n,) = self.call.modules.options.degrees
            if self.routed.needs_grad or not self.are_few(self.orders.tokens.count):
                self.orders.slots(n)
                self.orders.sent(n)

    def finish_exchange(self) -> RankCounts:
        """Waits for the exchange of row counts and returns the counts.

        Raises FaultError on all ranks if any rank has a fault, such as a wrong input. Raises ValueError on
        all ranks if two ranks have loaded the same experts from a state dict (`LoadedExchange`).
        """
        exchange = self._exchange
        assert exchange is not None
        # The exchange refers to this object. Without this line, the exchange and this object would form a
        # reference cycle, and their tensors would live until the garbage collector runs.
        self._exchange = None
        return exchange.finish()

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        """Waits for the row counts, then chooses n for both passes and the restore pair.

        n is the number of chunks. The restore pair says how backward gets two activations back: the rows that
        the experts received, and the hidden activation. All ranks choose the same n and restore pair. For a
        small call on the CPU without gradients the result has only the counts (`are_few`).

        modules: the layer's modules, with the experts to compute. A tool such as PEFT may have replaced the
            layer's own experts by these.
        inputs: the rows and parameters of the call.
        """
        self.orders.modules = modules
        counts = self.finish_exchange()
        if not counts.needs_grad and self.are_few(counts.max_tokens):
            return AgreedChoice(counts=counts)
        return AgreedChoice(counts=counts, choice=choose(self.call.modules, counts, inputs, self.orders))

    def are_few(self, num_tokens: int) -> bool:
        """Returns whether a call without gradients is computed directly, without chunks or a plan.

        This is done on the CPU for calls of at most `FEW_ROWS` rows, if the layer is not training.

        num_tokens: the largest number of tokens of any rank, so that all ranks get the same answer.
        """
        modules = self.call.modules
        is_small = num_tokens * modules.options.top_k <= FEW_ROWS
        # In training, reentrant activation checkpointing first runs a call without gradients. This pass must
        # round as the second pass does, so it must not take the path for few rows.
        ranks = modules.ranks
        trains = ranks.any_trains if ranks.size > 1 else self.call.layer.training
        on_cpu = self.routed.x_TM.device.type == "cpu"
        return is_small and on_cpu and not trains and modules.may_run_few_rows

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        """Cuts the sorted rows into chunks, and returns the decision to run them on the pipeline engine.

        modules: the layer's modules, with the experts to compute. A tool such as PEFT may have replaced the
            layer's own experts by these.
        inputs: the rows and parameters of the call.
        agreed: the result of `agree`: the row counts, and the choice of n and the restore pair.
        """
        counts = agreed.counts
        assert counts is not None
        if agreed.choice is None:
            return few_rows(self, modules, inputs, counts)
        self.orders.modules = modules
        return in_chunks(self, inputs, self.orders, counts, agreed.choice, max_tokens=counts.max_tokens)


def in_chunks(
    source: CountsSource,
    inputs: Inputs,
    orders: SortedSlots,
    counts: RankCounts,
    choice: Choice,
    *,
    max_tokens: int,
    kept_device_E: Tensor | None = None,
) -> Decision:
    """Plans the chunks (micro-batches) of a call. Returns the decision to run them on the pipeline engine.

    source: the source of the row counts, which also holds the call and its routed tokens.
    inputs: the rows and parameters of the call.
    orders: sorts the (token, choice) slots of the call for any number of chunks.
    counts: the row counts.
    choice: the number of chunks of each pass, and the restore pair.
    max_tokens: the largest number of tokens of any rank.
    kept_device_E: (E,) on the device: for each of the E experts of all ranks, how many of this rank's rows
        are not padding. For statistics after the call. None if there is no padding.
    """
    call = source.call
    plan = orders.plan(counts, choice)
    return Decision(
        call=call,
        routed=source.routed,
        inputs=inputs,
        runner=PipelineRunner(plan),
        counts=HostRowCounts(counts.on_host(), max_tokens, kept_device_E),
        plan=plan,
        restore=plan.restore if call.modules.options.rotates else None,
    )


def few_rows(source: CountsSource, modules: LayerModules, inputs: Inputs, counts: RankCounts) -> Decision:
    """Returns the decision to run a small call without chunks or a plan of buffers.

    source: has the call, and its tokens with their routing.
    modules: the layer's modules, with the experts to compute. A tool such as PEFT may have replaced the
        layer's own experts by these.
    inputs: the rows and parameters of the call.
    counts: the row counts.
    """
    from pmoe.runners.few_rows import FewRowsRunner

    routing = source.routed.gated.routing
    return Decision(
        call=source.call,
        routed=source.routed,
        inputs=inputs,
        runner=FewRowsRunner(modules, routing.expert, routing.keep, counts),
        counts=HostRowCounts(counts.on_host(), counts.max_tokens),
    )


class LoadedExchange:
    """An exchange of row counts in which a rank can also report that its experts were loaded.

    After any rank has loaded a state dict, all ranks compare their experts, because each rank must hold
    different ones. The other ranks learn of the loading from the exchange: beside the row counts each rank
    sends one number, its fault. A rank that has loaded a state dict sends `Fault.LOADED` as this number:

        first exchange    if any rank reports Fault.LOADED, all ranks discard the counts
        check_loaded      all ranks compare their experts
        second exchange   sends the counts a second time, with the true fault of each rank

    If no rank has loaded experts, only the first exchange takes place.

    modules: the modules and options of the layer.
    routed: the tokens with their routing, and the fault of this rank.
    begin: starts an exchange of the row counts; its argument is the fault to report.
    """

    def __init__(
        self, modules: LayerModules, routed: RoutedBatch, begin: Callable[[Tensor | Fault], CountsExchange]
    ) -> None:
        self._modules = modules
        self._routed = routed
        self._begin = begin
        self._exchange = begin(Fault.LOADED if modules.experts.was_loaded else routed.gated.fault)

    def finish(self) -> RankCounts:
        """Waits for the row counts and returns them.

        If any rank has loaded experts from a state dict, all ranks compare their experts, and exchange the
        counts a second time.

        If any rank reported a fault, all ranks raise: that rank its original error, the other ranks
        FaultError. All ranks raise ValueError if two ranks have loaded the same experts.
        """
        try:
            return self._exchange.finish()
        except FaultError as error:
            if error.fault is not Fault.LOADED:
                raise (self._routed.failure or error) from None
        check_loaded(self._modules)
        try:
            return self._begin(self._routed.gated.fault).finish()
        except FaultError as error:
            raise (self._routed.failure or error) from None
