"""COMET's fused kernels in a layer: which calls they take, and what they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pmoe.comm.counts import Shared
from pmoe.engine.passes import Inputs
from pmoe.engine.recompute import Decisions
from pmoe.experts import StackedExperts
from pmoe.gates import ExpertChoiceGate, Routing, SoftGate
from pmoe.kernels.comet import Journey, Steps
from pmoe.layer.alone import route_alone
from pmoe.layer.last_call import tell_alone
from pmoe.layer.route import check_input
from pmoe.layer.rows import any_requires_grad, autocast_dtype, cast_parameters, of_shape
from pmoe.ordering.sorted import SortedOrder
from pmoe.runners import fused as comet
from pmoe.runners import one_rank as alone
from pmoe.schedule.restore import KEEP, Restore
from pmoe.warn import warn_once

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


def gives_top_k(layer: MoELayer, routing: Routing) -> bool:
    """Whether every token has top_k rows of its own, dropped ones among them."""
    return routing.token is None and routing.mix is None and routing.expert.shape[1] == layer.top_k


def _unfit_to_fuse(layer: MoELayer) -> str | None:
    """Why no call of a layer that asks for the fused kernels is computed by them, whatever its tokens: the
    same on every rank. None where a call may be."""
    unfit = {
        "nothing travels on one rank": layer.fused == "auto" and layer.ranks.size == 1,
        f"the experts are {type(layer.experts).__name__}": not comet.takes(layer.experts),
        "experts are sharded over the ranks of a node": layer.grid.is_sharded,
        "there are callbacks": bool(layer.callbacks),
        "there is a shared expert": layer.shared_expert is not None,
        "rows travel once (send_once=True)": layer.send_once,
        "rows are sent to their own rank (bypass_local=False)": not layer.bypass_local,
        "rows do not travel by flat all-to-alls": not layer.is_flat,
        f"the order is a {type(layer.order).__name__}": type(layer.order) is not SortedOrder,
        f"the gate is a {type(layer.gate).__name__}": isinstance(layer.gate, SoftGate | ExpertChoiceGate),
        "there is a memory_budget": layer.memory_budget is not None,
        "steps are timed one after the other (sequential=True)": layer.sequential,
        "collectives wait for each other (one_lane=True)": layer.one_lane,
        "other layers' gradients are reduced inside": layer.gradients is not None,
    }
    return next((why for why, holds in unfit.items() if holds), None)


def is_fusible(layer: MoELayer) -> bool:
    """Whether any step of this layer may be computed by the fused kernels."""
    return bool(layer.fused) and _unfit_to_fuse(layer) is None and _fused_pair(layer) is not None


def may_fuse(layer: MoELayer, x: Tensor) -> bool:
    """Whether the fused kernels may take a call, whatever its row counts; the same on every rank. Where not,
    the reason is told."""
    if not layer.fused:
        return False
    why = _unfit_to_fuse(layer)
    if why is None and layer.ranks.size == 1:
        check_input(layer, x)
        assert isinstance(layer.experts, StackedExperts)
        _, d_model, d_hidden = layer.experts.w2.shape
        dtype = autocast_dtype(x) or x.dtype
        why = comet.refusal(x.device, dtype, d_model=d_model, d_hidden=d_hidden)
    if why is not None:
        _tell_unfused(layer, why)
    return why is None


def _tell_unfused(layer: MoELayer, why: str) -> None:
    """Once a reason: reasons with numbers begin alike, up to a colon."""
    if layer.fused != "auto":
        warn_once(f"fused ({layer.fused!r}) falls back to the unfused layer because {why}")


def _fused_refusal(layer: MoELayer, shared: Shared) -> str | None:
    """Why a call is not computed by the fused kernels, as far as its sizes on a device have no part in it, or
    None. The same on every rank."""
    if shared.most_rows is None:
        return f"the gate ({type(layer.gate).__name__}) does not give every token top_k ({layer.top_k}) rows"
    if shared.needs_grad and _fused_pair(layer) is None:
        return f"memory_reuse ({layer.restore}) offloads"
    return None


def _fused_pair(layer: MoELayer) -> Restore | None:
    """The restore pair of a fused call: the layer's, or the one that does not offload where it may choose."""
    return next((pair for pair in layer.chooser.pairs if not pair.offloads), None)


def fused_steps(layer: MoELayer, rows_TM: Tensor, shared: Shared) -> Steps | None:
    """What computes a call by the fused kernels; None, with a warning, where they do not take it."""
    why = _fused_refusal(layer, shared)
    if why is None:
        assert shared.most_rows is not None
        request = _fused_request(
            layer, rows_TM.device, rows_TM.dtype, shared.max_tokens, shared.most_rows, shared.needs_grad
        )
        if layer.fused == "auto" and not comet.worth(request):
            return None
        found = comet.steps_for(request)
        if not isinstance(found, str):
            return found
        why = found
    _tell_unfused(layer, why)
    return None


def _fused_request(
    layer: MoELayer,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
    most_rows: int,
    needs_grad: bool,
) -> comet.Request:
    assert isinstance(layer.experts, StackedExperts)
    return comet.Request(
        ranks=layer.ranks,
        device=device,
        dtype=dtype,
        d_model=layer.d_model,
        d_hidden=layer.experts.w2.shape[2],
        activation=alone.activation_of(layer.experts),
        experts=layer.num_local_experts,
        top_k=layer.top_k,
        max_tokens=max_tokens,
        most_rows=most_rows,
        needs_grad=needs_grad,
        slack=layer.slack,
    )


def fused_alone(layer: MoELayer, x: Tensor, decisions: Decisions) -> Tensor | None:
    """A call of one rank by the fused kernels, in four launches: the gate's product, the routing, those two.
    None where the gate is none that the routing kernel computes, or where the call falls back."""
    gate = layer.gate
    whole = layer.trusts_gate and layer.capacity_factor is None and not layer.check_finite
    if not whole or alone.refusal(gate, layer.experts) is not None or _fused_pair(layer) is None:
        return None
    x_TM = x.reshape(-1, layer.d_model)
    needs_grad = any_requires_grad(x, *layer.parameters())
    if layer.fused == "forward" and needs_grad:
        return None  # the pipeline engine's backward pass wants the counts on the host
    dtype, num_tokens = autocast_dtype(x) or x.dtype, x_TM.shape[0]
    request = _fused_request(layer, x.device, dtype, num_tokens, num_tokens * layer.top_k, needs_grad)
    steps = decisions.once("steps alone", lambda: comet.steps_for(request))
    if isinstance(steps, str):
        return None  # which is told where the call goes on
    with torch.autocast(x.device.type, enabled=False):
        routes = route_alone(layer, x_TM, decisions)
        call = fused_call(layer, steps, comet.journey_alone(routes))
        parameters = cast_parameters(layer.experts, layer.experts.local_parameters(), dtype)
        inputs = Inputs(x_TM=x_TM.to(dtype), weight_TK=routes.weight_TK, parameters=parameters)
        y_TM = comet.run(call, inputs, needs_grad=needs_grad)
    l_aux, counts_E = routes.l_aux, routes.counts_nE[0]
    tell_alone(
        layer,
        "fused",
        x_TM,
        dtype,
        l_aux=l_aux,
        counts_E=counts_E,
        needs_grad=needs_grad,
        restore=call.restore,
    )
    return of_shape(y_TM, x)


def fused_call(layer: MoELayer, steps: Steps, journey: Journey) -> comet.Call:
    assert isinstance(layer.experts, StackedExperts)
    activation = alone.activation_of(layer.experts)
    restore = _fused_pair(layer) or KEEP  # of a call without a backward pass
    return comet.Call(steps=steps, journey=journey, activation=activation, restore=restore)
