"""Callbacks: a user's hooks at six points of a layer, and how their gradients come about (FSMoE, section
3.1).

The four points inside are passed chunk by chunk (`pmoe.engine.hooked`).

Letters: N rows, M = d_model, W columns of what travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

POINTS = ("before_dispatch", "after_dispatch", "before_combine", "after_combine")
"""The points inside, in the order in which a chunk passes them."""


class Callback:
    """Subclass it and override hooks; each gets what is there and returns what shall be there instead.

    Rows are (N, M) tensors of their own, N any number, 0 included; the number must stay. What before_dispatch
    returns travels to the experts' ranks, whatever its columns and type, the same on every rank;
    after_dispatch must make (N, M) rows of the layer's type of it. The same holds of before_combine, which
    sees results with the routing weight applied, and after_combine. Rows that are sent again in backward pass
    their two hooks again. A callback that is a torch.nn.Module too is part of the layer, its parameters are
    trained. Hooks run in the autocast state of the layer's caller, wherever they run: there rows that they
    return become of the layer's type."""

    def before_moe_start(self, x: Tensor) -> Tensor:
        """The layer's input, in whatever shape it was given; to return: (..., d_model)."""
        return x

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        """Rows that are about to leave, (N, M)."""
        return rows

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        """Rows as they arrived, (N, W); to return: (N, M)."""
        return rows

    def before_combine(self, rows: Tensor, chunk: int) -> Tensor:
        """Results that are about to return, (N, M), each times its routing weight."""
        return rows

    def after_combine(self, rows: Tensor, chunk: int) -> Tensor:
        """Results as they came home, (N, W); to return: (N, M)."""
        return rows

    def before_moe_end(self, y: Tensor) -> Tensor:
        """The layer's output, (..., d_model); to return: anything."""
        return y


Hook = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Hooks:
    """The hooks of a layer's callbacks by point, and those callbacks that are modules."""

    at: dict[str, tuple[tuple[str, Hook], ...]]
    modules: tuple[nn.Module, ...]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Of the modules. Not cached: a module's parameters may be replaced."""
        return tuple(parameter for module in self.modules for parameter in module.parameters())

    @staticmethod
    def of(callbacks: Iterable[Callback]) -> Hooks | None:
        """None where they have no hook inside the layer."""
        callbacks = tuple(callbacks)
        at = {
            point: tuple(
                (f"{type(each).__name__}.{point}", getattr(each, point))
                for each in callbacks
                if getattr(type(each), point) is not getattr(Callback, point)
            )
            for point in POINTS
        }
        if not any(at.values()):
            return None
        return Hooks(at, tuple(each for each in callbacks if isinstance(each, nn.Module)))

    def has(self, point: str) -> bool:
        return bool(self.at.get(point))

    def run(self, point: str, rows: Tensor, chunk: int, like: Tensor) -> Tensor:
        """All hooks of a point, one after another. like: what columns and type rows have behind the last one,
        unless they then travel to another point that has hooks."""
        num_rows, behind = rows.shape[0], point.replace("before_", "after_")
        for name, hook in self.at[point]:
            rows = hook(rows, chunk)
            if not isinstance(rows, Tensor):
                raise TypeError(f"callback {name} must return a tensor, not {type(rows).__name__}")
            if rows.dim() != 2 or rows.shape[0] != num_rows:
                raise ValueError(
                    f"callback {name} returned shape {tuple(rows.shape)} for the {num_rows} rows of chunk "
                    f"{chunk}; it must return as many rows as it was given, (N, columns)"
                )
        is_used = point == behind or not self.has(behind)
        if is_used and rows.is_floating_point() and torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(like.dtype)  # norms and sums give float32 there, which the next product would cast
        if is_used and (rows.shape[1] != like.shape[1] or rows.dtype != like.dtype):
            raise ValueError(
                f"callback {name} returned {rows.shape[1]} columns of {rows.dtype}; it must return rows as "
                f"the layer has them, {like.shape[1]} columns of {like.dtype}"
            )
        return rows
