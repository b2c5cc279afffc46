"""Writes and reads timelines as Chrome traces, beside their drawings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pmoe.planner.timeline import Span


def chrome_trace(path: str | Path, panels: Mapping[str, Sequence[Span]]) -> None:
    """Writes a timeline as a Chrome trace, for about:tracing or Perfetto.

    Each panel becomes a process of the trace, each lane a thread.
    """
    events = [
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
        for panel, content in panels.items()
        for bar in content
    ]
    Path(path).write_text(json.dumps({"traceEvents": events}))


def read_trace(path: str | Path) -> dict[str, list[Span]]:
    """Returns the panels of a file that `chrome_trace` wrote."""
    panels: dict[str, list[Span]] = {}
    for event in json.loads(Path(path).read_text())["traceEvents"]:
        start = event["ts"] / 1e6
        bar = Span(
            direction=event["cat"],
            name=event["name"],
            **event["args"],
            lane=event["tid"],
            start=start,
            end=start + event["dur"] / 1e6,
        )
        panels.setdefault(event["pid"], []).append(bar)
    return panels
