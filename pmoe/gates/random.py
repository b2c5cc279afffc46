"""Random routing: the baseline that any learned gate should beat."""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.gates.base import PartitionName, Routing
from pmoe.gates.draws import DrawnGate

BOUND = 1 << 62
"""Draws are below it, so large that their remainders are uniform."""


class RandomGate(DrawnGate):
    """As `DrawnGate`, every set of K experts equally likely; drawn anew at every call, in training and in
    eval mode alike.

    The draws are of torch's default generator of the tokens' device: `torch.manual_seed` repeats them, and so
    does activation checkpointing, which keeps that generator's state. Ranks draw what their own generators
    give; nothing needs them to agree.

    partition "none": a part of the batch has other draws than it has within the whole.
    """

    partition: PartitionName = "none"

    def forward(self, x_TM: Tensor) -> Routing:
        return self.routed(x_TM, torch.randint(BOUND, (x_TM.shape[0], self.top_k), device=x_TM.device))
