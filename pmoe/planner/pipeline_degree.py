"""The pipeline degree of a layer with sharded experts, from its stages' costs (FSMoE, Section 4, Algorithm
1).

The schedule: on the inter-node lane all dispatches, then other layers' gradients (t_gar), then all combines;
on the intra-node lane all all-gathers before all reduce-scatters; experts on a lane of their own. What takes
longest decides which of four formulas holds; each is solved where it holds, and the least is taken.

Where all-gather and reduce-scatter take the same time, which the paper assumes, its formula of the case that
holds is the length of that schedule, and a convex function of r: so rounding its minimum down and up finds
the best whole r. Where they do not, the formulas may be too short: `pmoe.planner.degree_search` goes on from
here on the schedule itself.

Letters: r chunks; a2a, ag, rs, exp: all-to-all (each of two), all-gather, reduce-scatter, experts; t_gar
seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from pmoe.planner.costs import LayerCosts

MAX_DEGREE = 16
"""The largest r that is looked at where the caller names none."""

STEP = 1e-5
"""Of ln r, to either side, for a slope."""

TOLERANCE = 1e-7
"""Of a constraint, as a share of the time in one chunk: SLSQP ends that far outside at times."""


# ---- the paper's cases


def margins(costs: LayerCosts, r: float, t_gar: float) -> Mapping[int, float]:
    """Left side less right side of the constraints Q1 to Q7: Q is true where its margin is above 0."""
    a2a, ag, rs, exp = costs.chunk(r)
    experts = r * exp - 2 * (r - 1) * a2a
    return {
        1: a2a - ag,
        2: experts,
        3: r * exp - (r - 1) * (ag + rs),
        4: t_gar - (ag + rs),
        5: t_gar - (experts + ag + rs),
        6: t_gar - (r * (ag + rs) - 2 * (r - 1) * a2a),
        7: t_gar - (ag + rs + experts),
    }


Branch = tuple[int, Mapping[int, bool]]

BRANCHES: tuple[Branch, ...] = (
    (1, {1: True, 2: False, 4: True}),
    (1, {1: True, 2: True, 5: True}),
    (1, {1: False, 3: False, 6: True}),
    (1, {1: False, 3: True, 7: True}),
    (2, {1: True, 2: True, 5: False}),
    (2, {1: False, 3: True, 7: False}),
    (3, {1: True, 2: False, 4: False}),
    (4, {1: False, 3: False, 6: False}),
)
"""(case, which Q must be true and which false). One branch, and one only, holds at any r."""


def case_of(costs: LayerCosts, r: float, t_gar: float = 0.0) -> int:
    """Which of the four cases r chunks are: 1 inter-node lane and gradients, 2 experts, 3 all-to-alls, 4
    intra-node lane."""
    return _branch_of(costs, r, t_gar)[0]


def case_seconds(case: int, costs: LayerCosts, r: float, t_gar: float = 0.0) -> float:
    """f1 to f4 of Section 4.2."""
    a2a, ag, rs, exp = costs.chunk(r)
    match case:
        case 1:
            return 2 * r * a2a + t_gar
        case 2:
            return 2 * a2a + ag + rs + r * exp
        case 3:
            return 2 * r * a2a + ag + rs
        case _:  # 4
            return 2 * a2a + r * (ag + rs)


def formula_seconds(costs: LayerCosts, r: float, t_gar: float = 0.0) -> float:
    """What the paper predicts for r chunks: the formula of the case that holds there."""
    return case_seconds(case_of(costs, r, t_gar), costs, r, t_gar)


def find_degree(costs: LayerCosts, t_gar: float = 0.0, max_degree: int = MAX_DEGREE) -> int:
    """Algorithm 1: the degree that is fastest by the four formulas, each minimised by SLSQP where it holds.

    The constraints of a case are a disjunction, so its branches are solved apart, and a branch that holds in
    several stretches of whole r is solved in each. One that holds at no whole r is left out: it lies between
    two whole numbers, which its neighbours bring in. Of both whole numbers around the best r, the one with
    fewer `formula_seconds` is taken; of equals the lower.

    Example: experts of 8 s whatever r is, all else free -> degree 1; experts of 8 s in all and two
    all-to-alls of 4 s, nothing per chunk -> the largest degree.
    """
    branches = itertools.groupby(range(1, max_degree + 1), key=lambda r: _branch_of(costs, r, t_gar))
    solved = [(each[0], _solved(each, list(stretch), costs, t_gar, max_degree)) for each, stretch in branches]
    _, before = min(solved, key=lambda each: case_seconds(each[0], costs, each[1], t_gar))
    whole = {min(max(side(before), 1), max_degree) for side in (math.floor, math.ceil)}
    return min(sorted(whole), key=lambda r: formula_seconds(costs, r, t_gar))


# ---- SLSQP


def _branch_of(costs: LayerCosts, r: float, t_gar: float) -> Branch:
    """That of BRANCHES which holds at r."""
    found = margins(costs, r, t_gar)
    return next(each for each in BRANCHES if all((found[q] > 0) is true for q, true in each[1].items()))


def _solved(branch: Branch, stretch: list[int], costs: LayerCosts, t_gar: float, max_degree: int) -> float:
    """Where the case's formula is least on a branch, from the best of a stretch of whole r where it holds.

    Any other start may be cut off from the minimum: a branch may fail to hold between two whole numbers.

    Solved for ln r, in which each formula is convex and r of 1 and of 1000 are near, and in shares of the
    time in one chunk, so that no tolerance depends on the unit. A margin of 0 counts as inside: the formulas
    of neighbouring branches agree there. Where SLSQP ends outside, or higher, the start stands.
    """
    case, wants = branch
    unit = sum(costs.chunk(1)) + costs.chunk(1).a2a + t_gar
    start = float(min(stretch, key=lambda r: case_seconds(case, costs, r, t_gar)))
    if not unit or max_degree == 1:
        return start

    def seconds(log_r: float) -> float:
        return case_seconds(case, costs, math.exp(log_r), t_gar) / unit

    def inside(log_r: float) -> list[float]:
        found = margins(costs, math.exp(log_r), t_gar)
        return [(found[q] if true else -found[q]) / unit for q, true in wants.items()]

    log_r = _slsqp(seconds, inside, math.log(start), math.log(max_degree))
    better = min(inside(log_r)) >= -TOLERANCE and seconds(log_r) < seconds(math.log(start))
    return min(max(math.exp(log_r), 1.0), float(max_degree)) if better else start


def _slsqp(
    seconds: Callable[[float], float], inside: Callable[[float], list[float]], start: float, end: float
) -> float:
    """The minimum that scipy's SLSQP finds from ``start``, between 0 and ``end``; it may lie outside."""
    from scipy.optimize import minimize  # not needed to import pmoe

    def slope(x: Any) -> list[float]:
        return [(seconds(float(x[0]) + STEP) - seconds(float(x[0]) - STEP)) / (2 * STEP)]

    def slopes(x: Any) -> list[list[float]]:
        after, before = inside(float(x[0]) + STEP), inside(float(x[0]) - STEP)
        return [[(b - a) / (2 * STEP)] for a, b in zip(before, after, strict=True)]

    found: Any = minimize(
        lambda x: seconds(float(x[0])),
        [start],
        jac=slope,
        method="SLSQP",
        bounds=[(0.0, end)],
        constraints=[{"type": "ineq", "fun": lambda x: inside(float(x[0])), "jac": slopes}],
        options={"ftol": 1e-12, "maxiter": 50},
    )
    return min(max(float(found.x[0]), 0.0), end)
