"""A gate for models that have a router of their own. The model passes the routing at each call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pmoe.gates.base import Gate, PartitionName, Routing


class ExternalGate(Gate):
    """A gate for a model that computes the routing itself. A `routing` block sets the routing of a call:

        with gate.routing(expert_TK, weight_TK):
            y = layer(x)

    It has no parameters. Its l_aux is 0, because the model computes the losses of its router itself.
    Gradients flow through weight_TK (T, K), for T tokens with K experts each, to the model's router.
    """

    partition: PartitionName = "none"
    saved_scores = 0
    has_external_routing = True

    def __init__(self) -> None:
        super().__init__()
        self._given: Routing | None = None
        self._weights_of: Callable[[Tensor], Tensor] | None = None

    @contextlib.contextmanager
    def routing(
        self,
        expert_TK: Tensor,
        weight_TK: Tensor,
        keep_TK: Tensor | None = None,
        *,
        weights_of: Callable[[Tensor], Tensor] | None = None,
    ) -> Iterator[None]:
        """Returns a with-block in which the layer uses the given routing.

        The layer checks the three tensors when it is called, on every rank. `Routing` describes them.

        Args:
            expert_TK: (T, K) int64, global indices of the K experts of T tokens. Choices that keep_TK drops
                may have any valid index.
            weight_TK: (T, K) float32 or float64, factors of the experts' outputs.
            keep_TK: (T, K) bool, False for choices that are dropped; None keeps all.
            weights_of: for `pmoe.replay_routing`: a function that maps experts (T, K) int64 to the weights
                (T, K) that the router gives them in this call. None if the routing is not replayed.

        Raises TypeError if ``weights_of`` is neither None nor a function.
        """
        if weights_of is not None and not callable(weights_of):
            raise TypeError(f"weights_of ({weights_of!r}) must be None or a function from experts to weights")
        zero = torch.zeros((), device=getattr(weight_TK, "device", None))
        self._given = Routing(expert=expert_TK, weight=weight_TK, l_aux=zero, keep=keep_TK)
        self._weights_of = weights_of
        try:
            yield
        finally:
            self._given = None
            self._weights_of = None

    def weights_of(self, routing: Routing, expert_TK: Tensor) -> Tensor:
        """Returns the weights (T, K) that the model's router gives to recorded experts, in a replayed call.

        They come from the function ``weights_of`` that the caller passed to the with-block `routing`.

        routing: the routing of the call.
        expert_TK: (T, K) int64, the K recorded experts of each of T tokens.

        Raises ValueError if no function was passed, or if choices are dropped (``keep_TK``).
        """
        call = (
            "with gate.routing(expert_TK, weight_TK, weights_of=lambda chosen: score_TE.gather(1, chosen)):"
        )
        if self._weights_of is None:
            raise ValueError(
                "weights_of (None) of ExternalGate.routing must be a function from experts to weights where "
                f"the routing is replayed: call `{call}`"
            )
        if routing.keep is not None:
            raise ValueError(
                "keep_TK of ExternalGate.routing must be None where the routing is replayed, because it says "
                f"which of the router's own choices are dropped: call `{call}`"
            )
        return self._weights_of(expert_TK)

    def forward(self, x_TM: Tensor) -> Routing:
        """Returns the routing that the caller gave to the with-block `routing` around this call.

        x_TM: (T, M), the T tokens with M = d_model columns.

        Raises RuntimeError if the call is not inside such a block.
        """
        if self._given is None:
            raise RuntimeError(
                "a layer with an ExternalGate must be called inside "
                "`with gate.routing(expert_TK, weight_TK):`"
            )
        return self._given
