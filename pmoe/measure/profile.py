"""The profile of a device and a group of ranks: loaded from its file, or measured once and stored.

A profile holds a line, seconds = alpha + beta * size, for each kind of work measured alone
(`pmoe.measure.rates`, `pmoe.measure.operations`). It also holds how much computation, communication and
copies slow each other, measured side by side (MPipeMoE, Section II.C; FSMoE, Section 4.1).

All ranks hold the same profile, with the numbers of the slowest rank. There is one file for each device,
group and dtype. Other files in the folder are ignored.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pmoe.comm.agreement import from_first, largest
from pmoe.comm.base import Exchange
from pmoe.comm.ranks import Ranks
from pmoe.measure.bench import AGREEING, identity
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
from pmoe.planner.profile import FORMAT, Identity, Profile
from pmoe.warn import log, warn_once

NAMED = re.compile(r"(?!division_|degrees_).*_v\d+\.json")
"""Pattern of the names that `profile_path` gives files. The folder also holds files of other kinds."""


def load_or_measure(
    ranks: Ranks,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    operations: bool = False,
    across: Ranks | None = None,
    inside: Ranks | None = None,
    exchanges: Mapping[str, Exchange] | None = None,
) -> Profile:
    """Returns the stored profile if every rank has a valid one; otherwise measures a profile and stores it.

    Collective; every rank returns the same profile, and rank 0 stores it. Ranks on different kinds of devices
    measure every time, because their files never agree.

    operations: whether the profile must have FSMoE's lines (`measure_operations`) for the groups ``across``
        and ``inside``. If the file has none, or has lines of groups of other sizes, only these lines are
        measured and replaced.
    exchanges: all-to-alls, by name, whose lines these must have, too (`Operations.exchanges`). Lines that the
        file lacks are measured and added.

    Warns once about a file that cannot be used, and replaces it. A file of an older format has another name,
    and is not touched. If the folder cannot be written, it warns, and the next run measures again. Rank 0
    warns if lines fit badly although they were measured twice.

    Raises ValueError for a device or dtype that cannot be measured and for unequal groups; RuntimeError if
    another rank fails.
    """
    device = torch.device(device)
    profile = stored = _found_by_all(ranks, device, identity(ranks, device, dtype))
    if profile is None:
        log.info("measuring %s with %d ranks: this takes some seconds, once", device, ranks.size)
        profile = measure(ranks, device, dtype, quick=True)
    if operations:
        named = (("across", across), ("inside", inside))
        sizes = [part_of(ranks, device, name, part).size for name, part in named]
        operation_lines = profile.operations
        if operation_lines is None or [operation_lines.num_across, operation_lines.num_inside] != sizes:
            log.info("measuring FSMoE's operations on %s among %d x %d ranks, once", device, *sizes)
            operation_lines = measure_operations(ranks, device, dtype, across=across, inside=inside)
        for name, exchange in sorted((exchanges or {}).items()):
            if name in operation_lines.exchanges:
                continue
            log.info("measuring the all-to-all %s on %s, once", name, device)
            line = measure_exchange(ranks, device, dtype, exchange)
            operation_lines = replace(operation_lines, exchanges={**operation_lines.exchanges, name: line})
        if operation_lines is not profile.operations:
            profile = replace(profile, operations=operation_lines)
    if ranks.rank == 0 and profile is not stored:
        path = profile_path(profile)
        save_or_warn(
            "the profile could not be saved, so the next run measures again",
            lambda: save_profile(profile, path),
        )
    if ranks.rank == 0 and profile.doubt:
        warn_once(profile.doubt)
    PROFILES[ranks.name, device, dtype] = profile
    return profile


def _found_by_all(ranks: Ranks, device: torch.device, here: Identity) -> Profile | None:
    """Returns rank 0's stored profile if every rank has one that is valid on that rank; else None.

    Collective.

    here: the device, ranks and versions for which a profile must be valid.
    """
    own_profile = None
    fault = None
    try:
        own_profile = load_profile(profile_path(here), expected=here)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        fault = error
    # Only the lowest of the ranks with a fault warns: its value of `place` is the largest.
    place = ranks.size - ranks.rank
    own_state = [float(own_profile is None), float(place if fault else 0)]
    missing, warning = largest(ranks, device, own_state, stage=AGREEING)
    if fault and warning == place:
        warnings.warn(f"{fault}; it is measured again", stacklevel=3)
    if own_profile is None or missing:
        return None
    return from_first(ranks, own_profile, stage="sharing a profile")


PROFILES: dict[tuple[str, torch.device, torch.dtype], Profile] = {}
"""The profiles that this process uses, by (name of the ranks, device, dtype)."""


def profile_of(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Profile:
    """Returns the profile that this process uses. The first time it is loaded or measured.

    Collective the first time (`load_or_measure`).
    """
    return PROFILES.get((ranks.name, device, dtype)) or load_or_measure(ranks, device, dtype)


def profile_path(who: Identity, folder: PathLike | None = None) -> Path:
    """Returns the file of the profile for a device, group, dtype and versions (an identity).

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

    expected: the device, group, dtype and versions that it must be for; None accepts any.

    Raises FileNotFoundError if there is no file; CorruptFileError if the file holds no profile; ValueError,
    with both values, if its device, number of ranks, backend, dtype or version is not the expected one.
    """
    profile = load_json(path, profile_from, "`pmoe profile` writes it")
    if expected is not None and profile.identity != expected:
        raise ValueError(
            f"{path}: does not fit this machine and group: {profile.identity.difference(expected)}"
        )
    return profile


def stored_profiles(folder: PathLike | None = None) -> dict[Path, Profile | OSError | ValueError]:
    """Returns, for each file with a profile, the profile, or the error that makes it unusable.

    Files of other kinds are left out.

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
    """Returns the file and the profile if exactly one stored profile fits this number of ranks and dtype.

    folder: None stands for $PMOE_CACHE or ~/.cache/pmoe.

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
    """Returns the profile that the fields of a file describe, as `dataclasses.asdict` has written them.

    Raises CorruptFileError if a field is missing or has another type, and ValueError for another format.
    """
    versions = fields.get("versions")
    file_format = versions.get("file", FORMAT) if isinstance(versions, dict) else FORMAT
    if isinstance(file_format, int) and file_format != FORMAT:
        raise ValueError(f"format version ({file_format}) must be {FORMAT}")
    profile: Profile = typed(Profile, fields, "profile")
    return profile
