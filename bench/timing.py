"""Timing on a busy machine: variants take turns, medians are compared, and the machine is described.

The speed of a machine drifts within minutes (other work, clock rate). So two variants that are timed one
after the other are not comparable. `interleaved` runs every variant once in each round, so that a drift
affects all of them equally. All times are seconds.
"""

import datetime
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist

from pmoe import text
from pmoe.measure.timing import in_rounds

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """The seconds of one variant: one sample for each round, that of the slowest rank."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def low(self) -> float:
        """First quartile, in seconds."""
        return float(numpy.quantile(self.samples, 0.25))

    @property
    def high(self) -> float:
        """Third quartile, in seconds."""
        return float(numpy.quantile(self.samples, 0.75))

    @property
    def spread(self) -> float:
        """(high - low) / median: the width of the middle half of the samples, relative to the median."""
        return (self.high - self.low) / self.median

    def speedup_over(self, base: "Timing") -> float:
        """Returns how many times faster this variant is than ``base``: the median, over the rounds, of base /
        this.

        Both ran at nearly the same moment of a round, so that the median of their ratios is steadier than the
        ratio of their medians. Example: base (2, 4), this (1, 2) -> 2.0.
        """
        if len(base.samples) != len(self.samples):
            raise ValueError(
                f"base has {len(base.samples)} rounds, this has {len(self.samples)}: must be equal"
            )
        return statistics.median(b / s for b, s in zip(base.samples, self.samples, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """Returns data for JSON: median, low and high quartile and every sample, in seconds."""
        return {
            "median_s": self.median,
            "low_s": self.low,
            "high_s": self.high,
            "samples_s": list(self.samples),
        }


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    warmup: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> dict[str, Timing]:
    """Times every run once in each of `rounds` rounds, after `warmup` untimed rounds.

    In a process group every rank calls this with the same names in the same order. Each sample starts after
    `barrier` (by default the group's barrier, or nothing without a group) and is the slowest rank's time.
    Each round starts with another variant, so that none always follows the same one. A run on an accelerator
    must end with its own synchronisation.
    """
    grouped = dist.is_initialized()
    if barrier is None and grouped:
        barrier = dist.barrier
    timed = [partial(_seconds_of, run) for run in runs.values()]
    samples = in_rounds(timed, rounds, warm_up=warmup, begin=barrier, rotate=True)
    seconds = torch.tensor(samples, dtype=torch.float64)
    if grouped:
        seconds = seconds.cuda() if dist.get_backend() == "nccl" else seconds
        dist.all_reduce(
            seconds, op=dist.ReduceOp.MAX
        )  # once, at the end: a reduction would disturb the samples
    return {name: Timing(tuple(row)) for name, row in zip(runs, seconds[:, :, 0].tolist(), strict=True)}


def _seconds_of(run: Callable[[], Any]) -> tuple[float]:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start,)


ROOT = Path(__file__).resolve().parents[1]

OUT = Path("build/bench")
"""Folder to which benchmarks write by default. bench/results holds the results that are kept."""

PROGRESS_SECONDS = 5

BUSY = 0.3
"""Number of busy cores, when a benchmark begins, above which a warning says that other work ran."""


class Progress:
    """Prints progress lines to stderr, on the first rank, at least PROGRESS_SECONDS apart."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def at(self, where: str) -> None:
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        if is_first and time.monotonic() - self._last > PROGRESS_SECONDS:
            self._last = time.monotonic()
            print(where, file=sys.stderr, flush=True)


def counted(items: Sequence[T], what: str) -> Iterator[T]:
    """Yields the items, and prints which of them comes next. Example: "round 3 of 12".

    what: name of an item, such as "round".
    """
    progress = Progress()
    for at, item in enumerate(items, start=1):
        progress.at(f"{what} {at} of {len(items)}")
        yield item


def busy_seconds() -> float:
    """Returns the seconds that cores were busy since the machine started, summed over all cores (Linux)."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _io, *interrupts = stat.read_text().splitlines()[0].split()[1:8]
    return sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")


def busy_cores() -> float:
    """Returns the number of cores that other processes used in the second before the benchmark began.

    It is 0 in processes that begin no benchmark: tests, ranks of a benchmark, and help texts. The load
    average would not do, because it still contains work that ended a minute ago.
    """
    begins = Path(sys.argv[0]).resolve().parent == ROOT / "bench" and not multiprocessing.parent_process()
    if not begins or {"-h", "--help"} & set(sys.argv):
        return 0.0
    before = busy_seconds()
    time.sleep(1)
    return round(busy_seconds() - before, 2)


def machine() -> dict[str, Any]:
    """Returns the facts that belong to a measurement: CPU name, cores, load, Python and torch."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "busy_cores": busy_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def code() -> dict[str, Any]:
    """Returns the measured commit, and whether files differ from it; None if git does not know."""
    try:
        commit, changed = (_git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", *MEASURED))
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "clean": None}
    return {"commit": commit, "clean": not changed}


MEASURED = ("pmoe", "cuda", "bench/*.py", "setup.py")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


BEGUN = {"machine": machine(), "code": code()}
"""Description of the machine and the code, made when the benchmark began: its own work is not in the load."""


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows as aligned text, one line for each row. The keys of the first row are the header.

    Numbers are aligned to the right, words to the left. Floats get four significant digits. A key that a row
    lacks leaves its cell empty. If the machine was busy when the benchmark began, a last line says so.
    """
    if not rows:
        return ""
    columns = list(rows[0])
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    words = {i for i, column in enumerate(columns) if not all(_is_number(row.get(column)) for row in rows)}
    cores = BEGUN["machine"]["busy_cores"]
    busy = f"\nbegun on a busy machine: others used {cores} cores" if cores > BUSY else ""
    return text.table([columns, *cells], left=words) + busy


def write_json(path: str | Path, **content: Any) -> None:
    """Writes a benchmark's results to a JSON file, completely or not at all.

    The file has ``content``, whose values may be Timings, `BEGUN`, the command line and the time (UTC).
    """
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    document = {"when": now, "command": sys.argv, **BEGUN, **content}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(document, indent=1, default=_plain) + "\n")
    unfinished.replace(path)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | None)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Timing):
        return value.as_dict()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")
