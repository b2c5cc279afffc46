"""Row counts by one exchange among all ranks. This rank sorts its rows while the counts travel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import AgreedChoice, Decision, HostRowCounts
from pmoe.call.modules import LayerModules
from pmoe.call.routed import RoutedBatch
from pmoe.checkpointing.replay import hidden_from_checkpoints
from pmoe.choose.choose import choose
from pmoe.choose.slots import requested_slots
from pmoe.comm.counts import CountsExchange, Fault, FaultError, RankCounts
from pmoe.comm.failures import publishing_failures
from pmoe.decide.route import route_batch
from pmoe.decide.stored_state import check_loaded
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.make_plan import SortedSlots
from pmoe.engine.plan.plan import Plan
from pmoe.engine.variants.send_once import DeduplicatedSlots
from pmoe.ordering.sorted import Tokens
from pmoe.runners.pipeline import PipelineRunner


class ExactCounts:
    """A `CountsSource` that exchanges row counts. The pipeline engine runs the call in chunks.

    call     the call
    routed   its tokens with their routing
    orders   its slots, sorted by chunk and expert for each number of chunks that is asked for
    fuses    whether fused kernels may take the call (`kernels_may_take_it`)
    """

    call: Call
    routed: RoutedBatch
    orders: SortedSlots
    fuses: bool
    _exchange: LoadedExchange | None
    _once_FP: Tensor | None
    _counts_FE: Tensor

    def __init__(self, call: Call) -> None:
        """Routes the call, begins the exchange of its row counts, and sorts its rows if it can already.

        A checkpoint's second pass exchanges nothing, because it takes over the counts of the first.
        """
        self.call = call
        self.routed = route_batch(call)
        modules = call.modules
        routing = self.routed.gated.routing
        count = routing.expert.shape[0] if routing.token is None else self.routed.num_tokens
        orders_type = DeduplicatedSlots if modules.options.send_once else SortedSlots
        self.fuses = False
        self._exchange = None
        # Checkpoints expect as many operations in both passes, and the second one exchanges nothing.
        with publishing_failures(modules.ranks, "the exchange of row counts"), hidden_from_checkpoints():
            self.orders = orders_type(
                call.scheduled, routing.expert, routing.keep, Tokens(count, routing.token)
            )
            if not call.replay.is_replay:
                self._once_FP = self.orders.count_once(modules.num_bins)
                self._counts_FE = self.orders.count(modules.num_bins)
                self.fuses = self.kernels_may_take_it()
                self._exchange = LoadedExchange(modules, self.routed, self._begin_exchange)
            self.sort_early()

    def kernels_may_take_it(self) -> bool:
        """Returns whether fused kernels may take the call, judged before its row counts are known.

        The answer is the same on all ranks.
        """
        return False

    def _begin_exchange(self, fault: Tensor | Fault) -> CountsExchange:
        """Begins the exchange of row counts, in bins that join to every number of chunks that may be used.

        fault: the fault to report, or an int64 scalar on the device with its number.
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
            needs_grad=modules.asks_for_gradients(routed.x_TM, routing.weight),
            training=self.call.layer.training,
            dtype=routed.autocast or routed.x_TM.dtype,
            traffic=modules.traffic,
            slots=requested_slots(modules, routed),
            once_FP=self._once_FP,
            exchanges=(modules.dispatch, modules.combine),
            bypass_local=modules.stages.local,
            asks_max_rows=self.fuses,
            one_row_a_choice=has_k_choices and routing.mix is None and routing.token is None,
        )

    def sort_early(self) -> None:
        """Sorts the rows while the counts travel, if the counts cannot change the number of chunks.

        They can if several n are possible, or if ring slots may need a finer cut under skewed routing.
        """
        options = self.call.modules.options
        if len(options.degrees) == 1 and not options.rotates:
            self.orders.slots(options.degrees[0])
            self.orders.sent(options.degrees[0])

    def finish_exchange(self) -> RankCounts:
        """Waits for the counts and returns them. Raises what `LoadedExchange.finish` raises."""
        exchange = self._exchange
        assert exchange is not None
        # The exchange refers to this object. Without this line, the two would be a reference cycle, and their
        # tensors would live until the garbage collector runs.
        self._exchange = None
        return exchange.finish()

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        """Waits for the counts, then chooses n of both passes and the restore pair (`CountsSource.agree`)."""
        self.orders.modules = modules
        counts = self.finish_exchange()
        return AgreedChoice(counts=counts, choice=choose(self.call.modules, counts, inputs, self.orders))

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        """Cuts the sorted rows into chunks (`CountsSource.decision`)."""
        assert agreed.counts is not None
        assert agreed.choice is not None
        self.orders.modules = modules
        plan = self.orders.plan(agreed.counts, agreed.choice)
        counts = HostRowCounts(agreed.counts.on_host(), agreed.counts.max_tokens)
        return in_chunks(self.call, self.routed, inputs, plan, counts)


def in_chunks(call: Call, routed: RoutedBatch, inputs: Inputs, plan: Plan, counts: HostRowCounts) -> Decision:
    """Returns the decision to run by the pipeline engine."""
    return Decision(
        call=call,
        routed=routed,
        inputs=inputs,
        runner=PipelineRunner(plan),
        counts=counts,
        plan=plan,
        restore=plan.restore if call.modules.options.rotates else None,
    )


class LoadedExchange:
    """The exchange of a call's row counts, in which a rank also reports that its experts were loaded.

    Loading is reported as a fault, because the exchange carries one number for each rank beside the counts:

        first exchange    any rank reports Fault.LOADED: the counts are not used
        check_loaded      all ranks compare their experts
        second exchange   the counts again, with each rank's true fault

    If no rank has loaded experts, the first exchange is the only one.

    modules: the layer's modules.
    routed: the tokens with their routing, and the fault of this rank.
    begin: starts an exchange with the fault that it gets.
    """

    def __init__(
        self, modules: LayerModules, routed: RoutedBatch, begin: Callable[[Tensor | Fault], CountsExchange]
    ) -> None:
        self._modules = modules
        self._routed = routed
        self._begin = begin
        self._exchange = begin(Fault.LOADED if modules.experts.was_loaded else routed.gated.fault)

    def finish(self) -> RankCounts:
        """Waits for the counts and returns them.

        Raises FaultError on all ranks if any rank reported a fault; the faulty rank raises the error behind
        it. Raises ValueError on all ranks if two ranks hold equal experts since a state dict was loaded.
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
