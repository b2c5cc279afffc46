"""Files of a training run, which `StatsWriter` writes and `pmoe report` reads.

    run.json      one entry each time that training started or went on: machine, versions, settings, layers
    scalars.csv   step, name, value: losses, other numbers of the script, and the pools' peaks
    layers.csv    one row for each layer and logged step: `pmoe.stats` in columns

Lines are only appended, by one writer at a time (`claim`). A run that goes on from an earlier step writes
steps a second time. Then the later lines hold: readers drop the older lines of that step and of all later
steps.
"""

from __future__ import annotations

import bisect
import csv
import fcntl
import io
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from pmoe.integrations.statistics import LayerStats
from pmoe.measure.store import load_json, save_json

Row = SimpleNamespace
"""One line of a CSV file. Each column is an attribute."""

RUN, SCALARS, LAYERS = "run.json", "scalars.csv", "layers.csv"

TENSORS = ("T_I", "T_DI", "T_M", "T_DO", "T_O")
PREDICTED = ("saved", "temporary", "peak", "host")
PASSES = ("forward", "backward")
TIMES = ("seconds", "communication", "exposed")

Parse = Callable[[str], Any]
"""Function that makes a value of a cell's text."""


def _whole(cell: str) -> int:
    """Returns the integer. Raises ValueError if it needs more than 64 bits, which numpy cannot hold."""
    if abs(value := int(cell)) >= 2**63:
        raise ValueError(f"{cell[:20]}... is too large")
    return value


def _or_none(parse: Parse) -> Parse:
    """Returns a parser that makes None of an empty cell."""
    return lambda cell: parse(cell) if cell else None


COLUMNS: Mapping[str, Mapping[str, Parse]] = {
    SCALARS: {"step": _whole, "name": str, "value": float},
    LAYERS: {
        "step": _whole,
        "layer": str,
        "path": str,
        **dict.fromkeys(("n_forward", "n_backward"), _or_none(_whole)),
        "restore": _or_none(str),
        "num_slots": _or_none(_whole),
        **dict.fromkeys(("drop_rate", "imbalance", "rank_imbalance"), _or_none(float)),
        **{f"{way}_{time}": _or_none(float) for way in PASSES for time in TIMES},
        **{f"{each}_bytes": _or_none(_whole) for each in (*TENSORS, *PREDICTED)},
        "tokens_per_expert": lambda cell: tuple(map(_whole, cell.split())),
    },
}
"""Columns of each file, with the parser of their cells.

Columns of layers.csv have the meaning of the same fields in `LayerStats`. Columns ``*_bytes``, by tensor and
predicted, are rank 0's.
"""


def layer_row(step: int, each: LayerStats) -> Row:
    """Returns the row of one layer at one step. Seconds and ratios are rounded to six digits."""
    values = {name: getattr(each, name) for name in COLUMNS[LAYERS] if hasattr(each, name)}
    for direction in PASSES:
        times = getattr(each, direction)
        values |= {f"{direction}_{name}": getattr(times, name) for name in TIMES if times is not None}
    values |= {f"{name}_bytes": size for name, size in each.tensors.items()}
    if each.predicted is not None:
        values |= {f"{name}_bytes": getattr(each.predicted, name) for name in PREDICTED}
    short = {name: float(f"{value:.6g}") for name, value in values.items() if isinstance(value, float)}
    return Row(**{**values, **short, "step": step, "layer": each.name})


# ---- the files


FORMAT = 1

TIME, POOL_PEAK, HOST_POOL_PEAK = "pmoe/time", "pmoe/pool_peak_bytes", "pmoe/host_pool_peak_bytes"
"""Names of the scalars that the writer adds.

pmoe/time: seconds since 1970.
pmoe/pool_peak_bytes: largest bytes of the pools of rank 0's devices, summed over devices.
pmoe/host_pool_peak_bytes: the same of their memory on the host.
"""


@dataclass
class Curve:
    """A scalar over the run: steps in ascending order, and their values."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """All data of a run's folder.

    sessions: entries of run.json, oldest first.
    scalars: curve of each scalar, by name.
    rows: rows of layers.csv, by ascending step.
    """

    folder: Path
    sessions: list[dict[str, Any]]
    scalars: dict[str, Curve]
    rows: list[Row]


# ---- writing


_claims: weakref.WeakSet[BinaryIO] = weakref.WeakSet()


def _leave_claims() -> None:
    """Closes the claims in a forked process: a data loader's worker must not hold the folder of a run that
    died.
    """
    for file in _claims:
        file.close()


os.register_at_fork(after_in_child=_leave_claims)


def claim(folder: Path) -> BinaryIO:
    """Makes the caller the only writer of the folder, until the file is closed or its process ends.

    Raises ValueError if the folder has a writer. Writers on other machines are seen only if the file system
    shares its locks.
    """
    file = open(folder / SCALARS, "ab")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"run_dir ({folder}) must have one writer at a time, and another StatsWriter has it: close that "
            "one, or write to another folder"
        ) from None
    except OSError:  # a file system without locks: the folder is used without protection
        pass
    _claims.add(file)
    return file


def append(path: Path, rows: Iterable[Row]) -> None:
    """Adds rows to a CSV file and waits until they are on the disk. A new file gets its header first.

    If that fails (such as on a full disk), the file is cut back to its old length and OSError is raised.
    """
    columns = COLUMNS[path.name]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    # Unbuffered: after a failed write, closing the file would write a buffer's bytes once more.
    with open(path, "ab", buffering=0) as file:
        old_length = file.tell()
        if not old_length:
            writer.writerow(columns)
        for row in rows:
            values = (getattr(row, name, None) for name in columns)
            writer.writerow(
                " ".join(map(str, value)) if isinstance(value, tuple) else value for value in values
            )
        unwritten = memoryview(text.getvalue().encode())
        try:
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(old_length)
            raise


def mend(path: Path) -> None:
    """Prepares a CSV file of an earlier run for `append`: cuts off a last line that a crash left incomplete.

    Raises ValueError if the file has other columns.
    """
    if not path.exists():
        return
    header = ",".join(COLUMNS[path.name]) + "\n"
    with open(path, "rb+") as file:
        content = file.read()
        end_of_lines = content.rfind(b"\n") + 1
        if not (content.startswith(header.encode()) or header.encode().startswith(content)):
            raise ValueError(f"{path} must begin with the columns {header.strip()}: write to another folder")
        if end_of_lines < len(content):
            file.truncate(end_of_lines)


def add_session(path: Path, session: Mapping[str, Any], *, instead: bool = False) -> None:
    """Adds a session to run.json, or replaces the newest one if ``instead`` is True.

    Writes the whole file again.
    """
    sessions = read_sessions(path)
    kept = sessions[:-1] if instead else sessions
    save_json(path, {"format": FORMAT, "sessions": [*kept, session]}, default=str, allow_nan=True)


# ---- reading


def read_run(folder: Path) -> Run:
    """Reads all files of a folder.

    Raises ValueError, with the folder, if it holds no data; with file and line, if a line is broken or was
    written by another version of pmoe.
    """
    rule = f"must hold {SCALARS} or {LAYERS}, which pmoe.integrations.logging.StatsWriter writes"
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else "there is no such folder"
        raise ValueError(f"{folder} {rule}: {what}")
    scalars: dict[str, Curve] = {}
    for row in _in_force(_read(folder / SCALARS)):
        curve = scalars.setdefault(row.name, Curve())
        curve.steps.append(row.step)
        curve.values.append(row.value)
    rows = _in_force(_read(folder / LAYERS))
    if not (scalars or rows):
        raise ValueError(f"{folder} {rule}: it holds no data")
    return Run(folder, read_sessions(folder / RUN), scalars, rows)


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """Returns the sessions in run.json, oldest first. Empty if there is no such file."""
    return load_json(path, _sessions_from, "remove it to read the rest") if os.path.lexists(path) else []


def _sessions_from(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the sessions in the content of run.json. Raises ValueError if the content is something else."""
    sessions = found.get("sessions")
    if not isinstance(sessions, list) or not all(map(_is_session, sessions)):
        raise ValueError("must hold the sessions of a run, as StatsWriter writes them")
    version = found.get("format", FORMAT)
    if version != FORMAT:
        raise ValueError(f"must be of format {FORMAT}, not {version}: read it with the pmoe that wrote it")
    return sessions


def _is_session(found: Any) -> bool:
    """Returns whether the parts of a session that the report uses have the right types."""
    layers = found.get("layers") or [] if isinstance(found, dict) else None
    parts = () if layers is None else (found.get("versions") or {}, found.get("settings") or {})
    return isinstance(layers, list) and all(isinstance(part, dict) for part in (*parts, *layers))


def _in_force(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows by ascending step.

    Where the step goes back, the older rows of that step and of all later steps are left out.
    """
    kept: list[Row] = []
    for row in rows:
        if kept and row.step < kept[-1].step:
            del kept[bisect.bisect_left(kept, row.step, key=lambda kept_row: kept_row.step) :]
        kept.append(row)
    return kept


def _read(path: Path) -> Iterator[Row]:
    """Yields the complete lines of a CSV file as rows. Yields nothing if there is no such file."""
    if not os.path.lexists(path):
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text: {error}; remove it to read the rest") from None
    lines = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    columns = COLUMNS[path.name]
    header = list(columns)
    try:
        if next(lines, header) != header:
            wanted = ",".join(header)
            raise ValueError(f"it must begin with the columns {wanted}: read it with the pmoe that wrote it")
        for cells in lines:
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} cells, not {len(header)}")
            parsed = zip(columns.items(), cells, strict=True)
            yield Row(**{name: parse(cell) for (name, parse), cell in parsed})
    except (csv.Error, ValueError) as error:
        raise ValueError(
            f"{path}, line {lines.line_num}: {error}; remove the line to read the rest"
        ) from None
