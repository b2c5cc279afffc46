"""Row counts of a call by one exchange. The rank sorts its rows while the counts travel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import Agreed, CallCounts, Decision
from pmoe.call.modules import Parts
from pmoe.call.routed import Routed
from pmoe.checkpointing.replay import hidden_from_checkpoints
from pmoe.choose.choose import choose
from pmoe.choose.slots import slots_to_ask
from pmoe.comm.counts import CountsExchange, Fault, FaultError, RankCounts
from pmoe.comm.ranks import telling
from pmoe.decide.route import route_batch
from pmoe.decide.stored_state import check_loaded
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.make_plan import Orders
from pmoe.engine.plan.plan import Plan
from pmoe.engine.variants.send_once import OnceOrders
from pmoe.ordering.sorted import Tokens
from pmoe.runners.pipeline import PipelineRunner


class ExactCounts:
    """A call whose row counts are exchanged. It runs in chunks.

    orders   the slots of the call as they can be sorted
    """

    def __init__(self, call: Call) -> None:
        """Routes the call, begins the exchange of its row counts, and sorts its rows."""
        self.call = call
        self.routed = route_batch(call)
        parts = call.parts
        routing = self.routed.gated.routing
        count = routing.expert.shape[0] if routing.token is None else self.routed.num_tokens
        kind = OnceOrders if parts.spec.send_once else Orders
        self.orders = kind(call.scheduled, routing.expert, routing.keep, Tokens(count, routing.token))
        self.fuses = not call.replay.is_replay and self.kernels_may_take_it()
        self._exchange: LoadedExchange | None = None
        with telling(parts.ranks, "the exchange of row counts"):
            # A checkpoint's second pass takes over the counts of the first.
            if not call.replay.is_replay:
                with hidden_from_checkpoints():
                    self._exchange = LoadedExchange(parts, self.routed, self._begin_exchange)
            self.sort_early()

    def kernels_may_take_it(self) -> bool:
        """Whether fused kernels may take the call, as far as is known before the exchange. Equal on all
        ranks."""
        return False

    def _begin_exchange(self, fault: Tensor | Fault) -> CountsExchange:
        """Begins the exchange of counts in bins. The bins are the chunks, if their number and share of rows
        are fixed."""
        parts, routed, orders = self.call.parts, self.routed, self.orders
        routing = routed.gated.routing
        has_k_choices = routing.expert.shape[1] == parts.spec.top_k  # dropped rows among them
        return CountsExchange(
            parts.grid,
            orders.count(parts.num_bins),
            num_tokens=orders.tokens.count,
            fault=fault,
            needs_grad=parts.asks_for_gradients(routed.x_TM, routing.weight),
            training=self.call.layer.training,
            dtype=routed.autocast or routed.x_TM.dtype,
            traffic=parts.traffic,
            slots=slots_to_ask(parts, routed),
            once_FP=orders.count_once(parts.num_bins),
            exchanges=(parts.dispatch, parts.combine),
            bypass_local=parts.stages.local,
            asks_max_rows=self.fuses,
            one_row_a_choice=has_k_choices and routing.mix is None and routing.token is None,
        )

    def sort_early(self) -> None:
        """Sorts the rows while the counts travel, if no count can change the chunks."""
        spec = self.call.parts.spec
        if len(spec.degrees) == 1 and not spec.rotates:
            self.orders.slots(spec.degrees[0])
            self.orders.sent(spec.degrees[0])

    def finish_exchange(self) -> RankCounts:
        """Waits for the counts; raises as `LoadedExchange.finish`."""
        exchange = self._exchange
        assert exchange is not None
        # The exchange refers to this object: let go, both are freed at the end of the call without the
        # collector.
        self._exchange = None
        return exchange.finish()

    def agree(self, parts: Parts, inputs: Inputs) -> Agreed:
        self.orders.modules = parts
        counts = self.finish_exchange()
        return Agreed(counts=counts, choice=choose(self.call.parts, counts, inputs, self.orders))

    def decision(self, parts: Parts, inputs: Inputs, agreed: Agreed) -> Decision:
        assert agreed.counts is not None
        assert agreed.choice is not None
        self.orders.modules = parts
        plan = self.orders.plan(agreed.counts, agreed.choice)
        counts = CallCounts(agreed.counts.on_host(), agreed.counts.max_tokens)
        return in_chunks(self.call, self.routed, inputs, plan, counts)


def in_chunks(call: Call, routed: Routed, inputs: Inputs, plan: Plan, counts: CallCounts) -> Decision:
    """Returns the decision to run by the pipeline engine."""
    return Decision(
        call=call,
        routed=routed,
        inputs=inputs,
        runner=PipelineRunner(plan),
        counts=counts,
        plan=plan,
        restore=plan.restore if call.parts.spec.rotates else None,
    )


class LoadedExchange:
    """The exchange of a call's row counts, in which a rank also reports that its experts were loaded.

    If any rank's were, all ranks compare their experts after the exchange, and exchange the counts again.

    begin: starts the exchange with a fault.
    """

    def __init__(
        self, parts: Parts, routed: Routed, begin: Callable[[Tensor | Fault], CountsExchange]
    ) -> None:
        self._parts = parts
        self._routed = routed
        self._begin = begin
        self._exchange = begin(Fault.LOADED if parts.experts.was_loaded else routed.gated.fault)

    def finish(self) -> RankCounts:
        """Waits for the counts.

        Raises FaultError on all ranks if any rank reported a fault, and on that rank the error behind it.
        Raises ValueError on all ranks if two ranks hold equal experts since a state dict was loaded.
        """
        try:
            return self._exchange.finish()
        except FaultError as error:
            if error.fault is not Fault.LOADED:
                raise (self._routed.failure or error) from None
        check_loaded(self._parts)
        try:
            return self._begin(self._routed.gated.fault).finish()
        except FaultError as error:
            raise (self._routed.failure or error) from None
