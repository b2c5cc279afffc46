"""Schedules that reuse memory: MPipeMoE's ring buffers (section III.D, Fig. 6), restored tensors (Fig. 7b-e).

T_DI and T_DO rotate through two slots each, T_M through one, or two where it is offloaded; gradients and the
staging of what travels likewise. A slot is written again only after its last reader: `link` sees to that, for
it looks at slots where buffers have them. Rows that stay are cut like those that travel, so that a chunk's
rows are together.

Where T_M is offloaded, rows that stay have a slot of their own for it. They take turns with rows that travel,
so of two slots for both the rows that travel would always get the same one, and none of their copies could
run beside their own computing.

Forward with S3 (offload/recompute), n = 3, rows that travel and rows that stay (a column is no clock tick):

    communicate  . S0 P . S1 . . . R0 . S2 . . R1 . . R2
    compute      G0 . . G1 . L0 . C0 . G2 . L1 C1 . O0 C2 . O1 L2 O2
    copy out     . . . . . . LDI0 . DI0 . . LDI1 . DI1 . DI2 . . LDI2

Backward goes from the last chunk to the first: what was written last is read first, and chunk i - 1 is
fetched (H, or S again) while chunk i computes.

Letters: n chunks; T_DI, T_M, T_DO as in MPipeMoE.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import (
    Kind,
    Schedule,
    Stages,
    Task,
    check_degree,
    close_tasks,
    combine_tasks,
    dispatch_tasks,
    finished,
    make_task,
    open_tasks,
    return_weights,
    send_weights,
    shared_backward,
    with_gradients,
)


class _Rings:
    """Which slot each buffer lies in: the buffers of a ring take its slots in turn."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes, self._used = sizes, Counter[str]()
        self.slots: dict[str, str] = {}

    def put(self, ring: str, buffer: str) -> None:
        self.slots[buffer] = f"{ring}[{self._used[ring] % self._sizes[ring]}]"
        self._used[ring] += 1


@functools.lru_cache(maxsize=256)
def rotating_forward(n: int, stages: Stages, *, restore: Restore | None) -> Schedule:
    """The forward pass through rings. restore=None keeps nothing (no backward will come).

    S of chunk i + 1 is issued before R of chunk i (Fig. 7a): two slots of T_DI allow no more.
    """
    check_degree(n)
    local, remote = stages.local, stages.remote
    offloads_rows = restore is not None and restore.dispatched == "offload"
    offloads_hidden = restore is not None and restore.hidden == "offload"
    keeps_rows = restore is not None and restore.dispatched == "keep"
    keeps_hidden = restore is not None and restore.hidden == "keep"
    rings = _Rings(
        {
            **dict.fromkeys(("send", "arrived", "T_DI", "T_DO", "leaving"), 2),
            **dict.fromkeys(("T_DI_sorted", "T_DI_L"), 2 if offloads_rows else 1),
            "T_M": 2 if offloads_hidden else 1,
            **dict.fromkeys(("T_M_L", "active", "T_DO_sorted", "copies", "parts"), 1),
            **dict.fromkeys(("home", "home_L"), 2 if remote else 1),
        }
    )
    hidden_L = "T_M_L" if offloads_hidden and remote else "T_M"
    tasks: list[Task] = []

    def dispatch(i: int) -> None:
        if i < n:
            rings.put("send", f"send.{i}")
            if stages.sharded:
                rings.put("arrived", f"arrived.{i}")
                rings.put("copies", f"copies.{i}")
            rings.put("T_DI", f"T_DI.{i}")
            tasks.extend(dispatch_tasks(i, stages, "T_I", "T_DI"))

    def compute(i: int, at: str) -> None:
        """L or C of a chunk, and D of what it leaves to be offloaded."""
        rows = [f"T_DI_L.{i}"] if at else [f"T_DI.{i}", f"T_DI_sorted.{i}"]
        hidden, active = f"T_M{at}.{i}", f"active{at}.{i}"
        if not keeps_rows:
            rings.put("T_DI_L" if at else "T_DI_sorted", rows[-1])
        if not keeps_hidden:
            rings.put(hidden_L if at else "T_M", hidden)
        rings.put("active", active)
        if at:
            reads, writes = [f"T_I_L.{i}", "weight"], [*rows, hidden, active, f"home_L.{i}"]
        else:
            rings.put("T_DO_sorted", f"T_DO_sorted.{i}")
            rings.put("T_DO", f"T_DO.{i}")
            reads = [rows[0], "weight_DI"]
            writes = [rows[1], hidden, active, f"T_DO_sorted.{i}", f"T_DO.{i}"]
        tasks.append(make_task(Kind.LOCAL if at else Kind.COMPUTE, i, reads, writes))
        if offloads_rows:
            kind = Kind.LOCAL_COPY_ROWS_OUT if at else Kind.COPY_ROWS_OUT
            tasks.append(make_task(kind, i, rows, [f"host_T_DI{at}.{i}"]))
        if offloads_hidden:
            kind = Kind.LOCAL_COPY_HIDDEN_OUT if at else Kind.COPY_HIDDEN_OUT
            tasks.append(make_task(kind, i, [hidden], [f"host_T_M{at}.{i}"]))

    for i in range(n):
        rings.put("home", f"home.{i}")
        rings.put("home_L", f"home_L.{i}")
    if remote:
        dispatch(0)
        tasks += send_weights(stages)
        dispatch(1)
    if stages.shared:
        tasks.append(make_task(Kind.SHARED, -1, ["T_I"], ["T_S"]))
    if stages.hooked:
        tasks += open_tasks(0, "T_DI")
    for i, at in _units(range(n), local, remote):
        if stages.hooked and i + 1 < n:
            tasks += open_tasks(i + 1, "T_DI")
        compute(i, at)
        if not remote:
            tasks.append(_output("T_O", i, stages))
        elif not at:
            if stages.sharded:
                rings.put("leaving", f"leaving.{i}")
                rings.put("parts", f"parts.{i}")
            tasks += combine_tasks(i, stages, "T_DO", "home")
            if stages.hooked and i > 0:
                tasks += close_tasks(i - 1, "home")
            dispatch(i + 2)
            done = i - 1 - stages.hooked
            if done >= 0:
                tasks.append(_output("T_O", done, stages))
    if stages.hooked:
        tasks += close_tasks(n - 1, "home")
        tasks += [_output("T_O", n - 2, stages)] if n > 1 else []
    if remote:
        tasks.append(_output("T_O", n - 1, stages))
    return finished("forward", tasks, stages, rings.slots)


@functools.lru_cache(maxsize=256)
def rotating_backward(n: int, stages: Stages, *, restore: Restore, rearranged: bool = False) -> Schedule:
    """The backward pass through rings, with T_DI and T_M restored as ``restore`` says.

    rearranged: forward had another number of chunks, so what it kept is copied into slots chunk by chunk.
    Weight gradients follow their chunk at once: what they need is in slots that the next chunk takes.
    """
    check_degree(n)
    local, remote = stages.local, stages.remote
    dispatched, hidden_fate = restore.dispatched, restore.hidden
    rings = _Rings(
        {
            **dict.fromkeys(("send", "send_again", "arrived", "arrived_again", "leaving"), 2),
            **dict.fromkeys(("dT_DO", "T_DI", "dT_DI"), 2),
            **dict.fromkeys(("dT_DO_sorted", "T_DI_sorted", "dT_DI_sorted", "dT_DO_L"), 1),
            "T_DI_L": 2 if dispatched == "offload" else 1,
            "T_M": 2 if hidden_fate == "offload" else 1,
            **dict.fromkeys(("T_M_L", "dT_M", "active", "scratch", "copies", "parts"), 1),
            **dict.fromkeys(("dhome", "dhome_L"), 2 if remote else 1),
        }
    )
    hidden_L = "T_M_L" if hidden_fate == "offload" and remote else "T_M"
    chunks = range(n - 1, -1, -1)
    units = _units(chunks, local, remote)
    tasks: list[Task] = []

    def dispatch(place: int) -> None:
        """The chunk at that place of the order: its gradients, and before them its T_DI, if sent again."""
        if place >= n:
            return
        i = chunks[place]
        if dispatched == "communicate":
            rings.put("send_again", f"send_again.{i}")
            if stages.sharded:
                rings.put("arrived_again", f"arrived_again.{i}")
                rings.put("copies", f"copies_again.{i}")
            rings.put("T_DI", f"T_DI.{i}")
            tasks.extend(dispatch_tasks(i, stages, "T_I", "T_DI", again=True))
        rings.put("send", f"send.{i}")
        if stages.sharded:
            rings.put("arrived", f"arrived.{i}")
            rings.put("copies", f"copies.{i}")
        rings.put("dT_DO", f"dT_DO.{i}")
        tasks.extend(dispatch_tasks(i, stages, "dT_O", "dT_DO"))

    def unpack(place: int) -> None:
        """The callbacks of the chunk at that place, and its AGs."""
        if stages.hooked and place < n:
            if dispatched == "communicate":
                tasks.extend(open_tasks(chunks[place], "T_DI", again=True))
            tasks.extend(open_tasks(chunks[place], "dT_DO"))

    def fetch(i: int, at: str) -> None:
        """H of what forward offloaded of a unit."""
        if dispatched == "offload":
            rings.put("T_DI" + at, f"T_DI{at}.{i}")
            kind = Kind.LOCAL_COPY_ROWS_IN if at else Kind.COPY_ROWS_IN
            tasks.append(make_task(kind, i, [f"host_T_DI{at}.{i}"], [f"T_DI{at}.{i}"]))
        if hidden_fate == "offload":
            rings.put(hidden_L if at else "T_M", f"T_M{at}.{i}")
            kind = Kind.LOCAL_COPY_HIDDEN_IN if at else Kind.COPY_HIDDEN_IN
            tasks.append(make_task(kind, i, [f"host_T_M{at}.{i}"], [f"T_M{at}.{i}"]))

    def compute(i: int, at: str) -> None:
        """T_M made again, L or C with its R, and the weight gradients."""
        rows, hidden = [f"T_DI{at}.{i}"], f"T_M{at}.{i}"
        if not at and (dispatched == "communicate" or (dispatched == "keep" and not rearranged)):
            rows.append(f"T_DI_sorted.{i}")
        arranged = []  # T_DI as the chunk's first task makes it, of kept chunks, of what arrived, or of T_I
        if dispatched == "communicate":
            arranged = rows[-1:]
            rings.put("T_DI_L" if at else "T_DI_sorted", rows[-1])
        elif dispatched == "keep" and rearranged:
            arranged = rows
            rings.put("T_DI" + at, rows[0])
        if hidden_fate == "recompute" or (hidden_fate == "keep" and rearranged):
            rings.put("T_M", hidden)
        if hidden_fate == "recompute":
            given = [buffer for buffer in rows if buffer not in arranged]
            kind = Kind.LOCAL_RECOMPUTE if at else Kind.RECOMPUTE
            tasks.append(make_task(kind, i, given, [*arranged, hidden]))
            arranged = []
        elif hidden_fate == "keep" and rearranged:
            arranged = [*arranged, hidden]
        work = [f"{name}{at}.{i}" for name in ("dT_M", "active", "scratch")]
        for buffer, ring in zip(work, ("dT_M", "active", "scratch"), strict=True):
            rings.put(ring, buffer)
        if at:
            rings.put("dT_DO_L", f"dT_DO_L.{i}")
            grads, source, result = [f"dT_DO_L.{i}"], [f"dT_O_L.{i}"], [f"dhome_L.{i}"]
        else:
            for ring in ("dT_DO_sorted", "dT_DI_sorted", "dT_DI"):
                rings.put(ring, f"{ring}.{i}")
            grads, source = [f"dT_DO_sorted.{i}"], [f"dT_DO.{i}"]
            result = [f"dT_DI_sorted.{i}", f"dT_DI.{i}", f"dweight_DI.{i}"]
        reads = [buffer for buffer in (*source, *rows, hidden) if buffer not in arranged]
        if hidden in rings.slots:  # the activated hidden takes its place
            arranged = [*arranged, hidden] if hidden not in arranged else arranged
        kind, weight_kind = (Kind.LOCAL, Kind.LOCAL_WGRAD) if at else (Kind.COMPUTE, Kind.WGRAD)
        tasks.append(make_task(kind, i, reads, [*arranged, *work, *grads, *result]))
        if not at:
            if stages.sharded:
                rings.put("leaving", f"leaving.{i}")
                rings.put("parts", f"parts.{i}")
            tasks.extend(combine_tasks(i, stages, "dT_DI", "dhome"))
        given = [*rows, hidden, *work[:2], *grads, *([] if at else source)]
        tasks.append(make_task(weight_kind, i, [*given, "dw"], ["dw"]))

    for i in chunks:
        rings.put("dhome", f"dhome.{i}")
        rings.put("dhome_L", f"dhome_L.{i}")
    if remote:
        dispatch(0)
        dispatch(1)
    if stages.shared:
        tasks += shared_backward()
    fetch(*units[0])
    unpack(0)
    for place, (i, at) in enumerate(units):
        if stages.hooked:
            unpack(place + 1)
        for unit in units[place + 1 : place + 2]:
            fetch(*unit)
        compute(i, at)
        if not remote:
            tasks.append(_output("dT_I", i, stages))
        elif not at:
            if stages.hooked and i < n - 1:
                tasks += close_tasks(i + 1, "dhome")
            dispatch(n - 1 - i + 2)
            done = i + 1 + stages.hooked
            if done < n:
                tasks.append(_output("dT_I", done, stages))
            if i == 0:
                tasks += return_weights(chunks, stages)
    if stages.hooked:
        tasks += close_tasks(0, "dhome")
        tasks += [_output("dT_I", 1, stages)] if n > 1 else []
    if remote:
        tasks.append(_output("dT_I", 0, stages))
    if stages.gradients:
        tasks = with_gradients(tasks)
    return finished("backward", tasks, stages, rings.slots)


def rotating(
    direction: str, n: int, stages: Stages, *, restore: Restore | None, rearranged: bool = False
) -> Schedule:
    """The forward or the backward pass through rings. A backward has a ``restore``; a forward is the same
    whether its backward is ``rearranged`` or not."""
    if direction == "forward":
        return rotating_forward(n, stages, restore=restore)
    assert restore is not None
    return rotating_backward(n, stages, restore=restore, rearranged=rearranged)


def _units(chunks: Sequence[int], local: bool, remote: bool) -> list[tuple[int, str]]:
    """In which order the experts compute: (chunk, "_L" for its rows that stay, else ""). Rows that stay fill
    the time until their chunk arrives; the last chunk's cover its R."""
    units = []
    for i in chunks:
        unit = [(i, "_L")] * local + [(i, "")] * remote
        units += unit[::-1] if i == chunks[-1] else unit
    return units


def _output(result: str, i: int, stages: Stages) -> Task:
    home, shared = ("dhome", "dT_S") if result == "dT_I" else ("home", "T_S")
    reads = [f"{home}_L.{i}"] * stages.local + [f"{home}.{i}"] * stages.remote + [shared] * stages.shared
    return make_task(Kind.OUTPUT, i, reads, [f"{result}.{i}"])
