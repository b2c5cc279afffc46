"""Lengths of vectors, for gates that compare directions."""

from __future__ import annotations

import torch
from torch import Tensor

SHORTEST = 1e-6
"""A vector shorter than this has no direction."""


def inverse_length(vectors: Tensor) -> Tensor:
    """1 / |v| of each row, (..., 1), in float32 or wider; 0, with no gradient, where |v| < `SHORTEST`.

    A length of 0 would make NaN of the row, and a small constant added to it huge gradients.
    """
    wide = torch.promote_types(vectors.dtype, torch.float32)
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=wide)
    inverse: Tensor = length.clamp(min=SHORTEST).reciprocal() * (length >= SHORTEST)
    return inverse
