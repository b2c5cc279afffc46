"""Gates and their losses against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import pmoe
from pmoe.gates import GATES, Gate, SwitchGate, TopKGate, load_balance_loss, router_z_loss

LOG = math.log


def gate_with(logits_TE: list[list[float]], top_k: int = 1, **options: object) -> tuple[TopKGate, Tensor]:
    """Returns a gate, and tokens for which it computes these logits: token t is the t-th unit vector."""
    logits = torch.tensor(logits_TE, dtype=torch.float64)
    gate = TopKGate(logits.shape[0], logits.shape[1], top_k, dtype=torch.float64, **options)
    with torch.no_grad():
        gate.weight.copy_(logits.t())
    return gate, torch.eye(logits.shape[0], dtype=torch.float64)


def close(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=1e-14, atol=1e-14)


# Softmax of these is (1/8, 2/8, 5/8).
LOGITS = [[0.0, LOG(2), LOG(5)]]


def test_one_choice_has_the_softmax_probability_as_its_weight() -> None:
    gate, x = gate_with(LOGITS)
    routing = gate(x)
    assert routing.expert.tolist() == [[2]]
    close(routing.weight, [[5 / 8]])


def test_several_choices_come_best_first_with_weights_that_sum_to_one() -> None:
    gate, x = gate_with(LOGITS, top_k=2)
    routing = gate(x)
    assert routing.expert.tolist() == [[2, 1]]
    close(routing.weight, [[5 / 7, 2 / 7]])


@pytest.mark.parametrize(
    "top_k, normalize, expected",
    [
        (1, False, [[5 / 8]]),
        (1, True, [[1.0]]),
        (2, False, [[5 / 8, 2 / 8]]),
        (2, True, [[5 / 7, 2 / 7]]),
        (3, False, [[5 / 8, 2 / 8, 1 / 8]]),
    ],
)
def test_normalisation_can_be_asked_for_or_refused(
    top_k: int, normalize: bool, expected: list[list[float]]
) -> None:
    gate, x = gate_with(LOGITS, top_k, normalize=normalize)
    close(gate(x).weight, expected)


@pytest.mark.parametrize(
    "logits, top_k, expected",
    [
        ([0, 0, 0, 0], 1, [0]),
        ([0, 0, 0, 0], 2, [0, 1]),
        ([0, 0, 0, 0], 4, [0, 1, 2, 3]),
        ([0, 1, 1, 0], 1, [1]),
        ([0, 1, 1, 0], 3, [1, 2, 0]),
        ([1, 0, 0, 1], 2, [0, 3]),
    ],
)
def test_ties_go_to_the_lowest_expert(logits: list[float], top_k: int, expected: list[int]) -> None:
    gate, x = gate_with([logits], top_k)
    assert gate(x).expert.tolist() == [expected]


def test_ties_among_many_experts_go_to_the_lowest_ones() -> None:
    gate, x = gate_with([[0.0] * 300], top_k=5)
    assert gate(x).expert.tolist() == [[0, 1, 2, 3, 4]]


def test_logits_decide_where_the_softmax_rounds_them_to_a_tie() -> None:
    gate, x = gate_with([[0.0, 1e-20, 2e-20]], top_k=2)
    assert torch.tensor([[0.0, 1e-20, 2e-20]], dtype=torch.float64).softmax(-1).unique().numel() == 1
    assert gate(x).expert.tolist() == [[2, 1]]


def test_the_weight_of_a_single_choice_has_a_gradient() -> None:
    gate, x = gate_with(LOGITS)
    gate(x).weight.sum().backward()
    p = [1 / 8, 2 / 8, 5 / 8]
    close(gate.weight.grad, [[-p[2] * p[0]], [-p[2] * p[1]], [p[2] * (1 - p[2])]])


def test_a_single_normalised_weight_would_have_no_gradient() -> None:
    gate, x = gate_with(LOGITS, normalize=True)
    gate(x).weight.sum().backward()
    close(gate.weight.grad, [[0.0], [0.0], [0.0]])


@pytest.mark.parametrize("name", ["topk", "switch"])
def test_a_gate_routes_no_tokens(name: str) -> None:
    gate = GATES[name](6, 4, z_loss_weight=0.5)
    x = torch.empty(0, 6, requires_grad=True)
    routing = gate(x)
    assert routing.expert.shape == routing.weight.shape == (0, 1)
    assert routing.expert.dtype == torch.int64
    assert routing.l_aux.item() == 0
    (routing.weight.sum() + routing.l_aux).backward()
    assert x.grad.shape == (0, 6)
    assert torch.equal(gate.weight.grad, torch.zeros(4, 6))


@pytest.mark.parametrize(
    "rows, computed",
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_routing_is_computed_in_float32_or_wider(
    rows: torch.dtype, computed: torch.dtype, autocast: bool
) -> None:
    torch.manual_seed(0)
    gate = TopKGate(6, 4, 2, dtype=rows)
    x = torch.randn(5, 6, dtype=rows)
    with torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
        routing = gate(x)
    assert routing.weight.dtype == routing.l_aux.dtype == routing.logits.dtype == computed
    expected = x.to(computed) @ gate.weight.to(computed).t()
    torch.testing.assert_close(routing.logits, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("top_k", [1, 3])
def test_logits_that_are_no_numbers_still_give_distinct_experts(value: float, top_k: int) -> None:
    gate, x = gate_with([[0.0, value, 1.0, value], [value] * 4], top_k)
    expert = gate(x).expert
    assert expert.shape == (2, top_k)
    assert ((expert >= 0) & (expert < 4)).all()
    assert all(len(set(row)) == top_k for row in expert.tolist())


def test_a_switch_gate_is_top_one_without_normalisation() -> None:
    gate = SwitchGate(1, 3, dtype=torch.float64)
    with torch.no_grad():
        gate.weight.copy_(torch.tensor(LOGITS).t())
    routing = gate(torch.ones(1, 1, dtype=torch.float64))
    assert routing.expert.tolist() == [[2]]
    torch.testing.assert_close(routing.weight, torch.tensor([[5 / 8]], dtype=torch.float64))


def test_a_switch_gate_refuses_several_choices_and_normalisation() -> None:
    with pytest.raises(ValueError, match=r"top_k \(2\) must be 1 with gate='switch'"):
        SwitchGate(6, 4, 2)
    with pytest.raises(ValueError, match=r"normalize_gate \(True\) must be False or None"):
        SwitchGate(6, 4, normalize=True)


@pytest.mark.parametrize("top_k", [0, -1, 5])
def test_a_gate_refuses_more_choices_than_experts_or_none(top_k: int) -> None:
    with pytest.raises(ValueError, match=rf"top_k \({top_k}\) must be between 1 and num_experts \(4\)"):
        TopKGate(6, 4, top_k)


def test_a_gate_must_say_how_it_routes() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Gate()


def test_the_balance_loss_is_experts_times_shares_times_probabilities() -> None:
    probability = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64)
    # Of 2 choices one fell on expert 0, one on expert 2; mean probabilities 0.3, 0.25, 0.45.
    loss = load_balance_loss(probability, torch.tensor([[0], [2]]))
    close(loss, 3 * (0.5 * 0.3 + 0.5 * 0.45))


def test_the_balance_loss_counts_every_choice_of_a_token() -> None:
    probability = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64)
    # Of 4 choices 1, 2 and 1 fell on the experts.
    loss = load_balance_loss(probability, torch.tensor([[0, 1], [2, 1]]))
    close(loss, 3 * (0.25 * 0.3 + 0.5 * 0.25 + 0.25 * 0.45))


def test_the_balance_loss_is_one_where_even_and_the_number_of_experts_at_worst() -> None:
    even = torch.full((4, 4), 0.25, dtype=torch.float64)
    close(load_balance_loss(even, torch.tensor([[0], [1], [2], [3]])), 1.0)
    worst = torch.zeros(5, 4, dtype=torch.float64)
    worst[:, 1] = 1
    close(load_balance_loss(worst, torch.ones(5, 1, dtype=torch.int64)), 4.0)


def test_the_balance_loss_has_a_gradient_through_the_probabilities() -> None:
    probability = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64, requires_grad=True)
    load_balance_loss(probability, torch.tensor([[0], [2]])).backward()
    close(probability.grad, [[3 * 0.5 / 2, 0.0, 3 * 0.5 / 2]] * 2)


def test_the_z_loss_is_the_mean_square_of_the_log_of_summed_exponentials() -> None:
    logits = torch.tensor([[0.0, LOG(2), LOG(5)], [LOG(3), LOG(3), LOG(4)]], dtype=torch.float64)
    close(router_z_loss(logits), (LOG(8) ** 2 + LOG(10) ** 2) / 2)


def test_the_z_loss_gradient_is_the_softmax_times_twice_the_log() -> None:
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    router_z_loss(logits).backward()
    close(logits.grad, [[2 * LOG(8) * p for p in (1 / 8, 2 / 8, 5 / 8)]])


def test_losses_of_no_tokens_are_zero_and_attached() -> None:
    empty = torch.empty(0, 3, requires_grad=True)
    for loss in (load_balance_loss(empty, torch.empty(0, 2, dtype=torch.int64)), router_z_loss(empty)):
        assert loss.item() == 0
        assert loss.requires_grad


def test_a_gate_adds_the_weighted_z_loss_to_the_balance_loss() -> None:
    gate, x = gate_with(LOGITS, z_loss_weight=0.25)
    # The one token chose expert 2, whose probability is 5/8.
    close(gate(x).l_aux, 3 * 5 / 8 + 0.25 * LOG(8) ** 2)


def test_the_layer_passes_its_options_to_its_gate() -> None:
    layer = pmoe.MoELayer(6, 10, 4, 2, normalize_gate=False, z_loss_weight=0.25, dtype=torch.float64)
    x = torch.randn(7, 6, dtype=torch.float64)
    layer(x)
    routing = layer.gate(x)
    probability = torch.softmax(x @ layer.gate.weight.t(), -1)
    torch.testing.assert_close(routing.weight, probability.topk(2).values)
    z_loss = (x @ layer.gate.weight.t()).logsumexp(-1).square().mean()
    expected = load_balance_loss(probability, routing.expert) + 0.25 * z_loss
    torch.testing.assert_close(layer.l_aux, expected)
