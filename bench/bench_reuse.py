"""What does memory reuse save, and what does it cost in time?

    python bench/bench_reuse.py --link modelled --rate auto
    sudo python bench/bench_reuse.py --link real --rate auto

2 ranks with one thread each, on a slow link. Its rate makes communication cost as much as computation: in the
forward pass (`--rate auto`), or in the step (`--rate auto-step`). The variants:

- plain autograd with one all-to-all each way, in several spellings (`bench.plain`). The fastest is called
  plain;
- the last of them under `torch.utils.checkpoint`;
- the layer without reuse;
- the layer with each of the nine restore pairs.

For each it measures the bytes held between forward and backward, the peak of a step, and the time of a step.
The allocator counts bytes, with gradients but without inputs and parameters.

Beside each pair's time relative to keep/keep stands the simulator's prediction from its schedule. The costs
of tasks come from other runs: in sequence, at two sizes, on a link without limit.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.links import INFINITE, launch
from bench.passes import (
    DIRECTIONS,
    Run,
    Setting,
    choose_rate,
    make_layer,
    measure,
    measure_message,
    message_costs,
    products_alone,
    spans_of,
    timed,
)
from bench.plain import SPELLINGS, PlainOverRanks, fastest
from bench.plain import name_of as name_of_plain
from bench.timing import OUT, Timing, counted, table, write_json
from pmoe.call.options import Switches
from pmoe.engine.lanes.recorder import recording
from pmoe.planner.costs import LineCost, fit
from pmoe.planner.simulator import makespan, simulate, task_seconds
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES, Restore
from pmoe.schedule.ring_buffers import rotating_backward, rotating_forward
from pmoe.schedule.tasks import Kind, Stages, Task

PLAIN = [name_of_plain(spelling) for spelling in SPELLINGS]


class Step:
    """Runs a step of one variant on this rank: a plain layer, "checkpointed", "no reuse", or a restore
    pair.
    """

    def __init__(self, setting: Setting) -> None:
        self.layer, self.x, self.dy = make_layer(setting)
        self.plain = {name_of_plain(spelling): PlainOverRanks(self.layer, spelling) for spelling in SPELLINGS}

    def forward(self, variant: str | Restore, n: int, is_sequential: bool = False) -> Tensor:
        if variant in self.plain:
            return self.plain[variant](self.x)
        if variant == "checkpointed":
            return checkpoint(self.plain[PLAIN[-1]], self.x, use_reentrant=False)
        layer = self.layer
        layer.pipeline, layer.switches = n, Switches(sequential=is_sequential)
        layer.memory_reuse = False if variant == "no reuse" else variant
        return layer(self.x)

    def clear(self) -> None:
        self.x.grad = None
        for layer in (self.layer, *self.plain.values()):
            layer.zero_grad(set_to_none=True)

    def __call__(self, variant: str | Restore, n: int, is_sequential: bool = False) -> dict[str, float]:
        self.clear()
        return timed(lambda: self.forward(variant, n, is_sequential), self.dy)

    def gradients(self, variant: str | Restore, n: int) -> list[Tensor]:
        self(variant, n)
        if variant in PLAIN or variant == "checkpointed":
            gradients = self.plain[PLAIN[-1] if variant == "checkpointed" else variant].gradients()
            return [self.x.grad, *(gradients[name] for name, _ in self.layer.named_parameters())]
        return [self.x.grad, *(parameter.grad for parameter in self.layer.parameters())]

    def bytes(self, variant: str | Restore, n: int) -> dict[str, int]:
        """Returns the bytes of a step by the allocator's events.

        They are the bytes in use between forward and backward, the peak, and those that the memory pool keeps
        after the step. The pool's memory is counted too, because it comes from torch while torch's profiler
        records.
        """
        self.clear()
        mark = 0

        def step() -> None:
            nonlocal mark
            y = self.forward(variant, n)
            mark = time.time_ns()
            time.sleep(1e-3)
            y.backward(self.dy)

        pmoe.pool().trim()
        step()
        kept, host = pmoe.pool().device.kept_bytes, pmoe.pool().host
        self.clear()
        host.peak_bytes = 0
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            step()
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        now = peak = live_at_mark = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
            if event.start_ns() <= mark:
                live_at_mark = now
        return {"held": live_at_mark, "peak": peak, "host": host.peak_bytes, "kept": kept}


# ---- the prediction


def rows_of(setting: Setting, kind: Kind, n: int) -> float:
    """Returns the number of rows that a task of this kind works on, in a step of n chunks.

    With 2 ranks, half of the rows stay on their rank.
    """
    if kind is Kind.OUTPUT:
        return setting.rows / n
    stays = kind.name.startswith("LOCAL")
    share = 1 / setting.world if stays else (setting.world - 1) / setting.world
    return share * setting.rows / n


@dataclass(frozen=True)
class Costs:
    """Measured costs of the tasks of three restore pairs, which together have every kind of task.

    tasks: for each pair, direction and kind of task, the seconds by the task's number of rows.
    message: seconds of a message by its bytes.
    outside: seconds of each pass that are not part of any task.
    """

    tasks: dict[str, dict[str, dict[str, LineCost]]]
    message: LineCost
    outside: dict[str, float]

    def seconds(self, direction: str, pair: Restore, kind: Kind) -> LineCost:
        """Returns the seconds of a kind of task by its number of rows.

        If several of the measured pairs have the kind, the result is that of a pair that treats T_M as
        ``pair`` does: it is kept, or it is overwritten.
        """
        own = "keep/keep" if pair.hidden == "keep" else "communicate/recompute"
        for source in (own, "offload/offload", "communicate/recompute", "keep/keep"):
            if kind.value in self.tasks[source][direction]:
                return self.tasks[source][direction][kind.value]
        raise KeyError(kind)


def measure_costs(step: Step, setting: Setting, link: Any, rate: float, rounds: int) -> Costs:
    """Measures costs from runs in sequence, at n = 1 and n = 16, with three restore pairs.

    The three pairs together have every kind of task.
    """
    link.set_rate(INFINITE)
    samples: dict[tuple[str, str, Kind], list[tuple[float, float]]] = defaultdict(list)
    outside: dict[str, list[float]] = {"forward": [], "backward": []}
    pairs = (KEEP, STRATEGIES["S1"], STRATEGIES["S4"])
    for turn in counted(range(rounds + 1), "tasks alone, round"):
        for pair in pairs:
            for n in (1, 16):
                with recording() as journal:
                    times = step(pair, n, True)
                if turn == 0:
                    continue
                for direction in DIRECTIONS:
                    spans, covered = spans_of(journal, direction)
                    if n == 1:
                        outside[direction].append(times[direction] - covered)
                    for span in spans:
                        point = (rows_of(setting, span.kind, n), span.end - span.start)
                        samples[str(pair), direction, span.kind].append(point)
    message = measure_message(link, setting, rate, rounds)
    tasks: dict[str, dict[str, dict[str, LineCost]]] = {
        str(pair): {direction: {} for direction in DIRECTIONS} for pair in pairs
    }
    messages = (Kind.DISPATCH, Kind.DISPATCH_AGAIN, Kind.COMBINE, Kind.WEIGHTS)
    for (pair_name, direction, kind), points in samples.items():
        if kind not in messages:
            tasks[pair_name][direction][kind.value] = fit(points).line
    return Costs(
        tasks=tasks,
        message=message,
        outside={direction: statistics.median(values) for direction, values in outside.items()},
    )


def predict(costs: Costs, setting: Setting, pair: Restore, n: int) -> float:
    """Returns the seconds of a step with a restore pair and n chunks, as the simulator predicts them."""
    total = 0.0
    for direction, build in (("forward", rotating_forward), ("backward", rotating_backward)):

        def own(task: Task, direction: str = direction) -> float:
            return costs.seconds(direction, pair, task.kind)(rows_of(setting, task.kind, n))

        schedule = build(n, Stages(local=True, remote=True), restore=pair)
        seconds = task_seconds({**dict.fromkeys(Kind, own), **message_costs(costs.message, setting, n)})
        total += makespan(simulate(schedule.tasks, seconds)) + costs.outside[direction]
    return total


# ---- one rank


@dataclass(frozen=True)
class Result:
    times: dict[str, dict[str, Timing]]
    bytes: dict[str, dict[str, int]]
    worst_error: float
    bytes_per_second: float
    predicted: dict[str, float]
    costs: Costs


def name_of(variant: str | Restore, n: int) -> str:
    if variant in (*PLAIN, "checkpointed"):
        return str(variant)
    strategy = variant.strategy if isinstance(variant, Restore) else None
    return f"{variant} n={n}" + (f" {strategy}" if strategy else "")


def run_rank(link: Any, setting: Setting, rate: str, degrees: list[int], rounds: int) -> Result:
    link.set_rate(INFINITE)
    step = Step(setting)
    alone = measure({"computation": products_alone(setting)}, rounds)["computation"]
    variants: list[tuple[str | Restore, int]] = [(variant, 1) for variant in (*PLAIN, "checkpointed")]
    variants += [(variant, n) for n in degrees for variant in ("no reuse", *ALL_PAIRS)]
    expected = step.gradients(PLAIN[0], 1)
    worst = 0.0
    counted = {}
    for variant, n in variants:
        for got, want in zip(step.gradients(variant, n), expected, strict=True):
            worst = max(worst, float((got - want).abs().max() / want.abs().max()))
        # The least of three tries counts: the profiler does not see what gloo's thread frees.
        tries = [step.bytes(variant, n) for _ in range(3)]
        counted[name_of(variant, n)] = min(tries, key=lambda counted: counted["peak"])
    bytes_per_second = choose_rate(setting, rate, alone)
    costs = measure_costs(step, setting, link, bytes_per_second, rounds)
    runs: dict[str, Run] = {name_of(v, n): functools.partial(step, v, n) for v, n in variants}
    times = measure(runs, rounds)
    predicted = {name_of(p, n): predict(costs, setting, p, n) for n in degrees for p in ALL_PAIRS}
    return Result(times, counted, worst, bytes_per_second, predicted, costs)


# ---- the report


def fastest_of(result: Result) -> str:
    return fastest({name: times["step"] for name, times in result.times.items()})


def report_rows(result: Result, degrees: list[int]) -> list[dict[str, Any]]:
    """Returns one row of the table for each variant.

    A row has megabytes, milliseconds, and ratios to plain and to keep/keep of the same n.
    """
    rows = []
    baseline = fastest_of(result)
    plain, plain_peak = result.times[baseline]["step"], result.bytes[baseline]["peak"]
    for name, times in result.times.items():
        counted = result.bytes[name]
        row: dict[str, Any] = {
            "variant": "plain" if name == baseline else name,
            "held MB": counted["held"] / 1e6,
            "peak MB": counted["peak"] / 1e6,
            "host MB": counted["host"] / 1e6,
            "kept free MB": counted["kept"] / 1e6,
            "peak/plain": counted["peak"] / plain_peak,
            "step ms": times["step"].median * 1e3,
            "step/plain": 1 / times["step"].speedup_over(plain),
        }
        if name in result.predicted:
            n = int(name.split("n=")[1].split()[0])
            keep = name_of(KEEP, n)
            row["step/keep"] = 1 / times["step"].speedup_over(result.times[keep]["step"])
            row["predicted step/keep"] = result.predicted[name] / result.predicted[keep]
            row["predicted/measured"] = row["predicted step/keep"] / row["step/keep"]
        rows.append(row)
    keys = list(rows[-1])
    return [{key: row.get(key) for key in keys} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", choices=("modelled", "real"), default="modelled")
    parser.add_argument("--rate", default="auto", help="auto, auto-step, or bytes per second of each rank")
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4, 8], help="n to run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=4096, help="tokens a rank")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the JSON file")
    args = parser.parse_args()
    if args.rate not in ("auto", "auto-step") and not float(args.rate) > 0:
        parser.error(f"--rate ({args.rate}) must be auto, auto-step or a positive number")
    setting = Setting(rows=args.rows)
    result: Result = launch(
        setting.world,
        run_rank,
        args.link,
        INFINITE,
        (setting, args.rate, args.degrees, args.rounds),
        timeout_seconds=1800,
    )[0]
    rows = report_rows(result, args.degrees)
    print(f"{setting.world} ranks, one thread each, {setting}")
    print(
        f"{args.link} link at {result.bytes_per_second / 1e6:.2f} MB/s a rank; "
        f"medians of {args.rounds} rounds; largest relative error of a gradient {result.worst_error:.1e}; "
        f"plain is {fastest_of(result)}"
    )
    print(table(rows))
    path = args.out / f"reuse_{args.link}_{args.rate}.json"
    write_json(
        path,
        setting=asdict(setting),
        link=args.link,
        bytes_per_second=result.bytes_per_second,
        rounds=args.rounds,
        baseline=fastest_of(result),
        rows=rows,
        worst_error=result.worst_error,
        bytes=result.bytes,
        times=result.times,
        predicted_s=result.predicted,
        costs=asdict(result.costs),
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
