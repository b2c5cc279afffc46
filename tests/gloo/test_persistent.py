"""A layer by one persistent kernel for each pass, in several processes: its actors run in the emulator.

Heaps are files that the processes map. Results are compared with the unfused layer and float64. In one test a
rank does not come.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pmoe
from pmoe.comm.heap import close_heaps
from pmoe.comm.ranks import Ranks
from pmoe.kernels.heap import HeapError
from tests.emulated import emulated
from tests.gloo.test_comet_emulated import BF16, D_HIDDEN, D_MODEL, Case, check, run
from tests.pool import ranks

pytestmark = pytest.mark.timeout(300)


def test_two_processes_train_as_unfused(kernels: Path) -> None:
    check(kernels, Case(tokens=(23, 9), steps=1), "persistent")


def test_a_rank_without_tokens_skewed_routing_and_drops(kernels: Path) -> None:
    options = {"capacity_factor": 1.0, "memory_reuse": "S4", "expert": "swiglu", "bias": False}
    check(kernels, Case(tokens=(0, 31), skewed=True, options=options), "persistent")


@pytest.mark.nightly
def test_equal_batches_padded_to_capacity_travel_without_an_exchange_of_counts(kernels: Path) -> None:
    options = {"capacity_factor": 0.75, "pad_to_capacity": True}
    check(kernels, Case(tokens=(23, 23), skewed=True, options=options), "persistent")


@pytest.mark.nightly
def test_a_pool_holds_whatever_routing_its_slack_allows(kernels: Path) -> None:
    options: dict[str, Any] = {"slack": 2.0, "memory_reuse": "S4"}
    check(kernels, Case(tokens=(150, 140), steps=1, skewed=True, options=options), "persistent")


def crowded_job(rank: int, world: int, path: Path) -> tuple[str, list[str]]:
    """Sends all rows to the two experts of rank 0. Returns the runner that computes, and the messages."""
    import warnings

    with emulated(path), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.manual_seed(3)
        layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 2, dtype=BF16, fused="persistent")
        with torch.no_grad():
            layer.gate.weight[:2, 0] += 30
        layer(torch.ones(40, D_MODEL, dtype=BF16))
        close_heaps(Ranks())
    assert layer.ran is not None
    return layer.ran.path, [str(each.message) for each in said if "falls back" in str(each.message)]


def test_rows_beyond_a_pool_send_the_batch_to_the_pipeline_on_all_ranks(kernels: Path) -> None:
    for path, said in ranks(2).run(crowded_job, kernels):
        assert path == "pipeline"
        (warning,) = said
        assert "more rows arrive at a rank than its heap holds: 160 rows, room for 120" in warning


@pytest.mark.nightly
@pytest.mark.parametrize("pair", ["keep/recompute", "communicate/keep", "communicate/recompute"])
def test_four_processes(kernels: Path, pair: str) -> None:
    options: dict[str, Any] = {"memory_reuse": pmoe.Restore(*pair.split("/"))}
    check(kernels, Case(tokens=(5, 0, 17, 8), steps=1, options=options), "persistent")


def absent_job(rank: int, world: int, path: Path, launches: int) -> str:
    """Rank 1 takes part in everything except the launches after the first ones.

    Rank 0 must say for whom it waited, and both go on.
    """
    import warnings

    from pmoe.kernels import flashdmoe

    case, told, done = Case(tokens=(9, 9), steps=1), "", list[int]()
    launch = flashdmoe.launch_pass

    def rare(launcher: Any, *given: Any) -> None:
        if len(done) >= launches:
            for heap in launcher.heaps:
                heap.bound_seconds = 0.002  # of the emulator's time
        if rank == 0 or len(done) < launches:
            launch(launcher, *given)
        done.append(1)

    with emulated(path), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(flashdmoe, "launch_pass", rare)
        torch.manual_seed(3)
        layer, x = (
            pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 2, dtype=BF16, fused="persistent"),
            torch.ones(9, D_MODEL),
        )
        try:
            layer(x.to(BF16)).sum().backward()  # backward's launch knows of forward's
            if launches:
                layer(x.to(BF16))
        except HeapError as error:
            told = str(error)
        close_heaps(Ranks())
    with emulated(path):
        run(rank, case, "persistent", BF16)  # with a new heap
        close_heaps(Ranks())
    return told


@pytest.mark.parametrize("launches", [pytest.param(0, id="forward"), pytest.param(1, id="backward")])
def test_a_rank_that_never_comes_is_named_and_a_new_heap_serves(kernels: Path, launches: int) -> None:
    told, other = ranks(2).run(absent_job, kernels, launches)
    assert "rank 0 waited" in told and "rank 1" in told and f"in round {launches + 1}" in told, told
    assert other == ""
