"""The files of measured division points, one a device name, and all of them as one `Table`.

    {"format": 1,
     "entries": [{"device_name": "NVIDIA H200", "num_blocks": 132, "num_ranks": 8, ..., "kernel": "dispatch",
                  "direction": "forward", "n_c": 12, "chunk_columns": 512,
                  "seconds": [[1, 512, 0.0021], ...], "when": "2026-..."}, ...],
     "layers": [{"device_name": "NVIDIA H200", ..., "fused_forward": 0.0031, ..., "when": "2026-..."}, ...]}

They lie beside the profiles, in $PMOE_CACHE or ~/.cache/pmoe.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pmoe.measure.product_file import write_whole
from pmoe.measure.stored import profile_folder
from pmoe.planner.division import Division, Entry, LayerSeconds, LayerTimes, Shape, Sizes, Table

FORMAT = 1
"""Of the file. Rises with every change of what a field means."""

AGAIN = "measure again with: pmoe profile --kernels"


def table_path(device_name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """The file of devices of this name: in ``folder``, or $PMOE_CACHE, or ~/.cache/pmoe. Raises RuntimeError
    where there is no home."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return profile_folder(folder) / f"division_{slug}_v{FORMAT}.json"


def load_table(folder: str | os.PathLike[str] | None = None) -> Table:
    """What all files of the folder hold. One that is corrupt or of another format is told of by a warning,
    and not used; raises nothing, since other ranks may wait."""
    entries: dict[Shape, Entry] = {}
    layers: dict[Sizes, LayerTimes] = {}
    try:
        paths = sorted(profile_folder(folder).glob("division_*.json"))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        warnings.warn(f"pmoe: measured division points are not used: {error}", stacklevel=2)
        paths = []
    for path in paths:
        held = _usable(path)
        entries |= held.entries
        layers |= held.layers
    return Table(entries, layers)


def save_table(found: Table, folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Puts ``found`` beside what the files of its devices hold, in the place of what they held of the same
    shapes; returns those files. A reader never sees half of one. Of two writers at once one may lose what it
    added. A file of this format's name that cannot be used is told of, and replaced.

    Raises OSError or RuntimeError where one cannot be written.
    """
    paths = [table_path(each.device_name, folder) for each in (*found.entries, *found.layers)]
    paths = list(dict.fromkeys(paths))
    for path in paths:
        held = _usable(path) if path.exists() else Table()
        # Names that differ in a space alone share a file.
        entries = {k: v for k, v in found.entries.items() if table_path(k.device_name, folder) == path}
        layers = {k: v for k, v in found.layers.items() if table_path(k.device_name, folder) == path}
        merged = Table({**held.entries, **entries}, {**held.layers, **layers})
        write_whole(path, json.dumps({"format": FORMAT, **as_fields(merged)}, allow_nan=False) + "\n")
    return paths


def as_fields(table: Table) -> dict[str, list[dict[str, Any]]]:
    """The table as JSON has it, sorted by what its shapes say."""
    entries = sorted(table.entries.values(), key=lambda each: str(each.shape))
    layers = sorted(table.layers.values(), key=lambda each: str(each.sizes))
    return {
        "entries": [_entry_fields(each) for each in entries],
        "layers": [_layer_fields(each) for each in layers],
    }


def read_table(path: str | os.PathLike[str]) -> Table:
    """What one file holds. Raises OSError; ValueError with the file and the field where it is no table, or
    one of another format."""
    try:
        return _parsed(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _usable(path: Path) -> Table:
    try:
        return read_table(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"pmoe: measured division points are not used: {error}; {AGAIN}", stacklevel=3)
        return Table()


# ---- as JSON


def _entry_fields(entry: Entry) -> dict[str, Any]:
    return {
        **asdict(entry.shape),
        "n_c": entry.division.n_c,
        "chunk_columns": entry.division.chunk_columns,
        "seconds": [[each.n_c, each.chunk_columns, took] for each, took in sorted(entry.seconds.items())],
        "when": entry.when,
    }


def _layer_fields(times: LayerTimes) -> dict[str, Any]:
    return {**asdict(times.sizes), **asdict(times.seconds), "when": times.when}


def _parsed(text: bytes) -> Table:
    try:
        held = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(held, dict):
        raise ValueError("must be an object")
    if held.get("format") != FORMAT:
        raise ValueError(f"format ({held.get('format')!r}) must be {FORMAT}")
    entries, layers = held.get("entries"), held.get("layers")
    if not (isinstance(entries, list) and isinstance(layers, list)):
        raise ValueError("must have a list of entries and a list of layers")
    found = [_made(_entry, f"entries[{i}]", each) for i, each in enumerate(entries)]
    timed = [_made(_layer, f"layers[{i}]", each) for i, each in enumerate(layers)]
    return Table({each.shape: each for each in found}, {each.sizes: each for each in timed})


def _made(make: Any, name: str, value: object) -> Any:
    """By ``make``, whose value types refuse what cannot be; ValueError with the name of what is wrong."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} ({value!r}) must be an object")
    try:
        return make(value)
    except KeyError as error:
        raise ValueError(f"{name} has no {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _taken(kind: type, value: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: value[each.name] for each in fields(kind)}


def _entry(value: Mapping[str, Any]) -> Entry:
    return Entry(
        shape=Shape(**_taken(Shape, value)),
        division=Division(value["n_c"], value["chunk_columns"]),
        seconds={Division(n_c, columns): took for n_c, columns, took in value["seconds"]},
        when=str(value["when"]),
    )


def _layer(value: Mapping[str, Any]) -> LayerTimes:
    return LayerTimes(
        sizes=Sizes(**_taken(Sizes, value)),
        seconds=LayerSeconds(**_taken(LayerSeconds, value)),
        when=str(value["when"]),
    )
