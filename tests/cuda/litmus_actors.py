"""Programs of a few events each: the messages between the actors of cuda/flashdmoe (see `litmus`)."""

from __future__ import annotations

from tests.cuda.litmus import AWAIT, SIGNAL, Litmus, call, fence, lanes, read, sync, write

RAISED = {
    ("peers/protocol.h", "signal"): [SIGNAL],
    ("flashdmoe/subscriber.h", "is_raised"): [AWAIT],
}
ONE_DEVICE = "both threads are of one device"
IN_OTHER_BLOCKS = "a subscriber is in the scheduler's block; processors, which push tasks too, are not"


def task_is_handed_out() -> Litmus:
    """A tile has arrived from another rank. A subscriber puts its task into the queue, one lane of the
    scheduler sees it, another one writes it into a mailbox, and a processor reads task and rows."""
    (source,) = lanes(1, 3, "source")
    (subscriber,) = lanes(0, 0, "subscriber")
    s0, s1 = lanes(0, 0, "s0", "s1")
    p0, p1 = lanes(0, 1, "p0", "p1")
    return Litmus(
        "a task is handed out",
        [
            *write("row", source), *call(SIGNAL, "arrival", source),
            *call(AWAIT, "arrival", subscriber), *write("task", subscriber),
            *call("store_release", "ready", subscriber),
            *call("load_acquire", "ready", s0), *sync("scheduler", s0, s1),
            *call("store_release", "mailbox", s1),
            *call("load_acquire", "mailbox", p0), *read("task", p0), *sync("processor", p0, p1),
            *read("row", p1), *fence(p0), *read("row", p0, proxy="async"),
        ],
        lambda seen: seen("arrival", "subscriber") == "source" and seen("ready", "s0") == "subscriber"
        and seen("mailbox", "p0") == "s1"
        and None in (seen("task", "p0"), seen("row", "p1"), seen("row", "p0")),
        RAISED | {
            ("flashdmoe/queue.h", "push"): ["store16", "store_release"],
            ("flashdmoe/scheduler.h", "find_ready"): ["load_acquire", "shfl", "sync_warp"],
            ("flashdmoe/scheduler.h", "hand_out"): ["ballot", "store_release"],
            ("flashdmoe/processor.cuh", "next_task"): ["load_relaxed", "load_acquire", "load_acquire"],
            ("flashdmoe/processor.cuh", "run_processor"): ["next_task", "sync", "work", "current_task"],
            ("flashdmoe/hopper.cuh", "load"): ["sync_all", "fence_proxy_async_global", "load_tile"],
        },
        {
            "store_release ready subscriber: scope cta": IN_OTHER_BLOCKS,
            "load_acquire ready s0: scope cta": IN_OTHER_BLOCKS,
        },
    )  # fmt: skip


def tile_is_complete() -> Litmus:
    """Two processors have each computed a tile of the same rows.

    The last one puts the next product into the queue, or notifies the rank that the rows came from.
    """
    a0, a1 = lanes(0, 1, "a0", "a1")
    (b0,) = lanes(0, 2, "b0")
    (home,) = lanes(1, 3, "home")
    return Litmus(
        "a tile is complete",
        [
            *write("part 0", a1), *sync("block a", a0, a1), *call("add_acq_rel", "finished", a0),
            *write("part 1", b0), *call("add_acq_rel", "finished", b0), *call(SIGNAL, "returned", b0),
            *call(AWAIT, "returned", home), *read("part 0", home), *read("part 1", home),
        ],
        lambda seen: seen("returned", "home") == "b0" and seen("finished", "b0") == "a0"
        and None in (seen("part 0", "home"), seen("part 1", "home")),
        RAISED | {
            ("flashdmoe/processor.cuh", "run_processor"): ["work", "sync", "end_task"],
            ("flashdmoe/processor.cuh", "is_last"): ["add_acq_rel"],
            ("flashdmoe/processor.cuh", "end_task"): ["is_last", "signal"],
        },
        {
            "add_acq_rel finished a0: no acquire": "the first to add tells nobody",
            "add_acq_rel finished b0: no release": "the last to add tells by its signal",
        },
    )  # fmt: skip


def room_is_granted() -> Litmus:
    """A source tells how many rows come. A subscriber of their rank writes where they go, here and into the
    source's heap; another one of its rank and one of the source's read it. In the round before the source has
    read the same place."""
    before, s0, s1 = lanes(1, 1, "before", "s0", "s1")
    g0, g1 = lanes(0, 0, "g0", "g1")
    return Litmus(
        "room is granted",
        [
            *read("sent offset", before), *sync("kernels of s", before, s0, s1),
            *write("count", s0), *call(SIGNAL, "announced", s0),
            *call(AWAIT, "announced", g0), *read("count", g0),
            *write("offset", g0), *write("sent offset", g0),
            *call(SIGNAL, "known", g0), *call(SIGNAL, "placed", g0),
            *call(AWAIT, "known", g1), *read("count", g1), *read("offset", g1),
            *call(AWAIT, "placed", s1), *read("sent offset", s1),
        ],
        lambda seen: seen("announced", "g0") == "s0"
        and (
            seen("count", "g0") is None or seen("sent offset", "before") == "g0"
            or (seen("known", "g1") == "g0" and None in (seen("count", "g1"), seen("offset", "g1")))
            or (seen("placed", "s1") == "g0" and seen("sent offset", "s1") is None)
        ),
        RAISED | {
            ("flashdmoe/subscriber.h", "announce_counts"): ["is_raised", "announce"],
            ("flashdmoe/places.cuh", "announce"): ["write", "write", "signal"],
            ("flashdmoe/subscriber.h", "grant"): ["is_raised", "grant_room"],
            ("flashdmoe/subscriber.h", "push_arrived_tiles"): ["is_known", "read", "offset_of"],
            ("flashdmoe/subscriber.h", "send"): ["is_raised", "push"],
            ("flashdmoe/places.cuh", "grant_room"): ["write", "write", "signal", "signal"],
        },
        {
            f"{SIGNAL} known g0: scope gpu": ONE_DEVICE,
            f"{AWAIT} known g1: scope gpu": ONE_DEVICE,
        },
    )  # fmt: skip


def actors() -> list[Litmus]:
    return [task_is_handed_out(), tile_is_complete(), room_is_granted()]
