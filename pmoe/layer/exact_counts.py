"""Row counts of a call by one exchange; the rank's rows are sorted while it is under way."""

from __future__ import annotations

from torch import Tensor

from pmoe.comm.counts import CountsExchange, Fault, FaultError, RankCounts
from pmoe.comm.ranks import telling
from pmoe.engine.cut import Orders
from pmoe.engine.passes import Inputs
from pmoe.engine.plan import Plan
from pmoe.engine.replay import hidden_from_checkpoints
from pmoe.layer.choose import choose, slots_to_ask
from pmoe.layer.decision import Agreed, CallCounts, Decision, RoutedCall
from pmoe.layer.parts import Call, Parts
from pmoe.layer.route import Routed, route_batch
from pmoe.layer.stored_state import LoadedExchange
from pmoe.ordering.sorted import Tokens
from pmoe.runners.pipeline import PipelineRunner


def route_call(call: Call) -> RoutedCall:
    """As `pmoe.layer.decision.route_call`, of any layer. The exchange of counts is under way then."""
    parts = call.parts
    if parts.spec.fused:
        from pmoe.layer import fused

        return fused.route_call(call)
    routed, orders = sorted_rows(call)
    with telling(parts.ranks, "the exchange of row counts"):
        exchange = start(call, routed, orders)
        sort_early(parts, orders)

    def decide(scheduled: Parts, inputs: Inputs) -> Decision:
        orders.modules = scheduled

        def agree() -> Agreed:
            counts = shared_counts(exchange, routed)
            return Agreed(counts=counts, choice=choose(parts, counts, inputs, orders))

        agreed = call.replay.once(agree)
        assert agreed.counts is not None and agreed.choice is not None
        counts = CallCounts(agreed.counts.on_host(), agreed.counts.max_tokens)
        return in_chunks(call, routed, inputs, orders.plan(agreed.counts, agreed.choice), counts)

    return RoutedCall(call=call, routed=routed, decide=decide)


def sorted_rows(call: Call) -> tuple[Routed, Orders]:
    """The routed tokens, and their slots as they can be sorted."""
    routed = route_batch(call)
    routing = routed.routing
    count = routing.expert.shape[0] if routing.token is None else routed.num_tokens
    kind = Orders
    if call.parts.spec.send_once:
        from pmoe.engine.once import OnceOrders

        kind = OnceOrders
    return routed, kind(call.scheduled, routing.expert, routing.keep, Tokens(count, routing.token))


def start(
    call: Call, routed: Routed, orders: Orders, *, asks_max_rows: bool = False
) -> LoadedExchange | None:
    """Begins the exchange of counts; None in a second pass, which takes over those of the first.

    Counts travel in bins: the chunks, where their number is fixed and so is their share of rows.
    asks_max_rows: as in `CountsExchange`.
    """
    if call.replay.is_replay:
        return None
    parts, routing = call.parts, routed.routing
    takes_k = routing.expert.shape[1] == parts.spec.top_k  # dropped rows among them

    def begin(fault: Tensor | Fault) -> CountsExchange:
        return CountsExchange(
            parts.grid,
            orders.count(parts.num_bins),
            num_tokens=orders.tokens.count,
            fault=fault,
            needs_grad=parts.asks_for_gradients(routed.x_TM, routing.weight),
            training=call.layer.training,
            dtype=routed.dtype,
            traffic=parts.traffic,
            slots=slots_to_ask(parts, routed),
            once_FP=orders.count_once(parts.num_bins),
            exchanges=(parts.dispatch, parts.combine),
            bypass_local=parts.stages.local,
            asks_max_rows=asks_max_rows,
            one_row_a_choice=takes_k and routing.mix is None and routing.token is None,
        )

    with hidden_from_checkpoints():
        return LoadedExchange(parts, routed.gated.fault, begin)


def shared_counts(exchange: LoadedExchange | None, routed: Routed) -> RankCounts:
    """Ends the exchange. Raises FaultError where a rank reports a fault, or what is behind its own."""
    assert exchange is not None
    try:
        return exchange.finish()
    except FaultError as error:
        raise (routed.failure or error) from None


def sort_early(parts: Parts, orders: Orders) -> None:
    """Sorts while the counts travel, where no count can change the chunks."""
    degrees = parts.spec.degrees
    if len(degrees) == 1 and not parts.spec.rotates:
        orders.slots(degrees[0]), orders.sent(degrees[0])


def in_chunks(call: Call, routed: Routed, inputs: Inputs, plan: Plan, counts: CallCounts) -> Decision:
    """The decision to run by the pipeline engine."""
    return Decision(
        call=call,
        routed=routed,
        inputs=inputs,
        runner=PipelineRunner(plan),
        counts=counts,
        plan=plan,
        restore=plan.restore if call.parts.spec.rotates else None,
    )
