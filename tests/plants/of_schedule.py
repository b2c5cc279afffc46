"""Mistakes in schedules: orders of tasks, what they wait for, and ring slots."""

from __future__ import annotations

from tests.levels import MAKE_TEST
from tests.plants.plant import Plant

LEVEL = MAKE_TEST

SCHEDULE = (
    Plant(
        name="link-forgets-readers",
        breaks="a task that overwrites a slot does not wait for those that read it",
        file="pmoe/schedule/tasks.py",
        old="waits += [reader for b in writes for reader in readers.get(b, ())]",
        new="waits += []",
        tests="tests/unit/test_schedule.py",
    ),
    Plant(
        name="link-takes-any-slot",
        breaks="a buffer may be read whose slot holds another",
        file="pmoe/schedule/tasks.py",
        old="            if holds.get(slots.get(b, b), b) != b:",
        new="            if holds.get(b, b) != b:",
        tests="tests/unit/test_schedule.py",
    ),
    Plant(
        name="piece-of-chunk",
        breaks="rows that stay are looked for in the piece of another chunk",
        file="pmoe/schedule/tasks.py",
        old="    return max(chunk - (n - m), 0)",
        new="    return min(chunk, m - 1)",
        tests="tests/unit/test_schedule.py",
    ),
    Plant(
        name="gradients-behind-first-dispatch",
        breaks="other layers' gradients travel before the dispatches of this one",
        file="pmoe/schedule/tasks.py",
        old="last = max((at for at, task in enumerate(tasks)",
        new="last = min((at for at, task in enumerate(tasks)",
        tests="tests/unit/test_schedule.py",
    ),
    Plant(
        name="local-rows-all-first",
        breaks="no rows are left to compute while the last combine is on its way",
        file="pmoe/schedule/separate_buffers.py",
        old="    early = m - 1 if remote and m > 1 else m\n",
        new="    early = m\n",
        tests="tests/unit/test_schedule.py",
    ),
    Plant(
        name="sequential-drops-waits",
        breaks="the sequential schedule waits for the task before and for nothing else",
        file="pmoe/schedule/tasks.py",
        old="        waits = (*task.waits, chained[-1].name) if chained else task.waits\n",
        new="        waits = (chained[-1].name,) if chained else ()\n",
        tests="tests/unit/test_schedule.py",
    ),
    Plant(
        name="hidden-ring-of-one",
        breaks="a chunk overwrites T_M while the one before is copied to the host",
        file="pmoe/schedule/ring_buffers.py",
        old='        "T_M": of_fate.get(hidden_fate, 1),\n',
        new='        "T_M": min(of_fate.get(hidden_fate, 1), 1),\n',
        tests="tests/unit/test_reuse_schedule.py",
    ),
    Plant(
        name="ring-slot-taken-twice",
        breaks="two buffers in turn get the same slot of a ring",
        file="pmoe/schedule/ring_buffers.py",
        old="            used[ring] += 1\n",
        new="            used[ring] += 2\n",
        tests="tests/unit/test_reuse_schedule.py",
    ),
    Plant(
        name="last-chunk-local-first",
        breaks="the last chunk's rows that stay do not cover its combine",
        file="pmoe/schedule/ring_buffers.py",
        old="        units += unit[::-1] if i == chunks[-1] else unit\n",
        new="        units += unit\n",
        tests="tests/unit/test_reuse_schedule.py",
    ),
    Plant(
        name="backward-from-the-first-chunk",
        breaks="backward restores chunks in forward's order",
        file="pmoe/schedule/ring_buffers.py",
        old="    chunks = range(n - 1, -1, -1)\n",
        new="    chunks = range(n)\n",
        tests="tests/unit/test_reuse_schedule.py",
    ),
    Plant(
        name="slots-rounded-down",
        breaks="slots are smaller than their buffers, and overlap",
        file="pmoe/schedule/buffer_sizes.py",
        old="    spans = {slot: -(-elements // step) * step for",
        new="    spans = {slot: elements // step * step for",
        tests="tests/unit/test_reuse.py",
    ),
    Plant(
        name="slot-of-the-last-buffer",
        breaks="a slot is as large as the last of its buffers, not as the largest",
        file="pmoe/schedule/buffer_sizes.py",
        old="largest[slot] = max(largest.get(slot, 0), rows[chunk] * columns)\n",
        new="largest[slot] = rows[chunk] * columns\n",
        tests="tests/unit/test_reuse.py",
    ),
    Plant(
        name="strategies-swapped",
        breaks="S2 is another pair than the paper's",
        file="pmoe/schedule/restore.py",
        old='    "S2": Restore("communicate", "offload"),\n',
        new='    "S2": Restore("offload", "keep"),\n',
        tests="tests/unit/test_restore.py",
    ),
)
