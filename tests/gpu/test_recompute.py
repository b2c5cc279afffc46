"""Activation checkpointing on a GPU with routing that is taken over: bits, what is waited for, bytes; and
routing that changed under any other checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.kernels import extension
from pmoe.kernels.registry import PMOE, PRODUCTS
from pmoe.runners import one_rank
from tests.gpu.support import (
    AUX,
    DEVICE,
    NEEDS_GPU,
    count_alone,
    make_batch,
    make_layer,
    measure_nothing,
    synchronisations,
)

pytestmark = NEEDS_GPU

FROZEN = {"use_reentrant": False, "context_fn": pmoe.checkpoint_contexts}
PATHS = ["alone", "chunks"]


@contextlib.contextmanager
def taking(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A context in which all calls, or none, use the kernels of one rank; it yields the calls that do.

    Nothing is measured in it.
    """
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        calls = count_alone(patch)
        measure_nothing(patch)
        if path == "alone":
            assert extension.path(DEVICE)[1] is None
            stack.enter_context(PRODUCTS.forcing(PMOE))
        else:
            patch.setattr(one_rank, "kernel_refusal", lambda *_, **__: "the test wants chunks")
        yield calls


class Block(nn.Module):
    """Dropout before the gate and behind the layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = make_layer(torch.bfloat16, **{"num_experts": 8, **options})
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.drop(self.layer(self.drop(x)))
        return y.float().sin(), self.layer.l_aux.exp()


def step(block: Block, x: Tensor, **options: Any) -> dict[str, Tensor]:
    """options: of the checkpoint, none without one."""
    block.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    torch.manual_seed(5)
    y, l_aux = checkpoint(block, x, **options) if options else block(x)
    (y.square().sum() + AUX * l_aux).backward()
    found = {name: parameter.grad for name, parameter in block.named_parameters()}
    return {
        "y": y.detach(),
        "l_aux": l_aux.detach(),
        "x": x.grad,
        **found,
        "random": torch.rand(3, device=DEVICE),
    }


def counted(block: Block) -> list[int]:
    runs: list[int] = []
    hook = block.layer.gate.register_forward_hook
    hook(lambda *_: runs.append(1))
    return runs


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"expert": "swiglu", "bias": False}], ids=["ffn", "swiglu"])
def test_a_checkpoint_changes_no_bit(
    options: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, (x, _) = Block(**options), make_batch(517, dtype=torch.bfloat16)
    with taking(path, monkeypatch) as calls:
        expected = step(block, x)
        got = step(block, x, **FROZEN)
    assert calls == ["alone"] * (3 if path == "alone" else 0)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(
    "options", [{"pipeline": 3}, {"pipeline": 2, "memory_reuse": "S1"}, {"memory_reuse": "S4"}]
)
@pytest.mark.parametrize("gate", ["noisy_topk", "expert_choice"])
def test_noise_of_the_gate_is_drawn_once(gate: str, options: dict[str, Any]) -> None:
    block, (x, _) = Block(gate=gate, **options), make_batch(300, dtype=torch.bfloat16)
    expected = step(block, x)
    runs = counted(block)
    got = step(block, x, **FROZEN)
    assert len(runs) == 1
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("path", PATHS)
def test_the_second_pass_waits_for_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one for the row counts, where rows are cut into chunks."""
    block, (x, _) = Block(), make_batch(dtype=torch.bfloat16)
    x.requires_grad_()
    one = torch.ones((), device=DEVICE)
    assert synchronisations(one.item) == 1, "torch no longer reports synchronisations"

    def run() -> None:
        y, l_aux = checkpoint(block, x, preserve_rng_state=False, **FROZEN)
        (y.square().sum() + AUX * l_aux).backward()

    with taking(path, monkeypatch):
        for _ in range(2):  # what is set up at first use may wait
            run()
        torch.cuda.synchronize()
        assert synchronisations(run) == (path == "chunks")


@pytest.mark.parametrize("path", PATHS)
def test_no_rows_are_kept_between_the_passes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, d_model = 4096, 1024
    block = Block(d_model=d_model, d_hidden=64)
    x = make_batch(num_tokens, d_model, torch.bfloat16)[0].requires_grad_()

    def held(**options: Any) -> int:
        before = torch.cuda.memory_allocated()
        y, l_aux = checkpoint(block, x, use_reentrant=False, **options)
        found = torch.cuda.memory_allocated() - before
        (y.square().sum() + AUX * l_aux).backward()
        block.layer.l_aux = x.grad = None
        block.zero_grad(set_to_none=True)
        return found

    with taking(path, monkeypatch):
        held(), held(context_fn=pmoe.checkpoint_contexts)  # what is made once
        beyond = held(context_fn=pmoe.checkpoint_contexts) - held()
    # Float32 logits and probabilities of 8 experts, int64 indices and float32 weights of 2 choices.
    assert 0 < beyond <= num_tokens * 4 * (4 * 8 + 16) < x.nbytes / 8


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_routing_that_changed_is_refused_under_any_other_checkpoint(
    path: str, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, (x, _) = Block(), make_batch(dtype=torch.bfloat16)

    def run(**options: Any) -> Callable[[], object]:
        return lambda: step(block, x, use_reentrant=use_reentrant, **options)

    with taking(path, monkeypatch):
        run()()
        with pytest.raises(ValueError, match=r"routing changed in recomputation.*pmoe\.checkpoint_contexts"):
            run(preserve_rng_state=False)()
        torch.cuda.synchronize()
        run()()
