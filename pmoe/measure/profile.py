"""What a device and a group of ranks can do, measured once and kept in a file (MPipeMoE, Section II.C; FSMoE,
Section 4.1).

Costs of each kind of work are straight lines, measured alone; how much computation, communication and copies
slow each other is measured side by side. All ranks hold the same profile: the numbers of the slowest.

Entry point: `Profile` and its file are in pmoe/planner/profile.py; rates.py and operations.py measure.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import torch

from pmoe.comm.agree import from_first
from pmoe.comm.ranks import Ranks
from pmoe.measure.operations import LINE_SECONDS, measure_operations, part_of
from pmoe.measure.rates import FACTORS, measure, speeds
from pmoe.measure.rounds import Group
from pmoe.planner.profile import (
    FORMAT,
    WIDTH,
    CorruptProfileError,
    Identity,
    Operations,
    Profile,
    Versions,
    identity,
    load,
    profile_path,
    save,
)

__all__ = [
    "FACTORS",
    "FORMAT",
    "LINE_SECONDS",
    "WIDTH",
    "CorruptProfileError",
    "Identity",
    "Operations",
    "Profile",
    "Versions",
    "identity",
    "load",
    "load_or_measure",
    "measure",
    "measure_operations",
    "profile_of",
    "profile_path",
    "save",
    "speeds",
]


def load_or_measure(
    ranks: Ranks,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    folder: str | os.PathLike[str] | None = None,
    quick: bool = True,
    operations: bool = False,
    across: Ranks | None = None,
    inside: Ranks | None = None,
) -> Profile:
    """The profile from its file (see `profile_path`) where every rank has a good one, else measured and saved
    by rank 0. Collective; every rank returns the same profile.

    With ``operations`` it has those of ``across`` and ``inside`` (see `measure_operations`); where the file
    has none, or those of other sizes of groups, only they are measured, and take their place in the file.

    A file that cannot be used is told of in one warning and replaced; one of an older format has another name
    and is left alone. A folder that cannot be written costs a warning too, and the measuring again next time.
    Ranks on unlike devices measure every time.
    """
    group = Group(ranks, torch.device(device))
    profile = _found_by_all(group, identity(ranks, device, dtype), folder)
    known = profile is not None
    if profile is None:
        profile = measure(ranks, device, dtype, quick=quick)
    if operations:
        sizes = [part_of(group, "across", across).size, part_of(group, "inside", inside).size]
        held = profile.operations
        if held is None or [held.num_across, held.num_inside] != sizes:
            measured = measure_operations(ranks, device, dtype, across=across, inside=inside)
            profile, known = replace(profile, operations=measured), False
    if ranks.rank == 0 and not known:
        try:
            save(profile, profile_path(profile, folder))
        except OSError as error:  # must not stop one rank alone
            warnings.warn(
                f"the profile could not be saved, and will be measured again: {error}", stacklevel=2
            )
    return profile


def _found_by_all(group: Group, here: Identity, folder: str | os.PathLike[str] | None) -> Profile | None:
    """Rank 0's, where every rank has one that is of what is here. Collective."""
    path, ranks = profile_path(here, folder), group.ranks
    found, fault = None, None
    try:
        found = load(path, expected=here)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        fault = error
    place = ranks.size - ranks.rank  # the largest among the ranks with a fault is the one that tells
    missing, telling = group.largest([float(found is None), float(place if fault else 0)])
    if fault and telling == place:
        warnings.warn(f"{fault}; measured again", stacklevel=3)
    if found is None or missing:
        return None
    return Profile.from_json(from_first(group.ranks, found.to_json(), stage="sharing a profile"))


_profiles: dict[tuple[str, torch.device, torch.dtype], Profile] = {}


def profile_of(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Profile:
    """The stored profile of this device and group, or a quick measurement; collective the first time."""
    key = (ranks.name, device, dtype)
    if key not in _profiles:
        _profiles[key] = load_or_measure(ranks, device, dtype)
    return _profiles[key]
