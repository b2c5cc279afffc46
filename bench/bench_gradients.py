"""How much of the all-reduce of data-parallel gradients is left to wait for after backward?

    python bench/bench_gradients.py                       # modelled link: all-reduces are held back too
    sudo python bench/bench_gradients.py --link real      # network namespaces on one token bucket

The model has a few blocks of a dense part and an MoE layer. Each rank is a node behind a slow link, which
all-to-alls and the all-reduce of dense gradients share. Three kinds of steps are timed: without any
reduction, with plain all-reduces after backward, and with `pmoe.GradientReducer`, which reduces pieces within
backward.

    exposed time of a kind = its time - time without any reduction

The rate of the link is set so that a layer's all-to-alls take ``link_share`` of its forward computation. At 1
and more the lane between nodes is busy throughout the MoE layers, so only dense parts can hide gradients.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.links import INFINITE, launch
from bench.timing import Timing, interleaved, table, write_json
from pmoe.call.options import Switches
from pmoe.training.parallel import is_expert

WAYS = ("no reduction", "plain", "partitioned")


@dataclass(frozen=True)
class Setting:
    """Sizes of the model and the batch (letters as in docs/how_it_works.md).

    dense: number of products (d_model, 2 d_model) and back in the dense part of each block.
    link_share: seconds of a layer's all-to-alls / seconds of its forward computation.
    """

    tokens: int = 1024
    d_model: int = 512
    d_hidden: int = 4096
    num_experts: int = 4
    blocks: int = 4
    dense: int = 1
    n: int = 4
    link_share: float = 0.5


class Block(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        wide = 2 * setting.d_model
        self.dense = nn.ModuleList(
            nn.Sequential(nn.Linear(setting.d_model, wide), nn.GELU(), nn.Linear(wide, setting.d_model))
            for _ in range(setting.dense)
        )
        self.moe = pmoe.MoELayer(
            setting.d_model, setting.d_hidden, setting.num_experts, pipeline=setting.n, gate="topk"
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.dense:
            x = x + part(x)
        return x + self.moe(x)


def make_model(setting: Setting) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(setting) for _ in range(setting.blocks)))


@dataclass(frozen=True)
class Result:
    """The measurements, as rank 0 has them.

    bytes_per_second: rate of the link.
    dense_bytes: bytes of the dense gradients.
    times: for each kind of steps, the times of a step.
    predicted: exposed seconds that the partition of gradients predicts: with plain all-reduces, and after
        each of the two steps in which the partition is computed.
    pieces: bytes of gradients that are sent beside dense parts, inside MoE layers, and at the end.
    difference: largest difference between gradients of partitioned and of plain all-reduces, over the largest
        gradient of the same parameter.
    load: load of the machine when the benchmark began.
    """

    bytes_per_second: float
    dense_bytes: int
    times: dict[str, Timing]
    predicted: dict[str, float]
    pieces: dict[str, int]
    difference: float
    load: float


def run_rank(link: Any, setting: Setting, rounds: int, folder: str) -> Result:
    os.environ["PMOE_CACHE"] = folder
    if hasattr(link, "holds_all_reduces"):
        link.holds_all_reduces = True
    torch.manual_seed(dist.get_rank())
    x = torch.randn(setting.tokens, setting.d_model)
    rate = _rate(link, setting, x)
    models = {way: make_model(setting) for way in WAYS}
    hooks = {
        "no reduction": pmoe.GradientReducer(models["no reduction"], partition=False),
        "plain": pmoe.GradientReducer(models["plain"], partition=False),
        "partitioned": pmoe.GradientReducer(models["partitioned"]),
    }

    def step(way: str, reduces: bool = True) -> None:
        model, hook = models[way], hooks[way]
        model.zero_grad(set_to_none=True)
        if reduces:
            model(x).square().mean().backward()
            hook.finish()
        else:
            with hook.no_sync():
                model(x).square().mean().backward()

    for way in WAYS:  # a reducer's first step only records, from the second on it sends pieces
        step(way)
    step("plain")
    step("partitioned")
    pairs = zip(models["plain"].parameters(), models["partitioned"].parameters(), strict=True)
    difference = max(float((a.grad - b.grad).abs().max() / a.grad.abs().max()) for a, b in pairs)
    runs: dict[str, Callable[[], Any]] = {
        "no reduction": lambda: step("no reduction", reduces=False),
        "plain": lambda: step("plain"),
        "partitioned": lambda: step("partitioned"),
    }
    times = interleaved(runs, rounds)
    partition = hooks["partitioned"].partition
    assert partition is not None
    dense_bytes = sum(p.nbytes for p in models["plain"].parameters() if not is_expert(p))
    return Result(
        bytes_per_second=rate,
        dense_bytes=dense_bytes,
        times=times,
        predicted={
            "plain": partition.plain_seconds,
            "after step 1": partition.filled_seconds,
            "partitioned": partition.exposed_seconds,
        },
        pieces={
            "beside dense parts": sum(share.dense_bytes for share in partition.shares),
            "inside MoE layers": sum(share.moe_bytes for share in partition.shares),
            "at the end": partition.end_bytes,
        },
        difference=difference,
        load=os.getloadavg()[0],
    )


def _rate(link: Any, setting: Setting, x: Tensor) -> float:
    """Limits the link so that a layer's two all-to-alls take ``link_share`` of its forward computation.

    Returns the rate in bytes a second.
    """
    link.set_rate(INFINITE)
    layer = make_model(setting)[0].moe
    layer.switches = Switches(sequential=True)
    with torch.no_grad():
        layer(x)
        sent = layer.traffic.rows
        seconds = []
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            layer(x)
            seconds.append(time.perf_counter() - start)
    numbers = torch.tensor([sorted(seconds)[2], float(sent)], dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    rate = float(numbers[1] / numbers[0]) / setting.link_share
    link.set_rate(rate)
    return rate


def report(result: Result, setting: Setting) -> dict[str, Any]:
    base = result.times["no reduction"].median
    rows = []
    for way in WAYS:
        taken = result.times[way].median
        rows.append(
            {
                "way": way,
                "step ms": round(taken * 1e3, 1),
                "exposed ms": round((taken - base) * 1e3, 1),
                "predicted exposed ms": round(result.predicted.get(way, 0.0) * 1e3, 1),
            }
        )
    print(table(rows))
    plain, ours = (result.times[way].median - base for way in WAYS[1:])
    print(f"\nexposed: {plain * 1e3:.0f} -> {ours * 1e3:.0f} ms, {1 - ours / plain:.0%} less")
    print(f"a step: {result.times['partitioned'].speedup_over(result.times['plain']):.2f} x as fast as plain")
    print(
        f"bytes of {result.dense_bytes}: {result.pieces}; largest relative difference {result.difference:.1e}"
    )
    print(f"link {result.bytes_per_second / 1e6:.1f} MB/s, load {result.load:.1f}")
    return {
        "setting": asdict(setting),
        "rows": rows,
        "exposed_seconds": {"plain": plain, "partitioned": ours},
        "times": {way: timing.as_dict() for way, timing in result.times.items()},
        "predicted": result.predicted,
        "pieces": result.pieces,
        "dense_bytes": result.dense_bytes,
        "largest_relative_difference": result.difference,
        "bytes_per_second": result.bytes_per_second,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--link", choices=("modelled", "real"), default="modelled")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    for name, value in asdict(Setting()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    setting = Setting(**{name: getattr(args, name) for name in asdict(Setting())})
    with tempfile.TemporaryDirectory() as folder:
        result = launch(
            args.ranks, run_rank, link=args.link, rate=INFINITE, args=(setting, args.rounds, folder)
        )
    results = report(result[0], setting)
    if args.json:
        write_json(args.json, **results)


if __name__ == "__main__":
    main()
