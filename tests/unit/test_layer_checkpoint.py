"""MoELayer inside activation checkpoints of PyTorch, and under torch.compile."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from pmoe import MoELayer, warn
from pmoe.experts.base import ExpertRows
from pmoe.graph import capture
from tests.kit import AUX, D_HIDDEN, D_MODEL, NUM_EXPERTS, assert_same, build, gradients, loss_of, tokens
from tests.own_experts import mlp


def checkpointed(layer: MoELayer, use_reentrant: bool) -> dict[str, Tensor]:
    """Returns what `gradients` returns for a layer inside a checkpoint that also returns the loss."""
    x = tokens().requires_grad_()
    layer.zero_grad()
    y, l_aux = checkpoint(lambda x: (layer(x), layer.l_aux), x, use_reentrant=use_reentrant)
    loss_of(layer, y, l_aux).backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "l_aux": l_aux.detach(), "x": x.grad, **found}


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("n", [1, 2])
def test_checkpointing_changes_no_gradient_and_runs_forward_once_more(
    n: int, expert: object, use_reentrant: bool
) -> None:
    layer = build(expert=expert, pipeline=n)
    expected = gradients(layer, tokens())
    runs: list[int] = []
    layer.gate.register_forward_hook(lambda *_: runs.append(1))
    assert_same(checkpointed(layer, use_reentrant), expected)
    assert len(runs) == 2  # not once an expert: on several ranks that would be out of step


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_repeats_the_dropout_of_modules(use_reentrant: bool) -> None:
    layer = build(expert=lambda m, h: nn.Sequential(nn.Linear(m, h), nn.Dropout(0.5), nn.Linear(h, m)))
    torch.manual_seed(1)
    expected = gradients(layer, tokens())
    torch.manual_seed(1)
    assert_same(checkpointed(layer, use_reentrant), expected)


LOST = r"layer\.l_aux was read after a checkpoint with use_reentrant=True\. This value has no gradient: "


def loss_read_outside(layer: MoELayer, use_reentrant: bool) -> dict[str, Tensor]:
    """Returns what `gradients` returns for a layer in a checkpoint, after which the loss is read."""
    return gradients(layer, run=lambda x: checkpoint(layer, 1 * x, use_reentrant=use_reentrant))


def test_a_balance_loss_that_a_reentrant_checkpoint_cut_off_is_warned_of() -> None:
    """The loss had no graph, so the gate was trained without it, and nothing said so."""
    layer = build()
    expected = gradients(layer)
    warn.GIVEN.clear()
    with pytest.warns(UserWarning, match=LOST):
        lost = loss_read_outside(layer, use_reentrant=True)
    assert not torch.allclose(lost["gate.weight"], expected["gate.weight"])


def test_a_balance_loss_that_has_its_gradient_or_needs_none_is_not_warned_of() -> None:
    layer = build()
    expected = gradients(layer)
    warn.GIVEN.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(loss_read_outside(layer, use_reentrant=False), expected)
        assert_same(checkpointed(layer, use_reentrant=True), expected)
        with torch.no_grad():
            layer(tokens())
        assert not layer.l_aux.requires_grad
        layer.gate.requires_grad_(False)
        checkpoint(layer, tokens().requires_grad_(), use_reentrant=True).sum().backward()
        assert layer.l_aux.isfinite()


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
def test_a_checkpointed_layer_keeps_no_rows_between_the_passes(expert: object) -> None:
    layer = build(expert=expert, pipeline=2)
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: list[weakref.ref[Any]] = []
    compute = layer.experts.compute

    def watched(given: ExpertRows, *args: Any, **options: Any) -> Any:
        out, hidden = compute(given, *args, **options)
        storages = [tensor.untyped_storage() for tensor in (given.rows_NM, *hidden.tensors)]
        kept.extend(weakref.ref(each) for each in storages if each.data_ptr() not in weights)
        return out, hidden

    layer.experts.compute = watched
    y = layer(tokens().requires_grad_())
    assert len(kept) >= 4  # T_DI and T_M of two chunks
    assert all(ref() is not None for ref in kept)
    kept.clear()
    y = checkpoint(layer, tokens().requires_grad_(), use_reentrant=False)
    assert len(kept) >= 4
    assert all(ref() is None for ref in kept)
    y.sum().backward()


class Block(nn.Module):
    """A residual block with a layer, as in a transformer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D_MODEL)
        self.moe = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(**options), Block(**options)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, sum(block.moe.l_aux for block in self.blocks)


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what the pmoe backend changed, so that Dynamo does not look into layers, as in a new process."""
    monkeypatch.setattr(MoELayer, "forward", capture._eager)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Flat(nn.Module):
    """A module that calls two layers in one forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = Block(**options), Block(**options)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first.moe(self.first.norm(x)))
        return self.second.moe(self.second.norm(x)) + self.first.moe.l_aux + self.second.moe.l_aux


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"expert": mlp, "pipeline": 2}, {"capacity_factor": 1.0}])
@pytest.mark.parametrize("model_type", [Model, Flat])
def test_a_compiled_model_has_no_graph_break(
    model_type: type[nn.Module], options: dict[str, Any], fresh_compiler: None
) -> None:
    torch.manual_seed(0)
    model = model_type(**options)
    x = tokens(10, dtype=torch.float32).view(2, 5, D_MODEL)
    explained = torch._dynamo.explain(model)(x)
    assert len(explained.break_reasons) == explained.graph_break_count == 0, explained
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="eager")
    for seed in range(3):
        compiled(tokens(10, seed=seed, dtype=torch.float32).view(2, 5, D_MODEL))
    assert sum(counters["graph_break"].values()) == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_as_an_uncompiled_one(backend: str, fresh_compiler: None) -> None:
    torch.manual_seed(0)
    plain = Model(pipeline=2)
    model = copy.deepcopy(plain)
    compiled = torch.compile(model, backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    for step in range(3):
        x = tokens(10, seed=step, dtype=torch.float32).view(2, 5, D_MODEL)
        for run, optimizer in zip((plain, compiled), optimizers, strict=True):
            y, l_aux = run(x)
            optimizer.zero_grad()
            (y.square().mean() + AUX * l_aux).backward()
            optimizer.step()
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b, a, msg=name)
