"""What a report shows of layers: charts of load and communication, lines of tables of choices and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any

import numpy as np

from pmoe.integrations.report.charts import (
    Line,
    format_bytes,
    format_number,
    format_seconds,
    format_share,
    heat_map,
    line_chart,
)
from pmoe.integrations.report.history import COMMUNICATION, History, stretches
from pmoe.integrations.run_folder import PASSES, PREDICTED, TENSORS, LayerRow

MAX_LINES = 6
"""Layers that have a line of their own; of more, the median and the ends are drawn."""

MAX_SHOWN = 6
"""Heat maps that are shown at once, and half as many as lines of a table; the rest is folded away."""

MAX_COLUMNS = 120
"""Of a heat map."""

MAX_STRETCHES = 8
"""Of a layer, in the table of n and restore pairs."""

# ---- expert load


def load_charts(history: History) -> list[str]:
    charts: list[str] = []
    for whose, field in (("expert", "imbalance"), ("rank", "rank_imbalance")):
        title = f"Imbalance: rows of the busiest {whose}"
        charts += _by_layer(history, title, field, unit="over the mean", floor=1)
    if any(row.drop_rate for rows in history.by_layer.values() for row in rows):
        charts += _by_layer(history, "Dropped rows", "drop_rate", floor=0, show=format_share)
    return charts


def _by_layer(history: History, title: str, field: str, **options: Any) -> list[str]:
    """A chart with a line a layer; of many layers the median between the least and the greatest."""
    by_name: dict[str, dict[int, float]] = {}
    for name, rows in history.by_layer.items():
        for row in rows:
            if (value := getattr(row, field)) is not None:
                by_name.setdefault(name, {})[row.step] = value
    if len(by_name) > MAX_LINES:
        return [_of_many(title, by_name, **options)]
    lines = [Line(name=name, xs=list(of), ys=list(of.values())) for name, of in by_name.items()]
    return [line_chart(title, lines, **options)] if lines else []


def _of_many(title: str, by_name: Mapping[str, Mapping[int, float]], **options: Any) -> str:
    steps = sorted({step for values in by_name.values() for step in values})
    values = [[of[step] for of in by_name.values() if step in of] for step in steps]
    ends: dict[str, Callable[[list[float]], float]] = {"greatest": max, "median": median_low, "least": min}
    lines = [
        Line(name=f"{name} of layers", xs=steps, ys=list(map(end, values))) for name, end in ends.items()
    ]
    last, name = max((list(of.values())[-1], name) for name, of in by_name.items())
    show = options.get("show", format_number)
    note = f"{len(by_name)} layers. Greatest at the end: {name}, {show(last)}."
    return line_chart(title, lines, note=note, **options)


def heat_maps(history: History) -> list[str]:
    """First those `MAX_SHOWN` whose last row is the most uneven, in the model's order, then the others."""
    ran = {
        name: rows for name, rows in history.by_layer.items() if any(sum(r.tokens_per_expert) for r in rows)
    }
    worst = sorted(ran, key=lambda name: ran[name][-1].imbalance or 0.0, reverse=True)[:MAX_SHOWN]
    return [_heat_map(name, ran[name]) for name in sorted(ran, key=lambda name: name not in worst)]


def _heat_map(name: str, rows: Sequence[LayerRow]) -> str:
    """Steps are joined where there are too many: rows are added up."""
    last = rows[-1].tokens_per_expert
    rows = [row for row in rows if len(row.tokens_per_expert) == len(last)]
    starts = np.arange(0, len(rows), -(-len(rows) // MAX_COLUMNS))
    steps = np.add.reduceat([row.step for row in rows], starts) / np.diff([*starts, len(rows)])
    summed = np.add.reduceat([row.tokens_per_expert for row in rows], starts)
    with np.errstate(invalid="ignore"):
        ratios = (summed / summed.mean(1, keepdims=True)).T
    note = ""
    if sum(last):
        busiest, idle = last.index(max(last)), last.count(0)
        share = format_share(last[busiest] / sum(last))
        note = f"At step {rows[-1].step:,}: expert {busiest} has {share} of {sum(last):,} rows"
        note += f"; {idle} of {len(last)} experts have none." if idle else ", and every expert has some."
    return heat_map(name, steps.tolist(), ratios, "expert", note)


# ---- choices and communication


def choices(history: History) -> list[list[str]]:
    """How layers ran, by stretches of steps; layers that always ran in the same way share their lines."""
    names_of: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for name, rows in history.by_layer.items():
        names_of.setdefault(tuple(stretches(rows)), []).append(name)
    lines = []
    for found, names in names_of.items():
        shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names)} layers)"
        left_out = len(found) - MAX_STRETCHES
        shown += f" (after {left_out} changes)" if left_out > 0 else ""
        lines += [[shown if i == 0 else "", *each] for i, each in enumerate(found[-MAX_STRETCHES:])]
    return lines


def communication(history: History) -> list[str]:
    """Charts; none where nothing travelled."""
    seconds = map(history.seconds_by_step, COMMUNICATION)
    names = ("something travels", "and nothing is computed")
    lines = [
        Line(name=name, xs=list(of), ys=list(of.values()), is_filled=True)
        for name, of in zip(names, seconds, strict=True)
    ]
    if not any(lines[0].ys):
        return []
    note = (
        "Both passes of all layers; means over the ranks. Of a layer that a step calls several times, only "
        "the last call is in it; the exchange of row counts is not."
    )
    charts = [line_chart("Communication of a step", lines, floor=0, show=format_seconds, note=note)]
    for direction in PASSES:
        title, field = f"Exposed communication, {direction}", f"{direction}_exposed"
        charts += _by_layer(history, title, field, floor=0, show=format_seconds)
    return charts


# ---- memory


def tensors(history: History) -> list[tuple[str, list[int], str]]:
    """Bars: name of a layer, bytes of each of `TENSORS`, their sum as text."""
    return [
        (name, sizes, format_bytes(sum(sizes)))
        for name, row in history.latest.items()
        if row.T_I_bytes is not None
        for sizes in [[getattr(row, f"{each}_bytes") or 0 for each in TENSORS]]
    ]


def predicted(history: History) -> list[list[str]]:
    """Lines of a table: name of a layer, restore pair, each of `PREDICTED`."""
    return [
        [name, row.restore or "kept", *(format_bytes(getattr(row, f"{each}_bytes")) for each in PREDICTED)]
        for name, row in history.latest.items()
        if row.peak_bytes is not None
    ]
