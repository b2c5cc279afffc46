"""Agreement of ranks: one reduction gives the same result on all ranks, and an error if a peer is missing."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pmoe.comm.agreement import from_first, gathered, largest, same
from pmoe.comm.ranks import Ranks
from tests.pool import ranks

CPU = torch.device("cpu")


def agreed(rank: int, world: int) -> dict[str, Any]:
    group, calls = Ranks(), []
    real = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append(tensor.numel())
        return real(tensor, *args, **options)

    with mock.patch.object(dist, "all_reduce", counted):
        return {
            "largest": largest(group, CPU, [float(rank), -float(rank), 2.0**53 - rank], stage="a test"),
            "same": same(group, CPU, [float(rank == 0), 5.0, -0.0 * rank], stage="a test"),
            "reductions": calls,
            "gathered": gathered(group, "x" * rank, stage="a test"),
            "first": from_first(group, {"rank": rank}, stage="a test"),
        }


def test_every_rank_gets_the_same_answers_each_by_one_collective() -> None:
    for found in ranks(4).run(agreed):
        assert found == {
            "largest": [3.0, 0.0, 2.0**53],
            "same": [False, True, True],
            "reductions": [3, 6],
            "gathered": ["", "x", "xx", "xxx"],
            "first": {"rank": 0},
        }


def test_one_rank_agrees_with_itself_without_a_process_group() -> None:
    one = Ranks.single()
    assert largest(one, CPU, [1.0, 2.0], stage="a test") == [1.0, 2.0]
    assert same(one, CPU, [1.0], stage="a test") == [True]
    assert gathered(one, "x", stage="a test") == ["x"]
    assert from_first(one, "x", stage="a test") == "x"


def test_an_error_names_the_stage_and_this_rank() -> None:
    for rank, message in enumerate(ranks(2).run(failing)):
        assert message.startswith(f"pmoe: rank {rank} of 2 failed in comparing numbers; a peer has died")


def failing(rank: int, world: int) -> str:
    group = dist.new_group(list(range(world)))  # layers do not use a group after a collective of it failed
    with (
        mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("closed")),
        pytest.raises(RuntimeError) as error,
    ):
        largest(Ranks(group), CPU, [1.0], stage="comparing numbers")
    return str(error.value)
