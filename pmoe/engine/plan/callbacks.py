"""Callbacks: a user's hooks at six points of a layer (FSMoE, section 3.1).

Chunks pass the four points inside the layer one by one (`pmoe.engine.variants.callbacks`).

Letters: N rows, M = d_model, W columns of rows that travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

POINTS = ("before_dispatch", "after_dispatch", "before_combine", "after_combine")
"""The points inside the layer, in the order in which a chunk passes them in forward."""


class Callback:
    """Hooks at six points of a layer. Subclasses override some; each returns the tensor to go on with.

    Inside the layer, hooks get (N, M) rows of one chunk, N >= 0, and must return as many.

    - before_dispatch may return rows (N, W) of any W and type, the same on every rank. They travel to the
      experts' ranks, where after_dispatch must turn them into (N, M) rows of the layer's type.
    - before_combine and after_combine do the same for results, which have their routing weights applied.
    - If memory_reuse sends rows again in backward, they pass before_dispatch and after_dispatch again.
    - A callback that is also a torch.nn.Module is a part of the layer, and its parameters are trained.
    - Hooks run in the autocast state of the layer's caller. Under autocast, rows that they return are cast to
      the layer's type.
    """

    def before_moe_start(self, x: Tensor) -> Tensor:
        """Gets the layer's input, (...) of any shape, and returns (..., d_model)."""
        return x

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        """Gets the rows of a chunk before dispatch sends them, (N, M), and returns (N, W)."""
        return rows

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        """Gets the rows of a chunk as they arrived, (N, W), and returns (N, M)."""
        return rows

    def before_combine(self, rows: Tensor, chunk: int) -> Tensor:
        """Gets the results of a chunk, (N, M), each times its routing weight, and returns (N, W)."""
        return rows

    def after_combine(self, rows: Tensor, chunk: int) -> Tensor:
        """Gets the results of a chunk as they came home, (N, W), and returns (N, M)."""
        return rows

    def before_moe_end(self, y: Tensor) -> Tensor:
        """Gets the layer's output, (..., d_model), and returns any value."""
        return y


Hook = Callable[[Tensor, int], Tensor]
"""hook(rows, chunk) -> the rows that replace them."""


@dataclass(frozen=True)
class Hooks:
    """The hooks of a layer's callbacks at the points inside it.

    at: for each point, the overridden hooks as (name, hook), in the order of the callbacks.
    modules: the callbacks that are modules.
    """

    at: dict[str, tuple[tuple[str, Hook], ...]]
    modules: tuple[nn.Module, ...]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters of callbacks that are modules. Not cached, because they may be replaced."""
        return tuple(parameter for module in self.modules for parameter in module.parameters())

    @staticmethod
    def of(callbacks: Iterable[Callback]) -> Hooks | None:
        """Collects the hooks of callbacks; None if they override none inside the layer."""
        callbacks = tuple(callbacks)
        hooks_at = {
            point: tuple(
                (f"{type(callback).__name__}.{point}", getattr(callback, point))
                for callback in callbacks
                if getattr(type(callback), point) is not getattr(Callback, point)
            )
            for point in POINTS
        }
        if not any(hooks_at.values()):
            return None
        return Hooks(hooks_at, tuple(callback for callback in callbacks if isinstance(callback, nn.Module)))

    def has(self, point: str) -> bool:
        """Whether a point has hooks."""
        return bool(self.at.get(point))

    def run(self, point: str, rows: Tensor, chunk: int, like: Tensor) -> Tensor:
        """Runs all hooks of a point one after another and returns the rows (N, W) of the last one.

        rows: (N, M), or (N, W) as they travelled.
        like: a tensor with the layer's columns and type, which the rows must have after the last hook. They
            may have others if they then travel to a point that has hooks too.

        Raises TypeError or ValueError if a hook returns anything else.
        """
        num_rows = rows.shape[0]
        point_after = point.replace("before_", "after_")
        for name, hook in self.at[point]:
            rows = hook(rows, chunk)
            if not isinstance(rows, Tensor):
                raise TypeError(f"callback {name} must return a tensor, not {type(rows).__name__}")
            if rows.dim() != 2 or rows.shape[0] != num_rows:
                raise ValueError(
                    f"callback {name} returned shape {tuple(rows.shape)} for the {num_rows} rows of chunk "
                    f"{chunk}; it must return as many rows as it was given, (N, columns)"
                )
        # Whether rows go on to the experts or to their tokens as they are, not to other hooks.
        is_used = point == point_after or not self.has(point_after)
        if is_used and rows.is_floating_point() and torch.is_autocast_enabled(rows.device.type):
            # Under autocast norms and sums return float32. The next product would cast it anyway.
            rows = rows.to(like.dtype)
        if is_used and (rows.shape[1] != like.shape[1] or rows.dtype != like.dtype):
            raise ValueError(
                f"callback {name} returned {rows.shape[1]} columns of {rows.dtype}; it must return rows like "
                f"the layer's, {like.shape[1]} columns of {like.dtype}"
            )
        return rows
