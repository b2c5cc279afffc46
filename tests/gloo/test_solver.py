"""``pipeline="solve"`` on several ranks: any pair of degrees, and rows that are counted a second time.

Other tests: trials beside a `GradientReducer`, and what the layer's own modules cost.
"""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pmoe
from pmoe import warn
from pmoe.choose import open_choice, solve
from pmoe.comm.counts import CountsExchange
from pmoe.measure import profile
from pmoe.planner.costs import Fit, LineCost
from pmoe.planner.degree import DEGREES, SOLVER_DEGREES, Choice
from pmoe.planner.degree_search import ScheduleOptions, StepCosts, pass_seconds
from pmoe.planner.priced_choices import rounded_up
from pmoe.planner.timed_rounds import PassTimes
from pmoe.schedule.restore import KEEP, STRATEGIES
from pmoe.training import gradient_partitioning
from pmoe.training.gradient_partitioning import backward_degrees
from pmoe.training.reducer import FirstStep
from tests.gloo.flexible import lines
from tests.gloo.kit import TOKENS, build
from tests.gloo.test_best_choices import SLACK, lanes_of
from tests.gloo.test_best_choices import profile as stated_profile
from tests.gloo.test_profile import kept_in
from tests.kit import assert_same, step, tokens
from tests.own_experts import mlp
from tests.pool import ranks
from tests.reference import relative_error
from tests.spread import spread
from tests.unit.test_profile import Counted

# ---- any pair of degrees


class Takes:
    """Stands in for the costs of a step, in which a given pair of degrees is the fastest."""

    gate = (0.0, 0.0)

    def __init__(self, pair: tuple[int, int]) -> None:
        self.pair = pair

    def seconds(self, pairs: Sequence[tuple[int, int]], t_gar: float) -> dict[tuple[int, int], float]:
        assert self.pair in pairs
        return {self.pair: 1.0}


@contextmanager
def taking(pair_of: dict[int, tuple[int, int]] | tuple[int, int]) -> Iterator[None]:
    """Makes the solver take a pair of degrees.

    pair_of: the pair, or pairs by number of tokens: that of the smallest number that is not below the batch's
        counts.
    """

    def costs(modules: Any, rows_TM: Tensor, num_tokens: int, restore: Any, *others: Any) -> Takes:
        if isinstance(pair_of, tuple):
            return Takes(pair_of)
        return Takes(pair_of[min(limit for limit in pair_of if limit >= num_tokens)])

    with mock.patch.object(solve, "step_costs", costs):
        yield


def forced_job(rank: int, world: int, options: dict[str, Any], pair: tuple[int, int]) -> tuple[Any, ...]:
    """Compares a layer that takes the pair with an equal one that has one chunk and no reuse."""
    # Ranks with padded rows must have equally many tokens.
    x = tokens(3 * TOKENS[world][0 if "pad_to_capacity" in options else rank], 10 + rank)
    plain = {name: value for name, value in options.items() if name not in ("memory_reuse", "slack")}
    wanted = step(build(**plain, pipeline=1), x)
    layer = build(**options, pipeline="solve")
    with taking(pair):
        for _ in range(2):
            got = step(layer, x)
    assert_same(got, wanted, 1e-12, (pair, options))
    return layer.ran.forward, layer.ran.backward


PAIRS = [(4, 3), (5, 7), (6, 4), (3, 9), (16, 15)]
REUSE = [
    pmoe.Restore("keep", "keep"),
    pmoe.Restore("keep", "recompute"),
    pmoe.Restore("communicate", "keep"),
    *STRATEGIES.values(),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world, pair, reuse", spread([2, 4], [list(pair) for pair in PAIRS], REUSE, every=7))
def test_any_pair_of_degrees_has_the_same_result(world: int, pair: list[int], reuse: pmoe.Restore) -> None:
    options = {"memory_reuse": reuse, "slack": 100}
    for degrees in ranks(world).run(forced_job, options, tuple(pair)):
        assert degrees == tuple(pair)


OTHERS: list[tuple[dict[str, Any], tuple[int, int]]] = [
    ({"memory_reuse": "S4", "slack": 1.0, "top_k": 1}, (5, 7)),  # chunks are cut finer
    ({"memory_reuse": "S4", "capacity_factor": 1.25, "pad_to_capacity": True}, (4, 3)),
    ({"memory_reuse": "S1", "send_once": True, "top_k": 3}, (7, 7)),
    ({"memory_reuse": "S4", "expert": mlp}, (3, 5)),
    ({"memory_reuse": "S4", "fused": "auto"}, (4, 3)),  # on the CPU the pipeline computes it
    ({"memory_reuse": "S2", "expert": mlp}, (6, 3)),
    ({}, (13, 13)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", range(len(OTHERS)))
def test_layers_that_limit_the_pairs_have_the_same_result(at: int) -> None:
    options, pair = OTHERS[at]
    found = ranks(2).run(forced_job, options, pair)
    assert found[0] == found[1]
    if at:
        assert found[0] == pair
    else:
        assert all(got >= n and got % n == 0 for got, n in zip(found[0], pair, strict=True))


def allowed_job(rank: int, world: int) -> None:
    """Checks that layers whose passes must have equal chunks, or whole batches, are offered no other pair."""
    keep = pmoe.Restore("keep", "keep")
    for options, restore, wanted in (
        ({}, KEEP, lambda n, m: n == m),
        ({"memory_reuse": "S4"}, STRATEGIES["S4"], lambda n, m: True),
        ({"memory_reuse": "S4", "send_once": True, "top_k": 2}, STRATEGIES["S4"], lambda n, m: n == m),
        ({"memory_reuse": keep, "expert": mlp}, keep, lambda n, m: n % m == 0),
        ({"memory_reuse": "S4", "expert": mlp}, STRATEGIES["S4"], lambda n, m: True),
    ):
        pairs = build(**options, pipeline="solve").layer_modules.degree_pairs(restore)
        every = {(n, m) for n in SOLVER_DEGREES for m in SOLVER_DEGREES}
        assert set(pairs) == {(n, m) for n, m in every if wanted(n, m)}, options


def test_a_layer_is_offered_the_pairs_that_its_chunks_allow() -> None:
    ranks(2).run(allowed_job)


# ---- a memory budget


class FewChunksAreFast:
    """Stands in for the costs of a step: the fewer chunks both passes have, the faster it is."""

    gate = (0.0, 0.0)

    def seconds(self, pairs: Sequence[tuple[int, int]], t_gar: float) -> dict[tuple[int, int], float]:
        return {(n, m): 1.618 * n + m for n, m in pairs}


def budget_job(rank: int, world: int, budget: int, reuse: Any) -> tuple[Any, ...]:
    """Returns n of both passes, the restore pair, and the promised bytes of all pairs of n with it."""
    x = tokens(3 * TOKENS[world][rank], 10 + rank)
    most = rounded_up(3 * max(TOKENS[world]))
    layer = build(memory_reuse=reuse, slack=SLACK, pipeline="solve", memory_budget=budget)
    with (
        mock.patch.object(solve, "step_costs", lambda *_: FewChunksAreFast()),
        mock.patch("pmoe.choose.trials.profile_of", lambda *_: stated_profile(**lanes_of(1, 1, 1))),
    ):
        for _ in range(2):
            got = step(layer, x)
    assert_same(got, step(build(pipeline=1), x), 1e-12, budget)
    ran = layer.ran
    promised = {
        (n, m): layer.predict_memory(most, pipeline=n, pipeline_backward=m, memory_reuse=ran.restore).promised
        for n, m in layer.layer_modules.degree_pairs(ran.restore)
    }
    return ran.forward, ran.backward, ran.restore, promised


@pytest.mark.slow
@pytest.mark.parametrize("reuse", ["S4", True])
def test_the_solver_takes_the_fastest_pair_within_a_memory_budget(reuse: Any) -> None:
    every: list[tuple[int, int]] = []
    least = ranks(2).run(budget_job, 1 << 40, reuse)[0][3]
    for budget in (1 << 40, least[4, 4], least[16, 16]):
        (n, m, pair, promised), other = ranks(2).run(budget_job, budget, reuse)
        assert other[:3] == (n, m, pair)
        within = [degrees for degrees, num_bytes in promised.items() if num_bytes <= budget]
        assert (n, m) == min(within, key=lambda degrees: 1.618 * degrees[0] + degrees[1])
        every.append((n, m))
    assert every[0] == (1, 1) and len(set(every)) == 3


# ---- rows are counted again only if other chunks are taken


class Recounted:
    """Counts the exchanges of row counts, and their bins."""

    def __init__(self) -> None:
        self.bins: list[int] = []
        self.real = CountsExchange.__init__

    @contextmanager
    def watched(self) -> Iterator[None]:
        def noted(exchange: CountsExchange, grid: Any, counts_FE: Tensor, **options: Any) -> None:
            self.bins.append(counts_FE.shape[0])
            self.real(exchange, grid, counts_FE, **options)

        with mock.patch.object(CountsExchange, "__init__", noted):
            yield


def recount_job(rank: int, world: int) -> list[list[int]]:
    """Small batches take 3 and 4 chunks, large ones 5. The last rank has no tokens in every second call."""
    layer = build(pipeline="solve", memory_reuse="S4", slack=100)
    plain = build(pipeline=1)
    found = []
    for at, count in enumerate((9, 9, 40, 40, 9, 0)):
        x = tokens(0 if rank == world - 1 and at % 2 else count, 50 + at)
        recounted = Recounted()
        with taking({16: (3, 4), 64: (5, 5)}), recounted.watched():
            got = step(layer, x)
        found.append(recounted.bins)
        assert_same(got, step(plain, x), 1e-12, at)
    return found


def test_rows_are_counted_once_more_only_in_calls_whose_chunks_change() -> None:
    """The number of bins is the least common multiple of the chunks, times a power of two.

    It is doubled until two ranks can be told apart. The 32 bins are counted before a measurement: they show
    how much memory the step with the most chunks needs, which a measurement must not exceed. The last call
    has no tokens, a size that the solver has not met before.
    """
    for found in ranks(2).run(recount_job):
        assert found == [[16, 32, 24], [24], [24, 32, 10], [10], [10, 24], [24, 32, 24]]


def replayed_job(rank: int, world: int, frozen: bool) -> None:
    """Calls two batches with different chunks; their backward passes run in the order of the calls."""
    from torch.utils.checkpoint import checkpoint

    context = {"context_fn": pmoe.checkpoint_contexts} if frozen else {}
    layer, plain = build(pipeline="solve", memory_reuse="S4", slack=100), build(pipeline=1)
    xs = [tokens(count, 60 + count + rank).requires_grad_() for count in (9, 40)]
    with taking({16: (3, 4), 64: (5, 5)}):
        for x in xs:  # a first call of each size, which solves
            layer(x.detach())
        ys = [checkpoint(layer, x, use_reentrant=False, **context) for x in xs]
        for y in ys:
            y.square().sum().backward()
    for x in xs:
        got, x.grad = x.grad, None
        plain(x).square().sum().backward()
        assert relative_error(got, x.grad) < 1e-12


@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_counts_for_the_chunks_of_its_own_batch(frozen: bool) -> None:
    ranks(2).run(replayed_job, frozen)


def evaluated_job(rank: int, world: int, operations: Any) -> list[tuple[int | None, int | None]]:
    layer = build(pipeline="solve", memory_reuse="S4", slack=100)
    x = tokens(9, 5 + rank)
    found = []
    with mock.patch.object(solve, "module_lines", lambda *_: (operations, solve.ModuleLines())):
        for training in (False, True, False):
            with torch.set_grad_enabled(training):
                y = layer(x.clone().requires_grad_())
            if training:
                y.sum().backward()
            found.append((layer.ran.forward, layer.ran.backward))
    return found


def test_without_a_backward_pass_n_is_the_best_of_forward() -> None:
    """Experts take 20 s for a row of 9 tokens, messages 8 s: compared with the simulator, not with numbers by
    hand.
    """
    operations = lines(2e-4, 1.5e-6, 1e-6)
    first, second = ranks(2).run(evaluated_job, operations)
    assert first == second
    (n, none), (_, backward), again = first
    assert none is None and backward is not None
    assert again == (n, None)


# ---- beside a GradientReducer


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.moe = pmoe.MoELayer(8, 12, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.dense(x))


def beside_job(rank: int, world: int, pipeline: Any, operations: Any) -> dict[str, Any]:
    """Runs three steps with a reducer. In trials 8 chunks take a second longer than one, in both passes."""
    torch.manual_seed(3)
    model = Block(pipeline=pipeline, memory_reuse="S4")
    tried: list[list[int]] = []
    seen: list[int] = []
    real = open_choice.measure_in_little_memory
    real_end = FirstStep.end

    def noted(batch: Any, choices: Sequence[Choice], *limits: Any, **limit: Any) -> dict[Choice, PassTimes]:
        # For real: what trials do to the gradients would show.
        measured = real(batch, choices, *limits, **limit)
        tried.append([choice.forward for choice in choices])
        return {
            choice: replace(
                timed,
                forward=choice.forward / 7.0,
                backward=choice.backward / 7.0,
                step=(choice.forward + choice.backward) / 7.0,
            )
            for choice, timed in measured.items()
        }

    def ended(first: FirstStep, num_parameters: int) -> None:
        seen.append(len(first.layers))
        real_end(first, num_parameters)

    with (
        mock.patch.object(solve, "module_lines", lambda *_: (operations, solve.ModuleLines())),
        mock.patch.object(open_choice, "measure_in_little_memory", noted),
        mock.patch.object(pmoe.choose.search, "measure_in_stages", noted),
        mock.patch.object(FirstStep, "end", ended),
        mock.patch.object(gradient_partitioning, "all_reduce_line", lambda *_: LineCost(1e-5, 1e-7)),
    ):
        reducer = pmoe.GradientReducer(model)
        degrees = []
        for at in range(3):
            model.zero_grad()
            x = torch.randn(2100, 8, generator=torch.Generator().manual_seed(10 * at + rank))
            model(x).square().sum().backward()
            reducer.finish()
            degrees.append((model.moe.ran.forward, model.moe.ran.backward))
        grad = model.dense.weight.grad.clone()
    model.zero_grad()
    reducer.remove()
    model(x).square().sum().backward()
    wanted = model.dense.weight.grad
    dist.all_reduce(wanted)
    wanted /= world
    return {"degrees": degrees, "tried": tried, "seen": seen, "error": relative_error(grad, wanted)}


def test_beside_a_reducer_the_fixed_cost_of_a_chunk_is_measured_and_counts() -> None:
    """Without the measured cost nothing would make chunks cost anything: messages and products have no fixed
    cost.
    """
    for found in ranks(2).run(beside_job, "solve", lines(0.0, 1e-6, 1e-9)):
        assert [1, 8] in found["tried"]
        assert found["degrees"] == [(1, 1)] * 3
        assert found["seen"] == [1], "a trial is no backward pass of the model"
        assert found["error"] < 1e-5


def test_trials_of_a_search_beside_a_reducer_are_no_backward_passes_of_the_model() -> None:
    for found in ranks(2).run(beside_job, True, lines(0.0, 1e-6, 1e-9)):
        assert set(itertools.chain(*found["tried"])) <= set(DEGREES) and found["tried"]
        assert found["seen"] == [1]
        assert found["error"] < 1e-5


OUT_OF_MEMORY = {"all": None, "many chunks": {1: 1.0}, "no room": {}}
"""Results of trials: an error on every rank, seconds of only one choice, or none."""


def without_memory_job(rank: int, world: int, what: str) -> tuple[int, list[int]]:
    layer = pmoe.MoELayer(8, 12, 4, pipeline="solve", memory_reuse="S4")
    calls = 0

    def tried(batch: Any, choices: Sequence[Choice], *limits: Any, **limit: Any) -> dict[Choice, PassTimes]:
        nonlocal calls
        calls += 1
        seconds = OUT_OF_MEMORY[what]
        if seconds is None:
            raise torch.OutOfMemoryError
        return {
            choice: PassTimes(1.0, 1.0, step=2.0, runs=3, noise=0.0)
            for choice in choices
            if choice.forward in seconds
        }

    degrees = []
    with (
        mock.patch.object(solve, "operations_of", lambda *_: lines(0.0, 1e-6, 1e-9)),
        mock.patch.object(open_choice, "measure_in_little_memory", tried),
    ):
        for _ in range(2):
            layer(torch.randn(2100, 8, requires_grad=True)).sum().backward()
            degrees.append(layer.ran.forward)
    return calls, degrees


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", OUT_OF_MEMORY)
def test_trials_that_run_out_of_memory_are_not_repeated_and_the_lines_decide(what: str) -> None:
    first, second = ranks(2).run(without_memory_job, what)
    assert first == second
    calls, degrees = first
    assert calls == 1 and degrees[0] == degrees[1] > 1


# ---- what the layer's own modules cost

NAP = 0.001
"""Seconds for which modules sleep in each call."""

EXPERT = (LineCost(0.5, 0.0), LineCost(2.0, 0.0))
"""Seconds of an expert's forward and backward pass for any number of rows."""


def partition_job(rank: int, world: int, pipeline: Any) -> list[tuple[int, float]]:
    layer = build(pipeline=pipeline, memory_reuse="S4", expert=mlp)
    x = tokens(20, rank).requires_grad_()
    timed: list[nn.Module] = []

    def measure_expert_module(module: nn.Module, *_: Any) -> Any:
        timed.append(module)
        return EXPERT

    with (
        mock.patch.object(solve, "operations_of", lambda *_: lines(0.0, 0.0, 0.0)),
        mock.patch.object(solve, "measure_expert_module", measure_expert_module),
    ):
        layer(x).sum().backward()
        found = [(each.degree, each.alone) for each in backward_degrees(layer)]
    assert timed == [layer.experts.local[0]], "each layer times one of its experts once"
    return found


@pytest.mark.parametrize("pipeline", [2, "solve"])
def test_a_partition_of_gradients_prices_experts_that_are_modules(pipeline: Any) -> None:
    """Each of a rank's four experts is called for each chunk of rows that are sent, and of those that stay.

    S4 repeats the first of four products.
    """
    first, second = ranks(2).run(partition_job, pipeline)
    assert [n for n, _ in first] == ([2] if pipeline == 2 else list(SOLVER_DEGREES))
    for found in (first, second):
        for n, seconds in found:
            assert seconds == pytest.approx(2 * n * 4 * 2.0 * 1.25, rel=0.01)  # copies of rows were timed


def autocast_job(rank: int, world: int) -> list[float]:
    """Runs modules under autocast, in which their rows have a smaller dtype than their parameters."""
    layer = build(pipeline=2, memory_reuse="S4", dtype=torch.float32, expert=mlp)
    x = tokens(20, rank, torch.float32)
    with mock.patch.object(solve, "operations_of", lambda *_: lines(0.0, 0.0, 0.0)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x.requires_grad_())
        y.float().sum().backward()
        return [each.alone for each in backward_degrees(layer)]


def test_a_partition_times_modules_as_they_ran_under_autocast() -> None:
    first, second = ranks(2).run(autocast_job)
    assert first == second and first[0] > 0


class NappingGate(pmoe.Gate):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        time.sleep(NAP)
        scores_TE = (x_TM @ self.weight.t()).softmax(1)
        expert_T1 = torch.arange(x_TM.shape[0]).unsqueeze(1) % 8
        return pmoe.Routing(
            expert=expert_T1, weight=scores_TE.gather(1, expert_T1), l_aux=scores_TE.new_zeros(())
        )


class NappingOrder(pmoe.Order):
    def order(self, tokens_TM: Tensor, token_N: Tensor, out: Tensor) -> None:
        time.sleep(NAP)
        torch.index_select(tokens_TM, 0, token_N, out=out)

    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        time.sleep(2 * NAP)
        out.copy_(rows_NM[row_SK].sum(1))


class NappingExchange:
    """An exchange with a process group of its own, which waits for its messages."""

    in_steps = True

    def bind(self, ranks: Any, traffic: Any) -> None:
        super().bind(ranks, traffic)  # type: ignore[misc]
        self.group = dist.new_group(ranks.members)

    def exchange(self, rows: Any, send_rows: Any, out: Any, recv_rows: Any, relayed: Any = ()) -> None:
        time.sleep(self.nap)  # type: ignore[attr-defined]
        dist.all_to_all_single(out, rows, list(recv_rows), list(send_rows), group=self.group)
        self.traffic.rows += rows.nbytes  # type: ignore[attr-defined]


class NappingDispatch(NappingExchange, pmoe.Dispatch):
    nap = NAP


class NappingCombine(NappingExchange, pmoe.Combine):
    nap = 3 * NAP


def own_modules_job(rank: int, world: int, watched: bool) -> tuple[Any, int, int]:
    modules = {"gate": NappingGate(), "order": NappingOrder()}
    exchanges = {"dispatch": NappingDispatch(), "combine": NappingCombine()}
    layer = build(pipeline="solve", memory_reuse="S4", top_k=1, **modules, **exchanges)
    if watched and rank == 0:
        layer.gate.register_forward_hook(lambda *_: None)
    x = tokens(9, rank).requires_grad_()
    real = solve.measure_exchange

    def measured(ranks: Any, device: Any, dtype: Any, exchange: Any, *rest: Any, **limit: Any) -> Fit:
        fit = real(ranks, device, dtype, exchange, *rest, **limit)
        assert fit(1e9) > 0
        return replace(fit, line=LineCost(exchange.nap, 0.0))

    with (
        mock.patch.object(solve, "operations_of", lambda *_: lines(0.0, 0.0, 0.0)),
        mock.patch.object(solve, "measure_exchange", measured),
    ):
        layer(x)
        before = layer.traffic.rows + layer.traffic.scalars
        layer(x)
        costs = solve.step_costs(layer.layer_modules, x, 9, STRATEGIES["S4"])
    return costs, before, layer.traffic.rows + layer.traffic.scalars


def test_order_gate_and_exchanges_of_ones_own_are_measured_and_enter_the_step() -> None:
    found = ranks(2).run(own_modules_job, False)
    assert found[0][0] == found[1][0], "all ranks have the costs of the slowest"
    costs, before, after = found[0]
    assert isinstance(costs, StepCosts)
    for one in (costs.forward, costs.backward):
        assert (one.a2a(0.5), one.combine(0.5)) == (NAP, 3 * NAP)
        assert one.restore(0.5) > 0 and one.order(0.5) > 0
    assert costs.gate[0] > 0
    assert before * 2 == after, "what was sent to measure is no traffic of the layer"
    with_modules = sum(costs.seconds([(2, 2)]).values())
    free = replace(costs.forward, order=LineCost(0, 0), restore=LineCost(0, 0))
    options: ScheduleOptions = costs.forward_options
    assert pass_seconds(free, 2, options) < pass_seconds(costs.forward, 2, options) < with_modules


def test_a_gate_with_a_hook_on_one_rank_is_not_timed_there_and_holds_nobody_up() -> None:
    first, second = ranks(2).run(own_modules_job, True)
    assert first[0] == second[0]


class OneBatchGate(NappingGate):
    """A gate with a value for each token of its batch, so that it takes no other number of tokens."""

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        return super().forward(x_TM * torch.ones(9, 1, dtype=x_TM.dtype))


def one_batch_job(rank: int, world: int) -> tuple[list[str], tuple[float, float]]:
    layer = build(pipeline="solve", memory_reuse="S4", top_k=1, gate=OneBatchGate())
    x = tokens(9, rank).requires_grad_()
    warn.GIVEN.clear()
    with (
        mock.patch.object(solve, "operations_of", lambda *_: lines(0.0, 0.0, 0.0)),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            layer(x).sum().backward()
        costs = solve.step_costs(layer.layer_modules, x, 9, STRATEGIES["S4"])
    return [str(each.message) for each in caught], costs.gate


def test_a_gate_that_takes_no_other_batch_is_not_timed_and_trains() -> None:
    for told, gate in ranks(2).run(one_batch_job):
        assert len(told) == 1 and "the gate (OneBatchGate) could not be timed with random tokens" in told[0]
        assert gate == (0, 0)


def hierarchical_job(rank: int, world: int, folder: str, old: bool) -> dict[str, Any]:
    """Runs a layer's first calls with a stored profile. Returns which lines were measured, and which it
    uses.
    """
    measured: list[str] = []
    real = profile.measure_exchange
    solve._operations.clear()

    def noted(ranks: Any, device: Any, dtype: Any, exchange: Any, **limit: Any) -> Fit:
        measured.append(type(exchange).__name__)
        fit = real(ranks, device, dtype, exchange, **limit)
        return replace(fit, line=LineCost(0.5, fit.line.beta_seconds))

    def operations(*args: Any, **options: Any) -> Any:
        measured.append("operations")
        return replace(lines(0.25, 0.0, 0.0), num_across=4, num_inside=1)

    with (
        kept_in(folder),
        mock.patch.object(profile, "WHOLE_BYTES", 0.0),  # the batch is tiny, and its measurements are kept
        mock.patch.object(profile, "measure", Counted()),
        mock.patch.object(profile, "measure_operations", operations),
        mock.patch.object(profile, "measure_exchange", noted),
    ):
        dist.barrier()
        layer = build(pipeline="solve", dispatch="hierarchical_2d", combine="flat", nodes=2)
        layer(tokens(5, rank))
        costs = solve.step_costs(layer.layer_modules, tokens(5, rank), 5, KEEP)
        dist.barrier()
    solve._operations.clear()
    return {
        "measured": measured,
        "dispatch": costs.forward.a2a.alpha_seconds,
        "combine": costs.forward.combine.alpha_seconds,
    }


@pytest.mark.slow
def test_the_line_of_a_hierarchical_dispatch_is_measured_once_and_kept(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path)
    for found in ranks(4).run(hierarchical_job, folder, False):
        assert found == {
            "measured": ["operations", "HierarchicalAllToAll2D"],
            "dispatch": 0.5,
            "combine": 0.25,
        }
    for found in ranks(4).run(hierarchical_job, folder, False):
        assert found["measured"] == [] and found["dispatch"] == 0.5
    # A file of before has no such lines. It is read, and only this line is measured.
    [path] = tmp_path.iterdir()
    fields = json.loads(path.read_text())
    [name] = fields["operations"].pop("exchanges")
    assert name.startswith("HierarchicalAllToAll2D on 2 nodes")
    path.write_text(json.dumps(fields))
    for found in ranks(4).run(hierarchical_job, folder, True):
        assert found["measured"] == ["HierarchicalAllToAll2D"] and found["dispatch"] == 0.5
