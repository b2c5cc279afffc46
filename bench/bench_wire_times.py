"""How long does a layer take behind a slow link if its rows are sent in fewer bytes?

    python bench/bench_wire_times.py

2 CPU ranks, one thread each, behind a modelled link. The link is so slow that both all-to-alls of a forward
pass, of rows as they are, take --ratio times as long as the pass without a link. With 4, the messages of a
forward pass take four times its computation, and those of a backward pass about twice. The layers take turns.
For each, the table has the seconds of a forward pass and of a step, beside those of the layer that sends rows
as they are, and the share of its bytes (the bound of a step in which nothing but the link takes time).
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.links import INFINITE, launch
from bench.timing import OUT, Timing, interleaved, table, write_json

PLAIN = "as they are"
BOTH = {"wire": "e4m3", "wire_backward": "e4m3"}
FORMS: dict[str, dict[str, dict[str, str]]] = {
    "bfloat16": {
        PLAIN: {},
        "wire": {"wire": "e4m3"},
        "wire, wire_backward": BOTH,
        "all three in e4m3": {**BOTH, "wire_combine": "e4m3"},
    },
    "float32": {
        PLAIN: {},
        "wire, wire_backward": BOTH,
        "both, and wire_combine in bfloat16": {**BOTH, "wire_combine": "bfloat16"},
    },
}
"""The arguments of a layer, which say how its rows are sent, by the dtype of the layer and by a name."""


@dataclass(frozen=True)
class Setting:
    """Sizes of the layer and of the batch.

    tokens: those of each rank.
    ratio: seconds of the all-to-alls of a forward pass over its seconds without a link.
    """

    tokens: int = 4096
    d_model: int = 512
    d_hidden: int = 1024
    num_experts: int = 8
    top_k: int = 1
    pipeline: int = 4
    ratio: float = 4.0


def run_rank(link: Any, setting: Setting, dtype: str, rounds: int) -> dict[str, Any]:
    """Times all forms of a dtype. Returns the seconds of each pass and the bytes of a step, by form."""
    layers = {}
    for name, options in FORMS[dtype].items():
        torch.manual_seed(0)
        layers[name] = pmoe.MoELayer(
            setting.d_model,
            setting.d_hidden,
            setting.num_experts,
            setting.top_k,
            pipeline=setting.pipeline,
            dtype=getattr(torch, dtype),
            **options,
        )
    torch.manual_seed(1 + dist.get_rank())
    x, dy = torch.randn(2, setting.tokens, setting.d_model).to(getattr(torch, dtype))
    x.requires_grad_()

    def forward(layer: pmoe.MoELayer) -> Tensor:
        y: Tensor = layer(x)
        return y

    def step(layer: pmoe.MoELayer) -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        forward(layer).backward(dy)

    @torch.no_grad()
    def evaluate(layer: pmoe.MoELayer) -> None:
        forward(layer)

    def timed(run: Any) -> dict[str, Timing]:
        return interleaved({name: functools.partial(run, layer) for name, layer in layers.items()}, rounds)

    alone = interleaved({PLAIN: functools.partial(evaluate, layers[PLAIN])}, rounds)[PLAIN].median
    traffic = layers[PLAIN].traffic
    before = traffic.rows
    evaluate(layers[PLAIN])
    link.set_rate((traffic.rows - before) / (setting.ratio * alone))
    sent = {}
    for name, layer in layers.items():
        link.reset_bytes_sent()
        step(layer)
        sent[name] = link.bytes_sent
    return {"alone": alone, "forward": timed(evaluate), "step": timed(step), "bytes": sent}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratio", type=float, default=Setting.ratio)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON")
    args = parser.parse_args()
    setting = Setting(ratio=args.ratio)
    rows = []
    for dtype in FORMS:
        found = launch(2, run_rank, "modelled", INFINITE, (setting, dtype, args.rounds), timeout_seconds=600)[
            0
        ]
        for name in FORMS[dtype]:
            rows.append(
                {
                    "rows": dtype,
                    "arguments": name,
                    "forward ms": found["forward"][name].median * 1e3,
                    "forward / as they are": 1 / found["forward"][name].speedup_over(found["forward"][PLAIN]),
                    "step ms": found["step"][name].median * 1e3,
                    "step / as they are": 1 / found["step"][name].speedup_over(found["step"][PLAIN]),
                    "bytes / as they are": found["bytes"][name] / found["bytes"][PLAIN],
                    "forward without a link ms": found["alone"] * 1e3,
                }
            )
    print(setting)
    print(table(rows))
    path = args.out / "wire_times.json"
    write_json(path, setting=asdict(setting), rounds=args.rounds, rows=rows)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
