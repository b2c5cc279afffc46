"""Gates: which experts a token goes to, and with what weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pmoe
from pmoe.gates import GATES, DeepSeekGate, ExternalGate, load_balance_loss, router_z_loss
from tests.spec.kit import E, H, K, M, assert_close, assert_is_the_plain_layer, make, run_expert, step, tokens

LEARNED = sorted(set(GATES) - {"hash", "random"})
BY_TOKEN = sorted(set(GATES) - {"expert_choice", "soft"})


def top_k_of(gate: str) -> int:
    return 1 if gate == "switch" else K


def run(layer: pmoe.MoELayer, x: Tensor) -> Tensor:
    ids = torch.arange(len(x)) * 37
    return layer(x, ids) if getattr(layer.gate, "needs_token_ids", False) else layer(x)


def routed(layer: pmoe.MoELayer, x: Tensor) -> pmoe.Routing:
    ids = torch.arange(len(x)) * 37
    return layer.gate(x, ids) if layer.gate.needs_token_ids else layer.gate(x)


@pytest.mark.parametrize("gate", sorted(GATES))
def test_every_gate_works_forward_and_backward(gate: str) -> None:
    layer = make(gate=gate, top_k=top_k_of(gate))
    found = step(layer, tokens(9), run=lambda x: run(layer, x))
    assert all(each is None or each.isfinite().all() for each in found.values())


@pytest.mark.parametrize("gate", sorted(GATES))
def test_every_gate_takes_a_batch_without_tokens(gate: str) -> None:
    layer = make(gate=gate, top_k=top_k_of(gate))
    assert run(layer, tokens(0)).shape == (0, M)


@pytest.mark.parametrize("gate", LEARNED)
def test_every_learned_gate_gets_a_gradient(gate: str) -> None:
    layer = make(gate=gate, top_k=top_k_of(gate))
    step(layer, tokens(9))
    assert any(each.grad is not None and each.grad.abs().sum() > 0 for each in layer.gate.parameters())


@pytest.mark.parametrize("gate", BY_TOKEN)
def test_a_token_goes_to_top_k_experts_of_its_own(gate: str) -> None:
    layer = make(gate=gate, top_k=top_k_of(gate)).eval()
    expert_TK = routed(layer, tokens(9)).expert
    assert expert_TK.shape == (9, top_k_of(gate))
    assert all(len(set(row)) == len(row) and set(row) <= set(range(E)) for row in expert_TK.tolist())


@pytest.mark.parametrize("gate", [name for name in BY_TOKEN if name != "random"])
def test_the_output_is_the_sum_that_the_gate_asked_for(gate: str) -> None:
    layer, x = make(gate=gate, top_k=top_k_of(gate)).eval(), tokens(9)
    routing, p = routed(layer, x), dict(layer.named_parameters())
    rows = [
        sum(
            w * run_expert(p, e, x[t])
            for e, w in zip(routing.expert[t].tolist(), routing.weight[t], strict=True)
        )
        for t in range(9)
    ]
    assert_close({"y": run(layer, x)}, {"y": torch.stack(rows)}, limit=1e-6)


@pytest.mark.parametrize("gate", ["topk", "sigmoid", "deepseek", "xmoe", "switch"])
def test_in_eval_mode_the_result_of_a_token_depends_on_no_other(gate: str) -> None:
    layer, x = make(gate=gate, top_k=top_k_of(gate)).eval(), tokens(9)
    assert_close({"y": torch.cat([layer(part) for part in x.split(2)])}, {"y": layer(x)})


def test_topk_weights_of_a_token_sum_to_one() -> None:
    weight_TK = make(top_k=3).gate(tokens(9)).weight
    assert_close({"sum": weight_TK.sum(1)}, {"sum": torch.ones(9)}, limit=1e-6)


def test_topk_without_normalising_weighs_by_probability() -> None:
    assert_is_the_plain_layer([9], {"normalize": False}, normalize_gate=False)


def test_switch_sends_each_token_to_one_expert_weighed_by_its_probability() -> None:
    assert_is_the_plain_layer([9], {"top_k": 1, "normalize": False}, gate="switch", top_k=1)


def test_noisy_topk_is_random_in_training_and_fixed_in_eval() -> None:
    layer, x = make(gate="noisy_topk"), tokens(9)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_random_routing_differs_from_call_to_call() -> None:
    layer, x = make(gate="random", num_experts=8), tokens(30)
    assert not torch.equal(layer(x), layer(x))


def test_hash_routing_goes_by_token_ids_alone() -> None:
    layer, ids = make(gate="hash"), torch.tensor([5, 7, 5])
    layer(tokens(3), ids)
    assert torch.equal(*layer.gate(tokens(3), ids).expert[[0, 2]])


def test_expert_choice_gives_every_expert_the_same_number_of_tokens() -> None:
    layer = make(gate="expert_choice")
    layer(tokens(10))
    assert layer.tokens_per_expert.tolist() == [5, 5, 5, 5]


def test_soft_routing_computes_one_row_for_each_expert() -> None:
    layer = make(gate="soft")
    layer(tokens(10))
    assert layer.tokens_per_expert.tolist() == [1] * E


def test_soft_slots_are_as_many_as_the_gate_was_given() -> None:
    gate = GATES["soft"](M, E, slots_per_expert=3).double()
    layer = make(gate=gate)
    layer(tokens(10))
    assert layer.tokens_per_expert.tolist() == [3] * E


def test_deepseeks_bias_moves_towards_experts_with_few_tokens() -> None:
    layer = make(gate="deepseek", load="mixed")
    before = layer.gate.bias.clone()
    layer(tokens(30))
    layer.gate.update_bias()
    moved, rows = layer.gate.bias - before, layer.tokens_per_expert
    assert moved[rows.argmin()] > 0 > moved[rows.argmax()]


def test_deepseek_takes_experts_of_the_best_groups_only() -> None:
    gate = DeepSeekGate(M, 8, 2, num_groups=4, top_groups=1).double()
    groups = gate(tokens(20)).expert // 2
    assert torch.equal(groups[:, 0], groups[:, 1])


@pytest.mark.parametrize("gate", ["topk", "switch", "sigmoid", "noisy_topk", "xmoe", "deepseek"])
def test_the_balance_loss_is_larger_where_one_expert_gets_all(gate: str) -> None:
    def l_aux(skew: float) -> float:
        layer = make(gate=gate, top_k=top_k_of(gate)).eval()
        x = tokens(64, 5)
        x[:, 0] *= skew
        with torch.no_grad():
            layer.gate.weight[-1, 0] += skew
        layer(x)
        return layer.l_aux.item()

    assert l_aux(8.0) > l_aux(0.0)


def test_the_balance_loss_of_topk_is_one_where_even() -> None:
    probability = torch.full((8, E), 1 / E)
    expert = torch.arange(16).view(8, 2) % E
    assert float(load_balance_loss(probability, expert)) == pytest.approx(1.0)


def test_the_z_loss_adds_the_size_of_the_logits() -> None:
    plain, with_z, x = make(), make(z_loss_weight=0.1), tokens(9)
    plain(x), with_z(x)
    logits = x @ plain.gate.weight.t()
    assert_close({"l_aux": with_z.l_aux}, {"l_aux": plain.l_aux + 0.1 * router_z_loss(logits)})


def test_l_aux_belongs_to_the_last_call() -> None:
    layer = make()
    layer(tokens(9, 1))
    first = layer.l_aux
    layer(tokens(9, 2))
    assert not torch.equal(layer.l_aux, first)


class ByFirstColumn(pmoe.Gate):
    """Expert 1 for tokens whose second column is positive, else expert 0."""

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        second_T1 = x_TM[:, 1:2]
        weight_T1 = second_T1.abs().sigmoid()
        return pmoe.Routing(expert=(second_T1 > 0).long(), weight=weight_T1, l_aux=weight_T1.new_zeros(()))


@pytest.mark.parametrize("options", [{}, {"pipeline": 3}, {"pipeline": 2, "memory_reuse": "S4"}])
def test_a_gate_of_ones_own_routes(options: dict) -> None:
    layer, x = make(gate=ByFirstColumn(), top_k=1, **options), tokens(9)
    layer(x)
    positive = int((x[:, 1] > 0).sum())
    assert layer.tokens_per_expert.tolist() == [9 - positive, positive, 0, 0]
    assert torch.autograd.gradcheck(layer, tokens(4).requires_grad_())


def test_a_router_outside_of_the_layer_hands_its_routing_over() -> None:
    gate = ExternalGate()
    layer, x = pmoe.MoELayer(M, H, E, K, gate=gate, dtype=torch.float64), tokens(3)
    expert, weight = (
        torch.tensor([[0, 1], [2, 3], [1, 0]]),
        torch.rand(3, 2, dtype=torch.float64, requires_grad=True),
    )
    with gate.routing(expert, weight):
        layer(x).sum().backward()
    assert layer.tokens_per_expert.tolist() == [2, 2, 1, 1]
    assert weight.grad.abs().min() > 0
