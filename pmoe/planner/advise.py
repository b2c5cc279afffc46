"""The answer of `pmoe plan`: n and the restore pair for a layer of given sizes, and their price.

Every n with every pair is a candidate, n the same in both passes (`pmoe.planner.candidates`). Nothing runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pmoe.planner.candidates import PricedChoice, evaluate, within_budget
from pmoe.planner.degree import DEGREES
from pmoe.planner.equation10 import cheapest_pair, eq10_seconds
from pmoe.planner.layer_seconds import simulated_pass
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Profile
from pmoe.planner.simulator import makespan
from pmoe.planner.timeline import Bar, simulated_bars
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES, Restore


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a layer should take, and its alternatives.

    candidates: every n with every pair. decision: the one to take; why: in words. fastest: of all candidates.
    eq10: seconds of a step by pair, by Eq. 10.
    """

    candidates: Sequence[PricedChoice]
    eq10: dict[Restore, float]
    decision: PricedChoice
    why: str
    fastest: PricedChoice


def advise(
    sizes: LayerSizes,
    profile: Profile,
    num_tokens: int,
    *,
    budget: int | None = None,
    slack: float = 1.25,
    degrees: Sequence[int] = DEGREES,
) -> Advice:
    """n and the restore pair for a layer with ``num_tokens`` tokens a rank, evenly routed.

    budget: bytes, or None. With one the fastest candidate, by the simulator, that holds it for any routing;
    without, the cheapest of S1 to S4 by Eq. 10, with the n of least simulated time. slack: rows of a slot
    over the balanced share. degrees: n to choose from.

    Raises ValueError with the least budget where nothing holds it.
    """
    candidates = evaluate(
        sizes,
        num_tokens,
        degrees=[(n, n) for n in degrees],
        pairs=ALL_PAIRS,
        profile=profile,
        slack=slack,
    )
    if budget is None:
        pair, _ = cheapest_pair(sizes, profile, num_tokens, STRATEGIES.values())
        decision = _fastest([each for each in candidates if each.restore == pair])
        why = f"{pair.strategy} is the cheapest of S1 to S4 by Eq. 10, and n={decision.forward} its fastest"
    else:
        decision = within_budget(candidates, budget)
        why = f"the fastest that holds {budget} bytes for any routing"
    return Advice(
        candidates=candidates,
        eq10={pair: eq10_seconds(sizes, profile, num_tokens, pair) for pair in ALL_PAIRS},
        decision=decision,
        why=why,
        fastest=_fastest(candidates),
    )


def step_bars(sizes: LayerSizes, profile: Profile, num_tokens: int, chosen: PricedChoice) -> list[Bar]:
    """When each task of a step would run: forward, and backward right behind it."""
    drawn: list[Bar] = []
    origin = 0.0
    for direction, n in (("forward", chosen.forward), ("backward", chosen.backward)):
        rearranged = chosen.forward != chosen.backward
        ran = simulated_pass(sizes, profile, num_tokens, n, direction, chosen.restore, rearranged)
        drawn += simulated_bars(direction, ran, origin)
        origin += makespan(ran)
    return drawn


def _fastest(candidates: Sequence[PricedChoice]) -> PricedChoice:
    return min(candidates, key=lambda each: (each.seconds, each.memory.promised))
