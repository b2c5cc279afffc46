"""A mask says which rows of the input are tokens. The layer computes these as if there were no other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.gates import GATES
from pmoe.gates.external import ExternalGate
from pmoe.runners import one_rank
from tests.kit import AUX, build, tokens
from tests.reference import relative_error
from tests.switched import switched_layer

REAL = torch.arange(12) >= 5
"""A mask with padding on the left, as in a batch from which a model generates."""

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"pipeline": 2, "memory_reuse": "S4"},
    "offloading": {"pipeline": 4, "memory_reuse": "S1"},
    "chosen": {"pipeline": True, "memory_reuse": True},
    "capacity": {"capacity_factor": 1.0},
    "padded": {"capacity_factor": 1.0, "pad_to_capacity": True},
    "shared": {"shared_expert": 5, "shared_gate": True},
    "modules": {"expert": lambda: nn.Linear(6, 6, dtype=torch.float64)},
    "einsum": {"order": "einsum"},
    "fused": {"fused": True},
    **{gate: {"gate": gate} for gate in GATES if gate not in ("topk", "hash", "switch")},
    "switch": {"gate": "switch", "top_k": 1, "capacity_factor": 1.0},
}


def step(layer: pmoe.MoELayer, x: Tensor, dy: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """Returns the output, l_aux, the counts and every gradient of a step. x, dy: (..., M)."""
    torch.manual_seed(2)  # of gates that draw
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = layer(x) if mask is None else layer(x, mask=mask)
    ((y * dy).sum() + AUX * layer.l_aux).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    counts = layer.tokens_per_expert
    return {"y": y.detach(), "l_aux": layer.l_aux.detach(), "x": x.grad, "counts": counts, **gradients}


def check(layer: pmoe.MoELayer, shape: tuple[int, ...], mask: Tensor) -> None:
    """Compares a call with a mask with ``layer(x[mask])``, whose rows are put back at their tokens."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(*shape, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    real = mask.bool()
    x[~real] = torch.nan  # padding may hold anything
    masked = step(layer, x, dy, mask)
    alone = step(layer, x[real], dy[real], None)
    for name in ("y", "x"):
        assert masked[name].shape == x.shape
        assert torch.equal(masked[name][~real], torch.zeros_like(x[~real])), name
        masked[name] = masked[name][real]
    for name, value in alone.items():
        if value is None or masked[name] is None:
            assert value is masked[name], name
        else:
            assert torch.equal(masked[name], value), name


@pytest.mark.parametrize("way", WAYS)
def test_a_masked_call_is_the_call_of_its_tokens_scattered_back(way: str) -> None:
    layer = build(**WAYS[way])
    check(layer, (12,), REAL)
    check(layer, (2, 12), torch.stack([REAL, REAL.flip(0)]))


@pytest.mark.parametrize("count", [0, 1, 12])
def test_any_number_of_rows_may_be_tokens(count: int) -> None:
    for options in (WAYS["plain"], WAYS["chunks"], WAYS["shared"]):
        check(build(**options), (12,), torch.arange(12) < count)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8])
def test_an_attention_mask_of_integers_is_taken_as_it_is(dtype: torch.dtype) -> None:
    check(build(), (12,), REAL.to(dtype))


def test_kernels_of_one_rank_see_the_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_rank, "DEVICES", ("cpu",))
    monkeypatch.setattr(one_rank, "kernel_refusal", lambda *_, **__: None)
    layer = build()
    check(layer, (12,), REAL)
    assert layer.ran is not None and layer.ran.path == "one rank"


def test_padding_takes_no_capacity_and_counts_in_no_loss() -> None:
    layer = build(top_k=1, capacity_factor=2.0)
    x = tokens(12)
    x[~REAL] = x[-1].clone()  # padding rows look alike, and like the last token
    with torch.no_grad():
        alone = layer(x[REAL])
        dropped, l_aux = int((alone == 0).all(-1).sum()), layer.l_aux
        masked = layer(x, mask=REAL)
    assert int((masked[REAL] == 0).all(-1).sum()) == dropped
    assert layer.l_aux == l_aux and int(layer.tokens_per_expert.sum()) == int(REAL.sum()) - dropped


def test_token_ids_are_masked_with_their_tokens() -> None:
    layer = build(gate="hash")
    ids = torch.arange(12) * 7
    x = tokens(12)
    assert torch.equal(layer(x, ids, mask=REAL)[REAL], layer(x[REAL], ids[REAL]))
    assert torch.equal(layer(x, ids[REAL], mask=REAL)[REAL], layer(x[REAL], ids[REAL]))


def test_callbacks_see_the_tokens_alone() -> None:
    class Look(pmoe.Callback):
        shapes: list[tuple[int, ...]]

        def before_moe_start(self, x: Tensor) -> Tensor:
            self.shapes = [tuple(x.shape)]
            return x

        def before_moe_end(self, y: Tensor) -> Tensor:
            self.shapes.append(tuple(y.shape))
            return y

    look = Look()
    layer = switched_layer(6, 10, 4, 2, callbacks=[look])
    layer(torch.randn(3, 4, 6), mask=REAL.view(3, 4))
    assert look.shapes == [(7, 6), (7, 6)]


def test_a_routing_from_outside_is_of_the_tokens() -> None:
    layer = build(gate=ExternalGate())
    x = tokens(12)
    expert, weight = torch.arange(14).view(7, 2) % 4, torch.rand(7, 2)
    with layer.gate.routing(expert, weight):
        masked = layer(x, mask=REAL)
        alone = layer(x[REAL])
    assert torch.equal(masked[REAL], alone)


def test_a_masked_call_runs_again_under_a_checkpoint() -> None:
    for options in ({"use_reentrant": False}, {"use_reentrant": True}):
        layer = build(pipeline=2, memory_reuse="S4")
        x = tokens(12).requires_grad_()
        layer(x, mask=REAL).square().sum().backward()
        expected = [x.grad.clone(), *(parameter.grad.clone() for parameter in layer.parameters())]
        x.grad = None
        layer.zero_grad()
        y = torch.utils.checkpoint.checkpoint(lambda x, layer=layer: layer(x, mask=REAL), x, **options)
        y.square().sum().backward()
        for ours, value in zip([x.grad, *(p.grad for p in layer.parameters())], expected, strict=True):
            assert relative_error(ours, value) < 1e-12


REFUSED: list[tuple[Any, str]] = [
    (
        torch.ones(11, dtype=torch.bool),
        r"mask \(a tensor of shape \(11,\) .*must be a tensor of shape \(12,\)",
    ),
    (torch.ones(12, 6, dtype=torch.bool), r"mask \(a tensor of shape \(12, 6\)"),
    (torch.ones(12), r"mask of dtype torch.float32 must be bool: True where x has a token"),
    ([True] * 12, r"mask \(a list\) must be a tensor of shape \(12,\)"),
    (
        torch.ones(12, dtype=torch.bool, device="meta"),
        r"on meta\) must be a tensor of shape \(12,\) on cpu",
    ),
]


@pytest.mark.parametrize("mask, message", REFUSED, ids=["short", "wide", "float", "list", "meta"])
def test_a_mask_that_does_not_fit_is_named(mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()(tokens(12), mask=mask)
