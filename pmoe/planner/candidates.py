"""The ways to run a layer, each with its predicted seconds and bytes, and the fastest within a budget.

Nothing runs here: sizes, the schedules and a profile are enough (`pmoe plan`). A layer asks the same
functions, with numbers that all its ranks share, so that all decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pmoe.comm.counts import num_bins, slot_rows
from pmoe.planner.layer_seconds import step_seconds
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.memory import PredictedMemory, predict
from pmoe.planner.pass_rows import worst_rows
from pmoe.planner.profile import Profile
from pmoe.schedule.restore import Restore


@dataclass(frozen=True, kw_only=True)
class PricedChoice:
    """One way to run a layer and its price.

    forward, backward: n of each pass. restore: the pair. seconds: of a step, predicted. memory: for the worst
    routing.
    """

    forward: int
    backward: int
    restore: Restore
    seconds: float
    memory: PredictedMemory

    def __str__(self) -> str:
        degrees = f"n={self.forward}" + f"/{self.backward}" * (self.backward != self.forward)
        return (
            f"{degrees} {self.restore}: {self.seconds * 1e3:.3g} ms, "
            f"{self.memory.promised / 2**20:.1f} MiB at most"
        )


def bound(
    sizes: LayerSizes,
    num_tokens: int,
    forward: int,
    backward: int,
    restore: Restore,
    slack: float,
    bins: int | None = None,
) -> PredictedMemory:
    """The most bytes that any routing needs.

    num_tokens: the largest number of a rank. forward, backward: n of each pass. slack: rows of a slot over
    the balanced share. bins: into which rows are counted, by default as for these two degrees.
    """
    bins = num_bins((forward, backward), sizes.num_ranks) if bins is None else bins
    top_k = sizes.top_k * sizes.inside
    rows = {
        n: worst_rows(sizes, num_tokens, n, bins, slot_rows(slack, top_k, num_tokens, n))
        for n in (forward, backward)
    }
    return predict(sizes, num_tokens, rows[forward], rows[backward], restore, rearranged=forward != backward)


def evaluate(
    sizes: LayerSizes,
    num_tokens: int,
    *,
    degrees: Iterable[tuple[int, int]],
    pairs: Sequence[Restore],
    profile: Profile | None,
    slack: float,
    bins: int | None = None,
) -> list[PricedChoice]:
    """Every combination of degrees (forward, backward) and pairs, with its price.

    profile: of the machine; without one all seconds are 0. slack, bins: as `bound` takes them.
    """
    return [
        PricedChoice(
            forward=forward,
            backward=backward,
            restore=pair,
            seconds=0.0
            if profile is None
            else step_seconds(sizes, profile, num_tokens, forward, backward, pair),
            memory=bound(sizes, num_tokens, forward, backward, pair, slack, bins),
        )
        for forward, backward in degrees
        for pair in pairs
    ]


def within_budget(candidates: Sequence[PricedChoice], budget: int) -> PricedChoice:
    """The fastest that needs at most ``budget`` bytes for any routing; of equals the one of fewest bytes.

    Raises ValueError with the least budget that would do.
    """
    fitting = [each for each in candidates if each.memory.promised <= budget]
    if not fitting:
        least = min(candidates, key=lambda each: each.memory.promised)
        raise ValueError(
            f"memory_budget ({budget} bytes) must be at least {least.memory.promised} for these tokens, "
            f"whatever their routing (n={least.forward}, {least.restore})"
        )
    return min(fitting, key=lambda each: (each.seconds, each.memory.promised))
