"""Simulates FlashDMoE's kernel as tasks of actors, and the layers to which the kernel is compared.

A rank's kernel has three kinds of actors (section 4.2 of the FlashDMoE thesis). They run side by side:

- The processors are all thread blocks except one. They send rows, multiply tiles and add results.
- The subscriber notices that a tile of rows has arrived.
- The scheduler gives tasks to processors that are free.

An example with two tiles of rows, numbered 0 and 1:

    time ->         0  1  2  3  4  5  6  7  8  9  10
    processors      S0 S1 .  .  C0 C1 E0 E1 .  O0 O1
    link            .  S0 S1 .  .  .  .  R0 R1 .  .
    subscriber      .  .  A0 A1 .  .  .  .  U0 U1 .
    scheduler       .  .  .  C0 C1 E0 E1 .  .  .  .

    S0       rows of tile 0 are sent to the ranks of their experts
    A0       the subscriber notices that tile 0 has arrived
    C0, E0   first and second product of tile 0; in the line "scheduler", the scheduler hands out these tasks
    R0       results of tile 0 are sent back
    U0       the subscriber notices that results of tile 0 have arrived
    O0       these results are added to the output

The kernel is compared to a synchronous layer, which runs one task after another in one chunk. Both use the
sizes and the writes to other ranks of the simulation of COMET (`pmoe.papers.comet_tasks`). All assumptions
were fixed before the first run, and nothing was fitted to the thesis.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pmoe.papers.comet_figures import chunked_run
from pmoe.papers.comet_tasks import (
    PIECE_ROWS,
    TILE_COLUMNS,
    TILE_ROWS,
    Arriving,
    DeviceRates,
    FusedTask,
    Launch,
    Model,
    Returning,
    even_layer,
    fused_combine_tasks,
    fused_dispatch_tasks,
)
from pmoe.planner.simulator import Simulated, makespan, simulate

H100 = DeviceRates(
    blocks=132,
    block_flops=247e12 / 132,
    block_local_bytes=56e9,
    block_peer_bytes=56e9,
    link_bytes=300e9,
    signal_seconds=2e-6,
)
"""Rates of one of the thesis's eight devices, in float32 on tensor cores."""

H100_HALF = replace(H100, block_flops=495e12 / 132)
"""Rates of one of the thesis's eight devices, in 16-bit types."""

DECODE = 0.2e-6
"""Seconds that the subscriber takes to read one message, which says that a tile of rows has arrived."""

SCHEDULE = 0.1e-6
"""Seconds that the scheduler takes to hand out the tasks of one tile of rows."""

TOKENS = 8192
"""Number of tokens of a rank, unless a figure has another one."""

LAYER = Model(E=64, topk=2, N=2048, K=2048)

PAIR_COLUMNS = 512
"""Number of columns (T_N) after which the second of COMET's two kernels sends its sums."""


# ---- the actors


def actor_tasks(
    layer: Arriving, device: DeviceRates, late: float = 0.0, ends: Mapping[str, float] | None = None
) -> list[FusedTask]:
    """Returns the tasks of one rank's kernel (section 4.2 of the thesis).

    Three kinds of actors run side by side. The subscriber notices rows that have arrived. The scheduler hands
    out tasks. The processors (thread blocks) do the tasks. A tile of rows has these tasks, in order:

        S   the tile's rows arrive in pieces; the subscriber notices this, and the scheduler hands out tasks C
        C   tiles of the first product (L for rows of this rank); then the scheduler hands out tasks E
        E   tiles of the second product; each is written to the rank that the rows came from
        R   a tile of results passes the link
        O   a tile of returned results is added to the output

    By assumption, all ranks do the same tasks, and at the same time if ``late`` is 0. So while this rank
    sends results to rank - d, rank + d sends results to this rank.

    layer: the number of rows that arrive, for each level and expert. Rows that rank + d sends have level d.
    device: rates of the device.
    late: seconds by which the next rank, rank + 1, is behind this rank.
    ends: {name of a task: the time in seconds at which the task ends if no rank is late}. Needed only if
        ``late`` is above 0.
    """
    processors = device.blocks - 1
    kernel = Launch(device, processors)
    landed = dict[
        tuple[int, int, int], list[str]
    ]()  # (level, expert, row tile) -> writes that bring its rows
    piece = 0
    for level, rows_E in enumerate(layer.rows_WE):
        for expert, rows in enumerate(rows_E):
            for first in range(0, rows, PIECE_ROWS):
                size = min(PIECE_ROWS, rows - first) * layer.row_bytes
                block = piece % processors
                piece += 1
                end = kernel.write(f"S{piece}", block, level, "S", level, read_bytes=size, write_bytes=size)
                landed.setdefault((level, expert, first // TILE_ROWS), []).append(end)
    inner = range(math.ceil(layer.columns / TILE_COLUMNS))
    outer = range(math.ceil(layer.reduction / TILE_COLUMNS))
    tile_bytes = TILE_ROWS * TILE_COLUMNS * layer.element_size
    for i, ((level, *_), pieces) in enumerate(landed.items()):
        kind = "C" if level else "L"
        is_late = late > 0 and level == 1
        arrived = kernel.meet(f"A{i}", "S", level, device.signal_seconds + late * is_late, pieces)
        decoded = kernel.add(f"D{i}", "subscriber", "A", level, DECODE, (arrived,))
        first_given = kernel.add(f"G{i}", "scheduler", "A", level, SCHEDULE, (decoded,))
        seconds = device.tile_seconds(layer.reduction)
        tiles = [kernel.add(f"C{i}.{j}", "processor", kind, level, seconds, (first_given,)) for j in inner]
        second_given = kernel.add(f"H{i}", "scheduler", "A", level, SCHEDULE, tiles)
        written = tile_bytes / (device.block_peer_bytes if level else device.block_local_bytes)
        for j in outer:
            name = f"{i}.{j}"
            seconds = device.tile_seconds(layer.columns) + written
            sent = kernel.add(f"E{name}", "processor", "E", level, seconds, (second_given,))
            if level:
                sent = kernel.add(f"R{name}", "link", "R", level, tile_bytes / device.link_bytes, (sent,))
            # The late peer sends this tile ``late`` seconds after this rank has sent its own.
            since = ends[sent] + late if is_late and ends else 0.0
            waits = () if is_late else (sent,)
            returned = kernel.meet(f"B{name}", "R", level, device.signal_seconds + since, waits)
            decoded = kernel.add(f"U{name}", "subscriber", "A", level, DECODE, (returned,))
            seconds = 3 * tile_bytes / device.block_local_bytes
            kernel.add(f"O{name}", "processor", "O", level, seconds, (decoded,))
    return kernel.tasks


def first_come(tasks: Iterable[FusedTask], processors: int) -> list[Simulated[FusedTask]]:
    """Simulates tasks. A processor that becomes free takes the task that has been ready for longest.

    Any free processor may take a task, also if the task names another processor. The link, the subscriber and
    the scheduler run their tasks in the same way: first come, first served.

    Returns the tasks with their start and end in seconds.

    tasks: the tasks. Each must wait only for tasks before it in the list.
    processors: number of processors.
    """
    tasks = list(tasks)
    missing = {task.name: len(task.waits) for task in tasks}
    users = defaultdict[str, list[int]](list)
    for at, task in enumerate(tasks):
        for name in task.waits:
            users[name].append(at)
    ready = [(0.0, at) for at, task in enumerate(tasks) if not task.waits]
    free = {"processor": [0.0] * processors}
    done = list[Simulated[FusedTask]]()
    ends = dict[str, float]()
    while ready:
        since, at = heapq.heappop(ready)
        task = tasks[at]
        servers = free.setdefault("processor" if task.lane.startswith("comm ") else task.lane, [0.0])
        start = max(since, servers[0])
        end = start + task.seconds
        ends[task.name] = end
        heapq.heapreplace(servers, end)
        done.append(Simulated(task=task, start=start, end=end))
        for user in users[task.name]:
            missing[tasks[user].name] -= 1
            if not missing[tasks[user].name]:
                heapq.heappush(ready, (max(ends[name] for name in tasks[user].waits), user))
    return done


def rank_layer(
    ranks: int, tokens: int = TOKENS, experts: int = LAYER.E, element_size: int = 4
) -> tuple[Arriving, Returning]:
    """Returns one rank's work in the MoE layer of section 6.1 of the FlashDMoE thesis, in two halves.

    The first half is dispatch and the first product (COMET's "layer 0"), the second half is the second
    product and combine ("layer 1").

    ranks: number of ranks.
    tokens: tokens of a rank.
    experts: experts of all ranks.
    element_size: bytes of an element.
    """
    arriving, returning = even_layer(LAYER._replace(E=experts), tokens * ranks, ep=ranks)
    return replace(arriving, element_size=element_size), replace(returning, element_size=element_size)


@functools.cache
def actor_run(
    ranks: int, late: float = 0.0, tokens: int = TOKENS, experts: int = LAYER.E
) -> list[Simulated[FusedTask]]:
    """Returns the tasks of FlashDMoE's kernel on one rank, with their simulated start and end in seconds.

    ranks: number of ranks.
    late: seconds by which one other rank is behind this rank; 0 if no rank is late.
    tokens: tokens of a rank.
    experts: experts of all ranks.
    """
    arriving, _ = rank_layer(ranks, tokens, experts)
    in_time = actor_run(ranks, 0.0, tokens, experts) if late else []
    ends = {item.task.name: item.end for item in in_time} or None
    return first_come(actor_tasks(arriving, H100, late, ends), H100.blocks - 1)


# ---- the layers that it is compared with


def synchronous_seconds(ranks: int) -> tuple[float, float]:
    """Returns the simulated seconds of a synchronous layer's forward pass, and of one of its all-to-alls.

    A synchronous layer runs one task after another. The time to launch kernels is not included.

    ranks: number of ranks.
    """
    run = chunked_run(*rank_layer(ranks), H100, 1)
    return makespan(run), exchange_seconds(run)


def exchange_seconds(run: Iterable[Simulated[Any]]) -> float:
    """Returns the seconds of the longest dispatch task (an all-to-all) in a simulated pass.

    run: tasks of the pass with their start and end.
    """
    return max(item.end - item.start for item in run if item.task.kind == "S")


def pair_run(
    arriving: Arriving, returning: Returning, blocks: tuple[int, int], late: float = 0.0
) -> tuple[float, float]:
    """Returns the simulated seconds of COMET's first and second fused kernel, if one other rank is late.

    arriving: work of one rank in COMET's layer 0 (dispatch and first product), the first kernel.
    returning: work of one rank in COMET's layer 1 (second product and combine), the second kernel.
    blocks: number of communicating thread blocks of each of the two kernels.
    late: seconds by which rank + 1 is behind this rank; 0 if it is not late.
    """
    tasks = fused_dispatch_tasks(arriving, H100, blocks[0])
    levels = {task.name: task.part for task in tasks if task.kind == "S"}

    def begins(task: FusedTask) -> float:
        waits_for_it = task.lane == task.name and any(levels[name] == 1 for name in task.waits)
        return task.seconds + late * waits_for_it

    alone = makespan(simulate(tasks, lambda task: task.seconds))
    first = makespan(simulate(tasks, begins))
    behind = alone + late - first  # seconds by which the late peer's second kernel follows this rank's

    def returns(task: FusedTask) -> float:
        return task.seconds + behind * (task.lane == task.name and task.kind == "R")

    return first, makespan(simulate(fused_combine_tasks(returning, H100, blocks[1], PAIR_COLUMNS), returns))


def chunked_seconds(arriving: Arriving, returning: Returning, n: int, late: float = 0.0) -> float:
    """Returns the simulated seconds of pmoe's forward schedule in n chunks, if one other rank is late.

    The first all-to-all waits for the late rank.

    arriving: work of one rank in COMET's layer 0 (dispatch and first product).
    returning: work of one rank in COMET's layer 1 (second product and combine).
    n: number of chunks.
    late: seconds by which the other rank is behind this rank; 0 if it is not late.
    """
    run = chunked_run(arriving, returning, H100, n)
    first = min((item for item in run if item.task.kind == "S"), key=lambda item: item.start).task.name
    took = {item.task.name: item.end - item.start for item in run}
    tasks = [item.task for item in run]
    return makespan(simulate(tasks, lambda task: took[task.name] + late * (task.name == first)))
