"""A fault on one rank is an error on all. A peer that dies or never comes is one within the timeout."""

from __future__ import annotations

import copy
import math
import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from pmoe import MoELayer, Routing
from pmoe.comm.group_options import timeout_of
from tests.gloo.kit import backward, build, counted_collectives, error_of, inputs, one_step
from tests.kit import assert_same, tokens
from tests.own_experts import mlp
from tests.pool import GROUP_TIMEOUT_SECONDS, SHORT_TIMEOUT_SECONDS, Pool, ranks
from tests.spread import spread

# ---- faults on one rank


def broken_input(fault: str, x: Tensor) -> Tensor:
    if fault == "d_model":
        return torch.randn(3, 7, dtype=torch.float64)
    if fault == "dtype":
        return x.float()
    if fault == "integers":
        return x.long()
    if fault == "device":
        return x.to("meta")
    if fault == "NaN":
        x = x.clone()
        x[0, 1] = math.nan
    return x


class Fragile(nn.Module):
    """A gate that raises when it is asked to, or returns something that is no routing."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate, self.fault = gate, ""

    def forward(self, x: Tensor) -> Routing:
        if self.fault == "gate":
            raise KeyError("number 17")
        if self.fault == "no routing":
            return x
        routing = self.gate(x)
        if self.fault == "indices":
            return Routing(expert=routing.expert + 1, weight=routing.weight, l_aux=routing.l_aux)
        return routing


def fault_job(rank: int, world: int, fault: str, who: tuple[int, ...], expert: object) -> dict[str, Any]:
    layer = build(expert=expert, gate=Fragile(build().gate))
    layer.gate.gate.requires_grad_(True)
    expected = one_step(layer, rank, world)
    traffic = copy.copy(layer.traffic)
    x, _ = inputs(rank, world)
    if rank in who:
        x, layer.gate.fault = broken_input(fault, tokens(5, 3)), fault
    with counted_collectives() as calls:
        message = error_of(lambda: layer(x))
    layer.gate.fault = ""
    same = one_step(layer, rank, world)
    assert_same(same, expected)
    sent = (layer.traffic.rows - 2 * traffic.rows, layer.traffic.scalars - 2 * traffic.scalars)
    return {"message": message, "calls": calls, "payload": sent}


OTHER = "its gate raised an error, or its input is not a tensor"
FAULTS = {
    "d_model": (
        "FaultError: x of shape (3, 7) must end in d_model (6)",
        "the last dimension of its input is not d_model",
    ),
    "dtype": (
        "FaultError: x of dtype torch.float32 must be of the layer's dtype (torch.float64)",
        "its input has another dtype than the layer's parameters",
    ),
    "integers": (
        "FaultError: x of dtype torch.int64 must be of a floating-point type",
        "its input has another dtype than the layer's parameters",
    ),
    "device": (
        "FaultError: x on meta must be where the layer's parameters are (cpu)",
        "its input is on another device than the layer's parameters",
    ),
    "gate": ("KeyError: 'number 17'", OTHER),
    "no routing": ("TypeError: gate (Fragile) must return a pmoe.Routing", OTHER),
    "indices": ("", "its gate returned expert indices outside 0..num_experts - 1"),
    "NaN": ("", "its gate logits are not finite (check_finite=False lets them pass)"),
}


@pytest.mark.parametrize(
    "world, who, fault, expert",
    spread([(2, (1,)), (2, (0, 1)), (4, (2,)), (4, (0, 3))], list(FAULTS), ["ffn", mlp], every=5),
)
def test_a_fault_that_one_rank_sees_is_raised_by_all_before_any_row_travels(
    world: int, who: tuple[int, ...], fault: str, expert: object
) -> None:
    own, told = FAULTS[fault]
    for rank, got in enumerate(ranks(world).run(fault_job, fault, who, expert)):
        if rank in who and own:
            assert got["message"].startswith(own)
        else:
            assert got["message"] == "FaultError: " + "; ".join(f"rank {r}: {told}" for r in who)
        assert got["calls"] == ["all_to_all_single"]
        assert got["payload"] == (0, 0)


def not_finite_job(rank: int, world: int, value: float, options: dict[str, Any]) -> dict[str, Tensor]:
    layer = build(check_finite=False, **options)
    x, dy = inputs(rank, world)
    if rank == 1:
        x[0] = value
        x[2, 3] = value
    return backward(layer, x.requires_grad_(), dy)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{}, {"expert": mlp}, {"capacity_factor": 0.5}, {"top_k": 1}])
def test_logits_that_may_be_no_numbers_hang_nothing_and_spoil_no_other_token(
    value: float, options: dict[str, Any]
) -> None:
    got = ranks(2).run(not_finite_job, value, options)
    assert all(name in each for each in got for name in ("y", "x", "gate.weight"))
    assert got[0]["y"].isfinite().all()
    rows = got[1]["y"].isfinite().all(-1).tolist()
    if "capacity_factor" not in options:  # where a dropped token's row is zero
        assert rows == [False, True, False, True]
    assert rows[1]
    assert rows[3]


# ---- peers that die or never come


def lonely_job(rank: int, world: int, stage: str, ending: str) -> tuple[str, float]:
    """Rank 1 leaves before ``stage``. Returns rank 0's error, and the seconds after which it came."""
    layer = build()
    x, dy = inputs(rank, world)
    x.requires_grad_()
    one_step(layer, rank, world)  # connections are made
    y = layer(x) if stage == "backward" else None
    if rank == 1:
        if ending == "dies":
            os._exit(1)
        time.sleep(60)
    start = time.monotonic()
    message = error_of(lambda: layer(x) if y is None else (y * dy).sum().backward())
    return message, time.monotonic() - start


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("ending", ["dies", "never comes"])
def test_a_peer_that_is_missing_becomes_an_error_within_the_timeout(ending: str, stage: str) -> None:
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        pool.start(lonely_job, stage, ending)
        message, seconds = pool.answer(0)
    where = "the exchange of row counts" if stage == "forward" else r"[a-z]+ \([SR]0\) of chunk 0, backward"
    where += " of MoELayer 1"
    assert re.match(rf"RuntimeError: pmoe: rank 0 of 2 failed in {where}; a peer has died, never", message), (
        message
    )
    assert seconds < SHORT_TIMEOUT_SECONDS + 20  # what a busy machine may add


def other_order_job(rank: int, world: int) -> str:
    """Rank 1 gets a longer message of row counts than it expects, and gloo ends its process."""
    layers = [build(pipeline=n) for n in (4, 2)]
    for layer in layers:
        one_step(layer, rank, world)
    return error_of(lambda: layers[rank](inputs(rank, world)[0]))


def test_layers_in_another_order_are_named_where_gloo_ends_a_peer() -> None:
    """Its own words were only "Connection reset by peer"."""
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        pool.start(other_order_job)
        message = pool.answer(0)
    assert "every rank must call the layers of a group in the same order and equally often" in message
    assert "send messages of 48 to 80 bytes" in message or "different layers" in message, message


# ---- timeouts of a mesh's groups


def mesh_job(rank: int, world: int) -> tuple[dict[str, float], str, float]:
    """Returns timeouts of groups in seconds, then how a rank ends that waits for another, and when.

    The groups are torch's own of a mesh, those whose timeout was set, and the group that pmoe makes of both.
    """
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "ep", "esp"))
    seconds = {"before": timeout_of(mesh.get_group("esp")).total_seconds()}
    for name in mesh.mesh_dim_names:  # as docs/troubleshooting.md has it
        _set_pg_timeout(timedelta(seconds=2), mesh.get_group(name))
    layer = MoELayer(6, 8, 4, mesh=mesh["ep", "esp"])
    seconds |= {"set": timeout_of(mesh.get_group("esp")).total_seconds()}
    seconds |= {"made": timeout_of(layer.ranks.group).total_seconds()}
    layer(torch.randn(4, 6)).sum().backward()
    began, told = time.monotonic(), ""
    if rank % 2 == 0:
        told = error_of(lambda: layer(torch.randn(4, 6)))
    return seconds, told, time.monotonic() - began


@pytest.mark.slow
def test_groups_of_a_mesh_have_the_timeout_that_is_set_and_so_has_the_one_made_of_them() -> None:
    with Pool(4) as pool:
        found = pool.run(mesh_job)
    for rank, (seconds, told, waited) in enumerate(found):
        assert seconds == {"before": 1800.0, "set": 2.0, "made": 2.0}
        assert rank % 2 or "took longer than the group's timeout" in told and waited < GROUP_TIMEOUT_SECONDS
