"""The permute kernels on a GPU: every element against float64, on poisoned memory, whatever shape and stride.

Letters: T tokens, K choices, N routed rows, M columns.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from bench import permutes
from pmoe.kernels import extension
from pmoe.kernels.permute import operators, permute, refusal, unpermute
from pmoe.warn import GIVEN
from tests.gpu.support import DEVICE, LONG, NEEDS_GPU, poison_memory

pytestmark = NEEDS_GPU

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NAN = float("nan")

# tokens, choices, columns, share of dropped slots
SHAPES = {
    "top-1": (65, 1, 64, 0.0),
    "top-2": (97, 2, 256, 0.0),
    "top-4, dropped": (130, 4, 1024, 0.3),
    "top-8": (33, 8, 2048, 0.0),
    "top-3 of 2880": (50, 3, 2880, 0.1),
    "odd vectors": (41, 4, 8 * 37, 0.1),
    "one vector": (300, 2, 8, 0.2),
    "wide": (9, 2, 16384, 0.0),
    "many choices": (5, 256, 64, 0.5),
    "all dropped": (12, 2, 128, 1.0),
    "one token": (1, 4, 4096, 0.0),
    "no tokens": (0, 2, 64, 0.0),
    "no columns": (4, 2, 0, 0.0),
    "no choices": (4, 0, 64, 0.0),
}


@pytest.fixture(autouse=True)
def kernels_run() -> Iterator[None]:
    """Every test sees the kernels: a fall to PyTorch operations fails it."""
    reason = refusal(DEVICE, torch.bfloat16, 2)
    if reason is not None:
        if os.environ.get("PMOE_CUDA") == "0":
            pytest.skip(f"PMOE_CUDA=0: {reason}")
        pytest.fail(reason)
    GIVEN.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="pmoe: rows are copied and summed without")
        yield


class Problem:
    """Fresh random inputs: each call of the constructor draws others."""

    def __init__(self, shape: tuple[int, int, int, float], dtype: torch.dtype, gap: int = 0) -> None:
        self.num_tokens, self.top_k, self.columns, dropped = shape
        slots = self.num_tokens * self.top_k
        kept = torch.rand(slots) >= dropped
        self.num_rows = int(kept.sum())
        outside = torch.tensor([-1, self.num_rows, self.num_rows + 7, 2**31 - 1, -(2**31)])
        position = outside[torch.randint(5, (slots,))]
        position[kept] = torch.randperm(self.num_rows)
        self.position = position.view(self.num_tokens, self.top_k).to(DEVICE, torch.int32)
        self.kept = kept.view(self.num_tokens, self.top_k).to(DEVICE)
        weight = torch.randn(self.num_tokens, self.top_k, device=DEVICE)
        self.weight = torch.where(self.kept, weight, NAN)
        self.dtype, self.gap = dtype, gap
        self.x, self.rows = self.draw(self.num_tokens), self.draw(self.num_rows)

    def draw(self, count: int) -> Tensor:
        return self.poisoned(count).normal_()

    def poisoned(self, count: int) -> Tensor:
        """Columns between the rows of a strided matrix are NaN, too."""
        whole = torch.full((count, self.columns + self.gap), NAN, device=DEVICE, dtype=self.dtype)
        return whole[:, : self.columns]

    def as_float64(self, weighted: bool) -> Tensor:
        """The weights, 0 for dropped slots."""
        weight = self.weight.double() if weighted else torch.ones_like(self.weight, dtype=torch.float64)
        return torch.where(self.kept, weight, 0)

    def permuted(self, x: Tensor, weighted: bool) -> Tensor:
        """In float64."""
        rows = torch.full((self.num_rows, self.columns), NAN, device=DEVICE, dtype=torch.float64)
        for k in range(self.top_k):
            kept = self.kept[:, k]
            weight = self.as_float64(weighted)[kept, k, None]
            rows[self.position[kept, k].long()] = x[kept].double() * weight
        return rows

    def unpermuted(self, rows: Tensor, weighted: bool) -> tuple[Tensor, Tensor]:
        """(the sums in float64, those of the terms' absolute values)"""
        y = torch.zeros(self.num_tokens, self.columns, device=DEVICE, dtype=torch.float64)
        magnitude = torch.zeros_like(y)
        for k in range(self.top_k):
            kept = self.kept[:, k]
            term = rows[self.position[kept, k].long()].double() * self.as_float64(weighted)[kept, k, None]
            y[kept] += term
            magnitude[kept] += term.abs()
        return y, magnitude

    def dots(self, of_tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        dots = torch.zeros(self.num_tokens, self.top_k, device=DEVICE, dtype=torch.float64)
        magnitude = torch.zeros_like(dots)
        for k in range(self.top_k):
            kept = self.kept[:, k]
            products = of_tokens[kept].double() * rows[self.position[kept, k].long()].double()
            dots[kept, k], magnitude[kept, k] = products.sum(1), products.abs().sum(1)
        return dots, magnitude


def assert_near(got: Tensor, expected: Tensor, lost: Tensor | float = 0.0) -> None:
    """One rounding to got's type, beside what sums have ``lost``. NaN is never near."""
    assert got.shape == expected.shape
    tiny = 2.0**-24 if got.dtype == torch.float16 else 2.0**-126  # half a unit below the normal numbers
    bound = ROUNDING[got.dtype] * expected.abs() * 1.001 + lost + tiny
    wrong = ~((got.double() - expected).abs() <= bound)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}: {got[wrong][:4]}, {expected[wrong][:4]}"


def assert_gaps_untouched(matrix: Tensor, gap: int) -> None:
    if gap and matrix.shape[0] > 1:
        between = matrix.as_strided(
            (matrix.shape[0] - 1, gap), (matrix.stride(0), 1), matrix.storage_offset() + matrix.shape[1]
        )
        assert between.isnan().all()


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def shape(request: pytest.FixtureRequest) -> tuple[int, int, int, float]:
    return request.param  # type: ignore[no-any-return]


# ---- values, every element


@pytest.mark.sanitize
@pytest.mark.parametrize("gap", [0, 24], ids=["packed", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_launches(shape: tuple[int, int, int, float], dtype: torch.dtype, gap: int) -> None:
    p = Problem(shape, dtype, gap)
    for weighted in (False, True):
        weight = p.weight if weighted else None
        rows, y = p.poisoned(p.num_rows), p.poisoned(p.num_tokens)
        permutes.launch_permute(p.x, p.position, weight, rows)
        permutes.launch_unpermute(p.rows, p.position, weight, y)
        assert_near(rows, p.permuted(p.x, weighted))
        expected, magnitude = p.unpermuted(p.rows, weighted)
        assert_near(y, expected, magnitude * (p.top_k + 2) * 2.0**-24)
        assert_gaps_untouched(rows, gap)
        assert_gaps_untouched(y, gap)


@pytest.mark.sanitize
@pytest.mark.parametrize("gap", [0, 24], ids=["packed", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_launches(shape: tuple[int, int, int, float], dtype: torch.dtype, gap: int) -> None:
    p = Problem(shape, dtype, gap)
    d_x, d_rows = p.poisoned(p.num_tokens), p.poisoned(p.num_rows)
    d_weights = torch.full((2, p.num_tokens, p.top_k), NAN, device=DEVICE)
    permutes.launch_permute_backward(p.rows, p.x, p.position, p.weight, d_x, d_weights[0])
    permutes.launch_unpermute_backward(p.x, p.rows, p.position, p.weight, d_rows, d_weights[1])
    expected, magnitude = p.unpermuted(p.rows, True)
    assert_near(d_x, expected, magnitude * (p.top_k + 2) * 2.0**-24)
    assert_near(d_rows, p.permuted(p.x, True))
    expected, magnitude = p.dots(p.x, p.rows)
    for d_weight in d_weights:
        assert_near(d_weight, expected, magnitude * 2e-5)
        assert not d_weight[~p.kept].any()
    assert_gaps_untouched(d_x, gap)
    assert_gaps_untouched(d_rows, gap)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_any_number_of_parts_gives_the_same(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What bench_permute sweeps."""
    monkeypatch.setattr(operators, "PARTS", parts)
    p = Problem((100, 4, 4096, 0.1), torch.bfloat16)
    rows, y = p.poisoned(p.num_rows), p.poisoned(p.num_tokens)
    d_x, d_rows = p.poisoned(p.num_tokens), p.poisoned(p.num_rows)
    d_weights = torch.full((2, p.num_tokens, p.top_k), NAN, device=DEVICE)
    permutes.launch_permute(p.x, p.position, p.weight, rows)
    permutes.launch_unpermute(p.rows, p.position, p.weight, y)
    permutes.launch_permute_backward(p.rows, p.x, p.position, p.weight, d_x, d_weights[0])
    permutes.launch_unpermute_backward(p.x, p.rows, p.position, p.weight, d_rows, d_weights[1])
    monkeypatch.setattr(operators, "PARTS", 0)
    assert torch.equal(rows, permute(p.x, p.position, p.num_rows, p.weight)) and torch.equal(rows, d_rows)
    assert torch.equal(y, unpermute(p.rows, p.position, p.weight)) and torch.equal(y, d_x)
    expected, magnitude = p.dots(p.x, p.rows)
    for d_weight in d_weights:
        assert_near(d_weight, expected, magnitude * 2e-5)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_operators_and_their_gradients(
    shape: tuple[int, int, int, float], dtype: torch.dtype, weighted: bool
) -> None:
    """By autograd, into memory that held NaN."""
    p = Problem(shape, dtype)
    poison_memory()
    x, r = p.x.clone().requires_grad_(), p.rows.clone().requires_grad_()
    w = torch.where(p.kept, p.weight, 1).requires_grad_()
    p.weight = w.detach()
    weight = (w,) if weighted else ()
    rows, y = permute(x, p.position, p.num_rows, *weight), unpermute(r, p.position, *weight)
    assert_near(rows.detach(), p.permuted(p.x, weighted))
    found = torch.autograd.grad([rows, y], [x, r, *weight], [p.rows, p.x])
    expected, magnitude = p.unpermuted(p.rows, weighted)
    lost = magnitude * (p.top_k + 2) * 2.0**-24
    assert_near(y.detach(), expected, lost)
    assert_near(found[0], expected, lost)
    assert_near(found[1], p.permuted(p.x, weighted))
    if weighted:
        expected, magnitude = p.dots(p.x, p.rows)
        assert_near(found[2], 2 * expected, 2 * magnitude * 2e-5)


def test_copies_are_bit_by_bit() -> None:
    p = Problem((64, 2, 512, 0.0), torch.bfloat16)
    bits = torch.randint(-(2**15), 2**15, (64, 512), device=DEVICE, dtype=torch.int16)  # NaN among them
    rows = permute(bits.view(torch.bfloat16), p.position, p.num_rows).view(torch.int16)
    for k in range(2):
        assert torch.equal(rows[p.position[:, k].long()], bits)


def test_one_expert_keeps_the_order_of_tokens() -> None:
    x = torch.randn(1000, 512, device=DEVICE)
    position = torch.arange(1000, dtype=torch.int32, device=DEVICE).view(-1, 1)
    assert torch.equal(permute(x, position, 1000), x)
    assert torch.equal(unpermute(x, position), x)


def test_what_is_not_finite_in_a_dropped_slot_touches_nothing() -> None:
    p = Problem((40, 2, 256, 0.5), torch.float32)
    alone = ~p.kept.any(1)
    p.x[alone] = float("inf")
    d_rows, d_weight = p.poisoned(p.num_rows), torch.full_like(p.weight, NAN)
    permutes.launch_unpermute_backward(p.x, p.rows, p.position, p.weight, d_rows, d_weight)
    assert alone.any() and not d_weight[alone].any() and d_rows.isfinite().all()


def test_an_expanded_gradient() -> None:
    p = Problem((40, 2, 64, 0.2), torch.bfloat16)
    w = torch.where(p.kept, p.weight, 1).requires_grad_()
    r = p.rows.clone().requires_grad_()
    unpermute(r, p.position, w).sum().backward()
    ones = torch.ones(40, 64, device=DEVICE)
    expected, magnitude = p.dots(ones, p.rows)
    assert w.grad is not None and r.grad is not None
    assert_near(w.grad, expected, magnitude * 2e-5)


# ---- bits


def everything(p: Problem) -> list[Tensor]:
    x, r, w = (t.clone().requires_grad_() for t in (p.x, p.rows, torch.where(p.kept, p.weight, 1)))
    outputs = [permute(x, p.position, p.num_rows, w), unpermute(r, p.position, w)]
    return [
        *(t.detach() for t in outputs),
        *torch.autograd.grad(outputs[:1], [x, w], [p.rows]),
        *torch.autograd.grad(outputs[1:], [r, w], [p.x]),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_three_runs_give_the_same_bits(dtype: torch.dtype) -> None:
    p = Problem((3000, 6, 2048, 0.1), dtype)
    first = everything(p)
    for _ in range(2):
        poison_memory()
        for got, expected in zip(everything(p), first, strict=True):
            assert torch.equal(got, expected)


def test_a_token_gets_the_same_bits_in_any_batch() -> None:
    p = Problem((512, 2, 4096, 0.0), torch.bfloat16)
    y, d_weight = unpermute(p.rows, p.position, p.weight), torch.empty_like(p.weight)
    permutes.launch_permute_backward(p.rows, p.x, p.position, p.weight, torch.empty_like(p.x), d_weight)
    for few in (slice(0, 1), slice(100, 103), slice(17, 400)):
        position, weight = p.position[few], p.weight[few]
        d_x, part = p.poisoned(position.shape[0]), torch.full_like(weight, NAN)
        permutes.launch_permute_backward(p.rows, p.x[few], position, weight, d_x, part)
        assert torch.equal(unpermute(p.rows, position, weight), y[few])
        assert torch.equal(d_x, y[few]) and torch.equal(part, d_weight[few])


# ---- far apart


def far_rows(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows that are more than 2**31 elements apart, NaN; only they are ever written or read."""
    stride = 2**31 + 64
    needed = ((count - 1) * stride + columns) * dtype.itemsize
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * needed + 2**30:
        pytest.skip(f"{2 * needed} bytes are needed, {free} are free")
    rows = torch.empty((count - 1) * stride + columns, dtype=dtype, device=DEVICE)
    return rows.as_strided((count, columns), (stride, 1)).fill_(NAN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_row_strides_past_2_to_the_31(dtype: torch.dtype) -> None:
    columns, weight = 520, torch.tensor([[2.0], [3.0]], device=DEVICE)
    position = torch.tensor([[1], [0]], dtype=torch.int32, device=DEVICE)
    values = torch.randn(2, columns, device=DEVICE).to(dtype)
    far = far_rows(2, columns, dtype)
    far.copy_(values)
    out = far_rows(2, columns, dtype)
    expected = (values.float() * weight).to(dtype)
    d_weight = torch.full_like(weight, NAN)
    for move in (
        lambda: permutes.launch_permute(far, position, weight, out),
        lambda: permutes.launch_unpermute_backward(far, values, position, weight, out, d_weight),
        lambda: permutes.launch_unpermute_backward(values, far, position, weight, out, d_weight),
    ):
        out.fill_(NAN)
        move()
        assert torch.equal(out, expected.flip(0))
    expected = (values.flip(0).float() * weight).to(dtype)
    for move in (
        lambda: permutes.launch_unpermute(far, position, weight, out),
        lambda: permutes.launch_permute_backward(far, values, position, weight, out, d_weight),
        lambda: permutes.launch_permute_backward(values, far, position, weight, out, d_weight),
    ):
        out.fill_(NAN)
        move()
        assert torch.equal(out, expected)
    dots = (values.double() * values.flip(0).double()).sum(1, keepdim=True)
    magnitude = (values.double() * values.flip(0).double()).abs().sum(1, keepdim=True)
    assert_near(d_weight, dots, magnitude * 2e-5)


def test_more_than_2_to_the_31_elements() -> None:
    num_tokens, columns = 300_000, 4096
    free, _ = torch.cuda.mem_get_info()
    if free < 14 * 2**30:
        pytest.skip(f"14 GiB are needed, {free} bytes are free")
    x = torch.randint(-128, 128, (num_tokens, columns), device=DEVICE, dtype=torch.int8).to(torch.bfloat16)
    position = torch.randperm(2 * num_tokens, device=DEVICE).to(torch.int32).view(num_tokens, 2)
    rows = permute(x, position, 2 * num_tokens)
    assert rows.numel() > 2**31
    for at in torch.arange(num_tokens, device=DEVICE).split(50_000):
        for k in range(2):
            assert torch.equal(rows[position[at, k].long()], x[at])
    assert torch.equal(unpermute(rows, position), 2 * x)


# ---- streams, graphs, torch.library


def test_the_launch_is_on_the_current_stream() -> None:
    p = Problem((256, 2, 1024, 0.0), torch.bfloat16)
    expected = permute(p.x, p.position, p.num_rows)
    torch.cuda.synchronize()
    late = torch.full_like(p.x, NAN)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        late.copy_(p.x)
        rows = permute(late, p.position, p.num_rows)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(rows, expected)


def test_a_cuda_graph_holds_the_launches() -> None:
    p = Problem((256, 2, 1024, 0.1), torch.bfloat16)
    rows, y = p.poisoned(p.num_rows), p.poisoned(p.num_tokens)
    d_weight = torch.full_like(p.weight, NAN)

    def run() -> None:
        permutes.launch_permute(p.x, p.position, p.weight, rows)
        permutes.launch_permute_backward(rows, p.x, p.position, p.weight, y, d_weight)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    p.x.normal_()
    graph.replay()
    assert_near(rows, p.permuted(p.x, True))
    expected, magnitude = p.dots(p.x, rows)
    assert_near(d_weight, expected, magnitude * 2e-5)


def test_operators_are_well_formed() -> None:
    p = Problem((16, 2, 32, 0.2), torch.float32)
    weight = torch.where(p.kept, p.weight, 1).requires_grad_()
    x, rows = p.x.clone().requires_grad_(), p.rows.clone().requires_grad_()
    ops = torch.ops.pmoe
    torch.library.opcheck(ops.permute, (x, p.position, p.num_rows, weight))
    torch.library.opcheck(ops.unpermute, (rows, p.position, weight))
    torch.library.opcheck(ops.permute_backward, (p.rows, p.x, p.position, weight.detach()))
    torch.library.opcheck(ops.unpermute_backward, (p.x, p.rows, p.position, weight.detach()))


def test_no_call_waits_for_the_device() -> None:
    p = Problem((64, 2, 256, 0.1), torch.bfloat16)
    everything(p)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything(p)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- where the kernels refuse


def test_pytorch_operations_give_the_same_and_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Problem((200, 3, 256, 0.2), torch.bfloat16)
    by_kernels = everything(p)
    monkeypatch.setattr(operators, "refusal", lambda *_: "the test wants it so")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plain = everything(p)
        everything(p)
    texts = [str(each.message) for each in told if "the test wants it so" in str(each.message)]
    assert len(texts) == 4 and len(set(texts)) == 4  # each operator once
    for got, expected in zip(by_kernels, plain, strict=True):
        assert (got.double() - expected.double()).norm() <= 1e-2 * expected.double().norm()
    GIVEN.clear()


def test_float64_runs_as_pytorch_operations() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(4, 3, dtype=torch.float64, device=DEVICE)
        position = torch.tensor([[1], [0], [3], [2]], device=DEVICE)
        assert torch.equal(permute(x, position, 4)[position[:, 0]], x)


FINE = (33, 2, 64, 0.0)

BAD: dict[str, tuple[Callable[[Problem], object], str]] = {
    "row bytes": (lambda p: permute(p.x[:, :12].contiguous(), p.position, p.num_rows), r"12 x 2 = 24"),
    "row stride": (
        lambda p: permute(p.x.view(-1)[: 33 * 20].view(33, 20)[:, :16], p.position, 66),
        r"strides \(20, 1\) of 2 bytes",
    ),
    "column stride": (
        lambda p: unpermute(p.rows.t().contiguous().t(), p.position),
        r"strides \(1, 66\) .* adjacent columns",
    ),
    "address": (lambda p: permute(p.x.view(-1)[8 * 33 + 1 :][: 33 * 8].view(33, 8), p.position, 66), "0x"),
    "position's dtype": (lambda p: permute(p.x, p.position.long(), p.num_rows), "torch.int64"),
    "position's strides": (
        lambda p: permute(p.x, p.position.t().contiguous().t(), p.num_rows),
        r"\(1, 33\)",
    ),
    "weight's dtype": (lambda p: unpermute(p.rows, p.position, p.weight.double()), "float64"),
    "position's device": (lambda p: permute(p.x, p.position.cpu(), p.num_rows), "cuda:0 .* cpu"),
    "tokens": (
        lambda p: permute(p.x[:7], p.position, p.num_rows),
        r"x of shape \(7, 64\) must have the shape \(33, M\)",
    ),
}


@pytest.mark.parametrize("call, message", BAD.values(), ids=BAD.keys())
def test_bad_input_is_a_value_error_before_any_launch(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Problem], object], message: str
) -> None:
    p = Problem(FINE, torch.bfloat16)
    monkeypatch.setattr(extension, "module", lambda: pytest.fail("a launch"))
    with pytest.raises(ValueError, match=message):
        call(p)
    torch.cuda.synchronize()
