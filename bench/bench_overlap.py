"""How well does the pipeline hide communication on a slow link?

    python bench/bench_overlap.py --link modelled --rate auto       # forward: communication = computation
    python bench/bench_overlap.py --link modelled --rate auto-step  # the step: the same
    sudo python bench/bench_overlap.py --link real --rate auto

2 ranks with one thread each, on a link whose rate makes communication cost as much as computation. It prints
forward, backward and step of the layer for each n, and of `sequential` runs, in which every task waits for
the previous one.

Two bounds stand beside them: computation alone (the experts' products of the routed rows and nothing else)
and communication alone. A pass cannot be faster than the larger of the two. The bound of a step is the sum of
both passes' bounds, because neither pass can help the other.

The simulator's prediction stands beside each measured step. Its task costs come from other runs: the layer
without overlap and without a limit on the link, at two sizes, and messages of two sizes.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.chrome_trace import chrome_trace
from bench.links import INFINITE, launch
from bench.passes import (
    DIRECTIONS,
    PARTS,
    Run,
    Setting,
    choose_rate,
    make_layer,
    measure,
    measure_message,
    message_costs,
    messages_alone,
    products_alone,
    spans_of,
    timed,
)
from bench.timing import OUT, Timing, counted, table, write_json
from pmoe.call.options import Switches
from pmoe.engine.lanes.recorder import recording
from pmoe.planner.costs import LineCost, fit
from pmoe.planner.simulator import makespan, simulate, task_seconds
from pmoe.planner.timeline import Span, bars, draw, simulated_bars
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, Stages, Task, local_pieces, sequential


class Step:
    """Runs forward and backward of the layer in n chunks. Returns this rank's times of both passes."""

    def __init__(self, setting: Setting) -> None:
        self.layer, self.x, self.dy = make_layer(setting)

    def __call__(self, n: int, is_sequential: bool) -> dict[str, float]:
        self.layer.pipeline, self.layer.switches = n, Switches(sequential=is_sequential)
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        return timed(lambda: self.layer(self.x), self.dy)


# ---- the prediction


@dataclass(frozen=True)
class Costs:
    """Measured costs of tasks.

    compute: for each direction and kind of task, the seconds by the task's number of rows.
    message: seconds of a message by its bytes.
    outside: seconds of each pass that are not part of any task: gate, ordering and counts; the gate's
        backward.
    """

    compute: dict[str, dict[str, LineCost]]
    message: LineCost
    outside: dict[str, float]


def rows_of(setting: Setting, kind: Kind, chunk: int, n: int) -> float:
    """Returns the number of rows that a task of this kind works on, for one chunk of a step in n chunks."""
    if kind not in (Kind.LOCAL, Kind.LOCAL_WGRAD):
        share = (setting.world - 1) / setting.world if kind is not Kind.OUTPUT else 1.0
        return share * setting.rows / n
    m = local_pieces(n, local=True, remote=True)
    chunks = n - m + 1 if chunk == 0 else 1
    return chunks * setting.rows / n / setting.world


def measure_costs(step: Step, setting: Setting, link: Any, rate: float, rounds: int) -> Costs:
    """Measures costs of tasks, from runs without overlap at n = 1 and n = 16.

    Those of messages come from messages of two sizes.
    """
    link.set_rate(INFINITE)
    samples: dict[tuple[str, Kind], list[tuple[float, float]]] = defaultdict(list)
    outside: dict[str, list[float]] = {"forward": [], "backward": []}
    for turn in counted(range(rounds + 1), "tasks alone, round"):
        for n in (1, 16):
            with recording() as journal:
                times = step(n, True)
            if turn == 0:
                continue
            for direction in DIRECTIONS:
                spans, covered = spans_of(journal, direction)
                if n == 1:
                    outside[direction].append(times[direction] - covered)
                for span in spans:
                    size = rows_of(setting, span.kind, span.chunk, n)
                    samples[direction, span.kind].append((size, span.end - span.start))
    message = measure_message(link, setting, rate, rounds)
    compute: dict[str, dict[str, LineCost]] = {direction: {} for direction in DIRECTIONS}
    for (direction, kind), points in samples.items():
        if kind not in (Kind.DISPATCH, Kind.COMBINE, Kind.WEIGHTS):
            compute[direction][kind.value] = fit(points).line
    return Costs(
        compute=compute,
        message=message,
        outside={direction: statistics.median(values) for direction, values in outside.items()},
    )


def predict(costs: Costs, setting: Setting, n: int, is_sequential: bool) -> dict[str, Any]:
    """Returns the tasks and the times of a step in n chunks, as the simulator predicts them."""
    predicted: dict[str, Any] = {"spans": {}}
    for direction, build in (("forward", forward_schedule), ("backward", backward_schedule)):
        schedule = build(n, Stages(local=True, remote=True))
        schedule = sequential(schedule) if is_sequential else schedule

        def own(task: Task, direction: str = direction) -> float:
            return costs.compute[direction][task.kind.value](rows_of(setting, task.kind, task.chunk, n))

        seconds = {**dict.fromkeys(Kind, own), **message_costs(costs.message, setting, n)}
        spans = simulate(schedule.tasks, task_seconds(seconds))
        predicted["spans"][direction] = spans
        predicted[direction] = makespan(spans) + costs.outside[direction]
    predicted["step"] = predicted["forward"] + predicted["backward"]
    return predicted


# ---- one rank


@dataclass(frozen=True)
class Result:
    """The measurements, as rank 0 has them."""

    times: dict[str, dict[str, Timing]]
    bytes_per_second: float
    costs: Costs
    traffic: dict[str, int]
    spans: dict[int, list[Span]]


def run_rank(
    link: Any, setting: Setting, rate: str, degrees: list[int], with_sequential: bool, rounds: int
) -> Result:
    link.set_rate(INFINITE)
    step = Step(setting)
    alone = products_alone(setting)
    computation = measure({"computation": alone}, rounds)["computation"]
    bytes_per_second = choose_rate(setting, rate, computation)
    costs = measure_costs(step, setting, link, bytes_per_second, rounds)
    sent = [0 if r == dist.get_rank() else setting.rows // setting.world for r in range(setting.world)]
    runs: dict[str, Run] = {
        "computation alone": alone,
        "communication alone": messages_alone(sent, setting.d_model),
    }
    for is_sequential in (False, True) if with_sequential else (False,):
        for n in degrees:
            runs[run_name(n, is_sequential)] = functools.partial(step, n, is_sequential)
    times = measure(runs, rounds)
    before = asdict(step.layer.traffic)
    step(degrees[-1], False)
    traffic = {name: sent - before[name] for name, sent in asdict(step.layer.traffic).items()}
    spans = {n: median_step(step, n, rounds) for n in degrees}
    return Result(times, bytes_per_second, costs, traffic, spans)


def median_step(step: Step, n: int, rounds: int) -> list[Span]:
    """Runs several steps, and returns the recorded tasks of the step with the median time.

    A single step may be slower by chance.
    """
    recorded = []
    for _ in range(rounds):
        with recording() as journal:
            times = step(n, False)
        recorded.append((times["forward"] + times["backward"], journal.spans))
    return sorted(recorded, key=lambda timed_step: timed_step[0])[rounds // 2][1]


def run_name(n: int, is_sequential: bool) -> str:
    return f"sequential n={n}" if is_sequential else f"n={n}"


# ---- the report


def bounds(times: dict[str, dict[str, Timing]]) -> dict[str, float]:
    computation, communication = times["computation alone"], times["communication alone"]
    bound = {part: max(computation[part].median, communication[part].median) for part in DIRECTIONS}
    return {**bound, "step": bound["forward"] + bound["backward"]}


def report_rows(
    setting: Setting, result: Result, degrees: list[int], with_sequential: bool
) -> list[dict[str, Any]]:
    """Returns one row of the table for each run: milliseconds, ratios to the bounds, speed-ups,
    prediction.
    """
    bound = bounds(result.times)
    rows = []
    for name in ("computation alone", "communication alone"):
        rows.append({"run": name, **{f"{part} ms": result.times[name][part].median * 1e3 for part in PARTS}})
    for is_sequential in (False, True) if with_sequential else (False,):
        for n in degrees:
            times = result.times[run_name(n, is_sequential)]
            row: dict[str, Any] = {"run": run_name(n, is_sequential)}
            row |= {f"{part} ms": times[part].median * 1e3 for part in PARTS}
            row |= {f"{part}/bound": times[part].median / bound[part] for part in ("forward", "step")}
            if with_sequential:
                one, same = result.times[run_name(1, True)], result.times[run_name(n, True)]
                row["forward x seq n=1"] = times["forward"].speedup_over(one["forward"])
                row["step x seq n=1"] = times["step"].speedup_over(one["step"])
                row["step x seq same n"] = times["step"].speedup_over(same["step"])
            predicted = predict(result.costs, setting, n, is_sequential)
            row["predicted step ms"] = predicted["step"] * 1e3
            row["predicted/step"] = predicted["step"] / times["step"].median
            rows.append(row)
    keys = list(rows[2])
    return [{key: row.get(key) for key in keys} for row in rows]


def panels(setting: Setting, result: Result, n: int) -> dict[str, list[Span]]:
    """Returns the two panels of a picture: the tasks of a measured step, and those of the predicted step."""
    predicted = predict(result.costs, setting, n, False)
    shifted: list[Span] = []
    origin = 0.0
    for direction in DIRECTIONS:
        spans = predicted["spans"][direction]
        shifted += simulated_bars(direction, spans, origin)
        origin += makespan(spans) + sum(result.costs.outside.values()) / 2
    return {
        f"measured, n = {n}, rank 0": bars(result.spans[n]),
        f"predicted by the schedule, n = {n}": bars(shifted),
    }


def title_of(link: str, bytes_per_second: float, n: int) -> str:
    return f"{link} link, {bytes_per_second / 1e6:.0f} MB/s a rank: one step, n = {n}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", choices=("modelled", "real"), default="modelled")
    parser.add_argument("--rate", default="auto", help="auto, auto-step, or bytes per second of each rank")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="n to run")
    parser.add_argument("--sequential", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=4096, help="tokens a rank")
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--d-hidden", type=int, default=2048)
    parser.add_argument("--num-experts", type=int, default=8)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON and PNG")
    args = parser.parse_args()
    if args.rate not in ("auto", "auto-step") and not float(args.rate) > 0:
        parser.error(f"--rate ({args.rate}) must be auto, auto-step or a positive number")
    setting = Setting(
        rows=args.rows, d_model=args.d_model, d_hidden=args.d_hidden, num_experts=args.num_experts
    )
    if setting.rows % setting.num_experts or setting.num_experts % setting.world:
        parser.error("--num-experts must divide --rows and be even: every expert gets as many rows")
    degrees = sorted({1, *args.degrees})
    result: Result = launch(
        setting.world,
        run_rank,
        args.link,
        INFINITE,
        (setting, args.rate, degrees, args.sequential, args.rounds),
        timeout_seconds=1800,
    )[0]
    rows = report_rows(setting, result, degrees, args.sequential)
    print(f"{setting.world} ranks, one thread each, {setting}")
    print(
        f"{args.link} link at {result.bytes_per_second / 1e6:.2f} MB/s a rank; "
        f"medians of {args.rounds} rounds"
    )
    print(table(rows))
    expected = 4 * setting.remote_rows * setting.row_bytes
    print(
        f"bytes sent in a step: {result.traffic['rows']} rows ({expected} = 4 x {setting.remote_rows} remote "
        f"rows x {setting.row_bytes}) + {result.traffic['scalars']} routing weights and their gradients + "
        f"{result.traffic['counts']} counts"
    )
    best = min(degrees, key=lambda n: result.times[run_name(n, False)]["step"].median)
    stem = args.out / f"overlap_{args.link}_{args.rate}"
    args.out.mkdir(parents=True, exist_ok=True)
    drawn = panels(setting, result, best)
    draw(f"{stem}.png", drawn, title_of(args.link, result.bytes_per_second, best))
    chrome_trace(f"{stem}.trace.json", drawn)
    write_json(
        f"{stem}.json",
        setting=asdict(setting),
        link=args.link,
        bytes_per_second=result.bytes_per_second,
        rounds=args.rounds,
        bounds_s=bounds(result.times),
        rows=rows,
        times=result.times,
        traffic_bytes=result.traffic,
        costs=asdict(result.costs),
    )
    print(f"wrote {stem}.json, {stem}.png, {stem}.trace.json")


if __name__ == "__main__":
    main()
