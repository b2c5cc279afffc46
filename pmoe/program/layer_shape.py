"""The facts of a layer on which a pass program depends, and the refusal of layers that have no program."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.comm.base import FlatAllToAll
from pmoe.engine.plan.plan import PassModules, Plan
from pmoe.experts.ffn import FFNExperts
from pmoe.experts.stacked import OPERANDS, StackedExperts
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.ordering.sorted import SortedOrder
from pmoe.schedule.buffer_sizes import HiddenColumns

INDEX_BYTES = 4
"""Bytes of an index or of a position of a row: int32."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The facts of a layer on which the records of its passes depend. They are the same for all calls.

    ranks: W, number of ranks.
    local_experts: E_local, experts of each rank.
    top_k: K, choices of a token.
    d_model: M, columns of a row.
    columns: columns of the tensors inside the experts.
    bias: whether experts have the biases b1 and b2.
    keeps_own: whether rows for this rank's own experts stay on it.
    sends: whether rows are sent.
    weighs_active: whether backward multiplies the activated hidden by the routing weights, in place of the
        gradient of the output. pmoe's kernels do so if there is no bias.
    element_bytes: bytes of a number of rows and parameters.
    weight_bytes: bytes of a routing weight.
    sum_bytes: bytes of a number of the sums of parameters' gradients.
    trained: names of the experts' parameters of which backward computes gradients.
    """

    ranks: int
    local_experts: int
    top_k: int
    d_model: int
    columns: HiddenColumns
    bias: bool
    keeps_own: bool
    sends: bool
    weighs_active: bool
    element_bytes: int
    weight_bytes: int
    sum_bytes: int
    trained: frozenset[str] = frozenset(OPERANDS)

    @staticmethod
    def of(plan: Plan, x_TM: Tensor, weight_TK: Tensor, trained: Collection[str] = OPERANDS) -> LayerShape:
        """Returns the facts of a layer.

        plan: the plan of one of its calls.
        x_TM: (T, M), the input of the call. Only its dtype, device and width matter.
        weight_TK: (T, K), the routing weights of the call. Only their dtype matters.
        trained: names of the experts' parameters of which backward computes gradients. If there are none, the
            backward pass has a schedule without them (`Schedule.frozen`).

        Raises ValueError if a pass program cannot compute calls such as this one. The message names the
        reason. The engine computes these calls.
        """
        reason = program_refusal(plan)
        if reason is not None:
            raise ValueError(
                f"a pass program does not take this layer: {reason}. The engine (pmoe.engine) runs it"
            )
        modules = plan.modules
        experts = modules.experts
        assert isinstance(experts, StackedExperts)
        is_narrow = x_TM.dtype in (torch.bfloat16, torch.float16)
        return LayerShape(
            ranks=modules.grid.all.size,
            local_experts=experts.num_local_experts,
            top_k=plan.top_k,
            d_model=x_TM.shape[1],
            columns=experts.columns(x_TM.device.type),
            bias=experts.has_bias,
            keeps_own=modules.stages.local,
            sends=modules.stages.remote,
            weighs_active=x_TM.is_cuda and not experts.has_bias,
            element_bytes=x_TM.element_size(),
            weight_bytes=weight_TK.element_size(),
            sum_bytes=4 if is_narrow else x_TM.element_size(),
            trained=frozenset(trained),
        )


def program_refusal(plan: Plan) -> str | None:
    """Returns the first reason why a pass program cannot compute a call; None if it can.

    plan: the plan of the call.
    """
    return _refusal_of_modules(plan.modules) or _refusal_of_call(plan)


def _refusal_of_modules(modules: PassModules) -> str | None:
    """Returns the first reason that lies in the layer's modules and options; None if there is none."""
    stages = modules.stages
    experts = modules.experts
    exchanges = {type(modules.dispatch).__name__, type(modules.combine).__name__}
    reasons = {
        "callbacks see rows between the gate and the end of combine": modules.hooks is not None,
        f"experts ({type(experts).__name__}) are neither ffn nor swiglu": (
            type(experts) not in (FFNExperts, SwiGLUExperts)
        ),
        "there is a shared expert": stages.shared,
        "experts are sharded over the ranks of a node": stages.sharded,
        "busy experts have copies": stages.copies is not None,
        "other layers' gradients are reduced inside its backward pass": stages.gradients,
        f"rows travel by {', '.join(sorted(exchanges))}": exchanges != {FlatAllToAll.__name__},
        f"the order is a {type(modules.order).__name__}": type(modules.order) is not SortedOrder,
        "rows are sent in another form (wire)": modules.wires is not None,
        "operands of the experts' products are rounded (products)": modules.products is not None,
        "chunks have buffers of their own (memory_reuse=False)": not modules.rotates,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _refusal_of_call(plan: Plan) -> str | None:
    """Returns the first reason that lies in the plan of the call; None if there is none."""
    n = len(plan.forward.chunks)
    n_backward = len(plan.backward.chunks)
    reasons = {
        f"forward has {n} chunks and backward {n_backward}": n != n_backward,
        f"its restore pair ({plan.restore}) keeps tensors in fewer bytes": plan.restore.is_narrow,
        "rows are dropped over a capacity": plan.forward.has_drops,
        "tokens have different numbers of experts": plan.slot_token is not None,
        "rows are padded to capacity (pad_to_capacity=True)": plan.padding is not None,
        "a token is sent once to each rank (send_once=True)": plan.forward.once is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
