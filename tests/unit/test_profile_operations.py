"""FSMoE's lines: all sizes of the paper, one real measurement, and how they are added to a profile's file.

No time is asserted: a busy machine may take any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pmoe.comm.ranks import Ranks
from pmoe.measure import operations
from pmoe.measure import profile as profile_module
from pmoe.measure.bench import Bench
from pmoe.measure.line_fits import LaneWork
from pmoe.measure.operations import measure_operations
from pmoe.measure.profile import load_or_measure, load_profile, profile_path, save_profile
from pmoe.planner.costs import FREE, Fit
from pmoe.planner.profile import Operations
from tests.unit.test_profile import OPERATIONS, Counted

LINES = ("gemm", "all_to_all", "all_gather", "reduce_scatter", "all_reduce")


def assert_lines(operations: Operations, num_across: int, num_inside: int) -> None:
    """Checks the lines for these numbers of groups and of ranks in a group.

    A rank that is alone in its group sends nothing, so that its lines are 0.
    """
    assert (operations.num_across, operations.num_inside) == (num_across, num_inside)
    for name in LINES:
        found: Fit = getattr(operations, name)
        group = {"all_gather": num_inside, "reduce_scatter": num_inside, "gemm": 2}.get(name, num_across)
        if group == 1:
            assert found == FREE, name
            continue
        assert found.line.alpha_seconds >= 0 and found.line.beta_seconds >= 0, name
        assert found(2**40) > 0, name
        assert 0 <= found.r_squared <= 1, name
        assert 5 <= found.num_sizes <= 26, name
    assert operations.seconds > 0


# ---- measuring


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_has_a_line_of_products_and_nothing_that_travels(dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    with torch.inference_mode():
        found = measure_operations(Ranks(), "cpu", dtype, quick=True)
    assert_lines(found, 1, 1)
    assert found.gemm.num_sizes == 5
    assert torch.equal(torch.get_rng_state(), before), "measuring drew from the caller's random numbers"


def test_all_sizes_of_the_paper_are_those_of_section_6_2(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[int]] = {}

    def noted(bench: Bench, work: LaneWork, sizes: Iterable[int], repeats: int) -> Fit:
        found = asked.setdefault(work.lane, [units * work.size for units in sizes])
        return replace(FREE, num_sizes=len(found))

    monkeypatch.setattr(operations, "measured_line", noted)
    found = measure_operations(Ranks(), "cpu", full=True)
    first, second, *products = (each // 512 for each in asked["compute"])  # elements of what the weight meets
    assert products == [2**19 * i for i in range(1, 13)] and (first, second) == (2**15, 2**17)
    assert found.gemm.num_sizes == 14


# ---- the file


class CountedOperations:
    """Stands in for measure_operations, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.most_bytes = 0.0

    def __call__(
        self,
        ranks: Ranks,
        device: str,
        dtype: torch.dtype,
        *,
        across: Ranks | None,
        inside: Ranks | None,
        most_bytes: float,
    ) -> Operations:
        self.calls += 1
        self.most_bytes = most_bytes
        sizes = [(part or ranks).size for part in (across, inside)]
        return replace(OPERATIONS, num_across=sizes[0], num_inside=sizes[1], seconds=float(self.calls))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Counted, CountedOperations]:
    """Replaces both measurements, and lets profiles be stored in an empty folder."""
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    stand_ins = Counted(), CountedOperations()
    monkeypatch.setattr(profile_module, "measure", stand_ins[0])
    monkeypatch.setattr(profile_module, "measure_operations", stand_ins[1])
    return stand_ins


def test_operations_are_measured_when_first_asked_for_and_kept_in_the_same_file(
    tmp_path: Path, counted: tuple[Counted, CountedOperations]
) -> None:
    base, operations = counted
    assert load_or_measure(Ranks(), "cpu").operations is None
    found = load_or_measure(Ranks(), "cpu", operations=True)
    assert (base.calls, operations.calls) == (1, 1), "only what is missing is measured"
    assert found.seconds == 1.0 and found.operations is not None
    assert load_or_measure(Ranks(), "cpu", operations=True) == found
    assert load_or_measure(Ranks(), "cpu") == found, "not asked for, they stay"
    assert (base.calls, operations.calls) == (1, 1)
    assert len(list(tmp_path.iterdir())) == 1


def test_operations_that_were_measured_in_little_memory_are_in_no_file_and_measured_again_with_more(
    tmp_path: Path, counted: tuple[Counted, CountedOperations], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, operations = counted
    monkeypatch.setattr(profile_module, "PROFILES", {})
    monkeypatch.setattr(profile_module, "_limits", {})
    load_or_measure(Ranks(), "cpu", operations=True, most_bytes=1e6)
    assert operations.most_bytes == 1e6
    load_or_measure(Ranks(), "cpu", operations=True, most_bytes=2e6)
    assert (base.calls, operations.calls) == (1, 1), "what this process measured serves up to four times 1e6"
    assert not list(tmp_path.iterdir())
    load_or_measure(Ranks(), "cpu", operations=True, most_bytes=5e6)
    assert (base.calls, operations.calls, operations.most_bytes) == (2, 2, 5e6)
    load_or_measure(Ranks(), "cpu", operations=True, most_bytes=1e12)
    assert (base.calls, operations.calls, operations.most_bytes) == (3, 3, float("inf"))
    assert len(list(tmp_path.iterdir())) == 1


def test_lines_that_are_measured_in_little_memory_have_all_sizes_and_take_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 400_000
    taken: list[int] = []
    fit = operations.measured_line

    def noted(bench: Bench, work: LaneWork, sizes: Iterable[int], repeats: int) -> Fit:
        sizes = list(sizes)
        assert len(set(sizes)) == 5
        taken.append(max(sizes) * work.unit_bytes)
        return fit(bench, work, sizes, repeats)

    monkeypatch.setattr(operations, "measured_line", noted)
    found = measure_operations(Ranks(), "cpu", quick=True, most_bytes=limit)
    assert_lines(found, 1, 1)
    assert taken and max(taken) <= limit


def test_operations_of_other_nodes_are_measured_again(
    tmp_path: Path, counted: tuple[Counted, CountedOperations]
) -> None:
    base, operations = counted
    profile = load_or_measure(Ranks(), "cpu")
    save_profile(
        replace(profile, operations=OPERATIONS), profile_path(profile, tmp_path)
    )  # of 2 ranks a node
    found = load_or_measure(Ranks(), "cpu", operations=True).operations
    assert found is not None and (found.num_across, found.num_inside) == (1, 1)
    assert (base.calls, operations.calls) == (1, 1)
    assert load_profile(profile_path(profile, tmp_path)).operations == found
