"""The partition of gradients: every byte is sent once, none before it exists, and nearly as much as can be
hidden is.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from pmoe.planner.costs import (
    DegreeSeconds,
    GeneralizedLayer,
    LayerCosts,
    LineCost,
    all_reduce_seconds,
    bytes_within,
)
from pmoe.planner.degree import MAX_DEGREE
from pmoe.planner.degree_search import find_degree, simulated_degrees
from pmoe.planner.gradient_partition import Partition, partition
from tests.unit.test_pipeline_degree import BACKWARD, PAPERS, t_olp_moe

LINE = LineCost(1e-4, 6e-10)


def random_costs(rng: random.Random) -> LayerCosts:
    def work() -> LineCost:
        return LineCost(10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-4, -1))

    a2a, ag, exp = work(), work(), work()
    return LayerCosts(a2a=a2a, ag=ag, rs=ag, exp=exp)


def on_the_papers_schedule(
    backward: LayerCosts, dense_seconds: float, gradient_bytes: int, degrees: Sequence[int] = (1, 2, 4, 8, 16)
) -> GeneralizedLayer:
    """Returns a layer whose MoE part runs the paper's schedule, with these costs of its backward pass."""
    return GeneralizedLayer(
        degrees=simulated_degrees(backward, PAPERS, degrees),
        dense_seconds=dense_seconds,
        gradient_bytes=gradient_bytes,
    )


def random_layers(rng: random.Random, count: int) -> list[GeneralizedLayer]:
    return [
        on_the_papers_schedule(
            random_costs(rng).backward(),
            rng.choice([0.0, 10 ** rng.uniform(-4, -1)]),
            rng.choice([0, int(10 ** rng.uniform(5, 8))]),
        )
        for _ in range(count)
    ]


def plain_layer(*, idle: float = 0.0, dense: float = 0.0, gradient_bytes: int = 0) -> GeneralizedLayer:
    """Returns a layer with one degree, in which the lane between nodes is idle for ``idle`` seconds."""
    return GeneralizedLayer(
        degrees=(DegreeSeconds(1, 10.0, 10.0 - idle),), dense_seconds=dense, gradient_bytes=gradient_bytes
    )


def check(found: Partition, layers: list[GeneralizedLayer], line: LineCost, ready_bytes: int = 0) -> None:
    """Checks a partition: all bytes are sent, none before they exist, and the promised seconds are those of
    its shares.
    """
    gone, made = 0, ready_bytes
    for share, layer in zip(found.shares, layers, strict=True):
        gone += share.moe_bytes + share.dense_bytes
        assert gone <= made  # of gradients that earlier layers' backward passes have made
        made += layer.gradient_bytes
    assert gone + found.end_bytes == made
    seconds = all_reduce_seconds(line, found.end_bytes)
    for share, layer in zip(found.shares, layers, strict=True):
        assert min(share.moe_bytes, share.dense_bytes) >= 0
        assert all(isinstance(each, int) for each in (share.moe_bytes, share.dense_bytes, share.degree))
        assert share.t_gar == all_reduce_seconds(line, share.moe_bytes)
        chosen = next(each for each in layer.degrees if each.degree == share.degree)
        seconds += chosen.seconds(share.t_gar) - min(each.alone for each in layer.degrees)
        seconds += max(0.0, all_reduce_seconds(line, share.dense_bytes) - layer.dense_seconds)
    assert found.exposed_seconds == pytest.approx(seconds, rel=1e-9, abs=1e-12)
    assert found.exposed_seconds <= found.filled_seconds * (1 + 1e-12)
    assert found.exposed_seconds <= found.plain_seconds * (1 + 1e-12)


def grid_search(layers: list[GeneralizedLayer], line: LineCost, ready_bytes: int, steps: int) -> float:
    """Returns the least exposed seconds of all allowed partitions on a grid of shares.

    The shares are multiples of 1 / steps of the bytes.
    """
    sources = [ready_bytes, *(layer.gradient_bytes for layer in layers)]
    unit = max(1, sum(sources) // steps)
    reached = {0: 0.0}  # units placed so far -> least exposed seconds
    for layer, made in zip(layers, itertools.accumulate(sources), strict=False):
        times = [all_reduce_seconds(line, units * unit) for units in range(made // unit + 1)]
        beside = [max(0.0, t - layer.dense_seconds) for t in times]
        inside = [layer.best(t).seconds(t) - layer.best(0.0).alone for t in times]
        both = [min(beside[a] + inside[k - a] for a in range(k + 1)) for k in range(len(times))]
        after: dict[int, float] = {}
        for units, seconds in reached.items():
            for more in range(len(times) - units):
                candidate = seconds + both[more]
                after[units + more] = min(candidate, after.get(units + more, math.inf))
        reached = after
    total = sum(sources)
    return min(seconds + all_reduce_seconds(line, total - units * unit) for units, seconds in reached.items())


# ---- by hand ----


def test_two_layers_by_hand() -> None:
    """A byte takes 1 s. The first layer has nothing to send.

    In the second layer, 5 s beside the dense part and 3 s beside experts take 8 of the first one's 10 bytes.
    Its other 2 and the second layer's own 4 are sent at the end.
    """
    layers = [plain_layer(gradient_bytes=10, idle=9, dense=9), plain_layer(gradient_bytes=4, idle=3, dense=5)]
    found = partition(layers, LineCost(0.0, 1.0))
    assert [(share.dense_bytes, share.moe_bytes) for share in found.shares] == [(0, 0), (5, 3)]
    assert found.end_bytes == 6
    assert (found.plain_seconds, found.filled_seconds, found.exposed_seconds) == (14, 6, 6)


def test_alpha_is_paid_by_every_message_and_hides_too() -> None:
    layers = [plain_layer(dense=5, gradient_bytes=4)]
    found = partition(layers, LineCost(2.0, 1.0), ready_bytes=10)
    assert (found.shares[0].dense_bytes, found.end_bytes) == (3, 11)
    assert (found.plain_seconds, found.exposed_seconds) == (16, 13)


def test_step_2_takes_another_degree_where_that_hides_more_than_it_costs() -> None:
    """Four chunks take 10 s and hide nothing. One chunk takes 11 s and hides 6 s: 6 of 8 bytes are sent
    there.
    """
    degrees = (DegreeSeconds(1, 11.0, 5.0), DegreeSeconds(4, 10.0, 10.0))
    layer = GeneralizedLayer(degrees=degrees, dense_seconds=0.0, gradient_bytes=1)
    found = partition([layer], LineCost(0.0, 1.0), ready_bytes=8)
    assert found.filled_seconds == 9
    assert found.shares[0].degree == 1
    assert found.exposed_seconds == pytest.approx(4)  # 1 s for the degree, 3 bytes beyond its room
    check(found, [layer], LineCost(0.0, 1.0), 8)


def test_what_an_earlier_layer_takes_in_step_2_no_later_one_has_counted_on() -> None:
    """The first layer could take all 8 bytes, but the second one hides 5 of them at no cost."""
    first = GeneralizedLayer(
        degrees=(DegreeSeconds(1, 11.0, 1.0), DegreeSeconds(4, 10.0, 10.0)), dense_seconds=0, gradient_bytes=0
    )
    layers = [first, plain_layer(idle=5, gradient_bytes=1)]
    found = partition(layers, LineCost(0.0, 1.0), ready_bytes=8)
    check(found, layers, LineCost(0.0, 1.0), 8)
    assert found.exposed_seconds == pytest.approx(2)  # 1 s for the degree, and the last byte
    assert found.shares[0].degree == 1


def test_what_follows_the_last_dense_part_is_one_message() -> None:
    """One message of 12 s beside a dense part of 5 s leaves 7 s.

    3 bytes beside the dense part and 7 at the end would leave 9 s.
    """
    found = partition([plain_layer(dense=5)], LineCost(2.0, 1.0), ready_bytes=10)
    assert (found.shares[0].dense_bytes, found.end_bytes, found.exposed_seconds) == (10, 0, 7)


# ---- limits ----


def test_without_room_all_stays_for_the_end() -> None:
    layers = [plain_layer(gradient_bytes=100), plain_layer(gradient_bytes=50)]
    found = partition(layers, LINE, ready_bytes=7)
    assert found.end_bytes == 157
    assert found.exposed_seconds == found.plain_seconds == LINE(157)


def test_a_huge_alpha_leaves_all_for_the_end() -> None:
    rng = random.Random(3)
    line = LineCost(1e3, 1e-9)
    layers = [on_the_papers_schedule(random_costs(rng).backward(), 0.01, 10**7) for _ in range(4)]
    found = partition(layers, line, ready_bytes=10**6)
    assert found.end_bytes == 4 * 10**7 + 10**6
    assert found.exposed_seconds == found.plain_seconds
    check(found, layers, line, 10**6)


def test_one_layer_without_ready_gradients_keeps_its_own_for_the_end() -> None:
    layer = plain_layer(idle=1, dense=1, gradient_bytes=1000)
    found = partition([layer], LINE)
    assert (found.shares[0].moe_bytes, found.shares[0].dense_bytes, found.end_bytes) == (0, 0, 1000)


def test_no_gradients_take_no_time() -> None:
    found = partition([plain_layer(dense=1), plain_layer(idle=1)], LINE)
    assert found.end_bytes == 0
    assert found.plain_seconds == found.exposed_seconds == 0


def test_only_the_last_layers_own_gradients_are_left_where_there_is_room() -> None:
    layers = [plain_layer(idle=1, dense=1, gradient_bytes=10**7) for _ in range(24)]
    found = partition(layers, LINE)
    assert found.end_bytes == 10**7
    assert found.exposed_seconds == pytest.approx(LINE(10**7))
    check(found, layers, LINE)


# ---- against brute force ----


@pytest.mark.parametrize("seed", range(40))
def test_a_partition_is_as_good_as_the_best_on_a_grid(seed: int) -> None:
    """A partition is at most 1 % slower than the best on the grid. It may be faster, because bytes are
    finer.
    """
    rng = random.Random(seed)
    layers = random_layers(rng, rng.choice([1, 2, 3]))
    line = LineCost(10 ** rng.uniform(-5, -2), 10 ** rng.uniform(-10, -9))
    ready = rng.choice([0, int(10 ** rng.uniform(6, 8))])
    found = partition(layers, line, ready)
    check(found, layers, line, ready)
    best = grid_search(layers, line, ready, 60)
    assert found.exposed_seconds <= best * 1.01 + 1e-12


def test_step_2_gains_on_some_of_them() -> None:
    gained = 0
    for seed in range(40):
        rng = random.Random(seed)
        layers = random_layers(rng, rng.choice([1, 2, 3]))
        found = partition(layers, LineCost(1e-4, 1e-9), ready_bytes=10**8)
        gained += found.exposed_seconds < 0.99 * found.filled_seconds
    assert gained >= 5


def test_many_layers_are_partitioned_alike_every_time() -> None:
    layers = random_layers(random.Random(5), 32)
    line = LineCost(1e-4, 4e-9)
    found = partition(layers, line, ready_bytes=10**8)
    check(found, layers, line, 10**8)
    assert found.exposed_seconds < found.filled_seconds < found.plain_seconds
    assert partition(layers, line, ready_bytes=10**8) == found


def test_the_layers_own_schedule_may_be_partitioned_too() -> None:
    costs = random_costs(random.Random(1)).backward()
    degrees = simulated_degrees(costs, BACKWARD, (1, 2, 4, 8))
    layers = [GeneralizedLayer(degrees=degrees, dense_seconds=0.001, gradient_bytes=10**7)] * 3
    found = partition(layers, LINE)
    check(found, layers, LINE)
    assert {share.degree for share in found.shares} <= {1, 2, 4, 8}


# ---- parts ----


def test_what_hides_beside_experts_is_the_papers_case() -> None:
    rng = random.Random(7)
    for _ in range(100):
        costs = random_costs(rng)
        layer = on_the_papers_schedule(costs, 0.0, 0, range(1, MAX_DEGREE + 1))
        found = find_degree(costs)
        assert layer.best(0.0).degree == found
        assert layer.hidden_seconds == pytest.approx(t_olp_moe(costs, found), rel=1e-9)


def test_the_inverse_of_an_all_reduce_is_never_negative_and_never_longer() -> None:
    rng = random.Random(9)
    assert bytes_within(LINE, 0.0) == bytes_within(LINE, LINE.alpha_seconds) == 0
    assert bytes_within(LineCost(1e-4, 0.0), 1.0) == 2**53
    for _ in range(1000):
        line = LineCost(10 ** rng.uniform(-6, -2), 10 ** rng.uniform(-12, -8))
        seconds = line.alpha_seconds + 10 ** rng.uniform(-5, 0)
        most = bytes_within(line, seconds)
        assert line(most) <= seconds < line(most + 2)
