"""A layer's forward for tensors without values: meta tensors, or fake tensors (``FakeTensorMode``).

The output has the shape, dtype, device and requires_grad that real tensors would give, and backward gives
gradients of the right shapes. No row is routed or sent, so this works with any options and any number of
ranks. The layer's parameters and the input decide whether forward computes shapes only:

    parameters   input x   forward
    meta         meta      shapes only
    meta         plain     raises an error, as does a plain parameter with a meta input
    fake         fake      shapes only
    plain        fake      shapes only
    fake         plain     shapes only; needs an active FakeTensorMode

Tools that count a model's memory or operations with such tensors miss what happens inside the layer.
`MoELayer.predict_memory` predicts the layer's memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pmoe.call.decision import LastCall
from pmoe.call.modules import LayerModules
from pmoe.decide.route import cast_dtype, check_input
from pmoe.gates.base import at_least_float32


def has_no_values(modules: LayerModules, x: Tensor) -> bool:
    """Returns whether forward must compute shapes only, because input or parameters have no values.

    Meta and fake tensors have no values. An active FakeTensorMode gives tensors without values, too.

    modules: the layer's modules and options.
    x: (..., M), the input; M is d_model.
    """
    like = modules.reference_parameter
    if x.is_meta:
        return like is None or like.is_meta
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode is not None or isinstance(x, FakeTensor) or isinstance(like, FakeTensor)


def computed_shapes(modules: LayerModules, x: Tensor) -> tuple[Tensor, LastCall]:
    """Returns the layer's output as a tensor without values, (..., M), and the record of the call.

    The record holds only the auxiliary loss, a scalar without a value. Backward of the output gives gradients
    without values to x, to all parameters, and to the weights that a router outside of the layer computed.
    Backward of the loss gives them to x and to the gate's parameters.

    modules: the layer's modules and options.
    x: (..., M), the input; M is d_model.

    Raises the errors of a real call for a wrong shape, dtype or device.
    """
    for callback in modules.callbacks:
        x = callback.before_moe_start(x)
    check_input(modules, x, modules.reference_parameter)
    operands: list[Tensor] = []
    for module in (modules.experts, modules.gate, modules.shared_expert, modules.shared_gate, modules.latent):
        operands += () if module is None else module.parameters()
    operands += () if modules.hooks is None else modules.hooks.parameters
    # A router outside of the layer gets a gradient, too.
    if getattr(modules.gate, "has_external_routing", False):
        operands.append(modules.gate(x).weight)
    l_aux = _shape_like(x.new_empty(()), at_least_float32(x[:0]).dtype, x, *modules.gate.parameters())
    y = _shape_like(x, cast_dtype(modules, x) or x.dtype, x, *operands)
    for callback in modules.callbacks:
        y = callback.before_moe_end(y)
    return y, LastCall(l_aux=l_aux)


def _shape_like(like: Tensor, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
    """Returns a tensor without values that has ``tensors`` as inputs in the autograd graph.

    like: a tensor of any shape. The result has the shape and device of ``like``.
    dtype: dtype of the result.
    tensors: tensors of any shape. Backward gives each of them a gradient without values.
    """
    shaped: Tensor = _Shape.apply(like, dtype, *tensors)  # type: ignore[no-untyped-call]
    return shaped


class _Shape(torch.autograd.Function):
    """The autograd function of `_shape_like`: connects an output without values to its inputs.

    Thus the output requires a gradient if an input does, and backward gives each input a gradient of its
    shape, without values. Tools can follow shapes through the layer, forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, like: Tensor, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.tensors = tensors
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.tensors, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(_zeros_of(tensor, grad) if wants else None for tensor, wants in wanted)


def _zeros_of(tensor: Tensor, grad: Tensor) -> Tensor:
    """Returns a gradient without values: a meta tensor if ``grad`` is one, else a fake tensor.

    A real tensor of zeros would also have the right shape, but an optimizer could take it for a gradient.

    tensor: of any shape, a parameter or an input of the layer.
    grad: of any shape, the gradient that reached the layer's output.
    """
    if hasattr(tensor, "to_local"):  # a DTensor, whose gradient must be a DTensor
        return torch.zeros_like(tensor)
    return grad.new_zeros(tensor.shape, dtype=tensor.dtype)
