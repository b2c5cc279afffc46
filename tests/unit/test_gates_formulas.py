"""Gates that choose experts for each token, against the formulas of their papers as loops in float64.

The gradients of every parameter and of the tokens are compared by name.

Letters: T tokens, K choices, E experts, M = d_model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.gates import DeepSeekGate, Gate, NoisyTopKGate, Routing, SigmoidGate, XMoEGate
from pmoe.gates.deepseek import sequence_balance_loss

T, M, E = 13, 5, 6
Parameters = dict[str, Tensor]
Answer = tuple[list[list[int]], Tensor, Tensor]  # experts, weights (T, K), l_aux
Reference = Callable[[Tensor, Parameters], Answer]


def tokens() -> Tensor:
    return torch.randn(T, M, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def made(kind: type[Gate], top_k: int, **options: object) -> Gate:
    torch.manual_seed(0)
    gate = kind(M, E, top_k, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return gate


def check(gate: Gate, reference: Reference) -> Routing:
    """Compares a gate with a reference: experts, weights, loss, and the gradients of a mixture of weights and
    loss.
    """
    x = tokens()
    torch.manual_seed(11)
    mine = x.clone().requires_grad_()
    routing = gate(mine)
    torch.manual_seed(11)
    plain = x.clone().requires_grad_()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in gate.named_parameters()}
    expert, weight, l_aux = reference(plain, parameters)
    assert routing.expert.tolist() == expert
    torch.testing.assert_close(routing.weight, weight, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(routing.l_aux, l_aux, rtol=1e-12, atol=1e-14)
    factor = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ((routing.weight * factor).sum() + 0.7 * routing.l_aux).backward()
    ((weight * factor).sum() + 0.7 * l_aux).backward()
    torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-10, atol=1e-13, msg="x")
    for name, parameter in gate.named_parameters():
        expected = parameters[name].grad
        assert expected is None or expected.abs().max() > 1e-6, f"{name}: its gradient would test nothing"
        if expected is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-13, msg=name)
    return routing


def best(scores: Tensor, top_k: int) -> list[int]:
    """Returns the indices of the largest scores. If scores are equal, the lower index comes first."""
    values = scores.tolist()
    return sorted(range(len(values)), key=lambda e: -values[e])[:top_k]


def balance(probabilities: list[Tensor], chosen: list[list[int]]) -> Tensor:
    """Returns the load-balance loss of these tokens: E * sum over experts e of f_e P_e.

    f_e is the share of tokens for expert e, P_e their mean probability of it.
    """
    total = torch.zeros((), dtype=torch.float64)
    for e in range(E):
        f = sum(row.count(e) for row in chosen) / sum(len(row) for row in chosen)
        total = total + f * sum(p[e] for p in probabilities) / len(probabilities)
    return E * total


def z_loss(logits: list[Tensor]) -> Tensor:
    return sum(torch.log(torch.exp(row).sum()) ** 2 for row in logits) / len(logits)


# --- noisy top-k -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("top_k, normalize", [(1, None), (1, True), (2, None), (2, False), (E, None)])
def test_noisy_topk_is_the_softmax_of_the_kept_noisy_logits(
    top_k: int, normalize: bool | None, training: bool
) -> None:
    def reference(x: Tensor, p: Parameters) -> Answer:
        noise = torch.randn(T, E, dtype=torch.float64) if training else None
        chosen, weights, probabilities, logits = [], [], [], []
        for t in range(T):
            h = x[t] @ p["weight"].t()
            if noise is not None:
                h = h + noise[t] * torch.log(1 + torch.exp(x[t] @ p["noise_weight"].t()))
            keep = best(h, top_k)
            kept = torch.stack([h[e] if e in keep else torch.tensor(-math.inf).double() for e in range(E)])
            literal = top_k > 1 if normalize is None else normalize
            weights.append((kept if literal else h).softmax(-1)[keep])
            chosen.append(keep)
            probabilities.append(h.softmax(-1))
            logits.append(h)
        return chosen, torch.stack(weights), balance(probabilities, chosen) + 0.3 * z_loss(logits)

    gate = made(NoisyTopKGate, top_k, normalize=normalize, z_loss_weight=0.3)
    check(gate.train(training), reference)


def test_noise_begins_with_softplus_of_zero_as_its_deviation() -> None:
    torch.manual_seed(0)
    gate = NoisyTopKGate(M, E)
    x = torch.randn(4000, M)
    noise = gate(x).logits - gate.eval()(x).logits
    assert noise.std().item() == pytest.approx(math.log(2), rel=0.02)
    assert noise.mean().item() == pytest.approx(0, abs=0.02)


def test_noise_follows_the_seed_and_stops_in_eval_mode() -> None:
    gate, x = made(NoisyTopKGate, 2), tokens()
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(gate(x).logits)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    gate.eval()
    assert torch.equal(gate(x).logits, F.linear(x, gate.weight))


# --- sigmoid ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 2, E])
@pytest.mark.parametrize("normalize", [None, True])
def test_sigmoid_weighs_an_expert_by_the_sigmoid_of_its_product(top_k: int, normalize: bool | None) -> None:
    def reference(x: Tensor, p: Parameters) -> Answer:
        chosen, weights, shares, logits = [], [], [], []
        for t in range(T):
            logit = x[t] @ p["weight"].t()
            score = 1 / (1 + torch.exp(-logit))
            chosen.append(best(logit, top_k))
            weight = score[chosen[-1]]
            weights.append(weight / weight.sum() if normalize else weight)
            shares.append(score / score.sum())
            logits.append(logit)
        return chosen, torch.stack(weights), balance(shares, chosen) + 0.3 * z_loss(logits)

    check(made(SigmoidGate, top_k, normalize=normalize, z_loss_weight=0.3), reference)


def with_logits(kind: type[Gate], logits: list[list[float]], top_k: int, **options: object) -> Routing:
    """Returns the routing of tokens for which the gate computes these logits."""
    wanted = torch.tensor(logits)
    gate = kind(wanted.shape[0], wanted.shape[1], top_k, **options)
    with torch.no_grad():
        gate.weight.copy_(wanted.t())
    return gate(torch.eye(wanted.shape[0]))


def test_saturated_sigmoids_are_told_apart_and_tiny_ones_have_shares() -> None:
    # In float32 the sigmoid of 30 and of 40 is 1, that of -200 and of -201 is 0.
    routing = with_logits(SigmoidGate, [[30.0, 40.0, 0.0], [-200.0, -201.0, -300.0]], 2, normalize=True)
    assert routing.expert.tolist() == [[1, 0], [0, 1]]
    torch.testing.assert_close(routing.weight[0], torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(routing.weight[1], torch.tensor([1.0, -1.0]).sigmoid())
    assert routing.l_aux.isfinite()


@pytest.mark.parametrize("kind", [NoisyTopKGate, SigmoidGate, DeepSeekGate])
def test_ties_of_every_gate_go_to_the_lowest_expert(kind: type[Gate]) -> None:
    gate = kind(3, 5, 3).eval()
    with torch.no_grad():
        gate.weight.copy_(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]).unsqueeze(1).expand(5, 3))
    assert gate(torch.ones(1, 3)).expert.tolist() == [[1, 3, 0]]


def test_ties_of_xmoe_go_to_the_lowest_expert() -> None:
    gate = XMoEGate(3, 5, 3)
    with torch.no_grad():
        gate.weight.fill_(1)
        gate.weight[0] = -1
        gate.projection.fill_(1)
    assert gate(torch.ones(2, 3)).expert.tolist() == [[1, 2, 3]] * 2
    assert gate(torch.zeros(2, 3)).expert.tolist() == [[0, 1, 2]] * 2  # without direction all are alike


# --- DeepSeek --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "top_k, options",
    [
        (1, {}),
        (1, {"normalize": True}),
        (2, {}),
        (3, {"routed_scaling": 2.5, "sequence_length": 5}),
        (2, {"num_groups": 3, "top_groups": 1}),
        (3, {"num_groups": 3, "top_groups": 2, "z_loss_weight": 0.3, "sequence_length": 4}),
        (2, {"num_groups": 2, "top_groups": 1, "normalize": False}),
        (2, {"num_groups": 6, "top_groups": 3, "sequence_length": 100}),
    ],
)
def test_deepseek_chooses_by_biased_scores_and_weighs_by_unbiased_ones(
    top_k: int, options: dict[str, object]
) -> None:
    bias = torch.tensor([0.4, -0.3, 0.0, 0.2, -0.1, 0.1])

    def reference(x: Tensor, p: Parameters) -> Answer:
        groups, top_groups = int(options.get("num_groups", 1)), int(options.get("top_groups", 1))
        size = E // groups
        normalized = options.get("normalize", top_k > 1)
        chosen, weights, shares, unbiased, logits = [], [], [], [], []
        for t in range(T):
            logit = x[t] @ p["weight"].t()
            score = 1 / (1 + torch.exp(-logit))
            biased = (score + bias).tolist()
            runs = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
            of_group = [sum(sorted((biased[e] for e in run), reverse=True)[:2]) for run in runs]
            allowed = sorted(range(groups), key=lambda g: -of_group[g])[:top_groups]
            reachable = sorted(e for g in allowed for e in runs[g])
            chosen.append(sorted(reachable, key=lambda e: -biased[e])[:top_k])
            weight = score[chosen[-1]]
            weight = weight / weight.sum() if normalized else weight
            weights.append(options.get("routed_scaling", 1.0) * weight)
            shares.append(score / score.sum())
            unbiased.append(best(score, top_k))
            logits.append(logit)
        length = int(options.get("sequence_length", T))
        losses = [balance(shares[at : at + length], unbiased[at : at + length]) for at in range(0, T, length)]
        loss = sum(losses) / len(losses) + options.get("z_loss_weight", 0) * z_loss(logits)
        return chosen, torch.stack(weights), loss

    gate = made(DeepSeekGate, top_k, **options)
    gate.bias.copy_(bias)
    routing = check(gate, reference)
    assert routing.expert.tolist() != made(DeepSeekGate, top_k, **options)(tokens()).expert.tolist()


def test_groups_keep_a_token_from_the_best_expert_of_a_bad_group() -> None:
    logits = [[3.0, -9.0, 1.0, 1.0]]  # groups (0, 1) and (2, 3): sums of sigmoids 0.95 and 1.46
    assert with_logits(DeepSeekGate, logits, 2, num_groups=2).expert.tolist() == [[2, 3]]
    assert with_logits(DeepSeekGate, logits, 2).expert.tolist() == [[0, 2]]


def test_the_sequence_loss_is_one_where_even_and_counts_each_sequence_by_itself() -> None:
    # Two sequences of two tokens, each all on one expert: even together, the worst apart.
    share = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    expert = torch.tensor([[0], [0], [1], [1]])
    assert sequence_balance_loss(share, expert).item() == 1
    assert sequence_balance_loss(share, expert, 4).item() == 1
    assert sequence_balance_loss(share, expert, 2).item() == 2
    assert sequence_balance_loss(share, expert, 3).item() == pytest.approx((2 * 5 / 9 + 2) / 2)


def test_the_bias_moves_against_the_load_of_training_and_the_load_starts_again() -> None:
    gate = DeepSeekGate(4, 4, 1, update_speed=0.25)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(4))
    x = torch.eye(4)[[0, 0, 0, 1, 2, 2]]
    gate.eval()(x)
    assert gate.load.tolist() == [0, 0, 0, 0]
    gate.train()(x[:4])
    gate(x[4:])
    assert gate.load.tolist() == [3, 1, 2, 0]  # the mean is 1.5
    gate.update_bias()
    assert gate.bias.tolist() == [-0.25, 0.25, -0.25, 0.25]
    assert gate.load.tolist() == [0, 0, 0, 0]
    gate.update_bias()  # nothing was routed since
    assert gate.bias.tolist() == [-0.25, 0.25, -0.25, 0.25]


def test_updates_of_the_bias_even_out_a_skewed_load() -> None:
    torch.manual_seed(0)
    gate = DeepSeekGate(16, 8, 2, update_speed=0.01)
    x = torch.randn(2000, 16) + 0.5
    loads = []
    for _ in range(150):
        gate(x)
        loads.append(gate.load.max().item() / 500)
        gate.update_bias()
    assert loads[0] > 1.4
    assert loads[-1] < 1.1


def test_the_load_of_a_repeated_forward_moves_the_bias_as_that_of_one() -> None:
    one, two = made(DeepSeekGate, 2), made(DeepSeekGate, 2)
    one(tokens())
    two(tokens())
    two(tokens())  # as activation checkpointing does
    one.update_bias()
    two.update_bias()
    assert torch.equal(one.bias, two.bias)
    assert one.bias.abs().max() > 0


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, torch.float64])
def test_the_bias_stays_in_float32(narrow: torch.dtype) -> None:
    gate = DeepSeekGate(4, 4)
    gate.bias.copy_(torch.tensor([1.001, -1.001, 0.3, 0.0]))
    expected = gate.bias.clone()
    gate.to(narrow)
    assert gate.weight.dtype == narrow
    assert gate.bias.dtype == torch.float32
    assert torch.equal(gate.bias, expected)
    assert gate.load.dtype == torch.int64
    assert gate._buffers["bias"] is gate.bias
    assert set(gate.state_dict()) == {"weight", "bias"}


# --- X-MoE -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "top_k, options",
    [
        (1, {}),
        (2, {}),
        (2, {"normalize": False, "temperature": 0.5, "z_loss_weight": 0.3}),
        (1, {"score": "sigmoid"}),
        (2, {"score": "sigmoid", "d_proj": 4}),
        (2, {"score": "sigmoid", "normalize": True}),
    ],
)
def test_xmoe_scores_by_cosines_over_a_temperature(top_k: int, options: dict[str, object]) -> None:
    softmax = options.get("score", "softmax") == "softmax"
    first = options.get("temperature", 0.3 if softmax else 0.07)
    normalized = options.get("normalize", top_k > 1 and softmax)

    def reference(x: Tensor, p: Parameters) -> Answer:
        tau = torch.exp(p["log_temperature"])
        chosen, weights, probabilities, logits = [], [], [], []
        for t in range(T):
            h = p["projection"] @ x[t]
            cosine = torch.stack([h @ w / (h.norm() * w.norm()) for w in p["weight"]])
            chosen.append(best(cosine, top_k))
            score = torch.softmax(cosine / tau, -1) if softmax else torch.sigmoid(cosine / tau)
            weight = score[chosen[-1]]
            weights.append(weight / weight.sum() if normalized else weight)
            probabilities.append(torch.softmax(cosine / first, -1))
            logits.append(cosine / tau)
        loss = balance(probabilities, chosen) + options.get("z_loss_weight", 0) * z_loss(logits)
        return chosen, torch.stack(weights), loss

    check(made(XMoEGate, top_k, **options), reference)


@pytest.mark.parametrize("num_experts, d_proj", [(1, 2), (4, 2), (6, 3), (64, 32)])
def test_xmoe_projects_to_half_as_many_dimensions_as_experts(num_experts: int, d_proj: int) -> None:
    assert XMoEGate(8, num_experts).projection.shape == (d_proj, 8)


def test_the_temperature_begins_as_in_the_paper_and_is_positive_whatever_is_learned() -> None:
    assert XMoEGate(4, 4).log_temperature.exp().item() == pytest.approx(0.3)
    gate = XMoEGate(4, 4, score="sigmoid")
    assert gate.log_temperature.exp().item() == pytest.approx(0.07)
    with torch.no_grad():
        gate.log_temperature.fill_(-5)
    assert gate(torch.randn(8, 4)).weight.isfinite().all()


def test_a_zero_token_harms_nothing_in_xmoe() -> None:
    gate = XMoEGate(4, 8)
    x = torch.randn(3, 4)
    x[1] = 0
    x.requires_grad_()
    routing = gate(x)
    torch.testing.assert_close(routing.weight[1], torch.tensor([1 / 8]))
    (routing.weight.sum() + routing.l_aux).backward()
    assert torch.equal(x.grad[1], torch.zeros(4))
    assert all(parameter.grad.isfinite().all() for parameter in gate.parameters())
