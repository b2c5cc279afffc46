"""Draws the pictures of stored results again, as the benchmarks would draw them today. Nothing is measured.

python bench/redraw.py                    those of bench/results, in their places
python bench/redraw.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench import bench_choices, bench_overlap, memory_breakdown, memory_pairs, memory_saving, memory_timeline
from bench.chrome_trace import read_trace
from bench.memory import tokens_name
from bench.timing import Timing, counted
from pmoe.planner.timeline import draw

RESULTS = Path(__file__).resolve().parent / "results"

Stored = Mapping[str, Any]


def redraw_overlap(path: Path, stored: Stored) -> None:
    panels = read_trace(path.with_suffix(".trace.json"))
    (n,) = {int(match[1]) for name in panels if (match := re.search(r"n = (\d+)", name))}
    draw(
        path.with_suffix(".png"),
        panels,
        bench_overlap.title_of(stored["link"], stored["bytes_per_second"], n),
    )


def redraw_choices(path: Path, stored: Stored) -> None:
    batches = {
        int(tokens): {
            "times": {name: Timing(tuple(of["samples_s"])) for name, of in batch["times"].items()},
            "took": batch["took"],
        }
        for tokens, batch in stored["batches"]["found"].items()
    }
    bench_choices.draw(path.with_suffix(".png"), batches)


def redraw_pairs(path: Path, stored: Stored) -> None:
    for model, tokens in dict.fromkeys((row["model"], row["tokens"]) for row in stored["rows"]):
        rows = [row for row in stored["rows"] if (row["model"], row["tokens"]) == (model, tokens)]
        picture = path.with_name(f"{path.stem}_{model}_{tokens_name(tokens)}.png")
        memory_pairs.draw(picture, stored["ranks"], rows)


KINDS: Mapping[str, Callable[[Path, Stored], None]] = {
    r"overlap_.*": redraw_overlap,
    r"choices_modelled": redraw_choices,
    r"memory_pairs_\d+_ranks": redraw_pairs,
    r"memory_breakdown": lambda path, stored: memory_breakdown.draw(path.with_suffix(".png"), stored["rows"]),
    r"memory_saving": lambda path, stored: memory_saving.draw(path.with_suffix(".png"), stored["rows"]),
    r"memory_timeline_.*": lambda path, stored: memory_timeline.draw(
        path.with_suffix(".png"), stored["model"], stored["panels"]
    ),
}
"""Functions that draw stored results. A key is a pattern of the result's file name without ending."""


def redraw(folder: Path) -> list[str]:
    """Draws the pictures of all stored results in a folder. Returns the names of the results."""
    done = []
    for path in counted(sorted(folder.glob("*.json")), "file"):
        for name, drawn in KINDS.items():
            if re.fullmatch(name, path.name.removesuffix(".json")) and not path.name.endswith(".trace.json"):
                drawn(path, json.loads(path.read_text()))
                done.append(path.name)
    return done


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS, help="of results and their pictures")
    print("\n".join(redraw(parser.parse_args(argv).folder)))


if __name__ == "__main__":
    main()
