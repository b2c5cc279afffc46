"""Layers whose passes run as programs, on several ranks: the engine's results, messages and errors."""

from __future__ import annotations

import gc
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pmoe import warn
from pmoe.comm.agreement import all_fail_together
from pmoe.comm.ranks import Ranks
from pmoe.decide import program_choice
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES
from tests.gloo.kit import NUM_EXPERTS, error_of
from tests.gloo.test_program import ROWS
from tests.kit import assert_same, build, gradients, tokens
from tests.pool import SHORT_TIMEOUT_SECONDS, Pool, ranks
from tests.programs import CpuBackend, Exchange, on_cpu
from tests.unit.test_program_layers import fallbacks


def layer_job(rank: int, world: int, cases: list[dict[str, Any]], frozen_rank: int = -1) -> int:
    """Compares a step by programs with the engine's, to the bit. Returns how many chunks were sorted.

    frozen_rank: the rank whose experts are frozen.
    """
    num_experts = 6 if world == 3 else NUM_EXPERTS
    sorted_chunks = 0
    for number, options in enumerate(cases):
        results = []
        sent = []
        with on_cpu(CpuBackend(seed=100 * number + rank)):
            for program in (True, False):
                layer = build(num_experts, **options, program=program)
                layer.experts.requires_grad_(rank != frozen_rank)
                x = tokens(ROWS[world][rank], 10 + rank)
                found = gradients(layer, x)
                results.append({name: value for name, value in found.items() if value is not None})
                sent.append((layer.traffic.rows, layer.traffic.scalars))
                assert layer.ran is not None
                assert layer.ran.path == ("program" if program else "pipeline"), options
                counts = layer.row_counts
                assert counts is not None
                sorted_chunks += int((counts.received_rows > 0).sum(1).max()) > 1
        assert_same(*results, told=(options, world, rank))
        assert sent[0] == sent[1], "both send the same bytes"
    return sorted_chunks


def options_of(pairs: Any, degrees: tuple[int, ...], **others: Any) -> list[dict[str, Any]]:
    return [
        {"memory_reuse": pair, "pipeline": n, "expert": ("ffn", "swiglu")[(i + n) % 2], **others}
        for i, pair in enumerate(pairs)
        for n in degrees
    ]


QUICK = options_of([STRATEGIES["S1"], STRATEGIES["S4"], KEEP], (2,))


def test_a_step_by_programs_is_the_engines_to_the_bit() -> None:
    assert sum(ranks(4).run(layer_job, QUICK)) > 0, "some chunk's rows are sorted"


@pytest.mark.sampled(0)
@pytest.mark.slow
@pytest.mark.parametrize("bypass_local", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_step_by_programs_is_the_engines_to_the_bit_in_all_cases(world: int, bypass_local: bool) -> None:
    cases = options_of(ALL_PAIRS, (1, 2, 4, 8), bypass_local=bypass_local)
    ranks(world).run(layer_job, cases)


@pytest.mark.slow
def test_experts_may_be_frozen_on_one_rank_only() -> None:
    for frozen_rank in (0, 1):
        ranks(2).run(layer_job, QUICK, frozen_rank)


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def parametrized_job(rank: int, world: int) -> list[dict[str, Tensor]]:
    """Runs a step by programs and by the engine after rank 0 alone has parametrized its experts."""
    found = []
    with on_cpu():
        for program in (True, False):
            layer = build(NUM_EXPERTS, pipeline=2, memory_reuse="S4", program=program)
            gradients(layer, tokens(5, rank))
            if rank == 0:
                parametrize.register_parametrization(layer.experts, "w1", Halved())
            found.append(gradients(layer, tokens(5, rank)))
            assert layer.ran is not None
            assert layer.ran.path == ("program" if program else "pipeline")
    return found


def test_experts_may_be_parametrized_on_one_rank_only() -> None:
    """torch gives them another class there. Ranks that ask about it alone would wait for the others."""
    for by_programs, by_engine in ranks(2).run(parametrized_job):
        assert_same(by_programs, by_engine)


class Refusing(CpuBackend):
    """A backend that one rank cannot run."""

    def __init__(self, reason: str | None) -> None:
        super().__init__()
        self.reason = reason

    def refusal(self, *_: object) -> str | None:
        return self.reason


def refused_job(rank: int, world: int) -> tuple[list[str], str]:
    """Runs a layer where rank 1 has no library. Returns the reasons told, and how the call ran."""
    with on_cpu(Refusing("NCCL's library is not loaded" if rank == 1 else None)):
        layer = build(NUM_EXPERTS, pipeline=2, memory_reuse="S4", program=True)
        reasons = fallbacks(lambda: gradients(layer, tokens(5, rank)))
    assert layer.ran is not None
    return reasons, layer.ran.path


def test_if_one_rank_refuses_all_ranks_run_by_the_engine_and_say_why() -> None:
    first, second = ranks(2).run(refused_job)
    assert first == (["rank 1 refuses: NCCL's library is not loaded"], "pipeline")
    assert second == (["NCCL's library is not loaded"], "pipeline")


class Unconnected(CpuBackend):
    """A backend whose first attempts to connect the ranks fail.

    failures: the number of attempts that fail; ``attempts`` is the number of all so far.
    """

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.attempts = 0

    def connect(self, ranks: Ranks, device: torch.device, *, heaps: bool) -> Exchange:
        self.attempts += 1
        with all_fail_together(ranks, stage="connect"):
            if self.attempts <= self.failures and ranks.rank == 1:
                raise RuntimeError("number 17 is busy")
        return super().connect(ranks, device, heaps=heaps)


def unconnected_job(rank: int, world: int) -> tuple[list[str], list[str], int]:
    """Runs calls of a layer while attempts to connect fail twice. Returns the reasons told, and the paths."""
    paths = []
    with on_cpu(Unconnected(2)) as backend, pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_choice, "FIRST_PAUSE", 2)
        patch.setattr(program_choice, "LONGER", 2)
        layer = build(NUM_EXPERTS, pipeline=2, memory_reuse="S4", program=True)

        def run() -> None:
            for _ in range(6):
                layer(tokens(5, rank))
                assert layer.ran is not None
                paths.append(layer.ran.path)

        reasons = fallbacks(run)
    return reasons, paths, backend.attempts


def test_ranks_that_failed_to_connect_try_again_after_some_calls() -> None:
    """An attempt, 2 calls by the engine, an attempt, 4 calls by the engine, and an attempt that succeeds."""
    first, second = ranks(2).run(unconnected_job)
    paths = ["pipeline"] * 8 + ["program"] * 4
    assert first == (["there is no communicator: rank 1: number 17 is busy"], paths, 3)
    assert second == (["there is no communicator: number 17 is busy"], paths, 3)


class Counting(CpuBackend):
    """A backend that counts the communicators that it makes, in ``made``."""

    made = 0

    def connect(self, ranks: Ranks, device: torch.device, *, heaps: bool) -> Exchange:
        self.made += 1
        return super().connect(ranks, device, heaps=heaps)


KINDS: list[dict[str, Any]] = [{}, {"d_hidden": 12}, {"expert": "swiglu"}, {"top_k": 1}, {"bias": False}]
"""Layers of different sizes and settings, whose programs differ."""


def sharing_job(rank: int, world: int) -> tuple[int, list[str]]:
    """Runs layers of all kinds. Returns the number of communicators, and the paths."""
    paths = []
    with on_cpu(Counting()) as backend:
        for options in KINDS:
            layer = build(NUM_EXPERTS, pipeline=2, memory_reuse="S4", program=True, **options)
            gradients(layer, tokens(5, rank))
            assert layer.ran is not None
            paths.append(layer.ran.path)
    return backend.made, paths


def test_layers_of_all_sizes_share_a_communicator() -> None:
    """Each communicator of NCCL takes memory on the device, and a thread that looks at its passes."""
    assert ranks(2).run(sharing_job) == [(1, ["program"] * len(KINDS))] * 2


def pause_job(rank: int, world: int) -> tuple[int, list[str]]:
    """Runs layers of all kinds, whose ranks cannot connect. Returns the number of attempts, and the paths."""
    paths = []
    with on_cpu(Unconnected(99)) as backend:
        for options in KINDS:
            layer = build(NUM_EXPERTS, pipeline=2, memory_reuse="S4", program=True, **options)
            layer(tokens(5, rank))
            assert layer.ran is not None
            paths.append(layer.ran.path)
    return backend.attempts, paths


def test_ranks_that_failed_to_connect_do_not_try_again_for_a_layer_of_another_size() -> None:
    """An attempt may last until a time limit."""
    assert ranks(2).run(pause_job) == [(1, ["pipeline"] * len(KINDS))] * 2


def group_again_job(rank: int, world: int, folder: str) -> tuple[list[int], list[bool]]:
    """Destroys the group and makes it again. Returns the communicators made, and whether the first exists."""
    found = []
    exist = []
    with on_cpu(Counting()) as backend:
        layer = build(NUM_EXPERTS, pipeline=2, memory_reuse="S4", program=True)
        gradients(layer, tokens(5, rank))
        communicator = weakref.ref(backend.loaded[0].computing.exchange)
        backend.loaded.clear()
        found.append(backend.made)
        exist.append(communicator() is not None)
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/again", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        gradients(layer, tokens(5, rank))
        gc.collect()
        found.append(backend.made)
        exist.append(communicator() is not None)
        assert layer.ran is not None and layer.ran.path == "program"
    return found, exist


def test_programs_of_a_destroyed_group_are_forgotten(tmp_path: Path) -> None:
    """Else each group that a process makes leaves a communicator and a thread."""
    with Pool(2) as pool:
        assert pool.run(group_again_job, str(tmp_path)) == [([1, 2], [True, False])] * 2


class UnconnectedAlone(CpuBackend):
    """A backend whose rank 1 fails to connect after the last exchange, when rank 0 has its communicator."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def connect(self, ranks: Ranks, device: torch.device, *, heaps: bool) -> Exchange:
        communicator = super().connect(ranks, device, heaps=heaps)
        if ranks.rank == 1:
            raise self.error
        return communicator


def alone_job(rank: int, world: int, error: Exception) -> tuple[list[str], str, str]:
    """Runs one call. Returns the reasons told, the path, and the error of the call."""
    raised = ""
    with on_cpu(UnconnectedAlone(error)):
        layer = build(NUM_EXPERTS, pipeline=2, memory_reuse="S4", program=True)

        def run() -> None:
            nonlocal raised
            raised = error_of(lambda: layer(tokens(5, rank)))

        reasons = fallbacks(run)
    return reasons, "" if layer.ran is None else layer.ran.path, raised


def test_if_one_rank_alone_fails_to_connect_all_ranks_run_by_the_engine_and_say_why() -> None:
    """Rank 0 would send by its communicator, and wait for rank 1, whose engine sends by the group."""
    first, second = ranks(2).run(alone_job, RuntimeError("can't start new thread"))
    assert first == (["there is no communicator: rank 1: can't start new thread"], "pipeline", "")
    assert second == (["there is no communicator: can't start new thread"], "pipeline", "")
    first, second = ranks(2).run(alone_job, RuntimeError())
    assert first == (["there is no communicator: rank 1: RuntimeError"], "pipeline", ""), "without a text"
    assert second == (["there is no communicator: RuntimeError"], "pipeline", "")


def test_another_error_of_one_rank_while_it_connects_raises_on_all() -> None:
    with Pool(2) as pool:
        first, second = pool.run(alone_job, ValueError("a wrong variable"))
    assert first == ([], "", "ValueError: rank 1: a wrong variable")
    assert second == ([], "", "ValueError: a wrong variable")


def differing_job(rank: int, world: int) -> str:
    """Sets the switch on one rank only."""
    layer = build(NUM_EXPERTS, pipeline=2, memory_reuse="S4", program=rank == 0)
    return error_of(lambda: layer(tokens(3)))


def test_ranks_that_differ_in_the_switch_are_told() -> None:
    for message in ranks(2).run(differing_job):
        assert "program" in message and "ValueError" in message


def absent_job(rank: int, world: int, ending: str) -> tuple[str, float]:
    """Rank 1 ends, or raises, before the second pass. Returns the other ranks' error, and its time."""
    warn.GIVEN.clear()
    with on_cpu() as backend:
        layer = build(NUM_EXPERTS, pipeline=2, memory_reuse="S4", program=True)
        x = tokens(5, rank).requires_grad_()
        layer(x).sum().backward()
        y = layer(x)

        def broken(*_: object) -> None:
            if ending == "dies":
                os._exit(3)
            raise KeyError("number 17")

        if rank == 1:
            for loaded in backend.loaded:
                loaded.computing.run = broken  # type: ignore[method-assign]
        start = time.monotonic()
        return error_of(lambda: y.sum().backward()), time.monotonic() - start


def test_an_error_of_one_rank_in_a_program_reaches_the_others() -> None:
    with Pool(2) as pool:  # whose ranks have left a pass in the middle
        first, second = pool.run(absent_job, "raises")
    assert second[0] == "KeyError: 'number 17'"
    assert "failed in the program of a backward pass" in first[0] and "number 17" in first[0]


@pytest.mark.slow
def test_a_peer_that_dies_in_a_program_is_an_error_within_the_timeout() -> None:
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        pool.start(absent_job, "dies")
        message, seconds = pool.answer(0)
    assert "failed in the program of a backward pass" in message
    assert seconds < SHORT_TIMEOUT_SECONDS + 20  # what a busy machine may add
