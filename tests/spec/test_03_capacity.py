"""Capacity: an expert takes its first tokens and drops the rest; and rows that are padded up to it."""

from __future__ import annotations

import math

import pytest
import torch

from pmoe.gates import load_balance_loss
from tests.spec.kit import E, K, M, assert_close, assert_is_the_plain_layer, make, on_ranks, step, tokens


@pytest.mark.parametrize("load", ["mixed", "one expert", "some get none"])
@pytest.mark.parametrize("factor", [0.3, 0.6, 1.0, 1.25])
def test_rows_beyond_capacity_are_dropped_in_the_order_of_tokens(factor: float, load: str) -> None:
    assert_is_the_plain_layer([13], {"capacity_factor": factor}, capacity_factor=factor, load=load)


@pytest.mark.parametrize("factor", [0.3, 0.6, 1.25])
def test_no_expert_takes_more_than_its_share_times_the_factor(factor: float) -> None:
    layer = make(capacity_factor=factor, load="one expert")
    layer(tokens(13))
    assert layer.tokens_per_expert.max() == math.ceil(factor * 13 * K / E)


def test_a_large_capacity_drops_nothing() -> None:
    assert_close(step(make(capacity_factor=99.0), tokens(13)), step(make(), tokens(13)), limit=0)


def test_a_token_that_all_its_experts_dropped_gets_zero() -> None:
    layer = make(top_k=1, capacity_factor=0.3, load="one expert")
    y = layer(tokens(13))
    assert (y.abs().sum(1) > 0).tolist() == [True] + [False] * 12


def test_a_dropped_token_gets_no_gradient_but_the_balance_losss() -> None:
    layer, x = make(top_k=1, capacity_factor=0.3, load="one expert"), tokens(13).requires_grad_()
    layer(x).sum().backward()
    assert (x.grad.abs().sum(1) > 0).tolist() == [True] + [False] * 12


def test_the_balance_loss_counts_dropped_rows_too() -> None:
    layer, x = make(capacity_factor=0.3), tokens(13)
    layer(x)
    probability = torch.softmax(x @ layer.gate.weight.t(), dim=-1)
    assert_close({"l": layer.l_aux}, {"l": load_balance_loss(probability, probability.topk(K).indices)})


def test_a_kept_row_weighs_the_same_whatever_is_dropped_beside_it() -> None:
    whole, dropping, x = make(top_k=1), make(top_k=1, capacity_factor=0.6), tokens(13)
    expected, y = whole(x), dropping(x)
    kept = y.abs().sum(1) > 0
    assert 0 < kept.sum() < 13
    assert_close({"y": y[kept]}, {"y": expected[kept]})


@pytest.mark.parametrize("options", [{"pipeline": 3}, {"pipeline": 3, "memory_reuse": "S4"}])
def test_chunks_drop_what_the_whole_batch_drops(options: dict) -> None:
    factor = 0.6
    assert_is_the_plain_layer([13], {"capacity_factor": factor}, capacity_factor=factor, **options)


def test_important_tokens_go_first_where_the_gate_is_batch_prioritised() -> None:
    layer, x = make(gate="batch_prioritised", top_k=1, capacity_factor=0.6), tokens(13)
    y = layer(x)
    best = torch.softmax(x @ layer.gate.weight.t(), dim=-1).max(dim=1)
    for e in range(E):
        of_expert = best.indices == e
        kept = y[of_expert].abs().sum(1) > 0
        if 0 < kept.sum() < len(kept):
            assert best.values[of_expert][kept].min() >= best.values[of_expert][~kept].max()


def test_expert_choice_takes_capacity_as_the_number_of_each_experts_tokens() -> None:
    layer = make(gate="expert_choice", capacity_factor=0.5)
    layer(tokens(12))
    assert layer.tokens_per_expert.tolist() == [3] * E


# ---- pad_to_capacity


@pytest.mark.parametrize("factor", [0.6, 1.25])
@pytest.mark.parametrize("options", [{}, {"pipeline": 3}, {"pipeline": 2, "memory_reuse": "S4"}])
def test_padding_changes_no_result(options: dict, factor: float) -> None:
    of_plain = {"capacity_factor": factor}
    assert_is_the_plain_layer([13], of_plain, capacity_factor=factor, pad_to_capacity=True, **options)


@pytest.mark.parametrize("world", [2, 4])
def test_padding_changes_no_result_on_several_ranks(world: int) -> None:
    options = {"capacity_factor": 0.75, "num_experts": 8}
    assert_is_the_plain_layer(
        [9] * world, {"capacity_factor": 0.75}, pad_to_capacity=True, pipeline=2, **options
    )


def bytes_sent(rank: int, world: int, load: str, padded: bool) -> int:
    layer = make(load=load, pad_to_capacity=padded, capacity_factor=1.0)
    layer(tokens(8, rank))
    return layer.traffic.rows


def test_padded_messages_have_one_size_whatever_the_routing() -> None:
    mixed, skewed = (on_ranks(2, bytes_sent, load, True) for load in ("mixed", "one expert"))
    assert mixed == skewed
    assert on_ranks(2, bytes_sent, "mixed", False) != on_ranks(2, bytes_sent, "one expert", False)


def padded_apart(rank: int, world: int) -> str:
    layer = make(pad_to_capacity=True, capacity_factor=1.0)
    try:
        layer(tokens(5 + rank))
    except ValueError as error:
        return str(error)
    return ""


def test_padded_ranks_with_different_numbers_of_tokens_are_an_error_on_every_rank() -> None:
    messages = on_ranks(2, padded_apart)
    assert all("tokens" in message and "5" in message and "6" in message for message in messages), messages


# ---- on several ranks


@pytest.mark.parametrize("counts", [(9, 4), (13, 0), (5, 0, 11, 2)])
def test_capacity_is_counted_for_each_rank_by_itself(counts: tuple[int, ...]) -> None:
    options = {"capacity_factor": 0.6, "num_experts": 4}
    assert_is_the_plain_layer(counts, {"capacity_factor": 0.6}, pipeline=2, **options)


def test_the_output_of_dropped_tokens_has_the_layers_width() -> None:
    assert make(capacity_factor=0.01, top_k=1)(tokens(13)).shape == (13, M)
