"""The page about a run: `report.html` has its sections and their texts; here are their numbers and charts.

Long runs are thinned (`charts`); of many layers the later ones are folded away.
"""

from __future__ import annotations

from typing import Any

from pmoe.integrations.report import charts, layers
from pmoe.integrations.report.history import History, history_of
from pmoe.integrations.run_folder import HOST_POOL_PEAK, POOL_PEAK, TENSORS, TIME, Run
from pmoe.planner.drawing import SERIES, template

SMOOTHED = 100
"""Points of a loss: means between the least and the greatest of their neighbours show where it goes."""


def run_page(run: Run) -> str:
    """The page as HTML that needs no other file. Raises ImportError without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"matplotlib draws the charts (pip install 'pmoe[report]'): {error}") from None
    history = history_of(run)
    made = template("integrations/report/report.html").render(
        title=f"pmoe report: {run.folder.resolve().name}",
        run=run,
        history=history,
        losses=_losses(history),
        load=layers.load_charts(history),
        heat_maps=layers.heat_maps(history),
        choices=layers.choices(history),
        communication=layers.communication(history),
        tensors=layers.tensors(history),
        predicted=layers.predicted(history),
        others=_others(history),
        layers=_as_built(run),
        device_peak=history.last(POOL_PEAK),
        host_peak=history.last(HOST_POOL_PEAK),
        charts=charts,
        keys=list(zip(TENSORS, SERIES, strict=False)),
        max_maps=layers.MAX_SHOWN,
    )
    return made.strip() + "\n"


def _losses(history: History) -> list[str]:
    lines = [
        charts.Line(name=name, xs=curve.steps, ys=curve.values, max_points=SMOOTHED)
        for name, curve in history.losses.items()
    ]
    groups = [lines[i : i + len(SERIES)] for i in range(0, len(lines), len(SERIES))]
    return [charts.line_chart("Loss", group) for group in groups]


def _others(history: History) -> list[str]:
    return [
        charts.line_chart(name, [charts.Line(name=name, xs=curve.steps, ys=curve.values)])
        for name, curve in history.run.scalars.items()
        if name not in (*history.losses, TIME, POOL_PEAK, HOST_POOL_PEAK)
    ]


def _as_built(run: Run) -> tuple[dict[str, Any], list[list[str]]]:
    """Options that all layers have in common, and a table of the others, its header first."""
    layers = run.sessions[-1].get("layers") or [] if run.sessions else []
    names = list(layers[0]) if layers else []
    alike = {
        name: layers[0][name] for name in names[1:] if len({str(each.get(name)) for each in layers}) == 1
    }
    differ = [name for name in names if name not in alike]
    return alike, [differ, *([str(each.get(name)) for name in differ] for each in layers)]
