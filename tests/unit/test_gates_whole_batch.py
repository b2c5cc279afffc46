"""Gates that need the whole batch, against the algorithms of their papers as loops in float64.

Letters: T tokens, K choices, E experts, C tokens an expert, S rows, P slots an expert, M = d_model.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pmoe.gates import BatchPrioritisedGate, ExpertChoiceGate, SoftGate, TopKGate
from pmoe.gates.batch_prioritised import keep_by_priority

T, M, E = 11, 5, 4


def tokens(num_tokens: int = T) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_tokens, M, dtype=torch.float64, generator=generator)


def close(actual: Tensor, expected: Tensor, name: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13, msg=lambda text: f"{name}: {text}")


# --- expert choice ---------------------------------------------------------------------------------------


def plain_expert_choice(x: Tensor, weight: Tensor, rows: int, over: str) -> list[tuple[int, int, Tensor]]:
    """Returns (token, expert, weight) in ascending order, by the paper's formulas.

    over: whether the softmax runs over tokens or over experts.
    """
    logits = x @ weight.t()
    score = logits.softmax(-1) if over == "experts" else logits
    triples = []
    for e in range(E):
        ranking = sorted(range(x.shape[0]), key=lambda t: -score[t, e].item())[:rows]
        if over == "tokens":
            kept = torch.full((x.shape[0],), -math.inf, dtype=torch.float64)
            kept = kept.index_put((torch.tensor(ranking),), logits[ranking, e])  # KeepTopK
            column = kept.softmax(0)
        else:
            column = score[:, e]
        triples += [(t, e, column[t]) for t in ranking]
    return sorted(triples, key=lambda triple: triple[:2])


@pytest.mark.parametrize("over", ["experts", "tokens"])
@pytest.mark.parametrize(
    "top_k, factor, rows", [(1, None, 3), (2, None, 6), (1, 0.1, 1), (2, 1.25, 7), (4, 1.0, 11), (4, 9.0, 11)]
)
def test_each_expert_takes_its_best_tokens(over: str, top_k: int, factor: float | None, rows: int) -> None:
    torch.manual_seed(0)
    gate = ExpertChoiceGate(M, E, top_k, capacity_factor=factor, normalize_over=over, dtype=torch.float64)
    mine, plain = tokens().requires_grad_(), tokens().requires_grad_()
    weight = gate.weight.detach().clone().requires_grad_()
    routing = gate(mine)
    triples = plain_expert_choice(plain, weight, rows, over)
    assert routing.token.tolist() == [t for t, _, _ in triples]
    assert routing.expert.tolist() == [[e] for _, e, _ in triples]
    expected = torch.stack([w for _, _, w in triples]).unsqueeze(1)
    close(routing.weight, expected, "weight")
    assert routing.l_aux.item() == 0
    assert routing.l_aux.requires_grad
    factors = torch.randn(expected.shape, dtype=torch.float64)
    ((routing.weight * factors).sum() + routing.l_aux).backward()
    (expected * factors).sum().backward()
    close(mine.grad, plain.grad, "x")
    close(gate.weight.grad, weight.grad, "gate.weight")
    alone = over == "tokens" and rows == 1  # a softmax over one token is 1
    assert (weight.grad.abs().max() > 1e-6) != alone


def test_tied_tokens_are_taken_from_the_lowest_on() -> None:
    gate = ExpertChoiceGate(M, E, 1)
    routing = gate(torch.zeros(8, M))  # all scores are 1/4; each expert takes 2 of 8 tokens
    assert routing.token.tolist() == [0] * 4 + [1] * 4
    assert routing.expert.flatten().tolist() == [0, 1, 2, 3] * 2
    torch.testing.assert_close(routing.weight, torch.full((8, 1), 0.25))


def test_ties_of_one_expert_take_nothing_from_another() -> None:
    gate = ExpertChoiceGate(M, E, 1, normalize_over="tokens")
    x = torch.zeros(8, M)
    x[:, 0] = torch.arange(8)
    with torch.no_grad():
        gate.weight.zero_()[1, 0] = 1  # expert 1 wants the last tokens, the others are indifferent
    routing = gate(x)
    taken = {e: routing.token[routing.expert[:, 0] == e].tolist() for e in range(E)}
    assert taken == {0: [0, 1], 1: [6, 7], 2: [0, 1], 3: [0, 1]}


def test_the_weights_over_tokens_sum_to_one_an_expert() -> None:
    gate = ExpertChoiceGate(M, E, 2, normalize_over="tokens", dtype=torch.float64)
    routing = gate(tokens())
    sums = torch.zeros(E, dtype=torch.float64).index_add(0, routing.expert[:, 0], routing.weight[:, 0])
    torch.testing.assert_close(sums, torch.ones(E, dtype=torch.float64))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_tokens_that_are_no_numbers_leave_an_expert_choice_routing_whole(value: float) -> None:
    x = torch.randn(8, M)
    x[2] = value
    routing = ExpertChoiceGate(M, E, 2)(x)
    pairs = list(zip(routing.token.tolist(), routing.expert[:, 0].tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    assert routing.expert[:, 0].bincount(minlength=E).tolist() == [4] * E
    assert routing.l_aux.item() == 0


# --- soft ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [None, 1, 3])
def test_soft_mixes_by_a_softmax_over_tokens_and_one_over_slots(slots: int | None) -> None:
    torch.manual_seed(0)
    gate = SoftGate(M, E, slots_per_expert=slots, dtype=torch.float64)
    with torch.no_grad():
        gate.scale.fill_(1.7)
    mine, plain = tokens().requires_grad_(), tokens().requires_grad_()
    phi = gate.weight.detach().clone().requires_grad_()
    scale = gate.scale.detach().clone().requires_grad_()
    routing = gate(mine)
    per = slots or 1
    logits = [
        [scale * (x @ phi[e, p]) / (x.norm() * phi[e, p].norm()) for e in range(E) for p in range(per)]
        for x in plain
    ]
    exp = torch.stack([torch.stack(row).exp() for row in logits])
    dispatch = exp / exp.sum(0, keepdim=True)
    combine = exp / exp.sum(1, keepdim=True)
    close(routing.mix.dispatch, dispatch, "dispatch")
    close(routing.mix.combine, combine, "combine")
    assert routing.expert.tolist() == [[e] for e in range(E) for _ in range(per)]
    assert torch.equal(routing.weight, torch.ones(E * per, 1, dtype=torch.float64))
    assert routing.l_aux.item() == 0
    by_dispatch, by_combine = torch.randn_like(dispatch), torch.randn_like(combine)
    mixed = (routing.mix.dispatch * by_dispatch).sum() + (routing.mix.combine * by_combine).sum()
    (mixed + routing.l_aux).backward()
    ((dispatch * by_dispatch).sum() + (combine * by_combine).sum()).backward()
    close(mine.grad, plain.grad, "x")
    close(gate.weight.grad, phi.grad, "phi")
    close(gate.scale.grad, scale.grad, "scale")


def test_soft_weights_do_not_depend_on_the_length_of_a_token() -> None:
    gate, x = SoftGate(M, E, dtype=torch.float64), tokens()
    close(gate(x * 100).mix.combine, gate(x).mix.combine, "combine")


def test_a_zero_token_weighs_all_slots_alike_and_harms_nothing() -> None:
    gate, x = SoftGate(M, E, dtype=torch.float64), tokens()
    x[3] = 0
    x.requires_grad_()
    routing = gate(x)
    close(routing.mix.combine[3], torch.full((E,), 1 / E, dtype=torch.float64), "combine")
    (routing.mix.combine.square().sum() + routing.mix.dispatch.square().sum()).backward()
    assert torch.equal(x.grad[3], torch.zeros(M, dtype=torch.float64))
    assert gate.weight.grad.isfinite().all()


# --- batch prioritised -----------------------------------------------------------------------------------


def algorithm_2(expert: list[list[int]], priority: list[float], capacity: int) -> list[list[bool]]:
    """V-MoE's Algorithm 2: which choices are kept if each expert takes at most ``capacity`` tokens.

    All first choices are taken in the order of their tokens' priority, then all second choices, and so on.
    """
    order = sorted(range(len(expert)), key=lambda t: -priority[t])
    taken = [0] * E
    keep = [[False] * len(row) for row in expert]
    for choice in range(len(expert[0])):
        for t in order:
            e = expert[t][choice]
            if taken[e] < capacity:
                keep[t][choice] = True
                taken[e] += 1
    return keep


@pytest.mark.parametrize("normalize", [None, False])
@pytest.mark.parametrize("top_k, factor", [(1, 0.5), (1, 1.0), (2, 0.25), (2, 0.9), (3, 0.6), (2, 5.0)])
def test_capacity_goes_to_first_choices_of_the_most_certain_tokens(
    top_k: int, factor: float, normalize: bool | None
) -> None:
    torch.manual_seed(0)
    gate = BatchPrioritisedGate(
        M, E, top_k, capacity_factor=factor, normalize=normalize, z_loss_weight=0.3, dtype=torch.float64
    )
    plain = TopKGate(M, E, top_k, normalize=normalize, z_loss_weight=0.3, dtype=torch.float64)
    plain.load_state_dict(gate.state_dict())
    x = tokens(40)
    routing, expected = gate(x), plain(x)
    assert torch.equal(routing.expert, expected.expert)
    assert torch.equal(routing.weight, expected.weight)
    assert torch.equal(routing.l_aux, expected.l_aux)
    priority = torch.softmax(x @ gate.weight.t(), -1).amax(-1).tolist()
    capacity = math.ceil(factor * 40 * top_k / E)
    assert routing.keep.tolist() == algorithm_2(routing.expert.tolist(), priority, capacity)
    assert routing.keep.all() == (factor == 5.0)
    (routing.weight.sum() + routing.l_aux).backward()
    (expected.weight.sum() + expected.l_aux).backward()
    assert torch.equal(gate.weight.grad, plain.weight.grad)


def test_a_later_token_of_higher_priority_displaces_an_earlier_one() -> None:
    expert = torch.tensor([[0, 1], [0, 1], [1, 0]])
    priority = torch.tensor([0.5, 0.9, 0.6])
    # One row each: expert 0 takes token 1, expert 1 takes token 2, and no room is left for second choices.
    assert keep_by_priority(expert, priority, 1, 2).tolist() == [[False, False], [True, False], [True, False]]
    # Two rows each: first choices 1 and 0 fill expert 0; expert 1 has one left, for the second one of 1.
    assert keep_by_priority(expert, priority, 2, 2).tolist() == [[True, False], [True, True], [True, False]]


def test_equal_priorities_go_by_token() -> None:
    expert = torch.zeros(5, 1, dtype=torch.int64)
    kept = keep_by_priority(expert, torch.full((5,), 0.5), 2, 1)
    assert kept.flatten().tolist() == [True, True, False, False, False]


def test_without_a_capacity_factor_everything_is_kept() -> None:
    assert BatchPrioritisedGate(M, E, 2)(torch.randn(6, M)).keep is None
