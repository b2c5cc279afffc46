"""Lancet's passes on a whole model beside the layer's own pipeline: step, exposed communication, memory.

    python bench/bench_lancet.py --ratio 3          # or 5; timelines, and what the runtime costs
    python bench/bench_lancet.py --plans 20         # predicted against measured steps: the paper's Fig. 14
    python bench/bench_lancet.py --small 64 128 256
    python bench/bench_lancet.py --deep 24          # seconds of the passes, beside torch.compile's own

The model is a GPT in which every second block has a `pmoe.MoELayer`. The ranks are behind a modelled link. It
is so slow that both all-to-alls of a layer's pass take --ratio times as long as the forward of its experts.
In one run, round by round, the model takes turns with the layer's pipeline at several n and compiled by
``torch.compile(model, backend="pmoe")``.

Exposed time is the time for which a rank waits for the link. The time for which it waits for a late rank, or
for gloo to copy, stands beside it. Each of these commands takes some minutes and stores its piece in
lancet.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
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
from bench.graph_plans import RUNNERS, Ordered, Runner, Unordered
from bench.graph_timeline import PassTimeline
from bench.links import INFINITE, launch
from bench.timing import BEGUN, OUT, interleaved, table, write_json
from examples.lm_model import VOCABULARY, ByteGPT
from pmoe.comm.ranks import Ranks
from pmoe.graph import backend, run, weight_gradients
from pmoe.graph.explain import PassSeconds, bars_of
from pmoe.graph.instructions import exposed_seconds, total_seconds
from pmoe.graph.plan import RangePlan
from pmoe.planner.timeline import draw

DEGREES = (1, 2, 4, 8)
WHOLE = "whole graph"
WARM_UP = 4
"""Number of steps of a compiled model that are not timed.

In them it measures costs, agrees on a plan with the other ranks, and orders its instructions.
"""


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
    """Measures the seconds for which this rank waits for the modelled link, and those for gloo.

    gloo may be late because the other rank is.

    Only the thread that makes this object counts. Other threads wait for works that have a future.
    """

    def __init__(self) -> None:
        self.link = self.peer = 0.0
        computing = threading.get_ident()

        def counted(work: Any, timeout: Any = None) -> bool:
            begin = time.monotonic()
            work._inner.wait()
            arrived = time.monotonic()
            remaining = work._ready_at - arrived
            if remaining > 0:
                time.sleep(remaining)
            if threading.get_ident() == computing:
                self.peer += arrived - begin
                self.link += time.monotonic() - arrived
            return True

        modelled._LinkWork.wait = counted


@dataclass
class Way:
    """One way to run the model, and its measurements.

    graphs: its compiled graphs, one for each direction; none if the model is not compiled.
    first_seconds: seconds of its first step.
    link, forward_link: for each step, the seconds of waiting for the link: in all, and in forward.
    peer: for each step, the seconds of waiting for gloo.
    """

    model: ByteGPT
    call: Callable[[Tensor], Tensor]
    graphs: list[Ordered] = field(default_factory=list)
    first_seconds: float = 0.0
    link: list[float] = field(default_factory=list)
    forward_link: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)


class Rank:
    """All ways to run the model on one rank, and a step of each."""

    def __init__(self, setting: Setting, folder: str) -> None:
        os.environ["PMOE_CACHE"] = folder
        backend.GraphRunner = Runner  # type: ignore[misc]
        self.setting, self.waits, self.ways = setting, Waits(), dict[str, Way]()
        generator = torch.Generator().manual_seed(dist.get_rank())
        sizes = (setting.sequences, setting.context)
        self.x, self.target = (torch.randint(0, VOCABULARY, sizes, generator=generator) for _ in range(2))

    def step(self, name: str) -> None:
        way = self.ways[name]
        for graph in way.graphs:
            graph.enter()
        way.model.zero_grad(set_to_none=True)
        link, peer = self.waits.link, self.waits.peer
        y = way.call(self.x)
        loss = F.cross_entropy(y.flatten(0, 1), self.target.flatten()) + 0.01 * way.model.auxiliary_loss()
        way.forward_link.append(self.waits.link - link)
        loss.backward()
        way.link.append(self.waits.link - link)
        way.peer.append(self.waits.peer - peer)

    def add(self, name: str, pipeline: int | bool = False, **compiled: Any) -> None:
        """Adds a way to run the model.

        compiled: arguments of torch.compile; none to run the model without it.
        """
        model = self.setting.model(pipeline)
        call = torch.compile(model, **compiled) if compiled else model
        self.ways[name] = Way(model, call)  # type: ignore[arg-type]
        self._warm_up(name, WARM_UP)
        if compiled.get("backend") == "pmoe":
            self.ways[name].graphs = [Ordered.of(runner) for runner in RUNNERS.values()]

    def add_plan(self, name: str, plans: dict[str, tuple[RangePlan, bool]]) -> None:
        """Adds the compiled model a second time, as a way of its own whose graphs follow other plans.

        name: name of the new way.
        plans: for each direction the plan, and whether weight gradients are moved.
        """
        whole = self.ways[WHOLE]
        for graph in whole.graphs:
            graph.program.watch = None
        for direction, (plan, moved) in plans.items():
            RUNNERS[direction].take(plan, moved)
        self.ways[name] = Way(whole.model, whole.call)
        self._warm_up(name, 2)
        self.ways[name].graphs = [Ordered.of(runner) for runner in RUNNERS.values()]

    def _warm_up(self, name: str, steps: int) -> None:
        way = self.ways[name]
        for at in range(steps):
            begin = time.perf_counter()
            self.step(name)
            way.first_seconds = way.first_seconds if at else time.perf_counter() - begin
        way.link.clear(), way.forward_link.clear(), way.peer.clear()

    def timed(self, rounds: int) -> dict[str, dict[str, Any]]:
        """Times steps of all ways, which take turns. Returns the seconds of each way's step and of its parts.

        One more step of each way measures its gradients and its memory.
        """
        times = interleaved({name: lambda name=name: self.step(name) for name in self.ways}, rounds)
        plain, by_way = list(self.ways.values())[0], dict[str, dict[str, Any]]()
        for name, way in self.ways.items():
            with watched() as seen:
                self.step(name)
            ours = [parameter.grad.clone() for parameter in way.model.parameters()]
            if way is plain:
                first = ours
            by_way[name] = {
                "step ms": 1e3 * times[name].median,
                "exposed ms": 1e3 * statistics.median(way.link[:-1]),
                "of it forward ms": 1e3 * statistics.median(way.forward_link[:-1]),
                "peer ms": 1e3 * statistics.median(way.peer[:-1]),
                "first step s": way.first_seconds,
                "peak MiB": seen.peak_bytes() / 2**20,
                "gradients differ": max(
                    float((a - b).abs().max() / a.abs().max()) for a, b in zip(first, ours, strict=True)
                ),
                "seconds": times[name],
            }
            if way.graphs:
                said = 1e3 * sum(total_seconds(graph.instructions) for graph in way.graphs)
                took = 1e3 * sum(graph.median for graph in way.graphs)
                waits = 1e3 * sum(exposed_seconds(graph.instructions) for graph in way.graphs)
                by_way[name] |= {"graphs ms": took, "predicted ms": said, "off %": 100 * (said / took - 1)}
                by_way[name] |= {"predicted exposed ms": waits}
        return by_way

    def timelines(self, name: str, title: str) -> dict[str, Any]:
        """Records when the instructions of one step of a way ran. Returns the panels of a drawing."""
        way, panels = self.ways[name], dict[str, Any]()
        watches = [PassTimeline(graph.instructions) for graph in way.graphs]
        kept, way.graphs = way.graphs, []
        for graph, watch in zip(kept, watches, strict=True):
            graph.program.watch = lambda _, boxed, graph=graph, watch=watch: watch(graph.module, boxed)
        self.step(name)
        way.graphs = kept
        for graph, watch in zip(kept, watches, strict=True):
            direction, free = graph.program.key[0], weight_gradients.weight_gradients(graph.instructions)
            panels[f"{direction}, {title}"] = bars_of(direction, watch.ran, free)
        return panels


def layer_name(n: int) -> str:
    return f"layer, n={n}"


# ---- pieces


def slowed(link: Any, setting: Setting) -> tuple[float, float]:
    """Limits the link so that all-to-alls take --ratio times as long as experts in forward.

    Returns (seconds of a layer's experts in forward, rate of the link in bytes a second), as rank 0 measured
    them.
    """
    link.set_rate(INFINITE)
    layer = next(module for module in setting.model().modules() if isinstance(module, pmoe.MoELayer))
    ranks = dist.get_world_size()
    sizes = (setting.d_model, setting.d_hidden, setting.num_experts // ranks)
    local = pmoe.MoELayer(*sizes, group=Ranks.single())
    rows, taken = torch.randn(setting.tokens, setting.d_model), []
    with torch.no_grad():
        for _ in range(12):
            begin = time.perf_counter()
            local(rows)
            taken.append(time.perf_counter() - begin)
    median_seconds = torch.tensor([statistics.median(taken[2:])], dtype=torch.float64)
    dist.broadcast(median_seconds, 0)
    num_bytes = 2 * setting.tokens * (ranks - 1) / ranks * setting.d_model * layer.experts.w1.element_size()
    rate = num_bytes / (setting.ratio * median_seconds.item())
    link.set_rate(rate)
    return median_seconds.item(), rate


def beside_layer(link: Any, setting: Setting, folder: str, rounds: int, picture: str) -> dict[str, Any]:
    """Measures the compiled model beside the layer's own pipeline.

    Then it records timelines of both, and measures the cost of the runtime.
    """
    rank = Rank(setting, folder)
    seconds, rate = slowed(link, setting)
    for n in DEGREES:
        rank.add(layer_name(n), n)
    rank.add(WHOLE, backend="pmoe")
    ways = rank.timed(rounds)
    best = min(map(layer_name, DEGREES), key=lambda name: ways[name]["step ms"])
    ours, theirs = ways[WHOLE], ways[best]
    plans = [graph.program.plan for graph in rank.ways[WHOLE].graphs]
    results = {
        "setting": asdict(setting), "expert_seconds": seconds, "bytes_per_second": rate, "ways": ways,
        "beside": best,
        "speed": ours["seconds"].speedup_over(theirs["seconds"]),
        "exposed": ours["exposed ms"] / max(theirs["exposed ms"], 1e-9),
        "memory": ours["peak MiB"] / theirs["peak MiB"],
        "ranges": [asdict(range_) for plan in plans for range_ in plan.ranges],
    }  # fmt: skip
    rank.ways = {WHOLE: rank.ways[WHOLE]}
    after = rank.timelines(WHOLE, "as run") if picture else {}
    old = [runner.cutting.apply(runner.program.plan) for runner in RUNNERS.values()]
    whole = rank.ways[WHOLE]
    rank.ways["old order"] = Way(whole.model, whole.call)
    for module, graph in zip(old, whole.graphs, strict=True):
        rank.ways["old order"].graphs.append(replace(graph, module=Unordered(module), seconds=PassSeconds()))
    link.set_rate(INFINITE)
    free = rank.timed(rounds)
    results["runtime_over_old_order"] = (
        free[WHOLE]["seconds"].speedup_over(free["old order"]["seconds"]) ** -1
    )
    if picture:
        link.set_rate(rate)
        rank.add_plan("traced", dict.fromkeys(RUNNERS, (RangePlan(), False)))
        before = rank.timelines("traced", "as traced")
        if dist.get_rank() == 0:
            panels = {
                name: panel
                for pair in zip(before.items(), after.items(), strict=True)
                for name, panel in pair
            }
            draw(picture, panels, f"One step of the whole model, measured, at {setting.ratio:g} X")
    return results


def many_plans(link: Any, setting: Setting, folder: str, rounds: int, count: int) -> dict[str, Any]:
    """Measures steps with several plans of the graphs. Returns their predicted and measured seconds.

    The plans are the one that the backend chose, and others.
    """
    rank = Rank(setting, folder)
    slowed(link, setting)
    rank.add(WHOLE, backend="pmoe")
    every = {name: runner.every_plan() for name, runner in RUNNERS.items()}
    for at in range(count - 1):
        rank.add_plan(f"plan {at}", {name: plans[at % len(plans)] for name, plans in every.items()})
    ways = rank.timed(rounds)
    off = [abs(row["off %"]) for row in ways.values()]
    return {
        "setting": asdict(setting),
        "ways": ways,
        "mean off %": statistics.fmean(off),
        "worst off %": max(off),
    }


def planning(link: Any, setting: Setting, folder: str, _rounds: int) -> dict[str, Any]:
    """Measures the seconds of planning for a deep model, and of first steps with and without this backend."""
    link.set_rate(50e6)
    rank, results = Rank(setting, folder), dict[str, Any]()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            done = function(*args, **options)
            results[name] = max(results.get(name, 0.0), time.perf_counter() - begin)
            return done

        return call

    run.solve = timed("ranges s", run.solve)  # type: ignore[assignment]
    for name in ("assign", "placed", "listed"):
        setattr(weight_gradients, name, timed(f"{name} s", getattr(weight_gradients, name)))
    for name in ("pmoe", "aot_eager", "inductor"):
        rank.add(name, backend=name)
        results[f"first step, {name} s"] = rank.ways[name].first_seconds
    return {"setting": asdict(setting), **results}


# ---- the report


def show(name: str, results: dict[str, Any]) -> None:
    ways = results.get("ways", {})
    columns = [column for column in max(ways.values(), key=len, default={}) if column != "seconds"]
    print(f"\n{name}")
    if ways:
        print(
            table(
                [{"way": way, **{column: row.get(column) for column in columns}} for way, row in ways.items()]
            )
        )
    print({key: value for key, value in results.items() if key != "ways"}, flush=True)


def keep(path: Path, name: str, results: dict[str, Any]) -> None:
    """Stores the results of one command in the result file, beside those of other commands."""
    pieces = {}
    with contextlib.suppress(OSError, ValueError):
        pieces = json.loads(path.read_text()).get("pieces", {})
    pieces[name] = {"command": sys.argv, **BEGUN, **results}
    write_json(path, pieces=pieces)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratio", type=float, nargs="*", default=[], help="X of links, a piece each")
    parser.add_argument("--plans", type=int, default=0, help="how many plans are predicted and measured")
    parser.add_argument("--small", type=int, nargs="*", default=[], help="d_model of small models, at 3 X")
    parser.add_argument("--deep", type=int, default=0, help="blocks of a model that is planned for")
    parser.add_argument("--rounds", type=int, default=9, help="as many again for each halving of d_model")
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def sized(d_model: int, ratio: float = 3.0) -> Setting:
        heads = 8 if d_model >= 256 else 4
        return Setting(ratio=ratio, d_model=d_model, d_hidden=4 * d_model, heads=heads)

    pieces: dict[str, tuple[Any, ...]] = {}
    for ratio in args.ratio:
        name = f"lancet_{args.d_model}_{ratio:g}x"
        picture = str(args.out / f"{name}.png")
        pieces[name] = (beside_layer, sized(args.d_model, ratio), args.rounds, picture)
    if args.plans:
        pieces["plans"] = (many_plans, sized(args.d_model), args.rounds, args.plans)
    for d_model in args.small:
        pieces[f"lancet_{d_model}_3x"] = (beside_layer, sized(d_model), args.rounds * 512 // d_model, "")
    if args.deep:
        deep = Setting(d_model=32, d_hidden=64, layers=args.deep, heads=2, context=16)
        pieces["planning"] = (planning, deep, args.rounds)
    if not pieces:
        parser.error("one of --ratio, --plans, --small and --deep must be given")
    for name, (function, setting, *values) in pieces.items():
        with tempfile.TemporaryDirectory() as folder:
            taken = (setting, folder, *values)
            results = launch(2, function, "modelled", INFINITE, taken, timeout_seconds=1700)[0]
        show(name, results)
        keep(args.out / "lancet.json", name, results)


if __name__ == "__main__":
    main()
