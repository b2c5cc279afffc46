"""Several ranks: together they compute what one process would, whatever each of them holds. Nothing hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import pmoe
from tests.spec.kit import (
    Step,
    assert_close,
    assert_is_the_plain_layer,
    make,
    mine,
    on_ranks,
    plain_steps,
    step,
    step_on_rank,
    tokens,
)


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("counts", [(13,), (9, 4), (5, 3, 11, 2)])
def test_any_number_of_ranks_gives_the_plain_result(counts: tuple[int, ...], top_k: int) -> None:
    assert_is_the_plain_layer(counts, {"top_k": top_k}, num_experts=8, top_k=top_k)


@pytest.mark.parametrize("reuse", [False, "S1", "S4"])
@pytest.mark.parametrize("counts", [(9, 0), (0, 4), (0, 0), (5, 0, 0, 2), (0, 0, 0, 1)])
def test_ranks_without_tokens_do_not_hang(counts: tuple[int, ...], reuse: bool | str) -> None:
    assert_is_the_plain_layer(counts, pipeline=2, memory_reuse=reuse)


@pytest.mark.parametrize("reuse", [False, "S4"])
@pytest.mark.parametrize("load", ["one expert", "some get none"])
@pytest.mark.parametrize("counts", [(9, 4), (5, 0, 11, 2)])
def test_experts_and_ranks_that_get_no_rows_do_not_hang(
    counts: tuple[int, ...], load: str, reuse: bool | str
) -> None:
    options = {"top_k": 1, "load": load, "pipeline": 2, "memory_reuse": reuse}
    assert_is_the_plain_layer(counts, {"top_k": 1}, **options)


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_one_expert_a_rank_is_enough(expert: str) -> None:
    assert_is_the_plain_layer((5, 3, 11, 2), {"expert": expert}, num_experts=4, expert=expert)


def values(rank: int, world: int) -> dict[str, Tensor]:
    return dict(make(num_experts=8).state_dict())


@pytest.mark.parametrize("world", [2, 4])
def test_with_one_seed_the_ranks_hold_together_what_one_process_holds(world: int) -> None:
    whole = make(num_experts=8).state_dict()
    for rank, held in enumerate(on_ranks(world, values)):
        for name, value in held.items():
            expected = mine(rank, world, whole[name]) if name.startswith("experts.") else whole[name]
            assert torch.equal(value, expected), name


def only_some_call_backward_on(rank: int, world: int) -> Step:
    """Rank 0's loss does not look at its tokens' results."""
    layer, x = make(pipeline=2), tokens((9, 4)[rank], 10 + rank).requires_grad_()
    y = layer(x)
    ((0.0 if rank == 0 else 1.0) * y).sum().backward()
    return {"x": x.grad, **{name: each.grad for name, each in layer.named_parameters()}}


def test_experts_get_gradients_from_the_ranks_whose_loss_used_them() -> None:
    first, second = on_ranks(2, only_some_call_backward_on)
    assert first["x"].abs().sum() == 0 < second["x"].abs().sum()
    assert first["experts.w1"].abs().sum() > 0


def frozen_on_one(rank: int, world: int) -> Step:
    layer, x = make(pipeline=2), tokens((9, 4)[rank], 10 + rank)
    layer.requires_grad_(rank == 0)
    y = layer(x)
    (y * tokens(len(x), 4 + rank)).sum().backward()
    return {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}


def test_a_rank_that_froze_everything_takes_part_in_the_others_backward() -> None:
    first, second = on_ranks(2, frozen_on_one)
    assert len(first) == 5 and not second
    experts = {name: each for name, each in first.items() if "experts" in name}
    assert all(each.abs().sum() > 0 for each in experts.values())


def inference_beside_training(rank: int, world: int) -> Tensor:
    layer = make(pipeline=2)
    with torch.no_grad():
        return layer(tokens(7, 10 + rank))


def test_inference_gives_the_outputs_of_training() -> None:
    training = on_ranks(2, step_on_rank, (7, 7), {"pipeline": 2})
    for y, expected in zip(on_ranks(2, inference_beside_training), training, strict=True):
        assert torch.equal(y, expected["y"])


def two_layers(rank: int, world: int) -> Step:
    first, second = make(pipeline=2), make(pipeline=3, memory_reuse="S4")
    return step(first, tokens((9, 4)[rank], 10 + rank), run=lambda x: first(second(first(x))))


def test_layers_may_follow_each_other_and_one_may_be_called_twice() -> None:
    plain_first = make()
    alone = [
        plain_first(plain_first(plain_first(tokens(count, 10 + rank)))) for rank, count in enumerate((9, 4))
    ]
    for got, expected in zip(on_ranks(2, two_layers), alone, strict=True):
        assert_close({"y": got["y"]}, {"y": expected.detach()})


# ---- groups and meshes


def in_pairs(rank: int, world: int) -> Step:
    """Two layers of two ranks each, at once."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = make(group=groups[rank // 2], pipeline=2)
    return step(layer, tokens((9, 4)[rank % 2], 10 + rank % 2), 4 + rank % 2)


def test_groups_of_ranks_are_independent_of_each_other() -> None:
    expected = on_ranks(2, step_on_rank, (9, 4), {"pipeline": 2})
    for rank, got in enumerate(on_ranks(4, in_pairs)):
        assert_close(got, expected[rank % 2], limit=0)


def on_a_mesh(rank: int, world: int, ep: int, options: dict[str, Any]) -> tuple[Step, dict[str, tuple]]:
    mesh = init_device_mesh("cpu", (ep, world // ep), mesh_dim_names=("ep", "esp"))
    layer = make(mesh=mesh, **options)
    shapes = {name: tuple(each.shape) for name, each in layer.experts.named_parameters()}
    return step(layer, tokens((5, 3, 11, 2)[rank], 10 + rank), 4 + rank), shapes


@pytest.mark.parametrize("options", [{}, {"pipeline": 3}, {"pipeline": 2, "memory_reuse": "S4"}])
@pytest.mark.parametrize("world, ep", [(2, 1), (4, 2), (4, 1)])
def test_experts_that_are_split_over_ranks_give_the_plain_result(world: int, ep: int, options: dict) -> None:
    xs = [tokens((5, 3, 11, 2)[rank], 10 + rank) for rank in range(world)]
    expected = plain_steps(dict(make(num_experts=2).named_parameters()), xs)
    for rank, (got, _) in enumerate(on_ranks(world, on_a_mesh, ep, {"num_experts": 2, **options})):
        shared = ("y", "l_aux", "x", "gate.weight")
        assert_close({name: got[name] for name in shared}, {name: expected[rank][name] for name in shared})


def test_fewer_experts_than_ranks_are_split_by_their_hidden_columns() -> None:
    for _, shapes in on_ranks(4, on_a_mesh, 2, {"num_experts": 2}):
        assert shapes == {"w1": (1, 6, 6), "b1": (1, 6), "w2": (1, 6, 6), "b2": (1, 6)}


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_the_split_columns_gradients_are_those_of_the_whole_expert(expert: str) -> None:
    xs = [tokens((5, 3, 11, 2)[rank], 10 + rank) for rank in range(2)]
    whole = plain_steps(dict(make(num_experts=2, expert=expert).named_parameters()), xs, expert=expert)[0]
    for rank, (got, _) in enumerate(on_ranks(2, on_a_mesh, 1, {"num_experts": 2, "expert": expert})):
        assert_close({"w2": got["experts.w2"]}, {"w2": whole["experts.w2"].chunk(2, dim=2)[rank]})
        assert_close({"b2": got["experts.b2"]}, {"b2": whole["experts.b2"]})


def test_a_layer_without_a_process_group_is_one_rank() -> None:
    assert pmoe.MoELayer(4, 8, 3).num_local_experts == 3
