"""The profile of a device and a group of ranks: from its file, or measured once and kept there.

MPipeMoE, Section II.C; FSMoE, Section 4.1. Costs of each kind of work are straight lines, measured alone
(`pmoe.measure.rates`, `pmoe.measure.operations`); how much computation, communication and copies slow each
other is measured side by side. All ranks hold the same profile: the numbers of the slowest.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from pmoe.comm.agree import from_first
from pmoe.comm.ranks import Ranks
from pmoe.measure.bench import Group
from pmoe.measure.identity import identity
from pmoe.measure.operations import measure_operations, part_of
from pmoe.measure.profile_file import load_profile, profile_path, save_profile
from pmoe.measure.rates import measure
from pmoe.measure.store import PathLike
from pmoe.planner.profile import Identity, Profile


def load_or_measure(
    ranks: Ranks,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    folder: PathLike | None = None,
    quick: bool = True,
    operations: bool = False,
    across: Ranks | None = None,
    inside: Ranks | None = None,
) -> Profile:
    """The stored profile where every rank has a good one, else a measured one, saved by rank 0.

    Collective; every rank returns the same profile. With ``operations`` it has those of ``across`` and
    ``inside`` (see `measure_operations`); where the file has none, or those of other sizes of groups, only
    they are measured, and take their place in the file.

    Warns once about a file that cannot be used, and replaces it; one of an older format has another name and
    is left alone. A folder that cannot be written costs a warning, and the measuring again next time. Ranks
    on unlike devices measure every time.

    Raises as `identity` and `measure_operations` do.
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
            save_profile(profile, profile_path(profile, folder))
        except OSError as error:  # must not stop one rank alone
            warnings.warn(
                f"the profile could not be saved, and will be measured again: {error}", stacklevel=2
            )
    return profile


def _found_by_all(group: Group, here: Identity, folder: PathLike | None) -> Profile | None:
    """Rank 0's, where every rank has one that is of what is here. Collective."""
    path, ranks = profile_path(here, folder), group.ranks
    found, fault = None, None
    try:
        found = load_profile(path, expected=here)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        fault = error
    place = ranks.size - ranks.rank  # the largest among the ranks with a fault is the one that warns
    missing, warning = group.largest([float(found is None), float(place if fault else 0)])
    if fault and warning == place:
        warnings.warn(f"{fault}; measured again", stacklevel=3)
    if found is None or missing:
        return None
    return from_first(ranks, found, stage="sharing a profile")


_profiles: dict[tuple[str, torch.device, torch.dtype], Profile] = {}


def profile_of(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Profile:
    """The stored profile of this device and group, or a quick measurement; collective the first time."""
    key = (ranks.name, device, dtype)
    if key not in _profiles:
        _profiles[key] = load_or_measure(ranks, device, dtype)
    return _profiles[key]
