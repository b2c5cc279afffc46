"""Calls with other types of tensors than plain ones: they work as meant, or an error says what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import MoELayer
from tests.kit import (
    D_MODEL,
    assert_same,
    build,
    gradients,
    one_thread,  # noqa: F401 (a fixture)
    tokens,
)

LENGTHS = (3, 0, 5)


def jagged(*shape: int) -> Tensor:
    parts = tokens(sum(LENGTHS), width=D_MODEL).split(LENGTHS)
    if shape:
        parts = [part.unsqueeze(1).expand(-1, *shape, -1).contiguous() for part in parts]
    return torch.nested.nested_tensor(list(parts), layout=torch.jagged)


def of_values(layer: MoELayer, x: Tensor, run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Returns what `gradients` returns for a call with x, with y and the gradient of x as plain values."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = run(x)
    dy = tokens(sum(LENGTHS), 4)
    ((y.values() * dy).sum() + 0.37 * layer.l_aux).backward()
    found = {name: each.grad for name, each in layer.named_parameters()}
    return {"y": y.values().detach(), "l_aux": layer.l_aux.detach(), "x": x.grad.values(), **found}


@pytest.mark.parametrize("options", [{}, {"pipeline": 2, "memory_reuse": "S4"}, {"gate": "expert_choice"}])
def test_the_values_of_a_jagged_tensor_are_the_tokens(options: dict[str, Any]) -> None:
    layer = build(**options)
    expected = gradients(layer, tokens(sum(LENGTHS)))
    assert_same(of_values(layer, jagged(), layer), expected)
    if not options:
        run = lambda x: checkpoint(layer, x, use_reentrant=False)  # noqa: E731
        assert_same(of_values(layer, jagged(), run), expected)


def test_a_jagged_result_has_its_inputs_offsets() -> None:
    """A residual connection can then add input and result, and both can be padded in the same way."""
    layer, x = build(), jagged()
    y = layer(x)
    assert y.is_nested and y.layout is torch.jagged and y.shape == x.shape
    assert y.offsets() is x.offsets()
    assert (x + y).to_padded_tensor(0.0).shape == (3, 5, D_MODEL)
    wide = jagged(2)
    assert layer(wide).shape == wide.shape
    turned = wide.transpose(1, 2)
    assert layer(turned).shape == turned.shape
    assert torch.equal(layer(turned).values(), layer(turned.values()))


def test_token_ids_may_be_jagged_too() -> None:
    layer, ids = build(gate="hash"), torch.arange(sum(LENGTHS))
    nested = torch.nested.nested_tensor(list(ids.split(LENGTHS)), layout=torch.jagged)
    assert torch.equal(layer(jagged(), nested).values(), layer(tokens(sum(LENGTHS)), ids))


class Named(torch.Tensor):
    """A subclass of Tensor that changes nothing."""


class Logged(torch.Tensor):
    """A subclass of Tensor that records the functions that are called with it."""

    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Logged.seen.append(getattr(function, "__name__", ""))
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Named, Logged, nn.Parameter])
def test_subclasses_of_tensors_give_what_torchs_functions_give(kind: type[Tensor]) -> None:
    layer, linear = build(), nn.Linear(D_MODEL, D_MODEL).double()
    x = tokens()
    given = nn.Parameter(x) if kind is nn.Parameter else x.clone().as_subclass(kind).requires_grad_()
    assert type(layer(given)) is type(linear(given))
    expected = gradients(layer, x)
    layer.zero_grad()
    y = layer(given)
    dy = tokens(x.shape[0], 4)
    ((y * dy).sum() + 0.37 * layer.l_aux).backward()
    assert torch.equal(y.detach().as_subclass(Tensor), expected["y"])
    assert type(layer.l_aux) is Tensor
    assert torch.equal(given.grad.as_subclass(Tensor), expected["x"])
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, expected[name])
    with torch.device("cpu"):  # a mode of functions
        assert type(layer(given)) is type(linear(given))


def test_a_subclass_sees_a_layer_as_one_function() -> None:
    layer, x = build(), tokens().as_subclass(Logged)
    Logged.seen.clear()
    layer(x)
    assert [name for name in Logged.seen if name != "__get__"] == ["_as_function"]


def strided_nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([tokens(3), tokens(2)])


def holey() -> Tensor:
    starts, lengths = torch.tensor([0, 1]), torch.tensor([2, 3])
    return torch.nested.narrow(torch.randn(2, 5, D_MODEL).double(), 1, starts, lengths, layout=torch.jagged)


def masked() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(tokens(), torch.ones(tokens().shape, dtype=torch.bool))


def quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(tokens().float(), 0.1, 0, torch.quint8)


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "nested, strided": (strided_nested, "layout=torch.jagged"),
    "jagged with holes": (holey, r"x \(a NestedTensor\) has unused rows .* x.contiguous\(\)"),
    "jagged at last": (lambda: jagged().transpose(1, 2), "jagged in its last dimension"),
    "masked": (masked, r"x \(a MaskedTensor\) masks single elements: .* mask="),
    "sparse": (lambda: tokens().to_sparse(), r"sparse_coo, but .* pass x.to_dense\(\)"),
    "compressed": (lambda: tokens().to_sparse_csr(), r"sparse_csr, but .* pass x.to_dense\(\)"),
    "complex": (lambda: tokens().to(torch.complex64), "dtype torch.complex64 must be .* pass x.real"),
    "integers": (lambda: tokens().long(), "dtype torch.int64 must be of a floating-point type"),
    "quantised": (quantised, r"dtype torch.quint8 must be .* x.dequantize\(\)"),
    "two tensors": (lambda: TwoTensor(tokens(), tokens()), r"x \(a TwoTensor\) defines its own operators"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tokens_is_named_with_what_to_do(name: str) -> None:
    make, match = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=match):
        build()(make())


@pytest.mark.parametrize(
    "x", [tokens(), torch.randn(2, D_MODEL, device="meta").double()], ids=["real", "meta"]
)
def test_a_layer_is_not_traced_into_a_graph_of_one_batch(x: Tensor) -> None:
    layer = build(device=x.device)
    with pytest.raises(RuntimeError, match=r'make_fx and torch.export cannot trace it: .*backend="pmoe"'):
        make_fx(layer)(x)
    with pytest.raises(RuntimeError, match=r'make_fx and torch.export cannot trace it: .*backend="pmoe"'):
        torch.export.export(layer, (x,), strict=False)


def test_export_is_refused_also_after_a_model_was_compiled_for_pmoe() -> None:
    torch.compile(build(), backend="pmoe")(tokens())  # from now on MoELayer.forward is capture's
    with pytest.raises(RuntimeError, match="make_fx and torch.export cannot trace it"):
        torch.export.export(build(), (tokens(),), strict=False)


def test_callbacks_see_the_values_of_a_jagged_tensor() -> None:
    class Seeing(pmoe.Callback):
        def before_moe_start(self, x: Tensor) -> Tensor:
            seen.append(type(x))
            return x

        def before_moe_end(self, y: Tensor) -> Tensor:
            seen.append(type(y))
            return y

    seen: list[type] = []
    assert build(callbacks=[Seeing()])(jagged()).is_nested
    assert seen == [Tensor, Tensor]
