"""The pipeline runner: both passes by the engine, in micro-batches (MPipeMoE, sections III.B, III.D).

The class of a pass is put together for each call: the plain one (`Forward`, `Backward`) and, in front of it,
a class for each feature that the layer has:

    layer with memory_reuse="S1" and a shared expert
        forward   SharedExpertForward -> OffloadingForward -> Forward
        backward  SharedExpertBackward -> OffloadingBackward -> Backward
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from pmoe.comm.ranks import telling
from pmoe.engine.autograd import Path, Saved
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import Forwarded, Inputs, Kept
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import Hidden


@dataclass(frozen=True)
class PipelineRunner:
    """Computes both passes of ``plan`` by the engine, each by its schedule."""

    name: ClassVar[Path] = "pipeline"

    plan: Plan

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        plan = self.plan
        variants = _variants(plan, moves=keep and plan.restore.offloads)
        with telling(plan.modules.grid.all, "a forward pass"):
            forward = _compose((*(first for first, _ in variants), Forward))(plan, inputs, keep)
            y_TM = forward.run()
        return y_TM, keep_for_backward(plan, forward.left) if keep else None


Variant = tuple[type[Any], type[Any]]
"""The classes of one feature for the forward and the backward pass. Each calls the next class by super()."""


def _variants(plan: Plan, *, moves: bool) -> list[Variant]:
    """Returns the features of a pass, the outermost first. Only the files that are needed are imported.

    moves: whether T_DI or T_M is copied to the host, or fetched from the place where forward kept it.
    """
    modules = plan.modules
    variants: list[Variant] = []
    if plan.padding is not None:
        from pmoe.engine.variants.padding import PaddedBackward, PaddedForward

        variants.append((PaddedForward, PaddedBackward))
    if modules.hooks is not None:
        from pmoe.engine.variants.callbacks import HookedBackward, HookedForward

        variants.append((HookedForward, HookedBackward))
    if modules.shared_expert is not None:
        from pmoe.engine.variants.shared_expert import SharedExpertBackward, SharedExpertForward

        variants.append((SharedExpertForward, SharedExpertBackward))
    if modules.stages.sharded:
        from pmoe.engine.variants.sharded_experts import ShardedBackward, ShardedForward

        variants.append((ShardedForward, ShardedBackward))
    if plan.forward.once is not None:
        from pmoe.engine.variants.send_once import OnceBackward, OnceForward

        variants.append((OnceForward, OnceBackward))
    if moves:
        from pmoe.engine.variants.offload import OffloadingBackward, OffloadingForward

        variants.append((OffloadingForward, OffloadingBackward))
    return variants


@functools.cache
def _compose(classes: tuple[type[Any], ...]) -> type[Any]:
    """Returns one class that inherits from ``classes``, the outermost first."""
    if len(classes) == 1:
        return classes[0]

    class Composed(*classes):  # type: ignore[misc]
        pass

    return Composed


def keep_for_backward(plan: Plan, left: Forwarded) -> Saved:
    """Returns the state that autograd saves for the engine's backward pass.

    left: the state of the forward pass. All its tensors go into one list, x_TM the first, and `_backward`
        puts them back in the same order.
    """
    tensors: list[Tensor | None] = []
    checked = _checked(plan, left.inputs)
    if checked is not left.inputs:
        left = replace(left, inputs=checked)
    emptied = _swapped(left, tensors.append)
    if plan.restore.dispatched != "communicate" and not plan.modules.stages.shared:
        tensors[0] = None
    return Saved(tensors, functools.partial(_backward, plan, emptied))


def _checked(plan: Plan, inputs: Inputs) -> Inputs:
    """Returns the inputs for autograd to save, which raises if one is changed in place before backward.

    A module's graph that is kept checks its own parameters, and only those that it needs
    (`pmoe.experts.expert_autograd.Shelf`). Autograd then gets them as ``.data``, which it does not check. If
    modules run again in backward, all of their parameters are needed, and autograd checks them.
    """
    modules = plan.modules
    restore = plan.restore
    unchecked: dict[str, list[Tensor]] = {}
    if modules.experts.are_modules and restore.hidden != "recompute":
        unchecked["parameters"] = [parameter.data for parameter in inputs.parameters]
    if modules.shared_expert is not None and modules.shared_expert.are_modules:
        unchecked["shared_parameters"] = [parameter.data for parameter in inputs.shared_parameters]
    if restore.dispatched != "communicate" and inputs.hook_parameters:
        unchecked["hook_parameters"] = [parameter.data for parameter in inputs.hook_parameters]
    return replace(inputs, **unchecked) if unchecked else inputs  # type: ignore[arg-type]


def _backward(
    plan: Plan, emptied: Forwarded, tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor
) -> list[Tensor | None]:
    """Runs the engine's backward pass. Returns the gradients of ``Inputs.all``.

    emptied: the state of the forward pass, without its tensors.
    tensors: those tensors, in the order of `_swapped`.
    wanted: for each of ``Inputs.all``, whether its gradient is wanted.
    grad_TM: (T, M), the gradient of T_O.
    """
    remaining = iter(tensors)
    saved = _swapped(emptied, lambda _: next(remaining))
    saved.wanted = wanted
    variants = _variants(plan, moves=plan.restore.offloads or plan.rearranged)
    with telling(plan.modules.grid.all, "a backward pass"):
        backward = _compose((*(second for _, second in variants), Backward))(plan, grad_TM, saved)
        gradients: list[Tensor | None] = backward.run()
    return gradients


def _swapped(left: Forwarded, swap: Callable[[Any], Any]) -> Forwarded:
    """Returns a copy of the state with swap(tensor) for each tensor in it.

    The order is fixed, and ``swap`` is also called for a tensor that is None. So one call takes all tensors
    out, and a later one puts them back.
    """
    inputs = left.inputs.like([swap(each) for each in left.inputs.all])
    swapped = Forwarded(inputs=inputs, weight_received=swap(left.weight_received))
    for unit, kept in left.kept.items():
        rows_NM = swap(kept.rows_NM)
        hidden = kept.hidden
        if hidden is not None:
            tensors = [swap(tensor) for tensor in hidden.tensors]
            hidden = Hidden(tensors=tensors, graph=hidden.graph, expendable=hidden.expendable)
        swapped.kept[unit] = Kept(rows_NM, hidden, kept.recipe)
    for point, each in left.passed.items():
        swapped.passed[point] = replace(each, tensors=tuple(map(swap, each.tensors)))
    # The plan has no regroup for `pmoe.engine.variants.send_once`: it became known in forward.
    swapped.regroup = [swap(each) for each in left.regroup]
    return swapped
