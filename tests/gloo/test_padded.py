"""Equal splits padded to capacity on several ranks, against the same layer without padding.

Letters: T tokens, M = d_model, E experts, W ranks.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pmoe
from pmoe.choose import search, trials
from pmoe.decide import begin, padded_counts
from pmoe.engine.lanes.cuda import CudaLanes
from pmoe.measure import profile
from pmoe.schedule.restore import ALL_PAIRS
from tests import kit
from tests.gloo import streams, test_streams
from tests.gloo.kit import counted_collectives
from tests.kit import AUX
from tests.kit import D_MODEL as M
from tests.pool import SHORT_TIMEOUT_SECONDS, Pool, ranks
from tests.reference import Definition, relative_error

FACTOR, TOKENS = 0.7, 9
MANY_TOKENS = 2048
"""Enough tokens for trials."""


def build(world: int, **options: Any) -> pmoe.MoELayer:
    return kit.build(2 * world, **{"capacity_factor": FACTOR, **options})


def tokens(rank: int, num_tokens: int = TOKENS, seed: int = 10) -> Tensor:
    x = kit.tokens(num_tokens, seed + rank)
    x[:, 0] = x[:, 0].abs() + 1
    return x


def step(layer: pmoe.MoELayer, rank: int, num_tokens: int = TOKENS) -> dict[str, Tensor]:
    layer.zero_grad(set_to_none=True)
    x = tokens(rank, num_tokens).requires_grad_()
    y = layer(x)
    ((y * tokens(rank, num_tokens, 20)).sum() + AUX * layer.l_aux).backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    load = layer.tokens_per_expert.double()
    return {"y": y.detach(), "l_aux": layer.l_aux.detach(), "load": load, "x": x.grad, **found}


def one_expert(layer: pmoe.MoELayer) -> None:
    with torch.no_grad():
        layer.gate.weight[-1, 0] += 100  # tokens' first column is positive


def errors(rank: int, world: int, num_tokens: int, load: str, cases: list[dict[str, Any]]) -> list[str]:
    """Returns the cases in which a layer with padding differs from the same layer without."""
    wrong = []
    for options in cases:
        pair = [build(world, pad_to_capacity=flag, **options) for flag in (True, False)]
        if load == "one expert":
            for layer in pair:
                one_expert(layer)
        found, expected = (step(layer, rank, num_tokens) for layer in pair)
        for name in expected:
            error = relative_error(found[name], expected[name])
            if not error <= 1e-12:
                wrong.append(f"rank {rank}, {options}, {name}: {error}")
    return wrong


def check(world: int, cases: list[dict[str, Any]], num_tokens: int = TOKENS, load: str = "mixed") -> None:
    for wrong in ranks(world).run(errors, num_tokens, load, cases):
        assert not wrong, wrong


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [2, 4])
def test_output_gradients_and_drops_equal_the_layer_without_padding(world: int) -> None:
    degrees: list[dict[str, Any]] = [{"pipeline": n} for n in (1, 2, 3)]
    degrees += [{"pipeline": 2, "pipeline_backward": 4}, {"pipeline": 3, "pipeline_backward": 2}]
    axes = (degrees, [1, 2, 4], [0.4, 1.0, 3.0], [True, False])
    cases = [
        {**degree, "top_k": top_k, "capacity_factor": factor, "bypass_local": bypass_local}
        for degree, top_k, factor, bypass_local in itertools.product(*axes)
    ]
    check(world, cases[:: world + 1])  # which leaves no axis out


def test_they_equal_the_definition() -> None:
    world = 2
    whole = build(world).state_dict()  # of this one process
    definition = Definition(
        {name: value.detach() for name, value in whole.items()}, top_k=2, capacity_factor=FACTOR
    )
    xs, grads = ([tokens(rank, seed=seed) for rank in range(world)] for seed in (10, 20))
    ys, _, by_rank = definition.gradients(xs, grads, AUX)
    for rank, found in enumerate(ranks(world).run(defined)):
        assert relative_error(found["y"], ys[rank]) <= 1e-12
        assert relative_error(found["x"], by_rank[rank]["x"]) <= 1e-12
        own = slice(2 * rank, 2 * rank + 2)
        assert relative_error(found["experts.w1"], by_rank[rank]["experts.w1"][own]) <= 1e-12


def defined(rank: int, world: int) -> dict[str, Tensor]:
    return step(build(world, pad_to_capacity=True, pipeline=2), rank)


@pytest.mark.parametrize("world, pairs", [(2, ALL_PAIRS[::2]), (4, ALL_PAIRS[1::2])])
def test_restore_pairs_equal_the_layer_without_padding(world: int, pairs: list[pmoe.Restore]) -> None:
    check(world, [{"memory_reuse": pair, "pipeline": 4, "pipeline_backward": 2} for pair in pairs])


@pytest.mark.parametrize("world", [2, 4])
def test_no_tokens_on_any_rank_and_all_tokens_to_one_expert(world: int) -> None:
    cases: list[dict[str, Any]] = [{"pipeline": 2}, {"pipeline": 2, "memory_reuse": "S4"}]
    check(world, cases, num_tokens=0)
    check(world, cases, load="one expert")


def test_other_experts_and_schedules_equal_the_layer_without_padding() -> None:
    check(
        2,
        [
            {"expert": "swiglu", "bias": False, "pipeline": 2},
            {"expert": linear, "pipeline": 2, "memory_reuse": "S4"},
            {"sequential": True, "pipeline": 2},
            {"gate": "sigmoid", "z_loss_weight": 0.1},
            {"pipeline": True},
        ],
    )


def searching_job(rank: int, world: int, options: dict[str, Any]) -> tuple[float, set[int]]:
    """Compares a step that searches with the layer without padding.

    Returns the largest relative error, and the numbers of tokens on which trials ran.
    """
    sizes = set()
    run = trials.Trial.run

    def counted(trial: trials.Trial) -> tuple[float, float]:
        sizes.add(trial.batch.inputs.x_TM.shape[0])
        return run(trial)

    search._LEARNED.clear()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, PMOE_CACHE=folder),
        mock.patch.dict(profile.PROFILES, clear=True),
        mock.patch.object(trials.Trial, "run", counted),
    ):
        found = step(build(world, pad_to_capacity=True, **options), rank, MANY_TOKENS)
    search._LEARNED.clear()
    expected = step(build(world, capacity_factor=options["capacity_factor"]), rank, MANY_TOKENS)
    return max(relative_error(found[name], expected[name]) for name in expected), sizes


@pytest.mark.parametrize("factor", [1.25, 0.5])
@pytest.mark.parametrize(
    "options",
    [{"pipeline": True, "memory_reuse": "S4"}, {"pipeline": "solve", "memory_reuse": True}],
    ids=["True", "solve"],
)
def test_a_step_that_searches_on_a_part_of_the_batch_equals_the_layer_without_padding(
    options: dict[str, Any], factor: float
) -> None:
    """Before, padded rows were taken for tokens when trials ran on a part of the batch: a RuntimeError."""
    for error, sizes in ranks(2).run(searching_job, {**options, "capacity_factor": factor}):
        assert error <= 1e-12
        assert 0 < min(sizes) < MANY_TOKENS


def linear() -> nn.Module:
    return nn.Linear(M, M, dtype=torch.float64)


# ---- what travels


def traffic_job(rank: int, world: int) -> tuple[list[str], list[int], list[list[int]]]:
    """Returns what a second step communicates.

    These are its collectives, the bytes of counts before and after it, and the bytes of rows in two steps
    that are routed differently. On the CPU and on CUDA, ranks do not compare every call.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padded_counts, "compares_always", lambda _: False)
        layer = build(world, pad_to_capacity=True, pipeline=2)
        step(layer, rank)
        counts, rows = [layer.traffic.counts], [layer.traffic.rows]
        one_expert(layer)
        with counted_collectives() as calls:
            step(layer, rank)
        counts.append(layer.traffic.counts)
        rows.append(layer.traffic.rows - rows[0])
        assert layer.row_counts is not None
        return calls, counts, [rows, layer.row_counts.send.flatten().tolist()]


@pytest.mark.parametrize("world", [2, 4])
def test_a_call_like_one_before_exchanges_no_counts_and_as_many_rows_whatever_their_routing(
    world: int,
) -> None:
    capacity = 4 if world == 2 else 2  # ceil(0.7 * 9 * 2 / E)
    for calls, counts, (rows, row_counts) in ranks(world).run(traffic_job):
        assert set(calls) == {"all_to_all_single"}
        assert counts[0] == counts[1]
        assert row_counts == [capacity // 2] * (2 * world * 2)
        assert rows == [4 * (world - 1) * 2 * capacity * M * 8] * 2  # to and fro, forward and backward


# ---- streams


def capture_job(rank: int, world: int, options: dict[str, Any]) -> tuple[int, set[str], bool]:
    """Runs two steps on streams that only have clocks, and captures the second one.

    Returns the number of races and early frees, the tasks that wait for something outside of the capture, and
    whether the capturing stream has waited for all others when the step ends. CUDA asks for the last two.
    """
    strangers = set()
    with streams.watching() as watch:
        layer = test_streams.build({"capacity_factor": 1.5, **options, "pad_to_capacity": True})

        def step() -> None:
            x = torch.randn(40, test_streams.D_MODEL).requires_grad_()
            (layer(x).sum() + layer.l_aux).backward()

        step()
        captures = watch.current
        captures.advance()
        start, wait = captures.clock[captures], streams.Stream.wait_event

        def watched_wait(self: streams.Stream, event: streams.Event) -> None:
            if event.clock[captures] < start:
                strangers.add(watch.task)
            wait(self, event)

        with mock.patch.object(streams.Stream, "wait_event", watched_wait):
            step()
        others = [*CudaLanes._streams.values(), *watch.wires.values()]
        joined = all(captures.clock[other] >= other.clock[other] for other in others)
        report = streams.Report.of(watch)
        assert (report.num_messages > 0) == (world > 1 or not options.get("bypass_local", True))
        return len(report.findings), strangers, joined


def capturing_job(rank: int, world: int) -> str:
    """Returns the error of a layer without padding, before anything is sent. The padded layer raises none."""
    plain, layer = build(world), build(world, pad_to_capacity=True)
    expected = layer(tokens(rank))
    with mock.patch.object(begin, "is_for_graph", lambda _: True):
        with pytest.raises(RuntimeError) as raised, counted_collectives() as calls:
            plain(tokens(rank))
        assert not calls and torch.equal(layer(tokens(rank)), expected)
    return str(raised.value)


def test_of_several_ranks_only_padded_calls_can_be_captured() -> None:
    for told in ranks(2).run(capturing_job):
        assert "CUDA graph cannot hold this call of a MoELayer: rows travel between ranks" in told
        assert "on any number of ranks with pad_to_capacity=True" in told


CAPTURED: list[dict[str, Any]] = [
    {"pipeline": 1},
    {"pipeline": 3, "bypass_local": False},
    {"pipeline": 2, "memory_reuse": "S4"},
    {"pipeline": 4, "pipeline_backward": 2, "memory_reuse": pmoe.Restore("communicate", "keep")},
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("options", CAPTURED, ids=str)
def test_streams_never_race_and_a_capture_begins_and_ends_with_the_capturing_one(
    options: dict[str, Any], world: int
) -> None:
    for findings, strangers, joined in ranks(world).run(capture_job, options):
        assert not findings and not strangers and joined


def test_an_offloading_layer_waits_for_what_is_not_captured() -> None:
    """That is why such a layer is refused."""
    for findings, strangers, _ in ranks(2).run(capture_job, {"pipeline": 2, "memory_reuse": "S1"}):
        assert not findings and strangers


# ---- ranks that do not make the same call


def unlike_job(rank: int, world: int) -> list[str]:
    told = []
    layer = build(world, pad_to_capacity=True)
    layer(tokens(rank, 8))
    layer(tokens(rank, 6))

    def refused(x: Tensor) -> None:
        with pytest.raises(ValueError) as raised:
            layer(x)
        told.append(str(raised.value))

    refused(tokens(rank, 8 - 2 * (rank == 1)))  # both known by themselves
    refused(tokens(rank, 5 + rank))
    refused(tokens(rank, 7)[:, : M - (rank == 0)])
    with torch.set_grad_enabled(rank == 0):
        refused(tokens(rank, 6))
    layer.requires_grad_(rank == 0)
    refused(tokens(rank, 6))
    layer.requires_grad_()
    y = layer(tokens(rank, 6))
    assert y.shape == (6, M)
    return told


def test_ranks_that_do_not_make_the_same_call_are_told_so_on_every_rank() -> None:
    first, second = ranks(2).run(unlike_job)
    rule = "x must have the same number of tokens on every rank with pad_to_capacity (True)"
    counts = rule + ": rank 0: {}; rank 1: {}"
    for told in (first, second):
        assert told[0] == counts.format(8, 6) and told[1] == counts.format(5, 6)
        assert re.search(
            r"called without gradients .* on rank 1, and with them on rank 0: all ranks must", told[3]
        )
        assert told[4].endswith("every rank must need gradients, or none: no gradient is needed on rank 1")
    assert re.search(r"must end in d_model \(6\)", first[2])
    assert second[2] == "rank 0: the last dimension of its input is not d_model"


def first_call_job(rank: int, world: int) -> list[str]:
    """Runs calls as on CUDA: the first call of a kind is compared on all ranks, and raises the ranks'
    faults.
    """
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padded_counts, "compares_always", lambda _: False)
        layer = build(world, pad_to_capacity=True)
        for x in (tokens(rank, 4 + rank), tokens(rank, 4)[:, : M - (rank == 1)], tokens(rank, 4)):
            try:
                layer(x)
                told.append("")
            except ValueError as error:
                told.append(str(error))
    return told


def test_the_first_call_of_a_kind_is_compared_wherever_others_are_not() -> None:
    first, second = ranks(2).run(first_call_job)
    assert "rank 0: 4; rank 1: 5" in first[0] and first[0] == second[0]
    assert first[1] == "rank 1: the last dimension of its input is not d_model" and "d_model (6)" in second[1]
    assert first[2] == second[2] == ""


def late_job(rank: int, world: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padded_counts, "compares_always", lambda _: False)
        layer = build(world, pad_to_capacity=True)
        layer(tokens(rank))
        dist.barrier()
        start = time.monotonic()
        try:
            layer(tokens(rank)[:, : M - (rank == 1)])
        except (ValueError, RuntimeError) as error:
            if rank == 0:
                assert time.monotonic() - start < SHORT_TIMEOUT_SECONDS + 20
            return f"{type(error).__name__}: {error}"
        return ""


@pytest.mark.slow
def test_a_rank_that_fails_later_on_cuda_leaves_the_others_an_error_that_names_the_stage() -> None:
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        waiting, failed = pool.run(late_job)
    assert failed.startswith("FaultError: x of shape (9, 5) must end in d_model (6)")
    assert re.match(
        r"RuntimeError: pmoe: rank 0 of 2 failed in \w+ .*, forward of \w+ 1; a peer has died", waiting
    )
