"""Feed-forward experts, act(x w1^T + b1) w2^T + b2 for a row x, and their nonlinearities.

The nonlinearities and their gradients are computed in place. For backward, only T_M = x w1^T + b1 is kept,
the value before the nonlinearity. The value after it is computed again, which costs no matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.experts.base import WHOLE, Shard
from pmoe.experts.stacked import StackedExperts

aten: Any = torch.ops.aten
gelu: Any = F.gelu  # its type hints leave out the argument ``out``; aten.gelu.out takes 3 us longer


def _gelu(hidden: Tensor, out: Tensor) -> Tensor:
    for hidden_part, out_part in _of_few_shapes(hidden, out):
        gelu(hidden_part, out=out_part)
    return out


def _gelu_gradient_(grad: Tensor, hidden: Tensor) -> Tensor:
    for grad_part, hidden_part in _of_few_shapes(grad, hidden):
        aten.gelu_backward.grad_input(grad_part, hidden_part, grad_input=grad_part)
    return grad


def _of_few_shapes(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Splits rows into blocks with few different numbers of rows: powers of two, and one smaller rest.

    On the CPU, oneDNN compiles a gelu for each shape and keeps it. Row counts differ from call to call, so
    without the split the memory of these kernels would grow with every call. On CUDA nothing is split.

    tensors: tensors with the same number of rows, (rows, ...). The rest has fewer than 16 rows.

    Yields, for each block, a tuple with the same rows of every tensor.

    Example: 100 rows -> blocks of 64, 32 and 4 rows.
    """
    rows = tensors[0].shape[0]
    if tensors[0].is_cuda or rows < 16 or not rows & (rows - 1):
        return [tensors]
    sizes = [1 << bit for bit in range(rows.bit_length() - 1, 3, -1) if rows >> bit & 1] + [rows % 16]
    return zip(*(tensor.split_with_sizes(sizes) for tensor in tensors), strict=True)


@dataclass(frozen=True, kw_only=True)
class Activation:
    """A nonlinearity act(x) and its gradient, both of which write into the caller's memory.

    value: value(x, out) writes act(x) to ``out``, which may be x itself.
    gradient_: gradient_(grad, x) overwrites ``grad``, the gradient of act(x), with the gradient of x.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    gradient_: Callable[[Tensor, Tensor], Tensor]


ActivationName = Literal["relu", "gelu", "silu"]
"""Names that MoELayer's argument ``activation`` accepts: the keys of `ACTIVATIONS`."""

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
    """Returns the nonlinearity called ``name``.

    Raises ValueError, with the known names, for any other name.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation ({name!r}) must be one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


class FFNExperts(StackedExperts):
    """Feed-forward experts of one rank: act(x w1^T + b1) w2^T + b2 for a row x, with relu, gelu or silu.

    gelu is computed exactly, not by the approximation with tanh. One tensor holds a weight of all E_local
    experts. T_M, the hidden activation before the nonlinearity, is (N, H) for N rows and H hidden columns.
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
