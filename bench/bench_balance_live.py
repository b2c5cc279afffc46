"""What do copies of busy experts gain? Measured on 2 ranks behind a modelled link.

    python bench/bench_balance_live.py [--top-k 1] [--rounds 3] [--out build/bench]

Two gloo ranks of one thread each, 16,384 tokens a rank, d_model 256, d_hidden 1024, 8 experts, 4 chunks, in
float32. `pmoe.gates.forced.ForcedGate` sends 30 to 95 % of the rows to one expert, or to two experts of one
rank. The link is so slow that all messages of a balanced forward pass take as long as its computation, or a
third of that. Three layers are compared in turns:

    balanced  every expert gets equally many rows
    without   the skewed load
    with      the skewed load and balance=True

`bench/bench_balance.py` simulates larger machines.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.links import INFINITE, Link, launch
from bench.timing import OUT, interleaved, table, write_json
from pmoe.gates import TopKGate
from pmoe.gates.forced import ForcedGate
from pmoe.measure.profile import PROFILES

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

    def layer(self, busy: tuple[int, ...], share: float | None, balance: bool) -> pmoe.MoELayer:
        """Returns a layer whose busy experts get a share of the rows; () for an even load."""
        torch.manual_seed(0)
        gate = ForcedGate(
            TopKGate(self.d_model, self.num_experts, self.top_k), self.num_experts, busy=busy, share=share
        )
        return pmoe.MoELayer(
            self.d_model,
            self.d_hidden,
            self.num_experts,
            self.top_k,
            gate=gate,
            pipeline=self.n,
            balance=balance,
        )

    @property
    def loads(self) -> list[tuple[str, tuple[int, ...], float | None]]:
        """The skewed loads: a name, the busy experts and their share. The last load is even."""
        loads: list[tuple[str, tuple[int, ...], float | None]] = []
        for share in SHARES:
            if share * self.top_k <= 1:  # a token's experts are distinct
                loads.append((f"{share:.0%} to one expert", (0,), share))
            if share > 0.5:
                loads.append((f"{share:.0%} to two experts", (0, 1), share))
        return [*loads, ("even", (), None)]


def step(layer: pmoe.MoELayer, x: torch.Tensor, dy: torch.Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    layer(x).backward(dy)


def run_rank(link: Link, setting: Setting, cache: str) -> list[dict[str, Any]]:
    """Returns the seconds of each load on each link, the same on both ranks."""
    os.environ["PMOE_CACHE"] = cache
    torch.manual_seed(1 + dist.get_rank())
    x, dy = torch.randn(2, setting.tokens, setting.d_model)
    x.requires_grad_()
    balanced = setting.layer((), None, balance=False)
    link.set_rate(INFINITE)

    def forward() -> None:
        with torch.no_grad():
            balanced(x)

    computing = interleaved({"forward": forward}, rounds=3)["forward"].median
    row_bytes = 4 * setting.d_model
    results = []
    for relative in setting.links:
        rate = 2 * setting.tokens * setting.top_k / 2 * row_bytes / (relative * computing)
        link.set_rate(rate)
        PROFILES.clear()
        for name, busy, share in setting.loads:
            layers = {
                "balanced": balanced,
                "without": setting.layer(busy, share, balance=False),
                "with": setting.layer(busy, share, balance=True),
            }
            runs = {of: (lambda layer=layer: step(layer, x, dy)) for of, layer in layers.items()}
            timings = interleaved(runs, rounds=setting.rounds)
            seconds = {of: timing.median for of, timing in timings.items()}
            ran = layers["with"].ran
            assert ran is not None and ran.balance is not None
            counts = layers["with"].row_counts
            assert counts is not None
            rows = torch.zeros(2)
            rows[dist.get_rank()] = counts.recv.sum()
            dist.all_reduce(rows)
            results.append(
                {
                    "link": round(relative, 2),
                    "load": name,
                    **{f"{of}_s": value for of, value in seconds.items()},
                    "with_over_balanced": seconds["with"] / seconds["balanced"],
                    "without_over_with": timings["with"].speedup_over(timings["without"]),
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
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    links = [link for link in LINKS if arguments.link in (None, round(link, 2))]
    setting = Setting(
        top_k=arguments.top_k, rounds=arguments.rounds, tokens=arguments.tokens, links=tuple(links)
    )
    with tempfile.TemporaryDirectory() as cache:  # profiles of the modelled link are no one else's
        results, _ = launch(
            2, run_rank, link="modelled", rate=INFINITE, args=(setting, cache), timeout_seconds=1800
        )
    shown = [{key: value for key, value in result.items() if key != "samples"} for result in results]
    print(table(shown))
    of_link = "" if arguments.link is None else f"_link_{arguments.link:g}".replace(".", "")
    write_json(
        arguments.out / f"balance_live_top{setting.top_k}{of_link}.json",
        setting=asdict(setting),
        results=results,
    )


if __name__ == "__main__":
    main()
