"""What gates share that look at the whole batch before a token's experts are known."""

from __future__ import annotations

import math

from torch import Tensor


def rows_for_each_expert(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """ceil(factor * T * K / E), the layer's capacity too. Example: (1.25, 16, 2, 8) -> 5."""
    return math.ceil(factor * num_tokens * top_k / num_experts)


def attached_zero(scores: Tensor) -> Tensor:
    """0 on the graph of the scores, also where they are not finite."""
    return scores[:0].sum()
