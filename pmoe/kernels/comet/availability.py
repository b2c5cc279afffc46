"""What a device can run of the fused kernels, and how many of its blocks they take."""

from __future__ import annotations

import functools
import os

import torch

from pmoe.kernels import extension
from pmoe.kernels.gemm import find_path, misfit

MOST_RANKS, MOST_EXPERTS = 64, 1024
"""As in cuda/comet/layout.h."""

SPARE_BLOCKS, DEFAULT_SPARE_BLOCKS = "PMOE_SPARE_BLOCKS", 4


def path(device: torch.device) -> tuple[str | None, str | None]:
    """("sm_90a" or "sm_80", None): whose fused kernels a CUDA device runs; or (None, why there are none)."""
    return find_path(device, "comet", "fused kernels")


def refusal(device: torch.device, dtype: torch.dtype, *, d_model: int, d_hidden: int) -> str | None:
    """Why the fused kernels do not take rows of this type and width on this device; None where they do."""
    return path(device)[1] or misfit(dtype, d_model=d_model, d_hidden=d_hidden)


def ranks_refusal(device: torch.device, num_ranks: int, experts: int) -> str | None:
    """Why the fused kernels do not take so many ranks of so many experts each; None where they do."""
    if num_ranks > MOST_RANKS:
        return f"{num_ranks} ranks are more than {MOST_RANKS}"
    if num_ranks * experts > MOST_EXPERTS:
        return f"{num_ranks * experts} experts of all ranks are more than {MOST_EXPERTS}"
    found, why = path(device)
    if found is None:
        return why
    words = int(path_facts(found == "sm_90a")["board_words"])
    if (num_ranks + 1) * experts > words:
        return (
            f"({num_ranks} ranks + 1) x {experts} experts are more than the {words} that a block has room for"
        )
    return None


@functools.cache
def path_facts(hopper: bool) -> dict[str, int]:
    """ "tile_rows" and "tile_columns" of a path's kernels; "board_words": see `ranks_refusal`."""
    facts: dict[str, int] = extension.module().comet_path(hopper)
    return facts


def spare_blocks(num_ranks: int = 1) -> int:
    """Multiprocessors that are left to other kernels: $PMOE_SPARE_BLOCKS, else 4, or 0 for one rank.

    A fused kernel takes a whole multiprocessor for each block, and waits for its peers'. A collective that
    runs beside it on another stream, as data-parallel wrappers issue them in backward, may then hold one
    rank's fused kernel up, and be held up by another's, until the wait's bound: unless both have room.

    Raises ValueError for a variable that is not a whole number.
    """
    text = os.environ.get(SPARE_BLOCKS, "0" if num_ranks == 1 else str(DEFAULT_SPARE_BLOCKS))
    if not text.isdecimal():
        raise ValueError(f"{SPARE_BLOCKS} ({text!r}) must be a whole number of blocks, at least 0")
    return int(text)


def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
