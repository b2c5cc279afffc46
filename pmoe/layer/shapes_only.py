"""Calls without values: on the meta device, or with fake tensors (``FakeTensorMode``).

The output has the shape, dtype, device and requires_grad that a real call would give, and gradients have the
right shapes. No row is routed, nothing is sent and the host reads nothing, so this works with any options and
any number of ranks. Whether a call has no values depends on the layer's parameters and on the input:

    parameters   input x   the call
    meta         meta      shapes only
    meta         plain     an error
    fake         fake      shapes only
    plain        fake      shapes only
    fake         plain     shapes only, inside of FakeTensorMode

Tools that count memory or operations see nothing of the inside of the layer. `MoELayer.predict_memory` gives
its bytes.
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
    """Returns whether a call computes shapes only, because the input or the parameters hold no numbers.

    modules: the layer's modules and options.
    x: (..., M), the input.
    """
    like = modules.reference_parameter
    if x.is_meta:
        return like is None or like.is_meta
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode is not None or isinstance(x, FakeTensor) or isinstance(like, FakeTensor)


def computed_shapes(modules: LayerModules, x: Tensor) -> tuple[Tensor, LastCall]:
    """Returns the output of the layer without values, (..., M), and the record of the call.

    The record holds only the auxiliary loss, a scalar. Output and loss are connected to the autograd graphs
    of x, of the parameters, and of a router outside of the layer, so that backward gives all of them
    gradients.

    modules: the layer's modules and options.
    x: (..., M), the input.

    Raises what a real call raises for a wrong shape, dtype or device.
    """
    for callback in modules.callbacks:
        x = callback.before_moe_start(x)
    check_input(modules, x)
    operands: list[Tensor] = []
    for module in (modules.experts, modules.gate, modules.shared_expert, modules.shared_gate):
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
    """Returns a tensor without values, of the shape of ``like``. Backward gives ``tensors`` gradients.

    like, tensors: of any shape.
    dtype: of the result.
    """
    shaped: Tensor = _Shape.apply(like, dtype, *tensors)  # type: ignore[no-untyped-call]
    return shaped


class _Shape(torch.autograd.Function):
    """Makes a tensor without values from others. Its backward gives each of them a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.tensors = tensors
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.tensors, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(_zeros_of(tensor, grad) if wants else None for tensor, wants in wanted)


def _zeros_of(tensor: Tensor, grad: Tensor) -> Tensor:
    """Returns a gradient of the shape of ``tensor`` without numbers: on the meta device or fake.

    grad: a tensor on the meta device or fake; the result is of the same sort. So no optimizer can mistake it
        for a real gradient.
    """
    if hasattr(tensor, "to_local"):  # a DTensor, whose gradient must be a DTensor
        return torch.zeros_like(tensor)
    return grad.new_zeros(tensor.shape, dtype=tensor.dtype)
