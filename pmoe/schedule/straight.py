"""The old name of `pmoe.schedule.separate_buffers`, kept for one release."""

from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.warn import warn_of_old_name

__all__ = ["backward_schedule", "forward_schedule"]

warn_of_old_name("pmoe.schedule.straight", "pmoe.schedule.separate_buffers")
