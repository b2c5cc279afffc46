"""The old name of `pmoe.engine.lanes.recorder`: importing it works for one more release, with a warning."""

from pmoe.engine.lanes.recorder import Journal, recording
from pmoe.planner.timeline import Span
from pmoe.warn import warn_of_old_name

__all__ = ["Journal", "Span", "recording"]

warn_of_old_name("pmoe.engine.recording", "pmoe.engine.lanes.recorder")
