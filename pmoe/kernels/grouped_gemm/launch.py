"""One launch of a grouped product by the kernels of cuda/grouped_gemm, and which devices have them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.extension import path
from pmoe.kernels.gemm import ELEMENTS, PLAIN, SPARE, misfit
from pmoe.kernels.grouped_gemm.checks import RowSlots
from pmoe.warn import warn_once

SHARING = 0
"""How the two blocks of a cluster share operands on Hopper: `Sharing` of cuda/grouped_gemm/launch.h.

0 chooses by rule, 1 shares nothing, 2 shares B, 3 shares A.
"""

_spare = ContextVar("multiprocessors that products leave free in this thread", default=0)


@contextlib.contextmanager
def beside_communication(spare: int = SPARE) -> Iterator[None]:
    """Makes products in the block leave multiprocessors free for communication beside them.

    spare: how many. Blocks of a product then take tiles as they start: a block that starts late takes fewer.
    """
    token = _spare.set(spare)
    try:
        yield
    finally:
        _spare.reset(token)


def path_for(device: torch.device, dtype: torch.dtype, **columns: int) -> str | None:
    """Returns which code computes these operands ("sm_90a" or "sm_80"), or None if the reference must.

    It is None on the CPU, and on a device without kernels, which warns once. Raises ValueError for operands
    that do not fit the kernels that there are.
    """
    if device.type != "cuda":
        return None
    code, why = path(device)
    if code is None:
        warn_once(f"grouped products are computed without pmoe's kernels: {why}", for_each_reason=True)
        return None
    why = misfit(dtype, **columns)
    if why is not None:
        raise ValueError(f"grouped product: {why}")
    return code


def launch(
    kernels: str,
    form: int,
    like: Tensor,
    ends: Tensor,
    slots: RowSlots | None,
    epilogue: int = PLAIN,
    **fields: Any,
) -> None:
    """Launches a product on the current stream.

    kernels: the result of `path_for`.
    form, epilogue: codes of `pmoe.kernels.gemm`.
    like: a tensor with the operands' dtype and device.
    ends: (E,), the running sum of rows by expert.
    fields: the other arguments, by their names in cuda/grouped_gemm/bind.cpp.
    """
    if spare := _spare.get():
        next_tile = torch.zeros(1, dtype=torch.int32, device=like.device)
        fields |= {"spare": spare, "next_tile": next_tile.data_ptr()}
    extension.module().grouped_gemm(
        device=like.device.index,
        stream=torch.cuda.current_stream(like.device).cuda_stream,
        hopper=kernels == "sm_90a",
        element=ELEMENTS[like.dtype],
        form=form,
        epilogue=epilogue,
        ends=ends.data_ptr(),
        experts=ends.numel(),
        slot=0 if slots is None else slots.slot_N.data_ptr(),
        top_k=1 if slots is None else slots.top_k,
        sharing=SHARING,
        **fields,
    )
