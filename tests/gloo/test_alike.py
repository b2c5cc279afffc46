"""Ranks whose layers were given different options are told so, all of them, before anything else travels."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.layer import alike
from pmoe.layer.switches import Switches
from tests.pool import ranks

D_MODEL, D_HIDDEN = 6, 12


class Doubled(pmoe.Callback):
    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * 2


class Told(pmoe.Callback):
    """Looks on from outside."""

    def before_moe_start(self, x: Tensor) -> Tensor:
        return x


def build(**options: Any) -> pmoe.MoELayer:
    switches = options.pop("switches", Switches())
    layer = pmoe.MoELayer(D_MODEL, **{"d_hidden": D_HIDDEN, "num_experts": 4, "top_k": 2, **options})
    layer.switches = switches
    return layer


def differ_job(rank: int, world: int, name: str, values: tuple[Any, ...], tokens: int) -> tuple[str, int]:
    layer = build(**{name: values[rank]})
    with pytest.raises(ValueError, match="same on every rank") as told:
        layer(torch.randn(tokens * (rank == 0), D_MODEL))
    return str(told.value), layer.traffic.total


@pytest.mark.parametrize(
    "name, values",
    [
        ("pipeline", (2, 4)),
        ("pipeline", (True, "solve")),
        ("pipeline_backward", (None, 2)),
        ("memory_reuse", (False, "S4")),
        ("memory_reuse", ("S1", "S2")),
        ("memory_budget", (1 << 20, 1 << 21)),
        ("d_hidden", (D_HIDDEN, 2 * D_HIDDEN)),
        ("num_experts", (4, 8)),
        ("top_k", (1, 2)),
        ("send_once", (True, False)),
        ("fused", (True, False)),
        ("slack", (1.25, 1.5)),
        ("capacity_factor", (None, 1.0)),
        ("shared_expert", (None, 4)),
        ("gate", ("topk", "sigmoid")),
        ("switches", tuple(Switches(bypass_local=flag) for flag in (True, False))),
        ("switches", tuple(Switches(one_lane=flag) for flag in (True, False))),
        ("switches", tuple(Switches(sequential=flag) for flag in (True, False))),
    ],
)
@pytest.mark.parametrize("tokens", [5, 0])
def test_an_option_that_differs_is_named_on_every_rank(
    name: str, values: tuple[Any, ...], tokens: int
) -> None:
    for told, sent in ranks(2).run(differ_job, name, values, tokens):
        rule = f"{name} must be the same on every rank of a MoELayer, and differs: "
        shown = [
            pmoe.schedule.restore.parse_restore(each) if name == "memory_reuse" else each for each in values
        ]
        if name == "gate":
            shown = ["TopKGate", "SigmoidGate"]
        elif name == "shared_expert":
            shown = [None, "FFNExperts"]
        assert told == f"{rule}rank 0: {shown[0]}; rank 1: {shown[1]}"
        assert sent == 0


def hooks_job(rank: int, world: int, callback: type[pmoe.Callback]) -> str:
    layer = build(callbacks=[callback()] if rank == 0 else [])
    try:
        layer(torch.randn(3, D_MODEL))
    except ValueError as error:
        return str(error)
    return ""


def test_hooks_inside_must_be_everywhere_and_those_outside_need_not() -> None:
    assert ranks(2).run(hooks_job, Told) == ["", ""]
    for told in ranks(2).run(hooks_job, Doubled):
        assert told.startswith("callbacks must be the same on every rank") and "rank 1: without hooks" in told


def several_job(rank: int, world: int) -> str:
    layer = build(pipeline=1 + rank, slack=1.25 + rank % 2, capacity_factor=1 + rank % 2)
    with pytest.raises(ValueError, match="same on every rank") as told:
        layer(torch.randn(3, D_MODEL))
    return str(told.value)


def test_the_first_difference_has_its_values_told_and_the_others_their_names() -> None:
    found = ranks(4).run(several_job)
    assert len(set(found)) == 1
    assert found[0] == (
        "capacity_factor must be the same on every rank of a MoELayer, and differs (and so do pipeline, "
        "slack): rank 0: 1; rank 1: 2; rank 2: 1; rank 3: 2"
    )


def once_job(rank: int, world: int) -> list[int]:
    """Comparisons after: a first call, a second, a checkpoint's two passes of a copy, a failed call."""
    seen: list[int] = []
    compared = mock.Mock(side_effect=alike.check_alike)
    with mock.patch.object(alike, "check_alike", compared):
        layer = build(pipeline=2)
        x = torch.randn(3, D_MODEL, requires_grad=True)
        for _ in range(2):
            layer(x).sum().backward()
            seen.append(compared.call_count)
        # Pickled layers know their ranks again, and have compared nothing.
        other = build(pipeline=2)
        for kind in ({}, {"context_fn": pmoe.checkpoint_contexts}):
            checkpoint(nn.Sequential(other), x, use_reentrant=False, **kind).sum().backward()
            seen.append(compared.call_count)
        broken = build(pipeline=1 + rank)
        for _ in range(2):
            with pytest.raises(ValueError):
                broken(x)
            seen.append(compared.call_count)
    dist.barrier()
    return seen


def test_layers_compare_once_and_again_only_where_they_differed() -> None:
    assert ranks(2).run(once_job) == [[1, 1, 2, 2, 3, 4]] * 2


def test_one_rank_has_nobody_to_compare_with() -> None:
    with mock.patch.object(alike, "check_alike") as compared:
        build()(torch.randn(3, D_MODEL))
    assert not compared.called
