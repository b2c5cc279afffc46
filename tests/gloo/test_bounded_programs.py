"""Programs whose row counts stay on the device: their launches can be repeated for other tokens.

`pmoe.program.bounded` describes them. The recorded calls compute in float64, and give the engine's results to
the bit. On a device, launches in the emulator are captured once. They are then repeated for batches with
other routing, and give what programs with exact row counts give, to the bit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pmoe
from bench.bench_program import host_calls
from pmoe import Restore
from pmoe.comm.heap import close_heaps, program_heap
from pmoe.comm.heap.program_heap import ARENA_MIB
from pmoe.comm.ranks import Ranks
from pmoe.ordering.sorted import count_rows
from pmoe.program.bounded import DeviceRows, RowBounds, rows_on_device
from pmoe.program.compiler import compile_pass
from pmoe.program.records import Base, PassProgram
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES
from pmoe.schedule.tasks import Schedule
from tests.device_programs import DeviceCall, stand_ins
from tests.gloo.kit import NUM_EXPERTS
from tests.gloo.test_program import ROWS, all_to_all, counts_of
from tests.heaps import CPU, FileMemory
from tests.kit import build, loss_of, tokens
from tests.pool import ranks
from tests.programs import (
    BoundedComputing,
    EngineCall,
    ProgramCall,
    check_against_engine,
    engine_call,
    library,
    own_counts,
    unset,
)
from tests.unit.test_program_cuda import WIDTH


def gathered(counts_nE: Tensor) -> Tensor:
    """Returns the row counts of all ranks, (W, n, E)."""
    everyone = counts_nE.new_empty(dist.get_world_size() * counts_nE.shape[0], counts_nE.shape[1])
    dist.all_gather_into_tensor(everyone, counts_nE.contiguous())
    return everyone.view(-1, *counts_nE.shape)


def device_rows(expert_TK: Tensor, bounds: RowBounds) -> DeviceRows:
    num_experts = bounds.ranks * bounds.local_experts
    counts_nE = count_rows(expert_TK, None, bounds.chunks, num_experts)
    return rows_on_device(expert_TK, gathered(counts_nE), bounds, dist.get_rank())


class BoundedMemory(ProgramCall):
    """Both passes of a call by bounded programs: the memory and the records of a `ProgramCall` for them.

    bounds: for how many rows there is room.
    rows: which rows exist.
    """

    bounds: RowBounds
    rows: DeviceRows

    def compiled(self, schedule: Schedule) -> PassProgram:
        return compile_pass(schedule, self.shape, self.call.plan.restore, bounded=True)

    def make_room(self) -> None:
        """Replaces the memory whose size depends on row counts by memory with room for the most rows."""
        bounds = self.bounds
        rows = self.rows
        received, stays = bounds.chunks * bounds.received, bounds.chunks * bounds.stays
        weight_TK = self.call.inputs.weight_TK
        self.put(WEIGHT=torch.cat([weight_TK.flatten(), weight_TK.new_zeros(1)]))
        self.put(POSITION=rows.position_TK, PAIR_BY_NUMBER=rows.pair_by_number, ENDS=rows.ends)
        if rows.regroup is not None and rows.regroup_weights is not None:
            self.put(REGROUP=rows.regroup, REGROUP_WEIGHTS=rows.regroup_weights)
        for base in (Base.WEIGHT_BY_NUMBER, Base.DWEIGHT_BY_NUMBER):
            self.held[base] = unset(bounds.num_rows, dtype=weight_TK.dtype)
        for base in (Base.WEIGHT_RECEIVED, Base.WEIGHT_ARRIVED, Base.DWEIGHT_RECEIVED, Base.DWEIGHT_LEAVING):
            self.held[base] = unset(received, dtype=weight_TK.dtype)
        for name, num_rows in (("", received), ("_L", stays)):
            for tensor in ("T_DI", "T_M"):
                base = Base[f"SAVED_{tensor}{name}"]
                old = self.held[base]
                self.held[base] = unset(num_rows, old.shape[1], dtype=old.dtype)

    def put(self, **tensors: Tensor) -> None:
        if "DWEIGHT" in tensors:  # one number more, for rows that do not exist
            tensors["DWEIGHT"] = tensors["DWEIGHT"].new_zeros(tensors["DWEIGHT"].numel() + 1)
        super().put(**tensors)

    def backward(self) -> list[Tensor]:
        found = super().backward()
        return [found[0], found[1][:-1].view_as(self.call.inputs.weight_TK), *found[2:]]


# ---- in float64


class BoundedCall(BoundedMemory):
    """Both passes of a call by bounded programs whose recorded calls compute in float64."""

    def __init__(
        self, call: EngineCall, rank: int, bounds: RowBounds, rows: DeviceRows, seed: int, *, places: bool
    ) -> None:
        super().__init__(call, rank, *bounds.counts(rank), all_to_all, seed=seed)
        self.bounds, self.rows = bounds, rows
        self.shape = replace(self.shape, places=places)
        self.computing = BoundedComputing(
            self.computing.experts, all_to_all, program=lambda: self.program, table=rows.rows_by_rank
        )
        self.make_room()


def engine_job(rank: int, world: int, cases: list[tuple[Restore, int]]) -> list[bool]:
    """Compares both passes with the engine's. Returns whether the rows of each case fit."""
    num_experts = 6 if world == 3 else NUM_EXPERTS
    fits = []
    for number, (pair, n) in enumerate(cases):
        layer = build(
            num_experts, pipeline=n, memory_reuse=pair, expert=("ffn", "swiglu")[number % 2],
            bias=number % 3 == 0,
        )  # fmt: skip
        x = tokens(ROWS[world][rank], 10 + rank).requires_grad_()
        call = engine_call(lambda layer=layer, x=x: loss_of(layer, layer(x)).backward())
        bounds = RowBounds.of(
            max_tokens=max(ROWS[world]), top_k=call.inputs.weight_TK.shape[1], slack=world,
            chunks=len(call.plan.forward.chunks), ranks=world, local_experts=num_experts // world,
        )  # fmt: skip
        rows = device_rows(layer.gate(x.detach()).expert, bounds)
        bounded = BoundedCall(call, rank, bounds, rows, 17 * n + rank, places=number % 2 == 1)
        check_against_engine(bounded, (str(pair), n, world, rank))
        fits.append(bool(rows.fits))
    return fits


QUICK = [(STRATEGIES["S4"], 4), (STRATEGIES["S4"], 2), (KEEP, 2), (STRATEGIES["S4"], 1)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bounded_programs_compute_what_the_engine_does(world: int) -> None:
    for fits in ranks(world).run(engine_job, QUICK):
        assert fits == [True] * len(QUICK)


@pytest.mark.sampled(0)
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_bounded_programs_compute_what_the_engine_does_in_all_cases(world: int) -> None:
    ranks(world).run(engine_job, [(pair, n) for pair in ALL_PAIRS for n in (1, 2, 4, 8)])


# ---- launches that are repeated


class BoundedDeviceCall(BoundedMemory, DeviceCall):
    """Both passes of a call by bounded programs, whose launches are captured and then repeated."""

    def __init__(
        self, call: EngineCall, rank: int, bounds: RowBounds, rows: DeviceRows, heap: Any, kernels: str
    ) -> None:
        DeviceCall.__init__(
            self, call, rank, *bounds.counts(rank), all_to_all, communicator=heap.exchanger, kernels=kernels
        )
        self.bounds, self.rows = bounds, rows
        self.device_rows = rows.rows_by_rank
        self.make_room()

    def capture(self, module: Any) -> tuple[int, int]:
        """Captures both passes. Returns the numbers of launches and fills of each."""
        module.stub_capture(True)
        self.forward()
        num_forward = module.stub_num_captured()
        self.gradients = self.backward()
        module.stub_capture(False)
        return num_forward, module.stub_num_captured() - num_forward

    def replay(self, module: Any, call: EngineCall, rows: DeviceRows) -> list[Tensor]:
        """Repeats both passes for another batch of as many tokens. Returns the output and all gradients.

        call: the batch, with the gradient of its output.
        rows: its rows, as launches before the passes would compute them.
        """
        assert call.grad_TM is not None
        self.held[Base.T_I].copy_(call.inputs.x_TM)
        self.held[Base.DT_O].copy_(call.grad_TM)
        self.held[Base.WEIGHT][:-1] = call.inputs.weight_TK.flatten()
        self.held[Base.DWEIGHT].zero_()
        for name in ("position_TK", "pair_by_number", "ends", "regroup", "regroup_weights", "rows_by_rank"):
            new = getattr(rows, name)
            if new is not None:
                getattr(self.rows, name).copy_(new)
        for number in range(module.stub_num_captured()):
            module.stub_replay(number)
        return [self.held[Base.T_O].clone(), *(each.clone() for each in self.gradients)]


NUM_TOKENS = 8
BALANCED, TURNED, UNEVEN, CROWDED = range(4)
"""Batches: rows for all experts, for others than in the first, unevenly, and most of them for rank 0."""


def batch(rank: int, index: int, num_experts: int) -> Tensor:
    """(T, M): column e of a token leads to expert e (`steered`)."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    x = torch.rand(NUM_TOKENS, WIDTH, generator=generator)
    token = torch.arange(NUM_TOKENS)
    first = {
        BALANCED: token % num_experts,
        TURNED: (3 * token + rank) % num_experts,
        UNEVEN: token % 2 * (num_experts // 2 - 1),
        CROWDED: 0 * token,
    }[index]
    x[token, first] += 3
    x[token, (first + 1) % num_experts] += 2
    return x.to(torch.bfloat16)


def steered(num_experts: int, n: int) -> pmoe.MoELayer:
    """Returns a layer whose number of chunks stays n, however uneven its rows are."""
    layer = build(
        num_experts, pipeline=n, memory_reuse="S4", slack=num_experts, expert="swiglu", bias=False,
        d_model=WIDTH, d_hidden=WIDTH, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight.fill_diagonal_(8)
    return layer


def replay_job(
    rank: int, world: int, kernels: Path, path: str, n: int
) -> tuple[list[tuple[bool, bool]], tuple[int, int]]:
    """Repeats captured passes for all batches.

    Returns for each batch whether its rows fit, and whether the results are those of programs with exact row
    counts; or, if the rows do not fit, whether all results are 0. Also returns the launches of each pass.
    """
    num_experts = 2 * world
    with stand_ins(kernels, runs=True) as module, pytest.MonkeyPatch.context() as patch:
        patch.setenv(ARENA_MIB, "1")
        heap = program_heap.program_heap(Ranks(), CPU, memory=FileMemory())  # type: ignore[arg-type]
        layer = steered(num_experts, n)
        bounds = RowBounds.of(
            max_tokens=NUM_TOKENS, top_k=2, slack=1.5, chunks=n, ranks=world, local_experts=2
        )

        def exactly(index: int) -> tuple[EngineCall, DeviceRows, list[Tensor]]:
            x = batch(rank, index, num_experts).requires_grad_()
            call = engine_call(lambda: loss_of(layer, layer(x)).backward())
            assert len(call.plan.forward.chunks) == n
            expert_TK = layer.gate(x.detach()).expert
            send = own_counts(call, expert_TK, num_experts, world)
            exact = DeviceCall(
                call, rank, send, counts_of(send), all_to_all, communicator=heap.exchanger, kernels=path
            )
            results = [exact.forward().clone(), *(each.clone() for each in exact.backward())]
            return call, device_rows(expert_TK, bounds), results

        call, rows, _ = exactly(BALANCED)
        bounded = BoundedDeviceCall(call, rank, bounds, rows, heap, path)
        launches = bounded.capture(module)
        answers = []
        for index in (BALANCED, UNEVEN, CROWDED, TURNED, BALANCED):
            call, rows, expected = exactly(index)  # passes outside of the graph come between replays
            fits = bool(rows.fits)
            results = bounded.replay(module, call, rows)
            wanted = expected if fits else [torch.zeros_like(each) for each in expected]
            answers.append((fits, all(map(torch.equal, results, wanted))))
        assert bounded.num_lent == 2 and module.stub_refused() == []
        close_heaps(Ranks())
    return answers, launches


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, path, n", [(2, "sm_80", 4), (2, "sm_90a", 2), (3, "sm_80", 2)], ids=["2", "2 on Hopper", "3"]
)
def test_captured_launches_compute_other_batches_to_the_bit(
    kernels: Path, world: int, path: str, n: int
) -> None:
    """No row count reaches the host. A batch whose rows do not fit gives zeros on all ranks."""
    for answers, launches in ranks(world).run(replay_job, kernels, path, n):
        assert answers == [(True, True), (True, True), (False, True), (True, True), (True, True)]
        if (world, n) == (2, 4):
            expected = [
                host_calls(library(), 2, 4, direction, heaps=True, bounded=True)
                for direction in ("forward", "backward")
            ]
            assert launches == tuple(one.launches + one.copies for one in expected)
