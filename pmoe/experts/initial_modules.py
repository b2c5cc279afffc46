"""Initial values of experts that are a user's modules, as `pmoe.experts.initial` has them of stacked ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from pmoe.experts.initial import draw_seed, generators_at


def seeded(build: Callable[[], nn.Module], *, first_expert: int, count: int) -> list[nn.Module]:
    """Builds ``count`` modules, each under its global expert's seed."""
    seed = draw_seed()
    modules = []
    for i in range(count):
        with generators_at(seed + first_expert + i):
            modules.append(build())
    return modules


def initialise_modules(modules: Iterable[nn.Module], *, first_expert: int) -> None:
    """Has each module, and all in it, reset its parameters under its global expert's seed."""
    seed = draw_seed()
    for i, module in enumerate(modules):
        with generators_at(seed + first_expert + i):
            reset_modules(module)


def reset_modules(module: nn.Module) -> None:
    """Asks each part of it that has a ``reset_parameters`` for that."""
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()
