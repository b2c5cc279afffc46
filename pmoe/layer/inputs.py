"""The tensors of a call that have gradients, as the runners take them.

Letters: T tokens, S mixtures of tokens, M = d_model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.engine.passes import Inputs
from pmoe.experts.base import Experts
from pmoe.gates.base import at_least_float32
from pmoe.gates.logits import router_logits
from pmoe.layer.parts import Parts, any_requires_grad
from pmoe.layer.route import Routed


def parameters_of(parts: Parts) -> list[Tensor]:
    """All that backward may differentiate beside rows and routing weights: experts', shared ones', hooks'."""
    shared = parts.shared_expert.parameters() if parts.shared_expert else ()
    return [*parts.experts.local_parameters(), *shared, *parts.hooks.parameters]


def needs_grad(routed: Routed, parameters: list[Tensor]) -> bool:
    """Whether this rank asks for gradients."""
    return any_requires_grad(routed.x_TM, routed.routing.weight, *parameters)


def make_inputs(parts: Parts, routed: Routed, parameters: list[Tensor]) -> Inputs:
    """parameters: `parameters_of` the layer. Under autocast rows and parameters are cast."""
    rows_TM, mix = routed.x_TM, routed.routing.mix
    count = len(parameters) - len(parts.hooks.parameters)
    of_shared = 0 if parts.shared_expert is None else len(list(parts.shared_expert.parameters()))
    own, shared = parameters[: count - of_shared], parameters[count - of_shared : count]
    if routed.autocast is not None:
        rows_TM = rows_TM.to(routed.autocast)
        own = cast_parameters(parts.experts, own, routed.autocast)
        if parts.shared_expert is not None:
            shared = cast_parameters(parts.shared_expert, shared, routed.autocast)
    if mix is not None:
        rows_TM = mix.dispatch.to(rows_TM.dtype).t() @ rows_TM
    return Inputs(
        x_TM=rows_TM,
        weight_TK=routed.routing.weight,
        parameters=own,
        shared_weight_T=shared_weight(parts, routed.x_TM),
        shared_parameters=shared,
        hook_parameters=parameters[count:],
    )


def cast_parameters(experts: Experts, parameters: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Parameters as autocast hands them to operators; modules meet autocast by themselves."""
    return parameters if experts.runs_under_autocast else [each.to(dtype) for each in parameters]


def shared_weight(parts: Parts, x_TM: Tensor) -> Tensor | None:
    """(T,) the factor of the shared expert's output; None where there is none."""
    if parts.shared_expert is None:
        return None
    if parts.shared_gate is None:
        return torch.ones(x_TM.shape[0], dtype=at_least_float32(x_TM[:0]).dtype, device=x_TM.device)
    with torch.autocast(x_TM.device.type, enabled=False):
        return router_logits(x_TM, parts.shared_gate.weight).sigmoid().squeeze(1)
