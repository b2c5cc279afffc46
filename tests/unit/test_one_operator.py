"""torch.compile(model, fullgraph=True) with layers of one rank, by backends that are not pmoe's."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import pmoe
from pmoe.graph import one_operator

CASES: dict[str, dict[str, Any]] = {
    "ffn": {},
    "chunks that reuse memory": {"pipeline": 2, "memory_reuse": "S4"},
    "swiglu, shared expert": {"expert": "swiglu", "bias": False, "shared_expert": 24},
    "capacity": {"capacity_factor": 0.7},
    "sigmoid gate": {"gate": "sigmoid"},
    "a gate whose gradients share memory": {"gate": "noisy_topk"},
    "latent experts": {"d_latent": 8},
}


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    one_operator.KEPT.clear()  # of tests that ran no backward pass
    yield
    torch._dynamo.reset()


def model_of(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(16, 32, num_experts=4, top_k=2, dtype=dtype, **options)
    return nn.Sequential(nn.Linear(16, 16, dtype=dtype), layer, nn.Linear(16, 16, dtype=dtype))


def step(model: nn.Sequential, forward: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Returns the output, the auxiliary loss, the experts' loads, and all gradients."""
    model.zero_grad()
    torch.manual_seed(1)  # of gates that draw
    y = forward(x)
    layer = model[1]
    assert isinstance(layer, pmoe.MoELayer)
    (y.float().square().mean() + 0.1 * layer.l_aux).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [y.detach(), layer.l_aux.detach(), layer.tokens_per_expert, *gradients]


def assert_equal(backend: str, options: dict[str, Any], tolerance: float) -> None:
    model = model_of(**options)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    layer = model[1]
    for tokens in (24, 40, 1):  # the second number makes the size dynamic
        x = torch.randn(tokens, 16, dtype=torch.float64)
        expected = step(model, model, x)
        ran = layer.ran
        for value, wanted in zip(step(model, compiled, x), expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)
        assert layer.ran == ran and not one_operator.KEPT


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_model_is_one_graph_and_gives_the_same_values(options: dict[str, Any]) -> None:
    assert_equal("aot_eager", options, tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_inductor_gives_the_same_values_to_rounding(options: dict[str, Any]) -> None:
    """Inductor reuses memory: an operator that did not say what it reads later would get wrong gradients."""
    assert_equal("inductor", options, tolerance=1e-12)


def test_blocks_that_are_compiled_one_by_one_run_their_own_experts() -> None:
    blocks = nn.ModuleList(model_of() for _ in range(3))
    for number, block in enumerate(blocks):
        block[1].experts.w1.data.mul_(number + 1)
    counter = CompileCounterWithBackend("aot_eager")
    x = torch.randn(8, 16, dtype=torch.float64)
    for block in blocks:
        assert torch.equal(torch.compile(block, backend=counter, fullgraph=True)(x), block(x))
    assert counter.frame_count == 3


def test_a_copy_of_a_compiled_layer_runs_its_own_experts() -> None:
    model = model_of()
    x = torch.randn(8, 16, dtype=torch.float64)
    torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    other = copy.deepcopy(model)
    other[1].experts.w1.data.mul_(2)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), other(x)) and not torch.equal(compiled(x), model(x))


def test_hooks_of_parameters_run_once() -> None:
    model = model_of()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    calls: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: (calls.append(gradient), 2 * gradient)[1])
    x = torch.randn(8, 16, dtype=torch.float64)
    expected = step(model, model, x)
    eager_calls = len(calls)
    found = step(model, compiled, x)
    assert len(calls) == 2 * eager_calls
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)


def test_autocast_holds_inside_of_the_operator() -> None:
    model = model_of(torch.float32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(8, 16)

    def cast(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return forward(x)

        return run

    for value, wanted in zip(step(model, cast(compiled), x), step(model, cast(model), x), strict=True):
        assert value.dtype == wanted.dtype and torch.equal(value, wanted)
    ran = model[1].ran
    assert ran is not None and ran.dtype == torch.bfloat16


def test_under_autocast_the_graph_knows_the_type_of_the_output() -> None:
    layer = pmoe.MoELayer(8, 16, num_experts=4, top_k=2, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        return 2 * y if y.dtype == torch.float64 else 3 * y  # decided where the graph is traced

    x = torch.randn(5, 8, dtype=torch.float64)
    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x))


@pytest.mark.parametrize("has_grad", [True, False])
def test_parameters_that_are_replaced_in_compiled_code_are_refused(has_grad: bool) -> None:
    layer = pmoe.MoELayer(8, 16, num_experts=4, top_k=2, dtype=torch.float64)
    others = {name: 2 * parameter.detach() for name, parameter in layer.named_parameters()}
    x = torch.randn(5, 8, dtype=torch.float64)
    call = torch.func.functional_call
    with torch.set_grad_enabled(has_grad):
        compiled = torch.compile(lambda x: call(layer, others, (x,)), backend="aot_eager")
        with pytest.raises(RuntimeError, match="parameters of MoELayer in a compiled graph must be the mod"):
            compiled(x)
        outside = call(torch.compile(layer, backend="aot_eager", fullgraph=True), _renamed(others), (x,))
        assert torch.equal(outside, call(layer, others, (x,)))


def _renamed(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters under the names that they have in a compiled module."""
    return {f"_orig_mod.{name}": parameter for name, parameter in parameters.items()}


def test_frozen_parameters_and_a_mask() -> None:
    layer = pmoe.MoELayer(16, 32, num_experts=4, top_k=2).requires_grad_(False)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    gradients = []
    for forward in (layer, compiled):
        x = torch.ones(2, 3, 16).requires_grad_()
        y = forward(x, mask=mask)
        y.sum().backward()
        gradients += [y.detach(), x.grad]
    assert torch.equal(gradients[0], gradients[2]) and torch.equal(gradients[1], gradients[3])
    assert not gradients[2][0, 1].any() and layer.tokens_per_expert.sum() == 8


def test_a_kept_graph_is_freed_without_a_backward_pass() -> None:
    model = model_of()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(8, 16, dtype=torch.float64)
    y = compiled(x)
    assert len(one_operator.KEPT) == 1
    del y
    model[1].l_aux = None
    gc.collect()
    assert not one_operator.KEPT
    with torch.no_grad():
        compiled(x)
    assert not one_operator.KEPT


def test_two_forward_passes_before_their_backward_passes() -> None:
    model = model_of()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    first, second = torch.randn(2, 8, 16, dtype=torch.float64).unbind()
    losses = [compiled(x).square().mean() for x in (first, second)]
    sum(losses).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    sum(model(x).square().mean() for x in (first, second)).backward()
    for value, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(value, parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_second_backward_pass_says_what_to_do() -> None:
    compiled = torch.compile(model_of(), backend="aot_eager", fullgraph=True)
    y = compiled(torch.randn(8, 16, dtype=torch.float64))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="leave retain_graph=True out"):
        y.sum().backward()


def test_an_error_of_the_layer_comes_out_of_the_graph() -> None:
    layer = pmoe.MoELayer(16, 32, num_experts=4, top_k=2)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="check_finite"):
        compiled(torch.full((4, 16), float("nan")))


def test_checkpoints_without_fullgraph() -> None:
    model = model_of()
    x = torch.randn(8, 16, dtype=torch.float64)

    def forward(x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        y: Tensor = checkpoint(model, x, use_reentrant=False)
        return y

    expected = step(model, forward, x)
    found = step(model, torch.compile(forward, backend="aot_eager"), x)
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.slow
def test_a_compiled_block_whose_routing_is_kept_is_refused_with_what_to_compile_instead() -> None:
    """The error named torch.autograd.grad only, which the user had not called."""
    from torch.utils.checkpoint import checkpoint

    model = model_of()
    x = torch.randn(8, 16, dtype=torch.float64)

    def kept(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=pmoe.checkpoint_contexts)
        return y

    with pytest.raises(RuntimeError, match="nor be compiled.*compile the model around the checkpoint"):
        kept(torch.compile(model, backend="aot_eager"), x).sum().backward()
    one_operator.KEPT.clear()
    expected = step(model, lambda x: kept(model, x), x)
    found = step(model, torch.compile(lambda x: kept(model, x), backend="aot_eager"), x)
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)
