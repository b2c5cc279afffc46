"""The backward pass for experts that are not trained: no tasks compute gradients of their parameters."""

from __future__ import annotations

from torch import Tensor

from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import ForwardState, Unit
from pmoe.engine.plan.plan import Plan
from pmoe.schedule.tasks import Schedule


class FrozenBackward(Backward):
    """A backward pass that computes gradients of rows and routing weights, but not of the experts.

    Some saved tensors would be needed only for the gradients of the experts' parameters, after the gradients
    of the rows. The pass frees these tensors as soon as it has the gradients of the rows.
    """

    schedule: Schedule

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: ForwardState) -> None:
        super().__init__(plan, grad_TM, saved)
        self.schedule = self.schedule.frozen

    def _input_gradient(
        self, unit: Unit, grad_NM: Tensor, weight_N: Tensor, out_NM: Tensor, grad_weight_N: Tensor
    ) -> None:
        super()._input_gradient(unit, grad_NM, weight_N, out_NM, grad_weight_N)
        del self.pending[unit]
        self.rows.pop(unit, None)
