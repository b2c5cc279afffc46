"""The gate's graph under a checkpoint: what it saves of the layer's input is a ticket for the input.

The gate runs once, in the first pass, and its graph stays. Of the layer's input, which a gate saves, only a
`Ticket` stays; the rows are those that the second pass makes again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pmoe.engine.autograd import make_anchor


class Ticket:
    """Stands in the gate's graph for the layer's input or a view of it. holder: its ``saved_tensors`` are
    that input, saved as everything around the gate is: by the checkpoint, which makes it again."""

    def __init__(self, tensor: Tensor, input_stride: tuple[int, ...], input_offset: int) -> None:
        self.size, self.stride, self.input_stride = tensor.size(), tensor.stride(), input_stride
        self.offset = tensor.storage_offset() - input_offset
        self.holder: Any = None

    def tensor(self) -> Tensor:
        x_TM: Tensor
        (x_TM,) = self.holder.saved_tensors
        if x_TM.stride() != self.input_stride:  # other hooks, such as save_on_cpu's, may have changed that
            x_TM = torch.empty_strided(
                x_TM.size(), self.input_stride, dtype=x_TM.dtype, device=x_TM.device
            ).copy_(x_TM)
        return x_TM.as_strided(self.size, self.stride, x_TM.storage_offset() + self.offset)


class Packing:
    """Packs what a gate saves of x_TM. It does not hold x_TM: autograd keeps `pack` as long as the graph."""

    def __init__(self, x_TM: Tensor) -> None:
        self._storage, self._dtype = x_TM.untyped_storage()._cdata, x_TM.dtype
        self._layout = x_TM.stride(), int(x_TM.storage_offset())
        self.tickets: list[Ticket] = []

    def pack(self, tensor: Tensor) -> Ticket | tuple[Tensor, int]:
        # Also where there are no tokens: whether a rank runs again must not depend on them.
        if tensor.dtype == self._dtype and tensor.untyped_storage()._cdata == self._storage:
            self.tickets.append(Ticket(tensor, *self._layout))
            return self.tickets[-1]
        return tensor.detach(), tensor._version  # a graph that saved its own results would hold itself


def unpack(packed: Ticket | tuple[Tensor, int]) -> Tensor:
    if isinstance(packed, Ticket):
        return packed.tensor()
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that a gate needs for its gradient has been changed in "
            f"place since: it is at version {tensor._version}, and must be at version {version}"
        )
    return tensor


class _Hold(torch.autograd.Function):
    """Saves a tensor, and nothing more: nothing is computed from it, so nothing goes backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x_TM: Tensor) -> Tensor:
        ctx.save_for_backward(x_TM)
        return anchor.new_empty(0)


def hold(x_TM: Tensor) -> Any:
    held: Tensor = _Hold.apply(make_anchor(x_TM), x_TM.detach())  # type: ignore[no-untyped-call]
    return held.grad_fn


class _TakeOver(torch.autograd.Function):
    """The tensor, in a graph that knows no gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x_TM: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        raise RuntimeError(
            "a function checkpointed with pmoe.checkpoint_contexts must not go backward through a MoELayer "
            "itself (torch.autograd.grad): when it is run again, the gradient of its routing is not known"
        )


def as_first_pass_had(tensor: Tensor, x_TM: Tensor) -> Tensor:
    """As the first pass had it, as far as gradients are asked for."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor.detach()
    found: Tensor = _TakeOver.apply(make_anchor(x_TM), x_TM, tensor.detach())  # type: ignore[no-untyped-call]
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of dataclasses and tuples."""
    if isinstance(value, Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
        return dataclasses.replace(value, **{name: map_tensors(each, change) for name, each in fields})
    if isinstance(value, tuple):
        items = [map_tensors(each, change) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
