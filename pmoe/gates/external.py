"""A gate for models with a router of their own: each call's routing comes from outside the layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from pmoe.gates.base import Gate, PartitionName, Routing


class ExternalGate(Gate):
    """A gate that returns the routing that its user has set. Call the layer inside a `routing` block:

        with gate.routing(expert_TK, weight_TK):
            y = layer(x)

    It has no parameters. Its l_aux is 0, because the model computes its router's losses itself. Gradients
    flow through weight_TK (T, K) to the model's router.
    """

    partition: PartitionName = "none"
    saved_scores = 0
    has_external_routing = True

    def __init__(self) -> None:
        super().__init__()
        self._given: Routing | None = None

    @contextlib.contextmanager
    def routing(self, expert_TK: Tensor, weight_TK: Tensor, keep_TK: Tensor | None = None) -> Iterator[None]:
        """A block in which calls of the layer use this routing: see `Routing` for the three tensors.

        The layer checks them, on every rank.

        Args:
            expert_TK: (T, K) int64. Choices that keep_TK drops may name any of the E experts.
            weight_TK: (T, K) float32 or float64.
            keep_TK: (T, K) bool, the choices to be kept; None keeps all.
        """
        zero = torch.zeros((), device=getattr(weight_TK, "device", None))
        self._given = Routing(expert=expert_TK, weight=weight_TK, l_aux=zero, keep=keep_TK)
        try:
            yield
        finally:
            self._given = None

    def forward(self, x_TM: Tensor) -> Routing:
        """Returns the routing of the block, for tokens x_TM (T, M). Raises RuntimeError outside a block."""
        if self._given is None:
            raise RuntimeError(
                "a layer with an ExternalGate must be called inside "
                "`with gate.routing(expert_TK, weight_TK):`"
            )
        return self._given
