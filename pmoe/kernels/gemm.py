"""What grouped and fused products share: types, nonlinearities, their codes, and room for NCCL."""

from __future__ import annotations

import torch

from pmoe.kernels.extension import path

ACTIVATIONS = {"relu": 1, "gelu": 2, "silu": 3, "swiglu": 4}
"""As in cuda/common/activation.h. "swiglu" has hidden columns in two halves: silu(first) * second."""

ELEMENTS = {torch.bfloat16: 0, torch.float16: 1}

FORWARD, INPUT, WEIGHT = 0, 1, 2
"""`Form` of cuda/grouped_gemm/problem.h."""

PLAIN, HIDDEN, HIDDEN_GRADIENT = 0, 1, 2
"""`Epilogue` of cuda/grouped_gemm/problem.h."""

SPARE = 16
"""Multiprocessors left free beside communication: NCCL's blocks need whole ones. Where 16 of an H200
are taken, a product takes 1.07 times as long as alone with this, and 1.84 times without (bench_beside)."""


def activation_code(activation: str) -> int:
    """Raises ValueError for one that is not in ACTIVATIONS."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation ({activation!r}) must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def refusal(device: torch.device, dtype: torch.dtype, **columns: int) -> str | None:
    """Why the kernels would not compute a product of these columns on this device, or None."""
    return path(device)[1] or misfit(dtype, **columns)


def misfit(dtype: torch.dtype, **columns: int) -> str | None:
    """Why operands of this type and these numbers of columns do not fit the kernels, or None."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype}: the kernels take bfloat16 and float16"
    for name, count in columns.items():
        if count % 8 or not count:
            return f"{name} ({count}) must be a multiple of 8 and at least 8: 16 bytes a load"
    return None
