"""What grouped and fused products share: types, nonlinearities, and which code a device runs."""

from __future__ import annotations

from functools import cache

import torch

from pmoe.kernels import extension
from pmoe.kernels.operands import cuda_index

ACTIVATIONS = {"relu": 1, "gelu": 2, "silu": 3, "swiglu": 4}
"""As in cuda/common/activation.h. "swiglu" has hidden columns in two halves: silu(first) * second."""

ELEMENTS = {torch.bfloat16: 0, torch.float16: 1}

FORWARD, INPUT, WEIGHT = 0, 1, 2
"""`Form` of cuda/grouped_gemm/problem.h."""

PLAIN, HIDDEN, HIDDEN_GRADIENT = 0, 1, 2
"""`Epilogue` of cuda/grouped_gemm/problem.h."""


def activation_code(activation: str) -> int:
    """Raises ValueError for one that is not in ACTIVATIONS."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation ({activation!r}) must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def misfit(dtype: torch.dtype, **columns: int) -> str | None:
    """Why operands of this type and these numbers of columns do not fit the kernels, or None."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype}: the kernels take bfloat16 and float16"
    for name, count in columns.items():
        if count % 8 or not count:
            return f"{name} ({count}) must be a multiple of 8 and at least 8: 16 bytes a load"
    return None


def find_path(device: torch.device, family: str, what: str) -> tuple[str | None, str | None]:
    """("sm_90a" or "sm_80", None): whose kernels a CUDA device runs; or (None, why there are none).

    family: what the kernels' names begin with. what: these kernels, in words.
    Read from the kernels as the driver loaded them.
    """
    if device.type != "cuda":
        return None, f"device {device.type}: the {what} are CUDA's"
    return _path_of_index(cuda_index(device), family, what)


@cache
def _path_of_index(index: int, family: str, what: str) -> tuple[str | None, str | None]:
    if extension.load() is None:
        return None, extension.why_missing()
    return path_of(extension.on_device(index), family, what)


def path_of(device: extension.Device, family: str, what: str) -> tuple[str | None, str | None]:
    """As `find_path`, of a device whose kernels are loaded."""
    kernels = [each for each in device.kernels if each.name.startswith(f"{family}.")]
    for name in ("sm_90a", "sm_80"):
        found = [each for each in kernels if f".{name}." in each.name]
        if found and all(each.refusal is None for each in found):
            return name, None
    reason = device.reason or "; ".join(sorted({each.refusal for each in kernels if each.refusal}))
    return None, f"device {device.index}: {reason or f'the extension has no {what}'}"
