"""The flags' protocol of cuda/comet as programs of a few events each, for `ptx_model`.

Sense and scope of an instruction are read from the kernels' own headers (`instruction`). `Litmus.calls` names
the calls of the sources in the order of a program; a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tests.cuda.compiled import CUDA
from tests.cuda.ptx_model import Event, Execution, Program, Thread

OPCODES = {"ld": "R", "st": "W"}
SEMS = {"R": "acquire", "W": "release"}


@cache
def instruction(function: str) -> tuple[str, str, str]:
    """(opcode, sense, scope) of the one instruction of a function, as ("st", "release", "sys")."""
    text = (CUDA / "common" / "device_ptx.cuh").read_text()
    body = re.split(rf"\b{function}\(uint32_t|\b{function}\(const uint32_t", text)[1].split("\n}\n")[0]
    found = re.search(r'"(ld|st|atom)\.(\w+)\.(\w+)\.', body)
    assert found, f"{function}: no instruction of a sense and a scope"
    opcode, sem, scope = found.groups()
    return opcode, sem, scope


def call(function: str, place: str, thread: Thread) -> list[Event]:
    """An atomic one is a read and a write."""
    opcode, sem, scope = instruction(function)
    kinds = ["R", "W"] if opcode == "atom" else [OPCODES[opcode]]
    by = f"{function} {place} {thread.name}"
    told = {kind: SEMS[kind] if sem in (SEMS[kind], "acq_rel") else sem for kind in kinds}
    return [_event(kind, place, thread, sem=told[kind], scope=scope, by=by) for kind in kinds]


def _event(kind: str, place: str, thread: Thread, **more: Any) -> Event:
    return Event(kind=kind, place=place, thread=thread, **more)  # type: ignore[arg-type]


def read(place: str, thread: Thread, **more: Any) -> list[Event]:
    return [_event("R", place, thread, **more)]


def write(place: str, thread: Thread, **more: Any) -> list[Event]:
    return [_event("W", place, thread, **more)]


def sync(name: str, *threads: Thread) -> list[Event]:
    return [_event("B", name, thread) for thread in threads]


def fence(thread: Thread) -> list[Event]:
    """Of the asynchronous proxy."""
    return [_event("F", "", thread)]


@dataclass(frozen=True)
class Litmus:
    """is_bad: of an execution, by what each read has seen: read(place, thread name) -> the writer or None.

    calls: functions of the sources ("comet/dispatch.cuh", "send_rows"), and what each calls in this order.
    redundant: changes that the model does not need, by their name, and why.
    """

    name: str
    events: Sequence[Event]
    is_bad: Callable[[Callable[[str, str], str | None]], bool]
    calls: Mapping[tuple[str, str], Sequence[str]]
    redundant: Mapping[str, str]

    def bad_executions(self, events: Sequence[Event] | None = None) -> Iterator[Execution]:
        program = Program(self.events if events is None else events)
        for execution in program.executions():
            if self.is_bad(_observer(program, execution)):
                yield execution

    def weakened(self) -> Iterator[tuple[str, list[Event]]]:
        """(name, the program with one thing less): each sense and each scope, each meeting and each fence."""
        for by in dict.fromkeys(e.by for e in self.events if e.by):
            mine = [e for e in self.events if e.by == by]
            for sem in dict.fromkeys(e.sem for e in mine if e.sem not in ("weak", "relaxed")):
                change = {e: replace(e, sem="relaxed") for e in mine if e.sem == sem}
                yield f"{by}: no {sem}", [change.get(e, e) for e in self.events]
            wide = {"sys": "gpu", "gpu": "cta"}.get(mine[0].scope)
            if wide:
                change = {e: replace(e, scope=wide) for e in mine}
                yield f"{by}: scope {wide}", [change.get(e, e) for e in self.events]
        for name in dict.fromkeys(e.place for e in self.events if e.kind == "B"):
            yield f"no {name}", [e for e in self.events if (e.kind, e.place) != ("B", name)]
        for i, each in enumerate(self.events):
            if each.kind == "F":
                before = sum(e.kind == "F" and e.thread == each.thread for e in self.events[:i])
                rest = [e for j, e in enumerate(self.events) if j != i]
                yield f"no fence {before} of {each.thread.name}", rest


def _observer(program: Program, execution: Execution) -> Callable[[str, str], str | None]:
    def seen(place: str, thread: str) -> str | None:
        """Who wrote what the thread's last read of the place has seen."""
        reads = [
            i for i in program.of("R", place) if program.events[i].thread.name == thread
        ]  # fmt: skip
        source = execution.observed[reads[-1]]
        return None if source is None else program.events[source].thread.name

    return seen


def lanes(gpu: int, block: int, *names: str) -> list[Thread]:
    return [Thread(name=name, block=block, gpu=gpu) for name in names]


SIGNAL, AWAIT = "store_release_system", "load_acquire_system"
PROTOCOL = {
    ("peers/protocol.h", "signal"): [SIGNAL],
    ("peers/protocol.h", "await"): [AWAIT],
}


def rows_arrive() -> Litmus:
    """Rows that a warp has written elsewhere, read by the accelerator there: of two sources, one a lane."""
    a0, a1 = lanes(0, 0, "a0", "a1")
    (b0,) = lanes(1, 1, "b0")
    c0, c1 = lanes(2, 2, "c0", "c1")
    return Litmus(
        "rows arrive",
        [
            *write("row 0", a0), *write("row 1", a1), *sync("warp a", a0, a1), *call(SIGNAL, "flag a", a0),
            *write("row 2", b0), *call(SIGNAL, "flag b", b0),
            *call(AWAIT, "flag a", c0), *call(AWAIT, "flag b", c1), *fence(c0), *fence(c1),
            *sync("warp c", c0, c1), *fence(c0),
            *(each for i in range(3) for each in read(f"row {i}", c0, proxy="async")),
        ],
        lambda seen: seen("flag a", "c0") == "a0" and seen("flag b", "c1") == "b0"
        and None in [seen(f"row {i}", "c0") for i in range(3)],
        PROTOCOL | {
            ("comet/dispatch.cuh", "send_rows"): ["finish", "sync_warp", "signal"],
            ("comet/dispatch.cuh", "finish"): ["copy_row"],
            ("comet/hopper.cuh", "load_as_rows_arrive"): [
                "await_rows", "fence_proxy_async_global", "sync_warp", "fence_proxy_async_global",
                "load_tile",
            ],
        },
        {
            "no fence 0 of c0": "the fence behind the meeting is on the way from every lane's acquire",
            "no fence 0 of c1": "the same",
            "no fence 1 of c0": "each lane's own fence is on the way, too",
        },
    )  # fmt: skip


def rows_arrive_with_one_fence() -> Litmus:
    """As above, by what the model needs: the one fence behind the meeting."""
    whole = rows_arrive()
    fences = [i for i, e in enumerate(whole.events) if e.kind == "F"]
    events = [e for i, e in enumerate(whole.events) if i not in fences[:2]]
    return replace(whole, name="rows arrive, one fence", events=events, redundant={})


def inbox_is_granted() -> Litmus:
    """A rank has read its rows, in a kernel before; it says where next ones go, and they may come."""
    before, g0, g1 = lanes(0, 0, "before", "g0", "g1")
    s0, s1 = lanes(1, 1, "s0", "s1")
    return Litmus(
        "the inbox is granted",
        [
            *read("row", before), *sync("kernels of g", before, g0, g1),
            *write("grant 0", g0), *write("grant 1", g1), *sync("block g", g0, g1),
            *call(SIGNAL, "granted", g0),
            *call(AWAIT, "granted", s0), *sync("warp s", s0, s1),
            *read("grant 0", s1), *read("grant 1", s1), *write("row", s1),
        ],
        lambda seen: seen("granted", "s0") == "g0"
        and (None in (seen("grant 0", "s1"), seen("grant 1", "s1")) or seen("row", "before") == "s1"),
        PROTOCOL | {
            ("comet/dispatch.cuh", "grant"): ["write", "sync", "signal"],
            ("comet/dispatch.cuh", "send_rows"): ["await", "sync_warp", "read", "begin", "finish"],
        },
        {},
    )  # fmt: skip


def bulk_rows_arrive() -> Litmus:
    """Rows that one lane has sent by bulk copies, and what another lane has written of them: the wait for
    the copies is a fence of their proxy (PTX ISA, "Async proxy")."""
    a0, a1 = lanes(0, 0, "a0", "a1")
    (c0,) = lanes(1, 1, "c0")
    return Litmus(
        "rows arrive by bulk copies",
        [
            *write("row", a0, proxy="async"), *fence(a0), *write("link", a1), *sync("warp a", a0, a1),
            *call(SIGNAL, "flag a", a0),
            *call(AWAIT, "flag a", c0), *fence(c0), *read("row", c0, proxy="async"), *read("link", c0),
        ],
        lambda seen: seen("flag a", "c0") == "a0" and None in (seen("row", "c0"), seen("link", "c0")),
        PROTOCOL | {
            ("comet/dispatch.cuh", "send_rows"): ["finish", "sync_warp", "signal"],
            ("comet/bulk.cuh", "finish"): ["bulk_store", "bulk_commit", "bulk_wait"],
        },
        {},
    )  # fmt: skip


def inbox_is_granted_to_bulk_copies() -> Litmus:
    """As above, and the row comes by a bulk copy of the lane that has awaited the grant."""
    before, g0 = lanes(0, 0, "before", "g0")
    (s0,) = lanes(1, 1, "s0")
    return Litmus(
        "the inbox is granted to bulk copies",
        [
            *read("row", before), *sync("kernels of g", before, g0), *write("grant", g0),
            *call(SIGNAL, "granted", g0),
            *call(AWAIT, "granted", s0), *read("grant", s0), *fence(s0), *write("row", s0, proxy="async"),
        ],
        lambda seen: seen("granted", "s0") == "g0"
        and (seen("grant", "s0") is None or seen("row", "before") == "s0"),
        PROTOCOL | {
            ("comet/dispatch.cuh", "send_rows"): ["await", "sync_warp", "read", "begin", "finish"],
            ("comet/bulk.cuh", "begin"): ["fence_proxy_async_global", "load"],
        },
        {},
    )  # fmt: skip


def tiles_are_done() -> Litmus:
    """Two computing blocks have stored a tile each; a communicating warp sends their rows."""
    a0, a1 = lanes(0, 0, "a0", "a1")
    (b0,) = lanes(0, 1, "b0")
    c0, c1 = lanes(0, 2, "c0", "c1")
    return Litmus(
        "tiles are done",
        [
            *write("sum 0", a0), *write("sum 1", a1), *sync("block a", a0, a1),
            *call("add_acq_rel", "done", a0),
            *write("sum 2", b0), *call("add_acq_rel", "done", b0),
            *call("load_acquire", "done", c0), *sync("warp c", c0, c1),
            *(each for i in range(3) for each in read(f"sum {i}", c1)),
        ],
        lambda seen: seen("done", "c0") == "b0" and seen("done", "b0") == "a0"
        and None in [seen(f"sum {i}", "c1") for i in range(3)],
        {
            ("comet/combine.cuh", "tile_done"): ["add_acq_rel"],
            ("comet/combine.cuh", "await_done"): ["load_acquire"],
            ("comet/combine.cuh", "send_chunk"): ["await_done", "sync_warp", "send_sums"],
        },
        {
            "add_acq_rel done a0: no acquire": "the first to add waits for nobody",
            "add_acq_rel done b0: no acquire": "additions pass on what they follow: a release sequence",
        },
    )  # fmt: skip


def chunk_returns() -> Litmus:
    """Two warps have written sums into another rank's heap; the last of them tells it."""
    a0, a1 = lanes(0, 0, "a0", "a1")
    b0, b1 = lanes(0, 1, "b0", "b1")
    h0, h1 = lanes(1, 2, "h0", "h1")
    return Litmus(
        "a chunk returns",
        [
            *write("home 0", a0), *write("home 1", a1), *sync("warp a", a0, a1),
            *call("add_acq_rel", "sent", a0),
            *write("home 2", b1), *sync("warp b", b0, b1), *call("add_acq_rel", "sent", b0),
            *call(SIGNAL, "returned", b0),
            *call(AWAIT, "returned", h0), *sync("warp h", h0, h1),
            *(each for i in range(3) for each in read(f"home {i}", h1)),
        ],
        lambda seen: seen("returned", "h0") == "b0" and seen("sent", "b0") == "a0"
        and None in [seen(f"home {i}", "h1") for i in range(3)],
        PROTOCOL | {
            ("comet/combine.cuh", "chunk_sent"): ["sync_warp", "add_acq_rel", "signal"],
            ("comet/combine.cuh", "await_returns"): ["await", "sync_warp"],
        },
        {
            "add_acq_rel sent a0: no acquire": "the first to add tells nobody",
            "add_acq_rel sent b0: no release": "the last to add tells by its signal",
        },
    )  # fmt: skip


def home_is_free() -> Litmus:
    """A rank has summed the rows that came home, in a kernel before. The writer of the next round has awaited
    this rank's rows, in a kernel before its own."""
    before, a0 = lanes(0, 0, "before", "a0")
    b0, late = lanes(1, 1, "b0", "late")
    return Litmus(
        "home is free",
        [
            *read("home", before), *sync("kernels of a", before, a0), *call(SIGNAL, "arrival", a0),
            *call(AWAIT, "arrival", b0), *sync("kernels of b", b0, late), *write("home", late),
        ],
        lambda seen: seen("arrival", "b0") == "a0" and seen("home", "before") == "late",
        PROTOCOL,
        {},
    )  # fmt: skip


def report_is_whole() -> Litmus:
    """Whoever fails first tells the host what it waited for."""
    (a,) = lanes(0, 0, "a")
    (host,) = lanes(1, 1, "host")
    return Litmus(
        "the report is whole",
        [*write("peer", a), *call(SIGNAL, "wait", a), *call(AWAIT, "wait", host), *read("peer", host)],
        lambda seen: seen("wait", "host") == "a" and seen("peer", "host") is None,
        {("peers/protocol.h", "report"): ["add_acq_rel", "write", SIGNAL]},
        {},
    )


def everything() -> list[Litmus]:
    return [
        rows_arrive(),
        rows_arrive_with_one_fence(),
        inbox_is_granted(),
        bulk_rows_arrive(),
        inbox_is_granted_to_bulk_copies(),
        tiles_are_done(),
        chunk_returns(),
        home_is_free(),
        report_is_whole(),
    ]
