"""Activation checkpointing of layers on one rank: the second pass takes over the routing, or refuses another
one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import pmoe
from pmoe import MoELayer, Restore, Routing
from pmoe.checkpointing import contexts as checkpointing_contexts
from pmoe.gates import GATES
from pmoe.runners import one_rank
from pmoe.schedule.restore import ALL_PAIRS
from tests.allocated import Allocated
from tests.kit import (
    AUX,
    D_MODEL,
    NUM_EXPERTS,
    TOKENS,
    assert_same,
    one_thread,  # noqa: F401 (a fixture)
    tokens,
)
from tests.own_experts import mlp
from tests.own_gates import OwnGate
from tests.plain_steps import PlainSteps, using
from tests.recomputed import FROZEN, OPTIONS, Block, Run, build, counted, frozen, step
from tests.spread import spread

# ---- the second pass takes the routing over


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("gate", [*GATES, OwnGate])
def test_a_checkpoint_changes_no_bit_whatever_the_gate(gate: Any, early_stop: bool) -> None:
    block = Block(build(gate=gate if isinstance(gate, str) else gate()))
    expected = step(block, block)
    if "layer.gate.calls" in expected:
        block.layer.gate.calls.zero_()
    if gate == "deepseek":
        block.layer.gate.load.zero_()
    runs = counted(block.layer)
    with set_checkpoint_early_stop(early_stop):
        assert_same(step(block, frozen(block)), expected)
    assert len(runs) == 2


@pytest.mark.parametrize("gate", ["random", "noisy_topk", OwnGate])
def test_routing_is_taken_over_where_random_states_are_not_preserved(gate: Any) -> None:
    """Only the gate is random, so only the gate could decide otherwise in the second pass."""
    block = Block(build(gate=gate if isinstance(gate, str) else gate()))
    block.drop.p = 0.0
    expected, others = step(block, block), dict(block.named_buffers())
    for buffer in others.values():
        buffer.zero_()
    assert_same(step(block, frozen(block, preserve_rng_state=False)), expected)


@pytest.mark.parametrize("preserve", [True, False])
def test_what_is_drawn_behind_the_gate_is_drawn_again(preserve: bool) -> None:
    """The second pass leaves the generator as other modules do.

    This holds although it draws other random numbers than the first pass.
    """
    layer, drop = build(gate="noisy_topk"), nn.Dropout(0.5)
    seen: list[Tensor] = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = drop(layer(x))
        seen.append(y == 0)
        return y.exp(), layer.l_aux

    torch.manual_seed(5)
    y, l_aux = frozen(function, preserve_rng_state=preserve, early_stop=False)(tokens().requires_grad_())
    between = torch.get_rng_state()
    torch.rand(TOKENS, D_MODEL, dtype=torch.float64)
    after_one_dropout = torch.get_rng_state()
    torch.set_rng_state(between)
    (y.sum() + l_aux).backward()
    assert torch.equal(seen[0], seen[1]) == preserve
    assert torch.equal(torch.get_rng_state(), between if preserve else after_one_dropout)


PIPELINES = [{"pipeline": 1}, {"pipeline": 3}, {"pipeline": 4, "pipeline_backward": 2}, {"pipeline": True}]


@pytest.mark.parametrize(
    "pair, expert, options", spread([False, *ALL_PAIRS], ["ffn", "swiglu", mlp], PIPELINES, every=6)
)
def test_the_backward_pass_finds_what_the_second_pass_left(
    pair: Restore | bool, expert: Any, options: dict[str, Any]
) -> None:
    block = Block(build(expert=expert, memory_reuse=pair, **options))
    assert_same(step(block, frozen(block)), step(block, block))


@pytest.mark.parametrize("name", OPTIONS)
def test_whatever_else_a_layer_does(name: str) -> None:
    block = Block(build(**OPTIONS[name]))
    assert_same(step(block, frozen(block)), step(block, block))


class Wider(nn.Module, pmoe.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, D_MODEL, dtype=torch.float64))

    def before_moe_start(self, x: Tensor) -> Tensor:
        return x * self.factor

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * self.factor


def test_callbacks_see_both_passes() -> None:
    block = Block(build(callbacks=[Wider()], pipeline=2))
    assert_same(step(block, frozen(block)), step(block, block))


def test_the_path_of_one_ranks_kernels_is_taken_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    run, route = one_rank.OneRankRunner.forward, one_rank.route_tokens

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("run")
        return run(*args, **kwargs)

    monkeypatch.setattr(one_rank.OneRankRunner, "forward", counted)
    monkeypatch.setattr(one_rank, "route_tokens", lambda *args: (calls.append("route"), route(*args))[1])
    monkeypatch.setattr(one_rank, "DEVICES", ("cpu",))
    monkeypatch.setattr(one_rank, "kernel_refusal", lambda *_, **__: None)
    block = Block(build())
    expected = step(block, block)
    assert calls == ["route", "run"] * 2
    torch.manual_seed(5)
    x = tokens().requires_grad_()
    y, l_aux = frozen(block)(x)
    # What was taken in the first pass is taken in the second, whatever is measured in between.
    monkeypatch.setattr(one_rank, "kernel_refusal", lambda *_, **__: "another way is faster by now")
    calls.clear()
    (y.square().sum() + AUX * l_aux).backward()
    assert calls == ["run"] * 2
    # Autograd adds the gate's gradient of x to that of the experts. Without a checkpoint that keeps the
    # routing, the gate's product adds it.
    torch.testing.assert_close(x.grad, expected["x"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way, pair", spread([True, "forward"], ["S4", Restore("keep", "keep")], every=1))
def test_fused_calls_are_fused_in_both_passes(way: bool | str, pair: Any) -> None:
    block = Block(build(fused=way, memory_reuse=pair, pipeline=1 if way is True else 2))
    with using(lambda request: PlainSteps(request.ranks)):
        expected = step(block, block)
        torch.manual_seed(5)
        x = tokens().requires_grad_()
        y, l_aux = frozen(block)(x)
        block.zero_grad()
    (y.square().sum() + AUX * l_aux).backward()  # no longer offered, and not asked for
    assert torch.equal(x.grad, expected["x"])
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


# ---- passes in any order


def test_several_forwards_run_backward_in_any_order_and_twice() -> None:
    block = Block(build(gate="noisy_topk", memory_reuse="S2", pipeline=2))
    xs = [tokens(count, 30 + i).requires_grad_() for i, count in enumerate((6, TOKENS, 1))]
    losses, expected = [], []
    for run, into in ((block, expected), (frozen(block), losses)):
        for i, x in enumerate(xs):
            torch.manual_seed(i)
            y, l_aux = run(x)
            into.append(y.square().sum() + AUX * l_aux)
    leaves = [*block.parameters()]
    told = (block.layer.l_aux, block.layer.ran, block.layer.max_tokens)
    counts = block.layer.tokens_per_expert
    for i, retain in ((1, True), (2, False), (0, True), (1, False), (0, False)):
        got = torch.autograd.grad(losses[i], [xs[i], *leaves], retain_graph=retain)
        want = torch.autograd.grad(expected[i], [xs[i], *leaves], retain_graph=True)
        assert all(map(torch.equal, got, want)), i
    assert block.layer.l_aux is told[0] and (block.layer.ran, block.layer.max_tokens) == told[1:]
    assert torch.equal(block.layer.tokens_per_expert, counts) and counts.sum() == 2 * 1


@pytest.mark.parametrize("gate", ["topk", "noisy_topk", "expert_choice", "soft"])
def test_the_auxiliary_loss_alone_has_its_gradient(gate: str) -> None:
    block = Block(build(gate=gate, **({} if gate in ("expert_choice", "soft") else {"z_loss_weight": 0.1})))
    grads = []
    for run in (block, frozen(block)):
        torch.manual_seed(5)
        x = tokens().requires_grad_()
        _, l_aux = run(x)
        wanted = [x, *block.layer.gate.parameters()]
        grads.append(torch.autograd.grad(l_aux, wanted, retain_graph=True, allow_unused=True))
        torch.autograd.grad(l_aux, wanted, allow_unused=True)
    for got, want in zip(*grads, strict=True):
        assert (got is None and want is None) or torch.equal(got, want)


def test_without_tokens() -> None:
    block = Block(build(pipeline=2))
    assert_same(step(block, frozen(block), tokens(0)), step(block, block, tokens(0)))


def test_backward_inside_of_the_checkpointed_function_is_refused_if_it_meets_a_layer() -> None:
    """A backward pass through modules between the layers may run there."""
    block = Block(build(gate="noisy_topk"))

    def between(x: Tensor) -> tuple[Tensor, Tensor]:
        y, l_aux = block(x)
        leaf = y.detach().requires_grad_()
        (grad,) = torch.autograd.grad(leaf.exp().sum(), leaf)
        z, more = block(y + grad)
        return y * z, l_aux + more

    def through(x: Tensor) -> tuple[Tensor, Tensor]:
        y, l_aux = block(x)
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        z, more = block(x + grad)
        return y * z, l_aux + more

    for early_stop in (True, False):
        with set_checkpoint_early_stop(early_stop):
            assert_same(step(block, frozen(between)), step(block, between))
            with pytest.raises(RuntimeError, match=r"must not go backward through a MoELayer itself"):
                step(block, frozen(through))


def nested(inner: dict[str, Any], outer: dict[str, Any]) -> tuple[Block, Block, Run]:
    first, second = Block(build(gate="noisy_topk")), Block(build())

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y, l_aux = checkpoint(first, x, use_reentrant=False, **inner)
        z, more = second(y)
        return z, l_aux + more

    return first, second, lambda x: checkpoint(function, x, use_reentrant=False, **outer)


@pytest.mark.parametrize("inner", [FROZEN, {}], ids=["frozen inside", "plain inside"])
@pytest.mark.parametrize("outer", [FROZEN, {}], ids=["frozen outside", "plain outside"])
def test_checkpoints_inside_of_checkpoints(outer: dict[str, Any], inner: dict[str, Any]) -> None:
    first, second, run = nested(inner, outer)
    both = nn.ModuleList([first, second])

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        y, l_aux = first(x)
        z, more = second(y)
        return z, l_aux + more

    expected = step(both, plain)
    runs = counted(first.layer), counted(second.layer)
    assert_same(step(both, run), expected)
    taken_over = (outer == FROZEN, inner == FROZEN)
    # Outside plain, the inner pass is new when the outer one runs again, and then runs again by itself.
    assert (
        len(runs[0])
        == 2 * {(True, True): 1, (True, False): 3, (False, True): 2, (False, False): 3}[taken_over]
    )
    assert len(runs[1]) == (2 if outer == FROZEN else 4)


def test_inside_and_outside_take_over_alike_where_random_states_are_not_preserved() -> None:
    first, second, run = nested(*[{**FROZEN, "preserve_rng_state": False}] * 2)
    first.drop.p = second.drop.p = 0.0
    both = nn.ModuleList([first, second])

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        y, l_aux = first(x)
        z, more = second(y)
        return z, l_aux + more

    assert_same(step(both, run), step(both, plain))


# ---- what is kept, and for how long


@pytest.mark.parametrize(
    "dtype, gate",
    spread([torch.bfloat16, torch.float32], [each for each in GATES if each != "hash"], every=2),
)
def test_a_frozen_layer_keeps_no_rows_between_the_passes(gate: str, dtype: torch.dtype) -> None:
    """It keeps only logits, indices, weights and counts in addition to a plain checkpoint.

    This holds also with a router in float32.
    """
    num_tokens, d_model = 512, 512
    layer = MoELayer(d_model, 16, NUM_EXPERTS, gate=gate, dtype=dtype)
    layer.gate.float()
    x = torch.randn(num_tokens, d_model).to(dtype).requires_grad_()

    def held(**options: Any) -> int:
        def run(mark: Callable[[], None]) -> None:
            y = checkpoint(lambda x: layer(2 * x), x, use_reentrant=False, **options)
            mark()
            y.sum().backward()

        layer.l_aux = x.grad = None
        layer.zero_grad()
        return Allocated(run).held

    held()  # what is made once
    beyond = held(**FROZEN) - held()
    numbers_a_token = 4 * NUM_EXPERTS + 8
    assert 0 < beyond <= 4 * numbers_a_token * num_tokens + 20_000, beyond
    assert 4 * numbers_a_token * num_tokens + 20_000 < x.nbytes / 2


def test_nothing_is_left_after_backward() -> None:
    """The record of the routing is freed at once, because no cycle through the graph holds it."""
    block, kept = Block(build(pipeline=2)), []

    class Watched(checkpointing_contexts._FirstPass):
        def __init__(self) -> None:
            super().__init__()
            kept.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing_contexts, "_FirstPass", Watched)
        gc.collect()
        gc.disable()
        try:
            y, l_aux = frozen(block)(tokens().requires_grad_())
            assert kept[0]() is not None
            (y.sum() + l_aux).backward()
            assert kept[0]() is None
            y, l_aux = frozen(block)(tokens().requires_grad_())
            assert kept[1]() is not None
            block.layer.l_aux = None
            del y, l_aux
            assert kept[1]() is None
        finally:
            gc.enable()


def test_traffic_counts_what_is_sent_again_and_no_counts() -> None:
    layer = build(bypass_local=False)
    calls = 0
    exchange = layer.dispatch.exchange

    def counting(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return exchange(*args)

    layer.dispatch.exchange = counting
    y = checkpoint(layer, tokens().requires_grad_(), use_reentrant=False, **FROZEN)
    assert calls == 1
    y.sum().backward()
    assert calls == 3  # once more, and the gradients


# ---- with the rest of PyTorch


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, composable_checkpoint])
def test_torchs_wrappers_take_the_contexts(wrap: Any) -> None:
    block = Block(build(gate="noisy_topk"))
    expected = step(block, block)
    names = {f"_checkpoint_wrapped_module.{name}": name for name in expected}
    runs = counted(block.layer)
    wrapped = wrap(block, context_fn=pmoe.checkpoint_contexts)
    got = step(wrapped, wrapped)
    assert_same({names.get(name, name): value for name, value in got.items()}, expected)
    assert len(runs) == 2


def test_a_compiled_model_with_a_frozen_checkpoint_trains() -> None:
    block = Block(build(gate="noisy_topk"))
    expected = step(block, frozen(block))
    torch._dynamo.reset()
    try:
        runs = counted(block.layer)
        compiled = torch.compile(lambda x: frozen(block)(x * 1.0), backend="eager")
        assert_same(step(block, compiled), expected)
        assert len(runs) == 2
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_the_same_in_both_passes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), MoELayer(8, 16, NUM_EXPERTS, 2, expert="swiglu")).to(dtype)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x), model[1].l_aux

    def autocast(run: Run) -> Run:
        def inside(x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y, l_aux = run(x.to(dtype))
            return y.float(), l_aux

        return inside

    x = torch.randn(32, 8)
    assert_same(step(model, autocast(frozen(function)), x), step(model, autocast(function), x))


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"pipeline": 3, "memory_reuse": "S4"}, {"capacity_factor": 1.0}], ids=str
)
def test_in_deterministic_mode_two_runs_are_bit_identical(
    options: dict[str, Any], checkpointed: bool
) -> None:
    with deterministic():
        blocks = [Block(build(dtype=torch.float32, **options)).float() for _ in range(2)]
        runs = [step(block, frozen(block) if checkpointed else block, tokens().float()) for block in blocks]
    assert_same(*runs)


# ---- refusals


def test_other_layers_or_tokens_in_the_second_pass_are_refused() -> None:
    one, other = build(), build()
    calls: list[int] = []

    def checked(second: Callable[[Tensor], Tensor]) -> None:
        calls.clear()

        def function(x: Tensor) -> Tensor:
            calls.append(1)
            return (one(x) if len(calls) == 1 else second(x)).exp()

        checkpoint(function, tokens().requires_grad_(), use_reentrant=False, **FROZEN).sum().backward()

    with pytest.raises(RuntimeError, match="call 1 of a MoELayer .* it was another layer's"):
        checked(other)
    more = pytest.raises(RuntimeError, match="call 2 of a MoELayer .* the forward pass made 1")
    with more, set_checkpoint_early_stop(False):
        checked(lambda x: one(one(x)))
    with pytest.raises(
        RuntimeError, match=rf"x .*\({TOKENS - 1}, torch.float64\)\) .* \(\({TOKENS}, torch.float64\)"
    ):
        checked(lambda x: one(x[1:]))


class Transposed(nn.Module):
    """A gate whose input is stored by columns, and which saves views of parts of it for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, 2, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(D_MODEL - 2, dtype=torch.float64))

    def forward(self, x_TM: Tensor) -> Routing:
        logits = x_TM[:, 1:3] @ self.weight.t() + (x_TM[:, 2:] * self.scale).sum(1, keepdim=True).sin()
        weight, expert = logits.softmax(-1).topk(2)
        return Routing(expert=expert, weight=weight, l_aux=(x_TM.t() @ logits).square().mean())


def copying() -> saved_tensors_hooks:
    return saved_tensors_hooks(
        lambda tensor: tensor.clone(memory_format=torch.contiguous_format), lambda tensor: tensor
    )


@pytest.mark.parametrize("hooks", [nullcontext, copying])
def test_gates_may_save_views_of_an_input_of_any_layout(hooks: Any) -> None:
    """Other hooks inside the checkpoint may bring the saved tensor back in another layout."""
    layer = build(gate=Transposed())

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        columns = torch.cat([x, 2 * x], 1).t().contiguous().t()[:, 3 : 3 + D_MODEL]
        assert not columns.is_contiguous() and columns.storage_offset()
        with hooks():
            return layer(columns).exp(), layer.l_aux

    # Another layout may be added up in another order.
    limit = 1e-14 if hooks is copying else 0.0
    assert_same(step(layer, frozen(function)), step(layer, function), limit)


def test_a_gate_that_is_changed_between_the_passes_is_refused() -> None:
    layer = build()
    y = checkpoint(layer, tokens().requires_grad_(), use_reentrant=False, **FROZEN)
    with torch.no_grad():
        layer.gate.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"shape \(.*\) that a gate needs .* changed in place"):
        y.sum().backward()


def test_a_call_that_failed_is_not_made_again() -> None:
    layer = build()

    def function(x: Tensor) -> Tensor:
        try:
            return layer(x[:, 1:])
        except ValueError:
            return layer(x).exp()

    y = checkpoint(function, tokens().requires_grad_(), use_reentrant=False, **FROZEN)
    with pytest.raises(RuntimeError, match="call 1 of a MoELayer .* repeats a call that raised an error"):
        y.sum().backward()


def test_bad_input_is_refused_as_ever() -> None:
    layer = build()
    with pytest.raises(ValueError, match=r"must end in d_model \(6\)"):
        checkpoint(layer, torch.randn(3, 7, dtype=torch.float64), use_reentrant=False, **FROZEN)
    with pytest.raises(ValueError, match="context_fn"):
        checkpoint(layer, tokens().requires_grad_(), use_reentrant=True, **FROZEN)
    contexts = pmoe.checkpoint_contexts()
    with pytest.raises(RuntimeError, match="context_fn must be pmoe.checkpoint_contexts itself"):
        for _ in range(2):
            checkpoint(layer, tokens().requires_grad_(), use_reentrant=False, context_fn=lambda: contexts)
    assert not checkpointing_contexts._contexts.get()
