"""MoELayer in bfloat16 and float32, and under autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pmoe import MoELayer
from pmoe.experts.base import ExpertRows
from pmoe.experts.modules import ModuleExperts
from pmoe.experts.products import RowGroups
from pmoe.experts.swiglu import SwiGLUExperts
from tests.kit import AUX, D_MODEL, NUM_EXPERTS, TOKENS, assert_same, build, gradients, loss_of, tokens
from tests.own_experts import mlp
from tests.own_gates import ByPosition
from tests.reference import Definition


def plain_pytorch(layer: MoELayer, x: Tensor) -> Tensor:
    """Computes the layer by a few lines of PyTorch in the dtype of x: gate, linear maps, weighted sum."""
    routing = layer.gate(x)
    y = 0
    for e in range(layer.num_experts):
        token, choice = (routing.expert == e).nonzero(as_tuple=True)
        if isinstance(layer.experts, ModuleExperts):
            out = layer.experts.local[e](x[token])
        else:
            p = layer.experts
            hidden = F.linear(x[token], p.w1[e], p.b1[e])
            if isinstance(p, SwiGLUExperts):
                gate, up = hidden.chunk(2, dim=-1)
                active = F.silu(gate) * up
            else:
                active = F.gelu(hidden)
            out = F.linear(active, p.w2[e], p.b2[e])
        out = out * routing.weight[token, choice].to(out.dtype)[:, None]
        y = y + torch.zeros(x.shape, dtype=out.dtype).index_add(0, token, out)
    layer.l_aux = routing.l_aux
    return y


def in_float64(layer: MoELayer, x: Tensor) -> dict[str, Tensor]:
    wide = copy.deepcopy(layer).double()
    assert torch.equal(wide.gate(x.double()).expert, layer.gate(x).expert)
    return gradients(wide, x.double())


def error(got: Tensor, expected: Tensor) -> float:
    """Returns the root mean square of the differences."""
    return (got.double() - expected).square().mean().sqrt().item()


def assert_no_worse_than_plain_pytorch(
    layer: MoELayer, x: Tensor, context: Callable[[], Any] = nullcontext
) -> None:
    def under(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def wrapped(x: Tensor) -> Tensor:
            with context():
                return run(x)

        return wrapped

    expected = in_float64(layer, x)
    plain = gradients(layer, x, under(lambda x: plain_pytorch(layer, x)))
    got = gradients(layer, x, under(layer))
    for name, value in expected.items():
        assert got[name].dtype == plain[name].dtype, name
        ours, theirs = error(got[name], value), error(plain[name], value)
        assert ours <= 2 * theirs + 1e-12, f"{name}: {ours} where plain PyTorch has {theirs}"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_bfloat16_layer_errs_at_most_twice_as_much_as_plain_pytorch(
    n: int, expert: object, top_k: int
) -> None:
    torch.manual_seed(0)
    layer = MoELayer(64, 128, 4, top_k, expert=expert, pipeline=n, dtype=torch.bfloat16)
    assert_no_worse_than_plain_pytorch(layer, torch.randn(96, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("top_k", [1, 2])
def test_autocast_errs_at_most_twice_as_much_as_plain_pytorch_under_it(
    n: int, expert: object, top_k: int
) -> None:
    torch.manual_seed(0)
    layer = MoELayer(64, 128, 4, top_k, expert=expert, pipeline=n)
    assert_no_worse_than_plain_pytorch(
        layer, torch.randn(96, 64), lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_rows_in_bfloat16_and_gives_gradients_of_the_parameters_type(
    dtype: torch.dtype, expert: object
) -> None:
    layer = build(dtype=torch.float32, expert=expert)
    x = tokens(dtype=dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert layer.l_aux.dtype == torch.float32
    loss_of(layer, y).backward()
    assert x.grad.dtype == dtype
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
def test_the_experts_backward_inside_autocast_equals_one_outside(expert: object) -> None:
    """Only the gate's backward is autograd's own, which autocast changes as it changes any linear layer's."""
    layer = build(dtype=torch.float32, expert=expert)
    found = []
    for inside in (False, True):
        x = tokens(dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        with torch.autocast("cpu", enabled=inside, dtype=torch.bfloat16):
            grads = torch.autograd.grad((y.float() * tokens(seed=4)).sum(), list(layer.experts.parameters()))
        found.append(grads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("n", [1, 2])
def test_a_backward_inside_an_autocast_that_forward_never_saw_stays_wide(n: int) -> None:
    layer = build(dtype=torch.float32, pipeline=n, gate=ByPosition().float())  # a gate without a product
    expected = gradients(layer, tokens(dtype=torch.float32))
    layer.zero_grad()
    x = tokens(dtype=torch.float32).requires_grad_()
    loss = loss_of(layer, layer(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    assert torch.equal(x.grad, expected["x"])
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_autocast_leaves_float64_alone() -> None:
    layer = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(tokens())
    assert torch.equal(y, build()(tokens()))


class Seen(nn.Linear):
    """A module that records whether autocast is on while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), x.dtype
        return super().forward(x)


@pytest.mark.parametrize("expert", ["ffn", mlp])
@pytest.mark.parametrize("is_module", [True, False])
def test_a_shared_expert_runs_under_the_callers_autocast_if_it_is_a_module(
    is_module: bool, expert: object
) -> None:
    """Earlier it got bfloat16 rows with float32 weights unless the routed experts were modules."""
    shared = Seen(D_MODEL, D_MODEL) if is_module else 5
    layer = build(dtype=torch.float32, expert=expert, shared_expert=shared)
    x = tokens(dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        routed = plain_pytorch(layer, x)
        with torch.no_grad():
            parameters = [each.bfloat16() for each in layer.shared_expert.parameters()]
            given = ExpertRows(x.bfloat16(), RowGroups(counts=(TOKENS,)), parameters)
            added = layer.shared_expert.compute(given, torch.ones(TOKENS), keep=False)[0]
    if is_module:
        assert shared.seen == (True, torch.bfloat16, torch.bfloat16)
    assert y.dtype == torch.bfloat16 and error(y, (routed + added).double()) < 4e-3
    loss_of(layer, y).backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


def test_autocast_under_no_grad_then_with_gradients_still_trains_modules() -> None:
    """Autocast caches weights that it has cast. One that was cast under no_grad must not be used for
    training.
    """
    layer = build(dtype=torch.float32, expert=mlp)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            layer(tokens(dtype=torch.float32))
        y = layer(tokens(dtype=torch.float32))
    y.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.experts.parameters())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_a_float32_layer_equals_the_definition_to_its_precision(expert: str, n: int) -> None:
    layer = build(dtype=torch.float32, expert=expert, pipeline=n)
    parameters = {name: p.detach().double() for name, p in layer.named_parameters()}
    x = tokens(dtype=torch.float32)
    ys, aux, grads = Definition(parameters, 2, expert).gradients(
        [x.double()], [tokens(seed=4).float().double()], AUX
    )
    expected = {"y": ys[0], "l_aux": aux[0], **grads[0]}
    got = {name: value.double() for name, value in gradients(layer, x).items()}
    assert_same(got, expected, 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_loss_of_no_call_has_the_type_of_a_loss(dtype: torch.dtype) -> None:
    layer = build(dtype=dtype)
    before = layer.l_aux
    layer(tokens(dtype=dtype))
    assert (before.dtype, before.device, before.shape) == (layer.l_aux.dtype, layer.l_aux.device, ())


def test_the_loss_of_no_call_is_on_the_parameters_device() -> None:
    assert build(device="meta").l_aux.is_meta


def test_a_layer_without_parameters_has_a_loss_of_no_call() -> None:
    layer = build(gate="random", expert=nn.ModuleList(nn.Identity() for _ in range(NUM_EXPERTS)))
    assert not list(layer.parameters()) and layer.l_aux == 0
