"""The tensors of a call that have gradients, as the runners take them.

Letters: T tokens, S mixtures of tokens, M = d_model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.engine.passes import Inputs
from pmoe.experts.base import Experts
from pmoe.gates.base import at_least_float32
from pmoe.gates.logits import router_logits
from pmoe.layer.parts import Parts
from pmoe.layer.route import Routed


@dataclass(frozen=True)
class Operands:
    """What backward may differentiate beside rows and routing weights."""

    experts: list[Tensor]
    shared: list[Tensor]
    hooks: tuple[Tensor, ...]

    @staticmethod
    def of(parts: Parts) -> Operands:
        """The parameters as they are now: modules may have other ones at the next call."""
        shared = [] if parts.shared_expert is None else list[Tensor](parts.shared_expert.parameters())
        hooks = () if parts.hooks is None else parts.hooks.parameters
        return Operands(parts.experts.local_parameters(), shared, hooks)

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.chain(self.experts, self.shared, self.hooks)


def make_inputs(parts: Parts, routed: Routed, operands: Operands) -> Inputs:
    """Under autocast rows and parameters are cast."""
    rows_TM, mix = routed.x_TM, routed.routing.mix
    experts, shared = operands.experts, operands.shared
    if routed.autocast is not None:
        rows_TM = rows_TM.to(routed.autocast)
        experts = cast_parameters(parts.experts, experts, routed.autocast)
        if parts.shared_expert is not None:
            shared = cast_parameters(parts.shared_expert, shared, routed.autocast)
    if mix is not None:
        rows_TM = mix.dispatch.to(rows_TM.dtype).t() @ rows_TM
    return Inputs(
        x_TM=rows_TM,
        weight_TK=routed.routing.weight,
        parameters=experts,
        shared_weight_T=shared_weight(parts, routed.x_TM),
        shared_parameters=shared,
        hook_parameters=operands.hooks,
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
