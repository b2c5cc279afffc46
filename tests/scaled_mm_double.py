"""A stand-in for torch.nn.functional.scaled_grouped_mm on the CPU, where torch has none.

It checks its arguments as torch 2.13 does on CUDA (aten/src/ATen/native/cuda/GroupedBlas.cpp, and the
assertions of the kernels that it launches), finds the scale of each number by the formula of the scales'
order, and sums products in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ROW_WISE, BLOCKS = F.ScalingType.RowWise, F.ScalingType.BlockWise1x32
PLAIN, SWIZZLED = F.SwizzleType.NO_SWIZZLE, F.SwizzleType.SWIZZLE_32_4_4


def up(count: int, multiple: int) -> int:
    return (count + multiple - 1) // multiple * multiple


class ScaledGroupedMM:
    """Stands for the function. calls: the recipe and the shape of the first operand of each launch."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __call__(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        scale_a: Tensor,
        scale_recipe_a: object,
        scale_b: Tensor,
        scale_recipe_b: object,
        swizzle_a: object = None,
        swizzle_b: object = None,
        bias: Tensor | None = None,
        offs: Tensor | None = None,
        output_dtype: torch.dtype | None = torch.bfloat16,
        contraction_dim: tuple[int, ...] = (),
        use_fast_accum: bool = False,
    ) -> Tensor:
        assert mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn
        assert mat_a.dim() == 2 and mat_b.dim() == 3, "rows that are sorted by group, and a matrix for each"
        num_rows, columns = mat_a.shape
        groups, b_columns, out_columns = mat_b.shape
        assert columns == b_columns, "contraction dimension must match"
        # check_valid_strides_and_return_transposed: mat_a by rows, mat_b by columns, 16 bytes apart
        assert mat_a.stride(1) == 1 and mat_a.stride(0) >= columns and mat_a.stride(0) % 16 == 0
        assert mat_b.stride(1) == 1 and mat_b.stride(2) >= columns and mat_b.stride(2) % 16 == 0
        assert mat_a.data_ptr() % 16 == 0 and mat_b.data_ptr() % 16 == 0
        assert columns % 16 == 0 and out_columns % 16 == 0
        assert bias is None, "Bias not supported yet"
        assert output_dtype == torch.bfloat16 and not contraction_dim and not use_fast_accum
        assert offs is not None and offs.dim() == 1 and offs.dtype == torch.int32 and offs.is_contiguous()
        assert len(offs) == groups < 1024
        ends = offs.tolist()
        assert all(start <= end <= num_rows for start, end in zip([0, *ends], ends, strict=False))
        assert scale_recipe_a == scale_recipe_b
        if scale_recipe_a == ROW_WISE:
            assert swizzle_a == swizzle_b == PLAIN
            a, b = self._row_wise(mat_a, mat_b, scale_a, scale_b)
        else:
            assert scale_recipe_a == BLOCKS and swizzle_a == swizzle_b == SWIZZLED
            a, b = self._in_blocks(mat_a, mat_b, scale_a, scale_b, ends)
        out = torch.full((num_rows, out_columns), torch.nan, dtype=torch.bfloat16)
        for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            out[start:end] = (a[start:end] @ b[group]).bfloat16()
        name = "row-wise" if scale_recipe_a == ROW_WISE else "blocks"
        self.calls.append((name, tuple(mat_a.shape)))
        return out

    def _row_wise(
        self, mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, scale_b: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert scale_a.dtype == scale_b.dtype == torch.float32
        assert scale_a.shape == mat_a.shape[:1] and scale_a.is_contiguous()
        assert scale_b.shape == (mat_b.shape[0], mat_b.shape[2]) and scale_b.stride(1) == 1
        return mat_a.double() * scale_a[:, None].double(), mat_b.double() * scale_b[:, None].double()

    def _in_blocks(
        self, mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: list[int]
    ) -> tuple[Tensor, Tensor]:
        num_rows, columns = mat_a.shape
        groups, _, out_columns = mat_b.shape
        assert scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu
        assert scale_a.is_contiguous() and scale_b.is_contiguous()
        blocks = up(columns // 32, 4)
        assert columns % 32 == 0
        assert scale_a.dim() == 2 and scale_a.shape[0] >= num_rows
        assert scale_b.shape == (groups, up(out_columns, 128) * blocks)
        # Each group's scales follow those of the groups before it, each filled up to 128 rows.
        flat, first = scale_a.view(torch.uint8).flatten(), 0
        a, b = mat_a.double(), mat_b.double()
        for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            size = up(end - start, 128) * blocks
            a[start:end] *= spread(flat[first : first + size], end - start, columns)
            b[group] *= spread(scale_b[group].view(torch.uint8), out_columns, columns).t()
            first += size
        assert flat.numel() == first
        return a, b


def spread(scales: Tensor, num_rows: int, columns: int) -> Tensor:
    """The scale of each number of a matrix, from scales in tiles of 128 rows and 4 blocks."""
    row = torch.arange(num_rows)[:, None]
    block = torch.arange(columns // 32)[None]
    tile = row // 128 * (up(columns // 32, 4) // 4) + block // 4
    byte = scales[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]
    return torch.exp2(byte.double() - 127).repeat_interleave(32, dim=1)
