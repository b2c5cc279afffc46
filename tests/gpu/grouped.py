"""Operands of the grouped products, over poison, and what each product must be in float64.

Letters: N rows, E experts, K choices, S slots, I in-features, O out-features, M = d_model, H = d_hidden,
G = H or 2H rows of w1.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels import extension, grouped_gemm
from pmoe.kernels.grouped_gemm import RowSlots, launch
from tests.gpu.support import DEVICE

NAN = float("nan")
CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16]

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SMALLEST = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24, torch.float32: 2.0**-126}
SUMS = 2.0**-17
"""What a sum in float32 may lose, of the sum of its terms' absolute values: matrix units cut off rather than
round, some hundred times here. One term of the longest sum is 2^-12 of it."""
FUNCTIONS = 2.0**-18
"""What a nonlinearity in float32 may lose, of its operand."""

GROUPS = {
    "around tiles": (0, 1, 127, 128, 129, 0, 255, 256, 257, 0),
    "first and last": (77, 0, 0, 13),
    "one expert": (300,),
    "one row": (0, 1, 0, 0),
    "one has all": (0, 0, 260, 0),
    "no rows": (0, 0, 0),
    "many experts": tuple((7 * e) % 5 for e in range(130)),
}
SIZES = [(8, 8), (64, 128), (64, 256), (200, 136), (136, 520), (520, 72)]
"""(I, O): one column of 16 bytes, whole tiles, and some more or less than tiles of 64, 128 and 256."""

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "swiglu": lambda h: F.silu(h[:, : h.shape[1] // 2]) * h[:, h.shape[1] // 2 :],
}


@pytest.fixture(
    params=[
        "sm_90a",
        "sm_90a, sharing B",
        "sm_90a, sharing A",
        "sm_90a, in turns",
        "sm_90a, boxes",
        "sm_80",
    ],
    autouse=True,
)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Selects the kernels that run, and which operand pairs of blocks share.

    In turns and with boxes, the rule selects what pairs share.

    A fall to PyTorch operations fails.
    """
    own, why = extension.path(DEVICE)
    if own is None:
        if os.environ.get("PMOE_CUDA") == "0":
            pytest.skip(f"PMOE_CUDA=0: {why}")
        pytest.fail(str(why))
    wanted, *way = request.param.split(", ")
    if wanted == "sm_90a" and own != "sm_90a":
        pytest.skip(f"this device runs {own}")
    monkeypatch.setattr(launch, "path", lambda _: (wanted, None))
    sharing = {"sharing B": 2, "sharing A": 3, "in turns": 0, "boxes": 0}
    storing = {"in turns": launch.IN_TURNS, "boxes": launch.AS_BOXES}
    monkeypatch.setattr(launch, "SHARING", sharing[way[0]] if way else 1)
    monkeypatch.setattr(launch, "STORING", storing.get(way[0], launch.ALONE) if way else launch.ALONE)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="pmoe: grouped products are computed without")
        yield


@pytest.fixture(autouse=True)
def sums_without_pytorch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the one kernel of PyTorch behind a product by the CPU when test_ptx.py runs the tests.

    This kernel adds up the parts of inner products.
    """
    if os.environ.get("CUDA_FORCE_PTX_JIT") == "1":
        add_up = Tensor.sum
        monkeypatch.setattr(Tensor, "sum", lambda t, *args: add_up(t.cpu(), *args).to(t.device))


class Guarded:
    """A matrix on the device with NaN around it: a row above and below, 16 bytes left and right."""

    def __init__(self, values: Tensor) -> None:
        """values: (rows, columns), on the CPU."""
        rows, columns = values.shape
        self.inside = slice(1, rows + 1), slice(8, columns + 8)
        whole = torch.full((rows + 2, columns + 16), NAN, dtype=values.dtype)
        whole[self.inside] = values
        self.whole = whole.to(DEVICE)
        self.matrix = self.whole[self.inside]

    @classmethod
    def poisoned(cls, rows: int, columns: int, dtype: torch.dtype) -> Guarded:
        return cls(torch.full((rows, columns), NAN, dtype=dtype))

    def read(self) -> Tensor:
        """What it holds now, on the CPU."""
        whole = self.whole.to("cpu", copy=True)
        found = whole[self.inside].clone()
        whole[self.inside] = NAN
        assert whole.isnan().all(), "something was written around the result"
        return found


class Case:
    """Groups of rows, and operands for them. Rows behind the last group, their slots and what those gather
    are NaN: whoever reads one of them spoils a result."""

    def __init__(
        self,
        random: torch.Generator,
        counts: tuple[int, ...],
        dtype: torch.dtype = torch.bfloat16,
        *,
        spare: int = 0,
        top_k: int = 0,
        where: torch.device = CPU,
    ) -> None:
        """top_k: 0 for no slots. where: the float64 side is computed."""
        self.random, self.counts, self.dtype, self.top_k, self.where = random, counts, dtype, top_k, where
        self.used = sum(counts)
        self.num_rows = self.used + spare
        self.ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32).to(DEVICE)
        self.num_tokens = -(-self.used // top_k) if top_k else 0  # and one more, of NaN
        self.slots, self.slot = None, torch.arange(self.num_rows)
        if top_k:
            spare_slot = torch.full((spare,), self.num_tokens * top_k)
            own = torch.randperm(self.num_tokens * top_k, generator=random)[: self.used]
            self.slot = torch.cat([own, spare_slot])
            self.slots = RowSlots(slot_N=self.slot.int().to(DEVICE), top_k=top_k)

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(dtype or self.dtype)

    def exact(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.where, torch.float64)

    def rows(self, columns: int, gathered: bool = False) -> tuple[Guarded, Tensor]:
        """(what a product is given, its rows in float64)"""
        if gathered:
            given = self.draw(self.num_tokens + 1, columns)
            given[-1] = NAN
            rows = given[self.slot[: self.used] // self.top_k]
        else:
            given = self.draw(self.num_rows, columns)
            given[self.used :] = NAN
            rows = given[: self.used]
        return Guarded(given), self.exact(rows)

    def weight(self, *shape: int) -> tuple[Tensor, Tensor]:
        given = self.draw(len(self.counts), *shape)
        return given.to(DEVICE), self.exact(given)

    def scale(self) -> tuple[Tensor, Tensor]:
        """By slot where there are slots; in float64 by row, (used, 1)."""
        count = (self.num_tokens + 1) * self.top_k if self.top_k else self.num_rows
        given = self.draw(count, dtype=torch.float32)
        given[self.num_tokens * self.top_k if self.top_k else self.used :] = NAN
        return given.to(DEVICE), self.exact(given[self.slot[: self.used]].unsqueeze(1))

    def by_expert(self, per_expert: Tensor) -> Tensor:
        """(E, ...) -> (used, ...)"""
        return per_expert.repeat_interleave(torch.tensor(self.counts, device=self.where), dim=0)

    def times(self, rows: Tensor, weight: Tensor) -> Tensor:
        """rows (used, I) by each expert's weight (E, O, I)."""
        parts = rows.split(list(self.counts))
        return torch.cat([part @ each.t() for part, each in zip(parts, weight, strict=True)])

    def gradient(self, grad: Tensor, rows: Tensor) -> Tensor:
        """(E, O, I)"""
        parts = zip(grad.split(list(self.counts)), rows.split(list(self.counts)), strict=True)
        return torch.stack([of_grad.t() @ of_rows for of_grad, of_rows in parts])

    def compare(self, got: Tensor, expected: Tensor, lost: Tensor | float = 0.0) -> None:
        """got: on the CPU, with rows behind the last group, in which nothing was written."""
        assert got[self.used :].isnan().all(), "something was written behind the last group"
        assert_near(got[: self.used].to(self.where), expected, lost)


def assert_near(got: Tensor, expected: Tensor, lost: Tensor | float = 0.0) -> None:
    """One rounding to got's type, beside what was ``lost``. NaN is never near."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    bound = 1.001 * ROUNDING[got.dtype] * expected.abs() + lost + SMALLEST[got.dtype]
    wrong = ~((got.double() - expected).abs() <= bound)
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        count, share = int(wrong.sum()), f"of {wrong.numel()} of shape {tuple(wrong.shape)}"
        pytest.fail(
            f"{count} {share} are wrong, first at {first}: {got[wrong][:4]}, not {expected[wrong][:4]}"
        )


def check_product(
    case: Case, num_in: int, num_out: int, *, gathered: bool = False, bias: bool = False, scaled: bool = False
) -> None:
    given, x = case.rows(num_in, gathered)
    weight, w = case.weight(num_out, num_in)
    bias_EO, b = case.weight(num_out) if bias else (None, None)
    scale, s = case.scale() if scaled else (None, None)
    out = Guarded.poisoned(case.num_rows, num_out, case.dtype)
    returned = grouped_gemm.product(
        given.matrix, weight, case.ends, bias_EO=bias_EO, scale=scale, slots=case.slots, gathered=gathered,
        out=out.matrix,
    )  # fmt: skip
    assert returned is out.matrix
    expected, size = case.times(x, w), case.times(x.abs(), w.abs())
    if b is not None:
        expected, size = expected + case.by_expert(b), size + case.by_expert(b).abs()
    if s is not None:
        expected, size = expected * s, size * s.abs()
    case.compare(out.read(), expected, SUMS * size)


def check_hidden(
    case: Case, num_in: int, width: int, activation: str, *, gathered: bool = False, bias: bool = False
) -> None:
    columns = 2 * width if activation == "swiglu" else width
    given, x = case.rows(num_in, gathered)
    weight, w = case.weight(columns, num_in)
    bias_EG, b = case.weight(columns) if bias else (None, None)
    out = Guarded.poisoned(case.num_rows, columns, case.dtype)
    active, alone = (Guarded.poisoned(case.num_rows, width, case.dtype) for _ in range(2))
    options: dict[str, Any] = {
        "activation": activation, "bias_EG": bias_EG, "slots": case.slots if gathered else None,
    }  # fmt: skip
    grouped_gemm.hidden(given.matrix, weight, case.ends, out=out.matrix, active=active.matrix, **options)
    not_kept, _ = grouped_gemm.hidden(
        given.matrix, weight, case.ends, active=alone.matrix, keep=False, **options
    )
    expected, size = case.times(x, w), case.times(x.abs(), w.abs())
    if b is not None:
        expected, size = expected + case.by_expert(b), size + case.by_expert(b).abs()
    hidden, found = out.read(), active.read()
    case.compare(hidden, expected, SUMS * size)
    rounded = case.exact(hidden[: case.used])  # all that backward has
    case.compare(found, ACTIVATE[activation](rounded), FUNCTIONS * operand_size(activation, rounded))
    assert not_kept is None
    assert torch.equal(alone.read()[: case.used], found[: case.used]), "without T_M the result is another"


def operand_size(activation: str, hidden: Tensor) -> Tensor:
    if activation != "swiglu":
        return hidden.abs()
    gate, up = hidden.chunk(2, dim=1)
    return gate.abs() * up.abs()


def check_input_gradient(case: Case, num_in: int, num_out: int) -> None:
    given, g = case.rows(num_out)
    weight, w = case.weight(num_out, num_in)
    out = Guarded.poisoned(case.num_rows, num_in, case.dtype)
    grouped_gemm.input_gradient(given.matrix, weight, case.ends, out=out.matrix)
    w = w.transpose(1, 2)
    case.compare(out.read(), case.times(g, w), SUMS * case.times(g.abs(), w.abs()))


def check_hidden_gradient(
    case: Case,
    num_model: int,
    width: int,
    activation: str,
    *,
    weighs_active: bool = False,
    place: str = "own",
) -> None:
    columns = 2 * width if activation == "swiglu" else width
    given, g = case.rows(num_model)
    weight, w = case.weight(num_model, width)
    hidden, h = case.rows(columns)
    scale, s = case.scale()
    out = hidden if place == "out in hidden" else Guarded.poisoned(case.num_rows, columns, case.dtype)
    active = Guarded.poisoned(case.num_rows, width, case.dtype)
    into = hidden.matrix[:, :width] if place == "active in hidden" else active.matrix
    _, _, dots = grouped_gemm.hidden_gradient(
        given.matrix, weight, hidden.matrix, scale, case.ends, activation=activation,
        weighs_active=weighs_active, out=out.matrix, active=into,
    )  # fmt: skip
    w = w.transpose(1, 2)
    of_active, size = case.times(g, w), case.times(g.abs(), w.abs())
    leaf = h.requires_grad_()
    value = ACTIVATE[activation](leaf)
    (slope,) = torch.autograd.grad(value, leaf, of_active * s)
    value = value.detach()
    # No derivative exceeds 1.2; in float32 it loses some of its operand, too.
    of_product = (SUMS * size + FUNCTIONS * of_active.abs()) * s.abs()
    lost = 1.2 * of_product * (1 + operands(activation, leaf.detach()))
    case.compare(out.read(), slope, pair(activation, leaf.detach(), lost))
    factor = s if weighs_active else torch.ones_like(s)
    lost_value = FUNCTIONS * operand_size(activation, leaf.detach())
    found_active = active.read() if place != "active in hidden" else hidden.read()[:, :width]
    case.compare(found_active, value * factor, lost_value * factor.abs())
    lost_dots = (SUMS * (value.abs() * size) + lost_value * size).sum(1)
    found = dots.cpu()[: case.used].to(case.where)
    assert dots.dtype == torch.float32 and dots.shape == (case.num_rows,)
    assert_near(found, (value * of_active).sum(1), 2 * lost_dots)


def operands(activation: str, hidden: Tensor) -> Tensor:
    """(used, H): how large what the derivative is computed from is."""
    return hidden.abs() if activation != "swiglu" else hidden.chunk(2, dim=1)[0].abs()


def pair(activation: str, hidden: Tensor, lost: Tensor) -> Tensor:
    """What is lost of a gate's gradient is times its partner, and the other way round."""
    if activation != "swiglu":
        return lost
    gate, up = hidden.chunk(2, dim=1)
    return torch.cat([lost * up.abs(), lost * (FUNCTIONS + gate.abs())], dim=1)


def check_weight_gradient(
    case: Case,
    num_in: int,
    num_out: int,
    *,
    wide: bool = False,
    accumulate: bool = False,
    gathered: bool = False,
) -> None:
    """gathered: rows are read from tokens, if the kernels are those for boxes. No others can."""
    gathers = gathered and launch.STORING == launch.AS_BOXES
    grad, g = case.rows(num_out)
    rows, x = case.rows(num_in, gathers)
    experts, dtype = len(case.counts), torch.float32 if wide else case.dtype
    before = case.draw(experts, num_out, num_in, dtype=dtype)
    whole = torch.full((experts + 2, num_out, num_in), NAN, dtype=dtype)
    if accumulate:
        whole[1:-1] = before
    whole = whole.to(DEVICE)
    grouped_gemm.weight_gradient(
        grad.matrix, rows.matrix, case.ends, slots=case.slots if gathers else None, out=whole[1:-1],
        accumulate=accumulate,
    )  # fmt: skip
    expected, size = case.gradient(g, x), case.gradient(g.abs(), x.abs())
    if accumulate:
        expected, size = expected + case.exact(before), size + case.exact(before).abs()
    found = whole.cpu()
    assert found[0].isnan().all() and found[-1].isnan().all(), "something was written around the result"
    found = found[1:-1]
    assert_near(found.to(case.where), expected, SUMS * size)
    for expert, count in enumerate(case.counts):
        if count == 0:
            left = before[expert] if accumulate else torch.zeros_like(before[expert])
            assert torch.equal(found[expert], left), f"expert {expert} has no rows"


PRODUCT = [
    ({}, {}),
    ({"spare": 37}, {"bias": True}),
    ({}, {"scaled": True}),
    ({"top_k": 3}, {"bias": True, "scaled": True}),
    ({"top_k": 1}, {"gathered": True}),
    ({"top_k": 4, "spare": 5}, {"gathered": True, "bias": True, "scaled": True}),
]
"""(of the case, of the product)"""
HIDDEN = [
    ({}, {}),
    ({"spare": 37}, {"bias": True}),
    ({"top_k": 2, "spare": 5}, {"gathered": True, "bias": True}),
]
INPUT: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {}), ({"spare": 37}, {})]
HIDDEN_GRADIENT = [
    ({}, {}),
    ({"spare": 37}, {"weighs_active": True}),
    ({}, {"place": "out in hidden"}),
    ({"spare": 5}, {"place": "active in hidden", "weighs_active": True}),
]
WEIGHT = [
    ({}, {}),
    ({"spare": 37}, {"wide": True}),
    ({"spare": 37}, {"wide": True, "accumulate": True}),
    ({"top_k": 2, "spare": 5}, {"gathered": True}),
]


def everything(case: Case, num_in: int, width: int) -> Callable[[], list[Tensor]]:
    """All five products of fixed operands, into new memory."""
    source, _ = case.rows(num_in, gathered=True)
    grad, _ = case.rows(num_in)
    shapes = ((2 * width, num_in), (num_in, width))
    w1, w2 = (
        case.draw(len(case.counts), *shape).mul_(0.03).to(DEVICE) for shape in shapes
    )  # float16 holds it
    scale, _ = case.scale()
    slots, ends, x = case.slots, case.ends, source.matrix
    assert slots is not None
    rows, row_scale = x[slots.slot_N.long() // slots.top_k], scale[slots.slot_N.long()]

    def run() -> list[Tensor]:
        hidden, active = grouped_gemm.hidden(x, w1, ends, activation="swiglu", slots=slots)
        assert hidden is not None
        out = grouped_gemm.product(active, w2, ends, scale=scale, slots=slots)
        of_hidden, weighted, dots = grouped_gemm.hidden_gradient(
            grad.matrix, w2, hidden, row_scale, ends, activation="swiglu", weighs_active=True
        )
        of_w1 = grouped_gemm.weight_gradient(of_hidden, rows, ends)
        of_w2 = grouped_gemm.weight_gradient(grad.matrix, weighted, ends)
        of_x = grouped_gemm.input_gradient(of_hidden, w1, ends)
        return [hidden, active, out, of_hidden, weighted, dots, of_w1, of_w2, of_x]

    return run
