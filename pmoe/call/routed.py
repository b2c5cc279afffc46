"""The records of a routed call: the checked routing, and the tokens with it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.comm.counts import Fault
from pmoe.gates.base import Routing


@dataclass(frozen=True, kw_only=True)
class CheckedRouting:
    """The checked routing of a call. A checkpoint keeps this record for its second pass.

    routing    the routing. ``keep`` is True for slots within the capacity, of the layer or of the gate
    fault      a `Fault`, or its number as an int64 scalar on the device if it was found there
    is_again   whether a checkpoint has routed the same tokens before
    """

    routing: Routing
    fault: Tensor | Fault = Fault.NONE
    is_again: bool = False


@dataclass(frozen=True, kw_only=True)
class RoutedBatch:
    """The tokens of this rank with their routing.

    x          (..., M), the input of the layer after the callbacks' ``before_moe_start``
    x_TM       (T, M), its rows
    gated      the checked routing
    autocast   dtype to which rows and parameters are cast (`pmoe.decide.route.cast_dtype`); None if to none
    failure    the error behind the fault, if it was found on the host; else None
    """

    x: Tensor
    x_TM: Tensor
    gated: CheckedRouting
    autocast: torch.dtype | None
    failure: Exception | None = None

    @functools.cached_property
    def routing(self) -> Routing:
        """The checked routing."""
        return self.gated.routing

    @property
    def num_tokens(self) -> int:
        """T, the number of this rank's tokens."""
        return self.x_TM.shape[0]

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows that reach the experts."""
        return self.autocast or self.x_TM.dtype
