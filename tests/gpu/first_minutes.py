"""What to know first of a GPU, in ten minutes: ``python -m tests.gpu.first_minutes [--out FOLDER]``.

Each part is a process of its own with a limit, and a JSON file after it. What is most wanted comes first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu.ladder import report
from tests.gpu.ladder.climb import ROOT, end
from tests.gpu.ladder.step import FAILED, HUNG, NOT_RUN, PASSED

WALL_SECONDS = 600.0
TOLD = 6000
LEAST = 5.0
"""Seconds below which no part is begun."""


@dataclass(frozen=True)
class Part:
    """One part. command: what Python gets. seconds: its limit. answers: the question. variables: beside the
    environment's."""

    name: str
    command: tuple[str, ...]
    seconds: float
    answers: str
    variables: tuple[tuple[str, str], ...] = ()


POOL = ("specification", "streams", "reuse", "parallelize", "faults")
"""The files of tests/gloo that come first over NCCL."""


def all_parts(out: Path) -> list[Part]:
    """In their order. out: the folder of files that parts write themselves."""
    pytest = ("-m", "pytest", "-q", "-o", "timeout_method=thread", "-m", "not slow and not nightly")
    folder = str(out)
    return [
        Part(
            "costs", ("-m", "tests.gpu.first_costs", str(out / "launch_costs.json")), 30,
            "what does the host pay for a launch, an event, a collective?",
        ),
        Part(
            "traces", ("-m", "tests.gpu.first_traces", folder), 60,
            "where does the device wait for the host, with chunks and with offloading?",
        ),
        Part(
            "nccl", ("-m", "tests.gpu.ladder", "--only", "NCCL, ", "--out", str(out / "ladder")), 100,
            "does NCCL do what the engine asks of it, by 2 and 4 ranks?",
            (("NCCL_DEBUG", "WARN"),),
        ),
        Part(
            "pool", (*pytest, *(f"tests/gloo/test_{each}.py" for each in POOL)), 105,
            "are the results of several ranks on CUDA those of the definition?",
            (("PMOE_TESTS_BACKEND", "nccl"),),
        ),
        Part(
            "bounded", ("-m", "tests.gpu.first_bounded", str(out / "bounded.json")), 40,
            "what does the host pay for a replay of both passes of a layer, on 2 ranks?",
        ),
        Part(
            "grouped_gemm", ("bench/bench_grouped_gemm.py", "--rounds", "5", "--out", folder), 90,
            "do blocks share B, and are rows gathered in the load, where it is faster?",
        ),
        Part(
            "shapes", ("-m", "tests.gpu.first_shapes", folder), 105,
            "what do SonicMoE's seven shapes take, beside the plain grouped layer?",
        ),
        Part(
            "wire", ("-m", "tests.gpu.first_wire", str(out / "wire.json")), 20,
            "are messages in e4m3 those of the CPU to the bit, and how fast are they packed?",
        ),
        Part(
            "flashdmoe", ("bench/bench_flashdmoe.py", "--rounds", "3", "--out", folder), 50,
            "what does the persistent kernel take now that it is one launch?",
        ),
    ]  # fmt: skip


def run(
    parts: Sequence[Part],
    out: Path,
    *,
    wall: float = WALL_SECONDS,
    facts: Callable[[], dict[str, Any]] = lambda: report.facts(ROOT, 20),
) -> int:
    """Runs all parts. Returns 1 if one did not pass, else 0.

    wall: seconds of all parts together. facts: describes the machine.
    """
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    machine = facts()
    states = []
    for number, part in enumerate(parts):
        left = wall - (time.monotonic() - began)
        found = take(part, min(part.seconds, left)) if left >= LEAST else {"state": NOT_RUN, "seconds": 0.0}
        states.append(found["state"])
        content = {"part": asdict(part), **found, "machine": machine}
        (out / f"{number}_{part.name}.json").write_text(json.dumps(content, indent=1) + "\n")
        print(f"{found['state']:8} {found['seconds']:5.1f} s  {part.name}: {part.answers}", flush=True)
    return int(any(state != PASSED for state in states))


def take(part: Part, seconds: float) -> dict[str, Any]:
    """One part, to its end or its limit: its state, seconds, exit code and the end of what it printed."""
    environment = {
        **os.environ, **dict(part.variables), "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    began = time.monotonic()
    # A file: a pipe's end may outlive the part.
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            [sys.executable, *part.command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
            stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # the ladder ends its own step
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
        finally:
            end(process)
        printed.seek(0)
        told = printed.read()[-TOLD:]
    state = HUNG if code is None else PASSED if code == 0 else FAILED
    return {"state": state, "seconds": round(time.monotonic() - began, 1), "code": code, "printed": told}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.first_minutes", description=__doc__)
    given = os.environ.get("OUT")
    default = Path(given) / "gpu_first" if given else ROOT / "build" / "gpu_first"
    parser.add_argument("--out", type=Path, default=default, help="the folder of the files (%(default)s)")
    out = parser.parse_args(words).out.resolve()
    return run(all_parts(out), out)


if __name__ == "__main__":
    sys.exit(main())
