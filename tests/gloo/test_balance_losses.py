"""Balance losses over ranks: each equals the definition on the whole batch on one rank, however divided."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.gates import DeepSeekGate
from tests.gloo.kit import NUM_EXPERTS, build, error_of, part_of
from tests.kit import D_HIDDEN, D_MODEL, TOP_K, tokens
from tests.pool import ranks
from tests.reference import Definition, relative_error

LENGTHS = (3, 5, 1, 4, 2, 6, 3, 2)
"""Tokens of the sequences of a step."""
Z = 0.25

DIVISIONS: dict[int, list[list[list[list[int]]]]] = {
    1: [[[[0, 1, 2, 3, 4, 5, 6, 7]]], [[[0], [1, 2, 3], [], [4, 5, 6, 7]]]],
    2: [[[[0, 1, 2]], [[3, 4, 5, 6, 7]]], [[[0], [1, 2]], [[3, 4, 5, 6], [7]]]],
    4: [[[[0]], [[1, 2, 3]], [[]], [[4, 5, 6, 7]]], [[[0], [1]], [[2, 3], []], [[], [4]], [[5, 6], [7]]]],
}
"""For each number of ranks, the ways to divide a step: the sequences of each [rank][micro-batch]."""


def data(step: int) -> list[Tensor]:
    """Returns the sequences of a step."""
    return list(tokens(sum(LENGTHS), 100 + step).split(LENGTHS))


def model(**options: Any) -> nn.Sequential:
    torch.manual_seed(11)
    linear = nn.Linear(D_MODEL, D_MODEL).double()
    layers = [build(**options), build(**options)]
    with torch.no_grad():
        layers[1].gate.weight.mul_(-1.3)
    return nn.Sequential(linear, *layers)


def terms(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the probabilities (T, E), whether each expert is chosen (T, E), and the logits (T, E)."""
    logits = x @ gate.t()
    chosen = torch.zeros_like(logits, dtype=torch.float64)
    for t, line in enumerate(logits.detach()):
        chosen[t, line.argsort(descending=True, stable=True)[:TOP_K]] = 1
    return logits.softmax(-1), chosen, logits


def definition(over: str, layers: str, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of the whole step on one rank, and its gradients by name. It calls no layer."""
    whole = model(group=Ranks.single())
    leaves = {name: value.detach().clone().requires_grad_() for name, value in whole.named_parameters()}

    def gates_of(step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        x = torch.cat(data(step)) @ leaves["0.weight"].t() + leaves["0.bias"]
        first = terms(x, leaves["1.gate.weight"])
        of_first = {name[2:]: value for name, value in leaves.items() if name.startswith("1.experts")}
        y, _ = Definition(of_first, TOP_K).rank(x, leaves["1.gate.weight"])
        return [first, terms(y, leaves["2.gate.weight"])]

    now = gates_of(step)
    num_tokens = sum(LENGTHS)
    losses = []
    for layer, (probability, chosen, _) in enumerate(now):
        if over == "sequence":
            parts = []
            for p, c in zip(probability.split(LENGTHS), chosen.split(LENGTHS), strict=True):
                parts.append(NUM_EXPERTS * (c.mean(0) / TOP_K * p.mean(0)).sum())
            losses.append(torch.stack(parts).mean())
            continue
        counts = chosen.sum(0)
        if over == "window":
            earlier = [gates_of(before)[layer][1].sum(0) for before in range(max(step - 2, 0), step)]
            counts = torch.stack(earlier).sum(0).detach() if earlier else torch.ones(NUM_EXPERTS).double()
        losses.append(NUM_EXPERTS * (counts / counts.sum() * probability.mean(0)).sum())
    z = [logits.logsumexp(-1).square().mean() for _, _, logits in now]
    loss = torch.stack(losses).sum() + Z * torch.stack(z).sum()
    if layers == "transformers":
        probability = torch.cat([each[0] for each in now])
        chosen = torch.cat([each[1] for each in now])
        loss = NUM_EXPERTS * (chosen.mean(0) * probability.mean(0)).sum() + Z * torch.stack(z).mean()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    grads = {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(leaves.items(), found, strict=True)
    }
    assert num_tokens == len(now[0][0])
    return loss.detach(), grads


def balanced(moe: nn.Module, over: str, **options: Any) -> pmoe.BalanceLoss:
    window = 2 if over == "window" else None
    return pmoe.BalanceLoss(moe, over=over, window=window, z_loss_weight=Z, **options)


def run_step(
    balance: pmoe.BalanceLoss, run: Any, moe: nn.Module, own: list[list[int]], step: int, together: bool
) -> Tensor:
    """Runs the forward and backward passes of a step on one rank. Returns the sum of its losses.

    own: the sequences of each of this rank's micro-batches.
    together: whether all forward passes come first. If not, "batch" counts before.
    """
    sequences = data(step)
    empty = sequences[0][:0]
    batches = [(torch.cat([empty, *(sequences[at] for at in part)]), part) for part in own]

    def forward(x: Tensor, part: list[int], call: Any = run) -> None:
        if balance.over == "sequence":
            with balance.sequences([LENGTHS[at] for at in part]):
                call(x)
        else:
            call(x)

    if together:
        for x, part in batches:
            forward(x, part)
        loss = balance.loss()
        loss.backward()
        value = loss.detach()
    else:
        totals = pmoe.StepTotals(num_tokens=sum(LENGTHS), num_sequences=len(LENGTHS))
        if balance.over == "batch":
            with torch.no_grad():
                for x, part in batches:
                    forward(x, part, moe)
            totals = balance.totals()
            assert totals.num_tokens == sum(LENGTHS)
        value = torch.zeros((), dtype=torch.float64)
        for x, part in batches:
            forward(x, part)
            loss = balance.loss(totals)
            loss.backward()
            value += loss.detach()
    if balance.over == "window":
        balance.end_step()
    return value


def job(rank: int, world: int, over: str, layers: str, together: bool, recomputes: bool) -> None:
    for division in DIVISIONS[world]:
        moe = model()
        balance = balanced(moe, over, layers=layers, averaged=False)

        def run(x: Tensor, moe: nn.Module = moe) -> None:
            checkpoint(moe, x, use_reentrant=False) if recomputes else moe(x)

        for step in range(3 if over == "window" else 1):
            moe.zero_grad()
            value = run_step(balance, run, moe, division[rank], step, together)
            dist.all_reduce(value)
            loss, wanted = definition(over, layers, step)
            assert relative_error(value, loss) <= 1e-12
            for name, parameter in moe.named_parameters():
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                if "experts" not in name:
                    dist.all_reduce(grad)
                    target = wanted[name]
                else:
                    inner = {name[2:]: wanted[name]}
                    target = part_of(inner, name[2:], rank, world)
                if not target.any():
                    assert not grad.any() or relative_error(grad, target) <= 1e-12, name
                    continue
                assert relative_error(grad, target) <= 1e-12, (name, step)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("over", "layers"),
    [("sequence", "megatron"), ("batch", "torchtitan"), ("batch", "transformers"), ("window", "megatron")],
)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_divided_step_has_the_loss_and_gradients_of_the_whole(
    world: int, over: str, layers: str, together: bool
) -> None:
    ranks(world).run(job, over, layers, together, False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("over", ["sequence", "batch", "window"])
def test_checkpoints_count_no_call_twice(over: str) -> None:
    ranks(2).run(job, over, "megatron", False, True)


def test_calls_of_an_evaluation_or_of_a_copy_are_not_in_the_loss() -> None:
    layer = build(group=Ranks.single())
    balance = pmoe.BalanceLoss(layer)
    copy.deepcopy(layer)(tokens(7, 1))
    layer(tokens(5))
    loss = balance.loss()
    with torch.no_grad():
        layer.eval()(tokens(7, 1))
    layer.train()(tokens(5))
    with pytest.raises(RuntimeError, match=r"without gradients: call totals\(\) on every rank"):
        balance.loss()
    layer(tokens(5))
    assert torch.equal(balance.loss(), loss)


def test_the_state_of_a_loss_without_a_window_is_refused_by_one_with_a_window() -> None:
    layer = build(group=Ranks.single())
    batch = pmoe.BalanceLoss(layer)
    window = pmoe.BalanceLoss(layer, over="window", window=2)
    for taker, state in ((window, batch.state_dict()), (batch, window.state_dict())):
        with pytest.raises(ValueError, match=rf"'window' if and only if over \('{taker.over}'\) is 'window'"):
            taker.load_state_dict(state)


def wrapped_job(rank: int, world: int, ep: int, over: str) -> None:
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))
    moe = pmoe.parallelize(model(group=mesh.get_group("ep")), mesh)
    wrapped = DistributedDataParallel(moe, broadcast_buffers=False)
    balance = balanced(moe, over)
    division = DIVISIONS[world][1]
    value = run_step(balance, wrapped, moe, division[rank], 0, False)
    dist.all_reduce(value)
    loss, wanted = definition(over, "megatron", 0)
    assert relative_error(value / world, loss) <= 1e-12
    place = rank % ep
    for name, parameter in moe.named_parameters():
        if parameter.grad is None:
            continue
        grad = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        target = part_of({name[2:]: wanted[name]}, name[2:], place, ep)
        if target.any():
            assert relative_error(grad, target) <= 1e-12, name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("over", ["batch", "sequence"])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_the_loss_does_not_depend_on_data_and_expert_parallel_degrees(ep: int, over: str) -> None:
    ranks(4).run(wrapped_job, ep, over)


def unequal_job(rank: int, world: int, cut: list[int]) -> list[tuple[float, Tensor]]:
    """Returns the mean over ranks of l_aux, then of a `BalanceLoss`, each with the gradient of the gate."""
    own = tokens(24).split(cut)[rank]
    found = []
    for by_balance_loss in (False, True):
        layer = build()
        balance = pmoe.BalanceLoss(layer) if by_balance_loss else None
        layer(own)
        loss = layer.l_aux if balance is None else balance.loss()
        (gradient,) = torch.autograd.grad(loss, [layer.gate.weight])
        value = loss.detach().clone()
        dist.all_reduce(value)
        dist.all_reduce(gradient)
        found.append((value.item() / world, gradient / world))
    return found


@pytest.mark.parametrize("cut", [[12, 12], [20, 4], [24, 0]])
def test_l_aux_depends_on_how_tokens_are_divided_and_a_balance_loss_does_not(cut: list[int]) -> None:
    """A rank without tokens has l_aux = 0, so it halves the loss of the other rank."""
    layer = build(group=Ranks.single())
    layer(tokens(24))
    (wanted,) = torch.autograd.grad(layer.l_aux, [layer.gate.weight])
    whole = layer.l_aux.item()
    (l_aux, gradient), (balanced_loss, balanced_gradient) = ranks(2).run(unequal_job, cut)[0]
    assert abs(balanced_loss - whole) <= 1e-12 * whole and relative_error(balanced_gradient, wanted) <= 1e-12
    assert abs(l_aux - whole) > 1e-4
    if cut == [24, 0]:
        assert abs(l_aux - whole / 2) <= 1e-12 * whole and relative_error(gradient, wanted / 2) <= 1e-12


# ---- the bias of the gate without a loss


def bias_job(rank: int, world: int, at: int) -> Tensor:
    torch.manual_seed(5)
    gate = DeepSeekGate(D_MODEL, NUM_EXPERTS, TOP_K, num_groups=2, top_groups=1, dtype=torch.float64)
    torch.manual_seed(6)
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, TOP_K, gate=gate, dtype=torch.float64)
    for step in range(4):
        sequences = data(step)
        for part in DIVISIONS[world][at][rank]:
            layer(torch.cat([sequences[0][:0], *(sequences[one] for one in part)])).sum().backward()
        layer.gate.update_bias()
    return layer.gate.bias.clone()


def test_biases_do_not_depend_on_ranks_and_micro_batches() -> None:
    found = [bias for world in DIVISIONS for at in range(2) for bias in ranks(world).run(bias_job, at)]
    assert found[0].any()
    assert all(torch.equal(bias, found[0]) for bias in found)


# ---- ranks that differ


def fault_job(rank: int, world: int, fault: str) -> str:
    layer = build()
    if fault == "evaluation":
        balance = pmoe.BalanceLoss(layer)
        if rank == 0:
            with torch.no_grad():
                layer.layer_modules.gate(tokens(5, rank))
        layer(tokens(5, rank))
        error = error_of(balance.loss)
        layer(tokens(5, rank))
        balance.loss().backward()
        return error or "no error"
    if fault == "step without a loss":
        balance = pmoe.BalanceLoss(layer, over="window", window=2)
        layer(tokens(5, rank))
        if rank == 0:
            balance.loss(pmoe.StepTotals(num_tokens=5 * world)).backward()
        return error_of(balance.end_step)
    if fault == "layers":
        other = build(gate="sigmoid") if rank == 0 else nn.ModuleList([build()])
        return error_of(lambda: pmoe.BalanceLoss(other))
    if fault == "z_loss_weight":
        return error_of(lambda: pmoe.BalanceLoss(layer, z_loss_weight=0.1 * (rank == 0)))
    balance = pmoe.BalanceLoss(layer, over="sequence")

    def run() -> None:
        with balance.sequences([2, 3] if rank == 0 else [2, 2]):
            layer(tokens(5, rank))

    return error_of(run)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("layers", "must have the same layers on every rank"),
        (
            "z_loss_weight",
            "z_loss_weight (0.0 on rank 1) must be the same on every rank of the group, but rank 0",
        ),
        ("lengths", "must add up to the 5 tokens"),
        ("evaluation", "another rank cannot compute its balance loss"),
        ("step without a loss", "on this rank the step had no loss()"),
    ],
)
def test_what_differs_on_one_rank_is_an_error_on_all(world: int, fault: str, message: str) -> None:
    errors = ranks(world).run(fault_job, fault)
    assert all(errors), errors
    assert message in errors[1]
