"""The nonlinearities between an expert's two products, with their gradients in place.

Only the value before the nonlinearity (T_M) is kept for backward, so each function here is redone from it
element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten


def _gelu(hidden: Tensor, out: Tensor) -> Tensor:
    for hidden_part, out_part in _of_few_shapes(hidden, out):
        aten.gelu.out(hidden_part, out=out_part)
    return out


def _gelu_gradient_(grad: Tensor, hidden: Tensor) -> Tensor:
    for grad_part, hidden_part in _of_few_shapes(grad, hidden):
        aten.gelu_backward.grad_input(grad_part, hidden_part, grad_input=grad_part)
    return grad


def _of_few_shapes(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """On the CPU, parts of 16, 32, 64 ... rows, and fewer: oneDNN compiles and keeps a gelu of each shape."""
    rows = tensors[0].shape[0]
    if tensors[0].is_cuda or rows < 16 or not rows & (rows - 1):
        return [tensors]
    sizes = [1 << bit for bit in range(rows.bit_length() - 1, 3, -1) if rows >> bit & 1] + [rows % 16]
    return zip(*(each.split_with_sizes(sizes) for each in tensors), strict=True)


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
    "gelu": Activation(value=_gelu, gradient_=_gelu_gradient_),
    "silu": Activation(
        value=lambda hidden, out: aten.silu.out(hidden, out=out),
        gradient_=lambda grad, hidden: aten.silu_backward.grad_input(grad, hidden, grad_input=grad),
    ),
}


def find_activation(name: str) -> Activation:
    """Raises ValueError naming the known ones for any other name."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation ({name!r}) must be one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]
