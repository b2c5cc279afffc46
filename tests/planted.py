"""Mistakes planted in the library, which tests on the CPU and on a GPU must find."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from pmoe.schedule import ring_buffers, tasks
from pmoe.schedule.tasks import Task, link


def _link_without_slots(linked: list[Task], slots: dict[str, str]) -> tuple[Task, ...]:
    return link(linked)


@contextlib.contextmanager
def rings_reused_early() -> Iterator[None]:
    """Schedules whose waits know no slots; none that was built before, or is built here, is kept."""
    builders = (ring_buffers.rotating_forward, ring_buffers.rotating_backward)
    for builder in builders:
        builder.cache_clear()
    with mock.patch.object(tasks, "link", _link_without_slots):
        yield
    for builder in builders:
        builder.cache_clear()
