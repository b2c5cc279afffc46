"""A call of one rank by the kernels that `pmoe.runners.one_rank` launches: where it fits, and that call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pmoe.engine import recompute
from pmoe.engine.recompute import Decisions
from pmoe.experts import StackedExperts
from pmoe.gates import TopKGate
from pmoe.kernels.route import Routes
from pmoe.layer.last_call import tell_alone
from pmoe.layer.route import check_input
from pmoe.layer.rows import any_requires_grad, autocast_dtype, cast_parameters, of_shape
from pmoe.ordering.sorted import SortedOrder
from pmoe.planner.degree import fixed_degree
from pmoe.runners import one_rank as alone

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


def alone_refusal(layer: MoELayer, x: Tensor) -> str | None:
    """Why a call is not computed by `pmoe.runners.one_rank`, or None where it is."""
    if layer.ranks.size > 1:
        return f"{layer.ranks.size} ranks: rows travel"
    unfit = {
        "rows are sent to this rank itself": not layer.bypass_local or layer.send_once,
        "there are callbacks": bool(layer.callbacks),
        "there is a shared expert": layer.shared_expert is not None,
        "other layers' gradients are reduced inside": layer.gradients is not None,
        f"memory_reuse ({layer.restore})": layer.rotates,
        f"pipeline ({layer.pipeline})": fixed_degree(layer.pipeline) not in (None, 1),
        "rows are dropped over a capacity": layer.capacity_factor is not None,
        "steps are timed one after the other": layer.sequential,
        "the logits are checked": layer.check_finite,
        f"the order is a {type(layer.order).__name__}": type(layer.order) is not SortedOrder,
        "the gate is a module": not layer.trusts_gate,
    }
    why = next((why for why, holds in unfit.items() if holds), None) or alone.refusal(
        layer.gate, layer.experts
    )
    if why is not None:
        return why
    check_input(layer, x)
    assert isinstance(layer.gate, TopKGate) and isinstance(layer.experts, StackedExperts)
    return alone.kernel_refusal(
        layer.gate,
        layer.experts,
        x.reshape(-1, layer.d_model),
        autocast_dtype(x) or x.dtype,
        ranks=layer.ranks,
        needs_grad=any_requires_grad(x, *layer.parameters()),
    )


def route_alone(layer: MoELayer, x_TM: Tensor, decisions: Decisions) -> Routes:
    """As `route`, of one rank whose routing kernel does it all. Autocast must be off."""
    gate = layer.gate
    assert isinstance(gate, TopKGate)

    def decide() -> Routes:
        routes = alone.route_tokens(gate, x_TM)
        recompute.refuse_changed_routing(layer, x_TM.shape[0], routes.expert_TK)
        return routes

    return decisions.route(x_TM, decide)


def forward_alone(layer: MoELayer, x: Tensor, decisions: Decisions) -> Tensor:
    assert isinstance(layer.experts, StackedExperts)
    dtype = autocast_dtype(x) or x.dtype
    x_TM = x.reshape(-1, layer.d_model)
    parameters = cast_parameters(layer.experts, layer.experts.local_parameters(), dtype)
    found = alone.run(lambda: route_alone(layer, x_TM, decisions), layer.experts, x_TM, parameters, dtype)
    needs_grad = any_requires_grad(found.y_TM)
    tell_alone(layer, "alone", x_TM, dtype, l_aux=found.l_aux, counts_E=found.counts_E, needs_grad=needs_grad)
    return of_shape(found.y_TM, x)
