"""Callbacks: a user's hooks at six points of a layer (FSMoE, section 3.1).

Two points are before and after the layer. The other four are inside the layer; at these, a hook runs once for
each chunk (micro-batch) (`pmoe.engine.variants.callbacks`).

Letters: N rows of a chunk, M = d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

POINTS = ("before_dispatch", "after_dispatch", "before_combine", "after_combine")
"""The points inside the layer, in the order in which a chunk reaches them in forward."""


class Callback:
    """A user's hooks at six points of a layer. A subclass overrides the hooks that it needs.

    Each hook returns the tensor with which the layer continues. The four hooks inside the layer get the N
    rows of one chunk (micro-batch), (N, M) with M = d_model, and must return N rows. N may be 0.

    - before_dispatch may return rows with any number of columns and any dtype, the same on every rank. The
      all-to-all sends exactly these rows, and after_dispatch must turn them into (N, M) rows of the layer's
      dtype.
    - before_combine and after_combine may change the experts' results in the same way. Results are already
      multiplied by their routing weights.
    - If ``memory_reuse`` sends rows again in backward, before_dispatch and after_dispatch run again on these
      rows.
    - A callback that is also a torch.nn.Module is a part of the layer, and its parameters are trained.
    - Hooks run in the autocast state of the layer's caller. Under autocast, rows that they return are cast to
      the layer's dtype.
    """

    def before_moe_start(self, x: Tensor) -> Tensor:
        """Gets the layer's input, of any shape, and returns the input that the layer uses, (..., d_model)."""
        return x

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        """Gets the N rows of a chunk before dispatch sends them, (N, d_model); returns (N, columns).

        The number of columns may differ from d_model. The all-to-all sends all columns that are returned.
        """
        return rows

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        """Gets the N rows of a chunk after dispatch has brought them, (N, columns); returns (N, d_model).

        ``columns`` is the number of columns that before_dispatch has returned.
        """
        return rows

    def before_combine(self, rows: Tensor, chunk: int) -> Tensor:
        """Gets the N results of a chunk before combine sends them back, (N, d_model); returns (N, columns).

        Each result is already multiplied by its routing weight. The number of columns may differ from
        d_model.
        """
        return rows

    def after_combine(self, rows: Tensor, chunk: int) -> Tensor:
        """Gets the N results of a chunk on the rank of their tokens, (N, columns); returns (N, d_model).

        ``columns`` is the number of columns that before_combine has returned.
        """
        return rows

    def before_moe_end(self, y: Tensor) -> Tensor:
        """Gets the layer's output, (..., d_model). The layer returns the hook's result to its caller."""
        return y


Hook = Callable[[Tensor, int], Tensor]
"""Signature of a hook inside the layer: hook(rows, chunk number) -> rows that replace them."""


@dataclass(frozen=True)
class Hooks:
    """All hooks inside the layer, collected from the layer's callbacks.

    at: for each point inside the layer ("before_dispatch", ...), the hooks that callbacks define, as (name,
        hook), in the order of the callbacks.
    modules: the callbacks that are torch modules.
    """

    at: dict[str, tuple[tuple[str, Hook], ...]]
    modules: tuple[nn.Module, ...]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters of callbacks that are modules.

        They are not cached, because a module's parameters may be replaced.
        """
        return tuple(parameter for module in self.modules for parameter in module.parameters())

    @staticmethod
    def of(callbacks: Iterable[Callback]) -> Hooks | None:
        """Collects the callbacks' hooks inside the layer; None if no callback overrides any of them."""
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
        """Whether any callback has a hook at this point, "before_dispatch" for example."""
        return bool(self.at.get(point))

    def run(self, point: str, rows: Tensor, chunk: int, like: Tensor) -> Tensor:
        """Runs all hooks of a point, one after another, and returns the rows of the last hook, (N, columns).

        point: one of `POINTS`, "before_dispatch" for example.
        rows: (N, columns), the N rows of the chunk. At a point before an all-to-all, columns is d_model.
        chunk: the number of the chunk, for the hooks and for error messages.
        like: a tensor with the layer's number of columns and dtype. The result must have both, with one
            exception: hooks at a ``before_`` point may return another number of columns or another dtype if
            there are hooks at the ``after_`` point, which must restore both.

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
        # True if no further hook changes these rows before the experts, or the sum for each token, use them.
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
