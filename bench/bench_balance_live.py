"""What do copies of busy experts gain? Measured on 2 ranks behind a modelled link.

    python bench/bench_balance_live.py [--top-k 1] [--rounds 3] [--trace FOLDER] [--modules] [--out FILE]
    python bench/bench_balance_live.py --simulate [--top-k 1] [--modules]

Two gloo ranks of one thread each, 16,384 tokens a rank, d_model 256, d_hidden 1024, 8 experts, 4 chunks, in
float32. `pmoe.gates.forced.ForcedGate` sends 30 to 95 % of the rows to one expert, or to two experts of one
rank. The link is so slow that all messages of a balanced forward pass take as long as its computation, or a
third of that. Three layers are compared in turns:

    balanced  every expert gets equally many rows
    without   the skewed load
    with      the skewed load and balance=True

With --trace the loads are what the gates of `make train` chose (bench/record_routing.py), layer by layer; the
number of experts and top-k are those of the trace.

With --modules the experts of all three layers are modules, each two torch.nn.Linear and a GELU. Then
`torch.func.functional_call` computes copies.

Beside each measured number stands the simulated one, named so. The simulation knows the rate of the products,
which the balanced forward pass has without a link, and the rate of the link, and nothing else
(`pmoe.planner.uneven_ranks`). bench/bench_balance.py simulates larger machines in the same way.

With --simulate nothing is measured: the simulated ratios are printed, which depend only on the ratio of both
rates.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.links import INFINITE, Link, launch
from bench.timing import OUT, interleaved, table, write_json
from pmoe.decide import balanced_counts
from pmoe.gates import ReplayGate, TopKGate
from pmoe.gates.forced import ForcedGate
from pmoe.measure.profile import PROFILES
from pmoe.planner.cluster import Cluster
from pmoe.planner.copies import CopyLimits, CopyPlan, plan_copies
from pmoe.planner.costs import LineCost
from pmoe.planner.uneven_ranks import UnevenLayer, nodes_of, uneven_pass_seconds

SHARES = (0.30, 0.50, 0.80, 0.95)
LINKS = (1.0, 1 / 3)
"""Seconds of all messages of a balanced forward pass over the seconds of its computation."""


@dataclass(frozen=True)
class Setting:
    """Sizes of the layer and of the batch. tokens: those of each rank."""

    top_k: int = 1
    rounds: int = 3
    tokens: int = 16384
    d_model: int = 256
    d_hidden: int = 1024
    num_experts: int = 8
    n: int = 4
    links: tuple[float, ...] = LINKS
    trace: str = ""
    modules: bool = False

    def layer(self, load: Load, balance: bool) -> pmoe.MoELayer:
        """Returns a layer that gets a load."""
        torch.manual_seed(0)
        gate: torch.nn.Module = TopKGate(self.d_model, self.num_experts, self.top_k)
        if load.choices_TK is None:
            gate = ForcedGate(gate, self.num_experts, busy=load.busy, share=load.share)
        else:
            gate = ReplayGate(gate, [load.choices_TK])
        return pmoe.MoELayer(
            self.d_model,
            self.d_hidden,
            self.num_experts,
            self.top_k,
            gate=gate,
            expert=self.expert if self.modules else "ffn",
            pipeline=self.n,
            balance=balance,
        )

    def expert(self) -> torch.nn.Module:
        """Returns an expert that is a module, with the sizes of the experts of pmoe."""
        return torch.nn.Sequential(
            torch.nn.Linear(self.d_model, self.d_hidden),
            torch.nn.GELU(),
            torch.nn.Linear(self.d_hidden, self.d_model),
        )

    def loads(self, rank: int) -> list[Load]:
        """Returns the skewed loads, and at last an even one; with a trace one load for each of its layers.

        rank: the rank. Rank 0 has the first tokens of a trace, rank 1 the next.
        """
        if self.trace:
            tokens = slice(rank * self.tokens, (rank + 1) * self.tokens)
            trace = pmoe.read_routing(self.trace)
            return [Load(name, choices_TK=torch.cat(calls)[tokens]) for name, calls in trace.items()]
        loads = []
        for share in SHARES:
            if share * self.top_k <= 1:  # a token's experts are distinct
                loads.append(Load(f"{share:.0%} to one expert", (0,), share))
            if share > 0.5:
                loads.append(Load(f"{share:.0%} to two experts", (0, 1), share))
        return [*loads, Load("even")]

    def simulated(self, computing: float, rate: float, loads: Sequence[int], plan: CopyPlan) -> Simulated:
        """Returns the simulated seconds of a step with an even load, with the loads, and with copies.

        computing: seconds of a balanced forward pass without a link.
        rate: bytes a second of the link.
        loads: rows of each expert, from both ranks.
        plan: the copies.
        """
        cluster = self.cluster(computing, rate)

        def seconds(rows: Sequence[int], of_plan: CopyPlan | None = None) -> float:
            ways = ("forward", "backward")
            layer = self.uneven_layer(rows)
            return sum(uneven_pass_seconds(layer, cluster, self.n, way, of_plan) for way in ways)

        even = [sum(loads) // len(loads)] * len(loads)
        return Simulated(seconds(even), seconds(loads), seconds(loads, plan))

    def rate(self, relative: float, computing: float) -> float:
        """Returns the bytes a second of a link.

        relative: seconds of all messages of a balanced forward pass over the seconds of its computation.
        computing: seconds of a balanced forward pass without a link.
        """
        return 2 * self.tokens * self.top_k / 2 * 4 * self.d_model / (relative * computing)

    def cluster(self, computing: float, rate: float) -> Cluster:
        """Returns the two ranks, with the rates of `simulated`'s arguments."""
        line = LineCost(0.0, 1 / rate)
        row_seconds = computing / (self.tokens * self.top_k)
        return Cluster(
            machines=1,
            ranks_per_machine=2,
            device_type="cpu",
            memory_bytes=1e12,
            compute=LineCost(0.0, row_seconds / (2 * self.d_model * self.d_hidden)),
            copy=line,
            inside=line,
            outside=line,
        )

    def uneven_layer(self, rows: Sequence[int]) -> UnevenLayer:
        """Returns the layer with these rows of each expert, from both ranks."""
        parameters = 2 * self.d_model * self.d_hidden
        return UnevenLayer(
            loads=rows,
            row_bytes=4 * self.d_model,
            multiply_adds=parameters,
            expert_bytes=4 * parameters,
            are_modules=self.modules,
        )

    def simulations(self) -> list[dict[str, Any]]:
        """Returns the simulated ratios of each forced load on each link. Nothing is measured."""
        results = []
        for relative in self.links:
            rate = self.rate(relative, 1.0)
            cluster = self.cluster(1.0, rate)
            for load in self.loads(0):
                rows = load.rows(2 * self.tokens * self.top_k, self.num_experts)
                layer = self.uneven_layer(rows)
                near, far = layer.copy_prices(cluster, trains=True)
                limits = CopyLimits(per_rank=2, near=near, far=far)
                plan = plan_copies(rows, layer.owners(2), nodes_of(cluster), limits)
                took = self.simulated(1.0, rate, rows, plan)
                results.append(
                    {
                        "link": round(relative, 2),
                        "load": load.name,
                        "simulated_with_over_balanced": took.with_copies / took.balanced,
                        "simulated_without_over_with": took.without / took.with_copies,
                    }
                )
        return results


class Simulated(NamedTuple):
    """Simulated seconds of a step: with an even load, and with a skewed load without and with copies."""

    balanced: float
    without: float
    with_copies: float


@dataclass(frozen=True)
class Load:
    """A load of the experts: busy experts and their share of the rows, or recorded choices.

    Without busy experts and choices, all experts get equally many rows.
    """

    name: str
    busy: tuple[int, ...] = ()
    share: float | None = None
    choices_TK: torch.Tensor | None = None

    def rows(self, total: int, num_experts: int) -> list[int]:
        """Returns the rows of each expert that a forced load gives, of all ranks together.

        total: the rows of all experts.
        """
        share = len(self.busy) / num_experts if self.share is None else self.share
        hot = int(share * total) // max(len(self.busy), 1)
        other = (total - hot * len(self.busy)) // (num_experts - len(self.busy))
        return [hot if expert in self.busy else other for expert in range(num_experts)]


def step(layer: pmoe.MoELayer, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Makes a step of training. Copies of experts that did not change would stay, and would not be sent."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    layer(x).backward(dy)
    torch.optim.SGD(layer.experts.parameters(), lr=1e-6).step()


def run_rank(link: Link, setting: Setting, cache: str) -> list[dict[str, Any]]:
    """Returns the seconds of each load on each link, the same on both ranks."""
    os.environ["PMOE_CACHE"] = cache
    torch.manual_seed(1 + dist.get_rank())
    x, dy = torch.randn(2, setting.tokens, setting.d_model)
    x.requires_grad_()
    balanced = setting.layer(Load("even"), balance=False)
    link.set_rate(INFINITE)

    def forward() -> None:
        with torch.no_grad():
            balanced(x)

    computing = interleaved({"forward": forward}, rounds=3)["forward"].median
    results = []
    for relative in setting.links:
        rate = setting.rate(relative, computing)
        link.set_rate(rate)
        PROFILES.clear()
        for load in setting.loads(dist.get_rank()):
            layers = {
                "balanced": balanced,
                "without": setting.layer(load, balance=False),
                "with": setting.layer(load, balance=True),
            }
            runs = {of: (lambda layer=layer: step(layer, x, dy)) for of, layer in layers.items()}
            timings = interleaved(runs, rounds=setting.rounds)
            seconds = {of: timing.median for of, timing in timings.items()}
            plans: list[CopyPlan] = []

            def planned(*arguments: Any, plans: list[CopyPlan] = plans) -> CopyPlan:
                plans.append(plan_copies(*arguments))
                return plans[-1]

            with mock.patch.object(balanced_counts, "plan_copies", planned):
                step(layers["with"], x, dy)
            ran = layers["with"].ran
            assert ran is not None and ran.balance is not None
            counts = layers["with"].row_counts
            assert counts is not None
            rows = torch.zeros(2)
            rows[dist.get_rank()] = counts.recv.sum()
            dist.all_reduce(rows)
            shared = counts.loads
            copies = plans[-1] if ran.balance.copies else CopyPlan(hosts={}, before=0, after=0)
            simulated = setting.simulated(computing, rate, shared, copies)
            results.append(
                {
                    "link": round(relative, 2),
                    "load": load.name,
                    **{f"{of}_s": value for of, value in seconds.items()},
                    "with_over_balanced": seconds["with"] / seconds["balanced"],
                    "simulated_with_over_balanced": simulated.with_copies / simulated.balanced,
                    "without_over_with": timings["with"].speedup_over(timings["without"]),
                    "simulated_without_over_with": simulated.without / simulated.with_copies,
                    "simulated_over_measured": simulated.with_copies / seconds["with"],
                    "rows_max_over_mean": float(rows.max() / rows.mean()),
                    "copies": ran.balance.copies,
                    "before": ran.balance.before,
                    "samples": {of: timing.as_dict() for of, timing in timings.items()},
                }
            )
            if dist.get_rank() == 0:
                print(
                    table([{key: value for key, value in results[-1].items() if key != "samples"}]),
                    flush=True,
                )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--top-k", type=int, default=1, choices=(1, 2))
    parser.add_argument("--rounds", type=int, default=Setting.rounds)
    parser.add_argument("--link", type=float, help="one of the two links, 1 or 0.33; without it both")
    parser.add_argument("--tokens", type=int, default=Setting.tokens, help="of each rank")
    parser.add_argument("--trace", type=Path, help="folder of a recorded trace, in place of forced loads")
    parser.add_argument("--modules", action="store_true", help="experts are modules of two Linear")
    parser.add_argument("--simulate", action="store_true", help="print simulated ratios, measure nothing")
    parser.add_argument("--out", type=Path, default=OUT, help="a .json file, or a folder")
    arguments = parser.parse_args()
    links = [link for link in LINKS if arguments.link in (None, round(link, 2))]
    setting = Setting(
        top_k=arguments.top_k,
        rounds=arguments.rounds,
        tokens=arguments.tokens,
        links=tuple(links),
        modules=arguments.modules,
    )
    if arguments.simulate:
        if arguments.trace is not None:
            parser.error("--simulate takes forced loads only: leave out --trace")
        print(table(setting.simulations()))
        return
    if arguments.trace is not None:
        recorded = torch.cat(
            [call for calls in pmoe.read_routing(arguments.trace).values() for call in calls]
        )
        num_experts = 2 * -(-(int(recorded.max()) + 1) // 2)
        setting = replace(
            setting, trace=str(arguments.trace), top_k=recorded.shape[1], num_experts=num_experts
        )
    with tempfile.TemporaryDirectory() as cache:  # profiles of the modelled link are no one else's
        results, _ = launch(
            2, run_rank, link="modelled", rate=INFINITE, args=(setting, cache), timeout_seconds=1800
        )
    shown = [{key: value for key, value in result.items() if key != "samples"} for result in results]
    print(table(shown))
    of_link = "" if arguments.link is None else f"_link_{arguments.link:g}".replace(".", "")
    of_load = ("modules_" if setting.modules else "") + ("trace" if setting.trace else f"top{setting.top_k}")
    path = arguments.out
    if path.suffix != ".json":
        path = path / f"balance_live_{of_load}{of_link}.json"
    write_json(path, setting=asdict(setting), results=results)


if __name__ == "__main__":
    main()
