"""A layer of one rank by the kernels' path: its values, launches, bytes and waits. Beside it stands the same
layer without the kernels: the path of all layers, with a loop over the experts.

Letters: T tokens, K choices, E experts, M = d_model, H = d_hidden.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent

import pmoe
from pmoe.kernels import extension, permute
from pmoe.kernels.registry import LOOP, PMOE, PRODUCTS
from pmoe.runners import one_rank
from tests.gpu.support import (
    AUX,
    DEVICE,
    NEEDS_GPU,
    count_alone,
    make_batch,
    make_layer,
    measure_nothing,
    plain_step,
    poison_memory,
    relative_norm,
    step,
    synchronisations,
)

pytestmark = NEEDS_GPU

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
MAX_KERNELS = 6
"""Of forward: the gate's product, the loss, counts and memsets included."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One entry for each call by the kernels' path. Every layer that can take it does, and every product that
    pmoe's kernels can compute they do: nothing is measured, and no file of measurements is written."""
    why = extension.path(DEVICE)[1] or permute.refusal(DEVICE, torch.bfloat16, 2)
    if why is not None:
        if os.environ.get("PMOE_CUDA") == "0":
            pytest.skip(f"PMOE_CUDA=0: {why}")
        pytest.fail(why)
    calls = count_alone(monkeypatch)
    measure_nothing(monkeypatch)
    with warnings.catch_warnings(), PRODUCTS.forcing(PMOE):
        warnings.filterwarnings("error", message="pmoe")  # a fall to PyTorch's operations is told
        yield calls


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, PRODUCTS.forcing(LOOP):
        patch.setattr(one_rank, "kernel_refusal", lambda *_, **__: "the test wants the path of all layers")
        yield


def narrow_layer(dtype: torch.dtype = torch.bfloat16, **options: Any) -> pmoe.MoELayer:
    return make_layer(dtype, **{"num_experts": 8, **options})


def with_aux(layer: pmoe.MoELayer, found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**found, "l_aux": layer.l_aux.detach()}


def assert_as_near(
    found: dict[str, Tensor], plain: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """At most twice the plain computation's error; where luck makes that one better, two roundings."""
    assert set(found) == set(plain) == set(expected)
    for name, value in expected.items():
        error, allowed = (relative_norm(each[name], value) for each in (found, plain))
        assert error <= max(2 * allowed, 2 * ROUNDING[dtype]), f"{name}: {error} against {allowed}"


# ---- values


OPTIONS = {
    "ffn": {},
    "ffn, no bias": {"bias": False},
    "relu": {"activation": "relu"},
    "silu, no bias": {"activation": "silu", "bias": False},
    "swiglu": {"expert": "swiglu"},
    "swiglu, no bias": {"expert": "swiglu", "bias": False},
}


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_it_is_as_near_to_float64_as_the_path_without_kernels(
    kernels: list[str], options: dict[str, Any], top_k: int, dtype: torch.dtype
) -> None:
    layer = narrow_layer(dtype, top_k=top_k, **options)
    x, grad = make_batch(517, dtype=dtype)
    poison_memory()
    found = with_aux(layer, step(layer, x, grad))
    assert kernels == ["alone"]
    expert_TK = layer.gate(x).expert
    counts_E = layer.tokens_per_expert
    assert torch.equal(counts_E, torch.bincount(expert_TK.flatten(), minlength=8).cpu())
    with without_kernels():
        plain = with_aux(layer, step(layer, x, grad))
    assert kernels == ["alone"]
    given = {name: options[name] for name in ("activation",) if name in options}
    expected = plain_step(
        layer, x, grad, torch.float64, expert_TK, kind=options.get("expert", "ffn"), **given
    )
    assert_as_near(found, plain, expected, dtype)


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", ["ffn", "swiglu"])
def test_a_small_layer(kernels: list[str], kind: str) -> None:
    layer = narrow_layer(expert=kind)
    x, grad = make_batch(37, dtype=torch.bfloat16)
    poison_memory()
    found = with_aux(layer, step(layer, x, grad))
    assert kernels == ["alone"]
    expert_TK = layer.gate(x).expert
    expected, plain = (
        plain_step(layer, x, grad, dtype, expert_TK, kind=kind) for dtype in (torch.float64, torch.bfloat16)
    )
    assert_as_near(found, plain, expected, torch.bfloat16)


@pytest.mark.parametrize("kind", ["ffn", "swiglu"])
def test_thousands_of_tokens_and_tiles(kernels: list[str], kind: str) -> None:
    layer = narrow_layer(d_model=512, d_hidden=768, num_experts=16, top_k=4, expert=kind, bias=False)
    with torch.no_grad():  # results of size 1
        layer.experts.w1.mul_(0.3)
        layer.experts.w2.mul_(0.3)
    x, grad = make_batch(9001, 512, torch.bfloat16)
    poison_memory()
    found = with_aux(layer, step(layer, x, grad))
    assert kernels == ["alone"]
    with without_kernels():
        plain = with_aux(layer, step(layer, x, grad))
    expected = plain_step(layer, x, grad, torch.float64, layer.gate(x).expert, kind=kind)
    assert_as_near(found, plain, expected, torch.bfloat16)


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_few_tokens_and_none(kernels: list[str], num_tokens: int) -> None:
    """Without tokens there is nothing for the kernels."""
    layer = narrow_layer(expert="swiglu", top_k=4)
    x, grad = make_batch(num_tokens, dtype=torch.bfloat16)
    found = with_aux(layer, step(layer, x, grad))
    assert len(kernels) == (num_tokens > 0)
    with without_kernels():
        plain = with_aux(layer, step(layer, x, grad))
    expected = plain_step(layer, x, grad, torch.float64, layer.gate(x).expert, kind="swiglu")
    if num_tokens:
        assert_as_near(found, plain, expected, torch.bfloat16)
    else:
        assert found["y"].shape == (0, 64) and not found["experts.w1"].any()


@pytest.mark.parametrize("kind", ["ffn", "swiglu"])
def test_under_autocast(kernels: list[str], kind: str) -> None:
    """float32 parameters and input."""
    layer = narrow_layer(torch.float32, expert=kind)
    x, grad = make_batch(dtype=torch.float32)

    def autocast_step() -> dict[str, Tensor]:
        layer.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = layer(leaf)
        assert y.dtype == torch.bfloat16
        ((y * grad.to(y.dtype)).sum() + AUX * layer.l_aux).backward()
        found = {"y": y.detach(), "x": leaf.grad, "l_aux": layer.l_aux.detach()}
        return found | {name: parameter.grad for name, parameter in layer.named_parameters()}

    found = autocast_step()
    assert kernels == ["alone"]
    assert all(value.dtype == torch.float32 for name, value in found.items() if name != "y")
    with without_kernels():
        plain = autocast_step()
    expected = plain_step(layer, x, grad.bfloat16(), torch.float64, layer.gate(x).expert, kind=kind)
    assert_as_near(found, plain, expected, torch.bfloat16)


def test_without_gradients_the_values_are_the_same(kernels: list[str]) -> None:
    layer = narrow_layer(expert="swiglu")
    x, grad = make_batch(dtype=torch.bfloat16)
    expected = step(layer, x, grad)["y"]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(layer(x), expected)
    assert len(kernels) == 3


def test_inputs_and_gradients_of_any_layout(kernels: list[str]) -> None:
    """Rows that are not 16-byte aligned, transposed ones, and a gradient expanded from one number."""
    layer, (x, grad) = narrow_layer(), make_batch(dtype=torch.bfloat16)
    whole = torch.zeros(96, 67, dtype=torch.bfloat16, device=DEVICE)
    whole[:, 3:] = x
    expected = step(layer, x, torch.ones_like(grad))
    for given in (whole[:, 3:], x.t().contiguous().t()):
        assert not given.is_contiguous()
        layer.zero_grad(set_to_none=True)
        leaf = given.detach().requires_grad_()
        y = layer(leaf)
        (y.sum() + AUX * layer.l_aux).backward()
        found = {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
        for name, value in expected.items():
            # The gate's product may add up other rows in another order.
            assert relative_norm(found[name], value) <= 2 * ROUNDING[torch.bfloat16], name
    assert len(kernels) == 3


# ---- bits, graphs, waits


def test_three_runs_give_the_same_bits(kernels: list[str]) -> None:
    for options in ({}, {"expert": "swiglu", "top_k": 4}):
        layer = narrow_layer(d_model=256, d_hidden=512, **options)
        x, grad = make_batch(3001, 256, torch.bfloat16)
        first = with_aux(layer, step(layer, x, grad))
        for _ in range(2):
            poison_memory()
            for name, value in with_aux(layer, step(layer, x, grad)).items():
                assert torch.equal(value, first[name]), name
    assert len(kernels) == 6


def captured(run: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """What runs again what ``run`` launches now, into the same memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


def test_a_cuda_graph_holds_forward_and_backward(kernels: list[str]) -> None:
    """Replayed with tokens that go elsewhere: no number of rows was read by the host."""
    layer = narrow_layer(expert="swiglu", bias=False, top_k=2)
    x, grad = make_batch(300, dtype=torch.bfloat16)
    other, _ = make_batch(300, dtype=torch.bfloat16, seed=11)
    leaf, aux = x.clone().requires_grad_(), torch.full((), AUX, device=DEVICE)

    def run() -> list[Tensor]:
        y = layer(leaf)
        found = torch.autograd.grad([y, layer.l_aux], [leaf, *layer.parameters()], [grad, aux])
        return [y.detach(), *found]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as capture asks: what is set up at first use is set up before
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    replay = captured(run)
    for given in (x, other, x):
        with torch.no_grad():
            leaf.copy_(given)
        found = [each.clone() for each in replay()]
        for got, expected in zip(found, run(), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("options", [{}, {"expert": "swiglu", "bias": False}], ids=["ffn", "swiglu"])
def test_neither_pass_waits_for_the_device(kernels: list[str], options: dict[str, Any]) -> None:
    layer = narrow_layer(**options)
    x, grad = make_batch(dtype=torch.bfloat16)
    one = torch.ones((), device=DEVICE)
    assert synchronisations(one.item) == 1, "torch no longer reports synchronisations"
    for _ in range(2):  # what is set up at first use may wait
        step(layer, x, grad)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(layer, x, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(kernels) == 3


# ---- kernels and bytes


def device_work(function: Callable[[], object]) -> list[str]:
    """The names of all that ran on the device: kernels, copies, memsets."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    events: list[FunctionEvent] = profile.events()
    return [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("num_tokens", [1000, 9001])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_forward_is_six_kernels_at_most(
    kernels: list[str], options: dict[str, Any], needs_grad: bool, num_tokens: int
) -> None:
    # In training mode a pass without gradients may be a checkpoint's first: its routing is remembered.
    layer = narrow_layer(d_model=256, d_hidden=512, **options).train(needs_grad)
    x, _ = make_batch(num_tokens, 256, torch.bfloat16)
    leaf = x.requires_grad_(needs_grad)
    with torch.set_grad_enabled(needs_grad):
        for _ in range(2):
            layer(leaf)
        device_work(lambda: layer(leaf))  # what the profiler sets up at first use
        found = device_work(lambda: layer(leaf))
    assert len(kernels) == 4
    assert len(found) >= 4, f"the profiler saw {found} only"
    assert len(found) <= MAX_KERNELS, "\n".join([f"{len(found)}:", *found])


def test_saved_bytes_are_the_input_the_hidden_the_logits_and_16_a_slot(kernels: list[str]) -> None:
    num_tokens, top_k, num_model, width, num_experts = 2048, 4, 256, 128, 16
    layer = narrow_layer(
        expert="swiglu", bias=False, top_k=top_k, d_model=num_model, d_hidden=width, num_experts=num_experts
    )
    x = make_batch(num_tokens, num_model, torch.bfloat16)[0].requires_grad_()
    layer(x)
    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    held = torch.cuda.memory_allocated() - before
    tokens, hidden = 2 * num_tokens * num_model, 4 * num_tokens * top_k * width
    places = 12 * num_tokens * top_k + 4 * num_tokens * num_experts + 8 * num_experts
    assert len(kernels) == 2 and y.shape == x.shape
    assert tokens + hidden <= sum(kept.values()) <= tokens + hidden + places
    # The allocator rounds each of some ten tensors up to 512 bytes; x was there before, y came.
    assert held <= tokens + hidden + places + 16 * 512, held
