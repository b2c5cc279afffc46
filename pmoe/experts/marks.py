"""Marks: attributes that pmoe sets on experts' parameters, and that other tools read. One is set by FSDP1.

``allreduce = False`` makes data-parallel wrappers leave a parameter alone, because ranks hold different
experts.

``stacked = True`` says that dimension 0 of a parameter indexes experts. Optimizers that distinguish matrices
from vectors by the number of dimensions need it:

    w1, w2  (E, out, in)   three dimensions; for each expert one matrix
    b1, b2  (E, columns)   two dimensions; for each expert one bias, which is a vector and no matrix

E is the number of this rank's experts, out and in are the features of a matrix.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

STACKED = re.compile(r"(parametrizations\.)?(w1|w2|b1|b2)(_orig|\..*)?")
"""Matches names of parameters of all experts: "w1", and names of pruned ("w1_orig") or parametrized w1."""


def mark_stacked(experts: nn.Module) -> None:
    """Sets ``stacked = True`` on the experts' parameters whose dimension 0 indexes experts: w1, w2, b1, b2.

    Call it again whenever tools make new Parameter objects, because these have no attribute ``stacked``.
    """
    for name, parameter in experts.named_parameters():
        if STACKED.fullmatch(name):
            parameter.stacked = True  # type: ignore[attr-defined]


def is_stacked(parameter: Tensor) -> bool:
    """Returns whether `mark_stacked` has marked a parameter: its dimension 0 indexes experts.

    parameter: of any shape.
    """
    return bool(getattr(parameter, "stacked", False))


def num_dims(parameter: Tensor) -> int:
    """Returns the number of dimensions of a parameter, without dimension 0 if that indexes experts.

    So the result is 2 for a weight, which is a matrix for each expert, and 1 for a bias.

    parameter: of any shape.
    """
    return parameter.ndim - is_stacked(parameter)


def is_expert(parameter: Tensor) -> bool:
    """Returns whether data-parallel wrappers must leave a parameter alone, because it belongs to experts.

    Ranks hold different experts. To make DistributedDataParallel leave these parameters alone, pass their
    names to ``_set_params_and_buffers_to_ignore_for_model(model, names)`` before the model is wrapped.

    parameter: of any shape.
    """
    return not getattr(parameter, "allreduce", True)


def is_flattened(tensor: Tensor) -> bool:
    """Returns whether FullyShardedDataParallel (FSDP1) has joined a tensor with others in a flat tensor.

    Each rank keeps a piece of the flat tensor. So the tensor, of any shape, may have other dimensions and
    fewer values than the parameter that it was.
    """
    return hasattr(tensor, "_fsdp_flattened")
