"""Timelines as Chrome traces, beside their drawings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pmoe.planner.timeline import Span


def chrome_trace(path: str | Path, panels: Mapping[str, Sequence[Span]]) -> None:
    """The bars as a Chrome trace (about:tracing, Perfetto): a process a panel, a thread a lane."""
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
