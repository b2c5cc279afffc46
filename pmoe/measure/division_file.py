"""The files of measured divisions, one for each device name, and all of them as one `DivisionTable`.

    {"format": 1,
     "entries": [{"device_name": "NVIDIA H200", "num_blocks": 132, "num_ranks": 8, ..., "kernel": "dispatch",
                  "direction": "forward", "n_c": 12, "chunk_columns": 512,
                  "seconds": [[1, 512, 0.0021], ...], "when": "2026-..."}, ...],
     "layers": [{"device_name": "NVIDIA H200", ..., "fused_forward": 0.0031, ..., "when": "2026-..."}, ...]}

They lie beside the profiles, in $PMOE_CACHE or ~/.cache/pmoe.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from pmoe.measure.store import PathLike, cache_folder, cache_path, load, save
from pmoe.planner.division import Division, FusedKernelSizes, FusedLayerSizes
from pmoe.planner.division_table import DivisionTable, Entry, LayerSeconds, LayerTimes

FORMAT = 1
"""Of the file. Rises with every change of what a field means."""

AGAIN = "measure again with: pmoe profile --kernels"

T = TypeVar("T")


def division_path(device_name: str, folder: PathLike | None = None) -> Path:
    """The file of devices of this name: in ``folder``, or $PMOE_CACHE, or ~/.cache/pmoe.

    Raises RuntimeError where there is no home.
    """
    return cache_path(("division", device_name, f"v{FORMAT}"), folder)


def load_divisions(folder: PathLike | None = None) -> DivisionTable:
    """All files of the folder as one table.

    Warns about a file that is corrupt or of another format, and leaves it out. Raises nothing, since other
    ranks may wait.
    """
    entries: dict[FusedKernelSizes, Entry] = {}
    layers: dict[FusedLayerSizes, LayerTimes] = {}
    try:
        paths = sorted(cache_folder(folder).glob("division_*.json"))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        warnings.warn(f"pmoe: measured division points are not used: {error}", stacklevel=2)
        paths = []
    for path in paths:
        held = _usable(path)
        entries |= held.entries
        layers |= held.layers
    return DivisionTable(entries, layers)


def save_divisions(found: DivisionTable, folder: PathLike | None = None) -> list[Path]:
    """Merges ``found`` into the files of its devices, in the place of older entries of the same kernels.

    Returns those files. A reader never sees half of one. Of two writers at once one may lose what it added.
    Warns about a file of this format's name that cannot be used, and replaces it.

    Raises OSError or RuntimeError where one cannot be written.
    """
    paths = [division_path(each.device_name, folder) for each in (*found.entries, *found.layers)]
    paths = list(dict.fromkeys(paths))
    for path in paths:
        held = _usable(path) if path.exists() else DivisionTable()
        # Names that differ in a space alone share a file.
        entries = {k: v for k, v in found.entries.items() if division_path(k.device_name, folder) == path}
        layers = {k: v for k, v in found.layers.items() if division_path(k.device_name, folder) == path}
        merged = DivisionTable({**held.entries, **entries}, {**held.layers, **layers})
        save(path, {"format": FORMAT, **as_fields(merged)})
    return paths


def read_divisions(path: PathLike) -> DivisionTable:
    """The table of one file. Raises OSError; ValueError with the file and the field where it is no table, or
    one of another format."""
    return load(path, _parsed)


def _usable(path: Path) -> DivisionTable:
    try:
        return read_divisions(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"pmoe: measured division points are not used: {error}; {AGAIN}", stacklevel=3)
        return DivisionTable()


# ---- as JSON


def as_fields(table: DivisionTable) -> dict[str, list[dict[str, Any]]]:
    """The table as JSON has it, sorted by the text of its sizes."""
    entries = sorted(table.entries.values(), key=lambda each: str(each.sizes))
    layers = sorted(table.layers.values(), key=lambda each: str(each.sizes))
    return {
        "entries": [_entry_fields(each) for each in entries],
        "layers": [{**asdict(each.sizes), **asdict(each.seconds), "when": each.when} for each in layers],
    }


def _entry_fields(entry: Entry) -> dict[str, Any]:
    return {
        **asdict(entry.sizes),
        "n_c": entry.division.n_c,
        "chunk_columns": entry.division.chunk_columns,
        "seconds": [[each.n_c, each.chunk_columns, took] for each, took in sorted(entry.seconds.items())],
        "when": entry.when,
    }


def _parsed(held: Mapping[str, Any]) -> DivisionTable:
    if held.get("format") != FORMAT:
        raise ValueError(f"format ({held.get('format')!r}) must be {FORMAT}")
    entries, layers = held.get("entries"), held.get("layers")
    if not (isinstance(entries, list) and isinstance(layers, list)):
        raise ValueError("must have a list of entries and a list of layers")
    found = [_made(_entry, f"entries[{i}]", each) for i, each in enumerate(entries)]
    timed = [_made(_layer, f"layers[{i}]", each) for i, each in enumerate(layers)]
    return DivisionTable({each.sizes: each for each in found}, {each.sizes: each for each in timed})


def _made(make: Callable[[Mapping[str, Any]], T], name: str, value: object) -> T:
    """By ``make``, whose value types refuse bad fields; ValueError with the name of the field."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} ({value!r}) must be an object")
    try:
        return make(value)
    except KeyError as error:
        raise ValueError(f"{name} has no {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _fields_of(kind: type, value: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: value[each.name] for each in fields(kind)}


def _entry(value: Mapping[str, Any]) -> Entry:
    return Entry(
        sizes=FusedKernelSizes(**_fields_of(FusedKernelSizes, value)),
        division=Division(value["n_c"], value["chunk_columns"]),
        seconds={Division(n_c, columns): took for n_c, columns, took in value["seconds"]},
        when=str(value["when"]),
    )


def _layer(value: Mapping[str, Any]) -> LayerTimes:
    return LayerTimes(
        sizes=FusedLayerSizes(**_fields_of(FusedLayerSizes, value)),
        seconds=LayerSeconds(**_fields_of(LayerSeconds, value)),
        when=str(value["when"]),
    )
