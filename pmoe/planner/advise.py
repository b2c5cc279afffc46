"""What a layer of given sizes should be told: n, the restore pair, and what they cost. Nothing runs.

The answer of `pmoe plan`. Every n with every pair is a candidate, n the same in both passes; decide.py prices
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pmoe.planner.choose import (
    Candidate,
    cheapest_pair,
    eq10_seconds,
    evaluate,
    simulated_pass,
    within_budget,
)
from pmoe.planner.degree import DEGREES
from pmoe.planner.footprint import Shape
from pmoe.planner.profile import Profile
from pmoe.planner.simulator import makespan
from pmoe.planner.timeline import Bar
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES, Restore


@dataclass(frozen=True, kw_only=True)
class Advice:
    """decision: what to take, and why. fastest: of all candidates. eq10: seconds of a step by pair."""

    candidates: Sequence[Candidate]
    eq10: dict[Restore, float]
    decision: Candidate
    why: str
    fastest: Candidate


def advise(
    shape: Shape,
    profile: Profile,
    num_tokens: int,
    *,
    budget: int | None = None,
    slack: float = 1.25,
    degrees: Sequence[int] = DEGREES,
) -> Advice:
    """With a budget of bytes: the fastest candidate, by the simulator, that holds it for any routing. Without
    one: the cheapest of S1 to S4 by Eq. 10, with the n of least simulated time.

    Raises ValueError with the least budget where nothing holds it.
    """
    candidates = evaluate(
        shape,
        num_tokens,
        degrees=[(n, n) for n in degrees],
        pairs=ALL_PAIRS,
        profile=profile,
        slack=slack,
    )
    if budget is None:
        pair, _ = cheapest_pair(shape, profile, num_tokens, STRATEGIES.values())
        decision = _fastest([each for each in candidates if each.restore == pair])
        why = f"{pair.strategy} is the cheapest of S1 to S4 by Eq. 10, and n={decision.forward} its fastest"
    else:
        decision = within_budget(candidates, budget)
        why = f"the fastest that holds {budget} bytes for any routing"
    return Advice(
        candidates=candidates,
        eq10={pair: eq10_seconds(shape, profile, num_tokens, pair) for pair in ALL_PAIRS},
        decision=decision,
        why=why,
        fastest=_fastest(candidates),
    )


def step_bars(shape: Shape, profile: Profile, num_tokens: int, chosen: Candidate) -> list[Bar]:
    """When each task of a step would run: forward, and backward right behind it."""
    drawn, origin = [], 0.0
    for direction, n in (("forward", chosen.forward), ("backward", chosen.backward)):
        rearranged = chosen.forward != chosen.backward
        ran = simulated_pass(shape, profile, num_tokens, n, direction, chosen.restore, rearranged)
        drawn += [
            Bar(
                direction=direction,
                name=each.task.name,
                kind=each.task.kind.value,
                chunk=each.task.chunk,
                lane=each.task.lane.value,
                start=origin + each.start,
                end=origin + each.end,
            )
            for each in ran
        ]
        origin += makespan(ran)
    return drawn


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda each: (each.seconds, each.memory.promised))
