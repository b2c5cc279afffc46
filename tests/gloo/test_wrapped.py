"""Experts that a wrapper or a loop made equal on all ranks raise an error on every rank.

The first forward raises it.

Experts that are equal for good reasons are none.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import pmoe
from pmoe import warn
from pmoe.comm.ranks import Ranks
from tests.gloo.kit import error_of
from tests.pool import ranks

D_MODEL = 6
CPU = torch.device("cpu")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D_MODEL, 8), nn.ReLU(), nn.Linear(8, D_MODEL))


EXPERTS = {"ffn": "ffn", "modules": mlp}


def model_of(expert: str, **options: object) -> nn.Sequential:
    torch.manual_seed(3)
    layer = pmoe.MoELayer(D_MODEL, 8, 4, 2, expert=EXPERTS[expert], **options)
    return nn.Sequential(nn.Linear(D_MODEL, D_MODEL), layer, nn.Linear(D_MODEL, D_MODEL))


def step(model: nn.Module) -> None:
    model(torch.randn(5, D_MODEL)).sum().backward()


def broadcast(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    return model


def sharded_by_blocks(model: nn.Module) -> nn.Module:
    for block in model:
        fully_shard(block)
    return fully_shard(model)


Wrap = Callable[[nn.Module], nn.Module]
WRONG: dict[str, tuple[Wrap, str]] = {
    "ddp": (DistributedDataParallel, r"DistributedDataParallel(pmoe.parallelize(model, mesh))"),
    "ddp, some marked": (
        lambda model: DistributedDataParallel(ignoring(model, "1.experts.w1", "1.experts.local.0.0.weight")),
        r"DistributedDataParallel(pmoe.parallelize(model, mesh))",
    ),
    "fsdp2": (sharded_by_blocks, "fully_shard(..., ignored_params=pmoe.expert_parameters(model))"),
    "fsdp2, at the top": (fully_shard, "fully_shard(..., ignored_params=pmoe.expert_parameters(model))"),
    **{
        f"fsdp1, {kept}, {shards.name}": (
            lambda model, kept=kept, shards=shards: FullyShardedDataParallel(
                model, device_id=CPU, use_orig_params=kept, sharding_strategy=shards
            ),
            "FullyShardedDataParallel(model, ignored_states=pmoe.expert_parameters(model))",
        )
        for kept in (True, False)
        for shards in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
    },
    "a loop": (broadcast, "Exclude pmoe.expert_parameters(model)"),
    "ddp, unwrapped": (lambda model: DistributedDataParallel(model).module, "all ranks have those of one"),
}


def ignoring(model: nn.Module, *names: str) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


def wrong_job(rank: int, world: int) -> dict[tuple[str, str], tuple[str, int]]:
    found = {}
    for expert in EXPERTS:
        for name, (wrap, _) in WRONG.items():
            model = model_of(expert)
            layer = model[1]
            wrapped = wrap(model)
            found[expert, name] = error_of(lambda wrapped=wrapped: step(wrapped)), layer.traffic.total
    return found


def test_experts_that_ranks_took_for_copies_are_refused_with_the_line_to_add() -> None:
    for found in ranks(2).run(wrong_job):
        for (expert, name), (message, sent) in found.items():
            assert message.startswith("ValueError: experts"), (expert, name, message)
            assert WRONG[name][1] in message and sent == 0, (expert, name, message)


unsharded = partial(FullyShardedDataParallel, sharding_strategy=ShardingStrategy.NO_SHARD)


def later_job(rank: int, world: int) -> list[list[str]]:
    """Returns warnings of statistics.

    They are those after a step, after each of two loops that made experts equal, and of experts that were
    equal from the first call on.
    """
    found = []
    single, _ = dist.new_subgroups(group_size=1)

    def told(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            warn.GIVEN.clear()
            pmoe.stats(model, all_ranks=True, group=group)
        found.append([str(each.message) for each in given])

    for expert in EXPERTS:
        model = model_of(expert)
        step(model)
        told(model)
        broadcast(model)
        told(model)
        told(model, single)  # a group without the layer's other ranks knows nothing
        model = filled(model_of(expert), 0.5)
        step(model)
        told(model)
    return found


def test_experts_that_became_equal_after_the_first_call_are_told_by_statistics() -> None:
    first, other = ranks(2).run(later_job)
    assert [len(each) for each in first] == [0, 1, 0, 0] * len(EXPERTS)
    assert all("1: experts must differ from rank to rank" in each for each in first[1] + first[5])
    assert other == [[]] * 4 * len(EXPERTS)


def right_job(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "ep"))
    for expert in EXPERTS:
        for wrapper in (DistributedDataParallel, fully_shard, FullyShardedDataParallel, unsharded):
            model = pmoe.parallelize(model_of(expert), mesh)
            experts = pmoe.expert_parameters(model)
            given = {
                DistributedDataParallel: {},
                fully_shard: {"ignored_params": experts},
                FullyShardedDataParallel: {"ignored_states": experts, "device_id": CPU},
                unsharded: {"ignored_states": experts, "device_id": CPU},
            }[wrapper]
            before = [getattr(each, "to_local", lambda each=each: each)().clone() for each in experts]
            wrapped = wrapper(model, **given)
            step(wrapped)
            for each, value in zip(experts, before, strict=True):
                assert torch.equal(getattr(each, "to_local", lambda each=each: each)(), value)


def test_the_lines_that_are_named_are_right() -> None:
    ranks(2).run(right_job)


def equal_for_good_reasons() -> Iterator[tuple[str, nn.Module]]:
    """Yields models whose experts are equal on all ranks, or were changed, or are those of one rank only."""
    for expert in EXPERTS:
        yield "trained from zero", filled(model_of(expert), 0.0)
        yield "one dense checkpoint", filled(model_of(expert), 0.5)
        yield "a loop that leaves experts out", without_experts(model_of(expert))
        yield "each rank by itself", DistributedDataParallel(model_of(expert, group=Ranks.single()))
        names = [f"1.experts.{name}" for name, _ in model_of(expert)[1].experts.named_parameters()]
        yield "ddp that leaves experts out", DistributedDataParallel(ignoring(model_of(expert), *names))
        model = model_of(expert)
        yield "fsdp that leaves experts out", fully_shard(model, ignored_params=pmoe.expert_parameters(model))
        yield "copied", copy.deepcopy(model_of(expert))
        yield "in bfloat16 and back", model_of(expert).bfloat16().float()
        model = model_of(expert)
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
        yield "a checkpoint", model
        yield "replaced", replaced(model_of(expert))
    torch.manual_seed(1)
    alike = nn.ModuleList(mlp() for _ in range(2))  # the same on each rank, as it was built
    yield "modules of a user", nn.Sequential(pmoe.MoELayer(D_MODEL, 8, 4, 2, expert=alike))
    with torch.device("meta"):
        model = nn.Sequential(pmoe.MoELayer(D_MODEL, 8, 4, 2))
    model.to_empty(device="cpu")[0].reset_parameters()
    yield "from the meta device", model


@torch.no_grad()
def filled(model: nn.Module, value: float) -> nn.Module:
    for parameter in model[1].experts.parameters():
        parameter.fill_(value)
    return model


def without_experts(model: nn.Module) -> nn.Module:
    experts = pmoe.expert_parameters(model)
    for parameter in model.parameters():
        if parameter not in experts:
            dist.broadcast(parameter.detach(), 0)
    return model


def replaced(model: nn.Module) -> nn.Module:
    """Replaces parameters by a user's own Parameters, which have no mark."""
    for module in model[1].experts.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(value.detach() * 2))
    return model


def good_job(rank: int, world: int) -> dict[str, str]:
    return {
        name: error
        for name, model in equal_for_good_reasons()
        if (error := error_of(lambda m=model: step(m)))
    }


def test_experts_that_are_equal_for_good_reasons_raise_no_alarm() -> None:
    assert ranks(2).run(good_job) == [{}, {}]


def copies_job(rank: int, world: int, how: str, expert: str) -> tuple[str, bool]:
    """Wraps a model over copies of the experts.

    Ranks 0 and 1 together have all experts, and so have 2 and 3; the wrapper is over 0 and 2, and over 1 and
    3.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = model_of(expert, group=mesh.get_group("ep"))
    before: list[Tensor] = [each.detach().clone() for each in model.parameters()]
    if how == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    else:
        wrapped = fully_shard(model, mesh=mesh["dp"])
    error = error_of(lambda: step(wrapped))
    after = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
    return error, all(map(torch.equal, before, after))


@pytest.mark.parametrize("how, expert", [("ddp", "modules"), ("fsdp2", "ffn")])
def test_a_wrapper_over_ranks_that_hold_the_same_experts_may_have_them(how: str, expert: str) -> None:
    assert ranks(4).run(copies_job, how, expert) == [("", True)] * 4
