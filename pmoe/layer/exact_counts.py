"""Row counts of a call by one exchange; the rank's rows are sorted while it is under way.

Letters: F bins, E experts of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pmoe.comm.counts import CountsExchange, FaultError, RankCounts
from pmoe.engine.passes import Inputs
from pmoe.engine.replay import hidden_from_checkpoints
from pmoe.layer.choose import Batch, choose, slots_to_ask
from pmoe.layer.decision import Agreed, Decision
from pmoe.layer.orders import Orders
from pmoe.layer.parts import Call, Parts, any_requires_grad
from pmoe.layer.route import Operands, Routed, make_inputs, route_batch
from pmoe.ordering.sorted import Tokens
from pmoe.runners.pipeline import PipelineRunner


@dataclass(frozen=True)
class ExactCounts:
    """Counts that were exchanged."""

    counts: RankCounts

    @property
    def max_tokens(self) -> int:
        return self.counts.max_tokens

    def rows(self) -> RankCounts:
        return self.counts

    def kept_E(self) -> Tensor:
        return self.counts.send.sum(0).flatten()


def decide(call: Call) -> Decision:
    """As `pmoe.layer.decision.decide`, of any layer."""
    if call.parts.spec.fused:
        from pmoe.layer import fused

        return fused.decide(call)
    routed, orders = sorted_rows(call)
    operands = Operands.of(call.parts)
    finish = start(call, routed, orders, operands)
    inputs = make_inputs(call.parts, routed, operands)
    sort_early(call.parts, orders)

    def agree() -> Agreed:
        counts = finish()
        return Agreed(counts=counts, choice=choose(Batch.of(call.parts, routed, counts, inputs, orders)))

    return in_chunks(call, routed, inputs, orders, call.replay.once(agree))


def sorted_rows(call: Call) -> tuple[Routed, Orders]:
    """The routed tokens, and their slots as they can be sorted."""
    routed = route_batch(call)
    routing = routed.routing
    count = routing.expert.shape[0] if routing.token is None else routed.num_tokens
    tokens = Tokens(count, routing.token)
    kind = Orders
    if call.parts.spec.send_once:
        from pmoe.layer.once_orders import OnceOrders

        kind = OnceOrders
    return routed, kind(call.parts, routing.expert, routed.gated.keep_TK, tokens)


def start(
    call: Call, routed: Routed, orders: Orders, operands: Operands, *, asks_max_rows: bool = False
) -> Callable[[], RankCounts]:
    """Begins the exchange of counts, and returns what ends it. A second pass exchanges nothing.

    Counts travel in bins: the chunks, where their number is fixed and so is their share of rows.
    asks_max_rows: as in `CountsExchange`.
    """
    if call.replay.is_replay:
        return _never
    parts, routing, x_TM = call.parts, routed.routing, routed.x_TM
    takes_k = routing.expert.shape[1] == parts.spec.top_k  # dropped rows among them
    with hidden_from_checkpoints():
        exchange = CountsExchange(
            parts.grid,
            orders.count(parts.num_bins),
            num_tokens=orders.tokens.count,
            fault=routed.gated.fault,
            needs_grad=any_requires_grad(x_TM, routing.weight, *operands),
            dtype=routed.dtype,
            traffic=parts.traffic,
            slots=slots_to_ask(parts, routed),
            once_FP=orders.count_once(parts.num_bins),
            exchanges=(parts.dispatch, parts.combine),
            bypass_local=parts.stages.local,
            asks_max_rows=asks_max_rows,
            one_row_a_choice=takes_k and routing.mix is None and routing.token is None,
        )

    def finish() -> RankCounts:
        try:
            return exchange.finish()
        except FaultError as error:
            raise (routed.failure or error) from None

    return finish


def _never() -> RankCounts:
    raise AssertionError("a second pass takes over the counts of the first one")


def sort_early(parts: Parts, orders: Orders) -> None:
    """Sorts while the counts travel, where no count can change the chunks."""
    degrees = parts.spec.degrees
    if len(degrees) == 1 and not parts.spec.rotates:
        orders.of(degrees[0])


def in_chunks(call: Call, routed: Routed, inputs: Inputs, orders: Orders, agreed: Agreed) -> Decision:
    """The decision to run by the pipeline engine."""
    counts, choice = agreed.counts, agreed.choice
    assert counts is not None and choice is not None
    with hidden_from_checkpoints():  # trials may have made parts of it
        plan = orders.plans(counts)(choice.forward, choice.backward, choice.restore)
    return Decision(
        call=call,
        routed=routed,
        inputs=inputs,
        runner=PipelineRunner(plan),
        counts=ExactCounts(counts.on_host()),
        needs_grad=counts.needs_grad,
        plan=plan,
        restore=plan.restore if call.parts.spec.rotates else None,
    )
