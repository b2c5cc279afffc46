"""The kinds of tensors that a layer accepts as its input, and the error texts for other kinds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import _get_tracing_state as tracing_state
from torch._C._functorch import peek_interpreter_stack as innermost_transform

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLAIN = (Tensor, nn.Parameter)
"""The tensor classes that do not change the behaviour of torch's operators."""

NO_DISPATCH: tuple[object, ...] = (Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
"""Values of ``__torch_dispatch__`` that show that a tensor class does not change torch's operators."""


def is_jagged(x: object) -> bool:
    """Returns whether x is a nested tensor with the jagged layout."""
    return isinstance(x, Tensor) and x.layout is torch.jagged


def is_dtensor(x: object) -> bool:
    """Returns whether x is a DTensor."""
    # Importing the module is slow. If there is a DTensor, the module is imported already.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def refused_transform() -> str | None:
    """Returns why a layer refuses a call inside a transform of ``torch.func``; None outside of transforms."""
    running: Any = innermost_transform()
    if running is None:
        return None
    return (
        f"x (inside the transform {running.key().name.lower()} of torch.func) must be outside of it: a "
        "layer decides each call on the host, so vmap, grad, vjp and jvp cannot transform it: call the "
        "layer with all tokens as one batch, and differentiate it by torch.autograd.grad"
    )


def refused_kind(x: Tensor, d_model: int) -> str | None:
    """Returns why a layer refuses a tensor of this kind, and what to pass instead; None if it accepts it.

    x: of any shape. Only its class, its layout and the placements of a DTensor are checked, and whether
        ``torch.jit.trace`` or a transform of ``torch.func`` runs; dtype, shape and device are not.
    d_model: number of columns of the layer's input, for the text.
    """
    if tracing_state() is not None:
        return (
            "x (inside torch.jit.trace) must be outside of it: a layer decides each call on the host, so a "
            "trace would keep the routing of this batch. Trace the modules around the layer"
        )
    transform = refused_transform()
    if transform is not None:
        return transform
    name = f"x (a {type(x).__name__})"
    if x.layout is torch.jagged:
        if x.lengths() is not None:  # type: ignore[attr-defined]
            return f"{name} has unused rows between its sequences: pass x.contiguous()"
        if x._ragged_idx == x.dim() - 1:  # type: ignore[attr-defined]
            return f"{name} is jagged in its last dimension, which must be d_model ({d_model})"
        return None
    if x.is_nested:
        return f"{name} is nested with layout torch.strided: build it with layout=torch.jagged"
    if x.layout is not torch.strided:
        return f"x has layout {x.layout}, but a MoELayer takes dense tensors: pass x.to_dense()"
    if type(x) in PLAIN:
        return None
    if is_dtensor(x):
        return _refused_placement(x)  # type: ignore[arg-type]
    if type(x).__name__ == "MaskedTensor":
        return f"{name} masks single elements: pass x.get_data(), and mask= to mask whole tokens"
    if type(x).__torch_dispatch__ in NO_DISPATCH:
        return None
    if type(x).__name__ in ("FakeTensor", "AsyncCollectiveTensor"):
        return None
    return (
        f"{name} defines its own operators, so a layer cannot send its rows: pass a plain torch.Tensor with "
        "the same values (for a quantised tensor x.dequantize())"
    )


def _refused_placement(x: DTensor) -> str | None:
    """Returns why a layer refuses a DTensor that is sharded in this way; None if it accepts it.

    Each rank must hold whole tokens, with all their columns.
    """
    last = x.dim() - 1
    for placement in x.placements:
        if placement.is_partial() or placement.is_shard(last):
            return (
                f"x (a DTensor with placements {x.placements}) must have whole tokens on each rank: "
                f"Replicate, or Shard of a dimension before the last ({last}): pass "
                "x.redistribute(placements=[Shard(0)])"
            )
    return None
