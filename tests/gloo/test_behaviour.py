"""Behaviour of a layer on several ranks besides its results: freezing, orders of calls, traffic, groups."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pmoe import MoELayer
from tests.gloo.kit import (
    NUM_EXPERTS,
    TOKENS,
    backward,
    build,
    counted_collectives,
    error_of,
    inputs,
    one_step,
    part_of,
)
from tests.kit import AUX, D_HIDDEN, D_MODEL, assert_same, tokens
from tests.own_experts import mlp
from tests.pool import ranks
from tests.reference import Definition, relative_error
from tests.spread import named, spread

# ---- initial values


def initial_job(rank: int, world: int, expert: object, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the values of the second of two layers.

    They would be wrong if they depended on the first one's number of experts.
    """
    torch.manual_seed(1)
    MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, expert=expert, dtype=dtype)
    layer = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, expert=expert, dtype=dtype)
    return {**layer.state_dict(), "next random number": torch.rand(1)}


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_hold_together_what_one_rank_would_hold(expert: object, dtype: torch.dtype) -> None:
    whole = initial_job(0, 1, expert, dtype)
    for world in (2, 4):
        for rank, got in enumerate(ranks(world).run(initial_job, expert, dtype)):
            for name, value in got.items():
                assert torch.equal(value, part_of(whole, name, rank, world)), (rank, name)


def sizes_job(rank: int, world: int) -> str:
    return error_of(lambda: MoELayer(D_MODEL, D_HIDDEN, 7))


def test_experts_that_do_not_divide_evenly_are_refused() -> None:
    for world in (2, 4):
        for message in ranks(world).run(sizes_job):
            assert message == f"ValueError: num_experts (7) must be divisible by the size of group ({world})"


# ---- needs_input_grad


def frozen_job(
    rank: int, world: int, frozen: str | None, who: int, options: dict[str, Any]
) -> dict[str, Any]:
    layer = build(**options)
    x, dy = inputs(rank, world)
    x.requires_grad_()
    if rank == who:
        if frozen in ("x", "everything"):
            x.requires_grad_(False)
        for name, parameter in layer.named_parameters():
            if frozen == "everything" or (frozen is not None and name.startswith(frozen)):
                parameter.requires_grad_(False)
    return backward(layer, x, dy)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "world, who, options, frozen",
    spread(
        [(2, 1), (4, 2), (4, 1)],
        [{}, {"expert": mlp}, {"pipeline": 1, "bypass_local": False}],
        ["x", "gate", "experts", "everything"],
        every=3,
    ),
    ids=named,
)
def test_what_one_rank_freezes_neither_stops_the_others_nor_changes_their_gradients(
    world: int, who: int, options: dict[str, Any], frozen: str
) -> None:
    everything = ranks(world).run(frozen_job, None, who, options)
    for rank, (got, expected) in enumerate(
        zip(ranks(world).run(frozen_job, frozen, who, options), everything, strict=True)
    ):
        for name, value in expected.items():
            is_frozen = frozen == "everything" and name != "y" or name.startswith(frozen)
            if rank == who and is_frozen:
                assert got[name] is None, name
            else:
                assert torch.equal(got[name], value), (rank, name)


def nobody_job(rank: int, world: int) -> tuple[bool, bool, int]:
    layer = build().requires_grad_(False)
    x, _ = inputs(rank, world)
    y = layer(x)
    with torch.no_grad():
        unattached = build()(x).requires_grad
    return y.requires_grad, unattached, layer.traffic.rows


def test_where_no_rank_needs_a_gradient_there_is_no_graph() -> None:
    for attached, under_no_grad, rows in ranks(2).run(nobody_job):
        assert (attached, under_no_grad) == (False, False)
        assert rows > 0


# ---- orders of forwards and backwards


def orders_job(rank: int, world: int, order: tuple[int, ...], options: dict[str, Any]) -> list[dict]:
    layer = build(**options)
    xs = [tokens((count + rank) % 7, 30 + 7 * i + rank) for i, count in enumerate((6, 3, 5))]
    dys = [tokens(x.shape[0], 50 + i) for i, x in enumerate(xs)]
    leaves = [x.clone().requires_grad_() for x in xs]
    losses = []
    for x, dy in zip(leaves, dys, strict=True):
        losses.append((layer(x) * dy).sum() + AUX * layer.l_aux)
    found: list[dict] = [{}, {}, {}]
    for i in order:
        layer.zero_grad(set_to_none=True)
        losses[i].backward()
        found[i] = {"x": leaves[i].grad, **{n: p.grad for n, p in layer.named_parameters()}}
    expected = [backward(layer, x.clone().requires_grad_(), dy) for x, dy in zip(xs, dys, strict=True)]
    return [{**each, "expected": want} for each, want in zip(found, expected, strict=True)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "order, options",
    spread([((0, 1, 2),), ((2, 1, 0),), ((1, 2, 0),)], [{}, {"expert": mlp}], every=2),
    ids=named,
)
def test_several_forwards_may_run_backward_in_any_order(order: tuple[int, ...], options: dict) -> None:
    for world in (2, 4):
        for by_call in ranks(world).run(orders_job, order, options):
            for got in by_call:
                expected = got.pop("expected")
                del expected["y"]
                assert_same(got, expected)


def chained(rank: int, world: int, layers: list[MoELayer]) -> dict[str, Tensor]:
    """Calls two layers, one of them twice in one graph: autograd decides the order of their backward
    passes.
    """
    first, second = layers
    x, dy = inputs(rank, world)
    x.requires_grad_()
    y = first(x)
    l_aux = first.l_aux
    y = first(y + second(y))
    ((y * dy).sum() + AUX * (l_aux + first.l_aux + second.l_aux)).backward()
    return {"y": y.detach(), "x": x.grad}


def chained_job(rank: int, world: int, expert: object) -> list[dict[str, Tensor]]:
    layers = [build(expert=expert), build(expert=expert, pipeline=3)]
    found = chained(rank, world, layers)
    return [found, *({name: p.grad for name, p in layer.named_parameters()} for layer in layers)]


@pytest.mark.parametrize("world, expert", spread([2, 4], ["ffn", mlp], every=3))
def test_layers_chained_and_used_twice_in_one_graph_run_backward_in_step(world: int, expert: object) -> None:
    # One rank after another on one layer: the experts' gradients add up, the gate's is each rank's own.
    layers = [build(expert=expert), build(expert=expert, pipeline=3)]
    for rank, got in enumerate(ranks(world).run(chained_job, expert)):
        for layer in layers:
            layer.gate.zero_grad()
        assert_same(got[0], chained(rank, world, layers), 1e-12)
        for layer, found in zip(layers, got[1:], strict=True):
            assert relative_error(found["gate.weight"], layer.gate.weight.grad) < 1e-12
    for i, layer in enumerate(layers):
        whole = {name: p.grad for name, p in layer.named_parameters()}
        for rank, got in enumerate(ranks(world).run(chained_job, expert)):
            for name, value in got[1 + i].items():
                if name.startswith("experts."):
                    assert relative_error(value, part_of(whole, name, rank, world)) < 1e-12, name


# ---- groups


def subgroup_job(rank: int, world: int, members: list[list[int]]) -> dict[str, Any]:
    groups = [dist.new_group(each) for each in members]
    mine = next(i for i, each in enumerate(members) if rank in each)
    try:
        refused = [
            error_of(lambda group=group: build(group=group)) for i, group in enumerate(groups) if i != mine
        ]
        layer = build(group=groups[mine])
        place = (layer.ranks.rank, layer.ranks.size)
        got = one_step(layer, layer.ranks.rank, layer.ranks.size)
        again = one_step(copy.deepcopy(layer), layer.ranks.rank, layer.ranks.size)
        assert_same(again, got)
        return {"refused": refused, "place": place, **got}
    finally:
        dist.destroy_process_group(groups[mine])


@pytest.mark.parametrize("members", [[[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0], [1], [2], [3]]])
def test_a_group_of_some_ranks_works_alone_and_refuses_the_others(members: list[list[int]]) -> None:
    size = len(members[0])
    alone = ranks(size).run(step_job) if size > 1 else [step_job(0, 1)]
    for rank, got in enumerate(ranks(4).run(subgroup_job, members)):
        rule = f"group (GroupMember.NON_GROUP_MEMBER) must contain this rank (global rank {rank})"
        assert got.pop("refused") == [f"ValueError: {rule}"] * (len(members) - 1)
        mine = next(each for each in members if rank in each)
        assert got.pop("place") == (mine.index(rank), size)
        assert_same(got, alone[mine.index(rank)], 1e-13)


def step_job(rank: int, world: int) -> dict[str, Tensor]:
    return one_step(build(), rank, world)


def copies_job(rank: int, world: int) -> tuple[list[dict[str, Tensor]], bytes]:
    layer = build()
    plain = one_step(layer, rank, world)
    copied = one_step(copy.deepcopy(layer), rank, world)
    pickled = pickle.dumps(layer)
    return [plain, copied, one_step(pickle.loads(pickled), rank, world)], pickled


def test_copies_share_the_group_and_unpickled_layers_take_the_default_one() -> None:
    for rank, ((plain, copied, unpickled), pickled) in enumerate(ranks(2).run(copies_job)):
        assert_same(copied, plain)
        assert_same(unpickled, plain)
        lonely = pickle.loads(pickled)  # here no process group is initialised
        with pytest.raises(ValueError, match=rf"rank 0 of 1\) must have it as rank {rank} of 2, as when"):
            lonely(tokens(3, 0))


# ---- what travels


def traffic_job(rank: int, world: int, options: dict[str, Any]) -> list[dict[str, int]]:
    layer = build(**options)
    x, dy = inputs(rank, world)
    x = x.to(layer.experts.w1.dtype).requires_grad_()
    seen = []
    y = layer(x)
    seen.append(vars(layer.traffic).copy())
    (y * dy.to(y.dtype)).sum().backward()
    seen.append(vars(layer.traffic).copy())
    routing = layer.gate(x)
    seen.append({"expert": routing.expert, "total": layer.traffic.total})
    return seen


@pytest.mark.parametrize(
    "world, bypass_local, top_k, n, dtype",
    spread([2, 4], [True, False], [(1, 1), (2, 3)], [torch.float64, torch.float32, torch.bfloat16], every=3),
)
def test_exactly_the_rows_of_other_ranks_experts_travel(
    world: int, bypass_local: bool, top_k: int, n: int, dtype: torch.dtype
) -> None:
    """A row is sent there and back with its routing weight, and the same in backward; nothing is padded.

    Rows that a rank sends to itself are no traffic.
    """
    local = NUM_EXPERTS // world
    options = {"top_k": top_k, "pipeline": n, "dtype": dtype, "bypass_local": bypass_local}
    found = ranks(world).run(traffic_job, options)
    owner = [seen[2]["expert"].flatten() // local for seen in found]
    row, weight = D_MODEL * dtype.itemsize, max(4, dtype.itemsize)
    for rank, (forward, both, last) in enumerate(found):
        sent = int((owner[rank] != rank).sum())
        received = sum(int((owner[r] == rank).sum()) for r in range(world) if r != rank)
        assert sent + received > 0
        assert forward == {
            "counts": (world - 1) * (4 + n * local) * 4,  # tokens, fault, needs_grad, type, counts
            "rows": (sent + received) * row,
            "scalars": sent * weight,
            "inside": 0,
            "weights": 0,
        }
        assert both == {
            "counts": forward["counts"],
            "rows": 2 * (sent + received) * row,
            "scalars": (sent + received) * weight,
            "inside": 0,
            "weights": 0,
        }
        assert last["total"] == sum(both.values())


def collectives_job(
    rank: int, world: int, n: int | bool, load: str, options: dict[str, Any]
) -> list[list[str]]:
    layer = build(pipeline=n, **options)
    count = {"uneven": TOKENS[world][rank], "none": 0, "one": int(rank == 1)}[load]
    x = tokens(count, 5).requires_grad_()
    with counted_collectives() as forward:
        y = layer(x)
    with counted_collectives() as back:
        y.sum().backward()
    return [forward, back]


@pytest.mark.parametrize(
    "world, options, load, n",
    spread(
        [(2, {}), (4, {}), (2, {"expert": mlp}), (2, {"sequential": True})],
        ["uneven", "one", "none"],
        [1, 2, 5],
        every=3,
    ),
    ids=named,
)
def test_every_rank_issues_the_same_collectives_whatever_its_tokens(
    world: int, options: dict[str, Any], load: str, n: int
) -> None:
    """They are counts, weights, and n dispatches and n combines; in backward the same without counts."""
    for forward, back in ranks(world).run(collectives_job, n, load, options):
        assert forward == ["all_to_all_single"] * (2 + 2 * n)
        assert back == ["all_to_all_single"] * (1 + 2 * n)


# ---- users' modules, checkpoints, autocast


def module_job(rank: int, world: int, n: int, top_k: int) -> dict[str, Tensor]:
    layer = build(expert=mlp, pipeline=n, top_k=top_k)
    return {**one_step(layer, rank, world), "l_aux": layer.l_aux.detach()}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("world", [2, 4])
def test_modules_as_experts_equal_the_definition(world: int, top_k: int, n: int) -> None:
    layer = build(expert=mlp, top_k=top_k)
    stacked = {"w1": "0.weight", "b1": "0.bias", "w2": "2.weight", "b2": "2.bias"}
    parameters = {
        f"experts.{name}": torch.stack([m.get_parameter(inner).detach() for m in layer.experts.local])
        for name, inner in stacked.items()
    }
    parameters["gate.weight"] = layer.gate.weight.detach()
    xs, dys = zip(*[inputs(rank, world) for rank in range(world)], strict=True)
    ys, aux, expected = Definition(parameters, top_k).gradients(xs, dys, AUX)
    local = NUM_EXPERTS // world
    for rank, got in enumerate(ranks(world).run(module_job, n, top_k)):
        want = {"y": ys[rank], "l_aux": aux[rank], "x": expected[rank]["x"]}
        want["gate.weight"] = expected[rank]["gate.weight"]
        for i in range(local):
            for name, inner in stacked.items():
                want[f"experts.local.{i}.{inner}"] = expected[rank][f"experts.{name}"][rank * local + i]
        assert_same(got, want, 1e-12)


def checkpoint_job(rank: int, world: int, use_reentrant: bool, options: dict[str, Any]) -> list[Any]:
    """Runs two layers whose experts are loaded unevenly, with and without activation checkpoints."""
    layers = nn.ModuleList([build(**options), build(**options)])
    with torch.no_grad():
        for layer in layers:
            layer.gate.weight[:3, 0] += 9  # the first rank's experts get nearly all
    x, dy = inputs(rank, world)
    x[:, 0] = x[:, 0].abs() + 1
    runs = []
    for plain in (True, False):
        layers.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        y, l_aux = leaf, 0
        with counted_collectives() as forward:
            for layer in layers:

                def call(x: Tensor, layer: MoELayer = layer) -> tuple[Tensor, Tensor]:
                    return x + layer(x), layer.l_aux

                y, aux = call(y) if plain else checkpoint(call, y, use_reentrant=use_reentrant)
                l_aux = l_aux + aux
        with counted_collectives() as back:
            ((y * dy).sum() + AUX * l_aux).backward()
        found = {name: p.grad for name, p in layers.named_parameters()}
        runs.append(({"y": y.detach(), "x": leaf.grad, **found}, len(forward), len(back)))
    return runs


@pytest.mark.parametrize(
    "world, options, use_reentrant",
    spread([2, 4], [{}, {"expert": mlp}, {"expert": mlp, "pipeline": 1, "top_k": 1}], [True, False], every=3),
    ids=named,
)
def test_a_checkpoint_around_the_layer_runs_every_ranks_forward_once_more(
    world: int, options: dict[str, Any], use_reentrant: bool
) -> None:
    for plain, checkpointed in ranks(world).run(checkpoint_job, use_reentrant, options):
        assert_same(checkpointed[0], plain[0])
        assert checkpointed[1] == plain[1]
        assert checkpointed[2] == plain[1] + plain[2]


def accumulate_job(rank: int, world: int) -> list[dict[str, Tensor]]:
    layer = build()
    batches = [inputs(rank, world), (tokens(rank, 41), tokens(rank, 42))]
    steps = [backward(layer, x.clone().requires_grad_(), dy) for x, dy in batches]
    layer.zero_grad()
    for x, dy in batches:
        y = layer(x)
        ((y * dy).sum() + AUX * layer.l_aux).backward()
    return [*steps, {name: p.grad for name, p in layer.named_parameters()}]


def test_gradients_accumulate_over_batches_of_different_sizes() -> None:
    for first, second, both in ranks(2).run(accumulate_job):
        for name, value in both.items():
            assert relative_error(value, first[name] + second[name]) < 1e-13, name


def narrow_job(rank: int, world: int, autocast: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    dtype = torch.float32 if autocast else torch.bfloat16
    layer = build(dtype=dtype, **options)
    x, dy = (each.to(dtype) for each in inputs(rank, world))

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
            return layer(x)

    return backward(layer, x.requires_grad_(), dy, run)


@pytest.mark.parametrize(
    "options, autocast",
    spread([{}, {"expert": "swiglu"}, {"expert": mlp}, {"pipeline": 3}], [True, False], every=2),
    ids=named,
)
def test_narrow_types_err_on_several_ranks_no_more_than_on_one(
    autocast: bool, options: dict[str, Any]
) -> None:
    for world in (2, 4):
        wide = build(dtype=torch.float32 if autocast else torch.bfloat16, **options).double()
        narrow: dict[str, Tensor] = {}
        exact: dict[str, Tensor] = {}
        got_by_rank = ranks(world).run(narrow_job, autocast, options)
        for rank in range(world):
            # The same tokens on one rank; the experts' gradients of all ranks' tokens add up in float64.
            x, dy = inputs(rank, world)
            dtype = torch.float32 if autocast else torch.bfloat16
            one = {k: v.double() for k, v in narrow_job(rank, world, autocast, options).items()}
            exactly = backward(wide, x.to(dtype).double().requires_grad_(), dy.to(dtype).double())
            for name in ("y", "x", "gate.weight"):
                got = got_by_rank[rank][name]
                assert got.dtype == (torch.bfloat16 if not autocast or name == "y" else torch.float32)
                assert rms(got.double() - exactly[name]) <= 2 * rms(one[name] - exactly[name]), name
            for name, value in one.items():
                if name.startswith("experts."):
                    narrow[name] = narrow.get(name, 0) + value
                    exact[name] = exact.get(name, 0) + exactly[name]
        ours, theirs = [], []  # of all experts together: one alone has few numbers
        for rank, got in enumerate(got_by_rank):
            for name in got:
                if name.startswith("experts."):
                    want = part_of(exact, name, rank, world)
                    ours.append((got[name].double() - want).flatten())
                    theirs.append((part_of(narrow, name, rank, world) - want).flatten())
        assert rms(torch.cat(ours)) <= 2 * rms(torch.cat(theirs))


def rms(difference: Tensor) -> float:
    return difference.square().mean().sqrt().item() if difference.numel() else 0.0
