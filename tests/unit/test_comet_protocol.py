"""COMET's heap, order and signals on the CPU, without a kernel, from the headers that the kernels use.

They are compared with plain loops, and run by threads under ThreadSanitizer, which must find each planted
mistake.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cuda.compiled import (
    RACE_FOUND,
    SANITIZED,
    THREADS,
    compile_and_run,
    compile_program,
    run_sanitized,
)

pytestmark = pytest.mark.slow  # programs are compiled

RANKS = (2, 3, 4)

# A mistake, and who then meets with whom: functions that ThreadSanitizer's report must name.
MISTAKES = {
    "no_grant_wait": "send_rows",
    "no_arrival_wait": "compute_first",
    "no_done_wait": "send_sums|send_dots|compute_second",
    "no_return_wait": "sum_tokens",
    "reused_inbox": "send_rows",
    "reused_flags": "",  # anywhere
    "relaxed_signal": "",
}


@pytest.fixture(scope="module")
def program() -> Path:
    return compile_program("comet_protocol_test.cpp", *SANITIZED)


def expect_right(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"


def expect_a_race(ran: subprocess.CompletedProcess[str], between: str) -> None:
    told = f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
    assert ran.returncode == RACE_FOUND and "data race" in ran.stderr, f"not caught: {told}"
    if "comet_threads.h:" in ran.stderr:  # some machines lack what turns addresses into names
        assert any(name in ran.stderr for name in between.split("|")), f"caught elsewhere: {told}"


def test_rows_pieces_and_tiles_come_in_the_order_of_a_plain_sort() -> None:
    compile_and_run("comet_order_test.cpp")


def test_no_region_of_a_heap_is_written_by_two_ranks() -> None:
    compile_and_run("comet_layout_test.cpp", flags=tuple(THREADS))


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_no_region_of_a_heap_is_written_by_two_ranks_for_every_small_table() -> None:
    compile_and_run("comet_layout_test.cpp", "thorough", flags=tuple(THREADS), timeout=350)


@pytest.mark.parametrize("ranks", RANKS)
def test_rounds_are_right_and_free_of_races(program: Path, ranks: int) -> None:
    expect_right(run_sanitized(program, "rounds", str(ranks)))


def test_threads_fill_in_a_board_without_races(program: Path) -> None:
    expect_right(run_sanitized(program, "fill"))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(program: Path, mistake: str, ranks: int) -> None:
    expect_a_race(run_sanitized(program, "rounds", str(ranks), mistake), MISTAKES[mistake])


@pytest.mark.parametrize("ranks", RANKS)
def test_waits_for_a_rank_that_does_not_come_end_and_say_what_for(program: Path, ranks: int) -> None:
    # What a rank computes after it has failed is worthless, and may be read while it is written.
    expect_right(run_sanitized(program, "absent", str(ranks), reports=False))
