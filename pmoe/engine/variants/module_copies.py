"""Forward and backward passes with copies of busy experts that are a user's modules (``balance``).

The passes are those of `pmoe.engine.variants.copies`, except for two things:

- A copy is made from the parameters and the buffers of an expert (`pmoe.experts.copied_modules`).
- Each expert has its own tensor for each of its parameters. Stacked experts have one tensor for a parameter
  of all experts of the rank.

Letters: C copies that this rank hosts, Q parameters of an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pmoe.engine.variants.copies import CopiesBackward, CopiesForward, _WithCopies, parameters_in
from pmoe.experts.copied_modules import CopiedModules, elements_in_row, row_values
from pmoe.experts.products import GradientSum
from pmoe.experts.with_copies import ExpertsWithCopies


class _WithModuleCopies(_WithCopies):
    """A pass with copies of busy experts that are modules."""

    copied: Tensor
    experts: ExpertsWithCopies

    @property
    def own_modules(self) -> list[nn.Module]:
        """This rank's own experts. All experts of all ranks have the same architecture."""
        return self.plan.modules.experts.as_modules()

    def value_shapes(self) -> list[torch.Size]:
        return [torch.Size([count]) for count in elements_in_row(self.own_modules[0])]

    def own_weights(self, expert: int) -> list[Tensor]:
        return row_values(self.own_modules[expert - self.hosted.rank * self.hosted.num_local])

    def use_copies(self, copied: Tensor) -> None:
        self.copied = copied
        copies = CopiedModules(self.own_modules[0], copied, self.hosted.trained)
        self.experts = ExpertsWithCopies(self.plan.modules.experts, [copied], copies)


class ModuleCopiesForward(_WithModuleCopies, CopiesForward):
    """A forward pass with copies of busy experts that are modules."""


class ModuleCopiesBackward(_WithModuleCopies, CopiesBackward):
    """A backward pass with copies of busy experts that are modules.

    `copy_sums` has C * Q entries, one for each parameter of each copy: first the sums for the Q parameters of
    the first copy, then those of the second, and so on. The entry of a parameter that is not trained is None.
    """

    @functools.cached_property
    def trained(self) -> list[int]:
        """The numbers of an expert's trained parameters: their gradients are sent to its owner."""
        return [at for at, is_trained in enumerate(self.hosted.trained) if is_trained]

    def gradient_shapes(self) -> list[torch.Size]:
        shapes = [parameter.shape for parameter in self.own_modules[0].parameters()]
        return [shapes[at] for at in self.trained]

    def sums_that_stay(self) -> list[GradientSum | None]:
        return [None] * (len(self.hosted.hosted) * len(self.hosted.trained))

    def summed_gradients(self) -> list[tuple[int, Tensor]]:
        views = parameters_in(self.copied_gradients, self.gradient_shapes())
        return [
            (copy * len(self.hosted.trained) + at, view[copy])
            for copy in range(len(self.hosted.hosted))
            for at, view in zip(self.trained, views, strict=True)
        ]

    @functools.cached_property
    def places_of_parameters(self) -> dict[int, int]:
        """The index of each parameter in the pass's ``parameters``; the keys are ``id(parameter)``."""
        return {id(value): at for at, value in enumerate(self.plan.modules.experts.parameters())}

    def add_to_expert(self, place: int, gradients: Sequence[Tensor]) -> None:
        parameters = list(self.own_modules[place].parameters())
        for at, gradient in zip(self.trained, gradients, strict=True):
            total = self.sums[self.places_of_parameters[id(parameters[at])]]
            if total is not None:
                total.add(gradient)
