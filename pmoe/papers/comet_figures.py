"""COMET's Table 3, the moves of n_c in its Fig. 8, and its fused layer beside a chunked one.

They follow from a model, which simulates how long a fused kernel takes and how many of its blocks should
communicate (section 3.2.2). The machine's numbers are for this reproduction only; no layer uses them.
Everything that the paper leaves open is in ASSUMPTIONS. Nothing is fitted to the paper. The output says
where the model disagrees with it.

Letters are the paper's (Table 1): M tokens of all ranks, N width of a token (pmoe's d_model), K width of an
expert's hidden layer (d_hidden), W = TP * EP ranks; n_c communicating blocks, T_N columns of a chunk.
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
    """Simulates a fused kernel.

    chunk_columns: T_N, for layer 1 only.
    """
    if isinstance(layer, Arriving):
        tasks = fused_dispatch_tasks(layer, device, n_c)
    else:
        tasks = fused_combine_tasks(layer, device, n_c, chunk_columns)
    return simulate(tasks, lambda task: task.seconds)


def best_division(
    layer: Arriving | Returning, device: DeviceRates, *, chunks: Sequence[int] | None = None
) -> tuple[Division, float]:
    """Returns the fastest division of a kernel, and its seconds.

    It simulates all candidates, where COMET profiles them (section 3.2.2): n_c, and for layer 1 also T_N.
    Of equals it takes the smallest n_c, then the fewest chunks. Candidates are simulated in the order of
    `min_seconds`. The search ends when that lower bound exceeds the best result.

    chunks: values of T_N to choose from, for layer 1; by default those of pmoe's own sweep.
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
    """Returns a lower bound of the simulated seconds of a division.

    It is the largest of three: the work of the computing blocks, of the communicating blocks, and of the
    link, each with what must come before or after it.
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
"""Steps in time of the bars."""

_LEVELS = 25
"""Steps in height of the bars."""


def busy_bars(
    run: Sequence[Simulated[FusedTask]],
    lanes: Mapping[str, tuple[str | tuple[str, ...], int]],
    origin: float = 0.0,
) -> list[Span]:
    """Returns a fused kernel as bars on few lanes.

    A bar's height is the fraction of the blocks that work on a level or a chunk. Time is cut into 200
    steps. Neighbouring steps of the same height, to 1/25 of the lane, become one bar.

    lanes: by name, (how the names of its blocks' lanes begin, number of its blocks).
    origin: start of the kernel, in seconds.
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
"""Assumptions that the figures need, because the paper does not say or says it in several ways.

They were written before the first simulation, but after an estimate by hand, with blocks of 27 GB/s (about
half), that gave n_c = 23 for TP = 8. Afterwards the order of sums and of tiles that are not full was made
that of cuda/comet.
"""

H800 = DeviceRates(
    blocks=132,
    block_flops=650e12 / 132,
    block_local_bytes=56e9,
    block_peer_bytes=56e9,
    link_bytes=160e9,
    signal_seconds=2e-6,
)
"""Rates of one of the paper's eight devices, by ASSUMPTIONS."""


MODELS: Mapping[str, Model] = {name: Model(**row) for name, row in printed("comet table 2").items()}
RANKS = 8


# ---- Table 3


def table3() -> list[dict[str, Any]]:
    """Returns the cells of Table 3: the bytes of the shared communication buffer.

    computed_bytes: by section 5.5's formula, M N elements of two bytes.
    paper_bytes: as the paper prints them. Its MB are 2^20 bytes.
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
    """Returns the cases of Fig. 8, for layer 1.

    paper            the paper's best n_c. Its text gives three of the four.
    model, seconds   the model's best n_c, and how long the kernel then takes
    paper_seconds    how long it takes with the paper's n_c
    half_rate        the model's n_c if communicating blocks are half as fast
    per_group        the model's n_c if M are the tokens of a TP group
    """
    return [_case(*case) for case in printed("comet figure 8")]


def _case(tp: int, tokens: int, paper: int | None) -> dict[str, Any]:
    """Returns one case of Fig. 8."""
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
    """Returns both layers of Mixtral 8x7B on 8 ranks."""
    return even_layer(MODELS["Mixtral 8x7B"], tokens, ep=RANKS // tp, tp=tp)


@functools.cache  # with TP = 8 both readings of M are the same layer
def _at_one_tile(layer: Returning, device: DeviceRates) -> tuple[Division, float]:
    """Returns the best division if a chunk is one tile wide."""
    return best_division(layer, device, chunks=[TILE_COLUMNS])


def moves(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the two moves of n_c that the paper reports, and whether the model's n_c moves the same way."""
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
"""M of the layer that is drawn: Fig. 11's, Mixtral 8x7B with EP = 8 and TP = 1."""


def chunked_run(
    arriving: Arriving, returning: Returning, device: DeviceRates, n: int
) -> list[Simulated[Task]]:
    """Simulates pmoe's forward schedule in n chunks, with the chunked layer's costs by ASSUMPTIONS."""
    local_rows_E = arriving.rows_WE[0]
    peer_rows_E = tuple(map(sum, zip(*arriving.rows_WE[1:], strict=True)))
    remote = sum(peer_rows_E) > 0
    stages = Stages(local=sum(local_rows_E) > 0 or not remote, remote=remote)
    pieces = local_pieces(n, local=stages.local, remote=remote)
    all_local = device.blocks * device.block_local_bytes
    row_bytes = arriving.row_bytes
    out_bytes = returning.columns * returning.element_size

    def products(rows_E: Sequence[int]) -> float:
        """Seconds of both grouped products, in whole waves of tiles."""
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
    """Returns how many of ``rows`` rows are in a chunk."""
    return rows * (chunk + 1) // n - rows * chunk // n


@functools.cache
def beside() -> list[dict[str, Any]]:
    """Returns Mixtral's layer with EP = 8 in several ways, with the seconds of each.

    The ways are two fused kernels one after the other, each at its best division, and 1, 2, 4 and 8 chunks.
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
    """Returns the tables that `pmoe simulate comet` prints."""
    return {"table3": table3(), "figure8": figure8(), "moves": moves(figure8()), "beside": beside()}


def fused_bars(run: Sequence[Simulated[FusedTask]], n_c: int, origin: float = 0.0) -> list[Span]:
    """Returns a fused kernel with n_c communicating blocks as bars that begin at ``origin`` seconds."""
    lanes = zip(FUSED_LANES, (("link", 1), ("comm ", n_c), ("block ", H800.blocks - n_c)), strict=False)
    return busy_bars(run, dict(lanes), origin)


def panels() -> dict[str, list[Span]]:
    """Returns the panels of the drawing: the fused layer, and n = 2 and the best n of `beside`."""
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
    """Draws `panels`. Needs matplotlib."""
    title = f"Mixtral 8x7B, EP = 8, M = {DRAWN_TOKENS}: a rank of 8 H800, simulated"
    return drawing(panels(), title)
