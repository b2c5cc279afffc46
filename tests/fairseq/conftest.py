"""Trainings that several tests look at, each run once however many processes pytest has."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fairseq.environment import ADAM, LANGUAGE_MODEL, QUIET, SGD, preprocess_text, run


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a language model's data."""
    return once(tmp_path_factory, "text", preprocess_text) / "data"


@pytest.fixture(scope="session")
def adam_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(what 2 ranks printed in 36 steps, their checkpoints: after step 24 and the last)"""
    steps = (*ADAM, "--save-interval-updates", 24, "--max-update", 36)
    return trained(tmp_path_factory, "adam", text, *steps)


@pytest.fixture(scope="session")
def sgd_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(what 2 ranks printed in 3 steps of 2 batches each, their checkpoint)"""
    output, folder = trained(
        tmp_path_factory, "sgd", text, *SGD, "--update-freq", 2, "--max-update", 3, *QUIET
    )
    return output, folder / "checkpoint_last.pt"


def trained(factory: pytest.TempPathFactory, name: str, text: Path, *options: object) -> tuple[str, Path]:
    """What two ranks printed while they trained the language model, and the folder of their checkpoints."""
    folder = once(
        factory,
        name,
        lambda folder: run("train", text, *LANGUAGE_MODEL, *options, "--save-dir", folder, ranks=2),
    )
    return (folder / "output.txt").read_text(encoding="utf-8"), folder


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], str]) -> Path:
    """The folder ``name`` that the first process fills by ``make``, whose text becomes its output.txt; the
    others wait for that. AssertionError where the first has failed or takes longer than a test may."""
    shared = factory.getbasetemp()
    if shared.name.startswith("popen-"):  # pytest-xdist gives each process a folder below the common one
        shared = shared.parent
    folder, done, failed = shared / name, shared / name / "output.txt", shared / f"{name}.failed"
    try:
        folder.mkdir()
    except FileExistsError:
        end = time.monotonic() + 800
        while not done.exists():
            assert not failed.exists(), f"{name} was not made: see the first test that wanted it"
            assert time.monotonic() < end, f"{name} took too long"
            time.sleep(0.2)
        return folder
    try:
        output = make(folder)
    except BaseException:
        failed.touch()
        raise
    unfinished = folder / "output.part"
    unfinished.write_text(output, encoding="utf-8")
    unfinished.rename(done)
    return folder
