"""What do routing and ordering cost beside a layer's forward pass, for each gate?

    python bench/bench_gates.py --threads 2

Three things are timed. The gate decides. `count_rows` and `sort_rows` order its rows. `SortedOrder` gathers
the rows in that order and sums each token's rows again, into memory that exists before, as in a layer's
passes.

The goal is for all three together: at most TARGET of a forward pass of the plain top-1 layer of the same
size. Without gradients, on one rank, n = 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.timing import Timing, interleaved, table, write_json
from pmoe.gates import GATES, Gate, Routing
from pmoe.ordering.sorted import SortedOrder, SortedRows, Tokens, count_rows, sort_rows

TARGET = 0.05
"""Goal: the time of gate and ordering is at most this fraction of the layer's forward."""


@dataclass(frozen=True)
class Setting:
    """Sizes of layer and batch: T, M, H, E, K of docs/how_it_works.md."""

    tokens: int = 8192
    d_model: int = 1024
    d_hidden: int = 4096
    num_experts: int = 64
    top_k: int = 1


def build(name: str, setting: Setting) -> Gate:
    """Returns the gate that `MoELayer(gate=name)` would have, in training mode."""
    capacity = {"capacity_factor": 1.25} if name == "batch_prioritised" else {}
    return GATES[name](setting.d_model, setting.num_experts, setting.top_k, **capacity)


def route(gate: Gate, x: Tensor) -> Routing:
    if gate.needs_token_ids:
        return gate(x, torch.arange(x.shape[0]))
    return gate(x)


def order(routing: Routing, num_tokens: int, num_experts: int) -> SortedRows:
    """Returns the slots of a routing in sorted order; dropped slots come last. A slot is a (token, choice)
    pair.
    """
    local = range(0, num_experts)
    tokens = Tokens(routing.expert.shape[0] if routing.token is None else num_tokens, routing.token)
    count_rows(routing.expert, routing.keep, 1, num_experts, tokens)
    return sort_rows(routing.expert, routing.keep, 1, num_experts, local, 1, tokens)


class ThereAndBack:
    """Gathers rows for the experts and sums each token's rows, as in a layer whose experts change nothing."""

    def __init__(self, routing: Routing, x: Tensor, order: SortedRows) -> None:
        top_k = routing.expert.shape[1]
        self.routing, self.x, self.order = routing, x, order
        self.token = order.slot if top_k == 1 else order.slot // top_k
        if routing.token is not None:
            self.token = routing.token[order.slot]
        self.row = order.position.view(-1, top_k)
        size = routing.expert.shape[0] if routing.mix is not None else x.shape[0]
        self.rows, self.out = x.new_empty(order.slot.numel(), x.shape[1]), x.new_empty(size, x.shape[1])

    def __call__(self, weighted: bool = False) -> Tensor:
        """Returns the sum of each token's rows, (T, M): T tokens, M = d_model.

        weighted: multiplies each row by its routing weight, which in a layer the experts do.
        """
        mix, routing = self.routing.mix, self.routing
        x = self.x if mix is None else mix.dispatch.t() @ self.x
        SortedOrder().order(x, self.token, self.rows)
        if weighted:
            weight = routing.weight if routing.keep is None else routing.weight * routing.keep
            self.rows.mul_(weight.reshape(-1, 1)[self.order.slot])
        SortedOrder().restore(self.rows, self.row, self.out, routing.token)
        return self.out if mix is None else mix.combine @ self.out


@torch.no_grad()
def check(name: str, setting: Setting) -> None:
    """Raises AssertionError unless the timed code gives the result of a loop over tokens and experts.

    The experts return their input unchanged.
    """
    torch.manual_seed(0)
    small = Setting(tokens=12, d_model=8, d_hidden=8, num_experts=4, top_k=setting.top_k)
    x = torch.randn(small.tokens, small.d_model)
    routing = route(build(name, small), x)
    actual = ThereAndBack(routing, x, order(routing, small.tokens, small.num_experts))(weighted=True)
    expected = torch.zeros_like(x)
    if routing.mix is not None:
        expected = routing.mix.combine @ (routing.mix.dispatch.t() @ x)
    else:
        for row in range(routing.expert.shape[0]):
            token = row if routing.token is None else int(routing.token[row])
            for choice in range(routing.expert.shape[1]):
                if routing.keep is None or routing.keep[row, choice]:
                    expected[token] += routing.weight[row, choice] * x[token]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def runs_of(names: list[str], setting: Setting, x: Tensor) -> dict[str, Callable[[], object]]:
    runs: dict[str, Callable[[], object]] = {}
    for name in names:
        gate = build(name, setting)
        routing = route(gate, x)
        ordered = order(routing, setting.tokens, setting.num_experts)
        runs[f"{name}: gate"] = lambda gate=gate: route(gate, x)
        runs[f"{name}: order"] = lambda routing=routing: order(routing, setting.tokens, setting.num_experts)
        runs[f"{name}: rows"] = ThereAndBack(routing, x, ordered)
    layer = pmoe.MoELayer(setting.d_model, setting.d_hidden, setting.num_experts, setting.top_k)
    runs["layer"] = lambda: layer(x)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gates", nargs="+", default=list(GATES), choices=list(GATES))
    parser.add_argument("--tokens", type=int, default=Setting.tokens)
    parser.add_argument("--d-model", type=int, default=Setting.d_model)
    parser.add_argument("--d-hidden", type=int, default=Setting.d_hidden)
    parser.add_argument("--num-experts", type=int, default=Setting.num_experts)
    parser.add_argument("--top-k", type=int, default=1, help="switch takes part with 1 only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="where to write, such as bench/results/gates.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    setting = Setting(args.tokens, args.d_model, args.d_hidden, args.num_experts, args.top_k)
    names = [name for name in args.gates if name != "switch" or args.top_k == 1]
    for name in names:
        check(name, setting)
    torch.manual_seed(0)
    x = torch.randn(setting.tokens, setting.d_model)
    with torch.no_grad():
        times: dict[str, Timing] = interleaved(runs_of(names, setting, x), args.rounds)
    layer = times["layer"].median
    rows = []
    for name in names:
        parts = {part: times[f"{name}: {part}"].median for part in ("gate", "order", "rows")}
        share = sum(parts.values()) / layer
        rows.append(
            {"gate": name}
            | {f"{part} ms": seconds * 1e3 for part, seconds in parts.items()}
            | {"all / layer": share}
            | {f"within {TARGET:.0%}": "yes" if share <= TARGET else "no"}
        )
    print(f"{setting}, float32, {args.threads} threads, medians of {args.rounds} rounds")
    print(f"forward of the plain top-{setting.top_k} layer: {layer * 1e3:.0f} ms")
    print(table(rows))
    if args.json:
        write_json(args.json, setting=asdict(setting), threads=args.threads, rows=rows, times=times)
        print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
