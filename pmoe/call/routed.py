"""The tokens of a call with their routing."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.comm.counts import Fault
from pmoe.gates.base import Routing


@dataclass(frozen=True, kw_only=True)
class Gated:
    """The checked routing of a call: all that a checkpoint keeps of it.

    routing    its ``keep`` is True for the slots within capacity, the layer's or the gate's own
    fault      a `Fault`; an int64 scalar on the device if it is found there
    is_again   whether a checkpoint had these tokens routed before
    """

    routing: Routing
    fault: Tensor | Fault = Fault.NONE
    is_again: bool = False


@dataclass(frozen=True, kw_only=True)
class Routed:
    """The tokens of this rank with their routing.

    x          (..., M), the input of the layer after the callbacks' first hooks
    x_TM       (T, M), its rows
    gated      the checked routing
    autocast   type to which rows and parameters are cast (`pmoe.decide.route.cast_dtype`), or None
    failure    the error behind a fault that was found on the host, or None
    """

    x: Tensor
    x_TM: Tensor
    gated: Gated
    autocast: torch.dtype | None
    failure: Exception | None = None

    @functools.cached_property
    def routing(self) -> Routing:
        return self.gated.routing

    @property
    def num_tokens(self) -> int:
        return self.x_TM.shape[0]

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The type of the rows that reach the experts."""
        return self.autocast or self.x_TM.dtype
