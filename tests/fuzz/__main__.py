"""Runs the fuzzer for long: python -m tests.fuzz --cases 10000"""

from __future__ import annotations

import argparse
import os
import random
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.fuzz.run import fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--refusals", action="store_true", help="also print what was refused, and how often")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    try:
        counted = fuzz(given.cases, given.seed, told=lambda text: print(text, flush=True))
    except AssertionError as error:
        sys.exit(f"{error}\nseed {given.seed}")
    print(f"{counted.pop('played')} played, {counted.pop('refused', 0)} refused")
    for text, number in counted.most_common() if given.refusals else ():
        print(f"{number:6d} {text}")


if __name__ == "__main__":
    main()
