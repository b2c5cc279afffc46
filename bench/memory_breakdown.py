"""What takes the memory of an MoE layer as its batch grows? (MPipeMoE, Fig. 2)

It shows the shares of model states, activations and temporary buffers, by Eq. 1-3. With --measure also those
of a real step of one expert on one rank (num_experts = 1, no bias) without reuse:

    model states   four times the parameters
    activations    bytes held when forward has ended, with x and T_O
    temporaries    bytes that backward adds at its peak, with dy and dx

    python bench/memory_breakdown.py                      theory only, the paper's three models
    python bench/memory_breakdown.py --measure --models MoE-GPT3-S --tokens 256 512 1k 2k 4k
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.memory import FLOAT_BYTES, MODELS, Model, arguments, named_step, one_expert, tokens_name
from bench.pictures import plotting
from bench.timing import counted, table, write_json
from pmoe.papers.mpipemoe_memory import activations, buffers, model_states
from pmoe.planner.memory import GRADIENTS

KINDS = ("model states", "activations", "temporaries")
COLOURS = ("#77aadd", "#ccbb44", "#ee6677")
TOKENS = ("256", "512", "1k", "2k", "4k", "8k", "16k")


def by_theory(model: Model, tokens: int, num_experts: int) -> dict[str, int]:
    B, M, H = tokens, model.d_model, model.d_hidden
    numbers = (model_states(M, H, num_experts), activations(B, M, H), buffers(B, M, H))
    return {kind: FLOAT_BYTES * number for kind, number in zip(KINDS, numbers, strict=True)}


def by_measuring(model: Model, tokens: int, n: int) -> dict[str, int]:
    layer = one_expert(model, n, False)
    seen = named_step(layer, tokens)
    others = {allocation.name for allocation in seen.records} - {GRADIENTS}
    # dy counts as a temporary buffer of backward, although it exists from the start.
    dy = tokens * model.d_model * FLOAT_BYTES
    activations = [bytes_ for when, bytes_ in seen.live_bytes(others) if when <= seen.moments["backward"]][
        -1
    ] - dy
    return {
        "model states": 4 * sum(parameter.nbytes for parameter in layer.parameters()),
        "activations": activations,
        "temporaries": seen.peak_bytes(without=(GRADIENTS,)) - activations,
    }


def ratios(bytes_by_kind: dict[str, int]) -> dict[str, float]:
    return {kind: bytes_by_kind[kind] / sum(bytes_by_kind.values()) for kind in KINDS}


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draws one panel for each model and source: stacked shares over B."""
    plt = plotting()

    models = list(dict.fromkeys(row["model"] for row in rows))
    sources = list(dict.fromkeys(row["source"] for row in rows))
    figure, axes = plt.subplots(
        len(sources),
        len(models),
        figsize=(10, 0.8 + 2.6 * len(sources)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for i, source in enumerate(sources):
        for axis, model in zip(axes[i], models, strict=True):
            own = [row for row in rows if (row["model"], row["source"]) == (model, source)]
            names = [tokens_name(row["tokens"]) for row in own]
            below = [0.0] * len(own)
            for kind, colour in zip(KINDS, COLOURS, strict=True):
                heights = [row["ratios"][kind] for row in own]
                axis.bar(names, heights, bottom=below, color=colour, width=0.8, label=kind)
                for x, (height, start) in enumerate(zip(heights, below, strict=True)):
                    if height > 0.08:
                        axis.text(x, start + height / 2, f"{height:.2f}"[1:], ha="center", va="center")
                below = [a + b for a, b in zip(below, heights, strict=True)]
            axis.set_title(f"{model}, {source}", loc="left")
            axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("tokens B")
    for axis in axes[:, 0]:
        axis.set_ylabel("share of memory")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, models=list(MODELS), tokens=TOKENS, n=[1])
    parser.add_argument("--measure", action="store_true", help="one expert on one rank; on the CPU")
    args = parser.parse_args(argv)
    if args.device != "cpu":
        parser.error(f"--device ({args.device}) must be cpu: kinds are told apart by the allocator's events")
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    stem = args.out / "memory_breakdown"
    args.out.mkdir(parents=True, exist_ok=True)
    for name, model in args.models:
        for tokens in counted(args.tokens, f"{name}, batch"):
            num_experts = 1 if args.measure else model.num_experts
            sources = {f"Eq. 1-3, E = {num_experts}": by_theory(model, tokens, num_experts)}
            if args.measure:
                sources |= {f"measured, E = 1, n = {n}": by_measuring(model, tokens, n) for n in args.n}
            for source, bytes_by_kind in sources.items():
                rows.append(
                    {
                        "model": name,
                        "tokens": tokens,
                        "source": source,
                        "bytes": bytes_by_kind,
                        "ratios": ratios(bytes_by_kind),
                    }
                )
        write_json(f"{stem}.json", threads=args.threads, rows=rows)
    print(
        table(
            [
                {
                    "model": row["model"],
                    "B": tokens_name(row["tokens"]),
                    "source": row["source"],
                    **row["ratios"],
                    "MiB": sum(row["bytes"].values()) / 2**20,
                }
                for row in rows
            ]
        )
    )
    draw(Path(f"{stem}.png"), rows)
    print(f"wrote {stem}.json, {stem}.png")


if __name__ == "__main__":
    main()
