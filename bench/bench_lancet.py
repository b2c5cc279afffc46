"""Lancet's passes on a whole model beside the layer's own pipeline: the step, exposed communication, memory.

A GPT whose every second block is a `pmoe.MoELayer`, on ranks behind a modelled link so slow that both
all-to-alls of a layer's pass take --ratio times as long as its experts compute forward. The same model runs
with the layer's pipeline at several n, compiled by ``torch.compile(model, backend="pmoe")``, and compiled
with plans that the passes did not choose, round by round in the same run. Exposed is what a rank waits for
the link; what it waits for a late peer, and for gloo to copy, stands beside it. Predicted seconds are those
of both graphs of a plan, beside what these graphs took (the paper's Fig. 14). Then the same for a small
model, and how long planning takes for one of 24 blocks.

    python bench/bench_lancet.py
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import bench.links.modelled as modelled
import pmoe
from bench.allocations import watched
from bench.graph_timeline import PassTimeline
from bench.links import INFINITE, launch
from bench.timing import OUT, Timing, interleaved, table, write_json
from examples.lm_model import VOCABULARY, ByteGPT
from pmoe.comm.ranks import Ranks
from pmoe.graph import run, weight_gradients
from pmoe.graph.explain import PassSeconds, bars_of
from pmoe.graph.instructions import exposed_seconds, total_seconds
from pmoe.graph.run import Key
from pmoe.planner.timeline import draw

DEGREES = (1, 2, 4, 8)
FORCED = tuple(itertools.product((1, 2, 4, 8), (False, True)))
"""Plans that are not chosen: everything that can be cut in k parts, weight gradients moved or not."""
WHOLE = "whole graph"
TRACED = "k=1"
WARM_UP = 4
"""Steps in which a compiled model measures, agrees and orders."""


@dataclass(frozen=True)
class Setting:
    ratio: float = 3.0
    d_model: int = 512
    d_hidden: int = 2048
    layers: int = 4
    heads: int = 8
    context: int = 256
    sequences: int = 8
    num_experts: int = 8

    @property
    def tokens(self) -> int:
        return self.sequences * self.context

    def model(self, pipeline: int | bool = False) -> ByteGPT:
        torch.manual_seed(0)
        return ByteGPT(
            d_model=self.d_model, d_hidden=self.d_hidden, layers=self.layers, heads=self.heads,
            context=self.context, num_experts=self.num_experts, top_k=1, pipeline=pipeline,
        )  # fmt: skip


class Waits:
    """Seconds that this rank has waited: for the link, and for gloo, whose peer may be late."""

    def __init__(self) -> None:
        self.link = self.peer = 0.0

        def counted(work: Any, timeout: Any = None) -> bool:
            begin = time.monotonic()
            work._inner.wait()
            arrived = time.monotonic()
            left = work._ready_at - arrived
            if left > 0:
                time.sleep(left)
            self.peer += arrived - begin
            self.link += time.monotonic() - arrived
            return True

        modelled._LinkWork.wait = counted


@dataclass
class Way:
    """One way to run the model. keys: its programs. seconds, by direction: of its graphs' passes."""

    model: ByteGPT
    call: Callable[[Tensor], Tensor]
    keys: list[Key] = field(default_factory=list)
    first_seconds: float = 0.0
    link: list[float] = field(default_factory=list)
    forward_link: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    seconds: dict[str, PassSeconds] = field(default_factory=dict)
    peak_bytes: int = 0
    difference: float = 0.0


@dataclass(frozen=True)
class Result:
    """What rank 0 brings home. predicted: of a plan's two graphs, seconds and exposed ones, as they run and
    as traced; measured: the same two graphs' seconds."""

    bytes_per_second: float
    expert_seconds: float
    times: dict[str, Timing]
    ways: dict[str, dict[str, float]]
    predicted: dict[str, dict[str, float]]
    measured: dict[str, float]
    ranges: list[Any]
    blocks: list[int]


@contextlib.contextmanager
def forced(k: int) -> Iterator[None]:
    """First steps choose everything that can be cut, in k parts."""
    parts, solve = run.PARTS, run.solve
    run.PARTS = (k,) if k > 1 else ()
    run.solve = lambda graph, _: (0.0, run.whole_ranges(graph, k))  # type: ignore[assignment]
    try:
        yield
    finally:
        run.PARTS, run.solve = parts, solve


class Rank:
    """One rank's models, and a step of each."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.waits, self.ways = setting, Waits(), dict[str, Way]()
        generator = torch.Generator().manual_seed(dist.get_rank())
        sizes = (setting.sequences, setting.context)
        self.x, self.target = (torch.randint(0, VOCABULARY, sizes, generator=generator) for _ in range(2))

    def step(self, name: str) -> None:
        way = self.ways[name]
        way.model.zero_grad(set_to_none=True)
        link, peer = self.waits.link, self.waits.peer
        y = way.call(self.x)
        loss = F.cross_entropy(y.flatten(0, 1), self.target.flatten()) + 0.01 * way.model.auxiliary_loss()
        way.forward_link.append(self.waits.link - link)
        loss.backward()
        way.link.append(self.waits.link - link)
        way.peer.append(self.waits.peer - peer)

    def add(self, name: str, pipeline: int | bool = False, **compiled: Any) -> None:
        """compiled: arguments of torch.compile, none for the model as it is."""
        model = self.setting.model(pipeline)
        call = torch.compile(model, **compiled) if compiled else model
        way = self.ways[name] = Way(model, call)  # type: ignore[arg-type]
        known = set(run.PROGRAMS)
        for at in range(WARM_UP):
            begin = time.perf_counter()
            self.step(name)
            way.first_seconds = way.first_seconds if at else time.perf_counter() - begin
        way.keys = [key for key in run.PROGRAMS if key not in known]
        way.link.clear(), way.forward_link.clear(), way.peer.clear()
        for key in way.keys:
            run.PROGRAMS[key].watch = way.seconds[key[0]] = PassSeconds()

    def look_closer(self, name: str) -> None:
        """Memory of a step, and gradients beside those of the layer with n=1."""
        way = self.ways[name]
        with watched() as seen:
            self.step(name)
        way.peak_bytes = seen.peak_bytes()
        plain = self.ways[layer_name(1)]
        pairs = zip(plain.model.parameters(), way.model.parameters(), strict=True)
        way.difference = max(float((a.grad - b.grad).abs().max() / a.grad.abs().max()) for a, b in pairs)

    def timelines(self, name: str) -> dict[str, Any]:
        """When the instructions of one step ran, as panels of a drawing."""
        way, watches = self.ways[name], dict[Key, PassTimeline]()
        for key in way.keys:
            run.PROGRAMS[key].watch = watches[key] = PassTimeline(run.PROGRAMS[key].instructions)
        self.step(name)
        return {
            f"{key[0]}, {name}": bars_of(
                key[0], watch.found, weight_gradients.weight_gradients(run.PROGRAMS[key].instructions)
            )
            for key, watch in watches.items()
        }


def layer_name(n: int) -> str:
    return f"layer, n={n}"


def run_rank(link: Any, setting: Setting, rounds: int, folder: str, picture: str) -> Result:
    os.environ["PMOE_CACHE"] = folder
    rank = Rank(setting)
    link.set_rate(INFINITE)
    seconds, rate = _rate(setting)
    link.set_rate(rate)
    for n in DEGREES:
        rank.add(layer_name(n), n)
    rank.add(WHOLE, backend="pmoe")
    for k, moved in FORCED:
        with forced(k):
            name = f"k={k}" + (", dW moved" if moved else "")
            rank.add(name, backend="pmoe", options={"weight_gradients": moved, "parts": k})
    times = interleaved({name: lambda name=name: rank.step(name) for name in rank.ways}, rounds)
    for name in rank.ways:
        rank.look_closer(name)
    panels = {**rank.timelines(TRACED), **rank.timelines(WHOLE)}
    if dist.get_rank() == 0 and picture:
        draw(picture, panels, f"One step of the whole model, measured, at {setting.ratio:g} X")
    compiled = {name: way for name, way in rank.ways.items() if way.keys}
    programs = {name: [run.PROGRAMS[key] for key in way.keys] for name, way in compiled.items()}
    return Result(
        bytes_per_second=rate,
        expert_seconds=seconds,
        times=times,
        ways={
            name: {
                "link ms": 1e3 * statistics.median(way.link),
                "of it forward ms": 1e3 * statistics.median(way.forward_link),
                "peer ms": 1e3 * statistics.median(way.peer),
                "first step s": way.first_seconds,
                "peak MiB": way.peak_bytes / 2**20,
                "gradients differ": way.difference,
            }
            for name, way in rank.ways.items()
        },
        predicted={
            name: {
                "ms": 1e3 * sum(total_seconds(each.instructions) for each in found),
                "exposed ms": 1e3 * sum(exposed_seconds(each.instructions) for each in found),
                "as traced ms": 1e3 * sum(total_seconds(each.before) for each in found),
            }
            for name, found in programs.items()
        },
        measured={
            name: 1e3 * sum(statistics.median(each.found[:-1]) for each in way.seconds.values())
            for name, way in compiled.items()
        },
        ranges=[asdict(each) for program in programs[WHOLE] for each in program.plan.ranges],
        blocks=[layer for program in programs[WHOLE] for layer in program.plan.blocks],
    )


def _rate(setting: Setting) -> tuple[float, float]:
    """(seconds of a layer's experts forward, bytes a second that go with the ratio): rank 0's."""
    layer = next(each for each in setting.model().modules() if isinstance(each, pmoe.MoELayer))
    ranks = dist.get_world_size()
    sizes = (setting.d_model, setting.d_hidden, setting.num_experts // ranks)
    local = pmoe.MoELayer(*sizes, group=Ranks.single())
    rows, taken = torch.randn(setting.tokens, setting.d_model), []
    with torch.no_grad():
        for _ in range(12):
            begin = time.perf_counter()
            local(rows)
            taken.append(time.perf_counter() - begin)
    found = torch.tensor([statistics.median(taken[2:])], dtype=torch.float64)
    dist.broadcast(found, 0)
    num_bytes = 2 * setting.tokens * (ranks - 1) / ranks * setting.d_model * layer.experts.w1.element_size()
    return found.item(), num_bytes / (setting.ratio * found.item())


def planning(link: Any, setting: Setting, folder: str) -> dict[str, float]:
    """Seconds of planning for a deep model, and of first steps with and without this backend."""
    os.environ["PMOE_CACHE"] = folder
    link.set_rate(50e6)
    rank, found = Rank(setting), dict[str, float]()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            done = function(*args, **options)
            found[name] = max(found.get(name, 0.0), time.perf_counter() - begin)
            return done

        return call

    run.solve = timed("ranges s", run.solve)  # type: ignore[assignment]
    for name in ("assign", "placed", "listed"):
        setattr(weight_gradients, name, timed(f"{name} s", getattr(weight_gradients, name)))
    rank.add(WHOLE, backend="pmoe")
    for backend in ("aot_eager", "inductor"):
        rank.add(backend, backend=backend)
    return {**found, **{f"first step, {name} s": way.first_seconds for name, way in rank.ways.items()}}


# ---- the report


def rows_of(setting: Setting, result: Result) -> list[dict[str, Any]]:
    """One row a way."""
    rows = []
    for name, timing in result.times.items():
        row = {"d_model": setting.d_model, "X": setting.ratio, "way": name, "step ms": timing.median * 1e3}
        row |= result.ways[name]
        if name in result.predicted:
            said, took = result.predicted[name], result.measured[name]
            row |= {"graphs ms": took, "predicted ms": said["ms"], "off %": 100 * (said["ms"] / took - 1)}
            row |= {"predicted exposed ms": said["exposed ms"]}
        else:
            row |= dict.fromkeys(("graphs ms", "predicted ms", "off %", "predicted exposed ms"))
        rows.append(row)
    return rows


def beside_layer(result: Result) -> dict[str, Any]:
    """The whole graph over the layer's pipeline at its best n."""
    best = min(map(layer_name, DEGREES), key=lambda name: result.times[name].median)
    ours, theirs = result.ways[WHOLE], result.ways[best]
    return {
        "beside": best,
        "speed": result.times[WHOLE].speedup_over(result.times[best]),
        "exposed": ours["link ms"] / max(theirs["link ms"], 1e-9),
        "memory": ours["peak MiB"] / theirs["peak MiB"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratio", type=float, nargs="*", default=[3.0, 5.0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", type=int, default=128, help="d_model of the small model; 0 leaves it out")
    parser.add_argument("--deep", type=int, default=24, help="blocks of the deep model; 0 leaves it out")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = [Setting(ratio=ratio) for ratio in args.ratio]
    if args.small:
        settings.append(Setting(ratio=3.0, d_model=args.small, d_hidden=4 * args.small, heads=4))
    rows, runs = [], []

    def launched(function: Any, *given: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            filled = [folder if each is None else each for each in given]
            return launch(2, function, "modelled", INFINITE, tuple(filled), timeout_seconds=1700)[0]

    for setting in settings:
        name = f"lancet_{setting.d_model}_{setting.ratio:g}x"
        result: Result = launched(run_rank, setting, args.rounds, None, str(args.out / f"{name}.png"))
        new, beside = rows_of(setting, result), beside_layer(result)
        print(
            f"\n{setting}: X {result.expert_seconds * 1e3:.1f} ms, {result.bytes_per_second / 1e6:.1f} MB/s"
        )
        print(table(new), f"\nwhole graph: {beside}", flush=True)
        print(f"ranges {result.ranges}, experts in blocks in layers {result.blocks}", flush=True)
        rows += new
        runs.append({"setting": asdict(setting), "beside": beside, **asdict(replace(result, times={}))})
        runs[-1]["times"] = result.times
    off = [abs(row["off %"]) for row in rows if row["off %"] is not None]
    if off:
        print(
            f"\n{len(off)} plans: off by {statistics.fmean(off):.1f} % on average, {max(off):.1f} % at worst"
        )
    plans = {}
    if args.deep:
        deep = Setting(d_model=32, d_hidden=64, layers=args.deep, heads=2, context=16)
        plans = launched(planning, deep, None)
        print(f"\n{args.deep} blocks: { ({name: round(value, 2) for name, value in plans.items()}) }")
    write_json(args.out / "lancet.json", rounds=args.rounds, rows=rows, runs=runs, planning=plans)


if __name__ == "__main__":
    main()
