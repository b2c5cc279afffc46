"""Statistics of several ranks: sums of all by one collective, exposed communication, and the writer."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pmoe
from pmoe.integrations.logging import StatsWriter
from pmoe.integrations.run_folder import LAYERS, SCALARS, read_run
from tests.pool import Pool, ranks
from tests.switched import switched_layer

D_MODEL, D_HIDDEN, EXPERTS = 16, 32, 4


def build(num_layers: int = 1, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(switched_layer(D_MODEL, D_HIDDEN, EXPERTS, **options) for _ in range(num_layers)))


class Fixed(nn.Module):
    """A gate that sends each token to a given expert, one choice each."""

    def __init__(self, expert: list[int]) -> None:
        super().__init__()
        self.expert = torch.tensor(expert, dtype=torch.int64).unsqueeze(1)

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        return pmoe.Routing(expert=self.expert, weight=torch.ones(self.expert.shape), l_aux=torch.zeros(()))


OF_RANK = ([0, 0, 0, 1, 1, 2], [])
"""Experts of the tokens of each rank. The second rank has no tokens."""


def summed_job(rank: int, world: int) -> dict[str, Any]:
    model = build(gate=Fixed(OF_RANK[rank]), capacity_factor=4 / 3)  # 2 rows of 6 for each expert
    model(torch.randn(len(OF_RANK[rank]), D_MODEL)).sum().backward()
    with (
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduces,
        mock.patch.object(dist, "all_gather", side_effect=AssertionError),
        mock.patch.object(dist, "broadcast", side_effect=AssertionError),
    ):
        own = pmoe.stats(model)
        assert reduces.call_count == 0
        found = pmoe.stats(model, all_ranks=True)
        assert reduces.call_count == 1
    return {"own": own.layers[0], "all": found.layers[0], "num_ranks": found.num_ranks, "text": str(found)}


def test_one_collective_sums_the_rows_of_all_ranks_and_one_of_them_may_have_none() -> None:
    first, second = ranks(2).run(summed_job)
    assert first["own"].tokens_per_expert == (2, 2, 1, 0)
    assert first["own"].drop_rate == pytest.approx(1 / 6)
    assert second["own"].tokens_per_expert == (0, 0, 0, 0)
    assert (second["own"].drop_rate, second["own"].imbalance) == (0.0, None)
    for found in (first, second):
        assert found["num_ranks"] == 2
        assert found["all"].tokens_per_expert == (2, 2, 1, 0)
        assert (found["all"].num_slots, found["all"].drop_rate) == (6, pytest.approx(1 / 6))
        assert found["all"].imbalance == pytest.approx(2 / 1.25)
        assert found["all"].rank_imbalance == pytest.approx(4 / 2.5)  # two experts a rank: 4 rows and 1
        assert "of 2 ranks" in found["text"]
    # Bytes stay each rank's own: its tokens, and the rows that its experts computed.
    assert [found["all"].tensors["T_DI"] // (4 * D_MODEL) for found in (first, second)] == [4, 1]
    assert [found["all"].tensors["T_I"] // (4 * D_MODEL) for found in (first, second)] == [6, 0]


def skewed_job(rank: int, world: int) -> Any:
    tokens = 64
    model = build(pipeline=2, memory_reuse="S4", bypass_local=False)
    with torch.no_grad():
        model[0].gate.weight.zero_()[0, 0] = 50.0
    model(torch.randn(tokens, D_MODEL).index_fill_(1, torch.tensor([0]), 1.0)).sum().backward()
    return pmoe.stats(model).layers[0], model[0].predict_memory(tokens, model[0].row_counts)


def test_chunks_that_skewed_routing_had_cut_finer_are_those_that_are_told() -> None:
    for found, predicted in ranks(2).run(skewed_job):
        assert (found.n_forward, found.n_backward) == (4, 4)  # all rows of both ranks arrive at one
        assert found.predicted == predicted


class Slow(pmoe.Callback):
    """A callback that takes some time on one rank before results return."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def before_combine(self, rows: Tensor, chunk: int) -> Tensor:
        time.sleep(self.seconds)
        return rows


def slow_job(rank: int, world: int) -> Any:
    model = build(top_k=2, callbacks=[Slow(0.3 * rank)])
    x = torch.randn(32, D_MODEL)
    model(x).sum().backward()
    with pmoe.recording() as journal:
        model(x).sum().backward()
    own = pmoe.stats(model, journal=journal).layers[0]
    mean = pmoe.stats(model, journal=journal, all_ranks=True).layers[0]
    return own.forward, own.backward, mean.forward


def test_waiting_for_a_slow_peer_is_exposed_on_the_rank_that_waits() -> None:
    (fast, fast_backward, mean), (slow, _, same) = ranks(2).run(slow_job)
    assert fast.exposed >= 0.25  # nothing is left to compute while the other rank sleeps
    assert slow.exposed <= fast.exposed - 0.2  # which is computation over there
    for each in (fast, slow, fast_backward):
        assert 0 < each.exposed <= each.communication <= each.seconds
    assert mean == same
    for name in ("seconds", "communication", "exposed"):
        expected = (getattr(fast, name) + getattr(slow, name)) / 2
        assert getattr(mean, name) == pytest.approx(expected)


def dying_job(rank: int, world: int) -> str:
    model = build()
    model(torch.randn(8, D_MODEL)).sum().backward()
    dist.barrier()
    if rank == 1:
        os._exit(3)
    try:
        pmoe.stats(model, all_ranks=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_peer_that_died_is_an_error_that_names_the_stage() -> None:
    pool = Pool(2, timeout_seconds=8)
    pool.start(dying_job)
    try:
        assert "rank 0 of 2 failed in summing statistics" in pool.answer(0, timeout=60)
    finally:
        pool.stop()


# ---- the writer


def train(model: nn.Module, writer: StatsWriter, steps: range, rank: int) -> list[bool]:
    told = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = model(torch.randn(16 + rank, D_MODEL, generator=generator)).square().mean()
        loss.backward()
        told.append(writer.step(step, loss=loss, **({} if rank else {"only": step})) is not None)
    return told


def writer_job(rank: int, world: int, folder: str) -> list[bool]:
    model = build(2, top_k=2, pipeline=2, memory_reuse="S4")
    with StatsWriter(folder, model, every=3, settings={"lr": 0.1}) as writer:
        told = train(model, writer, range(1, 9), rank)
    assert writer.writes == (rank == 0)
    return told


def test_every_rank_takes_part_and_the_first_one_writes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for told in ranks(2).run(writer_job, str(folder)):
        assert told == [step in (1, 3, 6) for step in range(1, 9)]
    assert sorted(each.name for each in folder.iterdir()) == [LAYERS, "run.json", SCALARS]
    run = read_run(folder)
    assert run.scalars["loss"].steps == run.scalars["only"].steps == list(range(1, 9))
    assert [(row.step, row.layer) for row in run.rows] == [(s, name) for s in (1, 3, 6) for name in "01"]
    for row in run.rows:
        assert sum(row.tokens_per_expert) == row.num_slots == 2 * (16 + 17)
        assert (row.restore, row.n_forward) == ("communicate/recompute", 2)
        assert (row.forward_seconds is None) == (row.step == 1)  # the first step is not recorded
        if row.backward_communication is not None:
            assert row.backward_communication > 0
    (session,) = run.sessions
    assert (session["ranks"], session["backend"], session["settings"]) == (2, "gloo", {"lr": 0.1})
    assert [each["ranks"] for each in session["layers"]] == [2, 2]


def refused_job(rank: int, world: int, folder: str) -> str:
    try:
        StatsWriter(folder, build())
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_folder_that_cannot_be_used_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with open(tmp_path / LAYERS, "w", newline="") as file:
        csv.writer(file).writerow(["somebody", "else's"])
    for told in ranks(2).run(refused_job, str(tmp_path / "file")):
        assert "FileExistsError" in told and "file" in told
    for told in ranks(2).run(refused_job, str(tmp_path)):
        assert told.startswith("ValueError") and f"{tmp_path / LAYERS} must begin with the columns" in told


def unwritable_settings_job(rank: int, world: int, folder: str) -> str:
    try:
        StatsWriter(folder, build(), settings={(1, 2): 3})
    except TypeError as error:
        return str(error)
    return ""


def test_settings_that_are_no_plain_data_are_refused_on_every_rank(tmp_path: Path) -> None:
    for told in ranks(2).run(unwritable_settings_job, str(tmp_path)):
        assert "keys must be str" in told


def stops_job(rank: int, world: int, folder: str) -> int:
    """One rank closes the writer long before the other, because no collective follows."""
    model = build()
    writer = StatsWriter(folder, model, every=2)
    train(model, writer, range(1, 4), rank)
    if rank:
        time.sleep(0.3)
    writer.close()
    return 1


def test_ranks_may_close_at_different_times(tmp_path: Path) -> None:
    assert ranks(2).run(stops_job, str(tmp_path)) == [1, 1]
    assert read_run(tmp_path).scalars["loss"].steps == [1, 2, 3]
