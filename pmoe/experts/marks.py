"""Marks of stacked parameters, for tools that tell matrices from vectors by the number of dimensions.

w1, w2  (E, out, in)   three dimensions, and each slice is one matrix
b1, b2  (E, columns)   two dimensions, and each slice is one bias: no matrix
"""

from __future__ import annotations

import re

from torch import Tensor, nn

STACKED = re.compile(r"(parametrizations\.)?(w1|w2|b1|b2)(_orig|\..*)?")
"""Names of stacked parameters: as they are, pruned (w1_orig), or parametrized, with all that makes them."""


def mark_stacked(experts: nn.Module) -> None:
    """Sets ``stacked = True`` on stacked parameters: their dimension 0 counts experts. What makes new
    Parameter objects (see `Experts.mark_parameters`) is followed by this."""
    for name, parameter in experts.named_parameters():
        if STACKED.fullmatch(name):
            parameter.stacked = True  # type: ignore[attr-defined]


def is_stacked(parameter: Tensor) -> bool:
    """Whether dimension 0 counts experts (`mark_stacked`)."""
    return bool(getattr(parameter, "stacked", False))


def num_dims(parameter: Tensor) -> int:
    """The number of a parameter's dimensions; of one slice, where it is stacked. A matrix has 2, a bias 1."""
    return parameter.ndim - is_stacked(parameter)
