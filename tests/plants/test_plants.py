"""Every planted mistake is found by the tests that it names, of those that ``make test`` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plants.all_plants import PLANTS
from tests.plants.plant import Plant, run


def test_every_plant_can_be_planted() -> None:
    """A change of the source that moves a plant's text must move the plant."""
    assert "\n".join(filter(None, (plant.problem() for plant in PLANTS))) == ""
    assert len({plant.name for plant in PLANTS}) == len(PLANTS) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_mistake_is_found(plant: Plant, tmp_path: Path) -> None:
    outcome = run(plant, tmp_path)
    assert outcome.found, f"{plant.breaks}: {plant.tests} do not notice\n{outcome.output}"


@pytest.mark.slow
def test_without_a_mistake_nothing_is_found(tmp_path: Path) -> None:
    """Else a copy of the tree that does not work would find every plant."""
    nothing = Plant(
        name="nothing",
        breaks="nothing",
        file="pmoe/schedule/tasks.py",
        old="from __future__ import annotations\n",
        new="from __future__ import annotations\n\n",
        tests="tests/unit/test_restore.py tests/gloo/test_division.py",
    )
    assert not run(nothing, tmp_path).found
