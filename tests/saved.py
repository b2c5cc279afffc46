"""Tensors that a layer's experts and gate save for backward."""

from __future__ import annotations

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pmoe import MoELayer


def saved_by(layer: MoELayer, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and what the layer's experts and gate save for backward, parameters apart."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # an output would hold its own graph
        if not isinstance(tensor, nn.Parameter):
            saved.append(kept)
        return kept

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    return y, saved


def rows_saved(saved: list[Tensor], width: int, x: Tensor) -> list[Tensor]:
    """All saved tensors of that width, x apart."""
    found = [tensor for tensor in saved if tensor.dim() == 2 and tensor.shape[1] == width]
    return [tensor for tensor in found if tensor.data_ptr() != x.data_ptr()]


def num_rows(tensors: list[Tensor]) -> int:
    return sum(tensor.shape[0] for tensor in tensors)
