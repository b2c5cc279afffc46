"""Calls with inputs that are not plain tensors or have no values, and calls under dispatch modes.

The layer runs on a plain tensor that is made from the input x. The result gets the type of x:

    input x                     the layer's tokens             the result
    jagged nested tensor        its values                     jagged, with the same offsets
    DTensor                     this rank's part               a DTensor with the same placements
    subclass, own functions     the tensor without its class   as the class makes it (``__torch_function__``)
    AsyncCollectiveTensor       the tensor, after a wait       plain
    meta, fake                  none                           a shape only (`pmoe.layer.shapes_only`)

`pmoe.call.tensor_kinds.refused_kind` refuses other types. A rank that refuses its input tells the others in
the exchange of row counts, so that every rank raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import handle_torch_function, has_torch_function_unary

from pmoe.call.tensor_kinds import PLAIN, is_dtensor, is_jagged, refused_kind
from pmoe.checkpointing.selective import hidden_from_selective_checkpoints
from pmoe.layer.shapes_only import computed_shapes, has_no_values

if TYPE_CHECKING:
    from pmoe.layer.moe_layer import MoELayer


def call_with_any(layer: MoELayer, x: Tensor, *of_tokens: Tensor | None) -> Tensor:
    """Computes a layer's forward for an input of any tensor type. The result has the type of x.

    layer: the `MoELayer`.
    x: (..., d_model), the input: one row for each token.
    of_tokens: (...), further arguments with one value for each token: ids and mask. Each is a plain tensor,
        or of the type of x.

    Raises what `MoELayer.forward` raises, and RuntimeError if make_fx or torch.export traces the call.
    """
    if get_proxy_mode() is not None:  # the traced graph would hold the row counts of this batch as constants
        raise RuntimeError(
            "a MoELayer decides each call on the host, so make_fx and torch.export cannot trace it: trace "
            "the "
            'modules around it, or use torch.compile with backend="pmoe", which keeps the layer in its graph'
        )
    with hidden_from_selective_checkpoints():
        return _call(layer, x, *of_tokens)


def _call(layer: MoELayer, x: Tensor, *of_tokens: Tensor | None) -> Tensor:
    """Calls the layer in the way that the type of x needs. One type may wrap another: then it calls itself.

    x: (..., d_model), the input.
    of_tokens: (...), further arguments with one value for each token.
    """
    if not isinstance(x, Tensor) or refused_kind(x, layer.d_model) is not None:
        return layer._forward_plain(x, *of_tokens)  # raises the refusal, on every rank
    if is_jagged(x):
        return _jagged(layer, x, *of_tokens)
    if is_dtensor(x):
        return _distributed(layer, x, *of_tokens)
    if type(x).__name__ == "AsyncCollectiveTensor":
        return _call(layer, _Waited.apply(x), *of_tokens)  # type: ignore[no-untyped-call]
    if has_no_values(layer.layer_modules, x):
        y, layer.last = computed_shapes(layer.layer_modules, x)
        return y
    if type(x) in PLAIN:
        return layer._forward_plain(x, *of_tokens)
    return _as_function(x, layer, *of_tokens)


def _jagged(layer: MoELayer, x: Any, *of_tokens: Tensor | None) -> Tensor:
    """Calls the layer with the values of a jagged nested tensor, and returns one with the same offsets.

    x: the jagged nested tensor, its last dimension d_model.
    of_tokens: ids and mask, each a plain tensor of all values or a jagged nested tensor.
    """
    values = x.values()
    y = _call(layer, values, *map(_values, of_tokens))
    if not isinstance(y, Tensor) or y.shape[:-1] != values.shape[:-1]:
        return y  # a callback has replaced the output, so there is nothing to restore
    from torch.nested import nested_tensor_from_jagged

    return nested_tensor_from_jagged(
        y, x.offsets(), x.lengths(), x._ragged_idx, x._maybe_min_seqlen, x._maybe_max_seqlen
    )


def _values(of_tokens: Any) -> Tensor | None:
    """Returns the values of a jagged nested tensor, and any other argument unchanged."""
    values: Tensor | None = of_tokens.values() if is_jagged(of_tokens) else of_tokens
    return values


def _distributed(layer: MoELayer, x: Any, *of_tokens: Tensor | None) -> Tensor:
    """Calls the layer with this rank's part of a DTensor, and returns one with the same placements.

    x: the DTensor, (..., d_model).
    of_tokens: ids and mask, (...): each this rank's part, or a DTensor.
    """
    local = x.to_local()
    y = _call(layer, local, *map(_local, of_tokens))
    if not isinstance(y, Tensor) or y.shape[:-1] != local.shape[:-1]:
        return y  # a callback has replaced the output, so there is nothing to restore
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*x.shape[:-1], y.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)


def _local(of_tokens: Any) -> Tensor | None:
    """Returns this rank's part of a DTensor, and any other argument unchanged."""
    local: Tensor | None = of_tokens.to_local() if is_dtensor(of_tokens) else of_tokens
    return local


def _as_function(x: Tensor, layer: MoELayer, *of_tokens: Tensor | None) -> Tensor:
    """Makes the call as one of torch's functions, so that x's class handles it (``__torch_function__``).

    x: (..., d_model), of a tensor subclass, or a plain tensor, on which the layer is called.
    of_tokens: (...), further arguments with one value for each token.
    """
    if has_torch_function_unary(x):
        y: Tensor = handle_torch_function(_as_function, (x,), x, layer, *of_tokens)
        return y
    with torch._C._EnableTorchFunction():
        return layer._forward_plain(x.as_subclass(Tensor), *of_tokens)


class _Waited(torch.autograd.Function):
    """Waits for a collective that may still be computing x, and returns x as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        waited: Tensor = x.trigger_wait()
        return waited.view_as(waited)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
