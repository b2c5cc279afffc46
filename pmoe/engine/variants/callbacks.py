"""Passes of a layer with callbacks that have hooks inside it (`pmoe.Callback`).

The graph of each hook is kept from forward to backward, where autograd differentiates it. In backward a chunk
passes the four points in the opposite order:

    forward    G before_dispatch  S  after_dispatch  C  before_combine   R  after_combine   O
    backward   G after_combine    S  before_combine  C  after_dispatch   R  before_dispatch O

With sharded experts, hooks see rows between S and AG, and results between RS and R, in tasks of their own
(HA, HB). Without, the hooks beside C run in the task of the experts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import Inputs, Pass
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.callbacks import Hooks
from pmoe.experts.expert_autograd import Graph, Shelf, gradients, record


class _Hooked(Pass):
    """A pass with hooks at four places of a chunk's way.

    leaving_points: the points before and after S.
    returning_points: the points before and after R.
    """

    leaving_points: tuple[str, str]
    returning_points: tuple[str, str]

    call_inputs: Inputs
    """The tensors of the call, and its caller's autocast state."""

    @property
    def hooks(self) -> Hooks:
        """The hooks of the layer's callbacks."""
        hooks = self.plan.modules.hooks
        assert hooks is not None
        return hooks

    def run_hooks(self, point: str, rows: Tensor, i: int) -> Tensor:
        """Runs the hooks of a point on ``rows`` of chunk i, in the caller's autocast state."""
        autocast = self.call_inputs.hooks_autocast
        assert autocast is not None
        with autocast.again():
            return self.hooks.run(point, rows, i, self.source_TM)

    def at(self, point: str, i: int, rows: Tensor) -> Tensor:
        """Runs the hooks of a point on ``rows`` of chunk i in forward, their gradients in backward."""
        raise NotImplementedError

    def changed(self, point: str, i: int, rows: Tensor) -> Tensor:
        """Returns the result of the hooks of a point, contiguous, and keeps nothing for backward."""
        if not self.hooks.has(point):
            return rows
        with torch.no_grad():
            return self.run_hooks(point, rows, i).contiguous()

    def _any(self, points: Sequence[str]) -> bool:
        """Whether any of these points has hooks."""
        return any(self.hooks.has(point) for point in points)

    # ---- towards the experts

    def gather(self, i: int) -> None:
        """Runs G of chunk i, and the first hooks. They may change columns and type, so buffers are new."""
        if not self._any(self.leaving_points):
            super().gather(i)
            return
        chunk = self.cut.chunks[i]
        rows_NM = self.new(self.cut.chunks[i].num_sent, self.source_TM.shape[1])
        self.gather_rows(self.source_TM, rows_NM, i)
        leaving = self.at(self.leaving_points[0], i, rows_NM)
        self.own[f"send.{i}"] = leaving
        self.own[f"{self.brought_by_S}.{i}"] = leaving.new_empty(chunk.num_arrived, leaving.shape[1])

    def open(self, i: int) -> None:
        """Runs HA of chunk i: hooks see the rows that S brought, before AG."""
        self.own[f"arrived.{i}"] = self.at(self.leaving_points[1], i, self.buffer("arrived", i))

    def arrived(self, i: int) -> Tensor:
        rows = super().arrived(i)
        return rows if self.stages.sharded else self.at(self.leaving_points[1], i, rows)

    # ---- and back

    def leaving_buffer(self, i: int) -> Tensor:
        if self._any(self.returning_points) and not self.stages.sharded:
            return self.own_buffer(self.sent_back, i)
        return super().leaving_buffer(i)

    def in_source_order(self, i: int, rows_NM: Tensor) -> None:
        if self.stages.sharded:
            self.own_buffer("leaving", i)  # not a ring slot: hooks' graphs may keep it until backward
        super().in_source_order(i, rows_NM)
        if self._any(self.returning_points) and not self.stages.sharded:
            self._return_changed(self.sent_back, i, self.leaving_buffer(i))

    def close(self, i: int) -> None:
        """Runs HB of chunk i: hooks see the sums of RS, before R."""
        if self._any(self.returning_points):
            self._return_changed("leaving", i, self.buffer("leaving", i))

    def _return_changed(self, name: str, i: int, rows_NM: Tensor) -> None:
        """Stores the hooks' result as the buffer that leaves, and makes a buffer for the results at home.

        name: the buffer that R sends.
        rows_NM: (N, M), the results of chunk i.
        """
        leaving = self.at(self.returning_points[0], i, rows_NM)
        self.own[f"{name}.{i}"] = leaving
        self.own[f"came.{i}"] = leaving.new_empty(self.cut.chunks[i].num_sent, leaving.shape[1])

    def comes_home(self, i: int) -> Tensor:
        came = self.own.get(f"came.{i}")
        return super().comes_home(i) if came is None else came

    def output(self, i: int) -> None:
        if self._any(self.returning_points):
            came = self.own.pop(f"came.{i}")
            home = self.home_rows(i, self.cut.chunks[i].sent)
            home.copy_(self.at(self.returning_points[1], i, came))
        super().output(i)


class HookedForward(_Hooked, Forward):
    """A forward pass that runs the user's hooks and keeps their graphs."""

    leaving_points: tuple[str, str] = ("before_dispatch", "after_dispatch")
    returning_points: tuple[str, str] = ("before_combine", "after_combine")

    @property
    def call_inputs(self) -> Inputs:  # type: ignore[override]
        return self.inputs

    def at(self, point: str, i: int, rows: Tensor) -> Tensor:
        if not (self.keep and self.hooks.has(point)):
            return self.changed(point, i, rows)
        run = functools.partial(self.run_hooks, point, i=i)
        # Tensors in the memory of the hooks' parameters are not saved for backward: they exist anyway.
        shelf = Shelf(
            frozenset(parameter.untyped_storage().data_ptr() for parameter in self.inputs.hook_parameters)
        )
        graph, out = record(run, rows, slice(0, rows.shape[0]), shelf, own_rows=True)
        parameters = tuple(self.inputs.hook_parameters)
        self.left.passed[point, i] = Passed(graph, tuple(shelf.close()), rows.shape, rows.dtype, parameters)
        return out.contiguous()


class HookedBackward(_Hooked, Backward):
    """A backward pass that differentiates the hooks' graphs."""

    leaving_points: tuple[str, str] = ("after_combine", "before_combine")
    returning_points: tuple[str, str] = ("after_dispatch", "before_dispatch")

    @property
    def call_inputs(self) -> Inputs:  # type: ignore[override]
        return self.saved.inputs

    def at(self, point: str, i: int, rows: Tensor) -> Tensor:
        if not self.hooks.has(point):
            return rows
        passed = self.saved.passed[point, i]
        of_rows = None
        if passed.graph.output is not None:
            passed.graph.shelf.tensors = list(passed.tensors)
            of_rows, *of_parameters = gradients(passed.graph, passed.parameters, rows)
            passed.graph.shelf.close()
            for j, gradient in enumerate(of_parameters):
                if gradient is not None:
                    total = self.grad_hooks[j]
                    self.grad_hooks[j] = gradient if total is None else total + gradient
        if of_rows is None:
            of_rows = torch.zeros(passed.shape, dtype=passed.dtype, device=rows.device)
        return of_rows.contiguous()

    # ---- If T_DI is sent again, its rows pass the hooks before and after S again

    def gather_again(self, i: int) -> None:
        if not self._any(("before_dispatch", "after_dispatch")):
            super().gather_again(i)
            return
        x_TM = self.saved.inputs.x_TM
        chunk = self.cut.chunks[i]
        rows = x_TM.new_empty(chunk.num_sent, x_TM.shape[1])
        self.gather_rows(x_TM, rows, i)
        self.own[f"send_again.{i}"] = rows = self.changed("before_dispatch", i, rows)
        self.own[f"{self.brought_by_SI}.{i}"] = rows.new_empty(chunk.num_arrived, rows.shape[1])

    def open_again(self, i: int) -> None:
        self.own[f"arrived_again.{i}"] = self.changed("after_dispatch", i, self.buffer("arrived_again", i))

    def arrived_again(self, i: int) -> Tensor:
        rows = super().arrived_again(i)
        return rows if self.stages.sharded else self.changed("after_dispatch", i, rows)


@dataclass(frozen=True)
class Passed:
    """The graph of the hooks of one point for one chunk, kept for backward.

    graph: the recorded graph.
    tensors: the tensors that it saved.
    shape, dtype: those of the rows that entered it.
    parameters: the hooks' parameters, the leaves of the graph.
    """

    graph: Graph
    tensors: tuple[Tensor, ...]
    shape: torch.Size
    dtype: torch.dtype
    parameters: tuple[Tensor, ...]
