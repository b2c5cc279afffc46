"""Initial values of experts: a function of the seed and the global expert, whatever the number of ranks.

Every rank draws one number from the default generator, so a model built under one seed on all ranks stays
in step; each expert then draws from a seed of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pmoe.experts.stacked import StackedExperts


def initialise(experts: StackedExperts, *, first_expert: int) -> None:
    """Fills the stacked parameters; local expert i is global expert first_expert + i."""
    seed = _draw_seed()
    if experts.w1.is_meta:
        return
    for i in range(experts.num_local_experts):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + first_expert + i)
            experts.initialise_expert(i)


def seeded(build: Callable[[], nn.Module], *, first_expert: int, count: int) -> list[nn.Module]:
    """Builds ``count`` modules, each under its global expert's seed."""
    seed = _draw_seed()
    modules = []
    for i in range(count):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + first_expert + i)
            modules.append(build())
    return modules


def _draw_seed() -> int:
    return int(torch.randint(2**62, ()))
