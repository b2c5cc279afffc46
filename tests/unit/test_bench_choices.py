"""bench_choices: its arithmetic against numbers by hand, and one whole case at a small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import bench_choices
from bench.bench_choices import batch_rows, draw, regret, rows_of, summary
from bench.choices import CASES, WITH_BUDGET, Chosen, Result, name_of
from bench.links import copies
from bench.timing import Timing, write_json
from pmoe.planner.degree import DEGREES
from pmoe.schedule.restore import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
S4 = STRATEGIES["S4"]


def timed(*seconds: float) -> dict[str, Timing]:
    return {"step": Timing(seconds)}


PLAIN = [name_of(n, None) for n in (3, 1, 9)]
RESULT = Result(
    screened={
        name_of(1, None): timed(4.0, 4.0),
        name_of(3, None): timed(2.0, 2.0),
        name_of(9, None): timed(6.0, 6.0),
        name_of(4, S4): timed(1.0, 1.0),
    },
    times={
        name_of(1, None): timed(4.0, 4.0, 9.0),
        name_of(3, None): timed(2.0, 2.0, 2.0),
        name_of(4, S4): timed(1.0, 1.0, 1.0),
        "pipeline=True": timed(2.0, 2.4, 2.2),
        "both True": timed(1.0, 1.0, 1.0),
        name_of(4, S4) + WITH_BUDGET: timed(2.0, 2.0, 2.0),
        "both True and a budget": timed(3.0, 3.0, 3.0),
    },
    chosen={
        "pipeline=True": Chosen("n=4", 8.8, PLAIN, PLAIN[:2]),
        "both True": Chosen("n=4 S4", 5.0, [name_of(4, S4)], [name_of(4, S4)]),
        "both True and a budget": Chosen("n=4 S4", 5.0, [name_of(4, S4)], [name_of(4, S4) + WITH_BUDGET]),
    },
    bytes_per_second=1e6,
    copy_bytes_per_second=1e6,
    budget_bytes=1,
)


def test_what_is_stored_of_a_case_can_be_written(tmp_path: Path) -> None:
    write_json(tmp_path / "case.json", result=bench_choices.stored(RESULT))
    found = json.loads((tmp_path / "case.json").read_text("utf-8"))["result"]
    assert found["times"]["n=3"]["step"]["samples_s"] == [2.0, 2.0, 2.0]
    assert found["chosen"]["both True"]["among"] == ["n=4 communicate/recompute"]


def test_regret_is_over_the_fastest_of_what_the_chooser_could_have_been() -> None:
    assert regret(RESULT, "pipeline=True") == ("n=3", pytest.approx(0.1))  # of 1.0, 1.2 and 1.1
    first, second, third = rows_of(CASES[0], RESULT)
    assert (first["took"], first["best"], first["of"]) == ("n=4", "n=3", 3)
    assert first["slowest/best"] == 3 and first["search steps"] == pytest.approx(3)
    assert second["best"] == "n=4 communicate/recompute" and second["regret %"] == 0
    assert third["best"] == "n=4 communicate/recompute, budget" and third["slowest/best"] == 1
    assert third["regret %"] == pytest.approx(50), "of a layer that has the budget, too"


def test_the_summary_says_where_the_regret_is_too_large() -> None:
    rows = [
        {"case": case, "chooser": name, "regret %": value, "search steps": 1.0}
        for name, values in {
            "good": (0.0, 4.0, 9.0),
            "far once": (0.0, 1.0, 11.0),
            "often": (6.0, 6.0, 6.0),
        }.items()
        for case, value in zip("abc", values, strict=True)
    ]
    found = {row["chooser"]: row for row in summary(rows)}
    assert [row["5% and 10%"] for row in found.values()] == ["met", "MISSED", "MISSED", "MISSED"]
    assert found["far once"]["in case"] == "c" and found["all"]["worst regret %"] == 11


def test_n_by_batch_size_is_told_and_drawn(tmp_path: Path) -> None:
    takes = {"pipeline=True": 2, 'pipeline="solve"': 4}
    found = {
        tokens: {
            "times": {
                **{name_of(n, None): Timing((1.0 + abs(n - best),)) for n in DEGREES},
                **dict.fromkeys(takes, Timing((1.5,))),
            },
            "took": takes,
        }
        for tokens, best in ((1024, 1), (4096, 2), (16384, 8))
    }
    assert [row["best n"] for row in batch_rows(found)] == [1, 2, 8]
    draw(tmp_path / "n.png", found)
    assert (tmp_path / "n.png").stat().st_size > 10_000


def test_a_limited_copy_takes_as_long_as_its_bytes_at_that_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [5.0], []

    class Clock:
        monotonic = staticmethod(lambda: now[0])
        sleep = staticmethod(slept.append)

    monkeypatch.setattr(copies, "time", Clock)
    limit = copies.CopyLimit()
    limit.limited(lambda: None, lambda: 1 << 40)
    assert slept == []
    limit.set_rate(100.0)
    limit.limited(lambda: now.__setitem__(0, 6.0), lambda: 250)
    assert slept == [1.5]


@pytest.mark.nightly
def test_a_small_run_measures_every_choice_and_writes_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "bench_choices.py"), "--quick", "--rounds", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--out", str(tmp_path)], check=True, env=environment, timeout=600)
    found = json.loads((tmp_path / "choices_modelled.json").read_text("utf-8"))
    assert len(found["rows"]) == 5 * len(found["cases"])
    assert (tmp_path / "choices_modelled.png").exists()
    for case in found["results"].values():
        assert {f"n={n}" for n in (1, 3, 4)} < case["screened"].keys()
        assert sum("/" in name for name in case["screened"]) == 2 * 9
        for name, chosen in case["chosen"].items():
            assert set(chosen["among"]) <= case["screened"].keys()
            assert {name, *chosen["finalists"]} <= case["times"].keys()
        samples = [each["step"]["samples_s"] for each in case["times"].values()]
        assert all(each and min(each) > 0 for each in samples)
