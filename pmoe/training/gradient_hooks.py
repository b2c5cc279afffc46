"""Where a `GradientReducer` meets a model: hooks of parameters and of MoE layers' backward passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from pmoe.engine.plan import Gradients
from pmoe.layer import MoELayer
from pmoe.planner.degree import DEGREES, fixed_degree
from pmoe.planner.degree_search import ScheduleOptions, simulated_degrees
from pmoe.planner.stage_costs import DegreeSeconds
from pmoe.runners.solved import layer_costs, operations_of
from pmoe.schedule.restore import Restore

if TYPE_CHECKING:
    from pmoe.training.reducer_steps import ReducerStep


@dataclass(frozen=True)
class GradientHook:
    """Called by autograd when a parameter's gradient has been added up.

    step: the step under way; None where gradients are not reduced now. at: the parameter's index.
    """

    step: Callable[[], ReducerStep | None]
    at: int

    def __call__(self, parameter: Tensor) -> None:
        step = self.step()
        if step is not None:
            step.gradient_is_ready(self.at)


@dataclass(eq=False)
class LayerGradients:
    """Called by a layer's backward pass, see `pmoe.engine.plan.Gradients`. at: the layer's index."""

    step: Callable[[], ReducerStep | None]
    at: int
    t_gar: float = 0.0

    def begins(self) -> None:
        step = self.step()
        if step is not None:
            step.layer_begins(self.at)

    def inside(self) -> dist.Work | None:
        step = self.step()
        return None if step is None else step.inside_layer()

    def ends(self) -> None:
        step = self.step()
        if step is not None:
            step.layer_ends()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the model is nobody's to reduce."""


def carry(layer: MoELayer, gradients: Gradients | None) -> None:
    """Has the layer's backward passes carry other layers' gradients; None ends it."""
    layer.gradients = gradients


def backward_degrees(layer: MoELayer) -> tuple[DegreeSeconds, ...]:
    """Seconds of a layer's backward pass by degree, with and without gradients in it.

    For as many tokens as its last batch had. Collective the first time.
    """
    rows = next(layer.experts.parameters())
    operations = operations_of(layer.grid, rows.device, rows.dtype)
    costs = layer_costs(layer.memory_shape(), operations, layer.max_tokens).backward()
    restore = layer.restore if isinstance(layer.restore, Restore) else None
    way = ScheduleOptions(direction="backward", one_lane=layer.switches.one_lane, restore=restore)
    fixed = layer.pipeline_backward or fixed_degree(layer.pipeline)
    return simulated_degrees(costs, way, DEGREES if fixed is None else (fixed,))
