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
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Kind, PassBuilder, Schedule, Stages, Task


def _turns(tasks: Sequence[Task], sizes: Mapping[str, int], homes: Sequence[str]) -> dict[str, str]:
    """The slot of each buffer: those of a ring take its slots in turn, as they are first written.

    sizes: slots by ring; buffers of a ring without any have memory of their own. A buffer's ring has its
    name, or its name without "_L" or "_again". homes: what comes home, of which rows that stay are a part.
    """
    used = Counter[str]()
    slots: dict[str, str] = {}
    for buffer in (*homes, *(buffer for task in tasks for buffer in task.writes)):
        name = buffer.rpartition(".")[0]
        ring = name if name in sizes else name.removesuffix("_L").removesuffix("_again")
        if buffer not in slots and sizes.get(ring):
            slots[buffer] = f"{ring}[{used[ring] % sizes[ring]}]"
            used[ring] += 1
    return slots


@functools.lru_cache(maxsize=256)
def rotating_forward(n: int, stages: Stages, *, restore: Restore | None) -> Schedule:
    """The forward pass through rings. restore=None keeps nothing (no backward will come).

    S of chunk i + 1 is issued before R of chunk i (Fig. 7a): two slots of T_DI allow no more.
    """
    tasks = PassBuilder("forward", n, stages)
    remote = stages.remote
    dispatched, hidden_fate = (None, None) if restore is None else (restore.dispatched, restore.hidden)
    of_fate: dict[str | None, int] = {"keep": 0, "offload": 2}  # else one
    sizes = {
        **dict.fromkeys(("send", "arrived", "T_DI", "T_DO", "leaving"), 2),
        **dict.fromkeys(("T_DI_sorted", "T_DI_L"), of_fate.get(dispatched, 1)),
        "T_M": of_fate.get(hidden_fate, 1),
        **({"T_M_L": 1} if hidden_fate == "offload" and remote else {}),
        **dict.fromkeys(("active", "T_DO_sorted", "copies", "parts"), 1),
        **dict.fromkeys(("home", "home_L"), 2 if remote else 1),
    }

    def compute(i: int, at: str) -> None:
        """L or C of a chunk, and D of what it leaves to be offloaded."""
        rows = [f"T_DI_L.{i}"] if at else [f"T_DI.{i}", f"T_DI_sorted.{i}"]
        hidden, active = f"T_M{at}.{i}", f"active{at}.{i}"
        if at:
            reads, writes = [f"T_I_L.{i}", "weight"], [*rows, hidden, active, f"home_L.{i}"]
        else:
            reads = [rows[0], "weight_DI"]
            writes = [rows[1], hidden, active, f"T_DO_sorted.{i}", f"T_DO.{i}"]
        tasks.add(Kind.LOCAL if at else Kind.COMPUTE, i, reads, writes)
        if dispatched == "offload":
            tasks.add(Kind.COPY_ROWS_OUT.at(at), i, rows, [f"host_T_DI{at}.{i}"])
        if hidden_fate == "offload":
            tasks.add(Kind.COPY_HIDDEN_OUT.at(at), i, [hidden], [f"host_T_M{at}.{i}"])

    if remote:
        tasks.dispatch(0)
        tasks.send_weights()
        tasks.dispatch(1)
    tasks.shared()
    tasks.open(0)
    for i, at in _units(range(n), stages):
        tasks.open(i + 1)
        compute(i, at)
        if not remote:
            tasks.output(i)
        elif not at:
            tasks.combine(i)
            tasks.close(i - 1)
            tasks.dispatch(i + 2)
            tasks.output(i - 1 - stages.hooked)
    tasks.close(n - 1)
    if remote:
        for i in range(n - 1 - stages.hooked, n):
            tasks.output(i)
    homes = [f"{home}.{i}" for i in range(n) for home in ("home", "home_L")]
    return tasks.finish(_turns(tasks.tasks, sizes, homes))


@functools.lru_cache(maxsize=256)
def rotating_backward(n: int, stages: Stages, *, restore: Restore, rearranged: bool = False) -> Schedule:
    """The backward pass through rings, with T_DI and T_M restored as ``restore`` says.

    rearranged: forward had another number of chunks, so what it kept is copied into slots chunk by chunk.
    Weight gradients follow their chunk at once: what they need is in slots that the next chunk takes.
    """
    tasks = PassBuilder("backward", n, stages)
    remote = stages.remote
    dispatched, hidden_fate = restore.dispatched, restore.hidden
    sends_again = dispatched == "communicate"
    sizes = {
        **dict.fromkeys(("send", "send_again", "arrived", "arrived_again", "leaving"), 2),
        **dict.fromkeys(("dT_DO", "T_DI", "dT_DI"), 2),
        **dict.fromkeys(("dT_DO_sorted", "T_DI_sorted", "dT_DI_sorted", "dT_DO_L"), 1),
        "T_DI_L": 2 if dispatched == "offload" else 1,
        "T_M": 2 if hidden_fate == "offload" else 1,
        **({"T_M_L": 1} if hidden_fate == "offload" and remote else {}),
        **dict.fromkeys(("dT_M", "active", "scratch", "copies", "parts"), 1),
        **dict.fromkeys(("dhome", "dhome_L"), 2 if remote else 1),
    }
    chunks = range(n - 1, -1, -1)
    units = _units(chunks, stages)

    def dispatch(i: int) -> None:
        """The gradients of a chunk, and before them its T_DI, if sent again."""
        if sends_again:
            tasks.dispatch(i, again=True)
        tasks.dispatch(i)

    def unpack(i: int) -> None:
        """The callbacks of a chunk, and its AGs."""
        if sends_again:
            tasks.open(i, again=True)
        tasks.open(i)

    def fetch(i: int, at: str) -> None:
        """H of what forward offloaded of a unit."""
        if dispatched == "offload":
            tasks.add(Kind.COPY_ROWS_IN.at(at), i, [f"host_T_DI{at}.{i}"], [f"T_DI{at}.{i}"])
        if hidden_fate == "offload":
            tasks.add(Kind.COPY_HIDDEN_IN.at(at), i, [f"host_T_M{at}.{i}"], [f"T_M{at}.{i}"])

    def compute(i: int, at: str) -> None:
        """T_M made again, L or C with its R, and the weight gradients."""
        rows, hidden = [f"T_DI{at}.{i}"], f"T_M{at}.{i}"
        if not at and (sends_again or (dispatched == "keep" and not rearranged)):
            rows.append(f"T_DI_sorted.{i}")
        # T_DI as the chunk's first task makes it, of kept chunks, of what arrived, or of T_I
        arranged = rows[-1:] if sends_again or (dispatched == "keep" and rearranged) else []
        if hidden_fate == "recompute":
            given = [buffer for buffer in rows if buffer not in arranged]
            tasks.add(Kind.RECOMPUTE.at(at), i, given, [*arranged, hidden])
            arranged = []
        elif hidden_fate == "keep" and rearranged:
            arranged = [*arranged, hidden]
        work = [f"{name}{at}.{i}" for name in ("dT_M", "active", "scratch")]
        if at:
            grads, source, result = [f"dT_DO_L.{i}"], [f"dT_O_L.{i}"], [f"dhome_L.{i}"]
        else:
            grads, source = [f"dT_DO_sorted.{i}"], [f"dT_DO.{i}"]
            result = [f"dT_DI_sorted.{i}", f"dT_DI.{i}", f"dweight_DI.{i}"]
        reads = [buffer for buffer in (*source, *rows, hidden) if buffer not in arranged]
        if hidden_fate != "keep":  # the activated hidden takes its place
            arranged = [*arranged, hidden]
        tasks.add(Kind.LOCAL if at else Kind.COMPUTE, i, reads, [*arranged, *work, *grads, *result])
        if not at:
            tasks.combine(i)
        given = [*rows, hidden, *work[:2], *grads, *([] if at else source)]
        tasks.add(Kind.WGRAD.at(at), i, [*given, "dw"], ["dw"])

    if remote:
        dispatch(n - 1)
        dispatch(n - 2)
    tasks.shared()
    fetch(*units[0])
    unpack(n - 1)
    for place, (i, at) in enumerate(units):
        unpack(i - 1)
        for unit in units[place + 1 : place + 2]:
            fetch(*unit)
        compute(i, at)
        if not remote:
            tasks.output(i)
        elif not at:
            tasks.close(i + 1)
            dispatch(i - 2)
            tasks.output(i + 1 + stages.hooked)
            if i == 0:
                tasks.return_weights(chunks)
    tasks.close(0)
    if remote:
        for i in range(int(stages.hooked), -1, -1):
            tasks.output(i)
    homes = [f"{home}.{i}" for i in chunks for home in ("dhome", "dhome_L")]
    return tasks.finish(_turns(tasks.tasks, sizes, homes))


def rotating(
    direction: str, n: int, stages: Stages, *, restore: Restore | None, rearranged: bool = False
) -> Schedule:
    """The forward or the backward pass through rings. A backward has a ``restore``; a forward is the same
    whether its backward is ``rearranged`` or not."""
    if direction == "forward":
        return rotating_forward(n, stages, restore=restore)
    assert restore is not None
    return rotating_backward(n, stages, restore=restore, rearranged=rearranged)


def _units(chunks: Sequence[int], stages: Stages) -> list[tuple[int, str]]:
    """In which order the experts compute: (chunk, "_L" for its rows that stay, else ""). Rows that stay fill
    the time until their chunk arrives; the last chunk's cover its R."""
    units = []
    for i in chunks:
        unit = [(i, "_L")] * stages.local + [(i, "")] * stages.remote
        units += unit[::-1] if i == chunks[-1] else unit
    return units
