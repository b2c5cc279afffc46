"""The experts between dispatch and combine: by the pipeline engine, the fused kernels, or both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pmoe.comm.counts import Shared
from pmoe.engine import recompute
from pmoe.engine.autograd import run_experts
from pmoe.engine.callbacks import Hooks
from pmoe.engine.passes import Inputs
from pmoe.engine.plan import Plan
from pmoe.engine.recompute import Decisions
from pmoe.layer.choose import choose, choose_degrees
from pmoe.layer.last_call import how_it_ran
from pmoe.layer.plans import PlanFor
from pmoe.layer.route import Routed
from pmoe.layer.rows import autocast_dtype, cast_parameters
from pmoe.measure.products import settle_products
from pmoe.runners import fused as comet

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


def make_inputs(
    layer: MoELayer,
    hooks: Hooks,
    routed: Routed,
    parameters: list[Tensor],
    shared_weight_T: Tensor | None = None,
) -> Inputs:
    """parameters: of the experts, this rank's part."""
    rows_TM, mix = routed.x_TM, routed.routing.mix
    shared_parameters = list[Tensor](layer.shared_expert.parameters()) if layer.shared_expert else []
    dtype = autocast_dtype(rows_TM)
    if dtype is not None:
        rows_TM = rows_TM.to(dtype)
        parameters = cast_parameters(layer.experts, parameters, dtype)
        if layer.shared_expert is not None:
            shared_parameters = cast_parameters(layer.shared_expert, shared_parameters, dtype)
    if mix is not None:
        rows_TM = mix.dispatch.to(rows_TM.dtype).t() @ rows_TM
    return Inputs(
        x_TM=rows_TM,
        weight_TK=routed.routing.weight,
        parameters=parameters,
        shared_weight_T=shared_weight_T,
        shared_parameters=shared_parameters,
        hook_parameters=hooks.parameters,
    )


def run(
    layer: MoELayer,
    routed: Routed,
    inputs: Inputs,
    shared: Shared,
    plan_for: PlanFor,
    decisions: Decisions,
    call: comet.Call | None = None,
) -> Tensor:
    """T_O, and what the layer tells of how it came. call: what the fused kernels compute it by."""
    x = routed.x
    dtype = autocast_dtype(x)
    inside = dtype is not None and layer.experts.runs_under_autocast
    with torch.autocast(x.device.type, enabled=inside, dtype=dtype):
        if call is not None and (layer.fused != "forward" or not shared.needs_grad):
            plan, y_TM = None, comet.run(call, inputs, needs_grad=shared.needs_grad)
        else:
            _settle(layer, x, shared)
            plan, y_TM = _piped(layer, shared, plan_for, inputs, call, decisions)
    layer.ran = how_it_ran(routed, shared, inputs, call, plan)
    return y_TM


def _piped(
    layer: MoELayer,
    shared: Shared,
    plan_for: PlanFor,
    inputs: Inputs,
    call: comet.Call | None,
    decisions: Decisions,
) -> tuple[Plan, Tensor]:
    """T_O by the pipeline engine; with ``call``, forward by the fused kernels, in the chunks of backward."""
    if call is None:
        choice = decisions.once("choice", lambda: choose(layer, shared, plan_for, inputs))
        with recompute.unseen():  # trials may have made parts of it
            plan = plan_for(choice.forward, choice.backward, choice.restore)
        return plan, run_experts(plan, inputs, needs_grad=shared.needs_grad)
    pair = call.restore
    degrees = decisions.once("degrees", lambda: choose_degrees(layer, shared, pair, plan_for, inputs))
    backward = degrees.backward
    with recompute.unseen():
        plan = plan_for(backward, backward, call.restore)
    forward = comet.forward_by(call, shared.recv_device)
    return plan, run_experts(plan, inputs, needs_grad=True, forward=forward)


def _settle(layer: MoELayer, x: Tensor, shared: Shared) -> None:
    """Has the ways to compute the experts' products measured where that has not been done."""
    dtype, most = autocast_dtype(x) or x.dtype, shared.max_tokens
    even_rows = most * layer.top_k * layer.grid.inside.size
    needs_grad = shared.needs_grad
    with recompute.unseen():
        settle_products(layer.experts, layer.ranks, dtype, x.device, even_rows, needs_grad=needs_grad)
        if layer.shared_expert is not None:
            settle_products(layer.shared_expert, layer.ranks, dtype, x.device, most, needs_grad=needs_grad)
