"""The sizes and settings of a layer on which a pass program depends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.engine.plan.plan import PassModules
from pmoe.experts.stacked import OPERANDS, StackedExperts
from pmoe.schedule.buffer_sizes import HiddenColumns

INDEX_BYTES = 4
"""Bytes of a row's index or position, an int32."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes and settings of a layer on which its pass programs depend. They are the same for all calls.

    ranks: W, number of ranks.
    local_experts: E_local, number of experts of each rank.
    top_k: K, number of experts that each token chooses.
    d_model: M, columns of a row.
    columns: columns of the tensors inside the experts.
    bias: whether experts have the biases b1 and b2.
    keeps_own: whether rows for this rank's own experts stay on the rank.
    sends: whether rows may be sent by all-to-alls.
    weighs_active: what backward multiplies by the routing weights to get the gradient of w2. True: the hidden
        activation after the nonlinearity, as pmoe's CUDA kernels do if there is no bias. False: the gradient
        of the output.
    places: whether the experts' last products store results in the order in which the rows arrived, as pmoe's
        CUDA kernels do. If not, a further record copies sorted results to this order.
    element_bytes: bytes of an element of rows and parameters.
    weight_bytes: bytes of a routing weight.
    sum_bytes: bytes of an element of the sums in which gradients of parameters are added up.
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
    places: bool
    element_bytes: int
    weight_bytes: int
    sum_bytes: int
    trained: frozenset[str] = frozenset(OPERANDS)

    @staticmethod
    def of(
        modules: PassModules, x_TM: Tensor, weight_TK: Tensor, *, device_type: str | None = None
    ) -> LayerShape:
        """Returns the sizes and settings of a layer.

        Which parameters are frozen is not looked at: the field ``trained`` of the result has its default, all
        parameters. `Programs.of` replaces it for each program.

        modules: the layer's modules. Programs must be able to run the layer:
            `pmoe.decide.program_choice.layer_refusal` returns None.
        x_TM: (T, M), the input of a call. Only its dtype, device and width matter.
        weight_TK: (T, K), the routing weights of the call. Only their dtype and K matter.
        device_type: "cuda" or "cpu", the type of device whose kernels compute; None for the type of x_TM's
            device.
        """
        experts = modules.experts
        assert isinstance(experts, StackedExperts)
        device_type = device_type or x_TM.device.type
        is_narrow = x_TM.dtype in (torch.bfloat16, torch.float16)
        return LayerShape(
            ranks=modules.grid.all.size,
            local_experts=experts.num_local_experts,
            top_k=weight_TK.shape[1],
            d_model=x_TM.shape[1],
            columns=experts.columns(device_type),
            bias=experts.has_bias,
            keeps_own=modules.stages.local,
            sends=modules.stages.remote,
            weighs_active=device_type == "cuda" and not experts.has_bias,
            places=device_type == "cuda",
            element_bytes=x_TM.element_size(),
            weight_bytes=weight_TK.element_size(),
            sum_bytes=4 if is_narrow else x_TM.element_size(),
        )
