"""Keeps some of a model's experts unchanged while the other experts are trained.

All experts of a rank share one tensor for a weight, so ``requires_grad`` cannot freeze some of them.
`freeze_experts` therefore does two things. After each backward pass it sets the gradients of frozen experts
to zero. After each step of an optimizer it restores their values, because weight decay and momentum change
values even if their gradient is zero.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pmoe.arguments import check_module, is_int, list_of
from pmoe.experts.base import WHOLE, Experts
from pmoe.experts.dtensor_layout import hold_own_parts
from pmoe.experts.marks import is_stacked
from pmoe.experts.operands import frozen_rows, local_part, train_frozen_rows
from pmoe.experts.stacked import StackedExperts
from pmoe.layer import MoELayer


class FrozenExperts:
    """The experts that a call of `freeze_experts` has frozen. `remove` lets them be trained again.

    layers: the experts of each layer of which some are frozen.
    """

    def __init__(self, layers: list[Experts]) -> None:
        self._layers = layers

    def remove(self) -> None:
        """Lets the experts be trained again."""
        for experts in self._layers:
            hold_own_parts(experts)
            experts.frozen_experts = {}
            for parameter in experts.parameters():
                train_frozen_rows(parameter)
        self._layers = []


def freeze_experts(model: nn.Module, experts: Iterable[int] | Tensor) -> FrozenExperts:
    """Freezes some experts of each `MoELayer` of a model. The other experts can still be trained.

    Args:
        model: the model, or a layer. The experts of its layers must be stacked ("ffn", "swiglu"). Adapters of
            the frozen experts are frozen too, if each expert has its own.
        experts: the indices of the experts among all experts of a layer, from 0; or a mask, a bool tensor
            (E,) that is True for each frozen expert of a layer's E experts. A rank freezes the chosen experts
            that it holds.

    After each backward pass the gradients of the frozen experts are zeros. An optimizer's step does not
    change their values, not even by a bit. Call this function after `pmoe.parallelize`. To freeze all
    experts, or the router, call ``layer.experts.requires_grad_(False)`` or
    ``layer.gate.requires_grad_(False)``. The experts stay frozen if parameters are replaced, for example by
    ``model.to(torch.bfloat16)`` or ``load_state_dict(state, assign=True)``. A copy of the model, made by
    copy.deepcopy or pickle, has no frozen experts.

    Returns an object whose method ``remove()`` lets the experts be trained again.

    Raises ValueError or TypeError, before anything is changed, for an index that no expert has, for experts
    that are not stacked, and if some experts of a layer are frozen already.
    """
    check_module(model=model)
    mask = experts if isinstance(experts, Tensor) and experts.dtype == torch.bool else None
    numbers = list_of("experts", experts if mask is None else mask.reshape(-1).nonzero().flatten().tolist())
    layers = [
        (name or "model", module) for name, module in model.named_modules() if isinstance(module, MoELayer)
    ]
    if not layers:
        raise ValueError(
            f"model ({type(model).__name__}) must have a pmoe.MoELayer, whose experts are frozen"
        )
    hold_own_parts(model)
    for name, layer in layers:
        if mask is not None and tuple(mask.shape) != (layer.num_experts,):
            raise ValueError(
                f"experts (a mask of shape {tuple(mask.shape)}) must have shape ({layer.num_experts},): one "
                f"bool for each expert of {name}"
            )
        _check(name, layer, numbers)
    for _, layer in layers:
        first = layer.first_expert
        local = sorted({int(n) - first for n in numbers if 0 <= int(n) - first < layer.num_local_experts})
        own_experts = layer.layer_modules.experts
        own_experts.frozen_experts = {
            own_name: torch.tensor(rows, device="cpu")
            for own_name, parameter in own_experts.named_parameters()
            if is_stacked(parameter) and (rows := _rows_of(own_experts, own_name, local))
        }
        own_experts.freeze_rows()
    _watch_optimizers()
    return FrozenExperts([layer.layer_modules.experts for _, layer in layers])


def _rows_of(experts: Experts, name: str, local: list[int]) -> list[int]:
    """Returns the indices of some experts along dimension 0 of this rank's part of a parameter.

    If FSDP2 shards the experts over the ranks that hold copies of them, this rank may have no part of some
    of these experts.

    experts: this rank's experts.
    name: the parameter's name.
    local: the experts, by their indices among the experts of this rank.
    """
    dim, own = experts.copy_parts.get(name, (0, WHOLE))
    kept = own.of(experts.num_local_experts) if dim == 0 else slice(0, experts.num_local_experts)
    return [expert - kept.start for expert in local if kept.start <= expert < kept.stop]


def _check(name: str, layer: MoELayer, numbers: list[Any]) -> None:
    """Raises ValueError or TypeError if experts of a layer cannot be frozen.

    name: the name of the layer, for the message.
    layer: the layer.
    numbers: the indices of the experts to freeze, among all experts of the layer.
    """
    experts = layer.layer_modules.experts
    if not isinstance(experts, StackedExperts) or not {"w1", "w2"} <= experts._parameters.keys():
        raise TypeError(
            f"{name} (experts {type(experts).__name__}) must have stacked experts with plain weights: call "
            "requires_grad_(False) on an expert that is a module of its own"
        )
    for number in numbers:
        if not is_int(number):
            raise TypeError(f"experts ({number!r} among them) must be ints")
        if not 0 <= number < layer.num_experts:
            raise ValueError(
                f"experts ({number} among them) must be numbers from 0 to {layer.num_experts - 1}, those of "
                f"the experts of {name}"
            )
    if any(frozen_rows(parameter) is not None for parameter in experts.parameters()):
        raise ValueError(
            f"model (whose layer {name} has frozen experts already) must have none: call remove() on what "
            "pmoe.freeze_experts returned first"
        )


@functools.cache
def _watch_optimizers() -> None:
    """Makes every step of every optimizer of this process leave frozen experts unchanged, by two hooks.

    One hook runs before each step and stores the values of frozen experts. The other runs after the step and
    writes the values back. The hooks are registered once in a process.
    """
    register_optimizer_step_pre_hook(_remember)
    register_optimizer_step_post_hook(_put_back)


_before: weakref.WeakKeyDictionary[Optimizer, list[tuple[Tensor, Tensor, Tensor]]] = (
    weakref.WeakKeyDictionary()
)
"""The values of frozen experts before the step that an optimizer is making: (parameter, index, values)."""


@torch.no_grad()
def _remember(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Stores the values of frozen experts. It is a hook that runs before each optimizer step."""
    parameters = (tensor for group in optimizer.param_groups for tensor in group["params"])
    frozen = [(tensor, index) for tensor in parameters if (index := frozen_rows(tensor)) is not None]
    if frozen:
        _before[optimizer] = [(tensor, index, local_part(tensor)[index]) for tensor, index in frozen]


@torch.no_grad()
def _put_back(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Writes the stored values back to frozen experts. It is a hook that runs after each step."""
    for tensor, index, values in _before.pop(optimizer, ()):
        local_part(tensor)[index] = values
