"""Stores how many thread blocks of each fused kernel should communicate, and shares it among ranks.

In a fused kernel, n_c of the thread blocks communicate and the others compute. The fastest n_c is measured
once and stored. There is one file for each device name, in $PMOE_CACHE or ~/.cache/pmoe:

    {"format": 1,
     "entries": [{"device_name": "NVIDIA H200", "num_blocks": 132, "num_ranks": 8, ..., "kernel": "dispatch",
                  "direction": "forward", "n_c": 12, "chunk_columns": 512,
                  "seconds": [[1, 512, 0.0021], ...], "when": "2026-..."}, ...],
     "layers": [{"device_name": "NVIDIA H200", ..., "fused_forward": 0.0031, ..., "when": "2026-..."}, ...]}

"entries" has one measurement for each fused kernel, "layers" compares a whole fused layer with a chunked one.
Only rank 0 reads its files, and all ranks use its choice (`pmoe.planner.block_split`), so ranks cannot
differ.
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
    load_json,
    read_or_default,
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
"""The name, in error messages, of the stage in which ranks agree on how kernels divide thread blocks."""

T = TypeVar("T")

_agreed: dict[tuple[str, FusedLayerSizes], Any] = {}
"""Results of `agreed` and `agreed_layer` in this process.

The keys are (name of the group, sizes of the kernel or layer).
"""


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
    """Returns the sizes of a layer on this CUDA device. Stored measurements are looked up by these sizes.

    A rank is assumed to receive as many rows as it sends, tokens * top_k. The number is rounded up to a power
    of two.

    device: the CUDA device.
    num_experts: number of experts of all ranks.
    tokens: number of tokens of a rank.
    top_k: number of experts of each token.
    num_ranks: number of ranks that share the experts.
    dtype: dtype of the rows.
    sizes: the other fields of `FusedLayerSizes`: d_model, d_hidden, gated (SwiGLU or not) and virtual
        (whether all ranks are in one process).

    Raises ValueError if num_ranks does not divide num_experts, if top_k is above num_experts, or if
    `FusedLayerSizes` refuses a size.
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
    """Returns how many thread blocks of a fused kernel should communicate; the same on every rank.

    Rank 0 looks in its stored measurements. The result is the fastest number for these sizes, or for the
    nearest sizes that were measured. If nothing was measured, a rule gives it (`DivisionTable.find`).

    The function is collective the first time that a group asks for these sizes. Later calls return the cached
    result, until `forget` is called.

    ranks: the group.
    kernel: sizes of the kernel.
    device: the CUDA device.

    Raises ValueError on every rank if the sizes differ between ranks: rows must be a number that all ranks
    share. Raises RuntimeError, with the names of the stage and the rank, if another rank is missing.
    """

    def division_from(table: DivisionTable) -> Division:
        division, why = table.find(kernel)
        log.info("%s: %d blocks, %d columns; %s", kernel, division.n_c, division.chunk_columns, why)
        return division

    return _of_rank_0(ranks, device, kernel, division_from)


def agreed_layer(ranks: Ranks, sizes: FusedLayerSizes, device: torch.device) -> LayerSeconds | None:
    """Returns the measured seconds of a fused and of a chunked layer; the same on every rank.

    Rank 0 looks in its stored measurements. The result is None if they have no seconds for these sizes, nor
    for half or twice as many rows.

    The function is collective the first time that a group asks for these sizes. Later calls return the cached
    result, until `forget` is called.

    ranks: the group.
    sizes: sizes of the layer.
    device: the CUDA device.

    Raises ValueError on every rank if the sizes differ between ranks, and RuntimeError if another rank is
    missing.
    """
    sizes = sizes_of(sizes)
    return _of_rank_0(ranks, device, sizes, lambda table: table.find_layer_times(sizes))


def forget() -> None:
    """Clears the cached results, so that the next `agreed` or `agreed_layer` reads rank 0's files again.

    Either all ranks must call this function, or none: the next `agreed` or `agreed_layer` is a collective,
    which the ranks must enter together.
    """
    _agreed.clear()


def _of_rank_0(
    ranks: Ranks, device: torch.device, sizes: FusedLayerSizes, look_up: Callable[[DivisionTable], T]
) -> T:
    """Looks something up in rank 0's stored measurements, and returns it on every rank.

    Collective, unless the result is cached.

    ranks: the group.
    device: the CUDA device.
    sizes: sizes of the kernel or layer, under which the result is cached.
    look_up: takes the table of stored measurements and returns the result; only rank 0 calls it.

    Raises ValueError on every rank if the sizes differ between ranks.
    """
    key = (ranks.name, sizes)
    if key not in _agreed:
        if not all(same(ranks, device, [digest([str(sizes)])], stage=AGREEING)):
            raise ValueError(
                f"sizes ({sizes}) must be the same on every rank, but another rank has other sizes"
            )
        own = look_up(load_divisions()) if ranks.rank == 0 else None
        _agreed[key] = from_first(ranks, own, stage=AGREEING)
    value: T = _agreed[key]
    return value


FORMAT = 1
"""The version of the file's format. It rises whenever the meaning of a field changes."""


def division_path(device_name: str, folder: PathLike | None = None) -> Path:
    """Returns the path of the file that stores the measurements of devices of this name.

    device_name: CUDA's name of the devices.
    folder: None stands for $PMOE_CACHE or ~/.cache/pmoe.

    Raises RuntimeError if there is no home folder.
    """
    return cache_path(("division", device_name, f"v{FORMAT}"), folder)


def load_divisions(folder: PathLike | None = None) -> DivisionTable:
    """Returns the measurements of all files in the folder as one table.

    A file that is corrupt or of another format is skipped, with one warning. No error is raised, because
    other ranks may be waiting.

    folder: None stands for $PMOE_CACHE or ~/.cache/pmoe.
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


def save_divisions(divisions: DivisionTable, folder: PathLike | None = None) -> Path:
    """Merges measurements of one device into the device's file, and returns the file's path.

    The new measurements replace those of the same kernels and layers in the file. The others stay. If the
    file exists but cannot be used, the function warns and replaces it. Nobody can read a half-written file.
    If two processes write at the same time, the file may lack the new measurements of one of them.

    divisions: the new measurements. The devices in it all have the same name, which decides the file.
    folder: the folder of the file. None stands for $PMOE_CACHE or ~/.cache/pmoe.

    Raises OSError or RuntimeError if the file cannot be written.
    """
    (path,) = {division_path(sizes.device_name, folder) for sizes in (*divisions.entries, *divisions.layers)}
    stored = _usable(path)
    merged = DivisionTable({**stored.entries, **divisions.entries}, {**stored.layers, **divisions.layers})
    save_json(path, {"format": FORMAT, **as_fields(merged)})
    return path


def read_divisions(path: PathLike) -> DivisionTable:
    """Returns the measurements of one file as a table.

    Raises OSError if the file cannot be read, and ValueError, with the file and the field, if its content is
    not a table or is of another format.
    """
    return load_json(path, _table_from, "measure again with: pmoe profile --kernels")


def _usable(path: Path) -> DivisionTable:
    """Returns the measurements of a file; an empty table if the file is missing or cannot be used.

    Warns if the file exists but cannot be used.
    """
    about = "stored divisions of fused kernels are not used"
    return read_or_default(DivisionTable(), about, lambda: read_divisions(path))


def as_fields(table: DivisionTable) -> dict[str, list[dict[str, Any]]]:
    """Converts a table of measurements to dicts and lists that JSON can store.

    "entries" has the measurements of kernels, "layers" those of whole layers. Both are sorted by the text of
    the sizes, so that equal tables give equal files.
    """

    def rows(
        measurements: Mapping[Any, Any], numbers: Callable[[Any], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        return [{**asdict(sizes), **numbers(measurements[sizes])} for sizes in sorted(measurements, key=str)]

    return {"entries": rows(table.entries, _entry_numbers), "layers": rows(table.layers, asdict)}


def _entry_numbers(entry: Entry) -> dict[str, Any]:
    """Converts one measurement of a kernel to fields that JSON can store, without the kernel's sizes."""
    seconds = [
        [*astuple(division), division_seconds] for division, division_seconds in sorted(entry.seconds.items())
    ]
    return {**asdict(entry.division), "seconds": seconds, "when": entry.when}


def _table_from(content: Mapping[str, Any]) -> DivisionTable:
    """Converts the content of a file to a table of measurements.

    content: the JSON object in the file.

    Raises ValueError if the content has another format.
    """
    if content.get("format") != FORMAT:
        raise ValueError(f"format ({content.get('format')!r}) must be {FORMAT}")
    entries = content.get("entries")
    layers = content.get("layers")
    if not (isinstance(entries, list) and isinstance(layers, list)):
        raise ValueError("must have a list of entries and a list of layers")
    entry_list = [_entry(f"entries[{i}]", fields) for i, fields in enumerate(entries)]
    timed = {
        typed(FusedLayerSizes, entry, f"layers[{i}]"): typed(LayerSeconds, entry, f"layers[{i}]")
        for i, entry in enumerate(layers)
    }
    return DivisionTable({entry.sizes: entry for entry in entry_list}, timed)


def _entry(name: str, value: Any) -> Entry:
    """Converts one entry of a file to the measurement of a kernel.

    name: the place of the entry in the file, for errors ("entries[0]").
    value: the entry as JSON gives it.

    Raises CorruptFileError, with ``name``, if the entry is not a measurement.
    """
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
