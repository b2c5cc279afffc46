"""What gates' constructors check, and what gates have in common that choose by logits of one parameter."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pmoe.arguments import check_count, check_int, check_not_negative
from pmoe.gates.base import Gate


def check_sizes(d_model: int, num_experts: int, top_k: int) -> None:
    """TypeError unless all are ints, ValueError unless positive and top_k at most num_experts."""
    check_count(d_model=d_model, num_experts=num_experts)
    check_int(top_k=top_k)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be between 1 and num_experts ({num_experts})")


def check_normalize(normalize: bool | None) -> None:
    if normalize is not None and not isinstance(normalize, bool):
        raise TypeError(f"normalize ({normalize!r}) must be None, True or False")


def router_weight(
    rows: int, columns: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """(rows, columns), see `draw_router_weight`."""
    weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
    draw_router_weight(weight)
    return weight


def draw_router_weight(weight: nn.Parameter) -> None:
    """Uniform within 1 / sqrt(columns), as `torch.nn.Linear` begins."""
    bound = 1 / math.sqrt(weight.shape[1])
    nn.init.uniform_(weight, -bound, bound)


def scaled(weight_TK: Tensor, normalize: bool) -> Tensor:
    """(T, K): a token's weights over their sum, where that is asked for."""
    return weight_TK / weight_TK.sum(-1, keepdim=True) if normalize else weight_TK


class TopKRouter(Gate):
    """weight: parameter (E, M). normalize: None means what the gate's papers do, see `normalizes`."""

    normalizes = True
    """Whether several weights of a token are scaled to sum 1 where nothing is said. A single one never is: it
    would be the constant 1, and the gate would never learn from the task."""

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 1,
        *,
        normalize: bool | None = None,
        z_loss_weight: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.check_options(top_k, normalize)
        check_sizes(d_model, num_experts, top_k)
        check_normalize(normalize)
        check_not_negative(z_loss_weight=z_loss_weight)
        self.top_k, self.z_loss_weight = top_k, z_loss_weight
        self.normalize = self.normalizes and top_k > 1 if normalize is None else normalize
        self.make_parameters(router_weight(num_experts, d_model, device, dtype))

    def check_options(self, top_k: int, normalize: bool | None) -> None:
        """Raises ValueError for what a subclass does not take."""

    def make_parameters(self, weight: nn.Parameter) -> None:
        """weight: (E, M). A subclass adds its own, like that one."""
        self.weight = weight

    def reset_parameters(self) -> None:
        draw_router_weight(self.weight)

    def extra_repr(self) -> str:
        return f"num_experts={self.weight.shape[0]}, top_k={self.top_k}, normalize={self.normalize}"
