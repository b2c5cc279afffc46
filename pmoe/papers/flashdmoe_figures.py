"""Simulates FlashDMoE's Figs. 3.1 and 6.1 to 6.5: latency, overlap, throughput and a late rank.

`pmoe.papers.flashdmoe_actors` simulates FlashDMoE's kernel, in which actors (processors, a subscriber, a
scheduler) run side by side. This file compares the kernel with pmoe's schedule in chunks, and with COMET's
two fused kernels. The number of kernel launches of each system is that of the thesis's Table 1.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pmoe.papers.assumptions import printed
from pmoe.papers.comet_figures import busy_bars, chunked_run
from pmoe.papers.comet_layers import LAUNCH_SECONDS, LAUNCHES, chunk_launches
from pmoe.papers.flashdmoe_actors import (
    H100,
    H100_HALF,
    TOKENS,
    actor_run,
    actor_tasks,
    chunked_seconds,
    exchange_seconds,
    first_come,
    pair_run,
    rank_layer,
    synchronous_seconds,
)
from pmoe.papers.flashdmoe_table62 import table62
from pmoe.planner.simulator import makespan
from pmoe.planner.timeline import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERS = (2, 4, 8)
"""Numbers of GPUs in `scaled_layers`."""

SIZES = (1024, 2048, 4096, 8192, 16384)
"""Numbers of tokens of a rank in Fig. 6.1 and in `ways_by_size`."""

PAIR_BLOCKS = (8, 16, 24, 32)
"""Numbers of communicating thread blocks that are tried for COMET's kernels; the fastest is taken."""

CHUNKS = (1, 2, 4, 8)
"""Numbers of chunks that are tried for pmoe's schedule in chunks; the fastest is taken."""

EXPERTS = (8, 16, 32, 64, 128)
"""Experts of all ranks in Fig. 6.5."""

FIGURE65_TOKENS = 16384


# ---- Figs. 6.1 and 6.5


def latencies(gpus: int, tokens: int, experts: int) -> dict[str, float]:
    """Returns {"name of a system ms": milliseconds of a forward pass, launches of kernels included}.

    FlashDMoE computes in float32 and the other systems in 16 bits, as in the thesis (section 6.1.1). One more
    entry, "Megatron-TE, float32 ms", is the time that Megatron-TE would take in the same precision as
    FlashDMoE.

    gpus: number of GPUs.
    tokens: tokens of a GPU.
    experts: experts of all GPUs.
    """
    half = rank_layer(gpus, tokens, experts, element_size=2)
    one_chunk = makespan(chunked_run(*half, H100_HALF, 1))
    two_chunks = makespan(chunked_run(*half, H100_HALF, 2))
    float32 = makespan(chunked_run(*rank_layer(gpus, tokens, experts), H100, 1))
    seconds = {
        "FlashDMoE": (makespan(actor_run(gpus, 0.0, tokens, experts)), LAUNCHES["FlashDMoE"]),
        "Megatron-TE": (one_chunk, LAUNCHES["Megatron-LM TE"]),
        "Megatron-CUTLASS": (one_chunk, LAUNCHES["Megatron-LM CUTLASS"]),
        "FasterMoE": (two_chunks, chunk_launches(2, experts // gpus)),
        "Megatron-TE, float32": (float32, LAUNCHES["Megatron-LM TE"]),
    }
    return {
        f"{name} ms": (device + launches * LAUNCH_SECONDS) * 1e3
        for name, (device, launches) in seconds.items()
    }


def figure61() -> list[dict[str, Any]]:
    """Returns Fig. 6.1, milliseconds of a forward pass: a row for each number of GPUs and of tokens.

    A row has a field for each system. Tokens are counted for each GPU.
    """
    return [
        {"GPUs": gpus, "tokens": tokens, **latencies(gpus, tokens, 64)}
        for gpus, tokens in itertools.product((4, 8), SIZES)
    ]


def figure65() -> list[dict[str, Any]]:
    """Returns Fig. 6.5, milliseconds of a forward pass: a row for each number of GPUs and of experts.

    A row has a field for each system. Experts are those of all GPUs together.
    """
    return [
        {"GPUs": gpus, "experts": experts, **latencies(gpus, FIGURE65_TOKENS, experts)}
        for gpus, experts in itertools.product((4, 8), EXPERTS)
    ]


def speed_ups(figures: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yields the speed-ups of FlashDMoE that the thesis prints, each beside the simulated speed-up.

    figures: rows of the figures, by the name of the figure ("6.1", "6.5").

    Each result has these fields:

        figure                          the name of the figure
        GPUs                            the number of GPUs
        over                            the system to which FlashDMoE is compared; "all" for all systems
        most                            the largest simulated speed-up over this system, or over any system
        over Megatron-TE in float32     the largest simulated speed-up over Megatron-TE in float32
        thesis                          the speed-up that the thesis prints
    """
    for claim in printed("flashdmoe speed-ups"):
        figure, gpus, over, paper = claim
        rows = [row for row in figures[figure] if row["GPUs"] == gpus]
        systems = [over] if over != "all" else ["Megatron-TE", "Megatron-CUTLASS", "FasterMoE"]
        most = max(row[f"{name} ms"] / row["FlashDMoE ms"] for row in rows for name in systems)
        float32 = max(row["Megatron-TE, float32 ms"] / row["FlashDMoE ms"] for row in rows)
        yield {
            "figure": figure,
            "GPUs": gpus,
            "over": over,
            "most": most,
            "over Megatron-TE in float32": float32,
            "thesis": paper,
        }


# ---- Figs. 6.2 to 6.4 and 3.1


def scaled_layers() -> list[dict[str, Any]]:
    """Returns times of FlashDMoE's kernel and of a synchronous layer: a row for each number of GPUs.

    The synchronous layer runs one task after another. Fields whose names begin with "synchronous" are for
    this layer, all other fields for FlashDMoE's kernel:

        ms, synchronous ms        milliseconds of a forward pass, with the launches of its kernels
        O_e, synchronous O_e      overlap efficiency (Fig. 6.4): milliseconds with 2 GPUs, divided by
                                  milliseconds with this number of GPUs
        processors busy %         percentage of the time during which a processor (thread block) works, on
                                  average over the processors
        Mtokens/s                 million tokens that all GPUs together compute in a second
    """
    rows = list[dict[str, Any]]()
    for gpus in NUMBERS:
        run = actor_run(gpus)
        device, _ = synchronous_seconds(gpus)
        seconds = makespan(run) + LAUNCH_SECONDS
        row = {
            "GPUs": gpus,
            "ms": seconds * 1e3,
            "synchronous ms": (device + LAUNCHES["Megatron-LM TE"] * LAUNCH_SECONDS) * 1e3,
        }
        first = rows[0] if rows else row
        row["O_e"] = first["ms"] / row["ms"]
        row["synchronous O_e"] = first["synchronous ms"] / row["synchronous ms"]
        busy = sum(item.end - item.start for item in run if item.task.lane.startswith(("processor", "comm ")))
        row["processors busy %"] = 100 * busy / (H100.blocks - 1) / makespan(run)
        row["Mtokens/s"] = TOKENS * gpus / seconds / 1e6
        rows.append(row)
    return rows


def late_peers() -> list[dict[str, Any]]:
    """Returns how much slower a forward pass gets if one of 8 ranks is late: a row for each delay.

    A row has these fields:

        all-to-all, p95    a ratio from the thesis: the 95th percentile of an all-to-all's time, divided by
                           its usual time
        late ms            the delay in milliseconds: (ratio - 1) * milliseconds of an all-to-all
        synchronous ms     milliseconds that the delay adds to a layer that runs one task after another
        actors ms          milliseconds that the delay adds to FlashDMoE's kernel
        hidden %           the percentage of the delay that is not added to FlashDMoE's kernel
    """
    alone = makespan(actor_run(8))
    _, exchange = synchronous_seconds(8)
    rows = []
    for ratio in (1.32, 11.0):
        late = (ratio - 1) * exchange
        added = makespan(actor_run(8, late)) - alone
        row = {"all-to-all, p95": ratio, "late ms": late * 1e3, "synchronous ms": late * 1e3}
        rows.append({**row, "actors ms": added * 1e3, "hidden %": 100 * (1 - added / late)})
    return rows


def ways_by_size() -> list[dict[str, Any]]:
    """Returns the milliseconds of a forward pass in three ways: a row for each number of tokens of a rank.

    A row has these fields, in milliseconds:

        actors      FlashDMoE's kernel
        pair        COMET's two fused kernels
        pipeline    pmoe's schedule in chunks

    There are 8 ranks, and none is late. Three more fields, "actors, late" and so on, are for a pass in which
    another rank is late.
    """
    rows = list[dict[str, Any]]()
    for tokens in SIZES:
        arriving, returning = rank_layer(8, tokens)
        exchange = exchange_seconds(chunked_run(arriving, returning, H100, 1))
        pairs = {n_c: pair_run(arriving, returning, (n_c, n_c)) for n_c in PAIR_BLOCKS}
        first_blocks = min(pairs, key=lambda n_c: pairs[n_c][0])
        second_blocks = min(pairs, key=lambda n_c: pairs[n_c][1])
        in_chunks = {n: chunked_seconds(arriving, returning, n) for n in CHUNKS}
        n = min(CHUNKS, key=lambda n: in_chunks[n] + 4 * n * LAUNCH_SECONDS)
        ends = {item.task.name: item.end for item in actor_run(8, 0.0, tokens)}
        row: dict[str, Any] = {"tokens": tokens}
        for name, late in (("", 0.0), (", late", 0.32 * exchange)):
            actors = first_come(actor_tasks(arriving, H100, late, ends), H100.blocks - 1)
            row[f"actors{name}"] = (makespan(actors) + LAUNCH_SECONDS) * 1e3
            pair = sum(pair_run(arriving, returning, (first_blocks, second_blocks), late))
            row[f"pair{name}"] = (pair + 2 * LAUNCH_SECONDS) * 1e3
            chunked = chunked_seconds(arriving, returning, n, late) + 4 * n * LAUNCH_SECONDS
            row[f"pipeline{name}"] = chunked * 1e3
        rows.append(row)
    return rows


def tables() -> dict[str, list[dict[str, Any]]]:
    """Returns the tables that `pmoe simulate flashdmoe` prints, by name."""
    figures = {"6.1": figure61(), "6.5": figure65()}
    return {
        "table62": table62(),
        "figure61": figures["6.1"],
        "figure65": figures["6.5"],
        "speed_ups": list(speed_ups(figures)),
        "scaled": scaled_layers(),
        "late": late_peers(),
        "ways": ways_by_size(),
    }


LANES = {"link": ("link", 1), "subscriber": ("subscriber", 1), "scheduler": ("scheduler", 1)}
"""Rows of the drawing, without the row of the processors: {name of a row: (prefix, number of lanes)}.

The names of the row's lanes begin with the prefix.
"""


def actors_figure() -> Figure:
    """Returns a figure with two timelines of FlashDMoE's kernel on one of 8 ranks.

    In the first timeline no rank is late, in the second another rank is late. Needs matplotlib.
    """
    late = late_peers()[0]["late ms"] / 1e3
    lanes = LANES | {"processors": (("processor", "comm "), H100.blocks - 1)}
    runs = {"all alike": actor_run(8), f"one peer late by {late * 1e3:.2f} ms": actor_run(8, late)}
    panels = {name: busy_bars(run, lanes) for name, run in runs.items()}
    return drawing(panels, f"FlashDMoE's actors, {TOKENS} tokens a rank of 8 H100, simulated")
