"""docs/papers.md maps each paper to the code: the names in it exist, and nothing of a paper is left out."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from pmoe.cli.simulate import TOLD

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
PAPERS = ("MPipeMoE", "FSMoE", "COMET", "FlashDMoE", "Lancet")
NAMED = re.compile(r"`([\w/]+\.(?:py|cuh?|h|cpp)):([\w.]+)`")
MISSING = ("not built yet", "not in pmoe: ")


def numbered(kind: str, *numbers: object) -> list[str]:
    return [f"{kind} {number}" for number in numbers]


# What each paper numbers, counted in its text.
NUMBERED: dict[str, list[str]] = {
    "MPipeMoE": [
        *numbered("Eq.", *range(1, 11)),
        *numbered("Alg.", 1),
        *numbered("Fig.", *range(1, 14)),
        *numbered("Table", "I", "II", "III"),
    ],
    "FSMoE": [
        *numbered("Eq.", *range(1, 6)),
        *numbered("Alg.", 1),
        *numbered("Fig.", *range(1, 9)),
        *numbered("Table", *range(1, 7)),
        *numbered("Listing", 1, 2),
    ],
    "COMET": [*numbered("Fig.", *range(1, 15)), *numbered("Table", 1, 2, 3)],
    "FlashDMoE": [
        *(f"Eq. 1.{number}" for number in range(1, 8)),
        *numbered("Eq.", "5.1", "5.2", "5.3"),
        *numbered("Alg.", *range(1, 5)),
        *(f"Fig. {part}.{number}" for part, most in ((1, 6), (6, 6)) for number in range(1, most + 1)),
        *(f"Fig. {part}.{number}" for part in (3, 4, 5) for number in (1, 2, 3)),
        "Fig. A.1",
        *numbered("Table", "1.1", "6.1", "6.2"),
        *numbered("Def.", "5.3.1", "5.3.2"),
        "Theorem 5.3.1",
    ],
    "Lancet": [*numbered("Eq.", 1, 2), *numbered("Alg.", 1), *numbered("Fig.", *range(1, 17))],
}


class Row(NamedTuple):
    paper: str
    labels: tuple[str, ...]
    text: str
    """The row's last column: where the code is, or why there is none."""

    @property
    def is_missing(self) -> bool:
        return any(word in self.text for word in MISSING)

    @property
    def names(self) -> list[tuple[str, str]]:
        return NAMED.findall(self.text)


def labels_of(cell: str) -> Iterator[str]:
    """Yields the labels in a cell. Example: "Eq. 7 to 9, III.E" -> "Eq. 7", "Eq. 8", "Eq. 9", "III.E"."""
    for part in cell.split(", "):
        found = re.fullmatch(r"(.*?)(\d+) to (?:[\d.]*\.)?(\d+)", part)
        if found is None:
            yield part
            continue
        before, first, last = found.groups()
        yield from (f"{before}{number}" for number in range(int(first), int(last) + 1))


def rows_of(paper: str) -> list[Row]:
    section = PAGE.partition(f"\n## {paper}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [Row(paper, tuple(labels_of(label)), text) for label, _, text in cells]


ROWS = [row for paper in PAPERS for row in rows_of(paper)]


@functools.cache
def python_names(path: str) -> frozenset[str]:
    """Returns the functions, classes, methods ("Class.method") and constants of a file."""

    def told(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from told(node.body, f"{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))

    return frozenset(told(ast.parse((ROOT / path).read_text(encoding="utf-8")).body))


@functools.cache
def symbols(path: str) -> frozenset[str]:
    """Returns the functions, structs, classes and enums that a C++ or CUDA file declares."""
    text = re.sub(r"//.*", "", (ROOT / path).read_text(encoding="utf-8"))
    declared = re.findall(r"^(?:[\w:<>*&,() ]+[ *&])?(\w+)\(", text, re.MULTILINE)
    return frozenset(
        [*declared, *re.findall(r"\b(?:struct|class|enum class)\s+(?:alignas\(\d+\) )?(\w+)", text)]
    )


def exists(path: str, name: str) -> bool:
    if not (ROOT / path).is_file():
        return False
    return name in (python_names(path) if path.endswith(".py") else symbols(path))


@pytest.mark.parametrize("paper", PAPERS)
def test_every_name_of_the_map_exists(paper: str) -> None:
    named = [each for row in ROWS if row.paper == paper for each in row.names]
    assert len(named) > 5
    assert [f"{path}:{name}" for path, name in named if not exists(path, name)] == []


def test_a_name_that_does_not_exist_is_noticed() -> None:
    assert exists("pmoe/comm/expert_sharding.py", "ShardCollectives.all_gather")
    assert not exists("pmoe/comm/expert_sharding.py", "all_gather")
    assert not exists("pmoe/comm/expert_sharding.py", "ShardCollectives.gather_all")
    assert not exists("pmoe/comm/shared.py", "ShardCollectives")
    assert exists("cuda/comet/layout.h", "Layout") and exists("cuda/comet/combine.cuh", "sum_tokens")
    assert not exists("cuda/comet/combine.cuh", "sum_rows")
    assert not exists("cuda/comet/combine.cuh", "add_vector_to")


@pytest.mark.parametrize("paper", PAPERS)
def test_everything_that_a_paper_numbers_has_a_row(paper: str) -> None:
    there = {label for row in ROWS if row.paper == paper for label in row.labels}
    assert [label for label in NUMBERED[paper] if label not in there] == []
    unknown = [label for label in there if not label[0].isdigit() and label not in NUMBERED[paper]]
    assert [label for label in unknown if not re.fullmatch(r"[IVX]+\.[A-Z]", label)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.paper} {row.labels[0]}")
def test_a_row_says_where_something_is_or_why_it_is_not(row: Row) -> None:
    assert row.names or row.is_missing or row.text.startswith("["), row.text
    for module in re.findall(r"not built yet \(`([\w.]+)`\)", row.text):
        there = ROOT.joinpath(*module.split("."))
        assert not there.exists(), f"{module} is there now: say what it has of {row.labels}"


# ---- what came out


def came_out() -> list[tuple[str, str, str, str]]:
    """Returns the rows of the table "What came out": (in the paper, kind, command, result)."""
    section = PAGE.partition("\n## What came out\n")[2]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        (label, kind, command, told) for label, kind, command, told in (row for row in cells if len(row) == 4)
    ][2:]


SIMULATED_FIGURES = {
    "MPipeMoE": ("mpipemoe", [8, 12]),
    "FSMoE": ("fsmoe", [6, 7, 8]),
    "COMET": ("comet", [8, 10, 11, 12, 13, 14]),
    "FlashDMoE": ("flashdmoe", ["6.1", "6.3", "6.5"]),
    "Lancet": ("lancet", [2, 6]),
}
"""The experiment of `pmoe simulate` of each paper, and the figures that it simulates."""


@pytest.mark.parametrize("paper", SIMULATED_FIGURES)
def test_every_simulated_figure_has_a_row_with_the_command_and_a_result(paper: str) -> None:
    experiment, figures = SIMULATED_FIGURES[paper]
    rows = {
        label: told
        for label, kind, command, told in came_out()
        if kind == "simulated" and command == f"`pmoe simulate {experiment}`"
    }
    for figure in figures:
        told = rows[f"{paper}, Fig. {figure}"]
        assert re.search(r"\d", told) and re.search(r"paper|thesis|rates", told), told
    assert experiment in TOLD


def test_every_command_of_what_came_out_exists() -> None:
    kinds = {"formula", "simulated", "measured"}
    assert len(came_out()) > 30
    for label, kind, command, _ in came_out():
        assert kind in kinds, label
        words = command.strip("`").split()
        if words[:2] == ["pmoe", "simulate"]:
            assert words[2] in TOLD, label
        for word in words:
            assert not word.endswith(".py") or (ROOT / word).is_file(), f"{label}: {word}"


# ---- what the code says it has of a paper

KINDS = {"eq.": "Eq.", "fig.": "Fig.", "figure": "Fig.", "table": "Table", "algorithm": "Alg.", "section": ""}
CITED = re.compile(
    rf"\b({'|'.join(PAPERS)})(?:'s|,|:)?\s+"
    r"((?:[Ee]q\.|[Ff]ig(?:\.|ure)|Table|Algorithm|[Ss]ection|[Tt]heorem)\s(?:[IVX]+(?:\.[A-Z])?|\d[\d.]*)\b)"
)


def cited(text: str) -> Iterator[tuple[str, str]]:
    """Yields the (paper, label) pairs that a text cites. Example: "MPipeMoE, section III.B" -> ("MPipeMoE",
    "III.B").
    """
    for paper, label in CITED.findall(re.sub(r"\s*\n\s*(?://|#)?\s*", " ", text)):
        kind, _, number = label.partition(" ")
        known = KINDS.get(kind.lower(), kind.capitalize())
        yield paper, f"{known} {number.rstrip('.')}".strip()


def citations() -> Mapping[tuple[str, str], Path]:
    files = [path for top in ("pmoe", "cuda", "bench") for path in (ROOT / top).rglob("*.*")]
    texts = {path: path for path in files if path.suffix in (".py", ".h", ".cu", ".cuh", ".cpp")}
    return {each: path for path in texts for each in cited(path.read_text(encoding="utf-8"))}


def test_what_the_code_says_it_has_of_a_paper_is_not_listed_as_missing() -> None:
    found = citations()
    assert len(found) > 25
    for (paper, label), path in found.items():
        rows = [row for row in ROWS if row.paper == paper and covers(row, label)]
        told = f"{path.relative_to(ROOT)} names {paper}, {label}"
        assert rows, f"{told}: it has no row"
        assert any(row.names for row in rows), f"{told}: it is listed as missing"


def covers(row: Row, label: str) -> bool:
    """Returns whether a row of the table is about a label. A row about section 4.2 is one about section 4,
    too.
    """
    return any(each == label or each.startswith(f"{label}.") for each in row.labels)


def test_citations_are_read_across_lines_and_in_every_form() -> None:
    text = "after FSMoE,\n# Section 4.2, as MPipeMoE's Eq. 10 and (COMET, Figure 8). Theirs, Fig. 3."
    assert list(cited(text)) == [("FSMoE", "4.2"), ("MPipeMoE", "Eq. 10"), ("COMET", "Fig. 8")]
