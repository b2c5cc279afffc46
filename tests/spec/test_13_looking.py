"""Looking at a run: what a layer, statistics and recordings tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

import pmoe
from pmoe.integrations.logging import StatsWriter
from pmoe.measure.module_cost import profile_module
from tests.spec.kit import E, K, M, error_of, make, on_ranks, step, tokens


def test_a_layer_prints_its_sizes_and_options() -> None:
    shown = repr(make(pipeline=4, memory_reuse="S4"))
    assert all(
        each in shown for each in (f"d_model={M}", f"num_experts={E}", "top_k=2", "pipeline=4", "recompute")
    )


def test_statistics_count_rows_drops_and_imbalance() -> None:
    layer = make(top_k=1, capacity_factor=1.0, load="one expert")
    layer(tokens(16))
    (stats,) = pmoe.stats(layer).layers
    assert stats.tokens_per_expert == (0, 0, 0, 4)
    assert (stats.num_slots, stats.drop_rate, stats.imbalance) == (16, 0.75, 4.0)


def test_statistics_say_what_ran() -> None:
    layer = make(pipeline=4, pipeline_backward=2, memory_reuse="S4")
    step(layer, tokens(16))
    (stats,) = pmoe.stats(layer).layers
    assert (stats.path, stats.n_forward, stats.n_backward) == ("pipeline", 4, 2)
    assert stats.restore == "communicate/recompute"
    assert stats.predicted == layer.predict_memory(16, layer.row_counts)


def test_statistics_name_every_layer_of_a_model_and_print_as_a_table() -> None:
    model = nn.Sequential(make(), nn.Tanh(), make(pipeline=2))
    model(tokens(9))
    stats = pmoe.stats(model)
    assert [each.name for each in stats.layers] == ["0", "2"]
    assert len(str(stats).splitlines()) > 2


def test_a_layer_that_has_not_run_says_so() -> None:
    (stats,) = pmoe.stats(make()).layers
    assert stats.path == "not run" and stats.unpredicted == "the layer has not run"


def all_ranks(rank: int, world: int) -> tuple:
    layer = make()
    layer(tokens((9, 4)[rank], rank))
    (own,), (together,) = pmoe.stats(layer).layers, pmoe.stats(layer, all_ranks=True).layers
    return own.tokens_per_expert, together.tokens_per_expert, together.rank_imbalance


def test_statistics_of_all_ranks_add_up() -> None:
    (some, whole, imbalance), (others, same, _) = on_ranks(2, all_ranks)
    assert whole == same == tuple(a + b for a, b in zip(some, others, strict=True))
    assert sum(whole) == 13 * K
    assert imbalance == pytest.approx(max(sum(whole[:2]), sum(whole[2:])) / 13)


def test_a_recording_has_every_task_of_both_passes_with_its_time() -> None:
    layer = make(pipeline=2)
    with pmoe.recording() as journal:
        step(layer, tokens(9))
    assert {span.direction for span in journal.spans} == {"forward", "backward"}
    assert all(span.start <= span.end for span in journal.spans)
    assert {"L0", "L1", "O0", "O1"} <= {span.name for span in journal.spans}


def test_outside_of_a_recording_nothing_is_noted() -> None:
    layer = make()
    with pmoe.recording() as journal:
        pass
    step(layer, tokens(9))
    assert journal.spans == []


def bytes_by_rank(rank: int, world: int) -> dict[str, int]:
    layer = make()
    layer(tokens(9, rank))
    traffic = layer.traffic
    return {
        "rows": traffic.rows,
        "counts": traffic.counts,
        "scalars": traffic.scalars,
        "total": traffic.total,
    }


def test_traffic_counts_the_bytes_that_a_rank_sent() -> None:
    for sent in on_ranks(2, bytes_by_rank):
        assert min(sent.values()) > 0
        assert sent["total"] == sent["rows"] + sent["counts"] + sent["scalars"]
        assert sent["rows"] % (M * 8) == 0  # float64


def test_one_process_sends_nothing() -> None:
    layer = make(pipeline=2)
    step(layer, tokens(9))
    assert layer.traffic.total == 0


def logged(folder: Path, steps: range) -> None:
    model = nn.Sequential(make())
    with StatsWriter(folder, model, every=2, tensorboard=False) as writer:
        for at in steps:
            loss = model(tokens(9)).square().mean()
            loss.backward()
            writer.step(at, loss=loss)


def rows_of(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) - 1 for path in folder.rglob("*.csv"))


def test_a_writer_keeps_statistics_of_every_so_many_steps_and_goes_on_in_its_folder(tmp_path: Path) -> None:
    logged(tmp_path / "run", range(1, 5))
    first = rows_of(tmp_path / "run")
    logged(tmp_path / "run", range(5, 9))
    assert 0 < first < rows_of(tmp_path / "run")


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    model = make()
    with StatsWriter(tmp_path / "run", model, tensorboard=False):
        assert error_of(lambda: StatsWriter(tmp_path / "run", model, tensorboard=False)) != ""


def test_any_module_can_be_measured_over_numbers_of_rows() -> None:
    forward, backward = profile_module(nn.Linear(32, 32), [64, 128, 256], 32)
    assert forward.line.beta_seconds >= 0 and backward.line.beta_seconds >= 0


def test_saved_degrees_are_a_file_of_plain_json(tmp_path: Path) -> None:
    make(pipeline=True).save_degrees(tmp_path / "degrees.json")
    assert json.loads((tmp_path / "degrees.json").read_text())


def test_public_names_are_listed() -> None:
    assert set(pmoe.__all__) <= set(dir(pmoe))
    assert all(getattr(pmoe, name) is not None for name in pmoe.__all__)
