"""Pictures of the documentation that the planner draws: simulated, of a machine that is assumed.

    python docs/pictures.py docs

They are kept beside the pages, which must be whole where they are read without a build; a test notices where
the planner would draw others. What `pmoe plan --html` writes is made when the site is built.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from pmoe import Restore, cli
from pmoe.cli.arguments import byte_count
from pmoe.cli.plan import time_over_memory
from pmoe.measure.profile import save_profile
from pmoe.planner.candidates import PricedChoice, advise, evaluate, step_bars
from pmoe.planner.cost_model import Interference
from pmoe.planner.costs import LineCost
from pmoe.planner.degree import all_choices
from pmoe.planner.layer_sizes import LayerSizes, sizes_from_options
from pmoe.planner.profile import FORMAT, Profile, Versions
from pmoe.planner.timeline import draw
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
NAMES = ("chunks.png", "pairs.png", "plan.png")
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


def write(folder: Path) -> None:
    """All of NAMES, in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    chunks = candidates((1, 2, 4), (KEEP,))
    draw_steps(folder / "chunks.png", {f"n = {each.forward}": each for each in chunks})
    pairs = candidates((4,), (KEEP, STRATEGIES["S1"], STRATEGIES["S4"]))
    told = {str(each.restore): each.restore.strategy for each in pairs}
    named = {" ".join(filter(None, (pair, told[pair]))): each for pair, each in zip(told, pairs, strict=True)}
    draw_steps(folder / "pairs.png", {f"n = 4, {name}": each for name, each in named.items()})
    budget = byte_count(BUDGET)
    advice = advise(shape(), PROFILE, TOKENS, budget=budget)
    time_over_memory(advice, budget).savefig(folder / "plan.png", dpi=130)
    for name in NAMES:
        with Image.open(folder / name) as picture:
            small = picture.convert("RGB").quantize(NUM_COLOURS)
        small.save(folder / name, optimize=True)


def plan_page() -> str:
    """What `pmoe plan --html` writes; plan.png shows its first picture."""
    with tempfile.TemporaryDirectory() as scratch:
        profile, page = Path(scratch, "profile.json"), Path(scratch, "plan.html")
        save_profile(PROFILE, profile)
        with contextlib.redirect_stdout(io.StringIO()):
            cli.main(["plan", *PLAN, "--profile", str(profile), "--html", str(page)])
        return page.read_text(encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/pictures.py FOLDER")
    write(Path(sys.argv[1]))
