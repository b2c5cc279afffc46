"""Lancet's schedule pass on graphs without tensors, against search and a path's definition."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from pmoe.graph.instructions import (
    COMMUNICATE,
    COMPUTE,
    Instruction,
    exposed_seconds,
    peak_bytes,
    timeline,
    total_seconds,
)
from pmoe.graph.weight_gradients import (
    assign,
    labels,
    listed,
    placed,
    weight_gradients,
)


def overlapped_seconds(instructions: Sequence[Instruction], assigned: Mapping[str, str]) -> float:
    """The objective of section 4.2: the seconds for which all-to-alls are hidden, summed over all-to-alls."""
    seconds = {each.name: each.seconds for each in instructions}
    hidden: dict[str, float] = {}
    for name, behind in assigned.items():
        hidden[behind] = hidden.get(behind, 0.0) + seconds[name]
    return sum(min(seconds[name], found) for name, found in hidden.items())


def of(name: str, *waits: str, seconds: float = 1.0, lane: str = COMPUTE, num_bytes: int = 0) -> Instruction:
    return Instruction(name=name, waits=waits, holds=waits, seconds=seconds, lane=lane, num_bytes=num_bytes)


def backward(layers: int, draw: random.Random) -> list[Instruction]:
    """Returns the instructions of a backward pass: a chain of layers, in which each product has a weight
    gradient.

    Every second layer has two all-to-alls with experts between them.
    """
    found = [of("loss")]
    before = "loss"
    for layer in range(layers):
        if layer % 2:
            found.append(of(f"R{layer}", before, seconds=draw.uniform(0.5, 4), lane=COMMUNICATE))
            found.append(of(f"X{layer}", f"R{layer}", seconds=draw.uniform(0.5, 2)))
            found.append(of(f"wX{layer}", f"X{layer}", seconds=draw.uniform(0.5, 2)))
            found.append(of(f"S{layer}", f"X{layer}", seconds=draw.uniform(0.5, 4), lane=COMMUNICATE))
            before = f"S{layer}"
        found.append(of(f"d{layer}", before, seconds=draw.uniform(0.2, 1)))
        found.append(of(f"v{layer}", before, seconds=0.0))
        found.append(of(f"w{layer}", f"v{layer}", seconds=draw.uniform(0.2, 1)))
        before = f"d{layer}"
    return found


def random_graph(seed: int, count: int = 14) -> list[Instruction]:
    draw = random.Random(seed)
    found: list[Instruction] = []
    for at in range(count):
        waits = [each.name for each in draw.sample(found, min(len(found), draw.randint(0, 2)))]
        lane = COMMUNICATE if draw.random() < 0.2 else COMPUTE
        num_bytes = draw.randint(0, 9)
        found.append(of(f"i{at}", *waits, seconds=draw.uniform(0, 2), lane=lane, num_bytes=num_bytes))
    return found


def reaches(graph: Sequence[Instruction]) -> set[tuple[str, str]]:
    """Returns the pairs (a, b) for which there is a path from a to b."""
    pairs = {(name, each.name) for each in graph for name in each.waits}
    for middle, first, last in itertools.product([each.name for each in graph], repeat=3):
        if (first, middle) in pairs and (middle, last) in pairs:
            pairs.add((first, last))
    return pairs


def assert_runs(order: Sequence[Instruction], graph: Sequence[Instruction]) -> None:
    """Checks an order: the same instructions, each after those it waits for, all-to-alls in their old
    order.
    """
    assert sorted(each.name for each in order) == sorted(each.name for each in graph)
    done = set[str]()
    for each in order:
        assert done.issuperset(each.waits), each.name
        done.add(each.name)
    assert [each.name for each in order if each.communicates] == [
        each.name for each in graph if each.communicates
    ]


@pytest.mark.parametrize("seed", range(20))
def test_labels_are_what_no_path_joins(seed: int) -> None:
    graph = random_graph(seed)
    paths, place = reaches(graph), {each.name: at for at, each in enumerate(graph)}
    messages = {each.name for each in graph if each.communicates}
    free = {each.name for each in graph if not each.communicates}
    free = {name for name in free if not any((name, message) in paths for message in messages)}
    assert weight_gradients(graph) == free
    for message, found in labels(graph).items():
        for name in free:
            needs = [each for each in place if (each, name) in paths and each not in free]
            expected = (message, name) not in paths and all(place[each] < place[message] for each in needs)
            assert (name in found) == expected, (message, name)


@pytest.mark.parametrize("seed", range(20))
def test_each_order_runs(seed: int) -> None:
    for graph in (random_graph(seed), backward(6, random.Random(seed))):
        assert_runs(placed(graph, assign(graph)), graph)
        assert_runs(listed(graph), graph)


def every_assignment(graph: Sequence[Instruction]) -> Iterator[dict[str, str]]:
    fits: dict[str, list[str | None]] = {}
    for message, names in labels(graph).items():
        for name in names:
            fits.setdefault(name, [None]).append(message)
    for choice in itertools.product(*fits.values()):
        yield {name: message for name, message in zip(fits, choice, strict=True) if message is not None}


@pytest.mark.slow
@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.nightly)])
def test_the_greedy_assignment_is_near_the_optimum(count: int) -> None:
    """Algorithm 1 promises no bound."""
    ratios = []
    for seed in range(count):
        graph = backward(4, random.Random(seed))
        best = max(overlapped_seconds(graph, each) for each in every_assignment(graph))
        ratios.append(overlapped_seconds(graph, assign(graph)) / best)
    mean = sum(ratios) / len(ratios)
    print(f"greedy / optimum over {len(ratios)} instances: {mean:.4f}, at worst {min(ratios):.3f}")
    assert max(ratios) <= 1 + 1e-12
    assert mean > 0.9


def test_weight_gradients_fill_the_waits() -> None:
    graph = [
        of("a"),
        of("message", "a", seconds=4.0, lane=COMMUNICATE),
        of("next", "message"),
        of("small", "a", seconds=1.0),
        of("large", "a", seconds=3.0),
    ]
    assert exposed_seconds(graph) == 4.0
    order = listed(graph)
    assert [each.name for each in order] == ["a", "message", "large", "small", "next"]
    assert total_seconds(order) == 6.0


def test_a_message_starts_after_all_computation_before_it_in_the_list() -> None:
    """The bug: a message was predicted to start when its rows existed, though the host still computed.

    So passes whose weight gradients are not moved seemed to wait for messages for less time than they do. In
    bench/results/lancet.json the two plans of this kind took 11 and 14 % longer than predicted.

        as traced   compute      | dX | dW    |           | next |
                    communicate               | message   |
        moved       compute      | dX | dW    |     | next |
                    communicate       | message   |
    """
    traced = [
        of("dX"),
        of("dW", seconds=2.0),
        of("message", "dX", seconds=3.0, lane=COMMUNICATE),
        of("next", "message"),
    ]
    start_of = {simulated.task.name: simulated.start for simulated in timeline(traced)}
    assert start_of == {"dX": 0.0, "dW": 1.0, "message": 3.0, "next": 6.0}
    assert (total_seconds(traced), exposed_seconds(traced)) == (7.0, 3.0)
    moved = listed(traced)
    assert [instruction.name for instruction in moved] == ["dX", "message", "dW", "next"]
    assert (total_seconds(moved), exposed_seconds(moved)) == (5.0, 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_that_of_a_step_by_step_count(seed: int) -> None:
    graph, given = random_graph(seed), {"x": 5, "y": 3}
    graph[3] = of("i3", *graph[3].waits, num_bytes=4)
    graph[3] = Instruction(name="i3", waits=graph[3].waits, holds=(*graph[3].waits, "x"), num_bytes=4)
    kept = {"i2", "y"}
    sizes = {**given, **{each.name: each.num_bytes for each in graph}}
    peak = 0
    for at, now in enumerate(graph):
        later = {name for each in graph[at + 1 :] for name in each.holds}
        alive = {*given, *(each.name for each in graph[: at + 1])}
        needed = {name for name in alive if name in later | kept | {now.name} | set(now.holds)}
        untouched = {name for name in given if not any(name in each.holds for each in graph)}
        peak = max(peak, sum(sizes[name] for name in needed | untouched))
    assert peak_bytes(graph, kept, given) == max(peak, sum(given.values()))


def test_a_limit_is_kept() -> None:
    """Each product's result is needed until its weight gradient is computed: late gradients keep all
    results.
    """
    draw = random.Random(1)
    graph = [
        Instruction(
            name=each.name,
            waits=each.waits,
            holds=each.holds,
            seconds=each.seconds,
            lane=each.lane,
            num_bytes=10,
        )
        for each in backward(12, draw)
    ]
    graph += [of("late", graph[-1].name, seconds=50.0, lane=COMMUNICATE)]
    freely, least = peak_bytes(listed(graph), (), {}), peak_bytes(graph, (), {})
    assert freely > least
    assert peak_bytes(listed(graph, limit=least), (), {}) <= least + 20


@pytest.mark.parametrize("seed", range(5))
def test_each_result_of_an_instruction_is_selected_directly_after_it(seed: int) -> None:
    """The instructions X have two results each: one is sent, a weight gradient reads the other one."""
    draw = random.Random(seed)
    graph = []
    for at, instruction in enumerate(backward(8, draw)):
        graph.append(instruction)
        if instruction.name.startswith("X"):
            first, second = (
                replace(of(f"{instruction.name}.{number}", instruction.name, num_bytes=5), selects=True)
                for number in range(2)
            )
            graph += [first, second, of(f"late{at}", second.name, num_bytes=1)]
    for order in (placed(graph, assign(graph)), listed(graph), listed(graph, limit=12)):
        assert_runs(order, graph)
        names = [instruction.name for instruction in order]
        for name in names:
            if name.startswith("X") and "." not in name:
                place = names.index(name)
                assert names[place + 1 : place + 3] == [f"{name}.0", f"{name}.1"]
