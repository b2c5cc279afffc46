"""How much less is sent if a token goes only once to a rank that holds several of its experts?

    python bench/bench_send_once.py                  # top_k = 8 of 64 experts
    python bench/bench_send_once.py --top-k 2 --num-experts 8

4 gloo ranks with an untrained gate, so that a token's experts are random. It prints the bytes that all ranks
send in forward and in backward with `MoELayer(send_once=True)` and without it: of rows, and of scalars
(routing weights, their gradients, and the rows' owners). Beside the measured ratio stands the expected one,
and the largest difference between both outputs and between both gradients of the input.

Expected rows that a token sends to other ranks:

    without send_once   K (1 - 1 / W)
    with send_once      (W - 1) (1 - C(E - E / W, K) / C(E, K)): one row to each rank that has any of them
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.links import INFINITE, launch
from bench.timing import OUT, counted, table, write_json

SORTS = ("rows", "scalars", "counts")
VARIANTS = ("plain", "send_once")


@dataclass(frozen=True)
class Setting:
    """Sizes of the layer and of the batch.

    tokens: those of each rank.
    """

    tokens: int = 2048
    top_k: int = 8
    num_experts: int = 64
    d_model: int = 256
    d_hidden: int = 64
    ranks: int = 4

    @property
    def row_bytes(self) -> int:
        return 4 * self.d_model

    def expected_rows(self, variant: str) -> float:
        """Returns how many rows a token sends to other ranks, as a mean over all possible choices of experts.

        variant: "send_once" or "plain".
        """
        others = self.ranks - 1
        if variant == "plain":
            return self.top_k * others / self.ranks
        away = self.num_experts - self.num_experts // self.ranks
        return others * (1 - math.comb(away, self.top_k) / math.comb(self.num_experts, self.top_k))


def run_rank(_link: Any, setting: Setting) -> dict[str, Any]:
    """Runs a step of both variants. Returns the bytes that this rank sent, and how much the results differ.

    The bytes are those of each variant, pass and kind of data: "rows", "scalars" or "counts". "differences"
    has the relative differences of the outputs and of the gradients of the input.
    """
    by_variant: dict[str, Any] = {}
    results = {}
    for variant in counted(list(VARIANTS), "variant"):
        torch.manual_seed(0)
        layer = pmoe.MoELayer(
            setting.d_model,
            setting.d_hidden,
            setting.num_experts,
            setting.top_k,
            send_once=variant == "send_once",
        )
        torch.manual_seed(1 + dist.get_rank())
        x, dy = torch.randn(2, setting.tokens, setting.d_model)
        x.requires_grad_()
        before = asdict(layer.traffic)
        y = layer(x)
        between = asdict(layer.traffic)
        y.backward(dy)
        after = asdict(layer.traffic)
        by_variant[variant] = {
            "forward": {sort: between[sort] - before[sort] for sort in SORTS},
            "backward": {sort: after[sort] - between[sort] for sort in SORTS},
        }
        results[variant] = (y.detach(), x.grad)
    by_variant["differences"] = [
        float((ours - plain).norm() / plain.norm())
        for ours, plain in zip(results["send_once"], results["plain"], strict=True)
    ]
    return by_variant


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=Setting.tokens, help="of each rank")
    parser.add_argument("--top-k", type=int, default=Setting.top_k)
    parser.add_argument("--num-experts", type=int, default=Setting.num_experts)
    parser.add_argument("--d-model", type=int, default=Setting.d_model)
    parser.add_argument("--ranks", type=int, default=Setting.ranks)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON")
    args = parser.parse_args()
    setting = Setting(
        tokens=args.tokens,
        top_k=args.top_k,
        num_experts=args.num_experts,
        d_model=args.d_model,
        ranks=args.ranks,
    )
    if setting.ranks < 2 or setting.num_experts % setting.ranks:
        parser.error(f"--ranks ({setting.ranks}) must be at least 2 and divide --num-experts")
    ranks = launch(setting.ranks, run_rank, "modelled", INFINITE, (setting,), timeout_seconds=300)
    total = {
        variant: {
            direction: {sort: sum(rank[variant][direction][sort] for rank in ranks) for sort in SORTS}
            for direction in ("forward", "backward")
        }
        for variant in VARIANTS
    }
    rows = []
    for direction in ("forward", "backward"):
        for sort in (*SORTS, "total"):
            plain, once = (
                total[variant][direction].get(sort, sum(total[variant][direction].values()))
                for variant in VARIANTS
            )
            rows.append(
                {
                    "pass": direction,
                    "bytes of": sort,
                    **dict(zip(VARIANTS, (plain, once), strict=True)),
                    "ratio": once / plain if plain else None,
                }
            )
    expected = setting.expected_rows("send_once") / setting.expected_rows("plain")
    sent = {
        variant: sum(counts["rows"] for counts in total[variant].values())
        / (2 * 2 * setting.row_bytes * setting.tokens * setting.ranks)
        for variant in VARIANTS
    }
    ratio = sent["send_once"] / sent["plain"]
    print(f"{setting.ranks} ranks, {setting}")
    print(table(rows))
    print(
        f"rows that a token sends one way: plain {sent['plain']:.4f} (expected "
        f"{setting.expected_rows('plain'):.4f}), once {sent['send_once']:.4f} (expected "
        f"{setting.expected_rows('send_once'):.4f}); ratio {ratio:.4f} (expected {expected:.4f})"
    )
    differences = {
        name: max(rank["differences"][i] for rank in ranks) for i, name in enumerate(("output", "dx"))
    }
    print("relative difference of the results: " + ", ".join(f"{k} {v:.1e}" for k, v in differences.items()))
    path = args.out / "send_once.json"
    write_json(
        path,
        setting=asdict(setting),
        bytes=total,
        rows=rows,
        rows_a_token=sent,
        expected_rows_a_token={variant: setting.expected_rows(variant) for variant in VARIANTS},
        ratio=ratio,
        expected_ratio=expected,
        relative_difference=differences,
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
