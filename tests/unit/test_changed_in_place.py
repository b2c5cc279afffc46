"""Parameters and buffers that change in place between a layer's forward and backward pass.

Either backward raises, as torch's own layers do, or it does not need the old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import MoELayer, Restore
from pmoe.schedule.restore import ALL_PAIRS
from tests.kit import (
    D_MODEL,
    build,
    loss_of,
    one_thread,  # noqa: F401 (a fixture)
    tokens,
)
from tests.own_experts import Counting, mlp
from tests.spread import spread

CHANGED = "modified by an inplace operation"


class AfterDispatch(nn.Module, pmoe.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(D_MODEL, dtype=torch.float64) * 1.5)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, D_MODEL, dtype=torch.float64))

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return (rows * self.scale) @ self.weight


class AtTheEnd(nn.Module, pmoe.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(D_MODEL, dtype=torch.float64) * 1.5)

    def before_moe_end(self, y: Tensor) -> Tensor:
        return y @ self.weight


MAKERS: dict[str, Callable[..., MoELayer]] = {
    "ffn": lambda **options: build(pipeline=2, **options),
    "swiglu": lambda **options: build(expert="swiglu", **options),
    "modules": lambda **options: build(expert=mlp, **options),
    "modules, two chunks": lambda **options: build(expert=mlp, pipeline=2, **options),
    "buffers": lambda **options: build(expert=Counting, **options),
    "shared expert": lambda **options: build(shared_expert=5, shared_gate=True, **options),
    "shared module": lambda **options: build(shared_expert=mlp(D_MODEL, 7).double(), **options),
    "callbacks": lambda **options: build(callbacks=[AfterDispatch(), AtTheEnd()], **options),
    "padded": lambda **options: build(capacity_factor=1.0, pad_to_capacity=True, **options),
    "noisy": lambda **options: build(gate="noisy_topk", **options),
}


def of_layer(layer: MoELayer) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters()
    yield from ((name, each) for name, each in layer.named_buffers() if each.is_floating_point())


def gradients_with(layer: MoELayer, between: Callable[[], Any], run: Any = None) -> dict[str, Tensor]:
    layer.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    x = tokens().requires_grad_()
    loss = loss_of(layer, (run or layer)(x))
    between()
    loss.backward()
    found = {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
    return {"x": x.grad, **found}


def changed(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(1.5)


@pytest.mark.parametrize("name, pair", spread([*MAKERS], [False, *ALL_PAIRS], every=3))
def test_what_changes_in_between_raises_or_was_not_needed(name: str, pair: Restore | bool) -> None:
    layer = MAKERS[name](memory_reuse=pair)
    expected = gradients_with(layer, lambda: None)
    for which, tensor in of_layer(layer):
        before = tensor.detach().clone()
        try:
            got = gradients_with(layer, lambda tensor=tensor: changed(tensor))
        except RuntimeError as error:
            assert CHANGED in str(error), which
        else:
            # The noisy gate's weights are put side by side in a copy.
            needed = tensor.dim() > 1 and name != "noisy" or which.endswith("scale")
            assert not needed, f"{which} was changed, and nothing said so"
            for of, value in expected.items():
                assert torch.equal(got[of], value), (which, of)
        tensor.data.copy_(before)


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizers_step_in_between_raises(name: str) -> None:
    layer = MAKERS[name](memory_reuse="S4")
    gradients_with(layer, lambda: None)
    step = torch.optim.AdamW(layer.parameters()).step
    if name == "noisy":  # whose experts are others'
        layer.gate.requires_grad_(False)
    with pytest.raises(RuntimeError, match=CHANGED):
        gradients_with(layer, lambda: changed_by(layer, step))


def changed_by(layer: MoELayer, step: Callable[[], Any]) -> None:
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    step()


@pytest.mark.parametrize("pair", [False, "S1", "S2", "S3", "S4"])
@pytest.mark.parametrize("name", ["ffn", "modules", "shared module", "callbacks"])
def test_data_may_change_as_in_torchs_own_layers(name: str, pair: Any) -> None:
    layer = MAKERS[name](memory_reuse=pair)
    for _, tensor in of_layer(layer):
        gradients_with(layer, lambda tensor=tensor: tensor.data.mul_(1.5))


@pytest.mark.parametrize("pair", [False, *[each for each in ALL_PAIRS if each.hidden != "recompute"]])
@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
def test_under_autocast_the_copies_are_what_counts(expert: Any, pair: Restore | bool) -> None:
    """Under autocast backward uses the bfloat16 copies, which did not change, as in torch's linear layers."""
    layer = build(expert=expert, dtype=torch.float32, memory_reuse=pair, shared_expert=5).float()

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x.float())

    expected = gradients_with(layer, lambda: None, run)
    for which, tensor in layer.experts.named_parameters():
        before = tensor.detach().clone()
        got = gradients_with(layer, lambda tensor=tensor: changed(tensor), run)
        tensor.data.copy_(before)
        for of, value in expected.items():
            assert torch.equal(got[of], value), (which, of)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["ffn", "modules", "callbacks"])
def test_a_checkpoint_lets_them_change_as_it_lets_torchs_own(name: str, use_reentrant: bool) -> None:
    """The second pass of the checkpoint uses the new values, as it does for torch's own layers."""
    layer, linear = MAKERS[name](), nn.Linear(D_MODEL, D_MODEL).double()

    def run_checkpointed(module: nn.Module) -> None:
        y = checkpoint(module, tokens().requires_grad_(), use_reentrant=use_reentrant)
        for parameter in module.parameters():
            if parameter is not getattr(getattr(module, "gate", None), "weight", None):
                changed(parameter)  # a changed gate would route otherwise, which is an error of its own
        y.sum().backward()

    run_checkpointed(linear)
    run_checkpointed(layer)


def test_a_buffer_that_an_expert_changes_itself_is_its_own_affair() -> None:
    """If an expert changes a buffer in its own forward, nothing raises.

    If the forward runs again, the buffer gets back its value, such as a running average.
    """

    class Averaging(nn.Module):
        def __init__(self, d_model: int, d_hidden: int) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(d_model))
            self.linear = nn.Linear(d_model, d_model)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
            return self.linear(x) * self.mean

    for pair in (False, *ALL_PAIRS):
        gradients_with(build(expert=Averaging, memory_reuse=pair), lambda: None)
    layer = build(expert=Averaging)
    with pytest.raises(RuntimeError, match=CHANGED):
        gradients_with(layer, lambda: layer(tokens()))  # which averages again
