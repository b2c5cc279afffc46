"""pmoe report: the page's numbers, missing and broken data, and how a real browser shows the page."""

from __future__ import annotations

import html
import io
import json
import math
import os
import re
import shutil
import sys
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from pmoe import cli
from pmoe.integrations.report import charts
from pmoe.integrations.report.charts import (
    format_bytes,
    format_number,
    format_seconds,
    format_share,
    line_chart,
)
from pmoe.integrations.report.history import short_names
from pmoe.integrations.report.page import MAX_COLUMNS, run_page
from pmoe.integrations.run_folder import (
    HOST_POOL_PEAK,
    LAYERS,
    POOL_PEAK,
    RUN,
    SCALARS,
    TENSORS,
    TIME,
    Curve,
    Row,
    add_session,
    append,
    layer_row,
    read_run,
)
from pmoe.integrations.statistics import LayerStats, imbalance
from pmoe.planner.memory import PredictedMemory
from pmoe.planner.timeline import Overlap
from tests.browser import Page, driver, started

MEMORY = PredictedMemory(
    saved=2 << 20,
    temporary=5 << 20,
    gradients=1,
    host=0,
    peak=9 << 20,
    searching_peak=9 << 20,
    forward_peak=1,
    backward_peak=1,
    promised=1,
    is_bound=False,
)


def stats_of(name: str, rows: Sequence[int], **changed: Any) -> LayerStats:
    """Returns the statistics of a layer in a step, as StatsWriter gets them."""
    usual: dict[str, Any] = {
        "num_slots": sum(rows) + 10,
        "drop_rate": 10 / (sum(rows) + 10),
        "imbalance": imbalance(rows),
        "rank_imbalance": 1.1,
        "path": "pipeline",
        "n_forward": 2,
        "n_backward": 4,
        "restore": "communicate/recompute",
        "tensors": {"T_I": 1 << 20, "T_DI": 2 << 20, "T_M": 8 << 20, "T_DO": 2 << 20, "T_O": 1 << 20},
        "predicted": MEMORY,
        "unpredicted": "",
        "forward": Overlap(seconds=0.03, communication=0.02, exposed=0.005),
        "backward": Overlap(seconds=0.05, communication=0.02, exposed=0.001),
    }
    return LayerStats(name=name, tokens_per_expert=tuple(rows), **{**usual, **changed})


def scalar_rows(step: int, **values: float) -> list[Row]:
    return [Row(step=step, name=name, value=value) for name, value in values.items()]


def write_run(
    folder: Path,
    *,
    steps: Sequence[int],
    layers: int = 2,
    experts: int = 8,
    every: int = 10,
    nan: Sequence[int] = (),
    name: str = "blocks.{}.ffn",
    **changed: Any,
) -> Path:
    """Writes an invented run: its loss is 5 / step + 1, expert e of layer l has 50 + (e * 7 + l) % 50
    rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scalars: list[Row] = []
    rows: list[Row] = []
    for step in steps:
        scalars += scalar_rows(step, loss=math.nan if step in nan else 5 / step + 1, learning_rate=0.001)
        if step in (steps[0], steps[-1]) or step % every == 0:
            pools = {POOL_PEAK: 3 << 20, HOST_POOL_PEAK: 0}
            scalars += scalar_rows(step, **{TIME: 1e9 + 0.25 * step, **pools})
            for layer in range(layers):
                counts = [50 + (e * 7 + layer) % 50 for e in range(experts)]
                rows.append(layer_row(step, stats_of(name.format(layer), counts, **changed)))
    append(folder / SCALARS, scalars)
    append(folder / LAYERS, rows)
    described = [{"layer": name.format(i), "num_experts": experts, "d_model": 64 + i} for i in range(layers)]
    session = {
        "when": "2026-01-02T03:04:05",
        "ranks": 4,
        "device": "cpu",
        "versions": {"pmoe": "0.1.0", "torch": "2.13.0"},
        "settings": {"lr": 0.001, "data": "/a/long/path/" + "without-any-break" * 12},
        "layers": described,
    }
    add_session(folder / RUN, session)
    return folder


def text_of(page: str) -> str:
    """Returns the text that a reader of the page sees."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body)))


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


# ---- the command


def test_report_writes_one_page_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", steps=range(1, 41))
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"40 steps, 2 MoE layers\nwrote {tmp_path / 'run' / 'report.html'}\n"
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(tmp_path / "page.html")
    assert (found["steps"], found["layers"], found["loss"]) == (40, 2, pytest.approx(5 / 40 + 1))
    assert f"<b>{format_number(found['loss'])}</b>" in (tmp_path / "page.html").read_text()
    assert found["communication_seconds"] == pytest.approx(2 * 0.04)
    assert found["exposed_seconds"] == pytest.approx(2 * 0.006)


def test_a_folder_without_data_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, why in (
        ("empty", "it holds no data"),
        ("missing", "there is no such folder"),
        ("file", "it is a file"),
    ):
        told_to_user = refused(capsys, "report", str(tmp_path / name))
        assert f"RUN_DIR ({tmp_path / name}) must" in told_to_user.replace("\n", " ")
        assert why in told_to_user and SCALARS in told_to_user
    append(tmp_path / "empty" / SCALARS, [])
    assert "it holds no data" in refused(capsys, "report", str(tmp_path / "empty"))


@pytest.mark.parametrize(
    "name, text, why",
    [
        (SCALARS, "step,value\n1,2\n", "must begin with the columns step,name,value"),
        (SCALARS, "step,name,value\n1,loss,low\n", "scalars.csv, line 2: could not convert"),
        (SCALARS, "step,name,value\n1,loss\n", "scalars.csv, line 2: 2 cells, not 3"),
        (SCALARS, f"step,name,value\n1,{'x' * 200_000},2\n", "scalars.csv, line 2: field larger"),
        (SCALARS, "step,name,value\n1,\udcff,2\n", "scalars.csv must be text"),
        (RUN, "{", "run.json: no JSON"),
        (RUN, "[]", "run.json: must be an object, not list"),
        (RUN, '{"format": 2, "sessions": []}', "run.json: must be of format 1, not 2: read it with the pmoe"),
    ],
)
def test_a_broken_file_is_named_with_its_line(
    name: str, text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, steps=range(1, 5))
    (tmp_path / name).write_text(text, errors="surrogateescape")
    assert why in refused(capsys, "report", str(tmp_path))


def test_names_of_files_that_are_no_text_do_not_stop_the_page(tmp_path: Path) -> None:
    write_run(tmp_path, steps=[1])
    add_session(tmp_path / RUN, {"settings": {"data": "/data/\udcff"}})
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "/data/\\udcff" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, steps=[1])
    assert "--out" in refused(capsys, "report", str(tmp_path), "--out", str(tmp_path / "no" / "page.html"))


# ---- the page


def test_the_page_tells_the_run_s_numbers(tmp_path: Path) -> None:
    page = text_of(run_page(read_run(write_run(tmp_path, steps=range(1, 101)))))
    for expected in (
        "Began 2026-01-02 03:04 · 4 ranks · cpu · pmoe 0.1.0, torch 2.13.0",
        "time a step 250 ms",
        "exposed 12 ms",
        "85% is hidden",
        "pool's peak 3 MiB",
        "blocks.0.ffn, blocks.1.ffn 1 – 100 pipeline 2 4 communicate/recompute",
        "2 MiB 5 MiB 9 MiB 0",
        "MoE layers: 2; num_experts = 8.",
        "lr 0.001",
    ):
        assert expected in page, expected


def test_the_page_explains_its_words_and_has_no_empty_card(tmp_path: Path) -> None:
    write_run(tmp_path, steps=range(1, 41))
    text = text_of(run_page(read_run(tmp_path)))
    heading, legend = (text.index(words) for words in ("Memory A layer has", "Memory by tensor"))
    assert all(heading < text.index(f"{name}: the ") < legend for name in TENSORS)
    assert "Settings and versions" in text
    file = json.loads((tmp_path / RUN).read_text())
    file["sessions"][-1]["settings"] = {}
    (tmp_path / RUN).write_text(json.dumps(file))
    page = run_page(read_run(tmp_path))
    assert "Settings" not in text_of(page)
    assert not re.search(r"<dl>\s*</dl>", page)


def test_the_page_needs_nothing_from_outside_and_runs_nothing(tmp_path: Path) -> None:
    page = run_page(read_run(write_run(tmp_path, steps=range(1, 101))))
    assert not re.search(r"<script|<link|@import|https?://|javascript:", page)
    loaded = {url for url in re.findall(r'(?:src|href)="([^"]*)"', page) if not url.startswith("#")}
    assert {url[:22] for url in loaded} == {"data:image/png;base64,"}


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    page = run_page(read_run(write_run(tmp_path, steps=range(1, 30), name="<script>&{}'\"")))
    assert "<script" not in page and "&lt;script&gt;&amp;0" in page


def test_stretches_of_steps_that_ran_alike_are_one_line(tmp_path: Path) -> None:
    write_run(tmp_path, steps=range(1, 41))
    write_run(tmp_path, steps=range(41, 81), path="fused", n_forward=None, n_backward=None, restore=None)
    page = text_of(run_page(read_run(tmp_path)))
    assert "1 – 40 pipeline 2 4 communicate/recompute 41 – 80 fused – – –" in page


def test_tensors_are_told_to_be_kept_only_where_a_backward_pass_wants_them(tmp_path: Path) -> None:
    write_run(tmp_path, steps=range(1, 11), restore=None)
    write_run(tmp_path, steps=range(11, 21), restore=None, n_backward=None)
    page = text_of(run_page(read_run(tmp_path)))
    assert "1 – 10 pipeline 2 4 kept 11 – 20 pipeline 2 – –" in page


def test_the_most_uneven_of_many_layers_are_shown_first(tmp_path: Path) -> None:
    lines = [layer_row(1, stats_of(f"b.{i}", [10 + 3 * (i % 5), 10, 10])) for i in range(10)]
    lines.append(layer_row(1, stats_of("b.idle", [0, 0, 0])))
    append(tmp_path / LAYERS, lines)
    page = run_page(read_run(tmp_path))
    maps = re.findall(r'aria-label="(b\.\w+): 3 experts over 1 steps"', page)
    assert maps == ["b.2", "b.3", "b.4", "b.7", "b.8", "b.9", "b.0", "b.1", "b.5", "b.6"]
    assert "; the 6 most uneven layers" in text_of(page)


def test_what_is_missing_leaves_its_section_out(tmp_path: Path) -> None:
    (tmp_path / "losses").mkdir()
    append(tmp_path / "losses" / SCALARS, scalar_rows(1, loss=2.0))
    page = text_of(run_page(read_run(tmp_path / "losses")))
    assert "loss 2 last" in page and "no run.json" in page
    for title in ("Load of the experts", "Communication", "Memory", "Settings", "Chosen n"):
        assert title not in page
    (tmp_path / "layers").mkdir()
    missing = ("imbalance", "rank_imbalance", "drop_rate", "num_slots", "n_forward", "n_backward", "restore")
    nothing = dict.fromkeys([*missing, "predicted", "forward", "backward"])
    never = stats_of("0", [0, 0], path="not run", tensors={}, **nothing)
    append(tmp_path / "layers" / LAYERS, [layer_row(3, never)])
    page = text_of(run_page(read_run(tmp_path / "layers")))
    assert "Loss" not in page and "3 not run – –" in page and "No pass of the 1 logged steps" in page


def test_one_rank_says_that_nothing_travelled(tmp_path: Path) -> None:
    still = Overlap(seconds=0.1, communication=0.0, exposed=0.0)
    write_run(tmp_path, steps=range(1, 5), forward=still, backward=still)
    assert "Nothing travelled in the passes" in text_of(run_page(read_run(tmp_path)))


def test_values_that_are_not_finite_are_counted_and_leave_gaps(tmp_path: Path) -> None:
    page = run_page(read_run(write_run(tmp_path, steps=range(1, 61), nan=(30, 31))))
    assert "2 values not finite, the first at step 30." in page
    (column,) = re.findall(r'<g class="bad">(.*?)</g>', page, re.DOTALL)
    assert column.count("<path") == 2
    (tmp_path / "all").mkdir()
    nothing = [row for step in range(3) for row in scalar_rows(step, loss=math.nan)]
    append(tmp_path / "all" / SCALARS, nothing)
    assert "No finite value in 3 points." in run_page(read_run(tmp_path / "all"))


@pytest.mark.slow
def test_a_run_of_100_000_steps_and_many_layers_and_experts_stays_a_small_page(tmp_path: Path) -> None:
    scalars = [Row(step=s, name="loss", value=3 + math.sin(s)) for s in range(1, 100_001)]
    append(tmp_path / SCALARS, scalars)
    rows = [10 + e % 7 for e in range(128)]
    lines = [
        layer_row(step, stats_of(f"blocks.{i}.mlp", rows)) for step in range(0, 3000, 5) for i in range(12)
    ]
    append(tmp_path / LAYERS, lines)
    page = run_page(read_run(tmp_path))
    assert len(page) < 600_000
    assert "median of layers" in page and "blocks.0.mlp … blocks.11.mlp (12 layers)" in text_of(page)


# ---- numbers and charts


def test_numbers_are_told_in_few_digits() -> None:
    numbers = [0, 1, 1.2345, 12.345, 123.45, 12345, 1.5e9, 0.05, 0.00012, math.nan]
    assert list(map(format_number, numbers)) == [
        "0", "1", "1.234", "12.35", "123.5", "12,345", "1.5e+09", "0.05", "0.00012", "not finite",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (2, 0.0123, 4.5e-6, 0)] == ["2 s", "12.3 ms", "4.5 µs", "0"]
    sizes = [500, 3 << 20, 5 << 30, 0, None]
    assert list(map(format_bytes, sizes)) == ["500 bytes", "3 MiB", "5 GiB", "0", "–"]
    assert [format_share(s) for s in (0, 0.0004, 0.031, 0.5)] == ["0%", "under 0.1%", "3.1%", "50%"]


def test_thinning_keeps_means_and_extremes_of_finite_values() -> None:
    bins = charts.bins_of(range(6), [1, 5, math.nan, 3, math.inf, math.nan], 3)
    assert list(zip(*bins, strict=True))[:2] == [(0.5, 3, 1, 5), (2.5, 3, 3, 3)]
    assert np.isnan(bins.mean[2]) and np.isnan(bins.low[2])
    assert len(charts.bins_of(range(100_000), range(100_000), charts.MAX_POINTS).x) <= charts.MAX_POINTS
    assert charts.median([3, math.nan, 1, 2]) == 2 and charts.median([math.nan]) is None


def points_of(svg: str, kind: str) -> list[list[tuple[float, float]]]:
    """Returns the coordinates of all paths of a class, in pixels from the top left."""
    ways = re.findall(rf'<g class="{kind}">\s*(?:<defs>\s*)?<path [^>]*d="([^"]*)"', svg)
    return [[(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", way)] for way in ways]


def drawn(steps: Sequence[int], values: Sequence[float], **options: Any) -> str:
    return line_chart("title", {"a": Curve(list(steps), list(values))}, **options)


def labels_of(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_a_line_goes_through_its_points_and_stops_at_gaps() -> None:
    svg = drawn([0, 1, 2, 3, 4], [0, 10, math.nan, 10, 0], floor=0)
    (way,) = points_of(svg, "line")
    (x0, foot), (x1, top), (x3, also_top), (x4, also_foot) = way
    assert (x1 - x0, x3 - x1, x4 - x3) == pytest.approx(
        [(x4 - x0) * part for part in (0.25, 0.5, 0.25)], abs=0.1
    )
    assert foot == also_foot > top == also_top
    assert re.search(r'<g class="line">\s*<path d="M [\d. ]+L [\d. ]+M [\d. ]+L [\d. ]+"', svg)
    assert labels_of(svg) == ["0", "1", "2", "3", "4", "step", "0", "2", "4", "6", "8", "10"]


def test_a_point_alone_is_a_dot() -> None:
    svg = drawn([6, 7, 8, 9], [1, math.nan, 3, math.nan])
    (dots,) = re.findall(r'<g class="dot">(.*?)</g>\s*</g>', svg, re.DOTALL)
    assert dots.count("<use") == 2
    assert 'class="dot"' not in drawn([6, 7], [1, 2])


def test_axes_have_units() -> None:
    line = ([0, 100_000], [0, 0.02])
    steps = ["0", "20k", "40k", "60k", "80k", "100k", "step"]
    assert labels_of(drawn(*line, floor=0)) == [*steps, "0.000", "0.005", "0.010", "0.015", "0.020"]
    shown = labels_of(drawn(*line, floor=0, show=format_seconds))
    assert shown == [*steps, "0 s", "5 ms", "10 ms", "15 ms", "20 ms"]
    shown = labels_of(drawn(*line, floor=0, show=format_share))
    assert shown == [*steps, "0.00%", "0.50%", "1.00%", "1.50%", "2.00%"]


def test_few_very_large_values_do_not_flatten_the_rest() -> None:
    ys = [1 + 0.1 * (i % 10) for i in range(200)]
    svg = drawn(range(200), [*ys[:100], 1000.0, *ys[101:]])
    assert "Cut off above: values up to 1,000." in svg
    (way,) = points_of(svg, "line")
    heights = [y for _, y in way]
    assert max(heights) - sorted(heights)[1] > 50  # of 200; the usual values take a good part of the height


def test_values_near_the_largest_float_are_no_error() -> None:
    svg = drawn(range(3), [-1.7e308, 1.0, 1.7e308])
    assert "2 values not finite" in svg


def test_a_line_of_many_points_lies_in_a_band_that_holds_them_all() -> None:
    ys = [s % 7 for s in range(2002)]
    svg = drawn(range(2002), ys)
    (outline,) = points_of(svg, "band")
    assert len(outline) <= 2 * charts.MAX_POINTS + 10
    assert len({y for _, y in outline}) == 2  # every bin has a 0 and a 6
    (way,) = points_of(svg, "line")
    highest, lowest = sorted(
        {y % charts.COLUMN[1] for _, y in outline}
    )  # where it is used, it begins at the foot
    assert all(highest < y < lowest for _, y in way)


def pixels(markup: str) -> Any:
    """Returns the picture in a heat map, (rows, columns, 4): red, green, blue and opacity from 0 to 1."""
    found = re.search(r"base64,\s*([^\"]*)", markup)
    assert found is not None
    return imread(io.BytesIO(b64decode(found[1])))


def test_a_heat_map_s_colours_are_its_numbers() -> None:
    ratios = [[1.0, 2.0, 4.0, 9.0], [0.5, 0.25, 0.0, math.nan]]
    found = pixels(charts.heat_map("t", [1, 2, 3, 4], ratios, "expert"))
    even, twice, most, beyond = found[0]
    half, least, nothing, unknown = found[1]
    assert even[3] < 0.02  # the page shows through
    assert list(most) == list(beyond) and most[0] > 0.8 and most[3] > 0.9
    assert least[2] > 0.7 and least[3] > 0.9
    for between, end in ((twice, most), (half, least)):
        assert list(between[:3]) == pytest.approx(list(end[:3]), abs=0.01)
        assert between[3] == pytest.approx(end[3] / 2, abs=0.02)
    assert ["#" + bytes((255 * each).round().astype("u1")).hex() for each in (nothing, unknown)] == [
        f"{charts.NOTHING}ff", charts.UNKNOWN,
    ]  # fmt: skip


def test_many_steps_of_load_are_added_up_to_few_columns(tmp_path: Path) -> None:
    # The first expert has all rows of odd steps, none of even ones.
    steps = [stats_of("0", [8, 0] if step % 2 else [0, 8]) for step in range(500)]
    append(tmp_path / LAYERS, [layer_row(step, each) for step, each in enumerate(steps)])
    found = pixels(run_page(read_run(tmp_path)))
    assert found.shape[0] == 2 and found.shape[1] <= MAX_COLUMNS
    assert found[:, :-1, 3].max() < 0.35  # shares of 2/5 to 3/5 are near to even


def test_long_names_lose_what_they_have_in_common() -> None:
    long = [f"model.decoder.layers.{i}.feed_forward.experts" for i in (0, 12)]
    assert list(short_names(long).values()) == ["…layers.0…", "…layers.12…"]
    assert short_names(long[:1]) == {long[0]: long[0]}
    named = [f"model.decoder.blocks.part_{name}.feed_forward.experts" for name in "ab"]
    assert list(short_names(named).values()) == ["…part_a…", "…part_b…"]
    assert short_names(["blocks.1.ffn", "blocks.3.ffn"])["blocks.1.ffn"] == "blocks.1.ffn"
    assert short_names([""]) == {"": "(the model)"}
    apart = short_names(["a_very_long_name_of_a_module.x", "another_long_name_of_a_module"])
    assert len(set(apart.values())) == 2


def test_without_matplotlib_the_report_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, steps=[1])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib draws the charts (pip install '.[report]' in pmoe's folder)" in refused(
        capsys, "report", str(tmp_path)
    )
    assert not (tmp_path / "report.html").exists()


# ---- in a real browser

MEASURE = """
const low = node => getComputedStyle(node);
const shown = node => node.getClientRects().length > 0;
const texts = [...document.querySelectorAll('body *')].filter(node =>
  [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()) && shown(node));
const inside = node => { // what scrolls inside its own box may be wider than the page
  for (let at = node; at; at = at.parentElement) if (low(at).overflowX === 'auto') return true;
  return false;
};
const isDrawn = node => node instanceof SVGElement;
const scale = at => Math.hypot(at.a, at.b);
const size = node => parseFloat(low(node).fontSize) * (isDrawn(node) ? scale(node.getScreenCTM()) : 1);
const colour = text => text.match(/[\\d.]+/g).map(Number);
const bright = text => { const [r, g, b] = colour(text).map(v => {
  v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
  return .2126 * r + .7152 * g + .0722 * b; };
const behind = node => { for (let at = node; at; at = at.parentElement) {
  const found = low(at).backgroundColor; if (found !== 'rgba(0, 0, 0, 0)') return found; }
  return 'rgb(255, 255, 255)'; };
const contrast = node => {
  const own = isDrawn(node) ? low(node).fill : low(node).color, a = bright(own), b = bright(behind(node));
  return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); };
const crossing = nodes => { // steps stand beside each other: apart, to be read as two
  const boxes = nodes.map(each => each.getBoundingClientRect());
  const gap = (a, b) => Math.abs(a.top - b.top) < 1 ? 6 : 0;
  return boxes.some((a, i) => boxes.slice(i + 1).some(b => a.left < b.right + gap(a, b) &&
    b.left < a.right + gap(a, b) && a.top < b.bottom - 1 && b.top < a.bottom - 1)); };
return {
  width: innerWidth,
  scrolls: document.documentElement.scrollWidth,
  outside: texts.filter(node => !inside(node)).filter(node => {
    const box = node.getBoundingClientRect(); return box.right > innerWidth + 0.5 || box.left < -0.5;
  }).map(node => node.textContent.slice(0, 60)),
  smallest: Math.min(...texts.map(size)),
  faintest: Math.min(...texts.map(contrast)),
  charts: [...document.querySelectorAll('.chart')].map(chart => {
    const svgs = [...chart.querySelectorAll('svg')].filter(shown);
    const boxes = svgs.map(svg => svg.getBoundingClientRect());
    return {
      title: chart.querySelector('b').textContent,
      drawings: svgs.length,
      marks: [...chart.querySelectorAll('.line path, .dot use, .cells, .part')].filter(mark => {
        const box = mark.getBoundingClientRect(); return box.width > 0 || box.height > 0; }).length,
      high: Math.min(...boxes.map(box => box.height)),
      wide: Math.min(...boxes.map(box => box.width)),
      overlaps: svgs.some(svg => crossing([...svg.querySelectorAll('text')])),
      cut: svgs.some((svg, i) => [...svg.querySelectorAll('text')].some(text => {
        const box = text.getBoundingClientRect();
        return box.left < boxes[i].left - 1 || box.right > boxes[i].right + 1 ||
          box.top < boxes[i].top - 1 || box.bottom > boxes[i].bottom + 1; })),
    };
  }),
  pictures: [...document.querySelectorAll('image')].length,
};
"""


ROWS_TO_THE_EDGE = """
return [...document.querySelectorAll('.grid')].filter(grid => grid.clientWidth).flatMap(grid => {
  const cards = [...grid.children].map(each => each.getBoundingClientRect());
  const last = cards.filter(each => each.top === cards[cards.length - 1].top);
  const right = Math.max(...last.map(each => each.right));
  return Math.abs(right - grid.getBoundingClientRect().right) > 1 ? [right] : [];
});
"""
"""JavaScript that returns the right ends of last rows of cards that do not reach the page's edge."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the reports of three runs: a usual one, a large one, and one of a single step.

    The large one has names that are too long for a phone.
    """
    folder = tmp_path_factory.mktemp("pages")
    runs = {
        "usual": write_run(folder / "usual", steps=range(1, 1001)),
        "large": write_run(
            folder / "large",
            steps=range(100, 100_001, 100),
            layers=14,
            experts=96,
            every=10_000,
            nan=range(70_000, 71_000),
            name="model.decoder.transformer_blocks.layer_{}.mixture_of_experts_feed_forward",
        ),
        "one step": write_run(folder / "one", steps=[1], layers=1, experts=4),
    }
    for run in runs.values():
        (run / "report.html").write_text(run_page(read_run(run)), encoding="utf-8")
    return {name: run / "report.html" for name, run in runs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name, num_maps", [("usual", 2), ("large", 14), ("one step", 1)])
def test_a_browser_shows_the_pages_whole_and_readable_on_phones_and_desktops(
    name: str, num_maps: int, pages: dict[str, Path], browser: Page
) -> None:
    browser.resize(390, 844, is_phone=True)
    browser.open(pages[name])
    browser.run("document.querySelectorAll('details').forEach(each => { each.open = true })")
    for width, is_phone, dark in (
        (390, True, False),
        (390, True, True),
        (820, False, True),
        (1280, False, False),
    ):
        browser.resize(width, 844, is_phone=is_phone, dark=dark)
        found = browser.run(MEASURE)
        assert browser.messages() == []
        assert (found["width"], found["scrolls"]) == (width, width)
        assert found["outside"] == [], width
        assert found["smallest"] >= 12, width
        assert found["faintest"] >= 4.5, (width, dark)  # what the web's accessibility rules ask of text
        assert len(found["charts"]) >= 8
        for chart in found["charts"]:
            assert chart["marks"] > 0 and chart["drawings"] <= 1, (width, chart)
            if chart["title"] != "Memory by tensor":  # bars are no drawing
                assert chart["wide"] >= 0.4 * min(width, 400) and chart["high"] >= 100, (width, chart)
                assert not chart["overlaps"] and not chart["cut"], (width, chart)
        assert found["pictures"] == num_maps
        assert browser.run(ROWS_TO_THE_EDGE) == [], width


def test_the_browser_tells_of_whatever_goes_wrong_on_a_page(tmp_path: Path, browser: Page) -> None:
    (tmp_path / "page.html").write_text("<img src='missing.png'><script>throw Error('boom')</script>")
    browser.resize(390, 844, is_phone=True)
    browser.open(tmp_path / "page.html")
    told_to_console = " ".join(browser.messages())
    assert "missing.png" in told_to_console and "boom" in told_to_console
    assert browser.run("return innerWidth") > 390  # a page that says nothing of its viewport is zoomed out


def test_without_a_browser_the_test_says_what_installs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    told_to_user = "make browser .*apt-get install -y chromium chromium-driver"
    with pytest.raises(AssertionError, match=told_to_user), started():
        pass


@pytest.mark.slow
def test_a_chromedriver_that_finds_its_port_taken_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, fake = shutil.which("chromedriver"), tmp_path / "chromedriver"
    fake.write_text(
        f"#!/bin/sh\nif mkdir {tmp_path}/tried; then echo 'bind() failed: Address in use'; exit 1; fi\n"
        f'exec {real} "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(AssertionError, match="Address in use"), driver(tmp_path):
        pass
    (tmp_path / "tried").rmdir()
    with started() as page:
        page.resize(500, 500)
        assert page.run("return innerWidth") == 500
    assert (tmp_path / "tried").exists()
