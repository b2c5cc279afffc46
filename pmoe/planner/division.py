"""The division point of a fused kernel: how many of its thread blocks communicate while the others compute.

COMET measures it before deployment for each shape, parallelism and device, and looks it up as metadata
(arXiv 2502.19811, Section 3.2.2, "Adaptive thread block assignment"). There every division is a kernel of
its own; here it is an argument of one kernel, which a new table changes without a compiler. `Table.find` is

    measured   where it holds this very shape: the division that was fastest
    nearest    else: that of the nearest shape of the same kernel, direction and dtype, see `distance`; one
               that was measured elsewhere (another device, or another number of its blocks, or ranks of the
               other kind) counts only where none was measured here, scaled by the ratio of the blocks
    rule       else: `rule`

`fill` measures entries, pmoe/measure/division_file.py keeps them, pmoe/measure/division.py has ranks agree.
Nothing here needs a GPU or a process group.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from typing import Literal

import torch

from pmoe.comm.agree import Agree, digest
from pmoe.kernels.buckets import bucket

Kernel = Literal["dispatch", "combine"]
Direction = Literal["forward", "backward"]
KERNELS: tuple[Kernel, ...] = ("dispatch", "combine")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

COLUMNS = 256
"""A chunk of the combining kernel is a multiple of so many columns."""

RULE_PART, RULE_COLUMNS = 12, 512
"""Where nothing is measured a twelfth of the blocks communicates, 11 of 132: a guess, below the 18 to 46 that
COMET found best with tensor parallelism (Figure 8)."""

BLOCK_COUNTS = (1, 2, 4, 6, 8, 12, 16, 20, 26, 32, 40, 46)
BLOCK_STEP = 6
"""A sweep tries these, and goes on in such steps: one block more matters less, the more there are."""

CHUNKS = (256, 512, 1024)
"""A sweep of the combining kernel tries these, and all columns at once."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a layer is to its fused kernels, on one rank.

    num_blocks: multiprocessors of the device, one thread block each. experts: of this rank. rows: that it
    receives, a power of two as `pmoe.kernels.buckets.bucket` gives. gated: SwiGLU, whose w1 has 2 d_hidden
    rows. dtype: as torch names it, "bfloat16". virtual: the ranks share one device, so that rows travel
    through its own memory and over no link. Raises ValueError for sizes that no layer has.
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
        for each in fields(Sizes):
            value: object = getattr(self, each.name)
            kind = {"int": int, "str": str, "bool": bool}[str(each.type)]
            if type(value) is not kind:  # a bool is no number here
                raise ValueError(f"{each.name} ({value!r}) must be of type {kind.__name__}")
            least = 2 if each.name == "num_blocks" else 1
            if isinstance(value, int) and kind is int and value < least:
                raise ValueError(f"{each.name} ({value}) must be at least {least}")
        if self.rows != bucket(self.rows):
            raise ValueError(f"rows ({self.rows}) must be a power of two: {bucket(self.rows)}")
        dtype = getattr(torch, self.dtype, None)
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype ({self.dtype!r}) must name a floating-point type of torch")

    @property
    def told(self) -> str:
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
        return f"{self.told}, on {self.where}"


@dataclass(frozen=True, kw_only=True)
class Shape(Sizes):
    """One fused kernel of such a layer. dispatch: rows travel, then their product; combine: a product, whose
    sums travel back. backward: of the gradients. Raises ValueError as `Sizes` does."""

    kernel: Kernel
    direction: Direction

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("kernel", KERNELS), ("direction", DIRECTIONS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} ({value!r}) must be one of {', '.join(known)}")

    def __str__(self) -> str:
        return f"{self.kernel} {self.direction} {super().__str__()}"


def sizes_of(shape: Sizes) -> Sizes:
    """Those of the layer that a kernel's shape is of; equal to those of its other kernels."""
    return Sizes(**{each.name: getattr(shape, each.name) for each in fields(Sizes)})


def kernel_shape(sizes: Sizes, kernel: Kernel, direction: Direction) -> Shape:
    """One of the kernels of such a layer."""
    given = {each.name: getattr(sizes, each.name) for each in fields(Sizes)}
    return Shape(kernel=kernel, direction=direction, **given)


@dataclass(frozen=True, order=True)
class Division:
    """n_c: thread blocks that communicate; the others compute. chunk_columns: T_N, the columns that the
    combining kernel finishes before they leave, a multiple of 256; the dispatching kernel has no use for it.

    Raises ValueError for n_c below 1, and other chunk_columns.
    """

    n_c: int
    chunk_columns: int = RULE_COLUMNS

    def __post_init__(self) -> None:
        if type(self.n_c) is not int or self.n_c < 1:
            raise ValueError(f"n_c ({self.n_c!r}) must be a whole number of at least 1")
        columns = self.chunk_columns
        if type(columns) is not int or columns < COLUMNS or columns % COLUMNS:
            raise ValueError(f"chunk_columns ({columns!r}) must be a multiple of {COLUMNS}, and not 0")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What was measured of a shape. seconds: of each division tried, on the slowest rank; division: the
    fastest. when: ISO 8601, UTC. Raises ValueError where division is not among seconds, or a time is none."""

    shape: Shape
    division: Division
    seconds: Mapping[Division, float]
    when: str

    def __post_init__(self) -> None:
        if self.division not in self.seconds:
            raise ValueError(f"division ({self.division}) must be among those measured")
        for division, seconds in self.seconds.items():
            _check_seconds(f"seconds of {division}", seconds)


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Of a whole layer, on the slowest rank: with the fused kernels, and as a pipeline of chunks. forward: in
    inference. step: forward and backward. Raises ValueError for a time that is none."""

    fused_forward: float
    fused_step: float
    chunked_forward: float
    chunked_step: float

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_seconds(each.name, getattr(self, each.name))

    def fused_is_faster(self, *, training: bool) -> bool:
        if training:
            return self.fused_step < self.chunked_step
        return self.fused_forward < self.chunked_forward


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Both ways, measured in one run. when: ISO 8601, UTC."""

    sizes: Sizes
    seconds: LayerSeconds
    when: str


@dataclass(frozen=True)
class Table:
    """What has been measured, of any devices."""

    entries: Mapping[Shape, Entry] = field(default_factory=dict)
    layers: Mapping[Sizes, LayerTimes] = field(default_factory=dict)

    def find(self, shape: Shape) -> tuple[Division, str]:
        """(the division, why) as at the top of this file. n_c is within 1 .. num_blocks - 1, and a chunk has
        no more columns than d_model needs."""
        exact = self.entries.get(shape)
        if exact is not None:
            return clamped(exact.division, shape), f"measured {exact.when}"
        alike = (each for each in self.entries.values() if _same_work(each.shape, shape))
        entry = min(alike, key=lambda each: _order(each.shape, shape), default=None)
        if entry is None:
            of = f"{shape.kernel} {shape.direction} in {shape.dtype}"
            return rule(shape), f"rule: nothing measured of {of}"
        division, why = entry.division, f"nearest: {entry.shape.told}, measured {entry.when}"
        if _elsewhere(entry.shape, shape):
            here, there = shape.num_blocks, entry.shape.num_blocks
            scaled = (2 * division.n_c * here + there) // (2 * there)  # rounded half up
            division = Division(max(scaled, 1), division.chunk_columns)
            why += f" on {entry.shape.where}"
            if here != there:
                why += f", n_c {entry.division.n_c} scaled to {division.n_c}"
        return clamped(division, shape), why

    def find_layer_times(self, sizes: Sizes) -> LayerTimes | None:
        """Of these very sizes, else of twice or half as many rows and equal sizes otherwise, else None. Where
        both were measured those of more rows count, which favour fusion less (COMET, Section 5.3)."""
        plain = sizes_of(sizes)
        for rows in (sizes.rows, 2 * sizes.rows, sizes.rows // 2):
            found = self.layers.get(replace(plain, rows=rows)) if rows else None
            if found is not None:
                return found
        return None


def rule(shape: Shape) -> Division:
    """Where nothing is measured: a twelfth of the blocks, at least one, and chunks of 512 columns.

    Example: 132 blocks -> n_c=11.
    """
    return clamped(Division(max(1, shape.num_blocks // RULE_PART), RULE_COLUMNS), shape)


def clamped(division: Division, shape: Shape) -> Division:
    """As the kernel takes it: at least one block computes, and no chunk is wider than all columns."""
    return Division(
        n_c=min(division.n_c, shape.num_blocks - 1),
        chunk_columns=min(division.chunk_columns, all_columns(shape.d_model)),
    )


def all_columns(d_model: int) -> int:
    """Of a chunk that holds them all. Example: 1000 -> 1024."""
    return COLUMNS * math.ceil(d_model / COLUMNS)


# ---- which entry is nearest


def distance(one: Sizes, other: Sizes) -> float:
    """In powers of two: the sum of |log2 of the ratio| over rows, d_model, d_hidden, experts and num_ranks.
    Gated beside plain is one more: w1 has twice as many rows.

    Example: twice the rows and a quarter of the experts -> 3.
    """
    names = ("rows", "d_model", "d_hidden", "experts", "num_ranks")
    ratios = (abs(math.log2(getattr(one, name) / getattr(other, name))) for name in names)
    return round(sum(ratios) + (one.gated != other.gated), 9)  # equal distances must be equal numbers


def _same_work(one: Shape, other: Shape) -> bool:
    return (one.kernel, one.direction, one.dtype) == (other.kernel, other.direction, other.dtype)


def _elsewhere(one: Sizes, other: Sizes) -> bool:
    places = ((each.device_name, each.num_blocks, each.virtual) for each in (one, other))
    return len(set(places)) > 1


def _order(entry: Shape, wanted: Shape) -> tuple[object, ...]:
    """The least is the nearest. Behind the distance stands what settles ties, always alike: the same gating,
    then fewer rows and lesser sizes, then the place."""
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


# ---- measuring


def candidates(num_blocks: int, d_model: int | None = None) -> list[Division]:
    """The divisions of a sweep: `BLOCK_COUNTS` and on, below half of the blocks (1 always). With ``d_model``
    each of them with each of `CHUNKS` and all columns, as the combining kernel needs it; without, the
    dispatching kernel's, whose chunk_columns are the rule's.

    Example: 8 blocks, 1024 columns -> n_c 1, 2 with chunks 256, 512, 1024.
    """
    counts = [*BLOCK_COUNTS, *range(BLOCK_COUNTS[-1] + BLOCK_STEP, num_blocks, BLOCK_STEP)]
    chunks = [RULE_COLUMNS]
    if d_model is not None:
        every = all_columns(d_model)
        chunks = sorted({min(each, every) for each in CHUNKS} | {every})
    return [Division(n, columns) for n in counts if n == 1 or 2 * n < num_blocks for columns in chunks]


def fill(shapes: Sequence[Shape], time: Callable[[Shape, Division], float], agree: Agree) -> list[Entry]:
    """Measures every candidate of every shape, and what `rule` would take beside them; the entries of those
    that could be measured.

    Collective: one reduction, and one more a shape. time: seconds of one division on this rank, a median of
    rounds; it may be collective, since all ranks try the same divisions in the same order. Where it raises on
    one rank, the division does not count on any: that is told by a warning, never by an exception on one rank
    alone. The slowest rank's seconds count; of equal ones those of fewer communicating blocks.

    Raises ValueError on every rank where the ranks come with unlike shapes.
    """
    check_alike(map(str, shapes), agree, "shapes to measure")
    told: set[str] = set()

    def timed(shape: Shape, division: Division) -> float:
        try:
            seconds = float(time(shape, division))
            _check_seconds("seconds", seconds)
            return seconds
        except Exception as error:
            if str(error) not in told:
                told.add(str(error))
                warnings.warn(f"pmoe: {division} of {shape} could not be measured: {error}", stacklevel=3)
            return math.inf

    found = []
    for shape in shapes:
        columns = shape.d_model if shape.kernel == "combine" else None
        tried = sorted(
            {clamped(each, shape) for each in candidates(shape.num_blocks, columns)} | {rule(shape)}
        )
        slowest = agree([timed(shape, each) for each in tried])
        seconds = {each: took for each, took in zip(tried, slowest, strict=True) if math.isfinite(took)}
        if seconds:
            best = min(seconds, key=lambda each: (seconds[each], each))
            found.append(Entry(shape=shape, division=best, seconds=seconds, when=now()))
    return found


def check_alike(keys: Iterable[str], agree: Agree, what: str) -> None:
    """Collective. ValueError on every rank where the ranks' keys differ."""
    here = float(digest(keys))
    most, least = agree([here, -here])
    if most != -least:
        raise ValueError(f"{what} must be the same on every rank, and differ")


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _check_seconds(name: str, value: float) -> None:
    if type(value) is not float or not 0 <= value < math.inf:
        raise ValueError(f"{name} ({value!r}) must be a finite float of at least 0")
