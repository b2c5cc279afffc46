"""A training step of large models on 8 to 4,096 ranks, by the engine's own schedules and stated rates.

    python bench/scale.py [--assumptions] [--draw FILE]

Ranks that do the same are one class: an array has a number for each class, and every task of a schedule is
timed for all classes at once. `ASSUMPTIONS` were fixed before the first run; no rate is measured or fitted.

Letters: W ranks, P ranks that share the experts, n chunks.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.stated import assumptions, by_key, run
from pmoe.comm.counts import RankCounts, num_bins, slot_rows
from pmoe.planner.drawing import LIGHT, SERIES
from pmoe.planner.layer_sizes import LayerSizes, sizes_from_options
from pmoe.planner.memory import PredictedMemory, predict
from pmoe.planner.pass_rows import counted_rows
from pmoe.planner.timeline import TEXT_SIZE
from pmoe.schedule.restore import STRATEGIES
from pmoe.schedule.rings import rotating
from pmoe.schedule.tasks import Lane, Stages, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ASSUMPTIONS = assumptions("scale")

Classes = npt.NDArray[np.float64]
"""A number for each class of ranks."""


class ScaledModel(NamedTuple):
    """A model. layers: MoE layers. dense: parameters that are no routed expert's, with both embeddings of
    ``words`` rows. scores: elements of queries, keys and values that a token's scores take, of all layers."""

    d_model: int
    d_hidden: int
    num_experts: int
    top_k: int
    layers: int
    words: int
    scores: int
    dense: int

    @property
    def expert(self) -> int:
        """Parameters of one."""
        return 3 * self.d_model * self.d_hidden


_MIXTRAL = 32 * 4096 * (2 * 4096 + 2 * 1024) + 2 * 32000 * 4096
_MLA = 7168 * (1536 + 512 + 64) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
_DEEPSEEK = 61 * _MLA + 3 * 7168 * (58 * 2048 + 3 * 18432) + 2 * 129280 * 7168
_QWEN = 94 * 4096 * (2 * 8192 + 2 * 512) + 2 * 151936 * 4096
MODELS: Mapping[str, ScaledModel] = {
    "Mixtral 8x7B": ScaledModel(4096, 14336, 8, 2, 32, 32000, 32 * 32 * (128 + 128), _MIXTRAL),
    "DeepSeek-V3": ScaledModel(7168, 2048, 256, 8, 58, 129280, 61 * 128 * (192 + 128), _DEEPSEEK),
    "Qwen3-235B-A22B": ScaledModel(4096, 1536, 128, 8, 94, 151936, 94 * 64 * (128 + 128), _QWEN),
}
NUMBERS, DEGREES = tuple(8 << i for i in range(10)), (1, 4, 8)
TOKENS, BATCH, SEQUENCE = 8192, 4_194_304, 4096

LOCAL = 8  # ranks of a machine
FLOPS, LAUNCH, WEIGHTS, INSIDE, OUTSIDE = 400e12, 20e-6, 2.7e12, 300e9, 40e9
MESSAGE_INSIDE, MESSAGE_OUTSIDE, COLLECTIVE, HOP = 0.5e-6, 1e-6, 20e-6, 5e-6
ELEMENT, OPTIMIZER, SLACK = 2, 12, 1.25
STRAGGLER, LOSSY = 2.0, 1 + 0.01 * 61
S4 = STRATEGIES["S4"]
LIMITS = ("all-to-alls", "gradients", "launches")
LOOK: Any = {
    "font.size": TEXT_SIZE,
    "axes.titlesize": TEXT_SIZE,
    "axes.titlelocation": "left",
    "axes.grid": True,
}
LOOK |= {"axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.25}
TITLES = (f"{TOKENS:,} tokens a rank", f"{BATCH / 1e6:.1f} million tokens a step")


@dataclass(frozen=True)
class Case:
    """A step to simulate. tokens: of a rank in one of ``passes`` forward and backward passes.

    skewed, straggler, lossy: what is not as it should be. free: which of LIMITS takes no time.
    """

    model: str
    ranks: int
    tokens: int
    n: int
    passes: int = 1
    skewed: bool = True
    straggler: bool = False
    lossy: bool = False
    free: str = ""

    @property
    def sharing(self) -> int:
        """P."""
        return min(self.ranks, MODELS[self.model].num_experts)


# ---- routing


@functools.cache
def popularity(num_experts: int, skewed: bool) -> Classes:
    """(E,) the share of all rows that each expert has."""
    drawn = np.exp(0.3 * np.random.default_rng(0).standard_normal(num_experts) * skewed)
    return np.asarray(drawn / drawn.sum())


def rank_shares(case: Case) -> Classes:
    """(P,) of all rows, those for each rank's experts."""
    shares = popularity(MODELS[case.model].num_experts, case.skewed)
    return np.asarray(shares.reshape(case.sharing, -1).sum(1))


def cut_degree(case: Case) -> int:
    """The number of chunks that runs: n, doubled until no rank gets more rows in a chunk than its slot
    holds, or as often as the bins allow (`pmoe.comm.counts.Slots`)."""
    model, cut = MODELS[case.model], case.n
    received = (case.sharing - 1) * case.tokens * model.top_k * rank_shares(case).max()
    bins = num_bins((case.n,), case.sharing, model.num_experts)
    while bins % (2 * cut) == 0 and received / cut > slot_rows(SLACK, model.top_k, case.tokens, case.n):
        cut *= 2
    return cut


# ---- seconds


def all_to_all_seconds(num_bytes: Classes, sharing: int, slowed: Classes) -> Classes:
    """Of a rank with ``num_bytes`` for all its peers, or from them. slowed: what makes links between machines
    so many times as slow."""
    mates = min(sharing, LOCAL) - 1
    away, each = sharing - 1 - mates, num_bytes / (sharing - 1)
    inside = mates * (MESSAGE_INSIDE + each / INSIDE)
    return np.asarray(COLLECTIVE + np.maximum(inside, away * (MESSAGE_OUTSIDE + each / OUTSIDE) * slowed))


def gradient_seconds(case: Case, slowed: Classes) -> Classes:
    """Of the gradients of one layer."""

    def ring(num_bytes: float, ranks: int, rate: float) -> float:
        return 2 * num_bytes * (ranks - 1) / ranks / rate + 2 * HOP * math.log2(ranks)

    model = MODELS[case.model]
    dense = ELEMENT * model.dense / model.layers
    experts = ELEMENT * model.expert * model.num_experts / case.sharing
    between = ring(dense / LOCAL, case.ranks // LOCAL, OUTSIDE)
    between += ring(experts, case.ranks // case.sharing, OUTSIDE)
    return np.asarray(2 * COLLECTIVE + ring(dense, LOCAL, INSIDE) + between * slowed)


def class_seconds(case: Case) -> dict[str, Classes]:
    """Of each kind of task, for the classes: an ordinary rank, that of the hottest experts, a straggler, a
    lossy one; also of the "dense" part in forward, and of the exchange of row "counts"."""
    model, n, hottest = MODELS[case.model], cut_degree(case), rank_shares(case).max()
    ordinary = (1 - hottest) / (case.sharing - 1)
    slow = np.array([1, 1, STRAGGLER if case.straggler else 1, 1])
    slowed = np.array([1, 1, 1, LOSSY if case.lossy else 1])
    rows = case.tokens * model.top_k / n
    stay = rows * np.array([ordinary, hottest, ordinary, ordinary])
    away = (case.sharing - 1) * stay
    travelling = np.maximum(away, rows - stay)
    weights = ELEMENT * model.expert * model.num_experts / case.sharing

    def experts(part: float, rows: Classes) -> Classes:
        """Of a task with ``part`` of an expert's products."""
        products = np.maximum(2 * model.expert * part * rows / FLOPS, part * weights / WEIGHTS)
        return np.asarray((LAUNCH * (case.free != "launches") + products) * slow)

    def exchange(num_bytes: Classes) -> Classes:
        return all_to_all_seconds(num_bytes, case.sharing, slowed) * (case.free != "all-to-alls")

    rows_move = exchange(ELEMENT * model.d_model * travelling)
    dense = 2 * (model.dense - model.words * model.d_model) + SEQUENCE * model.scores
    return {
        **dict.fromkeys(("S", "SI", "R"), rows_move),
        "P": exchange(4 * n * travelling),
        **dict.fromkeys(("C", "W"), experts(1, away)),
        **dict.fromkeys(("L", "LW"), experts(1, stay)),
        "M": experts(2 / 3, away),
        "LM": experts(2 / 3, stay),
        "GAR": gradient_seconds(case, slowed) * (case.free != "gradients"),
        "dense": case.tokens * dense / model.layers / FLOPS * slow,
        "counts": exchange(np.full(4, 4.0 * n * model.num_experts)),
    }


def run_together(tasks: Sequence[Task], seconds: Mapping[str, Classes], start: Classes) -> Classes:
    """When each class ends a pass that it begins at ``start``. A collective begins when the last class comes,
    and ends for all when the slowest is done; all else is `pmoe.planner.simulator.simulate`."""
    free: dict[Lane, Classes] = {}
    ends: dict[str, Classes] = {}
    for task in tasks:
        begin = functools.reduce(np.maximum, [ends[name] for name in task.waits], free.get(task.lane, start))
        took = seconds.get(task.kind, np.zeros_like(start))
        meets = task.lane == Lane.COMMUNICATE
        end = np.full_like(start, begin.max() + took.max()) if meets else begin + took
        ends[task.name] = free[task.lane] = end
    return np.asarray(np.maximum.reduce(list(ends.values())))


def repeated(layer: Callable[[Classes], Classes], times: int, start: Classes) -> Classes:
    """The end of so many layers. Ranks meet in each, so the fourth and later ones add what the third did."""
    before = end = start
    for _ in range(min(times, 3)):
        before, end = end, layer(end)
    return end + max(0, times - 3) * (end - before)


@functools.cache
def scaled_seconds(case: Case) -> float:
    """Of a step: of all its passes, the last of which carries the gradients."""
    n, layers = cut_degree(case), MODELS[case.model].layers
    stages = Stages(local=True, remote=True, gradients=True)
    passes = [rotating(direction, n, stages, restore=S4).tasks for direction in ("forward", "backward")]

    def of_pass(seconds: Mapping[str, Classes]) -> float:
        def forward(start: Classes) -> Classes:
            met = (start + seconds["dense"]).max() + seconds["counts"]
            return run_together(passes[0], seconds, np.full_like(start, met.max()))

        def backward(start: Classes) -> Classes:
            return run_together(passes[1], seconds, start) + 3 * seconds["dense"]

        end = repeated(backward, layers, repeated(forward, layers, np.zeros(4)))
        return float(end.max() + seconds["GAR"].max())

    last = class_seconds(case)
    before = {**last, "GAR": np.zeros(4)}
    return of_pass(last) + ((case.passes - 1) * of_pass(before) if case.passes > 1 else 0.0)


# ---- bytes


def routed_sizes(case: Case) -> LayerSizes:
    model, options = MODELS[case.model], {"expert": "swiglu", "bias": False, "device_type": "cuda"}
    shape: Any = {**options, "top_k": model.top_k, "num_ranks": case.sharing, "dtype": torch.bfloat16}
    return sizes_from_options(*model[:3], **shape)


def layer_memory(case: Case) -> PredictedMemory:
    """Of one layer on the rank of the hottest experts, by the memory model."""
    model, sizes, n = MODELS[case.model], routed_sizes(case), cut_degree(case)
    rank = int(rank_shares(case).argmax())
    shares = np.tile(popularity(model.num_experts, case.skewed), n) / n
    ends = np.rint(shares.cumsum() * case.tokens * model.top_k)
    rows = torch.from_numpy(np.diff(ends, prepend=0).astype(np.int64)).view(n, case.sharing, -1)
    recv = rows[:, rank : rank + 1].expand_as(rows)
    counts = RankCounts(send=rows, recv=recv, recv_device=recv, max_tokens=case.tokens, needs_grad=True)
    found = counted_rows(sizes, counts, rank, n)
    return predict(sizes, sizes.call(case.tokens), found, found, S4)


def worst_bytes(case: Case) -> int:
    """The peak of the rank with most: its parameters, gradients and optimizer state, all layers' saved bytes,
    and what one layer adds to them."""
    model, memory = MODELS[case.model], layer_memory(case)
    experts = model.layers * model.expert * model.num_experts // case.sharing
    states = 2 * ELEMENT * (model.dense + experts)
    states += OPTIMIZER * (model.dense // case.ranks + experts * case.sharing // case.ranks)
    saved = memory.saved + case.tokens * model.d_model * ELEMENT
    return states + model.layers * saved + memory.promised - memory.saved


# ---- the figures


def scaling(strong: bool) -> list[dict[str, Any]]:
    """A row for each model and number of ranks; see "columns" of ASSUMPTIONS."""
    rows = list[dict[str, Any]]()
    for model, ranks in itertools.product(MODELS, NUMBERS):
        per_rank = BATCH // ranks if strong else TOKENS
        passes = max(1, per_rank // TOKENS)
        asked = [Case(model, ranks, per_rank // passes, n, passes) for n in DEGREES]
        case = min(asked, key=scaled_seconds)
        seconds, even = scaled_seconds(case), scaled_seconds(replace(case, skewed=False))
        without = {free: scaled_seconds(replace(case, free=free)) for free in LIMITS} | {"skew": even}
        waits_for = min(without, key=without.__getitem__)
        row: dict[str, Any] = {"model": model, "ranks": ranks, "tokens": case.tokens, "passes": passes}
        row |= {"n": case.n, "chunks": cut_degree(case), "ms": seconds * 1e3}
        row |= {"ktokens/s": passes * case.tokens * ranks / seconds / 1e3, "even ms": even * 1e3}
        row["lossy ms"] = scaled_seconds(replace(case, lossy=True)) * 1e3
        for each in asked:
            slow = scaled_seconds(replace(each, straggler=True))
            row[f"straggler n={each.n}"] = slow / scaled_seconds(each)
        row |= {"GiB": worst_bytes(case) / 2**30, "waits for": waits_for}
        rows.append({**row, "%": 100 * (1 - without[waits_for] / seconds)})
    return rows


def scaling_ends(rows: Sequence[Mapping[str, Any]], strong: bool) -> dict[str, Mapping[str, Any]]:
    """By model the first row that ASSUMPTIONS call the end of scaling, where there is one."""
    found = dict[str, Mapping[str, Any]]()
    for before, row in itertools.pairwise(rows):
        first = next(each for each in rows if each["model"] == row["model"])
        least = (
            1.5 * before["ktokens/s"] if strong else first["ktokens/s"] * row["ranks"] / first["ranks"] / 2
        )
        if before["model"] == row["model"] and row["ktokens/s"] < least:
            found.setdefault(row["model"], row)
    return found


def scaling_figure() -> Figure:
    """Tokens a second by ranks, weak scaling beside strong. Needs matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ring: Any = {"ls": "", "marker": "o", "ms": 14, "mfc": "none", "mec": LIGHT["bad"], "mew": 2}
    with rc_context(LOOK):
        figure = Figure(figsize=(10, 6), layout="constrained")
        for axis, strong in zip(figure.subplots(1, 2), (False, True), strict=True):
            rows = scaling(strong)
            ends = scaling_ends(rows, strong)
            for model, name in zip(MODELS, SERIES, strict=False):
                mine = [row for row in rows if row["model"] == model]
                speed = np.array([row["ktokens/s"] / (1 if strong else row["ranks"]) for row in mine])
                straggled = speed / [row[f"straggler n={row['n']}"] for row in mine]
                axis.plot(NUMBERS, speed, "o-", color=LIGHT[name], label=model * strong)
                axis.plot(NUMBERS, straggled, "--", color=LIGHT[name], lw=1.2)
                if model in ends:
                    at, below = NUMBERS.index(ends[model]["ranks"]), -24 if strong or name == "c1" else 12
                    axis.plot(NUMBERS[at], speed[at], **ring)
                    told: Any = {"xytext": (12, below), "textcoords": "offset points"}
                    axis.annotate(ends[model]["waits for"], (NUMBERS[at], speed[at]), **told)
            axis.plot([], [], "--", color="black", lw=1.2, label="with a straggler of 2 x" * strong)
            axis.plot([], [], label="where it stops scaling, and for what" * strong, **ring)
            axis.set(title=("weak: ", "strong: ")[strong] + TITLES[strong], xlabel="ranks")
            axis.set(ylabel="thousand tokens a second" + " and rank" * (not strong))
            axis.set_xscale("log", base=2)
            axis.set_yscale("log" if strong else "linear")
            axis.set_xticks(NUMBERS[::3], map(str, NUMBERS[::3]))
        figure.axes[0].set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def lines() -> Iterator[str]:
    for name, strong in (("weak", False), ("strong", True)):
        rows = scaling(strong)
        yield f"{name} scaling: {TITLES[strong]}\n\n{by_key(rows)}\n"
        for model, end in scaling_ends(rows, strong).items():
            yield f"{model} stops at {end['ranks']} ranks: {end['waits for']}"
        yield ""
    yield textwrap.fill(ASSUMPTIONS["columns"], 110)


if __name__ == "__main__":
    run("scale", lines, scaling_figure)
