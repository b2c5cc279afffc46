"""Checks on the tensors that kernels read and write: shape, dtype, device, strides and alignment.

Each check raises ValueError with the tensor's name, its value and the rule. Kernels read and write 16 bytes
at a time. Therefore addresses, the bytes of a row, and the distance from one row to the next must be
multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

VECTOR_BYTES = 16

MAX_ROWS = 2**31 - 1
"""The most rows of a tensor, because kernels store positions of rows as int32."""


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[int | str] | None = None,
    dtypes: Collection[torch.dtype] | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
) -> None:
    """Raises ValueError unless a tensor has the required properties. None and False require nothing.

    name: the tensor's name, for the error.
    shape: the required sizes. A string stands for any size: ("T", 8) allows (3, 8) and (0, 8).
    dtypes: the dtypes that are allowed.
    device: the device on which the tensor must be.
    contiguous: whether the tensor must be contiguous.
    """
    if shape is not None and not _fits(tensor.shape, shape):
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} must have the shape {_listed(shape)}")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise ValueError(f"{name} of dtype {tensor.dtype} must be {' or '.join(map(str, dtypes))}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} on {tensor.device} must be on {device}, where the other operands are")
    if contiguous and (why := _gap(name, tensor)) is not None:
        raise ValueError(why)


def check_floating(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless a tensor's dtype is a floating-point type. The error has the tensor's name."""
    if not tensor.is_floating_point():
        raise ValueError(f"{name} of dtype {tensor.dtype} must be of a floating-point type")


def check_memory(**operands: Mapping[str, Tensor | None]) -> None:
    """Raises ValueError if kernels could not read a tensor because of its strides or its address.

    operands: two keyword arguments, each a dict from a tensor's name to the tensor or None. Both are
        optional:

        rows     tensors (rows, columns). Columns must be adjacent, the row stride a multiple of 16 bytes
        dense    tensors that must be contiguous

    The address of each tensor must be a multiple of 16 bytes. Tensors without elements and None are not
    checked.

    Example: check_memory(rows={"grad": grad}, dense={"weight": weight, "bias": None}).
    """
    if (why := memory_misfit(**operands)) is not None:
        raise ValueError(why)


def memory_misfit(
    *, rows: Mapping[str, Tensor | None] | None = None, dense: Mapping[str, Tensor | None] | None = None
) -> str | None:
    """Returns why kernels could not read a tensor with its strides and its address; None if they can.

    rows: tensors (rows, columns) by name. Columns must be adjacent; rows may have gaps between them, if the
        row stride is a multiple of 16 bytes.
    dense: tensors by name that must be contiguous.

    The address of each tensor must be a multiple of 16 bytes. Tensors without elements and None are not
    checked.
    """
    reasons = [_misplaced_rows(name, tensor) for name, tensor in (rows or {}).items() if tensor is not None]
    reasons += [
        _gap(name, tensor) for name, tensor in (dense or {}).items() if tensor is not None and tensor.numel()
    ]
    for name, tensor in {**(rows or {}), **(dense or {})}.items():
        if tensor is not None and tensor.numel() and tensor.data_ptr() % VECTOR_BYTES:
            reasons.append(
                f"{name} at address {tensor.data_ptr():#x} must be aligned to {VECTOR_BYTES} bytes"
            )
    return next((why for why in reasons if why is not None), None)


def strides_fit(rows: Tensor) -> bool:
    """Returns whether kernels can read a tensor (rows, columns) with its strides.

    The column stride must be 1. Rows must not overlap, and the row stride must be a multiple of 16 bytes. The
    stride of a dimension of size 0 or 1 does not matter.
    """
    columns_fit = rows.shape[1] <= 1 or rows.stride(1) == 1
    stride = rows.stride(0)
    apart = stride >= rows.shape[1] and stride * rows.element_size() % VECTOR_BYTES == 0
    return columns_fit and (rows.shape[0] <= 1 or apart)


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor is contiguous, at an address from which kernels can read and write."""
    return tensor.is_contiguous() and tensor.data_ptr() % VECTOR_BYTES == 0


def _misplaced_rows(name: str, rows: Tensor) -> str | None:
    """Returns why kernels cannot read a tensor (rows, columns) with its strides; None if they can.

    name: the tensor's name, for the reason.
    """
    if not rows.numel() or strides_fit(rows):
        return None
    return (
        f"{name} of shape {tuple(rows.shape)} and strides {rows.stride()} of {rows.element_size()} bytes "
        "each must have adjacent columns (a column stride of 1), and a row stride of at least the number of "
        f"columns that is a multiple of {VECTOR_BYTES} bytes"
    )


def _gap(name: str, tensor: Tensor) -> str | None:
    """Returns the error message for a tensor that is not contiguous; None if it is contiguous."""
    if tensor.is_contiguous():
        return None
    return f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} must be contiguous"


def _fits(sizes: Sequence[int], wanted: Sequence[int | str]) -> bool:
    """Returns whether a tensor's sizes are the wanted sizes. A string among them stands for any size."""
    if len(sizes) != len(wanted):
        return False
    for have, size in zip(sizes, wanted, strict=True):
        if have != size and not isinstance(size, str):
            return False
    return True


def _listed(shape: Sequence[int | str]) -> str:
    """Returns a wanted shape as text. Example: ("T", 8) -> "(T, 8)"."""
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


# ---- addresses and strides of tensors, which launches take as integers


def address(tensor: Tensor | None) -> int:
    """Returns the address of a tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def at(**rows: Tensor | None) -> dict[str, int]:
    """Returns a dict with the address and the row stride of each tensor, as arguments of a kernel launch.

    rows: tensors (rows, columns) by name. In the result, the key of an address is the tensor's name. The key
        of a row stride (in elements) is the name and "_stride". Both values are 0 for None.

    Example: at(a=rows) -> {"a": address, "a_stride": elements}.
    """
    fields = {}
    for name, tensor in rows.items():
        fields[name] = address(tensor)
        fields[f"{name}_stride"] = 0 if tensor is None else row_stride(tensor)
    return fields


def row_stride(rows: Tensor) -> int:
    """Returns the number of elements from one row of a tensor (rows, columns) to the next.

    If there are fewer than two rows, the result is the number of columns, because torch may then report any
    stride.
    """
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def cuda_index(device: torch.device) -> int:
    """Returns the index of a CUDA device, or the index of the current device if ``device`` has none."""
    return torch.cuda.current_device() if device.index is None else device.index
