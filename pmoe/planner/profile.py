"""What a profile holds, whose it is, and the file that it is kept in.

Nothing is measured here: a stored profile serves a laptop without a process group (`pmoe plan`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import sys
import tempfile
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pmoe.comm.ranks import Ranks
from pmoe.planner.cost_model import Interference, Rates
from pmoe.planner.costs import Fit, LineCost

WIDTH = {"cpu": 512, "cuda": 4096}
"""By device type: products are measured with a weight of WIDTH x WIDTH."""

FORMAT = 2
"""Of the file. Rises with every change of what a field means. 2: `operations`."""


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
class Operations:
    """The lines of FSMoE's performance models (Eq. 1, Section 5.1), by least squares over the sizes of its
    Section 6.2, each with its r squared: seconds of one operation by its size, which is

    gemm: multiply-adds of one product. Those that an expert has several of, count several times.
    all_to_all: bytes that a rank sends to others, among num_across ranks, with equal splits.
    all_gather: bytes that a rank sends to others, among num_inside ranks, each of which sends all its rows to
    every other: num_inside - 1 times the bytes of its own rows.
    reduce_scatter: bytes that a rank sends to others, among num_inside ranks, each of which sends its part of
    every other's sum and adds up what it gets: num_inside - 1 times the bytes of its own sum.
    all_reduce: bytes of the tensor that num_across ranks add up, as gradients are.

    Among one rank nothing travels: the line is zero, over no sizes. seconds: how long measuring took.

    Example: 4 ranks inside, 1 MB of rows on each: the all-gather and the reduce-scatter have size 3e6.
    """

    num_across: int
    num_inside: int
    gemm: Fit
    all_to_all: Fit
    all_gather: Fit
    reduce_scatter: Fit
    all_reduce: Fit
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs, and whose they are: the first six fields are those of `Identity`.

    compute: seconds by multiply-adds. message: seconds by bytes that a rank sends to others, in an all-to-all
    with equal splits (zero where num_ranks is 1). copy_out, copy_in: seconds by bytes from the device to the
    host and back. seconds: how long measuring took. when: the end of it, ISO 8601, UTC. operations: None
    until somebody asks for them, and then measured for one way of arranging the ranks in nodes.
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
    operations: Operations | None = None

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
    if isinstance(kind, types.UnionType):  # something or None
        if value is None:
            return None
        [kind] = [each for each in typing.get_args(kind) if each is not types.NoneType]
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
