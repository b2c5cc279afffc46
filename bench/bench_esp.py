"""Experts sharded over the ranks of a node: what is gained if links inside and between nodes work at once?

    python bench/bench_esp.py                              # modelled links
    sudo python bench/bench_esp.py --link real --out /tmp  # network namespaces, token buckets

4 ranks with one thread each run on 2 nodes with two sorts of links. The rates are set so that a forward pass
needs the same time between nodes (S and R), inside nodes (AG and RS) and in the experts (C). A layer with one
communication lane (`Switches(one_lane=True)`), in which AG and RS queue behind S and R, then communicates for
twice the time of C.

It prints forward and step for each n with two lanes, with one lane, and in sequence, and the ratio one lane /
two lanes. Beside them stands the ideal: the simulator's times if nothing but these three costs time. Ideal
forward, in units of the experts' time:

    n    two lanes    one lane    ratio
    4    1.5          2           1.33
    8    1.25         2           1.6
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.chrome_trace import chrome_trace
from bench.links import INFINITE, launch
from bench.passes import DIRECTIONS, Run, even_batch, messages_alone, spans_of, timed
from bench.quiet import Measured, Neighbours, measure_quietly
from bench.timing import OUT, Timing, counted, machine, table, write_json
from pmoe.call.options import Switches
from pmoe.engine.lanes.recorder import Span, recording
from pmoe.planner.simulator import makespan, simulate
from pmoe.planner.timeline import bars
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, Stages, sequential

VARIANTS = ("two lanes", "one lane", "sequential")
NODES, RANKS_PER_NODE = 2, 2
WORLD = NODES * RANKS_PER_NODE


@dataclass(frozen=True)
class Setting:
    """Sizes of the layer and of a rank's batch (letters as in docs/how_it_works.md)."""

    tokens: int = 2048
    top_k: int = 1
    d_model: int = 512
    d_hidden: int = 4096
    num_experts: int = 4

    @property
    def row_bytes(self) -> int:
        return 4 * self.d_model

    @property
    def rows(self) -> int:
        """Number of routed rows of each rank.

        Routing is even, so S, R and the gathered rows of one rank have the same number of rows.
        """
        return self.tokens * self.top_k

    @property
    def between_bytes(self) -> int:
        """Bytes that a rank sends to the other node in a pass, by S and R."""
        return 2 * self.rows * (NODES - 1) // NODES * self.row_bytes

    @property
    def inside_bytes(self) -> int:
        """Bytes that a rank sends to the other rank of its node in a pass, by AG and RS."""
        return 2 * self.rows * (RANKS_PER_NODE - 1) * self.row_bytes


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (NODES, RANKS_PER_NODE), mesh_dim_names=("ep", "esp"))


def make_layer(setting: Setting, mesh: DeviceMesh) -> tuple[pmoe.MoELayer, Tensor, Tensor]:
    """Returns (layer, x, dy), with a batch that the gate routes evenly (`even_batch`)."""
    torch.manual_seed(0)
    layer = pmoe.MoELayer(setting.d_model, setting.d_hidden, setting.num_experts, setting.top_k, mesh=mesh)
    return layer, *even_batch(layer, setting.tokens)


class Step:
    """Runs forward and backward of the layer with one of the three ways to order communication.

    Returns this rank's times of both passes.
    """

    def __init__(self, setting: Setting, mesh: DeviceMesh) -> None:
        self.layer, self.x, self.dy = make_layer(setting, mesh)

    def __call__(self, n: int, variant: str) -> dict[str, float]:
        self.layer.pipeline = n
        self.layer.switches = Switches(one_lane=variant != "two lanes", sequential=variant == "sequential")
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        return timed(lambda: self.layer(self.x), self.dy)


@dataclass(frozen=True)
class Work:
    """Seconds of the tasks of a pass if none overlaps another and links have no limit: means over the ranks.

    tasks: seconds by direction and kind of task.
    outside: for each direction, the seconds of the pass that are not part of any task.
    """

    tasks: dict[str, dict[str, float]]
    outside: dict[str, float]

    @property
    def experts(self) -> float:
        """Seconds of the experts in forward (kind C)."""
        return self.tasks["forward"][Kind.COMPUTE.value]


def measure_work(step: Step, rounds: int) -> Work:
    """Measures the seconds of each kind of task, without overlap: medians over rounds, means over ranks.

    The steps have one chunk (n = 1). All ranks compute at the same time and share the machine's cores, so
    that products take as long as in the other runs.
    """
    samples: dict[tuple[str, str], list[float]] = {}
    for turn in counted(range(rounds + 1), "tasks alone, round"):
        with recording() as journal:
            times = step(1, "sequential")
        if not turn:
            continue
        for direction in DIRECTIONS:
            spans, covered = spans_of(journal, direction)
            for span in spans:
                samples.setdefault((direction, span.kind.value), []).append(span.end - span.start)
            samples.setdefault((direction, "outside"), []).append(times[direction] - covered)
    medians = torch.tensor([statistics.median(values) for values in samples.values()], dtype=torch.float64)
    dist.all_reduce(medians)
    mean_seconds = dict(zip(samples, (medians / dist.get_world_size()).tolist(), strict=True))
    return Work(
        tasks={
            direction: {
                kind: seconds
                for (at, kind), seconds in mean_seconds.items()
                if at == direction and kind != "outside"
            }
            for direction in DIRECTIONS
        },
        outside={direction: mean_seconds[direction, "outside"] for direction in DIRECTIONS},
    )


# ---- the ideal


def run_seconds(n: int, variant: str, cost: Callable[[str, Kind], float]) -> dict[str, float]:
    """Returns the times that the simulator predicts for forward, backward and the step.

    n: number of chunks.
    variant: way to order communication: two lanes, one lane, or in sequence.
    cost: cost(direction, kind) is the seconds of all tasks of a kind, of all chunks together.
    """
    stages = Stages(local=False, remote=True, sharded=True, one_lane=variant != "two lanes")
    by_direction = {}
    for direction, build in (("forward", forward_schedule), ("backward", backward_schedule)):
        schedule = build(n, stages)
        schedule = sequential(schedule) if variant == "sequential" else schedule

        def seconds(task: Any, direction: str = direction) -> float:
            return cost(direction, task.kind) / (1 if task.chunk < 0 else n)

        by_direction[direction] = makespan(simulate(schedule.tasks, seconds))
    return {**by_direction, "step": by_direction["forward"] + by_direction["backward"]}


BETWEEN, INSIDE = (Kind.DISPATCH, Kind.COMBINE), (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


def ideal_cost(direction: str, kind: Kind) -> float:
    """Returns the cost of a kind of task in units of the seconds that the experts' forward takes.

    S, R, AG and RS cost half a unit each, so that communication between nodes and inside nodes cost 1 each.
    The experts' backward costs 2.
    """
    return 0.5 if kind in (*BETWEEN, *INSIDE) else float(kind in (Kind.COMPUTE, Kind.WGRAD))


def measured_cost(work: Work, between: float, inside: float) -> Callable[[str, Kind], float]:
    """Returns a function cost(direction, kind) from measured times, for `run_seconds`.

    Computing tasks cost the seconds that they took without overlap.

    between, inside: seconds of a pass's messages on the link between nodes and inside nodes.
    """

    def cost(direction: str, kind: Kind) -> float:
        if kind in BETWEEN:
            return between / 2
        if kind in INSIDE:
            return inside / 2
        return work.tasks[direction].get(kind.value, 0.0)

    return cost


# ---- one rank


@dataclass(frozen=True)
class Result:
    """The measurements, as rank 0 has them."""

    work: Work
    work_afterwards: Work
    bytes_per_second: dict[str, float]
    measured: Measured
    traffic: dict[str, int]
    spans: dict[str, list[Span]]
    load: list[float]

    @property
    def times(self) -> dict[str, dict[str, Timing]]:
        return self.measured.times


def run_name(n: int, variant: str) -> str:
    return f"{variant}, n={n}"


def runs_of(degrees: list[int]) -> list[tuple[int, str]]:
    return [(1, "sequential")] + [(n, variant) for n in degrees for variant in VARIANTS[:2]]


def recorded(step: Step, n: int, variant: str, runs: int = 3) -> list[Span]:
    """Runs several steps, and returns the recorded tasks of the step with the median time."""
    steps = []
    for _ in range(runs):
        with recording() as journal:
            seconds = step(n, variant)["step"]
        steps.append((seconds, journal.spans))
    return sorted(steps, key=lambda timed_step: timed_step[0])[runs // 2][1]


def run_rank(link: Any, setting: Setting, degrees: list[int], rounds: int, patience_seconds: float) -> Result:
    mesh = make_mesh()
    step = Step(setting, mesh)
    link.set_rates(inter=INFINITE, intra=INFINITE)
    Neighbours().wait(patience_seconds)
    work = measure_work(step, rounds)
    load = [os.getloadavg()[0]]
    rates = {"inter": setting.between_bytes / work.experts, "intra": setting.inside_bytes / work.experts}
    link.set_rates(**rates)
    across, inside = mesh.get_local_rank("ep"), mesh.get_local_rank("esp")
    others = [0 if r == across else setting.rows // NODES for r in range(NODES)]
    peers = [0 if r == inside else setting.rows for r in range(RANKS_PER_NODE)]
    runs: dict[str, Run] = {
        "between nodes alone": messages_alone(others, setting.d_model, mesh.get_group("ep")),
        "inside nodes alone": messages_alone(peers, setting.d_model, mesh.get_group("esp")),
    }
    for n, variant in runs_of(degrees):
        runs[run_name(n, variant)] = functools.partial(step, n, variant)
    measured = measure_quietly(runs, rounds, patience_seconds)
    load.append(os.getloadavg()[0])
    before = asdict(step.layer.traffic)
    step(degrees[-1], "two lanes")
    traffic = {name: sent - before[name] for name, sent in asdict(step.layer.traffic).items()}
    spans = {run_name(n, variant): recorded(step, n, variant) for n, variant in runs_of(degrees)}
    link.set_rates(inter=INFINITE, intra=INFINITE)
    again = measure_work(step, rounds)
    load.append(os.getloadavg()[0])
    return Result(work, again, rates, measured, traffic, spans, load)


# ---- the report


def best(result: Result, degrees: list[int], variant: str, part: str) -> int:
    return min(degrees, key=lambda n: result.times[run_name(n, variant)][part].median)


def report_rows(result: Result, degrees: list[int]) -> list[dict[str, Any]]:
    """Returns one row of the table for each n: milliseconds, ratios one lane / two lanes, and two
    predictions.

    The first prediction is the ideal one; the second is the simulator's, with the measured costs of all
    tasks.
    """
    between = result.times["between nodes alone"]["forward"].median
    inside = result.times["inside nodes alone"]["forward"].median
    costs = {"ideal": ideal_cost, "predicted": measured_cost(result.work, between, inside)}
    rows = []
    for n in degrees:
        two, one = (result.times[run_name(n, variant)] for variant in VARIANTS[:2])
        row: dict[str, Any] = {"n": n}
        for part in ("forward", "step"):
            row[f"{part} two ms"] = two[part].median * 1e3
            row[f"{part} one ms"] = one[part].median * 1e3
            row[f"{part} one/two"] = two[part].speedup_over(one[part])
            for name, cost in costs.items():
                simulated = {variant: run_seconds(n, variant, cost)[part] for variant in VARIANTS[:2]}
                if name == "predicted":
                    outside = sum(
                        seconds
                        for direction, seconds in result.work.outside.items()
                        if part in (direction, "step")
                    )
                    simulated = {variant: seconds + outside for variant, seconds in simulated.items()}
                    row[f"{part} two predicted ms"] = simulated["two lanes"] * 1e3
                row[f"{part} {name}"] = simulated["one lane"] / simulated["two lanes"]
        rows.append(row)
    return rows


def summary(result: Result, degrees: list[int]) -> dict[str, Any]:
    """Returns the ratio of each variant's median time to that of two lanes, each at its best n.

    It has one ratio for forward and one for the step.
    """
    by_part: dict[str, Any] = {}
    for part in ("forward", "step"):
        at = {variant: best(result, degrees, variant, part) for variant in VARIANTS[:2]}
        two, one = (result.times[run_name(at[v], v)][part] for v in VARIANTS[:2])
        whole = result.times[run_name(1, "sequential")][part]
        by_part[part] = {
            "best_n": at,
            "one_lane_over_two": two.speedup_over(one),
            "sequential_over_two": two.speedup_over(whole),
        }
    return by_part


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", choices=("modelled", "real"), default="modelled")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="n to run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds a round to wait for idle cores")
    parser.add_argument("--tokens", type=int, default=Setting.tokens, help="of each rank")
    parser.add_argument("--top-k", type=int, default=Setting.top_k)
    parser.add_argument("--d-model", type=int, default=Setting.d_model)
    parser.add_argument("--d-hidden", type=int, default=Setting.d_hidden)
    parser.add_argument("--num-experts", type=int, default=Setting.num_experts)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON")
    args = parser.parse_args()
    setting = Setting(
        tokens=args.tokens,
        top_k=args.top_k,
        d_model=args.d_model,
        d_hidden=args.d_hidden,
        num_experts=args.num_experts,
    )
    if setting.tokens % setting.num_experts or setting.num_experts % NODES:
        parser.error("--num-experts must divide --tokens and be even: every expert gets as many rows")
    if setting.top_k > setting.num_experts // 2 and setting.top_k != setting.num_experts:
        parser.error("--top-k must be at most half of --num-experts")
    degrees = sorted({1, *args.degrees})
    result: Result = launch(
        WORLD,
        run_rank,
        args.link,
        INFINITE,
        (setting, degrees, args.rounds, args.patience),
        ranks_per_node=RANKS_PER_NODE,
        timeout_seconds=3600,
    )[0]
    rows, at_best = report_rows(result, degrees), summary(result, degrees)
    rates = result.bytes_per_second
    print(f"{NODES} nodes of {RANKS_PER_NODE} ranks on {machine()['usable_cores']} cores, one thread each")
    print(setting)
    print(
        f"{args.link} links, MB/s of a rank: {rates['inter'] / 1e6:.2f} between nodes, "
        f"{rates['intra'] / 1e6:.2f} inside; medians of {args.rounds} rounds"
    )
    shares = [result.measured.neighbours[at] for at in result.measured.rounds]
    print(
        f"other processes took {min(shares):.0%} to {max(shares):.0%} of the machine; of "
        f"{len(result.measured.neighbours)} rounds {len(shares)} count"
    )
    print(f"load average before, between and after: {', '.join(f'{load:.1f}' for load in result.load)}")
    print(
        f"a forward pass: experts {result.work.experts * 1e3:.0f} ms (afterwards "
        f"{result.work_afterwards.experts * 1e3:.0f}), "
        f"between nodes {result.times['between nodes alone']['forward'].median * 1e3:.0f} ms, "
        f"inside nodes {result.times['inside nodes alone']['forward'].median * 1e3:.0f} ms, "
        f"outside its schedule {result.work.outside['forward'] * 1e3:.0f} ms"
    )
    print(table(rows))
    for part, ratios in at_best.items():
        one, whole = ratios["one_lane_over_two"], ratios["sequential_over_two"]
        print(
            f"{part}, each at its best n ({ratios['best_n']}): one lane takes {one:.2f} x the time of two, "
            f"in sequence {whole:.2f} x"
        )
    expected = 2 * (setting.between_bytes + setting.inside_bytes)
    print(f"bytes sent in a step: {result.traffic['rows']} of rows (expected {expected}), {result.traffic}")
    stem = args.out / f"esp_{args.link}"
    args.out.mkdir(parents=True, exist_ok=True)
    chrome_trace(f"{stem}.trace.json", {name: bars(spans) for name, spans in result.spans.items()})
    write_json(
        f"{stem}.json",
        setting=asdict(setting),
        link=args.link,
        bytes_per_second=rates,
        load_average_1min=result.load,
        share_of_other_processes=result.measured.neighbours,
        rounds_that_count=result.measured.rounds,
        rounds=args.rounds,
        work=asdict(result.work),
        work_afterwards=asdict(result.work_afterwards),
        rows=rows,
        at_best_n=at_best,
        times=result.times,
        traffic_bytes=result.traffic,
    )
    print(f"wrote {stem}.json, {stem}.trace.json")


if __name__ == "__main__":
    main()
