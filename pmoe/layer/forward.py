"""A forward pass, its stages in the order in which a token meets them: gate, order, dispatch, experts,
combine. The last three are the tasks of a schedule, and run in `pmoe.layer.run`.

Letters: T tokens of this rank, K choices, E experts of the group, M = d_model, F bins, P ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pmoe.comm.counts import CountsExchange, FaultError, Shared
from pmoe.engine import recompute
from pmoe.engine.plan import Modules
from pmoe.gates.base import at_least_float32
from pmoe.gates.logits import router_logits
from pmoe.layer.alike import check_alike
from pmoe.layer.alone import alone_refusal, forward_alone
from pmoe.layer.capture import check_capturable, is_capturing
from pmoe.layer.choose import ask_slots
from pmoe.layer.fused import fused_alone, fused_call, fused_steps, gives_top_k, may_fuse
from pmoe.layer.last_call import OF_LAST_CALL
from pmoe.layer.padded import forward_padded
from pmoe.layer.plans import Orders, plans_of
from pmoe.layer.route import Routed, route
from pmoe.layer.rows import any_requires_grad, autocast_dtype, of_shape
from pmoe.layer.run import make_inputs, run
from pmoe.ordering.sorted import Tokens
from pmoe.runners import fused as comet

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


def forward(layer: MoELayer, x: Tensor, token_ids: Tensor | None) -> Tensor:
    """Route, exchange counts, plan, run the experts between dispatch and combine."""
    layer.grid.reconnect()
    if is_capturing(x):
        check_capturable(layer, x)
    decisions = recompute.decisions_of(layer, OF_LAST_CALL)
    if layer.ranks.size > 1 and not layer._is_compared:
        with recompute.unseen():
            check_alike(layer)
        layer._is_compared = True
    if layer.pad_to_capacity:
        return forward_padded(layer, x, token_ids, decisions)
    fuses = decisions.once("may_fuse", lambda: may_fuse(layer, x))
    if fuses and layer.ranks.size == 1:
        fused = fused_alone(layer, x, decisions)
        if fused is not None:
            return fused
    elif decisions.once("alone", lambda: alone_refusal(layer, x) is None):
        return forward_alone(layer, x, decisions)

    routed = route(layer, x, token_ids, decisions)
    routing, keep_TK = routed.routing, routed.decided.keep_TK
    modules = layer.modules_of_plan
    tokens = Tokens(routing.expert.shape[0] if routing.token is None else routed.num_tokens, routing.token)
    orders = Orders(layer, modules.stages, routing.expert, keep_TK, tokens)
    parameters, shared_weight_T = layer.experts.local_parameters(), _shared_weight(layer, routed.x_TM)
    counts_FE = orders.count(layer.num_bins)
    exchange = None
    if not decisions.taken_over:
        with recompute.unseen():
            exchange = _send_counts(layer, routed, orders, counts_FE, modules, parameters, fuses)
    # While the counts travel: no count can change these orders.
    sent = comet.sort(routing.expert, keep_TK, layer.num_experts) if fuses else None
    if len(layer.degree_candidates) == 1 and not modules.rotates and sent is None:
        orders.of(layer.degree_candidates[0])

    def finish() -> Shared:
        assert exchange is not None
        try:
            return exchange.finish()
        except FaultError as error:
            raise (routed.failure or error) from None

    shared = decisions.once("shared", finish)
    layer.l_aux = routing.l_aux
    layer._counted, layer.max_tokens = shared.on_host(), shared.max_tokens

    inputs = make_inputs(layer, modules.hooks, routed, parameters, shared_weight_T)
    call = None
    if sent is not None:
        steps = decisions.once("steps", lambda: fused_steps(layer, inputs.x_TM, shared))
        if steps is not None:
            journey = comet.make_journey(routing.expert, sent, counts_FE, shared, layer.ranks.rank)
            call = fused_call(layer, steps, journey)
    plan_for = plans_of(layer, modules, orders, shared)
    y_TM = run(layer, routed, inputs, shared, plan_for, decisions, call)
    if routing.mix is not None:
        y_TM = routing.mix.combine.to(y_TM.dtype) @ y_TM
    y = of_shape(y_TM, routed.x)
    for callback in layer.callbacks:
        y = callback.before_moe_end(y)
    return y


def _send_counts(
    layer: MoELayer,
    routed: Routed,
    orders: Orders,
    counts_FE: Tensor,
    modules: Modules,
    parameters: list[Tensor],
    fuses: bool,
) -> CountsExchange:
    """Counts travel in bins: the chunks, where their number is fixed and so is their share of rows."""
    x_TM, routing = routed.x_TM, routed.routing
    shared_parameters = layer.shared_expert.parameters() if layer.shared_expert else ()
    operands = (*parameters, *shared_parameters, *modules.hooks.parameters)
    return CountsExchange(
        layer.grid,
        counts_FE,
        num_tokens=orders.tokens.count,
        fault=routed.decided.fault,
        needs_grad=any_requires_grad(x_TM, routing.weight, *operands),
        dtype=autocast_dtype(x_TM) or x_TM.dtype,
        traffic=layer.traffic,
        slots=ask_slots(layer, x_TM) if modules.rotates else None,
        once_FP=orders.count_once(layer.num_bins),
        exchanges=(layer.dispatch, layer.combine),
        bypass_local=modules.stages.local,
        asks_most_rows=fuses,
        one_row_a_choice=gives_top_k(layer, routing),
    )


def _shared_weight(layer: MoELayer, x_TM: Tensor) -> Tensor | None:
    """(T,) the factor of the shared expert's output."""
    if layer.shared_expert is None:
        return None
    if layer.shared_gate is None:
        return torch.ones(x_TM.shape[0], dtype=at_least_float32(x_TM[:0]).dtype, device=x_TM.device)
    with torch.autocast(x_TM.device.type, enabled=False):
        return router_logits(x_TM, layer.shared_gate.weight).sigmoid().squeeze(1)
