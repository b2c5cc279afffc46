"""Constants and checks that grouped products and fused products share.

The integer constants are the values of enums in cuda/. Launches pass these values to the kernels.
"""

from __future__ import annotations

import torch

from pmoe.kernels.extension import path

ACTIVATIONS = {"relu": 1, "gelu": 2, "silu": 3, "swiglu": 4}
"""Code of each nonlinearity, as in cuda/common/activation.h.

"swiglu" splits the hidden columns into two halves and computes silu(first half) * second half.
"""

ELEMENTS = {torch.bfloat16: 0, torch.float16: 1}
"""Code of each dtype that the products take: `Element` of cuda/grouped_gemm/launch.h."""

FORWARD, INPUT, WEIGHT = 0, 1, 2
"""Codes of three products: rows W^T, the gradient of the rows, and the gradient of W.

W is the weight of an expert. The codes are the enum `Form` of cuda/grouped_gemm/problem.h.
"""

PLAIN, HIDDEN, HIDDEN_GRADIENT = 0, 1, 2
"""Codes of the operations that follow a product: `Epilogue` of cuda/grouped_gemm/problem.h.

PLAIN adds a bias and scales. HIDDEN adds a bias and applies the nonlinearity. HIDDEN_GRADIENT scales and
multiplies by the nonlinearity's derivative.
"""

SPARE = 16
"""Number of multiprocessors that products leave free for NCCL.

A thread block of NCCL needs a whole multiprocessor.

Measured on an H200 (bench_beside) while another kernel occupied 16 multiprocessors, as NCCL's collectives do:
with this value a product took 1.07 times as long as without the other kernel. With no multiprocessor left
free it took 1.84 times as long.
"""


def activation_code(activation: str) -> int:
    """Returns the code of a nonlinearity. Raises ValueError for a name that is not in `ACTIVATIONS`."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation ({activation!r}) must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def refusal(device: torch.device, dtype: torch.dtype, **columns: int) -> str | None:
    """Returns why pmoe's kernels cannot compute a product on this device with this dtype; None if they can.

    columns: sizes that must be multiples of 8, by the name that the reason mentions, such as
        in_features=1024.
    """
    return path(device)[1] or layout_problem(dtype, **columns)


def layout_problem(dtype: torch.dtype, **columns: int) -> str | None:
    """Returns why pmoe's kernels cannot read operands of this dtype and these sizes; None if they can.

    columns: sizes that must be multiples of 8, by the name that the reason mentions, such as
        in_features=1024.
    """
    if dtype not in ELEMENTS:
        return f"dtype {dtype}: the kernels take bfloat16 and float16"
    for name, count in columns.items():
        if count % 8 or not count:
            return f"{name} ({count}) must be a multiple of 8 and at least 8: kernels load 16 bytes at a time"
    return None
