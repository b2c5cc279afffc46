"""Two-layer experts over stacked weights: what feed-forward and SwiGLU experts share.

Letters: N rows, E experts of this rank, M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from pmoe.experts.base import Experts, Hidden, row_dot
from pmoe.experts.products import GradientSum, RowGroups, input_gradient, product

V = TypeVar("V")


class StackedExperts(Experts):
    """w1 (E, G, M), w2 (E, M, H), and b1 (E, G), b2 (E, M) with bias: out-features before in-features.

    A subclass says how the hidden activation T_M (N, G) becomes the activated one (N, H). T_DO is never
    saved: the gradient of a routing weight is <activated hidden, its incoming gradient> + <dy, b2>, both
    taken before the weight is multiplied in.
    """

    hidden_factor: int
    """G / H: 1 for feed-forward, 2 for gated experts."""

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_local_experts: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts

        def stacked(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_local_experts, *shape, device=device, dtype=dtype))

        self.w1 = stacked(self.hidden_factor * d_hidden, d_model)
        self.w2 = stacked(d_model, d_hidden)
        self.b1 = stacked(self.hidden_factor * d_hidden) if bias else None
        self.b2 = stacked(d_model) if bias else None

    @torch.no_grad()
    def initialise_expert(self, local_expert: int) -> None:
        """Draws one expert's parameters from the default generator, as `torch.nn.Linear` draws its own."""
        for name, parameter in self.named_parameters():
            fan_in = self.w1.shape[2] if name in ("w1", "b1") else self.w2.shape[2]
            bound = 1 / math.sqrt(fan_in)
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            drawn = torch.empty(parameter.shape[1:], dtype=dtype, device="cpu")
            parameter[local_expert] = drawn.uniform_(-bound, bound)

    @abc.abstractmethod
    def activate(self, hidden_NG: Tensor, *, overwrite: bool) -> Tensor:
        """The activated hidden, (N, H); ``overwrite`` allows hidden to be its storage."""

    @abc.abstractmethod
    def activation_gradient(self, grad_NH: Tensor, hidden_NG: Tensor) -> Tensor:
        """The gradient of hidden (N, G) from that of the activated one; may overwrite grad."""

    def compute(
        self,
        rows_NM: Tensor,
        weight_N: Tensor,
        groups: RowGroups,
        parameters: Sequence[Tensor],
        *,
        out: Tensor | None = None,
        keep: bool = True,
    ) -> tuple[Tensor, Hidden | None]:
        w1, w2, b1, b2 = self._named(parameters)
        hidden_NG = product(rows_NM, w1, groups, b1)
        active_NH = self.activate(hidden_NG, overwrite=not keep)
        out = product(active_NH, w2, groups, b2, out=out)
        out.mul_(weight_N.unsqueeze(1))
        return out, Hidden(tensors=[hidden_NG]) if keep else None

    def input_gradient(
        self,
        grad_NM: Tensor,
        rows_NM: Tensor,
        weight_N: Tensor,
        hidden: Hidden,
        groups: RowGroups,
        parameters: Sequence[Tensor],
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        w1, w2, _, b2 = self._named(parameters)
        (hidden_NG,) = hidden.tensors
        active_NH = self.activate(hidden_NG, overwrite=False)
        grad_active_NH = input_gradient(grad_NM, w2, groups)
        grad_weight_N = row_dot(active_NH, grad_active_NH)
        if b2 is not None:
            for expert, at in groups.slices():
                grad_weight_N[at] += (grad_NM[at] @ b2[expert]).to(grad_weight_N.dtype)
        scale_N1 = weight_N.unsqueeze(1)
        grad_hidden_NG = self.activation_gradient(grad_active_NH.mul_(scale_N1), hidden_NG)
        grad_rows_NM = input_gradient(grad_hidden_NG, w1, groups, out=out)
        return grad_rows_NM, grad_weight_N, (rows_NM, grad_hidden_NG, active_NH, grad_NM.mul_(scale_N1))

    def weight_gradient(
        self, pending: tuple[Tensor, ...], groups: RowGroups, sums: Sequence[GradientSum | None]
    ) -> None:
        rows_NM, grad_hidden_NG, active_NH, grad_out_NM = pending
        w1, w2, b1, b2 = self._named(sums)
        if w1 is not None:
            w1.add_weight(grad_hidden_NG, rows_NM, groups)
        if w2 is not None:
            w2.add_weight(grad_out_NM, active_NH, groups)
        if b1 is not None:
            b1.add_bias(grad_hidden_NG, groups)
        if b2 is not None:
            b2.add_bias(grad_out_NM, groups)

    def _named(self, values: Sequence[V]) -> tuple[V, V, V | None, V | None]:
        """values in the order of parameters() as (w1, w2, b1, b2)."""
        w1, w2, *biases = values
        b1, b2 = biases or (None, None)
        return w1, w2, b1, b2

    def extra_repr(self) -> str:
        experts, hidden, d_model = self.w1.shape
        return f"{experts} x ({d_model} -> {hidden} -> {d_model}), bias={self.b1 is not None}"
