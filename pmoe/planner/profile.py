"""What a device and a group of ranks can do, measured once and kept in a file (MPipeMoE, Section II.C).

Costs of each kind of work are straight lines, measured alone; how much computation, communication and copies
slow each other is measured side by side. All ranks hold the same profile: the numbers of the slowest.

`measure` and `load_or_measure` are collective: how often a rank measures, and how much, follows from numbers
that all ranks have agreed on, never from its own clock.

W ranks, WIDTH the columns and rows of the measured weight.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import json
import math
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import combinations, pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.counts import at_stage
from pmoe.comm.ranks import Ranks
from pmoe.planner.cost_model import Interference, Rates
from pmoe.planner.costs import LineCost, fit_line

FORMAT = 1
"""Of the file. Rises with every change of what a field means."""

COMPUTE, COMMUNICATE, COPY = "compute", "communicate", "copy"

WIDTH = {"cpu": 512, "cuda": 4096}
MOST_ROWS = {"cpu": 8192, "cuda": 16384}
FIRST_ROWS = {"cpu": 64, "cuda": 256}
"""By device type: the measured weight is WIDTH x WIDTH; the number of rows that it is applied to grows from
the first to the most, until a product is long enough to be timed."""

FIRST_MESSAGE_BYTES, FIRST_COPY_BYTES, MOST_BYTES = 2**14, 2**20, 2**26
"""Messages and copies likewise."""

TRIES = 7
"""Of each size in that search. Beside other processes a message may take many times its fastest."""

LEAST_SPEED = 1e-3
"""A lane that others bring to a stand has this relative speed, since a factor of zero has no inverse."""


class CorruptProfileError(ValueError):
    """The text is no profile: no JSON, a field missing, or one of another type."""


@dataclass(frozen=True, kw_only=True)
class Versions:
    """torch and the CUDA it was built with (None: without), and the file's own format."""

    torch: str
    cuda: str | None
    file: int


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What must be the same for a profile to hold. backend is "none" where num_ranks is 1."""

    device: str
    device_type: str
    num_ranks: int
    backend: str
    dtype: str
    versions: Versions


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs, and whose they are: the first six fields are those of `Identity`.

    compute: seconds by multiply-adds. message: seconds by bytes that a rank sends to others, in an all-to-all
    with equal splits (zero where num_ranks is 1). copy_out, copy_in: seconds by bytes from the device to the
    host and back. seconds: how long measuring took. when: the end of it, ISO 8601, UTC.
    """

    device: str
    device_type: str
    num_ranks: int
    backend: str
    dtype: str
    versions: Versions
    compute: LineCost
    message: LineCost
    copy_out: LineCost
    copy_in: LineCost
    interference: Interference
    seconds: float
    when: str

    @property
    def identity(self) -> Identity:
        return Identity(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Identity)})

    def rates(self, element_size: int) -> Rates:
        """For Eq. 10, with elements of ``element_size`` bytes: of large tasks, so without what a task costs
        whatever its size. Copies go at the slower direction's rate. On one rank nothing travels, and
        communication is as fast as a float can say."""
        copy = max(self.copy_out.beta_seconds, self.copy_in.beta_seconds)
        return Rates(
            compute=_rate(self.compute.beta_seconds),
            communicate=_rate(self.message.beta_seconds * element_size),
            copy=_rate(copy * element_size),
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """The inverse of `to_json`. Raises CorruptProfileError, or ValueError for another format version."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise CorruptProfileError(f"no JSON ({error})") from None
        versions = fields.get("versions") if isinstance(fields, dict) else None
        found = versions.get("file", FORMAT) if isinstance(versions, dict) else FORMAT
        if isinstance(found, int) and found != FORMAT:
            raise ValueError(f"format version ({found}) must be {FORMAT}")
        profile: Profile = _restored(cls, fields, "profile")
        return profile


# ---- the file


def identity(ranks: Ranks, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Identity:
    """Whose profile it is that `measure` would take here. Not collective.

    Raises ValueError for a device that is neither a CPU nor CUDA, and a dtype that is not floating point.
    """
    device = torch.device(device)
    if device.type not in WIDTH:
        raise ValueError(f"device ({device}) must be one of the types {', '.join(WIDTH)}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype ({dtype}) must be floating point")
    return Identity(
        device=_device_name(device),
        device_type=device.type,
        num_ranks=ranks.size,
        backend=_backend(ranks, device),
        dtype=str(dtype).removeprefix("torch."),
        versions=Versions(torch=str(torch.__version__), cuda=torch.version.cuda, file=FORMAT),
    )


def profile_path(profile: Profile | Identity, folder: str | os.PathLike[str] | None = None) -> Path:
    """The file that holds it, named after its identity: in ``folder``, or $PMOE_CACHE, or ~/.cache/pmoe."""
    who = profile.identity if isinstance(profile, Profile) else profile
    if folder is None:
        folder = os.environ.get("PMOE_CACHE") or Path.home() / ".cache" / "pmoe"
    parts = [
        who.device,
        f"{who.num_ranks} ranks",
        who.backend,
        who.dtype,
        f"torch {who.versions.torch}",
        f"cuda {who.versions.cuda}" if who.versions.cuda else "no cuda",
        f"v{who.versions.file}",
    ]
    return Path(folder) / ("_".join(_slug(part) for part in parts) + ".json")


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Writes the whole file or none: a reader never sees half of it. Makes the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".profile-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(profile.to_json())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str], *, expected: Identity | None = None) -> Profile:
    """The profile in the file, whose identity must be ``expected`` unless that is None.

    Raises FileNotFoundError; CorruptProfileError where the file holds no profile; ValueError where it holds
    that of another device, number of ranks, backend, dtype or version, naming what it holds and what is here.
    """
    try:
        profile = Profile.from_json(Path(path).read_bytes())
    except ValueError as error:
        raise type(error)(f"{path}: {error}") from None
    if expected is not None and profile.identity != expected:
        held, here = (_flat(asdict(who)) for who in (profile.identity, expected))
        told = "; ".join(
            f"{name} {held[name]!r}, here {here[name]!r}" for name in held if held[name] != here[name]
        )
        raise ValueError(f"{path}: holds the profile of {told}")
    return profile


def load_or_measure(
    ranks: Ranks,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    folder: str | os.PathLike[str] | None = None,
    quick: bool = True,
) -> Profile:
    """The profile from its file (see `profile_path`) where every rank has a good one, else measured and saved
    by rank 0. Collective; every rank returns the same profile.

    A file that cannot be used is told of in one warning and replaced. A folder that cannot be written costs a
    warning too, and the measuring again next time. Ranks on unlike devices measure every time.
    """
    here = identity(ranks, device, dtype)
    path = profile_path(here, folder)
    found, fault = None, None
    try:
        found = load(path, expected=here)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        fault = error
    place = ranks.size - ranks.rank  # the largest among the ranks with a fault is the one that tells
    group = _Group(ranks, torch.device(device))
    missing, telling = group.largest([float(found is None), float(place if fault else 0)])
    if fault and telling == place:
        warnings.warn(f"{fault}; measured again", stacklevel=2)
    if found is not None and not missing:
        return Profile.from_json(group.from_rank_0(found.to_json()))
    profile = measure(ranks, device, dtype, quick=quick)
    if ranks.rank == 0:
        try:
            save(profile, path)
        except OSError as error:  # must not stop one rank alone
            warnings.warn(
                f"the profile could not be saved, and will be measured again: {error}", stacklevel=2
            )
    return profile


# ---- measuring


@dataclass(frozen=True, kw_only=True)
class _Effort:
    """piece_seconds: the longest of the three sizes of each line. span_seconds: how long lanes run side by
    side. repeats: of each size. rounds: of each combination of lanes."""

    piece_seconds: float
    span_seconds: float
    repeats: int
    rounds: int


QUICK = _Effort(piece_seconds=2e-3, span_seconds=0.024, repeats=9, rounds=2)
FULL = _Effort(piece_seconds=5e-3, span_seconds=0.1, repeats=15, rounds=7)

Piece = Callable[[], object]
Marks = list[float]
"""Seconds on some clock: when a lane began, and when it ended each of its pieces."""


def measure(
    ranks: Ranks,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    quick: bool = False,
) -> Profile:
    """Collective; every rank returns the same profile, after some ten seconds, or one or two where quick.

    The device and the ranks should have nothing else to do meanwhile. Raises as `identity` does, and
    RuntimeError where a peer fails.
    """
    begin = time.perf_counter()
    device = torch.device(device)
    who, group, effort = identity(ranks, device, dtype), _Group(ranks, device), QUICK if quick else FULL
    lines: dict[str, LineCost] = {}
    pieces: dict[str, Piece] = {}
    with torch.inference_mode(False), torch.no_grad(), _bench(group) as bench:
        for name, kind in _kinds(bench, dtype).items():
            units = _units(bench, kind, effort)
            lines[name] = _line(bench, kind, units, effort)
            pieces[name] = kind.make(units)
        interference = _interference(bench, _by_lane(pieces), effort)
    profile = Profile(
        **{field.name: getattr(who, field.name) for field in dataclasses.fields(Identity)},
        compute=lines["compute"],
        message=lines.get("message", LineCost(0.0, 0.0)),
        copy_out=lines["copy_out"],
        copy_in=lines["copy_in"],
        interference=interference,
        seconds=time.perf_counter() - begin,
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    return Profile.from_json(group.from_rank_0(profile.to_json()))


class _Group:
    """The ranks, with what they agree by."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest that a rank has. Every rank gives as many. Also a barrier."""
        if self.ranks.size == 1:
            return list(values)
        with at_stage("agreeing on a profile", self.ranks):
            agreed = torch.tensor(values, dtype=torch.float64, device=self.device)
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.ranks.group)
            return [float(value) for value in agreed.tolist()]

    def from_rank_0(self, text: str) -> str:
        """What rank 0 has."""
        if self.ranks.size == 1:
            return text
        encoded = text.encode()
        [length] = self.largest([float(len(encoded)) if self.ranks.rank == 0 else 0.0])
        content = torch.zeros(int(length), dtype=torch.uint8)
        if self.ranks.rank == 0:
            content = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        content = content.to(self.device)
        group = self.ranks.group
        source = 0 if group is None else dist.get_global_rank(group, 0)
        with at_stage("sharing a profile", self.ranks):
            dist.broadcast(content, source, group=group)
            return bytes(content.tolist()).decode()


class _Bench(abc.ABC):
    """Runs pieces of work on three lanes, as the engine would."""

    def __init__(self, group: _Group) -> None:
        self.group = group

    @abc.abstractmethod
    def run(self, work: Mapping[str, tuple[Piece, int]]) -> dict[str, Marks]:
        """Each lane repeats its piece so many times, one after another; the lanes side by side."""

    @abc.abstractmethod
    def host_buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        """On the host, already touched, and such that copies there need not wait."""


class _CpuBench(_Bench):
    """Computes on the calling thread; messages and copies have a thread each."""

    def __init__(self, group: _Group, threads: Mapping[str, ThreadPoolExecutor]) -> None:
        super().__init__(group)
        self._threads = threads

    def run(self, work: Mapping[str, tuple[Piece, int]]) -> dict[str, Marks]:
        started = {
            lane: self._threads[lane].submit(_repeat, *todo) for lane, todo in work.items() if lane != COMPUTE
        }
        marks = {COMPUTE: _repeat(*work[COMPUTE])} if COMPUTE in work else {}
        return marks | {lane: future.result() for lane, future in started.items()}

    def host_buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.ones(elements, dtype=dtype, device="cpu")


class _CudaBench(_Bench):
    """Computes on the current stream; messages and copies have a stream each. The host runs ahead."""

    def __init__(self, group: _Group) -> None:
        super().__init__(group)
        device = group.device
        self._streams = {
            COMPUTE: torch.cuda.current_stream(device),
            COMMUNICATE: torch.cuda.Stream(device),
            COPY: torch.cuda.Stream(device),
        }

    def run(self, work: Mapping[str, tuple[Piece, int]]) -> dict[str, Marks]:
        def mark(lane: str) -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._streams[lane])
            return event

        torch.cuda.synchronize(self.group.device)  # what the caller enqueued, and the buffers' first values
        origin = mark(COMPUTE)
        for lane in work:
            self._streams[lane].wait_event(origin)
        events = {lane: [mark(lane)] for lane in work}
        for i in range(max(count for _, count in work.values())):
            for lane, (piece, count) in work.items():
                if i < count:
                    with torch.cuda.stream(self._streams[lane]):
                        piece()
                    events[lane].append(mark(lane))
        torch.cuda.synchronize(self.group.device)  # so the pieces' buffers are free to go, too
        return {lane: [origin.elapsed_time(event) / 1e3 for event in row] for lane, row in events.items()}

    def host_buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.ones(elements, dtype=dtype, device="cpu", pin_memory=True)


@contextmanager
def _bench(group: _Group) -> Iterator[_Bench]:
    if group.device.type == "cuda":
        with torch.cuda.device(group.device):
            yield _CudaBench(group)
    else:
        with ThreadPoolExecutor(1) as communicate, ThreadPoolExecutor(1) as copy:
            yield _CpuBench(group, {COMMUNICATE: communicate, COPY: copy})


def _repeat(piece: Piece, count: int) -> Marks:
    marks = [time.perf_counter()]
    for _ in range(count):
        piece()
        marks.append(time.perf_counter())
    return marks


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A kind of work, in units of ``size`` multiply-adds or bytes. make(units) gives one piece of it."""

    lane: str
    size: float
    first_units: int
    most_units: int
    make: Callable[[int], Piece]


def _kinds(bench: _Bench, dtype: torch.dtype) -> dict[str, _Kind]:
    """By the name of their line in a `Profile`."""
    ranks, device = bench.group.ranks, bench.group.device
    generator = torch.Generator(device).manual_seed(0)  # the caller's random numbers stay as they are
    others = ranks.size - 1

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    width = WIDTH[device.type]
    weight = made(width, width)

    def compute(rows: int) -> Piece:
        x, y = made(rows, width), made(rows, width)
        return lambda: torch.mm(x, weight, out=y)

    def message(elements: int) -> Piece:
        sent, received = made(elements * others), made(elements * others)
        splits = [elements] * ranks.size
        splits[ranks.rank] = 0  # own rows are not sent

        def exchange() -> None:
            with at_stage("measuring messages", ranks):
                work = dist.all_to_all_single(
                    received, sent, splits, splits, group=ranks.group, async_op=True
                )
                if work is not None:
                    work.wait()

        return exchange

    def copy_out(elements: int) -> Piece:
        inside, outside = made(elements), bench.host_buffer(elements, dtype)
        return lambda: outside.copy_(inside, non_blocking=True)

    def copy_in(elements: int) -> Piece:
        inside, outside = made(elements), bench.host_buffer(elements, dtype)
        return lambda: inside.copy_(outside, non_blocking=True)

    kinds = {
        "compute": _Kind(
            lane=COMPUTE,
            size=width * width,
            first_units=FIRST_ROWS[device.type],
            most_units=MOST_ROWS[device.type],
            make=compute,
        )
    }
    if others:
        size = others * dtype.itemsize
        kinds["message"] = _Kind(
            lane=COMMUNICATE,
            size=size,
            first_units=max(16, FIRST_MESSAGE_BYTES // size),
            most_units=max(64, MOST_BYTES // size),
            make=message,
        )
    for name, make in (("copy_out", copy_out), ("copy_in", copy_in)):
        kinds[name] = _Kind(
            lane=COPY,
            size=dtype.itemsize,
            first_units=FIRST_COPY_BYTES // dtype.itemsize,
            most_units=MOST_BYTES // dtype.itemsize,
            make=make,
        )
    return kinds


def _seconds(
    bench: _Bench,
    lane: str,
    piece: Piece,
    repeats: int,
    of: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Of one piece alone: the median (or what ``of`` takes) here, the slowest rank's of those. The first is
    not counted."""
    bench.group.largest([0.0])  # begin together
    marks = bench.run({lane: (piece, repeats + 1)})[lane][1:]
    return bench.group.largest([of([end - begin for begin, end in pairwise(marks)])])[0]


def _units(bench: _Bench, kind: _Kind, effort: _Effort) -> int:
    """Enough for a piece of ``effort.piece_seconds``, and for three times the seconds of the first try: where
    a task costs much whatever its size, size must show beside it. The fastest of a few tries counts, since an
    interruption would make pieces too small."""
    units = kind.first_units
    first = seconds = _seconds(bench, kind.lane, kind.make(units), TRIES, min)
    while units < kind.most_units and (seconds < effort.piece_seconds / 2 or seconds < 3 * first):
        units = min(kind.most_units, 4 * units)
        seconds = _seconds(bench, kind.lane, kind.make(units), TRIES, min)
    if seconds < effort.piece_seconds:
        units = min(kind.most_units, int(units * effort.piece_seconds / seconds))
    return units


def _line(bench: _Bench, kind: _Kind, units: int, effort: _Effort) -> LineCost:
    """Through three sizes. Where caches or noise make the smaller cheaper than any line from zero or above,
    the line goes from zero through the largest."""
    samples = [
        (part * kind.size, _seconds(bench, kind.lane, kind.make(part), effort.repeats))
        for part in (units // 16, units // 4, units)
    ]
    line = fit_line(samples)
    if line.alpha_seconds < 0 or line.beta_seconds <= 0:
        size, seconds = samples[-1]
        return LineCost(0.0, seconds / size)
    return line


FACTORS = {
    "mu_comp": (COMMUNICATE, (COMPUTE, COMMUNICATE)),
    "mu_mem": (COMMUNICATE, (COMMUNICATE, COPY)),
    "mu_all": (COMMUNICATE, (COMPUTE, COMMUNICATE, COPY)),
    "sigma_comm": (COMPUTE, (COMPUTE, COMMUNICATE)),
    "sigma_mem": (COMPUTE, (COMPUTE, COPY)),
    "sigma_all": (COMPUTE, (COMPUTE, COMMUNICATE, COPY)),
    "eta_comm": (COPY, (COMMUNICATE, COPY)),
    "eta_comp": (COPY, (COMPUTE, COPY)),
    "eta_all": (COPY, (COMPUTE, COMMUNICATE, COPY)),
}
"""Fig. 3: whose speed, and which lanes are busy."""


def _by_lane(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    """One piece a lane, in the order of FACTORS; that of the copies goes out and in."""
    copy_out, copy_in = pieces["copy_out"], pieces["copy_in"]
    found = {COMPUTE: pieces["compute"]}
    if "message" in pieces:
        found[COMMUNICATE] = pieces["message"]
    return found | {COPY: lambda: (copy_out(), copy_in())}


def _interference(bench: _Bench, pieces: Mapping[str, Piece], effort: _Effort) -> Interference:
    """Every lane gets so many pieces that they take about the same time alone. Beside messages, whose number
    all ranks must know beforehand, the others get twice as many, to be busy all the while. Speeds are those
    of the time in which all lanes are busy, so it does not matter which of them ends first."""
    alone = {lane: _seconds(bench, lane, piece, TRIES, min) for lane, piece in pieces.items()}
    span = max(effort.span_seconds, 4 * max(alone.values()))
    count = {lane: math.ceil(span / seconds) for lane, seconds in alone.items()}

    def run(lanes: Sequence[str]) -> dict[str, float]:
        bench.group.largest([0.0])  # begin together
        longer = 2 if COMMUNICATE in lanes and len(lanes) > 1 else 1
        return speeds(
            bench.run(
                {lane: (pieces[lane], count[lane] * (1 if lane == COMMUNICATE else longer)) for lane in lanes}
            )
        )

    together = [lanes for several in (2, 3) for lanes in combinations(pieces, several)]
    relative: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for _ in range(effort.rounds):
        full = {lane: run([lane])[lane] for lane in pieces}
        for lanes in together:
            for lane, speed in run(lanes).items():
                relative.setdefault((lane, lanes), []).append(speed / full[lane])
    # Without messages, "all" are the two lanes that there are.
    lanes_of = {name: tuple(lane for lane in lanes if lane in pieces) for name, (_, lanes) in FACTORS.items()}
    names = [name for name, (lane, _) in FACTORS.items() if (lane, lanes_of[name]) in relative]
    slowness = [-statistics.median(relative[FACTORS[name][0], lanes_of[name]]) for name in names]
    slowest = bench.group.largest(slowness)
    return Interference(
        **{name: min(1.0, max(LEAST_SPEED, -s)) for name, s in zip(names, slowest, strict=True)}
    )


def speeds(marks: Mapping[str, Marks]) -> dict[str, float]:
    """Pieces a second of each lane, from when the last lane began until the first lane ended. A piece under
    way counts by its part in that time. Lanes that never ran together count from the first to the last mark.

    Example: {a: 0, 2, 4, 6; b: 1, 5} -> from 1 to 5, a: 2 pieces, 0.5 a second, b: 1 piece, 0.25 a second.
    """
    begin, end = max(row[0] for row in marks.values()), min(row[-1] for row in marks.values())
    if end <= begin:
        begin, end = min(row[0] for row in marks.values()), max(row[-1] for row in marks.values())
    return {lane: (_done(row, end) - _done(row, begin)) / (end - begin) for lane, row in marks.items()}


def _done(marks: Marks, moment: float) -> float:
    """How many pieces had ended by then."""
    if moment >= marks[-1]:
        return len(marks) - 1
    i = bisect.bisect_right(marks, moment)
    if i == 0:
        return 0.0
    return i - 1 + (moment - marks[i - 1]) / (marks[i] - marks[i - 1])


# ---- helpers


def _rate(beta_seconds: float) -> float:
    return min(1 / beta_seconds, sys.float_info.max) if beta_seconds else sys.float_info.max


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
            break
    return f"{model}, {torch.get_num_threads()} threads"


def _backend(ranks: Ranks, device: torch.device) -> str:
    """Of the group, for tensors on ``device``."""
    if ranks.size == 1:
        return "none"
    config = dist.get_backend_config(ranks.group)  # "cpu:gloo,cuda:nccl"
    by_type = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return by_type.get(device.type, config)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _flat(fields: Mapping[str, typing.Any]) -> dict[str, typing.Any]:
    """{"versions": {"torch": t}} -> {"versions.torch": t}"""
    found: dict[str, typing.Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": deeper for inner, deeper in _flat(value).items()}
        else:
            found[name] = value
    return found


def _restored(kind: typing.Any, value: typing.Any, name: str) -> typing.Any:
    """``value``, as JSON has it, as the ``kind`` of a dataclass's field, or CorruptProfileError."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise CorruptProfileError(f"{name} ({value!r}) must be an object")
        kinds = typing.get_type_hints(kind)
        missing = [field for field in kinds if field not in value]
        if missing:
            raise CorruptProfileError(f"{name} has no {', '.join(missing)}")
        made = {field: _restored(kinds[field], value[field], f"{name}.{field}") for field in kinds}
        try:
            return kind(**made)  # type: ignore[operator]
        except ValueError as error:
            raise CorruptProfileError(f"{name}: {error}") from None
    if kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
            return float(value)
        raise CorruptProfileError(f"{name} ({value!r}) must be a finite number of at least 0")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CorruptProfileError(f"{name} ({value!r}) is of the wrong type")
    return value
