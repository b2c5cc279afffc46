"""Simulates FlashDMoE's actors: overlap efficiency, throughput, a late peer.

    python bench/flashdmoe.py [--assumptions] [--draw FILE]

`ASSUMPTIONS` were fixed before the first run, and nothing was fitted to the paper's results. The layer, the
writes to peers and the synchronous layer are those of the simulation of COMET (`pmoe.papers.comet_tasks`).

Letters: N ranks, H columns of a row, D of the hidden layer.
"""

from __future__ import annotations

import functools
import heapq
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.stated import assumptions, by_key, run
from pmoe.papers.assumptions import printed, wrapped
from pmoe.papers.comet_figures import busy_bars, chunked_run
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
from pmoe.planner.timeline import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ASSUMPTIONS = assumptions("flashdmoe")

# ---- the actors

H100 = DeviceRates(
    blocks=132,
    block_flops=247e12 / 132,
    block_local_bytes=56e9,
    block_peer_bytes=56e9,
    link_bytes=300e9,
    signal_seconds=2e-6,
)
DECODE, SCHEDULE, LAUNCHED = 0.2e-6, 0.1e-6, 5e-6
TOKENS, LAYER = 8192, Model(E=64, topk=2, N=2048, K=2048)
NUMBERS = (2, 4, 8)
SIZES, PAIR_BLOCKS, PAIR_COLUMNS, CHUNKS = (1024, 2048, 4096, 8192, 16384), (8, 16, 24, 32), 512, (1, 2, 4, 8)
"""Tokens a rank; n_c and T_N of COMET's kernels; n of the pipeline."""
OPERATIONS: Mapping[str, int] = printed("flashdmoe table 1.1")
"""Operations that a forward pass launches, by system."""


def actor_tasks(
    layer: Arriving, device: DeviceRates, late: float = 0.0, ends: Mapping[str, float] | None = None
) -> list[FusedTask]:
    """Returns the tasks of one rank's kernel (Section 4.2).

    late: seconds by which the peer at level 1 is late.
    ends: the time at which each task ends if no peer is late.

    For each tile of rows, in order:

        S   its pieces arrive; then the subscriber and the scheduler act
        C   tiles of the first product (L for rows of this rank); then the scheduler acts
        E   tiles of the second product, each written to its source by the processor that computed it
        R   on the link
        O   added to the output after its return

    All ranks do the same, so a tile comes from rank + l whenever one goes to rank - l.
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
            # The late peer sends this tile `late` seconds after this rank has sent its own.
            since = ends[sent] + late if is_late and ends else 0.0
            waits = () if is_late else (sent,)
            back = kernel.meet(f"B{name}", "R", level, device.signal_seconds + since, waits)
            told_back = kernel.add(f"U{name}", "subscriber", "A", level, DECODE, (back,))
            seconds = 3 * tile_bytes / device.block_local_bytes
            kernel.add(f"O{name}", "processor", "O", level, seconds, (told_back,))
    return kernel.tasks


def first_come(tasks: Iterable[FusedTask], processors: int) -> list[Simulated[FusedTask]]:
    """Simulates tasks of processors on the first free processor, in the order in which they become ready.

    They need not run on the processor that they name, because the scheduler is work-conserving. Other lanes
    keep the same order.
    """
    tasks = list(tasks)
    missing = {task.name: len(task.waits) for task in tasks}
    users = defaultdict[str, list[int]](list)
    for at, task in enumerate(tasks):
        for name in task.waits:
            users[name].append(at)
    ready = [(0.0, at) for at, task in enumerate(tasks) if not task.waits]
    free = {"processor": [0.0] * processors}
    done, ends = list[Simulated[FusedTask]](), dict[str, float]()
    while ready:
        since, at = heapq.heappop(ready)
        task = tasks[at]
        servers = free.setdefault("processor" if task.lane.startswith("comm ") else task.lane, [0.0])
        start = max(since, servers[0])
        ends[task.name] = end = start + task.seconds
        heapq.heapreplace(servers, end)
        done.append(Simulated(task=task, start=start, end=end))
        for user in users[task.name]:
            missing[tasks[user].name] -= 1
            if not missing[tasks[user].name]:
                heapq.heappush(ready, (max(ends[name] for name in tasks[user].waits), user))
    return done


@functools.cache
def actor_run(ranks: int, late: float = 0.0) -> list[Simulated[FusedTask]]:
    """Returns the simulated run of FlashDMoE's layer on one of so many ranks."""
    arriving, _ = even_layer(LAYER, TOKENS * ranks, ep=ranks)
    ends = {each.task.name: each.end for each in actor_run(ranks)} if late else None
    return first_come(actor_tasks(replace(arriving, element_size=4), H100, late, ends), H100.blocks - 1)


def synchronous_seconds(ranks: int) -> tuple[float, float]:
    """Returns the seconds of the synchronous layer without launches, and of one of its all-to-alls."""
    arriving, returning = (
        replace(each, element_size=4) for each in even_layer(LAYER, TOKENS * ranks, ep=ranks)
    )
    run = chunked_run(arriving, returning, H100, 1)
    return makespan(run), exchange_seconds(run)


def exchange_seconds(run: Iterable[Simulated[Any]]) -> float:
    """Returns the seconds of the longest all-to-all that sends rows away."""
    return max(each.end - each.start for each in run if each.task.kind == "S")


def scaled_layers() -> list[dict[str, Any]]:
    """Returns a row for each number of ranks, for the actors and for the synchronous layer.

    A row has milliseconds with launches; two ranks' time / this time (6.4: overlap efficiency); the share of
    processors' time in which they work; million tokens a second of all ranks.
    """
    rows = list[dict[str, Any]]()
    for ranks in NUMBERS:
        run, (slow, _) = actor_run(ranks), synchronous_seconds(ranks)
        seconds, slow = makespan(run) + LAUNCHED, slow + OPERATIONS["Megatron-LM TE"] * LAUNCHED
        busy = sum(each.end - each.start for each in run if each.task.lane.startswith(("processor", "comm ")))
        first = rows[0] if rows else {"ms": seconds * 1e3, "synchronous ms": slow * 1e3}
        row = {"GPUs": ranks, "ms": seconds * 1e3, "synchronous ms": slow * 1e3}
        row |= {
            "O_e": first["ms"] / row["ms"],
            "synchronous O_e": first["synchronous ms"] / row["synchronous ms"],
        }
        row["processors busy %"] = 100 * busy / (H100.blocks - 1) / makespan(run)
        rows.append({**row, "Mtokens/s": TOKENS * ranks / seconds / 1e6})
    return rows


def late_peers() -> list[dict[str, Any]]:
    """Returns a row for each delay of one peer of 8: the delay, and what it adds to either layer, in ms."""
    alone, (_, exchange) = makespan(actor_run(8)), synchronous_seconds(8)
    rows = []
    for ratio in (1.32, 11.0):
        late = (ratio - 1) * exchange
        added = makespan(actor_run(8, late)) - alone
        row = {"all-to-all, p95": ratio, "late ms": late * 1e3, "synchronous ms": late * 1e3}
        rows.append({**row, "actors ms": added * 1e3, "hidden %": 100 * (1 - added / late)})
    return rows


def pair_run(
    arriving: Arriving, returning: Returning, blocks: tuple[int, int], late: float = 0.0
) -> tuple[float, float]:
    """Returns the seconds of COMET's two kernels, with so many communicating blocks each.

    late: as in `actor_tasks`.
    """
    tasks = fused_dispatch_tasks(arriving, H100, blocks[0])
    levels = {task.name: task.part for task in tasks if task.kind == "S"}

    def begins(task: FusedTask) -> float:
        waits_for_it = task.lane == task.name and any(levels[name] == 1 for name in task.waits)
        return task.seconds + late * waits_for_it

    alone, first = (makespan(simulate(tasks, cost)) for cost in (lambda task: task.seconds, begins))
    behind = alone + late - first  # seconds by which the late peer's second kernel follows this rank's

    def returns(task: FusedTask) -> float:
        return task.seconds + behind * (task.lane == task.name and task.kind == "R")

    return first, makespan(simulate(fused_combine_tasks(returning, H100, blocks[1], PAIR_COLUMNS), returns))


def pipeline_seconds(arriving: Arriving, returning: Returning, n: int, late: float = 0.0) -> float:
    """Returns the seconds of the engine's schedule in n chunks.

    Its first all-to-all waits for the late peer.
    """
    run = chunked_run(arriving, returning, H100, n)
    first = min((each for each in run if each.task.kind == "S"), key=lambda each: each.start).task.name
    took = {each.task.name: each.end - each.start for each in run}
    tasks = [each.task for each in run]
    return makespan(simulate(tasks, lambda task: took[task.name] + late * (task.name == first)))


def ways_by_size() -> list[dict[str, Any]]:
    """Returns a row for each number of tokens a rank: milliseconds by each way, then with a late peer."""
    rows = list[dict[str, Any]]()
    for tokens in SIZES:
        layers = even_layer(LAYER, tokens * 8, ep=8)
        arriving, returning = (replace(each, element_size=4) for each in layers)
        exchange = exchange_seconds(chunked_run(arriving, returning, H100, 1))
        pairs = {n_c: pair_run(arriving, returning, (n_c, n_c)) for n_c in PAIR_BLOCKS}
        best = min(pairs, key=lambda n_c: pairs[n_c][0]), min(pairs, key=lambda n_c: pairs[n_c][1])
        n = min(CHUNKS, key=lambda n: pipeline_seconds(arriving, returning, n) + 4 * n * LAUNCHED)
        ends = {each.task.name: each.end for each in first_come(actor_tasks(arriving, H100), H100.blocks - 1)}
        row: dict[str, Any] = {"tokens": tokens}
        for name, late in (("", 0.0), (", late", 0.32 * exchange)):
            actors = first_come(actor_tasks(arriving, H100, late, ends), H100.blocks - 1)
            row[f"actors{name}"] = (makespan(actors) + LAUNCHED) * 1e3
            row[f"pair{name}"] = (sum(pair_run(arriving, returning, best, late)) + 2 * LAUNCHED) * 1e3
            chunked = pipeline_seconds(arriving, returning, n, late) + 4 * n * LAUNCHED
            row[f"pipeline{name}"] = chunked * 1e3
        rows.append(row)
    return rows


LANES = {"link": ("link", 1), "subscriber": ("subscriber", 1), "scheduler": ("scheduler", 1)}


def actors_figure() -> Figure:
    """Draws the actors of one rank of 8, without and with a late peer. Needs matplotlib."""
    late = late_peers()[0]["late ms"] / 1e3
    lanes = LANES | {"processors": (("processor", "comm "), H100.blocks - 1)}
    runs = {"all alike": actor_run(8), f"one peer late by {late * 1e3:.2f} ms": actor_run(8, late)}
    panels = {name: busy_bars(run, lanes) for name, run in runs.items()}
    return drawing(panels, f"FlashDMoE's actors, {TOKENS} tokens a rank of 8 H100, simulated")


def lines() -> Iterator[str]:
    tables = {
        f"actors beside a synchronous layer, {TOKENS:,} tokens a GPU": scaled_layers(),
        "one of 8 peers late: what it adds": late_peers(),
        "three ways, ms, by tokens a rank of 8, alone and with a peer that is late": ways_by_size(),
    }
    for title, rows in tables.items():
        yield f"{title}\n\n{by_key(rows)}\n"
    yield from wrapped(assumptions("flashdmoe, why"))


if __name__ == "__main__":
    run("flashdmoe", lines, actors_figure)
