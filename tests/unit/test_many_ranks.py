"""The work of a rank in a call does not grow with the number of ranks (`bench/bench_ranks.py`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.bench_ranks import CASES, TOKENS, TOP_K, WIDE, WIDE_BYTES
from tests import fresh

FEW, MANY = 16, 256

PROGRAM = """
import json, sys
from bench.bench_ranks import CASES, bytes_of, prepare, subject

prepare({num_ranks})

def lines_of_step(case):
    ran = 0
    def follow(frame, event, argument):
        nonlocal ran
        if "/pmoe/" not in frame.f_code.co_filename:
            return None
        ran += event == "line"
        return follow
    step = subject(case).step
    sys.settrace(follow)
    step()
    sys.settrace(None)
    return ran

print(json.dumps({{case: [lines_of_step(case), bytes_of(case)["counts"]] for case in CASES}}))
"""
"""A program that prints the lines of pmoe that a step executes, and its bytes.

A line in a loop counts as often as it runs.
"""


@pytest.fixture(scope="module")
def ran() -> dict[int, dict[str, list[int]]]:
    """Returns the numbers that `PROGRAM` prints, by number of ranks and case."""
    return {
        num_ranks: json.loads(fresh.run(PROGRAM.format(num_ranks=num_ranks))) for num_ranks in (FEW, MANY)
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_no_line_of_a_call_runs_once_a_rank(case: str, ran: Any) -> None:
    (few, _), (many, _) = ran[FEW][case], ran[MANY][case]
    assert few > 1000 and many - few < (MANY - FEW) / 2


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_counts_are_a_hundredth_of_wide_rows_at_most(case: str, ran: Any) -> None:
    of_rows = TOKENS * TOP_K * WIDE * WIDE_BYTES
    for _, counts in (ran[FEW][case], ran[MANY][case]):
        assert 0 < counts < of_rows / 100


LONE_RANK = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import pmoe

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
first, second = (pmoe.MoELayer(4, 8, 4) for _ in range(2))
x = torch.randn(6, 4)
for layer in (first, first, second):
    layer(x)
first.pipeline = 2
first(x)
print("ended")
"""


@pytest.mark.timeout(60)
def test_no_call_waits_for_the_ranks_of_torchs_fake_group() -> None:
    """Neither the first call of a second layer, nor calls without backward or with options that were set."""
    assert fresh.run(LONE_RANK).endswith("ended\n")
