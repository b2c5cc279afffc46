"""How long does `import pmoe` take, and how long does it take until a layer has computed?

    python bench/bench_import.py                # this clone, in a minute
    python bench/bench_import.py --base DIR     # and another clone, in the same rounds

Each sample is a new Python process, which first imports torch. Three moments are timed, each from the
beginning of `import pmoe`:

    import    pmoe is imported
    layer     pmoe.MoELayer is read, which imports what a layer needs
    step      a small layer is built, and has computed its first forward and backward pass on the CPU

Python may find compiled files (bytecode) or only sources, so both are measured. In the rounds without
bytecode, Python compiles pmoe's files in every process. torch has bytecode in both.

"ms" is the time on the clock, "CPU ms" the time of a processor, which other work disturbs less.
The last two columns are the medians, over the rounds, of (time of this clone / time of the other clone).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.timing import OUT, ROOT, Timing, counted, table, write_json

MOMENTS = ("import", "layer", "step")

PROGRAM = """
import json
import sys
import time

import torch

torch.set_num_threads(1)
before = set(sys.modules)
modules = []
seconds = []
cpu_seconds = []


def note():
    cpu_seconds.append(time.process_time() - cpu_begin)
    seconds.append(time.perf_counter() - begin)
    modules.append(sum(name.partition(".")[0] == "pmoe" for name in set(sys.modules) - before))


begin = time.perf_counter()
cpu_begin = time.process_time()
import pmoe

note()
pmoe.MoELayer
note()
layer = pmoe.MoELayer(16, 32, num_experts=4, top_k=2)
layer(torch.randn(8, 16, requires_grad=True)).sum().backward()
note()
print(json.dumps({"seconds": seconds, "cpu": cpu_seconds, "modules": modules, "file": pmoe.__file__}))
"""
"""What a process runs: it prints its seconds and the number of pmoe's modules at each of `MOMENTS`."""


@dataclass(frozen=True)
class Variant:
    """The sources of a clone, in a folder of their own.

    name: "this" for the clone of this file, "base" for the other one.
    folder: a folder that contains a copy of the clone's pmoe/.
    has_bytecode: whether Python writes and reads compiled files there.
    """

    name: str
    folder: Path
    has_bytecode: bool

    def sample(self) -> Sample:
        """Runs `PROGRAM` in a new process.

        Raises CalledProcessError if the process fails, and RuntimeError if it imported another pmoe.
        """
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if not self.has_bytecode:
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        # Without the folder of the sources: Python would find the pmoe of that folder first.
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
        done = subprocess.run(
            command, cwd=self.folder.parent, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        printed = json.loads(done.stdout.splitlines()[-1])
        if Path(printed["file"]) != self.folder / "pmoe" / "__init__.py":
            raise RuntimeError(f"the process imported {printed['file']}, not the copy in {self.folder}")
        return Sample(tuple(printed["seconds"]), tuple(printed["cpu"]), tuple(printed["modules"]))


@dataclass(frozen=True)
class Sample:
    """The result of one process at each of `MOMENTS`: seconds, seconds of a processor, pmoe's modules."""

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    modules: tuple[int, ...]


def copy_sources(clone: Path, folder: Path) -> None:
    """Copies pmoe/ of a clone into a folder, without bytecode and without compiled extensions.

    Raises FileNotFoundError if the clone has no pmoe/__init__.py.
    """
    if not (clone / "pmoe" / "__init__.py").is_file():
        raise FileNotFoundError(f"base ({clone}) must be a clone of pmoe: it has no pmoe/__init__.py")
    shutil.copytree(
        clone / "pmoe", folder / "pmoe", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyc")
    )


def variants_in(folder: Path, clones: Mapping[str, Path]) -> list[Variant]:
    """Copies the sources of each clone twice into a folder: for processes with bytecode, and without.

    clones: paths of the clones by name.
    """
    variants = []
    for has_bytecode in (True, False):
        for name, clone in clones.items():
            own = folder / f"{name}-{'bytecode' if has_bytecode else 'sources'}"
            copy_sources(clone, own)
            variants.append(Variant(name, own, has_bytecode))
    return variants


def measure(variants: Sequence[Variant], rounds: int) -> list[list[Sample]]:
    """Returns the samples of each variant: one for each round, after a round that does not count.

    Each round begins with another variant, so that a drift of the machine's speed affects all of them.
    """
    for variant in variants:  # writes bytecode, and brings the files into the page cache
        variant.sample()
    samples: list[list[Sample]] = [[] for _ in variants]
    for turn in counted(range(rounds), "round"):
        for step in range(len(variants)):
            i = (turn + step) % len(variants)
            samples[i].append(variants[i].sample())
    return samples


def rows_of(variants: Sequence[Variant], samples: Sequence[Sequence[Sample]]) -> list[dict[str, Any]]:
    """Returns a row for each moment, with bytecode and without: milliseconds, modules, ratio to the base."""
    rows = []
    for has_bytecode in (True, False):
        taken = {
            variant.name: of_variant
            for variant, of_variant in zip(variants, samples, strict=True)
            if variant.has_bytecode == has_bytecode
        }
        for at, moment in enumerate(MOMENTS):
            times = {name: Timing(tuple(one.seconds[at] for one in each)) for name, each in taken.items()}
            cpu_times = {
                name: Timing(tuple(one.cpu_seconds[at] for one in each)) for name, each in taken.items()
            }
            row: dict[str, Any] = {"bytecode": "yes" if has_bytecode else "no", "moment": moment}
            for name, each in taken.items():
                row[f"{name} ms"] = times[name].median * 1e3
                row[f"{name} CPU ms"] = cpu_times[name].median * 1e3
                row[f"{name} modules"] = each[0].modules[at]
            if "base" in times:
                row["this / base"] = times["base"].speedup_over(times["this"])
                row["CPU this / base"] = cpu_times["base"].speedup_over(cpu_times["this"])
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, help="another clone of pmoe, to compare with")
    parser.add_argument(
        "--rounds", type=int, default=9, help="processes of each clone, with bytecode and without"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds ({args.rounds}) must be at least 1")
    clones = {"this": ROOT}
    if args.base is not None:
        clones["base"] = args.base.resolve()
    with tempfile.TemporaryDirectory() as folder:
        variants = variants_in(Path(folder), clones)
        samples = measure(variants, args.rounds)
    rows = rows_of(variants, samples)
    print(f"from the beginning of `import pmoe`, with torch imported; medians of {args.rounds} processes")
    print(table(rows))
    path = args.out / "import.json"
    write_json(path, base=None if args.base is None else str(args.base), rounds=args.rounds, rows=rows)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
