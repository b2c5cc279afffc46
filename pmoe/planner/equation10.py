"""MPipeMoE's Eq. 10 for a layer's sizes and a machine's profile: the pair of least time.

The slowest lane of a pass sets its time, once for forward and once for backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from pmoe.planner.cost_model import lane_seconds
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Profile
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import PassDirection

LaneSeconds = tuple[float, float, float]
"""Seconds of computation, of communication, and of copies."""


def eq10_seconds(sizes: LayerSizes, profile: Profile, num_tokens: int, restore: Restore) -> float:
    """Seconds of a forward and a backward by Eq. 10. num_tokens: of this rank, evenly routed."""
    return sum(max(lanes) for lanes in _both_passes(sizes, profile, num_tokens, restore))


def cheapest_pair(
    sizes: LayerSizes, profile: Profile, num_tokens: int, pairs: Iterable[Restore]
) -> tuple[Restore, dict[Restore, float]]:
    """The pair of least time by Eq. 10, and the seconds of all.

    Pairs often are equal, for the slowest lane alone counts. Of equals the one with the least work on all
    lanes together is taken: what fills and empties the pipeline is a part of that. Then the first, so that
    ranks that share these numbers take the same.

    Raises ValueError without pairs.
    """
    lanes = {pair: _both_passes(sizes, profile, num_tokens, pair) for pair in pairs}
    if not lanes:
        raise ValueError("pairs (none) must name at least one way to restore")
    seconds = {pair: sum(max(each) for each in passes) for pair, passes in lanes.items()}
    work = {pair: sum(sum(each) for each in passes) for pair, passes in lanes.items()}
    return min(seconds, key=lambda pair: (seconds[pair], work[pair])), seconds


def _both_passes(sizes: LayerSizes, profile: Profile, num_tokens: int, restore: Restore) -> list[LaneSeconds]:
    """The three terms of Eq. 10, of forward and of backward."""
    across = (sizes.num_ranks - 1) / sizes.num_ranks if sizes.bypass_local else float(sizes.travels)
    return [
        lane_seconds(
            restore,
            direction,
            b=num_tokens * sizes.top_k * sizes.inside,
            M=sizes.d_model,
            H=sizes.columns.scratch,
            rates=profile.rates(sizes.element_size),
            interference=profile.interference,
            swiglu=sizes.columns.hidden > sizes.columns.scratch,
            travelling=across / sizes.inside,  # b counts rows once they are gathered
        )
        for direction in get_args(PassDirection)
    ]
