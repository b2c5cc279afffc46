"""Products of rounded operands: by torch's scaled_grouped_mm, or from the restored values of the operands.

For rows sorted by expert, both ways compute

    out = restored(rows) @ restored(matrix[e])^T    for the rows of each expert e

with sums in float32. The second way, from restored values, is the definition, and runs on every device. On a
GPU it is slow, because it multiplies in float32. pmoe then warns once for each reason why torch's product
cannot be used.

Letters: N rows, E experts, K columns that a product sums over, O columns of its result.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels.extension import device_name
from pmoe.kernels.registry import bucket
from pmoe.kernels.scaled_products.formats import MX_COLUMNS, ProductsName
from pmoe.kernels.scaled_products.layouts import in_tiles, rows_in_tiles
from pmoe.kernels.scaled_products.rounding import Rounded, restored, restoring_bytes
from pmoe.warn import log, warn_once

SCALED_GROUPED_MM = "scaled_grouped_mm"
RESTORED = "restored operands"

MOST_EXPERTS = 1023
"""The most experts in one launch of scaled_grouped_mm."""


@dataclass(frozen=True, kw_only=True)
class ScaledRequest:
    """A product of rounded operands that is to be computed.

    products: number format of the operands.
    device_type: "cpu" or "cuda".
    capability: compute capability of a CUDA device, such as (9, 0); (0, 0) for other devices.
    device_name: name of the device, for logs.
    dtype: dtype of the result.
    experts: number of experts.
    rows: number of rows of all experts together, rounded up to a power of two.
    columns: number of columns of a row, over which the product sums.
    out_columns: number of columns of the result.
    """

    products: ProductsName
    device_type: str
    capability: tuple[int, int]
    device_name: str
    dtype: torch.dtype
    experts: int
    rows: int
    columns: int
    out_columns: int

    def __str__(self) -> str:
        return (
            f"product in {self.products}, experts={self.experts} rows={self.rows} columns={self.columns} "
            f"out={self.out_columns} for {str(self.dtype).removeprefix('torch.')} on {self.device_name}"
        )


def refusals(request: ScaledRequest) -> list[str]:
    """Returns why torch's scaled_grouped_mm cannot compute a product; an empty list if it can.

    torch 2.13 checks the same conditions itself, except two: torch has no kernel for "e4m3" (a scale for each
    row) on Blackwell, and "mxfp8" needs a number of columns that is a multiple of 32.
    """
    if request.device_type != "cuda":
        return [f"device {request.device_type}: torch has no scaled_grouped_mm for it"]
    reasons = []
    major, minor = request.capability
    needed = {"e4m3": 9, "mxfp8": 10}[request.products]
    if major != needed:
        reasons.append(
            f"compute capability {major}.{minor}: torch's product in {request.products} needs {needed}.x"
        )
    if request.dtype != torch.bfloat16:
        reasons.append(f"dtype {request.dtype}: scaled_grouped_mm writes bfloat16 only")
    if request.experts > MOST_EXPERTS:
        reasons.append(f"{request.experts} experts: scaled_grouped_mm takes at most {MOST_EXPERTS}")
    multiple = {"e4m3": 16, "mxfp8": MX_COLUMNS}[request.products]
    if request.columns % multiple:
        reasons.append(f"{request.columns} columns to sum over are no multiple of {multiple}")
    if request.out_columns % 16:
        reasons.append(f"{request.out_columns} columns of the result are no multiple of 16")
    return reasons


@functools.cache
def way_to_compute(request: ScaledRequest) -> str:
    """Returns the way to compute a product: `SCALED_GROUPED_MM` if torch can, else `RESTORED`.

    Warns on a GPU, once for each reason, that products are slow. PMOE_LOG_KERNELS=1 logs each choice once.
    """
    reasons = refusals(request)
    if request.device_type == "cuda":
        for reason in reasons:
            message = f"rounded products are computed slowly, in float32: {reason}"
            warn_once(message, for_each_reason=True)
    if os.environ.get("PMOE_LOG_KERNELS", "") not in ("", "0"):
        state = f"refuses: {'; '.join(reasons)}" if reasons else "willing"
        log.warning("%s\n  %s %s", request, SCALED_GROUPED_MM, state)
    return RESTORED if reasons else SCALED_GROUPED_MM


def scaled_product(
    products: ProductsName,
    rows: Rounded,
    matrices: Rounded,
    counts: Sequence[int],
    ends_E: Tensor,
    bias_EO: Tensor | None,
    scale_N: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Fills out (N, O) with (rows matrix[e]^T + bias[e]) * scale for the rows of each expert e.

    Returns ``out``.

    products: number format of the operands.
    rows: the N rows, (N, K), sorted by expert. The product sums over the K columns.
    matrices: the matrices of E experts, (E, O, K). O is the number of columns of the result.
    counts: the numbers of rows of E experts, on the host.
    ends_E: (E,) int32, the running sum of ``counts``, on the rows' device.
    bias_EO: (E, O); None adds nothing.
    scale_N: (N,), a factor for each row; None is 1.
    """
    if not rows.numbers.shape[0]:
        return out
    device = out.device
    request = ScaledRequest(
        products=products,
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        device_name=device_name(device),
        dtype=out.dtype,
        experts=len(counts),
        rows=bucket(rows.numbers.shape[0]),
        columns=rows.numbers.shape[1],
        out_columns=out.shape[1],
    )
    if way_to_compute(request) == SCALED_GROUPED_MM:
        out.copy_(launch_scaled(products, rows, matrices, counts, ends_E))
        if bias_EO is not None:
            for expert, at in _with_rows(counts):
                out[at].add_(bias_EO[expert])
        return out if scale_N is None else out.mul_(scale_N.unsqueeze(1))
    for expert, at in _with_rows(counts):
        bias_O = None if bias_EO is None else bias_EO[expert]
        scale_n = None if scale_N is None else scale_N[at]
        out[at] = _product_of_restored(products, rows.select(at), matrices.select(expert), bias_O, scale_n)
    return out


def _product_of_restored(
    products: ProductsName, rows: Rounded, matrix: Rounded, bias_O: Tensor | None, scale_N: Tensor | None
) -> Tensor:
    """Returns (rows matrix^T + bias) * scale for the rows of one expert, (N, O) float32.

    The restored values are freed at the return, so that values of only one expert exist at a time.

    products: number format of the operands.
    rows: (N, K), the expert's N rows.
    matrix: (O, K), the expert's matrix: O columns of the result, K columns to sum over.
    bias_O: (O,); None adds nothing.
    scale_N: (N,), a factor for each row; None is 1.
    """
    matrix_OK = restored(products, matrix)
    result = restored(products, rows) @ matrix_OK.t()
    if bias_O is not None:
        result += bias_O
    if scale_N is not None:
        result *= scale_N.unsqueeze(1)
    return result


def restored_product_bytes(products: ProductsName, num_rows: int, columns: int, out_columns: int) -> int:
    """Returns the peak memory of restored values and results in `scaled_product`, in bytes.

    products: number format of the operands.
    num_rows: rows of the expert with the most rows.
    columns: number of columns of a row, over which the product sums.
    out_columns: number of columns of the result.
    """
    matrix = restoring_bytes(products, out_columns, columns)
    rows = restoring_bytes(products, num_rows, columns)
    float32_rows = num_rows * 4 * columns
    float32_matrix = out_columns * 4 * columns
    return max(matrix, float32_matrix + rows, float32_matrix + float32_rows + num_rows * 4 * out_columns)


def launch_scaled(
    products: ProductsName, rows: Rounded, matrices: Rounded, counts: Sequence[int], ends_E: Tensor
) -> Tensor:
    """Computes rows matrix[e]^T for the rows of each expert e by one launch of torch's kernel.

    Returns (N, O) bfloat16. The kernel needs every expert's first row at a multiple of 16 bytes. Every row
    begins at a multiple of 16 bytes, so no rows are padded. For "mxfp8", the scales of each expert are padded
    to a multiple of 128 rows.

    products: number format of the operands.
    rows: the N rows, (N, K), sorted by expert. The product sums over the K columns.
    matrices: the matrices of E experts, (E, O, K). O is the number of columns of the result.
    counts: the numbers of rows of E experts, on the host.
    ends_E: (E,) int32, the running sum of ``counts``, on the rows' device.
    """
    recipe = {"e4m3": F.ScalingType.RowWise, "mxfp8": F.ScalingType.BlockWise1x32}[products]
    swizzle = F.SwizzleType.SWIZZLE_32_4_4 if products == "mxfp8" else F.SwizzleType.NO_SWIZZLE
    rows_scales = rows.scales
    matrix_scales = matrices.scales
    if products == "mxfp8":
        rows_scales = rows_in_tiles(rows.scales, counts, ends_E)
        matrix_scales = in_tiles(matrices.scales)
    result: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        rows.numbers,
        matrices.numbers.transpose(1, 2),
        rows_scales,
        recipe,
        matrix_scales,
        recipe,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        offs=ends_E,
        output_dtype=torch.bfloat16,
    )
    return result


def _with_rows(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yields (expert, slice of its rows) for each expert that has rows.

    counts: the numbers of rows of the experts, whose rows follow each other.
    """
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
