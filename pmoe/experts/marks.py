"""Marks on stacked parameters, for tools that tell matrices from vectors by the number of dimensions.

w1, w2  (E, out, in)   three dimensions, and each slice is one matrix
b1, b2  (E, columns)   two dimensions, and each slice is one bias, not a matrix
"""

from __future__ import annotations

import re

from torch import Tensor, nn

STACKED = re.compile(r"(parametrizations\.)?(w1|w2|b1|b2)(_orig|\..*)?")
"""Matches names of stacked parameters: plain ("w1"), pruned ("w1_orig") or parametrized ones."""


def mark_stacked(experts: nn.Module) -> None:
    """Sets ``stacked = True`` on stacked parameters, whose dimension 0 counts the experts.

    Must be called again after new Parameter objects were made (see `Experts.mark_parameters`).
    """
    for name, parameter in experts.named_parameters():
        if STACKED.fullmatch(name):
            parameter.stacked = True  # type: ignore[attr-defined]


def is_stacked(parameter: Tensor) -> bool:
    """Returns whether dimension 0 of a parameter counts experts (`mark_stacked`)."""
    return bool(getattr(parameter, "stacked", False))


def num_dims(parameter: Tensor) -> int:
    """Returns the number of dimensions of a parameter, of one expert's slice if it is stacked.

    A matrix has 2, a bias 1.
    """
    return parameter.ndim - is_stacked(parameter)
