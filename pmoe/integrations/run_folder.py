"""The files of a training run, which `StatsWriter` writes and `pmoe report` reads.

    run.json      one session for each time that training was started or continued: machine, versions,
                  settings, layers
    scalars.csv   step, name, value: losses, other numbers of the script, and peaks of memory pools
    layers.csv    one row for each layer and each step with statistics: the fields of `pmoe.stats`

Lines of the CSV files are only appended, by one writer at a time (`claim`). A run that continues from an
earlier step writes the steps after it a second time. Readers then use the newer lines: when the step number
goes back to s, they drop all older lines of step s and later steps.
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
"""A line of a CSV file, with one attribute for each column."""

RUN, SCALARS, LAYERS = "run.json", "scalars.csv", "layers.csv"

TENSORS = ("T_I", "T_DI", "T_M", "T_DO", "T_O")
PREDICTED = ("saved", "temporary", "peak", "host")
PASSES = ("forward", "backward")
TIMES = ("seconds", "communication", "exposed")

Parse = Callable[[str], Any]
"""A function from a cell's text to its value."""


def _whole(cell: str) -> int:
    """Returns a cell's text as an int.

    Raises ValueError if it is not an integer or needs more than 64 bits, which numpy cannot hold.
    """
    if abs(value := int(cell)) >= 2**63:
        raise ValueError(f"{cell[:20]}... is too large")
    return value


def _or_none(parse: Parse) -> Parse:
    """Returns a parser that returns None for an empty cell, and the result of ``parse`` for any other."""
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
        **{f"{direction}_{time}": _or_none(float) for direction in PASSES for time in TIMES},
        **{f"{tensor}_bytes": _or_none(_whole) for tensor in (*TENSORS, *PREDICTED)},
        "tokens_per_expert": lambda cell: tuple(map(_whole, cell.split())),
    },
}
"""The columns of each CSV file, by file name: a parser of the cells for each column name.

Columns of layers.csv have the meaning of the `LayerStats` fields with the same names. Columns that end in
``_bytes`` are those of rank 0: the sizes of its tensors, and its predicted memory.
"""


def layer_row(step: int, layer_stats: LayerStats) -> Row:
    """Returns the row of layers.csv for one layer at one step.

    layer_stats: the statistics of the layer.

    Seconds and ratios are rounded to six digits.
    """
    values = {name: getattr(layer_stats, name) for name in COLUMNS[LAYERS] if hasattr(layer_stats, name)}
    for direction in PASSES:
        times = getattr(layer_stats, direction)
        values |= {f"{direction}_{name}": getattr(times, name) for name in TIMES if times is not None}
    values |= {f"{name}_bytes": size for name, size in layer_stats.tensors.items()}
    if layer_stats.predicted is not None:
        values |= {f"{name}_bytes": getattr(layer_stats.predicted, name) for name in PREDICTED}
    short = {name: float(f"{value:.6g}") for name, value in values.items() if isinstance(value, float)}
    return Row(**{**values, **short, "step": step, "layer": layer_stats.name})


# ---- the files


FORMAT = 1

TIME, POOL_PEAK, HOST_POOL_PEAK = "pmoe/time", "pmoe/pool_peak_bytes", "pmoe/host_pool_peak_bytes"
"""Names of the scalars that `StatsWriter` adds by itself.

pmoe/time: the time of the step, in seconds since 1970.
pmoe/pool_peak_bytes: largest number of bytes in the memory pools of rank 0 so far, summed over its devices.
pmoe/host_pool_peak_bytes: the same for the pools of host memory, which hold offloaded tensors.
"""


@dataclass
class Curve:
    """The values of one scalar over the run.

    steps: the steps at which it was logged, ascending.
    values: its value at each of these steps.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """The content of a run's folder.

    sessions: entries of run.json, oldest first: one for each time that training was started or continued.
    scalars: the curve of each scalar, by name.
    rows: rows of layers.csv, by ascending step.
    """

    folder: Path
    sessions: list[dict[str, Any]]
    scalars: dict[str, Curve]
    rows: list[Row]


# ---- writing


_claims: weakref.WeakSet[BinaryIO] = weakref.WeakSet()


def _leave_claims() -> None:
    """Closes the locked files of all writers in a forked process.

    A forked process, such as a data loader's worker, inherits the lock of a run's folder. If it kept the lock
    after the training process has died, no new writer could open the folder.
    """
    for file in _claims:
        file.close()


os.register_at_fork(after_in_child=_leave_claims)


def claim(folder: Path) -> BinaryIO:
    """Locks the folder for one writer, until the returned file is closed or the process ends.

    Raises ValueError if another writer has locked it. A writer on another machine is noticed only if the file
    system shares its locks between machines.
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
    except OSError:  # the file system has no locks, so another writer cannot be noticed
        pass
    _claims.add(file)
    return file


def append(path: Path, rows: Iterable[Row]) -> None:
    """Appends rows to a CSV file and waits until they are on the disk. A new file gets a header line first.

    path: the file. Its name says which columns it has (`COLUMNS`).

    Raises OSError if this fails, for example on a full disk. The file is then cut back to its old length.
    """
    columns = COLUMNS[path.name]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    # Unbuffered, because closing a buffered file after a failed write would write its buffer once more.
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
    """Prepares an earlier run's CSV file for `append`: cuts off a last line that is incomplete.

    A crash of the earlier run can leave a line incomplete.

    Does nothing if there is no such file. Raises ValueError if the file has other columns.
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
    """Writes a session to run.json: appends it, or replaces the newest session. The whole file is rewritten.

    A session is data about one start of training: machine, versions, settings, layers. `StatsWriter` appends
    it when training starts, and replaces it once when it knows the layers.

    path: the file run.json.
    session: the session.
    instead: True replaces the newest session in the file; False appends.
    """
    sessions = read_sessions(path)
    kept = sessions[:-1] if instead else sessions
    save_json(path, {"format": FORMAT, "sessions": [*kept, session]}, default=str, allow_nan=True)


# ---- reading


def read_run(folder: Path) -> Run:
    """Reads all files of a run's folder.

    Raises ValueError if the folder holds no data, or if a line cannot be parsed or was written by another
    version of pmoe. The message names the folder, or the file and the line.
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
    """Returns the sessions in run.json, oldest first: one for each start of the run, resumed or not.

    Returns an empty list if there is no such file.
    """
    return load_json(path, _sessions_from, "remove it to read the rest") if os.path.lexists(path) else []


def _sessions_from(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the sessions from the parsed content of run.json.

    content: the JSON object in the file.

    Raises ValueError if the content is not the content of a run.json, or has another format number.
    """
    sessions = content.get("sessions")
    if not isinstance(sessions, list) or not all(map(_is_session, sessions)):
        raise ValueError("must hold the sessions of a run, as StatsWriter writes them")
    version = content.get("format", FORMAT)
    if version != FORMAT:
        raise ValueError(f"must be of format {FORMAT}, not {version}: read it with the pmoe that wrote it")
    return sessions


def _is_session(value: Any) -> bool:
    """Returns whether a value from run.json has the types that the report needs of a session."""
    layers = value.get("layers") or [] if isinstance(value, dict) else None
    parts = () if layers is None else (value.get("versions") or {}, value.get("settings") or {})
    return isinstance(layers, list) and all(isinstance(part, dict) for part in (*parts, *layers))


def _in_force(rows: Iterable[Row]) -> list[Row]:
    """Returns the valid rows, by ascending step: those that no later row of the file replaces.

    A run that continues from an earlier step s writes the rows of step s and later steps a second time. The
    newer rows then replace all older rows of these steps.

    rows: the rows in the order of the file.
    """
    kept: list[Row] = []
    for row in rows:
        if kept and row.step < kept[-1].step:
            del kept[bisect.bisect_left(kept, row.step, key=lambda kept_row: kept_row.step) :]
        kept.append(row)
    return kept


def _read(path: Path) -> Iterator[Row]:
    """Yields the lines of a CSV file as rows, without a last line that is incomplete.

    Yields nothing if there is no such file. Raises ValueError, with file and line, if a line cannot be
    parsed.
    """
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
