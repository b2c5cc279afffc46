"""What every gate returns: the routing of a rank's tokens, decided once and never again.

Letters: T tokens of this rank, K choices a token, E experts of the whole group, M = d_model.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where each token goes and with what weight.

    expert: (T, K) int64, global expert indices, distinct within a token.
    weight: (T, K) float32 or float64, the factor of each expert's output; carries the gate's gradient.
    l_aux: scalar, the auxiliary loss of this rank's tokens, attached to the graph.
    logits: (T, E) or None, the gate's scores; looked at only for ``check_finite``.
    """

    expert: Tensor
    weight: Tensor
    l_aux: Tensor
    logits: Tensor | None = None


class Gate(nn.Module, abc.ABC):
    """A gate maps tokens to a `Routing`. Subclass it, or pass any module that returns one.

    A gate decides for the rank's whole batch at once, so micro-batches follow its decision and cannot
    change it.
    """

    @abc.abstractmethod
    def forward(self, x_TM: Tensor) -> Routing:
        """Routes the tokens x_TM, (T, d_model); T may be 0."""


def at_least_float32(x: Tensor) -> Tensor:
    """Routing is computed in float32 or wider, whatever the rows' type: rounding flips near ties."""
    return x if x.dtype == torch.float64 else x.float()
