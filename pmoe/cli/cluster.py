"""Reads the TOML file of ``pmoe plan --cluster``, which describes machines that you do not have."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pmoe.cli.arguments import refused_as
from pmoe.measure.store import typed
from pmoe.planner.cluster import Cluster, fields_of
from pmoe.planner.cost_model import Interference
from pmoe.planner.profile import Profile

if sys.version_info >= (3, 11):
    import tomllib as tomllib
else:
    import tomli as tomllib


def load_cluster(path: Path, profile: Profile | None) -> Cluster:
    """Returns the cluster that a TOML file describes.

    path: the file.
    profile: a profile that was measured on some of the machines. Its rates are used where the file leaves
        them out. None if there is no profile.

    Raises ValueError, naming the file, if the file cannot be read, if a key is missing, unknown or has a
    wrong value, or if the profile cannot come from the described machines.
    """
    with refused_as(f"--cluster ({path}) must be a file to read", OSError, ValueError):
        text = path.read_bytes()
    with refused_as(f"--cluster ({path}) must describe a cluster", ValueError, RecursionError):
        said = tomllib.loads(text.decode())
        measured = {} if profile is None else fields_of(profile)
        fields = {"interference": vars(Interference()), "measured": ""} | measured | said
        links = ("inside", "outside")
        # With 1 machine, the link between machines is not used. With 1 rank per machine, the link inside a
        # machine is not used. The file may leave out a link that is not used.
        for number, (link, unused) in {"machines": links, "ranks_per_machine": links[::-1]}.items():
            if fields.get(number) == 1 and link in fields:
                fields.setdefault(unused, fields[link])
        cluster: Cluster = typed(Cluster, fields, "cluster")
        if unknown := _keys(said) - _keys(asdict(cluster)):
            raise ValueError(f"{', '.join(sorted(unknown))} must be left out: a cluster has no such key")
        if profile is not None:
            cluster.check_part(profile)
    return cluster


def _keys(fields: Mapping[str, Any]) -> set[str]:
    """Returns all keys of a parsed file.

    A key of a table has the name of the table in front, such as "copy.alpha_seconds".
    """
    tables = {name: table for name, table in fields.items() if isinstance(table, dict)}
    return {*fields, *(f"{name}.{key}" for name, table in tables.items() for key in table)}
