"""Experts over tensors of another library's module, used where they lie: nothing is copied, and gradients are
summed in the layout of whoever owns the parameter.

Such experts live for one call (autograd keeps them until its backward): the tensors are those that the module
has then, whatever has moved, sharded or replaced them since the call before.

Letters: those of `pmoe.experts`.
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
from pmoe.schedule.slots import HiddenColumns

GRAPH = 6
"""How many tensors of T_M's width differentiating a function may hold at once. Measured: 5 for the square of
relu, 3.5 for gpt-oss's clamped gate."""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """w1 (E, G, M), w2 (E, M, H), b1 (E, G), b2 (E, M) as a module holds them; with ``transposed`` w1 is
    (E, M, G) and w2 (E, H, M), in-features first.

    activation: the name of one of pmoe's nonlinearities; or the module's own function from T_M (N, G) to the
    activated hidden (N, H), whose value for some rows does not depend on others. norm: a module of rows of
    T_DO (N, M).
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
        every = {"w1": self.w1, "w2": self.w2, "b1": self.b1, "b2": self.b2}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    def out_features_first(self, weight: Tensor) -> Tensor:
        return weight.transpose(1, 2) if self.transposed else weight

    def stand_ins(self) -> Stacks:
        """Tensors of the same shapes, types and device that hold no memory and are nobody's parameters."""
        made = {name: each.new_empty(()).expand(each.shape) for name, each in self.named.items()}
        name = self.activation if isinstance(self.activation, str) else None
        return Stacks(**made, transposed=self.transposed, activation=name)


class BorrowedExperts(StackedExperts):
    """Two-layer experts whose parameters are another module's: ``parameters()`` gives them, and nothing here
    registers, moves or marks them."""

    num_local_experts: int
    all_hidden: int
    hidden_factor: int
    activation: str

    is_parallel = False  # whoever owns them says how their gradients are reduced
    stacks: Stacks

    def __init__(self, stacks: Stacks) -> None:
        Experts.__init__(self)
        self.stacks = stacks
        w1, w2 = (stacks.out_features_first(each.detach()) for each in (stacks.w1, stacks.w2))
        vars(self).update(w1=w1, w2=w2, b1=stacks.b1, b2=stacks.b2)  # setattr would register them
        self.num_local_experts, self._d_model, self.all_hidden = w2.shape
        self.hidden_factor = w1.shape[1] // w2.shape[2]
        if isinstance(stacks.activation, str):
            self.activation = stacks.activation

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        return iter(self.stacks.named.items())

    def hidden_dims(self) -> Mapping[str, int | None] | None:
        return None  # not ours to cut

    @property
    def has_bias(self) -> bool:
        return self.stacks.b1 is not None

    def operands(self) -> list[Tensor]:
        """The module's own tensors; `pmoe.integrations.transformers.layout` has checked them."""
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
        # The transpose of a product is the product of the factors in the other order.
        rows_NM, grad_hidden_NG, active_NH, grad_out_NM = pending
        w1, w2, b1, b2 = split_parameters(sums)
        if w1 is not None:
            w1.add_weight(rows_NM, grad_hidden_NG, groups)
        if w2 is not None:
            w2.add_weight(active_NH, grad_out_NM, groups)
        super().weight_gradient(pending, groups, [None, None, b1, b2])


class BorrowedSwiGLU(BorrowedExperts, SwiGLUExperts):
    """silu(first half) * second half, by pmoe's own kernels."""


class BorrowedFFN(BorrowedExperts, FFNExperts):
    """One of pmoe's own nonlinearities, by its name."""


class BorrowedActivation(BorrowedExperts):
    """Any function from T_M to the activated hidden, (N, G) to (N, H), differentiated by autograd a block of
    rows at a time: T_M is kept as ever, and nothing else."""

    _writes_over: bool | None = None
    """Whether it changes its input in place; None before it has been asked for any rows."""

    def columns(self, device_type: str) -> HiddenColumns:
        return replace(super().columns(device_type), graph=GRAPH * self.hidden_factor * self.num_hidden)

    def _scratch_rows(self, device_type: str) -> int:
        wide = max(1, 4 // self.element_size)  # some compute in float32
        return max(super()._scratch_rows(device_type) // (GRAPH * self.hidden_factor * wide), 16)

    def activate(self, hidden_NG: Tensor, active_NH: Tensor) -> None:
        block_rows = self._scratch_rows(hidden_NG.device.type)
        for hidden, active in zip(hidden_NG.split(block_rows), active_NH.split(block_rows), strict=True):
            active.copy_(self._activated(hidden))

    def _activated(self, hidden_NG: Tensor) -> Tensor:
        """Activates a copy where the function writes over its argument, as ``nn.SiLU(inplace=True)`` does.

        The columns are needed again, and in a backward pass they are a leaf, to which autograd lets nobody
        write."""
        if self._writes_over is None:
            probe = torch.zeros_like(hidden_NG[:1]) if hidden_NG.shape[0] else None
            if probe is not None and not probe.is_inference():
                version = probe._version
                self.stacks.activation(probe)
                self._writes_over = probe._version != version
        keeps = self._writes_over is False
        found: Tensor = self.stacks.activation(hidden_NG if keeps else hidden_NG.clone())
        return found

    def activation_gradient(self, grad_NG: Tensor, hidden_NG: Tensor) -> None:
        with torch.enable_grad():
            hidden = hidden_NG.detach().requires_grad_()
            active = self._activated(hidden)
        (found,) = torch.autograd.grad(active, hidden, grad_NG[:, : active.shape[1]].to(active.dtype))
        grad_NG.copy_(found)


class NormedExperts(ModuleExperts):
    """Experts with a norm behind them, one for all of them: each row of T_DO passes it before the routing
    weight. Differentiated by autograd, as experts that are modules: memory is not predicted."""

    stacks: Stacks
    local: nn.ModuleList
    views: dict[str, tuple[Tensor, ...]]
    num_local_experts: int

    is_parallel = False

    def __init__(self, stacks: Stacks) -> None:
        Experts.__init__(self)
        self.stacks, self.local = stacks, nn.ModuleList()
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
        held = {name: parts[expert] for name, parts in self.views.items()}
        w1, w2 = (held[name].t() if self.stacks.transposed else held[name] for name in ("w1", "w2"))
        active_NH = self.stacks.activation(F.linear(rows_NM, w1, held.get("b1")))
        normed_NM: Tensor = self.stacks.norm(F.linear(active_NH, w2, held.get("b2")))
        return normed_NM
