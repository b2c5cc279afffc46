"""Pass programs over CUDA and NCCL on several ranks: launches in the emulator, rows through files.

The communicator's id goes through the process group, which is gloo here.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from pmoe import Restore
from pmoe.comm.ranks import Ranks
from pmoe.program.on_cuda import make_communicator
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES
from tests.device_programs import DeviceCall, stand_ins
from tests.gloo.test_program import ROWS, all_to_all, counts_of
from tests.kit import build, loss_of, tokens
from tests.pool import ranks
from tests.programs import ProgramCall, engine_call, own_counts
from tests.unit.test_program_cuda import WIDTH, check_results, wide

DEVICE = torch.device("cuda", 0)


def device_job(
    rank: int, world: int, kernels: Path, folder: Path, cases: list[tuple[Restore, int]], bypass_local: bool
) -> int:
    """Compares both passes with float64. Returns the number of chunks whose rows had to be sorted."""
    num_sorted = 0
    num_experts = 6 if world == 3 else 4
    with stand_ins(kernels, runs=True, folder=folder) as module:
        communicator = make_communicator(Ranks(), DEVICE)
        for number, (pair, n) in enumerate(cases):
            expert = ("ffn", "swiglu")[number % 2]
            layer = build(
                num_experts, pipeline=n, memory_reuse=pair, bypass_local=bypass_local, expert=expert,
                bias=number % 3 == 0, d_model=WIDTH, d_hidden=WIDTH, dtype=torch.bfloat16,
            )  # fmt: skip
            x = tokens(ROWS[world][rank], 10 + rank, torch.bfloat16, WIDTH).requires_grad_()
            call = engine_call(lambda layer=layer, x=x: loss_of(layer, layer(x)).backward())
            send = own_counts(call, layer.gate(x.detach()).expert, num_experts, world)
            recv = counts_of(send)
            device = DeviceCall(call, rank, send, recv, all_to_all, communicator=communicator)
            expected = ProgramCall(wide(call), rank, send, recv, all_to_all)
            check_results(device, expected, (str(pair), n, world, rank))
            assert module.stub_refused() == []
            num_sorted += sum(chunk.regroup is not None for chunk in call.plan.forward.chunks)
    return num_sorted


ALL = [(pair, (1, 2, 4)[number % 3]) for number, pair in enumerate(ALL_PAIRS)]
SOME = [(STRATEGIES["S1"], 2), (STRATEGIES["S4"], 4), (KEEP, 2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "world, bypass_local, cases",
    [(2, True, ALL), (4, True, SOME), (3, False, SOME), (2, False, SOME)],
    ids=["2 ranks", "4 ranks", "3 ranks, all rows sent", "2 ranks, all rows sent"],
)
def test_launches_and_messages_compute_a_layer_of_several_ranks(
    kernels: Path, world: int, bypass_local: bool, cases: list[tuple[Restore, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sorted_chunks = ranks(world).run(device_job, kernels, Path(folder), cases, bypass_local)
        assert not list(Path(folder).iterdir()), "every message was received"
    assert (sum(sorted_chunks) > 0) == (world - bypass_local > 1)


def no_nccl() -> None:
    raise RuntimeError("NCCL's library is not loaded")


def missing_job(rank: int, world: int, kernels: Path) -> str:
    """Asks for a communicator where only rank 0 has NCCL. Returns the error."""
    with stand_ins(kernels, runs=False) as module, pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(module, "nccl_loaded", no_nccl)
        with pytest.raises(RuntimeError) as raised:
            make_communicator(Ranks(), DEVICE)
    return str(raised.value)


def test_all_ranks_refuse_if_one_has_no_nccl(kernels: Path) -> None:
    first, second = ranks(2).run(missing_job, kernels)
    assert (first, second) == ("rank 1: NCCL's library is not loaded", "NCCL's library is not loaded")
