"""The tables in README.md and docs/numbers.md have the numbers of the stored results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
NUMBERS = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
DEGREES = (1, 2, 4, 8, 16)
PASSES = ("forward", "backward", "step")
PAIRS = [
    f"{t_di}/{t_m}" for t_di in ("keep", "offload", "communicate") for t_m in ("keep", "offload", "recompute")
]
RUNS = [
    "computation alone",
    "communication alone",
    *(f"n={n}" for n in DEGREES),
    *("sequential n=1", "sequential n=4"),
]


def stored(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def table_below(text: str, command: str) -> list[list[str]]:
    """Returns the cells of the first table after the first mention of ``command``, without its header."""
    _, found, rest = text.partition(command)
    assert found, command
    lines = rest[rest.index("\n|") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def told(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def overlap_row(row: dict[str, Any]) -> list[str]:
    times = [told(row[f"{part} ms"], 0) for part in ("forward", "backward", "step")]
    ratios = ("forward/bound", "step/bound", "step x seq n=1", "predicted/step")
    return [row["run"], *times, *(told(row[name], 2) for name in ratios)]


@pytest.mark.parametrize("rate", ["auto", "auto-step"])
def test_the_tables_of_overlap_are_the_stored_ones(rate: str) -> None:
    rows = {row["run"]: row for row in stored(f"overlap_modelled_{rate}")}
    command = f"`python bench/bench_overlap.py --link modelled --rate {rate}`"
    assert table_below(NUMBERS, command) == [overlap_row(rows[run]) for run in RUNS]


@pytest.mark.parametrize("rate", ["auto", "auto-step"])
def test_the_rates_of_overlap_are_the_stored_ones(rate: str) -> None:
    file = RESULTS / f"overlap_modelled_{rate}.json"
    bytes_per_second = json.loads(file.read_text(encoding="utf-8"))["bytes_per_second"]
    before, found, _ = NUMBERS.partition(f"(`python bench/bench_overlap.py --link modelled --rate {rate}`)")
    assert found and f"At {bytes_per_second / 1e6:.1f} MB/s" in before.rsplit("\n\n", 1)[-1]


def best(rows: Sequence[dict[str, Any]], name: str) -> tuple[float, str]:
    return min((row[name], row["run"]) for row in rows if row["run"].startswith("n="))


def real_row(rate: str) -> list[str]:
    rows = stored(f"overlap_real_{rate}")
    rate_bytes = json.loads((RESULTS / f"overlap_real_{rate}.json").read_text("utf-8"))["bytes_per_second"]
    (forward, at), (step, step_at) = best(rows, "forward/bound"), best(rows, "step/bound")
    faster = max(row["step x seq n=1"] for row in rows if row["run"] == step_at)
    return [f"{rate_bytes / 1e6:.1f}", f"{forward:.2f} ({at})", f"{step:.2f} ({step_at})", f"{faster:.2f}"]


def test_the_table_of_a_real_link_is_the_stored_one() -> None:
    expected = [real_row("auto"), real_row("auto-step")]
    assert table_below(NUMBERS, "`python bench/bench_overlap.py --link real --rate auto`") == expected


def reuse_rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name on the page, result) of each variant at n = 4."""
    rows = {row["variant"]: row for row in stored("reuse_modelled_auto")}
    yield "plain autograd, n=1", rows["plain"]
    yield "the same under `torch.utils.checkpoint`", rows["checkpointed"]
    yield "`memory_reuse=False`", rows["no reuse n=4"]
    for variant, row in rows.items():
        pair, *at = variant.split()
        if pair in PAIRS and "n=4" in at:
            yield " ".join([pair, *(word for word in at if word != "n=4")]), row


def reuse_row(name: str, row: dict[str, Any]) -> list[str]:
    columns = (("held MB", 1), ("peak MB", 0), ("peak/plain", 2), ("step ms", 0), ("step/plain", 2))
    more = (("step/keep", 2), ("predicted step/keep", 2))
    return [name, *(told(row[column], digits) for column, digits in (*columns, *more))]


def test_the_table_of_restore_pairs_is_the_stored_one() -> None:
    expected = [reuse_row(name, row) for name, row in reuse_rows()]
    assert len(expected) == 12
    assert table_below(NUMBERS, "`python bench/bench_reuse.py --link modelled --rate auto`") == expected


def saving_rows() -> Iterator[list[str]]:
    rows = stored("memory_saving")
    for model in ("MoE-GPT3-S", "MoE-BERT-L", "MoE-GPT3-XL"):
        for n in (2, 4, 8):
            here = [row for row in rows if (row["model"], row["n"]) == (model, n)]
            sizes = sorted({row["tokens"] // 1024 for row in here})
            cells = []
            for pair in ("S1", "S2", "S3", "S4", "keep/keep"):
                shares = [row["share"] for row in here if row["pair"].split()[-1] == pair]
                cells.append(f"{min(shares):.2f} - {max(shares):.2f}")
            yield [f"{model} ({sizes[0]}k - {sizes[-1]}k)", str(n), *cells]


def test_the_table_of_savings_is_the_stored_one() -> None:
    assert table_below(NUMBERS, "`python bench/memory_saving.py") == list(saving_rows())


def test_other_measured_numbers_are_the_stored_ones() -> None:
    text = " ".join(NUMBERS.split())
    one, two = (stored(f"plain_{threads}_threads")[0]["/ plain"] for threads in (1, 2))
    assert f"{one:.2f} x (one thread) and {two:.2f} x (two threads)" in text
    fairseq = json.loads((RESULTS / "fairseq.json").read_text("utf-8"))
    assert f"takes {100 * fairseq['share']:.1f} % of a step" in text
    automatic = fairseq["automatic"]
    assert f"In {automatic['steps']} steps with" in text
    assert f"took as long as {automatic['choosing / plain step']:.1f} steps" in text
    assert f"Later steps took {automatic['later steps, automatic / plain']:.2f} x the plain ones" in text
    first, second = automatic["first step's peak / largest later"]
    assert f"The first step's peak was {first:.2f} and {second:.2f} x the largest later one" in text


def test_the_table_of_alternating_all_to_alls_is_the_stored_one() -> None:
    """Fig. 7a of MPipeMoE beside all dispatches first: the same bytes, and never faster beyond the noise."""
    document = json.loads((RESULTS / "alternate_modelled.json").read_text("utf-8"))
    rows = [row for row in document["rows"] if row["order"] == "alternating"]
    expected = [
        [f"{row['link']:g}", str(row["n"]), *(told(row[f"{part} ratio"], 2) for part in PASSES)]
        for row in rows
    ]
    assert table_below(NUMBERS, "`python bench/bench_alternate.py`") == expected
    noise = max(abs(row["step ratio"] - 1) for row in rows if row["n"] == 2)  # the orders are equal there
    different = [row["step ratio"] for row in rows if row["n"] > 2]
    assert min(different) >= 1 - noise
    low = min(row["min"] for row in document["simulated"])
    high = max(row["max"] for row in document["simulated"])
    text = " ".join(NUMBERS.split())
    assert f"the ratio is {low:.2f} to {high:.2f}" in text
    peaks = document["peak_bytes"]
    assert len({peaks[f"n=4, {order}"] for order in ("S first", "alternating", "alternating, G too")}) == 1
    assert f"the same bytes ({peaks['n=4, S first'] / 1e6:.1f} MB with n = 4)" in text
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert f"takes {low:.2f} to {high:.2f} times as long as all S first" in page
    assert f"[{min(different):.2f} to {max(different):.2f} times](numbers.md#overlap)" in page


# ---- the README's two tables, a part of those


def test_the_readme_shows_rows_of_these_tables() -> None:
    speed = table_below(README, "`python bench/bench_overlap.py --link modelled --rate auto`")
    whole = {row["run"]: overlap_row(row) for row in stored("overlap_modelled_auto")}
    assert len(speed) > 3
    for run, *cells in speed:
        _, forward, backward, step, of_forward, of_step, faster, _ = whole[run]
        assert cells == [forward, backward, step, of_forward, of_step, faster], run
    memory = table_below(README, "`python bench/bench_reuse.py --link modelled --rate auto`")
    known = {name: reuse_row(name, row) for name, row in reuse_rows()}
    assert len(memory) > 5
    for name, *cells in memory:
        assert cells == known[name][1:6], name


# ---- docs/choosing.md: what searches cost

CHOOSING = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
SEARCH = json.loads((RESULTS / "search.json").read_text(encoding="utf-8"))


def search_row(noise: int) -> list[str]:
    rows = {(row["curves"], row["noise"], row["algorithm"]): row for row in SEARCH["simulated"]}
    runs = f"{noise}% of a run"
    cells = [rows[curves, runs, who] for curves in ("stored", "growing") for who in ("pmoe", "as printed")]
    return [f"{noise} %", *(f"{cell['searches']:.0f}, {cell['regret %']:.2f} %" for cell in cells)]


def test_the_table_of_searches_is_the_stored_one() -> None:
    assert table_below(CHOOSING, "`python bench/bench_search.py`") == [search_row(n) for n in range(4)]


def live_row(layer: str, options: str) -> list[str]:
    """Returns the smallest and the largest number of the runs with different batch sizes."""
    runs = [run for name, run in SEARCH["live"].items() if name.startswith(f"{layer}, seed")]
    assert len(runs) == 3
    summaries = [run["summary"] for run in runs]
    all_steps = [
        statistics.median(row["search steps"] + row["other steps"] for row in run["rows"]) for run in runs
    ]
    columns = (
        ([summary["searches"] for summary in summaries], ".0f"),
        ([summary["median runs"] for summary in summaries], ".1f"),
        ([summary["median steps"] for summary in summaries], ".1f"),
        (all_steps, ".1f"),
        ([summary["all search runs"] + summary["all other runs"] for summary in summaries], ".0f"),
    )
    return [f"`{options}`", *(f"{min(cells):{form}} to {max(cells):{form}}" for cells, form in columns)]


def test_the_table_of_live_searches_is_the_stored_one() -> None:
    assert table_below(CHOOSING, "(`python bench/bench_search.py --live --live-seeds 3`)") == [
        live_row("pipeline=True", "pipeline=True"),
        live_row("both True", "pipeline=True, memory_reuse=True"),
    ]


def test_the_page_says_what_the_first_live_searches_cost() -> None:
    steps: dict[str, list[float]] = {}
    for name, run in SEARCH["live"].items():
        first = run["rows"][0]
        steps.setdefault(name.partition(",")[0], []).append(first["search steps"] + first["other steps"])
    ends = {name: f"{min(cells):.0f} to {max(cells):.0f}" for name, cells in steps.items()}
    text = (
        f"{ends['pipeline=True']} steps with `pipeline=True`, and {ends['both True']} steps with both options"
    )
    assert text in " ".join(CHOOSING.split())


def test_the_table_of_reductions_beside_a_graph_is_the_stored_one() -> None:
    pieces = json.loads((RESULTS / "lancet_reductions.json").read_text(encoding="utf-8"))["pieces"]
    columns = [
        pieces[ratio]["ways"][way] for ratio in ("3x", "5x") for way in ("eager", "at the end", "planned")
    ]
    names = {
        "step": "step ms",
        "backward pass": "backward ms",
        "backward pass without reduction": "not reduced ms",
        "link in the backward pass": "link in it ms",
        "exposed reduction": "exposed reduction ms",
        "its bound": "its bound ms",
        "exposed all-to-alls": "exposed all-to-all ms",
        "both exposed together": "together ms",
    }
    rows = [[name, *(f"{each[key]:,.0f}" for each in columns)] for name, key in names.items()]
    lancet = (ROOT / "docs" / "lancet.md").read_text(encoding="utf-8")
    assert table_below(lancet, "`python bench/bench_lancet_reductions.py --ratio 3 5`") == rows


# ---- docs/choosing.md: what copies of busy experts gain on larger machines

COPIES = json.loads((RESULTS / "balance_simulated.json").read_text(encoding="utf-8"))


def copies_row(result: dict[str, Any]) -> list[str]:
    names = ("before", "after", "with_over_balanced", "speedup")
    return [result["case"], result["load"], *(told(result[name], 2) for name in names)]


def test_the_table_of_simulated_copies_is_the_stored_one() -> None:
    steps = [result for result in COPIES["results"] if result["what"] == "step"]
    assert len(steps) == 16
    assert table_below(CHOOSING, "`python bench/bench_balance.py`") == [copies_row(step) for step in steps]


def test_the_simulated_copies_make_rows_even() -> None:
    assert max(result["after"] for result in COPIES["results"]) < 1.06
