"""The file of `pmoe plan --cluster`, and what is printed of the ways to run a layer on its machines."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pmoe.cli.arguments import refused_as
from pmoe.cli.output import mib, ms
from pmoe.measure.store import typed
from pmoe.planner.candidates import Advice
from pmoe.planner.cluster import Cluster, fields_of
from pmoe.planner.cost_model import Interference
from pmoe.planner.profile import Profile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load_cluster(path: Path, profile: Profile | None) -> Cluster:
    """What the file says; of what it leaves out, what ``profile`` tells, which is of a part of the machines.

    Raises ValueError, naming the file, where it cannot be read, where a key is missing, unknown or of no
    such value, and for a profile of other machines.
    """
    with refused_as(f"--cluster ({path}) must be a file to read", OSError, ValueError):
        text = path.read_bytes()
    with refused_as(f"--cluster ({path}) must describe a cluster", ValueError, RecursionError):
        said = tomllib.loads(text.decode())
        measured = {} if profile is None else fields_of(profile)
        fields = {"interference": vars(Interference()), "measured": ""} | measured | said
        links = ("inside", "outside")
        for number, (link, unused) in {"machines": links, "ranks_per_machine": links[::-1]}.items():
            if fields.get(number) == 1 and link in fields:
                fields.setdefault(unused, fields[link])
        cluster: Cluster = typed(Cluster, fields, "cluster")
        if unknown := _keys(said) - _keys(dataclasses.asdict(cluster)):
            raise ValueError(f"{', '.join(sorted(unknown))} must be left out: it knows no such key")
        if profile is not None:
            cluster.check_part(profile)
    return cluster


def _keys(fields: Mapping[str, Any]) -> set[str]:
    tables = {name: value if isinstance(value, dict) else {"": value} for name, value in fields.items()}
    return {f"{name}.{key}".rstrip(".") for name, table in tables.items() for key in table}


# ---- what is printed, as JSON and as cells of a table


def way_fields(way: Advice) -> dict[str, Any]:
    num_bytes = {"even_bytes": way.even_bytes, "promised_bytes": way.decision.memory.promised}
    return {**way.way, "exposed_seconds": way.exposed_seconds, **num_bytes}


def rows_of(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A header and one row for each; seconds as ms, bytes as MiB, changes in percent."""
    rows = [[name.replace("seconds", "ms").replace("bytes", "MiB").replace("_", " ") for name in found[0]]]
    shown = {"seconds": ms, "bytes": mib, "change": "{:+.1%}".format}
    for each in found:
        cells = ((shown.get(name.rpartition("_")[2], str), value) for name, value in each.items())
        rows.append(["" if value is None else show(value) for show, value in cells])
    return rows
