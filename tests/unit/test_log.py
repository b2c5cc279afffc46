"""pmoe's own messages: visible without any configuration of logging, on rank 0, and easy to turn off."""

from __future__ import annotations

import pytest

from tests import fresh

SAY = """
import logging
import torch.distributed as dist
{before}
import pmoe
from pmoe.measure import timing as rounds
{after}
rounds.PROGRESS_SECONDS = 0
rounds.in_rounds([lambda: [1.0], lambda: [2.0]], 1, warm_up=0)
"""
LINES = [f"measuring: round 1 of 1, run {at} of 2" for at in (1, 2)]


def said(before: str = "", after: str = "") -> list[str]:
    return fresh.run(SAY.format(before=before, after=after)).splitlines()


def test_lines_are_seen_where_nothing_is_configured() -> None:
    assert said() == [f"pmoe: {line}" for line in LINES]


@pytest.mark.parametrize("level", ["WARNING", "ERROR"])
def test_one_line_turns_them_off_before_and_after_the_import(level: str) -> None:
    off = f"logging.getLogger('pmoe').setLevel(logging.{level})"
    assert said(before=off) == said(after=off) == []


def test_a_program_that_configures_logging_has_them_in_its_own_form_and_once() -> None:
    assert said(before="logging.basicConfig(format='own %(message)s')") == [f"own {line}" for line in LINES]


@pytest.mark.parametrize("rank, lines", [(0, 2), (1, 0)])
def test_rank_0_speaks_for_all(rank: int, lines: int) -> None:
    group = f"dist.init_process_group('fake', store=dist.HashStore(), rank={rank}, world_size=2)"
    assert len(said(before="import torch.testing._internal.distributed.fake_pg", after=group)) == lines
