"""Selective activation checkpointing around layers, on one rank: layers run again, whatever a policy
keeps.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import pmoe
from pmoe import MoELayer, Restore
from pmoe.checkpointing.selective import hidden_from_selective_checkpoints
from pmoe.schedule.restore import ALL_PAIRS
from tests.kit import (
    AUX,
    D_MODEL,
    assert_same,
    build,
    gradients,
    one_thread,  # noqa: F401 (a fixture)
    tokens,
)
from tests.own_experts import mlp
from tests.recomputed import counted
from tests.selective import CONTEXTS, Block, by_name, step
from tests.spread import spread


class Scaling(nn.Module, pmoe.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(D_MODEL, dtype=torch.float64) * 1.5)

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows @ self.weight


def layer_of(name: str, **options: Any) -> MoELayer:
    if name == "callbacks":
        return build(callbacks=[Scaling()], **options)
    return build(**LAYERS[name], **options)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two chunks": {"pipeline": 2},
    "noisy": {"gate": "noisy_topk"},
    "deepseek": {"gate": "deepseek"},
    "modules": {"expert": mlp},
    "modules, two chunks": {"expert": mlp, "pipeline": 2},
    "shared expert": {"shared_expert": 5, "shared_gate": True},
    "callbacks": {},
}


@pytest.mark.parametrize(
    "pair, name, context", spread([False, True, *ALL_PAIRS], [*LAYERS], [*CONTEXTS], every=8)
)
def test_whatever_a_policy_saves_a_step_is_as_without_a_checkpoint(
    pair: Restore | bool, name: str, context: str
) -> None:
    block = Block(layer_of(name, memory_reuse=pair))
    expected = step(block, block)
    run = functools.partial(checkpoint, block, use_reentrant=False, context_fn=CONTEXTS[context])
    assert_same(step(block, run), expected)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_without_a_policy_change_no_bit(use_reentrant: bool, name: str) -> None:
    for pair in (False, *ALL_PAIRS):
        block = Block(layer_of(name, memory_reuse=pair))
        expected = step(block, block)
        run = functools.partial(checkpoint, block, use_reentrant=use_reentrant)
        assert_same(step(block, run), expected, told=pair)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_layer_by_itself_may_be_checkpointed_selectively(n: int, context: str) -> None:
    """A policy that keeps products by name once raised an error of torch.

    It said "Tensor cached during selective activation checkpoint has been mutated".
    """
    layer = build(pipeline=n)
    expected = gradients(layer, tokens())
    runs = counted(layer)
    run = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=CONTEXTS[context])
    assert_same(gradients(layer, tokens(), run), expected)
    assert len(runs) == 2


@pytest.mark.parametrize("context", CONTEXTS)
def test_torchs_wrapper_takes_a_policy(context: str) -> None:
    block = Block(build())
    expected = step(block, block)
    wrapped = checkpoint_wrapper(block, context_fn=CONTEXTS[context])
    assert_same(step(block, wrapped), expected)


@pytest.mark.parametrize("pair", [False, "S1", "S4"])
@pytest.mark.parametrize("expert", ["ffn", mlp])
def test_a_selective_checkpoint_under_autocast(expert: Any, pair: Any) -> None:
    torch.manual_seed(0)
    layer = build(dtype=torch.float32, expert=expert, memory_reuse=pair).float()
    block, x = Block(layer, torch.float32), tokens(dtype=torch.float32)

    def run(x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(block, x, use_reentrant=False, **options) if options else block(x)

    expected = step(block, run, x)
    for context in CONTEXTS.values():
        assert_same(step(block, functools.partial(run, context_fn=context), x), expected)


def nested(block: nn.Module, other: nn.Module, inner: Any, outer: Any) -> Any:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y, l_aux = checkpoint(block, x, use_reentrant=False, **inner)
        z, more = other(y)
        return z, l_aux + more

    return lambda x: checkpoint(function, x, use_reentrant=False, **outer)


@pytest.mark.parametrize("outer", [{}, {"context_fn": CONTEXTS["products by name"]}], ids=["plain", "outer"])
@pytest.mark.parametrize("inner", [{}, {"context_fn": CONTEXTS["a list"]}], ids=["plain", "inner"])
def test_selective_checkpoints_inside_of_others(inner: dict[str, Any], outer: dict[str, Any]) -> None:
    """Torch takes care of them: the outer policy does not decide about an inner checkpoint's second pass."""
    blocks = nn.ModuleList([Block(build()), Block(build(pipeline=2))])
    dense = nn.ModuleList([Block(nn.Identity()), Block(nn.Identity())])
    for block in dense:
        block.layer.l_aux = torch.zeros((), dtype=torch.float64)

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        y, l_aux = blocks[0](x)
        z, more = blocks[1](y)
        return z, l_aux + more

    try:
        step(dense, nested(dense[0], dense[1], inner, outer))
    except RuntimeError:
        pytest.skip("torch itself takes no such nest")
    assert_same(step(blocks, nested(blocks[0], blocks[1], inner, outer)), step(blocks, plain))


@pytest.mark.parametrize("gate", ["topk", "noisy_topk", "deepseek"])
@pytest.mark.parametrize("policy", [by_name, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]])
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_policy_may_stand_beside_kept_routing(early_stop: bool, policy: Any, gate: str) -> None:
    block = Block(build(gate=gate, pipeline=2))
    expected = step(block, block)
    runs = counted(block.layer)
    context = functools.partial(pmoe.checkpoint_contexts, policy)
    run = functools.partial(checkpoint, block, use_reentrant=False, context_fn=context, early_stop=early_stop)
    products: list[Any] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
            products.append(function)
            return function(*args, **(options or {}))

    assert_same(step(block, run), expected)
    assert len(runs) == 1
    x = tokens().requires_grad_()
    y, _ = run(x)
    with Products():
        y.sum().backward()
    # The products around the layer were kept: the only addmm that runs again would be that of ``into``.
    again = [each for each in products if each is torch.ops.aten.addmm.default]
    assert not again


def test_a_kept_checkpoint_with_a_policy_goes_backward_twice_only_where_torchs_does() -> None:
    block = Block(build())
    context = functools.partial(pmoe.checkpoint_contexts, by_name)
    y, _ = checkpoint(block, tokens().requires_grad_(), use_reentrant=False, context_fn=context)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        y.sum().backward()


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="policy"):
        pmoe.checkpoint_contexts(3)  # type: ignore[arg-type]


# ---- the modes


def test_other_dispatch_modes_see_a_layer_inside_of_a_selective_checkpoint() -> None:
    layer, x = build(), tokens().requires_grad_()

    def flops(run: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            run(x)
        return counter.get_total_flops()

    def inside(x: Tensor) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            y = layer(x)
        counts.append(counter.get_total_flops())
        return y

    counts: list[int] = []
    run = functools.partial(checkpoint, use_reentrant=False, context_fn=CONTEXTS["products by name"])
    expected = flops(layer)
    assert expected > 0
    assert flops(lambda x: run(layer, x)) == expected
    run(inside, x)
    assert counts == [expected]


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        return function(*args, **(options or {}))


@pytest.mark.parametrize("fails", [False, True])
def test_modes_stand_as_before_behind_a_hidden_block(fails: bool) -> None:
    first, second = create_selective_checkpoint_contexts(by_name)
    outer, inner = Nothing(), Nothing()
    with outer, first, inner, second:
        before = _get_current_dispatch_mode_stack()
        try:
            with hidden_from_selective_checkpoints():
                assert _get_current_dispatch_mode_stack() == [outer, inner]
                if fails:
                    raise ValueError("inside")
        except ValueError:
            assert fails
        assert _get_current_dispatch_mode_stack() == before == [outer, first, inner, second]


def test_a_layer_without_dispatch_modes_never_looks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from pmoe.layer import calls_with_any

    monkeypatch.setattr(calls_with_any, "call_with_any", lambda *_: pytest.fail("was asked"))
    layer = build()
    (layer(tokens().requires_grad_()).sum() + AUX * layer.l_aux).backward()
