"""Is the layer's own choice the best that it could have chosen, and what does choosing cost?

    python bench/bench_choices.py                  # half an hour
    python bench/bench_choices.py --quick          # only shows that it works: two small cases

2 ranks with one thread each run on machines in which different choices win. A modelled link and a limit on
copies make messages and copies slow or fast beside computing; routing is even or skewed. In each case:

1. It times every n of 1 to 16 without reuse, and every restore pair with every n that pipeline=True knows.
2. It times the two fastest that a chooser could have taken, in the same rounds as the choosers:
   pipeline=True, pipeline="solve", memory_reuse=True, both True, and both under a budget.

    regret     (time of the choosing layer / time of the fastest) - 1. Under a budget, "the fastest" is the
               fastest that holds the budget for any routing. Its layer has the budget, too.
    cost       (time of the layer's first step - time of a step) / time of a step. The first layer with
               "solve" or memory_reuse=True also measures the machine, once for all layers.

Last it shows n by batch size: the fastest n and the chosen one, beside MPipeMoE's Fig. 12.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.choices import ALL_DEGREES, CASES, WITH_BUDGET, Case, Result, name_of, run_batches, run_case
from bench.links import INFINITE, launch
from bench.passes import Setting
from bench.pictures import plotting
from bench.timing import OUT, Timing, table, write_json
from pmoe.planner.degree import DEGREES

MEDIAN_REGRET, WORST_REGRET = 0.05, 0.10
"""The largest median of the regrets, and the largest single regret, that are acceptable."""

BATCHES = (1024, 2048, 4096, 8192, 16384)
BATCH_CASE = Case("by batch size", link=1.0, latency=0.02)
PAPER = ((0, 2), (8192, 4), (22528, 8))
"""(number of tokens, n): from this number of tokens on, n is the fastest in MPipeMoE (Fig. 12).

The paper measured GPT-XL on 64 GPUs, without n = 1.
"""

CHOSEN = (("pipeline=True", "o", "#aa3377"), ('pipeline="solve"', "x", "#ee6677"))
"""Name, mark and colour of each chooser in the picture."""

QUICK = Setting(rows=2048, d_model=32, d_hidden=64, num_experts=4)


# ---- the report


def regret(result: Result, name: str) -> tuple[str, float]:
    """Returns (name of the fastest run among the finalists, regret of a chooser), by median times.

    The regret is (time of the layer that chose) / (time of the fastest finalist) - 1.

    name: name of the chooser, such as "pipeline=True".
    """
    steps = {run: times["step"] for run, times in result.times.items()}
    best = min(result.chosen[name].finalists, key=lambda run: steps[run].median)
    return best, steps[best].speedup_over(steps[name]) - 1


def rows_of(case: Case, result: Result) -> list[dict[str, Any]]:
    """Returns the rows of the printed table for one case: one row for each chooser."""
    rows = []
    for name, chosen in result.chosen.items():
        best, more = regret(result, name)
        took, fastest = result.times[name]["step"], result.times[best]["step"]
        rows.append(
            {
                "case": case.name,
                "chooser": name,
                "took": chosen.took,
                "step ms": took.median * 1e3,
                "best": best,
                "best ms": fastest.median * 1e3,
                "regret %": 100 * more,
                "of": len(chosen.among),
                "slowest/best": max(result.screened[name]["step"].median for name in chosen.among)
                / result.screened[best.removesuffix(WITH_BUDGET)]["step"].median,
                "search steps": chosen.first_seconds / took.median - 1,
            }
        )
    return rows


def stored(result: Result) -> dict[str, Any]:
    """Returns the result of a case as data that JSON can hold."""
    return {**vars(result), "chosen": {name: asdict(chosen) for name, chosen in result.chosen.items()}}


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row for each chooser, and one for all, which say whether the regret is acceptable."""
    summary_rows = []
    for name in [*dict.fromkeys(row["chooser"] for row in rows), "all"]:
        own = [row for row in rows if name in (row["chooser"], "all")]
        median, worst = (
            of(row["regret %"] for row in own) for of in (lambda regrets: statistics.median(regrets), max)
        )
        met = median <= 100 * MEDIAN_REGRET and worst <= 100 * WORST_REGRET
        summary_rows.append(
            {
                "chooser": name,
                "median regret %": median,
                "worst regret %": worst,
                "in case": max(own, key=lambda row: row["regret %"])["case"],
                "search steps": statistics.median(row["search steps"] for row in own),
                f"{MEDIAN_REGRET:.0%} and {WORST_REGRET:.0%}": "met" if met else "MISSED",
            }
        )
    return summary_rows


def batch_rows(batches: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row for each batch size.

    A row has the fastest n, the n that the choosers took, and the milliseconds of every n and of both
    choosers.
    """
    return [
        {
            "tokens": tokens,
            "best n": best_degree(batch["times"]),
            **{f"{name} takes": n for name, n in batch["took"].items()},
            **{f"{name} ms": timing.median * 1e3 for name, timing in batch["times"].items()},
        }
        for tokens, batch in batches.items()
    ]


def best_degree(times: Mapping[str, Timing]) -> int:
    return min(DEGREES, key=lambda n: times[name_of(n, None)].median)


def draw(path: Path, batches: Mapping[int, Mapping[str, Any]]) -> None:
    """Draws the picture beside MPipeMoE's Fig. 12.

    Left: the speed of every n by batch size; that of the choosers is dashed. Right: the fastest n in the
        paper,
    the fastest n here, and the chosen n.
    """
    plt = plotting()

    sizes = list(batches)
    places = range(len(sizes))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 6.4), layout="constrained")
    colours = ("#bbbbbb", "#4477aa", "#66ccee", "#228833", "#ccbb44")
    width = 0.8 / len(DEGREES)
    base = {tokens: batch["times"][name_of(1, None)].median for tokens, batch in batches.items()}
    for k, (n, colour) in enumerate(zip(DEGREES, colours, strict=True)):
        heights = [base[t] / batch["times"][name_of(n, None)].median for t, batch in batches.items()]
        left.bar(
            [at - 0.4 + (k + 0.5) * width for at in places],
            heights,
            width * 0.9,
            color=colour,
            label=f"n={n}",
        )
    for name, _, colour in CHOSEN:
        heights = [base[t] / batch["times"][name].median for t, batch in batches.items()]
        left.plot(places, heights, "--o", ms=4, color=colour, label=name)
    left.set(
        title="2 CPU ranks on a modelled link",
        xlabel="tokens of a rank",
        ylabel="speed over n=1's",
    )
    left.set_xticks(places, [f"{size // 1024}k" for size in sizes])
    figure.legend(*left.get_legend_handles_labels(), ncols=4, loc="outside lower left")
    edges = [max(start, sizes[0]) for start, _ in PAPER] + [2 * max(PAPER[-1][0], sizes[-1])]
    paper = "fastest, Fig. 12 (GPT-XL, 64 GPUs)"
    right.stairs([n for _, n in PAPER], edges, color="black", lw=1.5, baseline=None, label=paper)
    best = [best_degree(batch["times"]) for batch in batches.values()]
    right.plot(sizes, best, "s", ms=12, mfc="none", color="#4477aa", label="fastest, here")
    for name, mark, colour in CHOSEN:
        taken = [batch["took"][name] for batch in batches.values()]
        right.plot(sizes, taken, mark, ms=6, color=colour, label=f"{name} takes")
    right.set(title="n by the size of a batch", xlabel="tokens of a batch; here of a rank", ylabel="n")
    right.set(xscale="log", yscale="log", ylim=(0.8, 40))
    right.set_xticks(sizes, [f"{size // 1024}k" for size in sizes])
    right.set_yticks(DEGREES, map(str, DEGREES))
    right.minorticks_off()
    figure.legend(*right.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, two cases, three n")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], metavar="NAME")
    parser.add_argument("--rounds", type=int, help="by default 9; 2 where quick")
    parser.add_argument("--rows", type=int, default=4096, help="tokens a rank, at least 2048 to be tried for")
    parser.add_argument("--d-model", type=int, default=160)
    parser.add_argument("--d-hidden", type=int, default=640)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON and PNG")
    args = parser.parse_args()
    rounds = args.rounds or (2 if args.quick else 9)
    setting = Setting(rows=args.rows, d_model=args.d_model, d_hidden=args.d_hidden)
    cases, degrees, batches = CASES, list(ALL_DEGREES), list(BATCHES)
    if args.quick:
        setting, cases, degrees, batches = QUICK, (CASES[1], CASES[-1]), [1, 3, 4], [256, 2048]
    if args.cases:
        cases = tuple(case for case in CASES if case.name in args.cases)
    began = time.monotonic()

    def launched(function: Any, *values: Any) -> Any:
        return launch(setting.world, function, "modelled", INFINITE, values, timeout_seconds=1800)[0]

    results: dict[str, Result] = {}
    rows: list[dict[str, Any]] = []
    for case in cases:
        results[case.name] = result = launched(run_case, case, setting, degrees, rounds)
        rows += (new := rows_of(case, result))
        print(f"\n{case}, {result.bytes_per_second / 1e6:.1f} MB/s, after {time.monotonic() - began:.0f} s")
        print(table(new), flush=True)
    by_batch = launched(run_batches, BATCH_CASE, setting, batches, rounds)
    print(f"\nn by batch size, {BATCH_CASE}, after {time.monotonic() - began:.0f} s")
    print(table(batch_rows(by_batch)))
    print(f"\n{setting}, one thread each; medians of {rounds} rounds or more")
    print(table(summary(rows)))
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / "choices_modelled"
    draw(Path(f"{stem}.png"), by_batch)
    write_json(
        f"{stem}.json",
        setting=asdict(setting),
        rounds=rounds,
        summary=summary(rows),
        rows=rows,
        cases=[asdict(case) for case in cases],
        results={name: stored(result) for name, result in results.items()},
        batches={"case": asdict(BATCH_CASE), "rows": batch_rows(by_batch), "found": by_batch},
        seconds=time.monotonic() - began,
    )
    print(f"wrote {stem}.json, {stem}.png")


if __name__ == "__main__":
    main()
