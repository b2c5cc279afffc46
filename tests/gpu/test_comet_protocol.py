"""Who waits for whom in the fused kernels, on the device: random sleeps in every role, a thousand rounds on
one heap, ranks whose launches are their own, each wait left out once, and ranks that never come.

compute-sanitizer's racecheck sees shared memory only: what blocks and ranks tell each other through global
memory is checked here, by values that are known to the bit (`tests.gpu.integers`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pmoe.kernels import extension
from pmoe.kernels.comet import launcher
from pmoe.kernels.comet import operators as comet_operators
from pmoe.kernels.heap import WAIT_SECONDS, HeapError
from tests.faults import InjectedFaults
from tests.gpu.fused import DEVICE, need_kernels
from tests.gpu.integers import Integers
from tests.gpu.support import NEEDS_GPU

pytestmark = NEEDS_GPU

ROUNDS, ROUNDS_AT_ONCE = 1000, 50
PLANTED_ROUNDS = 50
"""Within so many a missing wait must show."""


@pytest.fixture(params=["sm_90a", "sm_80"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    need_kernels()
    own, wanted = extension.path(DEVICE)[0], str(request.param)
    if wanted == "sm_90a" and own != wanted:
        pytest.skip(f"this device runs {own}")
    monkeypatch.setattr(launcher, "path", lambda _: (wanted, None))
    return wanted


@contextmanager
def integers(num_ranks: int, **options: Any) -> Iterator[Integers]:
    world = Integers(num_ranks, **options)
    try:
        yield world
    finally:
        world.virtual.close()


def wrong_rounds(world: Integers, rounds: int, at_once: int = ROUNDS_AT_ONCE) -> list[int]:
    """Which of so many came out wrong. The host looks at them only now and then: rounds follow each other on
    the device without a gap."""
    wrong: list[int] = []
    for first in range(0, rounds, at_once):
        numbers = range(first, min(first + at_once, rounds))
        found = torch.stack([world.play(world.turn(number)) for number in numbers])
        world.virtual.check()
        wrong += [number for number, bad in zip(numbers, found.tolist(), strict=True) if bad]
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_thousand_rounds_on_one_heap_with_sleeps_in_every_role(num_ranks: int) -> None:
    """Routing, tokens and who sleeps change with every round."""
    with integers(num_ranks, faults=InjectedFaults(delay_seed=num_ranks), seed=num_ranks) as world:
        wrong = wrong_rounds(world, ROUNDS)
    assert not wrong, f"{len(wrong)} of {ROUNDS} rounds, first {wrong[:10]}"


def test_rounds_without_sleeps() -> None:
    with integers(4, experts=1, top_k=3, seed=7) as world:
        wrong = wrong_rounds(world, 200)
    assert not wrong, f"{len(wrong)} of 200 rounds, first {wrong[:10]}"


@pytest.mark.sanitize
def test_a_few_rounds_with_sleeps() -> None:
    with integers(2, tokens=40, d_model=264, d_hidden=72, faults=InjectedFaults(delay_seed=3)) as world:
        assert not wrong_rounds(world, 2)


# ---- planted


PLANTED = {
    "nothing": (),
    "grant": ("grant",),
    "arrival": ("arrival",),
    "tiles": ("tiles",),
    "returned": ("returned",),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_each_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch, planted: tuple[str, ...]) -> None:
    """By wrong values; or, where rows went astray without their grant, by whoever waits for them in vain.

    One choice a token: rows that are in the wrong place then have links that end, and lead nowhere else.
    """
    monkeypatch.setenv(WAIT_SECONDS, "0.5" if planted else "30")
    noticed = None
    faults = InjectedFaults(delay_seed=11, not_waited=planted)
    with integers(2, top_k=1, d_hidden=2048, faults=faults, seed=5) as world:  # tiles take their time
        for number in range(PLANTED_ROUNDS):
            try:
                if bool(world.play(world.turn(number))):
                    noticed = f"round {number}: wrong values"
                world.virtual.check()
            except HeapError as error:
                noticed = f"round {number}: {error}"
            if noticed is not None:
                break
    if planted:
        assert noticed is not None, (
            f"without waiting for {planted[0]} all of {PLANTED_ROUNDS} rounds were right"
        )
    else:
        assert noticed is None, noticed


# ---- ranks in launches of their own


def on_streams(world: Integers, rounds: int) -> list[int]:
    """Rounds that came out wrong, each rank by launches of its own on a stream of its own."""
    heaps, given = world.virtual.heaps, world.given
    turns = [world.turn(number) for number in range(rounds)]
    ranks, streams = [], []
    for heap in heaps:
        faults = InjectedFaults(delay_seed=31 + heap.rank)
        own = faults.launcher([heap], lambda kernel, direction: world.virtual.division)
        own.blocks = world.virtual.launcher.blocks  # all ranks' are resident together
        ranks.append(own)
        streams.append(torch.cuda.Stream(DEVICE))
        with torch.cuda.stream(streams[-1]):  # so that no memory is asked of CUDA while a kernel waits
            sizes = [1 << 19] * (2 * rounds + 16)
            held = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes]
        del held
    world.fill()
    torch.cuda.synchronize()
    results = []
    for turn in turns:
        for rank, (own, stream) in enumerate(zip(ranks, streams, strict=True)):
            fused_routing, w1, w2 = (
                [turn.fused_routings[rank]],
                given.w1[rank : rank + 1],
                given.w2[rank : rank + 1],
            )
            with torch.cuda.stream(stream):
                hidden, active = comet_operators.dispatch_hidden(
                    own, fused_routing, turn.x_TM, turn.weight_TK, w1, [None], activation="relu", keep=True
                )
                y = comet_operators.product_combine(own, fused_routing, active, w2, [None])
                assert hidden is not None
                of_hidden, _, dots = comet_operators.dispatch_hidden_gradient(
                    own, fused_routing, turn.grad_TM, turn.weight_TK, w2, [None], hidden, activation="relu"
                )
                of_x, of_weight = comet_operators.gradient_combine(own, fused_routing, of_hidden, w1, dots)
            results.append((turn, fused_routing[0], y, of_x, of_weight))
    world.virtual.check()
    wrong = set()
    for at, (turn, home, *found) in enumerate(results):
        own_tokens = slice(home.first_token, home.first_token + (home.num_tokens or 0))
        for each, wanted in zip(found, (turn.y, turn.of_x, turn.of_weight), strict=True):
            if not torch.equal(each[own_tokens], wanted[own_tokens]):
                wrong.add(at // len(heaps))
    return sorted(wrong)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_may_be_a_launch_apart(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """As on devices of their own: no launch holds the ranks together. Skipped where a device does not run the
    cooperative launches of several streams at once."""
    with integers(num_ranks, seed=3) as world:  # loads both kernels of both ways while nobody waits
        assert not wrong_rounds(world, 1)
    monkeypatch.setenv(WAIT_SECONDS, "5")
    with integers(num_ranks, seed=4) as world:
        try:
            wrong = on_streams(world, 1)
        except HeapError as error:
            pytest.skip(
                f"cooperative launches of {num_ranks} streams do not run together on {DEVICE}: {error}"
            )
        wrong += [1 + number for number in on_streams(world, 60)]
    assert not wrong, f"rounds {wrong[:10]}"


# ---- ranks that never come


def alone(world: Integers) -> launcher.Launcher:
    """Rank 0 by itself."""
    return launcher.Launcher(world.virtual.heaps[:1], lambda kernel, direction: world.virtual.division)


@pytest.mark.parametrize("rounds", [0, 3], ids=lambda rounds: f"after {rounds} rounds")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_never_sends_is_named_and_a_new_heap_serves(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, rounds: int
) -> None:
    monkeypatch.setenv(WAIT_SECONDS, "0.5")
    with integers(num_ranks) as world:
        assert not wrong_rounds(world, rounds)
        own, turn, given = alone(world), world.turn(rounds), world.given
        # Both launches, as a layer does: the second finds a heap that has failed, or learns of it by itself.
        with pytest.raises(HeapError, match="rank 0 waited 0.5 s in vain for rank [1-3]: the (grant|arrival)"
                           ) as failed:  # fmt: skip
            _, active = comet_operators.dispatch_hidden(
                own, turn.fused_routings[:1], turn.x_TM, turn.weight_TK, given.w1[:1], [None],
                activation="relu", keep=False,
            )  # fmt: skip
            comet_operators.product_combine(own, turn.fused_routings[:1], active, given.w2[:1], [None])
            world.virtual.check()
        assert f", in round {1 + 2 * rounds}. " in str(failed.value)  # two dispatches a turn
        with pytest.raises(HeapError, match="make a new heap"):
            world.virtual.heaps[0].check()
        world.virtual.heaps[1].check()
    with integers(num_ranks, seed=9) as world:
        assert not wrong_rounds(world, 3)


def test_a_rank_that_never_returns_its_sums_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAIT_SECONDS, "0.5")
    with integers(2) as world:
        turn, given = world.turn(1), world.given
        _, active = comet_operators.dispatch_hidden(
            world.virtual.launcher, turn.fused_routings, turn.x_TM, turn.weight_TK, given.w1, given.b1,
            activation="relu", keep=False,
        )  # fmt: skip
        world.virtual.check()
        comet_operators.product_combine(
            alone(world), turn.fused_routings[:1], active[:1], given.w2[:1], [None]
        )
        with pytest.raises(HeapError, match=r"rank 1: the return of column chunk \d") as failed:
            world.virtual.check()
        assert ", in round 1. " in str(failed.value)
    assert torch.ones(5, device=DEVICE).sum().item() == 5
    with integers(2, seed=9) as world:
        assert not wrong_rounds(world, 3)


def test_whoever_waits_for_a_rank_that_has_failed_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gave up on rank 1; rank 1 comes late, and finds no sender."""
    monkeypatch.setenv(WAIT_SECONDS, "0.3")
    with integers(2) as world:
        turn, given = world.turn(1), world.given
        for rank in range(2):
            own = launcher.Launcher(
                [world.virtual.heaps[rank]], lambda kernel, direction: world.virtual.division
            )
            comet_operators.dispatch_hidden(
                own, turn.fused_routings[rank : rank + 1], turn.x_TM, turn.weight_TK,
                given.w1[rank : rank + 1], [None], activation="relu", keep=False,
            )  # fmt: skip
        for heap, peer in itertools.zip_longest(world.virtual.heaps, (1, 0)):
            with pytest.raises(HeapError, match=f"in vain for rank {peer}: the (grant|arrival)"):
                heap.check()
