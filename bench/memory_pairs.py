"""What does each restore pair cost, in memory and in time? (MPipeMoE, Fig. 11 and 13)

For each n, with one expert a rank, it runs the layer without rings and with all nine pairs. Memory is that of
parameters, gradients and Adam's moments, and the measured peak of everything else. Times are medians;
variants take turns.

    python bench/memory_pairs.py --models MoE-GPT3-S --tokens 4k
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 bench/memory_pairs.py      what the worst rank takes
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.memory import (
    Model,
    arguments,
    measured_total,
    one_expert,
    one_step,
    pair_name,
    predicted_total,
    tokens_name,
)
from bench.timing import Timing, interleaved, table, write_json
from pmoe import MoELayer, Restore
from pmoe.comm.ranks import Ranks
from pmoe.planner.drawing import Point, scatter_figure
from pmoe.schedule.restore import ALL_PAIRS


def timed_step(layer: MoELayer, x: torch.Tensor, dy: torch.Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    layer(x).backward(dy)
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)


def largest(number: int) -> int:
    """Returns the largest value of a number on all ranks. A collective."""
    if not dist.is_initialized():
        return number
    agreed = torch.tensor(number, dtype=torch.int64)
    agreed = agreed.cuda() if dist.get_backend() == "nccl" else agreed
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return int(agreed)


def measure(
    name: str, model: Model, tokens: int, degrees: Sequence[int], rounds: int, device: str
) -> list[dict[str, Any]]:
    """Returns one row for each variant. The memory of all variants is measured first, then all times."""
    reuses: list[Restore | bool] = [*ALL_PAIRS, False]
    ways = [(reuse, n) for reuse in reuses for n in degrees]
    x = torch.randn(tokens, model.d_model, device=device, requires_grad=True)
    dy = torch.randn_like(x)
    layers: dict[tuple[Restore | bool, int], MoELayer] = {}
    for way in ways:
        layer = layers[way] = one_expert(model, way[1], way[0], device)
        first = layers[ways[0]]  # all layers share its parameters, so that memory holds them once
        layer.gate, layer.experts = first.gate, first.experts
    memory = {}
    for way, layer in layers.items():
        total = largest(measured_total(layer, one_step(layer, tokens)))
        memory[way] = total, largest(predicted_total(layer, tokens) if layer.options.rotates else 0)
    runs: dict[str, Callable[[], object]] = {
        f"{pair_name(reuse)} n={n}": functools.partial(timed_step, layer, x, dy)
        for (reuse, n), layer in layers.items()
    }
    times: dict[str, Timing] = interleaved(runs, rounds)
    rows = []
    for reuse, n in ways:
        timing = times[f"{pair_name(reuse)} n={n}"]
        total, predicted = memory[reuse, n]
        rows.append(
            {
                "model": name,
                "tokens": tokens,
                "pair": pair_name(reuse),
                "n": n,
                "measured_bytes": total,
                "predicted_bytes": predicted if reuse is not False else None,
                "seconds": timing.median,
                "spread": timing.spread,
                "times": timing,
            }
        )
    return rows


def shown(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of the printed table.

    base: the results of keep/keep with the same number of chunks, to which times and bytes are compared.
    """
    predicted = row["predicted_bytes"]
    return {
        "model": row["model"],
        "B": tokens_name(row["tokens"]),
        "pair": row["pair"],
        "n": row["n"],
        "memory MiB": row["measured_bytes"] / 2**20,
        "predicted": None if predicted is None else predicted / 2**20,
        "/ keep/keep": row["measured_bytes"] / base["measured_bytes"],
        "step ms": row["seconds"] * 1e3,
        "spread": row["spread"],
        "x keep/keep": 1 / row["times"].speedup_over(base["times"]),
    }


def draw(path: Path, num_ranks: int, rows: Sequence[dict[str, Any]]) -> None:
    """Draws time over memory, for one model and one number of tokens."""
    points = [
        Point(
            group=row["pair"],
            label=str(row["n"]),
            mib=row["measured_bytes"] / 2**20,
            milliseconds=row["seconds"] * 1e3,
        )
        for row in rows
    ]
    about = (
        f"{rows[0]['model']}, B = {tokens_name(rows[0]['tokens'])}, {num_ranks} rank{'s' * (num_ranks > 1)}"
    )
    scatter_figure(points, f"{about}: measured; numbers are n").savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, models=["256x1024"], tokens=["2k"], n=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    else:
        torch.set_num_threads(args.threads)
    ranks = Ranks()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    written: list[Path] = []
    stem = args.out / f"memory_pairs_{ranks.size}_ranks"
    for name, model in args.models:
        for tokens in args.tokens:
            model_rows = measure(name, model, tokens, args.n, args.rounds, args.device)
            rows += model_rows
            if ranks.rank:
                continue
            write_json(f"{stem}.json", device=args.device, ranks=ranks.size, rounds=args.rounds, rows=rows)
            base = {row["n"]: row for row in model_rows if row["pair"] == "keep/keep"}
            print(table([shown(row, base[row["n"]]) for row in model_rows]))
            path = Path(f"{stem}_{name}_{tokens_name(tokens)}.png")
            draw(path, ranks.size, model_rows)
            written.append(path)
    if several:
        dist.destroy_process_group()
    if not ranks.rank:
        print(f"wrote {stem}.json, {', '.join(map(str, written))}")


if __name__ == "__main__":
    main()
