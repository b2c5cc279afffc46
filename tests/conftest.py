"""How the tests are divided among the processes of ``pytest -n``, and what each process does once."""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

LONGEST = (
    "tests/gloo/test_machines.py",
    "tests/fairseq",
    "tests/gloo/test_train_lm.py",
)
"""Files that are begun first, for the processes to end together: those that take the most of a minute."""

SLOW_FIXTURES = frozenset({"kernels", "session"})
"""Fixtures that take a minute: kernels compiled for the CPU, and the trainings of fairseq."""


def group(nodeid: str) -> str:
    """The tests that one process runs, one after the other: they share pools, programs and fixtures."""
    file = nodeid.partition("::")[0]
    if file.startswith("tests/fairseq/"):
        return "tests/fairseq"
    return nodeid if file.startswith(("tests/gpu/", "tests/plants/")) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    config.option.loadscopereorder = False  # in the order of collection
    return ByGroup(config, log)


OF_TEST_ALL = 8
"""`make test` runs n cases of a sampled test. `make test-all` also runs one in this many of the others."""


def divide_sampled_tests(items: list[pytest.Item]) -> None:
    """Marks the cases of each test with ``@pytest.mark.sampled(n)``, so that each level runs some of them.

    Of the cases that are not marked as slow, n are quick, evenly spread. One in `OF_TEST_ALL` of all others
    is slow, the first one among them. The rest is for the nightly tests.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("nightly"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        (count,) = of_test[0].get_closest_marker("sampled").args
        may_be_quick = [item for item in of_test if not item.get_closest_marker("slow")]
        quick = {
            may_be_quick[(2 * i + 1) * len(may_be_quick) // (2 * count)] for i in range(count) if may_be_quick
        }
        others = [item for item in of_test if item not in quick]
        for i, item in enumerate(others):
            item.add_marker("nightly" if i % OF_TEST_ALL else "slow")


@pytest.fixture(scope="session")
def kernels() -> Path:
    """The file of a ``pmoe._cuda`` whose kernels run on the CPU."""
    from tests.emulated import compile_kernels

    return compile_kernels()


@pytest.fixture
def extension_built() -> None:
    """Skips a test of the compiled kernels where nobody built them, and fails it where they do not load."""
    if importlib.util.find_spec("pmoe._cuda") is None:
        pytest.skip("pmoe._cuda is not built: make extension builds it, where there is nvcc")
    from pmoe.kernels import extension

    assert extension.load() is not None, extension.why_missing()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    divide_sampled_tests(items)
    for item in items:
        if not SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
    place = {file: i for i, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(group(item.nodeid), len(place)))


def pytest_collection_finish() -> None:
    """What is there before the first test stays: a collection of garbage need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Idle ranks take time too: gloo wakes a thread of each of their groups a hundred times a second.

    What a file's tests imported is left out of later collections of garbage, as what was there before is.
    """
    pools = sys.modules.get("tests.pool")
    if pools and not (
        nextitem and any(folder in nextitem.nodeid for folder in ("/fuzz/", "/gloo/", "/spec/"))
    ):
        pools.stop_all()
    if nextitem is None or nextitem.fspath != item.fspath:
        gc.collect()
        gc.freeze()
