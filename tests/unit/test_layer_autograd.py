"""MoELayer as a node of autograd's graph: passes in any order, frozen parameters, copies."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.kit import assert_same, build, gradients, loss_of, tokens
from tests.own_experts import mlp

# ---- modes of PyTorch


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("n", [1, 2])
def test_without_gradients_the_output_is_the_same_and_unattached(
    mode: Callable[[], Any], expert: object, n: int
) -> None:
    layer = build(expert=expert, pipeline=n)
    expected = layer(tokens())
    assert expected.requires_grad
    with mode():
        y = layer(tokens())
    assert not y.requires_grad
    assert not layer.l_aux.requires_grad
    assert torch.equal(y, expected)


def test_eval_changes_nothing_and_keeps_the_graph() -> None:
    expected, got = gradients(build(), tokens()), gradients(build().eval(), tokens())
    assert_same(got, expected)


def test_l_aux_is_attached_to_the_graph_of_its_forward() -> None:
    layer = build()
    layer(tokens())
    first = layer.l_aux
    layer(tokens(5))
    assert first is not layer.l_aux
    first.backward()
    assert layer.gate.weight.grad.any()
    assert layer.experts.w1.grad is None


def test_gradients_accumulate_over_several_batches() -> None:
    layer = build(pipeline=2)
    parts = [gradients(layer, x) for x in (tokens(7), tokens(5, seed=8))]
    layer.zero_grad()
    for x in (tokens(7), tokens(5, seed=8)):
        y = layer(x)
        loss_of(layer, y).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, parts[0][name] + parts[1][name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("expert", ["ffn", mlp])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_several_forwards_may_run_backward_in_any_order(order: tuple[int, ...], expert: object) -> None:
    layer = build(pipeline=2, expert=expert)
    xs = [tokens(7), tokens(0), tokens(5, seed=8)]
    expected = [gradients(layer, x) for x in xs]
    leaves = [x.clone().requires_grad_() for x in xs]
    losses = [loss_of(layer, layer(x)) for x in leaves]
    for i in order:
        layer.zero_grad(set_to_none=True)
        losses[i].backward()
        assert torch.equal(leaves[i].grad, expected[i]["x"])
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, expected[i][name]), name


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("n", [1, 3])
def test_a_retained_graph_gives_the_same_gradients_twice(expert: object, n: int) -> None:
    layer = build(expert=expert, pipeline=n)
    x = tokens().requires_grad_()
    loss = loss_of(layer, layer(x))
    leaves = [x, *layer.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("nonlinear", [False, True])
def test_a_second_derivative_is_refused(nonlinear: bool) -> None:
    """It is refused even if the incoming gradient is a constant, or only the gate could be differentiated."""
    layer = build()
    x = tokens().requires_grad_()
    y = layer(x)
    with pytest.raises(RuntimeError, match=r"no second derivative: create_graph \(True\) must be False"):
        torch.autograd.grad((y.square() if nonlinear else y).sum(), x, create_graph=True)


@pytest.mark.parametrize("options", [{}, {"pipeline": 2, "memory_reuse": "S4"}])
def test_several_gradients_in_one_tensor_are_refused_by_name(options: dict[str, Any]) -> None:
    """torch's error named an operator without a batching rule, and no argument."""
    layer, x = build(**options), tokens().requires_grad_()
    y = layer(x)
    with pytest.raises(RuntimeError, match=r"is_grads_batched \(True\) of torch.autograd.grad must be False"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape, dtype=y.dtype), is_grads_batched=True)
    with pytest.raises(RuntimeError, match=r"vectorize \(True\) of torch.autograd.functional"):
        torch.autograd.functional.jacobian(layer, x, vectorize=True)


@pytest.mark.parametrize("name", ["vmap", "grad", "vjp", "jvp", "jacrev"])
@pytest.mark.parametrize("has_grad", [True, False])
def test_transforms_of_torch_func_are_refused_by_name(name: str, has_grad: bool) -> None:
    layer = build()
    x = tokens()
    ways: dict[str, Callable[[], object]] = {
        "vmap": lambda: torch.func.vmap(layer)(x[None]),
        "grad": lambda: torch.func.grad(lambda x: layer(x).sum())(x),
        "vjp": lambda: torch.func.vjp(layer, x),
        "jvp": lambda: torch.func.jvp(layer, (x,), (x,)),
        "jacrev": lambda: torch.func.jacrev(layer)(x),
    }
    with (
        torch.set_grad_enabled(has_grad),
        pytest.raises(ValueError, match=r"x \(inside the transform \w+ of torch.func\) must be outside"),
    ):
        ways[name]()


def test_transforms_of_parameters_are_refused_by_name() -> None:
    layer = build()
    call = torch.func.functional_call
    parameters = dict(layer.named_parameters())
    with pytest.raises(ValueError, match=r"x \(inside the transform grad of torch.func\)"):
        torch.func.grad(lambda given: call(layer, given, (tokens(),)).sum())(parameters)


@pytest.mark.parametrize("num_tokens", [6, 300])
def test_a_trace_is_refused(num_tokens: int) -> None:
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"x \(inside torch.jit.trace\) must be outside"),
    ):
        torch.jit.trace(build(), (tokens(num_tokens),), check_trace=False)


def test_a_forward_mode_derivative_is_refused() -> None:
    layer = build()
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="a MoELayer has no forward-mode derivative: differentiate it by"),
    ):
        layer(torch.autograd.forward_ad.make_dual(tokens(), tokens()))


def test_parameters_changed_between_forward_and_backward_are_noticed() -> None:
    for expert in ("ffn", mlp):
        layer = build(expert=expert)
        y = layer(tokens())
        with torch.no_grad():
            for parameter in layer.experts.parameters():
                parameter += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
def test_a_layer_used_twice_in_one_graph_sums_its_gradients(expert: object) -> None:
    layer = build(expert=expert, pipeline=2)
    x = tokens().requires_grad_()
    (layer(layer(x)) * tokens(seed=4)).sum().backward()
    got = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}

    first, second = build(expert=expert, pipeline=2), build(expert=expert, pipeline=2)
    x = tokens().requires_grad_()
    (second(first(x)) * tokens(seed=4)).sum().backward()
    expected = {"x": x.grad}
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        expected[name] = a.grad + b.grad
    assert_same(got, expected, 1e-13)


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("frozen", ["x", "gate", "experts", "experts.1"])
def test_what_is_frozen_has_no_gradient_and_the_rest_is_unchanged(
    frozen: str, n: int, expert: object
) -> None:
    expected = gradients(build(expert=expert, pipeline=n), tokens())
    layer = build(expert=expert, pipeline=n)
    names = [name for name, _ in layer.named_parameters()]
    if frozen == "experts.1":
        without = {names[1]}
    else:
        without = {name for name in names if name.startswith(frozen + ".")}
    for name in without:
        layer.get_parameter(name).requires_grad_(False)
    x = tokens().requires_grad_(frozen != "x")
    loss_of(layer, layer(x)).backward()
    for name, parameter in layer.named_parameters():
        if name in without:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, expected[name]), name
    assert x.grad is None if frozen == "x" else torch.equal(x.grad, expected["x"])


def test_with_everything_frozen_there_is_no_graph() -> None:
    layer = build().requires_grad_(False)
    assert not layer(tokens()).requires_grad
    assert not layer.l_aux.requires_grad
    x = tokens().requires_grad_()
    layer(x).sum().backward()
    assert x.grad.any()


# ---- copies


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_computes_the_same_and_shares_nothing(duplicate: Callable[[Any], Any], expert: object) -> None:
    layer = build(expert=expert, pipeline=2)
    expected = gradients(layer, tokens())
    layer(tokens())  # so that l_aux is attached to a graph
    model = duplicate(nn.Sequential(nn.Identity(), layer))
    twin = model[1]
    assert layer.l_aux.requires_grad
    assert not twin.l_aux.requires_grad and twin.l_aux == 0
    twin.zero_grad()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert_same(gradients(twin, tokens()), expected)
    assert not any(
        parameter.grad.data_ptr() == p.grad.data_ptr()
        for parameter, p in zip(layer.parameters(), twin.parameters(), strict=True)
    )
