"""A check that pmoe's kernels compute correctly on this device: one small case, compared with plain PyTorch.

The case runs forward and backward of a few experts, with the bias, activation and routing weights that the
kernels fuse into their matrix products. The results are compared with those of a loop over experts in plain
PyTorch, once on the same device in the same dtype, and once in float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pmoe.experts import ActivationName, ExpertName, make_stacked
from pmoe.experts.base import ExpertRows
from pmoe.experts.products import GradientSum, RowGroups
from pmoe.experts.stacked import StackedExperts
from pmoe.kernels.registry import LOOP, PMOE, PRODUCTS

COUNTS = (70, 0, 33, 1)
"""Number of rows of each expert: one has more rows than a tile of the kernels, one has none, two have fewer.

A tile is the block of a matrix that one thread block computes.
"""

NUM_MODEL = 136
"""d_model of the case."""

NUM_HIDDEN = 72
"""d_hidden of the case."""


@dataclass(frozen=True)
class KernelCase:
    """The settings of one check of pmoe's kernels: device, dtype, activation and bias.

    A process runs the check once for each combination of settings.

    device: the device on which the kernels run.
    dtype: dtype of rows and weights.
    activation: the nonlinearity: "relu", "gelu", "silu" or "swiglu".
    bias: whether experts have biases.
    """

    device: torch.device
    dtype: torch.dtype
    activation: str
    bias: bool

    @classmethod
    def of(cls, experts: StackedExperts, device: torch.device, dtype: torch.dtype) -> KernelCase:
        """Returns the settings of the check for the kernels that these experts would use.

        experts: the experts, which say the activation and whether there are biases.
        device: the device on which the kernels run.
        dtype: dtype of rows and weights.
        """
        return cls(device, dtype, experts.fused_activation or "gelu", experts.has_bias)


def mismatch(case: KernelCase) -> str | None:
    """Runs pmoe's kernels on a small case. Returns a text about a wrong result; None if all are right."""
    generator = torch.Generator().manual_seed(0)
    kind: ExpertName = "swiglu" if case.activation == "swiglu" else "ffn"
    activation = cast(ActivationName, case.activation)  # SwiGLU experts do not look at it
    # Experts on the meta device give the shapes and the nonlinearity. Their parameters are passed separately.
    sizes = (NUM_MODEL, NUM_HIDDEN, len(COUNTS))
    experts = make_stacked(kind, *sizes, activation, case.bias, device="meta")
    rows = (sum(COUNTS), NUM_MODEL)
    shapes = (rows, rows, rows[:1], *(parameter.shape for parameter in experts.parameters()))
    operands = [torch.randn(*shape, generator=generator).mul_(0.25).to(case.dtype) for shape in shapes]
    exact = _both_passes(experts, [operand.double() for operand in operands])
    on_device = [operand.to(case.device) for operand in operands]
    with PRODUCTS.forcing(LOOP):
        plain = _both_passes(experts, on_device)
    with PRODUCTS.forcing(PMOE):
        by_kernels = _both_passes(experts, on_device)
    names = ["T_DO", "T_M", "dT_DI", "d weight", *(f"d {name}" for name, _ in experts.named_parameters())]
    return first_wrong(names, by_kernels, plain, exact, case.dtype)


def first_wrong(
    names: Sequence[str],
    results: Sequence[Tensor],
    plain: Sequence[Tensor],
    exact: Sequence[Tensor],
    dtype: torch.dtype,
) -> str | None:
    """Returns a text about the first result that is wrong; None if all are right.

    A result is right if its relative error is not much larger than that of plain PyTorch:

        |result - exact| / |exact| must be at most max(2 |plain - exact| / |exact|, 2 eps of the dtype)

    names: names of the results.
    results: the kernels' results, any shape.
    plain: the results of a loop over experts in the same dtype.
    exact: the results of a loop over experts in float64.
    dtype: the dtype of the kernels' results.
    """
    for name, result, usual, value in zip(names, results, plain, exact, strict=True):
        error, allowed = (
            float((tensor.cpu().double() - value).norm() / value.norm()) for tensor in (result, usual)
        )
        allowed = max(2 * allowed, 2 * torch.finfo(dtype).eps)
        if not error <= allowed:
            return f"{name} in {dtype} has a relative error of {error:.2g}, where {allowed:.2g} is allowed"
    return None


def _both_passes(experts: StackedExperts, operands: Sequence[Tensor]) -> list[Tensor]:
    """Computes forward and backward of experts by the kernels that `PRODUCTS` selects at present.

    operands: rows (N, M), the gradient of the experts' outputs (N, M), routing weights (N,), and the experts'
        parameters. N is the number of rows of all experts, M = d_model.

    Returns the experts' output T_DO, their hidden activation T_M, and the gradients of rows, routing weights
    and parameters.
    """
    rows_NM, grad_NM, narrow_N, *parameters = operands
    weight_N = narrow_N.to(torch.promote_types(narrow_N.dtype, torch.float32))
    groups = RowGroups(counts=COUNTS, ends=torch.tensor(COUNTS).cumsum(0).to(rows_NM.device, torch.int32))
    expert_rows = ExpertRows(rows_NM, groups, parameters)
    out_NM, hidden = experts.compute(expert_rows, weight_N)
    assert hidden is not None
    hidden_NG = hidden.tensors[0].clone()
    sums = [GradientSum(parameter, 1) for parameter in parameters]
    *grads, pending = experts.input_gradient(grad_NM.clone(), expert_rows, weight_N, hidden)
    experts.weight_gradient(pending, groups, sums)
    return [out_NM, hidden_NG, *grads, *(gradient_sum.result() for gradient_sum in sums)]
