"""The gradients that one message reduces, and when this message begins."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pmoe.graph.buckets import UnsentBuckets, bucket_limits, divide_into_buckets, send_seconds
from pmoe.graph.instructions import COMMUNICATE, Instruction, timeline, total_seconds
from pmoe.graph.reductions import (
    TIE,
    Gradient,
    by_source,
    hand_over_places,
    plan_hand_overs,
    returned,
    with_hand_overs,
)
from pmoe.graph.weight_gradients import listed
from tests.unit.test_reductions import random_pass


@pytest.mark.parametrize("seed", range(20))
def test_gradients_are_divided_as_torch_divides_them(seed: int) -> None:
    choose = random.Random(seed)
    sizes = [choose.choice([1, 7, 100, 1000, 5000]) for _ in range(choose.randint(1, 30))]
    limits = [choose.choice([1, 400, 4000, 40000]) for _ in range(choose.randint(1, 3))]
    tensors = [torch.empty(size) for size in sizes]
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    num_bytes = {f"{at}": tensor.nbytes for at, tensor in enumerate(tensors)}
    assert divide_into_buckets(num_bytes, limits) == [[f"{at}" for at in bucket] for bucket in expected]


def test_the_first_bucket_of_a_wrapper_with_the_default_size_is_smaller() -> None:
    wrapper = SimpleNamespace(bucket_bytes_cap=25 << 20, bucket_bytes_cap_default=True)
    assert bucket_limits(wrapper) == [1 << 20, 25 << 20]  # type: ignore[arg-type]
    wrapper = SimpleNamespace(bucket_bytes_cap=3 << 20, bucket_bytes_cap_default=False)
    assert bucket_limits(wrapper) == [3 << 20]  # type: ignore[arg-type]
    wrapper.bucket_bytes_cap_list = [1, 2, 3]
    assert bucket_limits(wrapper) == [1, 2, 3]  # type: ignore[arg-type]


def test_a_bucket_is_sent_when_it_is_complete_and_all_before_it_are_sent() -> None:
    first, second = {"a": 1.0, "b": 2.0}, {"c": 4.0}
    unsent = UnsentBuckets([first, second])
    assert unsent.add("c") == []
    assert unsent.add("a") == []
    assert unsent.add("not reduced") == []
    sent = unsent.add("b")
    assert sent == [first, second] and send_seconds(sent) == 7.0
    assert unsent.add("b") == []


def compute(name: str, seconds: float, *waits: str) -> Instruction:
    return Instruction(name=name, waits=waits, seconds=seconds)


def message(name: str, seconds: float, *waits: str) -> Instruction:
    return Instruction(name=name, waits=waits, seconds=seconds, lane=COMMUNICATE)


# Of each of two layers: `dense`, the gradients of a small and of a large weight, and two all-to-alls.
#
# compute      | dense | small | large |   | experts |
# communicate          | S0                |         | R0 |
LAYERS = [
    instruction
    for at in range(2)
    for instruction in (
        compute(f"dense{at}", 1.0, *([f"R{at - 1}"] if at else [])),
        message(f"S{at}", 2.0, f"dense{at}"),
        compute(f"small{at}", 0.5, f"dense{at}"),
        compute(f"large{at}", 0.5, f"dense{at}"),
        compute(f"experts{at}", 2.0, f"S{at}"),
        message(f"R{at}", 2.0, f"experts{at}"),
    )
]
GRADIENTS = [
    Gradient(name, number, name) for number, name in enumerate(("small0", "large0", "small1", "large1"))
]
BUCKETS = [{"small0": 1.0, "large0": 5.0}, {"small1": 1.0, "large1": 5.0}]


def test_a_bucket_whose_last_gradient_waits_for_a_long_gap_holds_back_all_later_buckets() -> None:
    """The bug: plans were priced as if each gradient had a message of its own.

    The gradients of large weights were handed over behind all all-to-alls, because their reductions fit into
    no gap. Those of small weights took the gaps, and the link seemed to be busy. But a wrapper sends a bucket
    when it has all its gradients, so it sent nothing at all before the last all-to-all had ended.
    """
    postponed = {"small0": 1, "large0": 4, "small1": 3, "large1": 4}
    begin = {
        ran.task.name: ran.start for ran in timeline(with_hand_overs(LAYERS, GRADIENTS, postponed, BUCKETS))
    }
    assert begin["gradient of large0"] > begin["R1"]
    order = plan_hand_overs([LAYERS], GRADIENTS, BUCKETS)
    begin = {ran.task.name: ran.start for ran in timeline(order)}
    assert begin["gradient of large0"] < begin["R0"]
    assert total_seconds(order) < total_seconds(with_hand_overs(LAYERS, GRADIENTS, postponed, BUCKETS))


def test_only_the_last_gradient_of_a_bucket_takes_time_on_the_link() -> None:
    order = with_hand_overs(LAYERS, GRADIENTS, {"small0": 1, "large0": 1, "small1": 4, "large1": 3}, BUCKETS)
    on_link = [each.name for each in order if each.reduces]
    assert on_link == ["gradient of large0", "gradient of small1"]
    assert [each.seconds for each in order if each.hands_over] == [0.0, 6.0, 0.0, 6.0]
    (last,) = (each for each in order if each.name == "gradient of small1")
    assert last.waits == ("small1", "large1")


def test_buckets_take_gaps_in_their_order() -> None:
    """The second bucket would fit into the gap before R0, but the first one is sent before it."""
    buckets = [{"large0": 5.0}, {"small0": 0.5}]
    assert hand_over_places(LAYERS, GRADIENTS, buckets, 1.0)["small0"] == 4
    assert hand_over_places(LAYERS, GRADIENTS, buckets[::-1], 1.0)["small0"] == 1


def test_a_parameter_that_is_frozen_in_another_graph_is_in_no_bucket_there() -> None:
    assert returned(BUCKETS, GRADIENTS[:3]) == [BUCKETS[0], {"small1": 1.0}]
    assert returned(BUCKETS, GRADIENTS[:2]) == [BUCKETS[0]]


def test_weight_gradients_of_the_next_bucket_run_first_while_the_link_is_idle() -> None:
    """Until a bucket is complete, the link stays idle."""
    chain = [
        compute("a", 1.0),
        compute("x", 1.0),
        compute("y", 1.0),
        compute("z", 1.0),
        compute("b", 1.0, "a"),
    ]
    order = [*chain, message("S", 1.0, "b"), compute("end", 1.0, "S")]
    got = [each.name for each in listed(order, reductions=[{"y": 1.0, "z": 1.0}, {"x": 1.0}])]
    assert got[:4] == ["y", "z", "a", "b"], got
    got = [
        each.name for each in listed(order, reductions=[{"y": 1.0, "z": 1.0}, {"x": 1.0}], one_by_one=True)
    ]
    assert got[:3] == ["x", "a", "y"], got


def test_neither_rule_for_early_weight_gradients_is_always_faster() -> None:
    """The bug: only one of them was tried. So plans of 5 X were not cut into as many parts as would be fast.

    One rule takes the link for busy as soon as one gradient of a bucket is computed, the other one when all
    are.
    """
    is_faster = {True: 0, False: 0}
    for seed in range(40):
        order, gradients, buckets = random_pass(seed)
        sources = by_source(gradients, buckets)
        alone, together = (
            total_seconds(
                plan_hand_overs(
                    [listed(order, reductions=sources, one_by_one=one_by_one)], gradients, buckets
                )
            )
            for one_by_one in (True, False)
        )
        is_faster[True] += alone < together / TIE
        is_faster[False] += together < alone / TIE
    assert all(is_faster.values()), is_faster
