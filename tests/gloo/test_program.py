"""Pass programs on several ranks: recorded calls that compute give the engine's results, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pmoe import Restore
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES
from tests.gloo.kit import NUM_EXPERTS, TOKENS
from tests.kit import build, loss_of, tokens
from tests.pool import ranks
from tests.programs import ProgramCall, check_against_engine, engine_call, own_counts

ROWS = {**TOKENS, 3: (7, 5, 0)}
"""Number of tokens of each rank, by the number of ranks. With 3 and 4 ranks one has none."""


def all_to_all(rows: Tensor, send: Sequence[int], out: Tensor, recv: Sequence[int]) -> None:
    dist.all_to_all_single(out, rows.contiguous(), list(recv), list(send))


def counts_of(send: Tensor) -> Tensor:
    """Returns the rows that each rank has for each expert of this rank, (n, W, E_local)."""
    by_rank = send.transpose(0, 1).contiguous()
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank)
    return received.transpose(0, 1).contiguous()


def engine_job(rank: int, world: int, cases: list[tuple[Restore, int]], bypass_local: bool) -> int:
    """Compares both passes with the engine's. Returns the number of chunks whose rows had to be sorted.

    In every second case the products store results in the order of arrival, as those of a device do.
    """
    num_sorted = 0
    num_experts = 6 if world == 3 else NUM_EXPERTS
    for number, (pair, n) in enumerate(cases):
        options = {"pipeline": n, "memory_reuse": pair, "bypass_local": bypass_local}
        layer = build(num_experts, **options, expert=("ffn", "swiglu")[number % 2])
        x = tokens(ROWS[world][rank], 10 + rank).requires_grad_()
        call = engine_call(lambda layer=layer, x=x: loss_of(layer, layer(x)).backward())
        send = own_counts(call, layer.gate(x.detach()).expert, num_experts, world)
        program = ProgramCall(call, rank, send, counts_of(send), all_to_all, seed=17 * n + rank)
        program.shape = replace(program.shape, places=number % 2 == 1)
        check_against_engine(program, (str(pair), n, world, rank))
        num_sorted += sum(chunk.regroup is not None for chunk in call.plan.forward.chunks)
    return num_sorted


ALL = [(pair, n) for pair in ALL_PAIRS for n in (1, 2, 4, 8)]
QUICK = [(STRATEGIES["S1"], 2), (STRATEGIES["S4"], 4), (KEEP, 2)]


def test_programs_compute_what_the_engine_does() -> None:
    assert sum(ranks(4).run(engine_job, QUICK, True)) > 0, "some chunk's rows are sorted"


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("bypass_local", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_programs_compute_what_the_engine_does_in_all_cases(world: int, bypass_local: bool) -> None:
    num_sorted = sum(ranks(world).run(engine_job, ALL, bypass_local))
    assert (num_sorted > 0) == (world - bypass_local > 1), "rows of one rank arrive sorted"
