"""The pipeline degree of a layer with sharded experts, from its stages' costs (FSMoE, Section 4, Algorithm
1).

The schedule: on the inter-node lane all dispatches, then other layers' gradients (t_gar), then all combines;
on the intra-node lane all all-gathers before all reduce-scatters; experts on a lane of their own. The longest
of four formulas, each of what may take longest, holds; the degree of which it is least is taken.

Where all-gather and reduce-scatter take the same time, which the paper assumes, the longest formula is the
length of that schedule. Where they do not, it may be too short: `pmoe.planner.degree_search` goes
on from here on the schedule itself.

Letters: r chunks; a2a, ag, rs, exp: all-to-all (each of two), all-gather, reduce-scatter, experts; t_gar
seconds.
"""

from __future__ import annotations

from pmoe.planner.costs import LayerCosts

MAX_DEGREE = 16
"""The largest r that is looked at where the caller names none."""


def case_seconds(costs: LayerCosts, r: float, t_gar: float = 0.0) -> tuple[float, float, float, float]:
    """f1 to f4 of Section 4.2, by what takes longest: 1 inter-node lane and gradients, 2 experts, 3
    all-to-alls, 4 intra-node lane."""
    a2a, ag, rs, exp = costs.chunk(r)
    return (
        2 * r * a2a + t_gar,
        2 * a2a + ag + rs + r * exp,
        2 * r * a2a + ag + rs,
        2 * a2a + r * (ag + rs),
    )


def formula_seconds(costs: LayerCosts, r: float, t_gar: float = 0.0) -> float:
    """The longest of the four formulas for r chunks.

    The paper's constraints Q1 to Q7 compare the formulas by pairs, with ag for (ag + rs) / 2: where the two
    are equal, the case that they lead to is the longest formula.
    """
    return max(case_seconds(costs, r, t_gar))


def find_degree(costs: LayerCosts, t_gar: float = 0.0, max_degree: int = MAX_DEGREE) -> int:
    """Algorithm 1: the degree that is fastest by the four formulas; of equals the lowest.

    The paper minimises each formula where it holds by SLSQP, and rounds. A degree is whole and at most
    ``max_degree``: here each is tried, which finds the same one.

    Example: experts of 8 s whatever r is, all else free -> degree 1; experts of 8 s in all and two
    all-to-alls of 4 s, nothing per chunk -> the largest degree.
    """
    return min(range(1, max_degree + 1), key=lambda r: formula_seconds(costs, r, t_gar))
