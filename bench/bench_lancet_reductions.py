"""Data-parallel gradients beside Lancet's passes: how much of their reduction is left to wait for?

    python bench/bench_lancet_reductions.py --ratio 3

The model is that of bench_lancet.py, in DistributedDataParallel. The ranks are behind a modelled link, which
all-to-alls and the all-reduces of dense gradients share. It is so slow that both all-to-alls of a layer's
pass take --ratio times as long as the forward of its experts. Three ways to run the model take turns:

    eager        the layer's own pipeline
    at the end   torch.compile(model, backend="pmoe"); gradients are handed over when the graph has ended
    planned      the same; gradients are handed over where the plan of the graph says

    exposed time of a way = its step - its step in which gradients are not reduced (no_sync)
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.bench_lancet import WARM_UP, Setting, slowed
from bench.links import INFINITE, launch
from bench.timing import OUT, interleaved, table, write_json
from examples.lm_model import VOCABULARY, ByteGPT
from pmoe.experts.marks import is_expert
from pmoe.graph import hand_over, run
from pmoe.graph.instructions import exposed_seconds, total_seconds

EAGER, AT_THE_END, PLANNED = "eager", "at the end", "planned"
NOT_REDUCED = ", not reduced"


@dataclass
class Way:
    """One way to run the model.

    begun: when each bucket began in the last backward pass, as a fraction of the pass.
    """

    model: ByteGPT
    wrapper: DistributedDataParallel
    begun: list[float] = field(default_factory=list)


class Rank:
    """The ways of one rank, and a step of each."""

    def __init__(self, setting: Setting, bucket_mb: float, n: int) -> None:
        self.setting, self.ways = setting, dict[str, Way]()
        generator = torch.Generator().manual_seed(dist.get_rank())
        sizes = (setting.sequences, setting.context)
        self.x, self.target = (torch.randint(0, VOCABULARY, sizes, generator=generator) for _ in range(2))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        names_of = hand_over.GraphInputs.names_of
        for name in (EAGER, AT_THE_END, PLANNED):
            model = pmoe.parallelize(setting.model(n if name == EAGER else False), mesh)
            call: Any = model
            if name != EAGER:
                torch._dynamo.reset()
                call = pmoe.parallelize(torch.compile(model, backend="pmoe"), mesh)
            wrapper = DistributedDataParallel(call, bucket_cap_mb=bucket_mb, broadcast_buffers=False)
            way = Way(model, wrapper)
            wrapper.register_comm_hook(way.begun, noted)
            self.ways[name] = way
            known = names_of if name != AT_THE_END else lambda *_: {}
            with mock.patch.object(hand_over.GraphInputs, "names_of", known):
                for _ in range(WARM_UP + 1):
                    self.step(name)

    def step(self, name: str) -> None:
        way = self.ways[name.removesuffix(NOT_REDUCED)]
        way.model.zero_grad(set_to_none=True)
        if name.endswith(NOT_REDUCED):
            with way.wrapper.no_sync():
                self.loss(way).backward()
            return
        loss = self.loss(way)
        way.begun.clear()
        begin = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - begin
        way.begun[:] = [(each - begin) / seconds for each in way.begun]

    def loss(self, way: Way) -> Tensor:
        y = way.wrapper(self.x)
        loss: Tensor = F.cross_entropy(y.flatten(0, 1), self.target.flatten())
        return loss + 0.01 * way.model.auxiliary_loss()


def noted(begun, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    begun.append(time.perf_counter())
    return allreduce_hook(None, bucket)


def work(link: Any, setting: Setting, folder: str, rounds: int, bucket_mb: float, n: int) -> dict[str, Any]:
    """Returns the measurements of a rank."""
    os.environ["PMOE_CACHE"] = folder
    link.holds_all_reduces = True
    _, rate = slowed(link, setting)
    rank = Rank(setting, bucket_mb, n)
    names = [name + suffix for name in rank.ways for suffix in ("", NOT_REDUCED)]
    times = interleaved({name: lambda name=name: rank.step(name) for name in names}, rounds)
    rows = []
    for name, way in rank.ways.items():
        seconds, base = times[name].median, times[name + NOT_REDUCED].median
        rank.step(name)
        rows.append(
            {
                "way": name,
                "step ms": 1e3 * seconds,
                "not reduced ms": 1e3 * base,
                "exposed ms": 1e3 * (seconds - base),
                "first bucket at %": 100 * way.begun[0],
                "half of the buckets at %": 100 * way.begun[len(way.begun) // 2],
            }
        )
    gradients = [
        [each.grad for each in way.model.parameters() if not is_expert(each)] for way in rank.ways.values()
    ]
    (program,) = (each for key, each in run.PROGRAMS.items() if key[0] == "backward" and each.reductions)
    return {
        "setting": asdict(setting),
        "bytes_per_second": rate,
        "dense_bytes": sum(each.nbytes for each in gradients[0]),
        "bucket_mb": bucket_mb,
        "ways": rows,
        "times": {name: times[name] for name in names},
        "backward predicted ms": 1e3 * total_seconds(program.instructions),
        "of it exposed ms": 1e3 * exposed_seconds(program.instructions),
        "gradients differ": max(
            float((a - b).abs().max() / a.abs().max())
            for other in gradients[1:]
            for a, b in zip(gradients[0], other, strict=True)
        ),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratio", type=float, default=3.0, help="X of the link")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--bucket-mb", type=float, default=1.0, help="bucket_cap_mb of the wrapper")
    parser.add_argument("--n", type=int, default=4, help="chunks of the layer's own pipeline")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(ratio=args.ratio, d_model=args.d_model, d_hidden=4 * args.d_model, context=args.context)
    with tempfile.TemporaryDirectory() as folder:
        given = (setting, folder, args.rounds, args.bucket_mb, args.n)
        found = launch(2, work, "modelled", INFINITE, given, timeout_seconds=1700)[0]
    print(table(found["ways"]))
    print({name: each for name, each in found.items() if name not in ("ways", "times")})
    write_json(args.out / "lancet_reductions.json", **found)


if __name__ == "__main__":
    main()
