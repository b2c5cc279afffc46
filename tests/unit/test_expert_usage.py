"""Numbers about load over all calls of a step: by hand, in the statistics, the writer and the report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.integrations.expert_usage import MOST_UNREAD, entropy, max_violation
from pmoe.integrations.logging import StatsWriter
from pmoe.integrations.run_folder import read_run


class Listed(nn.Module):
    """A gate that sends the tokens of each call to given experts, one for each token."""

    def __init__(self, *calls: list[int]) -> None:
        super().__init__()
        self.calls = [torch.tensor(call, dtype=torch.int64).unsqueeze(1) for call in calls]
        self.at = 0

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        expert = self.calls[self.at % len(self.calls)]
        self.at += 1
        return pmoe.Routing(expert=expert, weight=torch.ones(expert.shape), l_aux=torch.zeros(()))


def layer(gate: Any, **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(0)
    return pmoe.MoELayer(8, 16, 4, gate=gate, **options)


def run(moe: nn.Module, *counts: int) -> None:
    for count in counts:
        moe(torch.randn(count, 8))


FIRST, SECOND = [0, 0, 0, 1], [1, 2, 2, 2]
"""Rows of the two micro-batches: (3, 1, 0, 0) and (0, 1, 3, 0). Together (3, 2, 3, 0)."""


def test_the_numbers_of_a_step_are_those_counted_by_hand() -> None:
    model = nn.ModuleList([layer(Listed(FIRST, SECOND)), layer(Listed([0, 1, 2, 3], [3, 2, 1, 0]))])
    usage = pmoe.ExpertUsage(model)
    for moe in model:
        run(moe, 4, 4)
    stats = pmoe.stats(model, usage=usage)
    assert stats.layers[0].usage.tokens_per_expert == (3, 2, 3, 0)
    assert stats.layers[0].tokens_per_expert == (0, 1, 3, 0)  # of the last call
    shares = (3 / 8, 2 / 8, 3 / 8)
    bits = -sum(share * math.log(share) for share in shares) / math.log(4)
    wanted = {
        "moe/entropy_mean": (bits + 1) / 2,
        "moe/entropy_min": bits,
        "moe/max_share_mean": (3 / 8 + 1 / 4) / 2,
        "moe/max_share_max": 3 / 8,
        "moe/active_fraction_mean": 7 / 8,
        "moe/active_fraction_min": 3 / 4,
        "moe/max_vio_micro_mean": (2 + 0) / 2,
        "moe/max_vio_micro_max": 2,
        "moe/max_vio_global_mean": (3 / 2 - 1) / 2,
        "moe/max_vio_global_max": 3 / 2 - 1,
        "moe/drop_rate_mean": 0,
        "moe/drop_rate_max": 0,
    }
    assert stats.scalars() == pytest.approx(wanted, rel=1e-12)
    run(model[0], 4)
    run(model[1], 4)
    assert pmoe.stats(model, usage=usage).layers[0].usage.tokens_per_expert == (3, 1, 0, 0)  # a new step


def test_the_numbers_do_not_grow_with_layers_and_experts() -> None:
    small = nn.ModuleList([pmoe.MoELayer(8, 16, 2)])
    large = nn.ModuleList([pmoe.MoELayer(8, 16, 64, 2) for _ in range(5)])
    for model in (small, large):
        for moe in model:
            run(moe, 4)
    names = pmoe.stats(small).scalars().keys()
    assert names == pmoe.stats(large).scalars().keys()
    assert len(names) == 12
    assert pmoe.stats(nn.Linear(2, 2)).scalars() == {}


def test_without_usage_the_numbers_are_of_the_last_call() -> None:
    moe = layer(Listed(FIRST, SECOND))
    run(moe, 4, 4)
    scalars = pmoe.stats(moe).scalars()
    assert scalars["moe/max_vio_micro_mean"] == scalars["moe/max_vio_global_mean"] == 2


def test_dropped_rows_are_a_share_of_all_calls() -> None:
    moe = layer(Listed(FIRST, SECOND), capacity_factor=1.0)  # one row for each expert of each call
    usage = pmoe.ExpertUsage(moe)
    run(moe, 4, 4)
    assert pmoe.stats(moe, usage=usage).scalars()["moe/drop_rate_mean"] == 4 / 8
    chosen = pmoe.MoELayer(8, 16, 4, gate="expert_choice")
    run(chosen, 4)
    assert "moe/drop_rate_mean" not in pmoe.stats(chosen).scalars()


def test_second_passes_and_other_modes_do_not_count() -> None:
    moe = layer(Listed(FIRST))
    usage = pmoe.ExpertUsage(moe)
    evaluated = pmoe.ExpertUsage(moe, training=False)
    x = torch.randn(4, 8, requires_grad=True)
    for options in ({"use_reentrant": False}, {"use_reentrant": True}):
        checkpoint(moe, x, **options).sum().backward()
    moe.eval()
    run(moe, 4)
    moe.train()
    assert usage.take(moe).num_calls == 2
    assert evaluated.take(moe).num_calls == 1


def test_unread_counts_are_bounded() -> None:
    moe = layer(Listed(FIRST))
    usage = pmoe.ExpertUsage(moe)
    run(moe, *[4] * (MOST_UNREAD + 3))
    (rows,) = usage._layers.values()
    assert len(rows._unread) == 3
    assert usage.take(moe).tokens_per_expert == (3 * (MOST_UNREAD + 3), MOST_UNREAD + 3, 0, 0)
    usage.remove()
    run(moe, 4)
    assert usage.take(moe).num_calls == 0


def test_loads_at_their_limits() -> None:
    assert max_violation((0, 0)) == 0
    assert max_violation((3, 1, 0, 0)) == 2
    assert entropy((5, 0, 0)) == 0
    assert entropy((2, 2, 2)) == pytest.approx(1, rel=1e-15)
    assert entropy((0, 0)) == entropy((7,)) == 1
    moe = layer(Listed([]))
    usage = pmoe.ExpertUsage(moe)
    run(moe, 0)
    assert pmoe.stats(moe, usage=usage).scalars()["moe/max_share_max"] == 0


def test_seconds_are_there_if_they_were_recorded() -> None:
    moe = pmoe.MoELayer(8, 16, 4, pipeline=2)
    with pmoe.recording() as journal:
        moe(torch.randn(8, 8)).sum().backward()
    scalars = pmoe.stats(moe, journal=journal).scalars()
    assert scalars["moe/exposed_communication_seconds"] >= 0
    assert "moe/communication_seconds" in scalars
    assert "moe/communication_seconds" not in pmoe.stats(moe).scalars()


@pytest.mark.slow
def test_a_layer_in_a_compiled_graph_stays_in_it() -> None:
    """A hook that Dynamo cannot trace would break the graph, and with it the overlap with the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), pmoe.MoELayer(8, 16, 4))
    usage = pmoe.ExpertUsage(model)
    torch.compile(model, backend="pmoe", fullgraph=True)(torch.randn(4, 8)).sum().backward()
    assert model[1].ran.path == "whole graph"
    stats = pmoe.stats(model, usage=usage)
    assert stats.layers[0].usage.num_calls == 0
    assert stats.scalars()["moe/entropy_mean"] < 1  # of the last call
    plain = nn.Sequential(nn.Linear(8, 8), pmoe.MoELayer(8, 16, 4))
    usage = pmoe.ExpertUsage(plain)
    torch.compile(plain, backend="eager")(torch.randn(4, 8))
    assert usage.take(plain[1]).num_calls == 1


def test_the_writer_counts_the_micro_batches_of_a_step(tmp_path: Path) -> None:
    moe = layer(Listed(FIRST, SECOND))
    with StatsWriter(tmp_path, moe, every=2, routing=True) as writer:
        for step in range(1, 5):
            run(moe, 4, 4)
            moe.eval()
            run(moe, 4, 4)  # an evaluation
            moe.train()
            writer.step(step)
    scalars = read_run(tmp_path).scalars
    assert scalars["moe/max_vio_micro_mean"].steps == [1, 2, 4]
    assert scalars["moe/max_vio_micro_mean"].values == [2, 2, 2]
    assert scalars["moe/max_vio_global_max"].values == [0.5, 0.5, 0.5]
    assert sorted(path.name for path in (tmp_path / "routing").iterdir()) == [
        "step_00000002",
        "step_00000004",
    ]
    calls = pmoe.read_routing(tmp_path / "routing" / "step_00000004")[""]
    assert [call.flatten().tolist() for call in calls] == [FIRST, SECOND, FIRST, SECOND]
    assert not moe._forward_hooks
    assert not moe.gate._forward_hooks


def test_a_trace_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    moe = layer(Listed(FIRST))
    (tmp_path / "routing").write_text("in the way")
    with StatsWriter(tmp_path, moe, every=1, routing=True) as writer:
        run(moe, 4)
        writer.step(1)
        run(moe, 4)
        with pytest.warns(RuntimeWarning, match="StatsWriter cannot write to .*; its lines are lost"):
            writer.step(2)
    assert read_run(tmp_path).scalars["moe/entropy_mean"].steps == [1, 2]


def test_the_report_shows_mean_and_worst(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pmoe.integrations.report.page import run_page

    moe = layer(Listed(FIRST, SECOND))
    with StatsWriter(tmp_path, moe, every=1) as writer:
        for step in range(1, 4):
            run(moe, 4, 4)
            writer.step(step)
    page = run_page(read_run(tmp_path))
    assert "MaxVio of the global batch" in page
    assert "Other numbers" not in page
