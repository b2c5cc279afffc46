"""Passes of a layer with callbacks (`pmoe.Callback`) that have hooks inside the layer.

In forward, the autograd graph of each hook is recorded and kept. In backward, autograd differentiates the
graphs. The tasks of a chunk are gather (G), all-to-all to the experts (S), experts (C), all-to-all back (R)
and sum (O). Backward runs the gradients of the hooks in the opposite order:

    forward    G before_dispatch  S  after_dispatch  C  before_combine   R  after_combine   O
    backward   G after_combine    S  before_combine  C  after_dispatch   R  before_dispatch O

If experts are not sharded, hooks between S and R are a part of task C. If they are sharded, an all-gather
(AG) comes after S and a reduce-scatter (RS) before R. Hooks then run in tasks of their own: HA between S and
AG, and HB between RS and R.
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
from pmoe.experts.expert_autograd import Graph, SavedTensorSlots, gradients, record


class _Hooked(Pass):
    """A pass that runs callbacks' hooks before and after each of the two all-to-alls of a chunk.

    leaving_points: the names of the points before and after the all-to-all to the experts.
    returning_points: the names of the points before and after the all-to-all back.
    """

    leaving_points: tuple[str, str]
    returning_points: tuple[str, str]

    call_inputs: Inputs
    """The tensors of the call, and the autocast state of the layer's caller."""

    @property
    def hooks(self) -> Hooks:
        """The hooks of the layer's callbacks at the points inside the layer."""
        hooks = self.plan.modules.hooks
        assert hooks is not None
        return hooks

    def run_hooks(self, point: str, rows: Tensor, i: int) -> Tensor:
        """Runs the hooks of a point on rows of chunk i, in the autocast state of the layer's caller.

        point: a point inside the layer, "before_dispatch" for example.
        rows: (N, columns), the N rows of the chunk.
        """
        autocast = self.call_inputs.hooks_autocast
        assert autocast is not None
        with autocast.again():
            return self.hooks.run(point, rows, i, self.source_TM)

    def at(self, point: str, i: int, rows: Tensor) -> Tensor:
        """Runs the hooks of a point on rows of chunk i; in backward, computes the gradients of these hooks.

        point: a point inside the layer, "before_dispatch" for example.
        i: the number of the chunk.
        rows: (N, columns), the N rows of the chunk; in backward, the gradients of the hooks' results.

        Returns the rows with which the pass continues.
        """
        raise NotImplementedError

    def changed(self, point: str, i: int, rows: Tensor) -> Tensor:
        """Runs the hooks of a point on rows of chunk i without recording a graph; returns contiguous rows.

        Without hooks at the point, it returns ``rows``.

        point: a point inside the layer, "before_dispatch" for example.
        i: the number of the chunk.
        rows: (N, columns), the N rows of the chunk.
        """
        if not self.hooks.has(point):
            return rows
        with torch.no_grad():
            return self.run_hooks(point, rows, i).contiguous()

    def _any(self, points: Sequence[str]) -> bool:
        """Whether any of these points ("before_dispatch", ...) has hooks."""
        return any(self.hooks.has(point) for point in points)

    # ---- towards the experts

    def gather(self, i: int) -> None:
        """Copies the tokens of chunk i to its send buffer, then runs the first hooks on them (task G).

        Hooks may change the number of columns and the dtype. So the buffers of the all-to-all are allocated
        only after the hooks have run.
        """
        if not self._any(self.leaving_points):
            super().gather(i)
            return
        chunk = self.pass_plan.chunks[i]
        rows_NM = self.new(self.pass_plan.chunks[i].num_sent, self.source_TM.shape[1])
        self.gather_rows(self.source_TM, rows_NM, i)
        leaving = self.at(self.leaving_points[0], i, rows_NM)
        self.own[f"send.{i}"] = leaving
        self.own[f"{self.dispatch_output}.{i}"] = leaving.new_empty(chunk.num_arrived, leaving.shape[1])

    def open(self, i: int) -> None:
        """Runs hooks on the arrived rows of chunk i, before the all-gather inside the node (task HA).

        The task exists only if experts are sharded. Otherwise `arrived` runs these hooks, as a part of the
        experts' task.
        """
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
            self.own_buffer("leaving", i)  # no ring slot, because graphs of hooks may keep it until backward
        super().in_source_order(i, rows_NM)
        if self._any(self.returning_points) and not self.stages.sharded:
            self._return_changed(self.sent_back, i, self.leaving_buffer(i))

    def close(self, i: int) -> None:
        """Runs hooks on the results of chunk i, after the reduce-scatter inside the node (task HB).

        The task exists only if experts are sharded. Otherwise `in_source_order` runs these hooks, as a part
        of the experts' task.
        """
        if self._any(self.returning_points):
            self._return_changed("leaving", i, self.buffer("leaving", i))

    def _return_changed(self, name: str, i: int, rows_NM: Tensor) -> None:
        """Runs hooks on results of chunk i. The rows that hooks return become the buffer that is sent back.

        Another buffer with the columns and dtype of these rows is allocated for the results that come back to
        this rank.

        name: the name of the buffer that is sent back.
        rows_NM: (N, M), the N results, with M = d_model columns.
        """
        leaving = self.at(self.returning_points[0], i, rows_NM)
        self.own[f"{name}.{i}"] = leaving
        self.own[f"came.{i}"] = leaving.new_empty(self.pass_plan.chunks[i].num_sent, leaving.shape[1])

    def combine_output(self, i: int) -> Tensor:
        came = self.own.get(f"came.{i}")
        return super().combine_output(i) if came is None else came

    def output(self, i: int) -> None:
        if self._any(self.returning_points):
            came = self.own.pop(f"came.{i}")
            home = self.home_rows(i, self.pass_plan.chunks[i].sent)
            home.copy_(self.at(self.returning_points[1], i, came))
        super().output(i)


class HookedForward(_Hooked, Forward):
    """A forward pass that runs the user's hooks, and keeps their autograd graphs if backward may follow."""

    leaving_points: tuple[str, str] = ("before_dispatch", "after_dispatch")
    returning_points: tuple[str, str] = ("before_combine", "after_combine")

    @property
    def call_inputs(self) -> Inputs:  # type: ignore[override]
        return self.inputs

    def at(self, point: str, i: int, rows: Tensor) -> Tensor:
        if not (self.keep and self.hooks.has(point)):
            return self.changed(point, i, rows)
        run = functools.partial(self.run_hooks, point, i=i)
        # Parameters, and views of them, are not saved for backward, because they stay in memory anyway.
        saved_slots = SavedTensorSlots(
            frozenset(parameter.untyped_storage().data_ptr() for parameter in self.inputs.hook_parameters)
        )
        graph, out = record(run, rows, slice(0, rows.shape[0]), saved_slots, own_rows=True)
        parameters = tuple(self.inputs.hook_parameters)
        self.saved.passed[point, i] = HookGraph(
            graph, tuple(saved_slots.close()), rows.shape, rows.dtype, parameters
        )
        return out.contiguous()


class HookedBackward(_Hooked, Backward):
    """A backward pass that differentiates the autograd graphs of the user's hooks."""

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
            passed.graph.saved_slots.tensors = list(passed.tensors)
            of_rows, *of_parameters = gradients(passed.graph, passed.parameters, rows)
            passed.graph.saved_slots.close()
            for j, gradient in enumerate(of_parameters):
                if gradient is not None:
                    total = self.grad_hooks[j]
                    self.grad_hooks[j] = gradient if total is None else total + gradient
        if of_rows is None:
            of_rows = torch.zeros(passed.shape, dtype=passed.dtype, device=rows.device)
        return of_rows.contiguous()

    # ---- If the experts' input is sent again, the hooks before and after the all-to-all run again too

    def gather_again(self, i: int) -> None:
        if not self._any(("before_dispatch", "after_dispatch")):
            super().gather_again(i)
            return
        x_TM = self.saved.inputs.x_TM
        chunk = self.pass_plan.chunks[i]
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
class HookGraph:
    """The autograd graph of a user's hooks at one point of a pass, for one chunk, kept until backward.

    A point is, for example, the moment before the rows are sent.

    graph: the recorded graph.
    tensors: the tensors that autograd saved for the graph. They are kept here and not in the graph. Backward
        puts them back into the graph before it differentiates the graph.
    shape, dtype: shape and dtype of the rows that the hooks got.
    parameters: the parameters of callbacks that are modules; backward computes their gradients.
    """

    graph: Graph
    tensors: tuple[Tensor, ...]
    shape: torch.Size
    dtype: torch.dtype
    parameters: tuple[Tensor, ...]
