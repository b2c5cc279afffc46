"""Forced skew on several ranks, and a trace of it in which each rank has a file."""

import tempfile

import pytest
import torch

import pmoe
from pmoe.gates import ForcedGate, ReplayGate, TopKGate
from tests.kit import D_HIDDEN, D_MODEL, tokens
from tests.pool import ranks

NUM_EXPERTS = 8


def layer(gate: pmoe.Gate) -> pmoe.MoELayer:
    torch.manual_seed(0)
    return pmoe.MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, gate=gate, pipeline=2, dtype=torch.float64)


def inner() -> pmoe.Gate:
    torch.manual_seed(1)
    return TopKGate(D_MODEL, NUM_EXPERTS, 2, dtype=torch.float64)


def job(rank: int, world: int, folder: str) -> tuple[float | None, bool, list[int]]:
    """Returns the imbalance of the ranks, whether the replay gave the same output, and the calls' tokens."""
    forced = layer(ForcedGate.of_ratio(inner(), NUM_EXPERTS, world, 1.5))
    inputs = [tokens(0 if rank == 1 else 800, 2), tokens(100, 3)]
    with pmoe.record_routing(forced, folder):
        outputs = [forced(x) for x in inputs[:1]]
        imbalance = pmoe.stats(forced, all_ranks=True).layers[0].rank_imbalance
        outputs.append(forced(inputs[1]))
    calls = pmoe.read_routing(folder, rank)[""]
    replayed = layer(ReplayGate(inner(), calls))
    same = all(torch.equal(replayed(x), y) for x, y in zip(inputs, outputs, strict=True))
    return imbalance, same, [len(call) for call in calls]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_get_the_stated_ratio_and_replay_their_own_files(world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = ranks(world).run(job, folder)
    for rank, (imbalance, same, num_tokens) in enumerate(results):
        assert imbalance == pytest.approx(1.5, abs=0.01)
        assert same
        assert num_tokens == [0 if rank == 1 else 800, 100]
