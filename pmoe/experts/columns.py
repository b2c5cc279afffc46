"""Cuts a tensor of experts into parts of their hidden columns, and joins parts to a tensor.

The w1 of gated experts has two blocks of rows: the gate projection, and the up projection. A part has the
same hidden columns of both. Example with 6 hidden columns and 3 parts:

    rows of w1    gate 0 1 2 3 4 5 | up 0 1 2 3 4 5
    part 1             . . x x . . |    . . x x . .
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pmoe.experts.base import Shard


def own_columns(values: Tensor, dim: int, halves: int, shard: Shard) -> Tensor:
    """Returns one part of a tensor's hidden columns. It may share memory with the tensor.

    values: a tensor with all hidden columns.
    dim: the dimension that counts hidden columns, at least 0.
    halves: the number of blocks of hidden columns in that dimension: 2 in w1 of gated experts, else 1.
    shard: the part.
    """
    columns = values.unflatten(dim, (halves, -1))
    own = shard.of(columns.shape[dim + 1])
    part: Tensor = columns.narrow(dim + 1, own.start, own.stop - own.start).flatten(dim, dim + 1)
    return part


def joined_columns(parts: Sequence[Tensor], dim: int, halves: int) -> Tensor:
    """Returns the tensor with all hidden columns, in new memory: the inverse of `own_columns`.

    parts: the parts in the order of their numbers.
    dim: the dimension that counts hidden columns, at least 0.
    halves: the number of blocks of hidden columns in that dimension: 2 in w1 of gated experts, else 1.
    """
    return torch.cat([part.unflatten(dim, (halves, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)
