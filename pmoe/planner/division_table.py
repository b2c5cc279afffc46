"""Measured divisions of fused kernels, and the one to take for a kernel (COMET, Section 3.2.2).

COMET measures divisions before deployment for each shape, parallelism and device, and looks them up as
metadata ("Adaptive thread block assignment"). `DivisionTable.find` takes

    measured   where the table holds this very kernel: the division that was fastest
    nearest    else: that of the nearest sizes of the same kernel, direction and dtype, see `distance`; one
               that was measured elsewhere (another device, or another number of its blocks, or ranks of the
               other kind) counts only where none was measured here, scaled by the ratio of the blocks
    rule       else: `pmoe.planner.division.rule`

`pmoe.measure.fused_kernels` measures entries, `pmoe.measure.division` keeps them, and
`pmoe.measure.division` has ranks agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from pmoe.planner.division import Division, FusedKernelSizes, FusedLayerSizes, clamped, rule, sizes_of


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The measurements of one kernel.

    division: the fastest. seconds: of each division tried, on the slowest rank. when: ISO 8601, UTC.

    Raises ValueError where division is not among seconds, or a time is no finite float of at least 0.
    """

    sizes: FusedKernelSizes
    division: Division
    seconds: Mapping[Division, float]
    when: str

    def __post_init__(self) -> None:
        if self.division not in self.seconds:
            raise ValueError(f"division ({self.division}) must be among those measured")
        for division, seconds in self.seconds.items():
            check_seconds(f"seconds of {division}", seconds)


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Seconds of a whole layer on the slowest rank: with the fused kernels, and as a pipeline of chunks.

    fused_forward, chunked_forward: in inference. fused_step, chunked_step: forward and backward.

    Raises ValueError for a time that is no finite float of at least 0.
    """

    fused_forward: float
    fused_step: float
    chunked_forward: float
    chunked_step: float

    def __post_init__(self) -> None:
        for each in fields(self):
            check_seconds(each.name, getattr(self, each.name))

    def fused_is_faster(self, *, training: bool) -> bool:
        if training:
            return self.fused_step < self.chunked_step
        return self.fused_forward < self.chunked_forward


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds of a layer of these sizes, both ways, measured in one run. when: ISO 8601, UTC."""

    sizes: FusedLayerSizes
    seconds: LayerSeconds
    when: str


@dataclass(frozen=True)
class DivisionTable:
    """The measurements of any devices: entries by kernel, times by layer."""

    entries: Mapping[FusedKernelSizes, Entry] = field(default_factory=dict)
    layers: Mapping[FusedLayerSizes, LayerTimes] = field(default_factory=dict)

    def find(self, kernel: FusedKernelSizes) -> tuple[Division, str]:
        """The division to take, and why, as at the top of this file.

        n_c is within 1 .. num_blocks - 1, and a chunk has no more columns than d_model needs.
        """
        exact = self.entries.get(kernel)
        if exact is not None:
            return clamped(exact.division, kernel), f"measured {exact.when}"
        alike = (each for each in self.entries.values() if _same_work(each.sizes, kernel))
        entry = min(alike, key=lambda each: _order(each.sizes, kernel), default=None)
        if entry is None:
            of = f"{kernel.kernel} {kernel.direction} in {kernel.dtype}"
            return rule(kernel), f"rule: nothing measured of {of}"
        division, why = entry.division, f"nearest: {entry.sizes.summary}, measured {entry.when}"
        if _elsewhere(entry.sizes, kernel):
            here, there = kernel.num_blocks, entry.sizes.num_blocks
            scaled = (2 * division.n_c * here + there) // (2 * there)  # rounded half up
            division = Division(max(scaled, 1), division.chunk_columns)
            why += f" on {entry.sizes.where}"
            if here != there:
                why += f", n_c {entry.division.n_c} scaled to {division.n_c}"
        return clamped(division, kernel), why

    def find_layer_times(self, sizes: FusedLayerSizes) -> LayerTimes | None:
        """The times of these very sizes, else those of twice or half as many rows, else None.

        Where both were measured those of more rows count, which favour fusion less (COMET, Section 5.3).
        """
        plain = sizes_of(sizes)
        for rows in (sizes.rows, 2 * sizes.rows, sizes.rows // 2):
            found = self.layers.get(replace(plain, rows=rows)) if rows else None
            if found is not None:
                return found
        return None


# ---- which entry is nearest


def distance(one: FusedLayerSizes, other: FusedLayerSizes) -> float:
    """Between two sizes, in powers of two: the sum of |log2 of the ratio| over five of them.

    They are rows, d_model, d_hidden, experts and num_ranks. Gated beside plain is one more: w1 has twice as
    many rows.

    Example: twice the rows and a quarter of the experts -> 3.
    """
    names = ("rows", "d_model", "d_hidden", "experts", "num_ranks")
    ratios = (abs(math.log2(getattr(one, name) / getattr(other, name))) for name in names)
    return round(sum(ratios) + (one.gated != other.gated), 9)  # equal distances must be equal numbers


def _same_work(one: FusedKernelSizes, other: FusedKernelSizes) -> bool:
    return (one.kernel, one.direction, one.dtype) == (other.kernel, other.direction, other.dtype)


def _elsewhere(one: FusedLayerSizes, other: FusedLayerSizes) -> bool:
    places = ((each.device_name, each.num_blocks, each.virtual) for each in (one, other))
    return len(set(places)) > 1


def _order(entry: FusedKernelSizes, wanted: FusedKernelSizes) -> tuple[object, ...]:
    """The least is the nearest. Ties are settled by the same gating, then by fewer rows and lesser sizes,
    then by the place: every rank finds the same."""
    sizes = (entry.rows, entry.d_model, entry.d_hidden, entry.experts, entry.num_ranks)
    place = (entry.virtual != wanted.virtual, entry.device_name != wanted.device_name)
    return (
        _elsewhere(entry, wanted),
        distance(entry, wanted),
        entry.gated != wanted.gated,
        *sizes,
        *place,
        entry.device_name,
        entry.num_blocks,
    )


def check_seconds(name: str, value: float) -> None:
    """Raises ValueError unless ``value`` is a finite float of at least 0."""
    if type(value) is not float or not 0 <= value < math.inf:
        raise ValueError(f"{name} ({value!r}) must be a finite float of at least 0")
