"""What a schedule holds at once, from the lifetimes of its buffers: how MPipeMoE's Eq. 2-6 count.

A buffer lives from the first task that writes it to the last that reads or writes it, in list order; buffers
of one slot are one memory, which lives from the first of them to the last. What a task only reads and what it
only writes are both held while it runs. A layer's own bytes are `pmoe.planner.memory`'s, whose slots live for
the whole pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Storing(Protocol):
    """A task, as far as lifetimes depend on it."""

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def writes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a pass holds.

    peak_bytes: the most at once, be it before a task, within one or after it.
    during: by task in list order, the bytes of each memory (a slot, or a buffer that has none) while it runs.
    after: the same once everything that the task was the last to use is given back.
    """

    peak_bytes: int
    during: tuple[dict[str, int], ...]
    after: tuple[dict[str, int], ...]


def held(
    tasks: Iterable[Storing],
    bytes_of: Callable[[str], int],
    slots: Mapping[str, str] | None = None,
    *,
    before: Iterable[str] = (),
    after: Iterable[str] = (),
) -> Held:
    """The lifetimes of all buffers that ``tasks`` read and write, and the bytes that follow from them.

    bytes_of: from a buffer's name. slots: buffer -> the slot that it lies in; a slot is as large as the
    largest of its buffers. before: buffers that exist when the pass starts, whether or not it uses them.
    after: those that must outlive it.

    Example: A writes x (2 bytes), B reads x and writes y (3 bytes), y must outlive them -> peak 5,
    after A {x: 2}, after B {y: 3}.

    Raises ValueError for a task that reads what is neither there before the pass nor written by an earlier
    task, and for a buffer that should outlive the pass and never exists.
    """
    tasks, slots = list(tasks), slots or {}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    size: dict[str, int] = {}
    exists: set[str] = set()

    def use(buffer: str, at: int) -> None:
        memory = slots.get(buffer, buffer)
        exists.add(buffer)
        size[memory] = max(size.get(memory, 0), bytes_of(buffer))
        first.setdefault(memory, at)
        last[memory] = at

    for buffer in before:
        use(buffer, -1)
    for at, task in enumerate(tasks):
        for buffer in task.reads:
            if buffer not in exists:
                raise ValueError(f"task {task.name} reads {buffer}, which no task before it writes")
        for buffer in (*task.reads, *task.writes):
            use(buffer, at)
    for buffer in after:
        if buffer not in exists:
            raise ValueError(f"after: {buffer} must be there before the pass or written by a task")
        use(buffer, len(tasks))

    def living(begin: int, end: int) -> dict[str, int]:
        """First used by ``begin``, and last used at ``end`` or later."""
        return {m: size[m] for m in size if first[m] <= begin and last[m] >= end}

    during = tuple(living(at, at) for at in range(len(tasks)))
    left = tuple(living(at, at + 1) for at in range(len(tasks)))
    peak = max(sum(memories.values()) for memories in (living(-1, -1), *during))
    return Held(peak_bytes=peak, during=during, after=left)
