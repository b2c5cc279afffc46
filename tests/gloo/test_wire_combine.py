"""``wire_combine``: results return to the tokens' ranks in fewer bytes, in both passes.

Output and gradients equal, to the bit, those of a layer whose combine rounds the results that it sends, and
sends them as they are (`tests.gloo.test_wire.Rounding`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import pmoe
from pmoe import Restore
from pmoe.schedule.restore import ALL_PAIRS
from pmoe.schedule.wire import message_bytes
from tests.gloo.kit import TOKENS, build, error_of
from tests.gloo.test_footprint import step_bytes
from tests.gloo.test_wire import DTYPES, WIDTHS, Looks, Rounding, Spread, decibels, step
from tests.kit import assert_same, tokens
from tests.own_experts import mlp
from tests.pool import ranks
from tests.spread import named, parts, spread

WIRES = [(None, None, "e4m3"), ("e4m3", "e4m3", "e4m3"), ("e4m3", None, "bfloat16")]


def options_of(wires: tuple[str | None, ...]) -> dict[str, Any]:
    return dict(zip(("wire", "wire_backward", "wire_combine"), wires, strict=True))


def rounding(**options: Any) -> pmoe.MoELayer:
    """The layer that rounds results as ``wire_combine`` says, and sends them as they are."""
    combine = Rounding()
    combine.wire = options.pop("wire_combine")
    return build(**options, combine=combine)


def bits_job(rank: int, world: int, wires: tuple[str | None, ...], cases: list[tuple[Any, ...]]) -> None:
    for dtype, width, n, pair in cases:
        if "bfloat16" in wires and dtype != torch.float32:
            continue  # refused
        x = tokens(TOKENS[world][rank], 10 + rank, dtype, WIDTHS[width])
        options = {"d_model": WIDTHS[width], "dtype": dtype, "pipeline": n, "memory_reuse": pair}
        options |= options_of(wires)
        assert_same(step(build(**options), x), step(rounding(**options), x), told=(dtype, width, n, pair))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("wires", WIRES, ids=str)
@pytest.mark.parametrize("cases", parts(DTYPES, list(WIDTHS), [1, 3], [False, *ALL_PAIRS], every=29))
def test_results_are_the_bits_of_a_layer_that_rounds_what_it_sends_back(
    world: int, wires: tuple[str | None, ...], cases: list[tuple[Any, ...]]
) -> None:
    ranks(world).run(bits_job, wires, cases)


OTHERS: dict[str, dict[str, Any]] = {
    "rows to their own rank": {"bypass_local": False},
    "rows sent once": {"send_once": True, "top_k": 3, "memory_reuse": "S4"},
    "other chunks in backward": {"pipeline": 2, "pipeline_backward": 4},
    "padded": {"pad_to_capacity": True, "capacity_factor": 1.0},
    "dropped rows": {"capacity_factor": 0.7, "memory_reuse": "S4"},
    "a shared expert": {"shared_expert": 8, "memory_reuse": "S4"},
    "modules": {"expert": mlp, "memory_reuse": "S4"},
    "modules, kept": {"expert": mlp},
    "a slow order": {"order": "einsum"},
    "expert choice": {"gate": "expert_choice"},
    "mixed tokens": {"gate": "soft"},
    "kept messages": {"wire": "e4m3", "memory_reuse": Restore("message", "recompute")},
    "one task after the other": {"sequential": True},
}


def others_job(rank: int, world: int, others: dict[str, Any], wire: str) -> None:
    options = {"d_model": 130, "dtype": torch.float32, "wire_combine": wire, **others}
    count = 9 if "pad_to_capacity" in options else TOKENS[world][rank]
    x = tokens(count, 10 + rank, torch.float32, 130)
    assert_same(step(build(**options), x), step(rounding(**options), x))


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "world, wire, others", spread([2, 4], ["e4m3", "bfloat16"], list(OTHERS.values()), every=3), ids=named
)
def test_it_goes_with_each_other_feature(world: int, wire: str, others: dict[str, Any]) -> None:
    ranks(world).run(others_job, others, wire)


def exchanges_job(rank: int, world: int) -> str:
    options = {"d_model": 256, "dtype": torch.bfloat16, "wire": "e4m3", "wire_combine": "e4m3"}
    x = tokens(TOKENS[world][rank], 10 + rank, torch.bfloat16, 256)
    expected = step(rounding(**options), x)
    for name in ("hierarchical_1d", "hierarchical_2d"):
        for pair in (False, "S4"):
            layer = build(**options, dispatch=name, nodes=2, memory_reuse=pair)
            assert_same(step(layer, x), expected, told=(name, pair))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "esp"))
    return error_of(lambda: build(**options, mesh=mesh))


def test_hierarchical_exchanges_carry_results_and_sharded_experts_refuse_them() -> None:
    for message in ranks(4).run(exchanges_job):
        assert "wire_combine ('e4m3') must be None if experts are sharded over the ranks of a node" in message


# ---- bytes


def sent_job(rank: int, world: int, dtype: torch.dtype, wire: str, pair: Any) -> Any:
    layer = build(d_model=1024, d_hidden=4, dtype=dtype, memory_reuse=pair, wire_combine=wire)
    x = tokens(TOKENS[world][rank], 10 + rank, dtype, 1024).requires_grad_()
    y = layer(x)
    forward = layer.traffic.rows
    y.square().sum().backward()
    counts = layer.row_counts
    sent, received = (each.sum((0, 2)).tolist() for each in (counts.send, counts.recv))
    return forward, layer.traffic.rows - forward, sent[1 - rank], received[1 - rank]


@pytest.mark.parametrize(
    "dtype, wire, share",
    [(torch.bfloat16, "e4m3", 0.516), (torch.float32, "e4m3", 0.258), (torch.float32, "bfloat16", 0.5)],
)
@pytest.mark.parametrize("pair", [False, "S4"])
def test_a_combine_sends_the_bytes_of_its_messages(
    dtype: torch.dtype, wire: str, share: float, pair: Any
) -> None:
    whole = 1024 * dtype.itemsize
    message = message_bytes(wire, 1024, dtype.itemsize)
    assert message / whole == pytest.approx(share, abs=1e-3)
    for forward, backward, sent, received in ranks(2).run(sent_job, dtype, wire, pair):
        assert sent and received
        assert forward == sent * whole + received * message
        assert backward == sent * (1 + (pair == "S4")) * whole + received * message


def peak_job(rank: int, world: int, wires: tuple[str, ...], pair: Any, n: int) -> tuple[float, float]:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(64, 256, 4, pipeline=n, memory_reuse=pair, **options_of(wires))
    with torch.no_grad():
        layer.gate.weight[:] = 0.02 * torch.randn(4, 64)
    count = 1024 - 37 * rank
    found = step_bytes(layer, torch.randn(count, 64, generator=torch.Generator().manual_seed(rank)))
    exact = layer.predict_memory(count, layer.row_counts)
    return exact.peak / found.peak, layer.predict_memory(1024).peak / found.peak


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "wires, pair, world, n",
    spread(
        [[None, None, "e4m3"], ["e4m3", "e4m3", "bfloat16"]], [False, "S1", "S4"], [2, 4], [1, 2, 4], every=5
    ),
    ids=named,
)
def test_the_peak_on_every_rank_is_within_two_percent_of_the_prediction(
    wires: list[Any], pair: Any, world: int, n: int
) -> None:
    for exact, bound in ranks(world).run(peak_job, tuple(wires), pair, n):
        assert exact == pytest.approx(1, rel=0.02)
        assert bound >= 1


# ---- accuracy and values


def ratio_job(rank: int, world: int, wires: tuple[str | None, ...], dtype: torch.dtype) -> dict[str, float]:
    options = {"d_model": 512, "d_hidden": 256, "dtype": dtype, "pipeline": 2}
    x = tokens(256, 10 + rank, dtype, 512)
    exact = step(build(**options), x)
    found = step(build(**options, **options_of(wires)), x)
    return {name: decibels(found[name], exact[name]) for name in ("y", "x", "experts.w1", "experts.w2")}


@pytest.mark.parametrize(
    "wires, dtype, least",
    [
        ((None, None, "e4m3"), torch.bfloat16, {"y": 30, "x": 30}),
        (("e4m3", "e4m3", "e4m3"), torch.bfloat16, {"y": 28, "x": 26, "experts.w1": 25, "experts.w2": 25}),
        ((None, None, "bfloat16"), torch.float32, {"y": 50, "x": 50}),
    ],
    ids=str,
)
def test_signal_to_noise_is_what_the_page_says(
    wires: tuple[str | None, ...], dtype: torch.dtype, least: dict[str, float]
) -> None:
    for ratios in ranks(2).run(ratio_job, wires, dtype):
        assert all(ratios[name] >= limit for name, limit in least.items()), ratios


def bad_rows_job(rank: int, world: int, bad: float) -> None:
    layer = build(d_model=256, dtype=torch.float32, check_finite=False, gate=Spread(), wire_combine="e4m3")
    x = tokens(4, 10 + rank, torch.float32, 256)
    x[1] = 0
    clean = layer(x)
    assert clean.isfinite().all()
    x[2, 5] = bad
    y = layer(x)
    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_results_that_are_not_finite_stay_in_their_row(bad: float) -> None:
    ranks(2).run(bad_rows_job, bad)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"wire_combine": "e4m3", "dtype": torch.float64},
            r"wire_combine \('e4m3'\) must be None for rows of",
        ),
        (
            {"wire_combine": "bfloat16", "dtype": torch.bfloat16},
            r"wire_combine \('bfloat16'\) must be None for",
        ),
        (
            {"wire_combine": "e4m3", "callbacks": [Looks()]},
            r"wire_combine \('e4m3'\) must be None if callbacks",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**{"dtype": torch.float32, **options})


def test_one_rank_sends_nothing_back_and_rounds_nothing() -> None:
    options = {"d_model": 130, "dtype": torch.float32}
    x: Tensor = tokens(9, 3, torch.float32, 130)
    assert not dist.is_initialized()
    assert_same(step(build(**options, wire_combine="e4m3"), x), step(build(**options), x))
