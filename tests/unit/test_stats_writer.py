"""StatsWriter in one process: the content of its files, also after crashes and resumption, and what it
refuses.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmoe
from pmoe.integrations.logging import StatsWriter
from pmoe.integrations.run_folder import (
    COLUMNS,
    HOST_POOL_PEAK,
    LAYERS,
    POOL_PEAK,
    RUN,
    SCALARS,
    TIME,
    read_run,
)
from tests import fresh

ROOT = Path(__file__).resolve().parents[2]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(pmoe.MoELayer(8, 16, 4, top_k=2, pipeline=2, memory_reuse="S1"), nn.Linear(8, 1))


def train(folder: Path, steps: range, **options: Any) -> None:
    """Writes the statistics of invented steps, with losses of 1 / step."""
    model = build()
    with StatsWriter(folder, model, **{"every": 4, **options}) as writer:
        for step in steps:
            model(torch.randn(16, 8)).sum().backward()
            writer.step(step, loss=1 / step)


def test_scalars_are_of_every_step_and_statistics_of_the_first_and_each_so_many(tmp_path: Path) -> None:
    train(tmp_path / "deep" / "run", range(1, 10))
    run = read_run(tmp_path / "deep" / "run")
    assert run.scalars["loss"].steps == list(range(1, 10))
    assert run.scalars["loss"].values == [1 / step for step in range(1, 10)]  # to the last bit
    assert [row.step for row in run.rows] == [1, 4, 8]
    own = {name for name in run.scalars if not name.startswith("moe/")}
    assert own == {"loss", TIME, POOL_PEAK, HOST_POOL_PEAK}
    assert run.scalars[POOL_PEAK].values[-1] == pmoe.pool("cpu").device.peak_bytes
    times = run.scalars[TIME]
    assert times.steps == [1, 4, 8] and times.values == sorted(times.values)
    assert 0 < times.values[-1] - times.values[0] < time.time() - times.values[0] < 60


def test_a_row_holds_what_stats_says(tmp_path: Path) -> None:
    model = build()
    with StatsWriter(tmp_path, model, every=2) as writer:
        for step in (1, 2):
            model(torch.randn(16, 8)).sum().backward()
            found = writer.step(step)
    assert found is not None
    (each,), row = found.layers, read_run(tmp_path).rows[-1]
    for name in ("path", "n_forward", "n_backward", "restore", "num_slots", "tokens_per_expert"):
        assert getattr(row, name) == getattr(each, name), name
    assert row.imbalance == pytest.approx(each.imbalance)
    assert {name: getattr(row, f"{name}_bytes") for name in each.tensors} == each.tensors
    for name in ("saved", "temporary", "peak", "host"):
        assert getattr(row, f"{name}_bytes") == getattr(each.predicted, name), name
    assert each.forward is not None
    assert row.forward_seconds == pytest.approx(each.forward.seconds, rel=1e-4)


def test_a_tensor_counts_as_it_was_when_it_was_given(tmp_path: Path) -> None:
    total = torch.zeros((), requires_grad=True)
    with StatsWriter(tmp_path, build(), every=10) as writer:
        for step in (1, 2, 3):
            loss = total + step
            writer.step(step, loss=loss)
            with torch.no_grad():
                loss.zero_()
    assert read_run(tmp_path).scalars["loss"].values == [1, 2, 3]


def test_more_may_be_noted_of_the_last_step(tmp_path: Path) -> None:
    with StatsWriter(tmp_path, build(), every=2) as writer:
        with pytest.raises(ValueError, match="note must be called after a step"):
            writer.note(valid_loss=1)
        for step in (1, 2, 3):
            writer.step(step, loss=step)
            writer.note(valid_loss=10 * step)
    run = read_run(tmp_path)
    assert run.scalars["loss"].steps == run.scalars["valid_loss"].steps == [1, 2, 3]
    assert run.scalars["valid_loss"].values == [10, 20, 30]


def test_a_resumed_run_continues_the_files_and_its_later_lines_hold(tmp_path: Path) -> None:
    train(tmp_path, range(1, 12))
    before = (tmp_path / SCALARS).read_bytes()
    train(tmp_path, range(7, 15))  # from a checkpoint of step 6
    assert (tmp_path / SCALARS).read_bytes().startswith(before)
    run = read_run(tmp_path)
    assert run.scalars["loss"].steps == list(range(1, 15))
    assert [row.step for row in run.rows] == [1, 4, 7, 8, 12]
    assert len(run.sessions) == 2
    train(tmp_path, range(1, 3))  # all anew
    assert read_run(tmp_path).scalars["loss"].steps == [1, 2]


def test_half_a_line_left_by_a_crash_is_not_read_and_is_cut_off(tmp_path: Path) -> None:
    train(tmp_path, range(1, 6))
    for name in (SCALARS, LAYERS):
        with open(tmp_path / name, "ab") as file:
            file.write(b'6,"lo')
    assert read_run(tmp_path).scalars["loss"].steps == list(range(1, 6))
    train(tmp_path, range(6, 9))
    run = read_run(tmp_path)
    assert run.scalars["loss"].steps == list(range(1, 9))
    assert [row.step for row in run.rows] == [1, 4, 6, 8]


def test_a_file_with_half_a_header_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / SCALARS).write_text("step,na")
    train(tmp_path, range(1, 3))
    assert read_run(tmp_path).scalars["loss"].steps == [1, 2]


OLD_LAYERS = """\
step,layer,path,n_forward,n_backward,restore,num_slots,drop_rate,imbalance,rank_imbalance,forward_seconds,\
forward_communication,forward_exposed,backward_seconds,backward_communication,backward_exposed,T_I_bytes,\
T_DI_bytes,T_M_bytes,T_DO_bytes,T_O_bytes,saved_bytes,temporary_bytes,peak_bytes,host_bytes,tokens_per_expert
1,0,pipeline,4,2,communicate/recompute,16,0,1.5,,,,,,,,512,1024,2048,1024,512,9216,67584,106905,0,3 1 12 0
4,0,pipeline,4,2,communicate/recompute,16,0,1.5,,0.002,0.0001,0.0001,0.003,0.0002,0.0001,512,1024,2048,1024,\
512,9216,67584,106905,0,4 4 4 4
"""


def test_a_folder_of_the_first_version_is_read_and_continued(tmp_path: Path) -> None:
    (tmp_path / LAYERS).write_text(OLD_LAYERS)
    (tmp_path / SCALARS).write_text("step,name,value\n1,loss,2\n4,loss,1e-05\n")
    (tmp_path / RUN).write_text('{"format": 1, "sessions": [{"when": "2026-01-02"}]}')
    train(tmp_path, range(5, 9))
    run = read_run(tmp_path)
    assert run.scalars["loss"].steps == [1, 4, 5, 6, 7, 8] and run.scalars["loss"].values[1] == 1e-5
    assert [session.get("when", "")[:4] for session in run.sessions][0] == "2026" and len(run.sessions) == 2
    first, second, third, fourth = run.rows
    assert (first.step, first.layer, first.imbalance, first.rank_imbalance) == (1, "0", 1.5, None)
    assert (
        first.tokens_per_expert == (3, 1, 12, 0) and first.forward_seconds is first.backward_seconds is None
    )
    assert (first.T_I_bytes, first.T_DI_bytes, first.T_M_bytes) == (512, 1024, 2048)
    assert (first.T_DO_bytes, first.T_O_bytes) == (1024, 512)
    assert (first.saved_bytes, first.temporary_bytes, first.peak_bytes) == (9216, 67584, 106905)
    assert first.host_bytes == 0
    assert (second.backward_seconds, second.backward_communication) == (0.003, 0.0002)
    assert second.backward_exposed == 0.0001
    assert (third.step, fourth.step) == (5, 8)


@contextlib.contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    """Lets writes fail beyond this size of a file, as on a full disk."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_full_disk_leaves_whole_lines_and_stops_no_training(tmp_path: Path) -> None:
    layers = tmp_path / LAYERS
    with StatsWriter(tmp_path, build(), every=1) as writer:
        writer.step(1, loss=1)
        before = layers.read_bytes()
        for step, room in ((2, 5), (3, 0)):  # for a part of a line, for nothing
            with (
                files_at_most(len(before) + room),
                pytest.warns(RuntimeWarning, match="are written the next time"),
            ):
                writer.step(step, loss=step)
            assert layers.read_bytes() == before
        writer.step(4, loss=4)
    run = read_run(tmp_path)
    assert run.scalars["loss"].values == [1, 2, 3, 4]
    assert [row.step for row in run.rows] == [1, 2, 3, 4]


def test_a_disk_that_is_full_to_the_end_is_told_and_raises_nothing(tmp_path: Path) -> None:
    writer = StatsWriter(tmp_path, build(), every=1)
    with files_at_most(0), pytest.warns(RuntimeWarning, match="cannot write") as told:
        writer.step(1, loss=1)
        writer.close()
    assert "are written the next time" in str(told[0].message)
    assert "are lost" in str(told[1].message)
    assert len(told) == 2
    assert "File too large" in str(told[1].message)
    assert sorted(each.name for each in tmp_path.iterdir()) == [RUN, SCALARS]


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4))
    before = (tmp_path / SCALARS).read_bytes(), (tmp_path / RUN).read_bytes()
    with StatsWriter(tmp_path / ".", build()) as first:
        begun = (tmp_path / RUN).read_bytes()
        with pytest.raises(ValueError, match=r"one writer at a time, and another StatsWriter has it"):
            StatsWriter(tmp_path, build())
        assert ((tmp_path / SCALARS).read_bytes(), (tmp_path / RUN).read_bytes()) == (before[0], begun)
        first.step(4, loss=0.25)
    train(tmp_path, range(5, 7))
    assert read_run(tmp_path).scalars["loss"].steps == list(range(1, 7))


def test_a_forked_process_that_outlives_the_run_does_not_hold_its_folder(tmp_path: Path) -> None:
    """A data loader's workers live on for a while if the process that made them is killed."""
    lives, ends = os.pipe()
    writer = StatsWriter(tmp_path, build())
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.read(lives, 1)
        os._exit(0)
    try:
        with pytest.raises(ValueError, match="one writer"):
            StatsWriter(tmp_path, build())  # the child has not let go of it for us
        writer.close()
        train(tmp_path, range(1, 3))
    finally:
        os.close(ends)
        os.waitpid(child, 0)
        os.close(lives)


def test_a_training_loop_that_fails_leaves_what_it_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), StatsWriter(tmp_path, build(), every=10) as writer:
        for step in range(1, 4):
            writer.step(step, loss=math.nan if step == 3 else 1.0)
        raise RuntimeError("boom")
    curve = read_run(tmp_path).scalars["loss"]
    assert curve.steps == [1, 2, 3] and math.isnan(curve.values[-1])
    with pmoe.recording() as journal:
        build()(torch.randn(4, 8))
    assert journal.passes  # nothing else records any more


def test_steps_are_recorded_one_before_they_are_told_whatever_the_stride(tmp_path: Path) -> None:
    train(tmp_path / "by tens", range(10, 80, 10), every=20)
    train(tmp_path / "never", range(1, 6), exposed=False)
    recorded = {row.step: row.forward_seconds is not None for row in read_run(tmp_path / "by tens").rows}
    assert recorded == {10: False, 20: False, 40: True, 60: True}  # the second step shows the stride
    assert not any(row.forward_seconds for row in read_run(tmp_path / "never").rows)


def test_run_json_holds_settings_versions_and_how_layers_were_built(tmp_path: Path) -> None:
    train(tmp_path, range(1, 3), settings={"lr": 0.1, "path": Path("x")})
    (session,) = json.loads((tmp_path / RUN).read_text())["sessions"]
    assert session["settings"] == {"lr": 0.1, "path": "x"}
    assert session["versions"]["torch"] == torch.__version__
    (layer,) = session["layers"]
    assert (layer["layer"], layer["num_experts"], layer["memory_reuse"]) == ("0", 4, "offload/offload")
    assert layer["d_latent"] is None


@pytest.mark.parametrize(
    "options, error, told",
    [
        ({"every": 0}, ValueError, r"every \(0\) must be at least 1"),
        ({"every": 2.5}, TypeError, r"every \(2.5\) must be an int"),
        ({"model": 3}, TypeError, r"model \(3\) must be a torch.nn.Module"),
        ({"settings": [1, 2]}, TypeError, r"settings \(\[1, 2\]\) must be a dict"),
    ],
)
def test_wrong_arguments_are_named(
    options: dict[str, Any], error: type[Exception], told: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=told):
        StatsWriter(**{"run_dir": tmp_path, "model": build(), **options})


def test_steps_ascend_and_scalars_are_numbers(tmp_path: Path) -> None:
    writer = StatsWriter(tmp_path, build())
    writer.step(5, loss=1)
    with pytest.raises(ValueError, match=r"step \(5\) must be greater than the last one \(5\)"):
        writer.step(5)
    with pytest.raises(TypeError, match=r"step \('6'\) must be an int"):
        writer.step("6")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"loss \(a tensor of shape \(2,\) .* must be one real number"):
        writer.step(6, loss=torch.zeros(2))
    with pytest.raises(TypeError, match=r"loss \(a tensor .* torch.complex64\) must be one real number"):
        writer.step(6, loss=torch.tensor(1j))
    with pytest.raises(TypeError, match=r"loss \(10+\) must be a number"):
        writer.step(6, loss=10**400)
    for name in ("two\nlines", "half \ud800"):
        with pytest.raises(ValueError, match="a scalar's name .* must be printable"):
            writer.step(6, **{name: 1.0})
    with pytest.raises(TypeError, match=r"loss \('low'\) must be a number"):
        writer.step(7, loss="low")  # type: ignore[arg-type]
    writer.close()


def test_another_file_s_columns_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / LAYERS).write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=f"{LAYERS}, line 1: .* read it with the pmoe that wrote it"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match=f"{LAYERS} must begin with the columns {','.join(COLUMNS[LAYERS])}"):
        StatsWriter(tmp_path, build())
    assert (tmp_path / LAYERS).read_text() == "a,b\n1,2\n"


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, range(1, 10), tensorboard=True)
    train(tmp_path, range(7, 13), tensorboard=True)  # from a checkpoint of step 6
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0})
    board.Reload()
    losses = board.Scalars("loss")
    assert [each.step for each in losses] == list(range(1, 13))
    assert [each.value for each in losses] == pytest.approx([1 / step for step in range(1, 13)])
    assert [each.step for each in board.Scalars("pmoe/imbalance/0")] == [1, 4, 7, 8, 12]
    assert board.Scalars("pmoe/n_forward/0")[-1].value == 2
    histogram = board.Histograms("pmoe/tokens_per_expert/0")[0].histogram_value
    assert (histogram.num, histogram.sum) == (4, 32)  # 4 experts, 16 tokens, 2 choices


def test_without_tensorboard_it_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ImportError, match=r"tensorboard \(True\) must be False.*pip install '\.\[tensorboard\]'"
    ):
        StatsWriter(tmp_path / "run", build(), tensorboard=True)
    assert not (tmp_path / "run").exists()
    train(tmp_path / "run", range(1, 3))


def test_importing_writer_and_report_loads_no_optional_dependency() -> None:
    program = (
        "import sys, pmoe.integrations.logging, pmoe.integrations.report.page\n"
        "print(*(set(sys.modules) & {'tensorboard', 'torch.utils.tensorboard', 'matplotlib'}))"
    )
    assert fresh.run(program).strip() == ""
