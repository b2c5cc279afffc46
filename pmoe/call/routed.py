"""The records of a routed call: the gate's checked result, and the tokens together with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pmoe.comm.counts import EarlyMessages, Fault
from pmoe.gates.base import Routing

if TYPE_CHECKING:
    from pmoe.kernels.route.reference import Routes


class CheckedRouting(NamedTuple):
    """The checked routing of a call. Activation checkpointing keeps this record for its second pass.

    routing        the gate's result. ``keep`` is True for choices that the expert's capacity allows
    fault          a fault of this rank's input or routing, such as NaN in the gate's logits: a `Fault`, or
                   its number, an int64 scalar on the device
    is_again       whether activation checkpointing has routed the same tokens before
    kernel_routes  the result of the routing kernels, if they have routed; else None
    sorted_for     the number of chunks n for which ``kernel_routes`` has sorted the slots in the order of
                   `pmoe.ordering.sorted.sort_rows`; None if they have another order
    early          messages of row counts that the routing kernels have written; None if they have not
    rows_TM        (T, M), the tokens again, as an output of the gate in the autograd graph. The experts take
                   these rows, so backward passes the experts' gradient of the tokens to the gate, which adds
                   its own gradient (`pmoe.gates.logits.LogitsAndRows`). None if the experts take the same
                   tensor as the gate, and autograd adds the two gradients
    """

    routing: Routing
    fault: Tensor | Fault = Fault.NONE
    is_again: bool = False
    kernel_routes: Routes | None = None
    sorted_for: int | None = None
    early: EarlyMessages | None = None
    rows_TM: Tensor | None = None


class RoutedBatch(NamedTuple):
    """The tokens of this rank with their routing.

    x           (..., M), the input of the layer after the callbacks' ``before_moe_start``; M is d_model
    x_TM        (T, M), the rows of x, one for each of T tokens
    gated       the checked routing
    autocast    dtype to which rows and parameters are cast (`pmoe.decide.route.cast_dtype`); None if they
                are not cast
    needs_grad  whether autograd on this rank needs gradients of the call
    failure     the error for the fault in ``gated``, if it was found on the host; else None
    """

    x: Tensor
    x_TM: Tensor
    gated: CheckedRouting
    autocast: torch.dtype | None
    needs_grad: bool
    failure: Exception | None = None

    @property
    def routing(self) -> Routing:
        """The checked routing."""
        return self.gated.routing

    @property
    def num_tokens(self) -> int:
        """T, the number of this rank's tokens."""
        return self.x_TM.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows that reach the experts."""
        return self.autocast or self.x_TM.dtype

    def with_rows(self, x_TM: Tensor) -> RoutedBatch:
        """Returns this batch with other rows for the experts, (T, M), such as those that a hook returned."""
        return self._replace(x_TM=x_TM, gated=self.gated._replace(rows_TM=None))
