"""One autograd function holds both passes, so that backward's order is the schedule's and not autograd's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pmoe.engine.backward_pass import Backward, Given
from pmoe.engine.forward_pass import Forward, forward_pass
from pmoe.engine.passes import ForwardPass, Inputs, Kept
from pmoe.engine.plan import Plan


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        inputs: Inputs,
        forward: ForwardPass | None,
        anchor: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        inputs = inputs.like(tensors)
        done = (forward or forward_pass)(plan, inputs)
        needs_x = plan.restore.dispatched == "communicate" or plan.stages.shared
        saved = [*inputs.all, done.weight_received]
        saved[0] = inputs.x_TM if needs_x else None
        ctx.units, ctx.passed = [], []
        for unit, kept in done.kept.items():
            hidden, hidden_tensors = kept.hidden, kept.hidden.tensors if kept.hidden is not None else ()
            emptied = None if hidden is None else replace(hidden, tensors=())
            ctx.units.append((unit, kept.recipe, emptied, len(hidden_tensors)))
            saved += [kept.rows_NM, *hidden_tensors]
        for point, passed in done.passed.items():
            ctx.passed.append((point, passed.emptied(), len(passed.tensors)))
            saved += passed.tensors
        saved += done.regroup  # which rows are whose was not known when the plan was made
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.inputs = plan, inputs.like([None] * len(tensors))
        return done.y_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable lets this pass where grad_TM needs no gradient, and what follows is wrong.
        if torch.is_grad_enabled():
            raise RuntimeError("a MoELayer has no second derivative: create_graph (True) must be False")
        saved = iter(ctx.saved_tensors)
        inputs = ctx.inputs.like(list(itertools.islice(saved, len(ctx.inputs.all))))
        given = Given(
            inputs=inputs,
            weight_received=next(saved),
            kept={},
            wanted=ctx.needs_input_grad[4:],
        )
        for unit, recipe, hidden, count in ctx.units:
            rows_NM = next(saved)
            tensors = list(itertools.islice(saved, count))
            restored = None if hidden is None else replace(hidden, tensors=tensors)
            given.kept[unit] = Kept(rows_NM, restored, recipe)
        for point, passed, count in ctx.passed:
            given.passed[point] = replace(passed, tensors=tuple(itertools.islice(saved, count)))
        if ctx.plan.forward.once is not None:
            given = replace(given, regroup=list(saved))
        with torch.autocast(grad_TM.device.type, enabled=False):
            grads = Backward(ctx.plan, grad_TM, given).run()
        return None, None, None, None, *grads


def run_experts(
    plan: Plan, inputs: Inputs, *, needs_grad: bool, forward: ForwardPass | None = None
) -> Tensor:
    """T_O (T, M) of the tokens under ``plan``, with a hand-written backward where ``needs_grad``.

    needs_grad must be the same on every rank: where one rank differentiates all take part, whatever of
    their own inputs needs a gradient. forward: who goes forward instead of the plan's schedule.
    """
    if needs_grad and torch.is_grad_enabled():
        y_TM: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            plan, inputs.like([None] * len(inputs.all)), forward, make_anchor(inputs.x_TM), *inputs.all
        )
        return y_TM
    with torch.no_grad():
        if forward is not None:
            return forward(plan, inputs).y_TM
        return Forward(plan, inputs, keep=False).run()


def make_anchor(like: Tensor) -> Tensor:
    """A leaf that always needs a gradient: it keeps this rank's backward in the graph."""
    return torch.empty(0, device=like.device, requires_grad=True)


def run_both(plan: Plan, inputs: Inputs, now: Callable[[], float]) -> tuple[float, float, float]:
    """Both passes, with what comes out for a gradient, and all results thrown away: the times of ``now()``
    before, between and after them."""
    with torch.no_grad():
        start = now()
        done = forward_pass(plan, inputs)
        middle = now()
        given = Given(
            inputs=inputs,
            weight_received=done.weight_received,
            kept=dict(done.kept),
            wanted=[tensor is not None and tensor.requires_grad for tensor in inputs.all],
            regroup=done.regroup or None,
            passed=dict(done.passed),
        )
        Backward(plan, done.y_TM, given).run()
        return start, middle, now()
