"""Experts whose parameters belong to a module of another library; no parameter is copied.

These experts are built for one call, and autograd keeps them until the call's backward. So a call always uses
the tensors that the module holds at that time, even if they were moved, sharded or replaced since the last
call. Gradients are computed in the layout of the module's own parameters.

    BorrowedSwiGLU       gated by silu, with pmoe's kernels
    BorrowedFFN          one of pmoe's nonlinearities, with pmoe's kernels
    BorrowedActivation   any other activation, differentiated by autograd
    NormedExperts        experts with a norm after them, differentiated by autograd

Letters: those of `pmoe.experts`; G columns of T_M (H, or 2H if gated).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pmoe.experts.base import Experts
from pmoe.experts.ffn import FFNExperts
from pmoe.experts.modules import ModuleExperts
from pmoe.experts.products import GradientSum, RowGroups
from pmoe.experts.stacked import StackedExperts, split_parameters
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.schedule.buffer_sizes import HiddenColumns

GRAPH = 6
"""Upper bound on the tensors as wide as T_M that autograd holds while it differentiates an activation.

Measured: 5 for the square of relu, 3.5 for gpt-oss's clamped gate.
"""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """Tensors and activation of an experts module, as the module holds them.

    w1: (E, G, M), or (E, M, G) if transposed.
    w2: (E, M, H), or (E, H, M) if transposed.
    b1, b2: (E, G) and (E, M); None without biases.
    transposed: whether weights lie in-features first.
    activation: the name of one of pmoe's nonlinearities, or the module's own function from T_M (N, G) to the
        activated hidden (N, H). The function must treat each row by itself.
    norm: a module that normalizes rows of T_DO (N, M); None without one.
    """

    w1: Tensor
    w2: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    transposed: bool = False
    activation: Any = None
    norm: Any = None

    @property
    def named(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        tensors = {"w1": self.w1, "w2": self.w2, "b1": self.b1, "b2": self.b2}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def out_features_first(self, weight: Tensor) -> Tensor:
        """Returns a view of a weight (E, out, in), however the module holds it."""
        return weight.transpose(1, 2) if self.transposed else weight

    def stand_ins(self) -> Stacks:
        """Returns tensors of the same shapes, dtypes and device that hold no memory and are no parameters.

        A layer keeps them between calls, so that it knows the sizes but does not keep the module's tensors
        alive.
        """
        tensors = {name: each.new_empty(()).expand(each.shape) for name, each in self.named.items()}
        name = self.activation if isinstance(self.activation, str) else None
        return Stacks(**tensors, transposed=self.transposed, activation=name)


class BorrowedExperts(StackedExperts):
    """Two-layer experts whose parameters are another module's.

    ``parameters()`` returns the module's tensors, but they are not registered, moved or marked as pmoe's own
    experts are.

    stacks: the module's tensors.
    """

    num_local_experts: int
    all_hidden: int
    hidden_factor: int
    activation: str

    is_parallel = False  # the owner of the parameters decides how their gradients are reduced
    stacks: Stacks

    def __init__(self, stacks: Stacks) -> None:
        Experts.__init__(self)
        self.stacks = stacks
        w1, w2 = (stacks.out_features_first(each.detach()) for each in (stacks.w1, stacks.w2))
        # Not by setattr, which would register them as parameters of this module.
        vars(self).update(w1=w1, w2=w2, b1=stacks.b1, b2=stacks.b2)
        self.num_local_experts, self._d_model, self.all_hidden = w2.shape
        self.hidden_factor = w1.shape[1] // w2.shape[2]
        if isinstance(stacks.activation, str):
            self.activation = stacks.activation

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        return iter(self.stacks.named.items())

    def hidden_dims(self) -> Mapping[str, int | None] | None:
        return None  # the tensors of another module are neither spread nor cut over ranks

    @property
    def has_bias(self) -> bool:
        return self.stacks.b1 is not None

    def operands(self) -> list[Tensor]:
        """Returns the module's own tensors, which `pmoe.integrations.transformers.layout` has checked."""
        return list(self.stacks.named.values())

    def weights(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        w1, w2, b1, b2 = split_parameters(parameters)
        return self.stacks.out_features_first(w1), self.stacks.out_features_first(w2), b1, b2

    def weight_gradient(
        self, pending: tuple[Tensor, ...], groups: RowGroups, sums: Sequence[GradientSum | None]
    ) -> None:
        if not self.stacks.transposed:
            super().weight_gradient(pending, groups, sums)
            return
        # A gradient in-features first is the transpose of the usual one: (A^T B)^T = B^T A, so the factors
        # are exchanged.
        rows_NM, grad_hidden_NG, active_NH, grad_out_NM = pending
        w1, w2, b1, b2 = split_parameters(sums)
        if w1 is not None:
            w1.add_weight(rows_NM, grad_hidden_NG, groups)
        if w2 is not None:
            w2.add_weight(active_NH, grad_out_NM, groups)
        super().weight_gradient(pending, groups, [None, None, b1, b2])


class BorrowedSwiGLU(BorrowedExperts, SwiGLUExperts):
    """Experts with silu(first half) * second half as activation, computed by pmoe's own kernels."""


class BorrowedFFN(BorrowedExperts, FFNExperts):
    """Experts with one of pmoe's own nonlinearities as activation, given by name."""


class BorrowedActivation(BorrowedExperts):
    """Experts with any function as activation, from T_M (N, G) to the activated hidden (N, H).

    Forward keeps only T_M, as other experts do. Backward computes the function again under autograd, for a
    block of rows at a time.
    """

    _writes_over: bool | None = None
    """Whether the function changes its input in place; None until it was called with at least one row."""

    def columns(self, device_type: str) -> HiddenColumns:
        """Returns the columns that these experts hold for a row, those that autograd holds included."""
        return replace(super().columns(device_type), graph=GRAPH * self.hidden_factor * self.num_hidden)

    def _scratch_rows(self, device_type: str) -> int:
        """Returns the rows of a block: few enough for all that autograd holds, at least 16."""
        wide = max(1, 4 // self.element_size)  # some functions compute in float32
        return max(super()._scratch_rows(device_type) // (GRAPH * self.hidden_factor * wide), 16)

    def activate(self, hidden_NG: Tensor, active_NH: Tensor) -> None:
        """Writes the activated hidden of hidden_NG to active_NH, a block of rows at a time."""
        block_rows = self._scratch_rows(hidden_NG.device.type)
        for hidden, active in zip(hidden_NG.split(block_rows), active_NH.split(block_rows), strict=True):
            active.copy_(self._activated(hidden))

    def _activated(self, hidden_NG: Tensor) -> Tensor:
        """Returns the activated hidden (N, H), without changing hidden_NG.

        A function that writes to its argument, as ``nn.SiLU(inplace=True)`` does, is given a copy. T_M is
        needed again; in backward it is also a leaf, which autograd does not let a function change.
        """
        if self._writes_over is None:
            # Found out once, by a row of zeros. Tensors made under inference_mode count no changes.
            probe = torch.zeros_like(hidden_NG[:1]) if hidden_NG.shape[0] else None
            if probe is not None and not probe.is_inference():
                version = probe._version
                self.stacks.activation(probe)
                self._writes_over = probe._version != version
        keeps_input = self._writes_over is False
        active: Tensor = self.stacks.activation(hidden_NG if keeps_input else hidden_NG.clone())
        return active

    def activation_gradient(self, grad_NG: Tensor, hidden_NG: Tensor) -> None:
        """Replaces the gradient of the activated hidden, the first H columns of grad_NG, by that of T_M."""
        with torch.enable_grad():
            hidden = hidden_NG.detach().requires_grad_()
            active = self._activated(hidden)
        (grad,) = torch.autograd.grad(active, hidden, grad_NG[:, : active.shape[1]].to(active.dtype))
        grad_NG.copy_(grad)


class NormedExperts(ModuleExperts):
    """Experts with one norm after all of them, which each row of T_DO passes before the routing weight.

    They are differentiated by autograd, as experts that are modules are, so memory is not predicted.

    stacks: the module's tensors, with activation and norm.
    views: for each tensor, its views by expert.
    """

    stacks: Stacks
    local: nn.ModuleList
    views: dict[str, tuple[Tensor, ...]]
    num_local_experts: int

    is_parallel = False

    def __init__(self, stacks: Stacks) -> None:
        Experts.__init__(self)
        self.stacks = stacks
        self.local = nn.ModuleList()
        self.views = {name: each.unbind() for name, each in stacks.named.items()}
        self.num_local_experts = len(self.views["w1"])

    def operands(self) -> list[Tensor]:
        return list(self.parameters())

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        for name, parts in self.views.items():
            yield from ((f"{name}.{expert}", part) for expert, part in enumerate(parts))
        if self.stacks.norm is not None:
            yield from self.stacks.norm.named_parameters(prefix="norm")

    def _run(self, expert: int, rows_NM: Tensor) -> Tensor:
        """Returns one expert's output (N, M) for its rows, after the norm."""
        weights = {name: parts[expert] for name, parts in self.views.items()}
        w1, w2 = (weights[name].t() if self.stacks.transposed else weights[name] for name in ("w1", "w2"))
        active_NH = self.stacks.activation(F.linear(rows_NM, w1, weights.get("b1")))
        normed_NM: Tensor = self.stacks.norm(F.linear(active_NH, w2, weights.get("b2")))
        return normed_NM
