"""Permute and unpermute: the CUDA source on the CPU, and the operators against slow loops in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench import permutes
from pmoe.kernels import extension
from pmoe.kernels.permute import operators, permute, refusal, unpermute
from pmoe.kernels.permute.launches import check_rows_memory
from pmoe.warn import GIVEN
from tests.cuda import disassembly
from tests.cuda.compiled import compile_and_run
from tests.unit.test_imports import newly_imported

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def draw_positions(num_tokens: int, top_k: int, dropped: float = 0.0, seed: int = 0) -> tuple[Tensor, int]:
    """Draws random positions of rows: returns ((T, K) int32 positions, the number of rows)."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(num_tokens * top_k, generator=generator) >= dropped
    num_rows = int(kept.sum())
    outside = torch.tensor([-1, num_rows, num_rows + 7, 2**31 - 1])
    position = outside[torch.randint(4, (num_tokens * top_k,), generator=generator)]
    position[kept] = torch.randperm(num_rows, generator=generator)
    return position.to(torch.int32).view(num_tokens, top_k), num_rows


# ---- slow loops


def loop_permute(x: Tensor, position: Tensor, num_rows: int, weight: Tensor | None) -> Tensor:
    rows = torch.full((num_rows, x.shape[1]), float("nan"), dtype=torch.float64)
    for t in range(position.shape[0]):
        for k in range(position.shape[1]):
            p = int(position[t, k])
            if 0 <= p < num_rows:
                rows[p] = x[t].double() * (1 if weight is None else weight[t, k].double())
    return rows


def loop_unpermute(rows: Tensor, position: Tensor, weight: Tensor | None) -> Tensor:
    y = torch.zeros(position.shape[0], rows.shape[1], dtype=torch.float64)
    for t in range(position.shape[0]):
        for k in range(position.shape[1]):
            p = int(position[t, k])
            if 0 <= p < rows.shape[0]:
                y[t] += rows[p].double() * (1 if weight is None else weight[t, k].double())
    return y


def loop_dots(of_tokens: Tensor, rows: Tensor, position: Tensor) -> Tensor:
    dots = torch.zeros(position.shape, dtype=torch.float64)
    for t in range(position.shape[0]):
        for k in range(position.shape[1]):
            p = int(position[t, k])
            if 0 <= p < rows.shape[0]:
                dots[t, k] = (of_tokens[t].double() * rows[p].double()).sum()
    return dots


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype, terms: int = 1) -> None:
    """Checks a result with an error of one rounding in ``dtype`` and of ``terms`` roundings in float32."""
    wide = torch.promote_types(dtype, torch.float32)
    assert got.shape == expected.shape
    scale = expected.abs().max().clamp(min=1) if expected.numel() else 1
    bound = 1.01 * ROUNDING[dtype] * expected.abs() + 4 * terms * ROUNDING[wide] * scale
    wrong = ~((got.double() - expected).abs() <= bound)
    assert not wrong.any(), f"{got[wrong][:4]} must be {expected[wrong][:4]}"


SHAPES = {
    "top-2": (5, 2, 0.0),
    "top-1": (7, 1, 0.0),
    "dropped slots": (9, 3, 0.4),
    "all dropped": (4, 2, 1.0),
    "no tokens": (0, 2, 0.0),
    "one token": (1, 4, 0.0),
    "no choices": (3, 0, 0.0),
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def shape(request: pytest.FixtureRequest) -> tuple[int, int, float]:
    return request.param  # type: ignore[no-any-return]


# ---- values


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_both_equal_the_loops(shape: tuple[int, int, float], dtype: torch.dtype, weighted: bool) -> None:
    num_tokens, top_k, dropped = shape
    position, num_rows = draw_positions(num_tokens, top_k, dropped)
    weight = draw(num_tokens, top_k, dtype=torch.float32, seed=3) if weighted else None
    x, rows = draw(num_tokens, 6, dtype=dtype, seed=1), draw(num_rows, 6, dtype=dtype, seed=2)
    moved, y = permute(x, position, num_rows, weight), unpermute(rows, position, weight)
    assert moved.dtype == y.dtype == dtype
    assert_near(moved, loop_permute(x, position, num_rows, weight), dtype)
    assert_near(y, loop_unpermute(rows, position, weight), dtype, terms=top_k)


def test_the_examples_of_the_docstrings() -> None:
    x, position = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [2, 5]], dtype=torch.int32)
    assert permute(x, position, 3).tolist() == [[1], [1], [2]]
    rows, position = torch.tensor([[1.0], [10.0], [99.0]]), torch.tensor([[1, 0], [2, 3]], dtype=torch.int32)
    weight = torch.tensor([[2.0, 3.0], [4.0, 5.0]])
    assert unpermute(rows, position, weight).tolist() == [[23], [396]]


def test_there_and_back_is_the_input_times_the_number_of_choices() -> None:
    position, num_rows = draw_positions(8, 4)
    x = draw(8, 6, dtype=torch.bfloat16)
    assert torch.equal(unpermute(permute(x, position, num_rows), position), 4 * x)


def test_permuting_without_weights_copies_bits() -> None:
    position, num_rows = draw_positions(3, 2)
    bits = torch.tensor([[0x7FC1], [0x8000], [0x0001]], dtype=torch.int32).to(torch.int16)  # NaN, -0, tiny
    rows = permute(bits.view(torch.bfloat16), position, num_rows)
    for t in range(3):
        for k in range(2):
            assert rows.view(torch.int16)[position[t, k]] == bits[t]


def test_one_expert_keeps_the_order_of_tokens() -> None:
    """All rows are those of one expert, so their positions follow the order of tokens."""
    x = draw(6, 4)
    position = torch.arange(6, dtype=torch.int32).view(6, 1)
    assert torch.equal(permute(x, position, 6), x)
    assert torch.equal(unpermute(x, position), x)


def test_what_is_not_finite_in_a_dropped_slot_touches_nothing() -> None:
    position = torch.tensor([[0, -1], [-1, 1]], dtype=torch.int32)
    weight = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]], requires_grad=True)
    x = torch.ones(2, 4, requires_grad=True)
    rows = permute(x, position, 2, weight)
    y = unpermute(rows, position, weight)
    y.sum().backward()
    assert y.tolist() == [[1.0] * 4, [4.0] * 4]
    assert weight.grad is not None and weight.grad.tolist() == [[8.0, 0.0], [0.0, 16.0]]
    assert x.grad is not None and x.grad.tolist() == [[1.0] * 4, [4.0] * 4]


def test_equal_calls_give_equal_bits() -> None:
    position, num_rows = draw_positions(40, 4, 0.2)
    weight = draw(40, 4, dtype=torch.float32)

    def run() -> list[Tensor]:
        x = draw(40, 24, dtype=torch.bfloat16).requires_grad_()
        w = weight.clone().requires_grad_()
        y = unpermute(permute(x, position, num_rows, w), position, w)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, w])]

    first = run()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_positions_may_be_int64_and_strided_on_the_cpu() -> None:
    position, num_rows = draw_positions(5, 2, 0.3)
    x, weight = draw(6, 5).t(), draw(2, 5).t()
    expected = permute(x.contiguous(), position, num_rows, weight.contiguous())
    assert torch.equal(permute(x, position.long().t().contiguous().t(), num_rows, weight), expected)


# ---- gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_equal_the_loops(shape: tuple[int, int, float], dtype: torch.dtype) -> None:
    num_tokens, top_k, dropped = shape
    position, num_rows = draw_positions(num_tokens, top_k, dropped)
    weight = draw(num_tokens, top_k, dtype=torch.float32, seed=3).requires_grad_()
    x = draw(num_tokens, 6, dtype=dtype, seed=1).requires_grad_()
    rows = draw(num_rows, 6, dtype=dtype, seed=2).requires_grad_()
    d_rows, d_y = draw(num_rows, 6, dtype=dtype, seed=4), draw(num_tokens, 6, dtype=dtype, seed=5)

    d_x, d_weight = torch.autograd.grad(permute(x, position, num_rows, weight), [x, weight], d_rows)
    assert d_weight.dtype == torch.float32
    assert_near(d_x, loop_unpermute(d_rows, position, weight.detach()), dtype, terms=top_k)
    assert_near(d_weight, loop_dots(x.detach(), d_rows, position), torch.float32, terms=6)

    d_of_rows, d_weight = torch.autograd.grad(unpermute(rows, position, weight), [rows, weight], d_y)
    assert_near(d_of_rows, loop_permute(d_y, position, num_rows, weight.detach()), dtype)
    assert_near(d_weight, loop_dots(d_y, rows.detach(), position), torch.float32, terms=6)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_gradients_by_finite_differences(weighted: bool) -> None:
    position, num_rows = draw_positions(5, 3, 0.3)
    x, rows = draw(5, 4).requires_grad_(), draw(num_rows, 4).requires_grad_()
    weight = (draw(5, 3).requires_grad_(),) if weighted else ()
    assert torch.autograd.gradcheck(lambda x, *w: permute(x, position, num_rows, *w), (x, *weight))
    assert torch.autograd.gradcheck(lambda rows, *w: unpermute(rows, position, *w), (rows, *weight))


def test_second_derivatives_where_the_weights_have_none() -> None:
    position, num_rows = draw_positions(4, 2, 0.3)
    weight = draw(4, 2)
    assert torch.autograd.gradgradcheck(
        lambda x: permute(x, position, num_rows, weight), (draw(4, 3).requires_grad_(),)
    )
    assert torch.autograd.gradgradcheck(
        lambda rows: unpermute(rows, position, weight), (draw(num_rows, 3).requires_grad_(),)
    )


def test_second_derivatives_of_the_weights_are_refused() -> None:
    position, num_rows = draw_positions(4, 2)
    x, weight = draw(4, 3).requires_grad_(), draw(4, 2).requires_grad_()
    rows = permute(x, position, num_rows, weight)
    (d_x,) = torch.autograd.grad(rows.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="permute_backward"):
        d_x.sum().backward()


def test_rows_are_saved_only_where_the_weights_need_a_gradient() -> None:
    position, num_rows = draw_positions(4, 2)
    x, weight = draw(4, 3).requires_grad_(), draw(4, 2)

    def saved(weight: Tensor) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            unpermute(permute(x, position, num_rows, weight), position, weight)
        return sorted(shapes)

    assert saved(weight) == [(4, 2)] * 4
    assert saved(weight.requires_grad_()) == sorted([(4, 2)] * 4 + [(4, 3), (8, 3)])


# ---- torch.library and torch.compile


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dropped", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["constant", "leaf"])
def test_operators_are_well_formed(dropped: float, needs_grad: bool) -> None:
    position, num_rows = draw_positions(4, 2, dropped)
    x, rows, weight = (
        draw(*shape, dtype=torch.float32).requires_grad_(needs_grad)
        for shape in ((4, 8), (num_rows, 8), (4, 2))
    )
    ops = torch.ops.pmoe
    for some_weight in (None, weight):
        torch.library.opcheck(ops.permute, (x, position, num_rows, some_weight))
        torch.library.opcheck(ops.unpermute, (rows, position, some_weight))
    if not needs_grad:
        torch.library.opcheck(ops.permute_backward, (rows, x, position, weight))
        torch.library.opcheck(ops.unpermute_backward, (x, rows, position, weight))


def test_a_compiled_function_is_one_graph_and_gives_the_same() -> None:
    position, num_rows = draw_positions(6, 2, 0.2)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return unpermute(2 * permute(x, position, num_rows), position, weight)

    def results(run: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        x, weight = draw(6, 8).requires_grad_(), draw(6, 2, seed=1).requires_grad_()
        y = run(x, weight)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, weight])]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for got, expected in zip(results(compiled), results(function), strict=True):
        assert torch.equal(got, expected)


def test_importing_it_loads_no_compiler() -> None:
    found = newly_imported("import pmoe.kernels.permute")
    assert "pmoe.kernels.permute" in found
    assert not [name for name in found if name.startswith(("torch._dynamo", "torch._inductor", "triton"))]


# ---- what is refused

X, WEIGHT, POSITION = (
    draw(3, 8, dtype=torch.float32),
    draw(3, 2, dtype=torch.float32),
    draw_positions(3, 2)[0],
)

BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "tokens": (lambda: permute(X[:2], POSITION, 6), r"x of shape \(2, 8\) must have the shape \(3, M\)"),
    "x of 1 dimension": (lambda: permute(X[0], POSITION, 6), r"x of shape \(8,\) must .* \(3, M\)"),
    "integer rows": (
        lambda: permute(X.int(), POSITION, 6),
        "x of dtype torch.int32 must be of a floating-point type",
    ),
    "num_rows": (lambda: permute(X, POSITION, -4), r"num_rows \(-4\)"),
    "position's shape": (
        lambda: permute(X, POSITION[0], 6),
        r"position of shape \(2,\) must have the shape \(T, K\)",
    ),
    "position's dtype": (
        lambda: permute(X, POSITION.float(), 6),
        "position of dtype torch.float32 must be torch.int32",
    ),
    "weight's shape": (
        lambda: permute(X, POSITION, 6, WEIGHT[:, :1]),
        r"weight of shape \(3, 1\) .*\(3, 2\)",
    ),
    "weight's dtype": (lambda: permute(X, POSITION, 6, WEIGHT.half()), "torch.float16 must be torch.float32"),
    "wider weight": (lambda: permute(X, POSITION, 6, WEIGHT.double()), "torch.float64 must be torch.float32"),
    "rows of 1 dimension": (
        lambda: unpermute(X[0], POSITION),
        r"rows of shape \(8,\) must have the shape \(rows, M\)",
    ),
    "device of x": (lambda: permute(X.to("meta"), POSITION, 6), "x on meta must be on cpu"),
    "device of weight": (lambda: unpermute(X, POSITION, WEIGHT.to("meta")), "weight on meta must be on cpu"),
    "columns": (
        lambda: torch.ops.pmoe.permute_backward(X[:, :7], X, POSITION, WEIGHT),
        r"x of shape \(3, 8\) must have the shape \(3, 7\)",
    ),
    "dtypes": (
        lambda: torch.ops.pmoe.unpermute_backward(X.half(), X, POSITION, WEIGHT),
        "d_y of dtype torch.float16 must be torch.float32",
    ),
}


@pytest.mark.parametrize("call, message", BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_input_is_a_value_error_with_the_numbers(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


WIDE = draw(4, 32, dtype=torch.float32)

BAD_MEMORY: dict[str, tuple[Tensor, str]] = {
    "row bytes": (WIDE[:, :6].contiguous(), r"a row's bytes \(6 x 4 = 24\)"),
    "row bytes of halves": (WIDE[:, :12].half(), r"\(12 x 2 = 24\)"),
    "column stride": (WIDE.t()[:8], r"strides \(1, 32\) .* adjacent columns"),
    "row stride": (WIDE.view(-1).as_strided((4, 8), (18, 1)), r"strides \(18, 1\) of 4 bytes"),
    "rows that overlap": (
        WIDE.view(-1).as_strided((4, 8), (4, 1)),
        r"shape \(4, 8\) and strides \(4, 1\) of 4 bytes .* a row stride of at least the number of columns",
    ),
    "one row for all": (WIDE[:1, :8].expand(4, 8), r"strides \(0, 1\) of 4 bytes"),
    "address": (WIDE.view(-1)[1:113].view(-1, 16)[:, :8], "address"),
}


@pytest.mark.parametrize("rows, message", BAD_MEMORY.values(), ids=BAD_MEMORY.keys())
def test_rows_that_the_kernels_cannot_read_are_refused_with_the_numbers(rows: Tensor, message: str) -> None:
    """They are refused before any launch. The test calls the functions that launch, on tensors of the CPU."""
    position, _ = draw_positions(rows.shape[0], 2)
    fine = torch.empty(2 * rows.shape[0], rows.shape[1], dtype=rows.dtype)
    with pytest.raises(ValueError, match=message):
        permutes.launch_permute(rows, position, None, fine)
    with pytest.raises(ValueError, match=message):
        permutes.launch_unpermute(fine, position, None, rows)


BAD_SLOTS: dict[str, tuple[Tensor, Tensor, str]] = {
    "int64": (POSITION.long(), WEIGHT, "position of dtype torch.int64 must be torch.int32"),
    "position's strides": (
        POSITION.t().contiguous().t(),
        WEIGHT,
        r"position of .* strides \(1, 3\) must be contiguous",
    ),
    "weight's strides": (
        POSITION,
        WEIGHT.t().contiguous().t(),
        r"weight of .* strides \(1, 3\) must be contiguous",
    ),
    "weight's dtype": (POSITION, WEIGHT.double(), "weight of dtype torch.float64 must be torch.float32"),
}


@pytest.mark.parametrize("position, weight, message", BAD_SLOTS.values(), ids=BAD_SLOTS.keys())
def test_slots_that_the_kernels_cannot_read_are_refused(
    position: Tensor, weight: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        permutes.launch_permute(X, position, weight, torch.empty(6, 8))


def test_memory_of_another_shape_is_never_written() -> None:
    rows, d_weight = torch.empty(6, 8), torch.empty(3, 2)
    for out, message in (
        (torch.empty(2, 8), r"y of shape \(2, 8\) must have the shape \(3, 8\)"),
        (torch.empty(3, 4), r"y of shape \(3, 4\) must have the shape \(3, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            permutes.launch_unpermute(rows, POSITION, None, out)
    with pytest.raises(ValueError, match=r"d_rows of shape \(5, 8\) must have the shape \(6, 8\)"):
        permutes.launch_unpermute_backward(X, rows, POSITION, WEIGHT, rows[:5], d_weight)
    with pytest.raises(ValueError, match=r"d_weight of shape \(2, 2\) must have the shape \(3, 2\)"):
        permutes.launch_unpermute_backward(X, rows, POSITION, WEIGHT, rows, d_weight[:2])


def test_the_stride_of_a_lone_row_and_of_a_lone_column_says_nothing() -> None:
    check_rows_memory(x=WIDE.view(-1).as_strided((1, 8), (3, 1)))
    with pytest.raises(ValueError, match=r"\(1 x 4 = 4\)"):
        check_rows_memory(x=WIDE[:, :1])


def test_why_the_kernels_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    assert refusal(torch.device("cpu"), torch.float32, 2) == "device cpu: the kernels are for CUDA"
    assert "torch.float64" in str(refusal(cuda, torch.float64, 2))
    assert "top_k (257)" in str(refusal(cuda, torch.float32, 257))
    monkeypatch.setattr(extension, "load", lambda: object())
    loaded = extension.LoadedKernel(
        name="permute",
        runs="sm_80",
        refusal=None,
        binary_version=80,
        ptx_version=80,
        threads=256,
        registers=46,
        shared_bytes=0,
        dynamic_shared_bytes=0,
        local_bytes=0,
    )
    for kernels, why in (((loaded,), None), ((), "no kernel image is available")):
        device = extension.Device(index=0, name="a GPU", capability=(8, 0), kernels=kernels, reason=why)
        monkeypatch.setattr(extension, "on_device", lambda index, found=device: found)
        reason = refusal(cuda, torch.bfloat16, 8)
        assert reason == (None if why is None else f"device 0: {why}")
    monkeypatch.setattr(extension, "load", lambda: None)
    assert refusal(cuda, torch.bfloat16, 8) == extension.why_missing()


def test_a_refusal_is_told_once_and_bad_memory_is_refused_all_the_same() -> None:
    GIVEN.clear()
    with pytest.warns(UserWarning, match="rows are copied and summed without pmoe's kernels: device cpu"):
        assert not operators._runs_kernel(POSITION, None, x=X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not operators._runs_kernel(POSITION, None, x=X)
        with pytest.raises(ValueError, match="24"):
            operators._runs_kernel(POSITION, None, x=X[:, :6].contiguous())
    GIVEN.clear()


def test_an_expanded_gradient_becomes_readable() -> None:
    class OnCuda(Tensor):
        is_cuda = True  # type: ignore[assignment]

    for grad, fine in (
        (WIDE, True),
        (WIDE[:, 4:12], True),
        (WIDE[:1].expand(4, 32), False),
        (torch.ones(()).expand(4, 32), False),
        (WIDE.t(), False),
        (WIDE[:, 1:9], False),
    ):
        readable = operators._readable(grad.as_subclass(OnCuda))
        assert (readable.data_ptr() == grad.data_ptr()) is fine
        assert torch.equal(readable.as_subclass(Tensor), grad)
        check_rows_memory(grad=readable)


# ---- the CUDA source


@pytest.mark.slow
def test_the_kernels_source_on_the_cpu() -> None:
    print(compile_and_run("permute_test.cpp"))


def kernels() -> list[str]:
    return [name for name in disassembly.declared() if "permute" in name]


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
def test_rows_are_read_and_written_16_bytes_at_a_time() -> None:
    """All other loads from global memory are positions and weights; all other stores, weights' gradients."""
    names = kernels()
    assert len(names) == 29
    for arch in disassembly.archs():
        for name in names:
            code = disassembly.sass(arch)[name]
            opcodes = [disassembly.opcode(each) for each in code]
            loads = [each for each in opcodes if each.startswith("LDG")]
            stores = [each for each in opcodes if each.startswith("STG")]
            assert set(loads) <= {"LDG.E.128", "LDG.E"}, (arch, name, loads)
            assert set(stores) <= {"STG.E.128", "STG.E"}, (arch, name, stores)
            assert loads.count("LDG.E.128") >= 4 and stores.count("STG.E.128") >= 2, (arch, name)
            assert ("STG.E" in stores) == ("backward" in name), (arch, name, stores)


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
def test_loads_of_a_turn_are_issued_before_the_first_is_used() -> None:
    """All but two of eight vectors of routed rows are loaded with only address computations between them.

    This is so on sm_90a.
    """
    names = kernels()
    if "sm_90a" not in disassembly.archs():
        pytest.skip("not built for sm_90a")
    for name in names:
        if name.split(".")[0] in ("permute", "permute_several"):
            continue
        opcodes = [disassembly.opcode(each) for each in disassembly.sass("sm_90a")[name]]
        first = opcodes.index("LDG.E")  # a position: routed rows come behind it
        used = next(i for i, each in enumerate(opcodes) if i > first and each.startswith(("FFMA", "FADD")))
        assert opcodes[first:used].count("LDG.E.128") >= 6, (name, opcodes[first:used])
