"""Schedules as pure data: tasks, lanes, links, builders, ring slots, restore pairs. No torch here."""

from pmoe.schedule.tasks import (
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
    "Kind",
    "Lane",
    "Schedule",
    "Stages",
    "Task",
    "backward_schedule",
    "forward_schedule",
    "sequential",
]
