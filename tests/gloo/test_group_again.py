"""Process groups that are destroyed and made again: layers take the new group, or say in a sentence why
not.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import pmoe
from pmoe.planner import degree_trials
from tests.gloo import kit
from tests.gloo.kit import error_of
from tests.gloo.test_choices import step
from tests.pool import Pool

M, H, E = 6, 8, 4


def build(**options: Any) -> pmoe.MoELayer:
    torch.manual_seed(3)
    return pmoe.MoELayer(M, H, E, 2, **options)


def tokens(rank: int) -> Tensor:
    return torch.randn(5, M, generator=torch.Generator().manual_seed(rank))


def gradient(model: nn.Module, rank: int) -> Tensor:
    model.zero_grad(set_to_none=True)
    x = tokens(rank).requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def make_again(rank: int, world: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/again", world), rank=rank, world_size=world
    )


# ---- layers of the default group


def default_job(rank: int, world: int, options: dict[str, Any], folder: str) -> dict[str, Any]:
    layer = build(**options)
    before = gradient(layer, rank)
    copied, pickled = copy.deepcopy(layer), pickle.dumps(layer)
    y = layer(tokens(rank))  # whose backward pass is of another group
    dist.destroy_process_group()
    gone = [error_of(lambda: layer(tokens(rank))), error_of(lambda: pmoe.clip_grad_norm_(layer, 1.0))]
    gone.append(error_of(lambda: pmoe.save_checkpoint(folder, layer, step=1)))
    del y
    make_again(rank, world, folder)
    found = {"layer": layer, "copied": copied, "unpickled": pickle.loads(pickled)}
    same = {name: torch.equal(gradient(each, rank), before) for name, each in found.items()}
    again = [gradient(layer, rank).equal(before) for _ in range(2)]
    return {"gone": gone, "same": same, "again": again, "stats": pmoe.stats(layer, all_ranks=True).num_ranks}


@pytest.mark.parametrize(
    "world, options",
    [
        (2, {"pipeline": 2, "memory_reuse": "S4"}),
        (2, {"pad_to_capacity": True, "capacity_factor": 1.0}),
        (2, {"dispatch": "hierarchical_2d", "nodes": 1}),
        pytest.param(4, {"dispatch": "hierarchical_1d", "nodes": 2}, marks=pytest.mark.slow),
    ],
)
def test_layers_of_the_default_group_take_the_one_that_follows_it(
    world: int, options: dict[str, Any], tmp_path: Path
) -> None:
    with Pool(world) as pool:
        found = pool.run(default_job, options, str(tmp_path))
    for rank, got in enumerate(found):
        called, clipped, saved = got["gone"]
        place = f"rank {rank} of {world}"
        assert called == (
            f"RuntimeError: the process group of MoELayer 1 (0, {place}) was destroyed "
            "(torch.distributed.destroy_process_group): call torch.distributed.init_process_group again, as "
            f"{place}, and go on"
        )
        rule = "group (of size 1) must be all ranks that hold the model together"
        assert clipped.startswith(f"ValueError: {rule}") and rule in saved
        assert got["same"] == dict.fromkeys(got["same"], True)
        assert got["again"] == [True, True] and got["stats"] == world


# ---- layers of other groups


def own_group(world: int) -> nn.Module:
    return build(group=dist.new_group(list(range(world))))


def split(world: int) -> nn.Module:
    return build(mesh=init_device_mesh("cpu", (1, world), mesh_dim_names=("ep", "esp")))


def parallelized(world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    return pmoe.parallelize(nn.Sequential(build(group=pmoe.comm.ranks.Ranks.single())), mesh)


def others_job(rank: int, world: int, make: Callable[[int], nn.Module], folder: str) -> dict[str, list[str]]:
    model = make(world)
    gradient(model, rank)
    dist.destroy_process_group()
    gone = error_of(lambda: model(tokens(rank)))
    make_again(rank, world, folder)
    told = [gone, error_of(lambda: model(tokens(rank)))]
    beside = [
        error_of(lambda: pmoe.stats(model, all_ranks=True)),
        error_of(lambda: pmoe.clip_grad_norm_(model, 1.0)),
        error_of(lambda: repr(model)),
    ]
    layer = next(each for each in model.modules() if isinstance(each, pmoe.MoELayer))
    rebuilt = error_of(lambda: build(group=layer.ranks.group))
    return {"told": told, "beside": beside, "rebuilt": [rebuilt]}


@pytest.mark.parametrize("make", [own_group, split, parallelized])
def test_layers_of_other_groups_say_that_theirs_is_gone(
    make: Callable[[int], nn.Module], tmp_path: Path
) -> None:
    with Pool(2) as pool:
        found = pool.run(others_job, make, str(tmp_path))
    for rank, got in enumerate(found):
        name = "0" if make is parallelized else "MoELayer 1"
        for message in got["told"]:
            assert message.startswith(f"RuntimeError: the process group of {name} (")
            assert (
                f", rank {rank} of 2) was destroyed (torch.distributed.destroy_process_group): build"
                in message
            )
            assert message.endswith("and load its checkpoint (pmoe.load_checkpoint)")
        assert got["beside"] == ["", "", ""]
        assert "must not be destroyed (destroy_process_group)" in got["rebuilt"][0]


def other_size_job(rank: int, world: int, folder: str) -> str:
    layer = build()
    layer(tokens(rank))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{rank}", 1), rank=0, world_size=1)
    return error_of(lambda: layer(tokens(rank)))


def test_a_default_group_of_another_size_is_refused(tmp_path: Path) -> None:
    with Pool(2) as pool:
        found = pool.run(other_size_job, str(tmp_path))
    for rank, message in enumerate(found):
        assert message.startswith(
            "ValueError: group (the default one, with this process as rank 0 of 1) must have it as rank "
            f"{rank} of 2, as before"
        )


# ---- layers that were built before there was a group


def alone_job(rank: int, world: int) -> list[str]:
    import warnings

    from pmoe import warn

    group, dist.distributed_c10d._world.default_pg = dist.group.WORLD, None  # as before init_process_group
    try:
        early, spread, chosen = build(), build(), build(group=pmoe.comm.ranks.Ranks.single())
    finally:
        dist.distributed_c10d._world.default_pg = group
    warn.GIVEN.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen(tokens(rank))
        pmoe.parallelize(spread, init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))(tokens(rank))
        found = [len(caught)]
        for layer in (copy.deepcopy(early), early, early):
            layer(tokens(rank))
    return [*map(str, found), *(str(each.message) for each in caught)]


def test_a_layer_that_was_built_before_the_group_warns_at_its_first_call() -> None:
    with Pool(2) as pool:
        found = pool.run(alone_job)
    for before, *warned in found:
        assert before == "0" and len(warned) == 1
        assert "built before init_process_group holds all of its experts on this rank of 2" in warned[0]
        assert "pmoe.parallelize(model, mesh)" in warned[0] and "Ranks.single()" in warned[0]


# ---- a rank that is a new process in the new group

KEPT: list[pmoe.MoELayer] = []
"""The layer of a process that goes on after its process group."""


def first_life(rank: int, world: int, options: dict[str, Any], folder: str) -> None:
    """Makes a step, in which the ranks measure what they need to choose n and the restore pair."""
    os.environ["PMOE_CACHE"] = folder
    degree_trials.MOST_ROUNDS = 1
    KEPT.append(kit.build(top_k=1, **options))
    step(KEPT[0], 3000, rank)


def second_life(rank: int, world: int, options: dict[str, Any], folder: str) -> list[int]:
    """Makes the default group again, and two steps. A new process has built its layer again."""
    os.environ["PMOE_CACHE"] = folder
    degree_trials.MOST_ROUNDS = 1
    dist.destroy_process_group()
    make_again(rank, world, folder)
    layer = KEPT[0] if KEPT else kit.build(top_k=1, **options)
    degrees = []
    for count in (3000, 5000):
        step(layer, count, rank)
        assert layer.ran is not None
        degrees.append(layer.ran.forward)
    return degrees


@pytest.mark.parametrize("new_rank", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"pipeline": True}, id="trials"),
        pytest.param({"pipeline": 2, "memory_reuse": True}, id="profile"),
        pytest.param({"pipeline": "solve"}, id="solver"),
    ],
)
def test_a_new_process_takes_a_ranks_place_beside_one_that_has_measured(
    options: dict[str, Any], new_rank: int, tmp_path: Path
) -> None:
    """The process that went on would find all in its memory, and not take part in any measurement."""
    with Pool(2) as old, Pool(2) as new:
        old.run(first_life, options, str(tmp_path))
        pools = [new if rank == new_rank else old for rank in range(2)]
        for rank, pool in enumerate(pools):
            pool.pipes[rank].send((second_life, (options, str(tmp_path))))
        first, second = (pool.answer(rank, 60) for rank, pool in enumerate(pools))
        assert first == second
