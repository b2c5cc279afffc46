"""When a backward graph hands gradients over: reductions in the gaps between all-to-alls."""

from __future__ import annotations

import random

import pytest

from pmoe.graph.explain import Explanation, bars_of
from pmoe.graph.instructions import (
    COMMUNICATE,
    COMPUTE,
    Instruction,
    exposed_seconds,
    timeline,
    total_seconds,
)
from pmoe.graph.reductions import (
    Gradient,
    by_source,
    hand_over_places,
    places_in,
    plan_hand_overs,
    with_hand_overs,
)
from pmoe.graph.run import Program
from pmoe.graph.weight_gradients import listed


def compute(name: str, seconds: float, *waits: str) -> Instruction:
    return Instruction(name=name, waits=waits, seconds=seconds)


def message(name: str, seconds: float, *waits: str) -> Instruction:
    return Instruction(name=name, waits=waits, seconds=seconds, lane=COMMUNICATE)


# compute      | dh | dw |        | de | dense         |
# communicate       | S0        |      | R0 |
BACKWARD = [
    compute("dh", 1.0),
    message("S0", 3.0, "dh"),
    compute("dw", 1.0),
    compute("de", 1.0, "S0"),
    message("R0", 1.0, "de"),
    compute("dense", 4.0, "de"),
    compute("last", 1.0, "R0"),
]
HEAD, DENSE = Gradient("head", 0, "dw"), Gradient("block", 1, "dense")


def names(order: list[Instruction]) -> str:
    return " ".join(each.name for each in order)


def test_a_reduction_takes_the_first_gap_in_which_it_fits() -> None:
    """Between the end of S0 at 4 and the start of R0 at 5 a second is free."""
    gradients = [HEAD, DENSE]
    short = [{"head": 1.0}, {"block": 1.0}]
    long = [{"head": 1.5}, {"block": 1.0}]
    assert hand_over_places(BACKWARD, gradients, short, 1.0) == {"head": 1, "block": 2}
    assert hand_over_places(BACKWARD, gradients, long, 1.0) == {"head": 2, "block": 2}
    assert hand_over_places(BACKWARD, gradients, long, 0.5) == {"head": 1, "block": 2}


def test_a_gradient_that_is_not_reduced_is_handed_over_as_soon_as_it_exists() -> None:
    assert hand_over_places(BACKWARD, [HEAD, DENSE], [], 1.0) == {"head": 1, "block": 2}
    assert hand_over_places(BACKWARD, [Gradient("input", 0, "")], [], 1.0) == {"input": 0}
    order = plan_hand_overs([BACKWARD], [HEAD, DENSE], [])
    assert names(order) == "dh S0 dw gradient of head de R0 dense gradient of block last"
    assert total_seconds(order) == total_seconds(BACKWARD)


def test_no_all_to_all_waits_for_a_reduction_that_would_make_the_pass_longer() -> None:
    """A reduction of 3 s beside S0 would delay R0 and `last`; behind R0 it hides beside `dense`."""
    order = plan_hand_overs([BACKWARD], [HEAD], [{"head": 3.0}])
    start = {each.task.name: each.start for each in timeline(order)}
    assert start["R0"] == 5.0 and start["gradient of head"] == 6.0
    assert total_seconds(order) == total_seconds(BACKWARD) == 10.0


def test_an_all_to_all_waits_where_the_pass_is_faster_so() -> None:
    """Nothing hides a reduction of 9 s at the end, so it begins early and R0 waits for it."""
    buckets = [{"head": 9.0}]
    before = [*BACKWARD[:-1], compute("last", 1.0, "dense")]
    late = with_hand_overs(before, [HEAD], {"head": 2}, buckets)
    order = plan_hand_overs([before], [HEAD], buckets)
    assert total_seconds(order) < total_seconds(late)
    assert names(order).index("gradient of head") < names(order).index("R0")


def test_reductions_and_all_to_alls_share_one_lane() -> None:
    order = plan_hand_overs([BACKWARD], [HEAD, DENSE], [{"head": 1.0}, {"block": 2.0}])
    lane = [each for each in timeline(order) if each.task.lane == COMMUNICATE]
    assert [each.task.name for each in lane] == ["S0", "gradient of head", "R0", "gradient of block"]
    assert all(first.end <= second.start for first, second in zip(lane, lane[1:], strict=False))


def test_what_computes_a_gradient_moves_ahead_of_the_all_to_all_of_its_place() -> None:
    """On a rank whose graph computes the gradient of the head late."""
    order = [*BACKWARD[:2], *BACKWARD[3:], compute("x", 1.0), compute("dw", 1.0, "x")]
    got = with_hand_overs(order, [HEAD], {"head": 1}, [])
    assert names(got) == "dh S0 de x dw gradient of head R0 dense last"
    assert places_in(got, [HEAD]) == {"head": 1}


def test_a_gradient_without_a_place_is_handed_over_at_the_end() -> None:
    got = with_hand_overs(BACKWARD, [HEAD, DENSE], {"head": 1}, [])
    assert names(got).endswith("dense gradient of block last") or names(got).endswith("gradient of block")
    assert places_in(got, [HEAD, DENSE]) == {"head": 1, "block": 2}


def test_a_gradient_that_waits_for_a_later_all_to_all_than_on_rank_0_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="the gradient of block must not wait for R0, the all-to-all number 2"
    ):
        with_hand_overs([*BACKWARD[:5], compute("dense", 1.0, "R0")], [DENSE], {"block": 1}, [{"block": 1.0}])


def test_weight_gradients_run_early_for_their_reductions() -> None:
    """The chain a, b, c has no gap; a reduction of dw hides beside it only if dw runs early."""
    chain = [compute("a", 2.0), compute("dw", 1.0), compute("b", 2.0, "a"), compute("c", 2.0, "b")]
    end = [message("S", 0.5, "c"), compute("d", 1.0, "S")]
    order = [*chain, *end]
    gradient = Gradient("w", 0, "dw")
    buckets = [{"w": 4.0}]
    late = listed(order)
    early = listed(order, reductions=by_source([gradient], buckets))
    assert names(late).index("dw") > names(late).index("c")
    assert names(early).startswith("dw a")
    best = plan_hand_overs([late, early], [gradient], buckets)
    assert total_seconds(best) == total_seconds(plan_hand_overs([early], [gradient], buckets)) == 8.5


def test_an_explanation_tells_where_gradients_are_reduced() -> None:
    order = plan_hand_overs([BACKWARD], [HEAD, DENSE], [{"head": 1.0}, {"block": 2.0}])
    program = Program(("backward", (0,)), before=order, instructions=order)
    lines = str(Explanation({"backward": program}, {"backward": 10.0})).splitlines()
    assert lines[-2:] == [
        "backward: behind S0: 1 reductions of gradients begin",
        "backward: behind R0: 1 reductions of gradients begin",
    ]
    bars = bars_of("backward", timeline(order), set())
    assert [each.name for each in bars if each.kind == "reduction"] == [HEAD.instruction, DENSE.instruction]
    assert exposed_seconds(order) == total_seconds(order) - 8.0


def random_pass(seed: int) -> tuple[list[Instruction], list[Gradient], list[dict[str, float]]]:
    choose = random.Random(seed)
    order: list[Instruction] = []
    gradients: list[Gradient] = []
    buckets: list[dict[str, float]] = []
    for at in range(40):
        waits = tuple({choose.choice(order).name for _ in range(2)}) if order else ()
        if choose.random() < 0.2:
            order.append(message(f"m{at}", choose.random(), *waits))
        else:
            order.append(compute(f"c{at}", choose.random(), *waits))
        if choose.random() < 0.4:
            gradients.append(
                Gradient(f"g{at}", len(gradients), f"c{at}" if order[-1].lane == COMPUTE else "")
            )
            if choose.random() < 0.7:
                if not buckets or choose.random() < 0.5:
                    buckets.append({})
                buckets[choose.randrange(len(buckets))][f"g{at}"] = choose.random()
    return order, gradients, [bucket for bucket in buckets if bucket]


@pytest.mark.parametrize("seed", range(30))
def test_every_pass_keeps_its_order_and_hands_each_gradient_over_once_at_its_place(seed: int) -> None:
    order, gradients, buckets = random_pass(seed)
    got = plan_hand_overs([order], gradients, buckets)
    assert [each for each in got if not each.hands_over] == order
    assert sorted(each.name for each in got if each.hands_over) == sorted(
        each.instruction for each in gradients
    )
    done: set[str] = set()
    for each in got:
        assert done.issuperset(each.waits)
        done.add(each.name)
    as_soon = with_hand_overs(
        order, gradients, hand_over_places(order, gradients, buckets, float("-inf")), buckets
    )
    assert total_seconds(got) <= 1.01 * total_seconds(as_soon)
    # A rank that takes these places for its own order hands over between the same all-to-alls.
    place_of = places_in(got, gradients)
    assert places_in(with_hand_overs(order, gradients, place_of, buckets), gradients) == place_of
    assert plan_hand_overs([order], gradients, buckets, place_of) == got
    # Every message of a bucket is sent once.
    sent = sum(each.seconds for each in got if each.reduces)
    assert sent == pytest.approx(sum(sum(bucket.values()) for bucket in buckets))


def slow_link(message_seconds: float, reduction_seconds: float) -> list[Instruction]:
    """Returns the plan of a pass of four MoE layers, with a dense part and its gradient before each."""
    order: list[Instruction] = []
    gradients: list[Gradient] = []
    buckets: list[dict[str, float]] = []
    before: tuple[str, ...] = ()
    for layer in range(4):
        dense, gradient, experts = f"dense{layer}", f"dw{layer}", f"experts{layer}"
        order += [
            compute(dense, 1.0, *before),
            message(f"S{layer}", message_seconds, dense),
            compute(gradient, 1.0, dense),
            compute(experts, 1.0, f"S{layer}"),
            message(f"R{layer}", message_seconds, experts),
        ]
        before = (f"R{layer}",)
        gradients.append(Gradient(f"w{layer}", layer, gradient))
        buckets.append({f"w{layer}": reduction_seconds})
    order.append(compute("embedding", 1.0, *before))
    orders = [order, listed(order), listed(order, reductions=by_source(gradients, buckets))]
    return plan_hand_overs(orders, gradients, buckets)


@pytest.mark.parametrize("reduction_seconds", [0.5, 1.0, 2.0, 8.0])
def test_on_a_slow_link_a_reduction_costs_what_does_not_fit_into_its_gap(reduction_seconds: float) -> None:
    """The link is idle for 1 s beside the experts of each layer: only there can it carry a reduction free.

    If all-to-alls take longer than all computation, what is left of a reduction makes the pass longer,
    wherever it is put.
    """
    without = total_seconds(slow_link(5.0, 0.0))
    assert total_seconds(slow_link(5.0, reduction_seconds)) == without + 4 * max(reduction_seconds - 1.0, 0.0)
