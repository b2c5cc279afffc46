"""Initial values of experts: a function of the seed and the global expert, whatever the number of ranks.

Every rank draws one number from the default generator, so a model built under one seed on all ranks stays
in step; each expert then draws from a seed of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from pmoe.experts.stacked import StackedExperts


def initialise(experts: StackedExperts, *, first_expert: int) -> None:
    """Fills the stacked parameters; local expert i is global expert first_expert + i."""
    seed = _draw_seed()
    if experts.w1.is_meta:
        return
    for i in range(experts.num_local_experts):
        with _generators_at(seed + first_expert + i):
            experts.initialise_expert(i)


def seeded(build: Callable[[], nn.Module], *, first_expert: int, count: int) -> list[nn.Module]:
    """Builds ``count`` modules, each under its global expert's seed."""
    seed = _draw_seed()
    modules = []
    for i in range(count):
        with _generators_at(seed + first_expert + i):
            modules.append(build())
    return modules


def initialise_modules(modules: Iterable[nn.Module], *, first_expert: int) -> None:
    """Has each module, and all in it, reset its parameters under its global expert's seed."""
    seed = _draw_seed()
    for i, module in enumerate(modules):
        with _generators_at(seed + first_expert + i):
            reset_modules(module)


def reset_modules(module: nn.Module) -> None:
    """Asks each part of it that has a ``reset_parameters`` for that."""
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()


def _draw_seed() -> int:
    return int(torch.randint(2**62, (), device="cpu"))  # not what torch.device("meta") would make of it


@contextlib.contextmanager
def _generators_at(seed: int) -> Iterator[None]:
    """The default generators at ``seed``, put back at the end. A CUDA generator takes part where CUDA is in
    use already: torch.manual_seed would seed it for good."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield
