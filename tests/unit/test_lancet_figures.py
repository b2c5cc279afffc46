"""`pmoe simulate lancet`: statements about Lancet's section 7 follow from the simulated passes and are in
docs.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest

from pmoe.cli import main
from pmoe.graph.instructions import total_seconds
from pmoe.papers.assumptions import assumptions
from pmoe.papers.lancet_figures import (
    A100,
    FIGURE6_GPUS,
    LARGE,
    PAPER,
    PARTS,
    SMALL,
    TOKENS,
    V100,
    cut_seconds,
    figure2,
    figure6,
    forward,
    forward_work,
    in_layers,
    moe_layers,
    seconds_on,
    tables,
)

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


# ---- Fig. 2


def test_a_step_is_its_three_parts_and_each_bound_hides_one() -> None:
    for row in figure2():
        sent, experts, other = (row[f"{name} ms"] for name in ("all-to-all", "experts", "other"))
        assert row["Orig. ms"] == pytest.approx(sent + experts + other)
        assert row["Curr. ms"] == pytest.approx(row["Orig. ms"] - min(sent, experts))
        assert row["Opt. ms"] == pytest.approx(max(sent, experts + other))
        assert row["Opt. ms"] < row["Curr. ms"] < row["Orig. ms"]


def test_all_to_alls_outlast_experts_and_more_gpus_send_more() -> None:
    """The paper's point: if only experts hide all-to-alls, most of the all-to-alls stay exposed."""
    for model in (SMALL, LARGE):
        rows = [row for row in figure2() if row["model"] == model.name]
        ratios = [row["all-to-all / experts"] for row in rows]
        assert ratios == sorted(ratios) and ratios[0] > 3
        assert len({row["experts ms"] for row in rows}) == 1
    ratios = [row["all-to-all / experts"] for row in figure2()]
    why = assumptions("lancet, why")["Fig. 2"]
    assert f"take {min(ratios):.1f} to {max(ratios):.1f} times as long as experts" in why


def test_experts_are_what_lies_between_two_all_to_alls() -> None:
    works = list(forward_work(SMALL, 16))
    layers = moe_layers(works)
    assert len(layers) == SMALL.blocks // 2
    assert layers[0] == ["S of 1", *(f"{name} of 1" for name in (
        "first product", "nonlinearity", "second product"
    )), "R of 1"]  # fmt: skip


# ---- Fig. 6


def test_cutting_nothing_around_a_layer_is_tutels_pipeline() -> None:
    works = list(forward_work(SMALL, 24))
    seconds = functools.partial(seconds_on, A100, FIGURE6_GPUS, 24 * TOKENS)
    for k in (2, 4):
        tutels = in_layers(forward(works, seconds), works, seconds, k).seconds
        assert cut_seconds(works, seconds, 0.0, k) <= tutels * (1 + 1e-9)  # it takes the better of two orders
        assert cut_seconds(works, seconds, 0.0, k) == pytest.approx(tutels, rel=0.01)


def test_a_range_in_one_part_changes_nothing() -> None:
    works = list(forward_work(LARGE, 8))
    seconds = functools.partial(seconds_on, A100, FIGURE6_GPUS, 8 * TOKENS)
    uncut = total_seconds(forward(works, seconds))
    for span in (0.0, 1e-3, math.inf):
        assert cut_seconds(works, seconds, span, 1) == pytest.approx(uncut)


@pytest.mark.slow
def test_a_larger_range_pays_up_to_a_point_and_parts_can_be_too_many() -> None:
    for part, rows in itertools.groupby(figure6(), key=lambda row: row["figure"]):
        orig, *cut, lancet = rows
        best = [row["best ms"] for row in cut]
        assert max(best) < orig["best ms"]  # Tutel's range already helps
        assert min(best) < 0.9 * best[0]  # a larger one helps more
        assert lancet["best ms"] <= min(best) * (1 + 1e-9)  # and none beats the dynamic programme
        overheads = [row["8 parts ms"] - row[f"{PARTS[1]} parts ms"] for row in cut]
        if part == "(b)":  # many small operators
            assert cut[-1]["8 parts ms"] > orig["best ms"]
            assert min(best) < best[-1]  # the whole is not the best range
            assert overheads == sorted(overheads)


def test_the_command_prints_assumptions_and_refuses_others_options(capsys: pytest.CaptureFixture) -> None:
    assert main(["simulate", "lancet", "--assumptions"]) == 0
    assert re.search(r"^all-to-alls +20 microseconds", capsys.readouterr().out, re.M)
    with pytest.raises(SystemExit):
        main(["simulate", "lancet", "--contention", "1.5"])
    assert "--contention (1.5) is for fsmoe, not for lancet" in capsys.readouterr().err
