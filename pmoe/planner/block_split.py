"""Chooses how many thread blocks of a fused kernel communicate while its other blocks compute.

A fused kernel sends and computes at the same time: n_c of its thread blocks communicate, and the other blocks
compute (COMET, Section 3.2.2). A `Division` consists of n_c and the number of columns that are sent at a
time. COMET compiles a kernel for each division. In pmoe the division is an argument of one kernel, and this
file chooses it from measurements.
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
"""Names of the fused kernels whose thread blocks are divided between communication and computation."""
DIRECTIONS: tuple[PassDirection, ...] = get_args(PassDirection)

RULE_PART = 12
"""Without measurements, one of 12 thread blocks of a kernel communicates, and the others compute.

Example: 11 of 132 blocks communicate. The number 12 is a guess. COMET found 18 to 46 of 132 blocks best with
tensor parallelism (Figure 8).
"""

BLOCK_COUNTS = (1, 2, 4, 6, 8, 12, 16, 20, 26, 32, 40, 46)
"""Numbers of communicating thread blocks that are tried first to find a kernel's fastest division."""
BLOCK_STEP = 6
"""Above the largest of `BLOCK_COUNTS`, every sixth number of communicating thread blocks is tried.

If so many blocks communicate, one block more or less hardly changes the time.
"""

CHUNKS = (256, 512, 1024)
"""Numbers of columns that are tried as the width of the messages of the combining kernel.

The width of a whole row is tried as well.
"""


@dataclass(frozen=True, kw_only=True)
class FusedLayerSizes:
    """Sizes of a layer on one rank that determine how fast its fused kernels are.

    device_name: CUDA's name of the device.
    num_blocks: multiprocessors of the device. Each multiprocessor runs one thread block.
    num_ranks: number of ranks that share the layer's experts.
    experts: number of experts of this rank.
    rows: number of rows that this rank receives, rounded to a power of two.
    d_model, d_hidden: columns of a token, and of a hidden activation.
    gated: whether experts are SwiGLU, whose first weight (w1) has 2 d_hidden rows.
    dtype: torch's name of the rows' dtype, such as "bfloat16".
    virtual: whether the ranks share one device, so that nothing is sent over a link.

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
        """The sizes in words, without the device.

        Example: "bfloat16, 8 ranks, 1 expert, 16384 rows, 4096 x 14336 gated".
        """
        return (
            f"{self.dtype}, {self.num_ranks} {'virtual ' * self.virtual}rank{'s' * (self.num_ranks > 1)}, "
            f"{self.experts} expert{'s' * (self.experts > 1)}, {self.rows} rows, "
            f"{self.d_model} x {self.d_hidden}{' gated' * self.gated}"
        )

    @property
    def where(self) -> str:
        """The device and its number of thread blocks in words, such as "132 blocks of NVIDIA H200"."""
        return f"{self.num_blocks} blocks of {self.device_name}"

    def __str__(self) -> str:
        return f"{self.summary}, on {self.where}"


@dataclass(frozen=True, kw_only=True)
class FusedKernelSizes(FusedLayerSizes):
    """Sizes of a layer, and one of its fused kernels: the key under which measurements are stored.

    kernel: "dispatch" receives rows and multiplies them; "combine" multiplies rows, sums the results of each
        token, and sends the sums back.
    direction: "forward", or "backward" for the gradients.
    """

    kernel: FusedKernel
    direction: PassDirection

    def __str__(self) -> str:
        return f"{self.kernel} {self.direction} {super().__str__()}"


def sizes_of(sizes: FusedLayerSizes) -> FusedLayerSizes:
    """Returns the sizes of a layer without a kernel's name: the key of a layer's measured seconds.

    sizes: sizes of the layer, or sizes of one of its four kernels (dispatch and combine, forward and
        backward). These also have the kernel's name and direction, which the result does not have.
    """
    return FusedLayerSizes(**{field.name: getattr(sizes, field.name) for field in fields(FusedLayerSizes)})


def kernel_sizes(layer: FusedLayerSizes, kernel: FusedKernel, direction: PassDirection) -> FusedKernelSizes:
    """Returns the key of a kernel's measurements: the layer's sizes and the name of the kernel.

    layer: sizes of the layer.
    kernel: "dispatch" or "combine".
    direction: "forward" or "backward".
    """
    return FusedKernelSizes(kernel=kernel, direction=direction, **vars(layer))


def all_kernel_sizes(layer: FusedLayerSizes) -> list[FusedKernelSizes]:
    """Returns the keys of the measurements of a layer's four fused kernels.

    These are dispatch and combine, each forward and backward.

    layer: sizes of the layer.
    """
    return [kernel_sizes(layer, kernel, way) for kernel in KERNELS for way in DIRECTIONS]


def rule(sizes: FusedKernelSizes) -> Division:
    """Returns the division of a kernel's thread blocks that is used if nothing was measured.

    One block in 12 communicates, but at least one. The combining kernel sends its results 512 columns at a
    time.

    sizes: sizes of the kernel.
    """
    return clamped(Division(max(1, sizes.num_blocks // RULE_PART), RULE_COLUMNS), sizes)


def clamped(division: Division, sizes: FusedKernelSizes) -> Division:
    """Returns ``division``, changed as little as possible so that the kernel accepts it.

    At least one block must compute, and at most the columns of a whole row may be sent at a time.

    division: number of communicating blocks, and columns sent at a time.
    sizes: sizes of the kernel.
    """
    return Division(
        n_c=min(division.n_c, sizes.num_blocks - 1),
        chunk_columns=min(division.chunk_columns, all_columns(sizes.d_model)),
    )


def all_columns(d_model: int) -> int:
    """Returns the width of a message that holds a whole row: d_model rounded up to a multiple of 256.

    Kernels can only send multiples of 256 columns at a time. Example: 1000 -> 1024.
    """
    return COLUMNS * math.ceil(d_model / COLUMNS)


def chunk_candidates(d_model: int) -> list[int]:
    """Returns the widths of messages, in columns, that are tried for the combining kernel.

    These are the width of a whole row, and those of the numbers 256, 512 and 1024 (`CHUNKS`) that are not
    larger.
    """
    all_of_row = all_columns(d_model)
    return sorted({min(columns, all_of_row) for columns in CHUNKS} | {all_of_row})


def candidates(num_blocks: int, d_model: int | None = None) -> list[Division]:
    """Returns the divisions of a kernel's thread blocks that are measured to find the fastest.

    A division says how many blocks communicate (n_c); all other blocks compute. The values of n_c that are
    tried are the numbers in `BLOCK_COUNTS`, and every `BLOCK_STEP`-th number above the largest of them. Of
    these, 1 is always tried, and a larger n_c only if it is less than half of the blocks.

    num_blocks: thread blocks of the kernel.
    d_model: columns of a token, for the combining kernel: every n_c is tried with each of `chunk_candidates`.
        None for the dispatching kernel, which does not use the number of columns.

    Example: 8 blocks, 1024 columns -> n_c 1, 2, each with 256, 512 and 1024 columns sent at a time.
    """
    counts = [*BLOCK_COUNTS, *range(BLOCK_COUNTS[-1] + BLOCK_STEP, num_blocks, BLOCK_STEP)]
    chunks = [RULE_COLUMNS] if d_model is None else chunk_candidates(d_model)
    return [Division(n, columns) for n in counts if n == 1 or 2 * n < num_blocks for columns in chunks]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Measurements of one fused kernel: its seconds with each division of thread blocks that was tried.

    sizes: which kernel and direction, and the sizes of the layer.
    division: the division that was fastest.
    seconds: maps each division that was tried to the kernel's seconds on the slowest rank.
    when: time of the measurement, ISO 8601, UTC.
    """

    sizes: FusedKernelSizes
    division: Division
    seconds: Mapping[Division, float]
    when: str


@dataclass(frozen=True)
class LayerSeconds:
    """Measured seconds of a whole layer on the slowest rank, with fused kernels and as pipelined chunks.

    fused_forward, chunked_forward: seconds of a forward pass in inference.
    fused_step, chunked_step: seconds of a forward and a backward pass.
    when: time of the measurement, ISO 8601, UTC. All four numbers of seconds were measured in one run.
    """

    fused_forward: float
    fused_step: float
    chunked_forward: float
    chunked_step: float
    when: str

    def fused_is_faster(self, *, training: bool) -> bool:
        """Whether the layer with fused kernels was faster than the pipeline of chunks.

        training: True compares a forward and a backward pass, False a forward pass in inference.
        """
        if training:
            return self.fused_step < self.chunked_step
        return self.fused_forward < self.chunked_forward


@dataclass(frozen=True)
class DivisionTable:
    """All stored measurements of fused kernels, from all devices. COMET calls these measurements metadata.

    entries: measurements of single kernels.
    layers: measured seconds of whole layers, fused and in chunks.
    """

    entries: Mapping[FusedKernelSizes, Entry] = field(default_factory=dict)
    layers: Mapping[FusedLayerSizes, LayerSeconds] = field(default_factory=dict)

    def find(self, kernel: FusedKernelSizes) -> tuple[Division, str]:
        """Returns the division of thread blocks that a kernel should use, and the reason in words.

        The division is the first of these that exists:

        1. measured: the fastest division that was measured for exactly this kernel and these sizes.
        2. nearest: the fastest division that was measured for the same kernel, direction and dtype with the
           nearest sizes (`distance`). A measurement with the same device, number of blocks and sort of ranks
           (real or virtual) is always preferred to others. If the device of the measurement has another
           number of blocks, the number of communicating blocks is scaled in proportion.
        3. rule: one of 12 blocks communicates (`rule`).

        The returned division leaves at least one block to compute, and sends at most a whole row at a time.

        kernel: sizes of the kernel.
        """
        exact = self.entries.get(kernel)
        if exact is not None:
            return clamped(exact.division, kernel), f"measured {exact.when}"
        work_of = operator.attrgetter("kernel", "direction", "dtype")
        same_work = (
            candidate for candidate in self.entries.values() if work_of(candidate.sizes) == work_of(kernel)
        )
        entry = min(same_work, key=lambda candidate: _apart(candidate.sizes, kernel), default=None)
        if entry is None:
            kernel_text = f"{kernel.kernel} {kernel.direction} in {kernel.dtype}"
            return rule(kernel), f"rule: no measurement of {kernel_text}"
        division = entry.division
        why = f"nearest: {entry.sizes.summary}, measured {entry.when}"
        if _elsewhere(entry.sizes, kernel):
            own_blocks, entry_blocks = kernel.num_blocks, entry.sizes.num_blocks
            scaled = (2 * division.n_c * own_blocks + entry_blocks) // (2 * entry_blocks)  # rounded half up
            division = Division(max(scaled, 1), division.chunk_columns)
            why += f" on {entry.sizes.where}"
            if own_blocks != entry_blocks:
                why += f", n_c {entry.division.n_c} scaled to {division.n_c}"
        return clamped(division, kernel), why

    def find_layer_times(self, sizes: FusedLayerSizes) -> LayerSeconds | None:
        """Returns the measured seconds of a layer of about these sizes; None if there is no measurement.

        All sizes except the number of rows must be the same. Measurements are looked up with the same number
        of rows, then with twice as many, then with half as many. Fused kernels gain less with more rows
        (COMET, Section 5.3). So a measurement with twice as many rows is on the safe side: it shows too
        little gain rather than too much.

        sizes: sizes of the layer.
        """
        for rows in (sizes.rows, 2 * sizes.rows, sizes.rows // 2):
            times = self.layers.get(replace(sizes, rows=rows)) if rows else None
            if times is not None:
                return times
        return None


# ---- the nearest entry


def distance(one: FusedLayerSizes, other: FusedLayerSizes) -> float:
    """Returns how different two sizes are: the sum of |log2 of the ratio| over five of their numbers.

    The numbers are rows, d_model, d_hidden, experts and ranks. If only one of the two layers has gated
    experts, the distance is 1 larger, because the w1 of gated experts has twice as many rows.

    Example: twice the rows and a quarter of the experts -> 3.
    """
    names = ("rows", "d_model", "d_hidden", "experts", "num_ranks")
    ratios = (abs(math.log2(getattr(one, name) / getattr(other, name))) for name in names)
    # The sum is rounded, so that equal distances are equal numbers, which `_apart` then orders by text.
    return round(sum(ratios) + (one.gated != other.gated), 9)


def _elsewhere(one: FusedLayerSizes, other: FusedLayerSizes) -> bool:
    """Returns whether two measurements differ in device, number of thread blocks, or sort of ranks.

    Real ranks have a device each. Virtual ranks share one device, so nothing is sent over a link.
    """
    places = ((sizes.device_name, sizes.num_blocks, sizes.virtual) for sizes in (one, other))
    return len(set(places)) > 1


def _apart(entry: FusedKernelSizes, wanted: FusedKernelSizes) -> tuple[bool, float, str]:
    """Returns a key that sorts stored measurements, so that the nearest to the wanted sizes comes first.

    Measurements that match ``wanted`` in device, number of thread blocks and kind of ranks (real or virtual)
    come before all others. Equally near sizes are ordered by their text, so that all ranks agree.

    entry: sizes of a stored measurement.
    wanted: the wanted sizes.
    """
    return _elsewhere(entry, wanted), distance(entry, wanted), str(entry)
