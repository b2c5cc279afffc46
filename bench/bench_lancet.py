"""Lancet's passes on a whole model beside the layer's own pipeline: exposed communication and the step.

A GPT whose every second block is a `pmoe.MoELayer`, on ranks behind a modelled link so slow that both
all-to-alls of a layer's pass take --ratio times as long as its experts compute forward. The same model runs
with the layer's pipeline at several n, and once compiled by ``torch.compile(model, backend="pmoe")``, round
by round in the same run. Exposed is what a rank waits for messages.

    python bench/bench_lancet.py --ratio 3 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import bench.links.modelled as modelled
import pmoe
from bench.links import INFINITE, launch
from bench.timing import Timing, interleaved, table, write_json
from examples.lm_model import VOCABULARY, ByteGPT
from pmoe.comm.ranks import Ranks
from pmoe.graph.run import PROGRAMS

DEGREES = (1, 2, 4, 8)
WARM_UP = 4
"""Steps in which a compiled model measures, agrees and orders."""


@dataclass(frozen=True)
class Setting:
    d_model: int = 512
    d_hidden: int = 2048
    layers: int = 4
    heads: int = 8
    context: int = 256
    sequences: int = 8
    num_experts: int = 8
    ratio: float = 3.0

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
    """Seconds that this rank has waited for messages."""

    def __init__(self) -> None:
        self.seconds = 0.0
        wait = modelled._LinkWork.wait

        def counted(work: Any, timeout: Any = None) -> bool:
            begin = time.perf_counter()
            done = wait(work, timeout)
            self.seconds += time.perf_counter() - begin
            return done

        modelled._LinkWork.wait = counted


@dataclass(frozen=True)
class Result:
    """What rank 0 brings home. waited: seconds of each round, by way. predicted: seconds by direction."""

    bytes_per_second: float
    expert_seconds: float
    times: dict[str, Timing]
    waited: dict[str, list[float]]
    ranges: list[Any]
    predicted: dict[str, float]
    difference: float
    first_steps: dict[str, float] = field(default_factory=dict)


def run_rank(link: Any, setting: Setting, rounds: int, folder: str) -> Result:
    os.environ["PMOE_CACHE"] = folder
    rank, waits = dist.get_rank(), Waits()
    generator = torch.Generator().manual_seed(rank)
    x, target = (
        torch.randint(0, VOCABULARY, (setting.sequences, setting.context), generator=generator)
        for _ in range(2)
    )
    link.set_rate(INFINITE)
    seconds, rate = _rate(setting)
    link.set_rate(rate)
    models = {f"layer, n={n}": setting.model(n) for n in DEGREES}
    models["whole graph"] = setting.model()
    calls: dict[str, Callable[[Tensor], Tensor]] = dict(models)
    calls["whole graph"] = torch.compile(models["whole graph"], backend="pmoe")
    waited: dict[str, list[float]] = {way: [] for way in models}

    def step(way: str) -> None:
        models[way].zero_grad(set_to_none=True)
        before = waits.seconds
        y = calls[way](x)
        loss = F.cross_entropy(y.flatten(0, 1), target.flatten()) + 0.01 * models[way].auxiliary_loss()
        loss.backward()
        waited[way].append(waits.seconds - before)

    first = {}
    for way in models:
        for _ in range(WARM_UP):
            begin = time.perf_counter()
            step(way)
            first.setdefault(way, time.perf_counter() - begin)
        waited[way].clear()
    times = interleaved({way: lambda way=way: step(way) for way in models}, rounds)
    pairs = zip(models["layer, n=1"].parameters(), models["whole graph"].parameters(), strict=True)
    difference = max(float((a.grad - b.grad).abs().max() / a.grad.abs().max()) for a, b in pairs)
    return Result(
        bytes_per_second=rate,
        expert_seconds=seconds,
        times=times,
        waited=waited,
        ranges=[asdict(each) for program in PROGRAMS.values() for each in program.plan.ranges],
        predicted={key[0]: program.plan.seconds for key, program in PROGRAMS.items()},
        difference=difference,
        first_steps=first,
    )


def _rate(setting: Setting) -> tuple[float, float]:
    """(seconds of a layer's experts forward, bytes a second that go with the ratio): rank 0's."""
    layer = next(each for each in setting.model().modules() if isinstance(each, pmoe.MoELayer))
    local = pmoe.MoELayer(
        setting.d_model,
        setting.d_hidden,
        setting.num_experts // dist.get_world_size(),
        group=Ranks.single(),
    )
    rows, taken = torch.randn(setting.tokens, setting.d_model), []
    with torch.no_grad():
        for _ in range(6):
            begin = time.perf_counter()
            local(rows)
            taken.append(time.perf_counter() - begin)
    found = torch.tensor([sorted(taken)[2]], dtype=torch.float64)
    dist.broadcast(found, 0)
    sent = setting.tokens * (dist.get_world_size() - 1) / dist.get_world_size()
    num_bytes = 2 * sent * setting.d_model * layer.experts.w1.element_size()
    return found.item(), num_bytes / (setting.ratio * found.item())


def report(setting: Setting, result: Result) -> list[dict[str, Any]]:
    rows = [
        {
            "ratio": setting.ratio,
            "way": way,
            "step ms": timing.median * 1e3,
            "exposed ms": statistics.median_high(result.waited[way]) * 1e3,
            "first step s": result.first_steps[way],
        }
        for way, timing in result.times.items()
    ]
    print(table(rows))
    best = min(
        (each for each in result.times if each != "whole graph"), key=lambda way: result.times[way].median
    )
    faster = result.times["whole graph"].speedup_over(result.times[best])
    exposed = statistics.median_high(result.waited["whole graph"]) / statistics.median_high(
        result.waited[best]
    )
    print(
        f"\n{setting.ratio:g} X: beside {best} the step is {faster:.3f} x as fast, exposed {exposed:.2f} x; "
        f"gradients differ by {result.difference:.1e}; X {result.expert_seconds * 1e3:.1f} ms, "
        f"{result.bytes_per_second / 1e6:.1f} MB/s; ranges {result.ranges}\n"
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratio", type=float, nargs="+", default=[3.0, 5.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    found = []
    for ratio in args.ratio:
        setting = Setting(ratio=ratio, d_model=args.d_model, d_hidden=4 * args.d_model)
        with tempfile.TemporaryDirectory() as folder:
            result = launch(
                2,
                run_rank,
                link="modelled",
                rate=INFINITE,
                args=(setting, args.rounds, folder),
                timeout_seconds=1700,
            )[0]
        found.append({"setting": asdict(setting), "rows": report(setting, result), "ranges": result.ranges})
    write_json(args.out / "lancet.json", runs=found)


if __name__ == "__main__":
    main()
