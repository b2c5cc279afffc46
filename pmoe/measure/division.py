"""How many thread blocks of the fused kernels communicate: the same on all ranks.

The division follows from rank 0's table (`pmoe.planner.division_table`), whatever others have stored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import fields

import torch

from pmoe.comm.agree import digest, largest
from pmoe.comm.ranks import Ranks
from pmoe.kernels.architecture import device_name
from pmoe.kernels.product_request import bucket
from pmoe.measure.division_file import load_divisions
from pmoe.measure.store import PathLike
from pmoe.planner.division import Division, FusedKernelSizes, FusedLayerSizes, sizes_of
from pmoe.planner.division_table import LayerSeconds

log = logging.getLogger("pmoe")

AGREEING = "agreeing on divisions of the fused kernels"
"""The stage that an error names."""

SECONDS = tuple(each.name for each in fields(LayerSeconds))
UNKNOWN = -1.0

_divisions: dict[tuple[str, FusedKernelSizes, PathLike | None], Division] = {}
_layers: dict[tuple[str, FusedLayerSizes, PathLike | None], LayerSeconds | None] = {}


def fused_layer_sizes(
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
) -> FusedLayerSizes:
    """Of a layer on this CUDA device, whose rank receives as many rows as it sends: tokens * top_k.

    Raises ValueError where num_ranks does not divide num_experts, for top_k above num_experts, and as
    `FusedLayerSizes` does.
    """
    if top_k > num_experts:
        raise ValueError(f"top_k ({top_k}) must be at most num_experts ({num_experts})")
    if num_experts % num_ranks:
        raise ValueError(f"num_experts ({num_experts}) must be divisible by num_ranks ({num_ranks})")
    return FusedLayerSizes(
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


def agreed(
    ranks: Ranks, kernel: FusedKernelSizes, device: torch.device, *, folder: PathLike | None = None
) -> Division:
    """The division of rank 0's table for this kernel, see `DivisionTable.find`, on every rank.

    Collective the first time that a kernel comes: one reduction on ``device``. Later it is known, until
    `forget`. folder: of the tables (default $PMOE_CACHE, ~/.cache/pmoe).

    Raises ValueError on every rank where their sizes differ: rows must be a number that all ranks share.
    RuntimeError naming stage and rank where a peer is missing.
    """
    key = (ranks.name, kernel, folder)
    if key not in _divisions:

        def found() -> list[float]:
            division, why = load_divisions(folder).find(kernel)
            log.info("%s: %d blocks, %d columns; %s", kernel, division.n_c, division.chunk_columns, why)
            return [division.n_c, division.chunk_columns]

        n_c, columns = _of_rank_0(ranks, device, kernel, 2, found)
        _divisions[key] = Division(int(n_c), int(columns))
    return _divisions[key]


def agreed_layer(
    ranks: Ranks, sizes: FusedLayerSizes, device: torch.device, *, folder: PathLike | None = None
) -> LayerSeconds | None:
    """Seconds of the fused and of the chunked layer in rank 0's table, on every rank; None without any.

    See `DivisionTable.find_layer_times`. Collective and raising as `agreed`.
    """
    sizes = sizes_of(sizes)
    key = (ranks.name, sizes, folder)
    if key not in _layers:

        def found() -> list[float]:
            times = load_divisions(folder).find_layer_times(sizes)
            if times is None:
                return [UNKNOWN] * len(SECONDS)
            return [getattr(times.seconds, name) for name in SECONDS]

        of_rank_0 = _of_rank_0(ranks, device, sizes, len(SECONDS), found)
        known = UNKNOWN not in of_rank_0
        _layers[key] = LayerSeconds(**dict(zip(SECONDS, of_rank_0, strict=True))) if known else None
    return _layers[key]


def forget() -> None:
    """Everything agreed in this process: the next call reads rank 0's table. All ranks forget, or none."""
    _divisions.clear()
    _layers.clear()


def _of_rank_0(
    ranks: Ranks, device: torch.device, sizes: FusedLayerSizes, count: int, found: Callable[[], list[float]]
) -> list[float]:
    """A maximum in which the others have least: so one reduction also shows whether sizes are the same."""
    here = float(digest([str(sizes)]))
    own = found() if ranks.rank == 0 else [-math.inf] * count
    most, minus_least, *values = largest(ranks, device, [here, -here, *own], stage=AGREEING)
    if most != -minus_least:
        raise ValueError(f"shape ({sizes}) must be the same on every rank, and another rank has another")
    return values
