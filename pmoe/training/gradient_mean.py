"""Reduces experts' gradients in the backward pass: replaces them by their mean over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pmoe.comm.agreement import largest, same
from pmoe.comm.gradient_sum import sum_over_ranks
from pmoe.comm.ranks import Ranks


@dataclass(frozen=True)
class MeanOverRanks:
    """Sums experts' gradients over the experts' copies and divides them by the number of all ranks.

    Before this reduction, the gradient of one copy of an expert is already a sum over the tokens of all ranks
    that send tokens to this copy. So only the sum over the copies is missing.

    num_ranks: number of all ranks of the mesh, the divisor.
    copies: the ranks that hold copies of this rank's experts.
    ranks: the ranks over which one copy of the experts is spread.
    names: names of the experts' parameters, for errors.
    compared: the requires_grad flags that the ranks have compared before. An entry is a tuple with one flag
        for each parameter.
    """

    num_ranks: int
    copies: Ranks
    ranks: Ranks = field(default_factory=Ranks.single)
    names: tuple[str, ...] = ()
    compared: set[tuple[bool, ...]] = field(default_factory=set)

    def with_names(self, names: tuple[str, ...]) -> MeanOverRanks:
        """Returns a copy of this object with other names of parameters, which errors show.

        names: names of the parameters with which the experts' calls compute. They change if a call uses
            another adapter.
        """
        return replace(self, names=names)

    def compare(self, wanted: Sequence[bool], device: torch.device) -> None:
        """Checks, before a backward pass, that all copies of an expert train the same parameters.

        If copies trained different parameters, their ranks would start different all-reduces. The ranks would
        then hang or mix up gradients.

        wanted: requires_grad of each parameter of the experts on this rank.
        device: device of these parameters.

        Raises ValueError on every rank if requires_grad differs between copies.

        Collective. On a GPU the check makes the host wait. So it is skipped there for flags that were checked
        before.
        """
        if self.copies.size == 1 or (device.type != "cpu" and tuple(wanted) in self.compared):
            return
        self.copies.reconnect()
        stage = "comparing which parameters of experts are trained"
        are_same = same(self.copies, device, wanted, stage=stage)
        differ = largest(self.ranks, device, [not is_same for is_same in are_same], stage=stage)
        if any(differ):
            names = ", ".join(name for name, differs in zip(self.names, differ, strict=True) if differs)
            raise ValueError(
                f"requires_grad of experts' {names} must be the same on all copies of the experts"
            )
        self.compared.add(tuple(wanted))

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Replaces gradients, of any shape, by their means over all ranks, in place. Collective."""
        if not gradients:
            return
        torch._foreach_div_(list(gradients), self.num_ranks)
        sum_over_ranks(self.copies, "summing the gradients of copies of experts", gradients)
