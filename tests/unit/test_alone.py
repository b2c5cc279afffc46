"""A layer of one rank: the runner for one rank against the runner of all other layers.

The kernels of one rank need a GPU, so their plain definitions run in their place.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.engine.plan.callbacks import Callback
from pmoe.kernels.registry import PRODUCTS, MeasuredChoice
from pmoe.measure.products import _products, slower_kernels
from pmoe.runners import one_rank
from pmoe.warn import GIVEN
from tests.switched import switched_layer

M, H, E = 16, 24, 6


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets the runner for one rank run here, and returns a list of its calls."""
    calls: list[str] = []
    forward = one_rank.OneRankRunner.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("alone")
        return forward(*args, **kwargs)

    monkeypatch.setattr(one_rank, "DEVICES", ("cpu",))
    monkeypatch.setattr(one_rank, "kernel_refusal", lambda *_, **__: None)
    monkeypatch.setattr(one_rank.OneRankRunner, "forward", counted)
    return calls


def make(dtype: torch.dtype = torch.float64, **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(5)
    layer = switched_layer(
        **{"d_model": M, "d_hidden": H, "num_experts": E, "top_k": 2, **options}, dtype=dtype
    )
    with torch.no_grad():
        layer.gate.weight.mul_(3)
    return layer


def step(layer: pmoe.MoELayer, x: Tensor, grad: Tensor) -> dict[str, Tensor | None]:
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = layer(x)
    ((y * grad).sum() + 0.3 * layer.l_aux).backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "l_aux": layer.l_aux.detach(), "x": x.grad, **found}


def compared(
    layer: pmoe.MoELayer, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Runs one step with the runner for one rank, and one with that of all other layers. Returns both
    results.
    """
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(x.dtype)
    found = step(layer, x, grad)
    with monkeypatch.context() as patch:
        patch.setattr(one_rank, "kernel_refusal", lambda *_, **__: "not this time")
        expected = step(layer, x, grad)
    return found, expected


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "relu", "bias": False},
        {"activation": "silu", "top_k": 1},
        {"expert": "swiglu", "bias": False},
        {"expert": "swiglu", "top_k": 4, "z_loss_weight": 0.1},
        {"gate": "switch", "top_k": 1},
        {"top_k": 3, "normalize_gate": False, "pipeline": True},
        {"num_experts": 1, "top_k": 1},
        {"pipeline": "solve"},
    ],
)
def test_it_equals_the_path_of_all_layers(
    options: dict[str, Any], kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make(**options)
    found, expected = compared(layer, tokens(3, 11, M), monkeypatch)
    assert kernels == ["alone"]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=name)


def test_counts_come_to_the_host_when_they_are_asked_for(kernels: list[str], monkeypatch: Any) -> None:
    layer = make()
    layer(tokens(13, M))
    found, max_tokens = layer.tokens_per_expert, layer.max_tokens
    monkeypatch.setattr(one_rank, "kernel_refusal", lambda *_, **__: "not this time")
    layer(tokens(13, M))
    assert kernels and torch.equal(found, layer.tokens_per_expert) and max_tokens == layer.max_tokens == 13
    assert found.dtype == torch.int64 and found.sum() == 26


@pytest.mark.parametrize("shape", [(0, M), (1, M), (2, 0, M)])
def test_no_tokens_and_one(shape: tuple[int, ...], kernels: list[str], monkeypatch: Any) -> None:
    layer = make(expert="swiglu")
    found, expected = compared(layer, tokens(*shape), monkeypatch)
    assert kernels and found["y"].shape == shape
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=name)


def test_all_rows_to_one_expert(kernels: list[str], monkeypatch: Any) -> None:
    layer = make(top_k=1)
    with torch.no_grad():
        layer.gate.weight.zero_()
    found, expected = compared(layer, tokens(9, M), monkeypatch)
    assert kernels and layer.tokens_per_expert.tolist() == [9, 0, 0, 0, 0, 0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=name)


def test_frozen_parameters_get_no_gradient_and_cost_no_product(kernels: list[str]) -> None:
    layer = make()
    layer.experts.requires_grad_(False)
    found = step(layer, tokens(7, M), tokens(7, M))
    assert kernels and found["experts.w1"] is None and found["experts.b2"] is None
    assert found["x"] is not None and found["gate.weight"] is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_as_near_as_the_path_of_all_layers(
    dtype: torch.dtype, kernels: list[str], monkeypatch: Any
) -> None:
    exact = make(expert="swiglu", bias=False)
    layer = make(dtype, expert="swiglu", bias=False)
    layer.load_state_dict({k: v.to(dtype) for k, v in exact.state_dict().items()})
    exact.load_state_dict({k: v.double() for k, v in layer.state_dict().items()})
    x = tokens(40, M, dtype=dtype)
    found, plain = compared(layer, x, monkeypatch)
    wanted, _ = compared(exact, x.double(), monkeypatch)
    for name, value in wanted.items():
        norm = value.norm()
        error, allowed = ((each[name].double() - value).norm() / norm for each in (found, plain))
        assert error <= 2 * allowed + torch.finfo(dtype).eps / 4, name


def test_under_autocast_rows_and_parameters_are_cast(kernels: list[str], monkeypatch: Any) -> None:
    layer, x = make(torch.float32), tokens(20, M, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = compared(layer, x, monkeypatch)
    assert kernels and found["y"].dtype == torch.bfloat16
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.02, msg=name)


def test_without_gradients_nothing_is_saved(kernels: list[str]) -> None:
    layer, x = make(), tokens(8, M)
    expected = layer(x)
    with torch.no_grad():
        y = layer(x)
    assert len(kernels) == 2 and not y.requires_grad
    torch.testing.assert_close(y, expected.detach())


def test_saved_bytes_are_the_input_the_hidden_the_logits_and_12_a_slot(kernels: list[str]) -> None:
    num_tokens, top_k = 64, 4
    layer = make(torch.bfloat16, expert="swiglu", bias=False, top_k=top_k)
    x = tokens(num_tokens, M, dtype=torch.bfloat16).requires_grad_()
    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    held = 2 * num_tokens * M + 4 * num_tokens * top_k * H
    places = 12 * num_tokens * top_k + 4 * num_tokens * E
    assert kernels and y.shape == x.shape
    assert sum(kept.values()) == held + places + 2 * 4 * E  # rows by expert, and their running sums


def test_backward_twice_checkpointing_and_copies(kernels: list[str]) -> None:
    layer, x = make(), tokens(10, M).requires_grad_()
    y = layer(x)
    (once,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(once, again)
    z = checkpoint(layer, x, use_reentrant=False)
    (third,) = torch.autograd.grad(z.sum(), x)
    assert torch.equal(once, third) and torch.equal(copy.deepcopy(layer)(x), y)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    assert len(kernels) >= 4


def test_input_that_is_not_contiguous(kernels: list[str], monkeypatch: Any) -> None:
    layer = make()
    whole = tokens(12, 2 * M)
    for x in (whole[:, ::2], whole[::2, :M], whole[:, 1 : M + 1]):
        found, expected = compared(layer, x, monkeypatch)
        torch.testing.assert_close(found["y"], expected["y"], rtol=1e-12, atol=1e-13)
    assert len(kernels) == 3


class Writes(TorchDispatchMode):
    """Notes the names of operators that return a tensor of a shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape == self.shape:
            self.names.append(func.overloadpacket.__name__)
        return result


def test_the_gates_product_adds_its_gradient_of_the_tokens(kernels: list[str], monkeypatch: Any) -> None:
    """Autograd would launch a sum of its own, which reads both gradients once more and writes a third."""
    layer, x = make(bias=False), tokens(7, M).requires_grad_()
    added = {}
    for way in (None, "not this time"):
        monkeypatch.setattr(one_rank, "kernel_refusal", lambda *_, way=way, **__: way)
        y = layer(x)
        with Writes(7, M) as writes:
            (y.sum() + layer.l_aux).backward()
        added[way] = [name for name in writes.names if name in ("add", "add_", "addmm_", "mm")]
    # Here PyTorch expressions stand in for the kernel that adds a token's rows: an addition for each choice.
    of_rows = ["add_"] * layer.gate.top_k
    assert added[None] == [*of_rows, "addmm_"] and "add" in added["not this time"]


class Operators(TorchDispatchMode):
    """Notes the names of pmoe's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "pmoe":
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_rows_are_moved_without_the_dispatch_of_operators(kernels: list[str]) -> None:
    """Each of the four permutes of a step passed torch's wrappers for operators, which launch nothing."""
    layer, x = make(bias=False), tokens(7, M).requires_grad_()
    with Operators() as operators:
        (layer(x).sum() + layer.l_aux).backward()
    assert kernels == ["alone"]
    assert operators.names == {"route", "route_backward"}  # which the mode itself asks for


class SeesRows(Callback):
    """Takes the rows that dispatch will send, which the path of one rank never makes."""

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows


@pytest.mark.parametrize(
    "options",
    [
        {"memory_reuse": "S4", "pipeline": 2},
        {"pipeline": 2},
        {"capacity_factor": 1.0},
        {"gate": "sigmoid"},
        {"order": "einsum"},
        {"shared_expert": 8},
        {"callbacks": [SeesRows()]},
        {"bypass_local": False},
        {"send_once": True},
        {"check_finite": True},
        {"sequential": True},
        {"expert": lambda: torch.nn.Linear(M, M)},
        {"gate": pmoe.MoELayer(M, H, E, top_k=2).gate},
    ],
)
def test_layers_that_ask_for_more_take_the_path_of_all_layers(
    options: dict[str, Any], kernels: list[str]
) -> None:
    make(**options).double()(tokens(8, M))
    assert not kernels


def test_bad_input_is_refused_as_ever(kernels: list[str]) -> None:
    layer = make()
    with pytest.raises(ValueError, match=r"d_model \(16\)"):
        layer(tokens(3, M + 1))
    with pytest.raises(ValueError, match=r"float32 must be of the layer's dtype"):
        layer(tokens(3, M).float())
    assert not kernels


def test_without_a_device_for_them_the_kernels_say_why() -> None:
    layer, x = make(torch.bfloat16), tokens(3, M, dtype=torch.bfloat16)
    why = one_rank.kernel_refusal(
        layer.gate, layer.experts, x, torch.bfloat16, ranks=layer.ranks, needs_grad=True
    )
    assert why == "3 tokens on cpu"


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_that_another_way_computes_faster_keeps_the_layer_off_this_path(bias: bool) -> None:
    layer, device = make(torch.bfloat16, bias=bias), torch.device("cpu")

    def slower(needs_grad: bool) -> str | None:
        return slower_kernels(layer.experts, torch.bfloat16, device, 64, needs_grad=needs_grad)

    with PRODUCTS.forcing("pmoe"):
        assert slower(True) is None
    with PRODUCTS.forcing("grouped_mm"):
        assert slower(False) == "grouped_mm is chosen for the forward product of w1 with 64 rows"


@pytest.mark.parametrize(
    "slowest, why", [(1.04, None), (1.07, "products of 64 rows take 6.42 ms by pmoe, 6 ms")]
)
def test_products_that_are_a_little_slower_are_made_up_for_by_what_is_launched_with_them(
    slowest: float, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, device = make(torch.bfloat16), torch.device("cpu")
    competing = {"pmoe": 1e-3 * slowest, "grouped_mm": 1e-3}
    measured = MeasuredChoice(choice="grouped_mm", seconds=competing, when="2026-01-31T12:00:00+00:00")
    asked = [request for _, request in _products(layer.experts, torch.bfloat16, device, 64, True)]
    monkeypatch.setattr(PRODUCTS, "measured", dict.fromkeys(asked, measured))
    monkeypatch.setattr(PRODUCTS, "competing", lambda request: tuple(competing))

    def slower() -> str | None:
        return slower_kernels(layer.experts, torch.bfloat16, device, 64, needs_grad=True)

    GIVEN.clear()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        found = [slower(), slower()]
    assert found == [None if why is None else why + " by the fastest"] * 2
    told = [] if why is None else [f"pmoe: one rank's kernels are not used where they are slower: {found[0]}"]
    assert [str(each.message) for each in given] == told
    with PRODUCTS.forcing("pmoe"):
        assert slower() is None
    with PRODUCTS.forcing("loop"):
        assert slower() == "loop is chosen for the forward product of w1 with 64 rows"
    torch.use_deterministic_algorithms(True)
    try:
        assert slower() == "loop is chosen for the forward product of w1 with 64 rows"
    finally:
        torch.use_deterministic_algorithms(False)
    PRODUCTS.measured.popitem()
    assert slower() == "loop is chosen for the weight product of w2 with 64 rows"
