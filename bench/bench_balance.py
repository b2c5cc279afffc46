"""What do copies of busy experts gain? Simulated, for the cases whose numbers LLEP and UltraEP published.

    python bench/bench_balance.py [--out build/bench]

Nothing is measured here but the host time of a plan: devices and links are modelled, with the rates in the
result. All ranks are simulated together (`pmoe.planner.uneven_ranks`). Three layers are compared, each with
the fastest n of 1, 2, 4 and 8:

    balanced  the same layer with an even load, as a gate with forced balance gives it
    without   the skewed load
    with      the skewed load, and copies of busy experts (`pmoe.planner.copies`), which are kept from forward
              to backward. Weights and gradients are messages of the same link as rows: parts of an expert
              from its owner to the hosts of its copies, and then between these hosts
              (`pmoe.planner.copy_groups`). Owners and hosts compute their own rows of a copied expert and do
              not send them, and other rows stay on their machine if they can (`pmoe.planner.copy_rows`). Of
              three plans the fastest counts

Cases:

    llep      8 ranks of one machine, 128 experts, top-4, d_model = d_hidden = 2880, 32,768 tokens a rank; 30
              to 95 % of the rows go to four experts of one rank. The paper (arXiv 2601.17111) says "up to
              5 x" on 8 GPUs
    ultraep   64 ranks, on one machine or on 8, 256 experts, top-8, d_model = 7168, d_hidden = 2048, 4,096
              tokens a rank. Loads are lognormal, with a busiest rank of 1.3 to 4.01 times the mean: the range
              that the paper (arXiv 2606.04101) found. It says 94.3 % of the speed of forced balance, 1.49 x
              over no balancing, and an imbalance of 1.01 to 1.04 afterwards. The paper's models and machines
              differ

The papers' numbers are of other machines. They stand beside the simulated ones to compare sizes, not speed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.timing import OUT, counted, table, write_json
from pmoe.planner.cluster import Cluster
from pmoe.planner.copies import CopyLimits, CopyPlan, plan_copies
from pmoe.planner.costs import LineCost
from pmoe.planner.uneven_ranks import UnevenLayer, nodes_of, uneven_pass_seconds

DEGREES = (1, 2, 4, 8)
PER_RANK = 2
"""The most copies that a rank hosts."""
EXPOSED = (1.0, 0.5, 0.25)
"""Parts of a copy's messages that a plan counts. The plan with the fastest simulated time is taken."""
SEEDS = range(3)
"""Seeds of the lognormal loads; numbers are medians over them."""

PUBLISHED = {
    "llep": "LLEP (arXiv 2601.17111): up to 5 x faster, 4 x less peak memory, 8 GPUs",
    "ultraep": "UltraEP (arXiv 2606.04101): 94.3 % of forced balance, 1.49 x over none, imbalance from "
    "1.30-4.01 to 1.01-1.04, up to 256 GPUs",
}


def machine(machines: int, ranks: int, inside_bytes: float) -> Cluster:
    """Returns machines: 600 TFLOP/s a rank, 50 GB/s of a rank between machines.

    ranks: ranks of a machine.
    inside_bytes: bytes a second of a rank to the other ranks of its machine.
    """
    return Cluster(
        machines=machines,
        ranks_per_machine=ranks,
        device_type="cuda",
        memory_bytes=141e9,
        compute=LineCost(10e-6, 2 / 600e12),
        copy=LineCost(10e-6, 1 / 50e9),
        inside=LineCost(2e-6, 1 / inside_bytes),
        outside=LineCost(4e-6, 1 / 50e9),
    )


@dataclass(frozen=True)
class Case:
    """Sizes of a layer with SwiGLU experts in bfloat16, on a modelled cluster."""

    name: str
    cluster: Cluster
    num_experts: int
    top_k: int
    d_model: int
    d_hidden: int
    tokens: int

    @property
    def rows(self) -> int:
        """Number of rows of all ranks."""
        return self.tokens * self.top_k * self.cluster.num_ranks

    def layer(self, loads: Sequence[int]) -> UnevenLayer:
        """Returns the layer with these rows of each expert."""
        parameters = 3 * self.d_model * self.d_hidden
        return UnevenLayer(
            loads=loads, row_bytes=2 * self.d_model, multiply_adds=parameters, expert_bytes=2 * parameters
        )


LLEP = (128, 4, 2880, 2880, 32768)
ULTRAEP = (256, 8, 7168, 2048, 4096)
CASES = (
    Case("llep, 400 GB/s inside", machine(1, 8, 400e9), *LLEP),
    Case("llep, 50 GB/s inside", machine(1, 8, 50e9), *LLEP),
    Case("ultraep, 1 machine of 64, 400 GB/s", machine(1, 64, 400e9), *ULTRAEP),
    Case("ultraep, 8 machines of 8, 50 GB/s between", machine(8, 8, 400e9), *ULTRAEP),
)


def hot_loads(case: Case, share: float, num_hot: int) -> list[int]:
    """Returns the rows of each expert if the first ``num_hot`` get ``share`` of all rows, evenly."""
    hot = int(case.rows * share) // num_hot
    others = (case.rows - hot * num_hot) // (case.num_experts - num_hot)
    return [hot] * num_hot + [others] * (case.num_experts - num_hot)


def imbalance(rows: Sequence[int]) -> float:
    """Returns the largest number over the mean."""
    return max(rows) * len(rows) / sum(rows)


def rank_rows(case: Case, loads: Sequence[int], plan: CopyPlan | None = None) -> list[int]:
    """Returns the rows that each rank computes."""
    num_ranks = case.cluster.num_ranks
    plan = plan or CopyPlan(hosts={}, before=0, after=0)
    return plan.rows_of_ranks(loads, case.layer(loads).owners(num_ranks), num_ranks)


def lognormal_loads(case: Case, wanted: float, seed: int) -> list[int]:
    """Returns lognormal rows of experts, so wide that the busiest rank has ``wanted`` times the mean."""
    draw = random.Random(seed)
    normal = [draw.gauss(0, 1) for _ in range(case.num_experts)]
    low, high = 0.0, 8.0
    for _ in range(50):
        width = (low + high) / 2
        weights = [2.718281828 ** (width * value) for value in normal]
        loads = [int(case.rows * weight / sum(weights)) for weight in weights]
        low, high = (width, high) if imbalance(rank_rows(case, loads)) < wanted else (low, width)
    return loads


def seconds(
    case: Case, loads: Sequence[int], trains: bool, plan: CopyPlan | None = None
) -> tuple[float, int]:
    """Returns the simulated seconds with the fastest n, and this n: of forward, or of both passes."""
    ways = ("forward", "backward") if trains else ("forward",)
    layer = case.layer(loads)
    return min(
        (sum(uneven_pass_seconds(layer, case.cluster, n, way, plan) for way in ways), n) for n in DEGREES
    )


def plan_of(case: Case, loads: Sequence[int], trains: bool, exposed: float) -> tuple[CopyPlan, float]:
    """Returns the copies, and the seconds in which the plan was made (median of 9, on this machine).

    exposed: the part of a copy's messages that counts, because computation hides the rest.
    """
    layer = case.layer(loads)
    near, far = (int(price * exposed) for price in layer.copy_prices(case.cluster, trains=trains))
    limits = CopyLimits(per_rank=PER_RANK, near=near, far=far)
    arguments = (loads, layer.owners(case.cluster.num_ranks), nodes_of(case.cluster), limits)
    took = []
    for _ in range(9):
        begun = time.perf_counter()
        plan = plan_copies(*arguments)
        took.append(time.perf_counter() - begun)
    return plan, statistics.median(took)


def compare(case: Case, loads: Sequence[int], trains: bool) -> dict[str, Any]:
    """Returns the numbers of the three layers for one load; times are simulated, in milliseconds."""
    even = [case.rows // case.num_experts] * case.num_experts
    balanced, n_balanced = seconds(case, even, trains)
    without, n_without = seconds(case, loads, trains)
    plan = CopyPlan(hosts={}, before=0, after=0)  # a layer would host no copies where they do not pay
    with_copies, n_with = without, n_without
    slowest_plan = 0.0
    for exposed in EXPOSED:
        other, plan_seconds = plan_of(case, loads, trains, exposed)
        slowest_plan = max(slowest_plan, plan_seconds)
        took, n = seconds(case, loads, trains, other)
        if took < with_copies:
            plan, with_copies, n_with = other, took, n
    rows = rank_rows(case, loads, plan)
    return {
        "before": imbalance(rank_rows(case, loads)),
        "after": imbalance(rows),
        "balanced_ms": balanced * 1e3,
        "without_ms": without * 1e3,
        "with_ms": with_copies * 1e3,
        "with_over_balanced": with_copies / balanced,
        "speed_of_balanced": balanced / with_copies,
        "speedup": without / with_copies,
        "rows_of_busiest_before_over_after": max(rank_rows(case, loads)) / max(rows),
        "copies": len(plan.pairs),
        "experts_copied": len(plan.hosts),
        "n": (n_balanced, n_without, n_with),
        "plan_microseconds_measured": slowest_plan * 1e6,
    }


def medians(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median of each number."""
    numbers = {
        name: statistics.median(result[name] for result in results) for name in results[0] if name != "n"
    }
    return {**numbers, "n": results[0]["n"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    all_rows = []
    for case, trains in counted([(case, trains) for case in CASES for trains in (False, True)], "case"):
        if case.name.startswith("llep"):
            shares = (0.30, 0.50, 0.80, 0.95)
            results = {f"{s:.0%} to 4": compare(case, hot_loads(case, s, 4), trains) for s in shares}
        else:
            results = {
                f"lognormal, {wanted}": medians(
                    [compare(case, lognormal_loads(case, wanted, seed), trains) for seed in SEEDS]
                )
                for wanted in (1.3, 2.0, 3.0, 4.01)
            }
        what = "step" if trains else "forward"
        all_rows += [{"case": case.name, "what": what, "load": load, **r} for load, r in results.items()]
    columns = (
        "before",
        "after",
        "balanced_ms",
        "without_ms",
        "with_ms",
        "with_over_balanced",
        "speedup",
        "copies",
    )
    named = [{name: result[name] for name in ("case", "what", "load", *columns)} for result in all_rows]
    print("simulated:", table(named), sep="\n")
    print("\n".join(PUBLISHED.values()))
    write_json(
        arguments.out / "balance_simulated.json",
        simulated=True,
        per_rank=PER_RANK,
        published=PUBLISHED,
        cases=[asdict(case) for case in CASES],
        results=all_rows,
    )


if __name__ == "__main__":
    main()
