"""Gates, shared experts and callbacks whose values differ between ranks: a warning at the first call.

Statistics warn of it at any time. Values of which each rank has a part, or that may differ, are no fault.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import pmoe
from pmoe import warn
from pmoe.comm.ranks import Ranks
from tests.gloo.kit import error_of
from tests.pool import ranks

M, H, E = 6, 8, 4


class Scaled(nn.Module, pmoe.Callback):
    """A callback inside the layer, with a parameter."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((M,), value))

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * self.scale


class Outside(nn.Module, pmoe.Callback):
    """A callback that only looks on, outside of the layer, with another parameter on each rank."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((M,), value))

    def before_moe_start(self, x: Tensor) -> Tensor:
        return x


class OwnGate(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.inner = pmoe.gates.TopKGate(M, E, 2)
        self.bias = nn.Parameter(torch.full((), value))
        self.register_buffer("calls", torch.tensor(value))  # a user's own, which may differ

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        return self.inner(x_TM)


def layer_of(**options: Any) -> pmoe.MoELayer:
    torch.manual_seed(3)
    return pmoe.MoELayer(M, H, E, 2, **options)


def rows(seed: int = 0) -> Tensor:
    return torch.randn(5, M, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def nudged(layer: pmoe.MoELayer, name: str, rank: int) -> pmoe.MoELayer:
    """Changes one value of one tensor, on rank 1, by the smallest amount."""
    if rank == 1:
        tensor = dict([*layer.named_parameters(), *layer.named_buffers()])[name].view(-1)
        tensor[-1] = torch.nextafter(tensor[-1], torch.tensor(9.0))
    return layer


def different(rank: int) -> Iterator[tuple[str, pmoe.MoELayer]]:
    """Yields (the name that the warning must have, a layer)."""
    yield "gate.weight", nudged(layer_of(), "gate.weight", rank)
    yield "gate.weight", nudged(layer_of(capacity_factor=4.0, pad_to_capacity=True), "gate.weight", rank)
    yield "gate.noise_weight", nudged(layer_of(gate="noisy_topk"), "gate.noise_weight", rank)
    yield "gate.log_temperature", nudged(layer_of(gate="xmoe"), "gate.log_temperature", rank)
    yield "gate.bias", nudged(layer_of(gate="deepseek"), "gate.bias", rank)
    yield "gate.bias", layer_of(gate=OwnGate(float(rank)))
    yield (
        "shared_gate.weight",
        nudged(layer_of(shared_expert=8, shared_gate=True), "shared_gate.weight", rank),
    )
    yield "shared_expert.b2", nudged(layer_of(shared_expert=8), "shared_expert.b2", rank)
    name = "shared_expert.local.0.0.weight"
    module = nn.Sequential(nn.Linear(M, M))
    yield name, nudged(layer_of(shared_expert=module), name, rank) if rank else layer_of(shared_expert=module)
    yield "callbacks.1.scale", layer_of(callbacks=[Outside(1.0), Scaled(1.0 + rank % 2)])
    torch.manual_seed(rank)  # the usual way into it
    yield "gate.weight", pmoe.MoELayer(M, H, E, 2)
    torch.manual_seed(rank)
    frozen = pmoe.MoELayer(M, H, E, 2)
    frozen.gate.requires_grad_(False)
    yield "gate.weight", frozen


def different_job(rank: int, world: int) -> list[tuple[str, list[str], list[str]]]:
    """Returns (name, warnings of a first call, warnings of a second call) for each layer."""
    found = []
    for name, layer in different(rank):
        first, second = (told(lambda layer=layer: layer(rows(rank)).sum().backward()) for _ in range(2))
        found.append((name, first, second))
    return found


def test_dense_values_that_differ_are_told_on_every_rank_at_the_first_call_with_the_cure() -> None:
    for of_rank in ranks(2).run(different_job):
        for name, first, second in of_rank:
            assert len(first) == 1 and not second, (name, first, second)
            rule = rf"pmoe: MoELayer \d+, whose values of {re.escape(name)} must be the same on every rank"
            assert re.match(rule, first[0]), (name, first)
            assert "(ranks with equal values: rank 0; rank 1)" in first[0] and "torch.manual_seed" in first[0]
            assert "DistributedDataParallel" in first[0] and "torch.distributed.broadcast" in first[0]


def groups_job(rank: int, world: int) -> list[str]:
    return told(lambda: nudged(layer_of(), "gate.weight", rank)(rows()))


def test_the_ranks_that_are_alike_are_named_together() -> None:
    for warnings_of_rank in ranks(4).run(groups_job):
        assert "(ranks with equal values: ranks 0, 2, 3; rank 1)" in warnings_of_rank[0]


# ---- no alarm


class ByMegatron(nn.Module):
    """A linear map of which each rank has some rows, as in Megatron's layers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((M,), float(rank)))
        self.weight.tensor_model_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ByDTensor(nn.Module):
    """A shared expert of a user's own, whose weight is a DTensor; its forward takes this rank's part."""

    def __init__(self, placement: Any) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        whole = torch.arange(2.0 * M).view(2, M)
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [placement]))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.weight.to_local()[0]


def alike(rank: int) -> Iterator[tuple[str, nn.Module]]:
    everyone = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    yield "callbacks outside differ", layer_of(callbacks=[Outside(float(rank))])
    yield "one rank alone has a callback outside", layer_of(callbacks=[Outside(1.0)] if rank else [])
    yield "ranks of their own", nudged(layer_of(group=Ranks.single()), "gate.weight", rank)
    yield "Megatron's parts", layer_of(shared_expert=ByMegatron(rank))
    yield "a sharded weight", layer_of(shared_expert=ByDTensor(Shard(0)))
    yield "a replicated weight", layer_of(shared_expert=ByDTensor(Replicate()))
    yield "a gate without parameters", layer_of(gate="random")
    torch.manual_seed(3)
    experts = [nn.Linear(M, M) for _ in range(E)][2 * rank : 2 * rank + 2]
    yield "modules as experts", pmoe.MoELayer(M, H, E, 2, expert=nn.ModuleList(experts), gate=OwnGate(0.0))
    torch.manual_seed(rank)  # which DistributedDataParallel heals before the first call
    yield "ddp", DistributedDataParallel(pmoe.parallelize(pmoe.MoELayer(M, H, E, 2), mesh))
    model = pmoe.parallelize(nn.Sequential(nn.Linear(M, M), layer_of(shared_expert=8)), mesh)
    ignored = pmoe.expert_parameters(model)
    yield "fsdp2", fully_shard(model, mesh=everyone, ignored_params=ignored)
    for name, policy in (
        ("fsdp2 in bfloat16", MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        ("fsdp2 of the gate by itself", MixedPrecisionPolicy()),
    ):
        layer = layer_of(gate="deepseek", shared_expert=8)
        model = pmoe.parallelize(nn.Sequential(nn.Linear(M, M), layer), mesh)
        ignored = pmoe.expert_parameters(model)
        if "gate" in name:
            fully_shard(layer.gate, mesh=everyone)
        yield name, fully_shard(model, mesh=everyone, ignored_params=ignored, mp_policy=policy)
    model = pmoe.parallelize(nn.Sequential(nn.Linear(M, M), layer_of()), mesh)
    yield (
        "fsdp1",
        FullyShardedDataParallel(
            model, ignored_states=pmoe.expert_parameters(model), device_id=torch.device("cpu")
        ),
    )


def alike_job(rank: int, world: int) -> dict[str, str]:
    found = {}
    for name, model in alike(rank):

        def step(model: nn.Module = model) -> None:
            y = model(rows(rank))
            if y.requires_grad:
                y.sum().backward()

        with torch.set_grad_enabled(" weight" not in name):  # modules over DTensors do not train in a layer
            errors: list[str] = []
            warned = told(lambda step=step, errors=errors: errors.append(error_of(step)))
        found[name] = "; ".join([*errors, *warned])
        for module in model.modules():
            if isinstance(module, pmoe.gates.DeepSeekGate):
                assert (module.bias.dtype, module.load.dtype) == (torch.float32, torch.int64)
    return found


def test_what_may_differ_or_lies_in_parts_is_no_alarm() -> None:
    for found in ranks(2).run(alike_job):
        assert set(found.values()) == {""}, found


# ---- statistics


def told(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        warn.GIVEN.clear()
        call()
    return [str(each.message) for each in given]


def statistics_job(rank: int, world: int) -> list[list[str]]:
    """Returns warnings: before and after a call, of layers that became different, of layers of one rank
    each.
    """
    found = []
    model = nn.Sequential(layer_of(), layer_of(shared_expert=8))
    for _ in range(2):
        found.append(told(lambda: pmoe.stats(model, all_ranks=True)))
        model(rows(rank))
    nudged(model[1], "gate.weight", rank)
    nudged(model[1], "shared_expert.w1", rank)
    found.append(told(lambda: pmoe.stats(model, all_ranks=True)))
    single = nn.Sequential(nudged(layer_of(group=Ranks.single()), "gate.weight", rank))
    single(rows(rank))
    found.append(told(lambda: pmoe.stats(single, all_ranks=True)))
    return found


def test_statistics_tell_of_values_that_became_others_at_any_time() -> None:
    first, other = ranks(2).run(statistics_job)
    assert [len(each) for each in first] == [0, 0, 1, 0] and other == [[]] * 4
    assert first[2][0].startswith("pmoe: 1: the values of gate, shared_expert must be the same on every rank")
    assert "torch.manual_seed" in first[2][0]


def copies_job(rank: int, world: int) -> list[str]:
    """Returns warnings of gates of two groups of ranks: they are equal in a group, and differ between
    groups.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(rank // 2)
    model = nn.Sequential(pmoe.MoELayer(M, H, E, 2, group=mesh.get_group("ep")))
    model(rows(rank))
    return told(lambda: pmoe.stats(model, all_ranks=True))


def test_statistics_tell_of_groups_that_are_alike_only_within() -> None:
    first, *others = ranks(4).run(copies_job)
    assert len(first) == 1 and "the values of gate must be the same" in first[0]
    assert others == [[]] * 3


@pytest.mark.parametrize("world", [1])
def test_one_rank_reads_no_values(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("pmoe.decide.dense_values.fingerprint", refuse)
    layer_of()(rows())
