"""Rounds of timing: the order of the runs, which rounds count, and what the ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from pmoe.measure.timing import clock_of, in_rounds, median_seconds


class Journal:
    """Records runs by name, and lets each report given seconds."""

    def __init__(self, **seconds: list[float]) -> None:
        self.told: list[str] = []
        self.runs = [self._run(name, script) for name, script in seconds.items()]

    def begin(self) -> None:
        self.told.append("|")

    def _run(self, name: str, script: list[float]) -> Callable[[], tuple[float, float]]:
        def run() -> tuple[float, float]:
            self.told.append(name)
            taken = script.pop(0)
            return taken, 10 * taken

        return run


def test_runs_take_turns_after_a_warm_up_that_does_not_count() -> None:
    journal = Journal(a=[90, 1, 2], b=[80, 3, 4])
    found = in_rounds(journal.runs, 2, begin=journal.begin)
    assert "".join(journal.told) == "|a|b" * 3
    assert found == [[(1, 10), (2, 20)], [(3, 30), (4, 40)]]


def test_each_round_may_begin_with_another_run() -> None:
    journal = Journal(a=[1.0] * 4, b=[2.0] * 4, c=[3.0] * 4)
    found = in_rounds(journal.runs, 3, warm_up=1, rotate=True)
    assert "".join(journal.told) == "cab" + "abc" + "bca" + "cab"
    assert found == [[(n, 10 * n)] * 3 for n in (1.0, 2.0, 3.0)]


def test_the_median_of_each_part_decides() -> None:
    """The first run is slow to warm up, the second has one slow round, the third one fast round."""
    journal = Journal(a=[90, 3, 3, 3], b=[2, 2, 80, 2], c=[5, 1, 5, 5])
    assert median_seconds(journal.runs, 3) == [[3, 30], [2, 20], [5, 50]]
    assert "".join(journal.told) == "abc" * 4


def test_ranks_agree_on_all_medians_by_one_reduction() -> None:
    asked: list[list[float]] = []

    def slower_elsewhere(values: Sequence[float]) -> list[float]:
        asked.append(list(values))
        return [max(value, 4.0) for value in values]

    journal = Journal(a=[1, 1, 1], b=[7, 5, 5])
    assert median_seconds(journal.runs, 2, agree=slower_elsewhere) == [[4, 10], [5, 50]]
    assert asked == [[1, 10, 5, 50]]


def test_parts_are_read_when_all_rounds_are_over() -> None:
    journal = Journal(a=[1, 2, 3])
    read: list[tuple[int, float]] = []

    def seconds(part: float) -> float:
        read.append((len(journal.told), part))
        return part / 2

    assert median_seconds(journal.runs, 2, seconds=seconds) == [[1.25, 12.5]]
    assert {count for count, _ in read} == {3}


def test_rounds_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rounds \(0\) must be at least 1 and warm_up \(1\) at least 0"):
        in_rounds([], 0)
    with pytest.raises(ValueError, match=r"warm_up \(-1\) at least 0"):
        in_rounds([], 1, warm_up=-1)


def test_a_clock_of_the_cpu_goes_on() -> None:
    clock = clock_of(torch.device("cpu"))
    assert clock() <= clock()
