"""What does pipeline=True search, what does it cost, and what does it miss?

    python bench/bench_search.py                   # simulated, some minutes; no processes, no timing
    python bench/bench_search.py --live            # 2 ranks behind a modelled link, some minutes more
    python bench/bench_search.py --live --only-live

Simulated: batches of random sizes (B tokens of a rank) on curves of seconds by n and B. pmoe's search and
MPipeMoE's Algorithm 1 as printed measure the same curves with the same noise:

    stored     the curves that bench_choices measured (bench/results/choices_modelled.json): n = 2 is fastest
    growing    curves of the simulator, on which the fastest n grows with B from 2 to 8

    searches   number of searches in a run of all batches
    regret     seconds of a step with the chosen n / seconds of the fastest n - 1, mean over the batches
    steps      seconds of all runs of a search / seconds of a step with the fastest n, median over searches

Each number is the median over seeds; "worst" is the largest of a seed. Last it shows what a restore pair
loses with the n of another pair, because one table holds for all pairs.

Live: a layer with pipeline=True and memory_reuse=True trains on batches of random sizes. The runs of trials
are counted, and their seconds are compared with those of a plain step at the same B.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.choices import Case, batch, name_of_ran, own_cache, set_rates
from bench.links import INFINITE, launch
from bench.passes import Setting, timed
from bench.searches import (
    GROWING,
    GROWING_SIZES,
    Curves,
    Noise,
    losses_between_pairs,
    random_batches,
    simulated_curves,
    stored_curves,
    train,
)
from bench.timing import OUT, table, write_json
from pmoe.choose import open_choice, search
from pmoe.choose.trials import Trial

NOISES = (*(Noise(run) for run in (0.0, 0.01, 0.02, 0.03)), Noise(0.01, 0.01))
MOST_SEARCHES, MOST_REGRET = 16, 0.3
"""Largest acceptable number of searches in 300 batches, and largest acceptable mean regret.

The regret is in percent. The limits are for the stored curves.
"""
MOST_LIVE_SEARCHES, MOST_STEPS = 10, 12.0
"""The largest acceptable number of searches in 60 batches, and of steps of a search (median)."""

STORED = Path(__file__).resolve().parent / "results" / "choices_modelled.json"
LIVE_CASE = Case("live", link=1.0, latency=0.02)
LAYERS: dict[str, dict[str, Any]] = {
    "pipeline=True": {"pipeline": True},
    "both True": {"pipeline": True, "memory_reuse": True},
}
NEAR = 1.1
"""Largest ratio of the seconds of two restore pairs that are compared.

Only among pairs that take about the same time does memory_reuse=True change from one to another.
"""


# ---- simulated


def simulated_rows(
    name: str, curves: Curves, ends: tuple[int, int], count: int, noises: Sequence[Noise], seeds: int
) -> list[dict[str, Any]]:
    """Simulates searches on curves. Returns one row of the table for each noise and each of the two
    algorithms.

    curves: seconds of a step, by n and by tokens of a rank.
    ends: the smallest and the largest number of tokens of a batch.
    count: number of batches.
    seeds: number of runs, each with its own random batches and noise.
    """
    rows = []
    for noise in noises:
        for who, printed in (("pmoe", False), ("as printed", True)):
            outcomes = [
                train(curves, random_batches(*ends, count, seed), noise, seed, printed=printed)
                for seed in range(seeds)
            ]
            searches = [outcome.searches for outcome in outcomes]
            regrets = [100 * outcome.regret for outcome in outcomes]
            rows.append(
                {
                    "curves": name,
                    "noise": str(noise),
                    "algorithm": who,
                    "searches": statistics.median(searches),
                    "worst searches": max(searches),
                    "regret %": statistics.median(regrets),
                    "mean over seeds %": statistics.fmean(regrets),
                    "worst regret %": max(regrets),
                    "steps of a search": statistics.median(
                        statistics.median(outcome.steps) for outcome in outcomes
                    ),
                    f"{MOST_SEARCHES} and {MOST_REGRET} %": "met"
                    if statistics.median(searches) <= MOST_SEARCHES
                    and statistics.median(regrets) <= MOST_REGRET
                    else "MISSED",
                }
            )
    return rows


def pair_row(machines: int) -> dict[str, Any]:
    losses = losses_between_pairs(machines, NEAR)
    return {
        "machines": machines,
        "mean loss %": 100 * statistics.fmean(losses),
        "median loss %": 100 * statistics.median(losses),
        "95th percentile %": 100 * statistics.quantiles(losses, n=20)[-1],
        "worst %": 100 * max(losses),
    }


# ---- live


class Trials:
    """Counts the runs and the seconds of this rank's trials: those of searches for n, and all others."""

    def __init__(self) -> None:
        self.runs = {"search": 0, "other": 0}
        self.seconds = {"search": 0.0, "other": 0.0}
        self.running = "other"

    def counting(self) -> contextlib.ExitStack:
        """Returns a context in which trials are counted."""
        stack = contextlib.ExitStack()
        for module, name, kind in (
            (search, "measure_in_stages", "search"),
            (open_choice, "measure_in_little_memory", "other"),
            (open_choice, "run_trials", "other"),
        ):
            measured = functools.partial(self.measured, getattr(module, name), kind)
            stack.enter_context(mock.patch.object(module, name, measured))
        run = Trial.run

        def counted_run(trial: Trial) -> tuple[float, float]:
            self.runs[self.running] += 1
            return run(trial)

        stack.enter_context(mock.patch.object(Trial, "run", counted_run))
        return stack

    def measured(self, measure: Callable[..., Any], kind: str, *args: Any, **kwargs: Any) -> Any:
        self.running = kind
        begin = time.perf_counter()
        times = measure(*args, **kwargs)
        self.seconds[kind] += time.perf_counter() - begin
        return times


@own_cache()
def run_live(
    link: Any, case: Case, setting: Setting, batches: list[int], options: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Trains a layer on batches of these sizes.

    Returns one row for each batch in which trials ran, and the layer's table of the fastest n. A row has the
    runs and the seconds of the search for n, and those of other trials: of restore pairs, and of the
    comparison of the profile with a step.
    """
    set_rates(link, case, setting, 3)
    torch.manual_seed(0)
    layer = pmoe.MoELayer(setting.d_model, setting.d_hidden, setting.num_experts, **options)
    rows = []
    for number, B in enumerate(batches):
        x, dy = batch(layer, B, case.skew)

        def step(x: Tensor = x, dy: Tensor = dy) -> float:
            x.grad = None
            layer.zero_grad(set_to_none=True)
            return timed(lambda: layer(x), dy)["step"]

        trials = Trials()
        with trials.counting():
            first = step()
        if sum(trials.runs.values()):
            later = min(step() for _ in range(3))
            rows.append(
                {
                    "batch": number,
                    "B": B,
                    "took": name_of_ran(layer.ran),
                    "search runs": trials.runs["search"],
                    "search steps": trials.seconds["search"] / later,
                    "other runs": trials.runs["other"],
                    "other steps": trials.seconds["other"] / later,
                    "step ms": later * 1e3,
                    "first step ms": first * 1e3,
                }
            )
    learned = search.learned_degrees(layer.layer_modules)
    return rows, {name: degrees.to_fields() for name, degrees in learned.tables.items()}


def live_summary(rows: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Returns those numbers of a live run that have limits, and whether they are within the limits."""
    searches = [row for row in rows if row["search runs"]]
    steps = statistics.median(row["search steps"] for row in searches)
    all_steps = statistics.median(row["search steps"] + row["other steps"] for row in rows)
    met = len(searches) <= MOST_LIVE_SEARCHES and steps <= MOST_STEPS
    return {
        "searches": len(searches),
        "median runs": statistics.median(row["search runs"] for row in searches),
        "median steps": steps,
        "median steps of all trials": all_steps,
        "all search runs": sum(row["search runs"] for row in rows),
        "all other runs": sum(row["other runs"] for row in rows),
        "seconds": seconds,
        f"{MOST_LIVE_SEARCHES} searches, {MOST_STEPS:.0f} steps": "met" if met else "MISSED",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=25, help="runs of each simulated row")
    parser.add_argument("--batches", type=int, default=300, help="batches of a simulated run")
    parser.add_argument("--live", action="store_true", help="also train behind a modelled link")
    parser.add_argument("--only-live", action="store_true", help="nothing is simulated")
    parser.add_argument("--live-batches", type=int, default=60)
    parser.add_argument("--live-seeds", type=int, default=1, help="live runs of both kinds of layers")
    parser.add_argument(
        "--ends", type=int, nargs=2, default=(2048, 12288), help="least and most tokens, live"
    )
    parser.add_argument("--d-model", type=int, default=160)
    parser.add_argument("--d-hidden", type=int, default=640)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON")
    args = parser.parse_args()
    content: dict[str, Any] = {}
    if not args.only_live:
        stored, *stored_ends = stored_curves(STORED)
        growing = simulated_curves(GROWING, GROWING_SIZES)
        rows = []
        for name, curves in (("stored", stored), ("growing", growing)):
            ends = (stored_ends[0], stored_ends[1])
            rows += simulated_rows(name, curves, ends, args.batches, NOISES, args.seeds)
        print(f"{args.batches} batches, medians of {args.seeds} seeds")
        print(table(rows))
        pairs = pair_row(200)
        print("\nA restore pair with the fastest n of another pair, simulated")
        print(table([pairs]), flush=True)
        content |= {"simulated": rows, "pairs": pairs}
    if args.live or args.only_live:
        setting = Setting(d_model=args.d_model, d_hidden=args.d_hidden)
        content["live"] = {}
        for seed in range(args.live_seeds):
            for name, options in LAYERS.items():
                began = time.monotonic()
                batches = random_batches(*args.ends, args.live_batches, seed)
                values = (LIVE_CASE, setting, batches, options)
                rows, learned = launch(
                    setting.world, run_live, "modelled", INFINITE, values, timeout_seconds=3000
                )[0]
                summary = live_summary(rows, time.monotonic() - began)
                print(f"\n{name}, {args.live_batches} batches of {args.ends} tokens, seed {seed}")
                print(table(rows))
                print(table([summary]), flush=True)
                content["live"][f"{name}, seed {seed}"] = {"rows": rows, "table": learned, "summary": summary}
    path = args.out / "search.json"
    write_json(path, **content)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
