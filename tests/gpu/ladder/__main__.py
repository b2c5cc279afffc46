"""``python -m tests.gpu.ladder [--out FOLDER] [--only NAME] [--patience N]``: all steps, and one report."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.gpu.ladder import report
from tests.gpu.ladder.climb import ROOT, WALL_SECONDS, climb
from tests.gpu.ladder.step import WRONG, Outcome, Step, check_steps
from tests.gpu.ladder.steps import all_steps


def main(words: Sequence[str] | None = None) -> int:
    """1 where a step went wrong, or nothing at all could be tried."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.ladder", description=__doc__)
    given = os.environ.get("OUT")
    default = Path(given) / "gpu_ladder" if given else ROOT / "build" / "gpu_ladder"
    parser.add_argument("--out", type=Path, default=default, help="the report's folder (%(default)s)")
    parser.add_argument("--only", default="", help="steps whose names hold this, and what these need")
    parser.add_argument("--patience", type=float, default=1, help="multiplies each step's limit")
    options = parser.parse_args(words)
    if not options.patience >= 1:  # NaN, too
        parser.error(f"--patience ({options.patience}) must be at least 1")
    names = [each.name for each in all_steps()]
    if not any(options.only in name for name in names):
        parser.error(f"--only ({options.only!r}) must be a part of a step's name: {', '.join(names)}")
    steps = [replace(each, seconds=each.seconds * options.patience) for each in all_steps()]
    check_steps(steps)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the step is ended, too
    return run(chosen(steps, options.only), options.out)


def chosen(steps: Sequence[Step], only: str) -> list[Step]:
    """With all that they need."""
    wanted: set[str] = set()
    for each in reversed(steps):
        if only in each.name or each.name in wanted:
            wanted |= {each.name, *each.needs}
    return [each for each in steps if each.name in wanted]


def run(steps: Sequence[Step], out: Path) -> int:
    began, outcomes = time.monotonic(), list[Outcome]()
    machine = report.facts(ROOT)

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(report.line(outcome), flush=True)
        report.write(out, machine, outcomes, time.monotonic() - began)

    spent = time.monotonic() - began
    hopper = machine.get("path") == "sm_90a"
    climb(steps, gpus=len(machine["gpus"]), hopper=hopper, wall=WALL_SECONDS - spent, tell=tell)
    print(report.summary(outcomes, time.monotonic() - began), out / "report.txt", sep="\n")
    wrong = any(each.state in WRONG for each in outcomes)
    return int(wrong or not any(each.state == "passed" for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
