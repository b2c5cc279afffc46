"""Stored divisions of the fused kernels' thread blocks, and their agreement on all ranks.

There is one file for each device name, beside the profiles, in $PMOE_CACHE or ~/.cache/pmoe:

    {"format": 1,
     "entries": [{"device_name": "NVIDIA H200", "num_blocks": 132, "num_ranks": 8, ..., "kernel": "dispatch",
                  "direction": "forward", "n_c": 12, "chunk_columns": 512,
                  "seconds": [[1, 512, 0.0021], ...], "when": "2026-..."}, ...],
     "layers": [{"device_name": "NVIDIA H200", ..., "fused_forward": 0.0031, ..., "when": "2026-..."}, ...]}

All ranks use the division that follows from rank 0's table (`pmoe.planner.block_split`). The files of other
ranks are not read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, TypeVar

import torch

from pmoe.comm.agreement import digest, from_first, same
from pmoe.comm.ranks import Ranks
from pmoe.kernels.comet.launcher import Division
from pmoe.kernels.extension import device_name
from pmoe.kernels.registry import bucket
from pmoe.measure.store import (
    CorruptFileError,
    PathLike,
    cache_folder,
    cache_path,
    found_or,
    load_json,
    save_json,
    typed,
)
from pmoe.planner.block_split import (
    DivisionTable,
    Entry,
    FusedKernelSizes,
    FusedLayerSizes,
    LayerSeconds,
    sizes_of,
)
from pmoe.planner.layer_sizes import check_fits
from pmoe.warn import log

AGREEING = "agreeing on divisions of the fused kernels"
"""Stage that an error names."""

T = TypeVar("T")

_agreed: dict[tuple[str, FusedLayerSizes], Any] = {}
"""Answers of rank 0's table, by the group's name and the kernel or layer."""


def fused_layer_sizes(
    device: torch.device,
    *,
    num_experts: int,
    tokens: int,
    top_k: int,
    num_ranks: int,
    dtype: torch.dtype,
    **sizes: Any,
) -> FusedLayerSizes:
    """Returns the sizes of a layer on this CUDA device.

    Its rank receives as many rows as it sends, tokens * top_k.

    sizes: d_model, d_hidden, gated and virtual of `FusedLayerSizes`.

    Raises ValueError if num_ranks does not divide num_experts, for top_k above num_experts, and as
    `FusedLayerSizes` does.
    """
    check_fits(num_experts, top_k, num_ranks)
    return FusedLayerSizes(
        device_name=device_name(device),
        num_blocks=torch.cuda.get_device_properties(device).multi_processor_count,
        num_ranks=num_ranks,
        experts=num_experts // num_ranks,
        rows=bucket(tokens * top_k),
        dtype=str(dtype).removeprefix("torch."),
        **sizes,
    )


def agreed(ranks: Ranks, kernel: FusedKernelSizes, device: torch.device) -> Division:
    """Returns the division of this kernel by rank 0's table, on every rank; see `DivisionTable.find`.

    Collective when a kernel is asked for the first time. Its answer is then remembered until `forget`.

    Raises ValueError on every rank if the sizes differ between ranks: rows must be a number that all ranks
    share. Raises RuntimeError, naming stage and rank, if a peer is missing.
    """

    def found(table: DivisionTable) -> Division:
        division, why = table.find(kernel)
        log.info("%s: %d blocks, %d columns; %s", kernel, division.n_c, division.chunk_columns, why)
        return division

    return _of_rank_0(ranks, device, kernel, found)


def agreed_layer(ranks: Ranks, sizes: FusedLayerSizes, device: torch.device) -> LayerSeconds | None:
    """Returns the times of the fused and the chunked layer by rank 0's table, on every rank.

    None if the table has none; see `DivisionTable.find_layer_times`. Collective and raising as `agreed`.
    """
    sizes = sizes_of(sizes)
    return _of_rank_0(ranks, device, sizes, lambda table: table.find_layer_times(sizes))


def forget() -> None:
    """Forgets everything that ranks agreed on, so that the next call reads rank 0's table again.

    Either all ranks must call it, or none.
    """
    _agreed.clear()


def _of_rank_0(
    ranks: Ranks, device: torch.device, sizes: FusedLayerSizes, found: Callable[[DivisionTable], T]
) -> T:
    """Returns what rank 0 found in its table, on every rank. Collective if it is not remembered."""
    key = (ranks.name, sizes)
    if key not in _agreed:
        if not all(same(ranks, device, [digest([str(sizes)])], stage=AGREEING)):
            raise ValueError(
                f"sizes ({sizes}) must be the same on every rank, but another rank has other sizes"
            )
        own = found(load_divisions()) if ranks.rank == 0 else None
        _agreed[key] = from_first(ranks, own, stage=AGREEING)
    value: T = _agreed[key]
    return value


FORMAT = 1
"""Version of the file's format. It rises with every change of a field's meaning."""


def division_path(device_name: str, folder: PathLike | None = None) -> Path:
    """Returns the file for devices of this name, in `cache_folder`.

    Raises RuntimeError if there is no home folder.
    """
    return cache_path(("division", device_name, f"v{FORMAT}"), folder)


def load_divisions(folder: PathLike | None = None) -> DivisionTable:
    """Returns the entries of all files in the folder as one table.

    It raises nothing, because other ranks may be waiting. A file that is corrupt or of another format is
    left out, with one warning.
    """
    entries: dict[FusedKernelSizes, Entry] = {}
    layers: dict[FusedLayerSizes, LayerSeconds] = {}
    try:
        paths = sorted(cache_folder(folder).glob("division_*.json"))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        warnings.warn(f"pmoe: stored divisions of fused kernels are not used: {error}", stacklevel=2)
        paths = []
    for path in paths:
        file_table = _usable(path)
        entries |= file_table.entries
        layers |= file_table.layers
    return DivisionTable(entries, layers)


def save_divisions(found: DivisionTable, folder: PathLike | None = None) -> Path:
    """Merges measurements of one device into its file, and returns the file's path.

    Older entries of the same kernels are replaced. A reader never sees half of the file, but of two
    processes that write at once one may lose what it added. A file of this format's name that cannot be
    used is replaced, with a warning.

    Raises OSError or RuntimeError if the file cannot be written.
    """
    (path,) = {division_path(sizes.device_name, folder) for sizes in (*found.entries, *found.layers)}
    stored = _usable(path)
    merged = DivisionTable({**stored.entries, **found.entries}, {**stored.layers, **found.layers})
    save_json(path, {"format": FORMAT, **as_fields(merged)})
    return path


def read_divisions(path: PathLike) -> DivisionTable:
    """Returns the table of one file.

    Raises OSError if it cannot be read, and ValueError, with the file and the field, if it is no table or
    of another format.
    """
    return load_json(path, _table_from, "measure again with: pmoe profile --kernels")


def _usable(path: Path) -> DivisionTable:
    """Returns the table of a file, or an empty table if it cannot be used.

    Warns about a file that exists and cannot be used.
    """
    about = "stored divisions of fused kernels are not used"
    return found_or(DivisionTable(), about, lambda: read_divisions(path))


def as_fields(table: DivisionTable) -> dict[str, list[dict[str, Any]]]:
    """Returns the table as JSON can hold it, sorted by the text of the sizes."""

    def rows(held: Mapping[Any, Any], numbers: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**asdict(sizes), **numbers(held[sizes])} for sizes in sorted(held, key=str)]

    return {"entries": rows(table.entries, _entry_numbers), "layers": rows(table.layers, asdict)}


def _entry_numbers(entry: Entry) -> dict[str, Any]:
    """Returns an entry without its sizes."""
    seconds = [
        [*astuple(division), division_seconds] for division, division_seconds in sorted(entry.seconds.items())
    ]
    return {**asdict(entry.division), "seconds": seconds, "when": entry.when}


def _table_from(held: Mapping[str, Any]) -> DivisionTable:
    """Returns the table that the fields of a file hold. Raises ValueError if they are not of this format."""
    if held.get("format") != FORMAT:
        raise ValueError(f"format ({held.get('format')!r}) must be {FORMAT}")
    entries = held.get("entries")
    layers = held.get("layers")
    if not (isinstance(entries, list) and isinstance(layers, list)):
        raise ValueError("must have a list of entries and a list of layers")
    entry_list = [_entry(f"entries[{i}]", fields) for i, fields in enumerate(entries)]
    timed = {
        typed(FusedLayerSizes, entry, f"layers[{i}]"): typed(LayerSeconds, entry, f"layers[{i}]")
        for i, entry in enumerate(layers)
    }
    return DivisionTable({entry.sizes: entry for entry in entry_list}, timed)


def _entry(name: str, value: Any) -> Entry:
    """Returns one entry of a file. Raises CorruptFileError, with the name of the field, if it is none."""
    sizes = typed(FusedKernelSizes, value, name)
    division = typed(Division, value, name)
    try:
        seconds = {
            Division(n_c, columns): typed(float, division_seconds, f"{name}.seconds[{i}]")
            for i, (n_c, columns, division_seconds) in enumerate(value.get("seconds"))
        }
    except (TypeError, ValueError) as error:
        raise CorruptFileError(f"{name}: {error}") from None
    if division not in seconds:
        raise CorruptFileError(f"{name}: division ({division}) must be among those measured")
    when = typed(str, value.get("when"), f"{name}.when")
    return Entry(sizes=sizes, division=division, seconds=seconds, when=when)
