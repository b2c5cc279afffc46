"""The file of what trials found for one kind of layer: a table for each restore pair and type of rows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pmoe.comm.agree import digest
from pmoe.measure.store import PathLike, cache_path, load_json, save_json
from pmoe.planner.granularity import GranularityTable

FORMAT = 2
"""Of the file; another one is refused. 2: a key of all that changes the time, several tables."""

Tables = dict[str, GranularityTable]
"""By restore pair and type of rows, in words."""


def kept_path(key: Mapping[str, Any]) -> Path | None:
    """Where layers of this key keep what they learn between runs: in $PMOE_CACHE; None without one."""
    if not os.environ.get("PMOE_CACHE"):
        return None
    whose = [key["device"], f"{key['num_ranks']} ranks", key["backend"], f"torch {key['versions']['torch']}"]
    return cache_path(["degrees", *whose, f"{digest([_text(key)]):x}", f"v{FORMAT}"])


def save_degrees(tables: Mapping[str, GranularityTable], path: PathLike, key: Mapping[str, Any]) -> None:
    """Writes the whole file or none.

    key: says where the numbers hold (device, ranks, options); anything that JSON can hold.

    Raises OSError where it cannot be written, TypeError for a key that JSON cannot hold.
    """
    held = {name: table.to_fields() for name, table in tables.items() if table.ranges.points}
    save_json(path, {"format": FORMAT, "key": dict(key), "tables": held})


def load_degrees(path: PathLike, key: Mapping[str, Any], candidates: Sequence[int] | None = None) -> Tables:
    """The tables that were saved at ``path`` with this key. candidates: the n that they may name; None all.

    Raises ValueError, naming the path, for a file that holds no tables, of another format or another key;
    OSError where it cannot be read.
    """
    here = json.loads(_text(key))

    def parse(fields: Mapping[str, Any]) -> Tables:
        if fields.get("format") != FORMAT:
            raise ValueError(f"format ({fields.get('format')!r}) must be {FORMAT}")
        _check_key(fields.get("key"), here)
        tables = fields.get("tables")
        if not isinstance(tables, dict):
            raise ValueError(f"no granularity table: tables ({tables!r}) must be an object")
        found = {name: GranularityTable.from_fields(table) for name, table in tables.items()}
        for degrees in (each for table in found.values() for each in table.ranges.points.values()):
            if candidates is not None and not {degrees.forward, degrees.backward} <= set(candidates):
                raise ValueError(f"found {degrees}, expected degrees among {tuple(candidates)}")
        return found

    return load_json(path, parse)


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(dict(key), sort_keys=True)


def _check_key(found: Any, here: Mapping[str, Any]) -> None:
    """Raises ValueError with the first two fields that differ."""
    if not isinstance(found, dict):
        raise ValueError(f"key ({found!r}) must be an object")
    names = [name for name in sorted({*found, *here}) if found.get(name) != here.get(name)]
    if names:
        told = "; ".join(f"{name} {found.get(name)!r}, here {here.get(name)!r}" for name in names[:2])
        raise ValueError(f"holds the degrees of another layer, group or machine: {told}")
