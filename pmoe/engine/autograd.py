"""The autograd Function of pmoe's layers: a single node of autograd's graph for the whole computation.

This node runs the whole backward pass, so the tasks of the pass run in the order of pmoe's schedule. With a
node for each operation, autograd would choose the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch._C._functorch import is_legacy_batchedtensor as is_batched

from pmoe.comm.failures import backward_pass
from pmoe.comm.ranks import Ranks
from pmoe.engine.passes.base import Inputs
from pmoe.gates.base import without_autocast

Path = Literal[
    "pipeline", "program", "one rank", "few rows", "fused", "fused forward", "persistent", "whole graph"
]
"""The implementation that computed a call:

    pipeline        pmoe's engine, in chunks (micro-batches)
    program         compiled pass programs, in chunks
    one rank        kernels for layers on a single rank
    few rows        one product for each expert without a plan, for small calls without gradients
    fused           COMET's fused CUDA kernels in both passes
    fused forward   COMET's fused CUDA kernels in forward, the engine in backward
    persistent      one persistent CUDA kernel for each pass (FlashDMoE)
    whole graph     a part of the graph that torch.compile(model, backend="pmoe") compiled
"""

BackwardFunction = Callable[[list[Any], Sequence[bool], Tensor], list[Tensor | None]]
"""Signature of a backward pass: backward(saved, wanted, grad_TM) -> gradients.

saved: the tensors that the forward pass saved. The function may empty this list while it runs, so that their
    memory is freed early.
wanted: a bool for each tensor of `Inputs.all`: whether its gradient is needed.
grad_TM: (T, M), the gradient of the layer's output, for T tokens with M = d_model columns.
gradients: the gradient of each tensor of `Inputs.all`, or None.
"""


class Saved(NamedTuple):
    """Everything that autograd needs to run the backward pass of a call.

    tensors: the tensors for ``ctx.save_for_backward``; an entry may be None.
    backward: the function that computes the gradients from these tensors.
    needs_peers: whether all ranks must run this backward pass together. If False, the pass sends nothing.
    """

    tensors: list[Tensor | None]
    backward: BackwardFunction
    needs_peers: bool = True


class Runner(Protocol):
    """The interface of everything that can compute a layer's call: the engine, fused kernels and others.

    The implementations are in `pmoe.runners`.

    name: the implementation's name, which `RunReport.path` shows to users.
    """

    name: ClassVar[Path]

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        """Returns the layer's output T_O, (T, M) for T tokens with M = d_model, and the state for backward.

        The caller has turned autograd off, so the operations of the pass record no graph.

        inputs: the tensors of the call.
        keep: whether a backward pass may follow. If False, no tensors are kept and the state is None.
        """


NO_SECOND_DERIVATIVE = "a MoELayer has no second derivative: create_graph (True) must be False"
"""The error of a backward pass that would be differentiated."""

ONE_GRADIENT = (
    "a MoELayer takes one gradient of its output at a time: is_grads_batched (True) of torch.autograd.grad "
    "must be False, and so must vectorize (True) of torch.autograd.functional"
)
"""The error of a backward pass with several gradients of the output in one tensor."""


class _Experts(torch.autograd.Function):
    """The autograd Function of one call: its node stands for dispatch, experts and combine."""

    @staticmethod
    def forward(
        ctx: Any, call: tuple[Runner, Inputs, Ranks], anchor: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        # The three values are one argument, because torch looks at each argument in Python.
        runner, inputs, ranks = call
        y_TM, saved = runner.forward(inputs.like(tensors), keep=True)
        assert saved is not None
        ctx.save_for_backward(*saved.tensors)
        ctx.backward_from = saved.backward
        ctx.inputs = inputs
        ctx.ranks = ranks
        ctx.call_number = ranks.expect_backward(y_TM.device)
        ctx.needs_peers = saved.needs_peers
        return y_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, ...]:
        # torch's once_differentiable would not refuse a grad_TM that needs no gradient, and the second
        # derivative would then be wrong without an error.
        if torch.is_grad_enabled() or is_batched(grad_TM):
            raise RuntimeError(NO_SECOND_DERIVATIVE if torch.is_grad_enabled() else ONE_GRADIENT)
        if hasattr(ctx, "later") or _get_current_graph_task_keep_graph():
            from pmoe.engine import halves

            return halves.asked_gradients(ctx, grad_TM, _Experts._gradients)
        return _Experts._gradients(ctx, grad_TM, ctx.backward_from)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Tensor:
        raise RuntimeError(
            "a MoELayer has no forward-mode derivative: differentiate it by backward or torch.autograd.grad"
        )

    @staticmethod
    def _gradients(ctx: Any, grad_TM: Tensor, backward_from: BackwardFunction) -> tuple[Tensor | None, ...]:
        with backward_pass(ctx.ranks, ctx.call_number):
            tensors = list(ctx.saved_tensors)
            for check in {getattr(node, "check_unchanged", None) for node, _ in ctx.next_functions}:
                # The nodes of DTensors and adapters have this check. autograd's own check of saved tensors
                # does not find a DTensor that was changed in place after forward, or a recomputation with
                # another adapter.
                if check is not None:
                    check()
            wanted = ctx.needs_input_grad[NOT_DIFFERENTIATED:]
            if ctx.inputs.compare is not None:
                ctx.inputs.compare(ctx.inputs.like(wanted).parameters, grad_TM.device)
            if ctx.needs_peers:
                ctx.ranks.count_backward(ctx.call_number)
            with without_autocast(grad_TM.device.type):
                return *(None,) * NOT_DIFFERENTIATED, *backward_from(tensors, wanted, grad_TM)


NOT_DIFFERENTIATED = 2
"""Number of arguments of ``_Experts.forward`` that get no gradient: call and anchor."""


def run_as_one_node(runner: Runner, inputs: Inputs, ranks: Ranks, *, needs_grad: bool) -> Tensor:
    """Runs the experts of a call: returns the layer's output T_O, (T, M) for T tokens with M = d_model.

    runner: the implementation that computes the call.
    inputs: the tensors of the call.
    ranks: the layer's ranks.
    needs_grad: whether any rank needs gradients of the call; the same on every rank. If True, the output's
        autograd graph is one node, which runs the whole backward pass. Backward communicates, so all ranks
        must run it, even a rank on which no input needs a gradient.
    """
    if needs_grad and torch.is_grad_enabled():
        tensors = inputs.all
        call = (runner, inputs.like([None] * len(tensors)), ranks)
        return _Experts.apply(call, make_anchor(inputs.x_TM), *tensors)  # type: ignore[no-untyped-call, no-any-return]
    with torch.no_grad():
        return runner.forward(inputs, keep=False)[0]


def make_anchor(like: Tensor) -> Tensor:
    """Returns an empty tensor (0,) that requires a gradient, as one more input of the autograd Function.

    With this input, autograd runs the backward pass even on a rank where no other input requires a gradient.
    If that rank skipped its backward pass, the other ranks would wait for its messages forever.

    like: a tensor on the device of the result.
    """
    return torch.empty(0, device=like.device, requires_grad=True)
