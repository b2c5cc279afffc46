"""The one autograd Function of pmoe's layers, which holds a whole pass.

Autograd sees a single node, so the order of tasks in backward is that of the schedule and not autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from pmoe.comm.ranks import Ranks
from pmoe.engine.passes.base import Inputs

Path = Literal["pipeline", "one rank", "fused", "fused forward", "persistent", "whole graph"]
"""The way in which a call was computed:

    pipeline        by the engine, in chunks
    one rank        by the kernels of a single rank
    fused           by COMET's kernels in both passes
    fused forward   by COMET's kernels in forward, by the engine in backward
    persistent      by one kernel a pass (FlashDMoE)
    whole graph     as part of the graph of torch.compile(model, backend="pmoe")
"""

BackwardFunction = Callable[[list[Any], Sequence[bool], Tensor], list[Tensor | None]]
"""backward(saved tensors, wanted, gradient of T_O) -> the gradients of ``Inputs.all``, or None.

wanted: for each of ``Inputs.all``, whether its gradient is wanted.
The function may empty the list of saved tensors to free them early: nothing else holds them.
"""


@dataclass(frozen=True)
class Saved:
    """The result of a forward pass for autograd.

    tensors: the tensors that autograd saves.
    backward: the function that computes gradients from them.
    """

    tensors: list[Tensor | None]
    backward: BackwardFunction


class Runner(Protocol):
    """The interface of everything that computes a decided call (`pmoe.runners`).

    name: the value of `Ran.path` for its calls.
    """

    name: ClassVar[Path]

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        """Returns T_O (T, M), and the state for backward; None in its place unless ``keep``.

        Runs without autograd.
        """


class _Experts(torch.autograd.Function):
    """The node of autograd's graph that stands for all experts of a call."""

    @staticmethod
    def forward(
        ctx: Any, runner: Runner, inputs: Inputs, ranks: Ranks, anchor: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        y_TM, saved = runner.forward(inputs.like(tensors), keep=True)
        assert saved is not None
        ctx.save_for_backward(*saved.tensors)
        ctx.backward_from = saved.backward
        ctx.inputs = inputs
        ctx.ranks = ranks
        ctx.call = ranks.expect_backward(y_TM.device)
        return y_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, ...]:
        # torch's once_differentiable would not refuse a grad_TM that needs no gradient, and the second
        # derivative would then be wrong without an error.
        if torch.is_grad_enabled():
            raise RuntimeError("a MoELayer has no second derivative: create_graph (True) must be False")
        with ctx.ranks.backward_pass(ctx.call):
            return _Experts._gradients(ctx, grad_TM)

    @staticmethod
    def _gradients(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, ...]:
        tensors = list(ctx.saved_tensors)
        for check in {getattr(node, "check_unchanged", None) for node, _ in ctx.next_functions}:
            if check is not None:  # of DTensors: autograd saved their local parts, which show no change
                check()
        wanted = ctx.needs_input_grad[NOT_DIFFERENTIATED:]
        if ctx.inputs.compare is not None:
            ctx.inputs.compare(ctx.inputs.like(wanted).parameters, grad_TM.device)
        with torch.autocast(grad_TM.device.type, enabled=False):
            return *(None,) * NOT_DIFFERENTIATED, *ctx.backward_from(tensors, wanted, grad_TM)


NOT_DIFFERENTIATED = 4
"""Number of arguments of ``_Experts.forward`` before the tensors: runner, inputs, ranks, anchor."""


def run_experts(runner: Runner, inputs: Inputs, ranks: Ranks, *, needs_grad: bool) -> Tensor:
    """Returns T_O (T, M) of the tokens. With ``needs_grad`` its graph is one node with a whole backward pass.

    needs_grad: must be the same on every rank. If one rank differentiates, all ranks take part in backward,
        even a rank on which no input needs a gradient.
    """
    if needs_grad and torch.is_grad_enabled():
        without_tensors = inputs.like([None] * len(inputs.all))
        y_TM: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            runner, without_tensors, ranks, make_anchor(inputs.x_TM), *inputs.all
        )
        return y_TM
    with torch.no_grad():
        return runner.forward(inputs, keep=False)[0]


def make_anchor(like: Tensor) -> Tensor:
    """Returns an empty leaf (0,) that needs a gradient, which makes autograd run this rank's backward.

    Without it, a rank on which no input needs a gradient would skip backward, and its peers would hang.
    """
    return torch.empty(0, device=like.device, requires_grad=True)
