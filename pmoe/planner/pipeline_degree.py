"""The pipeline degree of a layer with sharded experts, from its stages' costs (FSMoE, Section 4, Algorithm
1).

The schedule: on the inter-node lane all dispatches, then other layers' gradients (t_gar), then all combines;
on the intra-node lane all all-gathers before all reduce-scatters; experts on a lane of their own. What takes
longest decides which of four formulas holds, and the degree of which it is least is taken.

Where all-gather and reduce-scatter take the same time, which the paper assumes, the formula that holds is the
length of that schedule. Where they do not, the formulas may be too short: `pmoe.planner.degree_search` goes
on from here on the schedule itself.

Letters: r chunks; a2a, ag, rs, exp: all-to-all (each of two), all-gather, reduce-scatter, experts; t_gar
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from pmoe.planner.costs import LayerCosts

MAX_DEGREE = 16
"""The largest r that is looked at where the caller names none."""


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


BRANCHES: tuple[tuple[int, Mapping[int, bool]], ...] = (
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
    found = margins(costs, r, t_gar)
    return next(case for case, wants in BRANCHES if all((found[q] > 0) is true for q, true in wants.items()))


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
    """Algorithm 1: the degree that is fastest by the four formulas; of equals the lowest.

    The paper minimises each formula where it holds by SLSQP, and rounds. A degree is whole and at most
    ``max_degree``: here each is tried, which finds the same one.

    Example: experts of 8 s whatever r is, all else free -> degree 1; experts of 8 s in all and two
    all-to-alls of 4 s, nothing per chunk -> the largest degree.
    """
    return min(range(1, max_degree + 1), key=lambda r: formula_seconds(costs, r, t_gar))
