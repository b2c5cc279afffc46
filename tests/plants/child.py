"""Runs tests in a fork of a process that has imported `tests.libraries`.

They run as they would in a process of their own.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
from itertools import pairwise
from typing import Any

import pytest

from tests.pool import forks

OPTIONS = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=240"]


def main(markers: str, tests: list[str]) -> int:
    """pytest's exit code. It runs those of ``tests`` that ``markers`` select, until the first that fails."""
    if tests[0].startswith("tests/gloo/"):
        fork_the_ranks_server()
    return int(pytest.main([*OPTIONS, "-m", markers, *tests]))


def fork_the_ranks_server() -> None:
    """The process whose forks are the ranks (`tests.pool.forks`) has the libraries too, if it is a fork."""
    util: Any = multiprocessing.util
    start, util.spawnv_passfds = util.spawnv_passfds, fork
    forks()
    multiprocessing.forkserver.ensure_running()
    util.spawnv_passfds = start


def fork(_path: str, command: list[str], keep: list[int]) -> int:
    """``python -c program`` with these open files, as `multiprocessing.util.spawnv_passfds` starts it."""
    if command[-2] != "-c":
        raise ValueError(f"command ({command}) must be python -c program")
    child = os.fork()
    if child == 0:
        for first, end in pairwise([2, *sorted(keep), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(first + 1, end)
        exec(command[-1], {"__name__": "__main__"})
        os._exit(0)
    return child
