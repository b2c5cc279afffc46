"""Ranks that pass different meshes to parallelize get an error that names them; smaller meshes are legal."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pmoe
from pmoe.comm import mesh_agreement
from pmoe.comm.ranks import Ranks
from tests.gloo.kit import error_of
from tests.gloo.lm import make_mesh
from tests.pool import SHORT_TIMEOUT_SECONDS, Pool, ranks


def parallelized(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(4, 6, 4, 2, group=Ranks.single())
    return pmoe.parallelize(nn.Sequential(layer), mesh)


def meshes() -> dict[str, Any]:
    """Returns meshes of 4 ranks by name. Every rank makes all of them, because that is collective."""
    square = make_mesh({"dp": 2, "ep": 2})
    columns = make_mesh({"ep": 2, "dp": 2})
    return {
        "square": square,
        "pair": square["ep"],  # (0, 1) and (2, 3)
        "columns": columns,
        "column": columns["ep"],  # (0, 2) and (1, 3)
        "flat": make_mesh({"ep": 4}),
        "split": make_mesh({"ep": 2, "esp": 2}),
        "dense": square["dp"],
    }


def attempts(rank: int, world: int, names: list[str]) -> list[str]:
    """Calls parallelize with one mesh after another. Returns the errors, "" for none.

    names: for each call, the names of the meshes that the ranks pass.
    """
    of_name = meshes()
    found = []
    for of_ranks in names:
        found.append(error_of(partial(parallelized, of_name[of_ranks.split()[rank]])))
        torch.distributed.barrier()
    return found


DIFFERS = r"^ValueError: mesh must be the same on every rank, and differs: "
NO_EXPERTS = r"mesh \(dimensions \('dp',\)\) must have the dimension"
CASES = [
    # the meshes that ranks 0 to 3 pass, and the errors that they get
    ("square square square pair", [DIFFERS + r"rank 2: .*\[\[0, 1\], \[2, 3\]\].*; rank 3: .* \[2, 3\]"] * 4),
    ("flat flat split flat", [DIFFERS + r"rank \d: .*rank \d: .*"] * 4),
    ("square columns square columns", [DIFFERS] * 4),
    ("pair pair pair flat", ["^$", "^$", *[DIFFERS + r"rank 2: .*\[2, 3\].*rank 3: .*\[0, 1, 2, 3\]"] * 2]),
    ("pair pair pair pair", ["^$"] * 4),
    ("column column column column", ["^$"] * 4),
    ("square square square square", ["^$"] * 4),
    ("dense dense dense dense", [f"^ValueError: {NO_EXPERTS}"] * 4),
    ("flat flat flat flat", ["^$"] * 4),
]


def test_every_mismatch_of_meshes_is_named_on_the_ranks_concerned_and_later_calls_work() -> None:
    """Meshes smaller than the world were not compared: ranks with other meshes waited until the timeout."""
    found = ranks(4).run(attempts, [names for names, _ in CASES])
    for at, (names, wanted) in enumerate(CASES):
        for messages, pattern in zip(found, wanted, strict=True):
            assert re.search(pattern, messages[at]), f"{names}: {messages[at]}"


def late_attempts(rank: int, world: int, names: list[str], seconds: float) -> list[str]:
    """Calls parallelize like `attempts`, but without barriers. Rank 3 comes late to the first call."""
    of_name = meshes()
    if rank == 3:
        time.sleep(seconds)
    return [error_of(partial(parallelized, of_name[of_ranks.split()[rank]])) for of_ranks in names]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("first", "error"),
    [
        ("dense dense dense dense", NO_EXPERTS),  # each rank refuses its own mesh
        ("square columns square square", DIFFERS),
        ("square square square columns", DIFFERS),
    ],
)
def test_a_rank_that_comes_late_to_a_refused_call_raises_its_error_and_keeps_in_step(
    first: str, error: str
) -> None:
    """The late rank took a refused call for a call before its own, and the ranks went out of step."""
    for messages in ranks(4).run(late_attempts, [first, "square square square square"], 0.4):
        assert re.search(error, messages[0]), messages
        assert messages[1] == ""


@pytest.mark.slow
def test_a_rank_that_comes_after_the_timeout_raises_at_once() -> None:
    """It waited once more for the whole timeout."""
    names = ["flat flat flat flat", "square square square square"]
    with Pool(4, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        found = pool.run(late_attempts, names, SHORT_TIMEOUT_SECONDS + 1)
    for messages in found:
        assert "rank 3 has not called pmoe.parallelize within 4 seconds" in messages[0]
        assert messages[1] == ""


def other_calls(rank: int, world: int) -> list[str]:
    """Ranks 0 and 1 call parallelize twice by themselves, ranks 2 and 3 do not; then all ranks call it."""
    of_name = meshes()
    pairs = [error_of(lambda: parallelized(of_name["pair"])) for _ in range(2 if rank < 2 else 0)]
    return [*pairs, *(error_of(lambda: parallelized(of_name["square"])) for _ in range(2))]


def test_ranks_may_call_parallelize_with_smaller_meshes_before() -> None:
    assert ranks(4).run(other_calls) == [[""] * 4, [""] * 4, [""] * 2, [""] * 2]


def lost(rank: int, world: int) -> str:
    """Ranks 0 and 1 have a legal mesh of their own, and ranks 2 and 3 wait for them in vain."""
    of_name = meshes()
    return error_of(lambda: parallelized(of_name["pair" if rank < 2 else "flat"]))


@pytest.mark.slow
def test_a_mesh_that_one_rank_refuses_is_an_error_on_all_ranks_that_wait_for_it() -> None:
    found = ranks(4).run(attempts, ["square dense square square", "square square square square"])
    for rank, messages in enumerate(found):
        start = "ValueError: mesh" if rank == 1 else "ValueError: rank 1: mesh"
        assert messages[0].startswith(f"{start} (dimensions ('dp',)) must have the dimension")
        assert messages[1] == ""


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_after_the_timeout() -> None:
    with Pool(4, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        found = pool.run(lost)
    assert found[:2] == ["", ""]
    for message in found[2:]:
        assert re.search(r"rank 0 has not called pmoe.parallelize within 4 seconds with the mesh", message)
        assert "the mesh of its last call: ('ep',) [0, 1] on cpu" in message


def calls_after_each_other(rank: int, world: int) -> list[str]:
    """Both ranks call with two meshes. Rank 0 comes to both calls between two readings of rank 1."""
    num_come = mesh_agreement._Board.num_come
    store = dist.distributed_c10d._get_default_store()
    second = "second mesh"

    def num_come_before(board: Any, call: tuple[str, int]) -> int:
        number = num_come(board, call)
        if number == 1:
            store.set("rank 1 has read", "")
            while (board.last_call(0) or [(None, 0)])[0][0] != second:
                time.sleep(0.001)
        return number

    def call(text: str) -> str:
        return error_of(lambda: mesh_agreement.agree_on_mesh(text, [0, 1], lambda: None))

    if rank == 0:
        store.wait(["rank 1 has read"])
        return [call("first mesh"), call(second)]
    with mock.patch.object(mesh_agreement._Board, "num_come", num_come_before):
        first = call("first mesh")
    return [first, call(second)]


def test_a_rank_that_makes_its_next_call_between_two_readings_of_another_contradicts_nothing() -> None:
    """The other rank took the next call for a different mesh of the present one, and refused both."""
    assert ranks(2).run(calls_after_each_other) == [["", ""], ["", ""]]
