"""`pmoe profile --kernels`: measures how many thread blocks of pmoe's fused kernels should communicate.

A fused kernel multiplies rows and moves them between ranks at the same time: n_c of its thread blocks
communicate, the others compute. This split is called a division. The fastest division depends on the layer's
sizes. It is stored in a table that layers look up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pmoe.cli.arguments import DTYPES, refuse_options, refused_as, whole_number
from pmoe.cli.launch import all_ranks, own_device, world_size
from pmoe.cli.output import Output, ms
from pmoe.comm.agreement import all_fail_together
from pmoe.comm.ranks import Ranks
from pmoe.experts import STACKED
from pmoe.kernels import extension
from pmoe.layer import MoELayer
from pmoe.measure.block_split import as_fields, forget, fused_layer_sizes, load_divisions, save_divisions
from pmoe.measure.fused_kernels import measure_kernels, time_layers
from pmoe.measure.store import cache_folder
from pmoe.planner.block_split import (
    DivisionTable,
    Entry,
    FusedLayerSizes,
    LayerSeconds,
    all_kernel_sizes,
    rule,
    sizes_of,
)
from pmoe.text import table

LAYER: dict[str, Any] = {
    "d_model": 4096,
    "d_hidden": 14336,
    "num_experts": 8,
    "top_k": 2,
    "tokens": (1024, 4096, 16384),
    "expert": "swiglu",
}
"""The layer that is measured if no options are given: a layer of Mixtral 8x7B, from COMET's Table 2."""

OPTIONS = ("show", *LAYER, "virtual_ranks")
"""Options of `pmoe profile` that are allowed only together with --kernels."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group(
        "the fused kernels", "how many of their thread blocks communicate (default layer: Mixtral 8x7B's)"
    ).add_argument
    add("--kernels", action="store_true", help="measure these kernels, not the machine, on a CUDA device")
    add("--show", action="store_true", help="print what is stored and measure nothing")
    experts = f"experts on all ranks; default {LAYER['num_experts']}"
    tokens = f"tokens of one rank, one or more numbers; default {' '.join(map(str, LAYER['tokens']))}"
    add("--d-model", type=whole_number, metavar="M", help=f"default {LAYER['d_model']}")
    add("--d-hidden", type=whole_number, metavar="H", help=f"default {LAYER['d_hidden']}")
    add("--num-experts", type=whole_number, metavar="E", help=experts)
    add("--top-k", type=whole_number, metavar="K", help=f"experts of each token; default {LAYER['top_k']}")
    add("--tokens", type=whole_number, nargs="+", metavar="B", help=tokens)
    add("--expert", choices=list(STACKED), help=f"default {LAYER['expert']}")
    add("--virtual-ranks", type=whole_number, metavar="W", help="ranks in one process, on one device")


def run_command(args: argparse.Namespace) -> Output | None:
    """Measures the fastest division of each fused kernel, stores the table, and returns it as output.

    A division says how many thread blocks of a kernel communicate while the others compute. Under torchrun
    every rank must run this. Rank 0 stores and prints, and the other ranks return None. With --show nothing
    is measured.
    """
    refuse_options(args, ("quick", "full", "inside", "out"), "must not be given with --kernels")
    if args.show:
        divisions = load_divisions(args.folder)
        folder = cache_folder(args.folder)
        return Output({"folder": str(folder), **as_fields(divisions)}, _lines(divisions, folder))
    device = _fused_device(args)
    with all_ranks(device) as ranks:
        divisions, path = _measured(args, ranks, device)
    if ranks.rank:
        return None
    lines = [_divisions(divisions), f"\nwrote {path}"]
    return Output({"path": str(path), **as_fields(divisions)}, lines)


def _fused_device(args: argparse.Namespace) -> torch.device:
    """Returns the CUDA device on which the fused kernels are measured.

    Raises ValueError if the device has no fused kernels. Also raises ValueError if --virtual-ranks is given
    although torchrun started several processes: virtual ranks are ranks inside a single process.
    """
    virtual = args.virtual_ranks
    world = world_size()
    if virtual is not None and world > 1:
        raise ValueError(f"--virtual-ranks ({virtual}) needs a single process, but torchrun started {world}")
    device = own_device("cuda" if args.device is None else args.device)
    _, reason = extension.path(device)
    if reason is not None:
        raise ValueError(f"pmoe profile --kernels needs a CUDA device with the fused kernels: {reason}")
    return device


def _measured(
    args: argparse.Namespace, ranks: Ranks, device: torch.device
) -> tuple[DivisionTable, Path | None]:
    """Measures the fused kernels. Returns the table of divisions, and the file in which rank 0 has stored it.

    A division says how many thread blocks of a kernel communicate while the others compute. With several
    processes, whole layers are timed, too. Collective: every rank must call this function. The file is None
    on other ranks.

    args: the options of the command.
    ranks: the ranks that measure.
    device: the CUDA device.

    Raises ValueError if no kernel could be measured.
    """
    layer = {name: getattr(args, name) or default for name, default in LAYER.items()}
    layer |= {"device": device, "dtype": DTYPES[args.dtype or "bfloat16"]}
    all_tokens = layer.pop("tokens")
    virtual = args.virtual_ranks
    options = {name: value for name, value in layer.items() if name != "expert"}
    options |= {"gated": layer["expert"] == "swiglu", "num_ranks": virtual or ranks.size}
    options["virtual"] = virtual is not None
    sizes = {tokens: fused_layer_sizes(**options, tokens=tokens) for tokens in all_tokens}
    divisions = measure_kernels(list(sizes.values()), ranks, device, top_k=layer["top_k"])
    if not divisions.entries:
        raise ValueError("no fused kernel could be measured: see the warnings above")
    path = _save(divisions, ranks, args.folder)
    if virtual is None and ranks.size > 1:  # timed only now, because the layers use the stored divisions
        divisions = DivisionTable(divisions.entries, _time_layers(layer, sizes, ranks))
        path = _save(divisions, ranks, args.folder)
    return divisions, path


def _save(divisions: DivisionTable, ranks: Ranks, folder: Path | None) -> Path | None:
    """Rank 0 stores a table of divisions in a file. Later layers of this process read the file. Collective.

    Returns the file's path on rank 0, and None on other ranks.

    divisions: the table: how many thread blocks of each fused kernel communicate.
    folder: the folder to store it in; None takes the default.
    """
    rule = f"--folder ({cache_folder(folder)}) must be a folder to write"
    with all_fail_together(ranks, stage="storing division points"), refused_as(rule, OSError):
        path = save_divisions(divisions, folder) if ranks.rank == 0 else None
    forget()
    return path


def _time_layers(
    layer: Mapping[str, Any], sizes: Mapping[int, FusedLayerSizes], ranks: Ranks
) -> dict[FusedLayerSizes, LayerSeconds]:
    """Returns measured times of a layer with fused kernels and of the same layer in chunks, for each size.

    layer: arguments of `pmoe.MoELayer`.
    sizes: sizes of the layer, by number of tokens of a rank.
    ranks: the ranks of the layer.

    Sizes for which the layer cannot use its fused kernels are left out, with a message on stderr.
    """
    times = {}
    for tokens, layer_sizes in sizes.items():
        x_TM = torch.randn(tokens, layer["d_model"], device=layer["device"]).to(layer["dtype"])
        fused, chunked = (
            MoELayer(**layer, bias=False, fused=is_fused, pipeline=True, memory_reuse=True)
            for is_fused in (True, False)
        )
        fused(x_TM)
        assert fused.ran is not None
        if fused.ran.path == "fused":
            times[layer_sizes] = time_layers(fused, chunked, x_TM, ranks)
        else:  # the layer itself warns about a reason only once
            print(
                f"pmoe: no layer times for {layer_sizes}: it ran on path {fused.ran.path!r}, not fused",
                file=sys.stderr,
            )
    return times


def _lines(divisions: DivisionTable, folder: Path) -> Iterator[str]:
    """Yields the lines that --show prints: tables of the measurements that are stored in a folder.

    divisions: the stored measurements.
    folder: the folder.
    """
    if not (divisions.entries or divisions.layers):
        yield f"no measurements of fused kernels in {folder}"
        return
    if divisions.entries:
        yield _divisions(divisions)
    if divisions.layers:
        yield "\nms of a layer, forward and both passes, with fused kernels and in chunks"
        yield table(_layer_rows(divisions.layers))
    yield f"\nstored in {folder}"


def _divisions(divisions: DivisionTable) -> str:
    """Returns a table of the fastest division of each fused kernel, as text, with its time.

    A division says how many thread blocks communicate (n_c), and how many columns the combine kernel sends at
    a time (T_N). One division is the default, which is used without measurements. If it was measured, the
    table also has its time.

    divisions: the measurements.
    """
    lines = ["thread blocks that communicate (n_c), columns of a chunk (T_N), and ms of the kernel"]
    header = ("kernel", "n_c", "T_N", "ms", "ms by rule", "measured")
    for sizes in sorted({sizes_of(shape) for shape in divisions.entries}, key=str):
        entries = [
            divisions.entries[shape] for shape in all_kernel_sizes(sizes) if shape in divisions.entries
        ]
        lines += ["", str(sizes), table([header, *map(_division_cells, entries)])]
    return "\n".join(lines)


def _division_cells(entry: Entry) -> Sequence[str]:
    """Returns the texts of one row of the table of fastest divisions, for one kernel.

    A division says how many thread blocks communicate, and how many columns are sent together.

    entry: the kernel's sizes, its fastest division, and the measured seconds of all divisions.
    """
    shape = entry.sizes
    division = entry.division
    by_rule = entry.seconds.get(rule(entry.sizes))
    return (
        f"{shape.kernel} {shape.direction}",
        str(division.n_c),
        str(division.chunk_columns) if shape.kernel == "combine" else "-",
        ms(entry.seconds[division]),
        "-" if by_rule is None else ms(by_rule),
        entry.when,
    )


def _layer_rows(layers: Mapping[FusedLayerSizes, LayerSeconds]) -> Iterator[Sequence[str]]:
    """Yields the rows of a table of layer times, in milliseconds: with fused kernels, and in chunks.

    layers: measured times by the sizes of a layer.
    """
    yield "", "fused", "chunked", "fused, both", "chunked, both", "measured"
    for sizes in sorted(layers, key=str):
        times = layers[sizes]
        seconds = (times.fused_forward, times.chunked_forward, times.fused_step, times.chunked_step)
        yield str(sizes), *map(ms, seconds), times.when
