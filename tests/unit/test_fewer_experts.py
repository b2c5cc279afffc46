"""Upcycling with noise and Drop-Upcycling, pruning and merging: values by hand, and bits that come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.gates import DeepSeekGate
from tests.kit import one_thread  # noqa: F401

M, H, E = 6, 40, 4


def layer(seed: int = 0, num_experts: int = E, **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(seed)
    return pmoe.MoELayer(M, H, num_experts, 2, **{"dtype": torch.float64, **options})


def dense(expert: str) -> dict[str, Tensor]:
    factor = 2 if expert == "swiglu" else 1
    torch.manual_seed(9)
    shapes = {"w1": (factor * H, M), "w2": (M, H), "b1": (factor * H,), "b2": (M,)}
    return {name: torch.randn(shape, dtype=torch.float64) + 0.5 for name, shape in shapes.items()}


# ---- upcycling


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_dropped_columns_are_the_same_in_all_matrices_of_an_expert(expert: str) -> None:
    moe = layer(expert=expert)
    values = dense(expert)
    torch.manual_seed(1)
    pmoe.copy_into_experts(moe, values, drop=0.25)
    chosen = []
    for e in range(E):
        halves = (moe.experts.w1[e] != values["w1"]).view(-1, H, M)
        columns = halves[0].any(1)
        assert int(columns.sum()) == H // 4
        assert all(torch.equal(half.all(1), columns) for half in halves)
        assert torch.equal((moe.experts.w2[e] != values["w2"]).all(0), columns)
        assert torch.equal((moe.experts.b1[e] != values["b1"]).view(-1, H).any(0), columns)
        assert torch.equal(moe.experts.b2[e], values["b2"])
        chosen.append(columns)
    assert not torch.equal(chosen[0], chosen[1])
    moe(torch.randn(5, M, dtype=torch.float64))  # experts that differ are no mistake


def test_dropped_columns_are_drawn_with_the_mean_and_spread_of_what_they_replace() -> None:
    torch.manual_seed(0)
    moe = pmoe.MoELayer(200, 400, 2, 2, expert="ffn")
    values = {
        "w1": 3 + 0.5 * torch.randn(400, 200),
        "w2": -1 + 2 * torch.randn(200, 400),
        "b1": torch.zeros(400),
        "b2": torch.zeros(200),
    }
    pmoe.copy_into_experts(moe, values, drop=0.5)
    drawn = moe.experts.w1[0][moe.experts.w1[0] != values["w1"]]
    assert drawn.numel() == pytest.approx(200 * 200, rel=0.01)
    assert drawn.mean().item() == pytest.approx(3, abs=0.02)
    assert drawn.std().item() == pytest.approx(0.5, rel=0.02)
    drawn = moe.experts.w2[1][moe.experts.w2[1] != values["w2"]]
    assert (drawn.mean().item(), drawn.std().item()) == pytest.approx((-1, 2), rel=0.05)


def test_noise_is_a_part_of_the_spread_of_each_matrix() -> None:
    torch.manual_seed(0)
    moe = pmoe.MoELayer(200, 400, 2, 2, expert="swiglu", bias=False)
    values = {
        "w1": torch.cat([torch.randn(400, 200), 5 * torch.randn(400, 200)]),
        "w2": torch.randn(200, 400),
    }
    pmoe.copy_into_experts(moe, values, noise=0.1)
    gate, up = (moe.experts.w1[0] - values["w1"]).view(2, 400, 200)
    assert gate.std().item() == pytest.approx(0.1, rel=0.02)
    assert up.std().item() == pytest.approx(0.5, rel=0.02)
    assert not torch.equal(moe.experts.w2[0], moe.experts.w2[1])


def test_the_router_starts_as_asked() -> None:
    moe = layer()
    before = moe.gate.weight.clone()
    pmoe.copy_into_experts(moe, dense("ffn"))
    assert torch.equal(moe.gate.weight, before)
    wide = pmoe.MoELayer(200, 8, 64, 2)
    network = nn.Sequential(nn.Linear(200, 8), nn.GELU(), nn.Linear(8, 200))
    pmoe.copy_into_experts(wide, network, router_std=0.02)
    assert wide.gate.weight.std().item() == pytest.approx(0.02, rel=0.05)
    x = torch.randn(5, 200)
    torch.testing.assert_close(wide(x), network(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": 1.5}, r"drop \(1.5\) must be at most 1"),
        ({"noise": -1.0}, r"noise \(-1.0\) must be"),
        ({"router_std": 0.0}, r"router_std \(0.0\) must be None or a positive number"),
    ],
)
def test_wrong_numbers_change_nothing(options: dict[str, float], message: str) -> None:
    moe = layer()
    before = moe.experts.w1.clone()
    with pytest.raises(ValueError, match=message):
        pmoe.copy_into_experts(moe, dense("ffn"), **options)
    assert torch.equal(moe.experts.w1, before)


def test_gates_and_experts_that_cannot_vary_are_named() -> None:
    with pytest.raises(ValueError, match=r"router_std \(0.1\) must be None: the gate \(HashGate\)"):
        pmoe.copy_into_experts(layer(gate="hash"), dense("ffn"), router_std=0.1)
    moe = pmoe.MoELayer(M, H, E, expert=lambda **_: nn.Linear(M, M))
    with pytest.raises(TypeError, match=r"experts \(ModuleExperts\) must be plain stacked ones .* for noise"):
        pmoe.copy_into_experts(moe, nn.Linear(M, M), noise=0.1)


# ---- pruning


@pytest.mark.parametrize("gate", ["topk", "deepseek", "xmoe"])
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_pruned_experts_come_back_bit_for_bit(gate: str, expert: str) -> None:
    moe = layer(gate=gate, expert=expert, shared_expert=8)
    state = moe.state_dict()
    pruned, removed = pmoe.prune_experts(state, [3, 1])
    assert torch.equal(pruned["experts.w1"], state["experts.w1"][[3, 1]])
    assert torch.equal(pruned["gate.weight"], state["gate.weight"][[3, 1]])
    assert torch.equal(pruned["shared_expert.w1"], state["shared_expert.w1"])
    if gate == "topk":
        layer(1, 2, expert=expert, shared_expert=8).load_state_dict(pruned)
    whole = pmoe.restore_experts(pruned, removed)
    assert whole.keys() == state.keys()
    assert all(torch.equal(whole[name], value) for name, value in state.items())


def test_a_pruned_layer_computes_what_the_whole_one_does_for_tokens_of_its_experts() -> None:
    moe = layer(normalize_gate=False)
    x = torch.randn(40, M, dtype=torch.float64)
    expert = moe.gate(x).expert
    x = x[((expert == 1) | (expert == 3)).all(1)]
    assert len(x)
    pruned, _ = pmoe.prune_experts(moe.state_dict(), [1, 3])
    small = layer(1, 2, normalize_gate=True)
    small.load_state_dict(pruned)
    whole = layer(0, normalize_gate=True)
    torch.testing.assert_close(small(x), whole(x), rtol=1e-12, atol=1e-14)


def test_the_busiest_experts_are_the_lowest_of_equal_ones() -> None:
    assert pmoe.busiest_experts((5, 9, 0, 5), 2) == [0, 1]
    assert pmoe.busiest_experts(torch.tensor([1, 2, 3]), 1) == [2]


# ---- merging


def test_copies_merge_into_what_they_were_made_of() -> None:
    moe = layer()
    values = dense("ffn")
    pmoe.copy_into_experts(moe, values)
    merged = pmoe.merge_experts(moe.state_dict(), [[0, 2], [1, 3]], (7, 1, 3, 2))
    assert torch.equal(merged["experts.w1"], values["w1"].expand(2, -1, -1))
    layer(1, 2).load_state_dict(merged)


def test_a_merged_expert_is_the_mean_weighted_by_rows() -> None:
    state = layer(gate=DeepSeekGate(M, E, 2, dtype=torch.float64)).state_dict()
    state["gate.bias"] = torch.arange(4.0)
    merged = pmoe.merge_experts(state, [[0, 2, 3], [1]], (1, 5, 3, 0))
    for name in ("experts.w1", "experts.b2", "gate.weight", "gate.bias"):
        wanted = (state[name][0] + 3 * state[name][2]) / 4
        torch.testing.assert_close(merged[name][0], wanted, rtol=1e-12, atol=1e-14)
        assert torch.equal(merged[name][1], state[name][1])
    plain = pmoe.merge_experts(state, [[0, 2], [1, 3]])
    torch.testing.assert_close(plain["experts.w2"][1], (state["experts.w2"][1] + state["experts.w2"][3]) / 2)
    unused = pmoe.merge_experts(state, [[0, 1], [2, 3]], (0, 0, 1, 1))
    torch.testing.assert_close(unused["experts.w2"][0], state["experts.w2"][:2].mean(0))


def test_experts_join_the_leader_with_the_most_similar_router_row() -> None:
    state = layer().state_dict()
    rows = torch.tensor([[1.0, 0], [0, 1], [3, 1], [1, 9]], dtype=torch.float64)
    state["gate.weight"] = torch.nn.functional.pad(rows, (0, M - 2))
    assert pmoe.group_experts(state, (9, 8, 1, 1), 2) == [[0, 2], [1, 3]]
    assert pmoe.group_experts(state, (1, 1, 9, 8), 2) == [[2, 0], [3, 1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: pmoe.prune_experts(s, [0, 4]), r"keep \(\[0, 4\]\) must be different numbers from 0 to 3"),
        (
            lambda s: pmoe.prune_experts({}, [0]),
            r"state \(with nothing\) must have experts.w1 or gate.weight",
        ),
        (lambda s: pmoe.restore_experts(s, {}), "removed must have 'kept_experts'"),
        (
            lambda s: pmoe.restore_experts(s, pmoe.prune_experts(s, [0, 1])[1]),
            "pruned must have the 2 experts that removed leaves, but it has not in",
        ),
        (lambda s: pmoe.merge_experts(s, [[0, 1], [1, 2, 3]]), "must have each of the 4 experts once"),
        (lambda s: pmoe.merge_experts(s, [[0, 1, 2, 3]], [1]), r"rows \(of 1 experts\) must have a number"),
        (lambda s: pmoe.group_experts(s, [1, 2], 2), "rows must have a number for each of the 4 experts"),
        (lambda s: pmoe.busiest_experts([1, 2], 3), r"count \(3\) must be at most the number of experts"),
        (
            lambda s: pmoe.prune_experts(s | {"experts.w2": s["experts.w2"][:2]}, [0]),
            r"state\['experts.w2'\] of shape \(2, 6, 40\) must have 4 experts",
        ),
    ],
)
def test_what_does_not_fit_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(dict(layer().state_dict()))
