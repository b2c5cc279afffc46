"""SwiGLU experts (arXiv 2002.05202): (silu(x wg^T) * (x wu^T)) w2^T, w1 = [wg; wu]."""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.experts.activations import ACTIVATIONS
from pmoe.experts.stacked import StackedExperts


class SwiGLUExperts(StackedExperts):
    """E_local gated experts. T_M is (N, 2H): the gate's H columns first, then the other factor's."""

    hidden_factor = 2

    def activate(self, hidden_NG: Tensor, *, overwrite: bool) -> Tensor:
        gate_NH, up_NH = hidden_NG.chunk(2, dim=1)
        active_NH = ACTIVATIONS["silu"].value(
            gate_NH, torch.empty_like(up_NH, memory_format=torch.contiguous_format)
        )
        return active_NH.mul_(up_NH)

    def activation_gradient(self, grad_NH: Tensor, hidden_NG: Tensor) -> Tensor:
        gate_NH, up_NH = hidden_NG.chunk(2, dim=1)
        grad_NG = torch.empty_like(hidden_NG)
        grad_gate_NH, grad_up_NH = grad_NG.chunk(2, dim=1)
        torch.mul(grad_NH, ACTIVATIONS["silu"].value(gate_NH, torch.empty_like(grad_NH)), out=grad_up_NH)
        ACTIVATIONS["silu"].gradient_(grad_gate_NH.copy_(grad_NH.mul_(up_NH)), gate_NH)
        return grad_NG
