"""``balance`` beside options that change how rows are sent, or with what experts compute.

Output and every gradient are those of the same layer without copies, to the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import pmoe
from pmoe.schedule.restore import ALL_PAIRS
from tests.adapted import fill
from tests.gloo.kit import error_of
from tests.gloo.test_balance import TOKENS, build, differences, step
from tests.gloo.test_wire import Rounding
from tests.kit import AUX, assert_same, tokens
from tests.pool import ranks
from tests.spread import parts

PAIRS = [False, *ALL_PAIRS]
BUSY: list[tuple[int, tuple[Any, ...]]] = [
    (1, (4, 1, 0.8, (0,))),
    (1, (4, 2, 0.5, (3,))),
    (2, (8, 3, 0.6, (0, 1))),
    (2, (8, 2, 0.9, (4, 5))),
]
"""The most copies of a rank; then the number of experts, top_k, and the share of the busy experts."""

_meshes: list[DeviceMesh] = []


def mesh_of(world: int) -> DeviceMesh:
    """The mesh in which two ranks share each expert."""
    if not _meshes:
        _meshes.append(init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ep", "esp")))
    return _meshes[0]


def compared(rank: int, world: int, cases: list[tuple[Any, ...]], **options: Any) -> Iterator[str]:
    """What is wrong in each case: a number of chunks, a restore pair, and a load."""
    for n, pair, (balance, case) in cases:
        both = {"pipeline": n, "memory_reuse": pair, **options}
        without = step(build(*case, **both), rank, world)
        layer = build(*case, balance=balance, **both)
        wrong = differences(step(layer, rank, world), without, 1e-12)
        assert layer.ran is not None and layer.ran.balance is not None
        if wrong or not layer.ran.balance.copies:
            yield f"n={n}, {pair}, {case}: {layer.ran.balance.copies} copies, {wrong}"


EVERY = parts([1, 2, 4], PAIRS, BUSY, every=11)


def once_job(rank: int, world: int, cases: list[tuple[Any, ...]]) -> list[str]:
    several = [case for case in cases if case[2][1][1] > 1]
    return list(compared(rank, world, several, send_once=True))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("cases", EVERY)
def test_a_token_is_sent_once_to_each_rank_of_experts_and_copies(
    world: int, cases: list[tuple[Any, ...]]
) -> None:
    assert ranks(world).run(once_job, cases) == [[]] * world


def sharded_job(rank: int, world: int, cases: list[tuple[Any, ...]], options: dict[str, Any]) -> list[str]:
    return list(compared(rank, world, cases, mesh=mesh_of(world), **options))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"send_once": True, "expert": "swiglu"}], ids=["plain", "once"])
@pytest.mark.parametrize("cases", EVERY)
def test_copies_of_sharded_experts_are_sharded(options: dict[str, Any], cases: list[tuple[Any, ...]]) -> None:
    if "send_once" in options:
        cases = [case for case in cases if case[2][1][1] > 1]
    assert ranks(4).run(sharded_job, cases, options) == [[]] * 4


def everywhere_job(rank: int, world: int) -> tuple[list[str], bool]:
    """Every rank has a part of every expert: there is no other rank for a copy."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("ep", "esp"))
    with pytest.warns(UserWarning, match="balance .1. does nothing where every rank has a part of every"):
        layer = build(4, 1, 0.8, (0,), balance=1, mesh=mesh)
    found = step(layer, rank, world)
    assert layer.ran is not None
    return differences(found, step(build(4, 1, 0.8, (0,), mesh=mesh), rank, world), 1e-12), (
        layer.ran.balance is None
    )


def test_where_every_rank_has_a_part_of_every_expert_balance_does_nothing() -> None:
    assert ranks(2).run(everywhere_job) == [([], True)] * 2


# ---- rows in fewer bytes


def wire_job(
    rank: int, world: int, wires: tuple[str | None, str | None], cases: list[tuple[Any, ...]]
) -> None:
    """With copies a wire gives the bits of a layer with the same copies, whose dispatch rounds the rows."""
    for n, pair, (balance, case) in cases:
        both = {"dtype": torch.float32, "pipeline": n, "balance": balance}
        keeps = pmoe.Restore("keep", pair.hidden) if pair else False
        layer = build(*case, memory_reuse=pair, wire=wires[0], wire_backward=wires[1], **both)
        other = build(*case, memory_reuse=keeps, dispatch=Rounding(), **both)
        found = []
        for each in (layer, other):
            x = tokens(TOKENS[world][rank], rank, torch.float32).requires_grad_()
            each.dispatch.wire = wires[0]
            y = each(x)
            each.dispatch.wire = wires[1]
            ((y * tokens(len(x), 20 + rank, torch.float32)).sum() + AUX * each.l_aux).backward()
            gradients = {name: parameter.grad for name, parameter in each.named_parameters()}
            found.append({"y": y.detach(), "x": x.grad, **gradients})
        assert layer.ran is not None and layer.ran.balance is not None and layer.ran.balance.copies
        assert_same(*found, told=(n, pair, case))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("wires", [("bfloat16", "bfloat16"), ("e4m3", None), (None, "e4m3")], ids=str)
@pytest.mark.parametrize("cases", EVERY)
def test_rows_for_copies_are_rounded_as_all_rows_that_are_sent(
    world: int, wires: tuple[str | None, str | None], cases: list[tuple[Any, ...]]
) -> None:
    ranks(world).run(wire_job, wires, cases)


def all_sent_job(rank: int, world: int) -> float:
    """How far a step with copies is from one without, where all rows are rounded in both."""
    steps = []
    for balance in (0, 2):
        layer = build(8, 2, 0.9, (4, 5), torch.float32, balance=balance, wire="e4m3", bypass_local=False)
        steps.append(step(layer, rank, world))
    without, found = steps
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        for name, value in without.items()
        if value is not None and name != "rows" and value.numel()
    )


def test_where_all_rows_are_sent_copies_change_nothing_of_a_wire() -> None:
    assert max(ranks(4).run(all_sent_job)) < 1e-5


# ---- adapters


def adapted_job(
    rank: int, world: int, cases: list[tuple[Any, ...]], settings: dict[str, Any], trains_all: bool
) -> list[str]:
    wrong = []
    for n, pair, (balance, case) in cases:
        steps = []
        for copies in (0, balance):
            layer = build(*case, pipeline=n, memory_reuse=pair)
            pmoe.add_lora(layer, rank=2, alpha=3.0, **settings)
            fill(layer.layer_modules.experts.adapter("default"), layer.first_expert)
            for name, parameter in layer.experts.named_parameters():
                parameter.requires_grad_(trains_all or "adapters" in name)
            layer.balance = copies
            steps.append(step(layer, rank, world))
        assert layer.ran is not None and layer.ran.balance is not None and layer.ran.balance.copies
        wrong += differences(steps[1], steps[0], 1e-12)
    return wrong


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("settings", [{}, {"shared": True}, {"targets": ["w2"]}], ids=str)
@pytest.mark.parametrize("trains_all", [False, True], ids=["adapters are trained", "all is trained"])
@pytest.mark.parametrize("cases", EVERY)
def test_copies_have_the_adapters_of_their_experts(
    world: int, settings: dict[str, Any], trains_all: bool, cases: list[tuple[Any, ...]]
) -> None:
    assert ranks(world).run(adapted_job, cases, settings, trains_all) == [[]] * world


def sent_job(rank: int, world: int, shared: bool) -> tuple[int, int]:
    """Elements that this rank sends of weights and of gradients of copies: only adapters are trained."""
    layer = build(4, 1, 0.8, (0,), balance=1)
    pmoe.add_lora(layer, rank=1, shared=shared)
    layer(tokens(TOKENS[world][rank], rank)).sum().backward()
    experts = layer.experts
    of_expert = sum(value[0].numel() for name, value in experts.named_parameters() if "adapters" not in name)
    of_adapter = sum(value.numel() for value in experts.adapters.parameters())
    of_adapter = 0 if shared else of_adapter // 2
    return layer.traffic.weights // 8 - (of_expert + of_adapter) * (rank == 0), of_adapter


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_frozen_weights_and_shared_adapters_are_not_sent(shared: bool) -> None:
    (of_owner, _), (of_host, of_adapter) = ranks(2).run(sent_job, shared)
    assert of_owner == 0 and of_host == of_adapter


def switched_job(rank: int, world: int) -> list[bool]:
    """Whether evaluation is right when the adapter's factor changes between calls whose copies stay."""
    right = []
    layers = []
    for balance in (0, 1):
        layer = build(4, 1, 0.8, (0,), balance=balance).eval()
        pmoe.add_lora(layer, rank=2, alpha=3.0)
        fill(layer.layer_modules.experts.adapter("default"), layer.first_expert)
        layers.append(layer)
    for alpha in (3.0, 3.0, 6.0):
        outputs = []
        for layer in layers:
            layer.experts.adapters["default"].alpha = alpha
            with torch.no_grad():
                outputs.append(layer(tokens(TOKENS[world][rank], rank)))
        right.append(torch.allclose(*outputs, rtol=1e-12, atol=1e-12))
    return right


def test_copies_that_stay_follow_the_factor_of_an_adapter() -> None:
    assert ranks(2).run(switched_job) == [[True] * 3] * 2


# ---- ranks that differ


def unlike_job(rank: int, world: int, what: str) -> str:
    # A group of its own: an error on one rank ends the group for all.
    layer = build(4, 1, 0.8, (0,), torch.float32, balance=1, group=dist.new_group())
    x = tokens(TOKENS[world][rank], rank, torch.float32)
    with torch.no_grad():  # no call stays open for which a later job of these processes would wait
        layer(x)
    if rank == 1:
        if what == "dtype":
            layer.to(torch.float64)
            x = x.double()
        elif what == "dtype of one weight":
            layer.experts.w2 = torch.nn.Parameter(layer.experts.w2.double())
        else:
            layer.experts.to("meta")
    return error_of(lambda: layer(x))


@pytest.mark.parametrize(
    "what, sentence",
    [
        ("dtype", "rows must have one dtype on all ranks"),
        ("dtype of one weight", "must have the dtype and device of their w1"),
        ("device", "meta"),
    ],
)
def test_ranks_whose_weights_differ_are_named_before_weights_are_sent(what: str, sentence: str) -> None:
    found = ranks(2).run(unlike_job, what)
    assert sentence in found[1]
    assert all(found)


# ---- padding


def padding_job(rank: int, world: int) -> tuple[list[str], int, int]:
    """A batch with padding, whose rows would all go to the busy expert."""
    count = (24, 0, 40, 8)[rank]
    x = tokens(2 * count, 10 + rank)
    mask = torch.arange(2 * count) % 2 == 0
    found = []
    for balance in (0, 1):
        layer = build(4, 1, 0.8, (0,), balance=balance, pipeline=2)
        rows = x.clone().requires_grad_()
        y = layer(rows, mask=mask)
        y.square().sum().backward()
        values = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found.append({"y": y.detach(), "x": rows.grad, **values})
    assert layer.ran is not None and layer.ran.balance is not None and layer.row_counts is not None
    return differences(found[1], found[0], 1e-12), layer.ran.balance.copies, sum(layer.row_counts.loads)


def test_padding_is_no_load() -> None:
    """Balancers that count padded tokens copy the wrong experts (vllm 38128)."""
    for wrong, copies, load in ranks(4).run(padding_job):
        assert not wrong and copies > 0
        assert load == 24 + 40 + 8
