"""Makes the HTML page about a run: numbers and charts. `report.html` has the page's sections and texts.

Lines of long runs have fewer points than steps (`charts`). If a model has many layers, some of them are
hidden until the reader unfolds them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any

import numpy as np

from pmoe.integrations import run_folder as files
from pmoe.integrations.report import charts
from pmoe.integrations.report.history import COMMUNICATION, History, history_of, stretches
from pmoe.planner.drawing import SERIES, template

SMOOTHED = 100
"""Number of points of a loss curve. Each is the mean of neighbouring values, so that a trend is visible.

A band around the curve shows the smallest and largest values.
"""

MAX_LINES = 6
"""Largest number of layers for which a chart has one line each.

With more layers, it has three lines: median, largest and smallest value over the layers.
"""

MAX_SHOWN = 6
"""Number of heat maps that are visible before the reader unfolds the rest. A table shows twice as many lines.
"""

USAGE = {
    "max_vio_micro": "MaxVio of a micro-batch: busiest expert over the mean, minus 1",
    "max_vio_global": "MaxVio of the global batch",
    "entropy": "Entropy of the experts' shares; 1 is even",
    "active_fraction": "Share of experts with any rows",
}
"""Titles of the charts about all calls of a step, by the numbers in `pmoe.integrations.expert_usage.WORST`.

Other charts show the largest share, dropped rows and the imbalance of ranks of each layer's last call.
"""

MAX_COLUMNS = 120
"""Largest number of columns of a heat map."""

MAX_STRETCHES = 8
"""Largest number of lines for one layer in the table that says with which n and restore pair it ran.

n is the number of chunks. Older lines are left out.
"""


def run_page(run: files.Run) -> str:
    """Returns the page about a run as HTML, with all pictures and styles inside.

    Raises ImportError if matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"matplotlib draws the charts (pip install '.[report]' in pmoe's folder): {error}"
        ) from None
    history = history_of(run)
    page = template("integrations/report/report.html").render(
        title=f"pmoe report: {run.folder.resolve().name}",
        run=run,
        history=history,
        losses=_losses(history),
        load=_load_charts(history),
        heat_maps=_heat_maps(history),
        choices=_choices(history),
        communication=_communication(history),
        tensors=_tensors(history),
        predicted=_predicted(history),
        others=_others(history),
        layers=_as_built(run),
        device_peak=history.last(files.POOL_PEAK),
        host_peak=history.last(files.HOST_POOL_PEAK),
        charts=charts,
        keys=list(zip(files.TENSORS, SERIES, strict=False)),
        max_maps=MAX_SHOWN,
    )
    return page.strip() + "\n"


# ---- expert load


def _load_charts(history: History) -> list[str]:
    """Returns charts of the imbalance between experts and between ranks, and of dropped rows if any."""
    drawn: list[str] = []
    for whose, field in (("expert", "imbalance"), ("rank", "rank_imbalance")):
        title = f"Imbalance: rows of the busiest {whose}"
        drawn += _by_layer(history, title, field, unit="over the mean", floor=1)
    if any(row.drop_rate for rows in history.by_layer.values() for row in rows):
        drawn += _by_layer(history, "Dropped rows", "drop_rate", floor=0, show=charts.format_share)
    return drawn + _usage_charts(history)


def _usage_charts(history: History) -> list[str]:
    """Returns charts of how evenly experts were used in all calls of a step: mean and worst of the layers."""
    drawn = []
    for name, title in USAGE.items():
        curves = {
            end: history.run.scalars[f"moe/{name}_{end}"]
            for end in ("mean", "min", "max")
            if f"moe/{name}_{end}" in history.run.scalars
        }
        if curves:
            drawn.append(charts.line_chart(title, {f"{end} of layers": each for end, each in curves.items()}))
    return drawn


def _by_layer(history: History, title: str, field: str, **options: Any) -> list[str]:
    """Returns a list with one chart of a field of the logged rows; an empty list if no layer has values.

    The chart has one line for each layer. For more than `MAX_LINES` layers, its lines are the median, largest
    and smallest value over the layers.

    history: the logged rows of each layer.
    title: title of the chart.
    field: name of the field, such as "imbalance".
    options: further arguments of `charts.line_chart`.
    """
    by_name: dict[str, files.Curve] = {}
    for name, rows in history.by_layer.items():
        if known := {row.step: value for row in rows if (value := getattr(row, field)) is not None}:
            by_name[name] = files.Curve(list(known), list(known.values()))
    if len(by_name) > MAX_LINES:
        return [_of_many(title, by_name, **options)]
    return [charts.line_chart(title, by_name, **options)] if by_name else []


def _of_many(title: str, by_name: Mapping[str, files.Curve], **options: Any) -> str:
    """Returns a chart of the largest, median and smallest value over many layers.

    title: title of the chart.
    by_name: the values of each layer.
    options: further arguments of `charts.line_chart`.
    """
    values = defaultdict[int, list[float]](list)
    for curve in by_name.values():
        for step, value in zip(curve.steps, curve.values, strict=True):
            values[step].append(value)
    ends: dict[str, Callable[[list[float]], float]] = {"greatest": max, "median": median_low, "least": min}
    steps = sorted(values)
    curves = {
        f"{name} of layers": files.Curve(steps, [end(values[step]) for step in steps])
        for name, end in ends.items()
    }
    last, name = max((curve.values[-1], name) for name, curve in by_name.items())
    show = options.get("show", charts.format_number)
    note = f"{len(by_name)} layers. Greatest at the end: {name}, {show(last)}."
    return charts.line_chart(title, curves, note=note, **options)


def _heat_maps(history: History) -> list[str]:
    """Returns a heat map for each layer: how its rows are spread over experts and steps.

    The `MAX_SHOWN` layers with the largest imbalance at their last logged step come first, because the page
    shows these and folds the rest. Apart from that, layers are in the model's order.
    """
    ran = {
        name: rows for name, rows in history.by_layer.items() if any(sum(r.tokens_per_expert) for r in rows)
    }
    worst = sorted(ran, key=lambda name: ran[name][-1].imbalance or 0.0, reverse=True)[:MAX_SHOWN]
    return [_heat_map(name, ran[name]) for name in sorted(ran, key=lambda name: name not in worst)]


def _heat_map(name: str, rows: Sequence[files.Row]) -> str:
    """Returns the heat map of one layer: one line for each expert, one column for each step.

    name: name of the layer.
    rows: its logged rows.

    If there are more than `MAX_COLUMNS` steps, each column adds up neighbouring steps.
    """
    last = rows[-1].tokens_per_expert
    rows = [row for row in rows if len(row.tokens_per_expert) == len(last)]
    starts = np.arange(0, len(rows), -(-len(rows) // MAX_COLUMNS))
    steps = np.add.reduceat([row.step for row in rows], starts) / np.diff([*starts, len(rows)])
    summed = np.add.reduceat([row.tokens_per_expert for row in rows], starts)
    with np.errstate(invalid="ignore"):
        ratios = (summed / summed.mean(1, keepdims=True)).T
    note = ""
    if sum(last):
        busiest = last.index(max(last))
        idle = last.count(0)
        share = charts.format_share(last[busiest] / sum(last))
        note = f"At step {rows[-1].step:,}: expert {busiest} has {share} of {sum(last):,} rows"
        note += f"; {idle} of {len(last)} experts have none." if idle else ", and every expert has some."
    return charts.heat_map(name, steps.tolist(), ratios, "expert", note)


# ---- choices and communication


def _choices(history: History) -> list[list[str]]:
    """Returns the lines of a table of settings: for each layer and range of steps, code, n, restore pair.

    n is the number of chunks; the restore pair says how backward got the dispatched rows (T_DI) and the
    hidden activation (T_M): kept, offloaded, sent or computed again. Layers with the same settings at all
    steps share their lines.
    """
    names_of: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for name, rows in history.by_layer.items():
        names_of.setdefault(tuple(stretches(rows)), []).append(name)
    lines = []
    for ranges, names in names_of.items():
        shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names)} layers)"
        left_out = len(ranges) - MAX_STRETCHES
        shown += f" (after {left_out} changes)" if left_out > 0 else ""
        lines += [[shown if i == 0 else "", *cells] for i, cells in enumerate(ranges[-MAX_STRETCHES:])]
    return lines


def _communication(history: History) -> list[str]:
    """Returns charts of the time that layers communicate; an empty list if nothing was sent between ranks."""
    names = ("something travels", "and nothing is computed")
    curves = dict(zip(names, map(history.seconds_by_step, COMMUNICATION), strict=True))
    if not any(curves[names[0]].values):
        return []
    note = (
        "Both passes of all layers; means over the ranks. Of a layer that a step calls several times, only "
        "the last call is in it; the exchange of row counts is not."
    )
    options: dict[str, Any] = {"floor": 0, "show": charts.format_seconds}
    drawn = [charts.line_chart("Communication of a step", curves, note=note, is_filled=True, **options)]
    for direction in files.PASSES:
        title, field = f"Exposed communication, {direction}", f"{direction}_exposed"
        drawn += _by_layer(history, title, field, **options)
    return drawn


# ---- memory


def _tensors(history: History) -> list[tuple[str, list[int]]]:
    """Returns the data of a bar chart of memory: (layer's name, bytes of each tensor in `TENSORS`).

    The bytes are those of rank 0 at the last logged step.
    """
    rows = [(name, row) for name, row in history.latest.items() if row.T_I_bytes is not None]
    return [(name, [getattr(row, f"{tensor}_bytes") or 0 for tensor in files.TENSORS]) for name, row in rows]


def _predicted(history: History) -> list[list[str]]:
    """Returns the lines of a table of predicted memory: name, restore pair and bytes of each layer.

    The restore pair says how backward gets the dispatched rows (T_DI) and the hidden activation (T_M): kept,
    offloaded, sent or computed again. The bytes are the fields in `PREDICTED`.
    """
    return [
        [
            name,
            row.restore or "kept",
            *(charts.format_bytes(getattr(row, f"{field}_bytes")) for field in files.PREDICTED),
        ]
        for name, row in history.latest.items()
        if row.peak_bytes is not None
    ]


# ---- scalars and settings


def _losses(history: History) -> list[str]:
    """Returns charts of all losses of the run.

    A chart has as many lines as the theme has colours; further losses get another chart.
    """
    named = list(history.losses.items())
    groups = [named[i : i + len(SERIES)] for i in range(0, len(named), len(SERIES))]
    return [charts.line_chart("Loss", dict(group), max_points=SMOOTHED) for group in groups]


def _others(history: History) -> list[str]:
    """Returns a chart for each scalar that no other part of the page shows."""
    shown = (*history.losses, files.TIME, files.POOL_PEAK, files.HOST_POOL_PEAK)
    others = {
        name: curve
        for name, curve in history.run.scalars.items()
        if name not in shown and not name.startswith("moe/")
    }
    return [charts.line_chart(name, {name: curve}) for name, curve in others.items()]


def _as_built(run: files.Run) -> tuple[dict[str, Any], list[list[str]]]:
    """Returns the options with which layers were built: those that all share, and a table of the others.

    The first row of the table is its header.
    """
    layers = run.sessions[-1].get("layers") or [] if run.sessions else []
    names = list(layers[0]) if layers else []
    alike = {
        name: layers[0][name] for name in names[1:] if len({str(layer.get(name)) for layer in layers}) == 1
    }
    differ = [name for name in names if name not in alike]
    return alike, [differ, *([str(layer.get(name)) for name in differ] for layer in layers)]
