"""`pmoe simulate lancet`: what is said of Lancet's section 7 follows from the passes, and docs say it too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pmoe.cli import main
from pmoe.papers.lancet_figures import LARGE, PAPER, SMALL, V100, forward_work, tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    return tables()


@pytest.fixture
def rows(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, float]]:
    return found["section7"]


@pytest.mark.slow
def test_each_pass_helps_and_both_help_most(rows: list[dict[str, float]]) -> None:
    for row in rows:
        alone = [row[f"{name} ms"] for name in ("weight gradients", "ranges", "Tutel")]
        assert row["Lancet ms"] < min(alone) and max(alone) < row["no overlap ms"], row
        assert 0 < row["less exposed than Tutel %"] <= 100


@pytest.mark.slow
def test_docs_say_what_is_printed(found: dict[str, list[dict[str, Any]]]) -> None:
    page = (ROOT / "docs" / "lancet.md").read_text(encoding="utf-8")
    best = {row["gain"]: row["most"] for row in found["most"]}
    least = min(row["over no overlap"] for row in found["section7"])
    assert f"{least:.2f} to {best['over no overlap']:.2f} times" in page
    assert f"up to {best['less exposed than Tutel %']:.0f} %" in page
    assert best.keys() == PAPER.keys()


@pytest.mark.parametrize("model", [SMALL, LARGE], ids=lambda model: model.name)
def test_operators_are_those_of_the_model(model: object) -> None:
    works = list(forward_work(model, model.sequences[V100.name]))  # type: ignore[attr-defined]
    names = [work.name for work in works]
    assert len(set(names)) == len(names)
    assert sum(work.sent > 0 for work in works) == model.blocks  # type: ignore[attr-defined]  # two in every other


def test_the_command_prints_assumptions_and_refuses_others_options(capsys: pytest.CaptureFixture) -> None:
    assert main(["simulate", "lancet", "--assumptions"]) == 0
    assert re.search(r"^all-to-alls +20 microseconds", capsys.readouterr().out, re.M)
    with pytest.raises(SystemExit):
        main(["simulate", "lancet", "--contention", "1.5"])
    assert "--contention (1.5) is for fsmoe, not for lancet" in capsys.readouterr().err
