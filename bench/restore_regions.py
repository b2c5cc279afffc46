"""Which of the strategies S1-S4 is fastest, by the rates of a machine? Simulated; nothing is measured.

One layer: M = 1024, H = 4096, B = 16384 tokens of a rank, top-1, even routing, bfloat16. A regime is

- a number of ranks W,
- link: seconds of an all-to-all of B x M elements / seconds of a product of B x M x H multiply-adds,
- copy: seconds of a copy of B x M elements / seconds of that product,
- whether lanes slow each other.

The simulator times the schedules that the layer runs. Eq. 10 picks a strategy without them.

    python bench/restore_regions.py              prints the tables, draws build/bench/restore_regions.png
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.pictures import plotting
from bench.timing import OUT
from pmoe.planner.cost_model import Interference, cheapest_pair
from pmoe.planner.costs import LineCost
from pmoe.planner.degree import Choice
from pmoe.planner.drawing import PAIRS
from pmoe.planner.layer_seconds import step_seconds
from pmoe.planner.layer_sizes import LayerSizes, sizes_from_options
from pmoe.planner.profile import Profile, Versions
from pmoe.schedule.restore import KEEP, STRATEGIES

M, H, B, ELEMENT_SIZE = 1024, 4096, 16384, 2
RANKS = (2, 8, 64)
DEGREES = (4, 8, 16)
LINK = tuple(2.0**k for k in range(-4, 5))
COPY = tuple(2.0**k for k in range(-5, 4))
SLOWED = Interference(
    mu_comp=0.8,
    mu_mem=0.7,
    mu_all=0.6,
    sigma_comm=0.98,
    sigma_mem=0.98,
    sigma_all=0.95,
    eta_comm=0.7,
    eta_comp=0.9,
    eta_all=0.65,
)
"""Interference as in Fig. 3: computation is hardly slowed, communication and copies much."""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """The rates of a machine, relative to each other.

    ranks: number of ranks.
    link, copy: seconds of an all-to-all and of a copy of B x M elements, over the seconds of one product.
    slowed: whether lanes slow each other.
    """

    ranks: int
    link: float
    copy: float
    slowed: bool


REGIMES = [
    Regime(ranks=W, link=link, copy=copy, slowed=slowed)
    for W, link, copy, slowed in itertools.product(RANKS, LINK, COPY, (False, True))
]


@functools.cache
def shape_of(ranks: int) -> LayerSizes:
    return sizes_from_options(M, H, 64, num_ranks=ranks, dtype=torch.bfloat16, device_type="cuda")


def profile_of_rates(
    ranks: int, multiply_adds: float, link_bytes: float, copy_bytes: float, interference: Interference
) -> Profile:
    """Returns the profile of a machine with these rates, each in units a second. A task of no size costs
    nothing.
    """
    return Profile(
        device="by hand",
        device_type="cuda",
        num_ranks=ranks,
        backend="nccl",
        dtype="bfloat16",
        versions=Versions(torch="none", cuda=None, file=1),
        compute=LineCost(0.0, 1 / multiply_adds),
        message=LineCost(0.0, 1 / link_bytes),
        copy_out=LineCost(0.0, 1 / copy_bytes),
        copy_in=LineCost(0.0, 1 / copy_bytes),
        interference=interference,
        seconds=0.0,
        when="",
    )


def profile_of(regime: Regime) -> Profile:
    """Returns the profile of a regime in which a product takes one second."""
    of_bytes = B * M * ELEMENT_SIZE
    return profile_of_rates(
        regime.ranks,
        float(B * M * H),
        of_bytes / regime.link,
        of_bytes / regime.copy,
        SLOWED if regime.slowed else Interference(),
    )


@functools.cache
def simulated(regime: Regime, n: int) -> dict[str, float]:
    """Returns the seconds of a simulated step with each of the strategies S1 to S4."""
    shape, profile = shape_of(regime.ranks), profile_of(regime)
    return {
        name: step_seconds(shape, profile, B, Choice(forward=n, backward=n, restore=pair))
        for name, pair in STRATEGIES.items()
    }


@functools.cache
def picked(regime: Regime) -> str:
    pair, _ = cheapest_pair(shape_of(regime.ranks), profile_of(regime), B, STRATEGIES.values())
    return pair.strategy or ""


H200_PRODUCTS, H200_LINK_BYTES, H200_COPY_BYTES = 300e12, 400e9, 50e9
"""Round numbers like those of an H200, not measured.

They are 600 TFLOP/s in bfloat16 (two FLOP a multiply-add), 400 GB/s between ranks, 50 GB/s to the host and
back.
"""

H200_LINK = (ELEMENT_SIZE / H200_LINK_BYTES) / (H / H200_PRODUCTS)
H200_COPY = (ELEMENT_SIZE / H200_COPY_BYTES) / (H / H200_PRODUCTS)


def h200(ranks: int, interference: Interference) -> Profile:
    return profile_of_rates(ranks, H200_PRODUCTS, H200_LINK_BYTES, H200_COPY_BYTES, interference)


LANES = {False: "lanes as fast as alone", True: "lanes slow each other"}

EQUAL = 0.01
"""Strategies count as equally fast if their simulated steps differ by at most this fraction."""


def winner(regime: Regime, n: int) -> str:
    """Returns the strategy that is fastest in the simulator; Eq. 10's pick if that is as fast."""
    seconds = simulated(regime, n)
    best = min(seconds, key=seconds.__getitem__)
    pick = picked(regime)
    return pick if seconds[pick] <= seconds[best] * (1 + EQUAL) else best


def table(ranks: int, slowed: bool, n: int) -> str:
    """Returns the fastest strategies as a Markdown table: a row for each copy, a column for each link.

    A star marks a regime for which Eq. 10 picks another strategy.
    """
    lines = [
        "| copy \\ link | " + " | ".join(f"{link:g}" for link in LINK) + " |",
        "|---" * (len(LINK) + 1) + "|",
    ]
    for copy in COPY:
        regimes = [Regime(ranks=ranks, link=link, copy=copy, slowed=slowed) for link in LINK]
        cells = [winner(regime, n) + "*" * (winner(regime, n) != picked(regime)) for regime in regimes]
        lines.append(f"| {copy:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


COLOURS = {name: PAIRS[str(pair)] for name, pair in STRATEGIES.items()}


def draw(path: Path, n: int) -> None:
    """Draws one square for each W and for lanes that slow each other or not. Needs matplotlib.

    Each point of a square is a regime (link, copy).
    """
    from matplotlib.patches import Patch, Rectangle

    pyplot = plotting()
    figure, axes = pyplot.subplots(2, len(RANKS), figsize=(10, 8), sharex=True, sharey=True)
    for (row, slowed), (column, ranks) in itertools.product(enumerate((False, True)), enumerate(RANKS)):
        ax = axes[row][column]
        for link, copy in itertools.product(LINK, COPY):
            regime = Regime(ranks=ranks, link=link, copy=copy, slowed=slowed)
            fastest, x, y = winner(regime, n), math.log2(link), math.log2(copy)
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=COLOURS[fastest], lw=0))
            ax.text(x, y, fastest, ha="center", va="center", color="white")
            if fastest != picked(regime):
                ax.plot([x + 0.33], [y + 0.33], "k.", markersize=5)
        ax.plot([math.log2(H200_LINK)], [math.log2(H200_COPY)], "k*", markersize=12)
        ax.set_xlim(math.log2(LINK[0]) - 0.5, math.log2(LINK[-1]) + 0.5)
        ax.set_ylim(math.log2(COPY[0]) - 0.5, math.log2(COPY[-1]) + 0.5)
        ax.set_xticks([math.log2(ratio) for ratio in LINK], [f"{ratio:g}" for ratio in LINK], rotation=45)
        ax.set_yticks([math.log2(ratio) for ratio in COPY], [f"{ratio:g}" for ratio in COPY])
        ax.set_title(f"W = {ranks}, {LANES[slowed]}")
        if column == 0:
            ax.set_ylabel("copy of B x M / one product")
        if row == 1:
            ax.set_xlabel("all-to-all of B x M / one product")
    entries = [Patch(color=COLOURS[name], label=f"{name} {pair}") for name, pair in STRATEGIES.items()]
    entries.append(pyplot.Line2D([], [], color="k", marker=".", lw=0, label="Eq. 10 picks another"))
    entries.append(
        pyplot.Line2D([], [], color="k", marker="*", markersize=10, lw=0, label="ratios of an H200")
    )
    figure.legend(handles=entries, loc="lower center", ncol=2, frameon=False)
    figure.suptitle(
        f"Fastest of S1-S4 by the simulator, n = {n}, M = {M}, H = {H}, B = {B} (model, not measured)"
    )
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Which of S1-S4 is fastest where: a model, not a measurement."
    )
    parser.add_argument("--n", type=int, default=8, help="micro-batches (8)")
    parser.add_argument("--out", type=Path, default=OUT / "restore_regions.png", help="the picture")
    args = parser.parse_args()
    for ranks, slowed in itertools.product(RANKS, (False, True)):
        print(f"W = {ranks}, {LANES[slowed]}, n = {args.n}\n", flush=True)
        print(table(ranks, slowed, args.n) + "\n", flush=True)
    print(f"H200 (link {H200_LINK:.2g}, copy {H200_COPY:.2g}), milliseconds of a step, n = {args.n}\n")
    pairs = {"keep": KEEP, **STRATEGIES}
    print("| W | lanes | " + " | ".join(pairs) + " |\n" + "|---" * (len(pairs) + 2) + "|")
    for ranks, slowed in itertools.product(RANKS, (False, True)):
        shape, profile = shape_of(ranks), h200(ranks, SLOWED if slowed else Interference())
        seconds = [
            step_seconds(shape, profile, B, Choice(forward=args.n, backward=args.n, restore=pair))
            for pair in pairs.values()
        ]
        print(
            f"| {ranks} | {LANES[slowed]} | "
            + " | ".join(f"{duration * 1e3:.2f}" for duration in seconds)
            + " |"
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(args.out, args.n)


if __name__ == "__main__":
    main()
