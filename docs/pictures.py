"""Pictures of the documentation that the planner draws: simulated, of a machine that is assumed.

    python docs/pictures.py docs

They are kept beside the pages, which must be whole where they are read without a build; a test notices where
the planner would draw others. What `pmoe plan --html` writes is made when the site is built.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from pmoe import Restore, cli
from pmoe.cli.arguments import byte_count
from pmoe.cli.plan import time_over_memory
from pmoe.measure.profile import save_profile
from pmoe.planner.cluster import Cluster
from pmoe.planner.copies import CopyLimits, CopyPlan, plan_copies
from pmoe.planner.cost_model import Interference
from pmoe.planner.costs import LineCost
from pmoe.planner.degree import all_choices
from pmoe.planner.drawing import LIGHT, SERIES
from pmoe.planner.layer_sizes import LayerSizes, sizes_from_options
from pmoe.planner.priced_choices import PricedChoice, advise, evaluate, step_bars
from pmoe.planner.profile import FORMAT, Profile, Versions
from pmoe.planner.timeline import TEXT_SIZE, Span, draw, simulated_bars
from pmoe.planner.uneven_ranks import UnevenLayer, uneven_pass
from pmoe.schedule.restore import KEEP, STRATEGIES

MACHINE = (
    "8 ranks, 600 TFLOP/s in bfloat16, 50 GB/s between ranks, 50 GB/s to the host, 10 microseconds a task"
)
"""Round numbers of one machine, not measured: the pages name them beside each picture."""

PROFILE = Profile(
    device="assumed",
    device_type="cuda",
    num_ranks=8,
    backend="nccl",
    dtype="bfloat16",
    versions=Versions(torch="any", cuda=None, file=FORMAT),
    compute=LineCost(alpha_seconds=10e-6, beta_seconds=1 / 300e12),
    message=LineCost(alpha_seconds=10e-6, beta_seconds=1 / 50e9),
    copy_out=LineCost(alpha_seconds=10e-6, beta_seconds=1 / 50e9),
    copy_in=LineCost(alpha_seconds=10e-6, beta_seconds=1 / 50e9),
    interference=Interference(),
    seconds=0.0,
    when="never",
)

LAYER = "MoELayer(2048, 8192, 64, top_k=2), 8192 tokens a rank"
TOKENS, BUDGET = 8192, "1GiB"
PLAN = [
    *("--d-model", "2048", "--d-hidden", "8192", "--num-experts", "64", "--top-k", "2"),
    *("--tokens", str(TOKENS), "--ranks", "8", "--dtype", "bfloat16", "--budget", BUDGET),
]
NAMES = ("chunks.png", "pairs.png", "copies.png", "plan.png", "scale.png")
SHARE = 0.5
"""Share of all rows that goes to one expert in the picture of copies."""
NUM_COLOURS = 64
"""Of a picture: a third of the bytes, and nothing that an eye would miss."""


def shape() -> LayerSizes:
    return sizes_from_options(2048, 8192, 64, top_k=2, num_ranks=8, dtype=torch.bfloat16, device_type="cuda")


def candidates(degrees: tuple[int, ...], pairs: tuple[Restore, ...]) -> list[PricedChoice]:
    both = [(n, n) for n in degrees]
    return evaluate(shape(), TOKENS, all_choices(both, pairs), profile=PROFILE, slack=1.25)


def draw_steps(path: Path, drawn: dict[str, PricedChoice]) -> None:
    panels = {name: step_bars(shape(), PROFILE, TOKENS, each) for name, each in drawn.items()}
    draw(path, panels, f"One step of {LAYER}, simulated")


def draw_copies(path: Path) -> None:
    """A step in which one expert gets half of all rows, without and with copies, and an even one."""
    num_ranks, num_experts, parameters = 8, 64, 2 * 2048 * 8192
    rows = TOKENS * 2 * num_ranks
    even = [rows // num_experts] * num_experts
    busy = [int(rows * SHARE), *[int(rows * (1 - SHARE)) // (num_experts - 1)] * (num_experts - 1)]
    cluster = Cluster(
        machines=1,
        ranks_per_machine=num_ranks,
        device_type="cuda",
        memory_bytes=141e9,
        compute=PROFILE.compute,
        copy=PROFILE.copy_out,
        inside=LineCost(PROFILE.message.alpha_seconds / (num_ranks - 1), PROFILE.message.beta_seconds),
        outside=PROFILE.message,
    )

    def layer(loads: list[int]) -> UnevenLayer:
        return UnevenLayer(
            loads=loads, row_bytes=2 * 2048, multiply_adds=parameters, expert_bytes=2 * parameters
        )

    def bars(loads: list[int], plan: CopyPlan | None) -> list[Span]:
        drawn: list[Span] = []
        for direction in ("forward", "backward"):
            origin = max((span.end for span in drawn), default=0.0)
            for item in uneven_pass(layer(loads), cluster, 4, direction, plan):
                if item.task.rank in (-1, 0, 1):
                    of_rank = item.task.rank
                    lane = "communicate" if of_rank < 0 else f"compute, rank {of_rank}"
                    [span] = simulated_bars(direction, [replace(item, task=item.task.task)], origin)
                    drawn.append(replace(span, lane=lane))
        return drawn

    near, far = layer(busy).copy_prices(cluster, trains=True)
    limits = CopyLimits(per_rank=1, near=near // 4, far=far // 4)
    owners = layer(busy).owners(num_ranks)
    plan = plan_copies(busy, owners, [0] * num_ranks, limits)
    panels = {
        f"one expert of rank 0 gets {SHARE:.0%} of the rows": bars(busy, None),
        f"the same with {len(plan.pairs)} copies": bars(busy, plan),
        "an even load": bars(even, None),
    }
    draw(path, panels, f"One step of {LAYER}, n = 4, simulated")


def printed(*argv: str) -> str:
    """What a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(argv)
    return out.getvalue()


LOOK: Any = {"font.size": TEXT_SIZE, "axes.titlesize": TEXT_SIZE, "axes.titlelocation": "left"}
LOOK |= {"figure.titlesize": "large"}  # as by default; programs that draw in the same process change it
LOOK |= {"axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False}


def draw_scaling(path: Path) -> None:
    """Tokens a second by ranks, weak scaling beside strong, as `pmoe simulate scale` prints them."""
    found = json.loads(printed("simulate", "scale", "--json"))
    ring: Any = {"ls": "", "marker": "o", "ms": 14, "mfc": "none", "mec": LIGHT["bad"], "mew": 2}
    titles = {"weak": "8,192 tokens on each rank", "strong": "4.2 million tokens a step in all"}
    with rc_context(LOOK):
        figure = Figure(figsize=(10, 6), layout="constrained")
        for axis, (kind, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
            strong, rows = kind == "strong", found[kind]
            ends = {end["model"]: end for end in found[f"{kind} ends"]}
            for model, name in zip(dict.fromkeys(row["model"] for row in rows), SERIES, strict=False):
                mine = {row["ranks"]: row for row in rows if row["model"] == model}
                speed = {ranks: row["ktokens/s"] / (1 if strong else ranks) for ranks, row in mine.items()}
                slow = [speed[ranks] / row[f"slow n={row['n']}"] for ranks, row in mine.items()]
                axis.plot([*speed], [*speed.values()], "o-", color=LIGHT[name], label=model * strong)
                axis.plot([*speed], slow, "--", color=LIGHT[name], lw=1.2)
                if end := ends.get(model):
                    at, below = (
                        (end["ranks"], speed[end["ranks"]]),
                        12 - 36 * strong - 58 * (name == "c1" and not strong),
                    )
                    axis.plot(*at, **ring)
                    axis.annotate(end["waits for"], at, xytext=(12, below), textcoords="offset points")
            axis.plot([], [], "--", color="black", lw=1.2, label="with a straggler of 2 x" * strong)
            axis.plot([], [], label="where it stops scaling, and for what" * strong, **ring)
            axis.set(title=f"{kind}: {title}", xlabel="ranks")
            axis.set(ylabel="thousand tokens a second" + " and rank" * (not strong))
            axis.set_xscale("log", base=2)
            axis.set_yscale("log" if strong else "linear")
            axis.set_xticks([8, 64, 512, 4096], ["8", "64", "512", "4096"])
        figure.axes[0].set_ylim(bottom=0)
        figure.suptitle("Training steps of three models, simulated: no such run was made", x=0.01, ha="left")
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)


def write(folder: Path) -> None:
    """All of NAMES, in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    chunks = candidates((1, 2, 4), (KEEP,))
    draw_steps(folder / "chunks.png", {f"n = {each.forward}": each for each in chunks})
    pairs = candidates((4,), (KEEP, STRATEGIES["S1"], STRATEGIES["S4"]))
    told = {str(each.restore): each.restore.strategy for each in pairs}
    named = {" ".join(filter(None, (pair, told[pair]))): each for pair, each in zip(told, pairs, strict=True)}
    draw_steps(folder / "pairs.png", {f"n = 4, {name}": each for name, each in named.items()})
    draw_copies(folder / "copies.png")
    budget = byte_count(BUDGET)
    advice = advise(shape(), PROFILE, TOKENS, budget=budget)
    time_over_memory(advice, budget).savefig(folder / "plan.png", dpi=130)
    draw_scaling(folder / "scale.png")
    for name in NAMES:
        with Image.open(folder / name) as picture:
            small = picture.convert("RGB").quantize(NUM_COLOURS)
        small.save(folder / name, optimize=True)


def plan_page() -> str:
    """What `pmoe plan --html` writes; plan.png shows its first picture."""
    with tempfile.TemporaryDirectory() as scratch:
        profile, page = Path(scratch, "profile.json"), Path(scratch, "plan.html")
        save_profile(PROFILE, profile)
        printed("plan", *PLAN, "--profile", str(profile), "--html", str(page))
        return page.read_text(encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/pictures.py FOLDER")
    write(Path(sys.argv[1]))
