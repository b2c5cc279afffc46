"""Fused kernels of virtual ranks on one GPU, beside the same two products with their rows in place.

    python bench/bench_comet.py [--out build/bench] [--rounds 20] [--quick]

Experts of Mixtral and Phi-3.5-MoE: SwiGLU without biases, bfloat16, 16384 routed rows of all ranks together,
the same number for each expert. W = 2 and 4 virtual ranks run in one cooperative launch (and W = 1, where all
rows stay).

The fused pair is dispatch + first product with its nonlinearity (T_M is kept), then second product with
routing weights + sums + combine. Beside it, on all multiprocessors:

    in place  pmoe's own two products of rows that lie sorted, with T_M, nonlinearity and weights
    alone     the same, without pairs of blocks that share an operand, because the fused kernels have none
    torch     F.grouped_mm twice: the products only, without nonlinearity and weights

On one GPU the link is the GPU's memory. So pair / "in place" is the cost of the protocol and of the blocks
that communicate; no link is hidden. The goal for W = 2 and 4 is 1.10, as if 12 of 132 blocks did nothing
else. n_c counts the communicating blocks of each rank, so W * n_c blocks communicate.

The pair's output is first compared with that of "in place". Then every division (n_c, columns) of a sweep
runs once a round, and each round begins with another division. Last, the fastest division of both kernels
takes turns with the others. Times are medians by CUDA events, after a write that empties the L2 cache and a
sleep in which the host enqueues the timed work.

Letters: T tokens, K choices, N routed rows, E experts, W ranks, M = d_model, H = d_hidden.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.device import (
    WARMUP,
    difference,
    file_name,
    flush_buffer,
    need_gpu,
    part_seconds,
    sharing,
    show_gpu,
)
from bench.grouped_gemm_cases import MODELS, QUICK_ROWS, ROWS, Model, draw
from bench.timing import OUT, Timing, table, write_json
from bench.virtual_ranks import FusedParameters, VirtualRanks, routes_of
from pmoe.kernels import extension, grouped_gemm
from pmoe.kernels.comet import operators as comet_operators
from pmoe.kernels.comet.launcher import Division
from pmoe.measure.timing import in_rounds

DEVICE = torch.device("cuda", 0)
LEAD_CYCLES = 3_000_000
"""Cycles for which the device sleeps before timed work: 1.5 ms at 2 GHz.

Meanwhile the host enqueues the work, so that the measured time is that of the device, not of the host.
"""

RANKS = (1, 2, 4)
N_C = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20)
CHUNK_COLUMNS = (256, 512, 1024, 2048)
SWEEP_ROUNDS = 5
GOAL = 1.10
"""Largest acceptable ratio of the time of the fused kernels to that of "in place", for W of 2 and more."""

LIMIT = 2.0**-6
"""Largest relative difference between bfloat16 results: a few roundings of 2^-9 each."""

Times = list[float]
"""Milliseconds of the parts of a run, in order."""


class Scenario:
    """The experts and tokens of one model, and its two products on rows that are sorted already."""

    def __init__(self, model: Model, num_rows: int) -> None:
        self.model, self.num_rows = model, num_rows
        self.num_tokens = num_rows // model.top_k
        self.x_TM = draw(self.num_tokens, model.d_model)
        self.weight_TK = torch.rand(self.num_tokens, model.top_k, device=DEVICE) + 0.1
        self.w1 = draw(model.experts, 2 * model.d_hidden, model.d_model, scale=model.d_model**-0.5)
        self.w2 = draw(model.experts, model.d_model, model.d_hidden, scale=model.d_hidden**-0.5)
        slot_N = torch.arange(self.num_tokens * model.top_k, dtype=torch.int32, device=DEVICE)
        self.expert_TK = (slot_N % model.experts).view(self.num_tokens, model.top_k)  # evenly
        expert_N = self.expert_TK.reshape(-1).long()
        slot_N = expert_N.argsort(stable=True)
        self.position_TK = slot_N.argsort().view_as(self.expert_TK)
        self.ends_E = torch.bincount(expert_N, minlength=model.experts).cumsum(0).int()
        self.rows_NM = self.x_TM.index_select(0, slot_N // model.top_k)
        self.weight_N = self.weight_TK.reshape(-1)[slot_N].contiguous()
        self.active_NH = self.first_product()

    def first_product(self) -> Tensor:
        return grouped_gemm.hidden(self.rows_NM, self.w1, self.ends_E, activation="swiglu")[1]

    def second_product(self) -> Tensor:
        return grouped_gemm.product(self.active_NH, self.w2, self.ends_E, scale=self.weight_N)

    def output(self) -> Tensor:
        """Returns (T, M), in float32: for each of the T tokens the sum of its rows; M = d_model."""
        out_NM = self.second_product()
        return sum(
            (out_NM[place_T].float() for place_T in self.position_TK.t()), torch.zeros(1, device=DEVICE)
        )

    def in_place(self) -> list[Callable[[], object]]:
        return [self.first_product, self.second_product]

    def torch_products(self) -> list[Callable[[], object]]:
        first, second = self.w1.transpose(1, 2), self.w2.transpose(1, 2)
        return [
            lambda: F.grouped_mm(self.rows_NM, first, offs=self.ends_E),
            lambda: F.grouped_mm(self.active_NH, second, offs=self.ends_E),
        ]


class Fused:
    """The two products of a scenario as W virtual ranks compute them by the fused kernels."""

    def __init__(self, scenario: Scenario, num_ranks: int) -> None:
        self.scenario, model = scenario, scenario.model
        routes = routes_of(scenario.expert_TK, None, num_ranks, model.experts)
        by_rank = routes.counts_nE.unflatten(1, (num_ranks, -1)).sum((0, 2))
        self.virtual = VirtualRanks(
            num_ranks,
            model.experts // num_ranks,
            rows=int(by_rank.max()),
            home_rows=-(-scenario.num_tokens // num_ranks) * model.top_k,
            d_model=model.d_model,
            dtype=torch.bfloat16,
            device=DEVICE,
        )
        self.launcher, self.fused_routings = self.virtual.launcher, self.virtual.fused_routings(routes)
        nothing: list[Tensor | None] = [None] * num_ranks
        self.operands = FusedParameters(
            w1=scenario.w1.chunk(num_ranks),
            w2=scenario.w2.chunk(num_ranks),
            b1=nothing,
            b2=nothing,
            activation="swiglu",
        )
        self.active: Sequence[Tensor] = []

    @property
    def n_c(self) -> list[int]:
        """The numbers of communicating blocks of a rank that the sweep tries: at most half of the blocks."""
        return [count for count in N_C if 2 * count <= self.launcher.blocks]

    def divide(self, dispatch: Division, combine: Division) -> None:
        taken = {"dispatch": dispatch, "combine": combine}
        self.launcher.divide = lambda kernel, direction: taken[kernel]

    def dispatch(self) -> None:
        operands = self.operands
        scenario = self.scenario
        _, self.active = comet_operators.dispatch_hidden(
            self.launcher, self.fused_routings, scenario.x_TM, scenario.weight_TK, operands.w1, operands.b1,
            activation="swiglu", keep=True,
        )  # fmt: skip

    def combine(self) -> Tensor:
        return comet_operators.product_combine(
            self.launcher, self.fused_routings, self.active, self.operands.w2, self.operands.b2
        )

    def pair(self, dispatch: Division, combine: Division) -> Callable[[], list[Callable[[], object]]]:
        def parts() -> list[Callable[[], object]]:
            self.divide(dispatch, combine)
            return [self.dispatch, self.combine]

        return parts


# ---- correct first


def check(scenario: Scenario, fused: Fused) -> float:
    """Returns the relative difference between the output of the fused kernels and that of rows in place.

    Raises SystemExit if it is larger than `LIMIT`.
    """
    fused.divide(Division(4), Division(4))
    fused.dispatch()
    output = fused.combine()
    fused.virtual.check()
    apart = difference(output, scenario.output())
    if not apart <= LIMIT:  # also true for NaN
        sys.exit(f"bench_comet: {scenario.model.name}: {apart} from the products in place, limit {LIMIT}")
    return apart


# ---- then time


def in_turn(
    runs: Mapping[Any, Callable[[], Sequence[Callable[[], object]]]], rounds: int, flush: Tensor
) -> dict[Any, list[Times]]:
    """Times several runs, which take turns. Returns for each run the milliseconds of its parts in each round.

    Every run takes place once in each round, and each round begins with another run.

    runs: by name, a function that returns the parts of a run: functions to be called one after the other.
    flush: buffer that is overwritten before each run, to empty the L2 cache.
    """

    def timed(parts: Callable[[], Sequence[Callable[[], object]]]) -> Times:
        return [1e3 * part for part in part_seconds(parts(), flush, LEAD_CYCLES)]

    samples = in_rounds(
        [functools.partial(timed, parts) for parts in runs.values()], rounds, warm_up=WARMUP, rotate=True
    )
    return dict(zip(runs, samples, strict=True))


@dataclass(frozen=True)
class Sweep:
    """Median milliseconds of both fused kernels, for each way to divide the blocks of a rank.

    dispatch: of the dispatching kernel, by n_c, the number of communicating blocks.
    combine: of the combining kernel, by (n_c, number of columns that are sent at a time).
    """

    dispatch: dict[int, float]
    combine: dict[tuple[int, int], float]

    @property
    def best(self) -> tuple[Division, Division]:
        n_c = min(self.dispatch, key=lambda count: (self.dispatch[count], count))
        return Division(n_c), Division(
            *min(self.combine, key=lambda division: (self.combine[division], division))
        )

    def rows(self) -> list[dict[str, Any]]:
        chunks = sorted({chunk for _, chunk in self.combine})
        return [
            {"n_c": n_c, "dispatch ms": taken}
            | {f"combine {chunk}": self.combine[n_c, chunk] for chunk in chunks}
            for n_c, taken in self.dispatch.items()
        ]


def sweep(fused: Fused, rounds: int, flush: Tensor) -> Sweep:
    divisions = list(itertools.product(fused.n_c, CHUNK_COLUMNS))
    runs = {division: fused.pair(Division(division[0]), Division(*division)) for division in divisions}
    samples = in_turn(runs, rounds, flush)
    by_n_c: dict[int, Times] = {}
    for (n_c, _), taken in samples.items():
        by_n_c.setdefault(n_c, []).extend(first for first, _ in taken)
    return Sweep(
        dispatch={n_c: statistics.median(taken) for n_c, taken in by_n_c.items()},
        combine={
            division: statistics.median(second for _, second in taken) for division, taken in samples.items()
        },
    )


def timing(samples: Sequence[Times], part: int | None = None) -> Timing:
    """Returns the seconds of one part of a run, or of all parts together, as a `Timing` over the rounds.

    samples: for each round, the milliseconds of each part.
    part: index of the part; None adds all parts.
    """
    return Timing(tuple((sum(taken) if part is None else taken[part]) / 1e3 for taken in samples))


def measure(
    scenario: Scenario, num_ranks: int, rounds: int, flush: Tensor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measures one scenario on W virtual ranks. Returns (row of the table, further content of the file)."""
    fused = Fused(scenario, num_ranks)
    apart = check(scenario, fused)
    swept = sweep(fused, min(rounds, SWEEP_ROUNDS), flush)
    dispatch, combine = swept.best
    runs: dict[str, Callable[[], Sequence[Callable[[], object]]]] = {
        "fused": fused.pair(dispatch, combine),
        "in place": scenario.in_place,
        "alone": lambda: [sharing("none", part) for part in scenario.in_place()],
        "torch": scenario.torch_products,
    }
    samples = in_turn(runs, rounds, flush)
    fused.virtual.check()
    fused.virtual.close()
    pairs = {name: timing(taken) for name, taken in samples.items()}
    row: dict[str, Any] = {
        "model": scenario.model.name,
        "W": num_ranks,
        "n_c": f"{dispatch.n_c}, {combine.n_c}",
        "columns": combine.chunk_columns,
    }
    for at, name in enumerate(("dispatch", "combine")):
        row[f"{name} ms"] = timing(samples["fused"], at).median * 1e3
        row["product ms" if at else "hidden ms"] = timing(samples["in place"], at).median * 1e3
    row |= {
        "pair ms": pairs["fused"].median * 1e3,
        "spread": pairs["fused"].spread,
        "in place ms": pairs["in place"].median * 1e3,
        "x in place": pairs["in place"].speedup_over(pairs["fused"]),
        "x alone": pairs["alone"].speedup_over(pairs["fused"]),
        "x torch": pairs["torch"].speedup_over(pairs["fused"]),
        "difference": apart,
    }
    document = {
        "blocks_of_a_rank": fused.launcher.blocks,
        "dispatch": asdict(dispatch),
        "combine": asdict(combine),
        "sweep": swept.rows(),
        "parts": {
            name: [timing(taken, part) for part in range(2)] for name, taken in samples.items()
        },
    }  # fmt: skip
    print(f"\n{scenario.model.name}, W = {num_ranks}: {fused.launcher.blocks} blocks a rank")
    print(table(swept.rows()), flush=True)
    return row, document


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns, as texts, the goals that the rows of the table do not reach."""
    return [
        f"{row['model']}, W = {row['W']}: {row['x in place']:.3f} x in place, goal {GOAL}"
        for row in rows
        if row["W"] > 1 and not row["x in place"] <= GOAL
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The fused kernels of virtual ranks on one GPU, beside products of rows in place."
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each time")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows, 5 rounds, no file")
    arguments = parser.parse_args()
    need_gpu("bench_comet")
    path, reason = extension.path(DEVICE)
    if path is None:
        sys.exit(f"bench_comet: not run, {reason}")
    rounds = 5 if arguments.quick else arguments.rounds
    num_rows = QUICK_ROWS if arguments.quick else ROWS
    machine = show_gpu()
    print(f"the kernels of {path}; {num_rows} routed rows, SwiGLU, bfloat16, uniform routing", flush=True)
    flush = flush_buffer()
    rows, documents = [], []
    for model in MODELS:
        if model.by_bound:  # Qwen2-MoE: this benchmark has no goal for it
            continue
        torch.manual_seed(0)
        scenario = Scenario(model, num_rows)
        for num_ranks in RANKS:
            row, document = measure(scenario, num_ranks, rounds, flush)
            rows.append(row)
            documents.append({"model": asdict(model), "ranks": num_ranks, **document})
        del scenario
        torch.cuda.empty_cache()
    print(f"\n{table(rows)}")
    over = missed(rows)
    print("\n".join(["over the goals:", *(over or ["none"])]))
    if arguments.quick:
        return
    file = arguments.out / file_name("comet", machine)
    write_json(
        file, **machine, kernels=path, routed_rows=num_rows, rounds=rounds,
        goals={"x in place": GOAL}, over_the_goals=over, rows=rows, measured=documents,
    )  # fmt: skip
    print(f"written: {file}")


if __name__ == "__main__":
    main()
