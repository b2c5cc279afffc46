"""The pipeline runner: both passes by the engine, in micro-batches (MPipeMoE, section III.B and III.D)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from pmoe.engine.autograd import Path, Saved
from pmoe.engine.backward_pass import SavedForBackward
from pmoe.engine.passes import Forwarded, Inputs, Kept
from pmoe.engine.plan import Plan
from pmoe.engine.specialised import backward_of, forward_of


@dataclass(frozen=True)
class PipelineRunner:
    """Both passes of ``plan``, each by its schedule."""

    name: ClassVar[Path] = "pipeline"

    plan: Plan

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        forward = forward_of(self.plan, keep)(self.plan, inputs, keep)
        y_TM = forward.run()
        return keep_for_backward(self.plan, inputs, forward.done(y_TM)) if keep else (y_TM, None)


@dataclass(frozen=True, kw_only=True)
class _Rest:
    """What a forward pass leaves beside tensors.

    inputs: without tensors. units, passed: what each unit and each hook point kept, emptied, with its number
    of tensors.
    """

    inputs: Inputs
    units: list[tuple[Any, ...]]
    passed: list[tuple[Any, ...]]


def keep_for_backward(plan: Plan, inputs: Inputs, done: Forwarded) -> tuple[Tensor, Saved]:
    """T_O, and what the engine's backward pass needs, its tensors in one list.

    Their order: inputs, routing weights received, units, hooks, regroups."""
    needs_x = plan.restore.dispatched == "communicate" or plan.modules.stages.shared
    tensors = [*inputs.all, done.weight_received]
    tensors[0] = inputs.x_TM if needs_x else None
    units: list[tuple[Any, ...]] = []
    for unit, kept in done.kept.items():
        hidden_tensors = kept.hidden.tensors if kept.hidden is not None else ()
        emptied = None if kept.hidden is None else replace(kept.hidden, tensors=())
        units.append((unit, kept.recipe, emptied, len(hidden_tensors)))
        tensors += [kept.rows_NM, *hidden_tensors]
    passed: list[tuple[Any, ...]] = []
    for point, each in done.passed.items():
        passed.append((point, each.emptied(), len(each.tensors)))
        tensors += each.tensors
    tensors += done.regroup  # which rows are whose was not known when the plan was made
    rest = _Rest(inputs=inputs.like([None] * len(inputs.all)), units=units, passed=passed)
    return done.y_TM, Saved(tensors, functools.partial(_backward, plan, rest))


def _backward(
    plan: Plan, rest: _Rest, tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor
) -> list[Tensor | None]:
    return backward_of(plan)(plan, grad_TM, _restored(plan, rest, iter(tensors), wanted)).run()


def _restored(plan: Plan, rest: _Rest, tensors: Iterator[Any], wanted: Sequence[bool]) -> SavedForBackward:
    """What `keep_for_backward` laid out in one list."""
    found = SavedForBackward(
        inputs=rest.inputs.like(list(itertools.islice(tensors, len(rest.inputs.all)))),
        weight_received=next(tensors),
        kept={},
        wanted=wanted,
    )
    for unit, recipe, hidden, count in rest.units:
        rows_NM, hidden_tensors = next(tensors), list(itertools.islice(tensors, count))
        restored = None if hidden is None else replace(hidden, tensors=hidden_tensors)
        found.kept[unit] = Kept(rows_NM, restored, recipe)
    for point, each, count in rest.passed:
        found.passed[point] = replace(each, tensors=tuple(itertools.islice(tensors, count)))
    return replace(found, regroup=list(tensors)) if plan.forward.once is not None else found
