"""Least-squares fits of lines, against numbers by hand."""

from __future__ import annotations

import pytest

from pmoe.planner.costs import FREE, Fit, LineCost, fit


def line_of(found: Fit) -> tuple[float, float]:
    return found.line.alpha_seconds, found.line.beta_seconds


def test_points_on_a_line_give_that_line_and_an_r_squared_of_one() -> None:
    found = fit([(100, 1.2e-3), (200, 1.4e-3), (400, 1.8e-3)])
    assert line_of(found) == pytest.approx((1e-3, 2e-6), rel=1e-12)
    assert found.r_squared == pytest.approx(1.0)


def test_noise_is_spread_over_all_points() -> None:
    """Means 1 and 8/3; sxy = 3, sxx = 2. Errors -1/6, 1/3, -1/6: squares of 1/6, and 14/3 about the mean."""
    found = fit([(0, 1), (1, 3), (2, 4)])
    assert line_of(found) == pytest.approx((7 / 6, 3 / 2), rel=1e-12)
    assert found.r_squared == pytest.approx(27 / 28, rel=1e-12)


def test_a_size_may_come_several_times_and_its_median_counts() -> None:
    assert line_of(fit([(1, 1), (1, 3), (3, 4), (3, 6)])) == pytest.approx((0.5, 1.5), rel=1e-12)
    cost = fit([(0, 1e-5), (1e6, 1.1e-4), (1e6, 5.0), (1e6, 1e-4)])  # 5 s: an interruption
    assert line_of(cost) == pytest.approx((1e-5, 1e-10), rel=1e-12)
    assert cost(5e5) == pytest.approx(6e-5)


def test_a_line_that_would_begin_below_zero_goes_through_the_origin() -> None:
    """Without the limit alpha = -1, beta = 2. Through the origin beta = (1 + 2 * 3) / (1 + 4), errors 0.4,
    0.2.
    """
    found = fit([(1, 1), (2, 3)])
    assert line_of(found) == pytest.approx((0.0, 1.4), rel=1e-12)
    assert found.r_squared == pytest.approx(1 - (0.16 + 0.04) / 2, rel=1e-12)


def test_a_line_that_would_fall_is_flat_and_tells_nothing() -> None:
    found = fit([(1, 3), (2, 2), (3, 1)])
    assert line_of(found) == pytest.approx((2.0, 0.0), rel=1e-12)
    assert found.r_squared == 0.0


def test_seconds_that_do_not_vary_are_told_in_full() -> None:
    found = fit([(1, 0.1), (2, 0.1), (3, 0.1)])
    assert line_of(found) == pytest.approx((0.1, 0.0), rel=1e-12)
    assert found.r_squared == 1.0
    assert fit([(1, 0.0), (2, 0.0)]) == Fit(line=LineCost(0.0, 0.0), r_squared=1.0, num_sizes=2)


def test_r_squared_is_never_below_zero() -> None:
    """A line through the origin may fit worse than the mean."""
    assert 0 <= fit([(10, 0), (11, 100)]).r_squared < 1


@pytest.mark.parametrize("unit", [1.0, 1e-9, 2.0**30])
def test_neither_the_unit_of_size_nor_that_of_time_matters(unit: float) -> None:
    plain = fit([(1, 4), (2, 5), (4, 9), (8, 11)])
    sizes = fit([(1 * unit, 4), (2 * unit, 5), (4 * unit, 9), (8 * unit, 11)])
    times = fit([(1, 4 * unit), (2, 5 * unit), (4, 9 * unit), (8, 11 * unit)])
    alpha, beta = line_of(plain)
    assert line_of(sizes) == pytest.approx((alpha, beta / unit), rel=1e-12)
    assert line_of(times) == pytest.approx((alpha * unit, beta * unit), rel=1e-12)


def test_a_cost_is_never_negative() -> None:
    assert LineCost(-1.0, 0.2)(1) == 0.0


def test_a_fit_counts_its_sizes_and_tells_seconds() -> None:
    found = fit([(1, 1), (1, 3), (3, 4), (3, 6)])
    assert found.num_sizes == 2
    assert found(5) == pytest.approx(8.0)
    assert FREE(1e9) == 0.0


def test_relative_errors_let_small_sizes_tell_what_a_task_costs_whatever_its_size() -> None:
    """One per cent of a large size's seconds is more than alpha, so absolute errors would hide alpha."""
    alpha, beta = 40e-6, 1e-9
    noise = {1e5: 1.0, 1e6: 1.0, 1e7: 1.04}
    samples = [(size, (alpha + beta * size) * of) for size, of in noise.items()]
    assert fit(samples).line.alpha_seconds < 0.5 * alpha
    near = fit(samples, relative=True).line
    assert near.alpha_seconds == pytest.approx(alpha, rel=0.1)
    assert near.beta_seconds == pytest.approx(beta, rel=0.1)
    exact = [(size, alpha + beta * size) for size in noise]
    assert fit(exact, relative=True).line.alpha_seconds == pytest.approx(alpha, rel=1e-9)
    assert fit([(1.0, 0.0), (2.0, 1.0)], relative=True).line.alpha_seconds == 0  # seconds may be none
