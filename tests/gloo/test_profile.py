"""Profiles of two ranks: both hold the same one, and both measure or neither does.

No time is asserted: a busy machine may take any.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pmoe.comm.ranks import Ranks
from pmoe.measure import profile as profile_module
from pmoe.measure.bench import identity
from pmoe.measure.profile import load_or_measure, load_profile, profile_path, save_profile
from pmoe.planner.profile import Identity, Profile
from tests.pool import ranks
from tests.unit.test_profile import Counted, assert_sound

Report = tuple[Profile, int, list[str]]
"""Results of a rank: its profile, how often it measured, and its warnings."""


def kept_in(folder: str) -> Any:
    """Stores profiles in this folder within the block."""
    return mock.patch.dict(os.environ, PMOE_CACHE=folder)


def loaded_or_measured(rank: int, world: int, folders: list[str]) -> Report:
    counted, real = Counted(), profile_module.measure
    profile_module.measure = counted  # type: ignore[assignment]
    try:
        with kept_in(folders[rank]), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            profile = load_or_measure(Ranks(), "cpu")
    finally:
        profile_module.measure = real
    dist.barrier()
    return profile, counted.calls, [str(warning.message) for warning in caught]


def really_loaded_or_measured(rank: int, world: int, folder: str) -> Profile:
    with kept_in(folder):
        profile = load_or_measure(Ranks(), "cpu")
    total = [None] * world
    dist.all_gather_object(total, rank)  # no rank is out of step
    assert total == list(range(world))
    return profile


def saved(rank: int, world: int, folders: list[str], seconds: list[float]) -> str:
    """Lets each rank save a profile of this machine with these seconds."""
    made = Counted()(Ranks(), "cpu", torch.float32, quick=True)
    path = profile_path(made, folders[rank])
    save_profile(replace(made, seconds=seconds[rank]), path)
    return str(path)


def folders_of(tmp_path: Path) -> list[str]:
    folders = [tmp_path / "rank 0", tmp_path / "rank 1"]
    for folder in folders:
        folder.mkdir()
    return [str(folder) for folder in folders]


def test_both_ranks_measure_the_same_sound_profile_and_find_it_again(tmp_path: Path) -> None:
    first, second = ranks(2).run(really_loaded_or_measured, str(tmp_path))
    assert first == second
    assert_sound(first)
    assert (first.num_ranks, first.backend, first.device_type) == (2, "gloo", "cpu")
    [path] = tmp_path.iterdir()
    assert load_profile(path, expected=first.identity) == first
    again = ranks(2).run(loaded_or_measured, [str(tmp_path)] * 2)
    assert again == [(first, 0, [])] * 2, "measured though there was a file"


def test_only_rank_0_saves(tmp_path: Path) -> None:
    folders = folders_of(tmp_path)
    [(first, *counts), (second, *other)] = ranks(2).run(loaded_or_measured, folders)
    assert first == second
    assert counts == other == [1, []]
    assert [len(list(Path(folder).iterdir())) for folder in folders] == [1, 0]


def test_where_one_rank_has_no_file_all_measure(tmp_path: Path) -> None:
    folders = folders_of(tmp_path)
    Path(ranks(2).run(saved, folders, [7.0, 7.0])[1]).unlink()
    [(first, *counts), (second, *other)] = ranks(2).run(loaded_or_measured, folders)
    assert first == second
    assert first.seconds == 1.0, "measured, not loaded"
    assert counts == other == [1, []]


def test_where_one_rank_has_a_corrupt_file_all_measure_and_that_rank_tells(tmp_path: Path) -> None:
    folders = folders_of(tmp_path)
    path = ranks(2).run(saved, folders, [7.0, 7.0])[1]
    Path(path).write_text("{", encoding="utf-8")
    [(_, calls, told), (_, other_calls, other_told)] = ranks(2).run(loaded_or_measured, folders)
    assert calls == other_calls == 1
    assert told == []
    assert len(other_told) == 1
    assert other_told[0].startswith(f"{path}: no JSON")


def test_a_corrupt_file_that_all_ranks_read_is_told_of_once(tmp_path: Path) -> None:
    path = ranks(2).run(saved, [str(tmp_path)] * 2, [7.0, 7.0])[0]
    Path(path).write_text("{", encoding="utf-8")
    reports = ranks(2).run(loaded_or_measured, [str(tmp_path)] * 2)
    assert [(calls, len(told)) for _, calls, told in reports] == [(1, 1), (1, 0)]


def test_where_files_differ_all_ranks_take_the_profile_of_rank_0(tmp_path: Path) -> None:
    folders = folders_of(tmp_path)
    ranks(2).run(saved, folders, [7.0, 8.0])
    reports = ranks(2).run(loaded_or_measured, folders)
    assert [(profile.seconds, calls) for profile, calls, _ in reports] == [(7.0, 0), (7.0, 0)]


def identity_of_rank(rank: int, world: int) -> Identity:
    return identity(Ranks(), "cpu")


def test_the_identity_names_the_backend_that_carries_tensors_of_the_device() -> None:
    here = ranks(2).run(identity_of_rank)
    assert here[0] == here[1]
    assert (here[0].num_ranks, here[0].backend, here[0].dtype) == (2, "gloo", "float32")
