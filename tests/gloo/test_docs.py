"""Every Python snippet of the documentation that needs several processes runs on as many."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pool import ranks
from tests.snippets import Block, python_blocks, run_snippet

SEVERAL = [block for block in python_blocks() if block.num_ranks > 1]


def job(rank: int, world: int, name: str, code: str, folder: str) -> str:
    before = os.getcwd()
    os.chdir(folder)
    try:
        return run_snippet(name, code)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("block", SEVERAL, ids=str)
def test_a_snippet_of_several_processes_runs_as_it_stands(block: Block, tmp_path: Path) -> None:
    printed = ranks(block.num_ranks).run(job, str(block), block.text, str(tmp_path))
    if block.output is not None:
        assert printed[0] == block.output
