"""Calls without values, on the meta device or with fake tensors: only the shapes of a real call."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import pmoe
from pmoe import MoELayer
from pmoe.gates import GATES
from tests.kit import AUX, D_HIDDEN, D_MODEL, NUM_EXPERTS, TOP_K, build, tokens
from tests.own_experts import mlp


class Scaling(nn.Module, pmoe.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(D_MODEL))

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * self.factor

    def before_moe_end(self, y: Tensor) -> Tensor:
        return y.double()


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "modules": {"expert": mlp},
    "shared": {"shared_expert": 5, "shared_gate": True, "pipeline": 2, "memory_reuse": "S4"},
    "fused": {"fused": True},
    "searched": {"pipeline": True, "memory_reuse": True},
    "budget": {"pipeline": True, "memory_budget": "1MiB"},
    "padded": {"capacity_factor": 1.0, "pad_to_capacity": True},
    **{gate: {"gate": gate, "top_k": 1 if gate == "switch" else TOP_K} for gate in GATES},
}


def made(name: str, **options: Any) -> MoELayer:
    given = {"top_k": TOP_K, **OPTIONS[name], **options}
    return MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, **given)


def facts(layer: MoELayer, x: Tensor) -> dict[str, Any]:
    """Returns everything about a step except values: shapes, dtypes, devices."""
    ids = {"token_ids": torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)}
    y = layer(x, **(ids if getattr(layer.gate, "needs_token_ids", False) else {}))
    (y.sum() + AUX * layer.l_aux).backward()
    gradients = {name: each.grad for name, each in layer.named_parameters()}
    shapes = {name: None if each is None else (each.shape, each.dtype) for name, each in gradients.items()}
    kept = (layer.l_aux.shape, layer.l_aux.dtype)
    return {
        "y": (y.shape, y.dtype, y.requires_grad),
        "l_aux": kept,
        "x": (x.grad.shape, x.grad.dtype),
        **shapes,
    }


def assert_alike(got: dict[str, Any], real: dict[str, Any]) -> None:
    """Compares the facts of a step without values with those of a real one.

    A parameter without a gradient in the real step may have one in the step without values.
    """
    assert got.keys() == real.keys()
    assert not {name: (got[name], each) for name, each in real.items() if each not in (None, got[name])}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", OPTIONS)
def test_fake_tensors_give_the_shapes_and_types_of_a_real_call(name: str, dtype: Any) -> None:
    autocast = functools.partial(torch.autocast, "cpu", dtype or torch.bfloat16, enabled=dtype is not None)
    options = {**OPTIONS[name], **({"fused": False} if name == "fused" else {})}
    layer = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, **{"top_k": TOP_K, **options})
    with autocast():
        real = facts(layer, torch.randn(3, 2, D_MODEL, requires_grad=True))
    with FakeTensorMode(), autocast():
        layer = made(name)
        x = torch.randn(3, 2, D_MODEL, requires_grad=True)
        got = facts(layer, x)
        assert isinstance(layer(x, torch.zeros(3, 2, dtype=torch.int64)), FakeTensor)
    assert_alike(got, real)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_meta_device_gives_the_shapes_and_types_of_a_real_call(name: str) -> None:
    options = {**OPTIONS[name], **({"fused": False} if name == "fused" else {})}
    layer = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, **{"top_k": TOP_K, **options})
    real = facts(layer, torch.randn(3, 2, D_MODEL, requires_grad=True))
    with torch.device("meta"):
        layer = made(name)
        got = facts(layer, torch.randn(3, 2, D_MODEL, requires_grad=True))
    assert layer.l_aux.is_meta
    assert_alike(got, real)


def test_callbacks_with_parameters_take_part() -> None:
    with FakeTensorMode():
        layer = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, callbacks=[Scaling()])
        found = facts(layer, torch.randn(5, D_MODEL, requires_grad=True))
    assert found["y"][1] == torch.float64 and found["callback_modules.0.factor"] is not None


@pytest.mark.parametrize("fake", ["layer", "input"])
def test_one_of_both_may_be_real(fake: str) -> None:
    real_layer, real_x = made("default"), torch.randn(5, D_MODEL, requires_grad=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer, x = made("default"), torch.randn(5, D_MODEL, requires_grad=True)
        found = facts(layer if fake == "layer" else real_layer, real_x if fake == "layer" else x)
    assert found["y"] == ((5, D_MODEL), torch.float32, True)
    grad = (layer if fake == "layer" else real_layer).experts.w1.grad
    assert isinstance(grad, FakeTensor), "zeros must not look like a gradient"


def test_nothing_is_remembered_and_a_real_call_follows() -> None:
    layer = made("default")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        layer(mode.from_tensor(torch.randn(5, D_MODEL)))
        assert layer.ran is None and layer.row_counts is None
    y = layer(torch.randn(5, D_MODEL))
    assert type(y) is Tensor and layer.ran is not None
    assert layer.tokens_per_expert.sum() == 5 * TOP_K


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_graph(mode: Any) -> None:
    with torch.device("meta"), mode():
        layer = made("default")
        assert not layer(torch.randn(5, D_MODEL)).requires_grad and not layer.l_aux.requires_grad


@pytest.mark.parametrize(
    "x, match",
    [
        (torch.randn(3, D_MODEL + 1, device="meta"), r"x of shape \(3, 7\) must end in d_model \(6\)"),
        (torch.randn(3, D_MODEL, device="meta").double(), "dtype torch.float64 must be of the layer's dtype"),
    ],
    ids=["shape", "dtype"],
)
def test_what_a_real_call_refuses_is_refused(x: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        made("default", device="meta")(x)


def test_a_meta_layer_that_meets_values_says_how_it_gets_some() -> None:
    layer = made("default", device="meta")
    with pytest.raises(ValueError, match=r"\(meta\): call layer.to_empty\(device=...\) and"):
        layer(torch.randn(3, D_MODEL))
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.randn(3, D_MODEL)).isfinite().all()


def test_a_layer_with_values_refuses_an_input_without() -> None:
    with pytest.raises(ValueError, match=r"x on meta must be where the layer's parameters are \(cpu\)"):
        made("default")(torch.randn(3, D_MODEL, device="meta"))


def test_torchs_memory_estimator_goes_through_a_model() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(D_MODEL, D_MODEL), made("default"), nn.Linear(D_MODEL, D_MODEL))
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            model(torch.randn(5, D_MODEL)).sum().backward()
    [peak] = tracker.get_tracker_snapshot("peak").values()
    assert peak["Total"] > 4 * sum(each.numel() for each in model.parameters())


def test_a_call_that_dynamo_does_not_look_into_has_a_shape() -> None:
    """torch.compile runs such a function with fake tensors, to find out what it returns."""
    layer = build()
    inside = torch.compiler.allow_in_graph(lambda x: layer(x))
    torch._dynamo.reset()
    try:
        compiled = torch.compile(lambda x: inside(x) * 2, backend="eager", fullgraph=True)
        assert torch.equal(compiled(tokens()), layer(tokens()) * 2)
    finally:
        torch._dynamo.reset()


def test_a_router_outside_of_the_layer_has_its_gradient() -> None:
    gate = pmoe.gates.ExternalGate()
    with FakeTensorMode():
        layer = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, TOP_K, gate=gate)
        x, weight = torch.randn(5, D_MODEL), torch.rand(5, TOP_K, requires_grad=True)
        with gate.routing(torch.zeros(5, TOP_K, dtype=torch.int64), weight):
            layer(x).sum().backward()
        assert weight.grad.shape == weight.shape
