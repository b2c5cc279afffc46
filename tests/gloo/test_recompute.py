"""Activation checkpointing of layers on several ranks: the second pass takes over the routing.

A routing that differs on one of the ranks is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import pmoe
from pmoe import MoELayer, Restore, Routing
from pmoe.choose import search, solve
from pmoe.decide import exact_counts
from pmoe.planner.degree import Choice
from pmoe.planner.profile import Operations
from pmoe.schedule.restore import ALL_PAIRS
from tests import kit
from tests.gloo.flexible import lines, mesh_of
from tests.gloo.kit import NUM_EXPERTS, TOKENS, counted_collectives, error_of
from tests.kit import AUX, D_HIDDEN, D_MODEL, assert_same, tokens
from tests.own_experts import dropping, mlp
from tests.plain_steps import plain_steps, using
from tests.pool import ranks
from tests.spread import spread

FROZEN = {"use_reentrant": False, "context_fn": pmoe.checkpoint_contexts}


class Block(nn.Module):
    """Dropout before the gate of a layer that is called twice, and the losses of both calls."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = kit.build(NUM_EXPERTS, **options)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.layer(self.drop(x))
        l_aux = self.layer.l_aux.exp()
        y = y + self.drop(self.layer(y.sin()))
        return y.exp().cos(), l_aux + self.layer.l_aux


Run = Callable[[Tensor], tuple[Tensor, Tensor]]


def step(block: nn.Module, run: Run, x: Tensor) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Returns results, gradients and the next random number; then the collectives of each pass."""
    block.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    with counted_collectives() as forward:
        y, l_aux = run(x)
    with counted_collectives() as backward:
        (y.square().sum() + AUX * l_aux).backward()
    found = {name: parameter.grad for name, parameter in block.named_parameters()}
    random = torch.rand(1)
    found = {"y": y.detach(), "l_aux": l_aux.detach(), "x": x.grad, **found, "random": random}
    return found, forward, backward


def compare(block: Block, x: Tensor, what: object = None) -> tuple[list[str], list[str], list[str]]:
    """Returns the collectives of both passes without a checkpoint, and of backward with one."""
    expected, forward, backward = step(block, block, x)
    l_aux, counts = block.layer.l_aux, block.layer.tokens_per_expert
    got, again, more = step(block, lambda x: checkpoint(block, x, **FROZEN), x)
    assert_same(got, expected, told=what)
    assert again == forward, what
    assert torch.equal(block.layer.l_aux, l_aux) and torch.equal(block.layer.tokens_per_expert, counts)
    return forward, backward, more


# ---- the second pass takes the routing over


def pairs_job(rank: int, world: int, pair: Restore | bool, expert: Any, n: int, n_backward: int) -> None:
    block = Block(
        memory_reuse=pair, expert=expert, pipeline=n, pipeline_backward=n_backward, gate="noisy_topk"
    )
    forward, backward, more = compare(block, tokens(TOKENS[world][rank], 10 + rank))
    counts = 1 if pair is False and n == n_backward else 2
    a_call = len(forward) // 2
    assert len(more) == len(backward) + 2 * (a_call - counts)  # no counts are exchanged again


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "world, pair, expert, degrees",
    spread([2, 4], [False, *ALL_PAIRS], ["ffn", mlp, dropping], [[1, 1], [3, 3], [4, 2]], every=13),
)
def test_a_checkpoint_changes_no_bit(
    world: int, pair: Restore | bool, expert: Any, degrees: list[int]
) -> None:
    if expert is dropping and degrees[0] != degrees[1]:
        degrees = [2, 2]  # what is drawn at random is not drawn again in other chunks
    ranks(world).run(pairs_job, pair, expert, *degrees)


class Widen(pmoe.Callback, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, D_MODEL, dtype=torch.float64))

    def before_moe_start(self, x: Tensor) -> Tensor:
        return x * self.factor

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * self.factor


OPTIONS: dict[str, dict[str, Any]] = {
    "once": {"send_once": True, "top_k": 3, "pipeline": 2},
    "once, S4": {"send_once": True, "memory_reuse": "S4", "pipeline": 2},
    "callbacks": {"callbacks": 1, "memory_reuse": "S2", "pipeline": 2},
    "shared expert": {"shared_expert": 5, "shared_gate": True, "pipeline": 2},
    "capacity": {"capacity_factor": 0.7, "memory_reuse": "S3", "pipeline": 2},
    "expert choice": {"gate": "expert_choice", "pipeline": 2},
    "soft": {"gate": "soft"},
    "random": {"gate": "random", "memory_reuse": "S1", "pipeline": 3},
    "all travel": {"bypass_local": False, "pipeline": 2, "memory_reuse": "S4"},
    "padded": {"capacity_factor": 0.7, "pad_to_capacity": True, "pipeline": 2, "memory_reuse": "S4"},
    "hierarchical": {"dispatch": "hierarchical_2d", "nodes": 2, "pipeline": 2},
    "sharded": {"mesh": 1, "pipeline": 2, "memory_reuse": "S2"},
    "fused": {"fused": True},
    "fused forward": {"fused": "forward", "pipeline": 2, "memory_reuse": "S4"},
}


def options_job(rank: int, world: int, name: str) -> None:
    options = dict(OPTIONS[name])
    if "callbacks" in options:
        options["callbacks"] = [Widen()]
    if "mesh" in options:
        options["mesh"] = mesh_of(world // 2, 2, False)
    x = tokens(6 if "pad_to_capacity" in options else TOKENS[world][rank], 10 + rank)
    with using(plain_steps) if "fused" in options else nullcontext():
        compare(Block(**options), x, name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world, name", spread([4, 2], list(OPTIONS), every=2))
def test_whatever_else_a_layer_does(world: int, name: str) -> None:
    ranks(world).run(options_job, name)


def choices_job(rank: int, world: int) -> None:
    """Runs calls of which each makes another choice than the last."""
    block, chosen = Block(pipeline=True, memory_reuse=True), 0
    x = tokens(TOKENS[world][rank], rank).requires_grad_()

    def choose(*_: Any) -> Choice:
        nonlocal chosen
        chosen += 1
        n = (1, 4, 2, 8)[chosen % 4]
        return Choice(forward=n, backward=n, restore=ALL_PAIRS[chosen % 9])

    original, exact_counts.choose = exact_counts.choose, choose
    try:
        y, l_aux = checkpoint(block, x, **FROZEN)
        assert chosen == 2
        block.layer(x)
        (y.square().sum() + AUX * l_aux).backward()
        assert chosen == 3
    finally:
        exact_counts.choose = original


def test_nothing_is_chosen_anew() -> None:
    ranks(2).run(choices_job)


def search_job(rank: int, world: int) -> list[Any]:
    """Trials of pipeline=True run both passes several times: none of them is a call of the layer."""
    block = Block(pipeline=True, memory_reuse="S4", top_k=1)
    block.drop.p = 0.0
    known = search.learned_degrees(block.layer.layer_modules)
    x = tokens(2100 - rank, rank).requires_grad_()
    y, _ = checkpoint(block, x, **FROZEN)
    found = known.table(x.dtype).lookup(2100)
    assert found is not None
    n = block.layer.ran.forward
    with counted_collectives() as calls:
        y.square().sum().backward()
    assert block.layer.ran.forward == n
    got = x.grad.clone()
    x.grad = None
    block(x)[0].square().sum().backward()
    return [torch.equal(x.grad, got), found.forward, "all_reduce" in calls, "barrier" in calls]


def test_trials_of_the_search_are_not_repeated() -> None:
    for found in ranks(2).run(search_job):
        assert found == [True, found[1], False, False]


def solve_job(rank: int, world: int, operations: Operations, context: dict[str, Any]) -> bool:
    """Runs a first call in which an expert is timed, forward and backward.

    The timing once left the tensors that it saved to the checkpoint, and so ran the checkpoint's second pass
    in the middle of the first.
    """
    block = Block(pipeline="solve", expert=dropping)
    x = tokens(TOKENS[world][rank], rank)
    with mock.patch.object(solve, "operations_of", lambda *_: operations):
        got, *_ = step(block, lambda x: checkpoint(block, x, use_reentrant=False, **context), x)
        expected, *_ = step(block, block, x)
    assert_same(got, expected)
    return bool(block.layer.cache.choosers)


@pytest.mark.parametrize("context", [{}, {"context_fn": pmoe.checkpoint_contexts}], ids=["plain", "frozen"])
def test_what_a_first_call_measures_is_no_part_of_the_checkpoint_around_it(context: dict[str, Any]) -> None:
    assert all(ranks(2).run(solve_job, lines(1e-5, 1e-9, 1e-12), context))


def aux_job(rank: int, world: int, gate: str) -> list[float]:
    """Uses only the auxiliary loss. Ranks without tokens take part when the layer runs again."""
    block = Block(gate=gate, pipeline=2, memory_reuse="S2")
    grads = []
    for run in (block, lambda x: checkpoint(block, x, **FROZEN)):
        block.zero_grad()
        torch.manual_seed(5)
        _, l_aux = run(tokens(TOKENS[world][rank], rank).requires_grad_())
        l_aux.backward()
        grads.append([parameter.grad.clone() for parameter in block.layer.gate.parameters()])
    return [torch.equal(got, want) for got, want in zip(*grads, strict=True)]


@pytest.mark.parametrize("gate", ["topk", "noisy_topk", "expert_choice"])
def test_the_auxiliary_loss_alone_has_its_gradient(gate: str) -> None:
    for equal in ranks(4).run(aux_job, gate):
        assert equal and all(equal)


def orders_job(rank: int, world: int) -> None:
    block = Block(gate="noisy_topk", memory_reuse="S2", pipeline=2)
    xs = [tokens((count + rank) % 7, 30 + 7 * i + rank).requires_grad_() for i, count in enumerate((6, 3, 5))]
    losses: list[list[Tensor]] = [[], []]
    for run, into in zip((block, lambda x: checkpoint(block, x, **FROZEN)), losses, strict=True):
        for i, x in enumerate(xs):
            torch.manual_seed(i)
            y, l_aux = run(x)
            into.append(y.square().sum() + AUX * l_aux)
    for i, retain in ((1, True), (2, False), (0, True), (1, False), (0, False)):
        wanted = [xs[i], *block.parameters()]
        want = torch.autograd.grad(losses[0][i], wanted, retain_graph=True)
        got = torch.autograd.grad(losses[1][i], wanted, retain_graph=retain)
        assert all(map(torch.equal, got, want)), i


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [2, 4])
def test_several_forwards_run_backward_in_any_order_and_twice(world: int) -> None:
    ranks(world).run(orders_job)


def sharded_job(rank: int, world: int, is_outside: bool) -> None:
    """Runs a gate whose graph holds parameters that FSDP frees between the passes."""
    block = Block(gate="noisy_topk", pipeline=2)
    experts = set(block.layer.experts.parameters())
    call = block.forward
    run = block
    if not is_outside:  # a checkpoint inside of what is sharded
        block.forward = lambda x: checkpoint(call, x, **FROZEN) if block.is_frozen else call(x)
    fully_shard(block, mesh=init_device_mesh("cpu", (world,)), ignored_params=experts)
    block.is_frozen = False
    x = tokens(TOKENS[world][rank], rank)
    expected = step(block, run, x)[0]
    block.is_frozen = True
    got = step(block, (lambda x: checkpoint(block, x, **FROZEN)) if is_outside else run, x)[0]
    for name, value in expected.items():
        whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in (got[name], value)]
        assert torch.equal(*whole), name


@pytest.mark.parametrize("is_outside", [True, False])
def test_a_sharded_gate_has_the_same_gradients(is_outside: bool) -> None:
    ranks(2).run(sharded_job, is_outside)


def failed_job(rank: int, world: int) -> str:
    """Makes a first call that is wrong on rank 1 only; every rank gets an error, and goes on."""
    layer = Block().layer

    def function(x: Tensor) -> Tensor:
        try:
            return layer(x[:, : D_MODEL - rank])
        except ValueError:
            return layer(x).exp()

    y = checkpoint(function, tokens(5, rank).requires_grad_(), **FROZEN)
    return error_of(lambda: y.sum().backward())


def test_every_rank_refuses_to_repeat_a_call_that_failed() -> None:
    for message in ranks(2).run(failed_job):
        assert message.startswith("RuntimeError: call 1 of a MoELayer"), message
        assert "repeats a call that raised an error" in message


# ---- selective checkpointing


def saving_products(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    saved = operation is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def saving_nothing(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy: Callable[..., CheckpointPolicy]) -> dict[str, Any]:
    context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    return {"use_reentrant": False, "context_fn": context_fn}


def selective_job(rank: int, world: int, options: dict[str, Any], count: int) -> tuple[str, bool]:
    """Runs layers under selective checkpoints.

    In one case n is found by trials in the first pass; in another a gate decides otherwise in the second.
    """
    padded = "pad_to_capacity" in options
    block, x = Block(**options), tokens(count - (0 if padded else rank), rank)
    got = step(block, lambda x: checkpoint(block, x, **selective(saving_products)), x)[0]
    assert_same(got, step(block, block, x)[0], told=options)
    tables = search.learned_degrees(block.layer.layer_modules).tables.values()
    found = any(table.lookup(count) is not None for table in tables)
    torch.manual_seed(rank)
    y, _ = checkpoint(block, x.requires_grad_(), preserve_rng_state=False, **selective(saving_nothing))
    return error_of(lambda: y.sum().backward()), found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options, count",
    [
        ({}, 9),
        ({"pipeline": 2, "memory_reuse": "S4"}, 9),
        ({"pad_to_capacity": True, "capacity_factor": 1.0, "pipeline": 2}, 9),
        ({"pipeline": True, "top_k": 1}, 2100),
    ],
    ids=str,
)
def test_selective_checkpointing_finds_the_same_operations_in_both_passes(
    options: dict[str, Any], count: int
) -> None:
    for message, found in ranks(2).run(selective_job, options, count):
        assert "routing changed in recomputation" in message
        assert found == (options.get("pipeline") is True)


# ---- two runs


@contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def deterministic_job(rank: int, world: int, options: dict[str, Any]) -> None:
    x = tokens(TOKENS[world][rank], rank).float()
    with deterministic():
        runs = []
        for _ in range(2):
            block = Block(dtype=torch.float32, **options)
            runs.append(step(block, lambda x: checkpoint(block, x, **FROZEN), x)[0])  # noqa: B023
            runs.append(step(block, block, x)[0])
    for run in runs[1:]:
        assert_same(run, runs[0], told=options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [{}, {"pipeline": 3, "memory_reuse": "S4"}, {"capacity_factor": 1.0}], ids=str
)
def test_in_deterministic_mode_two_runs_are_bit_identical(options: dict[str, Any]) -> None:
    ranks(4).run(deterministic_job, options)


# ---- routing that changed on one rank


class Drifting(nn.Module):
    """A gate that routes differently in each call, if ``drifts`` is True."""

    def __init__(self, drifts: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_EXPERTS, D_MODEL, dtype=torch.float64))
        self.drifts, self.calls = drifts, 0

    def forward(self, x_TM: Tensor) -> Routing:
        self.calls += self.drifts
        logits = x_TM @ self.weight.t()
        expert = (torch.arange(x_TM.shape[0]).unsqueeze(1) + torch.arange(2) + self.calls) % NUM_EXPERTS
        return Routing(expert=expert, weight=logits.softmax(-1).gather(1, expert), l_aux=logits.sum())


def changed_job(
    rank: int, world: int, culprits: tuple[int, ...], use_reentrant: bool, options: dict[str, Any]
) -> tuple[str, list[str], bool]:
    gate = "topk" if "pad_to_capacity" in options else Drifting(rank in culprits)
    torch.manual_seed(0)
    layer = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, gate=gate, dtype=torch.float64, **options)
    drop = nn.Dropout(0.5 if gate == "topk" and rank in culprits else 0.0)
    count = 7 if "pad_to_capacity" in options else TOKENS[world][rank]
    torch.manual_seed(rank)

    def function(x: Tensor) -> Tensor:
        return 2 * layer(drop(x))

    x = tokens(count, rank).requires_grad_()
    y = checkpoint(function, x, use_reentrant=use_reentrant, preserve_rng_state=False)
    with counted_collectives() as calls:
        message = error_of(lambda: y.square().sum().backward())
    # All ranks are where they were: the next step is right.
    y = checkpoint(function, x, **FROZEN)
    y.square().sum().backward()
    return message, calls, x.grad is not None


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    "world, culprits, options",
    [
        (2, (0,), {}),
        (2, (1,), {"memory_reuse": "S4", "pipeline": 2}),
        (2, (1,), {"pad_to_capacity": True, "capacity_factor": 1.0}),
        (4, (0, 3), {"pipeline": 3}),
    ],
)
def test_every_rank_raises_before_rows_travel(
    world: int, culprits: tuple[int, ...], options: dict[str, Any], use_reentrant: bool
) -> None:
    text = "routing changed in recomputation: pass context_fn=pmoe.checkpoint_contexts"
    for message, calls, went_on in ranks(world).run(changed_job, culprits, use_reentrant, options):
        assert message.startswith("FaultError: ")
        for rank in range(world):
            assert (f"rank {rank}: {text}" in message) == (rank in culprits), message
        assert calls in (["all_to_all_single"], ["all_to_all_single", "all_reduce"])
        assert went_on
