"""The pipeline runner: both passes by the engine, in micro-batches (MPipeMoE, sections III.B, III.D).

The class that runs a pass is made by inheritance for each combination of features. It inherits from one class
for each feature that the layer has, and last from the base class (`Forward` or `Backward`):

    layer with memory_reuse="S1" and a shared expert
        forward   SharedExpertForward -> OffloadingForward -> Forward
        backward  SharedExpertBackward -> OffloadingBackward -> Backward
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from torch import Tensor

from pmoe.comm.failures import leave, publishing_failures
from pmoe.engine.autograd import Path, Saved
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import ForwardState, Inputs, SavedUnit
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import Hidden
from pmoe.schedule.restore import GATHERED_AGAIN

if TYPE_CHECKING:
    from pmoe.engine.halves import Halves

ForwardType = TypeVar("ForwardType", bound=Forward)
BackwardType = TypeVar("BackwardType", bound=Backward)


@dataclass(frozen=True)
class PipelineRunner:
    """A runner that computes both passes by the engine, in chunks (micro-batches).

    plan: the chunks of both passes and the restore pair, from which each pass builds its schedule.
    """

    name: ClassVar[Path] = "pipeline"

    plan: Plan

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        try:
            forward = make_forward(self.plan, inputs, keep, Forward)
            y_TM = forward.run()
        except BaseException as error:
            leave(error, self.plan.modules.grid.all, "a forward pass")
            raise
        return y_TM, keep_for_backward(self.plan, forward.saved) if keep else None


def make_forward(plan: Plan, inputs: Inputs, keep: bool, plain: type[ForwardType]) -> ForwardType:
    """Returns the object that runs a forward pass. Its buffers are allocated, its tasks have not run yet.

    plan: the plan of the call.
    inputs: the rows and parameters of the call.
    keep: whether a backward pass may follow.
    plain: the base class, such as `Forward`. The classes of the layer's features are put before it in the
        order of inheritance, so that their methods are called first.
    """
    variants = _variants(plan, inputs.x_TM.is_cuda, moves=keep and plan.restore.offloads)
    return cast(ForwardType, _compose((*(first for first, _ in variants), plain))(plan, inputs, keep))


def make_backward(
    plan: Plan, grad_TM: Tensor, saved: ForwardState, plain: type[BackwardType]
) -> BackwardType:
    """Returns the object that runs a backward pass. Its buffers are allocated, its tasks have not run yet.

    plan: the plan of the call.
    grad_TM: (T, M), the gradient of the layer's output for T tokens; M = d_model.
    saved: the state that the forward pass left.
    plain: the base class, such as `Backward`. The classes of the layer's features are put before it in the
        order of inheritance, so that their methods are called first.
    """
    variants = _variants(plan, grad_TM.is_cuda, moves=plan.restore.offloads or plan.rearranged)
    return cast(BackwardType, _compose((*(second for _, second in variants), plain))(plan, grad_TM, saved))


Variant = tuple[type[Any], type[Any]]
"""The two classes of a feature of a layer: one for the forward pass and one for the backward pass.

Their methods call the method of the next class by super().
"""


def _variants(plan: Plan, on_gpu: bool, *, moves: bool) -> list[Variant]:
    """Returns the classes of the features that a pass needs; the first class's methods are called first.

    Only the files of these features are imported.

    plan: the plan of the call.
    on_gpu: whether the rows are on a GPU.
    moves: whether the pass copies T_DI (dispatched rows) or T_M (hidden activation): in forward to the host;
        in backward from the host, or from forward's chunks into other chunks of its own.
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
    is_plain = modules.wires is None and modules.copies is None and plan.forward.once is None
    if modules.stages.sharded or not is_plain or modules.products or plan.restore.hidden == "e4m3":
        variants += _rare_variants(plan, on_gpu)
    if moves:
        from pmoe.engine.variants.offload import OffloadingBackward, OffloadingForward

        variants.append((OffloadingForward, OffloadingBackward))
    if on_gpu:
        from pmoe.engine.variants.cuda_kernels import CudaBackward, CudaForward

        variants.append((CudaForward, CudaBackward))
    return variants


def _rare_variants(plan: Plan, on_gpu: bool) -> list[Variant]:
    """Returns the classes of the rarer features that a pass needs, such as sharded experts.

    They are in a function of their own, so that most layers import none of these files.

    plan: the plan of the call.
    on_gpu: whether the rows are on a GPU.
    """
    variants: list[Variant] = []
    if plan.modules.wires is not None and on_gpu:
        from pmoe.engine.variants.cuda_wire import WiredBackwardOnCuda, WiredForwardOnCuda

        variants.append((WiredForwardOnCuda, WiredBackwardOnCuda))
    elif plan.modules.wires is not None:
        from pmoe.engine.variants.wire import WiredBackward, WiredForward

        variants.append((WiredForward, WiredBackward))
    if plan.modules.stages.sharded:
        from pmoe.engine.variants.sharded_experts import ShardedBackward, ShardedForward

        variants.append((ShardedForward, ShardedBackward))
    if plan.forward.once is not None:
        from pmoe.engine.variants.send_once import OnceBackward, OnceForward

        variants.append((OnceForward, OnceBackward))
    if plan.modules.copies is not None and plan.modules.experts.are_modules:
        from pmoe.engine.variants.module_copies import ModuleCopiesBackward, ModuleCopiesForward

        variants.append((ModuleCopiesForward, ModuleCopiesBackward))
    elif plan.modules.copies is not None:
        from pmoe.engine.variants.copies import CopiesBackward, CopiesForward

        variants.append((CopiesForward, CopiesBackward))
    if plan.modules.products is not None:
        from pmoe.engine.variants.rounded_products import RoundedBackward, RoundedForward

        variants.append((RoundedForward, RoundedBackward))
    if plan.restore.hidden == "e4m3" and on_gpu:
        from pmoe.engine.variants.cuda_hidden_e4m3 import PackingBackwardOnCuda, PackingForwardOnCuda

        variants.append((PackingForwardOnCuda, PackingBackwardOnCuda))
    elif plan.restore.hidden == "e4m3":
        from pmoe.engine.variants.hidden_e4m3 import PackingBackward, PackingForward

        variants.append((PackingForward, PackingBackward))
    return variants


@functools.cache
def _compose(classes: tuple[type[Any], ...]) -> type[Any]:
    """Returns one class that inherits from ``classes``. The methods of the first class are called first.

    Calls with equal arguments return the same class.
    """
    if len(classes) == 1:
        return classes[0]

    class Composed(*classes):  # type: ignore[misc]
        pass

    return Composed


def keep_for_backward(plan: Plan, state: ForwardState) -> Saved:
    """Returns the state that autograd saves for the engine's backward pass.

    plan: the plan of the call.
    state: the state of the forward pass. All its tensors go into one list, and `PipelineBackward` puts them
        back in the same order. The first tensor, the input x_TM (T tokens, d_model columns), is left out if
        backward does not read it.
    """
    tensors: list[Tensor | None] = []
    checked = _checked(plan, state.inputs)
    if checked is not state.inputs:
        state = replace(state, inputs=checked)
    emptied = map_saved_tensors(state, tensors.append)
    if plan.restore.dispatched not in GATHERED_AGAIN and not plan.modules.stages.shared:
        tensors[0] = None
    return Saved(tensors, PipelineBackward(plan, emptied))


def _checked(plan: Plan, inputs: Inputs) -> Inputs:
    """Returns the inputs in the form in which autograd saves them, so that changes in place are detected.

    Autograd raises an error in backward if a saved tensor was changed in place. Parameters of a user's own
    expert modules are an exception if the autograd graph of their forward pass is kept for backward. That
    graph itself checks the parameters that it needs (`pmoe.experts.expert_autograd.SavedTensorSlots`). So
    these parameters are saved as ``.data``, which autograd does not check. If modules run again in backward,
    all of their parameters are needed, and autograd checks them. The same rule holds for a shared expert that
    is a user's module, and for callbacks.

    plan: the plan of the call.
    inputs: the tensors of the call.
    """
    modules = plan.modules
    restore = plan.restore
    unchecked: dict[str, Any] = {}
    if modules.experts.are_modules and restore.hidden != "recompute":
        unchecked["parameters"] = [parameter.data for parameter in inputs.parameters]
    if modules.shared_expert is not None and modules.shared_expert.are_modules:
        unchecked["shared_parameters"] = [parameter.data for parameter in inputs.shared_parameters]
    if restore.dispatched != "communicate" and inputs.hook_parameters:
        unchecked["hook_parameters"] = [parameter.data for parameter in inputs.hook_parameters]
    return inputs._replace(**unchecked) if unchecked else inputs


@dataclass(frozen=True)
class PipelineBackward:
    """The function that runs the engine's backward pass (`pmoe.engine.autograd.BackwardFunction`).

    plan: the plan of the call.
    emptied: the state of the forward pass with None in place of each tensor, because autograd saves the
        tensors.
    """

    plan: Plan
    emptied: ForwardState

    def __call__(self, tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor) -> list[Tensor | None]:
        """Runs the engine's backward pass. Returns the gradients of ``Inputs.all``.

        tensors: the tensors that forward saved, in the order of `map_saved_tensors`.
        wanted: for each tensor of ``Inputs.all``, whether its gradient is wanted.
        grad_TM: (T, M), the gradient of the layer's output T_O for T tokens; M = d_model.
        """
        remaining = iter(tensors)
        saved = map_saved_tensors(self.emptied, lambda _: next(remaining))
        saved.wanted = wanted
        try:
            is_frozen = self.plan.modules.copies is None and not any(saved.inputs.like(wanted).parameters)
            return make_backward(self.plan, grad_TM, saved, _frozen_class() if is_frozen else Backward).run()
        except BaseException as error:
            leave(error, self.plan.modules.grid.all, "a backward pass")
            raise

    def inputs_first(self, tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor) -> Halves:
        """Runs the tasks of the pass that do not compute gradients of parameters.

        Returns the gradients of ``Inputs.all`` that are found so far, and a function that runs the other
        tasks and returns the parameters' gradients. If the schedule cannot be divided in this way
        (`InputsFirst.fits`), the whole pass runs at once, and the function only returns the parameters'
        gradients. The arguments are those of ``__call__``.
        """
        from pmoe.engine.halves import InputsFirst, all_at_once

        if not InputsFirst.fits(self.plan.modules):
            return all_at_once(self, tensors, wanted, grad_TM)
        remaining = iter(tensors)
        saved = map_saved_tensors(self.emptied, lambda _: next(remaining))
        saved.wanted = wanted
        with publishing_failures(self.plan.modules.grid.all, "a backward pass"):
            first = make_backward(self.plan, grad_TM, saved, InputsFirst)
            return first.run(), first.parameter_gradients


def map_saved_tensors(state: ForwardState, swap: Callable[[Any], Any]) -> ForwardState:
    """Returns a copy of the state of a forward pass with each tensor replaced by swap(tensor).

    ``swap`` is called in a fixed order, also for a tensor that is None. So one call can take all tensors out,
    and a later call can put them back.
    """
    inputs = state.inputs.like([*map(swap, state.inputs.all)])
    swapped = ForwardState(inputs=inputs, weight_received=swap(state.weight_received))
    for unit, kept in state.kept.items():
        rows_NM = swap(kept.rows_NM)
        hidden = kept.hidden
        if hidden is None and rows_NM is kept.rows_NM:
            swapped.kept[unit] = kept  # it has no tensors: the record, which never changes, may be shared
            continue
        if hidden is not None:
            tensors = [swap(tensor) for tensor in hidden.tensors]
            hidden = Hidden(tensors=tensors, graph=hidden.graph, expendable=hidden.expendable)
        swapped.kept[unit] = SavedUnit(rows_NM, hidden, kept.recipe)
    for point, passed in state.passed.items():
        swapped.passed[point] = replace(passed, tensors=tuple(map(swap, passed.tensors)))
    # With `pmoe.engine.variants.send_once`, forward computes ``regroup``, so it is state and not in the plan.
    swapped.regroup = [*map(swap, state.regroup)]
    return swapped


def _frozen_class() -> type[Backward]:
    """Returns the class of the backward pass for experts whose parameters need no gradients."""
    from pmoe.engine.variants.frozen import FrozenBackward

    return FrozenBackward
