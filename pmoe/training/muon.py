"""`ExpertMuon`: the Muon optimizer for experts whose matrices are stacked in one parameter.

`torch.optim.Muon` takes parameters with two dimensions. The weights of a rank's experts are parameters with
three dimensions, such as (E, H, M). Flattened to two, the experts would be orthogonalized as one matrix,
which would mix them. Here the Newton-Schulz iteration, which orthogonalizes a matrix, runs over a batch of
matrices. Each rank has whole experts, so nothing is communicated.

Letters: E experts of this rank, f = 2 for gated experts and else 1, H = d_hidden, M = d_model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pmoe.arguments import (
    check_count,
    check_flag,
    check_module,
    check_not_negative,
    check_one_of,
    check_place,
)
from pmoe.experts.dtensor_layout import hold_own_parts
from pmoe.experts.operands import local_part
from pmoe.experts.stacked import StackedExperts
from pmoe.layer import MoELayer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of a Newton-Schulz step X -> a X + (b A + c A A) X with A = X X^T, as in `torch.optim.Muon`."""

EPS = 1e-7
"""A matrix is divided by its norm, or by this number if the norm is smaller."""

MOST_STEPS = 99
"""The largest number of Newton-Schulz steps, as in `torch.optim.Muon`."""

AdjustName = Literal["original", "match_rms_adamw"]
"""Values of `ExpertMuon`'s argument adjust_lr_fn."""


class ExpertMuon(Optimizer):
    """The Muon optimizer for the weight matrices of a model's stacked experts.

        groups = pmoe.parameter_groups(model, lr=1e-3, weight_decay=0.1)
        others = [group for group in groups if not (group["kind"] == "matrices" and group["stacked"])]
        experts = pmoe.ExpertMuon(model, lr=1e-3)  # trains w1 and w2; give ``others`` to other optimizers

    A step on a matrix W with the gradient G, its momentum B, the momentum's factor mu, and learning rate lr:

        B = mu B + (1 - mu) G
        U = mu B + (1 - mu) G with nesterov, U = B without
        W = (1 - lr weight_decay) W - lr adjust(W) orthogonalized(U)

    adjust(W) is a factor that depends on the shape of W, by the rule adjust_lr_fn.

    The optimizer trains w1 and w2 of the experts of each layer. Each matrix of each expert is orthogonalized
    by itself. If experts are gated, the two halves of w1 (the gate projection and the up projection) count as
    two matrices. Biases are not trained: give them to another optimizer. Copies of an expert on several ranks
    stay equal, because their gradients are equal.

    Args:
        model: a model with MoE layers, after `pmoe.parallelize`, or a single layer.
        lr, weight_decay, momentum, nesterov, ns_steps, adjust_lr_fn: the arguments of `torch.optim.Muon`.
        dtype: the dtype of the Newton-Schulz steps. torch's Muon uses bfloat16.

    Raises ValueError for numbers out of range, and for a model without stacked experts. Raises ValueError
    also if a rank has only parts of matrices, because a part cannot be orthogonalized. A rank has only parts
    if hidden columns are split over ranks ("esp"), or if ``shard_experts`` cuts inside of matrices.
    Raises TypeError for experts that are modules or parametrized.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustName = "original",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        check_module(model=model)
        check_not_negative(lr=lr, weight_decay=weight_decay, momentum=momentum)
        if momentum >= 1:
            raise ValueError(f"momentum ({momentum}) must be below 1")
        check_flag("nesterov", nesterov)
        check_count(MOST_STEPS, ns_steps=ns_steps)
        check_one_of("adjust_lr_fn", adjust_lr_fn, get_args(AdjustName))
        if dtype is None:
            raise TypeError("dtype (None) must be a torch.dtype")
        check_place(None, dtype)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": int(ns_steps),
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(_groups(model), defaults)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all matrices that have a gradient. Returns the closure's loss; None without a closure.

        closure: function that computes the loss and its gradients again, and returns the loss.

        Raises TypeError if the closure is neither None nor a function.
        """
        if closure is not None and not callable(closure):
            raise TypeError(f"closure ({closure!r}) must be None or a function")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Does a step of Muon for one parameter, which has a matrix for each expert.

        parameter: w1, (E, fH, M), or w2, (E, M, H), for E experts of this rank, H = d_hidden, M = d_model; f
            is 2 for gated experts and 1 for others.
        group: the options of the parameter's group.
        """
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient = local_part(parameter.grad)  # type: ignore[arg-type]  # step has checked it
        buffer = local_part(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        matrices = update.unflatten(1, (group["halves"], -1)).flatten(0, 1)
        lr = group["lr"] * _ratio(group["adjust_lr_fn"], *matrices.shape[1:])
        step = orthogonalized(matrices, group["ns_steps"], self.dtype)
        value = local_part(parameter)
        value.mul_(1 - group["lr"] * group["weight_decay"])
        value.add_(step.view(value.shape).to(value.dtype), alpha=-lr)


def orthogonalized(matrices: Tensor, steps: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Orthogonalizes each matrix of a batch: makes all its singular values nearly 1.

    This is the Newton-Schulz iteration of `torch.optim.Muon`, for each matrix by itself. Returns (B, rows,
    columns) in ``dtype``.

    matrices: (B, rows, columns), B matrices.
    steps: number of Newton-Schulz steps.
    dtype: the dtype in which the steps are computed.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.to(dtype)
    x = x.mT if is_tall else x
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / norm.clamp(min=EPS)  # a new tensor: x may be the gradient itself
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()


def _ratio(name: AdjustName, rows: int, columns: int) -> float:
    """Returns the factor by which `torch.optim.Muon` multiplies the learning rate for a matrix.

    name: the rule, the argument adjust_lr_fn of `ExpertMuon`.
    rows, columns: the shape of the matrix.
    """
    if name == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the parameter groups of `ExpertMuon`, for a model's experts.

    One group has the parameters with one matrix for each expert. The other group has the parameters with two
    matrices for each expert, one above the other (w1 of gated experts). The entry "halves" of a group is 1
    or 2.

    Raises ValueError or TypeError if Muon cannot train the experts of a layer.
    """
    hold_own_parts(model)
    by_halves: dict[int, list[Tensor]] = {1: [], 2: []}
    for name, layer in model.named_modules():
        if not isinstance(layer, MoELayer):
            continue
        experts = layer.layer_modules.experts
        if not isinstance(experts, StackedExperts) or not {"w1", "w2"} <= experts._parameters.keys():
            raise TypeError(
                f"model has a layer {name!r} whose experts ({type(experts).__name__}) must be plain stacked "
                "ones: no modules, no parametrizations"
            )
        if layer.shard.count > 1:
            raise ValueError(
                f"model has a layer {name!r} whose experts are split over {layer.shard.count} ranks (esp): a "
                "part of a matrix cannot be orthogonalized. Use AdamW for its experts, or a mesh without esp"
            )
        if any(experts.copy_parts.get(weight, (0,))[0] for weight in ("w1", "w2")):
            raise ValueError(
                f"model has a layer {name!r} whose experts (with shard_experts) are cut inside of matrices: "
                "a part of a matrix cannot be orthogonalized. Use AdamW for its experts, or a number of "
                "copies that divides the number of a rank's experts"
            )
        by_halves[experts.hidden_factor].append(experts.get_parameter("w1"))
        by_halves[1].append(experts.get_parameter("w2"))
    if not by_halves[1]:
        raise ValueError(f"model ({type(model).__name__}) must hold a MoELayer with stacked experts")
    return [{"params": params, "halves": halves} for halves, params in by_halves.items() if params]
