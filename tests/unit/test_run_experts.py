"""`pmoe.run_experts`: experts and routing of the caller, against a loop in float64."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import pmoe
from pmoe.layer import run_experts
from tests.kit import one_thread
from tests.reference import relative_error

__all__ = ["one_thread"]

T, K, E, M, H = 9, 2, 4, 6, 5


def squared(hidden: Tensor) -> Tensor:
    return F.relu(hidden).square()


def swiglu(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": swiglu,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "squared": squared,
}


class Owner(nn.Module):
    """A module with experts of its own, as a framework has them."""

    def __init__(self, activation: str, *, bias: bool, transposed: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        columns = 2 * H if activation == "swiglu" else H
        shapes = {"w1": (E, columns, M), "w2": (E, M, H)}
        for name, (experts, rows, width) in shapes.items():
            shape = (experts, width, rows) if transposed else (experts, rows, width)
            setattr(self, name, nn.Parameter(torch.randn(*shape, dtype=torch.float64)))
        for name, width in (("b1", columns), ("b2", M)):
            value = nn.Parameter(torch.randn(E, width, dtype=torch.float64)) if bias else None
            self.register_parameter(name, value)
        self.activation = activation
        self.transposed = transposed

    def arguments(self) -> dict[str, Any]:
        own = {"b1": self.b1, "b2": self.b2, "transposed": self.transposed}
        activation: Any = squared if self.activation == "squared" else self.activation
        return {"w1": self.w1, "w2": self.w2, "activation": activation, **own}


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts (E is none), and weights."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(T, M, dtype=torch.float64, generator=generator)
    index = torch.rand(T, E + 1, generator=generator).topk(K).indices
    weights = torch.rand(T, K, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), index, weights.requires_grad_()


def routed_without_gradients() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts, of which each exists, and weights, none of which needs a gradient."""
    x, index, weights = routed()
    return x.detach(), index.clamp(max=E - 1), weights.detach()


def by_loop(owner: Owner, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for k in range(index.shape[1]):
            e = int(index[t, k])
            if e == E:
                continue
            w1, w2 = (w[e].t() if owner.transposed else w[e] for w in (owner.w1, owner.w2))
            b1, b2 = (None if b is None else b[e] for b in (owner.b1, owner.b2))
            hidden = FUNCTIONS[owner.activation](F.linear(x[t], w1, b1))
            y = y + F.one_hot(torch.tensor(t), x.shape[0])[:, None] * weights[t, k] * F.linear(hidden, w2, b2)
    return y


def gradients(y: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(6))
    return list(torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy))


@pytest.mark.parametrize("options", [{}, {"pipeline": 2, "memory_reuse": "S4"}], ids=["default", "S4"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_output_and_every_gradient_equal_the_loop(
    activation: str, bias: bool, transposed: bool, options: dict[str, Any]
) -> None:
    owner = Owner(activation, bias=bias, transposed=transposed)
    x, index, weights = routed()
    y = pmoe.run_experts(owner, x, index, weights, **owner.arguments(), **options)
    wanted = by_loop(owner, x, index, weights)
    assert relative_error(y.detach(), wanted.detach()) < 1e-12
    leaves = (x, weights, owner.w1, owner.w2, owner.b1, owner.b2)
    for got, value in zip(gradients(y, *leaves), gradients(wanted, *leaves), strict=True):
        assert relative_error(got, value) < 1e-12


@pytest.mark.parametrize("num_tokens", [1, T])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_a_second_call_without_gradients_goes_the_short_way(activation: str, num_tokens: int) -> None:
    owner = Owner(activation, bias=True, transposed=False).eval()
    x, index, weights = (each[:num_tokens] for each in routed_without_gradients())
    with torch.no_grad():
        for _ in range(2):
            y = pmoe.run_experts(owner, x, index, weights, **owner.arguments())
        assert relative_error(y, by_loop(owner, x, index, weights)) < 1e-12
    model = nn.ModuleDict({"experts": owner})
    (layer,) = pmoe.stats(model).layers
    assert (layer.name, layer.path) == ("experts", "few rows")
    assert sum(layer.tokens_per_expert) == num_tokens * K


def test_an_option_that_is_wrong_in_a_later_call_is_named_on_the_short_way_too() -> None:
    owner = Owner("swiglu", bias=False, transposed=False).eval()
    x, index, weights = routed_without_gradients()
    with torch.no_grad():
        pmoe.run_experts(owner, x, index, weights, **owner.arguments())
        with pytest.raises(ValueError, match=r"pipeline \(1000000000\) must be"):
            pmoe.run_experts(owner, x, index, weights, **owner.arguments(), pipeline=10**9)


def test_calls_that_alternate_between_options_use_two_layers_again() -> None:
    """Before, a layer was built at each change of options, and had to measure and compare everything again.

    This is the case of a model that is evaluated with other options than it is trained with.
    """
    owner = Owner("gelu", bias=True, transposed=False)
    used = []
    outputs = []
    for number in range(6):
        options: dict[str, Any] = {"pipeline": 2, "memory_reuse": "S4"} if number % 2 else {"pipeline": 1}
        y = pmoe.run_experts(owner, *routed(), **owner.arguments(), **options)
        y.sum().backward()
        outputs.append(y.detach())
        used.append(run_experts.layers(owner)[""])
    assert used[0] is used[2] is used[4] and used[1] is used[3] is used[5] and used[0] is not used[1]
    assert all(relative_error(y, outputs[0]) < 1e-12 for y in outputs)
    with pytest.raises(ValueError, match=r"pipeline \(0\) must be"):
        pmoe.run_experts(owner, *routed(), **owner.arguments(), pipeline=0)
    assert run_experts.layers(owner)[""] is used[-1]


def test_of_many_options_the_layers_of_the_last_ones_are_kept() -> None:
    owner = Owner("gelu", bias=True, transposed=False)
    first = None
    for n in (*range(1, run_experts.MOST_LAYERS + 2), 1):
        pmoe.run_experts(owner, *routed(), **owner.arguments(), pipeline=n)
        first = first or run_experts.layers(owner)[""]
    assert len(run_experts._layers[owner].earlier) == run_experts.MOST_LAYERS - 1
    assert run_experts.layers(owner)[""] is not first


def test_statistics_of_the_short_way_are_those_of_the_call_if_its_index_is_overwritten() -> None:
    owner = Owner("swiglu", bias=False, transposed=False).eval()
    x, index, weights = routed_without_gradients()
    with torch.no_grad():
        for _ in range(2):
            pmoe.run_experts(owner, x, index, weights, **owner.arguments())
    wanted = index.reshape(-1).bincount(minlength=E)
    index.zero_()
    (layer,) = run_experts.layers(owner).values()
    assert layer.tokens_per_expert.equal(wanted)


NARROW = [(4, torch.int8), (128, torch.int8), (4, torch.uint8), (256, torch.uint8), (4, torch.int32)]
WIDE = [(4, torch.uint16), (4, torch.uint32), (4, torch.uint64)]


@pytest.mark.parametrize("num_experts, dtype", NARROW + WIDE)
def test_the_numbers_of_experts_may_be_integers_of_any_dtype(num_experts: int, dtype: torch.dtype) -> None:
    """Numbers from 0 to 255 fit into uint8, but E = 256, which means no expert, does not.

    In a comparison with uint8 numbers torch makes 0 of it, so rows of expert 0 were left out. Calls with
    wider unsigned integers raised.
    """
    owner = nn.Module().eval()
    generator = torch.Generator().manual_seed(5)
    w1 = torch.randn(num_experts, H, M, dtype=torch.float64, generator=generator)
    w2 = torch.randn(num_experts, M, H, dtype=torch.float64, generator=generator)
    x, _, weights = routed_without_gradients()
    index = torch.tensor([[0, num_experts - 1]] * T)
    for is_short_way in (False, True, True):
        with torch.set_grad_enabled(not is_short_way):
            wanted, y = (
                pmoe.run_experts(owner, x, numbers, weights, w1, w2, activation="relu")
                for numbers in (index, index.to(dtype))
            )
        assert torch.equal(y, wanted)
        (layer,) = run_experts.layers(owner).values()
        assert int(layer.tokens_per_expert[-1]) == T


def test_tracing_the_short_way_is_refused() -> None:
    """A trace would keep the experts of the traced batch."""
    owner = Owner("swiglu", bias=False, transposed=False).eval().requires_grad_(False)
    x, index, weights = routed_without_gradients()

    def run(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return pmoe.run_experts(owner, x, index, weights, **owner.arguments())

    with torch.no_grad():
        run(x, index, weights)
        with pytest.raises(ValueError, match="inside torch.jit.trace"):
            torch.jit.trace(run, (x, index, weights), check_trace=False)
        with pytest.raises(RuntimeError, match="make_fx and torch.export cannot trace it"):
            make_fx(run)(x, index, weights)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert run(mode.from_tensor(x), index, weights).shape == x.shape


def test_weights_of_integers_are_refused_on_both_ways() -> None:
    owner = Owner("swiglu", bias=False, transposed=False).eval()
    x, index, weights = routed_without_gradients()
    with torch.no_grad():
        for _ in range(2):
            pmoe.run_experts(owner, x, index, weights, **owner.arguments())
            with pytest.raises(
                TypeError, match=r"weight of dtype torch.int64; it must be of a floating-poin"
            ):
                pmoe.run_experts(owner, x, index, torch.ones_like(index), **owner.arguments())


def test_a_module_knows_nothing_of_its_layer_and_a_copy_has_one_of_its_own() -> None:
    owner = Owner("swiglu", bias=False, transposed=False)
    names = set(owner.state_dict())
    x, index, weights = routed()
    pmoe.run_experts(owner, x, index, weights, **owner.arguments())
    assert set(owner.state_dict()) == names
    other = copy.deepcopy(owner)
    with torch.no_grad():
        other.w2.mul_(2)
    y = pmoe.run_experts(other, x, index, weights, **other.arguments())
    assert relative_error(y.detach(), by_loop(other, x, index, weights).detach()) < 1e-12


@pytest.mark.parametrize("other_owner", [False, True])
def test_an_inner_call_for_the_same_module_is_refused_and_one_for_another_module_runs(
    other_owner: bool,
) -> None:
    """The inner call waited forever for the outer one."""
    owner = Owner("relu", bias=False, transposed=False)
    inner = Owner("relu", bias=False, transposed=False) if other_owner else owner
    x, index, weights = routed()
    results: list[Any] = []

    def activation(hidden: Tensor) -> Tensor:
        if hidden.shape[0] > 1:  # not the row with which the activation is checked
            pmoe.run_experts(inner, x, index, weights, **inner.arguments())
        return F.relu(hidden)

    def call() -> None:
        try:
            values = {**owner.arguments(), "activation": activation}
            results.append(pmoe.run_experts(owner, x, index, weights, **values))
        except RuntimeError as error:
            results.append(str(error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    (result,) = results
    if other_owner:
        assert relative_error(result.detach(), by_loop(owner, x, index, weights).detach()) < 1e-12
    else:
        assert result.startswith("owner (Owner) must not be the module whose experts are running: the act")
    y = pmoe.run_experts(owner, x, index, weights, **owner.arguments())
    assert relative_error(y.detach(), by_loop(owner, x, index, weights).detach()) < 1e-12


def change(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments.update(values)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "owner": ({"owner": 3}, r"owner \(3\) must be a torch.nn.Module"),
    "index": ({"index": [0]}, r"index \(.*\) must be a tensor"),
    "option": (
        {"capacity_factor": 1.0},
        r"capacity_factor \(1.0\) must be left out: the options are pipeline",
    ),
    "typo": ({"piepline": 2}, r"piepline \(2\) must be left out: .*: did you mean pipeline\?"),
    "value": ({"pipeline": -1}, r"pipeline \(-1\)"),
    "chunks": ({"pipeline": 10**9}, r"pipeline \(1000000000\) must be .* at most 1024: .* pass True"),
    "activation": ({"activation": "tanh"}, r"activation \('tanh'\) must be one of 'swiglu', 'silu'"),
    "weights": (
        {"weights": torch.ones(T, K + 1)},
        r"weights \(shape \(9, 3\)\) must be of the shape of index",
    ),
    "b1": ({"b1": torch.ones(E, 2 * H).double()}, "b1 and b2 must both be tensors, or both be None"),
    "dtype": (
        {"w2": torch.ones(E, M, H)},
        r"w2 \(torch.float32 on cpu\) must have the dtype and device of w1",
    ),
    "layout": ({"transposed": True}, r"w1 of shape \(4, 10, 6\) must fit w2 of shape \(4, 6, 5\)"),
    "dims": ({"w1": torch.ones(E, M).double()}, r"w1 of shape \(4, 6\) and w2 .* must have three dimensions"),
    "range": ({"index": torch.full((T, K), E + 1)}, "expert"),
    "width": ({"x": torch.ones(T, M + 1).double()}, r"d_model \(6\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_named_with_its_value(name: str) -> None:
    owner = Owner("swiglu", bias=False, transposed=False)
    x, index, weights = routed()
    values, text = WRONG[name]
    arguments = {"owner": owner, "x": x, "index": index, "weights": weights, **owner.arguments(), **values}
    with pytest.raises((TypeError, ValueError), match=text):
        pmoe.run_experts(**arguments)
