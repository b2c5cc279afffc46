"""How many thread blocks of the fused kernels communicate: stored, and the same on all ranks.

There is a file for each device name, beside the profiles, in $PMOE_CACHE or ~/.cache/pmoe:

    {"format": 1,
     "entries": [{"device_name": "NVIDIA H200", "num_blocks": 132, "num_ranks": 8, ..., "kernel": "dispatch",
                  "direction": "forward", "n_c": 12, "chunk_columns": 512,
                  "seconds": [[1, 512, 0.0021], ...], "when": "2026-..."}, ...],
     "layers": [{"device_name": "NVIDIA H200", ..., "fused_forward": 0.0031, ..., "when": "2026-..."}, ...]}

The division that ranks agree on follows from rank 0's table (`pmoe.planner.division`), whatever others
have stored.
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
from pmoe.planner.division import (
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
"""The stage that an error names."""

T = TypeVar("T")

_agreed: dict[tuple[str, FusedLayerSizes], Any] = {}
"""By group and kernel or layer, what rank 0's table says."""


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
    """Of a layer on this CUDA device, whose rank receives as many rows as it sends: tokens * top_k.

    sizes: d_model, d_hidden, gated and virtual, as `FusedLayerSizes` has them, and raising as it does.

    Raises ValueError where num_ranks does not divide num_experts, and for top_k above num_experts.
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
    """The division of rank 0's table for this kernel, see `DivisionTable.find`, on every rank.

    Collective the first time that a kernel comes. Later it is known, until `forget`.

    Raises ValueError on every rank where their sizes differ: rows must be a number that all ranks share.
    RuntimeError naming stage and rank where a peer is missing.
    """

    def found(table: DivisionTable) -> Division:
        division, why = table.find(kernel)
        log.info("%s: %d blocks, %d columns; %s", kernel, division.n_c, division.chunk_columns, why)
        return division

    return _of_rank_0(ranks, device, kernel, found)


def agreed_layer(ranks: Ranks, sizes: FusedLayerSizes, device: torch.device) -> LayerSeconds | None:
    """Seconds of the fused and of the chunked layer in rank 0's table, on every rank; None without any.

    See `DivisionTable.find_layer_times`. Collective and raising as `agreed`.
    """
    sizes = sizes_of(sizes)
    return _of_rank_0(ranks, device, sizes, lambda table: table.find_layer_times(sizes))


def forget() -> None:
    """Everything agreed in this process: the next call reads rank 0's table. All ranks forget, or none."""
    _agreed.clear()


def _of_rank_0(
    ranks: Ranks, device: torch.device, sizes: FusedLayerSizes, found: Callable[[DivisionTable], T]
) -> T:
    key = (ranks.name, sizes)
    if key not in _agreed:
        if not all(same(ranks, device, [digest([str(sizes)])], stage=AGREEING)):
            raise ValueError(f"shape ({sizes}) must be the same on every rank, and another rank has another")
        own = found(load_divisions()) if ranks.rank == 0 else None
        _agreed[key] = from_first(ranks, own, stage=AGREEING)
    value: T = _agreed[key]
    return value


FORMAT = 1
"""Of the file. Rises with every change of what a field means."""


def division_path(device_name: str, folder: PathLike | None = None) -> Path:
    """The file of devices of this name in the `cache_folder`. Raises RuntimeError where there is no home."""
    return cache_path(("division", device_name, f"v{FORMAT}"), folder)


def load_divisions(folder: PathLike | None = None) -> DivisionTable:
    """All files of the folder as one table.

    Warns once about a file that is corrupt or of another format, and leaves it out. Raises nothing, since
    other ranks may wait.
    """
    entries: dict[FusedKernelSizes, Entry] = {}
    layers: dict[FusedLayerSizes, LayerSeconds] = {}
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


def save_divisions(found: DivisionTable, folder: PathLike | None = None) -> Path:
    """Merges ``found``, all of one device, into its file, in the place of older entries of the same kernels.

    Returns the file. A reader never sees half of it. Of two writers at once one may lose what it added.
    Warns about a file of this format's name that cannot be used, and replaces it.

    Raises OSError or RuntimeError where it cannot be written.
    """
    (path,) = {division_path(each.device_name, folder) for each in (*found.entries, *found.layers)}
    held = _usable(path)
    merged = DivisionTable({**held.entries, **found.entries}, {**held.layers, **found.layers})
    save_json(path, {"format": FORMAT, **as_fields(merged)})
    return path


def read_divisions(path: PathLike) -> DivisionTable:
    """The table of one file. Raises OSError; ValueError with the file and the field where it is no table, or
    one of another format."""
    return load_json(path, _table_from, "measure again with: pmoe profile --kernels")


def _usable(path: Path) -> DivisionTable:
    about = "measured division points are not used"
    return found_or(DivisionTable(), about, lambda: read_divisions(path))


def as_fields(table: DivisionTable) -> dict[str, list[dict[str, Any]]]:
    """The table as JSON has it, sorted by the text of its sizes."""

    def rows(held: Mapping[Any, Any], numbers: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**asdict(sizes), **numbers(held[sizes])} for sizes in sorted(held, key=str)]

    return {"entries": rows(table.entries, _entry_numbers), "layers": rows(table.layers, asdict)}


def _entry_numbers(entry: Entry) -> dict[str, Any]:
    seconds = [[*astuple(each), took] for each, took in sorted(entry.seconds.items())]
    return {**asdict(entry.division), "seconds": seconds, "when": entry.when}


def _table_from(held: Mapping[str, Any]) -> DivisionTable:
    if held.get("format") != FORMAT:
        raise ValueError(f"format ({held.get('format')!r}) must be {FORMAT}")
    entries, layers = held.get("entries"), held.get("layers")
    if not (isinstance(entries, list) and isinstance(layers, list)):
        raise ValueError("must have a list of entries and a list of layers")
    found = [_entry(f"entries[{i}]", each) for i, each in enumerate(entries)]
    timed = {
        typed(FusedLayerSizes, each, f"layers[{i}]"): typed(LayerSeconds, each, f"layers[{i}]")
        for i, each in enumerate(layers)
    }
    return DivisionTable({each.sizes: each for each in found}, timed)


def _entry(name: str, value: Any) -> Entry:
    sizes, division = typed(FusedKernelSizes, value, name), typed(Division, value, name)
    try:
        seconds = {
            Division(n_c, columns): typed(float, took, f"{name}.seconds[{i}]")
            for i, (n_c, columns, took) in enumerate(value.get("seconds"))
        }
    except (TypeError, ValueError) as error:
        raise CorruptFileError(f"{name}: {error}") from None
    if division not in seconds:
        raise CorruptFileError(f"{name}: division ({division}) must be among those measured")
    when = typed(str, value.get("when"), f"{name}.when")
    return Entry(sizes=sizes, division=division, seconds=seconds, when=when)
