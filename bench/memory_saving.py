"""How much of the saving that Eq. 6 promises does each strategy reach? (MPipeMoE, Fig. 10)

    share = (yardstick - measured) / saving by Eq. 6

The yardstick is a pipeline without reuse, by Eq. 1, 2 and 4. Measured are parameters, gradients and Adam's
moments, and the peak of everything else while x, y, dy and dx are held. One rank, one expert, no bias,
float32. Small cases run first, and results are written after each case.

    python bench/memory_saving.py                                  a quick look: the smallest model
    python bench/memory_saving.py --models MoE-GPT3-S MoE-BERT-L MoE-GPT3-XL --tokens 4k 8k 16k 32k
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.memory import (
    Model,
    arguments,
    available_bytes,
    measured_total,
    one_expert,
    one_step,
    pair_name,
    parse_pair,
    predicted_total,
    saving_bytes,
    tokens_name,
    yardstick_bytes,
)
from bench.pictures import plotting
from bench.timing import table, write_json
from pmoe import Restore
from pmoe.planner.drawing import PAIRS
from pmoe.schedule.restore import KEEP, STRATEGIES

TARGETS = {"S1": {4: 0.92, 8: 0.97}, "S2": {4: 0.92, 8: 0.97}} | {
    name: dict.fromkeys((2, 4, 8), 0.97) for name in ("S3", "S4")
}
"""Smallest acceptable share of the saving by Eq. 6, by strategy and n."""


def measure(name: str, model: Model, tokens: int, n: int, pair: Restore, device: str) -> dict[str, Any]:
    layer = one_expert(model, n, pair, device)
    step = one_step(layer, tokens)
    yardstick, saving = yardstick_bytes(tokens, model), saving_bytes(tokens, model, n)
    measured, predicted = measured_total(layer, step), predicted_total(layer, tokens)
    # Like the predicted peak: without x and dy, but with the parameters' gradients.
    peak = step.peak - 2 * tokens * model.d_model * 4
    foretold = layer.predict_memory(tokens, layer.row_counts).peak
    target = TARGETS.get(pair.strategy or "", {}).get(n)
    share = (yardstick - measured) / saving
    return {
        "model": name,
        "tokens": tokens,
        "n": n,
        "pair": pair_name(pair),
        "yardstick_bytes": yardstick,
        "saving_bytes": saving,
        "measured_bytes": measured,
        "predicted_bytes": predicted,
        "share": share,
        "predicted_share": (yardstick - predicted) / saving,
        "peak_bytes": peak,
        "predicted_peak_bytes": foretold,
        "predicted_over_measured": foretold / peak,
        "seconds": step.seconds,
        "target": target,
        "holds": None if target is None else share >= target,
    }


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of the printed table."""
    return {
        "model": row["model"],
        "B": tokens_name(row["tokens"]),
        "n": row["n"],
        "pair": row["pair"],
        "yardstick MiB": row["yardstick_bytes"] / 2**20,
        "measured MiB": row["measured_bytes"] / 2**20,
        "share": row["share"],
        "target": row["target"],
        "peak MiB": row["peak_bytes"] / 2**20,
        "predicted / peak": row["predicted_over_measured"],
        "s": row["seconds"],
    }


def colour_of(pair: str) -> str:
    """Returns the colour of a restore pair in pictures.

    pair: its name (`pair_name`).
    """
    return PAIRS.get(pair.split()[0], "#000000")


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draws one panel for each model: the share of the saving over B.

    There is a group of bars for each n, and in it a bar for each restore pair.
    """
    plt = plotting()

    models = list(dict.fromkeys(row["model"] for row in rows))
    pairs = list(dict.fromkeys(row["pair"] for row in rows))
    figure, axes = plt.subplots(
        len(models), 1, figsize=(10, 1.6 + 3.3 * len(models)), squeeze=False, layout="constrained"
    )
    for axis, model in zip(axes[:, 0], models, strict=True):
        own = [row for row in rows if row["model"] == model]
        groups = sorted({(row["tokens"], row["n"]) for row in own})
        width = 0.82 / len(pairs)
        for k, pair in enumerate(pairs):
            share_of = {(row["tokens"], row["n"]): row["share"] for row in own if row["pair"] == pair}
            at = [i - 0.41 + (k + 0.5) * width for i, group in enumerate(groups) if group in share_of]
            heights = [share_of[group] for group in groups if group in share_of]
            axis.bar(at, heights, width * 0.92, color=colour_of(pair), label=pair)
            if len(groups) * len(pairs) <= 24:
                for x, height in zip(at, heights, strict=True):
                    axis.text(x, 0.03, f"{height:.3f}", ha="center", va="bottom", rotation=90)
        axis.axhline(1, color="black", lw=0.8)
        axis.set_xticks(range(len(groups)), [f"{tokens_name(tokens)}\nn={n}" for tokens, n in groups])
        shares = [row["share"] for row in own]
        axis.set_ylim(min(0.0, *shares) * 1.1, 1.15 * max(1.0, *shares))
        axis.set_ylabel("share of Eq. 6's saving")
        axis.set_title(model, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("Measured saving over the saving of Eq. 6, one expert on one rank")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, models=["MoE-GPT3-S"], tokens=["4k"], n=[2, 4, 8])
    parser.add_argument("--pairs", type=parse_pair, nargs="+", default=[*STRATEGIES.values(), KEEP])
    parser.add_argument(
        "--add", action="store_true", help="keep the cells that the file holds, and measure the others"
    )
    args = parser.parse_args(argv)
    if min(args.n) < 2:
        parser.error(f"--n ({min(args.n)}) must be at least 2: Eq. 6 saves nothing below")
    torch.set_num_threads(args.threads)
    stem = args.out / "memory_saving"
    cells = [
        (name, model, tokens, n, pair)
        for name, model in args.models
        for tokens in args.tokens
        for n in args.n
        for pair in args.pairs
    ]
    cells.sort(key=lambda cell: cell[2] * cell[1].d_model * cell[1].d_hidden)
    rows: list[dict[str, Any]] = []
    if args.add and Path(f"{stem}.json").exists():
        rows = json.loads(Path(f"{stem}.json").read_text())["rows"]
    stored = {(row["model"], row["tokens"], row["n"], row["pair"]) for row in rows}
    cells = [cell for cell in cells if (cell[0], cell[2], cell[3], pair_name(cell[4])) not in stored]
    for name, model, tokens, n, pair in cells:
        about = f"{name}, B={tokens_name(tokens)}, n={n}, {pair_name(pair)}"
        if args.device == "cpu" and 1.5 * yardstick_bytes(tokens, model) > available_bytes():
            print(f"{about}: left out, the machine has too little memory left", flush=True)
            continue
        row = measure(name, model, tokens, n, pair, args.device)
        rows.append(row)
        print(f"{about}: share {row['share']:.4f}, {row['seconds']:.1f} s", flush=True)
        write_json(
            f"{stem}.json",
            device=args.device,
            threads=args.threads,
            cells=len(stored) + len(cells),
            rows=rows,
        )
    if not rows:
        return
    print(table([shown(row) for row in rows]))
    missed = [row for row in rows if row["holds"] is False]
    print(f"{len(missed)} of {sum(row['target'] is not None for row in rows)} cells miss their target share")
    draw(Path(f"{stem}.png"), rows)
    print(f"wrote {stem}.json, {stem}.png")


if __name__ == "__main__":
    main()
