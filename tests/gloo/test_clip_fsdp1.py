"""`pmoe.clip_grad_norm_` on parameters that FullyShardedDataParallel (FSDP1) shards, beside torch's norms.

FSDP1's parameters are plain tensors. They were taken for copies of each other, so that the norm was too small
by the square root of the number of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.training.fsdp1 import num_parts
from tests.gloo.kit import error_of
from tests.pool import ranks
from tests.reference import relative_error

M, H, E, TOKENS = 6, 8, 4, 5
CPU = torch.device("cpu")
SHARDED, WHOLE = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD


def model_of(group: Any) -> nn.Sequential:
    torch.manual_seed(3)
    layer = pmoe.MoELayer(M, H, E, 2, group=group, dtype=torch.float64)
    return nn.Sequential(nn.Linear(M, M), layer, nn.Linear(M, 3)).double()


def tokens(world: int) -> Tensor:
    return torch.randn(world * TOKENS, M, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def wrapped(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, device_id=CPU, **options)


def clip_job(rank: int, world: int, keeps: bool, strategy: ShardingStrategy) -> dict[str, float]:
    """Returns relative errors of norms and clipped gradients, against one process with all tokens.

    keeps: FSDP1's ``use_orig_params``.
    """
    found = {}
    options = {"use_orig_params": keeps, "sharding_strategy": strategy}
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    alone = model_of(Ranks.single())
    loss_of(alone, tokens(world)).backward()
    for order in (1.0, 2.0, 3.0, math.inf):
        expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), math.inf, order)
        # Experts are spread, and FSDP1 leaves them alone.
        spread = pmoe.parallelize(model_of(mesh.get_group("ep")), mesh)
        spread = wrapped(spread, ignored_states=pmoe.expert_parameters(spread), **options)
        # Each rank has all experts, and FSDP1 shards them like everything else.
        inner = model_of(Ranks.single())
        inner[2] = wrapped(inner[2], **options)
        copied = wrapped(inner, **options)
        for name, model in {"spread": spread, "copied": copied}.items():
            loss_of(model, tokens(world).chunk(world)[rank]).backward()
            norm = pmoe.clip_grad_norm_(model, math.inf, order)
            found[f"{name}, order {order}"] = relative_error(norm, expected)
            pmoe.clip_grad_norm_(model, 0.01, order)
            clipped = pmoe.clip_grad_norm_(model, math.inf, order)
            found[f"{name}, order {order}, clipped"] = abs(clipped.item() - 0.01)
    single = wrapped(model_of(Ranks.single()).float(), **options)  # torch's own norm refuses float64
    loss_of(single, tokens(world).float().chunk(world)[rank]).backward()
    norm = pmoe.clip_grad_norm_(single, math.inf)
    found["torch's own"] = relative_error(norm, single.clip_grad_norm_(math.inf))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("strategy", [SHARDED, WHOLE, ShardingStrategy.SHARD_GRAD_OP])
def test_the_norm_of_shards_is_that_of_one_process(keeps: bool, strategy: ShardingStrategy) -> None:
    for found in ranks(2).run(clip_job, keeps, strategy):
        for name, error in found.items():
            assert error < (1e-5 if "clipped" in name or "own" in name else 1e-12), (name, error)


def train_job(rank: int, world: int, keeps: bool) -> tuple[list[float], list[float]]:
    """Returns the losses of four clipped steps, and those of one process with all tokens."""
    losses: tuple[list[float], list[float]] = [], []
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    model = pmoe.parallelize(model_of(mesh.get_group("ep")), mesh)
    model = wrapped(model, ignored_states=pmoe.expert_parameters(model), use_orig_params=keeps)
    alone = model_of(Ranks.single())
    optimizer = torch.optim.AdamW(pmoe.parameter_groups(model), lr=1e-2)
    plain = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, tokens(world).chunk(world)[rank])
        loss.backward()
        pmoe.clip_grad_norm_(model, 0.1)
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses[0].append(mean.item())
        plain.zero_grad()
        loss = loss_of(alone, tokens(world))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        plain.step()
        losses[1].append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
def test_training_with_clipping_is_that_of_one_process(keeps: bool) -> None:
    for found, expected in ranks(2).run(train_job, keeps):
        assert found == pytest.approx(expected, rel=1e-9)


def hybrid_job(rank: int, world: int) -> list[Any]:
    """Returns norms under HYBRID_SHARD, and over how many ranks parameters of spread experts are split."""
    alone = model_of(Ranks.single())
    loss_of(alone, tokens(world)).backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), math.inf)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    errors = []
    for keeps in (True, False):
        hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
        model = wrapped(model_of(Ranks.single()), use_orig_params=keeps, **hybrid)
        loss_of(model, tokens(world).chunk(world)[rank]).backward()
        errors.append(relative_error(pmoe.clip_grad_norm_(model, math.inf), expected))
    over_copies = {"process_group": mesh.get_group("dp")}
    model = wrapped(model_of(mesh.get_group("ep")), use_orig_params=True, **over_copies)
    parts = {name: num_parts(model)[id(parameter)] for name, parameter in model.named_parameters()}
    mixed = wrapped(model_of(mesh.get_group("ep")), use_orig_params=False, **over_copies)
    inner = model_of(mesh.get_group("ep"))
    inner[1].experts = wrapped(inner[1].experts, use_orig_params=False, **over_copies)
    apart = wrapped(inner, use_orig_params=False, **over_copies)
    return [errors, parts, error_of(lambda: num_parts(mixed)), sorted(num_parts(apart).values())]


@pytest.mark.slow
def test_shards_within_groups_and_spread_experts_count_each_value_once() -> None:
    for errors, parts, refusal, of_flat in ranks(4).run(hybrid_job):
        assert max(errors) < 1e-12
        assert {count for name, count in parts.items() if ".experts." in name} == {4}
        assert {count for name, count in parts.items() if ".experts." not in name} == {2}
        assert "use_orig_params (False) of FullyShardedDataParallel must be True" in refusal
        assert "spread over 2 ranks beside other parameters" in refusal
        assert of_flat == [2, 4]


def refused_job(rank: int, world: int) -> list[str]:
    model = wrapped(nn.Sequential(nn.Linear(M, M), nn.Linear(M, M)), use_orig_params=True)
    made_before = nn.Linear(M, M)
    groups = pmoe.parameter_groups(made_before, lr=0.1, weight_decay=0.1)
    kept = wrapped(made_before, use_orig_params=True)
    assert {id(each) for group in groups for each in group["params"]} == set(map(id, kept.parameters()))
    return [
        error_of(lambda: pmoe.clip_grad_norm_(model.parameters(), 1.0)),
        error_of(lambda: pmoe.clip_grad_norm_(next(model.parameters()), 1.0)),
        error_of(lambda: pmoe.parameter_groups(model, lr=0.1)),
    ]


def test_pieces_of_flat_parameters_are_refused_without_their_model() -> None:
    for listed, single, grouped in ranks(2).run(refused_job):
        for message in (listed, single):
            assert message.startswith("ValueError: parameters (parameter 0 is sharded by FullySharded")
            assert "must be the model with its wrapper" in message
        assert "0.weight in FullyShardedDataParallel) must not be wrapped yet" in grouped
        assert "before the model is wrapped, and wrap it with use_orig_params=True" in grouped
