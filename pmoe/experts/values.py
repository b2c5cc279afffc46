"""Distinguishes tensors that hold numbers from meta and fake tensors, which hold none."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(tensor: Tensor) -> bool:
    """Returns whether a tensor, of any shape, holds numbers: it is neither on the meta device nor fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def check_not_meta(parameter: Tensor | None) -> None:
    """Raises ValueError if a parameter is on the meta device, because nothing can be computed with it.

    parameter: of any shape, or None, which passes.
    """
    if parameter is not None and parameter.is_meta:
        raise ValueError(
            "the layer's parameters are on the meta device and have no values: call "
            "layer.to_empty(device=...) and layer.reset_parameters() before the layer"
        )
