"""The grouped products on a GPU: every element against float64, over poison, whatever the groups.

Where a GPU runs Hopper's kernels, those of sm_80 run there too, and every test runs with each, and with pairs
of blocks. Operands are drawn on the CPU, and results are compared there: the device runs nothing but the
kernels, so that test_ptx.py can run the tests named every_element where PyTorch's own cannot be loaded.

Letters: N rows, E experts, K choices, S slots, I in-features, O out-features, M = d_model, H = d_hidden,
G = H or 2H rows of w1.
"""

from __future__ import annotations

import itertools
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels import grouped_gemm, status
from pmoe.kernels.grouped_gemm import RowSlots, grouped_hidden, grouped_product, launch, products
from tests.gpu.support import DEVICE, LONG, NEEDS_GPU, poison_memory, relative_norm

pytestmark = NEEDS_GPU

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


@pytest.fixture(params=["sm_90a", "sm_90a, pairs", "sm_80"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whose kernels run; pairs: of blocks that share an operand. A fall to PyTorch operations fails."""
    own, why = grouped_gemm.path(DEVICE)
    if own is None:
        if os.environ.get("PMOE_CUDA") == "0":
            pytest.skip(f"PMOE_CUDA=0: {why}")
        pytest.fail(str(why))
    wanted, *pairs = request.param.split(", ")
    if wanted == "sm_90a" and own != "sm_90a":
        pytest.skip(f"this device runs {own}")
    monkeypatch.setattr(launch, "path", lambda _: (wanted, None))
    monkeypatch.setattr(launch, "CLUSTER", 2 if pairs else 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="pmoe: grouped products are computed without")
        yield


@pytest.fixture(autouse=True)
def sums_without_pytorch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where test_ptx.py runs this, the one kernel of PyTorch behind a product, which adds up the parts of
    inner products, is done on the CPU."""
    if os.environ.get("CUDA_FORCE_PTX_JIT") == "1":
        add_up = Tensor.sum
        monkeypatch.setattr(Tensor, "sum", lambda t, *args: add_up(t.cpu(), *args).to(t.device))


@pytest.fixture
def random() -> torch.Generator:
    """Other numbers each time; PMOE_TEST_SEED draws those of a failure again."""
    seed = int(os.environ.get("PMOE_TEST_SEED") or secrets.randbits(32))
    print(f"PMOE_TEST_SEED={seed}")  # pytest shows it where the test fails
    return torch.Generator().manual_seed(seed)


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


# ---- what each product must be


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
        "activation": activation, "bias_EG": bias_EG, "slots": case.slots, "gathered": gathered,
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


def check_input_gradient(case: Case, num_in: int, num_out: int, *, gathered: bool = False) -> None:
    given, g = case.rows(num_out, gathered)
    weight, w = case.weight(num_out, num_in)
    out = Guarded.poisoned(case.num_rows, num_in, case.dtype)
    grouped_gemm.input_gradient(
        given.matrix, weight, case.ends, slots=case.slots, gathered=gathered, out=out.matrix
    )
    w = w.transpose(1, 2)
    case.compare(out.read(), case.times(g, w), SUMS * case.times(g.abs(), w.abs()))


def check_hidden_gradient(
    case: Case,
    num_model: int,
    width: int,
    activation: str,
    *,
    gathered: bool = False,
    weighs_active: bool = False,
    place: str = "own",
) -> None:
    columns = 2 * width if activation == "swiglu" else width
    given, g = case.rows(num_model, gathered)
    weight, w = case.weight(num_model, width)
    hidden, h = case.rows(columns)
    scale, s = case.scale()
    out = hidden if place == "out in hidden" else Guarded.poisoned(case.num_rows, columns, case.dtype)
    active = Guarded.poisoned(case.num_rows, width, case.dtype)
    into = hidden.matrix[:, :width] if place == "active in hidden" else active.matrix
    _, _, dots = grouped_gemm.hidden_gradient(
        given.matrix, weight, hidden.matrix, scale, case.ends, activation=activation, slots=case.slots,
        gathered=gathered, weighs_active=weighs_active, out=out.matrix, active=into,
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
    gathers_grad: bool = False,
    gathers_rows: bool = False,
) -> None:
    grad, g = case.rows(num_out, gathers_grad)
    rows, x = case.rows(num_in, gathers_rows)
    experts, dtype = len(case.counts), torch.float32 if wide else case.dtype
    before = case.draw(experts, num_out, num_in, dtype=dtype)
    whole = torch.full((experts + 2, num_out, num_in), NAN, dtype=dtype)
    if accumulate:
        whole[1:-1] = before
    whole = whole.to(DEVICE)
    grouped_gemm.weight_gradient(
        grad.matrix, rows.matrix, case.ends, slots=case.slots, gathers_grad=gathers_grad,
        gathers_rows=gathers_rows, out=whole[1:-1], accumulate=accumulate,
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
INPUT = [({}, {}), ({"spare": 37}, {}), ({"top_k": 2, "spare": 5}, {"gathered": True})]
HIDDEN_GRADIENT = [
    ({}, {}),
    ({"spare": 37}, {"weighs_active": True}),
    ({"top_k": 3}, {"place": "out in hidden"}),
    ({}, {"place": "active in hidden"}),
    ({"top_k": 2, "spare": 5}, {"gathered": True, "weighs_active": True}),
]
WEIGHT = [
    ({}, {}),
    ({"spare": 37}, {"wide": True}),
    ({"spare": 37}, {"wide": True, "accumulate": True}),
    ({"top_k": 2, "spare": 5}, {"gathers_rows": True}),
    ({"top_k": 3, "spare": 5}, {"gathers_grad": True, "wide": True}),
    ({"top_k": 2}, {"gathers_grad": True, "gathers_rows": True, "wide": True, "accumulate": True}),
]


# ---- every element


by_groups = pytest.mark.parametrize("counts", GROUPS.values(), ids=GROUPS.keys())
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_size = pytest.mark.parametrize("sizes", SIZES, ids=str)
by_activation = pytest.mark.parametrize("activation", list(ACTIVATE))
MIXED = (130, 0, 257, 3)


@by_groups
@by_dtype
def test_every_element_of_a_product(
    random: torch.Generator, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    for of_case, options in PRODUCT:
        check_product(Case(random, counts, dtype, **of_case), 72, 264, **options)


@by_size
def test_every_element_of_a_product_of_any_size(random: torch.Generator, sizes: tuple[int, int]) -> None:
    for of_case, options in PRODUCT:
        check_product(Case(random, MIXED, **of_case), *sizes, **options)


@by_groups
@by_activation
def test_every_element_of_the_hidden(
    random: torch.Generator, counts: tuple[int, ...], activation: str
) -> None:
    for dtype, (of_case, options) in zip(itertools.cycle(DTYPES), HIDDEN):
        check_hidden(Case(random, counts, dtype, **of_case), 72, 136, activation, **options)


@by_size
@by_dtype
def test_every_element_of_the_hidden_of_any_size(
    random: torch.Generator, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    for activation, (of_case, options) in itertools.product(("gelu", "swiglu"), HIDDEN):
        check_hidden(Case(random, MIXED, dtype, **of_case), *sizes, activation, **options)


@by_groups
@by_dtype
def test_every_element_of_the_input_gradient(
    random: torch.Generator, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    for of_case, options in INPUT:
        check_input_gradient(Case(random, counts, dtype, **of_case), 264, 72, **options)


@by_size
def test_every_element_of_the_input_gradient_of_any_size(
    random: torch.Generator, sizes: tuple[int, int]
) -> None:
    for of_case, options in INPUT:
        check_input_gradient(Case(random, MIXED, **of_case), *sizes, **options)


@by_groups
@by_activation
def test_every_element_of_the_hidden_gradient(
    random: torch.Generator, counts: tuple[int, ...], activation: str
) -> None:
    for dtype, (of_case, options) in zip(itertools.cycle(DTYPES), HIDDEN_GRADIENT):
        check_hidden_gradient(Case(random, counts, dtype, **of_case), 72, 264, activation, **options)


@by_size
@by_dtype
def test_every_element_of_the_hidden_gradient_of_any_size(
    random: torch.Generator, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    for activation, (of_case, options) in itertools.product(("gelu", "swiglu"), HIDDEN_GRADIENT):
        check_hidden_gradient(Case(random, MIXED, dtype, **of_case), *sizes, activation, **options)


@by_groups
@by_dtype
def test_every_element_of_the_weight_gradient(
    random: torch.Generator, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    for of_case, options in WEIGHT:
        check_weight_gradient(Case(random, counts, dtype, **of_case), 72, 136, **options)


@by_size
def test_every_element_of_the_weight_gradient_of_any_size(
    random: torch.Generator, sizes: tuple[int, int]
) -> None:
    for of_case, options in WEIGHT:
        check_weight_gradient(Case(random, MIXED, **of_case), *sizes, **options)


@pytest.mark.sanitize
def test_few_rows_by_every_kernel(random: torch.Generator) -> None:
    counts, sizes = (3, 0, 130), (72, 136)
    for dtype in DTYPES:
        for of_case, options in (PRODUCT[1], PRODUCT[-1]):
            check_product(Case(random, counts, dtype, **of_case), *sizes, **options)
        for activation, (of_case, options) in itertools.product(("gelu", "swiglu"), HIDDEN[1:]):
            check_hidden(Case(random, counts, dtype, **of_case), *sizes, activation, **options)
        for of_case, options in INPUT[1:]:
            check_input_gradient(Case(random, counts, dtype, **of_case), *sizes, **options)
        for activation, (of_case, options) in itertools.product(("relu", "swiglu"), HIDDEN_GRADIENT[1::3]):
            check_hidden_gradient(Case(random, counts, dtype, **of_case), *sizes, activation, **options)
        for of_case, options in WEIGHT:
            check_weight_gradient(Case(random, counts, dtype, **of_case), *sizes, **options)


@pytest.mark.sanitize
def test_a_stage_is_used_again_and_again(random: torch.Generator) -> None:
    """Sums of more than twice as many steps as the ring has stages, in few tiles."""
    check_product(Case(random, (9, 5), top_k=2), 584, 8, gathered=True)
    check_product(Case(random, (9, 5)), 584, 8)
    check_weight_gradient(Case(random, (3, 585)), 8, 8)
    check_weight_gradient(Case(random, (3, 585), top_k=2), 8, 8, gathers_rows=True)


# ---- many tiles a block, checked on the device


def drawn_counts(random: torch.Generator, rows: int, experts: int) -> tuple[int, ...]:
    expert_N = torch.randint(experts, (rows,), generator=random)
    return tuple(torch.bincount(expert_N, minlength=experts).tolist())


@by_dtype
def test_blocks_that_compute_many_tiles(random: torch.Generator, dtype: torch.dtype) -> None:
    def case(**options: Any) -> Case:
        return Case(random, drawn_counts(random, 6000, 16), dtype, where=DEVICE, **options)

    check_product(case(), 1024, 1408, bias=True, scaled=True)
    check_hidden(case(top_k=2), 1024, 1408, "swiglu", gathered=True)
    check_input_gradient(case(), 1024, 1408)
    check_hidden_gradient(case(top_k=2), 1024, 1408, "swiglu", gathered=True, weighs_active=True)
    check_weight_gradient(case(), 1024, 1408)
    check_weight_gradient(case(top_k=2), 1024, 1408, wide=True, accumulate=True, gathers_rows=True)


def test_a_row_of_nan_spoils_no_other_expert(random: torch.Generator) -> None:
    """Tiles reach into the neighbours' rows."""
    case = Case(random, (3, 70, 5))
    grad, rows = (case.draw(78, columns) for columns in (136, 72))
    grad[5], rows[7] = NAN, float("inf")
    found = grouped_gemm.weight_gradient(grad.to(DEVICE), rows.to(DEVICE), case.ends).cpu()
    assert found[[0, 2]].isfinite().all() and not found[1].isfinite().any()
    weight, _ = case.weight(64, 72)
    found = grouped_gemm.product(rows.to(DEVICE), weight, case.ends).cpu()
    spoilt = ~found.isfinite().all(1)
    assert spoilt.nonzero().flatten().tolist() == [7]


# ---- bits


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

    def run() -> list[Tensor]:
        hidden, active = grouped_gemm.hidden(x, w1, ends, activation="swiglu", slots=slots, gathered=True)
        assert hidden is not None
        out = grouped_gemm.product(active, w2, ends, scale=scale, slots=slots)
        of_hidden, weighted, dots = grouped_gemm.hidden_gradient(
            grad.matrix, w2, hidden, scale, ends, activation="swiglu", slots=slots, weighs_active=True
        )
        of_w1 = grouped_gemm.weight_gradient(of_hidden, x, ends, slots=slots, gathers_rows=True)
        of_w2 = grouped_gemm.weight_gradient(grad.matrix, weighted, ends)
        of_x = grouped_gemm.input_gradient(of_hidden, w1, ends)
        return [hidden, active, out, of_hidden, weighted, dots, of_w1, of_w2, of_x]

    return run


@by_dtype
def test_three_runs_give_the_same_bits(random: torch.Generator, dtype: torch.dtype) -> None:
    run = everything(Case(random, drawn_counts(random, 3000, 8), dtype, top_k=2), 512, 712)
    first = run()
    for _ in range(2):
        poison_memory()
        for found, expected in zip(run(), first, strict=True):
            assert torch.equal(found, expected)
    assert all(each.isfinite().all() for each in first)


# ---- far apart


def room_for(num_bytes: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < num_bytes + 2**31:
        pytest.skip(f"{num_bytes} bytes are needed, {free} are free")


def far_rows(count: int, columns: int) -> Tensor:
    """Rows more than 2**31 elements apart. Only they are ever read or written."""
    stride = 2**31 + 64
    memory = torch.empty((count - 1) * stride + columns, dtype=torch.bfloat16, device=DEVICE)
    return memory.as_strided((count, columns), (stride, 1))


def test_row_strides_past_2_to_the_31(random: torch.Generator) -> None:
    room_for(2 * 2 * (2**31 + 128))
    case = Case(random, (0, 2))
    values, weight = case.draw(2, 72), case.draw(2, 136, 72)
    x, out = far_rows(2, 72), far_rows(2, 136)
    x.copy_(values)
    out.fill_(NAN)
    grouped_gemm.product(x, weight.to(DEVICE), case.ends, out=out)
    w = weight.double()
    size = case.times(values.double().abs(), w.abs())
    assert_near(out.cpu(), case.times(values.double(), w), SUMS * size)
    found = grouped_gemm.weight_gradient(out, x, case.ends).cpu()
    g, rows = out.cpu().double(), values.double()
    assert_near(found, case.gradient(g, rows), SUMS * case.gradient(g.abs(), rows.abs()))


def test_experts_past_2_to_the_31(random: torch.Generator) -> None:
    experts, num_in, num_out = 17, 8192, 16384
    room_for(2 * 2 * experts * num_in * num_out)
    case = Case(random, (1,) + (0,) * (experts - 2) + (40,))
    values, last = case.draw(41, num_in), case.draw(num_out, num_in)
    weight = torch.empty(experts, num_out, num_in, dtype=torch.bfloat16, device=DEVICE)
    weight[[0, -1]] = last.to(DEVICE)
    assert weight.numel() > 2**31
    x = values.to(DEVICE)
    y = grouped_gemm.product(x, weight, case.ends)
    assert relative_norm(y, x.double() @ last.to(DEVICE).double().t()) < ROUNDING[torch.bfloat16]
    back = grouped_gemm.input_gradient(y, weight, case.ends)
    assert relative_norm(back, y.double() @ last.to(DEVICE).double()) < ROUNDING[torch.bfloat16]
    grouped_gemm.weight_gradient(y, x, case.ends, out=weight.fill_(NAN))
    assert relative_norm(weight[-1], y[1:].double().t() @ x[1:].double()) < ROUNDING[torch.bfloat16]
    for expert in range(1, experts - 1):
        assert not weight[expert].any(), f"expert {expert} has no rows"


# ---- streams, graphs, torch.library


def test_the_launch_is_on_the_current_stream(random: torch.Generator) -> None:
    case = Case(random, (130, 40))
    given, weight = case.draw(170, 64).to(DEVICE), case.draw(2, 128, 64).to(DEVICE)
    expected = grouped_gemm.product(given, weight, case.ends)
    late = torch.full_like(given, NAN)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        late.copy_(given)
        found = grouped_gemm.product(late, weight, case.ends)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found, expected)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """What runs again what ``run`` launches now."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def test_a_cuda_graph_holds_the_launches_and_reads_the_groups_anew(random: torch.Generator) -> None:
    case = Case(random, (130, 0, 40), top_k=2)
    out = Guarded.poisoned(170, 136, torch.bfloat16)
    of_weight = torch.full((3, 136, 72), NAN, device=DEVICE)
    source = case.draw(case.num_tokens, 72).to(DEVICE)
    weight, w = case.weight(136, 72)

    def run() -> None:
        options: dict[str, Any] = {"slots": case.slots}
        grouped_gemm.product(source, weight, case.ends, gathered=True, out=out.matrix, **options)
        grouped_gemm.weight_gradient(
            out.matrix, source, case.ends, gathers_rows=True, out=of_weight, **options
        )

    run()  # what is loaded at the first launch is loaded outside the graph
    torch.cuda.synchronize()
    replay = captured(run)
    for counts in ((130, 0, 40), (0, 1, 169), (57, 57, 56)):
        case.counts = counts
        case.ends.copy_(torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32))
        values = case.draw(case.num_tokens, 72)
        source.copy_(values)
        out.matrix.fill_(NAN)
        replay()
        rows = values[case.slot // 2].double()
        y = out.read()
        case.compare(y, case.times(rows, w), SUMS * case.times(rows.abs(), w.abs()))
        expected, size = (case.gradient(f(y.double()), f(rows)) for f in (torch.clone, torch.abs))
        assert_near(of_weight.cpu(), expected, SUMS * size)


def test_no_call_waits_for_the_device(random: torch.Generator) -> None:
    run = everything(Case(random, (130, 0, 40), top_k=2), 64, 128)
    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("top_k", [0, 2])
def test_operators_and_their_gradients(random: torch.Generator, top_k: int) -> None:
    """An expert of two products, by autograd; in float64 the plain definition is, on the CPU."""
    case = Case(random, (130, 0, 40), top_k=top_k)
    source = case.draw(case.num_tokens if top_k else 170, 64)
    given = [source, case.draw(3, 256, 64), case.draw(3, 256), case.draw(3, 64, 128), case.draw(3, 64)]
    scale, grad = case.draw(170, dtype=torch.float32), case.draw(170, 64)

    def step(device: torch.device, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [each.to(device, dtype).requires_grad_() for each in given]
        leaves.append(scale.to(device, dtype).requires_grad_())
        x, w1, b1, w2, b2, weight = leaves
        slots = None if case.slots is None else RowSlots(slot_N=case.slot.int().to(device), top_k=top_k)
        ends = case.ends.to(device)
        _, active = grouped_hidden(x, w1, ends, activation="swiglu", bias_EG=b1, slots=slots)
        y = grouped_product(active, w2, ends, bias_EO=b2, scale=weight, slots=slots)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(device, dtype))]

    found, expected = step(DEVICE, None), step(CPU, torch.float64)
    for got, right in zip(found, expected, strict=True):
        assert relative_norm(got, right) <= 4 * ROUNDING[torch.bfloat16]


def test_operators_are_well_formed(random: torch.Generator) -> None:
    case = Case(random, (5, 0, 3), torch.float16)
    x, w = case.draw(8, 16).to(DEVICE).requires_grad_(), case.draw(3, 24, 16).to(DEVICE).requires_grad_()
    torch.library.opcheck(torch.ops.pmoe.grouped_product, (x, w, case.ends, None, None, None, 1, False))


def test_the_kernels_of_both_paths_are_loaded() -> None:
    (device, *_) = status().devices
    found = {each.name: each for each in device.kernels if each.name.startswith("grouped_gemm.")}
    hopper = {name for name in found if name.startswith("grouped_gemm.sm_90a.")}
    alone = {name for name in hopper if not name.endswith(".pairs")}
    assert alone and {f"{name}.pairs" for name in alone} == hopper - alone
    assert {name.replace("sm_90a", "sm_80") for name in alone} == found.keys() - hopper
    for name, kernel in found.items():
        refused = name in hopper and device.capability != (9, 0)
        assert (kernel.refusal is not None) == refused, f"{name}: {kernel.refusal}"
        assert kernel.local_bytes == 0, f"{name}: {kernel.local_bytes} bytes of local memory"


def test_the_rule_for_pairs_changes_no_bit(monkeypatch: pytest.MonkeyPatch, random: torch.Generator) -> None:
    """Whatever it picks: a tile is the same sum in the same order."""
    run = everything(Case(random, (130, 0, 700, 3), top_k=2), 264, 128)
    expected = run()
    monkeypatch.setattr(launch, "CLUSTER", 0)
    for found, other in zip(run(), expected, strict=True):
        assert torch.equal(found, other)


# ---- before any launch


class Fine:
    """Operands that fit, for the tests to spoil one of."""

    def __init__(self) -> None:
        self.x = torch.ones(10, 64, dtype=torch.bfloat16).to(DEVICE)
        self.grad = torch.ones(10, 128, dtype=torch.bfloat16).to(DEVICE)
        self.w = torch.ones(2, 128, 64, dtype=torch.bfloat16).to(DEVICE)
        self.long = torch.ones(4096, dtype=torch.bfloat16).to(DEVICE)
        self.ends = torch.tensor([4, 10], dtype=torch.int32).to(DEVICE)
        self.slots = RowSlots(slot_N=torch.arange(10, dtype=torch.int32).to(DEVICE), top_k=2)
        self.scale = torch.ones(10).to(DEVICE)
        self.many = torch.ones(2, 128, 64, dtype=torch.float32).to(DEVICE)

    def product(self, **other: Any) -> Tensor:
        given = {"rows": self.x, "weight_EOI": self.w, "ends_E": self.ends, **other}
        return grouped_gemm.product(**given)

    def back(self, **other: Any) -> Tensor:
        return grouped_gemm.weight_gradient(
            **{"grad": self.grad, "rows": self.x, "ends_E": self.ends, **other}
        )

    def way_back(self, **other: Any) -> Any:
        given = {
            "grad": self.grad, "weight_EMH": self.w, "hidden_NG": self.x, "scale": self.scale,
            "ends_E": self.ends, "activation": "relu", **other,
        }  # fmt: skip
        return grouped_gemm.hidden_gradient(**given)


BAD: dict[str, tuple[Callable[[Fine], object], str]] = {
    "rows' address": (
        lambda f: f.product(rows=f.long[1:641].view(10, 64)),
        r"rows at address 0x[0-9a-f]+ must be aligned to 16",
    ),
    "rows' stride": (
        lambda f: f.product(rows=f.long[:680].view(10, 68)[:, :64]),
        r"rows of shape \(10, 64\) and strides \(68, 1\) of 2 bytes must have",
    ),
    "rows' columns": (
        lambda f: f.product(rows=f.long[:640].view(64, 10).t()),
        r"strides \(1, 10\) of 2 bytes must have a column stride of 1",
    ),
    "rows' width": (
        lambda f: f.product(rows=f.grad),
        r"rows of shape \(10, 128\) must have the shape \(rows, 64\)",
    ),
    "rows' dtype": (
        lambda f: f.product(rows=f.x.to("cpu", torch.float16).to(DEVICE)),
        "float16 must be torch.bfloat16",
    ),
    "rows' device": (lambda f: f.product(rows=f.x.cpu()), "rows on cpu must be on cuda"),
    "dtype": (
        lambda f: f.product(rows=f.many[0], weight_EOI=f.many),
        r"dtype torch.float32: the kernels take bfloat16",
    ),
    "weight's address": (
        lambda f: f.product(rows=f.long[:80].view(10, 8), weight_EOI=f.long[1:129].view(2, 8, 8)),
        r"weight at address 0x[0-9a-f]+ must be aligned to 16",
    ),
    "weight's strides": (
        lambda f: f.product(rows=f.grad, weight_EOI=f.w.transpose(1, 2)),
        r"weight of shape .* and strides \(8192, 1, 64\) must be contiguous",
    ),
    "out-features": (
        lambda f: f.product(rows=f.x[:1], weight_EOI=f.long[: 2 * 12 * 64].view(2, 12, 64)),
        r"out_features \(12\) must be a multiple of 8",
    ),
    "out's shape": (lambda f: f.product(out=f.x), r"out of shape \(10, 64\) must have the shape \(10, 128\)"),
    "out's dtype": (
        lambda f: f.product(out=f.many[0, :20].view(10, 128)),
        "out of dtype torch.float32 must be",
    ),
    "out's stride": (
        lambda f: f.product(out=f.long[:1320].view(10, 132)[:, :128]),
        r"out of shape \(10, 128\) and strides \(132, 1\) of 2 bytes must have",
    ),
    "out's address": (
        lambda f: f.product(out=f.long[4:1284].view(10, 128)),
        r"out at address 0x[0-9a-f]+ must be aligned to 16",
    ),
    "active's shape": (
        lambda f: f.way_back(active=f.grad),
        r"active of shape \(10, 128\) must have the shape \(10, 64\)",
    ),
    "ends' device": (lambda f: f.product(ends_E=f.ends.cpu()), "ends on cpu must be on cuda"),
    "ends' dtype": (lambda f: f.product(ends_E=f.ends.cpu().long().to(DEVICE)), "ends of dtype torch.int64"),
    "ends' number": (
        lambda f: f.product(ends_E=f.ends[:1]),
        r"ends of shape \(1,\) must have the shape \(2,\)",
    ),
    "slots' device": (
        lambda f: f.product(slots=RowSlots(slot_N=f.slots.slot_N.cpu(), top_k=2)),
        "slot on cpu must be on cuda",
    ),
    "slots' number": (
        lambda f: f.product(slots=RowSlots(slot_N=f.slots.slot_N[:9], top_k=2)),
        r"slot of shape \(9,\) must have the shape \(10,\)",
    ),
    "scale's dtype": (
        lambda f: f.product(scale=torch.ones(10, dtype=torch.float64).to(DEVICE)),
        "scale of dtype torch.float64 must be torch.float32",
    ),
    "scale's number": (lambda f: f.product(scale=f.scale[:9]), r"shape \(9,\) must have the shape \(10,\)"),
    "scale's device": (lambda f: f.product(scale=f.scale.cpu()), "scale on cpu must be on cuda"),
    "bias": (
        lambda f: f.product(bias_EO=f.w[:, 0]),
        r"bias of shape \(2, 64\) must have the shape \(2, 128\)",
    ),
    "gradient's rows": (
        lambda f: f.back(grad=f.grad[:9]),
        r"grad of 9 rows must have as many as rows \(10\)",
    ),
    "accumulating": (
        lambda f: f.back(out=f.w, accumulate=True),
        "out of dtype torch.bfloat16 must be float32 to accumulate",
    ),
    "gradient's place": (
        lambda f: f.back(out=f.w[:1]),
        r"out of shape \(1, 128, 64\) must have the shape \(2, 128, 64\)",
    ),
    "hidden": (
        lambda f: f.way_back(hidden_NG=f.grad),
        r"hidden of shape \(10, 128\) must have the shape \(10, 64\)",
    ),
    "hidden's address": (
        lambda f: f.way_back(hidden_NG=f.long[1:641].view(10, 64)),
        r"hidden at address 0x[0-9a-f]+ must be aligned to 16",
    ),
}


@pytest.mark.parametrize("call, message", BAD.values(), ids=BAD.keys())
def test_bad_operands_are_a_value_error_before_any_launch(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Fine], object], message: str
) -> None:
    fine = Fine()
    monkeypatch.setattr(products, "launch", lambda *_, **__: pytest.fail("a launch"))
    with pytest.raises(ValueError, match=message):
        call(fine)
