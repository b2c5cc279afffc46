"""``wire`` and ``wire_backward``: rows are sent to experts in fewer bytes.

Output and gradients equal, to the bit, those of a layer whose dispatch rounds the rows that it sends, by a
definition of its own (`rounded`), and sends them as they are.
"""

from __future__ import annotations

import re
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import pmoe
from pmoe import MoELayer, Restore, warn
from pmoe.comm import wire as wire_messages
from pmoe.comm.base import FlatAllToAll, RowCounts
from pmoe.comm.ranks import Ranks
from pmoe.schedule.restore import ALL_PAIRS, parse_restore
from pmoe.schedule.wire import message_bytes
from tests.gloo.kit import TOKENS, build, take_all_experts, watched_all_to_alls
from tests.gloo.test_footprint import step_bytes
from tests.kit import assert_same, loss_of, tokens
from tests.own_experts import mlp
from tests.pool import ranks
from tests.spread import parts, spread

WIDTHS = {"whole blocks": 256, "a short block": 130, "one short block": 6}


def rounded(rows_NM: Tensor, wire: str | None) -> Tensor:
    """What arrives of rows that are sent in a form: the definition, block by block."""
    if wire is None:
        return rows_NM
    if wire == "bfloat16":
        return rows_NM.bfloat16().to(rows_NM.dtype)
    blocks = []
    for block in rows_NM.float().split(128, dim=1):
        scale = (block.abs().max(dim=1, keepdim=True).values / 448).clamp(min=2.0**-126)
        blocks.append((block / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(blocks, dim=1).to(rows_NM.dtype)


class Rounding(FlatAllToAll):
    """A dispatch that rounds the rows that it sends, and sends them in their own type."""

    wire: str | None = None

    def exchange(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts = ()
    ) -> dist.Work | None:
        return super().exchange(rounded(rows, self.wire), send_rows, out, recv_rows, relayed)


def step(layer: MoELayer, x: Tensor, wires: tuple[str | None, str | None] | None = None) -> dict[str, Tensor]:
    """Output and every gradient. wires: the forms that a `Rounding` dispatch rounds to, in each pass."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    if wires is not None:
        layer.dispatch.wire = wires[0]
    y = layer(x)
    if wires is not None:
        layer.dispatch.wire = wires[1]
    loss_of(layer, y).backward()
    return {"y": y.detach(), "x": x.grad, **{name: each.grad for name, each in layer.named_parameters()}}


def reference(x: Tensor, wires: tuple[str | None, str | None], **options: Any) -> dict[str, Tensor]:
    """The step of a layer that rounds the rows that it sends, and keeps them.

    It has the same chunks, and recomputes what the other layer recomputes.
    """
    pair = parse_restore(options.get("memory_reuse", False))
    keeps = Restore("keep", pair.hidden) if isinstance(pair, Restore) else False
    return step(build(**{**options, "memory_reuse": keeps, "dispatch": Rounding()}), x, wires)


def wired(wires: tuple[str | None, str | None], **options: Any) -> MoELayer:
    return build(wire=wires[0], wire_backward=wires[1], **options)


WIRES = [("e4m3", None), ("e4m3", "e4m3"), ("bfloat16", None), ("bfloat16", "bfloat16"), (None, "e4m3")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bits_job(rank: int, world: int, wires: tuple[str | None, ...], cases: list[tuple[Any, ...]]) -> None:
    for dtype, width, n, pair in cases:
        if "bfloat16" in wires and dtype != torch.float32:
            continue  # refused
        x = tokens(TOKENS[world][rank], 10 + rank, dtype, WIDTHS[width])
        options = {"d_model": WIDTHS[width], "dtype": dtype, "pipeline": n, "memory_reuse": pair}
        assert_same(step(wired(wires, **options), x), reference(x, wires, **options), told=(width, n, pair))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("wires", WIRES, ids=str)
@pytest.mark.parametrize("cases", parts(DTYPES, list(WIDTHS), [1, 2, 3], [False, *ALL_PAIRS], every=29))
def test_a_wire_gives_the_bits_of_a_layer_whose_sent_rows_were_rounded(
    world: int, wires: tuple[str | None, ...], cases: list[tuple[Any, ...]]
) -> None:
    ranks(world).run(bits_job, wires, cases)


OTHERS: dict[str, dict[str, Any]] = {
    "rows to their own rank": {"bypass_local": False},
    "rows sent once": {"send_once": True, "top_k": 3},
    "rows sent once, S4": {"send_once": True, "top_k": 3, "memory_reuse": "S4"},
    "other chunks in backward": {"pipeline": 2, "pipeline_backward": 4},
    "other chunks in backward, S4": {"pipeline": 4, "pipeline_backward": 2, "memory_reuse": "S4"},
    "other chunks in backward, S1": {"pipeline": 3, "pipeline_backward": 1, "memory_reuse": "S1"},
    "padded": {"pad_to_capacity": True, "capacity_factor": 1.0},
    "padded, S4": {"pad_to_capacity": True, "capacity_factor": 1.0, "memory_reuse": "S4"},
    "dropped rows": {"capacity_factor": 0.7, "memory_reuse": "S4"},
    "a shared expert": {"shared_expert": 8, "memory_reuse": "S4"},
    "gated experts": {"expert": "swiglu"},
    "modules": {"expert": mlp, "memory_reuse": "S4"},
    "a slow order": {"order": "einsum", "memory_reuse": "S4"},
    "a budget": {"memory_budget": "1GiB", "memory_reuse": "S2"},
    "expert choice": {"gate": "expert_choice"},
    "mixed tokens": {"gate": "soft"},
    "one task after the other": {"sequential": True},
}


def others_job(rank: int, world: int, options: dict[str, Any], wires: tuple[str | None, ...]) -> None:
    options = {"d_model": 130, "dtype": torch.float32, **options}
    x = tokens(9 if "pad_to_capacity" in options else TOKENS[world][rank], 10 + rank, torch.float32, 130)
    assert_same(step(wired(wires, **options), x), reference(x, wires, **options))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("world, wires", spread([2, 4], [["e4m3", None], ["e4m3", "e4m3"]], every=2))
@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_a_wire_goes_with_each_other_feature(
    options: dict[str, Any], world: int, wires: list[str | None]
) -> None:
    ranks(world).run(others_job, options, wires)


def exchanges_job(rank: int, world: int, pair: Any) -> None:
    """Hierarchical exchanges carry the same messages. With sharded experts they are gathered packed."""
    wires = ("e4m3", "e4m3")
    x = tokens(TOKENS[world][rank], 10 + rank, torch.bfloat16, 256)
    options = {"d_model": 256, "d_hidden": 12, "dtype": torch.bfloat16, "memory_reuse": pair}
    expected = reference(x, wires, **options)
    for name in ("hierarchical_1d", "hierarchical_2d"):
        for combine in (None, "flat"):
            layer = wired(wires, dispatch=name, combine=combine, nodes=2, **options)
            assert_same(step(layer, x), expected, told=(name, combine))
    for ep, esp in ((2, 2), (1, 4)):
        mesh = init_device_mesh("cpu", (ep, esp), mesh_dim_names=("ep", "esp"))
        assert_same(step(wired(wires, mesh=mesh, **options), x), reference(x, wires, mesh=mesh, **options))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pair", [False, "S1", "S4"])
def test_hierarchical_exchanges_and_sharded_experts_carry_messages(pair: Any) -> None:
    ranks(4).run(exchanges_job, pair)


# ---- the plain definition


def definition_job(rank: int, world: int, wires: tuple[str | None, ...]) -> None:
    """Output and gradients, by a loop over tokens and experts in float64 on rounded rows."""
    options = {"d_model": 130, "dtype": torch.float32, "pipeline": 2, "memory_reuse": "S4"}
    layer = wired(wires, **options)
    x = tokens(TOKENS[world][rank], 10 + rank, torch.float32, 130)
    found = step(layer, x)
    assert found["y"].shape == x.shape
    wide = build(d_model=130, group=Ranks.single(), pipeline=1)
    take_all_experts(wide, layer, world)
    leaf = x.double().requires_grad_()
    routing = wide.gate(leaf)
    # Straight through: the value of the rounded row, the gradient of the row.
    sent = leaf + (rounded(x, wires[0]).double() - leaf).detach()
    rows = []
    for token, (experts, weights) in enumerate(zip(routing.expert.tolist(), routing.weight, strict=True)):
        total = torch.zeros(130, dtype=torch.float64)
        for expert, weight in zip(experts, weights, strict=True):
            row = (leaf if expert // (8 // world) == rank else sent)[token]
            parameters = {name: each[expert] for name, each in wide.experts.named_parameters()}
            hidden = torch.nn.functional.gelu(row @ parameters["w1"].t() + parameters["b1"])
            total = total + weight * (hidden @ parameters["w2"].t() + parameters["b2"])
        rows.append(total)
    y = torch.stack(rows) if rows else leaf * 0
    loss_of(layer, y, routing.l_aux).backward()
    for name, value in (("y", y.detach()), ("x", leaf.grad)):
        assert torch.allclose(found[name].double(), value, rtol=1e-4, atol=1e-4), (name, rank)
    for name, parameter in wide.experts.named_parameters():
        whole = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        dist.all_reduce(whole)
        count = 8 // world
        own = found[f"experts.{name}"].double()
        assert torch.allclose(own, whole[rank * count : (rank + 1) * count], rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("world", [2, 4])
def test_a_wire_is_the_plain_definition_on_rounded_rows_that_change_rank(world: int) -> None:
    ranks(world).run(definition_job, ("e4m3", None))


# ---- bytes


def sent_job(rank: int, world: int, dtype: torch.dtype, wires: tuple[str | None, ...], pair: Any) -> Any:
    """Bytes of rows in (forward, backward), counted by `Traffic` and by the arguments of all-to-alls."""
    options = {"d_model": 1024, "d_hidden": 4, "dtype": dtype, "memory_reuse": pair}
    layer = wired(wires, **options)
    x = tokens(TOKENS[world][rank], 10 + rank, dtype, 1024).requires_grad_()
    seen = []

    def note_bytes(out: Tensor, rows: Tensor) -> None:
        seen.append(rows.nbytes if rows.dim() == 2 and rows.shape[1] > 100 else 0)  # no row counts

    with watched_all_to_alls(note_bytes):
        y = layer(x)
        forward = (layer.traffic.rows, sum(seen))
        loss_of(layer, y).backward()
        backward = (layer.traffic.rows - forward[0], sum(seen) - forward[1])
    counts = layer.row_counts
    sent, received = (each.sum((0, 2)).tolist() for each in (counts.send, counts.recv))
    return forward, backward, sent[1 - rank], received[1 - rank]


@pytest.mark.parametrize("dtype, ratio", [(torch.bfloat16, 0.516), (torch.float32, 0.258)])
@pytest.mark.parametrize("pair", [False, "S4"])
def test_a_dispatch_sends_the_bytes_of_its_messages(dtype: torch.dtype, ratio: float, pair: Any) -> None:
    again = pair == "S4"
    whole = 1024 * dtype.itemsize
    message = message_bytes("e4m3", 1024, dtype.itemsize)
    assert message / whole == pytest.approx(ratio, abs=1e-3)
    for wires, gradient in ((("e4m3", None), whole), (("e4m3", "e4m3"), message)):
        for forward, backward, sent, received in ranks(2).run(sent_job, dtype, wires, pair):
            assert sent and received
            assert forward == (sent * message + received * whole,) * 2
            assert backward == (sent * (again * message + gradient) + received * whole,) * 2


def again_job(rank: int, world: int) -> None:
    """The messages of T_DI that S4 sends in backward are those of forward."""
    layer = wired(("e4m3", "e4m3"), d_model=256, dtype=torch.bfloat16, memory_reuse="S4", pipeline=2)
    sent: list[Tensor] = []
    exchange = FlatAllToAll.exchange

    def seen(self: FlatAllToAll, rows: Tensor, *args: Any) -> Any:
        if self is layer.dispatch and rows.dtype == torch.uint8:
            sent.append(rows.clone())
        return exchange(self, rows, *args)

    FlatAllToAll.exchange = seen
    try:
        step(layer, tokens(TOKENS[world][rank], 10 + rank, torch.bfloat16, 256))
    finally:
        FlatAllToAll.exchange = exchange
    forward = sent[:2]
    assert len(sent) == 6 and all(each.shape[1] == 264 for each in sent)
    for messages in forward:
        assert any(torch.equal(messages, each) for each in sent[2:]), rank


def test_s4_sends_the_same_bytes_again() -> None:
    ranks(2).run(again_job)


# ---- accuracy


def ratio_job(rank: int, world: int) -> dict[str, float]:
    """Signal to noise in dB of output and gradients, against the layer without a wire, in bfloat16."""
    options = {"d_model": 512, "d_hidden": 256, "dtype": torch.bfloat16, "pipeline": 2}
    x = tokens(256, 10 + rank, torch.bfloat16, 512)
    exact = step(build(**options), x)
    found = step(wired(("e4m3", "e4m3"), **options), x)
    ratios = {"rows": decibels(rounded(x, "e4m3"), x)}
    return ratios | {name: decibels(found[name], exact[name]) for name in exact}


def decibels(found: Tensor, exact: Tensor) -> float:
    noise = (found.double() - exact.double()).square().sum()
    return float(10 * (exact.double().square().sum() / noise).log10())


def test_signal_to_noise_is_what_peers_ask_for() -> None:
    """torchao asks for the same numbers of an all-to-all in MXFP8."""
    for ratios in ranks(2).run(ratio_job):
        weights = [value for name, value in ratios.items() if name.startswith("experts.w")]
        assert ratios["rows"] >= 30 and ratios["y"] >= 28 and ratios["x"] >= 26, ratios
        assert len(weights) == 2 and min(weights) >= 25, ratios


# ---- bad input


def bad_rows_job(rank: int, world: int, bad: float) -> None:
    """A value that is not finite arrives as NaN in its block of columns, and only there."""
    layer = wired(("e4m3", "e4m3"), d_model=256, dtype=torch.float32, check_finite=False, gate=Spread())
    x = tokens(4, 10 + rank, torch.float32, 256)
    x[1] = 0
    clean = layer(x)
    assert clean.isfinite().all()
    x[2, 5] = bad
    y = layer(x)
    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


class Spread(torch.nn.Module):
    """Sends every token to the same experts, one of each rank, whatever its values."""

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        expert_TK = torch.tensor([[0, 7]]).expand(x_TM.shape[0], 2).contiguous()
        weight_TK = torch.full((x_TM.shape[0], 2), 0.5, dtype=x_TM.dtype)
        return pmoe.Routing(expert=expert_TK, weight=weight_TK, l_aux=x_TM.new_zeros(()))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_stay_in_their_row(bad: float) -> None:
    ranks(2).run(bad_rows_job, bad)


def told_job(rank: int, world: int) -> str:
    layer = wired(("e4m3", None), d_model=256, dtype=torch.float32)
    x = tokens(4, 10 + rank, torch.float32, 256)
    x[0, 0] = float("inf") if rank else x[0, 0]
    with pytest.raises(ValueError) as error:
        layer(x)
    return str(error.value)


def test_the_check_of_logits_sees_such_rows_as_without_a_wire() -> None:
    for message in ranks(2).run(told_job):
        assert "finite" in message


class Looks(pmoe.Callback):
    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"wire": "e4m3", "dtype": torch.float64}, r"wire \('e4m3'\) must be None for rows of torch.float64"),
    ({"wire_backward": "e4m3", "dtype": torch.float64}, r"wire_backward \('e4m3'\) must be None"),
    ({"wire": "bfloat16", "dtype": torch.bfloat16}, r"wire \('bfloat16'\) must be None for rows of torch.bf"),
    ({"wire": "bfloat16", "dtype": torch.float16}, "makes float32 rows shorter only"),
    ({"wire": "e4m3", "callbacks": [Looks()]}, r"wire \('e4m3'\) must be None if callbacks have hooks"),
    (
        {"wire_backward": "e4m3", "callbacks": [Looks()]},
        r"wire_backward \('e4m3'\) must be None if callbacks",
    ),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=[message for _, message in REFUSED])
def test_wires_that_a_layer_must_not_have_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    options = {"dtype": torch.float32, **options}
    with pytest.raises(ValueError, match=message):
        build(**options)
    wires = {name: options.pop(name) for name in ("wire", "wire_backward") if name in options}
    layer = build(**options)
    for name, value in wires.items():
        with pytest.raises(ValueError, match=message):
            setattr(layer, name, value)
        assert getattr(layer, name) is None


def autocast_job(rank: int, world: int, dtype: torch.dtype) -> str:
    """The rows of a float32 layer are narrow under autocast: bfloat16 would make them no shorter."""
    layer = wired(("bfloat16", None), dtype=torch.float32)
    x = tokens(5, 10 + rank, torch.float32)
    assert torch.isfinite(layer(x)).all()
    with torch.autocast("cpu", dtype), pytest.raises(ValueError) as error:
        layer(x)
    return str(error.value)


def test_rows_that_autocast_made_narrow_are_refused_by_name() -> None:
    for message in ranks(2).run(autocast_job, torch.bfloat16):
        assert re.match(r"wire \('bfloat16'\) must be None for rows of torch.bfloat16", message)


def set_job(rank: int, world: int) -> None:
    """A wire that is set on a built layer holds from the next call on."""
    x = tokens(TOKENS[world][rank], 10 + rank, torch.float32, 130)
    options = {"d_model": 130, "dtype": torch.float32}
    layer = build(**options)
    plain = step(layer, x)
    layer.wire = "e4m3"
    assert_same(step(layer, x), reference(x, ("e4m3", None), **options))
    layer.wire = None
    assert_same(step(layer, x), plain)


def test_a_wire_may_be_set_on_a_built_layer() -> None:
    ranks(2).run(set_job)


def test_one_rank_sends_nothing_and_rounds_nothing() -> None:
    options = {"d_model": 130, "dtype": torch.float32}
    x = tokens(9, 3, torch.float32, 130)
    for others in ({}, {"send_once": True}, {"bypass_local": False}):
        assert_same(
            step(wired(("e4m3", "e4m3"), **options, **others), x), step(build(**options, **others), x)
        )


def fused_job(rank: int, world: int) -> tuple[str, str]:
    warn.GIVEN.clear()
    layer = wired(("e4m3", None), d_model=128, dtype=torch.float32, fused=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(tokens(5, 10 + rank, torch.float32, 128))
    assert layer.ran is not None
    return layer.ran.path, str(caught[0].message)


def test_fused_kernels_leave_such_layers_to_the_pipeline_and_say_so() -> None:
    for path, message in ranks(2).run(fused_job):
        assert path == "pipeline"
        assert "dispatched rows are sent in another form (wire='e4m3', wire_backward=None)" in message


# ---- the host's work


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators, without those that only look at memory in another way."""

    VIEWS = (
        "view",
        "slice",
        "select.int",
        "unsqueeze",
        "squeeze",
        "expand",
        "split",
        "t.default",
        "as_strided",
        "set_.source",  # of the pool, after the memory of ring slots
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if not (name.startswith(self.VIEWS) or "detach" in name or "alias" in name):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def operators_job(
    rank: int, world: int, dtype: torch.dtype, options: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Operators of a chunk, without a wire and with wires: those of a forward pass, and of a step."""
    found: dict[str, dict[str, float]] = {}
    for kind, wires in (("plain", (None, None)), ("wires", ("e4m3", "e4m3"))):
        for trains in (False, True):
            two, four = (
                operators_of(wired(wires, d_model=256, dtype=dtype, pipeline=n, **options), rank, trains)
                for n in (2, 4)
            )
            found.setdefault(kind, {})["step" if trains else "forward"] = (four - two) / 2
    return found


def operators_of(layer: MoELayer, rank: int, trains: bool) -> int:
    """Returns the number of operators of a layer's forward pass, or of a step."""
    x = tokens(16, 10 + rank, layer.experts.w1.dtype, 256).requires_grad_(trains)
    with torch.set_grad_enabled(trains):
        y = layer(x)
        if trains:
            y.sum().backward()
        with Operators() as operators:
            y = layer(x)
            if trains:
                y.sum().backward()
    return len(operators.names)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "world, dtype, options",
    [
        (2, torch.float32, {}),
        (4, torch.bfloat16, {}),
        (2, torch.bfloat16, {"memory_reuse": "S1"}),
        (4, torch.float32, {"memory_reuse": "S4"}),
    ],
    ids=str,
)
def test_a_wire_takes_at_most_two_operators_a_chunk_in_each_direction_on_the_cpu(
    world: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """They are a copy out of e4m3 and a product with the scales. Tokens are packed once a pass.

    Kernels take one launch each in place of the permute and the gather (`pmoe.engine.variants.cuda_wire`).
    """
    sends_again = options.get("memory_reuse") == "S4"
    for found in ranks(world).run(operators_job, dtype, options):
        plain = found["plain"]
        packed = found["wires"]
        assert 0 < packed["forward"] - plain["forward"] <= 2, found
        assert packed["step"] - plain["step"] <= 2 * (2 + sends_again), found


# ---- many tokens


def blocks_job(rank: int, world: int, rows: int, wires: tuple[str | None, ...]) -> None:
    """Blocks of a few rows, so that each chunk packs its own tokens, in several blocks."""
    for top_k, dtype, pair in (
        (1, torch.float32, False),
        (3, torch.bfloat16, "S4"),
        (3, torch.float32, "S4"),
    ):
        if "bfloat16" in wires and dtype != torch.float32:
            continue
        options = {"d_model": 130, "dtype": dtype, "memory_reuse": pair, "top_k": top_k, "pipeline": 2}
        x = tokens(TOKENS[world][rank], 10 + rank, dtype, 130)
        expected = reference(x, wires, **options)
        with mock.patch.object(wire_messages, "BLOCK_BYTES", 4 * 130 * rows):
            assert_same(step(wired(wires, **options), x), expected, told=(top_k, dtype, pair))


@pytest.mark.parametrize("rows, wires", [(1, ("e4m3", "e4m3")), (3, ("bfloat16", "e4m3"))], ids=str)
def test_tokens_that_are_packed_chunk_by_chunk_and_in_blocks_give_the_same_bits(
    rows: int, wires: tuple[str | None, ...]
) -> None:
    ranks(2).run(blocks_job, rows, wires)


def packed_job(rank: int, world: int, options: dict[str, Any], block_rows: int) -> tuple[int, int, int]:
    """Returns the numbers of tokens, of rows that are sent, and of rows that a forward pass packs."""
    packed = []
    pack = wire_messages._pack_e4m3

    def counted(rows: Tensor, *arguments: Any) -> None:
        packed.append(rows.shape[0])
        pack(rows, *arguments)

    layer = wired(("e4m3", None), d_model=128, dtype=torch.float32, pipeline=2, **options)
    blocks = mock.patch.object(wire_messages, "BLOCK_BYTES", 4 * 128 * block_rows)
    with blocks, mock.patch.object(wire_messages, "_pack_e4m3", counted):
        layer(tokens(32, 10 + rank, torch.float32, 128))
    assert layer.row_counts is not None
    sent = layer.row_counts.send.sum((0, 2)).tolist()
    return 32, sum(sent) - sent[rank], sum(packed)


@pytest.mark.parametrize("block_rows", [5, 1000])
@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_k": 4}, {"top_k": 4, "order": "einsum"}], ids=str)
def test_a_token_is_packed_once_or_its_rows_if_they_are_fewer(
    options: dict[str, Any], block_rows: int
) -> None:
    """Orders of users get rows in the rows' dtype, so the rows are packed."""
    for num_tokens, sent, packed in ranks(2).run(packed_job, options, block_rows):
        if "order" in options:
            assert packed == sent > num_tokens
        elif block_rows < num_tokens:
            assert packed <= min(num_tokens, sent)
        else:
            assert packed == num_tokens


def unchanged_job(rank: int, world: int) -> None:
    """Float32 tokens and gradients are packed from copies, whatever their strides are."""
    layer = wired(("e4m3", "e4m3"), d_model=256, dtype=torch.float32)
    x = tokens(9, 10 + rank, torch.float32, 256)
    dy = tokens(9, 20 + rank, torch.float32, 256)
    results = []
    for columns_first in (False, True):
        leaf = (x.t().contiguous().t() if columns_first else x.clone()).requires_grad_()
        gradient = dy.t().contiguous().t() if columns_first else dy.clone()
        y = layer(leaf)
        y.backward(gradient)
        assert torch.equal(leaf, x) and torch.equal(gradient, dy)
        results.append({"y": y.detach(), "x": leaf.grad})
    # Not to the bit: the gate's product of tokens with other strides may sum in another order.
    torch.testing.assert_close(*results)


def test_packing_changes_neither_tokens_nor_gradients() -> None:
    ranks(2).run(unchanged_job)


def peak_job(rank: int, world: int, num_tokens: int, options: dict[str, Any]) -> tuple[float, float]:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(256, 256, 4, wire="e4m3", wire_backward="e4m3", **options)
    with torch.no_grad():
        layer.gate.weight[:] = 0.02 * torch.randn(layer.gate.weight.shape)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens - 37 * rank, 256, generator=generator).to(layer.gate.weight.dtype)
    found = step_bytes(layer, x)
    exact = layer.predict_memory(x.shape[0], layer.row_counts)
    return exact.peak / found.peak, layer.predict_memory(num_tokens).peak / found.peak


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "num_tokens, options",
    [
        (2048, {"pipeline": 4, "top_k": 2, "memory_reuse": "S4", "dtype": torch.bfloat16}),
        (1000, {"pipeline": 4, "top_k": 2, "memory_reuse": "S4"}),
        (2048, {"pipeline": 2}),
        (1000, {"pipeline": 2, "dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_the_peak_is_predicted_for_tokens_that_are_packed_at_once_and_by_chunk(
    num_tokens: int, options: dict[str, Any]
) -> None:
    for exact, bound in ranks(2).run(peak_job, num_tokens, options):
        assert exact == pytest.approx(1, rel=0.02)
        assert bound >= 1
