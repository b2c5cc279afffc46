"""The order of all-to-alls changes no bit of a result, be it all S first or S and R in turns (Fig. 7a)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from bench.bench_alternate import ORDERS, running
from pmoe.engine.lanes import run as lanes_run
from pmoe.schedule.tasks import Kind, Schedule
from tests.gloo.kit import build, one_step
from tests.pool import ranks


def orders_job(rank: int, world: int) -> list[tuple[list[str], dict[str, Tensor]]]:
    """Returns, for each order, the S and R of both passes in the order of their issue, and the results."""
    found = []
    run_schedule = lanes_run.run_schedule
    for order in ORDERS:
        links: list[str] = []

        def recorded(schedule: Schedule, *others: Any, links: list[str] = links) -> None:
            sends = [task.name for task in schedule.tasks if task.kind in (Kind.DISPATCH, Kind.COMBINE)]
            links.append(" ".join(sends))
            run_schedule(schedule, *others)

        layer = build(pipeline=4)
        with running(order), mock.patch.object(lanes_run, "run_schedule", recorded):
            results = one_step(layer, rank, world)
        found.append((links, results))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_both_orders_give_the_same_bits(world: int) -> None:
    """On 4 ranks one has no tokens."""
    for (links, expected), *others in ranks(world).run(orders_job):
        assert links == ["S0 S1 S2 S3 R0 R1 R2 R3"] * 2
        for other_links, results in others:
            assert other_links == ["S0 S1 R0 S2 R1 S3 R2 R3"] * 2
            assert results.keys() == expected.keys()
            for name, result in results.items():
                assert result.equal(expected[name]), name
