"""Table 6.2 of FlashDMoE's thesis by formula, and its actors on a simulator: overlap efficiency, throughput,
a late peer.

What is assumed was fixed before the first run, and nothing is fitted. The layer is COMET's
(`pmoe.papers.comet_tasks`), and so are writing to peers and the synchronous layer beside it.

Letters: N ranks, H columns of a row, D of the hidden layer.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

from pmoe.kernels.flashdmoe import TILE_ROWS
from pmoe.papers.assumptions import printed
from pmoe.papers.comet_figures import H800, busy_bars, chunked_run
from pmoe.papers.comet_tasks import (
    PIECE_ROWS,
    TILE_COLUMNS,
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
from pmoe.planner.timeline import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- Table 6.2


def symmetric_bytes(ranks: int, experts: int, capacity: int, row_bytes: int) -> int:
    """Size(L) of P x R x B x E x C x H (section 5.3), two rounds and two buffers; experts: of a rank.

    capacity: EC; a cell holds whole tiles of 128 rows. Example: 8, 2, 256, 4096 -> 64 MiB.
    """
    return ranks * 2 * 2 * experts * math.ceil(capacity / TILE_ROWS) * TILE_ROWS * row_bytes


def table62() -> list[dict[str, Any]]:
    """A row a line of Table 6.2, MB. rest: of the paper's bookkeeping without a hidden activation."""
    rows = []
    for thousands, experts, paper, bookkeeping in printed("flashdmoe table 6.2"):
        capacity = thousands * 1024 // experts
        size = symmetric_bytes(8, experts // 8, capacity, 4096) / 2**20
        row = {"tokens": f"{thousands}K", "experts": experts, "EC": capacity, "cell": max(128, capacity)}
        row |= {"Size(L)": size, "paper": paper, "bookkeeping, paper": bookkeeping}
        rows.append({**row, "rest": bookkeeping - size})  # a hidden activation is as large as the tensor
    return rows


# ---- the actors

H100 = replace(H800, block_flops=247e12 / H800.blocks, link_bytes=300e9)
DECODE, SCHEDULE, LAUNCHED = 0.2e-6, 0.1e-6, 5e-6
TOKENS, LAYER = 8192, Model(E=64, topk=2, N=2048, K=2048)
NUMBERS = (2, 4, 8)
SIZES, PAIR_BLOCKS, PAIR_COLUMNS, CHUNKS = (1024, 2048, 4096, 8192, 16384), (8, 16, 24, 32), 512, (1, 2, 4, 8)
"""Tokens a rank; n_c and T_N of COMET's kernels; n of the pipeline."""
OPERATIONS: Mapping[str, int] = printed("flashdmoe table 1.1")
"""What a forward pass launches."""


def actor_tasks(
    layer: Arriving, device: DeviceRates, late: float = 0.0, ends: Mapping[str, float] | None = None
) -> list[FusedTask]:
    """The tasks of one rank's kernel (section 4.2). late: seconds by which the peer at level 1 is behind;
    ends: when each task ends where none is behind.

    By tile of rows: S, pieces that arrive; the subscriber, the scheduler; C, or L of rows from here, tiles of
    the first product; the scheduler; E, tiles of the second, each written to its source by the
    processor that computed it; R, on the link; O, added to the output when it is back. As all ranks do the
    same, one comes from rank + l when one goes to rank - l.
    """
    kernel, processors, piece = Launch(device, device.blocks - 1), device.blocks - 1, 0
    landed = dict[tuple[int, int, int], list[str]]()
    for level, rows_E in enumerate(layer.rows_WE):
        for expert, rows in enumerate(rows_E):
            for first in range(0, rows, PIECE_ROWS):
                size = min(PIECE_ROWS, rows - first) * layer.row_bytes
                block, piece = piece % processors, piece + 1
                end = kernel.write(f"S{piece}", block, level, "S", level, read_bytes=size, write_bytes=size)
                landed.setdefault((level, expert, first // TILE_ROWS), []).append(end)
    inner, outer = (range(math.ceil(columns / TILE_COLUMNS)) for columns in (layer.columns, layer.reduction))
    tile_bytes = TILE_ROWS * TILE_COLUMNS * layer.element_size
    for i, ((level, *_), pieces) in enumerate(landed.items()):
        kind, is_late = "C" if level else "L", late > 0 and level == 1
        here = kernel.meet(f"A{i}", "S", level, device.signal_seconds + late * is_late, pieces)
        told = kernel.add(f"D{i}", "subscriber", "A", level, DECODE, (here,))
        told = kernel.add(f"G{i}", "scheduler", "A", level, SCHEDULE, (told,))
        seconds = device.tile_seconds(layer.reduction)
        tiles = [kernel.add(f"C{i}.{j}", "processor", kind, level, seconds, (told,)) for j in inner]
        told = kernel.add(f"H{i}", "scheduler", "A", level, SCHEDULE, tiles)
        written = tile_bytes / (device.block_peer_bytes if level else device.block_local_bytes)
        for j in outer:
            name, seconds = f"{i}.{j}", device.tile_seconds(layer.columns) + written
            sent = kernel.add(f"E{name}", "processor", "E", level, seconds, (told,))
            if level:
                sent = kernel.add(f"R{name}", "link", "R", level, tile_bytes / device.link_bytes, (sent,))
            since = ends[sent] + late if is_late and ends else 0.0  # not when this rank's own has gone
            waits = () if is_late else (sent,)
            back = kernel.meet(f"B{name}", "R", level, device.signal_seconds + since, waits)
            told_back = kernel.add(f"U{name}", "subscriber", "A", level, DECODE, (back,))
            seconds = 3 * tile_bytes / device.block_local_bytes
            kernel.add(f"O{name}", "processor", "O", level, seconds, (told_back,))
    return kernel.tasks


def first_come(tasks: Iterable[FusedTask], processors: int) -> list[Simulated[FusedTask]]:
    """Tasks of processors, computing and writing, go to the first that is free, in the order in which they
    become ready, not to those they were meant for (the scheduler is work-conserving); other lanes keep that
    order too.
    """
    tasks = list(tasks)
    number = {task.name: at for at, task in enumerate(tasks)}
    order = TopologicalSorter({task.name: task.waits for task in tasks})
    order.prepare()
    ready, free = list[tuple[float, int]](), {"processor": [0.0] * processors}
    done, ends = list[Simulated[FusedTask]](), dict[str, float]()
    while order.is_active():
        for at in map(number.__getitem__, order.get_ready()):
            heapq.heappush(ready, (max((ends[name] for name in tasks[at].waits), default=0.0), at))
        since, at = heapq.heappop(ready)
        task = tasks[at]
        servers = free.setdefault("processor" if task.lane.startswith("comm ") else task.lane, [0.0])
        start = max(since, servers[0])
        ends[task.name] = end = start + task.seconds
        heapq.heapreplace(servers, end)
        done.append(Simulated(task=task, start=start, end=end))
        order.done(task.name)
    return done


def float32_layer(ranks: int, tokens: int = TOKENS) -> tuple[Arriving, Returning]:
    """What arrives at a rank of so many, with so many tokens each, and what returns."""
    arriving, returning = even_layer(LAYER, tokens * ranks, ep=ranks)
    return replace(arriving, element_size=4), replace(returning, element_size=4)


@functools.cache
def actor_run(ranks: int, tokens: int = TOKENS, late: float = 0.0) -> list[Simulated[FusedTask]]:
    """FlashDMoE's layer on a rank of so many."""
    ends = {each.task.name: each.end for each in actor_run(ranks, tokens)} if late else None
    tasks = actor_tasks(float32_layer(ranks, tokens)[0], H100, late, ends)
    return first_come(tasks, H100.blocks - 1)


def synchronous_seconds(ranks: int, tokens: int = TOKENS) -> tuple[float, float]:
    """Of the synchronous layer without launches, and of its all-to-all that sends rows away."""
    run = chunked_run(*float32_layer(ranks, tokens), H100, 1)
    return makespan(run), max(each.end - each.start for each in run if each.task.kind == "S")


def scaled_layers() -> list[dict[str, Any]]:
    """A row for each number of ranks: ms, and by how much two ranks' time is shorter (6.4: overlap
    efficiency), of the actors and of the synchronous layer, launches included; the share of processors' time
    in which they work; million tokens a second of all ranks."""
    rows = list[dict[str, Any]]()
    for ranks in NUMBERS:
        run, (slow, _) = actor_run(ranks), synchronous_seconds(ranks)
        seconds, slow = makespan(run) + LAUNCHED, slow + OPERATIONS["Megatron-LM TE"] * LAUNCHED
        busy = sum(each.end - each.start for each in run if each.task.lane.startswith(("processor", "comm ")))
        row = {"GPUs": ranks, "ms": seconds * 1e3, "synchronous ms": slow * 1e3}
        first = rows[0] if rows else row
        row["efficiency"] = first["ms"] / row["ms"]
        row["synchronous efficiency"] = first["synchronous ms"] / row["synchronous ms"]
        row["processors busy %"] = 100 * busy / (H100.blocks - 1) / makespan(run)
        rows.append({**row, "Mtokens/s": TOKENS * ranks / seconds / 1e6})
    return rows


def late_peers() -> list[dict[str, Any]]:
    """A row for each delay of one peer of 8, and what it adds to either layer, ms."""
    alone, (_, exchange) = makespan(actor_run(8)), synchronous_seconds(8)
    rows = []
    for ratio in (1.32, 11.0):
        late = (ratio - 1) * exchange
        added = makespan(actor_run(8, late=late)) - alone
        row = {"all-to-all, p95": ratio, "late ms": late * 1e3, "synchronous ms": late * 1e3}
        rows.append({**row, "actors ms": added * 1e3, "hidden %": 100 * (1 - added / late)})
    return rows


def pair_run(
    arriving: Arriving, returning: Returning, blocks: tuple[int, int], late: float = 0.0
) -> tuple[float, float]:
    """Seconds of COMET's two kernels, with so many communicating blocks each. late: as in `actor_tasks`."""
    tasks = fused_dispatch_tasks(arriving, H100, blocks[0])
    levels = {task.name: task.part for task in tasks if task.kind == "S"}

    def begins(task: FusedTask) -> float:
        waits_for_it = task.lane == task.name and any(levels[name] == 1 for name in task.waits)
        return task.seconds + late * waits_for_it

    alone, first = (makespan(simulate(tasks, cost)) for cost in (lambda task: task.seconds, begins))
    behind = alone + late - first  # the late peer's second kernel, to this one's

    def returns(task: FusedTask) -> float:
        return task.seconds + behind * (task.lane == task.name and task.kind == "R")

    return first, makespan(simulate(fused_combine_tasks(returning, H100, blocks[1], PAIR_COLUMNS), returns))


def chunked_seconds(arriving: Arriving, returning: Returning, n: int, late: float = 0.0) -> float:
    """Of the engine's schedule in n chunks and its launches; the first all-to-all waits for the late peer."""
    return makespan(chunked_run(arriving, returning, H100, n, late)) + 4 * n * LAUNCHED


def ways_by_size() -> list[dict[str, Any]]:
    """A row for each number of tokens a rank: ms by each way, then with a late peer."""
    rows = list[dict[str, Any]]()
    for tokens in SIZES:
        (arriving, returning), (_, exchange) = float32_layer(8, tokens), synchronous_seconds(8, tokens)
        pairs = {n_c: pair_run(arriving, returning, (n_c, n_c)) for n_c in PAIR_BLOCKS}
        best = min(pairs, key=lambda n_c: pairs[n_c][0]), min(pairs, key=lambda n_c: pairs[n_c][1])
        n = min(CHUNKS, key=lambda n: chunked_seconds(arriving, returning, n))
        row: dict[str, Any] = {"tokens": tokens}
        for name, late in (("", 0.0), (", late", 0.32 * exchange)):
            row[f"actors{name}"] = (makespan(actor_run(8, tokens, late)) + LAUNCHED) * 1e3
            row[f"pair{name}"] = (sum(pair_run(arriving, returning, best, late)) + 2 * LAUNCHED) * 1e3
            row[f"pipeline{name}"] = chunked_seconds(arriving, returning, n, late) * 1e3
        rows.append(row)
    return rows


def actors_figure() -> Figure:
    """The actors of a rank of 8, alone and with a late peer. Needs matplotlib."""
    late = late_peers()[0]["late ms"] / 1e3
    lanes: Any = {name: (name, 1) for name in ("link", "subscriber", "scheduler")}
    lanes["processors"] = (("processor", "comm "), H100.blocks - 1)
    runs = {"all alike": actor_run(8), f"one peer late by {late * 1e3:.2f} ms": actor_run(8, late=late)}
    panels = {name: busy_bars(run, lanes) for name, run in runs.items()}
    return drawing(panels, f"FlashDMoE's actors, {TOKENS} tokens a rank of 8 H100, simulated")


def tables() -> dict[str, list[dict[str, Any]]]:
    """What `pmoe simulate flashdmoe` prints."""
    found = {"table62": table62(), "actors": scaled_layers()}
    return {**found, "late peer": late_peers(), "three ways": ways_by_size()}
