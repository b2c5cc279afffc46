"""dispatch="auto" on two machines of two ranks: the profile says which all-to-all, and all ranks take it."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.measure.bench import identity
from pmoe.measure.profile import profile_path, save_profile
from pmoe.planner.costs import Fit, LineCost
from pmoe.warn import log
from tests.gloo.kit import build, one_step
from tests.kit import assert_same
from tests.pool import ranks
from tests.unit.test_profile import MADE, OPERATIONS

Found = tuple[str, str, list[str], list[str], dict[str, torch.Tensor]]
"""The results of a rank: both exchanges, log messages, warnings, and the results of a step."""


def built(rank: int, world: int, folders: list[str], local: int, options: dict[str, Any]) -> Found:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    here = {"PMOE_CACHE": folders[rank % len(folders)], "LOCAL_WORLD_SIZE": str(local)}
    try:
        with mock.patch.dict(os.environ, here), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer = build(dispatch="auto", **options)
            results = one_step(layer, rank, world)
    finally:
        log.removeHandler(handler)
    warned = [str(each.message) for each in caught if "auto" in str(each.message)]
    auto = [line for line in said if "auto" in line]
    return type(layer.dispatch).__name__, type(layer.combine).__name__, auto, warned, results


def stored(rank: int, world: int, folder: str, alpha_outside: float) -> str:
    """Stores a profile of these ranks, with this alpha of a message to another machine. Returns the path."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        who = identity(Ranks(), "cpu", torch.float64)
    lines = {"all_to_all": LineCost(alpha_outside, 1e-9), "all_gather": LineCost(1e-6, 1e-10)}
    fits = {name: Fit(line=line, r_squared=1.0, num_sizes=3) for name, line in lines.items()}
    path = profile_path(who, folder)
    if rank == 0:
        save_profile(replace(MADE, **vars(who), operations=replace(OPERATIONS, **fits)), path)
    return str(path)


def run(folders: list[Path], local: int = 2, **options: Any) -> list[Found]:
    found: list[Found] = ranks(4).run(built, [str(folder) for folder in folders], local, options)
    dispatch, combine, *_ = found[0]
    assert all((each[0], each[1]) == (dispatch, combine) for each in found)
    assert all(each[2] == found[0][2] and len(each[2]) == 1 for each in found)  # the same is said
    return found


@pytest.mark.parametrize(
    ("alpha", "name"),
    [(1e-1, "HierarchicalAllToAll2D"), (0.0, "FlatAllToAll")],
    ids=["messages late", "bytes alone"],
)
def test_the_fastest_by_the_profile_is_taken_by_all_ranks(alpha: float, name: str, tmp_path: Path) -> None:
    ranks(4).run(stored, str(tmp_path), alpha)
    elsewhere = tmp_path / "no profile"
    found = run([tmp_path, elsewhere, elsewhere, elsewhere])  # rank 0's counts
    assert found[0][:2] == (name, name)
    assert "an all-to-all takes flat " in found[0][2][0] and MADE.when in found[0][2][0]
    plain = ranks(4).run(built, [str(elsewhere)], 2, {})
    for mine, flat in zip(found, plain, strict=True):
        assert_same(mine[4], flat[4])


@pytest.mark.parametrize(
    ("local", "options", "why"),
    [
        (2, {}, "no stored profile of these ranks has both links: `pmoe profile` measures them"),
        (4, {}, "no machine has several ranks beside other machines"),
        (1, {}, "no machine has several ranks beside other machines"),
        (2, {"nodes": [0, 0, 0, 1]}, "machines have different numbers of ranks"),
        (2, {"memory_budget": "1GiB"}, "memory_budget ('1GiB') needs it"),
    ],
)
def test_without_a_choice_it_is_the_flat_one_and_the_log_says_why(
    local: int, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    found = run([tmp_path], local, **options)
    assert found[0][:2] == ("FlatAllToAll", "FlatAllToAll")
    assert found[0][2] == [f'dispatch="auto" takes "flat": {why}'] and not any(each[3] for each in found)


def test_a_damaged_profile_is_warned_of_by_rank_0_and_stops_nobody(tmp_path: Path) -> None:
    path = Path(ranks(4).run(stored, str(tmp_path), 1e-1)[0])
    path.write_text(path.read_text()[:100])
    found = run([tmp_path])
    assert found[0][0] == "FlatAllToAll"
    assert len(found[0][3]) == 1 and path.name in found[0][3][0]
    assert not any(each[3] for each in found[1:])


def test_nodes_that_cannot_be_are_refused_on_every_rank(tmp_path: Path) -> None:
    assert all("nodes (0) must be at least 1" in told for told in ranks(4).run(refused, str(tmp_path)))


def refused(rank: int, world: int, folder: str) -> str:
    with pytest.raises(ValueError) as caught:
        pmoe.MoELayer(8, 16, 4, dispatch="auto", nodes=0)
    return str(caught.value)
