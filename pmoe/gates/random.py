"""The random gate: a baseline that any learned gate should beat."""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.gates.base import PartitionName, Routing
from pmoe.gates.draws import DrawnGate

BOUND = 1 << 62
"""Upper bound of the draws, so large that their remainders are as good as uniform."""


class RandomGate(DrawnGate):
    """Draws K distinct experts for each token at each call, in training and in eval mode.

    Every set of K experts is equally likely. Weights are 1 / K and l_aux is 0, as `DrawnGate` says.

    The draws come from torch's default generator of the tokens' device. `torch.manual_seed` repeats them, and
    so does activation checkpointing, which restores the generator's state. Each rank uses its own generator;
    ranks need not agree.

    partition is "none", because a part of the batch gets other draws than within the whole batch.
    """

    partition: PartitionName = "none"

    def forward(self, x_TM: Tensor) -> Routing:
        return self.routed(x_TM, torch.randint(BOUND, (x_TM.shape[0], self.top_k), device=x_TM.device))
