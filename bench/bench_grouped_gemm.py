"""The grouped products on one GPU: TFLOP/s beside F.grouped_mm, a dense product and a copy, in one run.

    python bench/bench_grouped_gemm.py [--out build/bench] [--rounds 20] [--quick]

Both products of an expert of three models, for 16384 routed rows. Experts are drawn at random, so groups
differ in size (sizes are in the file). Forward and both gradients are measured beside F.grouped_mm. Then the
forms that only pmoe's kernels compute in one launch:

- the gated hidden with its activation, from rows in order, from gathered rows, or from rows that are permuted
  by a launch before it, whose time counts;
- the product with routing weights;
- the gradient through the nonlinearity;
- the weight gradient that is added to a float32 sum.

If PyTorch operations around F.grouped_mm give the same result, they are measured too.

Every result is checked first: a sample of its rows against float64, all of it against F.grouped_mm. Then all
runs and the dense product take turns, round by round, timed by CUDA events after a write that empties the L2
cache.

    FLOP        2 N I O, of rows that exist
    fill        FLOP / FLOP of the blocks' tiles, which are rarely full
    of dense    rate / rate of the dense product in the same rounds
    of copy     (fewest bytes / time) / rate of a large copy (bytes read plus bytes written)
    x rival     above 1: pmoe is faster
    alone, share B, share A
                milliseconds of each way on Hopper, where two blocks may share an operand. "ms" is the way
                that the rule picks (`pmoe.kernels.grouped_gemm.launch.SHARING`).
    in turns, boxes
                milliseconds of the two ways in which tiles are stored beside the products of the next tiles,
                for products that have them (`pmoe.kernels.grouped_gemm.launch.STORING`).

Goals for plain forward and both gradients: x rival 1.0. Mixtral and Phi-3.5-MoE: 0.75 of dense. Qwen2-MoE:
0.75 "of bound", the lower of dense rate * fill and FLOP * copy rate / fewest bytes.

Letters: N rows, E experts, K choices, I in-features, O out-features, M = d_model, H = d_hidden.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.device import (
    COPY_BYTES,
    difference,
    file_name,
    need_gpu,
    relative_error,
    sharing,
    show_gpu,
    storing_beside,
    time_in_turn,
)
from bench.grouped_gemm_cases import (
    DEVICE,
    MODELS,
    QUICK_ROWS,
    ROWS,
    Case,
    Model,
    Routed,
    draw,
    fused_cases,
    plain_cases,
    tile_of,
)
from bench.timing import OUT, Timing, table, write_json
from pmoe.kernels import extension
from pmoe.kernels.grouped_gemm.launch import AS_BOXES, IN_TURNS

DENSE = 8192
LEAD_CYCLES = 600_000
"""Cycles for which the device sleeps before timed work: 0.3 ms at 2 GHz.

Meanwhile the host enqueues the work, so that the measured time is that of the device, not of the host.
"""

SHARED: dict[str, Literal["none", "B", "A"]] = {"alone": "none", "share B": "B", "share A": "A"}
BESIDE = {"in turns": IN_TURNS, "boxes": AS_BOXES}
SHARE = 0.75
LIMIT = 2.0**-8
"""Largest relative error of bfloat16 results. One rounding is 2^-9 at most on average."""


# ---- correct first


def check(case: Case) -> float:
    """Returns the relative error of a sample of the result's rows, against float64.

    Raises SystemExit if it exceeds `LIMIT`, or if the whole result differs from that of F.grouped_mm by more
    than twice `LIMIT`.
    """
    result = case.run()
    got, expected = case.exact(result)
    error = relative_error(got, expected)
    if not error <= LIMIT:  # also true for NaN
        sys.exit(f"bench_grouped_gemm: {case.name}: relative error {error} of a sample, limit {LIMIT}")
    if case.rival is not None:
        other = case.rival()
        apart = difference(result, other)
        if not apart <= 2 * LIMIT:
            sys.exit(f"bench_grouped_gemm: {case.name}: {apart} from F.grouped_mm, limit {2 * LIMIT}")
    return error


# ---- then time


class Ceilings:
    """Rates of a dense product and of a copy. The dense product runs again beside every measured product."""

    def __init__(self, path: str, side: int, copy_bytes: int, rounds: int) -> None:
        self.path, self.side = path, side
        self.a, self.b = draw(side, side), draw(side, side)
        source = torch.randint(256, (copy_bytes,), dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        self.timings = time_in_turn(
            {"dense": self.dense, "copy": lambda: target.copy_(source)}, rounds, LEAD_CYCLES
        )
        self.copy_rate = 2 * copy_bytes / self.timings["copy"].median
        self.dense_rates: list[float] = [self.rate_of(self.timings["dense"])]

    def dense(self) -> Tensor:
        return self.a @ self.b

    def rate_of(self, timing: Timing) -> float:
        return 2 * self.side**3 / timing.median


def measure(
    case: Case, ceilings: Ceilings, by_bound: bool, rounds: int
) -> tuple[dict[str, Any], dict[str, Timing]]:
    """Measures one product. Returns (row of the table, times by way)."""
    error = check(case)
    runs: dict[str, Callable[[], object]] = {"pmoe": case.run, "dense": ceilings.dense}
    if ceilings.path == "sm_90a":
        runs |= {name: sharing(operand, case.run) for name, operand in SHARED.items()}
        for name in case.beside:
            beside = replace(case, name=f"{case.name}, {name}", run=storing_beside(BESIDE[name], case.run))
            check(beside)
            runs[name] = beside.run
    if case.rival is not None:
        runs["rival"] = case.rival
    timings = time_in_turn(runs, rounds, LEAD_CYCLES)
    dense_rate = ceilings.rate_of(timings["dense"])
    ceilings.dense_rates.append(dense_rate)
    timing = timings["pmoe"]
    rate = case.flop / timing.median
    bound = min(dense_rate * case.fill, case.flop * ceilings.copy_rate / case.min_bytes)
    row: dict[str, Any] = {
        "product": case.name,
        "ms": timing.median * 1e3,
        "spread": timing.spread,
        "TFLOP/s": rate / 1e12,
        "of dense": rate / dense_rate,
        "fill": case.fill,
        "of bound": rate / bound,
        "of copy": case.min_bytes / timing.median / ceilings.copy_rate,
        **{name: timings[name].median * 1e3 if name in timings else None for name in (*SHARED, *BESIDE)},
        "rival ms": timings["rival"].median * 1e3 if "rival" in timings else None,
        "x rival": timing.speedup_over(timings["rival"]) if "rival" in timings else None,
        "error": error,
        "plain": case.plain,
        "flop": case.flop,
        "min_bytes": case.min_bytes,
        "goal_of": "bound" if by_bound else "dense",
    }
    return row, timings


def missed(model: Model, row: Mapping[str, Any]) -> list[str]:
    """Returns, as texts, the goals that a row of the table does not reach."""
    if not row["plain"]:
        return []
    shares = {"x rival": 1.0, "of bound" if model.by_bound else "of dense": SHARE}
    return [
        f"{model.name}, {row['product']}: {name} {row[name]:.3f}, goal {goal}"
        for name, goal in shares.items()
        if row[name] < goal
    ]


SHOWN = (
    "product",
    "ms",
    "spread",
    "TFLOP/s",
    "of dense",
    "fill",
    "of bound",
    "of copy",
    *SHARED,
    *BESIDE,
    "rival ms",
    "x rival",
)


def measure_model(
    model: Model, num_rows: int, ceilings: Ceilings, rounds: int
) -> tuple[dict[str, Any], list[str]]:
    """Measures the products of one model. Returns (content of the result file, goals that were not
    reached).
    """
    torch.manual_seed(0)
    routed = Routed(model, num_rows)
    tile = tile_of(ceilings.path)
    makers: list[Callable[[], Iterator[Case]]] = [
        lambda: plain_cases(routed, "up", model.d_model, model.d_hidden, tile),
        lambda: plain_cases(routed, "down", model.d_hidden, model.d_model, tile),
        lambda: fused_cases(routed, model, tile),
    ]
    rows: list[dict[str, Any]] = []
    timings: dict[str, dict[str, Timing]] = {}
    for make in makers:
        for case in make():
            row, timings[case.name] = measure(case, ceilings, model.by_bound, rounds)
            rows.append(row)
        torch.cuda.empty_cache()
    print(f"\n{model.name}: E={model.experts}, {model.d_model} x {model.d_hidden}, {num_rows} rows, "
          f"{min(routed.counts)} to {max(routed.counts)} an expert")  # fmt: skip
    print(table([{name: row[name] for name in SHOWN} for row in rows]), flush=True)
    document = {"model": asdict(model), "counts": routed.counts, "rows": rows, "timings": timings}
    return document, [line for row in rows for line in missed(model, row)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="TFLOP/s of the grouped products on one GPU, beside F.grouped_mm and a dense product."
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each time")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows, 5 rounds, no file")
    arguments = parser.parse_args()
    need_gpu("bench_grouped_gemm")
    path, reason = extension.path(DEVICE)
    if path is None:
        sys.exit(f"bench_grouped_gemm: not run, {reason}")
    rounds = 5 if arguments.quick else arguments.rounds
    num_rows = QUICK_ROWS if arguments.quick else ROWS
    machine = show_gpu()
    torch.manual_seed(0)
    ceilings = Ceilings(path, DENSE, COPY_BYTES, rounds)
    torch.cuda.empty_cache()
    print(f"the kernels of {path}; dense {DENSE}^3: {ceilings.dense_rates[0] / 1e12:.4g} TFLOP/s, "
          f"copy: {ceilings.copy_rate / 1e9:.4g} GB/s", flush=True)  # fmt: skip
    measured, under = [], []
    for model in MODELS:
        document, lines = measure_model(model, num_rows, ceilings, rounds)
        measured.append(document)
        under += lines
    dense = {"size": DENSE, "flop_per_second": ceilings.dense_rates[0], "beside_each": ceilings.dense_rates}
    print(f"\ndense beside the products: median {statistics.median(ceilings.dense_rates) / 1e12:.4g} TFLOP/s")
    print("\n".join(["under the goals:", *(under or ["none"])]))
    if arguments.quick:
        return
    file = arguments.out / file_name("grouped_gemm", machine)
    write_json(
        file, **machine, kernels=path, rows=num_rows, rounds=rounds, dense=dense,
        copy={"bytes": 2 * COPY_BYTES, "bytes_per_second": ceilings.copy_rate},
        ceilings=ceilings.timings, goals={"x rival": 1.0, "share": SHARE}, under_the_goals=under,
        models=measured,
    )  # fmt: skip
    print(f"written: {file}")


if __name__ == "__main__":
    main()
