"""All ranks divide the fused kernels in the same way: as rank 0's table says, whatever others have stored."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from pmoe.comm.agreement import largest
from pmoe.comm.ranks import Ranks
from pmoe.measure.block_split import agreed, agreed_layer, forget, save_divisions
from pmoe.measure.fused_kernels import sweep
from pmoe.planner.block_split import Division, DivisionTable, FusedKernelSizes
from tests.gloo.test_settle import counted_reductions
from tests.pool import ranks
from tests.unit.test_division import CPU, SECONDS, SHAPE, SIZES, entry, table


def taken(rank: int, world: int, folder: str, given: list[FusedKernelSizes]) -> list[Any]:
    """Returns what each rank takes, its reductions, and its error. Each rank has a folder of its own."""
    forget()
    group, found, error = Ranks(), None, None
    own = mock.patch.dict(os.environ, PMOE_CACHE=str(Path(folder) / str(rank)))
    with own, warnings.catch_warnings(record=True) as caught, counted_reductions() as reductions:
        warnings.simplefilter("always")
        try:
            found = [agreed(group, given[rank], CPU) for _ in range(2)]
        except ValueError as failure:
            error = str(failure)
        seconds = agreed_layer(group, SIZES, CPU)
    dist.barrier()  # no rank is out of step
    return [found, seconds, len(reductions), len(caught), error]


def test_ranks_whose_files_differ_take_rank_0s_with_one_reduction_each(tmp_path: Path) -> None:
    save_divisions(DivisionTable({SHAPE: entry(SHAPE, 26, 1024)}, {SIZES: SECONDS}), tmp_path / "0")
    slower = replace(SECONDS, fused_step=9.0)
    save_divisions(DivisionTable({SHAPE: entry(SHAPE, 40, 256)}, {SIZES: slower}), tmp_path / "1")
    expected = [[Division(26, 1024)] * 2, SECONDS, 2, 0, None]
    assert ranks(2).run(taken, str(tmp_path), [SHAPE] * 2) == [expected] * 2


def test_where_rank_0_has_nothing_the_rule_holds_whatever_rank_1_has(tmp_path: Path) -> None:
    save_divisions(DivisionTable({SHAPE: entry(SHAPE, 40)}, {SIZES: SECONDS}), tmp_path / "1")
    expected: list[Any] = [[Division(11, 512)] * 2, None, 2, 0, None]
    assert ranks(2).run(taken, str(tmp_path), [SHAPE] * 2) == [expected] * 2


def test_where_rank_0s_file_is_corrupt_it_tells_and_all_go_on(tmp_path: Path) -> None:
    path = save_divisions(table(entry(SHAPE, 40)), tmp_path / "0")
    path.write_text("{")
    first, second = ranks(2).run(taken, str(tmp_path), [SHAPE] * 2)
    assert first == [[Division(11, 512)] * 2, None, 2, 1, None]
    assert second == [[Division(11, 512)] * 2, None, 2, 0, None]


def test_unlike_shapes_are_an_error_on_every_rank(tmp_path: Path) -> None:
    given = [SHAPE, replace(SHAPE, rows=8192)]
    for shape, (found, seconds, reductions, _, error) in zip(
        given, ranks(2).run(taken, str(tmp_path), given), strict=True
    ):
        assert (found, seconds, reductions) == (None, None, 2)
        assert error == f"sizes ({shape}) must be the same on every rank, but another rank has other sizes"


def filled(rank: int, world: int) -> tuple[Division, dict[Division, float]]:
    """Fills a table. Rank 0 is fast with few blocks, rank 1 with many; n_c=4 fails on rank 1."""

    def time(shape: FusedKernelSizes, division: Division) -> float:
        if rank == 1 and division.n_c == 4:
            raise RuntimeError("no memory")
        return float(division.n_c if rank == 0 else 9 - division.n_c)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agree = partial(largest, Ranks(), CPU, stage="a test")
        (found,) = sweep([replace(SHAPE, kernel="dispatch", num_blocks=18)], time, agree)
    dist.barrier()
    return found.division, dict(found.seconds)


def test_what_is_measured_is_the_slowest_ranks_and_the_same_on_all() -> None:
    seconds = {Division(1): 8.0, Division(2): 7.0, Division(6): 6.0, Division(8): 8.0}
    assert ranks(2).run(filled) == [(Division(6), seconds)] * 2
