"""A gate that decides nothing: the routing comes from outside of the layer, call by call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from pmoe.gates.base import Gate, PartitionName, Routing


class ExternalGate(Gate):
    """For models whose router is their own. Each call of the layer stands inside `routing`:

        with gate.routing(expert_TK, weight_TK):
            y = layer(x)

    It has no parameters, and its l_aux is 0: the router's losses are its owner's. Gradients of weight_TK
    travel back to whoever made it.
    """

    partition: PartitionName = "none"
    saved_scores = 0
    has_external_routing = True

    def __init__(self) -> None:
        super().__init__()
        self._given: Routing | None = None

    @contextlib.contextmanager
    def routing(self, expert_TK: Tensor, weight_TK: Tensor, keep_TK: Tensor | None = None) -> Iterator[None]:
        """Routes the layer's calls inside the block by these, (T, K) each, as in `Routing`.

        The layer checks them, on every rank. Of slots that keep_TK drops the expert may be any of the E.
        """
        zero = torch.zeros((), device=getattr(weight_TK, "device", None))
        self._given = Routing(expert=expert_TK, weight=weight_TK, l_aux=zero, keep=keep_TK)
        try:
            yield
        finally:
            self._given = None

    def forward(self, x_TM: Tensor) -> Routing:
        """The routing of the block, for tokens (T, M). Raises RuntimeError outside of a block."""
        if self._given is None:
            raise RuntimeError("a layer with an ExternalGate must be called inside `with gate.routing(...)`")
        return self._given
