"""The page about a run: its sections, their order, and how much each shows.

A section without numbers is left out, or is one sentence: a run may have only losses, only one row, or layers
whose rows never travel. Long runs are thinned (`charts`); of many layers the later ones are folded away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pmoe.integrations.report.charts import (
    NONE,
    Line,
    format_bytes,
    format_number,
    format_seconds,
    format_share,
    line_chart,
)
from pmoe.integrations.report.history import COMMUNICATION, History, history_of
from pmoe.integrations.report.layers import (
    choices,
    communication,
    grid,
    load_charts,
    memory,
    with_rest_folded,
)
from pmoe.integrations.run_folder import HOST_POOL_PEAK, POOL_PEAK, TIME, Run
from pmoe.planner.drawing import SERIES, page, part

SMOOTHED = 100
"""Points of a loss: means between the least and the greatest of their neighbours show where it goes."""


def run_page(run: Run) -> str:
    """The page as HTML that needs no other file. Raises ImportError without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"matplotlib draws the charts (pip install 'pmoe[report]'): {error}") from None
    history = history_of(run)
    sections = {
        "Loss": _losses(history),
        "Load of the experts": load_charts(history),
        "Chosen n and restore pair": choices(history),
        "Communication": communication(history),
        "Memory": memory(history),
        "Other numbers": _others(history),
        "Settings and versions": _settings(run),
    }
    parts = [part("section", title, parts) for title, parts in sections.items() if parts]
    return page(f"pmoe report: {run.folder.resolve().name}", [_tiles(history), *parts], _lead(run))


# ---- the head


def _lead(run: Run) -> str:
    if not run.sessions:
        return "When and with what this ran is not known: there is no run.json."
    newest = run.sessions[-1]
    versions = newest.get("versions") or {}
    ranks = newest.get("ranks", 1)
    began = str(run.sessions[0].get("when", "")).replace("T", " ")[:16]
    again = len(run.sessions) - 1
    parts = [
        f"Began {began}" if began else "",
        f"went on {again} time{'s' * (again > 1)} since" if again else "",
        f"{ranks} rank{'s' * (ranks != 1)}",
        str(newest.get("device") or ""),
        f"pmoe {versions.get('pmoe')}, torch {versions.get('torch')}" if versions else "",
    ]
    return " · ".join(filter(None, parts))


def _tiles(history: History) -> str:
    """The numbers that people look for first, as far as there are any."""
    communication, exposed = map(history.median_seconds, COMMUNICATION)
    hidden = format_share(max(0.0, 1 - (exposed or 0) / communication)) if communication else NONE
    about = f"of communication a step; {hidden} is hidden"
    numbers = [
        ("time a step", history.seconds_per_step, format_seconds, "median"),
        ("imbalance", history.imbalance, format_number, "max / mean, the worst layer"),
        ("dropped rows", history.drop_rate, format_share, "of all layers"),
        ("exposed", exposed if communication else None, format_seconds, about),
        ("pool's peak", history.last(POOL_PEAK) or None, format_bytes, "ring slots of rank 0"),
    ]
    found = [(name, show(value), how) for name, value, show, how in numbers if value is not None]
    return part("tiles", [("steps", f"{history.last_step:,}", ""), *_loss_tile(history), *found])


def _loss_tile(history: History) -> list[tuple[str, str, str]]:
    if history.loss is None:
        return []
    name, last = history.loss[0], history.last_losses
    how = "last" if len(last) == 1 else f"mean of the last {len(last):,}"
    return [(name, format_number(sum(last) / len(last)) if last else NONE, how)]


# ---- scalars


def _losses(history: History) -> list[str]:
    lines = [
        Line(name=name, xs=curve.steps, ys=curve.values, max_points=SMOOTHED)
        for name, curve in history.losses.items()
    ]
    groups = [lines[i : i + len(SERIES)] for i in range(0, len(lines), len(SERIES))]
    return [grid([line_chart("Loss", group) for group in groups])] if lines else []


def _others(history: History) -> list[str]:
    charts = [
        line_chart(name, [Line(name=name, xs=curve.steps, ys=curve.values)])
        for name, curve in history.run.scalars.items()
        if name not in (*history.losses, TIME, POOL_PEAK, HOST_POOL_PEAK)
    ]
    return with_rest_folded(charts, 12, "other numbers", grid)


# ---- settings


def _settings(run: Run) -> list[str]:
    if not run.sessions:
        return []
    newest = run.sessions[-1]
    known = {name: newest.get(name) for name in ("when", "ranks", "backend", "device", "parameters")}
    panels = {"Run": known | (newest.get("versions") or {}), "Settings": newest.get("settings") or {}}
    pairs = [part("pairs", title, named) for title, named in panels.items() if named]
    layers = newest.get("layers") or []
    return [grid(pairs), *(_layers_as_built(layers) if layers else [])]


def _layers_as_built(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Options that all layers have in common in a sentence, the others in a table."""
    header = list(layers[0])
    same = [name for name in header[1:] if len({str(each.get(name)) for each in layers}) == 1]
    common = ", ".join(f"{name} = {layers[0][name]}" for name in same)
    parts = [f"MoE layers: {len(layers)}; {common}."]
    differ = [name for name in header if name not in same]
    if len(differ) > 1:
        lines = [[str(each.get(name)) for name in differ] for each in layers]
        parts.append(part("folded", f"{len(lines)} layers", [part("table", differ, lines, words=1)]))
    return parts
