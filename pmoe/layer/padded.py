"""A forward pass whose rows are padded to capacity: the number of tokens says where rows go.

Letters: N padded rows, T tokens of this rank, K choices, E experts of the group, M = d_model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from pmoe.comm.counts import FaultError
from pmoe.engine import padded, recompute
from pmoe.engine.recompute import Decisions
from pmoe.gates import GATES, ExpertChoiceGate, SoftGate
from pmoe.layer.last_call import CountedPadded
from pmoe.layer.plans import Orders, plans_of
from pmoe.layer.route import Routed, decides_capacity, route
from pmoe.layer.rows import any_requires_grad, autocast_dtype, of_shape
from pmoe.layer.run import make_inputs, run
from pmoe.ordering.capacity import expert_capacity
from pmoe.ordering.sorted import Tokens

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


def unfit_to_pad(layer: MoELayer) -> str | None:
    """Why rows of a layer cannot be padded to capacity, whatever its tokens. None where they can."""
    gate = layer.gate
    whole = isinstance(gate, SoftGate | ExpertChoiceGate) or decides_capacity(gate)
    unfit = {
        f"capacity_factor is {layer.capacity_factor}, which sets no capacity": layer.capacity_factor is None
        and not whole,
        f"the gate ({type(gate).__name__}) decides itself what is kept, or mixes tokens": whole,
        f"gate ({type(gate).__name__}) is a module of one's own: what it returns is checked when counts are "
        "exchanged": type(gate) not in GATES.values(),
        "logits are checked (check_finite=True): ranks tell each other with the counts": layer.check_finite,
        "rows travel once (send_once=True): how many do is not known before": layer.send_once,
        "experts are sharded over the ranks of a node": layer.grid.is_sharded,
        "rows do not travel by flat all-to-alls": layer.dispatch.in_steps or layer.combine.in_steps,
        "there are callbacks, which would see padding": bool(layer.callbacks),
        "there is a shared_expert, which would compute padding": layer.shared_expert is not None,
        f"kernels are fused (fused={layer.fused!r}): they send no padding": bool(layer.fused),
    }
    return next((why for why, holds in unfit.items() if holds), None)


def padded_call(layer: MoELayer, x_TM: Tensor) -> padded.Call:
    return padded.Call(
        num_tokens=x_TM.shape[0],
        needs_grad=any_requires_grad(x_TM, *layer.parameters()),
        dtype=autocast_dtype(x_TM) or x_TM.dtype,
    )


def forward_padded(layer: MoELayer, x: Tensor, token_ids: Tensor | None, decisions: Decisions) -> Tensor:
    """As `pmoe.layer.forward`. Ranks agree on the number of tokens, and tell each other of faults, as
    `pmoe.engine.padded.agrees_always` says, or where a checkpoint routes again."""
    routed = route(layer, x, token_ids, decisions)
    routing, device = routed.routing, routed.x_TM.device
    call = padded_call(layer, routed.x_TM)
    _agree(layer, routed, call)
    splits = _splits(layer, call, top_k=routing.expert.shape[1])
    padding, kept_E = padded.make_padding(routing.expert, splits)
    max_tokens = -(-splits.num_rows // routing.expert.shape[1])
    shared = splits.shared(layer.ranks.size, device, max_tokens=max_tokens, needs_grad=call.needs_grad)
    layer.l_aux, layer.max_tokens = routing.l_aux, call.num_tokens
    layer._counted = CountedPadded(shared.on_host(), kept_E)

    modules = layer.modules_of_plan
    expert_N1 = splits.expert_of_rows(device)
    orders = Orders(layer, modules.stages, expert_N1, None, Tokens(splits.num_rows))
    plan_for = plans_of(layer, modules, orders, shared, padding)
    inputs = make_inputs(layer, modules.hooks, routed, layer.experts.local_parameters())
    return of_shape(run(layer, routed, inputs, shared, plan_for, decisions), routed.x)


def _agree(layer: MoELayer, routed: Routed, call: padded.Call) -> None:
    agrees_always, is_again = padded.agrees_always(routed.x_TM.device), routed.decided.is_again
    if routed.failure is not None and layer._agreed and not agrees_always:
        raise routed.failure  # the others may not ask
    if not (agrees_always or call not in layer._agreed or is_again):
        return
    if layer.ranks.size > 1 or is_again:
        try:
            with recompute.unseen():
                padded.check_alike(
                    layer.grid,
                    call,
                    num_experts=layer.num_experts,
                    device=routed.x_TM.device,
                    fault=routed.decided.fault,
                    traffic=layer.traffic,
                )
        except FaultError as error:
            raise (routed.failure or error) from None
    layer._agreed |= {call}


def _splits(layer: MoELayer, call: padded.Call, top_k: int) -> padded.Splits:
    assert layer.capacity_factor is not None
    capacity = expert_capacity(layer.capacity_factor, call.num_tokens, top_k, layer.num_experts)
    return padded.Splits(
        num_experts=layer.num_experts,
        capacity=min(capacity, call.num_tokens),  # a token's experts are distinct
        bins=math.lcm(*layer.degree_candidates),
    )
