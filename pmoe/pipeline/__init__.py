"""The pipeline: how a layer runs. Schedules are data; the engine runs them on the lanes of a device."""

from pmoe.pipeline.engine import Journal, Span, recording
from pmoe.pipeline.schedule import (
    Kind,
    Lane,
    Schedule,
    Stages,
    Task,
    backward_schedule,
    forward_schedule,
    sequential,
)

__all__ = [
    "Journal",
    "Kind",
    "Lane",
    "Schedule",
    "Stages",
    "Span",
    "Task",
    "backward_schedule",
    "forward_schedule",
    "recording",
    "sequential",
]
