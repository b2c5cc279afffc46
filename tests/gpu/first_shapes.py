"""SonicMoE's seven shapes by bench/bench_alone.py: ``python -m tests.gpu.first_shapes FOLDER``."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import bench_alone
from bench.bench_alone import SHAPES, Scenario
from bench.timing import table, write_json

ROUNDS = 5

Measure = Callable[[Scenario], tuple[dict[str, Any], list[dict[str, Any]]]]


def measure(scenario: Scenario) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    step = bench_alone.Step(scenario)
    with bench_alone.with_kernels():
        why = bench_alone.refusal(step)
    if why is not None:
        raise RuntimeError(f"the kernels do not compute this layer: {why}")
    found = bench_alone.measure(step, scenario, ROUNDS)
    del step
    torch.cuda.empty_cache()
    return found


def run(file: Path, machine: dict[str, Any], measure: Measure = measure) -> int:
    """Measures each shape, and writes all results so far after it. Returns how many shapes failed.

    A shape that fails has its error in the place of results.
    """
    shapes: dict[str, dict[str, Any]] = {}
    failed = 0
    for name, scenario in SHAPES.items():
        try:
            document, rows = measure(scenario)
            shapes[name] = {**document, "rows": rows}
            print(f"{name}\n{table(rows)}", flush=True)
        except (Exception, SystemExit) as error:  # bench_alone ends so where results differ
            failed += 1
            shapes[name] = {"scenario": asdict(scenario), "error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        write_json(file, **machine, rounds=ROUNDS, shapes=shapes)
    return failed


def main(words: Sequence[str]) -> int:
    from bench.device import show_gpu

    return int(run(Path(words[0]) / "sonic_shapes.json", show_gpu()) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
