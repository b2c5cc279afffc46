"""A layer as the partition of gradients sees it, and seconds of an all-reduce (FSMoE, Sections 5.1, 5.2)."""

from __future__ import annotations

from dataclasses import dataclass

from pmoe.arguments import check_int, check_not_negative
from pmoe.planner.costs import LineCost
from pmoe.planner.stage_costs import DegreeSeconds


@dataclass(frozen=True, kw_only=True)
class GeneralizedLayer:
    """An MoE layer and the dense part up to the next one (Section 5.2), in the backward pass.

    degrees: its MoE part's seconds by degree, see `pmoe.planner.degree_search.simulated_degrees`.
    dense_seconds: of the dense part, that an all-reduce may run beside.
    gradient_bytes: made in this layer, and there when its backward pass has ended.

    Raises ValueError for no degrees and for a negative number, TypeError for bytes that are no int.
    """

    degrees: tuple[DegreeSeconds, ...]
    dense_seconds: float
    gradient_bytes: int

    def __post_init__(self) -> None:
        if not self.degrees:
            raise ValueError("degrees (none) must hold at least one")
        check_int(gradient_bytes=self.gradient_bytes)
        check_not_negative(dense_seconds=self.dense_seconds, gradient_bytes=self.gradient_bytes)

    def best(self, t_gar: float) -> DegreeSeconds:
        """The fastest degree that carries t_gar; of equals the lower: what Algorithm 1 is asked in Eq. 5."""
        return min(self.degrees, key=lambda each: (each.seconds(t_gar), each.degree))

    @property
    def hidden_seconds(self) -> float:
        """t_olp,moe: the longest t_gar that costs the MoE part nothing."""
        least = self.best(0.0).alone
        return max(each.alone - each.beside for each in self.degrees if each.alone <= least)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one layer carries of earlier layers' gradients, and the degree of its MoE part that fits."""

    moe_bytes: int
    dense_bytes: int
    t_gar: float
    degree: int


def all_reduce_seconds(all_reduce: LineCost, num_bytes: int) -> float:
    """t_ar (Section 5.1); nothing is sent, and takes no time, where there are no bytes."""
    return all_reduce(num_bytes) if num_bytes else 0.0


def bytes_within(all_reduce: LineCost, seconds: float) -> int:
    """The inverse of t_ar, in whole bytes: the most that take no longer; 0 where alpha alone does."""
    left = seconds - all_reduce.alpha_seconds
    if left <= 0:
        return 0
    most = left / all_reduce.beta_seconds if all_reduce.beta_seconds else 2.0**53
    found = int(min(most, 2.0**53))
    while found and all_reduce(found) > seconds:  # the quotient may be rounded up
        found -= 1
    return found
