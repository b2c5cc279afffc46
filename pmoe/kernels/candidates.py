"""The three ways to compute a grouped product: pmoe's kernels, one launch of grouped_mm, or a loop.

`PRODUCTS` chooses among them on CUDA. On the CPU the loop computes: it is as fast, and writes in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.kernels import grouped_gemm
from pmoe.kernels.operands import memory_misfit
from pmoe.kernels.product_request import ProductOperands, ProductRequest
from pmoe.kernels.registry import ProductCandidate, Registry

PMOE, GROUPED_MM, LOOP = "pmoe", "grouped_mm", "loop"

BIAS = "bias: grouped_mm has none, and adding it afterwards rounds twice"


def _pmoe_reasons(request: ProductRequest) -> list[str]:
    columns = {"in_features": request.in_features, "out_features": request.out_features}
    why = grouped_gemm.refusal(request.device, request.dtype, **columns)
    return [] if why is None else [why]


def _pmoe_misfit(operands: ProductOperands) -> str | None:
    if not operands.first.is_cuda:
        return None  # the reference takes everything
    (first, second), out = _named(operands), operands.out
    if operands.form == "weight":
        return memory_misfit(rows=dict([first, second]), dense={"out": out})
    return memory_misfit(rows=dict([first, ("out", out)]), dense=dict([second, ("bias", operands.bias)]))


def _grouped_mm_reasons(request: ProductRequest) -> list[str]:
    device = request.device
    if device.type != "cuda":
        return [f"device {device.type}: a loop is as fast there and writes in place"]
    found = []
    if request.dtype != torch.bfloat16:
        found.append(f"dtype {request.dtype}: grouped_mm has one launch for bfloat16 only")
    if request.bias:
        found.append(BIAS)
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10):
        found.append(
            f"compute capability {major}.{minor}: grouped_mm loops there, reading the offsets on the host"
        )
    if request.experts >= 1024:
        found.append(f"{request.experts} experts: grouped_mm takes fewer than 1024")
    columns = {"in_features": request.in_features}
    if request.form != "forward":  # the columns of a result are padded
        columns["out_features"] = request.out_features
    for name, count in columns.items():
        if count * request.dtype.itemsize % 16:
            found.append(f"{name}: a row of {count} elements is no multiple of 16 bytes")
    return found


def _grouped_mm_misfit(operands: ProductOperands) -> str | None:
    if operands.bias is not None:
        return BIAS
    return memory_misfit(dense=dict(_named(operands))) if operands.first.is_cuda else None


def _named(operands: ProductOperands) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    """The first and the second operand with their names."""
    first, second = {"forward": ("rows", "weight"), "input": ("grad", "weight"), "weight": ("grad", "rows")}[
        operands.form
    ]
    return (first, operands.first), (second, operands.second)


PRODUCTS = Registry(
    [
        ProductCandidate(name=PMOE, reasons=_pmoe_reasons, misfit=_pmoe_misfit),
        ProductCandidate(name=GROUPED_MM, reasons=_grouped_mm_reasons, misfit=_grouped_mm_misfit),
        ProductCandidate(name=LOOP, reasons=lambda request: []),
    ]
)
"""The choices of this process, for all layers. `pmoe.measure.products` has them measured."""
