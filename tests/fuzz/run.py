"""Draws cases until so many were played, and stops at the first that differs, made small."""

from __future__ import annotations

import atexit
import collections
import functools
import shutil
import tempfile
import time
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, Verbosity, assume, given, seed, settings

from tests.fuzz.cases import WORLDS, Case, cases
from tests.fuzz.play import job
from tests.pool import Pool

SECONDS = 10.0
"""After which a rank that waits for its peer gives up: a hang is a failure to be made small, too."""

_pools: dict[int, Pool] = {}


def impatient(world: int) -> Pool:
    """Ranks that wait for each other for SECONDS only."""
    if world not in _pools or not _pools[world].usable:
        _pools[world] = Pool(world, SECONDS)
    return _pools[world]


def outcome(case: Case, ranks: Callable[[int], Pool] = impatient) -> list[str]:
    """What is wrong of a case, in words; ["refused: ..."] where every rank refuses it alike, or one
    that is in a group of its own."""
    told = ranks(case.world).run(job, case, _folder())
    refusals = [each[0] for each in told if each and each[0].startswith("refused")]
    alone = case.options.get("group") == "single"
    if refusals and len(refusals) == (sum(map(bool, told)) if alone else case.world):
        return refusals[:1]
    return [f"rank {rank}: {line}" for rank, lines in enumerate(told) for line in lines]


@functools.cache
def _folder() -> str:
    """Where what is measured is kept: not in the user's own."""
    folder = tempfile.mkdtemp(prefix="pmoe-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def stop() -> None:
    for each in _pools.values():
        each.stop()
    _pools.clear()


def fuzz(
    number: int,
    start: int | None = None,
    worlds: tuple[int, ...] = WORLDS,
    told: Callable[[str], None] | None = None,
    ranks: Callable[[int], Pool] = impatient,
) -> collections.Counter[str]:
    """Plays ``number`` cases that no rank refuses, on ``ranks`` of a number of them. start: the seed of what
    is drawn; None is always the same.

    Returns how many were played and refused, and the refusals. Raises AssertionError with a case that can be
    pasted, the smallest that was found.
    """
    counted: collections.Counter[str] = collections.Counter()
    began = time.monotonic()

    @settings(
        max_examples=number,
        derandomize=start is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        print_blob=False,
    )
    @given(cases(worlds))
    def play(case: Case) -> None:
        try:
            wrong = outcome(case, ranks)
        except AssertionError as error:
            raise AssertionError(f"{case!r}\n{_end(str(error))}") from None
        if wrong and wrong[0].startswith("refused"):
            counted["refused"] += 1
            counted[wrong[0]] += 1
            assume(False)
        assert not wrong, f"{case!r}\n" + "\n".join(wrong)
        counted["played"] += 1
        if told and counted["played"] % 100 == 0:
            told(f"{counted['played']} of {number} in {time.monotonic() - began:.0f} s")

    if start is not None:
        play = seed(start)(play)
    try:
        play()
    finally:
        stop()
    return counted


def _end(text: str) -> str:
    """The last lines of what the ranks say."""
    return "\n".join(line for line in text.splitlines() if line and not line.startswith("    "))[-3000:]
