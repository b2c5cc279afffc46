"""The one autograd function of pmoe's layers: backward's order is the schedule's, not autograd's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from pmoe.comm.ranks import Ranks
from pmoe.engine.passes import Inputs

Path = Literal["pipeline", "one rank", "fused", "fused forward", "persistent", "whole graph"]
"""By the pipeline engine; one rank's kernels; COMET's, in both passes or in forward; one kernel a pass."""

BackwardFunction = Callable[[list[Any], Sequence[bool], Tensor], list[Tensor | None]]
"""From the saved tensors, which of ``Inputs.all`` want gradients, and the gradient of T_O: those gradients.
The list is the callee's to empty: nobody else holds its tensors."""


@dataclass(frozen=True)
class Saved:
    """What a forward pass leaves: tensors that autograd saves, and the pass that goes backward from them."""

    tensors: list[Tensor | None]
    backward: BackwardFunction


class Runner(Protocol):
    """How a decided call is computed (`pmoe.runners`). name: as `Ran.path` gives it."""

    name: ClassVar[Path]

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        """T_O (T, M), and what backward needs; None unless ``keep``. It runs without autograd."""


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, runner: Runner, inputs: Inputs, ranks: Ranks, anchor: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        y_TM, saved = runner.forward(inputs.like(tensors), keep=True)
        assert saved is not None
        ctx.save_for_backward(*saved.tensors)
        ctx.backward_from, ctx.inputs = saved.backward, inputs
        ctx.ranks, ctx.call = ranks, ranks.expect_backward(y_TM.device)
        return y_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable lets this pass where grad_TM needs no gradient, and what follows is wrong.
        if torch.is_grad_enabled():
            raise RuntimeError("a MoELayer has no second derivative: create_graph (True) must be False")
        with ctx.ranks.backward_pass(ctx.call):
            return _Experts._gradients(ctx, grad_TM)

    @staticmethod
    def _gradients(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, ...]:
        tensors = list(ctx.saved_tensors)
        for check in {getattr(node, "check_unchanged", None) for node, _ in ctx.next_functions}:
            if check is not None:  # of parameters whose version is not that of the saved tensor
                check()
        wanted = ctx.needs_input_grad[NOT_DIFFERENTIATED:]
        if ctx.inputs.compare is not None:
            ctx.inputs.compare(ctx.inputs.like(wanted).parameters, grad_TM.device)
        with torch.autocast(grad_TM.device.type, enabled=False):
            return *(None,) * NOT_DIFFERENTIATED, *ctx.backward_from(tensors, wanted, grad_TM)


NOT_DIFFERENTIATED = 4
"""Arguments of `_Experts` before the tensors."""


def run_experts(runner: Runner, inputs: Inputs, ranks: Ranks, *, needs_grad: bool) -> Tensor:
    """T_O (T, M) of the tokens, with a hand-written backward where ``needs_grad``.

    needs_grad must be the same on every rank: where one rank differentiates all take part, whatever of
    their own inputs needs a gradient.
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
    """A leaf that always needs a gradient: it keeps this rank's backward in the graph."""
    return torch.empty(0, device=like.device, requires_grad=True)
