"""The lines of a run folder's CSV files: a dataclass a file, a field a column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from pmoe.integrations.statistics import LayerStats
from pmoe.planner.exposed import Overlap

TENSORS = ("T_I", "T_DI", "T_M", "T_DO", "T_O")
PREDICTED = ("saved", "temporary", "peak", "host")
PASSES = ("forward", "backward")
TIMES = ("seconds", "communication", "exposed")


@dataclass(frozen=True, kw_only=True)
class ScalarRow:
    """A line of scalars.csv."""

    step: int
    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """A line of layers.csv, a field a column; None is an empty cell.

    Fields mean what they mean in `LayerStats`. Bytes, by tensor and predicted, are rank 0's.
    """

    step: int
    layer: str
    path: str
    n_forward: int | None = None
    n_backward: int | None = None
    restore: str | None = None
    num_slots: int | None = None
    drop_rate: float | None = None
    imbalance: float | None = None
    rank_imbalance: float | None = None
    forward_seconds: float | None = None
    forward_communication: float | None = None
    forward_exposed: float | None = None
    backward_seconds: float | None = None
    backward_communication: float | None = None
    backward_exposed: float | None = None
    T_I_bytes: int | None = None
    T_DI_bytes: int | None = None
    T_M_bytes: int | None = None
    T_DO_bytes: int | None = None
    T_O_bytes: int | None = None
    saved_bytes: int | None = None
    temporary_bytes: int | None = None
    peak_bytes: int | None = None
    host_bytes: int | None = None
    tokens_per_expert: tuple[int, ...]

    @property
    def forward(self) -> Overlap | None:
        """Seconds of the forward pass; None unless it was recorded."""
        return self._recorded("forward")

    @property
    def backward(self) -> Overlap | None:
        return self._recorded("backward")

    @property
    def passes(self) -> list[Overlap]:
        """The recorded passes."""
        return [each for each in (self.forward, self.backward) if each is not None]

    @property
    def tensors(self) -> dict[str, int]:
        return self._num_bytes(TENSORS)

    @property
    def predicted(self) -> dict[str, int]:
        return self._num_bytes(PREDICTED)

    def _recorded(self, direction: str) -> Overlap | None:
        seconds = {name: getattr(self, f"{direction}_{name}") for name in TIMES}
        return None if None in seconds.values() else Overlap(**seconds)

    def _num_bytes(self, names: Sequence[str]) -> dict[str, int]:
        found = {name: getattr(self, f"{name}_bytes") for name in names}
        return {name: size for name, size in found.items() if size is not None}


AnyRow = TypeVar("AnyRow", ScalarRow, LayerRow)


def columns(kind: type[ScalarRow] | type[LayerRow]) -> list[str]:
    """The header of a file of such rows."""
    return [each.name for each in fields(kind)]


def layer_row(step: int, each: LayerStats) -> LayerRow:
    """The statistics of one layer at one step; seconds and ratios to six digits."""
    values = {name: getattr(each, name) for name in columns(LayerRow) if hasattr(each, name)}
    for direction in PASSES:
        seen = getattr(each, direction)
        values |= {f"{direction}_{name}": getattr(seen, name) for name in TIMES if seen is not None}
    values |= {f"{name}_bytes": size for name, size in each.tensors.items()}
    if each.predicted is not None:
        values |= {f"{name}_bytes": getattr(each.predicted, name) for name in PREDICTED}
    return LayerRow(step=step, layer=each.name, **{name: _short(value) for name, value in values.items()})


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def cells_of(row: ScalarRow | LayerRow) -> dict[str, Any]:
    """The cells of a line by column, for `csv.DictWriter`."""
    values = asdict(row)
    return {name: " ".join(map(str, v)) if isinstance(v, tuple) else v for name, v in values.items()}


def row_of(kind: type[AnyRow], cells: Sequence[str]) -> AnyRow:
    """The row of a line. Raises ValueError for a cell that its column does not allow."""
    named = zip(fields(kind), cells, strict=True)
    return kind(**{each.name: _parsed(str(each.type), cell) for each, cell in named})


def _parsed(annotation: str, cell: str) -> Any:
    """The value of a cell, as the annotation of its field says."""
    if annotation.endswith(" | None"):
        return _parsed(annotation.removesuffix(" | None"), cell) if cell else None
    return PARSERS[annotation](cell)


PARSERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "tuple[int, ...]": lambda cell: tuple(map(int, cell.split())),
}
