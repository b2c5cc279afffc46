"""The timeline: draws when each task of a pass ran, the measured times above the predicted times."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pmoe.planner.simulator import Simulated
from pmoe.schedule.tasks import Lane, Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ON_COLOUR = "#101010"
"""Colour of text on a coloured bar. It stays dark on dark pages, because bars keep their colours."""

TEXT_SIZE = 12.5
"""Size of text in points, for drawings that are 10 inches wide.

In the documentation such text is at least 12 pixels high. On phones it is too, because drawings are scrolled
rather than shrunk.
"""


@dataclass(frozen=True, kw_only=True)
class Span:
    """The time from start to end of one task, measured or predicted.

    direction: "forward" or "backward".
    name: name of the task.
    kind: what the task does: a `Kind` of a schedule's task, or its text.
    chunk: number of the micro-batch; -1 if the task serves all chunks.
    lane: the queue that ran the task, such as a CUDA stream: a `Lane` of a schedule, or its text.
    start, end: times in seconds. All tasks of a recording use one clock. In a drawing, 0 is the left edge.
    share, base: height and position of the bar in its lane, as fractions of the lane's height. The bar is
        ``share`` high and starts ``base`` above the lane's bottom. A lane of a fused kernel stands for many
        thread blocks, and a bar is as high as the fraction of blocks that work on its task.
    """

    direction: str
    name: str
    kind: str
    chunk: int
    lane: str
    start: float
    end: float
    share: float = 1.0
    base: float = 0.0


def bars(spans: Iterable[Span]) -> list[Span]:
    """Returns measured spans as bars of a drawing that starts at 0 seconds.

    A lane is a queue of tasks. A message may be issued while an earlier message of its lane is still being
    sent. The measured span of the later message then includes the time in which the message waits. The bar
    leaves this time out: it starts when the earlier message has ended.
    """
    spans = sorted(spans, key=lambda span: span.start)
    origin = min((span.start for span in spans), default=0.0)
    free: dict[str, float] = {}
    drawn = []
    for span in spans:
        start = min(max(span.start, free.get(span.lane, span.start)), span.end)
        free[span.lane] = span.end
        drawn.append(_bar(span.direction, span, start - origin, span.end - origin))
    return drawn


def simulated_bars(direction: str, simulated: Iterable[Simulated[Task]], origin: float = 0.0) -> list[Span]:
    """Returns the tasks of a simulated pass as bars of a drawing.

    direction: "forward" or "backward".
    simulated: the tasks with their start and end.
    origin: seconds from the start of the drawing to the start of the pass.
    """
    return [_bar(direction, item.task, origin + item.start, origin + item.end) for item in simulated]


def _bar(direction: str, task: Span | Task, start: float, end: float) -> Span:
    kind, lane = (str(getattr(value, "value", value)) for value in (task.kind, task.lane))
    return Span(
        direction=direction, name=task.name, kind=kind, chunk=task.chunk, lane=lane, start=start, end=end
    )


PICTURES: Mapping[str, Any] = json.loads(
    files("pmoe.planner").joinpath("pictures.json").read_text(encoding="utf-8")
)
"""Contents of pictures.json.

"theme" has the colours of pages, "legend" has the colours and words of timelines.
"""

LEGEND: Mapping[str, tuple[str, str]] = PICTURES["legend"]
"""Maps each kind of task to its colour and its meaning.

The colours can be told apart without colour vision (after Paul Tol's schemes). Copies out and copies in have
the same colour, because they are on different lanes.
"""

SHARED: Mapping[str, str] = (
    dict.fromkeys(("LDI", "HI", "LHI"), "DI")
    | dict.fromkeys(("LDM", "HM", "LHM"), "DM")
    | dict.fromkeys(("HB", "HAI"), "HA")
    | {"VR": "V", "VGR": "VG", "LKW": "KW"}
)
"""Maps kinds of tasks without an entry in the legend to the kind that has their colour and meaning."""

HATCHES = ("", "////", "....", "xxxx", "----", "||||", "++++", "oo", "\\\\\\\\", "**")
"""Fill patterns for kinds of tasks with bars that are too small for their names. The first is a solid bar."""

LANES = ("communicate", "intra-node", "compute", "copy out", "copy in")
"""The lanes of a drawing, from top to bottom.

The lanes of copies, and of messages inside a node, are drawn only if they have tasks.
"""

FUSED_LANES = ("link", "communicating blocks", "computing blocks", "subscriber", "scheduler", "processors")
"""Lanes of fused kernels from top to bottom: three of COMET's kernels, then three of FlashDMoE's kernel.

`pmoe.papers.comet_figures.busy_bars` makes their bars.
"""


def draw(path: str | Path | IO[bytes], panels: Mapping[str, Sequence[Span]], title: str) -> None:
    """Draws timelines, one panel for each key, and writes them as a PNG. Needs matplotlib.

    path: where to write the image.
    panels: bars of each panel, by the panel's name.
    title: text above the drawing.
    """
    drawing(panels, title).savefig(path, dpi=130)


def drawing(panels: Mapping[str, Sequence[Span]], title: str) -> Figure:
    """Returns a figure with one timeline below another, on one time axis. Needs matplotlib.

    panels: bars of each timeline, by its name. Lanes are the rows of a timeline.
    title: text above the figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # A lane that stands for many blocks is drawn higher, because it has several bars above each other.
    inches = [0.9 + (0.8 if _fused(spans) else 0.4) * len(_lanes(spans)) for spans in panels.values()]
    figure = Figure(figsize=(10, 1.6 + sum(inches)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=inches)
    all_bars = [bar for content in panels.values() for bar in content]
    longest = max((bar.end for bar in all_bars), default=1.0)
    hatches = _hatches(all_bars, longest)
    for axis, (name, content) in zip(axes[:, 0], panels.items(), strict=True):
        _draw_panel(axis, name, content, longest, hatches)
    kinds = {SHARED.get(bar.kind, bar.kind) for bar in all_bars if bar.end > bar.start}
    axes[-1, 0].set_xlabel("milliseconds", size=TEXT_SIZE)
    handles = [
        Patch(facecolor=colour, edgecolor="white", lw=0, hatch=hatches.get(kind, ""), label=meaning)
        for kind, (colour, meaning) in LEGEND.items()
        if kind in kinds
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=TEXT_SIZE)
    figure.suptitle(title, fontsize=TEXT_SIZE)
    return figure


def _fused(content: Sequence[Span]) -> bool:
    """Whether the spans are those of a fused kernel."""
    return any(bar.lane in FUSED_LANES for bar in content)


def _lanes(content: Sequence[Span]) -> list[str]:
    """Returns the lanes to draw, from top to bottom. Lanes of single ranks come last, in order of name."""
    used = {bar.lane for bar in content}
    if _fused(content):
        return [lane for lane in FUSED_LANES if lane in used]
    of_ranks = sorted(used - set(LANES))
    if of_ranks:
        return [*(lane for lane in LANES if lane in used), *of_ranks]
    return [lane for lane in LANES if lane in used | {"communicate", "compute"}]


def _has_room(bar: Span, longest: float) -> bool:
    """Whether a bar is wide and high enough for its name.

    longest: end in seconds of the figure's last span.
    """
    return bar.share > 0.2 and bar.end - bar.start > (0.003 + 0.0125 * len(bar.name)) * longest


def _hatches(spans: Sequence[Span], longest: float) -> dict[str, str]:
    """Returns a fill pattern for each kind of task that has a bar too small for its name.

    The pattern is for readers who cannot tell the colours apart. Bars of a fused kernel have no pattern,
    because they are too many and too small.

    spans: the bars of the figure.
    longest: end in seconds of the figure's last span.
    """
    narrow = {
        SHARED.get(bar.kind, bar.kind)
        for bar in spans
        if bar.end > bar.start and bar.lane not in FUSED_LANES and not _has_room(bar, longest)
    }
    return dict(zip((kind for kind in LEGEND if kind in narrow), itertools.cycle(HATCHES), strict=False))


def _draw_panel(
    axis: Axes, name: str, content: Sequence[Span], longest: float, hatches: Mapping[str, str]
) -> None:
    """Draws one timeline: a bar for each span, and a dotted line where the backward pass starts.

    axis: the part of the figure to draw on.
    name: title of the timeline.
    content: the spans.
    longest: end in seconds of the figure's last span, so the width of the figure. A bar's name is written on
        the bar only if the bar is wide enough.
    hatches: maps a kind of task to the pattern of its bars, if some are too narrow for their names.
    """
    lanes = _lanes(content)
    total = max((bar.end for bar in content), default=1.0)
    for bar in content:
        row = len(lanes) - 1 - lanes.index(bar.lane)
        kind, is_named = SHARED.get(bar.kind, bar.kind), _has_room(bar, longest)
        width = bar.end - bar.start
        # Bars of a fused kernel have many edges. Shades separate them, because lines would hide the bars.
        middle = row + 0.8 * (bar.base + bar.share / 2 - 0.5)
        axis.barh(
            middle,
            width * 1e3,
            left=bar.start * 1e3,
            height=0.8 * bar.share,
            color=LEGEND[kind][0],
            hatch="" if is_named or bar.lane in FUSED_LANES else hatches.get(kind, ""),
            alpha=0.65 if bar.lane in FUSED_LANES and bar.chunk % 2 else 1.0,
            edgecolor="white",
            lw=0.0 if bar.lane in FUSED_LANES else 0.5,
        )
        if is_named:
            centre = (bar.start + width / 2) * 1e3
            axis.text(centre, middle, bar.name, ha="center", va="center", size=TEXT_SIZE, color=ON_COLOUR)
    backward = [bar.start for bar in content if bar.direction == "backward"]
    if backward:
        axis.axvline(min(backward) * 1e3, color="black", lw=0.8, ls=":")
        axis.text(min(backward) * 1e3, len(lanes) - 0.55, " backward", size=TEXT_SIZE, va="bottom")
    axis.set_yticks(range(len(lanes)), reversed(lanes))
    axis.set_ylim(-0.5, len(lanes))
    axis.set_title(f"{name}: {total * 1e3:.{0 if total >= 0.1 else 2}f} ms", loc="left", size=TEXT_SIZE)
    axis.tick_params(labelsize=TEXT_SIZE)
    axis.spines[["top", "right"]].set_visible(False)


# ---- overlap: how much communication hides behind computation


LINKS = (Lane.COMMUNICATE, Lane.INTRA_NODE)
"""Lanes of messages: between nodes, and inside a node."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Seconds of one pass, and how much of its communication no computation hides.

    seconds: from the start of the pass's first task to the end of its last task.
    communication: seconds in which at least one message is being sent.
    exposed: seconds in which a message is being sent while nothing is computed.

    The exchange of row counts before a forward pass is not included.
    """

    seconds: float
    communication: float
    exposed: float


def overlap(spans: Sequence[Span]) -> Overlap:
    """Returns how much of the communication in the spans of one pass is hidden by computation.

    Example: message S from 0 to 3 s, computation C from 2 to 6 s, message R from 5 to 8 s -> seconds 8,
    communication 6, exposed 4 (from 0 to 2 and from 6 to 8).
    """
    travel_times = [(span.start, span.end) for span in spans if span.lane in LINKS]
    compute_times = [(span.start, span.end) for span in spans if span.lane == Lane.COMPUTE]
    start = min((span.start for span in spans), default=0.0)
    return Overlap(
        seconds=max((span.end for span in spans), default=0.0) - start,
        communication=union_length(travel_times),
        # |travelling without computing| = |travelling or computing| - |computing|
        exposed=union_length([*travel_times, *compute_times]) - union_length(compute_times),
    )


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the total length that intervals cover. Parts where intervals overlap count once.

    intervals: (start, end) of each interval.

    Example: (0, 2), (1, 3), (5, 6) -> 4.
    """
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return sum((end - start for start, end in joined), 0.0)
