"""The nonlinearities between an expert's two products, with their gradients in place.

Only the value before the nonlinearity (T_M) is kept for backward, so each function here is redone from it
element by element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Activation:
    """value(hidden, out) writes the activated hidden; gradient_(grad, hidden) turns the gradient of the
    activated value into that of the hidden one, in place. out may be hidden."""

    value: Callable[[Tensor, Tensor], Tensor]
    gradient_: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(
        value=lambda hidden, out: torch.clamp(hidden, min=0, out=out),
        gradient_=lambda grad, hidden: aten.threshold_backward.grad_input(grad, hidden, 0, grad_input=grad),
    ),
    # The exact gelu, x * Phi(x), as torch.nn.GELU() without arguments.
    "gelu": Activation(
        value=lambda hidden, out: aten.gelu.out(hidden, out=out),
        gradient_=lambda grad, hidden: aten.gelu_backward.grad_input(grad, hidden, grad_input=grad),
    ),
    "silu": Activation(
        value=lambda hidden, out: aten.silu.out(hidden, out=out),
        gradient_=lambda grad, hidden: aten.silu_backward.grad_input(grad, hidden, grad_input=grad),
    ),
}


def find_activation(name: str) -> Activation:
    """Raises ValueError naming the known ones for any other name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation ({name!r}) must be one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]
