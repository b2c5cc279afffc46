"""Do all-to-alls that alternate make a step faster, if every buffer has memory of its own?

    python bench/bench_alternate.py               # simulated, and measured on a modelled link
    python bench/bench_alternate.py --rounds 0    # simulated only, in some seconds

S is the dispatch all-to-all, R the combine all-to-all. MPipeMoE's Fig. 7a runs them in turns. With
`memory_reuse=False` pmoe runs all S first (`pmoe.schedule.separate_buffers`). For n = 4 chunks, on the link:

    S first       S0 S1 S2 S3 R0 R1 R2 R3
    alternating   S0 S1 R0 S2 R1 S3 R2 R3

The two orders are equal for n = 1 and n = 2. Two alternating schedules are compared with the first order. One
changes only the order of the link. The other also gathers the rows of a chunk (G) just before their S, as
layers with ring slots (buffers that chunks use in turn) do.

- Simulated: 2 to 8 ranks, even and skewed rows, n = 3 to 16, links of different rates. A collective begins
  when all ranks are ready, and ends on all ranks at the same time.
- Measured: 2 ranks with one thread each on a modelled link, the three orders in turns in every round. Results
  of the orders are compared bit by bit before, and the bytes of a step are counted after.

All ratios are seconds in the alternating order / seconds with S first: above 1, S first is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.allocations import watched
from bench.links import INFINITE, launch
from bench.passes import DIRECTIONS, PARTS, Run, Setting, make_layer, measure, products_alone, timed
from bench.quiet import measure_quietly
from bench.timing import OUT, Timing, table, write_json
from pmoe.planner.simulator import makespan, simulate
from pmoe.schedule import separate_buffers
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import (
    Kind,
    Lane,
    PassDirection,
    Schedule,
    Stages,
    Task,
    finished,
    local_pieces,
    piece_of,
)

# ---- the orders

FIRST = "S first"
ALTERNATING = "alternating"
ALTERNATING_GATHERS = "alternating, G too"
ORDERS = (FIRST, ALTERNATING, ALTERNATING_GATHERS)


@functools.lru_cache(maxsize=256)
def schedule_in(order: str, direction: PassDirection, n: int, stages: Stages) -> Schedule:
    """Returns the schedule of a pass without ring slots, whose all-to-alls have the given order.

    In the alternating orders, S of chunk i + 2 follows R of chunk i (MPipeMoE, Fig. 7a), in backward too. All
    other tasks, what they read and write, and their order in their lanes stay as they are; but in the last
    order G of chunk i + 2 comes just before its S.

    order: one of `ORDERS`.
    stages: the layer's stages, without callbacks of sharded experts (`Stages.hooked`).
    """
    build = forward_schedule if direction == "forward" else backward_schedule
    schedule = build(n, stages)
    if order == FIRST:
        return schedule
    if stages.hooked:
        raise ValueError("stages.hooked (True) must be False: R of a chunk is then two tasks behind C")
    moved = {Kind.DISPATCH, Kind.ALL_GATHER}
    if order == ALTERNATING_GATHERS:
        moved.add(Kind.GATHER)
    # `finished` puts the gradients of other layers behind the last S again.
    tasks = [task for task in schedule.tasks if task.kind is not Kind.GRADIENTS]
    later = [task for task in tasks if task.kind in moved and task.chunk >= 2]
    alternating: list[Task] = []
    for task in tasks:
        if task not in later:
            alternating.append(task)
        if task.kind is Kind.COMBINE:
            alternating += [other for other in later if other.chunk == task.chunk + 2]
    return finished(direction, alternating, stages)


@contextlib.contextmanager
def running(order: str) -> Iterator[None]:
    """Inside, layers without ring slots run in the given order. Ranks must enter it with the same order."""

    def forward(n: int, stages: Stages) -> Schedule:
        return schedule_in(order, "forward", n, stages)

    def backward(n: int, stages: Stages) -> Schedule:
        return schedule_in(order, "backward", n, stages)

    with mock.patch.multiple(separate_buffers, forward_schedule=forward, backward_schedule=backward):
        yield


# ---- simulated: all ranks at once


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """A task of one rank; or a collective, which is one task of all ranks.

    rank: the rank's number; -1 for a collective.
    """

    task: Task
    rank: int
    waits: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.task.name}@{self.rank}"

    @property
    def lane(self) -> str:
        return f"{self.task.lane.value}@{self.rank}"


def of_all_ranks(schedule: Schedule, world: int) -> list[RankTask]:
    """Returns the tasks of all ranks, each of which runs the schedule.

    If a collective waits for a task in the schedule of one rank, it waits here for that task on every rank.
    The schedule must have no lane inside nodes.
    """
    lane_of = {task.name: task.lane for task in schedule.tasks}

    def waits(task: Task, ranks: Sequence[int]) -> tuple[str, ...]:
        names = []
        for name in task.waits:
            names += [f"{name}@{-1 if lane_of[name] is Lane.COMMUNICATE else rank}" for rank in ranks]
        return tuple(dict.fromkeys(names))

    tasks = []
    for task in schedule.tasks:
        if task.lane is Lane.COMMUNICATE:
            tasks.append(RankTask(task=task, rank=-1, waits=waits(task, range(world))))
        else:
            tasks += [RankTask(task=task, rank=rank, waits=waits(task, [rank])) for rank in range(world)]
    return tasks


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pass of all ranks, from which the seconds of tasks follow.

    rows: share of a rank's batch by (chunk, source rank, destination rank). If routing is even, each is
        1 / (n * world).
    link: seconds of S and R of a whole batch / seconds of the experts' products in forward, if routing is
        even. A link with 1 takes as long as computing takes in forward.
    slowness: factor of computing by rank.
    fixed: seconds of a message or a product of no rows, as a share of the products of a batch in forward.
    """

    direction: PassDirection
    rows: Sequence[Sequence[Sequence[float]]]
    link: float
    slowness: Sequence[float]
    fixed: float

    @property
    def world(self) -> int:
        return len(self.slowness)

    @property
    def n(self) -> int:
        return len(self.rows)

    def seconds(self, task: RankTask) -> float:
        """Returns the seconds of a task. The products of a whole batch in forward take 1 second.

        In backward the gradients of rows (C, L) take 1 second, and those of parameters (W, LW) another.
        Copying rows (G, O) takes 2 % of the products of the same rows.
        """
        kind, chunk = task.task.kind, task.task.chunk
        if kind in (Kind.DISPATCH, Kind.COMBINE):
            return self.fixed + self._message(chunk)
        if kind is Kind.WEIGHTS:
            return self.fixed
        copying = kind in (Kind.GATHER, Kind.OUTPUT)
        work = sum(self._rows(kind, i, task.rank) for i in self._chunks(kind, chunk))
        return self.slowness[task.rank] * (0.02 * work if copying else self.fixed + work)

    def _message(self, chunk: int) -> float:
        """Returns the seconds of one all-to-all of a chunk: the most rows that a rank sends or receives."""
        rows = self.rows[chunk]
        ranks = range(self.world)
        sent = [sum(rows[r][to] for to in ranks if to != r) for r in ranks]
        received = [sum(rows[source][r] for source in ranks if source != r) for r in ranks]
        even = (self.world - 1) / self.world
        return self.link / 2 / even * max(*sent, *received)

    def _chunks(self, kind: Kind, number: int) -> list[int]:
        """Returns the chunks whose rows a task computes. Rows that stay are computed in fewer tasks."""
        if kind not in (Kind.LOCAL, Kind.LOCAL_WGRAD):
            return [number]
        pieces = local_pieces(self.n, local=True, remote=True)
        return [i for i in range(self.n) if piece_of(i, self.n, pieces) == number]

    def _rows(self, kind: Kind, chunk: int, rank: int) -> float:
        rows = self.rows[chunk]
        ranks = range(self.world)
        if kind in (Kind.LOCAL, Kind.LOCAL_WGRAD):
            return rows[rank][rank]
        if kind is Kind.GATHER:
            return sum(rows[rank][to] for to in ranks if to != rank)
        if kind is Kind.OUTPUT:
            return sum(rows[rank])
        return sum(rows[source][rank] for source in ranks if source != rank)  # C, W

    def pass_seconds(self, order: str) -> float:
        """Returns the simulated seconds of the pass on its slowest rank."""
        schedule = schedule_in(order, self.direction, self.n, Stages(local=True, remote=True))
        return makespan(simulate(of_all_ranks(schedule, self.world), self.seconds))


LINKS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)
"""Simulated links: seconds of S and R / seconds of products in forward. Above 1 the link is slower."""

CHUNKS = (3, 4, 6, 8, 12, 16)
"""Simulated numbers of chunks. With 1 and 2 the orders are equal."""


def even_rows(n: int, world: int) -> list[list[list[float]]]:
    """Returns rows of a batch of which each rank sends every rank the same number in every chunk."""
    return [[[1 / (n * world)] * world] * world] * n


def skewed_rows(n: int, world: int, generator: random.Random) -> list[list[list[float]]]:
    """Returns rows of a batch whose destinations are skewed: shares of a chunk are random, and some are 0."""

    def shares() -> list[float]:
        weights = [generator.expovariate(1) ** 2 * (generator.random() > 0.2) + 1e-9 for _ in range(world)]
        return [weight / sum(weights) / n for weight in weights]

    return [[shares() for _ in range(world)] for _ in range(n)]


def case(direction: PassDirection, n: int, link: float, seed: int | None) -> Case:
    """Returns a case of the grid: without a seed an even one on 2 ranks, else a skewed one on 2 to 8 ranks.

    The ranks of a skewed case do not compute at the same rate.
    """
    if seed is None:
        rows = even_rows(n, 2)
        return Case(direction=direction, rows=rows, link=link, slowness=(1.0, 1.0), fixed=0.005)
    generator = random.Random(seed)
    world = generator.choice((2, 4, 8))
    return Case(
        direction=direction,
        rows=skewed_rows(n, world, generator),
        link=link,
        slowness=[generator.uniform(0.8, 1.5) for _ in range(world)],
        fixed=generator.choice((0.0, 0.005, 0.02)),
    )


def simulated_rows(seeds: int) -> list[dict[str, Any]]:
    """Returns a row for each direction, link, load and alternating order: the ratios over all n.

    seeds: number of skewed cases for each n.
    """
    result = []
    for direction, link in itertools.product(DIRECTIONS, LINKS):
        for load, cases in (("even", [None]), ("skewed", range(seeds))):
            ratios: dict[str, list[float]] = {order: [] for order in ORDERS[1:]}
            for n, seed in itertools.product(CHUNKS, cases):
                one = case(direction, n, link, seed)
                first = one.pass_seconds(FIRST)
                for order in ORDERS[1:]:
                    ratios[order].append(one.pass_seconds(order) / first)
            for order, values in ratios.items():
                row = {"pass": direction, "link": link, "rows": load, "order": order}
                row |= {"min": min(values), "median": statistics.median(values), "max": max(values)}
                result.append(row)
    return result


# ---- measured: one rank

RATES = (0.5, 1.0, 2.0, 4.0)
"""Measured links: seconds of S and R / seconds of products in forward."""

DEGREES = (2, 4, 8)
"""Measured numbers of chunks. With 2 the orders are equal, which shows how exact the measurement is."""


def orders_of(n: int) -> tuple[str, ...]:
    """Returns the orders that are measured with n chunks: one alternating order where all are equal."""
    return ORDERS[:2] if n <= 2 else ORDERS


class Step:
    """Runs forward and backward of the layer in an order. Returns this rank's times of both."""

    def __init__(self, setting: Setting) -> None:
        self.layer, self.x, self.dy = make_layer(setting)

    def __call__(self, n: int, order: str) -> dict[str, float]:
        self.layer.pipeline = n
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        with running(order):
            return timed(lambda: self.layer(self.x), self.dy)

    def results(self, n: int, order: str) -> list[Tensor]:
        """Returns the output and all gradients of a step."""
        self.layer.pipeline = n
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        with running(order):
            y = self.layer(self.x)
            y.backward(self.dy)
        gradients = [tensor.grad for tensor in (self.x, *self.layer.parameters()) if tensor.grad is not None]
        return [y.detach(), *gradients]

    def peak_bytes(self, n: int, order: str) -> int:
        """Returns the most bytes that a step holds, without input and parameters; the least of 3 counts.

        A count may be too high, because gloo's threads free memory later.
        """
        counts = []
        for _ in range(3):
            with watched() as seen:
                self.results(n, order)
            counts.append(seen.peak_bytes())
        return min(counts)


@dataclass(frozen=True)
class Result:
    """Results of rank 0.

    times: by link, then by run ("n=4, alternating").
    neighbours: by link, the share of the machine that other processes used in each round.
    peak_bytes: by run.
    """

    computation: Timing
    times: dict[float, dict[str, dict[str, Timing]]]
    neighbours: dict[float, list[float]]
    peak_bytes: dict[str, int]


def run_name(n: int, order: str) -> str:
    return f"n={n}, {order}"


def run_rank(link: Any, setting: Setting, rates: Sequence[float], rounds: int, patience: float) -> Result:
    link.set_rate(INFINITE)
    step = Step(setting)
    alone = products_alone(setting)
    for n in DEGREES:
        expected = step.results(n, FIRST)
        for order in ORDERS[1:]:
            for one, other in zip(expected, step.results(n, order), strict=True):
                assert torch.equal(one, other), f"n = {n}, {order}: results differ from those with S first"
    computation = measure({"computation": alone}, rounds)["computation"]["forward"]
    runs: dict[str, Run] = {
        run_name(n, order): functools.partial(step, n, order) for n in DEGREES for order in orders_of(n)
    }
    times = {}
    neighbours = {}
    for rate in rates:
        dist.barrier()
        link.set_rate(2 * setting.remote_rows * setting.row_bytes / (rate * computation.median))
        measured = measure_quietly(runs, rounds, patience)
        times[rate], neighbours[rate] = measured.times, measured.neighbours
    dist.barrier()
    link.set_rate(INFINITE)
    peaks = {run_name(n, order): step.peak_bytes(n, order) for n in DEGREES for order in orders_of(n)}
    return Result(computation, times, neighbours, peaks)


def measured_rows(result: Result) -> list[dict[str, Any]]:
    """Returns a row for each link, n and alternating order: ratios to S first, paired in each round."""
    rows = []
    for rate, times in result.times.items():
        for n in DEGREES:
            first = times[run_name(n, FIRST)]
            for order in orders_of(n)[1:]:
                other = times[run_name(n, order)]
                row: dict[str, Any] = {"link": rate, "n": n, "order": order}
                row |= {f"{part} ms, S first": first[part].median * 1e3 for part in PARTS}
                row |= {f"{part} ratio": first[part].speedup_over(other[part]) for part in PARTS}
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="links to measure")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds; 0 simulates only")
    parser.add_argument("--seeds", type=int, default=20, help="skewed cases that are simulated for each n")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--rows", type=int, default=2048, help="tokens a rank")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds ({args.seeds}) must be at least 1")
    simulated = simulated_rows(args.seeds)
    print("simulated: seconds in the alternating order / seconds with S first")
    print(table(simulated))
    if not args.rounds:
        return
    setting = Setting(rows=args.rows)
    result: Result = launch(
        setting.world,
        run_rank,
        "modelled",
        INFINITE,
        (setting, args.rates, args.rounds, args.patience),
        timeout_seconds=1800,
    )[0]
    rows = measured_rows(result)
    print(f"measured: {setting.world} ranks, one thread each, {setting}, medians of {args.rounds} rounds")
    print(table(rows))
    print("peak bytes of a step:", result.peak_bytes)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "alternate_modelled.json"
    write_json(
        path,
        setting=asdict(setting),
        rounds=args.rounds,
        seeds=args.seeds,
        simulated=simulated,
        rows=rows,
        peak_bytes=result.peak_bytes,
        neighbours=result.neighbours,
        computation=result.computation,
        times=result.times,
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
