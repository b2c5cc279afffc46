"""Files from outside: nothing in them is run, and what is wrong with them is named or does no harm."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pmoe
from pmoe.integrations.report.page import run_page
from pmoe.integrations.run_folder import read_run
from pmoe.measure.division import read_divisions
from pmoe.measure.profile import load_profile, save_profile
from pmoe.runners.searched import load_degrees
from tests.unit.test_checkpoint import assert_same, contents, make, train
from tests.unit.test_granularity import KEY
from tests.unit.test_profile import MADE

STORED = Path(__file__).resolve().parents[1] / "stored"


class Bomb:
    """A pickle of it is a program."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def damaged(whole: bytes, times: int) -> Iterator[bytes]:
    """Copies with one bit flipped, then ones that are cut short."""
    draw = random.Random(len(whole))
    for _ in range(times):
        place, changed = draw.randrange(len(whole)), bytearray(whole)
        changed[place] ^= 1 << draw.randrange(8)
        yield bytes(changed)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        yield whole[:length]


def saved(folder: Path) -> Path:
    model, optimizer = make()
    train(model, optimizer, 2)
    return pmoe.save_checkpoint(folder, model, optimizer, step=2, extra={"epoch": 1})


def load(folder: Path) -> str:
    """What is told of a checkpoint that does not load, for a model that stays as it was; "" where it loads as
    it was saved."""
    model, optimizer = make()
    before = contents(model, optimizer)
    try:
        loaded = pmoe.load_checkpoint(folder, model, optimizer)
    except pmoe.training.checkpoint.CheckpointError as error:
        assert_same(contents(model, optimizer), before)
        return str(error)
    other, theirs = make()
    train(other, theirs, 2)
    assert_same(contents(model, optimizer), contents(other, theirs))
    assert (loaded.step, loaded.extra) == (2, {"epoch": 1})
    return ""


def test_a_checkpoint_with_a_bit_flipped_or_cut_short_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert load(tmp_path) == ""
    files = sorted(each for each in path.iterdir())
    assert {each.name for each in files} == {
        *(".metadata", "__0_0.distcp", "plain.pt", "random_0.pt", "sums_0.json")
    }
    for file in files:
        whole = file.read_bytes()
        for bad in damaged(whole, 12):
            file.write_bytes(bad)
            told = load(tmp_path)
            assert told and (file.name in told or file.name == "sums_0.json"), told
        file.write_bytes(whole)
    pointer = tmp_path / "latest.json"
    whole = pointer.read_bytes()
    for bad in damaged(whole, 40):
        pointer.write_bytes(bad)
        load(tmp_path)  # refused, or right
    pointer.write_bytes(whole)
    assert load(tmp_path) == ""


@pytest.mark.parametrize("name", ["plain.pt", "random_0.pt", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("way", ["pickle", "torch"])
def test_a_program_in_a_files_place_is_not_run(name: str, way: str, tmp_path: Path) -> None:
    """Nor where its sum is right."""
    path, ran = saved(tmp_path), tmp_path / "it ran"
    bomb = Bomb(ran)
    with open(path / name, "wb") as file:
        torch.save(bomb, file) if way == "torch" else pickle.dump(bomb, file)
    assert name in load(tmp_path)
    (path / "sums_0.json").unlink()  # as in checkpoints of before there were sums
    with pytest.raises(pmoe.training.checkpoint.CheckpointError):
        pmoe.load_checkpoint(tmp_path, *make())
    assert not ran.exists()


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "a/../.."])
def test_a_pointer_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "latest.json").write_text(f'{{"folder": "{name}", "step": 2}}')
    assert "latest.json is damaged: it must name a folder beside it" in load(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "dangling link", "link"])
@pytest.mark.parametrize(
    "name", ["latest.json", "step_00000002/plain.pt", "step_00000002/.metadata", "step_00000002/__0_0.distcp"]
)
def test_what_is_no_file_is_named_and_a_link_is_followed(kind: str, name: str, tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / name
    shutil.move(file, tmp_path / "moved")
    if kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(tmp_path / ("moved" if kind == "link" else "nothing"))
    told = load(tmp_path)
    assert told == "" if kind == "link" else Path(name).name in told


def made_profile(folder: Path) -> Path:
    path = folder / "profile.json"
    save_profile(MADE, path)
    return path


READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "profile": (made_profile, load_profile),
    "divisions": (lambda folder: copied("division", folder), read_divisions),
    "degrees": (lambda folder: copied("degrees", folder), lambda path: load_degrees(path, KEY)),
}


def copied(start: str, folder: Path) -> Path:
    (found,) = STORED.glob(f"{start}*.json")
    return Path(shutil.copy(found, folder))


@pytest.mark.parametrize("kind", READERS)
def test_a_stored_measurement_that_is_damaged_is_named_or_still_a_measurement(
    kind: str, tmp_path: Path
) -> None:
    make_file, read = READERS[kind]
    path = make_file(tmp_path)
    whole = path.read_bytes()
    for bad in damaged(whole, 200):
        path.write_bytes(bad)
        try:
            read(path)
        except ValueError as error:
            assert path.name in str(error)
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "it ran")))
    with pytest.raises(ValueError, match=path.name):
        read(path)
    assert not (tmp_path / "it ran").exists()
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match=path.name):
        read(path)


def test_a_run_folder_that_is_damaged_is_named_or_still_makes_a_page(tmp_path: Path) -> None:
    from pmoe.integrations.logging import StatsWriter

    model = torch.nn.Sequential(pmoe.MoELayer(4, 6, 2))
    with StatsWriter(tmp_path / "run", model, every=1, tensorboard=False) as writer:
        for step in (1, 2):
            model(torch.randn(5, 4)).sum().backward()
            writer.step(step, loss=torch.tensor(float(step)))
    for name in ("run.json", "scalars.csv", "layers.csv"):
        file = tmp_path / "run" / name
        whole = file.read_bytes()
        for bad in damaged(whole, 6):
            file.write_bytes(bad)
            try:
                run_page(read_run(tmp_path / "run"))
            except ValueError as error:
                assert name in str(error)
        file.write_bytes(whole)
