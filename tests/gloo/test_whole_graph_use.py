"""torch.compile(model, backend="pmoe") in users' situations: wrapped, checkpointed, compiled twice,
failing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pmoe
from bench.graph_timeline import PassTimeline
from pmoe.comm.ranks import Ranks
from pmoe.experts.operands import local_part
from pmoe.graph import cost, explain, run
from pmoe.measure.line_fits import LaneWork
from pmoe.planner.costs import LineCost
from tests.gloo.test_whole_graph import batch, build, layers, loss_of
from tests.pool import Pool, ranks
from tests.reference import relative_error

STEPS = 5


def fresh() -> None:
    torch._dynamo.reset()
    run.PROGRAMS.clear()


def compile_for_pmoe(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, backend="pmoe", **options)


def wrong_gradients(one: nn.Module, other: nn.Module) -> float:
    """Returns the largest error of a gradient of this rank."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(relative_error(local_part(b.grad), local_part(a.grad)) for a, b in pairs)


# ---- wrapped


def in_ddp(rank: int, world: int, compile_first: bool) -> list[float]:
    fresh()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    plain = pmoe.parallelize(build(top_k=2), mesh)
    graph = pmoe.parallelize(build(top_k=2), mesh)
    eager = DistributedDataParallel(plain)
    if compile_first:
        inner = compile_for_pmoe(graph)
        compiled = DistributedDataParallel(pmoe.parallelize(inner, mesh))
    else:
        compiled = compile_for_pmoe(DistributedDataParallel(graph))
    errors = []
    for step in range(STEPS):
        x = batch(rank, step, 4)
        losses = []
        for model, call in ((plain, eager), (graph, compiled)):
            model.zero_grad()
            loss = loss_of(model, call, x)
            loss.backward()
            losses.append(loss.detach())
        errors += [relative_error(losses[1], losses[0]), wrong_gradients(plain, graph)]
        assert all(each.ran.path == "whole graph" for each in layers(graph)), layers(graph)[0].ran
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("compile_first", [False, True])
def test_under_ddp_gradients_are_those_of_the_eager_model(compile_first: bool) -> None:
    for errors in ranks(2).run(in_ddp, compile_first):
        assert max(errors) < 1e-12, errors


def in_ddp_unmarked(rank: int, world: int) -> str:
    fresh()
    call = compile_for_pmoe(DistributedDataParallel(build()))
    with pytest.raises(ValueError, match="must not be in DistributedDataParallel|they were copied") as caught:
        call(batch(rank, 0, 4))
    return str(caught.value)


@pytest.mark.slow
def test_experts_that_ddp_takes_for_copies_are_an_error_in_a_graph_too() -> None:
    for message in ranks(2).run(in_ddp_unmarked):
        assert "pmoe.parallelize" in message


def in_fsdp2(rank: int, world: int) -> float:
    fresh()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    models = []
    for is_compiled in (False, True):
        model = pmoe.parallelize(build(top_k=2), mesh)
        own = set(pmoe.expert_parameters(model))
        for module in (*model.blocks, model):
            fully_shard(module, ignored_params=own & set(module.parameters()))
        call = compile_for_pmoe(model) if is_compiled else model
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, call, batch(rank, step, 4)).backward()
        models.append(model)
    assert all(each.ran.path == "whole graph" for each in layers(models[1]))
    return wrong_gradients(*models)


@pytest.mark.slow
def test_under_fsdp2_gradients_are_those_of_the_eager_model() -> None:
    for error in ranks(2).run(in_fsdp2):
        assert error < 1e-12


# ---- eager parts, autocast, other compilers


class TwoBlocks(nn.Module):
    """Two blocks. The first one is checkpointed, the second one may be compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = (
            nn.Sequential(nn.Linear(8, 8), pmoe.MoELayer(8, 12, 4), nn.Linear(8, 8)).double()
            for _ in range(2)
        )
        self.call: Callable[[Tensor], Tensor] = self.second

    def forward(self, x: Tensor) -> Tensor:
        h: Any = checkpoint(self.first, x, use_reentrant=False, context_fn=pmoe.checkpoint_contexts)
        return self.call(h)


def beside_checkpoint(rank: int, world: int) -> list[float]:
    fresh()
    plain, graph = TwoBlocks(), TwoBlocks()
    graph.load_state_dict(plain.state_dict())
    object.__setattr__(graph, "call", compile_for_pmoe(graph.second, fullgraph=True))
    errors = []
    for step in range(STEPS):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step + 10 * rank), dtype=torch.float64)
        for model in (plain, graph):
            model.zero_grad()
            model(x).square().mean().backward()
        errors.append(wrong_gradients(plain, graph))
    assert layers(graph)[1].ran.path == "whole graph" and layers(graph)[0].ran.path == "pipeline"
    return errors


@pytest.mark.slow
def test_eager_parts_may_be_checkpointed() -> None:
    for errors in ranks(2).run(beside_checkpoint):
        assert max(errors) < 1e-12, errors


def under_autocast(rank: int, world: int) -> list[float]:
    fresh()
    plain = build(top_k=2).float()
    graph = copy.deepcopy(plain)
    compiled = compile_for_pmoe(graph, fullgraph=True)
    errors = []
    for step in range(STEPS):
        x = batch(rank, step, 4)
        for model, call in ((plain, plain), (graph, compiled)):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, call, x)
            loss.backward()
        errors.append(wrong_gradients(plain, graph))
    assert {each.ran.dtype for each in layers(graph)} == {torch.bfloat16}
    return errors


@pytest.mark.slow
def test_autocast_is_that_of_the_layer() -> None:
    for errors in ranks(2).run(under_autocast):
        assert max(errors) < 2e-2, errors  # bfloat16 has 8 bits


def nested(rank: int, world: int) -> None:
    fresh()
    for inner, outer in (("aot_eager", "pmoe"), ("pmoe", "aot_eager")):
        plain = build()
        graph = copy.deepcopy(plain)
        graph.blocks[1] = torch.compile(graph.blocks[1], backend=inner)
        call = torch.compile(graph, backend=outer)
        for step in range(3):
            x = batch(rank, step, 4)
            for model, run_it in ((plain, plain), (graph, call)):
                model.zero_grad()
                loss_of(model, run_it, x).backward()
            assert wrong_gradients(plain, graph) < 1e-12
        # An outer compiler traces through an inner one, whose backend is then not asked.
        assert layers(graph)[0].ran.path == ("whole graph" if outer == "pmoe" else "pipeline")


@pytest.mark.slow
def test_compilers_may_be_nested() -> None:
    ranks(2).run(nested)


class WithoutHash:
    """A backend object that has no hash, as Inductor's has none."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, module: Any, inputs: Any) -> Any:
        return module.forward


def beside_another(rank: int, world: int) -> float:
    fresh()
    plain, x = build(), batch(rank, 0, 4)
    compile_for_pmoe(copy.deepcopy(plain))(x)
    graph = copy.deepcopy(plain)
    loss_of(graph, torch.compile(graph, backend=WithoutHash()), x).backward()
    loss_of(plain, plain, x).backward()
    return wrong_gradients(plain, graph)


@pytest.mark.slow
def test_other_backends_compile_models_of_the_same_process() -> None:
    for error in ranks(2).run(beside_another):
        assert error < 1e-12


# ---- it explains itself


def limited(rank: int, world: int) -> tuple[list[float], list[int]]:
    """Returns the limits under which the profile was measured, and the bytes of the messages measured."""
    limits = []
    taken = []
    real = cost.messages

    def profile_of(ranks: Ranks, device: torch.device, dtype: torch.dtype, most_bytes: float) -> Any:
        limits.append(most_bytes)
        return SimpleNamespace(message=LineCost(1e-4, 1e-9))

    def messages(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> LaneWork:
        work = real(ranks, device, dtype)

        def make(units: int) -> Callable[[], object]:
            taken.append(units * work.unit_bytes)
            return work.make(units)

        return replace(work, make=make)

    fakes = {"LINKS": {}, "profile_of": profile_of, "messages": messages}
    with mock.patch.multiple(cost, **fakes):
        for limit in (20_000, 60_000, 100_000):
            own_limit = limit if rank == 1 else limit // 2  # all ranks take that of the rank with most rows
            cost.link_of(Ranks(), torch.device("cpu"), torch.float32, own_limit)
    return limits, taken


def test_messages_are_measured_in_no_more_memory_than_the_graphs_rows_take() -> None:
    """A limit of 60,000 bytes is below four times the first one, so the first measurement still counts."""
    for limits, taken in ranks(2).run(limited):
        assert limits == [20_000, 100_000]
        assert taken == [20_000, 100_000]


def test_the_rows_of_a_graph_take_the_bytes_of_its_tokens_once_for_each_choice() -> None:
    graph = fx.Graph()
    tokens = graph.placeholder("tokens")
    tokens.meta["val"] = torch.empty(6, 4, dtype=torch.float64)
    for name in ("slot", "position", "send", "own"):
        graph.placeholder(name)
    graph.output(tokens)
    module = fx.GraphModule(nn.Module(), graph)
    assert cost.packed_bytes(module) == float("inf"), "no layer, so no limit"
    with module.graph.inserting_before(next(iter(module.graph.find_nodes(op="output")))):
        first, *others = module.graph.find_nodes(op="placeholder")
        module.graph.call_function(torch.ops.pmoe_graph.pack.default, (first, *others, 2))
    assert cost.packed_bytes(module) == 6 * 4 * 8 * 2


def explained(rank: int, world: int, folder: str) -> str:
    fresh()
    model = build()
    kept = torch.ones_like(next(model.parameters()))
    next(model.parameters()).grad = kept
    found = explain(model, batch(rank, 0, 4))
    assert next(model.parameters()).grad is kept and kept.eq(1).all()
    assert found.measured.keys() == found.programs.keys() == {"forward", "backward"}
    found.draw(f"{folder}/{rank}.png")
    return str(found)


def seen(rank: int, world: int) -> None:
    fresh()
    call, x = compile_for_pmoe(model := build()), batch(rank, 0, 4)
    for _ in range(4):
        loss_of(model, call, x).backward()
    watches = {}
    for key, program in run.PROGRAMS.items():
        program.watch = watches[key] = PassTimeline(program.instructions)
    loss_of(model, call, x).backward()
    for key, watch in watches.items():
        ran = {each.task.name: each for each in watch.ran}
        instructions = run.PROGRAMS[key].instructions
        assert {each.name for each in instructions} <= ran.keys()
        assert all(0 <= each.start <= each.end for each in ran.values())
        assert all(each.communicates == ran[each.name].task.communicates for each in instructions)
        # As `timeline` predicts: a message starts after all computation before it in the list.
        computed = 0.0
        for each in instructions:
            if each.communicates:
                assert ran[each.name].start >= computed, each.name
            else:
                computed = max(computed, ran[each.name].end)


@pytest.mark.slow
def test_a_timeline_has_every_instruction_on_its_lane() -> None:
    ranks(2).run(seen)


@pytest.mark.slow
def test_explain_tells_what_was_decided_and_draws_it(tmp_path: Path) -> None:
    for rank, text in enumerate(ranks(2).run(explained, str(tmp_path))):
        heading, *rows = text.splitlines()
        assert heading.split()[:2] == ["pass", "predicted"]
        assert [row.split()[0] for row in rows[:2]] == ["forward", "backward"]
        assert (tmp_path / f"{rank}.png").stat().st_size > 10_000


def test_explain_needs_a_layer_that_communicates() -> None:
    fresh()
    with pytest.raises(ValueError, match="model must hold a MoELayer among several ranks"):
        explain(nn.Linear(4, 4), torch.randn(2, 4))


# ---- what goes wrong


def unlike(rank: int, world: int) -> str:
    fresh()
    model = nn.Sequential(nn.Linear(8, 8), pmoe.MoELayer(8, 12, 4), *([nn.Sigmoid()] if rank else []))
    with pytest.raises(ValueError) as caught:
        compile_for_pmoe(model)(torch.randn(4, 8))
    return str(caught.value)


def test_ranks_with_other_graphs_raise_and_name_the_first_operator() -> None:
    for message in ranks(2).run(unlike):
        assert message.startswith("the forward graph of rank 1 must be that of rank 0: operator ")
        assert "sigmoid" in message


def many_shapes(rank: int, world: int) -> str:
    fresh()
    call = compile_for_pmoe(nn.Sequential(nn.Linear(8, 8), pmoe.MoELayer(8, 12, 4)))
    with torch._dynamo.config.patch(recompile_limit=1):
        call(torch.randn(4, 8))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit) as caught, torch.no_grad():
            call(torch.randn(4, 8))
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_would_run_without_its_graph_raises() -> None:
    for message in ranks(2).run(many_shapes):
        assert "recompile_limit" in message


def failing(rank: int, world: int) -> str:
    fresh()
    model = nn.Sequential(nn.Linear(8, 8), pmoe.MoELayer(8, 12, 4))
    call = compile_for_pmoe(model)
    for _ in range(4):
        call(torch.randn(4, 8)).sum().backward()
    if rank == 1:

        def compute(*given: Any) -> Any:
            raise RuntimeError("the product has no memory")

        model[1].experts.compute = compute  # type: ignore[method-assign]
    try:
        for _ in range(2):
            call(torch.randn(4, 8)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing failed"


@pytest.mark.slow
def test_a_failure_names_instruction_layer_and_rank_and_lets_nobody_wait_longer_than_the_timeout() -> None:
    with Pool(2, timeout_seconds=4) as pool:
        pool.start(failing)
        first, second = (pool.answer(rank, 30) for rank in range(2))
    named = r"pmoe: rank 1 failed in experts_\d+(, part \d)? \(layer \d+\) of the forward graph: the product"
    assert re.match(named, second), second
    assert "exchange" in first and "rank 0" in first, first
