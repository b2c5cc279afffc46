"""Constants and checks that grouped and fused products share: dtypes, nonlinearities, codes of cuda/."""

from __future__ import annotations

import torch

from pmoe.kernels.extension import path

ACTIVATIONS = {"relu": 1, "gelu": 2, "silu": 3, "swiglu": 4}
"""Codes of the nonlinearities, as in cuda/common/activation.h.

"swiglu" takes hidden columns in two halves: silu(first) * second.
"""

ELEMENTS = {torch.bfloat16: 0, torch.float16: 1}
"""Codes of the dtypes that the kernels take: `Element` of cuda/grouped_gemm/launch.h."""

FORWARD, INPUT, WEIGHT = 0, 1, 2
"""`Form` of cuda/grouped_gemm/problem.h."""

PLAIN, HIDDEN, HIDDEN_GRADIENT = 0, 1, 2
"""`Epilogue` of cuda/grouped_gemm/problem.h."""

SPARE = 16
"""Multiprocessors that products leave free for NCCL beside them: NCCL's blocks need whole ones.

On an H200 whose NCCL took 16, a product took 1.07 times its time alone with this, and 1.84 times without
(bench_beside).
"""


def activation_code(activation: str) -> int:
    """Returns the code of a nonlinearity. Raises ValueError for a name that is not in ACTIVATIONS."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation ({activation!r}) must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def refusal(device: torch.device, dtype: torch.dtype, **columns: int) -> str | None:
    """Returns why the kernels would not compute a product on this device; None if they would.

    columns: numbers of columns by name, which errors mention.
    """
    return path(device)[1] or misfit(dtype, **columns)


def misfit(dtype: torch.dtype, **columns: int) -> str | None:
    """Returns why operands of this dtype and these columns do not fit the kernels; None if they do."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype}: the kernels take bfloat16 and float16"
    for name, count in columns.items():
        if count % 8 or not count:
            return f"{name} ({count}) must be a multiple of 8 and at least 8: kernels load 16 bytes at a time"
    return None
