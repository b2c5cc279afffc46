"""A part of what `python -m tests.fuzz` plays, the same in every run."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import pmoe
from pmoe.runners.features import Feature
from tests.featured import RECIPES
from tests.fuzz.cases import ARGUMENTS, ELSEWHERE, Case
from tests.fuzz.play import job
from tests.fuzz.run import fuzz
from tests.pool import ranks
from tests.programs import Computing
from tests.switched import NAMES


@pytest.mark.timeout(600)
def test_thirty_random_layers_called_in_random_ways_equal_the_definition() -> None:
    counted = fuzz(30, worlds=(1, 2), ranks=ranks)  # four ranks in the long run
    assert counted["played"] >= 30


def test_a_layer_with_programs_runs_as_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mistake in what programs compute is found: beside the definition, and beside the engine's bits."""
    case = Case(world=1, options={"memory_reuse": "S4", "pipeline": 2, "program": True})
    assert job(0, 1, case, str(tmp_path)) == []
    right = Computing.rows

    def tiny(self: Computing, *memories: object) -> object:
        found = right(self, *memories)
        found[0].mul_(1 + 2**-50)
        return found

    monkeypatch.setattr(Computing, "rows", tiny)
    assert any("not the engine's bits" in line for line in job(0, 1, case, str(tmp_path)))

    def wrong(self: Computing, *memories: object) -> object:
        found = right(self, *memories)
        found[0].mul_(1.1)
        return found

    monkeypatch.setattr(Computing, "rows", wrong)
    assert any(line.startswith("y 0") for line in job(0, 1, case, str(tmp_path)))


def test_every_argument_is_drawn() -> None:
    arguments = set(inspect.signature(pmoe.MoELayer).parameters)
    assert arguments | NAMES == set(ARGUMENTS) | set(ELSEWHERE)


def test_every_feature_can_be_drawn() -> None:
    """What a recipe sets is an argument that is drawn; gradients that others set are tested elsewhere."""
    names = {RECIPES[feature].argument for feature in Feature} - {"ranks", "gradients"}
    assert names <= set(ARGUMENTS) | set(ELSEWHERE)
