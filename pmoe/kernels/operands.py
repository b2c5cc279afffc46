"""What launches ask of their operands: shape, type, device, and how the numbers lie in memory.

Each check raises ValueError with the operand's name, its value and the rule. Kernels read and write 16 bytes
at a time: a row, an address and the distance of two rows are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

VECTOR_BYTES = 16

MAX_ROWS = 2**31 - 1
"""Positions of rows are int32."""


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[int | str] | None = None,
    dtypes: Collection[torch.dtype] | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
) -> None:
    """Raises ValueError unless the operand is as asked; None asks nothing.

    shape: sizes; a letter stands for any size. Example: ("T", 8) takes (3, 8) and (0, 8).
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
    """Raises ValueError for integers."""
    if not tensor.is_floating_point():
        raise ValueError(f"{name} of dtype {tensor.dtype} must be of a floating-point type")


def check_memory(**operands: Mapping[str, Tensor | None]) -> None:
    """Raises ValueError for operands that the kernels would not read right; see `memory_misfit`."""
    if (why := memory_misfit(**operands)) is not None:
        raise ValueError(why)


def memory_misfit(
    *, rows: Mapping[str, Tensor | None] | None = None, dense: Mapping[str, Tensor | None] | None = None
) -> str | None:
    """Why the kernels would not read these operands right, by name; None where they would.

    rows: (rows, columns), which may lie apart. dense: without gaps. All begin at a multiple of 16 bytes.
    Operands of no elements lie right wherever they are.
    """
    found = [_misplaced_rows(name, each) for name, each in (rows or {}).items() if each is not None]
    found += [_gap(name, each) for name, each in (dense or {}).items() if each is not None and each.numel()]
    for name, each in {**(rows or {}), **(dense or {})}.items():
        if each is not None and each.numel() and each.data_ptr() % VECTOR_BYTES:
            found.append(f"{name} at address {each.data_ptr():#x} must be aligned to {VECTOR_BYTES} bytes")
    return next((why for why in found if why is not None), None)


def strides_fit(rows: Tensor) -> bool:
    """Whether columns are side by side, and rows apart by a multiple of 16 bytes, without overlap.

    Strides of a dimension of one entry say nothing.
    """
    columns_fit = rows.shape[1] <= 1 or rows.stride(1) == 1
    stride = rows.stride(0)
    apart = stride >= rows.shape[1] and stride * rows.element_size() % VECTOR_BYTES == 0
    return columns_fit and (rows.shape[0] <= 1 or apart)


def _misplaced_rows(name: str, rows: Tensor) -> str | None:
    if not rows.numel() or strides_fit(rows):
        return None
    return (
        f"{name} of shape {tuple(rows.shape)} and strides {rows.stride()} of {rows.element_size()} bytes "
        "must have a column stride of 1, and rows apart by at least their columns and a multiple of "
        f"{VECTOR_BYTES} bytes"
    )


def _gap(name: str, tensor: Tensor) -> str | None:
    if tensor.is_contiguous():
        return None
    return f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} must be contiguous"


def _fits(sizes: Sequence[int], wanted: Sequence[int | str]) -> bool:
    return len(sizes) == len(wanted) and all(
        isinstance(size, str) or size == have for have, size in zip(sizes, wanted, strict=True)
    )


def _listed(shape: Sequence[int | str]) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


# ---- for launches


def address(tensor: Tensor | None) -> int:
    """0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def at(**rows: Tensor | None) -> dict[str, int]:
    """Address and row stride of each, by its name and its name with "_stride": 0 and 0 for None."""
    found = {}
    for name, each in rows.items():
        found[name] = address(each)
        found[f"{name}_stride"] = 0 if each is None else row_stride(each)
    return found


def row_stride(rows: Tensor) -> int:
    """Elements from a row to the next. That of a lone row says nothing: its columns then."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def cuda_index(device: torch.device) -> int:
    """Of the current device where ``device`` names none."""
    return torch.cuda.current_device() if device.index is None else device.index
