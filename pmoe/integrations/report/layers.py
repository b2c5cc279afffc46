"""The sections of a report about layers: load, choices, communication and memory."""

from __future__ import annotations

import functools
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
    heat_legend,
    heat_map,
    line_chart,
)
from pmoe.integrations.report.history import COMMUNICATION, History, stretches
from pmoe.integrations.run_folder import HOST_POOL_PEAK, POOL_PEAK, PREDICTED, TENSORS, LayerRow
from pmoe.planner.drawing import SERIES, part

MAX_LINES = 6
"""Layers that have a line of their own; of more, the median and the ends are drawn."""

MAX_SHOWN = 6
"""Heat maps that are shown at once, and half as many as other parts; the rest is folded away."""

MAX_COLUMNS = 120
"""Of a heat map."""

MAX_STRETCHES = 8
"""Of a layer, in the table of n and restore pairs."""

grid = functools.partial(part, "grid")

# ---- expert load


def load_charts(history: History) -> list[str]:
    if not history.by_layer:
        return []
    charts: list[str] = []
    for whose, field in (("expert", "imbalance"), ("rank", "rank_imbalance")):
        title = f"Imbalance: rows of the busiest {whose}"
        charts += _by_layer(history, title, field, unit="over the mean", floor=1)
    if any(row.drop_rate for rows in history.by_layer.values() for row in rows):
        charts += _by_layer(history, "Dropped rows", "drop_rate", floor=0, show=format_share)
    return [grid(charts), *_heat_maps(history)]


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


def _heat_maps(history: History) -> list[str]:
    """Of many layers those whose last row is the most uneven are shown, in the model's order."""
    ran = {
        name: rows for name, rows in history.by_layer.items() if any(sum(r.tokens_per_expert) for r in rows)
    }
    if not ran:
        return []
    worst = sorted(ran, key=lambda name: ran[name][-1].imbalance or 0.0, reverse=True)[:MAX_SHOWN]
    whose = f"; the {len(worst)} most uneven layers" if len(ran) > len(worst) else ""
    maps = [_heat_map(name, ran[name]) for name in sorted(ran, key=lambda name: name not in worst)]
    head = heat_legend(f"Rows of each expert, against an even share of its layer's rows{whose}")
    return [head, *with_rest_folded(maps, MAX_SHOWN, "more layers", grid)]


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


def choices(history: History) -> list[str]:
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
    if not lines:
        return []
    about = (
        "What was really run at the steps that were logged, after fallbacks and after chunks were cut finer. "
        "n: micro-batches of a pass. T_DI / T_M: what became of them between the passes."
    )
    header = ["layer", "steps", "computed by", "n forward", "n backward", "T_DI / T_M"]
    return [about, part("table", header, lines, words=3)]


def communication(history: History) -> list[str]:
    if not history.by_layer:
        return []
    total, exposed = map(history.seconds_by_step, COMMUNICATION)
    if not total:
        steps = {row.step for row in history.run.rows}
        return [f"No pass of the {len(steps):,} logged steps was recorded."]
    if not any(total.values()):
        return ["Nothing travelled in the passes that were recorded."]
    charts = [_of_a_step(total, exposed)]
    for direction in ("forward", "backward"):
        title, field = f"Exposed communication, {direction}", f"{direction}_exposed"
        charts += _by_layer(history, title, field, floor=0, show=format_seconds)
    return [grid(charts)]


def _of_a_step(total: Mapping[int, float], exposed: Mapping[int, float]) -> str:
    lines = [
        Line(name=name, xs=list(of), ys=list(of.values()), is_filled=True)
        for name, of in (("something travels", total), ("and nothing is computed", exposed))
    ]
    note = (
        "Both passes of all layers; means over the ranks. Of a layer that a step calls several times, only "
        "the last call is in it; the exchange of row counts is not."
    )
    return line_chart("Communication of a step", lines, floor=0, show=format_seconds, note=note)


# ---- memory


def memory(history: History) -> list[str]:
    rows = [(name, each[-1]) for name, each in history.by_layer.items() if each[-1].T_I_bytes is not None]
    sizes = [(name, [getattr(row, f"{each}_bytes") or 0 for each in TENSORS]) for name, row in rows]
    bars = [(name, values, format_bytes(sum(values))) for name, values in sizes]
    keys = list(zip(TENSORS, SERIES, strict=False))
    note = "Of rank 0 at the last logged step, each tensor as a whole. T_DO is never kept for backward."
    lines = [
        [name, row.restore or "kept", *(format_bytes(getattr(row, f"{each}_bytes")) for each in PREDICTED)]
        for name, row in rows
        if row.peak_bytes is not None
    ]
    header = ["layer", "T_DI / T_M", "held between the passes", "added by a pass", "peak", "on the host"]
    about = ["Predicted for the rows that came, on rank 0, parameters and input not counted:"]
    max_items, more = 2 * MAX_SHOWN, "more layers"
    return [
        *with_rest_folded(
            bars, max_items, more, lambda some: part("bars", "Memory by tensor", keys, some, note)
        ),
        *(about if lines else []),
        *with_rest_folded(lines, max_items, more, lambda some: part("table", header, some, words=2)),
        *_pools(history),
    ]


def _pools(history: History) -> list[str]:
    device, host = history.last(POOL_PEAK), history.last(HOST_POOL_PEAK)
    if not (device or host):
        return []
    return [
        f"The pool that all layers of rank 0 share held at most {format_bytes(device)} on the device and "
        f"{format_bytes(host)} on the host."
    ]


# ---- many layers


def with_rest_folded(
    items: Sequence[Any], max_items: int, what: str, made: Callable[[Sequence[Any]], str]
) -> list[str]:
    """The part ``made`` of the first items, and that of the rest, folded away under ``what`` they are."""
    first, rest = items[:max_items], items[max_items:]
    parts = [made(first)] if first else []
    return [*parts, part("folded", f"{len(rest)} {what}", [made(rest)])] if rest else parts
