"""Which profiles have been measured and stored, and the one that fits.

Other files in the folder are not looked at.
"""

from __future__ import annotations

import os
from pathlib import Path

from pmoe.comm.ranks import Ranks
from pmoe.measure.profile import CorruptProfileError, Profile, identity, load, profile_path


class NoProfileError(LookupError):
    """No stored profile fits, or more than one does."""


def profile_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Where profiles are stored: ``folder``, or $PMOE_CACHE, or ~/.cache/pmoe."""
    return profile_path(identity(Ranks(), "cpu"), folder).parent


def stored_profiles(folder: str | os.PathLike[str] | None = None) -> dict[Path, Profile | ValueError]:
    """By file, each profile, or why it cannot be used (another format's version)."""
    found: dict[Path, Profile | ValueError] = {}
    for path in sorted(profile_folder(folder).glob("*.json")):
        try:
            found[path] = load(path)
        except CorruptProfileError:
            continue  # something else's file
        except ValueError as error:
            found[path] = error
    return found


def find_profile(
    folder: str | os.PathLike[str] | None = None,
    *,
    num_ranks: int,
    dtype: str,
    device_type: str | None = None,
) -> tuple[Path, Profile]:
    """The one stored profile for so many ranks, this dtype and, where given, this type of device.

    Raises NoProfileError, with what there is and how to measure, where none fits or several do.
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
        f"{count} {wanted} in {profile_folder(folder)}",
        *(f"  {path.name}: {_told(profile)}" for path, profile in stored.items()),
    ]
    if fitting:
        lines.append("name one of them with --profile FILE")
    else:
        launch = "python" if num_ranks == 1 else f"torchrun --nproc-per-node {num_ranks}"
        lines.append(f"measure one with: {launch} -m pmoe profile --dtype {dtype}")
    raise NoProfileError("\n".join(lines))


def _told(profile: Profile | ValueError) -> str:
    if isinstance(profile, ValueError):
        return str(profile)
    ranks = f"{profile.num_ranks} rank{'s' * (profile.num_ranks > 1)}"
    return f"{profile.device}, {ranks}, {profile.backend}, {profile.dtype}, {profile.when}"
