"""`MoELayer.forward` for inputs that are not plain tensors with values.

The layer can compute only with plain tensors. So this file takes a plain tensor out of the input x, runs the
layer on it, and turns the result back into the type of x:

    type of x                    what the layer runs on      what forward returns
    jagged nested tensor         x.values()                  a jagged tensor with the same offsets
    DTensor                      x.to_local()                a DTensor with the same placements
    AsyncCollectiveTensor        x, once it has arrived      a plain tensor
    another subclass of Tensor   x as a plain Tensor         what the class's ``__torch_function__`` returns
    on the meta device or fake   nothing                     a tensor without values (`layer.shapes_only`)

`MoELayer.forward` also uses this file for a plain x while a ``TorchDispatchMode`` is active. Under
FakeTensorMode the result has no values. Selective activation checkpointing must see no operator of the layer
(`pmoe.checkpointing.selective`). make_fx and torch.export are refused. Other modes change nothing.

`pmoe.call.tensor_kinds.refused_kind` says which types are refused. A rank that refuses its input reports this
to the other ranks in the exchange of row counts, so that every rank raises and none waits. Inside a transform
of ``torch.func`` no message can be sent, so the rank publishes its error in the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import handle_torch_function, has_torch_function_unary

from pmoe.call.tensor_kinds import PLAIN, is_dtensor, is_jagged, refused_kind, refused_transform
from pmoe.checkpointing.selective import hidden_from_selective_checkpoints
from pmoe.comm.counts import Fault, FaultError
from pmoe.comm.failures import publish_construction
from pmoe.layer.shapes_only import computed_shapes, has_no_values

if TYPE_CHECKING:
    from pmoe.layer.moe_layer import MoELayer


def call_with_any(layer: MoELayer, x: Tensor, *of_tokens: Tensor | None) -> Tensor:
    """Computes a layer's forward for an input of any tensor type.

    The result has the type of x. If x is an AsyncCollectiveTensor, the result is a plain tensor.

    layer: the `MoELayer`.
    x: (..., d_model), the input: one row for each token.
    of_tokens: forward's arguments token_ids and mask, (...): one value for each token, or None. Each is a
        plain tensor, or of the type of x.

    Raises what `MoELayer.forward` raises, and RuntimeError if make_fx or torch.export traces the call. Raises
    FaultError inside a transform of ``torch.func``.
    """
    transform = refused_transform()
    if transform is not None and layer.ranks.size > 1:
        # A transform wraps all tensors that are made in it, so no message could be sent.
        error = FaultError(Fault.SHAPE, transform)
        publish_construction(error)
        raise error
    if get_proxy_mode() is not None:  # the traced graph would hold the row counts of this batch as constants
        raise RuntimeError(
            "a MoELayer decides each call on the host, so make_fx and torch.export cannot trace it: trace "
            "the "
            'modules around it, or use torch.compile with backend="pmoe", which keeps the layer in its graph'
        )
    with hidden_from_selective_checkpoints():
        return _call(layer, x, *of_tokens)


def _call(layer: MoELayer, x: Tensor, *of_tokens: Tensor | None) -> Tensor:
    """Runs the layer on the plain tensor inside of x, and returns the output in the type of x.

    The types may be nested: a DTensor may hold a subclass, for example. Each call of this function takes one
    type off and calls the function again with the tensor inside, until a plain tensor is left.

    layer: the `MoELayer`.
    x: (..., d_model), the input, of any tensor type.
    of_tokens: forward's arguments token_ids and mask, (...): one value for each token, or None.
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

    x: (batch, ragged, d_model), the jagged nested tensor. Its values are (tokens, d_model).
    of_tokens: forward's arguments token_ids and mask: each a jagged nested tensor like x, a plain tensor
        (tokens,) or None.
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
    """Calls the layer with this rank's part of a DTensor, and returns a DTensor with the same placements.

    x: the DTensor, (..., d_model).
    of_tokens: forward's arguments token_ids and mask, (...): each a DTensor like x, a plain tensor that has
        the values of this rank's part, or None.
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
    """Runs the layer on a tensor subclass like an operator of torch, through ``__torch_function__``.

    If x's class has a ``__torch_function__``, that method is called, with `_as_function` as the operator. The
    default ``__torch_function__`` calls `_as_function` a second time with ``__torch_function__`` disabled,
    and wraps the result in the class. The second call runs the layer on x as a plain Tensor.

    x: (..., d_model), the input, of a subclass of Tensor; or a plain Tensor, if the class's method has
        unwrapped it.
    layer: the `MoELayer`.
    of_tokens: forward's arguments token_ids and mask, (...): one value for each token, or None.
    """
    if has_torch_function_unary(x):
        y: Tensor = handle_torch_function(_as_function, (x,), x, layer, *of_tokens)
        return y
    with torch._C._EnableTorchFunction():
        return layer._forward_plain(x.as_subclass(Tensor), *of_tokens)


class _Waited(torch.autograd.Function):
    """Waits for the collective that computes x, if it is still running, and returns x as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        waited: Tensor = x.trigger_wait()
        return waited.view_as(waited)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
