"""Simulates MPipeMoE's Figs. 8 and 12: the split of a batch along tokens, and FasterMoE's split.

Fig. 8 compares three systems. FastMoE has one chunk. FasterMoE splits a rank's rows by the ranks to which
they are sent (Fig. 5a). PipeMoE splits the rows along the tokens (Fig. 5b). PipeMoE is the paper's pipeline
without reuse of memory. Fig. 12 shows the time of PipeMoE's step for several numbers of chunks.

The drawing below shows both splits for 4 ranks and 2 chunks. The rank has two rows for each destination rank,
on the left. The digits in the two other tables are the chunks (0 or 1) in which these rows are sent.

    rows of a rank                  by destination               along tokens
    | to 0 | to 1 | to 2 | to 3 |   | 0 0 | 0 0 | 1 1 | 1 1 |    | 0 1 | 0 1 | 0 1 | 0 1 |

Schedules are pmoe's own. The costs of tasks follow from stated rates (ASSUMPTIONS), which were written down
before the first run. Nothing was measured or fitted to the paper.

Letters: B tokens of a rank, M = d_model, H = d_hidden, n chunks.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from pmoe.papers.assumptions import assumptions, printed
from pmoe.planner.costs import LineCost
from pmoe.planner.simulator import TaskCost, makespan, simulate, task_seconds
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, PassDirection, Stages, Task, sequential

ASSUMPTIONS = assumptions("mpipemoe")
"""Assumptions, by name, where the paper says nothing or is ambiguous."""

RANKS = 64
RANKS_PER_NODE = 8
ELEMENT_SIZE = 4

INSIDE = LineCost(0.5e-6, 1 / (0.8 * 300e9))
"""Seconds of a message to a peer in the same node, by bytes."""

OUTSIDE = LineCost(1e-6, 1 / (0.8 * 25e9))
"""Seconds of a message to a peer in another node, by bytes."""

TASK_SECONDS = 20e-6
"""Seconds of a task of the experts in addition to its products."""

HALF_ROWS = 512
"""The number of rows with which a product on tensor cores reaches half of its highest rate."""

DEGREES = (1, 2, 4, 8, 16)
GROUPS = 2
"""Number of groups of ranks in FasterMoE, which has one chunk for each group."""

TOKENS = (4096, 8192, 16384, 32768)
"""Numbers of tokens (B) in Fig. 8. They are those of Fig. 10, because the paper does not list them."""


class Sizes(NamedTuple):
    """Sizes of an MoE layer in MPipeMoE's Table III.

    M: d_model.
    H: d_hidden.
    """

    M: int
    H: int


MODELS: Mapping[str, Sizes] = {name: Sizes(**sizes) for name, sizes in printed("mpipemoe table 3").items()}


class Products(NamedTuple):
    """Rate at which a GPU multiplies matrices: rate * rows / (rows + half_rows) operations per second.

    rate: floating-point operations per second of a product with many rows.
    half_rows: number of rows with which a product reaches half of ``rate``; 0 for a rate that does not depend
        on the number of rows.
    """

    rate: float
    half_rows: float

    def seconds(self, rows: float, flops: float) -> float:
        """Returns the seconds of one or more matrix products.

        rows: number of rows of each product. Products of few rows run at a lower rate.
        flops: floating-point operations of all products together.
        """
        return flops / self.rate * (rows + self.half_rows) / rows


TENSOR_CORES = Products(0.5 * 156e12, HALF_ROWS)
NO_TENSOR_CORES = Products(0.8 * 19.5e12, 0.0)

BASELINES: Mapping[str, Products] = {"all": TENSOR_CORES, "PipeMoE": NO_TENSOR_CORES}
"""Two cases for the rate of FastMoE's and FasterMoE's products.

"all": all three systems use tensor cores. "PipeMoE": only PipeMoE uses them.
"""


class SplitChunk(NamedTuple):
    """The messages and rows of one rank in one chunk of a pass.

    inside: number of messages that the rank sends to ranks of its own node.
    outside: number of messages that the rank sends to ranks of other nodes.
    message_rows: number of rows of each message.
    rows: number of rows that the rank's expert computes.
    """

    inside: int
    outside: int
    message_rows: float
    rows: float

    def exchange_seconds(self, M: int) -> float:
        """Returns the seconds of an all-to-all of the chunk's rows.

        A rank has two links, one to its own node and one to other nodes. A link sends one message after
        another. Both links work at the same time.

        M: elements of a row (d_model).
        """
        num_bytes = self.message_rows * M * ELEMENT_SIZE
        return max(self.inside * INSIDE(num_bytes), self.outside * OUTSIDE(num_bytes))


def along_tokens(B: int, n: int) -> list[SplitChunk]:
    """Returns MPipeMoE's n chunks (Fig. 5b). Each chunk has 1 / n of the rows for every destination rank.

    B: number of tokens of a rank.
    n: number of chunks.
    """
    chunk = SplitChunk(RANKS_PER_NODE - 1, RANKS - RANKS_PER_NODE, B / RANKS / n, B / n)
    return [chunk] * n


def by_destination(B: int, n: int) -> list[SplitChunk]:
    """Returns FasterMoE's n chunks (Fig. 5a). Each chunk has all rows for one group of neighbouring ranks.

    Chunk 0 has the rows for the rank's own group, chunk 1 the rows for the next group, and so on. Rows for
    the rank itself are not sent over a link.

    B: number of tokens of a rank.
    n: number of groups and of chunks. The number of ranks must be a multiple of it.
    """
    size = RANKS // n
    mates = min(size, RANKS_PER_NODE)
    own = SplitChunk(mates - 1, size - mates, B / RANKS, B / n)
    if size >= RANKS_PER_NODE:
        return [own, *[SplitChunk(0, size, B / RANKS, B / n)] * (n - 1)]
    groups_of_node = RANKS_PER_NODE // size
    near = [SplitChunk(size, 0, B / RANKS, B / n)] * (groups_of_node - 1)
    return [own, *near, *[SplitChunk(0, size, B / RANKS, B / n)] * (n - groups_of_node)]


@functools.cache
def both_passes_seconds(
    sizes: Sizes, chunks: tuple[SplitChunk, ...], products: Products, *, overlaps: bool = True
) -> float:
    """Returns the simulated seconds of a forward and a backward pass of a layer.

    sizes: sizes of the layer.
    chunks: the chunks of each pass, in order.
    products: rate at which a GPU multiplies matrices.
    overlaps: whether all-to-alls run beside computation. If False, tasks run one after another.
    """
    flops_of_row = 2 * 2 * sizes.M * sizes.H  # of the two products of forward

    def exchanged(task: Task) -> float:
        return chunks[task.chunk].exchange_seconds(sizes.M)

    def computed(task: Task) -> float:
        rows = chunks[task.chunk].rows
        return TASK_SECONDS + products.seconds(rows, rows * flops_of_row)

    # In backward, COMPUTE has the products for gradients of rows, and WGRAD those for gradients of weights.
    costs: Mapping[Kind, TaskCost] = {
        Kind.DISPATCH: exchanged,
        Kind.COMPUTE: computed,
        Kind.WGRAD: computed,
    }
    return sum(
        makespan(simulate(_tasks(direction, len(chunks), overlaps), task_seconds(costs)))
        for direction in get_args(PassDirection)
    )


def _tasks(direction: PassDirection, n: int, overlaps: bool) -> Sequence[Task]:
    """Returns the tasks of a pass in n chunks.

    Rows for an expert on their own rank have no tasks of their own. They wait for the all-to-alls, and are
    computed together with the rows that come from other ranks.

    direction: "forward" or "backward".
    n: number of chunks.
    overlaps: whether all-to-alls run beside computation. If False, tasks run one after another.
    """
    builder = forward_schedule if direction == "forward" else backward_schedule
    schedule = builder(n, Stages(local=False, remote=True))
    return (schedule if overlaps else sequential(schedule)).tasks


# ---- Fig. 8


def fast_moe(sizes: Sizes, B: int, products: Products) -> float:
    """Returns the simulated seconds of a step by FastMoE: one chunk, and one task after another.

    sizes: sizes of the layer.
    B: number of tokens of a rank.
    products: rate at which a GPU multiplies matrices.
    """
    return both_passes_seconds(sizes, tuple(along_tokens(B, 1)), products, overlaps=False)


def faster_moe(sizes: Sizes, B: int, products: Products) -> float:
    """Returns the simulated seconds of a step by FasterMoE, with two chunks, split by destination rank.

    sizes: sizes of the layer.
    B: number of tokens of a rank.
    products: rate at which a GPU multiplies matrices.
    """
    return both_passes_seconds(sizes, tuple(by_destination(B, GROUPS)), products)


def pipe_moe(sizes: Sizes, B: int, n: int) -> float:
    """Returns the simulated seconds of a step by PipeMoE, with n chunks, split along the tokens.

    With n = 1, tasks run one after another.

    sizes: sizes of the layer.
    B: number of tokens of a rank.
    n: number of chunks.
    """
    return both_passes_seconds(sizes, tuple(along_tokens(B, n)), TENSOR_CORES, overlaps=n > 1)


def best_n(sizes: Sizes, B: int) -> int:
    """Returns the number of chunks with which PipeMoE's step is fastest.

    If several numbers are equally fast, the smallest of them is returned.

    sizes: sizes of the layer.
    B: number of tokens of a rank.
    """
    return min(DEGREES, key=lambda n: pipe_moe(sizes, B, n))


def figure8() -> list[dict[str, Any]]:
    """Returns the times of Fig. 8: a row for each model and number of tokens of a rank (B).

    A row has these fields:

        TF32                          the systems that use tensor cores: "all" or "PipeMoE" (only PipeMoE)
        model                         the name of the model
        B                             the number of tokens of a rank
        FastMoE_seconds, and so on    seconds of a step by each system
        n=2_seconds                   seconds of PipeMoE's step in 2 chunks, the number that FasterMoE has
        n                             the number of chunks with which PipeMoE's step is fastest
        over FastMoE, over FasterMoE  speed-up of PipeMoE over this system
    """
    rows = []
    for (cores, products), (name, sizes), B in itertools.product(BASELINES.items(), MODELS.items(), TOKENS):
        n = best_n(sizes, B)
        pipe = pipe_moe(sizes, B, n)
        fast = fast_moe(sizes, B, products)
        faster = faster_moe(sizes, B, products)
        rows.append(
            {
                "TF32": cores,
                "model": name,
                "B": B,
                "FastMoE_seconds": fast,
                "FasterMoE_seconds": faster,
                "n=2_seconds": pipe_moe(sizes, B, GROUPS),
                "PipeMoE_seconds": pipe,
                "n": n,
                "over FastMoE": fast / pipe,
                "over FasterMoE": faster / pipe,
            }
        )
    return rows


def speed_ups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the speed-ups of PipeMoE that section V.C names, simulated and as the paper prints them.

    There is a row for each of these speed-ups:

        speed-up         the speed-up in words, such as "mean over FasterMoE"
        TF32: all        the simulated speed-up if all systems use tensor cores
        TF32: PipeMoE    the simulated speed-up if only PipeMoE uses tensor cores
        paper            the speed-up that the paper prints

    rows: the result of `figure8`.
    """
    table = []
    for words, paper in printed("mpipemoe figure 8").items():
        kind, _, over = words.partition(" ")
        line: dict[str, Any] = {"speed-up": words}
        for cores in BASELINES:
            values = [row[over] for row in rows if row["TF32"] == cores]
            line[f"TF32: {cores}"] = max(values) if kind == "most" else statistics.fmean(values)
        table.append({**line, "paper": paper})
    return table


# ---- Fig. 12


FIGURE12_MODEL = "MoE-GPT3-XL"
FIGURE12_TOKENS = tuple(1024 * k for k in (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64))
"""Numbers of tokens (B) in Fig. 12. The text names only 8k and 22k, where the best n changes in the paper."""


def figure12() -> list[dict[str, Any]]:
    """Returns the times of Fig. 12: a row for each number of tokens of a rank (B).

    A row has these fields:

        B               the number of tokens of a rank
        n=1_seconds     simulated seconds of PipeMoE's step in 1 chunk; there are more such fields for other
                        numbers of chunks
        best            the number of chunks with the least simulated time
        paper           the number of chunks that is fastest in the paper
    """
    sizes = MODELS[FIGURE12_MODEL]
    rows = []
    for B in FIGURE12_TOKENS:
        seconds = {f"n={n}_seconds": pipe_moe(sizes, B, n) for n in DEGREES}
        rows.append({"B": B, **seconds, "best": best_n(sizes, B), "paper": paper_n(B)})
    return rows


def paper_n(B: int) -> int:
    """Returns the number of chunks that is fastest in the paper's Fig. 12, for B tokens of a rank."""
    return int(max(n for n, first in printed("mpipemoe figure 12") if first <= B))


def tables() -> dict[str, list[dict[str, Any]]]:
    """Returns the tables that `pmoe simulate mpipemoe` prints, by name."""
    rows = figure8()
    return {"figure8": rows, "speed_ups": speed_ups(rows), "figure12": figure12()}
