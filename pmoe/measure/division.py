"""How many thread blocks of the fused kernels communicate: taken alike by all ranks, and how it is measured.

What is taken follows from rank 0's table (pmoe/planner/division.py), whatever the other ranks have stored.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.comm.agree import digest, largest
from pmoe.comm.ranks import Ranks
from pmoe.kernels import comet, status
from pmoe.kernels.architecture import device_name
from pmoe.kernels.buckets import bucket
from pmoe.measure.division_file import load_table
from pmoe.measure.virtual_ranks import time_division
from pmoe.planner.division import (
    DIRECTIONS,
    KERNELS,
    Division,
    LayerSeconds,
    Shape,
    Sizes,
    Table,
    fill,
    sizes_of,
)

log = logging.getLogger("pmoe")

WARM_UP, ROUNDS = 2, 7
"""Of a layer's passes: how often they run before they count, and how often they count."""

Folder = str | os.PathLike[str] | None

AGREEING = "agreeing on divisions of the fused kernels"
"""The stage that an error names."""

SECONDS = tuple(each.name for each in fields(LayerSeconds))
UNKNOWN = -1.0

_divisions: dict[tuple[str, Shape, Folder], Division] = {}
_layers: dict[tuple[str, Sizes, Folder], LayerSeconds | None] = {}


def agreed(ranks: Ranks, shape: Shape, device: torch.device, *, folder: Folder = None) -> Division:
    """What rank 0's table has for this kernel, see `Table.find`, on every rank.

    Collective the first time that a shape comes: one reduction on ``device``. Later it is known, until
    `forget`. folder: of the tables (default $PMOE_CACHE, ~/.cache/pmoe).

    Raises ValueError on every rank where their shapes differ: rows must be a number that all ranks share.
    RuntimeError naming stage and rank where a peer is missing.
    """
    key = (ranks.name, shape, folder)
    if key not in _divisions:

        def found() -> list[float]:
            division, why = load_table(folder).find(shape)
            log.info("%s: %d blocks, %d columns; %s", shape, division.n_c, division.chunk_columns, why)
            return [division.n_c, division.chunk_columns]

        n_c, columns = _of_rank_0(ranks, device, shape, 2, found)
        _divisions[key] = Division(int(n_c), int(columns))
    return _divisions[key]


def agreed_layer(
    ranks: Ranks, sizes: Sizes, device: torch.device, *, folder: Folder = None
) -> LayerSeconds | None:
    """Seconds of the fused and of the chunked layer as rank 0's table has them, see
    `Table.find_layer_times`, on every rank; None where it has none. Collective and raising as `agreed`."""
    sizes = sizes_of(sizes)
    key = (ranks.name, sizes, folder)
    if key not in _layers:

        def found() -> list[float]:
            times = load_table(folder).find_layer_times(sizes)
            if times is None:
                return [UNKNOWN] * len(SECONDS)
            return [getattr(times.seconds, name) for name in SECONDS]

        of_rank_0 = _of_rank_0(ranks, device, sizes, len(SECONDS), found)
        _layers[key] = None if UNKNOWN in of_rank_0 else _layer_seconds(of_rank_0)
    return _layers[key]


def forget() -> None:
    """What was agreed in this process: the next call reads rank 0's table. All ranks forget, or none."""
    _divisions.clear()
    _layers.clear()


def _of_rank_0(
    ranks: Ranks, device: torch.device, sizes: Sizes, count: int, found: Callable[[], list[float]]
) -> list[float]:
    """A maximum in which the others have least: so one reduction also tells whether sizes are alike."""
    here = float(digest([str(sizes)]))
    own = found() if ranks.rank == 0 else [-math.inf] * count
    most, minus_least, *values = largest(ranks, device, [here, -here, *own], stage=AGREEING)
    if most != -minus_least:
        raise ValueError(f"shape ({sizes}) must be the same on every rank, and another rank has another")
    return values


def _layer_seconds(values: Sequence[float]) -> LayerSeconds:
    return LayerSeconds(**dict(zip(SECONDS, values, strict=True)))


# ---- measuring


def kernel_shapes(sizes: Sizes) -> list[Shape]:
    """The fused kernels of such a layer."""
    of = asdict(sizes_of(sizes))
    return [Shape(**of, kernel=kernel, direction=way) for kernel in KERNELS for way in DIRECTIONS]


def layer_sizes(
    device: torch.device,
    *,
    d_model: int,
    d_hidden: int,
    num_experts: int,
    tokens: int,
    top_k: int,
    num_ranks: int,
    gated: bool,
    dtype: torch.dtype,
    virtual: bool = False,
) -> Sizes:
    """Of a layer on this CUDA device, whose rank receives as many rows as it sends: tokens * top_k.

    Raises ValueError where num_ranks does not divide num_experts, for top_k above num_experts, and as
    `Sizes` does.
    """
    if top_k > num_experts:
        raise ValueError(f"top_k ({top_k}) must be at most num_experts ({num_experts})")
    if num_experts % num_ranks:
        raise ValueError(f"num_experts ({num_experts}) must be divisible by num_ranks ({num_ranks})")
    return Sizes(
        device_name=device_name(device),
        num_blocks=torch.cuda.get_device_properties(device).multi_processor_count,
        num_ranks=num_ranks,
        experts=num_experts // num_ranks,
        rows=bucket(tokens * top_k),
        d_model=d_model,
        d_hidden=d_hidden,
        gated=gated,
        dtype=str(dtype).removeprefix("torch."),
        virtual=virtual,
    )


def fused_refusal(device: torch.device) -> str | None:
    """Why the fused kernels cannot be timed on ``device``; None where they can."""
    found = status()
    if found.no_devices is not None:
        return found.no_devices
    if device.type != "cuda":
        return f"device ({device}) is none"
    if found.reason is not None:
        return found.reason
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= len(found.devices):
        return f"device ({device}) is not here, torch sees {len(found.devices)}"
    return found.devices[index].reason or comet.path(torch.device("cuda", index))[1]


def measure_kernels(layers: Sequence[Sizes], ranks: Ranks, device: torch.device, *, top_k: int) -> Table:
    """The fused kernels of these layers with every division of a sweep, on random rows whose routing is even.
    Collective; see `pmoe.planner.division.fill`. Whatever cannot be measured is told of, and left out.
    """

    def seconds(shape: Shape, division: Division) -> float:
        return time_division(shape, division, top_k=top_k, device=device, group=ranks)

    shapes = [shape for each in dict.fromkeys(layers) for shape in kernel_shapes(each)]
    entries = fill(shapes, seconds, functools.partial(largest, ranks, device, stage=AGREEING))
    return Table({each.shape: each for each in entries})


def time_layers(fused: nn.Module, chunked: nn.Module, x_TM: Tensor, ranks: Ranks) -> LayerSeconds:
    """Medians of both layers' passes over ``x_TM``, on the slowest rank. Rounds of both alternate: a clock
    that changes meets them alike. Collective; clears the gradients of both."""
    device = x_TM.device
    dy_TM = torch.randn_like(x_TM)

    def forward(layer: nn.Module) -> None:
        with torch.no_grad():
            layer(x_TM)

    def step(layer: nn.Module) -> None:
        layer.zero_grad(set_to_none=True)
        layer(x_TM.detach().requires_grad_()).backward(dy_TM)

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    work = [(way, layer) for layer in (fused, chunked) for way in (forward, step)]  # as in SECONDS
    taken: list[list[float]] = [[] for _ in work]
    for turn in range(-WARM_UP, ROUNDS):
        for (way, layer), times in zip(work, taken, strict=True):
            if ranks.size > 1:
                dist.barrier(group=ranks.group)
            begin = clock()
            way(layer)
            end = clock()
            if turn >= 0:
                times.append(end - begin)
    for layer in (fused, chunked):
        layer.zero_grad(set_to_none=True)
    medians = [statistics.median(times) for times in taken]
    return _layer_seconds(largest(ranks, device, medians, stage=AGREEING))
