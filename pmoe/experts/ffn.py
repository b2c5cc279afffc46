"""Feed-forward experts: act(x w1^T + b1) w2^T + b2. Also the nonlinearities and their gradients in place.

Only the value before the nonlinearity (T_M) is kept for backward. Everything else is computed again, element
by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pmoe.experts.base import WHOLE, Shard
from pmoe.experts.stacked import StackedExperts

aten: Any = torch.ops.aten


def _gelu(hidden: Tensor, out: Tensor) -> Tensor:
    for hidden_part, out_part in _of_few_shapes(hidden, out):
        aten.gelu.out(hidden_part, out=out_part)
    return out


def _gelu_gradient_(grad: Tensor, hidden: Tensor) -> Tensor:
    for grad_part, hidden_part in _of_few_shapes(grad, hidden):
        aten.gelu_backward.grad_input(grad_part, hidden_part, grad_input=grad_part)
    return grad


def _of_few_shapes(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Splits rows into blocks of few different sizes on the CPU: powers of two, and one of under 16.

    oneDNN compiles a gelu for each shape and keeps it. Row counts differ from call to call, so without the
    blocks its memory would grow with every call.

    Example: 100 rows -> blocks of 64, 32 and 4 rows.
    """
    rows = tensors[0].shape[0]
    if tensors[0].is_cuda or rows < 16 or not rows & (rows - 1):
        return [tensors]
    sizes = [1 << bit for bit in range(rows.bit_length() - 1, 3, -1) if rows >> bit & 1] + [rows % 16]
    return zip(*(tensor.split_with_sizes(sizes) for tensor in tensors), strict=True)


@dataclass(frozen=True, kw_only=True)
class Activation:
    """One nonlinearity and its gradient. Both write into memory that the caller gives.

    value: value(hidden, out) writes the activated hidden to ``out``, which may be ``hidden`` itself.
    gradient_: gradient_(grad, hidden) overwrites the gradient of the activated hidden with that of hidden.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    gradient_: Callable[[Tensor, Tensor], Tensor]


ActivationName = Literal["relu", "gelu", "silu"]
"""Names that MoELayer's argument ``activation`` takes: the keys of `ACTIVATIONS`."""

ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(
        value=lambda hidden, out: torch.clamp(hidden, min=0, out=out),
        gradient_=lambda grad, hidden: aten.threshold_backward.grad_input(grad, hidden, 0, grad_input=grad),
    ),
    # The exact gelu, x * Phi(x): torch.nn.GELU() without arguments.
    "gelu": Activation(value=_gelu, gradient_=_gelu_gradient_),
    "silu": Activation(
        value=lambda hidden, out: aten.silu.out(hidden, out=out),
        gradient_=lambda grad, hidden: aten.silu_backward.grad_input(grad, hidden, grad_input=grad),
    ),
}


def find_activation(name: str) -> Activation:
    """Returns the `Activation` of a name. Raises ValueError, with the known names, for any other name."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation ({name!r}) must be one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


class FFNExperts(StackedExperts):
    """E_local feed-forward experts, act(x w1^T + b1) w2^T + b2, with relu, gelu (exact) or silu.

    T_M is (N, H).
    """

    hidden_factor = 1

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_local_experts: int,
        *,
        activation: ActivationName = "gelu",
        bias: bool = True,
        shard: Shard = WHOLE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        find_activation(activation)
        super().__init__(
            d_model, d_hidden, num_local_experts, bias=bias, shard=shard, device=device, dtype=dtype
        )
        self.activation = activation

    def activate(self, hidden_NG: Tensor, active_NH: Tensor) -> None:
        find_activation(self.activation).value(hidden_NG, active_NH)

    def activation_gradient(self, grad_NG: Tensor, hidden_NG: Tensor) -> None:
        find_activation(self.activation).gradient_(grad_NG, hidden_NG)
