"""Does a model learn as well if its rows are sent in e4m3? The model of `make train`, with and without.

    python bench/bench_wire.py [--steps 1200] [--out build/bench]

2 ranks with one thread each, one run for each form: rows as they are, and rows and backward's gradients in
e4m3. Everything else is as in `make train`, but for a fixed number of chunks, so that all runs have the same.
It prints and stores the held-out loss at the end, and draws the curves of all runs. The losses do not depend
on how busy the machine is. On two idle cores it takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.bench_train_lm import LAUNCH
from bench.pictures import plotting
from bench.timing import OUT, ROOT, counted, table, write_json

FORMS = {
    "as they are": [],
    "e4m3, both passes": ["--wire", "e4m3", "--wire-backward", "e4m3"],
}
"""Options of train_lm.py by the form in which rows are sent. The first entry is the reference."""


def train(options: list[str]) -> dict[str, Any]:
    """Trains the model, and returns what rank 0 wrote to metrics.json."""
    with tempfile.TemporaryDirectory(prefix="pmoe-lm-") as folder:
        command = [sys.executable, "examples/lm_launch.py", *LAUNCH, "--out", folder, "--pipeline", "2"]
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"bench_wire: training ended with {done.returncode}: {done.stderr[-2000:]}")
        metrics: dict[str, Any] = json.loads((Path(folder) / "metrics.json").read_text())
    return metrics


def draw(path: Path, histories: dict[str, dict[str, Any]]) -> None:
    """Draws the held-out loss of each run over the bytes that it was trained on.

    histories: the curves of each run, by its name.
    """
    pyplot = plotting()
    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    for (name, history), style in zip(histories.items(), ("-", "--", ":"), strict=False):
        axes.plot(history["valid_bytes"], history["valid_loss"], style, marker="o", label=name)
    axes.set(xlabel="bytes trained on", ylabel="held-out loss, nats a byte")
    axes.legend(title="rows are sent")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    args = parser.parse_args()
    steps = ["--steps", str(args.steps), "--warmup", str(min(100, args.steps // 4))]
    metrics = {
        name: train([*steps, "--eval-every", str(max(1, args.steps // 12)), *FORMS[name]])
        for name in counted(list(FORMS), "form")
    }
    losses = {name: float(each["summary"]["valid_loss"]) for name, each in metrics.items()}
    exact = next(iter(losses.values()))
    rows = [
        {"rows are sent": name, "steps": args.steps, "held-out loss": loss, "over the first": loss / exact}
        for name, loss in losses.items()
    ]
    print(table(rows))
    histories = {name: each["history"] for name, each in metrics.items()}
    write_json(args.out / "wire_training.json", rows=rows, histories=histories)
    draw(args.out / "wire_training.png", histories)
    print(f"wrote {args.out / 'wire_training.json'} and wire_training.png")


if __name__ == "__main__":
    main()
