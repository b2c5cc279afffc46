"""`bench/bench_import.py`: what it copies, in which order it runs processes, and what its table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.bench_import import Sample, Variant, copy_sources, measure, rows_of, variants_in
from bench.timing import ROOT


def test_a_copy_has_sources_alone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for name in (
        "__init__.py",
        "__pycache__/__init__.cpython-311.pyc",
        "_cuda.so",
        "gates/topk.py",
        "py.typed",
    ):
        file = clone / "pmoe" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    copy_sources(clone, tmp_path / "copy")
    copied = sorted(str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*.*"))
    assert copied == ["pmoe/__init__.py", "pmoe/gates/topk.py", "pmoe/py.typed"]


def test_a_folder_that_is_no_clone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"base \(.*/nothing\) must be a clone of pmoe"):
        copy_sources(tmp_path / "nothing", tmp_path / "copy")


def test_the_clones_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round begins with another variant, and the first process of each does not count."""
    variants = [Variant(name, tmp_path, has_bytecode=True) for name in ("this", "base")]
    order: list[str] = []

    def sample(self: Variant) -> Sample:
        order.append(self.name)
        return Sample((float(len(order)),) * 3, (0.1,) * 3, (1, 2, 3))

    monkeypatch.setattr(Variant, "sample", sample)
    samples = measure(variants, rounds=3)
    assert order == ["this", "base", "this", "base", "base", "this", "this", "base"]
    assert [[one.seconds[0] for one in each] for each in samples] == [[3, 6, 7], [4, 5, 8]]


def test_the_table_has_medians_modules_and_the_ratio_of_each_round(tmp_path: Path) -> None:
    variants = [
        Variant(name, tmp_path, has_bytecode) for has_bytecode in (True, False) for name in ("this", "base")
    ]
    seconds = ((0.1, 0.2, 0.3), (0.2, 0.4, 0.3), (1.0, 1.0, 3.0), (2.0, 2.0, 2.0))
    samples = [
        [Sample((first, 2 * first, 4 * first), (first, first, 3), (2, 80, 90)) for first in each]
        for each in seconds
    ]
    rows = rows_of(variants, samples)
    assert [(row["bytecode"], row["moment"]) for row in rows] == [
        (bytecode, moment) for bytecode in ("yes", "no") for moment in ("import", "layer", "step")
    ]
    first = rows[0]
    assert first["this ms"] == pytest.approx(200)
    assert first["base ms"] == pytest.approx(300)
    assert (first["this modules"], first["base modules"]) == (2, 2)
    # The rounds' ratios are 0.5, 0.5 and 1. The ratio of the medians would be 2 / 3.
    assert first["this / base"] == pytest.approx(0.5)
    assert first["CPU this / base"] == pytest.approx(0.5)
    assert rows[2]["CPU this / base"] == 1
    assert rows[5]["this ms"] == pytest.approx(4000)
    assert "this / base" not in rows_of(variants[::2], samples[::2])[0]


def test_a_process_imports_the_copy_and_times_every_moment(tmp_path: Path) -> None:
    variant, _ = variants_in(tmp_path, {"this": ROOT})
    sample = variant.sample()
    assert 0 < sample.seconds[0] < sample.seconds[1] < sample.seconds[2]
    assert 0 < sample.cpu_seconds[0] < sample.cpu_seconds[1] < sample.cpu_seconds[2]
    assert sample.modules[0] < 10 < sample.modules[1] < sample.modules[2]
    assert list((variant.folder / "pmoe").rglob("*.pyc"))
