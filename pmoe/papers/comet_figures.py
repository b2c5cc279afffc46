"""Simulates COMET: its Table 3, its Fig. 8, and its fused layer beside a layer in chunks.

A fused kernel has 132 thread blocks, of which n_c communicate and all others compute (section 3.2.2). Fig. 8
is about the best n_c. This file simulates how long a kernel takes with each n_c, to find the best one. The
rates of the GPUs are for this reproduction only: no layer of pmoe uses them. ASSUMPTIONS has the assumptions
where the paper says nothing. Nothing is fitted to the paper. The output shows where simulation and paper
differ.

Letters are the paper's (Table 1): M tokens of all ranks, N width of a token (pmoe's d_model), K width of an
expert's hidden layer (d_hidden), W = TP * EP ranks (TP tensor-parallel, EP expert-parallel), n_c
communicating blocks, T_N columns of a chunk. Layer 0 is dispatch and the first product, layer 1 the second
product and combine.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pmoe.kernels.comet.launcher import Division
from pmoe.papers.assumptions import assumptions, printed
from pmoe.papers.comet_tasks import (
    TILE_COLUMNS,
    Arriving,
    DeviceRates,
    FusedTask,
    Model,
    Returning,
    chunk_widths,
    even_layer,
    fused_combine_tasks,
    fused_dispatch_tasks,
    row_tiles,
)
from pmoe.planner.block_split import chunk_candidates
from pmoe.planner.simulator import Simulated, TaskCost, makespan, simulate, task_seconds
from pmoe.planner.timeline import FUSED_LANES, Span, drawing, simulated_bars
from pmoe.schedule.separate_buffers import forward_schedule
from pmoe.schedule.tasks import Kind, Stages, Task, local_pieces, piece_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def fused_run(
    layer: Arriving | Returning, device: DeviceRates, n_c: int, chunk_columns: int = TILE_COLUMNS
) -> list[Simulated[FusedTask]]:
    """Simulates a fused kernel, and returns its tasks with their start and end in seconds.

    layer: work of one rank in COMET's layer 0 (`Arriving`: dispatch and first product) or layer 1
        (`Returning`: second product and combine).
    device: rates of the device.
    n_c: number of thread blocks that communicate.
    chunk_columns: T_N, the number of columns of a chunk. Layer 1 sends its sums chunk by chunk. Layer 0 does
        not use this number.
    """
    if isinstance(layer, Arriving):
        tasks = fused_dispatch_tasks(layer, device, n_c)
    else:
        tasks = fused_combine_tasks(layer, device, n_c, chunk_columns)
    return simulate(tasks, lambda task: task.seconds)


def best_division(
    layer: Arriving | Returning, device: DeviceRates, *, chunks: Sequence[int] | None = None
) -> tuple[Division, float]:
    """Finds by simulation the fastest division of a kernel's thread blocks.

    Returns the division, and the kernel's seconds with this division.

    A division is n_c, the number of communicating blocks, and for layer 1 also T_N, the number of columns of
    a chunk. COMET measures all divisions (section 3.2.2). This function simulates them, in the order of their
    lower bounds (`min_seconds`), until a bound exceeds the best result. If several divisions are equally
    fast, it takes the one with the smallest n_c, then the one with the largest T_N.

    layer: work of one rank in COMET's layer 0 (`Arriving`: dispatch and first product) or layer 1
        (`Returning`: second product and combine).
    device: rates of the device.
    chunks: values of T_N to choose from, for layer 1; None for the values that pmoe measures.
    """
    if isinstance(layer, Arriving):
        chunks = [TILE_COLUMNS]
    candidates = sorted(
        (min_seconds(layer, device, n_c, width), n_c, -width)
        for n_c in range(1, device.blocks)
        for width in chunks or chunk_candidates(layer.columns)
    )
    best = (math.inf, 0, 0)
    for min_rows, n_c, negative in candidates:
        # The bound adds numbers in another order than the simulation, so rounding may make it too high.
        if min_rows * (1 - 1e-9) > best[0]:
            break
        best = min(best, (makespan(fused_run(layer, device, n_c, -negative)), n_c, negative))
    seconds, n_c, negative = best
    return (Division(n_c) if isinstance(layer, Arriving) else Division(n_c, -negative)), seconds


def min_seconds(
    layer: Arriving | Returning, device: DeviceRates, n_c: int, chunk_columns: int = TILE_COLUMNS
) -> float:
    """Returns a lower bound of the simulated seconds of a kernel with a division of its thread blocks.

    Computing blocks, communicating blocks and the link between ranks work side by side. Each of the three
    needs at least the time of its own work, and of work of the others that must come before or after it. The
    bound is the longest of these three times. The table lists what they include:

                               layer 0                            layer 1
        computing blocks       all tiles                          all tiles + sending the last chunk
        communicating blocks   sending all rows + one tile        tiles of the first chunk + sending all sums
        link                   bytes for other ranks + one tile   tiles of the first chunk + bytes for other
                                                                  ranks

    layer: work of one rank in COMET's layer 0 (`Arriving`: dispatch and first product) or layer 1
        (`Returning`: second product and combine).
    device: rates of the device.
    n_c: number of communicating blocks.
    chunk_columns: T_N, the number of columns of a chunk. Layer 1 sends its sums chunk by chunk. Layer 0 does
        not use this number.
    """
    tile = device.tile_seconds(layer.reduction)

    def computed(columns: int) -> float:
        tiles = row_tiles(layer.rows_E) * math.ceil(columns / TILE_COLUMNS)
        return math.ceil(tiles / (device.blocks - n_c)) * tile

    whole = computed(layer.columns)
    if isinstance(layer, Arriving):
        local_rows = sum(layer.rows_WE[0])
        peer_rows = sum(map(sum, layer.rows_WE[1:]))
        local_bytes = layer.row_bytes * (2 * local_rows + peer_rows)
        peer_bytes = layer.row_bytes * peer_rows
        unhidden = min(tile, whole)  # at least one tile comes after the last piece
        last_share = 0.0
    else:
        local_rows = layer.partials_W[0]
        peer_rows = sum(layer.partials_W[1:])
        row_bytes = layer.columns * layer.element_size
        local_bytes = row_bytes * (sum(layer.rows_E) + 2 * local_rows + peer_rows + layer.tokens)
        peer_bytes = row_bytes * peer_rows
        # The first chunk is computed before any is sent.
        unhidden = computed(min(chunk_columns, layer.columns))
        last_share = chunk_widths(layer, chunk_columns)[-1] / layer.columns
    moved = (local_bytes / device.block_local_bytes + peer_bytes / device.block_peer_bytes) / n_c
    return max(whole + moved * last_share, unhidden + moved, unhidden + peer_bytes / device.link_bytes)


# ---- a simulated kernel as bars of a timeline


_RESOLUTION = 200
"""Number of equal steps into which a drawing divides the time of a kernel."""

_LEVELS = 25
"""Number of equal steps into which a drawing divides the height of a row."""


def busy_bars(
    run: Sequence[Simulated[FusedTask]],
    lanes: Mapping[str, tuple[str | tuple[str, ...], int]],
    origin: float = 0.0,
) -> list[Span]:
    """Returns a simulated fused kernel as a timeline in which one row stands for many thread blocks.

    A kernel has too many thread blocks to draw a row for each. Each bar belongs to one
    part of the kernel's work: its height is the fraction of the row's blocks that work on that part at that
    time. A part is

        in COMET's layer 0 (dispatch and first product)    the tokens of one source rank
        in COMET's layer 1 (second product and combine)    one chunk of columns

    Time is cut into 200 steps, and heights are rounded to 1/25. Neighbouring steps with the same height
    become one bar.

    run: tasks of the kernel with their start and end. A task's ``lane`` names its block, such as "block 17".
    lanes: the rows of the timeline: {name of a row: (prefix, number of blocks)}. A block belongs to the row
        if its name starts with the prefix, such as "block". There may be several prefixes, in a tuple.
    origin: seconds from the start of the drawing to the start of the kernel.
    """
    marks = np.linspace(0.0, makespan(run), _RESOLUTION + 1)
    drawn: list[Span] = []
    for lane, (prefix, size) in lanes.items():
        work: dict[tuple[str, int], NDArray[np.float64]] = {}
        for item in run:
            if item.task.lane.startswith(prefix) and item.end > item.start:
                busy = work.setdefault((item.task.kind, item.task.part), np.zeros(_RESOLUTION))
                busy += np.diff(marks.clip(item.start, item.end)) / (size * marks[1])
        base = np.zeros(_RESOLUTION)
        for (kind, part), busy in work.items():
            heights = (np.stack([base, busy], axis=1) * _LEVELS).round(6).round().tolist()
            for _, group in itertools.groupby(range(_RESOLUTION), key=heights.__getitem__):
                first, *rest = group
                if busy[first] > 1e-9:
                    bar = Span(
                        direction="forward",
                        name=kind if kind == "L" else f"{kind}{part}",
                        kind=kind,
                        chunk=part,
                        lane=lane,
                        start=origin + float(marks[first]),
                        end=origin + float(marks[first + len(rest) + 1]),
                        base=float(base[first]),
                        share=float(busy[first]),
                    )
                    drawn.append(bar)
            base += busy
    return drawn


ASSUMPTIONS = assumptions("comet")
"""Assumptions, by name, where the paper says nothing or is ambiguous.

They were written before the first simulation. After it, two of them were changed to agree with cuda/comet:
the order of sums, and the order of tiles that are not full. An earlier estimate by hand, with blocks of 27
GB/s (about half the assumed rate), gave n_c = 23 for tensor parallelism over 8 ranks.
"""

H800 = DeviceRates(
    blocks=132,
    block_flops=650e12 / 132,
    block_local_bytes=56e9,
    block_peer_bytes=56e9,
    link_bytes=160e9,
    signal_seconds=2e-6,
)
"""Rates of one of the paper's eight GPUs, by ASSUMPTIONS."""


MODELS: Mapping[str, Model] = {name: Model(**row) for name, row in printed("comet table 2").items()}
RANKS = 8


# ---- Table 3


def table3() -> list[dict[str, Any]]:
    """Returns Table 3: the bytes of the shared communication buffer, for each model and number of tokens.

    Each result is a dict with these fields:

        model            name of the model
        tokens           M, the number of tokens of all ranks
        computed_bytes   bytes by the formula of section 5.5: M * N elements of two bytes each, where N is the
                         number of columns of a token (d_model)
        paper_bytes      the bytes that the paper prints; the paper's MB are 2^20 bytes
    """
    return [
        {
            "model": name,
            "tokens": tokens,
            "paper_bytes": paper * 2**20,
            "computed_bytes": 2 * tokens * MODELS[name].N,
        }
        for name, tokens, paper in printed("comet table 3")
    ]


# ---- Fig. 8


@functools.cache
def figure8() -> list[dict[str, Any]]:
    """Returns the cases of Fig. 8 for COMET's layer 1: the fastest number of communicating blocks (n_c).

    Each result is a dict with these fields:

    tp              number of ranks of a tensor-parallel (TP) group
    tokens          M, the number of tokens of all ranks
    paper           the best n_c in the paper's text; None for the one case that the text leaves out
    model           the simulated best n_c
    seconds         the kernel's simulated seconds with this n_c
    paper_seconds   the kernel's simulated seconds with the paper's n_c
    half_rate       the simulated best n_c if communicating blocks are half as fast
    per_group       the simulated best n_c if M counts the tokens of one TP group, not of all ranks
    """
    return [_case(*case) for case in printed("comet figure 8")]


def _case(tp: int, tokens: int, paper: int | None) -> dict[str, Any]:
    """Returns one case of Fig. 8, with the fields that `figure8` lists.

    tp: ranks of a tensor-parallel group.
    tokens: M, tokens of all ranks.
    paper: the best n_c (number of communicating blocks) that the paper gives; None if it gives none.
    """
    slower = replace(
        H800, block_local_bytes=H800.block_local_bytes / 2, block_peer_bytes=H800.block_peer_bytes / 2
    )
    _, layer = _mixtral(tokens, tp)
    best, seconds = _at_one_tile(layer, H800)
    return {
        "tp": tp,
        "tokens": tokens,
        "paper": paper,
        "model": best.n_c,
        "seconds": seconds,
        "paper_seconds": None if paper is None else makespan(fused_run(layer, H800, paper)),
        "half_rate": _at_one_tile(layer, slower)[0].n_c,
        "per_group": _at_one_tile(_mixtral(tokens * RANKS // tp, tp)[1], H800)[0].n_c,
    }


def _mixtral(tokens: int, tp: int) -> tuple[Arriving, Returning]:
    """Returns one rank's work for a layer of Mixtral 8x7B on 8 ranks, in COMET's layers 0 and 1.

    COMET's layer 0 is dispatch and the first product, layer 1 the second product and combine.

    tokens: M, tokens of all ranks.
    tp: ranks of a tensor-parallel group.
    """
    return even_layer(MODELS["Mixtral 8x7B"], tokens, ep=RANKS // tp, tp=tp)


@functools.cache  # with TP = 8 the layer is the same for both meanings of M
def _at_one_tile(layer: Returning, device: DeviceRates) -> tuple[Division, float]:
    """Finds the best number of communicating blocks in COMET's layer 1, if sums are sent tile by tile.

    Sums are sent after each T_N columns; here T_N is the width of one tile, 256.

    Returns the best division of the blocks, and the simulated seconds of layer 1 with this division.

    layer: work of one rank in COMET's layer 1 (second product and combine).
    device: rates of the device.
    """
    return best_division(layer, device, chunks=[TILE_COLUMNS])


def moves(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compares how the best n_c changes with M and with TP in the simulation and in the paper.

    n_c is the number of communicating blocks, M the number of tokens, TP the size of a tensor-parallel group.
    The paper reports two changes. The result has a dict for each of them, with these fields:

        move        what changes, such as "TP = 8, M 4096 -> 16384"
        paper       the best n_c before and after the change, in the paper
        model       the best n_c before and after the change, in the simulation
        same way    True if the best n_c grows in both, or shrinks in both

    cases: the result of `figure8`.
    """
    of = {(case["tp"], case["tokens"]): (case["paper"], case["model"]) for case in cases}
    rows = []
    for move, start, end in (
        ("TP = 8, M 4096 -> 16384", (8, 4096), (8, 16384)),
        ("M = 16384, TP 8 -> 4", (8, 16384), (4, 16384)),
    ):
        paper, model = of[start]
        moved_paper, moved_model = of[end]
        row = {"move": move, "paper": f"{paper} -> {moved_paper}", "model": f"{model} -> {moved_model}"}
        rows.append({**row, "same way": (moved_model - model) * (moved_paper - paper) > 0})
    return rows


# ---- the fused layer beside the chunked one

DRAWN_TOKENS = 16384
"""M (tokens of all ranks) of the layer in the drawing: that of Fig. 11, Mixtral 8x7B with EP = 8, TP = 1."""


def chunked_run(
    arriving: Arriving, returning: Returning, device: DeviceRates, n: int
) -> list[Simulated[Task]]:
    """Simulates a forward pass of pmoe in n chunks, for comparison with fused kernels.

    The schedule is pmoe's own. The text "chunked layer" in ASSUMPTIONS has the costs of its tasks.

    arriving: work of one rank in COMET's layer 0 (dispatch and first product).
    returning: work of one rank in COMET's layer 1 (second product and combine).
    device: rates of the device.
    n: number of chunks.

    Returns the tasks of the pass with their start and end in seconds.
    """
    local_rows_E = arriving.rows_WE[0]
    peer_rows_E = tuple(map(sum, zip(*arriving.rows_WE[1:], strict=True)))
    remote = sum(peer_rows_E) > 0
    stages = Stages(local=sum(local_rows_E) > 0 or not remote, remote=remote)
    pieces = local_pieces(n, local=stages.local, remote=remote)
    all_local = device.blocks * device.block_local_bytes
    row_bytes = arriving.row_bytes
    out_bytes = returning.columns * returning.element_size

    def products(rows_E: Sequence[int]) -> float:
        """Returns the seconds of the experts' two matrix products, in whole waves of tiles.

        In a wave every thread block computes one tile. The last wave takes as long as a full wave.

        rows_E: number of rows of each expert.
        """
        return sum(
            math.ceil(row_tiles(rows_E) * math.ceil(layer.columns / TILE_COLUMNS) / device.blocks)
            * device.tile_seconds(layer.reduction)
            for layer in (arriving, returning)
        )

    def local(task: Task) -> float:
        chunks = [i for i in range(n) if piece_of(i, n, pieces) == task.chunk]
        return products([sum(_rows_of_chunk(rows, i, n) for i in chunks) for rows in local_rows_E])

    def sent(task: Task) -> int:
        return sum(_rows_of_chunk(rows, task.chunk, n) for rows in peer_rows_E)

    def output(task: Task) -> float:
        summed = sent(task) + sum(_rows_of_chunk(rows, task.chunk, n) for rows in local_rows_E)
        return (summed + _rows_of_chunk(returning.tokens, task.chunk, n)) * out_bytes / all_local

    costs: Mapping[Kind, TaskCost] = {
        Kind.LOCAL: local,
        Kind.COMPUTE: lambda task: products([_rows_of_chunk(rows, task.chunk, n) for rows in peer_rows_E]),
        Kind.GATHER: lambda task: 2 * sent(task) * row_bytes / all_local,
        Kind.DISPATCH: lambda task: sent(task) * row_bytes / device.link_bytes + device.signal_seconds,
        Kind.COMBINE: lambda task: sent(task) * out_bytes / device.link_bytes + device.signal_seconds,
        Kind.OUTPUT: output,
    }
    return simulate(forward_schedule(n, stages).tasks, task_seconds(costs))


def _rows_of_chunk(rows: int, chunk: int, n: int) -> int:
    """Returns the number of rows of a chunk, if n chunks share ``rows`` rows as evenly as possible.

    chunk: number of the chunk, from 0 to n - 1.
    """
    return rows * (chunk + 1) // n - rows * chunk // n


@functools.cache
def beside() -> list[dict[str, Any]]:
    """Returns the simulated seconds of Mixtral's layer with EP = 8: with fused kernels, and in chunks.

    EP is the number of ranks over which the experts are distributed. The first row of the result is for
    COMET's two fused kernels, which run one after the other, each with its best division into communicating
    and computing thread blocks. The other rows are for pmoe's schedule in 1, 2, 4 and 8 chunks.
    """
    arriving, returning = _mixtral(DRAWN_TOKENS, tp=1)
    first, first_seconds = best_division(arriving, H800)
    second, second_seconds = best_division(returning, H800)
    fused = {
        "way": "fused",
        "seconds": first_seconds + second_seconds,
        "layer_0_seconds": first_seconds,
        "layer 0 blocks": first.n_c,
        "layer_1_seconds": second_seconds,
        "layer 1 blocks": second.n_c,
        "layer 1 columns": second.chunk_columns,
    }
    chunked = {n: makespan(chunked_run(arriving, returning, H800, n)) for n in (1, 2, 4, 8)}
    return [fused, *({"way": f"chunked, n = {n}", "seconds": seconds} for n, seconds in chunked.items())]


def tables() -> dict[str, list[dict[str, Any]]]:
    """Returns the tables that `pmoe simulate comet` prints, by name."""
    return {"table3": table3(), "figure8": figure8(), "moves": moves(figure8()), "beside": beside()}


def fused_bars(run: Sequence[Simulated[FusedTask]], n_c: int, origin: float = 0.0) -> list[Span]:
    """Returns a simulated fused kernel as bars of a timeline.

    The rows of the timeline are the link, the communicating blocks, and the computing blocks.

    run: tasks of the kernel with their start and end.
    n_c: number of communicating blocks.
    origin: seconds from the start of the drawing to the start of the kernel.
    """
    lanes = zip(FUSED_LANES, (("link", 1), ("comm ", n_c), ("block ", H800.blocks - n_c)), strict=False)
    return busy_bars(run, dict(lanes), origin)


def panels() -> dict[str, list[Span]]:
    """Returns the timelines to draw, as {title: bars}: the fused layer, and the layer in chunks.

    The layer in chunks has one timeline with 2 chunks, and one with the fastest number of chunks. If 2 chunks
    are fastest, there is only one.
    """
    arriving, returning = _mixtral(DRAWN_TOKENS, tp=1)
    fused, *chunked = beside()
    first, second, columns = fused["layer 0 blocks"], fused["layer 1 blocks"], fused["layer 1 columns"]
    bars = fused_bars(fused_run(arriving, H800, first), first)
    bars += fused_bars(fused_run(returning, H800, second, columns), second, fused["layer_0_seconds"])
    name = f"fused, n_c = {first} of {H800.blocks} in layer 0, {second} in layer 1 (T_N = {columns})"
    drawn = {name: bars}
    for n in dict.fromkeys((2, 1 << min(range(4), key=lambda i: chunked[i]["seconds"]))):
        drawn[f"chunked, n = {n}"] = simulated_bars("forward", chunked_run(arriving, returning, H800, n))
    return drawn


def beside_figure() -> Figure:
    """Returns a figure with the timelines of the fused layer and of the layer in chunks. Needs matplotlib."""
    title = f"Mixtral 8x7B, EP = 8, M = {DRAWN_TOKENS}: a rank of 8 H800, simulated"
    return drawing(panels(), title)
