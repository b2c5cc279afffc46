"""Router replay over ranks: drifted routers, micro-batches, pipeline stages, ranks with other traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.comm.ranks import Ranks
from tests.gloo.kit import NUM_EXPERTS, TOKENS, build, error_of, part_of
from tests.kit import TOP_K, tokens
from tests.pool import ranks
from tests.reference import Definition, relative_error

STEPS = 2
"""Micro-batches of a step."""


def batches(rank: int, world: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns (x, dy, mask) of each micro-batch of a rank; the rank without tokens has none in each."""
    count = TOKENS[world][rank]
    return [
        (tokens(count, 10 * at + rank), tokens(count, 50 + 10 * at + rank), tokens(count, rank)[:, 0] > -0.3)
        for at in range(STEPS)
    ]


def drifted(weight_EM: Tensor) -> Tensor:
    return weight_EM.flip(0) + 0.1 * weight_EM


def plain_step(world: int) -> list[dict[str, Tensor]]:
    """Returns y of all micro-batches and the gradients of every rank, by loops over tokens and experts."""
    whole = build(group=Ranks.single())
    old = whole.gate.weight.detach()
    experts = {
        name: value.detach().clone().requires_grad_() for name, value in whole.experts.named_parameters()
    }
    definition = Definition({f"experts.{name}": value for name, value in experts.items()}, TOP_K)
    outputs, gates, inputs, loss = [], [], [], torch.zeros((), dtype=torch.float64)
    for rank in range(world):
        gate = drifted(old).requires_grad_()
        gates.append(gate)
        for x, dy, mask in batches(rank, world):
            x.requires_grad_()
            inputs.append(x)
            probability = (x @ gate.t()).softmax(-1)
            rows = [x[:0].sum(0)] if not len(x) else []
            for t in range(len(x)):
                scores = x[t].detach() @ (old if mask[t] else gate.detach()).t()
                chosen = scores.argsort(descending=True, stable=True)[:TOP_K]
                weight = probability[t, chosen] / probability[t, chosen].sum()
                rows.append(
                    sum(w * definition.run_expert(int(e), x[t]) for w, e in zip(weight, chosen, strict=True))
                )
            y = torch.stack(rows) if len(x) else x * 1.0
            outputs.append(y)
            loss = loss + (y * dy).sum()
    leaves = [*gates, *inputs, *experts.values()]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    found = [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, found, strict=True)]
    by_expert = dict(zip(experts, found[world + len(inputs) :], strict=True))
    whole_of = {f"experts.{name}": value for name, value in by_expert.items()}
    results = []
    for rank in range(world):
        own = slice(rank * STEPS, (rank + 1) * STEPS)
        results.append(
            {
                "y": torch.cat(outputs[own]).detach(),
                "x": torch.cat(found[world : world + len(inputs)][own]),
                "gate.weight": found[rank],
                **{name: part_of(whole_of, name, rank, world) for name in whole_of},
            }
        )
    return results


def replay_job(rank: int, world: int, how: str) -> None:
    layer = build()
    data = batches(rank, world)
    with torch.no_grad(), pmoe.record_routing(layer) as trace:
        for x, _, _ in data:
            layer(x)
    with torch.no_grad():
        layer.gate.weight.copy_(drifted(layer.gate.weight))
    contexts = {"context_fn": pmoe.checkpoint_contexts} if how == "contexts" else {}
    outputs = []
    with pmoe.replay_routing(layer, trace, mask=[mask for _, _, mask in data]):
        losses = []
        for x, dy, _ in data:
            x.requires_grad_()
            y = layer(x) if how == "plain" else checkpoint(layer, x, use_reentrant=False, **contexts)
            outputs.append(y.detach())
            losses.append((y * dy).sum())
        for loss in losses:  # after all forward passes, the first first
            loss.backward()
    got = {
        "y": torch.cat(outputs),
        "x": torch.cat([x.grad for x, _, _ in data]),
        **{name: parameter.grad for name, parameter in layer.named_parameters()},
    }
    wanted = plain_step(world)[rank]
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert relative_error(got[name], value) <= 1e-12, name


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", ["plain", "contexts", "checkpoint"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_replayed_step_equals_its_definition(world: int, how: str) -> None:
    ranks(world).run(replay_job, how)


def outside_job(rank: int, world: int) -> None:
    """A router outside of the layer, beside a layer whose gate has the router's weight."""
    inside = build()
    layer = build(gate=pmoe.gates.ExternalGate())
    layer.experts.load_state_dict(inside.experts.state_dict())
    weight = inside.gate.weight.detach().clone().requires_grad_()
    data = batches(rank, world)

    def call(x: Tensor) -> Tensor:
        score_TE = (x @ weight.t()).softmax(-1)

        def weights_of(expert_TK: Tensor) -> Tensor:
            chosen_TK = score_TE.gather(1, expert_TK)
            return chosen_TK / chosen_TK.sum(1, keepdim=True)

        expert_TK = score_TE.topk(TOP_K).indices
        with layer.gate.routing(expert_TK, weights_of(expert_TK), weights_of=weights_of):
            return layer(x)

    with torch.no_grad(), pmoe.record_routing(layer) as trace:
        for x, _, _ in data:
            call(x)
    with torch.no_grad():
        weight.copy_(drifted(weight))
        inside.gate.weight.copy_(weight)
    for one, compute in ((layer, call), (inside, inside)):
        with pmoe.replay_routing(one, trace):
            for x, dy, _ in data:
                (compute(x) * dy).sum().backward()
    found = {"gate.weight": weight.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    for name, parameter in inside.named_parameters():
        assert relative_error(found[name], parameter.grad) <= 1e-12, name


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_router_outside_of_the_layer_is_replayed_as_one_inside(world: int) -> None:
    ranks(world).run(outside_job)


# ---- pipeline stages

BATCHES, PER_BATCH = 4, 8


class Stage(nn.Module):
    def __init__(self, seed: int, is_checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = build(group=Ranks.single())
        self.is_checkpointed = is_checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return x + self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.is_checkpointed else self.inner(x)


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def stage_job(rank: int, world: int, schedule: Any, is_checkpointed: bool) -> None:
    stages = [Stage(at, is_checkpointed) for at in range(world)]
    mine = stages[rank]
    whole = nn.Sequential(*stages)
    parts = tokens(BATCHES * PER_BATCH, 1).chunk(BATCHES)
    targets = tokens(BATCHES * PER_BATCH, 2).chunk(BATCHES)
    with torch.no_grad(), pmoe.record_routing(whole) as trace:
        for x in parts:
            whole(x)
    with torch.no_grad():
        for one in stages:
            one.layer.gate.weight.copy_(drifted(one.layer.gate.weight))
    runs = schedule(
        PipelineStage(mine, rank, world, torch.device("cpu")), n_microbatches=BATCHES, loss_fn=squares
    )
    own = {"layer": trace[f"{rank}.layer"]}
    given = (torch.cat(parts),) if rank == 0 else ()
    named = {"target": torch.cat(targets)} if rank == world - 1 else {}
    with pmoe.replay_routing(mine, own):  # torch finds the shapes in the same block
        runs.step(*given, **named)
    got = {name: parameter.grad.clone() for name, parameter in mine.named_parameters()}
    whole.zero_grad()
    with pmoe.replay_routing(whole, trace):
        for x, target in zip(parts, targets, strict=True):
            (squares(whole(x), target) / BATCHES).backward()
    for name, parameter in mine.named_parameters():
        assert relative_error(got[name], parameter.grad) <= 1e-12, name


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_stages_replay_the_traces_of_their_layers(schedule: Any, is_checkpointed: bool) -> None:
    ranks(2).run(stage_job, schedule, is_checkpointed)


# ---- ranks with other traces


def fault_job(rank: int, world: int, fault: str) -> str:
    layer = build()
    x = tokens(5, rank)
    with torch.no_grad(), pmoe.record_routing(layer) as trace:
        for _ in range(2):
            layer(x)
    calls = trace[""]
    if rank == 1:
        if fault == "calls":
            calls = calls[:1]
        if fault == "experts":
            calls = [torch.full_like(call, NUM_EXPERTS) for call in calls]
        if fault == "tokens":
            calls = [call[:3] for call in calls]

    def run() -> None:
        with pmoe.replay_routing(layer, {"": calls}):
            for _ in range(2):
                layer(x)

    return error_of(run)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("calls", "must have as many calls on every rank"),
        ("experts", "must have experts from 0 to 7"),
        ("tokens", "has experts of 3 tokens, but the call has 5"),
    ],
)
def test_a_trace_that_is_wrong_on_one_rank_is_an_error_on_all(world: int, fault: str, message: str) -> None:
    errors = ranks(world).run(fault_job, fault)
    assert all(error.startswith(("ValueError", "FaultError")) for error in errors), errors
    assert message in errors[1]
    if fault != "tokens":
        assert all(message in error for error in errors), errors
    else:
        assert all("rank 1" in error for rank, error in enumerate(errors) if rank != 1), errors
