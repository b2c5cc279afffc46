"""The files of profiles, one for each device, group and dtype; and the stored one that fits.

Other files in the folder are not looked at.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pmoe.measure.store import CorruptFileError, PathLike, cache_folder, cache_path, load_json, save_json
from pmoe.planner.profile import FORMAT, Identity, Profile


class NoProfileError(LookupError):
    """No stored profile fits, or more than one does."""


def profile_path(who: Identity, folder: PathLike | None = None) -> Path:
    """The file named after an identity: in ``folder``, or $PMOE_CACHE, or ~/.cache/pmoe."""
    parts = [
        who.device,
        f"{who.num_ranks} ranks",
        who.backend,
        who.dtype,
        f"torch {who.versions.torch}",
        f"cuda {who.versions.cuda}" if who.versions.cuda else "no cuda",
        f"v{who.versions.file}",
    ]
    return cache_path(parts, folder)


def save_profile(profile: Profile, path: PathLike) -> None:
    """Writes the whole file or none. Makes the folder. Raises OSError where it cannot be written."""
    save_json(path, dataclasses.asdict(profile))


def load_profile(path: PathLike, *, expected: Identity | None = None) -> Profile:
    """The profile in the file, whose identity must be ``expected`` unless that is None.

    Raises FileNotFoundError; CorruptFileError where the file holds no profile; ValueError where it holds that
    of another device, number of ranks, backend, dtype or version, naming what it holds and what is here.
    """
    profile = load_json(path, profile_from)
    if expected is not None and profile.identity != expected:
        raise ValueError(f"{path}: holds the profile of {profile.identity.difference(expected)}")
    return profile


def stored_profiles(folder: PathLike | None = None) -> dict[Path, Profile | ValueError]:
    """By file, each profile, or why it cannot be used (another format's version)."""
    found: dict[Path, Profile | ValueError] = {}
    for path in sorted(cache_folder(folder).glob("*.json")):
        try:
            found[path] = load_profile(path)
        except CorruptFileError:
            continue  # something else's file
        except ValueError as error:
            found[path] = error
    return found


def find_profile(
    folder: PathLike | None = None, *, num_ranks: int, dtype: str, device_type: str | None = None
) -> tuple[Path, Profile]:
    """The one stored profile for so many ranks, this dtype and, unless None, this type of device.

    Raises NoProfileError where none fits or several do, with a line for each stored profile and how to
    measure one.
    """
    stored = stored_profiles(folder)
    fitting = [
        (path, profile)
        for path, profile in stored.items()
        if isinstance(profile, Profile)
        and (profile.num_ranks, profile.dtype) == (num_ranks, dtype)
        and device_type in (None, profile.device_type)
    ]
    if len(fitting) == 1:
        return fitting[0]
    wanted = f"{num_ranks} rank{'s' * (num_ranks > 1)} and {dtype}" + (
        f" on {device_type}" if device_type else ""
    )
    count = f"{len(fitting)} profiles fit" if fitting else "no profile fits"
    lines = [
        f"{count} {wanted} in {cache_folder(folder)}",
        *(f"  {path.name}: {_described(profile)}" for path, profile in stored.items()),
    ]
    if fitting:
        lines.append("name one of them with --profile FILE")
    else:
        launch = "python" if num_ranks == 1 else f"torchrun --nproc-per-node {num_ranks}"
        lines.append(f"measure one with: {launch} -m pmoe profile --dtype {dtype}")
    raise NoProfileError("\n".join(lines))


def _described(profile: Profile | ValueError) -> str:
    if isinstance(profile, ValueError):
        return str(profile)
    ranks = f"{profile.num_ranks} rank{'s' * (profile.num_ranks > 1)}"
    return f"{profile.device}, {ranks}, {profile.backend}, {profile.dtype}, {profile.when}"


# ---- from JSON


def profile_from(fields: Mapping[str, Any]) -> Profile:
    """The profile whose `dataclasses.asdict` these are.

    Raises CorruptFileError where a field is missing or of another type, ValueError for another format.
    """
    versions = fields.get("versions")
    found = versions.get("file", FORMAT) if isinstance(versions, dict) else FORMAT
    if isinstance(found, int) and found != FORMAT:
        raise ValueError(f"format version ({found}) must be {FORMAT} (`pmoe profile` writes it)")
    profile: Profile = _typed(Profile, fields, "profile")
    return profile


def _typed(kind: Any, value: Any, name: str) -> Any:
    """``value``, as JSON has it, as the ``kind`` of a dataclass's field, or CorruptFileError."""
    if isinstance(kind, types.UnionType):  # something or None
        if value is None:
            return None
        [kind] = [each for each in typing.get_args(kind) if each is not types.NoneType]
    if dataclasses.is_dataclass(kind):
        return _typed_record(kind, value, name)
    if kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
            return float(value)
        raise CorruptFileError(f"{name} ({value!r}) must be a finite number of at least 0")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CorruptFileError(f"{name} ({value!r}) is of the wrong type")
    return value


def _typed_record(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise CorruptFileError(f"{name} ({value!r}) must be an object")
    kinds = typing.get_type_hints(kind)
    missing = [field for field in kinds if field not in value]
    if missing:
        raise CorruptFileError(f"{name} has no {', '.join(missing)}")
    made = {field: _typed(kinds[field], value[field], f"{name}.{field}") for field in kinds}
    try:
        return kind(**made)
    except ValueError as error:
        raise CorruptFileError(f"{name}: {error}") from None
