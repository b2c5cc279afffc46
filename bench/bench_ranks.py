"""What does a call cost a rank's host, by the number of ranks?

    python bench/bench_ranks.py [--ranks 8 64 512 4096] [--rounds 5] [--calls 5]

Only one of W ranks exists. A stand-in for the group has collectives that return at once
(`bench.links.alike`), so what is measured is this rank's own work. 4,096 tokens, d_model 16, d_hidden 32, one
expert a rank, top-2, even routing, n = 4, one thread.

    milliseconds   CPU time of the calling thread: the median over the rounds of a round's median call
    counts         bytes of counts beside the bytes of the rows, if these had 4,096 columns of two bytes
    bookkeeping    bytes of Python objects that a forward leaves for its backward, and of the kept row counts

Each number of ranks has a process of its own, and all have a turn in each round.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import truediv
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.links import alike
from bench.timing import OUT, counted, table, write_json

TOKENS, D_MODEL, D_HIDDEN, TOP_K, N = 4096, 16, 32, 2, 4
WIDE, WIDE_BYTES = 4096, 2
"""Number of columns, and bytes of an element, of the rows to which the bytes of counts are compared."""

CASES: dict[str, dict[str, Any]] = {"no reuse": {}, "S4": {"memory_reuse": "S4"}}


class Subject:
    """One layer on rank 0 of W ranks, of which only this one exists."""

    def __init__(self, num_ranks: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.gate = pmoe.gates.ExternalGate()
        self.layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, num_ranks, TOP_K, gate=self.gate, pipeline=N, **options)
        self.x, self.dy = torch.randn(TOKENS, D_MODEL, requires_grad=True), torch.randn(TOKENS, D_MODEL)
        self.expert_TK = torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % num_ranks
        self.weight_TK = torch.full((TOKENS, TOP_K), 1 / TOP_K)

    def step(self) -> dict[str, float]:
        """Returns the milliseconds of both passes."""
        with self.gate.routing(self.expert_TK, self.weight_TK):
            forward, y = timed(lambda: self.layer(self.x))
        backward, _ = timed(lambda: y.backward(self.dy))
        return {"forward": forward, "backward": backward}

    def bytes_of(self) -> dict[str, int]:
        """Runs one step. Returns the bytes of row counts that it sends, and of its bookkeeping.

        bookkeeping: bytes of Python objects that forward leaves for backward, and of the row counts that the
            layer keeps.
        """
        before = self.layer.traffic.counts
        tracemalloc.start()
        with self.gate.routing(self.expert_TK, self.weight_TK):
            y = self.layer(self.x)
        objects, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        y.backward(self.dy)
        kept = [tensor for tensor in vars(self.layer.row_counts).values() if isinstance(tensor, torch.Tensor)]
        return {
            "counts": self.layer.traffic.counts - before,
            "bookkeeping": objects + sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values()),
        }


def timed(run: Any) -> tuple[float, Any]:
    begin = time.thread_time()
    result = run()
    return 1e3 * (time.thread_time() - begin), result


# ---- in the process of one number of ranks


def prepare(num_ranks: int) -> None:
    torch.set_num_threads(1)
    alike.start(num_ranks)


@functools.cache
def subject(case: str) -> Subject:
    made = Subject(dist.get_world_size(), **CASES[case])
    for _ in range(3):
        made.step()
    return made


def median_step(case: str, calls: int) -> dict[str, float]:
    steps = [subject(case).step() for _ in range(calls)]
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def bytes_of(case: str) -> dict[str, int]:
    return subject(case).bytes_of()


# ---- in the process that compares


def measure(ranks: list[int], rounds: int, calls: int) -> list[dict[str, Any]]:
    """Returns one row of the table for each case and number of ranks. Ratios are medians over the rounds."""
    pools = {
        num_ranks: ProcessPoolExecutor(1, get_context("spawn"), initializer=prepare, initargs=(num_ranks,))
        for num_ranks in ranks
    }
    rows = []
    for case in CASES:
        steps: dict[int, list[dict[str, float]]] = {num_ranks: [] for num_ranks in ranks}
        for _ in counted(range(rounds), f"{case}, round"):
            for num_ranks, pool in pools.items():
                steps[num_ranks].append(pool.submit(median_step, case, calls).result())
        for num_ranks, pool in pools.items():
            row: dict[str, Any] = {"layer": case, "ranks": num_ranks}
            for name in ("forward", "backward"):
                own, first = ([step[name] for step in steps[world]] for world in (num_ranks, ranks[0]))
                row[f"{name} ms"] = statistics.median(own)
                row[f"{name} over W={ranks[0]}"] = statistics.median(map(truediv, own, first))
            num_bytes = pool.submit(bytes_of, case).result()
            of_rows = TOKENS * TOP_K * WIDE * WIDE_BYTES
            row |= {
                "counts KiB": num_bytes["counts"] / 1024,
                "% of rows": 100 * num_bytes["counts"] / of_rows,
            }
            rows.append(row | {"bookkeeping KiB": num_bytes["bookkeeping"] / 1024})
    for pool in pools.values():
        pool.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=7, help="of each layer in a round")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    args = parser.parse_args()
    rows = measure(args.ranks, args.rounds, args.calls)
    print(table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "ranks.json", rows=rows, rounds=args.rounds, calls=args.calls)
    print(f"wrote {args.out / 'ranks.json'}")


if __name__ == "__main__":
    main()
