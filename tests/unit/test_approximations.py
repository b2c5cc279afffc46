"""The documented errors of approximate GPU instructions are within the bounds of tests/gpu."""

from __future__ import annotations

import pytest

from tests.cuda.compiled import compile_and_run

pytestmark = pytest.mark.slow


def shares(times: int) -> dict[str, float]:
    """Returns, for each bound, the largest share of it that the errors take.

    times: factor by which the errors are larger than documented.
    """
    told = compile_and_run("approximations_test.cpp", flags=(f"-DPMOE_TIMES={times}",))
    return {name: float(share) for name, share in map(str.split, told.splitlines())}


def test_the_bounds_of_the_gpu_tests_hold_four_times_over() -> None:
    found = shares(1)
    assert set(found) == {"gelu", "gelu_derivative", "silu", "silu_derivative", "sums"}
    assert all(0.01 < share < 0.25 for share in found.values()), found


def test_larger_errors_would_be_seen() -> None:
    assert all(share > 1 for share in shares(64).values())
