"""The language model of `make train` with experts and without: what it learns, and what memory it holds.

    python bench/bench_train_lm.py [--steps 1200] [--out build/bench]

2 ranks with one thread each. Everything else is as in `make train` and `make train ARGS=--dense`. Resident
memory is the larger of both ranks', at some steps. It takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.timing import OUT, ROOT, Progress, table, write_json

MODELS = {"32 experts, top-2": [], "dense": ["--dense"]}
LAUNCH = ["--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=2", "examples/train_lm.py"]
STEP = re.compile(r"step (\d+)/\d+")
DONE = re.compile(
    r"done: (\d+) steps.* loss ([\d.]+) nats, ([\d.]+) bits/byte, (\d+) s, peak memory (\d+) MiB"
)


def train(steps: int, options: list[str]) -> dict[str, Any]:
    """Trains the model, and returns the numbers of the last line that rank 0 printed.

    "resident" in the result is the resident memory in MiB of the larger rank, by step.
    """
    resident: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="pmoe-lm-") as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "examples/lm_launch.py", *LAUNCH, "--steps", str(steps), "--out", folder]
        with log.open("w") as output:
            launcher = subprocess.Popen(
                [*command, *options], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                progress = Progress()
                while launcher.poll() is None:
                    time.sleep(2)
                    seen, sizes = STEP.findall(log.read_text()), _resident_of_children(launcher.pid)
                    progress.at(f"step {seen[-1] if seen else 0} of {steps}")
                    if seen and len(sizes) == 2:
                        resident[int(seen[-1])] = max(sizes)
            finally:
                launcher.terminate()  # it ends its ranks too
        last_line = DONE.search(log.read_text())
    if last_line is None:
        sys.exit(f"bench_train_lm: training ended with {launcher.returncode} and without its last line")
    taken, loss, bits, seconds, peak = map(float, last_line.groups())
    return {
        "steps": int(taken),
        "validation loss": loss,
        "bits a byte": bits,
        "seconds": seconds,
        "peak MiB": peak,
        "resident MiB": resident,
    }


def _resident_of_children(launcher: int) -> list[float]:
    """Returns the resident memory in MiB of each process that the launcher has started (Linux)."""
    sizes = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except OSError:  # the process has ended meanwhile
            continue
        if int(fields["PPid"]) == launcher and "VmRSS" in fields:
            sizes.append(int(fields["VmRSS"].split()[0]) / 1024)
    return sizes


def growth(resident: dict[int, float], after: int = 200) -> float | None:
    """Returns (memory at the last step) / (memory at the first step from step ``after`` on).

    resident: resident memory by step. Returns None if there is no step from ``after`` on.
    """
    seen = [size for step, size in sorted(resident.items()) if step >= after]
    return seen[-1] / seen[0] if seen else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    args = parser.parse_args()
    rows = []
    for model, options in MODELS.items():
        result = train(args.steps, options)
        rows.append({"model": model, "resident after 200": growth(result["resident MiB"]), **result})
        print(f"{model}: {result['validation loss']} nats after {result['seconds']:.0f} s", flush=True)
    print(table([{name: value for name, value in row.items() if name != "resident MiB"} for row in rows]))
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "train_lm.json", rows=rows)
    print(f"wrote {args.out / 'train_lm.json'}")


if __name__ == "__main__":
    main()
