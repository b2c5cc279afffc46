"""The hooks of a `GradientReducer`, and its steps: the first watches, later ones follow a timetable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.ranks import Ranks
from pmoe.measure.rounds import clock_of
from pmoe.training.gradient_partitioning import GradientBuffers, GradientRange, LayerBackward, Timetable

CurrentStep: TypeAlias = "Callable[[], FirstStep | PartitionedStep | None]"
"""Gives the step under way, None where gradients are not reduced now. Hooks call its methods in the order of
backward: of parameters, and of MoE layers' backward passes."""


def gradient_hook(step: CurrentStep, at: int) -> Callable[[Tensor], None]:
    """Called by autograd when the gradient of parameter ``at`` has been added up."""

    def hook(_: Tensor) -> None:
        if (current := step()) is not None:
            current.gradient_is_ready(at)

    return hook


@dataclass(eq=False)
class LayerGradients:
    """Called by a layer's backward pass, see `pmoe.engine.plan.Modules`. at: the layer's index."""

    step: CurrentStep
    at: int
    t_gar: float = 0.0

    def begins(self) -> None:
        if (step := self.step()) is not None:
            step.layer_begins(self.at)

    def inside(self) -> dist.Work | None:
        return None if (step := self.step()) is None else step.inside_layer()

    def ends(self) -> None:
        if (step := self.step()) is not None:
            step.layer_ends()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the model is nobody's to reduce."""


class FirstStep:
    """Sends nothing inside backward: shows the order of gradients, and how long the dense parts take.

    order: indices of parameters as their gradients came; those without any come last. layers: every backward
    pass of an MoE layer. last_seconds: of the dense part after the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._now = clock_of(device)
        self._came: dict[int, None] = {}
        self._dense_since: float | None = None
        self.layers: list[LayerBackward] = []

    def gradient_is_ready(self, at: int) -> None:
        """The gradient of parameter ``at`` has been added up."""
        self._came.setdefault(at)

    def layer_begins(self, layer: int) -> None:
        """The backward pass of an MoE layer begins."""
        self.layers.append(LayerBackward(layer, len(self._came), self._dense_seconds()))

    def inside_layer(self) -> None:
        """The task of the layer's schedule that carries gradients: nothing yet."""

    def layer_ends(self) -> None:
        """The backward pass of an MoE layer has ended, and a dense part follows."""
        self._dense_since = self._now()

    def end(self, num_parameters: int) -> None:
        """After backward."""
        self.last_seconds = self._dense_seconds()
        self.order = list(dict.fromkeys([*self._came, *range(num_parameters)]))

    def _dense_seconds(self) -> float:
        return 0.0 if self._dense_since is None else self._now() - self._dense_since


class PartitionedStep:
    """Sends gradients inside backward, as a timetable says. names: of the parameters, for errors.

    Raises RuntimeError where a gradient is not there when it should travel.
    """

    def __init__(
        self, buffers: GradientBuffers, timetable: Timetable, ranks: Ranks, names: Sequence[str]
    ) -> None:
        self._buffers, self._timetable, self._ranks, self._names = buffers, timetable, ranks, names
        self._works: list[dist.Work] = []
        self._ready: set[int] = set()
        self._num_layers = 0

    def gradient_is_ready(self, at: int) -> None:
        self._buffers.take(at)
        self._ready.add(at)

    def layer_begins(self, layer: int) -> None:
        self._check_ready(self._timetable.inside.get(self._num_layers))

    def inside_layer(self) -> dist.Work | None:
        part = self._timetable.inside.get(self._num_layers)
        return None if part is None else self._all_reduce(part)

    def layer_ends(self) -> None:
        self._num_layers += 1
        part = self._timetable.beside.get(self._num_layers)
        self._check_ready(part)
        if part is not None:
            self._works.append(self._all_reduce(part))

    def finish(self) -> GradientBuffers:
        """After backward: sends what is left, waits for all, and returns where the sums are."""
        for at in range(len(self._names)):
            if at not in self._ready:
                self._buffers.take(at)
        if self._ranks.group is not None:
            self._works += [self._all_reduce(each) for each in self._timetable.end]
        for work in self._works:
            work.wait()
        return self._buffers

    def _all_reduce(self, each: GradientRange) -> dist.Work:
        work: dist.Work = dist.all_reduce(each.memory, group=self._ranks.group, async_op=True)
        return work

    def _check_ready(self, part: GradientRange | None) -> None:
        for at in () if part is None else part.parameters:
            if at not in self._ready:
                raise RuntimeError(
                    f"pmoe: the gradient of {self._names[at]} is not there when it should travel: a model "
                    "whose backward pass changes from step to step needs GradientReducer(partition=False)"
                )
