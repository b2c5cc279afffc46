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


def find_path(device: torch.device, what: str) -> tuple[str | None, str | None]:
    """("sm_90a" or "sm_80", None): which code of the kernels a CUDA device runs; or (None, why none).

    what: the kernels, in words. Read from a kernel as the driver loaded it.
    """
    if device.type != "cuda":
        return None, f"device {device.type}: the {what} are CUDA's"
    return _path_of_index(cuda_index(device))


@cache
def _path_of_index(index: int) -> tuple[str | None, str | None]:
    return (
        (None, extension.why_missing()) if extension.load() is None else path_of(extension.on_device(index))
    )


def path_of(device: extension.Device) -> tuple[str | None, str | None]:
    """As `find_path`."""
    if not device.kernels:
        return None, f"device {device.index}: {device.reason}"
    probe = device.kernels[0]
    refusal = extension.hopper_refusal(probe.binary_version, probe.ptx_version, device.capability)
    return "sm_90a" if refusal is None else "sm_80", None
