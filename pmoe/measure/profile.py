"""The profile of a device and a group of ranks: loaded from its file, or measured once and stored.

A profile holds a line, seconds = alpha + beta * size, for each kind of work (products, messages, copies),
measured while nothing else runs (`pmoe.measure.rates`, `pmoe.measure.operations`). It also holds how much
computation, communication and copies slow each other if they run at the same time (MPipeMoE, Section II.C;
FSMoE, Section 4.1).

All ranks hold the same profile, with the numbers of the slowest rank. There is one file for each device,
group and dtype. Other files in the folder are ignored.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from pmoe.comm.agreement import from_first, largest
from pmoe.comm.base import Exchange
from pmoe.comm.ranks import Ranks
from pmoe.measure.bench import AGREEING, TooLittleMemoryError, identity
from pmoe.measure.operations import measure_exchange, measure_operations, part_of
from pmoe.measure.rates import measure
from pmoe.measure.store import (
    CorruptFileError,
    PathLike,
    cache_folder,
    cache_path,
    load_json,
    save_json,
    save_or_warn,
    typed,
)
from pmoe.planner.costs import LineCost
from pmoe.planner.profile import FORMAT, Identity, Profile
from pmoe.warn import log, warn_once

T = TypeVar("T")

NAMED = re.compile(r"(?!division_|degrees_).*_v\d+\.json")
"""Pattern of the names that `profile_path` gives files.

The folder also holds files of other kinds, which the pattern must not match.
"""


def load_or_measure(
    ranks: Ranks,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    operations: bool = False,
    across: Ranks | None = None,
    inside: Ranks | None = None,
    exchanges: Mapping[str, Exchange] | None = None,
    most_bytes: float = math.inf,
) -> Profile:
    """Returns the stored profile if every rank has a valid one; otherwise measures a profile and stores it.

    Collective; every rank returns the same profile, and rank 0 stores it. The stored profile is valid only
    for the kind of device of rank 0. So if ranks have different kinds of devices, they measure in every run.

    dtype: dtype of the tensors that are multiplied, sent and copied.
    operations: whether the profile must also have the seconds of FSMoE's operations, a product and four
        collectives (`measure_operations`), for the groups ``across`` and ``inside``. If the stored profile
        lacks them, or has them for groups of other sizes, only the operations are measured.
    across: ranks among which rows are dispatched and gradients are summed, for example one rank of each node.
        None stands for all ranks. Only used if ``operations``.
    inside: ranks that share each expert, for example those of a node. None stands for all ranks. Only used if
        ``operations``.
    exchanges: all-to-alls, by name, whose seconds the operations must have, too (`Operations.exchanges`).
        Those that the stored profile lacks are measured and added. Only used if ``operations``.
    most_bytes: how many bytes the tensors that are measured may take, the same on every rank. Below
        `WHOLE_BYTES`, only small products and messages can be measured. This process then uses the profile,
        but no file stores it, because it says little about large products and messages.

    Warns once about a file that cannot be used, and replaces it. A file of an older format has another name
    and stays. If the folder cannot be written, rank 0 warns, and the next run measures again. Rank 0 also
    warns if a line fits the measured seconds badly although they were measured twice.

    Raises ValueError for a device or dtype that cannot be measured, and if ``across`` or ``inside`` is not
    equally large on all ranks or has ranks outside ``ranks``. Raises RuntimeError if another rank fails.
    """
    device = torch.device(device)
    profile = stored = _found_by_all(ranks, device, identity(ranks, device, dtype))
    key = (ranks.name, device, dtype)
    limit = most_bytes if most_bytes < WHOLE_BYTES else math.inf
    if profile is None and limit <= WIDER * _limits.get(key, math.inf) < math.inf:
        profile = PROFILES.get(key)  # this process measured it in little memory, so no file has it
    if profile is None:
        log.info("measuring %s with %d ranks: this takes some seconds, once", device, ranks.size)
        new_profile, reached = in_less_memory(
            ranks, limit, partial(measure, ranks, device, dtype, quick=True)
        )
        profile = new_profile
        _limits[key] = limit
        _lacked_memory.discard(key)
        if reached < limit:
            _lacked_memory.add(key)
    elif stored is not None:
        _limits[key] = math.inf
        _lacked_memory.discard(key)
    is_whole = _limits.get(key, math.inf) == math.inf and key not in _lacked_memory
    if operations:
        named = (("across", across), ("inside", inside))
        sizes = [part_of(ranks, device, name, part).size for name, part in named]
        operation_lines = profile.operations
        if operation_lines is None or [operation_lines.num_across, operation_lines.num_inside] != sizes:
            log.info("measuring FSMoE's operations on %s among %d x %d ranks, once", device, *sizes)
            measured = partial(measure_operations, ranks, device, dtype, across=across, inside=inside)
            new_lines, reached = in_less_memory(ranks, limit, measured)
            operation_lines = new_lines
            is_whole = is_whole and reached == math.inf
        for name, exchange in sorted((exchanges or {}).items()):
            if name in operation_lines.exchanges:
                continue
            log.info("measuring the all-to-all %s on %s, once", name, device)
            measured_exchange = partial(measure_exchange, ranks, device, dtype, exchange)
            line, reached = in_less_memory(ranks, limit, measured_exchange)
            is_whole = is_whole and reached == math.inf
            operation_lines = replace(operation_lines, exchanges={**operation_lines.exchanges, name: line})
        if operation_lines is not profile.operations:
            profile = replace(profile, operations=operation_lines)
    if ranks.rank == 0 and profile is not stored and is_whole:
        path = profile_path(profile)
        save_or_warn(
            "the profile could not be saved, so the next run measures again",
            lambda: save_profile(profile, path),
        )
    if ranks.rank == 0 and profile.doubt:
        warn_once(profile.doubt)
    PROFILES[key] = profile
    return profile


def _found_by_all(
    ranks: Ranks, device: torch.device, own_identity: Identity, otherwise: str = "it is measured again"
) -> Profile | None:
    """Returns rank 0's stored profile, or None if any rank has no valid stored profile. Collective.

    ranks: the ranks that use the profile.
    device: the device.
    own_identity: the device, ranks and versions of this rank, for which its stored profile must be valid.
    otherwise: what is done without the profile, as the end of a warning. The warning says that a file cannot
        be used.
    """
    own_profile = None
    fault = None
    try:
        own_profile = load_profile(profile_path(own_identity), expected=own_identity)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        fault = error
    # Only the lowest of the ranks with a fault warns: its value of `place` is the largest.
    place = ranks.size - ranks.rank
    own_state = [float(own_profile is None), float(place if fault else 0)]
    missing, warning = largest(ranks, device, own_state, stage=AGREEING)
    if fault and warning == place:
        warnings.warn(f"{fault}; {otherwise}", stacklevel=3)
    if own_profile is None or missing:
        return None
    return from_first(ranks, own_profile, stage="sharing a profile")


PROFILES: dict[tuple[str, torch.device, torch.dtype], Profile | None] = {}
"""The profiles that this process uses, by (name of the process group, device, dtype).

The value None says that no file with a profile was found, and that no profile has been measured since.
"""


MOST_SECONDS = 1e6
"""Largest alpha or beta of a line in a file. No measurement takes as long, and predictions would overflow."""

WHOLE_BYTES = 2**28
"""Bytes that are enough to measure the longest products and messages of a profile."""

WIDER = 4
"""Factor for the limit of bytes above which a profile is measured again.

A profile that was measured with tensors of at most b bytes is used for layers that allow up to WIDER * b
bytes for a measurement.
"""

_limits: dict[tuple[str, torch.device, torch.dtype], float] = {}
"""The limit of bytes under which each profile of this process was measured; infinite if there was none."""

_lacked_memory: set[tuple[str, torch.device, torch.dtype]] = set()
"""Profiles of this process that were measured with fewer bytes, because a rank lacked memory for the limit.

No file stores them.
"""

MOST_REPEATS = 6
"""How often a measurement for which some rank lacks memory is repeated with smaller tensors."""


def in_less_memory(ranks: Ranks, most_bytes: float, measured: Callable[..., T]) -> tuple[T, float]:
    """Measures, and repeats the measurement with smaller tensors if any rank runs out of memory. Collective.

    Each repetition may allocate a quarter (1 / `WIDER`) of the bytes of the one before. Rank 0 warns once.
    Returns the result, and the limit of bytes of the measurement that gave it.

    ranks: the ranks that measure.
    most_bytes: how many bytes the first measurement may allocate, the same on every rank.
    measured: measures, and allocates at most its keyword argument ``most_bytes``. It raises
        `TooLittleMemoryError` on every rank if any rank runs out of memory.

    Raises TooLittleMemoryError on every rank if the memory is too little even for the smallest tensors.
    """
    for _ in range(MOST_REPEATS):
        try:
            return measured(most_bytes=most_bytes), most_bytes
        except TooLittleMemoryError:
            most_bytes = min(most_bytes, WHOLE_BYTES) / WIDER
        if ranks.rank == 0:
            warn_once(
                "some rank ran out of memory in a measurement of this machine: smaller tensors are measured, "
                "so choices may be worse. Free memory, or measure before training with `pmoe profile`"
            )
    return measured(most_bytes=most_bytes), most_bytes


def profile_of(
    ranks: Ranks, device: torch.device, dtype: torch.dtype, most_bytes: float = math.inf
) -> Profile:
    """Returns the profile that this process uses, which holds the measured seconds of work by size.

    The first call loads the profile from its file, or measures it. If a later call allows more than `WIDER`
    times as many bytes, the profile is measured once more with larger tensors, because small tensors say
    little about larger work. A call that loads or measures is collective (`load_or_measure`).

    ranks: the ranks that use the profile.
    device, dtype: device and dtype of the rows.
    most_bytes: the limit of bytes for the tensors of a measurement, the same on every rank.
    """
    key = (ranks.name, device, dtype)
    profile = PROFILES.get(key)
    if profile is None or most_bytes > WIDER * _limits.get(key, math.inf):
        profile = load_or_measure(ranks, device, dtype, most_bytes=most_bytes)
    return profile


def stored_profile_of(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Profile | None:
    """Returns the profile that this process uses, or None if there is none. Never measures one.

    The first call loads the profile from its file, if a valid one exists on every rank, and is collective.

    ranks: the ranks that use the profile.
    device: the device.
    dtype: dtype of the rows.
    """
    key = (ranks.name, device, dtype)
    if key not in PROFILES:
        PROFILES[key] = _found_by_all(ranks, device, identity(ranks, device, dtype), "it is not used")
    return PROFILES[key]


def profile_path(who: Identity, folder: PathLike | None = None) -> Path:
    """Returns the path of the file in which a profile is stored.

    The file's name is made of the device, ranks, backend, dtype and versions.

    who: the device, ranks, backend, dtype and versions for which the profile is valid.
    folder: None stands for $PMOE_CACHE or ~/.cache/pmoe.
    """
    cuda = f"cuda {who.versions.cuda}" if who.versions.cuda else "no cuda"
    nodes = f"{who.num_nodes} nodes" if who.num_nodes > 1 else ""
    place = [who.device, f"{who.num_ranks} ranks", nodes, who.backend, who.link]
    parts = [*place, who.dtype, f"torch {who.versions.torch}", cuda, f"v{who.versions.file}"]
    return cache_path(filter(None, parts), folder)


def save_profile(profile: Profile, path: PathLike) -> None:
    """Writes a profile to a file, completely or not at all. Makes the folder.

    Raises OSError if the file cannot be written.
    """
    save_json(path, dataclasses.asdict(profile))


def load_profile(path: PathLike, *, expected: Identity | None = None) -> Profile:
    """Returns the profile in a file.

    path: the file.
    expected: the device, ranks, backend, dtype and versions for which the profile must have been measured;
        None accepts any.

    Raises FileNotFoundError if there is no file, CorruptFileError if the file holds no profile, and
    ValueError, with the differences, if the profile was not measured for ``expected``.
    """
    profile = load_json(path, profile_from, "`pmoe profile` writes it")
    if expected is not None and profile.identity != expected:
        raise ValueError(
            f"{path}: does not fit this machine and group: {profile.identity.difference(expected)}"
        )
    return profile


def stored_profiles(folder: PathLike | None = None) -> dict[Path, Profile | OSError | ValueError]:
    """Returns all stored profiles by file, with the error instead of the profile for an unusable file.

    Files that hold other things than a profile are left out.

    folder: None stands for $PMOE_CACHE or ~/.cache/pmoe.
    """
    profiles: dict[Path, Profile | OSError | ValueError] = {}
    for path in sorted(cache_folder(folder).glob("*.json")):
        try:
            profiles[path] = load_profile(path)
        except (OSError, ValueError) as error:
            if not isinstance(error, CorruptFileError) or NAMED.fullmatch(path.name):
                profiles[path] = error
    return profiles


def find_profile(folder: PathLike | None = None, *, num_ranks: int, dtype: str) -> tuple[Path, Profile]:
    """Returns (file, profile) if exactly one stored profile has this number of ranks and this dtype.

    folder: None stands for $PMOE_CACHE or ~/.cache/pmoe.
    num_ranks: number of ranks of the profile.
    dtype: torch's name of the rows' dtype.

    Raises ValueError if none or several fit. The error lists the stored profiles, and says how to measure
    one.
    """
    stored = stored_profiles(folder)
    fitting = [
        (path, profile)
        for path, profile in stored.items()
        if isinstance(profile, Profile) and (profile.num_ranks, profile.dtype) == (num_ranks, dtype)
    ]
    if len(fitting) == 1:
        return fitting[0]
    count = f"{len(fitting)} profiles fit" if fitting else "no profile fits"
    wanted = f"{num_ranks} rank{'s' * (num_ranks > 1)} and {dtype}"
    stored_lines = [f"  {path.name}: {profile}" for path, profile in stored.items()]
    launch = "python" if num_ranks == 1 else f"torchrun --nproc-per-node {num_ranks}"
    measure_one = f"measure one with: {launch} -m pmoe profile --dtype {dtype}"
    advice = "name one of them with --profile FILE" if fitting else measure_one
    raise ValueError("\n".join([f"{count} {wanted} in {cache_folder(folder)}", *stored_lines, advice]))


def profile_from(fields: Mapping[str, Any]) -> Profile:
    """Builds a profile from the fields of a file.

    fields: the profile's fields, as `dataclasses.asdict` gives them.

    Raises CorruptFileError if a field is missing, has another type, or has seconds that nothing takes
    (`MOST_SECONDS`), and ValueError if the file has another version of the format.
    """
    versions = fields.get("versions")
    file_format = versions.get("file", FORMAT) if isinstance(versions, dict) else FORMAT
    if isinstance(file_format, int) and file_format != FORMAT:
        raise ValueError(f"format version ({file_format}) must be {FORMAT}")
    profile: Profile = typed(Profile, fields, "profile")
    lines = {name: cost for name, cost in vars(profile).items() if isinstance(cost, LineCost)}
    for number, fitted in enumerate([] if profile.operations is None else profile.operations.fits):
        lines[f"operation {number}"] = fitted.line
    for name, line in lines.items():
        if max(line.alpha_seconds, line.beta_seconds) > MOST_SECONDS:
            raise CorruptFileError(
                f"profile.{name} ({line}) must be at most {MOST_SECONDS:g} s in both numbers"
            )
    return profile
