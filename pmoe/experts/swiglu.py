"""SwiGLU experts (arXiv 2002.05202): (silu(x wg^T) * (x wu^T)) w2^T for a row x, where w1 = [wg; wu]."""

from __future__ import annotations

from torch import Tensor

from pmoe.experts.ffn import ACTIVATIONS
from pmoe.experts.stacked import StackedExperts


class SwiGLUExperts(StackedExperts):
    """Gated experts of one rank: (silu(x wg^T) * (x wu^T)) w2^T for a row x, where w1 = [wg; wu].

    One tensor holds a weight of all E_local experts. T_M, the hidden activation before the nonlinearity, is
    (N, 2H) for N rows and H hidden columns: x wg^T (the gate), then x wu^T.
    """

    hidden_factor = 2
    activation = "swiglu"

    def activate(self, hidden_NG: Tensor, active_NH: Tensor) -> None:
        gate_NH, up_NH = hidden_NG.chunk(2, dim=1)
        ACTIVATIONS["silu"].value(gate_NH, active_NH).mul_(up_NH)

    def activation_gradient(self, grad_NG: Tensor, hidden_NG: Tensor) -> None:
        gate_NH, up_NH = hidden_NG.chunk(2, dim=1)
        grad_active_NH, grad_up_NH = grad_NG.chunk(2, dim=1)
        ACTIVATIONS["silu"].value(gate_NH, grad_up_NH).mul_(grad_active_NH)
        ACTIVATIONS["silu"].gradient_(grad_active_NH.mul_(up_NH), gate_NH)
