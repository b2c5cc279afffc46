"""In a training script: scales of gradients, clipping, data parallelism, loss scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pmoe
from pmoe.training.parallel import is_expert, make_meshes, reduce_gradients
from tests.spec.kit import M, Step, assert_close, error_of, make, mine, on_ranks, tokens

TOKENS = 6
"""Of each rank: losses are means over ranks, so that one process has the mean over all tokens."""


def model_of(**options: Any) -> nn.Sequential:
    """Dense layers around an MoE layer, from one seed."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(M, M), make(**{"num_experts": 4, **options}), nn.Linear(M, 3)).double()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def in_one_process(world: int, max_norm: float | None = None) -> tuple[Step, float]:
    """Gradients of the mean of the ranks' losses, and their norm."""
    model = model_of()
    (sum(loss_of(model, tokens(TOKENS, 10 + rank)) for rank in range(world)) / world).backward()
    norm = 0.0 if max_norm is None else nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    return {name: each.grad for name, each in model.named_parameters()}, norm


def own_gradients(model: nn.Module, names: Any = None) -> Step:
    """Plain tensors, by the names of one process."""
    found = {}
    for name, each in model.named_parameters():
        grad = each.grad.full_tensor() if hasattr(each.grad, "full_tensor") else each.grad
        found[name.removeprefix("module.")] = grad
    return found


def parallel(ways: str, ep: int) -> nn.Module:
    """The model over ("dp", "ep"), its dense part shared by ``ways``: "ddp", "fsdp" or "none"."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))
    model = pmoe.parallelize(model_of(group=mesh.get_group("ep")), mesh)
    if ways == "fsdp":
        everyone = init_device_mesh("cpu", (world,))
        return fully_shard(model, mesh=everyone, ignored_params=pmoe.expert_parameters(model))
    return DistributedDataParallel(model) if ways == "ddp" else model


def parallel_step(rank: int, world: int, ways: str, ep: int, max_norm: float | None) -> tuple[Step, float]:
    model = parallel(ways, ep)
    loss_of(model, tokens(TOKENS, 10 + rank)).backward()
    norm = 0.0 if max_norm is None else float(pmoe.clip_grad_norm_(model, max_norm))
    return own_gradients(model), norm


@pytest.mark.parametrize("ways", ["ddp", "fsdp"])
@pytest.mark.parametrize("world, ep", [(2, 2), (4, 2), (4, 4), (2, 1)])
def test_every_gradient_has_the_scale_of_one_process(world: int, ep: int, ways: str) -> None:
    expected, _ = in_one_process(world)
    for got, _ in on_ranks(world, parallel_step, ways, ep, None):
        assert_close(got, expected)


@pytest.mark.parametrize("ways", ["ddp", "fsdp"])
@pytest.mark.parametrize("world, ep", [(2, 2), (4, 2)])
def test_the_clipped_norm_is_that_of_one_process_on_every_rank(world: int, ep: int, ways: str) -> None:
    expected, norm = in_one_process(world, 0.01)
    for got, found in on_ranks(world, parallel_step, ways, ep, 0.01):
        assert found == pytest.approx(norm, rel=1e-9)
        assert_close(got, expected, limit=1e-9)


# ---- without wrappers


def reduced(rank: int, world: int, sizes: dict[str, int], divide_by: float | None) -> tuple[Step, list[str]]:
    meshes = make_meshes(**sizes)
    model = model_of(mesh=meshes.experts)
    loss_of(model, tokens(TOKENS, 10 + rank)).backward()
    reduce_gradients(model, meshes, divide_by=divide_by)
    return own_gradients(model), [name for name, each in model.named_parameters() if is_expert(each)]


@pytest.mark.parametrize("divide_by", [None, 1])
@pytest.mark.parametrize("world, ep", [(2, 2), (4, 2), (4, 4), (4, 1)])
def test_reduce_gradients_makes_those_of_one_process(world: int, ep: int, divide_by: int | None) -> None:
    expected, _ = in_one_process(world)
    for rank, (got, experts) in enumerate(on_ranks(world, reduced, {"ep": ep}, divide_by)):
        factor = world if divide_by else 1
        own = {n: mine(rank % ep, ep, e) if n in experts else e for n, e in expected.items()}
        assert_close(got, {name: factor * each for name, each in own.items()})


def summed_by_the_layer(rank: int, world: int) -> Step:
    layer = make()
    layer(tokens(TOKENS, 10 + rank)).sum().backward()
    return {name: each.grad for name, each in layer.named_parameters()}


def test_without_any_reduction_an_experts_gradient_is_the_sum_over_all_ranks_tokens() -> None:
    layer = make()
    sum(layer(tokens(TOKENS, 10 + rank)).sum() for rank in range(2)).backward()
    for rank, got in enumerate(on_ranks(2, summed_by_the_layer)):
        assert_close({"w1": got["experts.w1"]}, {"w1": mine(rank, 2, layer.experts.w1.grad)})


def test_clipping_in_one_process_is_torchs() -> None:
    some, other = model_of(), model_of()
    for model in (some, other):
        loss_of(model, tokens(TOKENS)).backward()
    assert pmoe.clip_grad_norm_(some, 0.01) == pytest.approx(
        nn.utils.clip_grad_norm_(other.parameters(), 0.01)
    )
    assert_close(own_gradients(some), own_gradients(other))


# ---- gradients inside the backward pass


def by_reducer(rank: int, world: int, partition: bool | None) -> list[Step]:
    """Of three steps: the first is plain, then pieces travel inside."""
    meshes = make_meshes(ep=world)
    model = model_of(mesh=meshes.experts, pipeline=2)
    reducer, found = pmoe.GradientReducer(model, partition=partition), []
    for _ in range(3):
        model.zero_grad()
        loss_of(model, tokens(TOKENS, 10 + rank)).backward()
        reducer.finish()
        found.append(
            {name: each.grad.clone() for name, each in model.named_parameters() if not is_expert(each)}
        )
    return found


@pytest.mark.parametrize("partition", [None, False])
def test_dense_gradients_that_travel_inside_backward_are_the_mean_over_ranks(partition: bool | None) -> None:
    expected, _ = in_one_process(2)
    for steps in on_ranks(2, by_reducer, partition):
        for got in steps:
            assert_close(got, {name: expected[name] for name in got})


# ---- optimizers


def trained(rank: int, world: int, ways: str, options: dict[str, Any]) -> Step:
    model = parallel(ways, 2)
    optimizer = torch.optim.AdamW(pmoe.parameter_groups(model), lr=0.01, **options)
    for at in range(3):
        optimizer.zero_grad()
        loss_of(model, tokens(TOKENS, 100 * at + rank)).backward()
        optimizer.step()
    named = {name.removeprefix("module."): each.detach() for name, each in model.named_parameters()}
    return {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in named.items()
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("ways", ["ddp", "fsdp"])
def test_three_steps_on_four_ranks_are_those_of_one_process(ways: str, options: dict[str, Any]) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for at in range(3):
        optimizer.zero_grad()
        (sum(loss_of(model, tokens(TOKENS, 100 * at + rank)) for rank in range(4)) / 4).backward()
        optimizer.step()
    expected = {name: each.detach() for name, each in model.named_parameters()}
    for got in on_ranks(4, trained, ways, options):
        assert_close(got, expected, limit=1e-8)


def made_too_early(rank: int, world: int) -> str:
    model = model_of(group=dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pmoe.parallelize(model, init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))
    loss_of(model, tokens(TOKENS)).backward()
    return error_of(optimizer.step)


def test_an_optimizer_that_was_made_before_parallelize_is_refused_at_its_step() -> None:
    errors = on_ranks(2, made_too_early)
    assert all("pmoe.parallelize" in error and "Make the optimizer after" in error for error in errors)


def scaled(rank: int, world: int, overflows: bool) -> tuple[bool, float]:
    """Whether the step was made, and the scale after it. overflows: on rank 1 alone."""
    model = parallel("ddp", 2)
    optimizer = torch.optim.SGD(pmoe.parameter_groups(model), lr=0.1)
    scaler = pmoe.GradScaler("cpu", init_scale=4.0)
    weight = next(each for each in model.parameters() if is_expert(each))
    before = weight.detach().full_tensor().clone()
    scaler.scale(loss_of(model, tokens(TOKENS, 10 + rank))).backward()
    if overflows and rank == 1:
        weight.grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(weight.detach().full_tensor(), before), scaler.get_scale()


@pytest.mark.parametrize("overflows", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_of_all(overflows: bool) -> None:
    expected = (False, 2.0) if overflows else (True, 4.0)
    assert on_ranks(2, scaled, overflows) == [expected] * 2


def test_a_model_without_a_layer_is_refused() -> None:
    assert "must have a pmoe.MoELayer" in on_ranks(2, without_layer)[0]


def without_layer(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    return error_of(lambda: pmoe.parallelize(nn.Linear(2, 2), mesh))
