"""bench/timing.py: turns of runs, quartiles, speed-ups, and how times are printed and stored."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from typing import Any

import pytest
import torch

from bench import timing
from bench.timing import Timing, interleaved, table, write_json


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.BEGUN, "machine", {**timing.BEGUN["machine"], "busy_cores": 0.0})


def test_variants_take_turns_and_each_round_starts_with_another() -> None:
    journal: list[str] = []
    runs = {name: partial(journal.append, name) for name in "abc"}
    timings = interleaved(runs, rounds=3, warmup=1, barrier=partial(journal.append, "|"))
    assert "".join(journal) == "|c|a|b" + "|a|b|c" + "|b|c|a" + "|c|a|b"
    assert {name: len(timing.samples) for name, timing in timings.items()} == {"a": 3, "b": 3, "c": 3}


def test_each_variant_gets_its_own_time() -> None:
    timings = interleaved({"nap": partial(time.sleep, 0.02), "nothing": lambda: None}, rounds=2)
    assert min(timings["nap"].samples) >= 0.02


def test_median_quartiles_and_speedup_by_hand() -> None:
    base, other = Timing((2.0, 4.0, 6.0, 8.0, 10.0)), Timing((1.0, 1.0, 2.0, 8.0, 20.0))
    assert (base.low, base.median, base.high) == (4, 6, 8)
    assert base.spread == pytest.approx(4 / 6)
    assert other.speedup_over(base) == 2  # of 2, 4, 3, 1, 0.5
    with pytest.raises(ValueError, match="base has 1 rounds, this has 5"):
        other.speedup_over(Timing((1.0,)))


def test_a_table_is_aligned() -> None:
    rows = [{"n": 1, "what": "sequential", "ms": 381.25}, {"n": 16, "what": "", "ms": None}]
    assert table(rows) == " n  what           ms\n 1  sequential  381.2\n16"


def test_a_table_says_that_the_machine_was_busy_when_the_run_began(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"n": 1}]
    for load, said in ((timing.BUSY, False), (4.5, True)):
        machine = {**timing.BEGUN["machine"], "busy_cores": load}
        monkeypatch.setitem(timing.BEGUN, "machine", machine)
        assert ("busy machine: others used 4.5 cores" in table(rows)) == said


def test_json_holds_the_samples_the_machine_and_the_code(tmp_path: Any) -> None:
    write_json(tmp_path / "new" / "a.json", rows={"x": Timing((1.0, 3.0))}, rounds=2)
    read = json.loads((tmp_path / "new" / "a.json").read_text())
    assert read["rows"]["x"]["samples_s"] == [1, 3]
    assert read["machine"]["torch"] == torch.__version__
    assert read["code"].keys() == {"commit", "clean"}
    if (timing.ROOT / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}", read["code"]["commit"]) and isinstance(
            read["code"]["clean"], bool
        )
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
