"""The pipeline runner: both passes by the engine, in micro-batches (MPipeMoE, section III.B and III.D).

A pass is made of the plain one (`Forward`, `Backward`) and of what only some layers need, a file each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from pmoe.engine.autograd import Path, Saved
from pmoe.engine.backward_pass import Backward, SavedForBackward
from pmoe.engine.forward_pass import Forward
from pmoe.engine.passes import Forwarded, Inputs, Kept
from pmoe.engine.plan import Plan


@dataclass(frozen=True)
class PipelineRunner:
    """Both passes of ``plan``, each by its schedule."""

    name: ClassVar[Path] = "pipeline"

    plan: Plan

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        plan = self.plan
        parts = _special_parts(plan, moves=keep and plan.restore.offloads)
        forward = _together((*(part for part, _ in parts), Forward))(plan, inputs, keep)
        y_TM = forward.run()
        return y_TM, keep_for_backward(plan, inputs, forward.left) if keep else None


def _special_parts(plan: Plan, *, moves: bool) -> list[tuple[type[Forward], type[Backward]]]:
    """moves: T_DI or T_M is copied away, or fetched from where forward kept it."""
    parts: list[tuple[type[Forward], type[Backward]]] = []
    if plan.modules.hooks is not None:
        from pmoe.engine.hooked import HookedBackward, HookedForward

        parts.append((HookedForward, HookedBackward))
    if plan.modules.shared is not None:
        from pmoe.engine.shared_expert import BackwardWithSharedExpert, ForwardWithSharedExpert

        parts.append((ForwardWithSharedExpert, BackwardWithSharedExpert))
    if plan.modules.stages.sharded:
        from pmoe.engine.sharded import ShardedBackward, ShardedForward

        parts.append((ShardedForward, ShardedBackward))
    if plan.forward.once is not None:
        from pmoe.engine.once import OnceBackward, OnceForward

        parts.append((OnceForward, OnceBackward))
    if moves:
        from pmoe.engine.offloaded import FetchingBackward, OffloadingForward

        parts.append((OffloadingForward, FetchingBackward))
    return parts


@functools.cache
def _together(parts: tuple[type, ...]) -> type[Any]:
    """A class of several, each of which does its own and hands on to the next."""
    return parts[0] if len(parts) == 1 else type(parts[-1].__name__, parts[:-1], {})


def keep_for_backward(plan: Plan, inputs: Inputs, left: Forwarded) -> Saved:
    """What the engine's backward pass needs, its tensors in one list.

    Their order: inputs, routing weights received, units, hooks, regroups. All else stays as it is, emptied of
    tensors, with their number."""
    needs_x = plan.restore.dispatched == "communicate" or plan.modules.stages.shared
    tensors = [*inputs.all, left.weight_received]
    tensors[0] = inputs.x_TM if needs_x else None
    units: list[tuple[Any, ...]] = []
    for unit, kept in left.kept.items():
        hidden_tensors = kept.hidden.tensors if kept.hidden is not None else ()
        emptied = None if kept.hidden is None else replace(kept.hidden, tensors=())
        units.append((unit, kept.recipe, emptied, len(hidden_tensors)))
        tensors += [kept.rows_NM, *hidden_tensors]
    passed: list[tuple[Any, ...]] = []
    for point, each in left.passed.items():
        passed.append((point, replace(each, tensors=()), len(each.tensors)))
        tensors += each.tensors
    tensors += left.regroup  # which rows are whose was not known when the plan was made
    without = inputs.like([None] * len(inputs.all))
    return Saved(tensors, functools.partial(_backward, plan, without, units, passed))


def _backward(
    plan: Plan,
    inputs: Inputs,
    units: list[tuple[Any, ...]],
    passed: list[tuple[Any, ...]],
    tensors: list[Any],
    wanted: Sequence[bool],
    grad_TM: Tensor,
) -> list[Tensor | None]:
    """inputs, units, passed: what `keep_for_backward` emptied."""
    found = iter(tensors)
    given = inputs.like(list(itertools.islice(found, len(inputs.all))))
    saved = SavedForBackward(inputs=given, weight_received=next(found), wanted=wanted)
    for unit, recipe, hidden, count in units:
        rows_NM, hidden_tensors = next(found), list(itertools.islice(found, count))
        restored = None if hidden is None else replace(hidden, tensors=hidden_tensors)
        saved.kept[unit] = Kept(rows_NM, restored, recipe)
    for point, each, count in passed:
        saved.passed[point] = replace(each, tensors=tuple(itertools.islice(found, count)))
    saved.regroup = list(found)
    parts = _special_parts(plan, moves=plan.restore.offloads or plan.rearranged)
    backward = _together((*(part for _, part in parts), Backward))(plan, grad_TM, saved)
    gradients: list[Tensor | None] = backward.run()
    return gradients
