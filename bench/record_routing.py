"""Records what the gates of `make train`'s model choose, for bench/bench_balance_live.py.

    python bench/record_routing.py [--skip 30] [--calls 8] [--out build/bench/routing] [ARGS of train_lm.py]

One process trains the model of examples/train_lm.py, whose data must be there (`make train` fetches it). The
first steps are not recorded; of the next steps, every MoE layer's choices are written to the folder, with
`pmoe.record_routing`. A step of 32 sequences has 4,096 tokens, so 8 steps have the 16,384 tokens of each of 2
ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import train_lm
from lm_arguments import parse_arguments
from lm_ranks import start_ranks, stop_ranks

import pmoe
from bench.timing import OUT


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--skip", type=int, default=30, help="steps before the recording")
    parser.add_argument("--calls", type=int, default=8, help="steps to record")
    parser.add_argument("--out", type=Path, default=OUT / "routing")
    own, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = ["--out", folder, *rest]
        arguments = parse_arguments()
        ranks = start_ranks(arguments.timeout)
        try:
            run = train_lm.begin(arguments, ranks)

            def steps(count: int) -> None:
                for _ in range(count):
                    print(f"step {run.step}: loss {train_lm.train_step(run, False).loss:.3f}", flush=True)
                    run.step += 1

            steps(own.skip)
            with pmoe.record_routing(run.model, own.out):
                steps(own.calls)
        finally:
            stop_ranks()
    for name, calls in pmoe.read_routing(own.out).items():
        rows = sum(call.flatten().bincount(minlength=arguments.num_experts) for call in calls)
        of_ranks = rows.view(2, -1).sum(1)
        uneven = float(of_ranks.max() / of_ranks.double().mean())
        print(f"{name}: busiest expert {float(rows.max() / rows.double().mean()):.2f} x, rank {uneven:.2f} x")


if __name__ == "__main__":
    main()
