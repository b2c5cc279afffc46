"""A part of what `python -m tests.fuzz` plays, the same in every run."""

from __future__ import annotations

import inspect

import pytest

import pmoe
from pmoe.runners.features import Feature
from tests.featured import RECIPES
from tests.fuzz.cases import ARGUMENTS, ELSEWHERE
from tests.fuzz.run import fuzz
from tests.pool import ranks
from tests.switched import NAMES


@pytest.mark.timeout(600)
def test_thirty_random_layers_called_in_random_ways_equal_the_definition() -> None:
    counted = fuzz(30, worlds=(1, 2), ranks=ranks)  # four ranks in the long run
    assert counted["played"] >= 30


def test_every_argument_is_drawn() -> None:
    arguments = set(inspect.signature(pmoe.MoELayer).parameters)
    assert arguments | NAMES == set(ARGUMENTS) | set(ELSEWHERE)


def test_every_feature_can_be_drawn() -> None:
    """What a recipe sets is an argument that is drawn; gradients that others set are tested elsewhere."""
    names = {RECIPES[feature].argument for feature in Feature} - {"ranks", "gradients"}
    assert names <= set(ARGUMENTS) | set(ELSEWHERE)
