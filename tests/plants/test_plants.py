"""Every planted mistake is found by the tests that it names, at the level that its file names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.levels import MAKE_TEST, MAKE_TEST_ALL, MARKERS
from tests.plants.all_plants import LEVEL_OF, PLANTS
from tests.plants.plant import ROOT, Plant, run, words_of


def test_every_plant_can_be_planted() -> None:
    """A change of the source that moves a plant's text must move the plant."""
    assert "\n".join(filter(None, (plant.problem() for plant in PLANTS))) == ""
    assert len({plant.name for plant in PLANTS}) == len(PLANTS) >= 60


class Collected:
    """A plugin of pytest that keeps the names of the tests that it would run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]


def collected(files: Iterable[str], level: str) -> list[str]:
    """The tests of ``files`` that a level runs."""
    plugin = Collected()
    words = ["--collect-only", "-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:xdist"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        pytest.main([*words, "-m", MARKERS[level], *sorted(files)], plugins=[plugin])
    return plugin.names


def missing(plants: Iterable[Plant], level: str) -> list[str]:
    """The plants of which a level runs no test."""
    words = {plant.name: words_of(plant.tests) for plant in plants}
    names = collected({file.split("::")[0] for each in words.values() for file in files_of(each)}, level)
    return [name for name, each in words.items() if not any(is_named(each, test) for test in names)]


def files_of(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("tests/")]


def is_named(words: list[str], name: str) -> bool:
    """Whether pytest with these words runs the test. -k has words between "or", and nothing else."""
    chosen = words[-1].split(" or ") if "-k" in words else [""]
    return name.startswith(tuple(files_of(words))) and any(word in name for word in chosen)


@pytest.mark.parametrize("level", sorted(set(LEVEL_OF.values())))
def test_a_level_runs_tests_of_each_of_its_plants(level: str) -> None:
    """A plant whose tests are slow belongs into a file of a slower level."""
    assert missing((plant for plant, found_at in LEVEL_OF.items() if found_at == level), level) == []


def test_a_plant_whose_tests_are_slow_would_be_noticed() -> None:
    plant = Plant(
        name="slow", breaks="", file="", old="", new="", tests="tests/unit/test_build.py -k nothing or pure"
    )
    assert (missing([plant], MAKE_TEST), missing([plant], MAKE_TEST_ALL)) == (["slow"], [])


@pytest.mark.nightly
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_mistake_is_found(plant: Plant, tmp_path: Path) -> None:
    level = LEVEL_OF[plant]
    outcome = run(plant, level, tmp_path)
    assert outcome.found, f"{plant.breaks}: {plant.tests} of {level} do not notice\n{outcome.output}"


@pytest.mark.nightly
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
    assert not run(nothing, MAKE_TEST, tmp_path).found
