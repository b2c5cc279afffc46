"""Gates without parameters: the gate that hashes token ids, and the random gate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pmoe.gates import HashGate, RandomGate
from pmoe.gates.hash import hashed
from tests import fresh

M, E = 6, 64
WORD = (1 << 64) - 1


def chi_square(expert: Tensor, num_experts: int) -> float:
    counts = expert.flatten().bincount(minlength=num_experts).double()
    mean = expert.numel() / num_experts
    return ((counts - mean).square() / mean).sum().item()


def bound(num_experts: int) -> float:
    """Returns a bound of random counts: five standard deviations above the mean of a chi-square with E - 1
    degrees of freedom.
    """
    return num_experts - 1 + 5 * math.sqrt(2 * (num_experts - 1))


def split_mix(state: int) -> int:
    """Returns the next number of the generator SplitMix64, computed with Python's integers."""
    state = (state + 0x9E3779B97F4A7C15) & WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def test_the_reference_is_split_mix() -> None:
    assert split_mix(1234567) == 6457827717110365317  # of the generator's published test vector


@pytest.mark.parametrize("seed", [0, 1, -1, 12345, 1 << 70])
def test_the_hash_is_that_of_unbounded_integers(seed: int) -> None:
    ids = [0, 1, -1, 2, 50_000, (1 << 63) - 1, -(1 << 63)]
    key = split_mix(seed & WORD)
    for row, number in zip(hashed(torch.tensor(ids), seed, 3).tolist(), ids, strict=True):
        start = split_mix((((number & WORD) ^ key) - 0x9E3779B97F4A7C15) & WORD)
        expected, state = [], start
        for _ in range(3):
            expected.append(split_mix(state) & (WORD >> 1))
            state = (state + 0x9E3779B97F4A7C15) & WORD
        assert row == expected


def test_hashes_are_pinned() -> None:
    """The hashes may never change, because models that were trained with them would get other experts."""
    routing = HashGate(M, 8, 3)(torch.randn(4, M), torch.tensor([0, 1, 2, -7]))
    assert routing.expert.tolist() == [[2, 1, 3], [3, 4, 7], [4, 6, 0], [1, 2, 6]]
    torch.testing.assert_close(routing.weight, torch.full((4, 3), 1 / 3))


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_ids_are_spread_evenly(top_k: int) -> None:
    ids = torch.arange(50_000)
    for seed in (0, 1):
        expert = HashGate(M, E, top_k, seed=seed)(torch.empty(50_000, M), ids).expert
        assert all(len(set(row)) == top_k for row in expert[:2000].tolist())
        assert chi_square(expert, E) <= bound(E)


def test_ids_in_strides_are_spread_evenly_too() -> None:
    for stride in (2, 64, 1000, 1 << 32):
        ids = torch.arange(20_000) * stride
        assert chi_square(HashGate(M, E)(torch.empty(20_000, M), ids).expert, E) <= bound(E)


def test_seeds_group_ids_differently() -> None:
    ids = torch.arange(20_000)
    x = torch.empty(20_000, M)
    one, two = (HashGate(M, E, seed=seed)(x, ids).expert for seed in (0, 1))
    pairs = one * E + two  # independent: each of the E * E pairs is equally likely
    assert chi_square(pairs, E * E) <= bound(E * E)


def test_an_id_has_the_same_experts_wherever_and_whenever_it_stands() -> None:
    gate = HashGate(M, E, 4, seed=3)
    ids = torch.tensor([5, 9, 5, -5, 9])
    expert = gate(torch.randn(5, M), ids).expert
    assert torch.equal(expert[0], expert[2])
    assert torch.equal(expert[1], expert[4])
    assert not torch.equal(expert[0], expert[3])
    assert torch.equal(gate.eval()(torch.randn(2, M), ids[3:]).expert, expert[3:])


def test_another_process_hashes_alike() -> None:
    program = (
        "import torch; from pmoe.gates import HashGate; "
        "print(HashGate(4, 100, 3, seed=7)(torch.empty(50, 4), torch.arange(50)).expert.tolist())"
    )
    there = fresh.run(program)
    here = HashGate(4, 100, 3, seed=7)(torch.empty(50, 4), torch.arange(50)).expert.tolist()
    assert there.strip() == str(here)


@pytest.mark.parametrize(
    "ids, message",
    [
        (torch.zeros(4, dtype=torch.int64), r"token_ids of shape \(4,\) must have the shape \(3,\)"),
        (torch.zeros(3, 1, dtype=torch.int64), r"token_ids of shape \(3, 1\) must have the shape \(3,\)"),
        (torch.zeros(3, dtype=torch.int32), r"token_ids of dtype torch.int32 must be torch.int64"),
        (torch.zeros(3), r"token_ids of dtype torch.float32 must be torch.int64"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), r"token_ids on meta must be on cpu"),
        ([0, 1, 2], r"token_ids \(list\) must be a torch.Tensor"),
        (None, r"token_ids \(NoneType\) must be a torch.Tensor"),
    ],
)
def test_bad_ids_are_refused(ids: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HashGate(M, 4)(torch.randn(3, M), ids)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("training", [True, False])
def test_random_experts_are_even_distinct_and_drawn_anew(top_k: int, training: bool) -> None:
    torch.manual_seed(0)
    gate = RandomGate(M, E, top_k).train(training)
    routing = gate(torch.empty(30_000, M))
    assert chi_square(routing.expert, E) <= bound(E)
    assert all(len(set(row)) == top_k for row in routing.expert[:2000].tolist())
    torch.testing.assert_close(routing.weight, torch.full((30_000, top_k), 1 / top_k))
    assert routing.l_aux.item() == 0
    assert not torch.equal(gate(torch.empty(30_000, M)).expert, routing.expert)


def test_a_seed_repeats_random_experts_and_so_does_checkpointing() -> None:
    gate = RandomGate(M, E, 2)
    x = torch.randn(20, M, requires_grad=True)
    drawn = []
    for _ in range(2):
        torch.manual_seed(4)
        drawn.append(gate(x).expert)
    assert torch.equal(*drawn)

    seen = []

    def block(rows: Tensor) -> Tensor:
        seen.append(gate(rows).expert)
        return (rows.square() * seen[-1].sum(-1, keepdim=True)).sum()

    checkpoint(block, x, use_reentrant=False).backward()
    assert len(seen) == 2
    assert torch.equal(*seen)
