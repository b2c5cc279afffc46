"""On a GPU the gate's matrix product adds the gate's gradient of the tokens to that of the experts.

The branches for CUDA run on the CPU, where PyTorch expressions compute what the kernels would
(`bench.bench_device_calls`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.bench_device_calls import as_cuda
from pmoe.checkpointing.contexts import checkpoint_contexts
from pmoe.gates.logits import LogitsAndRows, router_logits
from tests.kit import build, gradients, tokens
from tests.reference import relative_error

LIMIT = 1e-12


def of_logits(rows: Tensor | None, logits: Tensor) -> Tensor:
    """A loss of the logits, and of the rows that the experts read; None leaves the rows out."""
    loss = (logits * tokens(*logits.shape[:1], 5, logits.dtype, logits.shape[1])).sum()
    return loss if rows is None else loss + rows.square().sum()


@pytest.mark.parametrize("reads_rows", [True, False])
def test_the_gradients_are_those_of_the_definition(reads_rows: bool) -> None:
    x, weight = tokens(9, 1).requires_grad_(), tokens(5, 2).requires_grad_()
    logits, rows = LogitsAndRows.apply(x, weight)
    assert torch.equal(rows, x) and rows.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(logits, router_logits(x, weight))
    found = torch.autograd.grad(of_logits(rows if reads_rows else None, logits), [x, weight])
    expected = torch.autograd.grad(of_logits(x if reads_rows else None, x @ weight.t()), [x, weight])
    assert max(map(relative_error, found, expected)) <= LIMIT


def test_rows_alone_give_the_gate_no_gradient() -> None:
    x, weight = tokens(9, 1).requires_grad_(), tokens(5, 2).requires_grad_()
    _, rows = LogitsAndRows.apply(x, weight)
    of_x, of_weight = torch.autograd.grad(rows.square().sum(), [x, weight], allow_unused=True)
    assert torch.equal(of_x, 2 * x) and of_weight is None


def test_a_change_of_the_tokens_in_place_is_refused() -> None:
    x, weight = tokens(9, 1).requires_grad_(), tokens(5, 2).requires_grad_()
    leaf = x * 1
    _, rows = LogitsAndRows.apply(leaf, weight)
    loss = rows.square().sum()
    leaf.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("options", [{"pipeline": 1}, {"pipeline": 2, "memory_reuse": "S4"}, {"d_latent": 4}])
def test_a_layer_gives_the_gradients_of_the_cpu(options: dict[str, Any]) -> None:
    layer = build(**options)
    on_cpu = gradients(layer)
    with as_cuda(computes=True) as device, device:
        on_cuda = gradients(layer)
    assert max(float(relative_error(on_cuda[name], value)) for name, value in on_cpu.items()) <= LIMIT
    added = [place for place in device.calls.where if place.startswith("gates/logits.py:backward")]
    # With d_latent the experts read other rows than the gate.
    assert any("addmm_" in place for place in added) != ("d_latent" in options), added


def test_a_frozen_gate_and_constant_tokens() -> None:
    layer = build(pipeline=2)
    layer.gate.weight.requires_grad_(False)
    x = tokens().requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    with as_cuda(computes=True):
        (found,) = torch.autograd.grad(layer(x).sum(), x)
        assert relative_error(found, expected) <= LIMIT
        assert not LogitsAndRows.takes(tokens(), layer.gate.weight)


def test_a_backward_hook_of_the_experts_keeps_the_gradients_that_it_got() -> None:
    """The sum is written into memory that a hook could hold. With hooks, autograd adds the gradients."""
    layer = build(pipeline=2)
    held: list[tuple[Tensor, Tensor]] = []

    def hold(module: nn.Module, of_inputs: tuple[Tensor, ...], of_outputs: tuple[Tensor, ...]) -> None:
        held.append((of_inputs[0], of_inputs[0].clone()))

    layer.experts.register_full_backward_hook(hold)
    with as_cuda(computes=True):
        gradients(layer)
    assert len(held) == 1
    assert torch.equal(*held[0])


@pytest.mark.parametrize(
    "options",
    [{"use_reentrant": True}, {"use_reentrant": False}]
    + [{"use_reentrant": False, "context_fn": checkpoint_contexts}],
    ids=["reentrant", "not reentrant", "with the routing kept"],
)
def test_checkpointing_loses_no_gradient(options: dict[str, Any]) -> None:
    layer = build(pipeline=2)
    expected = gradients(layer)

    def run(x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(lambda x: (layer(x), layer.l_aux), x, **options)

    with as_cuda(computes=True):
        found = gradients(layer, run=run)
    assert max(float(relative_error(found[name], value)) for name, value in expected.items()) <= LIMIT


def test_the_second_half_of_backward_runs_no_product_of_rows_again() -> None:
    """Zero-bubble schedules ask for gradients of inputs first, and then of all parameters, the gate's too."""
    layer = build(pipeline=2)
    parameters = list(layer.parameters())
    x = tokens().requires_grad_()
    with as_cuda(computes=True) as device:
        y = layer(x * 2)
        dy = tokens(*y.shape[:1], 4)
        expected = torch.autograd.grad(y, [x, *parameters], dy, retain_graph=True)
        (of_x,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
        device.calls.where.clear()
        with device:
            of_parameters = torch.autograd.grad(y, parameters, dy, retain_graph=True)
    assert torch.equal(of_x, expected[0])
    assert max(map(relative_error, of_parameters, expected[1:])) <= LIMIT
    assert [place for place in device.calls.where if "unpermute" in place] == []
