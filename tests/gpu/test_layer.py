"""The layer and what surrounds it on a GPU: user modules, autocast, checkpoints, compiler, allocator."""

from __future__ import annotations

import gc
import importlib.util
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from tests.gpu.support import (
    AUX,
    DEVICE,
    LAYERS,
    NEEDS_GPU,
    ROUNDED,
    largest_error,
    make_batch,
    make_layer,
    plain_step,
    poison_memory,
    relative_norm,
    step,
)

pytestmark = [*NEEDS_GPU, pytest.mark.usefixtures("nccl")]


def with_aux(layer: pmoe.MoELayer, found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**found, "l_aux": layer.l_aux.detach()}


# ---- sizes in which kernels have more than one tile ---------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("bypass_local", [True, False])
def test_thousands_of_rows_equal_the_plain_layer(bypass_local: bool, n: int, dtype: torch.dtype) -> None:
    sizes = {"d_model": 256, "d_hidden": 512, "num_experts": 8, "top_k": 2}
    layer = make_layer(dtype, pipeline=n, bypass_local=bypass_local, **sizes)
    x, grad = make_batch(3001, 256, dtype)
    poison_memory()
    got = with_aux(layer, step(layer, x, grad))
    expert_TK = layer.gate(x).expert
    expected = plain_step(layer, x, grad, torch.float64, expert_TK)
    plain = plain_step(layer, x, grad, dtype, expert_TK)
    for name, value in expected.items():
        error, allowed = (relative_norm(found[name], value) for found in (got, plain))
        allowed = 5e-5 if dtype == torch.float32 else max(2 * allowed, 2 * ROUNDED[dtype])
        assert error <= allowed, f"{name}: {error} against {allowed}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("bypass_local", [True, False])
def test_two_runs_are_bit_identical(bypass_local: bool, n: int, dtype: torch.dtype) -> None:
    sizes = {"d_model": 256, "d_hidden": 512, "num_experts": 8, "top_k": 2}
    layer = make_layer(dtype, pipeline=n, bypass_local=bypass_local, capacity_factor=1.0, **sizes)
    x, grad = make_batch(3001, 256, dtype)
    first = step(layer, x, grad)
    poison_memory()
    for name, value in step(layer, x, grad).items():
        assert torch.equal(value, first[name]), name


# ---- other experts, other types --------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("bypass_local", [True, False])
def test_modules_of_the_user_equal_a_loop_over_them(bypass_local: bool, n: int) -> None:
    layer = make_layer(pipeline=n, bypass_local=bypass_local, **LAYERS["user's experts"]())
    x, grad = make_batch()
    got = step(layer, x, grad)
    layer.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    routing = layer.gate(leaf)
    y = torch.zeros_like(leaf)
    for e, module in enumerate(layer.experts.local):
        token, choice = (routing.expert == e).nonzero(as_tuple=True)
        y = y.index_add(0, token, module(leaf[token]) * routing.weight[token, choice].unsqueeze(1))
    ((y * grad).sum() + AUX * routing.l_aux).backward()
    expected = {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    assert largest_error(got, expected) < 1e-12


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["ffn", "swiglu"])
def test_autocast_computes_in_bfloat16(kind: str, n: int) -> None:
    """float32 parameters and input; the gate stays in float32."""
    layer = make_layer(torch.float32, pipeline=n, bypass_local=False, expert=kind)
    x, grad = make_batch(dtype=torch.float32)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(leaf)
    assert y.dtype == torch.bfloat16
    ((y * grad.to(y.dtype)).sum() + AUX * layer.l_aux).backward()
    got = {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    assert all(value.dtype == torch.float32 for name, value in got.items() if name != "y")
    got, grad = with_aux(layer, got), grad.bfloat16()
    expert_TK = layer.gate(x).expert
    expected = plain_step(layer, x, grad, torch.float64, expert_TK, kind=kind)
    plain = plain_step(layer, x, grad, torch.bfloat16, expert_TK, kind=kind)
    for name, value in expected.items():
        error, allowed = (relative_norm(found[name], value) for found in (got, plain))
        assert error <= max(2 * allowed, 2 * ROUNDED[torch.bfloat16]), f"{name}: {error} against {allowed}"


def test_user_modules_run_under_autocast() -> None:
    layer = make_layer(torch.float32, pipeline=3, bypass_local=False, **LAYERS["user's experts"]())
    x, grad = make_batch(dtype=torch.float32)
    expected = step(layer, x, grad)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(leaf)
    assert y.dtype == torch.bfloat16
    ((y * grad.to(y.dtype)).sum() + AUX * layer.l_aux).backward()
    got = {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    assert max(relative_norm(got[name], value) for name, value in expected.items()) < 0.05


@pytest.mark.parametrize("bypass_local", [True, False])
def test_inputs_and_gradients_of_any_layout(bypass_local: bool) -> None:
    """x transposed, the gradient of y expanded from one number."""
    layer, (x, _) = make_layer(pipeline=3, bypass_local=bypass_local), make_batch()
    expected = step(layer, x, torch.ones((), dtype=x.dtype, device=DEVICE))
    layer.zero_grad(set_to_none=True)
    leaf = x.t().contiguous().t().requires_grad_()
    assert not leaf.is_contiguous()
    y = layer(leaf)
    (y.sum() + AUX * layer.l_aux).backward()
    got = {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    assert largest_error(got, expected) < 1e-12


def test_without_gradients() -> None:
    layer, (x, grad) = make_layer(pipeline=3, bypass_local=False), make_batch()
    expected = step(layer, x, grad)["y"]
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)


def test_bad_rows_are_refused_on_the_host() -> None:
    layer, (x, _) = make_layer(check_finite=True, bypass_local=False), make_batch()
    with pytest.raises(ValueError, match="not finite"):
        layer(x.where(x < 2, torch.nan))
    with pytest.raises(ValueError, match="cpu"):
        layer(x.cpu())


# ---- around the layer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bypass_local", [True, False])
def test_a_checkpointed_layer_gives_the_same_gradients(bypass_local: bool) -> None:
    layer, (x, grad) = make_layer(pipeline=3, bypass_local=bypass_local), make_batch()
    expected = step(layer, x, grad)
    layer.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    y = checkpoint(layer, leaf, use_reentrant=False)
    ((y * grad).sum() + AUX * layer.l_aux).backward()
    got = {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    assert largest_error(got, expected) < 1e-12


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_gives_the_same_values(compiler: None, backend: str) -> None:
    if backend == "inductor":
        has_compiler = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
        if not has_compiler or importlib.util.find_spec("triton") is None:
            pytest.skip("inductor needs triton and a C compiler")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(DEVICE, torch.float32)
    model.append(make_layer(torch.float32, pipeline=3, bypass_local=False)).append(
        nn.LayerNorm(64).to(DEVICE)
    )
    x, grad = make_batch(dtype=torch.float32)
    expected = step(model, x, grad)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        got = step(compiled, x, grad)
        got = {name.removeprefix("_orig_mod."): value for name, value in got.items()}
        assert largest_error(got, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["n=1", "n=3", "capacity", "swiglu", "user's experts"])
@pytest.mark.parametrize("bypass_local", [True, False])
def test_a_step_gives_all_its_memory_back(bypass_local: bool, name: str, dtype: torch.dtype) -> None:
    """At once, without the garbage collector: nothing holds itself by a cycle."""
    layer = make_layer(dtype, bypass_local=bypass_local, **LAYERS[name]())

    def train() -> None:
        step(layer, *make_batch(dtype=dtype))
        layer.zero_grad(set_to_none=True)

    def infer() -> None:
        with torch.no_grad():
            layer(make_batch(dtype=dtype)[0])

    for run in (train, infer):
        run()  # libraries take their workspaces
        run()
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated()
        gc.disable()
        try:
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            assert torch.cuda.memory_allocated() == before
        finally:
            gc.enable()
