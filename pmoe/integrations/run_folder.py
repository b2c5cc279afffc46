"""The files of a training run that `StatsWriter` writes and `pmoe report` reads.

    run.json      what ran: one entry each time that training began or went on
    scalars.csv   step, name, value: losses and whatever else a script names, and the pools' peaks
    layers.csv    one row a layer and logged step: `pmoe.stats` in columns

Lines are only ever appended, by one writer at a time (`claim`). A run that goes on from an earlier step
writes steps again: the later lines hold, and readers forget whatever older lines say of that step and those
behind it.
"""

from __future__ import annotations

import bisect
import csv
import io
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pmoe.integrations.statistics import LayerStats
from pmoe.planner.exposed import Overlap

RUN, SCALARS, LAYERS = "run.json", "scalars.csv", "layers.csv"

FORMAT = 1

TIME, POOL_PEAK, HOST_POOL_PEAK = "pmoe/time", "pmoe/pool_peak_bytes", "pmoe/host_pool_peak_bytes"
"""Names of scalars that the writer adds: seconds since 1970, and the pools' peaks of rank 0's devices."""

TENSORS = ("T_I", "T_DI", "T_M", "T_DO", "T_O")
PREDICTED = ("saved", "temporary", "peak", "host")
PASSES = ("forward", "backward")
TIMES = ("seconds", "communication", "exposed")

SCALAR_HEADER = ("step", "name", "value")
LAYER_HEADER = (
    "step",
    "layer",
    "path",
    "n_forward",
    "n_backward",
    "restore",
    "num_slots",
    "drop_rate",
    "imbalance",
    "rank_imbalance",
    *(f"{direction}_{name}" for direction in PASSES for name in TIMES),
    *(f"{name}_bytes" for name in TENSORS),
    *(f"{name}_bytes" for name in PREDICTED),
    "tokens_per_expert",
)


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """A line of layers.csv: fields as in `pmoe.integrations.statistics.LayerStats`, None in empty cells.

    Bytes by tensor and of the prediction are of rank 0."""

    step: int
    layer: str
    path: str
    n_forward: int | None
    n_backward: int | None
    restore: str | None
    num_slots: int | None
    drop_rate: float | None
    imbalance: float | None
    rank_imbalance: float | None
    forward: Overlap | None
    backward: Overlap | None
    tensors: dict[str, int]
    predicted: dict[str, int]
    tokens_per_expert: tuple[int, ...]

    @property
    def passes(self) -> list[Overlap]:
        """Those that were recorded."""
        return [each for each in (self.forward, self.backward) if each is not None]


@dataclass
class Curve:
    """A scalar over the run; steps ascend."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """What a folder holds. sessions: of run.json, the last is the newest. rows: ascending by step."""

    folder: Path
    sessions: list[dict[str, Any]]
    scalars: dict[str, Curve]
    rows: list[LayerRow]


# ---- writing


_claims: weakref.WeakSet[BinaryIO] = weakref.WeakSet()


def _leave_claims() -> None:
    for file in _claims:
        file.close()


if hasattr(os, "register_at_fork"):  # a data loader's worker must not hold the folder of a run that died
    os.register_at_fork(after_in_child=_leave_claims)


def claim(folder: Path) -> BinaryIO:
    """Makes the caller the folder's only writer until the file is closed or its process ends; other machines
    see it where the file system has locks that they share.

    Raises ValueError where there is another writer.
    """
    file = open(folder / SCALARS, "ab")  # noqa: SIM115
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"run_dir ({folder}) must have one writer at a time, and another StatsWriter has it: close that "
            "one, or write to another folder"
        ) from None
    except (ImportError, OSError):  # neither Windows nor every file system has such locks
        pass
    _claims.add(file)
    return file


def append(path: Path, header: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """Adds lines to a CSV file, which reach the disk; makes the file with its header. Where that fails, as on
    a full disk, it adds nothing and raises OSError."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    with open(path, "ab", buffering=0) as file:  # a buffer would be written once more when it is closed
        before = file.tell()
        if not before:
            writer.writerow(header)
        writer.writerows(lines)
        left = memoryview(text.getvalue().encode())
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def mend(path: Path, header: Sequence[str]) -> None:
    """Makes a CSV file of an earlier run fit to be appended to: half a line at its end, which a crash may
    leave, is cut off. Raises ValueError where it is another kind of file."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        found = file.read()
        whole = found.rfind(b"\n") + 1
        if whole and found[:whole].split(b"\n", 1)[0].decode(errors="replace") != ",".join(header):
            raise ValueError(
                f"{path} must begin with the columns {','.join(header)}: write to another folder"
            )
        if whole < len(found):
            file.truncate(whole)


def add_session(path: Path, session: Mapping[str, Any], *, instead: bool = False) -> None:
    """Adds to run.json, which is replaced as a whole. instead: of the newest session there."""
    sessions = read_sessions(path)
    kept = sessions[:-1] if instead else sessions
    text = json.dumps({"format": FORMAT, "sessions": [*kept, session]}, indent=1, default=str)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def layer_line(step: int, each: LayerStats) -> list[object]:
    """The cells of `LAYER_HEADER`; None is an empty one."""
    passes = (each.forward, each.backward)
    return [
        step,
        each.name,
        each.path,
        each.n_forward,
        each.n_backward,
        each.restore,
        each.num_slots,
        *(_short(value) for value in (each.drop_rate, each.imbalance, each.rank_imbalance)),
        *(None if seen is None else _short(getattr(seen, name)) for seen in passes for name in TIMES),
        *(each.tensors.get(name) for name in TENSORS),
        *(None if each.predicted is None else getattr(each.predicted, name) for name in PREDICTED),
        " ".join(map(str, each.tokens_per_expert)),
    ]


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.6g}"


# ---- reading


def read_run(folder: Path) -> Run:
    """Raises ValueError, naming the folder, where it holds no data; naming file and line, where that is
    broken."""
    rule = f"must hold {SCALARS} or {LAYERS}, which pmoe.integrations.logging.StatsWriter writes"
    if not folder.is_dir():
        raise ValueError(
            f"{folder} {rule}: {'it is a file' if folder.exists() else 'there is no such folder'}"
        )
    scalars: dict[str, Curve] = {}
    for step, (name, value) in _lines(folder / SCALARS, SCALAR_HEADER, _scalar):
        if step is not None:
            for curve in scalars.values():
                _forget(curve, step)
        at, number = value
        curve = scalars.setdefault(name, Curve())
        curve.steps.append(at)
        curve.values.append(number)
    rows: list[LayerRow] = []
    for step, row in _lines(folder / LAYERS, LAYER_HEADER, _layer_row):
        if step is not None:
            del rows[bisect.bisect_left(rows, step, key=lambda row: row.step) :]
        rows.append(row)
    scalars = {name: curve for name, curve in scalars.items() if curve.steps}
    if not (scalars or rows):
        raise ValueError(f"{folder} {rule}: it holds no data")
    return Run(folder, read_sessions(folder / RUN), scalars, rows)


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """Those of run.json, none where there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{path} must hold JSON: {error}") from None
    sessions = found.get("sessions") if isinstance(found, dict) else None
    if not isinstance(sessions, list) or not all(isinstance(each, dict) for each in sessions):
        raise ValueError(f"{path} must hold the sessions of a run, as StatsWriter writes them")
    return sessions


def _lines(
    path: Path, header: Sequence[str], parse: Callable[[list[str]], Any]
) -> Iterator[tuple[int | None, Any]]:
    """What ``parse`` makes of each whole line, behind the step from which older lines are void, or None."""
    if not path.exists():
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text: {error}") from None
    lines = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    latest = None
    try:
        if tuple(next(lines, header)) != tuple(header):
            raise ValueError(f"it must begin with the columns {','.join(header)}")
        for cells in lines:
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} cells, not {len(header)}")
            step, parsed = int(cells[0]), parse(cells)
            yield (step if latest is not None and step < latest else None), parsed
            latest = step
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path}, line {lines.line_num}: {error}") from None


def _scalar(cells: list[str]) -> tuple[str, tuple[int, float]]:
    return cells[1], (int(cells[0]), float(cells[2]))


def _forget(curve: Curve, step: int) -> None:
    at = bisect.bisect_left(curve.steps, step)
    del curve.steps[at:], curve.values[at:]


def _layer_row(cells: list[str]) -> LayerRow:
    named = dict(zip(LAYER_HEADER, cells, strict=True))

    def number(name: str) -> float | None:
        return float(named[name]) if named[name] else None

    def whole(name: str) -> int | None:
        return int(named[name]) if named[name] else None

    def recorded(direction: str) -> Overlap | None:
        found = [number(f"{direction}_{name}") for name in TIMES]
        seconds, communication, exposed = found
        if seconds is None or communication is None or exposed is None:
            return None
        return Overlap(seconds=seconds, communication=communication, exposed=exposed)

    def num_bytes(names: Sequence[str]) -> dict[str, int]:
        return {name: int(named[f"{name}_bytes"]) for name in names if named[f"{name}_bytes"]}

    return LayerRow(
        step=int(named["step"]),
        layer=named["layer"],
        path=named["path"],
        n_forward=whole("n_forward"),
        n_backward=whole("n_backward"),
        restore=named["restore"] or None,
        num_slots=whole("num_slots"),
        drop_rate=number("drop_rate"),
        imbalance=number("imbalance"),
        rank_imbalance=number("rank_imbalance"),
        forward=recorded("forward"),
        backward=recorded("backward"),
        tensors=num_bytes(TENSORS),
        predicted=num_bytes(PREDICTED),
        tokens_per_expert=tuple(int(rows) for rows in named["tokens_per_expert"].split()),
    )
