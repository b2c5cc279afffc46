"""The files of profiles, one for each device, group and dtype; and the stored one that fits.

Other files in the folder are not looked at.
"""

from __future__ import annotations

from pathlib import Path

from pmoe.planner.profile import Identity, Profile
from pmoe.store import CorruptFileError, PathLike, cache_folder, cache_path, load, save


class NoProfileError(LookupError):
    """No stored profile fits, or more than one does."""


def profile_path(who: Identity | Profile, folder: PathLike | None = None) -> Path:
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
    save(path, profile.to_fields())


def load_profile(path: PathLike, *, expected: Identity | None = None) -> Profile:
    """The profile in the file, whose identity must be ``expected`` unless that is None.

    Raises FileNotFoundError; CorruptFileError where the file holds no profile; ValueError where it holds that
    of another device, number of ranks, backend, dtype or version, naming what it holds and what is here.
    """
    profile = load(path, Profile.from_fields)
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
