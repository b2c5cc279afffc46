"""The functions that pick the best experts and draw random ones, against sorting and counting."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pmoe.gates.draws import distinct
from pmoe.gates.expert_choice import best_tokens
from pmoe.gates.soft import inverse_length
from pmoe.kernels.route import top_indices
from pmoe.kernels.route.reference import ROUNDS


@pytest.mark.parametrize("top_k", [1, 2, 3, 8, ROUNDS, ROUNDS + 1, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", ["distinct", "tied", "with nan and infinities"])
def test_the_largest_are_those_of_a_stable_sort(top_k: int, dtype: torch.dtype, values: str) -> None:
    torch.manual_seed(0)
    score = torch.randn(50, 24, dtype=dtype)
    if values != "distinct":
        score = torch.randint(3, (50, 24)).to(dtype)
    if values == "with nan and infinities":
        score[torch.rand_like(score) < 0.2] = math.nan
        score[torch.rand_like(score) < 0.2] = math.inf
        score[torch.rand_like(score) < 0.4] = -math.inf
        score[0] = -math.inf
        score[1] = math.nan
    before = score.clone()
    expected = score.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(top_indices(score, top_k), expected)
    assert torch.equal(score.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("top_k", [1, 2, ROUNDS + 1])
def test_negative_infinity_ties_with_the_lowest_finite_number(top_k: int) -> None:
    score = torch.full((2, 24), -math.inf)
    score[0, 3], score[1, 0] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    assert top_indices(score, top_k).tolist() == [list(range(top_k))] * 2


@pytest.mark.parametrize("rows", [0, 1, 4, 9, 10])
def test_the_best_tokens_of_an_expert_are_those_of_a_stable_sort(rows: int) -> None:
    torch.manual_seed(0)
    score = torch.randint(3, (10, 40)).double()  # many ties
    score[3, :10] = math.nan
    score[5, 10:20] = math.inf
    score[7, 15:25] = -math.inf
    expected = torch.zeros(10, 40, dtype=torch.bool)
    best = score.nan_to_num(nan=math.inf).sort(dim=0, descending=True, stable=True).indices[:rows]
    expected.scatter_(0, best, torch.ones_like(best, dtype=torch.bool))
    assert torch.equal(best_tokens(score, rows), expected)


@pytest.mark.parametrize("num_experts, top_k", [(5, 1), (5, 2), (5, 4), (5, 5)])
def test_every_set_of_distinct_experts_is_equally_likely(num_experts: int, top_k: int) -> None:
    torch.manual_seed(0)
    num_draws = 60_000
    chosen = distinct(torch.randint(1 << 62, (num_draws, top_k)), num_experts).sort(-1).values
    sets = list(itertools.combinations(range(num_experts), top_k))
    counts = [int((chosen == torch.tensor(one)).all(-1).sum()) for one in sets]
    assert sum(counts) == num_draws  # so they are distinct
    mean = num_draws / len(sets)
    chi_square = sum((count - mean) ** 2 / mean for count in counts)
    freedom = len(sets) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom)


def test_distinct_experts_follow_from_the_draws() -> None:
    # E = 3, K = 2: 7 mod 2 = 1 and 8 mod 3 = 2; 1 and 4 mod 3 = 1 again, so the last expert instead.
    assert distinct(torch.tensor([[7, 8], [1, 4]]), 3).tolist() == [[1, 2], [1, 2]]


def test_a_vector_without_length_has_no_direction_and_no_gradient() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-8, 0.0]], requires_grad=True)
    unit = vectors * inverse_length(vectors)
    torch.testing.assert_close(unit, torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, 0.0]]))
    (unit @ torch.tensor([1.0, 0.0])).sum().backward()
    # d/dv of v_0 / |v| is (v_1^2, -v_0 v_1) / |v|^3.
    torch.testing.assert_close(vectors.grad, torch.tensor([[0.128, -0.096], [0.0, 0.0], [0.0, 0.0]]))
