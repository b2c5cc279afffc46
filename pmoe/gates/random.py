"""The random gate: a baseline that any trained gate should beat."""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.gates.base import PartitionName, Routing
from pmoe.gates.draws import DrawnGate

BOUND = 1 << 62
"""Upper bound of the random numbers. It is so large that their remainders are practically uniform."""


class RandomGate(DrawnGate):
    """Draws K = top_k distinct experts for each token at each call, in training and in eval mode.

    All sets of K experts are equally likely. The weights are 1 / K and l_aux is 0, as in `DrawnGate`.

    The random numbers come from torch's default generator of the tokens' device. So `torch.manual_seed` makes
    them repeatable, and activation checkpointing repeats them, because it restores the generator's state.
    Ranks draw independently of each other.

    partition is "none" (the gate needs the whole batch), because a part of it would draw other numbers than
    the whole batch.
    """

    partition: PartitionName = "none"

    def forward(self, x_TM: Tensor) -> Routing:
        return self.routed(x_TM, torch.randint(BOUND, (x_TM.shape[0], self.top_k), device=x_TM.device))
