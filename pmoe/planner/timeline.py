"""The timeline: draws when each task ran, measured above predicted, and writes Chrome traces.

It reads spans only: anything with direction, name, kind, chunk, lane, start and end (seconds).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from pmoe.planner.simulator import Simulated
from pmoe.schedule.tasks import Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ON_COLOUR = "#101010"
"""Text on a coloured mark: dark on dark pages, too."""


class TimedTask(Protocol):
    """What the timeline reads of a span."""

    @property
    def direction(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def chunk(self) -> int: ...
    @property
    def lane(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One task on the drawing: seconds from the start of the step.

    share, base: the part of the lane's height that it takes, and what lies below it, where a lane is many
    blocks of a device, of which some work on this."""

    direction: str
    name: str
    kind: str
    chunk: int
    lane: str
    start: float
    end: float
    share: float = 1.0
    base: float = 0.0


def bars(spans: Iterable[TimedTask], origin: float | None = None) -> list[Bar]:
    """Spans as bars from time 0 (or ``origin``), each starting when its lane was free.

    A communication span begins when it is issued; the time until the message before it has ended is
    waiting, not sending.
    """
    spans = sorted(spans, key=lambda span: span.start)
    if origin is None:
        origin = min((span.start for span in spans), default=0.0)
    free: dict[str, float] = {}
    drawn = []
    for span in spans:
        start = min(max(span.start, free.get(span.lane, span.start)), span.end)
        free[span.lane] = span.end
        drawn.append(
            Bar(
                direction=span.direction,
                name=span.name,
                kind=str(getattr(span.kind, "value", span.kind)),
                chunk=span.chunk,
                lane=str(getattr(span.lane, "value", span.lane)),
                start=start - origin,
                end=span.end - origin,
            )
        )
    return drawn


def simulated_bars(direction: str, simulated: Iterable[Simulated[Task]], origin: float = 0.0) -> list[Bar]:
    """A simulated pass that begins at ``origin`` seconds, as bars."""
    return [
        Bar(
            direction=direction,
            name=each.task.name,
            kind=each.task.kind.value,
            chunk=each.task.chunk,
            lane=each.task.lane.value,
            start=origin + each.start,
            end=origin + each.end,
        )
        for each in simulated
    ]


COLOURS: Mapping[str, str] = {
    "S": "#4477aa",
    "R": "#66ccee",
    "P": "#bbbbbb",
    "L": "#228833",
    "C": "#ccbb44",
    "E": "#bbaa66",
    "LW": "#99ddaa",
    "W": "#eedd99",
    "G": "#aa3377",
    "O": "#ee6677",
    "SI": "#88aacc",
    "GI": "#cc88aa",
    "M": "#ddaa33",
    "LM": "#117733",
    "AG": "#332288",
    "RS": "#88ccee",
    "AGI": "#6655aa",
    "PG": "#dddddd",
    "X": "#44aa99",
    "XW": "#99ddcc",
    "GAR": "#882255",
    **dict.fromkeys(("HA", "HB", "HAI"), "#999933"),
    **dict.fromkeys(("DI", "LDI", "HI", "LHI"), "#994455"),
    **dict.fromkeys(("DM", "LDM", "HM", "LHM"), "#ee99aa"),
}
"""One colour a kind of task, distinguishable without colour vision (after Paul Tol's schemes). The lane says
whether a copy goes out or in."""

MEANING: Mapping[str, str] = {
    "S": "S dispatch",
    "R": "R combine",
    "P": "P routing weights",
    "L": "L experts, rows that stay",
    "C": "C experts, received rows",
    "E": "E experts, columns of all rows",
    "LW": "LW weight gradients, rows that stay",
    "W": "W weight gradients, received rows",
    "G": "G gather",
    "O": "O output",
    "SI": "SI dispatch again",
    "GI": "GI gather again",
    "M": "M hidden recomputed",
    "LM": "LM hidden recomputed, rows that stay",
    "AG": "AG gather inside the node",
    "RS": "RS sum inside the node",
    "AGI": "AGI gather again",
    "PG": "PG routing weights inside the node",
    "X": "X shared expert",
    "XW": "XW its weight gradients",
    "GAR": "GAR other layers' gradients",
    "HA": "HA, HB callbacks",
    "DI": "DI, HI copies of T_DI",
    "DM": "DM, HM copies of T_M",
}

SHARED: Mapping[str, str] = (
    dict.fromkeys(("LDI", "HI", "LHI"), "DI")
    | dict.fromkeys(("LDM", "HM", "LHM"), "DM")
    | dict.fromkeys(("HB", "HAI"), "HA")
)
"""Kinds that share another's line in the legend."""


LANES = ("communicate", "intra-node", "compute", "copy out", "copy in")
"""From the top. Copies are shown where there are any."""

FUSED_LANES = ("link", "communicating blocks", "computing blocks")
"""Those of a fused kernel (`pmoe.papers.comet_bars.busy_bars`), from the top."""


def draw(path: str | Path | IO[bytes], panels: Mapping[str, Sequence[Bar]], title: str) -> None:
    """Draws `drawing` as a PNG. Needs matplotlib."""
    drawing(panels, title).savefig(path, dpi=130)


def drawing(panels: Mapping[str, Sequence[Bar]], title: str) -> Figure:
    """One panel a key, lanes as rows, all on one time axis. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # a lane of many blocks is higher: its parts lie above each other
    inches = [0.9 + (0.8 if _fused(each) else 0.4) * len(_lanes(each)) for each in panels.values()]
    figure = Figure(figsize=(13, 1.2 + sum(inches)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=inches)
    kinds: dict[str, None] = {}
    for axis, (name, content) in zip(axes[:, 0], panels.items(), strict=True):
        _draw_panel(axis, name, content)
        shown = [bar for bar in content if bar.end > bar.start]
        kinds.update(dict.fromkeys(SHARED.get(bar.kind, bar.kind) for bar in shown))
    axes[-1, 0].set_xlabel("milliseconds")
    handles = [Patch(color=COLOURS[kind], label=MEANING[kind]) for kind in MEANING if kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


def _fused(content: Sequence[Bar]) -> bool:
    return any(bar.lane in FUSED_LANES for bar in content)


def _lanes(content: Sequence[Bar]) -> list[str]:
    if _fused(content):
        return list(FUSED_LANES)
    used = {"communicate", "compute", *(bar.lane for bar in content)}
    return [lane for lane in LANES if lane in used]


def _draw_panel(axis: Axes, name: str, content: Sequence[Bar]) -> None:
    lanes = _lanes(content)
    total = max((bar.end for bar in content), default=1.0)
    for bar in content:
        row = len(lanes) - 1 - lanes.index(bar.lane)
        width = bar.end - bar.start
        # parts of shares have many edges: they are told apart by shade, not by lines
        middle = row + 0.8 * (bar.base + bar.share / 2 - 0.5)
        axis.barh(
            middle,
            width * 1e3,
            left=bar.start * 1e3,
            height=0.8 * bar.share,
            color=COLOURS[bar.kind],
            alpha=0.65 if bar.lane in FUSED_LANES and bar.chunk % 2 else 1.0,
            edgecolor="white",
            lw=0.0 if bar.lane in FUSED_LANES else 0.5,
        )
        if bar.share > 0.2 and width > (0.002 + 0.005 * len(bar.name)) * total:
            centre = (bar.start + width / 2) * 1e3
            axis.text(centre, middle, bar.name, ha="center", va="center", fontsize=7, color=ON_COLOUR)
    backward = [bar.start for bar in content if bar.direction == "backward"]
    if backward:
        axis.axvline(min(backward) * 1e3, color="black", lw=0.8, ls=":")
        axis.text(min(backward) * 1e3, len(lanes) - 0.55, " backward", fontsize=8, va="bottom")
    axis.set_yticks(range(len(lanes)), reversed(lanes))
    axis.set_ylim(-0.5, len(lanes) - 0.25)
    axis.set_title(f"{name}: {total * 1e3:.{0 if total >= 0.1 else 2}f} ms", loc="left", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def chrome_trace(path: str | Path, panels: Mapping[str, Sequence[Bar]]) -> None:
    """The same as a Chrome trace (about:tracing, Perfetto): a process a panel, a thread a lane."""
    events: list[dict[str, Any]] = []
    for panel, content in panels.items():
        for bar in content:
            events.append(
                {
                    "name": bar.name,
                    "cat": bar.direction,
                    "ph": "X",
                    "ts": bar.start * 1e6,
                    "dur": (bar.end - bar.start) * 1e6,
                    "pid": panel,
                    "tid": bar.lane,
                    "args": {"kind": bar.kind, "chunk": bar.chunk},
                }
            )
    Path(path).write_text(json.dumps({"traceEvents": events}))
