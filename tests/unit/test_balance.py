"""`BalanceLoss` on one rank: formulas of every gate, sums over layers as others have them, wrong use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.gates import DeepSeekGate, XMoEGate, load_balance_loss, router_z_loss
from pmoe.gates.deepseek import sequence_balance_loss
from tests.kit import one_thread  # noqa: F401

M, H, E, K, T = 6, 8, 8, 2, 12


def layer(gate: Any = "topk", seed: int = 3, **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(seed)
    return pmoe.MoELayer(M, H, E, K, gate=gate, dtype=torch.float64, **options)


def tokens(count: int = T, seed: int = 0) -> Tensor:
    return torch.randn(count, M, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


GATES = ("topk", "noisy_topk", "sigmoid", "xmoe", "deepseek", "batch_prioritised")


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("z_loss_weight", [0.0, 0.5])
def test_one_call_on_one_rank_has_the_loss_of_its_gate(name: str, z_loss_weight: float) -> None:
    """Whatever formula a gate has for l_aux, a step of one call has it too."""
    moe = layer(name, z_loss_weight=z_loss_weight)
    over = "sequence" if name == "deepseek" else "batch"
    balance = pmoe.BalanceLoss(
        moe, over=over, z_loss_weight=z_loss_weight, sequence_length=T if over == "sequence" else None
    )
    moe(tokens())
    loss = balance.loss()
    parameters = list(moe.gate.parameters())
    wanted, found = (
        torch.autograd.grad(each, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        for each in (moe.l_aux, loss)
    )
    assert abs(loss.item() - moe.l_aux.item()) <= 1e-12
    scale = max(one.abs().max().item() for one in wanted)
    for one, other in zip(wanted, found, strict=True):
        assert (one - other).abs().max() <= 1e-12 * scale


def test_groups_of_the_deepseek_gate_do_not_count() -> None:
    gate = DeepSeekGate(M, E, K, num_groups=4, top_groups=1, dtype=torch.float64)
    gate.bias.normal_()
    moe = layer(gate)
    balance = pmoe.BalanceLoss(moe, over="batch")
    moe(tokens())
    assert balance.loss().item() == pytest.approx(moe.l_aux.item(), rel=1e-12)


def test_the_temperature_of_the_xmoe_gate_cannot_lower_the_loss() -> None:
    moe = layer(XMoEGate(M, E, K, dtype=torch.float64))
    balance = pmoe.BalanceLoss(moe)
    moe(tokens())
    before = balance.loss()
    with torch.no_grad():
        moe.gate.log_temperature += 1
    moe(tokens())
    assert balance.loss().item() == pytest.approx(before.item(), rel=1e-12)


def model() -> nn.Sequential:
    return nn.Sequential(layer(), layer(seed=4), layer(seed=5))


def calls_of(moe: nn.Sequential, x: Tensor) -> list[pmoe.Routing]:
    routings = []
    for part in moe:
        routings.append(part.gate(x))
        x = part(x)
    return routings


def test_layers_are_summed_as_megatron_and_torchtitan_do() -> None:
    moe = model()
    values = [load_balance_loss(each.logits.softmax(-1), each.expert) for each in calls_of(moe, tokens())]
    for name in ("megatron", "torchtitan"):
        balance = pmoe.BalanceLoss(moe, layers=name)
        moe(tokens())
        assert balance.loss().item() == pytest.approx(sum(values).item(), rel=1e-12)
        balance.remove()


@pytest.mark.slow  # imports transformers
def test_layers_are_pooled_as_transformers_does() -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    moe = model()
    logits = tuple(each.logits for each in calls_of(moe, tokens()))
    balance = pmoe.BalanceLoss(moe, layers="transformers")
    moe(tokens())
    loss = balance.loss()
    wanted = mixtral.load_balancing_loss_func(logits, E, K)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    found = torch.autograd.grad(loss, [part.gate.weight for part in moe])
    expected = torch.autograd.grad(wanted, [part.gate.weight for part in moe])
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_sequences_of_one_length_have_the_loss_of_deepseek() -> None:
    moe = layer("sigmoid")
    routing = moe.gate(tokens())
    share = routing.logits.sigmoid() / routing.logits.sigmoid().sum(-1, keepdim=True)
    for length in (4, 5):
        balance = pmoe.BalanceLoss(moe, over="sequence", sequence_length=length)
        moe(tokens())
        wanted = sequence_balance_loss(share, routing.expert, length)
        assert balance.loss().item() == pytest.approx(wanted.item(), rel=1e-12)
        balance.remove()


def test_padding_is_in_no_sequence() -> None:
    moe = layer()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    x = tokens(6).view(2, 3, M)
    routing = moe.gate(x[mask])
    balance = pmoe.BalanceLoss(moe, over="sequence")
    with balance.sequences(mask.sum(1).tolist()):
        moe(x, mask=mask)
    parts = [(routing.logits.softmax(-1)[part], routing.expert[part]) for part in (slice(0, 2), slice(2, 5))]
    wanted = sum(load_balance_loss(*part) for part in parts) / 2
    assert balance.loss().item() == pytest.approx(wanted.item(), rel=1e-12)


def test_the_first_step_of_a_window_pulls_nowhere() -> None:
    moe = layer()
    balance = pmoe.BalanceLoss(moe, over="window", window=3)
    moe(tokens())
    loss = balance.loss()
    assert loss.item() == pytest.approx(1, rel=1e-12)
    (grad,) = torch.autograd.grad(loss, [moe.gate.weight])
    assert grad.abs().max() <= 1e-15


def test_a_window_forgets_and_survives_a_restart() -> None:
    moe = layer()
    balance = pmoe.BalanceLoss(moe, over="window", window=2)
    shares = []
    for step in range(4):
        routing = moe.gate(tokens(seed=step))
        shares.append(torch.bincount(routing.expert.flatten(), minlength=E).double())
        moe(tokens(seed=step))
        loss = balance.loss()
        if step:
            counts = torch.stack(shares[max(step - 2, 0) : step]).sum(0)
            wanted = E * (counts / counts.sum() * routing.logits.softmax(-1).mean(0)).sum()
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
        balance.end_step()
    again = pmoe.BalanceLoss(moe, over="window", window=2)
    again.load_state_dict(balance.state_dict())
    moe(tokens())
    assert again.loss().item() == balance.loss().item()


def test_z_loss_is_a_mean_over_the_tokens_of_the_step() -> None:
    moe = layer()
    balance = pmoe.BalanceLoss(moe, z_loss_weight=0.5)
    plain = pmoe.BalanceLoss(moe)
    moe(tokens(5))
    moe(tokens(7, 1))
    logits = moe.gate(torch.cat([tokens(5), tokens(7, 1)])).logits
    difference = balance.loss() - plain.loss()
    assert difference.item() == pytest.approx(0.5 * router_z_loss(logits).item(), rel=1e-12)


def test_after_remove_nothing_is_collected() -> None:
    moe = layer()
    balance = pmoe.BalanceLoss(moe)
    balance.remove()
    moe(tokens())
    assert not moe.gate._forward_hooks
    with pytest.raises(RuntimeError, match=r"layer '' must be called before loss\(\)"):
        balance.loss()


# ---- wrong use


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"over": "rank"}, r"over \('rank'\) must be one of sequence, batch, window"),
        ({"layers": "sum"}, r"layers \('sum'\) must be one of megatron, torchtitan, transformers"),
        ({"over": "window"}, r"window \(None\) must be a number of steps if and only if"),
        ({"window": 2}, r"window \(2\) must be a number of steps if and only if"),
        ({"sequence_length": 4}, r"sequence_length \(4\) must be None unless over is 'sequence'"),
        (
            {"over": "sequence", "layers": "transformers"},
            r"layers \('transformers'\) takes all layers' tokens",
        ),
        ({"z_loss_weight": -1.0}, r"z_loss_weight \(-1.0\) must be"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pmoe.BalanceLoss(layer(), **options)


def test_models_that_cannot_be_balanced_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model \(Linear\) must hold a MoELayer"):
        pmoe.BalanceLoss(nn.Linear(2, 2))
    for name in ("hash", "random", "expert_choice"):
        with pytest.raises(ValueError, match=r"a layer '' whose gate .* has no scores to balance"):
            pmoe.BalanceLoss(layer(name))


def test_lengths_that_do_not_add_up_are_named() -> None:
    moe = layer()
    balance = pmoe.BalanceLoss(moe, over="sequence")
    with (
        pytest.raises(
            ValueError, match=r"lengths \(of 2 sequences, 11 tokens\) must add up to the 12 tokens"
        ),
        balance.sequences([5, 6]),
    ):
        moe(tokens())
    with pytest.raises(ValueError, match=r"sequence_length \(None\) must be a number, or the call be inside"):
        moe(tokens())
    with (
        pytest.raises(ValueError, match=r"lengths\[1\] \(0\) must be an int of at least 1"),
        balance.sequences([12, 0]),
    ):
        pass
    message = "sequences must be used with over='sequence'"
    with pytest.raises(ValueError, match=message), pmoe.BalanceLoss(moe).sequences([12]):
        pass


def test_totals_that_lack_a_number_are_named() -> None:
    moe = layer()
    balance = pmoe.BalanceLoss(moe)
    moe(tokens())
    with pytest.raises(ValueError, match=r"counts must have the choices of each expert.*balance.totals"):
        balance.loss(pmoe.StepTotals(num_tokens=T))
    balance.remove()
    balance = pmoe.BalanceLoss(moe, over="sequence", sequence_length=4)
    moe(tokens())
    with pytest.raises(ValueError, match=r"num_sequences \(0\) must be that of the whole step"):
        balance.loss(pmoe.StepTotals(num_tokens=T))
    with pytest.raises(ValueError, match="end_step must be called with over='window'"):
        balance.end_step()


def test_calls_without_gradients_are_no_loss() -> None:
    """The scores of a reentrant checkpoint's first pass have no graph: the loss would train nothing."""
    moe = layer()
    balance = pmoe.BalanceLoss(moe)
    x = tokens().requires_grad_()
    checkpoint(moe, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"called without gradients: call totals\(\).*use_reentrant=False"):
        balance.loss()
    with torch.no_grad():
        moe(tokens())
    totals = balance.totals()
    assert totals.num_tokens == T
    assert totals.counts[""].sum() == T * K
    moe(tokens())
    assert balance.loss(totals).requires_grad


def test_layers_of_other_tokens_need_a_loss_of_their_own() -> None:
    moe = nn.ModuleList([layer(), layer(seed=4)])
    balance = pmoe.BalanceLoss(moe)
    moe[0](tokens())
    moe[1](tokens(5))
    with pytest.raises(
        ValueError, match=r"tokens by layer: \{'0': 12, '1': 5\}\) must give every layer the same"
    ):
        balance.loss()


def test_an_attached_loss_has_the_gradients_of_an_added_one() -> None:
    moe = layer()
    balance = pmoe.BalanceLoss(moe, z_loss_weight=0.2)
    grads = []
    for way in ("added", "attached"):
        moe.zero_grad()
        x = tokens().requires_grad_()
        y = moe(x)
        if way == "added":
            (y.square().sum() + 3 * balance.loss()).backward()
        else:
            same = balance.attach(y, 3, None)
            assert torch.equal(same, y)
            same.square().sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in moe.parameters())])
    for first, second in zip(*grads, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-14)


def test_an_attached_loss_is_left_to_totals_without_gradients_and_repeated_by_no_checkpoint() -> None:
    moe = layer()
    balance = pmoe.BalanceLoss(moe)

    def stage(x: Tensor) -> Tensor:
        return balance.attach(moe(x), 0.5, totals)

    totals: pmoe.StepTotals | None = None
    with torch.no_grad():
        stage(tokens())
    totals = balance.totals()
    assert totals.num_tokens == T
    grads = []
    for reentrant in (None, False):
        moe.zero_grad()
        x = tokens().requires_grad_()
        y = stage(x) if reentrant is None else checkpoint(stage, x, use_reentrant=False)
        y.square().sum().backward()
        grads.append([x.grad, moe.gate.weight.grad])
    for first, second in zip(*grads, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="attach must be outside of .*: pass use_reentrant=False"):
        checkpoint(stage, tokens().requires_grad_(), use_reentrant=True).sum().backward()
