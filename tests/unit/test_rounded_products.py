"""``products``: the experts' products with operands rounded to float8.

tests/gloo/test_rounded_products.py has layers of several ranks.

`plain` is the definition: it rounds by a loop over blocks, and multiplies in float64.
"""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import MoELayer, warn
from pmoe.experts.products import RowGroups
from pmoe.experts.rounded_products import RoundedProducts
from pmoe.kernels.scaled_products import products as scaled
from pmoe.kernels.scaled_products.layouts import in_tiles, rows_in_tiles
from pmoe.kernels.scaled_products.products import RESTORED, SCALED_GROUPED_MM, ScaledRequest
from pmoe.kernels.scaled_products.rounding import (
    power_of_two,
    restored,
    restoring_bytes,
    round_operand,
    rounded_bytes,
    rounding_bytes,
)
from pmoe.runners.features import Feature, refused
from tests import featured
from tests.allocated import Allocated
from tests.gpu.ladder.rounded import find_rounded
from tests.kit import one_thread
from tests.own_experts import mlp
from tests.scaled_mm_double import ScaledGroupedMM, spread
from tests.spread import named
from tests.unit.test_footprint import measured

__all__ = ["one_thread"]

FORMATS = ["e4m3", "mxfp8"]
COUNTS = (3, 0, 130, 1)
GENERATOR = torch.Generator().manual_seed(51)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def plain(products: str, values: Tensor) -> Tensor:
    """Values rounded along the last dimension: the definition. In float64."""
    blocks = []
    for block in values.float().split(values.shape[-1] if products == "e4m3" else 32, dim=-1):
        scale = (block.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126)
        if products == "mxfp8":
            scale = torch.exp2(torch.log2(scale.double()).ceil()).float()
        blocks.append((block / scale).to(torch.float8_e4m3fn).double() * scale.double())
    return torch.cat(blocks, dim=-1)


def sqnr(found: Tensor, exact: Tensor) -> float:
    """Signal over the noise of rounding, in decibels."""
    exact = exact.double()
    return 10 * math.log10(exact.square().sum() / (found.double() - exact).square().sum())


# ---- rounding


@pytest.mark.parametrize("products", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 31, 32, 127, 129, 200])
def test_operands_are_rounded_by_the_definition(products: Any, dtype: torch.dtype, width: int) -> None:
    values = random(2, 5, width, dtype=dtype) * torch.logspace(-3, 3, 5)[:, None].to(dtype)
    found = round_operand(products, values)
    assert torch.equal(restored(products, found), plain(products, values).float())
    assert found.numbers.shape == values.shape and found.numbers.is_contiguous()
    assert found.scales.is_contiguous()
    transposed = round_operand(products, values.transpose(1, 2))
    assert torch.equal(restored(products, transposed), plain(products, values.transpose(1, 2)).float())


@pytest.mark.parametrize("products", FORMATS)
def test_rows_of_any_size_stay_finite_and_zeros_stay_zeros(products: Any) -> None:
    rows = torch.rand(2000, 64, generator=GENERATOR) * torch.logspace(-44, 38, 2000)[:, None]
    rows[5] = 0
    rows[6] = torch.finfo(torch.float32).max * 7 / 8
    found = restored(products, round_operand(products, rows))
    assert found.isfinite().all() and not found[5].any()
    assert products == "mxfp8" or torch.equal(found[6], rows[6])


@pytest.mark.parametrize("products, bad", [("e4m3", 64), ("mxfp8", 32)])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_makes_its_block_nan_and_no_other(
    products: Any, bad: int, value: float
) -> None:
    rows = torch.ones(2, 64)
    rows[1, 3] = value
    found = restored(products, round_operand(products, rows))
    assert found[0].isfinite().all() and found[1, :bad].isnan().all() and found[1, bad:].isfinite().all()


def test_powers_of_two_are_rounded_up() -> None:
    values = torch.tensor([1.0, 1.0000001, 1.5, 2.0, 2.0**-126, 3e35, math.inf, math.nan, -math.nan])
    found = power_of_two(values).float()
    assert found[:6].tolist() == [1, 2, 2, 2, 2.0**-126, 2.0**118] and found[6:].isnan().all()


# ---- products


@pytest.mark.parametrize("products", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(48, 80), (127, 129), (1, 7)])
def test_products_are_the_definition_on_rounded_operands(
    products: Any, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    num_in, num_out = sizes
    groups = RowGroups(counts=COUNTS)
    N, E = groups.num_rows, len(COUNTS)
    rows, grad = random(N, num_in, dtype=dtype), random(N, num_out, dtype=dtype)
    weight, bias = random(E, num_out, num_in, dtype=dtype), random(E, num_out, dtype=dtype)
    scale = random(N).abs()
    both = RoundedProducts(products)
    expert = torch.tensor([expert for expert, count in enumerate(COUNTS) for _ in range(count)])
    wide = plain(products, weight)[expert], plain(products, weight.transpose(1, 2))[expert]
    exact = torch.einsum("noi,ni->no", wide[0], plain(products, rows)) + bias.double()[expert]
    exact *= scale[:, None].double()
    found = both.product(rows, weight, groups, bias, scale_N=scale)
    assert found.dtype == dtype and near(found, exact)
    found = both.input_product(grad, weight, groups)
    assert near(found, torch.einsum("nio,no->ni", wide[1], plain(products, grad)))
    out = torch.full((N, num_out), math.nan, dtype=dtype)
    assert both.product(rows, weight, groups, out=out) is out and out.isfinite().all()
    assert both.product(rows[:0], weight, RowGroups(counts=(0,) * E)).shape == (0, num_out)


def near(found: Tensor, exact: Tensor) -> bool:
    """Whether a result is rounded once, to its own type, after sums in float32."""
    error = (found.double() - exact).abs()
    return bool((error <= torch.finfo(found.dtype).eps * exact.abs() + 2e-6 * exact.abs().max()).all())


@pytest.mark.parametrize("products", FORMATS)
def test_a_product_has_the_accuracy_that_peers_ask_for(products: Any) -> None:
    """One product of random operands: output at least 28 dB, input gradient 26 dB, operands 30 dB."""
    groups = RowGroups(counts=(100, 28))
    rows, weight, grad = random(128, 256), random(2, 192, 256), random(128, 192)
    both = RoundedProducts(products)
    exact = torch.cat([rows[:100] @ weight[0].t(), rows[100:] @ weight[1].t()])
    exact_grad = torch.cat([grad[:100] @ weight[0], grad[100:] @ weight[1]])
    assert sqnr(restored(products, round_operand(products, rows)), rows) >= 30
    assert sqnr(both.product(rows, weight, groups), exact) >= 28
    assert sqnr(both.input_product(grad, weight, groups), exact_grad) >= 26


def test_a_pass_rounds_each_weight_once_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "pmoe.experts.rounded_products.round_operand",
        lambda products, values: shapes.append(tuple(values.shape)) or round_operand(products, values),
    )
    layer = MoELayer(16, 24, 4, products="e4m3", pipeline=4)
    layer(torch.randn(64, 16, requires_grad=True)).sum().backward()
    weights = [shape for shape in shapes if len(shape) == 3]
    assert weights == [(4, 24, 16), (4, 16, 24), (4, 24, 16), (4, 16, 24)]


# ---- layers


def step(layer: MoELayer, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    layer.zero_grad(set_to_none=True)
    leaf = x.detach().clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    return {"y": y.detach(), "x": leaf.grad, **{name: each.grad for name, each in layer.named_parameters()}}


class First(torch.autograd.Function):
    """rows @ matrix^T, both rounded. The gradient of rows is rounded, too, that of the matrix is not."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor, products: str) -> Tensor:
        ctx.save_for_backward(rows, matrix)
        ctx.products = products
        return plain(products, rows) @ plain(products, matrix).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, matrix = ctx.saved_tensors
        return plain(ctx.products, grad) @ plain(ctx.products, matrix.t()).t(), grad.t() @ rows, None


class Second(torch.autograd.Function):
    """weight * (active @ matrix^T + bias): one rounded product in backward gives two gradients.

    It is d = grad @ matrix. The gradient of ``active`` is weight * d, that of ``weight`` <active, d> + <bias,
    grad>, as pmoe does not keep the output.
    """

    @staticmethod
    def forward(
        ctx: Any, active: Tensor, matrix: Tensor, bias: Tensor, weight: Tensor, products: str
    ) -> Tensor:
        ctx.save_for_backward(active, matrix, bias, weight)
        ctx.products = products
        return weight * (plain(products, active) @ plain(products, matrix).t() + bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        active, matrix, bias, weight = ctx.saved_tensors
        product = plain(ctx.products, grad) @ plain(ctx.products, matrix.t()).t()
        of_weight = (active * product).sum(1, keepdim=True) + grad @ bias[:, None]
        weighted = weight * grad
        return weight * product, weighted.t() @ active, weighted.sum(0), of_weight, None


def definition(layer: MoELayer, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """A step by a loop over experts, in float64 but for what is rounded."""
    products = layer.products
    wide = {name: value.detach().double().requires_grad_() for name, value in layer.named_parameters()}
    leaf = x.double().requires_grad_()
    weight_TE = (leaf @ wide["gate.weight"].t()).softmax(-1)
    weight_TK, expert_TK = weight_TE.topk(layer.top_k)
    weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    y = torch.zeros_like(leaf)
    for e in range(layer.num_experts):
        token, choice = (expert_TK == e).nonzero(as_tuple=True)
        w1, b1, w2, b2 = (wide[f"experts.{name}"][e] for name in ("w1", "b1", "w2", "b2"))
        hidden = First.apply(leaf[token], w1, products) + b1
        halves = hidden.chunk(2, -1)
        active = F.silu(halves[0]) * halves[1] if layer.experts.hidden_factor == 2 else F.gelu(hidden)
        y = y.index_add(0, token, Second.apply(active, w2, b2, weight_TK[token, choice, None], products))
    y.backward(dy.double())
    return {"y": y.detach(), "x": leaf.grad, **{name: each.grad for name, each in wide.items()}}


LAYERS: dict[str, dict[str, Any]] = {
    "kept": {},
    "gated, S4": {"expert": "swiglu", "memory_reuse": "S4", "pipeline": 3},
    "S1": {"memory_reuse": "S1", "pipeline": 2},
    "other chunks in backward": {"memory_reuse": "S3", "pipeline": 2, "pipeline_backward": 3},
}


@pytest.mark.parametrize("products", FORMATS)
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_layer_is_the_definition_on_rounded_operands(products: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    layer = MoELayer(40, 56, 4, 2, products=products, **options)
    torch.nn.init.normal_(layer.experts.b1)
    x, dy = random(50, 40), random(50, 40) / 7
    found, exact = step(layer, x, dy), definition(layer, x, dy)
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


def test_one_chunk_or_four_and_every_restore_pair_give_the_same_numbers() -> None:
    torch.manual_seed(5)
    layer = MoELayer(48, 64, 4, 2, products="mxfp8", dtype=torch.bfloat16)
    x, dy = random(64, 48, dtype=torch.bfloat16), random(64, 48, dtype=torch.bfloat16)
    expected = step(layer, x, dy)
    for n in (1, 4):
        for pair in (False, "S1", "S2", "S3", "S4"):
            layer.memory_reuse, layer.pipeline = pair, n
            found = step(layer, x, dy)
            assert all(sqnr(found[name], value) > 40 for name, value in expected.items()), (n, pair)


@pytest.mark.parametrize("products", FORMATS)
def test_a_layer_loses_about_a_twentieth_and_its_weight_gradients_no_more(products: Any) -> None:
    """Two products one after the other: 3 dB below one product, in the output and in the input gradient."""
    torch.manual_seed(5)
    layer = MoELayer(128, 256, 4, 2, dtype=torch.bfloat16)
    x, dy = random(200, 128, dtype=torch.bfloat16), random(200, 128, dtype=torch.bfloat16)
    exact = step(layer, x, dy)
    layer.products = products
    found = step(layer, x, dy)
    assert sqnr(found["y"], exact["y"]) >= 24.5 and sqnr(found["x"], exact["x"]) >= 24
    assert sqnr(found["experts.w1"], exact["experts.w1"]) >= 25
    assert sqnr(found["experts.w2"], exact["experts.w2"]) >= 25
    layer.products = None
    assert all(torch.equal(value, step(layer, x, dy)[name]) for name, value in exact.items())


def test_finer_scales_do_not_bring_two_products_in_a_row_to_28_decibels() -> None:
    """The numbers of docs/flexible.md: the error comes from the three bits of e4m3's mantissa."""
    rows, w1, w2 = random(256, 512), random(512, 512) / 22, random(256, 512) / 22

    def output(of_rows: int, of_weights: int) -> Tensor:
        active = F.gelu(in_blocks(rows, of_rows) @ in_blocks(w1, of_weights).t())
        return in_blocks(active, of_rows) @ in_blocks(w2, of_weights).t()

    exact = output(0, 0)
    found = {columns: sqnr(output(columns, columns), exact) for columns in (512, 128, 32, 16)}
    assert 25 < found[512] <= found[128] + 0.3 < found[32] < found[16] < 27.5, found
    assert sqnr(output(128, 0), exact) >= 28 and sqnr(output(0, 128), exact) >= 28


def in_blocks(values: Tensor, columns: int) -> Tensor:
    """Values rounded to e4m3 with a float32 scale for each block of columns; as they are with 0 columns."""
    if not columns:
        return values
    blocks = values.unflatten(-1, (-1, columns))
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def test_a_layer_learns_with_rounded_products_as_without() -> None:
    losses = {}
    for products in (None, "e4m3", "mxfp8"):
        torch.manual_seed(3)
        layer = MoELayer(16, 32, 4, 2, products=products)
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        x = random(128, 16)
        target = x.roll(1, dims=1).sin()
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.mse_loss(layer(x), target)
            loss.backward()
            optimizer.step()
        losses[products] = float(loss)
    assert losses[None] < 0.2 and all(loss < 1.1 * losses[None] for loss in losses.values()), losses


def test_layers_with_rounded_products_are_copied_pickled_and_compared() -> None:
    layer = MoELayer(16, 24, 4, products="e4m3")
    x = random(9, 16)
    again = pickle.loads(pickle.dumps(layer))
    assert again.products == "e4m3" and torch.equal(again(x), layer(x))
    torch.nn.utils.parametrizations.weight_norm(layer.experts, "w1")  # such modules refuse copy.copy
    assert layer(x).isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_experts_of_another_module_round_in_either_layout_and_in_short_calls(training: bool) -> None:
    owner = torch.nn.Module().train(training)
    x, w1, w2 = random(6, 32), random(4, 48, 32), random(4, 32, 24)
    index, weights = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 1], [0, 3], [1, 0]]), torch.full((6, 2), 0.5)
    exact = pmoe.run_experts(owner, x, index, weights, w1, w2)
    options = {"products": "e4m3", "pipeline": 2}
    found = [pmoe.run_experts(owner, x, index, weights, w1, w2, **options) for _ in range(2)]
    turned = [each.transpose(1, 2).contiguous() for each in (w1, w2)]
    other = pmoe.run_experts(torch.nn.Module(), x, index, weights, *turned, transposed=True, **options)
    assert torch.equal(*found) and 20 < sqnr(found[0], exact) < 35
    assert torch.allclose(found[0], other, atol=1e-4 * float(exact.abs().max()))


@pytest.mark.parametrize("products", FORMATS)
def test_backward_may_run_twice_and_checkpointing_keeps_the_bits(products: Any) -> None:
    layer = MoELayer(40, 24, 4, 2, products=products, memory_reuse="S4", pipeline=2)
    leaf = random(30, 40).requires_grad_()
    inputs = [leaf, *layer.parameters()]
    y = layer(leaf)
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(y.sum(), inputs, allow_unused=True)
    again = checkpoint(layer, leaf, use_reentrant=False)
    third = torch.autograd.grad(again.sum(), inputs, allow_unused=True)
    assert torch.equal(again, y)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("products", FORMATS)
def test_rows_that_are_zero_tiny_or_not_finite_stay_among_themselves(
    products: Any, dtype: torch.dtype
) -> None:
    layer = MoELayer(33, 17, 4, 2, products=products, dtype=dtype, check_finite=False)
    x = random(9, 33, dtype=dtype)
    clean = layer(x)
    x[1], x[2], x[3, 5], x[4, 0] = 0, torch.finfo(dtype).tiny / 4, math.nan, 1e-7
    y = layer(x)
    assert y[3].isnan().all() and y[[0, 1, 2, 4, 5, 6, 7, 8]].isfinite().all()
    assert torch.allclose(y[[0, 5, 6, 7, 8]], clean[[0, 5, 6, 7, 8]], rtol=0.02, atol=0.01)
    assert layer(x[:0]).shape == (0, 33)


def test_under_autocast_the_cast_operands_are_rounded() -> None:
    layer = MoELayer(32, 48, 4, products="e4m3")
    x = random(9, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16 and sqnr(y, layer(x)) > 25


# ---- refusals


def test_experts_that_cannot_round_are_refused_by_name() -> None:
    for options, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            MoELayer(16, 24, 4, **{"products": "e4m3", **options})
    layer = MoELayer(16, 24, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"products \('mxfp8'\) must be None for rows of torch.float64"):
        layer.products = "mxfp8"
    assert layer.products is None
    with pytest.raises(ValueError, match=r"products \('e4m3'\) must be None in a layer with adapters"):
        pmoe.add_lora(MoELayer(16, 24, 4, products="e4m3"), rank=2, alpha=2)
    layer = MoELayer(16, 24, 4)
    pmoe.add_lora(layer, rank=2, alpha=2)
    with pytest.raises(ValueError, match=r"products \('e4m3'\) must be None where experts have adapters"):
        layer.products = "e4m3"
    with pytest.raises(ValueError, match=r"cannot be batch-invariant .*\(products='e4m3'\)"):
        pmoe.make_batch_invariant(MoELayer(16, 24, 4, products="e4m3"))


OF_RANKS = (
    Feature.RANKS,
    Feature.SHARDED,
    Feature.COPIES,
    Feature.WIRE,
    Feature.WIRE_COMBINE,
    Feature.MESSAGES,
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "feature", [each for each in Feature if each not in OF_RANKS], ids=lambda each: each.name
)
def test_each_feature_is_computed_or_refused_by_its_name(
    feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(featured, "F64", torch.float32)
    layer = featured.build((feature,))
    exact = featured.found(layer)
    missing = refused("rounded products", {*layer.layer_modules.features, Feature.PRODUCTS})
    if missing is not None:
        with pytest.raises(ValueError, match=featured.sentence(missing)):
            layer.products = "e4m3"
        return
    layer.products = "e4m3"
    found = featured.found(layer)
    assert found.keys() == exact.keys()
    for name in ("y", "x"):
        assert feature in (Feature.PRODUCTS, Feature.HIDDEN_E4M3) or sqnr(found[name], exact[name]) >= 15, (
            name
        )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float64}, r"products \('e4m3'\) must be None for rows of torch.float64"),
    ({"expert": mlp}, r"products \('e4m3'\) must be None where experts .* are modules"),
]


# ---- memory


PEAKS: list[dict[str, Any]] = [
    {"products": "e4m3", "pipeline": 1},
    {"products": "e4m3", "dtype": torch.bfloat16, "memory_reuse": "S4"},
    {"products": "mxfp8", "expert": "swiglu", "memory_reuse": "S2"},
    {"products": "mxfp8", "dtype": torch.float16, "d_hidden": 100, "d_model": 120, "top_k": 2},
]


@pytest.mark.parametrize("options", PEAKS, ids=named)
def test_the_peak_of_a_step_is_within_two_percent_of_the_prediction(options: dict[str, Any]) -> None:
    layer = MoELayer(**{"d_model": 128, "d_hidden": 256, "num_experts": 4, "pipeline": 2, **options})
    found = measured(layer, 1024)
    predicted = layer.predict_memory(1024, layer.row_counts)
    assert predicted.unknown == () and predicted.tensors["rounded operands"]
    assert predicted.peak == pytest.approx(found.peak, rel=0.02)
    assert predicted.saved == pytest.approx(found.held, rel=0.02)
    assert layer.predict_memory(1024).peak >= found.peak


@pytest.mark.parametrize("products", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [96, 100])
def test_the_bytes_of_rounding_and_of_restoring_are_those_that_the_allocator_counts(
    products: Any, dtype: torch.dtype, columns: int
) -> None:
    values = random(4, columns, 300, dtype=dtype).transpose(1, 2)
    rounding = Allocated(lambda mark: round_operand(products, values))
    assert rounding_bytes(products, 1200, columns, dtype.itemsize) == pytest.approx(rounding.peak, rel=0.01)
    assert rounded_bytes(products, 1200, columns) == pytest.approx(rounding.left, rel=0.01)
    operand = round_operand(products, values)
    restoring = Allocated(lambda mark: restored(products, operand))
    assert restoring_bytes(products, 1200, columns) == pytest.approx(restoring.peak, rel=0.01)


def test_a_memory_budget_counts_rounded_operands() -> None:
    options = {"memory_reuse": True, "pipeline": 4}
    plain, layer = (MoELayer(128, 256, 4, products=each, **options) for each in (None, "e4m3"))
    least = min(each.promised for each in plain.predict_memory(1024).candidates.values())
    assert MoELayer(128, 256, 4, memory_budget=least, **options).predict_memory(1024).promised <= least
    with pytest.raises(ValueError, match=rf"memory_budget \({least} bytes\) must be at least"):
        MoELayer(128, 256, 4, products="e4m3", memory_budget=least, **options).predict_memory(1024)
    most = min(each.promised for each in layer.predict_memory(1024).candidates.values())
    within = MoELayer(128, 256, 4, products="e4m3", memory_budget=most, **options)
    x = torch.randn(1024, 128, requires_grad=True)
    within(x).sum().backward()
    assert within.predict_memory(1024).promised <= most


# ---- torch's product


def request(**changed: Any) -> ScaledRequest:
    fields = {
        "products": "e4m3", "device_type": "cuda", "capability": (9, 0), "device_name": "an H200",
        "dtype": torch.bfloat16, "experts": 8, "rows": 4096, "columns": 1024, "out_columns": 4096,
    }  # fmt: skip
    return ScaledRequest(**{**fields, **changed})


@pytest.mark.parametrize(
    "changed, words",
    [
        ({}, None),
        ({"products": "mxfp8", "capability": (10, 0)}, None),
        ({"products": "mxfp8", "capability": (10, 3)}, None),
        ({"device_type": "cpu"}, "device cpu: torch has no scaled_grouped_mm for it"),
        ({"capability": (8, 9)}, "compute capability 8.9: torch's product in e4m3 needs 9.x"),
        ({"capability": (10, 0)}, "compute capability 10.0: torch's product in e4m3 needs 9.x"),
        ({"products": "mxfp8"}, "compute capability 9.0: torch's product in mxfp8 needs 10.x"),
        ({"dtype": torch.float32}, "dtype torch.float32: scaled_grouped_mm writes bfloat16 only"),
        ({"experts": 1024}, "1024 experts: scaled_grouped_mm takes at most 1023"),
        ({"columns": 1032}, "1032 columns to sum over are no multiple of 16"),
        (
            {"products": "mxfp8", "capability": (10, 0), "columns": 1040},
            "1040 columns to sum over are no multiple of 32",
        ),
        ({"out_columns": 4104}, "4104 columns of the result are no multiple of 16"),
    ],
)
def test_torchs_product_is_taken_unless_it_would_refuse(changed: dict[str, Any], words: str | None) -> None:
    warn.GIVEN.clear()
    asked = request(**changed)
    scaled.way_to_compute.cache_clear()
    assert scaled.refusals(asked) == ([] if words is None else [words])
    if words is None:
        assert scaled.way_to_compute(asked) == SCALED_GROUPED_MM
    elif asked.device_type == "cpu":
        assert scaled.way_to_compute(asked) == RESTORED
    else:
        with pytest.warns(
            UserWarning, match="rounded products are computed slowly, in float32: " + words[:9]
        ):
            assert scaled.way_to_compute(asked) == RESTORED


def test_the_choice_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PMOE_LOG_KERNELS", "1")
    scaled.way_to_compute.cache_clear()
    for _ in range(2):
        scaled.way_to_compute(request(device_type="cpu", capability=(0, 0), device_name="cpu"))
    (record,) = caplog.records
    assert "product in e4m3, experts=8 rows=4096 columns=1024 out=4096 for bfloat16 on cpu" in record.message
    assert "scaled_grouped_mm refuses: device cpu" in record.message


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> ScaledGroupedMM:
    """Takes torch's product on the CPU, by a stand-in that checks its arguments as torch does."""
    stand_in = ScaledGroupedMM()
    monkeypatch.setattr(F, "scaled_grouped_mm", stand_in)
    monkeypatch.setattr(scaled, "way_to_compute", lambda asked: SCALED_GROUPED_MM)
    return stand_in


@pytest.mark.parametrize("counts", [(3, 0, 130, 1), (0, 0, 5, 0), (128, 256, 31, 129)])
@pytest.mark.parametrize("products", FORMATS)
def test_launches_keep_the_rules_of_torch_and_give_the_definition(
    products: Any, counts: tuple[int, ...], double: ScaledGroupedMM
) -> None:
    groups = RowGroups(counts=counts)
    rows = (
        random(groups.num_rows, 160, dtype=torch.bfloat16) * torch.logspace(-4, 4, groups.num_rows)[:, None]
    )
    rows = rows.bfloat16()
    weight, bias = random(4, 144, 160, dtype=torch.bfloat16), random(4, 144, dtype=torch.bfloat16)
    grad = random(groups.num_rows, 160, dtype=torch.bfloat16)
    square = random(4, 160, 160, dtype=torch.bfloat16)
    both = RoundedProducts(products)
    expert = torch.tensor([expert for expert, count in enumerate(counts) for _ in range(count)])
    exact = torch.einsum("noi,ni->no", plain(products, weight)[expert], plain(products, rows))
    found = both.product(rows, weight, groups)
    assert torch.equal(found, exact.bfloat16())
    with_bias = both.product(rows, weight, groups, bias, scale_N=torch.full((groups.num_rows,), 0.5))
    assert torch.equal(with_bias, (exact.bfloat16() + bias[expert]) * 0.5)
    exact = torch.einsum("nio,no->ni", plain(products, square.transpose(1, 2))[expert], plain(products, grad))
    assert torch.equal(both.input_product(grad, square, groups), exact.bfloat16())
    name = "row-wise" if products == "e4m3" else "blocks"
    assert double.calls == [(name, (groups.num_rows, 160))] * 3


@pytest.mark.parametrize("products", FORMATS)
def test_a_layer_trains_by_launches_as_by_the_definition(products: Any, double: ScaledGroupedMM) -> None:
    torch.manual_seed(5)
    layer = MoELayer(64, 96, 4, 2, products=products, dtype=torch.bfloat16, memory_reuse="S4", pipeline=2)
    x, dy = random(60, 64, dtype=torch.bfloat16), random(60, 64, dtype=torch.bfloat16)
    found = step(layer, x, dy)
    assert len(double.calls) == 2 * (2 + 1 + 2)  # two products, T_M again, and two gradients for each chunk
    layer.products, layer.memory_reuse = None, False
    exact = step(layer, x, dy)
    assert all(sqnr(found[name], value) >= 20 for name, value in exact.items() if name != "gate.weight")


def other_order(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8).roll(1, -1).view(scales.dtype)


def test_the_ladders_step_finds_what_is_wrong(
    double: ScaledGroupedMM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the stand-in: right as it is, wrong where scales are in another order."""
    monkeypatch.setattr(scaled, "way_to_compute", lambda asked: RESTORED)  # the definition
    monkeypatch.setattr(scaled, "refusals", lambda asked: [])
    right = {"product in e4m3": None, "product in mxfp8": None}
    assert find_rounded(torch.device("cpu")) == right and len(double.calls) == 2
    monkeypatch.setattr(
        scaled, "rows_in_tiles", lambda scales, counts, ends: rows_in_tiles(other_order(scales), counts, ends)
    )
    monkeypatch.setattr(scaled, "in_tiles", lambda scales: in_tiles(other_order(scales)))
    assert "wrong, first" in str(find_rounded(torch.device("cpu"))["product in mxfp8"])


def test_scales_in_tiles_written_out() -> None:
    """Row r and block b of a tile are at byte 16 (r % 32) + 4 (r // 32) + b."""
    scales = torch.arange(1, 131, dtype=torch.uint8).view(130, 1).expand(130, 5).contiguous()
    tiles = in_tiles(scales).view(2, 2, 512)
    assert tiles[0, 0, :16].tolist() == [1] * 4 + [33] * 4 + [65] * 4 + [97] * 4
    assert tiles[0, 1, :16].tolist() == [1, 0, 0, 0, 33, 0, 0, 0, 65, 0, 0, 0, 97, 0, 0, 0]
    assert tiles[1, 0, :32].tolist() == [129] * 4 + [0] * 12 + [130] * 4 + [0] * 12
    back = spread(in_tiles(scales), 130, 160)[:, ::32]
    assert torch.equal(back, torch.exp2(scales.double() - 127))


def test_the_stand_in_refuses_what_torch_refuses(double: ScaledGroupedMM) -> None:
    ends = torch.tensor([4], dtype=torch.int32)
    for width in (24, 32):
        rows, weight = round_operand("e4m3", random(4, width)), round_operand("e4m3", random(1, 24, width))
        with pytest.raises(AssertionError):
            scaled.launch_scaled("e4m3", rows, weight, (4,), ends)
