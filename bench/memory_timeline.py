"""Which tensors hold the memory while a step runs? Live bytes over one step, beside keep/keep.

Bytes come from the allocator's events, on the CPU, for one expert on one rank. The dashed line is the layer's
prediction for these rows, plus x and dy, which the prediction leaves out.

    python bench/memory_timeline.py --pair S4 --n 8
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.memory import (
    PARTS,
    Model,
    arguments,
    named_step,
    one_expert,
    pair_name,
    parse_pair,
    tokens_name,
)
from bench.pictures import plotting
from bench.timing import counted, table, write_json
from pmoe import Restore
from pmoe.schedule.restore import KEEP, STRATEGIES

COLOURS = ("#dddddd", "#4477aa", "#66ccee", "#228833", "#ccbb44", "#999999", "#bbbbbb", "#ee6677", "#aa3377")
"""Colours of the parts."""


def measure(model: Model, tokens: int, n: int, pair: Restore) -> dict[str, Any]:
    """Returns moments of one step in seconds, and the bytes of each part from each moment on."""
    layer = one_expert(model, n, pair)
    seen = named_step(layer, tokens)
    start, end = seen.moments["forward"], seen.moments["end"]
    curves = {part: seen.live_bytes([part]) for part in PARTS}
    moments = sorted({min(max(when, start), end) for curve in curves.values() for when, _ in curve})
    series = {part: _sampled(curve, moments) for part, curve in curves.items()}
    total = [sum(values) for values in zip(*series.values(), strict=True)]
    inputs = 2 * tokens * model.d_model * 4
    return {
        "pair": pair_name(pair),
        "tokens": tokens,
        "n": n,
        "peak_bytes": seen.peak_bytes(),
        "predicted_peak_bytes": layer.predict_memory(tokens, layer.row_counts).peak + inputs,
        "at_peak_bytes": {part: values[total.index(max(total))] for part, values in series.items()},
        "seconds": [moment - start for moment in moments],
        "backward_seconds": seen.moments["backward"] - start,
        "bytes": series,
    }


def _sampled(curve: Sequence[tuple[float, int]], moments: Sequence[float]) -> list[int]:
    """Returns the values of a step curve at moments.

    curve: (seconds, value from then on) pairs.
    """
    values, value, steps = [], 0, list(curve)
    for moment in moments:
        while steps and steps[0][0] <= moment:
            value = steps.pop(0)[1]
        values.append(value)
    return values


def title_of(model: str, panels: Mapping[str, Mapping[str, Any]]) -> str:
    first = next(iter(panels.values()))
    return f"{model}, B = {tokens_name(first['tokens'])}, n = {first['n']}, one expert on one rank"


def draw(path: Path, model: str, panels: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws one panel for each variant, side by side, with a common axis of bytes."""
    plt = plotting()

    figure, axes = plt.subplots(
        1, len(panels), figsize=(10, 6.4), sharey=True, squeeze=False, layout="constrained"
    )
    used = [part for part in PARTS if any(any(panel["bytes"][part]) for panel in panels.values())]
    for axis, (name, panel) in zip(axes[0], panels.items(), strict=True):
        x = [seconds * 1e3 for seconds in panel["seconds"]]
        stack = [[value / 2**20 for value in panel["bytes"][part]] for part in used]
        colours = [COLOURS[PARTS.index(part)] for part in used]
        axis.stackplot(x, stack, labels=used, colors=colours, step="post", lw=0)
        predicted, peak = panel["predicted_peak_bytes"] / 2**20, panel["peak_bytes"] / 2**20
        axis.axhline(predicted, color="black", lw=1, ls="--")
        axis.annotate(
            f"predicted {predicted:.1f} MiB, measured {peak:.1f}",
            (0.01, predicted),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
        axis.axvline(panel["backward_seconds"] * 1e3, color="black", lw=0.8, ls=":")
        axis.text(panel["backward_seconds"] * 1e3, 0, " backward", rotation=90, va="bottom")
        axis.set_title(name, loc="left")
        axis.set_xlabel("milliseconds, with the profiler on")
        axis.set_xlim(0, x[-1])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("live bytes, MiB")
    axes[0, 0].set_ylim(0, 1.06 * max(panel["predicted_peak_bytes"] for panel in panels.values()) / 2**20)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles[::-1],
        labels[::-1],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        title="from the top",
    )
    figure.suptitle(title_of(model, panels))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, models=["MoE-GPT3-S"], tokens=["4k"], n=[8])
    parser.add_argument("--pair", type=parse_pair, default=STRATEGIES["S4"])
    args = parser.parse_args(argv)
    if args.device != "cpu":
        parser.error(f"--device ({args.device}) must be cpu: tensors are told by the allocator's events")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, model in args.models:
        for tokens in args.tokens:
            for n in args.n:
                pairs = list(dict.fromkeys((args.pair, KEEP)))
                panels = {pair_name(pair): measure(model, tokens, n, pair) for pair in counted(pairs, "pair")}
                print(title_of(name, panels) + ": MiB at the peak")
                print(
                    table(
                        [
                            {
                                "pair": pair,
                                **{
                                    part: num_bytes / 2**20
                                    for part, num_bytes in panel["at_peak_bytes"].items()
                                },
                                "peak": panel["peak_bytes"] / 2**20,
                                "predicted": panel["predicted_peak_bytes"] / 2**20,
                            }
                            for pair, panel in panels.items()
                        ]
                    )
                )
                chosen = str(args.pair).replace("/", "-")
                stem = f"{args.out}/memory_timeline_{name}_{tokens_name(tokens)}_n{n}_{chosen}"
                write_json(f"{stem}.json", model=name, threads=args.threads, panels=panels)
                draw(Path(f"{stem}.png"), name, panels)
                print(f"wrote {stem}.json, {stem}.png")


if __name__ == "__main__":
    main()
