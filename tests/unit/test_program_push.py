"""Exchanges over heaps for pass programs (``cuda/program/push.cuh``), on the CPU.

The kernel's source runs in the emulator, with all of its threads and with ranks that come late. Threads run
it under ThreadSanitizer, too. Each planted mistake must be found.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.compiled import (
    RACE_FOUND,
    SANITIZED,
    compile_program,
    run_program,
    run_sanitized,
)

pytestmark = pytest.mark.slow  # programs are compiled

SMALL = "-DPMOE_SMALL_PIECES"
RANKS = (2, 3, 4)


@pytest.fixture(scope="module")
def emulated() -> Path:
    return compile_program("push_test.cpp", SMALL)


@pytest.fixture(scope="module")
def threads() -> Path:
    return compile_program("push_test.cpp", SMALL, *SANITIZED)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_all_rows_arrive_though_ranks_are_late_and_reuse_their_memory(emulated: Path, num_ranks: int) -> None:
    """Each rank overwrites its rows as soon as its exchange has ended, and goes on to the next one."""
    run_program(emulated, "exchanges", str(num_ranks))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_threads_of_all_ranks_have_no_race(threads: Path, num_ranks: int) -> None:
    ran = run_sanitized(threads, "exchanges", str(num_ranks))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("mistake", ["grant", "arrival"])
def test_a_wait_that_is_left_out_is_noticed(emulated: Path, mistake: str) -> None:
    """Rows are wrong, or go where no memory is."""
    with pytest.raises(AssertionError, match="FAILED: "):
        run_program(emulated, "exchanges", "3", mistake)


@pytest.mark.parametrize("mistake", ["grant", "arrival", "signal"])
def test_a_wait_or_an_order_that_is_left_out_is_a_race(threads: Path, mistake: str) -> None:
    """With "signal", flags order nothing: they are raised without release."""
    ran = run_sanitized(threads, "exchanges", "3", mistake)
    assert ran.returncode == RACE_FOUND and "data race" in ran.stderr, ran.stdout + ran.stderr


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_rank_that_never_comes_is_named_by_all_others(emulated: Path, num_ranks: int) -> None:
    run_program(emulated, "absent", str(num_ranks))
