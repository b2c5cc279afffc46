"""The file of a granularity table: the degrees that trials found fastest, for one kind of layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pmoe.measure.store import PathLike, load, save
from pmoe.planner.granularity import GranularityTable

FORMAT = 1
"""Of the file; another one is refused."""


def save_degrees(table: GranularityTable, path: PathLike, key: Mapping[str, Any]) -> None:
    """Writes the whole file or none.

    key: says where the numbers hold (device, ranks, sizes); anything that JSON can hold.

    Raises OSError where it cannot be written, TypeError for a key that JSON cannot hold.
    """
    save(path, {"format": FORMAT, "key": dict(key), **table.to_fields()})


def load_degrees(path: PathLike, key: Mapping[str, Any]) -> GranularityTable:
    """The table that was saved at ``path`` with this key.

    Raises ValueError, naming the path, for a file that is no such table, of another format or another key;
    OSError where it cannot be read.
    """
    expected = {"format": FORMAT, "key": json.loads(json.dumps(dict(key)))}

    def parse(fields: Mapping[str, Any]) -> GranularityTable:
        for name, value in expected.items():
            if fields.get(name) != value:
                raise ValueError(
                    f"found {name} {fields.get(name)!r}, expected {value!r}: save_degrees of a layer like "
                    "this one writes a file that fits"
                )
        return GranularityTable.from_fields(fields)

    return load(path, parse)
