"""Lines by least squares, checked by hand."""

from __future__ import annotations

import pytest

from pmoe.planner.costs import FREE, LineCost, fit, least_squares


def test_points_on_a_line_give_that_line_and_an_r_squared_of_one() -> None:
    line, r_squared = least_squares([100, 200, 400], [1.2e-3, 1.4e-3, 1.8e-3])
    assert (line.alpha_seconds, line.beta_seconds) == pytest.approx((1e-3, 2e-6))
    assert r_squared == pytest.approx(1.0)


def test_noise_is_spread_over_all_points() -> None:
    """Means 1 and 8/3; sxy = 3, sxx = 2; errors -1/6, 1/3, -1/6: squares of 1/6, and 14/3 about the mean."""
    line, r_squared = least_squares([0, 1, 2], [1, 3, 4])
    assert (line.alpha_seconds, line.beta_seconds) == pytest.approx((7 / 6, 3 / 2))
    assert r_squared == pytest.approx(27 / 28)


def test_a_size_may_come_several_times_and_each_time_counts() -> None:
    line, _ = least_squares([1, 1, 3, 3], [1, 3, 4, 6])
    assert (line.alpha_seconds, line.beta_seconds) == pytest.approx((0.5, 1.5))


def test_a_line_that_would_begin_below_zero_goes_through_the_origin() -> None:
    """Unrestrained alpha = -1, beta = 2. Through the origin beta = (1 + 2 * 3) / (1 + 4), errors 0.4, 0.2."""
    line, r_squared = least_squares([1, 2], [1, 3])
    assert (line.alpha_seconds, line.beta_seconds) == pytest.approx((0.0, 1.4))
    assert r_squared == pytest.approx(1 - (0.16 + 0.04) / 2)


def test_a_line_that_would_fall_is_flat_and_tells_nothing() -> None:
    assert least_squares([1, 2, 3], [3, 2, 1]) == (LineCost(2.0, 0.0), 0.0)


def test_seconds_that_do_not_vary_are_told_in_full() -> None:
    line, r_squared = least_squares([1, 2, 3], [0.1] * 3)
    assert (line.alpha_seconds, line.beta_seconds) == pytest.approx((0.1, 0.0))
    assert r_squared == 1.0
    assert least_squares([1, 2], [0.0, 0.0]) == (LineCost(0.0, 0.0), 1.0)


def test_r_squared_is_never_below_zero() -> None:
    """Through the origin a line may be worse than the mean."""
    _, r_squared = least_squares([10, 11], [0, 100])
    assert 0 <= r_squared < 1


@pytest.mark.parametrize(
    ("sizes", "seconds", "told"),
    [
        ([], [], r"sizes \(\[\]\) must have two distinct values"),
        ([5], [1], r"sizes \(\[5\]\) must have two distinct values"),
        ([5, 5, 5], [1, 2, 3], r"sizes \(\[5\]\) must have two distinct values"),
        ([1, 2, 3], [1, 2], r"sizes \(3 of them\) must be as many as seconds \(2\)"),
        ([1, 2], [1, float("nan")], r"seconds \(nan among them\) must be finite and at least 0"),
        ([1, 2], [1, -1], r"seconds \(-1 among them\) must be finite and at least 0"),
        ([1, float("inf")], [1, 2], r"sizes \(inf among them\) must be finite and at least 0"),
    ],
)
def test_what_has_no_line_is_refused(sizes: list[float], seconds: list[float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        least_squares(sizes, seconds)


def test_a_fit_counts_its_sizes_and_tells_seconds() -> None:
    found = fit([(1, 1), (1, 3), (3, 4), (3, 6)])
    assert found.num_sizes == 2
    assert found(5) == pytest.approx(8.0)
    assert FREE(1e9) == 0.0
