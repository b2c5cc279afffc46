"""Sizes of a layer's fused kernels, and the division of their thread blocks (COMET, Section 3.2.2).

n_c blocks of a kernel communicate while the others compute. COMET compiles a kernel for each division; here
the division is an argument of one kernel.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import get_args

import torch

from pmoe.arguments import check_count
from pmoe.kernels.comet.launcher import COLUMNS, RULE_COLUMNS, Division, FusedKernel
from pmoe.kernels.registry import bucket
from pmoe.schedule.tasks import PassDirection

KERNELS: tuple[FusedKernel, ...] = get_args(FusedKernel)
DIRECTIONS: tuple[PassDirection, ...] = get_args(PassDirection)

RULE_PART = 12
"""Where nothing is measured a twelfth of the blocks communicates, 11 of 132: a guess, below the 18 to 46 that
COMET found best with tensor parallelism (Figure 8)."""

BLOCK_COUNTS = (1, 2, 4, 6, 8, 12, 16, 20, 26, 32, 40, 46)
BLOCK_STEP = 6
"""A sweep tries these, and goes on in such steps: one block more matters less, the more there are."""

CHUNKS = (256, 512, 1024)
"""A sweep of the combining kernel tries these, and all columns at once."""


@dataclass(frozen=True, kw_only=True)
class FusedLayerSizes:
    """A layer as its fused kernels see it, on one rank.

    device_name: as CUDA names it. num_blocks: multiprocessors of the device, one thread block each.
    num_ranks: W. experts: of this rank. rows: received by this rank, a power of two.
    gated: SwiGLU, whose w1 has 2 d_hidden rows. dtype: as torch names it, "bfloat16".
    virtual: the ranks share one device, so that rows travel through its own memory and over no link.

    Raises ValueError for sizes that no layer has.
    """

    device_name: str
    num_blocks: int
    num_ranks: int
    experts: int
    rows: int
    d_model: int
    d_hidden: int
    gated: bool
    dtype: str
    virtual: bool = False

    def __post_init__(self) -> None:
        counts = ("num_blocks", "num_ranks", "experts", "rows", "d_model", "d_hidden")
        check_count(**{name: getattr(self, name) for name in counts})
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks ({self.num_blocks}) must be at least 2")
        if self.rows != bucket(self.rows):
            raise ValueError(f"rows ({self.rows}) must be a power of two: {bucket(self.rows)}")
        dtype = getattr(torch, self.dtype, None)
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype ({self.dtype!r}) must name a floating-point type of torch")

    @property
    def summary(self) -> str:
        """Example: "bfloat16, 8 ranks, 1 expert, 16384 rows, 4096 x 14336 gated"."""
        return (
            f"{self.dtype}, {self.num_ranks} {'virtual ' * self.virtual}rank{'s' * (self.num_ranks > 1)}, "
            f"{self.experts} expert{'s' * (self.experts > 1)}, {self.rows} rows, "
            f"{self.d_model} x {self.d_hidden}{' gated' * self.gated}"
        )

    @property
    def where(self) -> str:
        return f"{self.num_blocks} blocks of {self.device_name}"

    def __str__(self) -> str:
        return f"{self.summary}, on {self.where}"


@dataclass(frozen=True, kw_only=True)
class FusedKernelSizes(FusedLayerSizes):
    """One fused kernel of a layer of these sizes.

    kernel: "dispatch", where rows travel and then are multiplied, or "combine", a product whose sums travel
    back. direction: "forward", or "backward" for the gradients.
    """

    kernel: FusedKernel
    direction: PassDirection

    def __str__(self) -> str:
        return f"{self.kernel} {self.direction} {super().__str__()}"


def sizes_of(sizes: FusedLayerSizes) -> FusedLayerSizes:
    """Those of the layer that a kernel is part of; equal to those of its other kernels."""
    return FusedLayerSizes(**{each.name: getattr(sizes, each.name) for each in fields(FusedLayerSizes)})


def kernel_sizes(layer: FusedLayerSizes, kernel: FusedKernel, direction: PassDirection) -> FusedKernelSizes:
    """One of the kernels of a layer."""
    return FusedKernelSizes(kernel=kernel, direction=direction, **vars(layer))


def all_kernel_sizes(layer: FusedLayerSizes) -> list[FusedKernelSizes]:
    """Every fused kernel of a layer: dispatch and combine, each forward and backward."""
    return [kernel_sizes(layer, kernel, way) for kernel in KERNELS for way in DIRECTIONS]


def rule(sizes: FusedKernelSizes) -> Division:
    """Where nothing is measured: a twelfth of the blocks, at least one, and chunks of 512 columns."""
    return clamped(Division(max(1, sizes.num_blocks // RULE_PART), RULE_COLUMNS), sizes)


def clamped(division: Division, sizes: FusedKernelSizes) -> Division:
    """The division as the kernel takes it: at least one block computes, and no chunk exceeds all columns."""
    return Division(
        n_c=min(division.n_c, sizes.num_blocks - 1),
        chunk_columns=min(division.chunk_columns, all_columns(sizes.d_model)),
    )


def all_columns(d_model: int) -> int:
    """Columns of a chunk that holds all of them. Example: 1000 -> 1024."""
    return COLUMNS * math.ceil(d_model / COLUMNS)


def chunk_candidates(d_model: int) -> list[int]:
    """Columns of a chunk that a combining kernel may have: `CHUNKS`, and all columns."""
    every = all_columns(d_model)
    return sorted({min(each, every) for each in CHUNKS} | {every})


def candidates(num_blocks: int, d_model: int | None = None) -> list[Division]:
    """The divisions of a sweep: `BLOCK_COUNTS` and on, below half of the blocks (1 always).

    d_model: of the combining kernel, which tries each of them with each of `CHUNKS` and all columns.
    Example: 8 blocks, 1024 columns -> n_c 1, 2 with chunks 256, 512, 1024.
    """
    counts = [*BLOCK_COUNTS, *range(BLOCK_COUNTS[-1] + BLOCK_STEP, num_blocks, BLOCK_STEP)]
    chunks = [RULE_COLUMNS] if d_model is None else chunk_candidates(d_model)
    return [Division(n, columns) for n in counts if n == 1 or 2 * n < num_blocks for columns in chunks]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The measurements of one kernel.

    division: the fastest. seconds: of each division tried, on the slowest rank. when: ISO 8601, UTC.
    """

    sizes: FusedKernelSizes
    division: Division
    seconds: Mapping[Division, float]
    when: str


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a whole layer on the slowest rank: with the fused kernels, and as a pipeline of chunks.

    fused_forward, chunked_forward: in inference. fused_step, chunked_step: forward and backward. when: they
    were measured, in one run, ISO 8601, UTC.
    """

    fused_forward: float
    fused_step: float
    chunked_forward: float
    chunked_step: float
    when: str

    def fused_is_faster(self, *, training: bool) -> bool:
        if training:
            return self.fused_step < self.chunked_step
        return self.fused_forward < self.chunked_forward


@dataclass(frozen=True)
class DivisionTable:
    """The measurements of any devices, by kernel and by layer: what COMET looks up as metadata."""

    entries: Mapping[FusedKernelSizes, Entry] = field(default_factory=dict)
    layers: Mapping[FusedLayerSizes, LayerSeconds] = field(default_factory=dict)

    def find(self, kernel: FusedKernelSizes) -> tuple[Division, str]:
        """The division to take, and why: the first of these that there is.

        measured: this very kernel's fastest.
        nearest: that of the nearest sizes of the same kernel, direction and dtype, see `distance`. One that
            was measured elsewhere (another device, number of its blocks, or kind of ranks) counts only where
            none was measured here, scaled by the ratio of the blocks.
        rule: of `rule`.

        n_c is within 1 .. num_blocks - 1, and a chunk has no more columns than d_model needs.
        """
        exact = self.entries.get(kernel)
        if exact is not None:
            return clamped(exact.division, kernel), f"measured {exact.when}"
        work = operator.attrgetter("kernel", "direction", "dtype")
        alike = (each for each in self.entries.values() if work(each.sizes) == work(kernel))
        entry = min(alike, key=lambda each: _apart(each.sizes, kernel), default=None)
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

    def find_layer_times(self, sizes: FusedLayerSizes) -> LayerSeconds | None:
        """The times of these very sizes, else those of twice or half as many rows, else None.

        Where both were measured those of more rows count, which favour fusion less (COMET, Section 5.3).
        """
        for rows in (sizes.rows, 2 * sizes.rows, sizes.rows // 2):
            found = self.layers.get(replace(sizes, rows=rows)) if rows else None
            if found is not None:
                return found
        return None


# ---- which entry is nearest


def distance(one: FusedLayerSizes, other: FusedLayerSizes) -> float:
    """Between two sizes, in powers of two: the sum of |log2 of the ratio| over five of them.

    Gated beside plain is one more: w1 has twice as many rows.
    Example: twice the rows and a quarter of the experts -> 3.
    """
    names = ("rows", "d_model", "d_hidden", "experts", "num_ranks")
    ratios = (abs(math.log2(getattr(one, name) / getattr(other, name))) for name in names)
    return round(sum(ratios) + (one.gated != other.gated), 9)  # equal distances must be equal numbers


def _elsewhere(one: FusedLayerSizes, other: FusedLayerSizes) -> bool:
    places = ((each.device_name, each.num_blocks, each.virtual) for each in (one, other))
    return len(set(places)) > 1


def _apart(entry: FusedKernelSizes, wanted: FusedKernelSizes) -> tuple[bool, float, str]:
    """The least is the nearest; of equals the first in the order of their texts."""
    return _elsewhere(entry, wanted), distance(entry, wanted), str(entry)
