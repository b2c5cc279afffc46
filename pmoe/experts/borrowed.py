"""Experts that compute with the parameters of another module, without copying them.

`pmoe.layer.run_experts` uses them for models that have expert weights of their own. An object of these
classes is made for one call, and autograd keeps it until the call's backward. So each call uses the tensors
that the module has at that time, even if they were moved, sharded or replaced since the last call. Gradients
have the layout of the module's own parameters.

    BorrowedSwiGLU       SwiGLU experts, computed by pmoe's kernels
    BorrowedFFN          experts with another nonlinearity of pmoe, computed by pmoe's kernels
    BorrowedActivation   experts with any other activation, which autograd differentiates
    NormedExperts        experts followed by a norm, which autograd differentiates

Letters: E experts of this rank, N rows, M = d_model, H = d_hidden, G columns of T_M, the hidden activation
before the nonlinearity (G = H, or 2H for gated experts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""Upper bound on the memory that autograd needs to differentiate an activation function.

The unit is a tensor of the size of T_M, the hidden activation. Measured: 5 for the square of relu, 3.5 for
gpt-oss's clamped gate.
"""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """The parameters and the activation of another module of experts.

    Dimension 0 of each parameter indexes the experts. Letters: E experts of this rank, N rows, M = d_model, H
    = d_hidden, G = H, or 2H for gated experts.

    w1: (E, G, M), or (E, M, G) if transposed.
    w2: (E, M, H), or (E, H, M) if transposed.
    b1, b2: (E, G) and (E, M); None without biases.
    transposed: whether a weight has the dimensions (E, in, out), not (E, out, in).
    activation: name of a nonlinearity of pmoe, or the module's own function from the hidden activation T_M
        (N, G) to its output (N, H). The function must compute each row independently of the others.
    norm: a module that normalizes the rows (N, M) of the experts' output; None if there is none.
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
        """The tensors w1, w2, b1 and b2 by name, without missing biases, in the shapes of `Stacks`."""
        tensors = {"w1": self.w1, "w2": self.w2, "b1": self.b1, "b2": self.b2}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def out_features_first(self, weight: Tensor) -> Tensor:
        """Returns a view of a weight with the dimensions (E, out, in), for E experts.

        weight: (E, out, in), or (E, in, out) if ``transposed``.
        """
        return weight.transpose(1, 2) if self.transposed else weight

    def stand_ins(self) -> Stacks:
        """Returns stand-ins for the parameters: tensors of the same shapes, dtypes and device without memory.

        A layer keeps the stand-ins between calls. So it knows the sizes, and does not keep the module's
        tensors alive.
        """
        tensors = {name: tensor.new_empty(()).expand(tensor.shape) for name, tensor in self.named.items()}
        name = self.activation if isinstance(self.activation, str) else None
        return Stacks(**tensors, transposed=self.transposed, activation=name)


class BorrowedExperts(StackedExperts):
    """Base class of two-layer experts that compute with the parameters of another module.

    ``parameters()`` yields these parameters. They stay registered in the other module only, so `.to()` on
    these experts does not move them.

    stacks: the parameters and the activation of that module.
    """

    num_local_experts: int
    all_hidden: int
    hidden_factor: int
    activation: str

    # pmoe must not mark the parameters as expert-parallel: the module that owns them decides how their
    # gradients are reduced.
    is_parallel = False
    stacks: Stacks

    def __init__(self, stacks: Stacks) -> None:
        Experts.__init__(self)
        self.stacks = stacks
        w1, w2 = (stacks.out_features_first(stack.detach()) for stack in (stacks.w1, stacks.w2))
        # A plain assignment would register the tensors as parameters of this module.
        vars(self).update(w1=w1, w2=w2, b1=stacks.b1, b2=stacks.b2)
        self.num_local_experts, self._d_model, self.all_hidden = w2.shape
        self.hidden_factor = w1.shape[1] // w2.shape[2]
        if isinstance(stacks.activation, str):
            self.activation = stacks.activation

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        return iter(self.stacks.named.items())

    def hidden_dims(self) -> Mapping[str, int | None] | None:
        return None  # pmoe must not spread another module's tensors over ranks

    @property
    def has_bias(self) -> bool:
        return self.stacks.b1 is not None

    def operands(self) -> list[Tensor]:
        """Returns the module's own tensors: w1, w2, and the biases b1 and b2 if there are any.

        For E experts, a weight is (E, out, in) or (E, in, out), and a bias (E, out). The caller has checked
        them.
        """
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
        # The gradient of a weight (in, out) is the transposed gradient of a weight (out, in). Because of
        # (A^T B)^T = B^T A, it is computed by exchanging the factors.
        rows_NM, grad_hidden_NG, active_NH, grad_out_NM = pending
        w1, w2, b1, b2 = split_parameters(sums)
        if w1 is not None:
            w1.add_weight(rows_NM, grad_hidden_NG, groups)
        if w2 is not None:
            w2.add_weight(active_NH, grad_out_NM, groups)
        super().weight_gradient(pending, groups, [None, None, b1, b2])


class BorrowedSwiGLU(BorrowedExperts, SwiGLUExperts):
    """SwiGLU experts that compute with the parameters of another module, by pmoe's kernels.

    The activation is silu(first half of the hidden columns) * second half.
    """


class BorrowedFFN(BorrowedExperts, FFNExperts):
    """Feed-forward experts that compute with the parameters of another module, by pmoe's kernels.

    The activation is one for which pmoe has kernels: "relu", "gelu" or "silu".
    """


class BorrowedActivation(BorrowedExperts):
    """Experts that compute with another module's parameters and its own activation function.

    The function maps the hidden activation T_M (N, G) to its output (N, H): N rows, H = d_hidden, G = H, or
    2H for gated experts. Forward saves only T_M, as pmoe's own experts do. Backward computes the function
    again under autograd, for a block of rows at a time.
    """

    _writes_over: bool | None = None
    """Whether the function changes its argument in place; None until it was called with at least one row."""

    @property
    def fused_activation(self) -> str | None:
        """Always None: the activation is the other module's own function, for which pmoe has no kernels."""
        return None

    def columns(self, device_type: str) -> HiddenColumns:
        """Returns how many columns of memory the experts need for each row, for each kind of buffer.

        The numbers include the tensors that autograd keeps while it differentiates the activation function.

        device_type: "cuda" or "cpu".
        """
        return super().columns(device_type)._replace(graph=GRAPH * self.hidden_factor * self.num_hidden)

    def _scratch_rows(self, device_type: str) -> int:
        """Returns how many rows backward processes at a time, at least 16.

        The number is small enough that the tensors which autograd makes for these rows fit into the temporary
        memory.

        device_type: "cuda" or "cpu".
        """
        wide = max(1, 4 // self.element_size)  # some functions compute in float32
        return max(super()._scratch_rows(device_type) // (GRAPH * self.hidden_factor * wide), 16)

    def activate(self, hidden_NG: Tensor, active_NH: Tensor) -> None:
        """Applies the activation function, a block of rows at a time, and writes the result to active_NH.

        hidden_NG: (N, G), the hidden activation: N rows, G = H, or 2H for gated experts.
        active_NH: (N, H), where H = d_hidden.
        """
        block_rows = self._scratch_rows(hidden_NG.device.type)
        for hidden, active in zip(hidden_NG.split(block_rows), active_NH.split(block_rows), strict=True):
            active.copy_(self._activated(hidden))

    def _activated(self, hidden_NG: Tensor) -> Tensor:
        """Returns the activation function's result, (N, H) for N rows. hidden_NG is not changed.

        A function that writes to its argument, such as ``nn.SiLU(inplace=True)``, gets a copy, for two
        reasons: the argument is needed again; and in backward it is a leaf that requires a gradient, which
        autograd does not allow to be changed in place.

        hidden_NG: (N, G), the hidden activation; H = d_hidden, and G is H, or 2H for gated experts.
        """
        if self._writes_over is None:
            # A call with one row of zeros shows whether the function writes to its argument. Tensors that are
            # made under inference_mode have no version number, so the question stays open there.
            probe = torch.zeros_like(hidden_NG[:1]) if hidden_NG.shape[0] else None
            if probe is not None and not probe.is_inference():
                version = probe._version
                self.stacks.activation(probe)
                self._writes_over = probe._version != version
        keeps_input = self._writes_over is False
        active: Tensor = self.stacks.activation(hidden_NG if keeps_input else hidden_NG.clone())
        return active

    def activation_gradient(self, grad_NG: Tensor, hidden_NG: Tensor) -> None:
        """Replaces the gradient of the activation's output by the gradient of its input, in grad_NG.

        grad_NG: (N, G). On entry its first H columns hold the gradient of the output. On return all G columns
            hold the gradient of the input.
        hidden_NG: (N, G), the input of the activation: N rows, H = d_hidden, G = H, or 2H for gated experts.
        """
        with torch.enable_grad():
            hidden = hidden_NG.detach().requires_grad_()
            active = self._activated(hidden)
        (grad,) = torch.autograd.grad(active, hidden, grad_NG[:, : active.shape[1]].to(active.dtype))
        grad_NG.copy_(grad)


class NormedExperts(ModuleExperts):
    """Experts of another module that normalizes their output, by one norm for all experts.

    The norm is applied before the routing weights. Autograd differentiates these experts, as it does a user's
    modules, so pmoe cannot predict their memory.

    stacks: the tensors of the module, with its activation and norm.
    views: maps each tensor's name to its views, one for each expert. Views of weights are (out, in) or (in,
        out), views of biases (out,).
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
        self.views = {name: stack.unbind() for name, stack in stacks.named.items()}
        self.num_local_experts = len(self.views["w1"])

    def operands(self) -> list[Tensor]:
        return list(self.parameters())

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        for name, parts in self.views.items():
            yield from ((f"{name}.{expert}", part) for expert, part in enumerate(parts))
        if self.stacks.norm is not None:
            yield from self.stacks.norm.named_parameters(prefix="norm")

    def _run(self, expert: int, rows_NM: Tensor) -> Tensor:
        """Returns one expert's normalized output, (N, M), for its N rows with M = d_model columns.

        expert: the expert's number on this rank.
        rows_NM: (N, M), the rows.
        """
        weights = {name: parts[expert] for name, parts in self.views.items()}
        w1, w2 = (weights[name].t() if self.stacks.transposed else weights[name] for name in ("w1", "w2"))
        active_NH = self.stacks.activation(F.linear(rows_NM, w1, weights.get("b1")))
        normed_NM: Tensor = self.stacks.norm(F.linear(active_NH, w2, weights.get("b2")))
        return normed_NM
