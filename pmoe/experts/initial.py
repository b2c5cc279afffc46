"""Initial values of experts: a function of the seed and the global expert, whatever the number of ranks.

Every rank draws one number from the default generator, so a model built under one seed on all ranks stays
in step; each expert then draws from a seed of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pmoe.experts.stacked import StackedExperts


def initialise(experts: StackedExperts, *, first_expert: int) -> None:
    """Fills the stacked parameters; local expert i is global expert first_expert + i."""
    seed = draw_seed()
    if experts.w1.is_meta:
        return
    for i in range(experts.num_local_experts):
        with generators_at(seed + first_expert + i):
            experts.initialise_expert(i)


def draw_seed() -> int:
    """One number from the default generator of the CPU."""
    return int(torch.randint(2**62, (), device="cpu"))  # not what torch.device("meta") would make of it


@contextlib.contextmanager
def generators_at(seed: int) -> Iterator[None]:
    """The default generators at ``seed``, put back at the end. A CUDA generator takes part where CUDA is in
    use already: torch.manual_seed would seed it for good."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield
