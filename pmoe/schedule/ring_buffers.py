"""Schedules in which chunks take turns in ring slots (MPipeMoE, section III.D, Fig. 6 and Fig. 7b-e).

A ring is a small number of memory slots for the buffers of one name, in which chunks take turns. With two
slots, chunk 2 uses the slot that chunk 0 had before:

    buffer   T_DI.0    T_DI.1    T_DI.2    T_DI.3
    slot     T_DI[0]   T_DI[1]   T_DI[0]   T_DI[1]

T_DI and T_DO, the experts' input and output, have two slots each. The hidden activation T_M has one slot, two
if it is offloaded, and none if forward keeps it. Gradients and the buffers that are sent have rings, too. A
slot is written again only after its last reader has ended: `link` makes tasks wait for slots as it does for
buffers.

The experts compute two parts of each chunk one after the other: the rows that stay on this rank, because
their expert is on it, and the rows that other ranks sent. If T_M is offloaded, each part has its own slots
for T_M. If both parts took turns in two slots, rows from other ranks would always get the same slot. Copying
them to the host could then not run while the next of these rows are computed.

Forward with S3 (T_DI offloaded, T_M recomputed), n = 3, rows that are sent and rows that stay. Columns show
the order, not the time. The name of a task is one of these letters and the index of its chunk:

    G    copies rows to the send buffer              S    dispatch all-to-all
    L    experts on rows that stay                   C    experts on rows that other ranks sent
    R    combine all-to-all                          O    sums the results of each token
    LDI  copies T_DI of rows that stay to the host   DI   copies T_DI of the other rows to the host
    P    sends the routing weights of all chunks

    communicate  . S0 P . S1 . . . R0 . S2 . . R1 . . R2
    compute      G0 . . G1 . L0 . C0 . G2 . L1 C1 . O0 C2 . O1 L2 O2
    copy out     . . . . . . LDI0 . DI0 . . LDI1 . DI1 . DI2 . . LDI2

Backward goes from the last chunk to the first, so that the tensors written last are read first. Chunk i - 1
is copied from the host, or sent again, while chunk i is computed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

from pmoe.schedule.restore import GATHERED_AGAIN, Restore
from pmoe.schedule.tasks import Kind, PassBuilder, Schedule, Stages, Task


def _turns(tasks: Sequence[Task], sizes: Mapping[str, int], homes: Sequence[str]) -> dict[str, str]:
    """Returns the ring slot of each buffer, such as {"T_DI.2": "T_DI[0]"}.

    A ring is a small number of memory slots for buffers of the same name, one buffer for each chunk. Buffers
    take the slots of their ring in turn, in the order in which tasks write the buffers.

    tasks: the tasks of a pass, in order.
    sizes: the number of slots of each ring, by the ring's name. Buffer "T_M_L.3" is in the ring "T_M_L" if
        there is one, else in the ring "T_M". Buffer "T_DI_again.3" is in the ring "T_DI_again" if there is
        one, else in "T_DI". Buffers without a ring, or with a ring of 0 slots, get no slot.
    homes: names of buffers that get their slots before all others, in the order of this list. They are
        "home.i" and "home_L.i" (in backward "dhome.i" and "dhome_L.i"), which hold the results of chunk i on
        the tokens' rank. "home_L.i" (rows that stay on this rank) is a part of the memory of "home.i", so
        both need the slot of the same index. In the order of writing they could get different indices.
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
    """Returns the schedule of a forward pass in n chunks, in which chunks take turns in ring slots.

    A ring slot is memory that several chunks use, one after another. The link between ranks alternates:
    dispatch of chunk i + 1, combine of chunk i, dispatch of chunk i + 2 (MPipeMoE, Fig. 7a). So the
    dispatched rows of two chunks exist at a time, and need two slots.

    n: number of chunks.
    stages: the stages that the layer has.
    restore: the restore pair: whether the dispatched rows (T_DI) and the hidden activation (T_M) are kept,
        offloaded, or made again in backward; None if no backward pass follows.
    """
    tasks = PassBuilder("forward", n, stages)
    remote = stages.remote
    dispatched, hidden_fate = (None, None) if restore is None else (restore.dispatched, restore.hidden)
    # The number of ring slots of T_DI or T_M, by the tensor's fate. All other fates, and None, have 1 slot.
    of_fate: dict[str | None, int] = {"keep": 0, "offload": 2}
    sizes = {
        **dict.fromkeys(("send", "arrived", "T_DO", "leaving"), 2),
        "T_DI": 0 if dispatched == "message" else 2,  # messages stay in the memory in which they arrive
        **dict.fromkeys(("T_DI_sorted", "T_DI_L"), of_fate.get(dispatched, 1)),
        "T_M": of_fate.get(hidden_fate, 1),
        **({"T_M_L": 1} if hidden_fate == "offload" and remote else {}),
        **dict.fromkeys(("active", "T_DO_sorted", "copies", "parts"), 1),
        **dict.fromkeys(("home", "home_L"), 2 if remote else 1),
    }

    def compute(i: int, place: str) -> None:
        """Adds the task in which experts compute one part of chunk i, and tasks that offload its tensors.

        If the restore pair offloads the part's dispatched rows (T_DI), a task copies them to the host. If it
        offloads the part's hidden activation (T_M), a task copies this tensor to the host.

        i: index of the chunk.
        place: "_L" for the rows that stay on this rank, because their expert is on it; "" for the rows that
            other ranks sent.
        """
        rows = [f"T_DI_L.{i}"] if place else [f"T_DI.{i}", f"T_DI_sorted.{i}"]
        hidden = f"T_M{place}.{i}"
        active = f"active{place}.{i}"
        if place:
            reads = [f"T_I_L.{i}", "weight"]
            writes = [*rows, hidden, active, f"home_L.{i}"]
        else:
            reads = [rows[0], "weight_DI", *tasks.copied]
            writes = [rows[1], hidden, active, f"T_DO_sorted.{i}", f"T_DO.{i}"]
        tasks.add(Kind.LOCAL if place else Kind.COMPUTE, i, reads, writes)
        if dispatched == "offload":
            tasks.add(Kind.COPY_ROWS_OUT.at(place), i, rows, [f"host_T_DI{place}.{i}"])
        if hidden_fate == "offload":
            tasks.add(Kind.COPY_HIDDEN_OUT.at(place), i, [hidden], [f"host_T_M{place}.{i}"])

    tasks.copy_weights()
    if remote:
        tasks.dispatch(0)
        tasks.send_weights()
        tasks.relay_weights()
        tasks.dispatch(1)
    tasks.shared()
    tasks.open(0)
    for i, place in _units(range(n), stages):
        tasks.open(i + 1)
        compute(i, place)
        if not remote:
            tasks.output(i)
        elif not place:
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
    """Returns the schedule of a backward pass in n chunks, in which chunks take turns in ring slots.

    A ring slot is memory that several chunks use, one after another. The pass restores the dispatched rows
    (T_DI) and the hidden activation (T_M) of forward, chunk by chunk. A chunk's gradients of parameters are
    computed right after its other gradients, because these tasks read slots that the next chunk overwrites.

    n: number of chunks.
    stages: the stages that the layer has.
    restore: the restore pair: whether T_DI and T_M were kept or offloaded in forward, or are made again here.
    rearranged: whether forward had another number of chunks. Tensors that forward kept are then copied into
        slots, chunk by chunk.
    """
    tasks = PassBuilder("backward", n, stages)
    remote = stages.remote
    dispatched, hidden_fate = restore.dispatched, restore.hidden
    sends_again = dispatched == "communicate"
    # Whether backward must arrange T_DI in the order of the experts again: from rows that are sent again,
    # from messages, or from T_I.
    arranges = dispatched in GATHERED_AGAIN
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
        """Adds the tasks that gather the output's gradient of chunk i and send it to the experts.

        If backward sends forward's dispatched rows (T_DI) again, the tasks that gather and send T_DI come
        first.

        i: index of the chunk.
        """
        if sends_again:
            tasks.dispatch(i, again=True)
        tasks.dispatch(i)

    def unpack(i: int) -> None:
        """Adds the callbacks on the gradients of chunk i that arrived, and the all-gather of these gradients.

        Adds nothing unless experts are sharded and the layer has callbacks (`Stages.hooked`). In other layers
        the all-gather, if there is one, is added together with the dispatch, and callbacks are a part of the
        experts' task. If backward also sends forward's dispatched rows (T_DI) again, callbacks and all-gather
        of these rows come first.

        i: index of the chunk.
        """
        if sends_again:
            tasks.open(i, again=True)
        tasks.open(i)

    def fetch(i: int, place: str) -> None:
        """Adds the tasks that copy chunk i's tensors back from the host, if forward has offloaded them.

        The tensors may be the dispatched rows (T_DI), the hidden activation (T_M), or both.

        i: index of the chunk.
        place: "_L" for the rows that stay on this rank, because their expert is on it; "" for the rows that
            other ranks sent.
        """
        if dispatched == "offload":
            tasks.add(Kind.COPY_ROWS_IN.at(place), i, [f"host_T_DI{place}.{i}"], [f"T_DI{place}.{i}"])
        if hidden_fate == "offload":
            tasks.add(Kind.COPY_HIDDEN_IN.at(place), i, [f"host_T_M{place}.{i}"], [f"T_M{place}.{i}"])

    def compute(i: int, place: str) -> None:
        """Adds the backward tasks of the experts for one part of chunk i, in this order:

        1. the hidden activation (T_M) is recomputed, if its fate in the restore pair is "recompute";
        2. the gradients of the part's rows are computed, after T_M is unpacked if it was kept in e4m3;
        3. the combine all-to-all sends these gradients back, if other ranks sent the rows;
        4. the gradients of parameters are computed, first those of copies of busy experts, if there are any.

        i: index of the chunk.
        place: "_L" for the rows that stay on this rank, because their expert is on it; "" for the rows that
            other ranks sent.
        """
        rows = [f"T_DI{place}.{i}"]
        hidden = f"T_M{place}.{i}"
        if not place and (arranges or (dispatched == "keep" and not rearranged)):
            rows.append(f"T_DI_sorted.{i}")
        # The first task of these rows also writes T_DI in the order of the experts: from kept chunks, from
        # rows that were sent again, from messages, or from T_I. `arranged` has the buffers that the next task
        # writes for this reason.
        arranged = rows[-1:] if arranges or (dispatched == "keep" and rearranged) else []
        if hidden_fate == "recompute":
            inputs = [buffer for buffer in rows if buffer not in arranged]
            inputs += [] if place else tasks.copied
            tasks.add(Kind.RECOMPUTE.at(place), i, inputs, [*arranged, hidden])
            arranged = []
        elif hidden_fate == "e4m3" or (hidden_fate == "keep" and rearranged):
            arranged = [*arranged, hidden]  # unpacked, or copied from forward's chunks
        work = [f"{name}{place}.{i}" for name in ("dT_M", "active", "scratch")]
        if place:
            grads = [f"dT_DO_L.{i}"]
            source = [f"dT_O_L.{i}"]
            result = [f"dhome_L.{i}"]
        else:
            grads = [f"dT_DO_sorted.{i}"]
            source = [f"dT_DO.{i}", *tasks.copied]
            result = [f"dT_DI_sorted.{i}", f"dT_DI.{i}", f"dweight_DI.{i}"]
        reads = [buffer for buffer in (*source, *rows, hidden) if buffer not in arranged]
        if hidden_fate not in ("keep", "e4m3"):  # the task overwrites T_M with the activation's result
            arranged = [*arranged, hidden]
        tasks.add(Kind.LOCAL if place else Kind.COMPUTE, i, reads, [*arranged, *work, *grads, *result])
        if not place:
            tasks.combine(i)
        inputs = [*rows, hidden, *work[:2], *grads, *([] if place else source[:1])]
        if not place:
            tasks.copy_wgrad(i, inputs, is_last=i == 0)
        tasks.add(Kind.WGRAD.at(place), i, [*inputs, "dw"], ["dw"])

    tasks.copy_weights()
    if remote:
        dispatch(n - 1)
        tasks.relay_weights()
        dispatch(n - 2)
    tasks.shared()
    fetch(*units[0])
    unpack(n - 1)
    for index, (i, place) in enumerate(units):
        unpack(i - 1)
        for unit in units[index + 1 : index + 2]:
            fetch(*unit)
        compute(i, place)
        if not remote:
            tasks.output(i)
        elif not place:
            tasks.close(i + 1)
            dispatch(i - 2)
            tasks.output(i + 1 + stages.hooked)
            if i == 0:
                tasks.return_weights(chunks)
    tasks.close(0)
    tasks.add_gradients()
    if remote:
        for i in range(int(stages.hooked), -1, -1):
            tasks.output(i)
    homes = [f"{home}.{i}" for i in chunks for home in ("dhome", "dhome_L")]
    return tasks.finish(_turns(tasks.tasks, sizes, homes))


def rotating(
    direction: str, n: int, stages: Stages, *, restore: Restore | None, rearranged: bool = False
) -> Schedule:
    """Returns the schedule of a forward or backward pass in which n chunks take turns in ring slots.

    A ring slot is memory that several chunks use, one after another.

    direction: "forward" or "backward".
    n: number of chunks.
    stages: the stages that the layer has.
    restore: the restore pair: whether the dispatched rows (T_DI) and the hidden activation (T_M) are kept,
        offloaded, or made again in backward; None for a forward pass without a backward pass.
    rearranged: whether backward has another number of chunks than forward. It changes only backward's
        schedule.
    """
    if direction == "forward":
        return rotating_forward(n, stages, restore=restore)
    assert restore is not None
    return rotating_backward(n, stages, restore=restore, rearranged=rearranged)


def _units(chunks: Sequence[int], stages: Stages) -> list[tuple[int, str]]:
    """Returns the order in which the experts compute the parts of chunks, as (chunk, "_L") and (chunk, "").

    (chunk, "_L") are the rows of a chunk that stay on this rank, because their expert is on it. (chunk, "")
    are the rows that other ranks sent. In each chunk, the rows that stay come first, to fill the time until
    the other rows arrive. Only in the last chunk they come last, to fill the time while results are sent
    back.

    chunks: the indices of the chunks, in the order of the pass.
    stages: the stages of the layer, which say whether rows stay and whether rows are sent.
    """
    units = []
    for i in chunks:
        unit = [(i, "_L")] * stages.local + [(i, "")] * stages.remote
        units += unit[::-1] if i == chunks[-1] else unit
    return units
