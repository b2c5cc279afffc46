"""Mistakes in the kernels' PyTorch references, and in what decides which kernel runs."""

from __future__ import annotations

from tests.levels import MAKE_TEST
from tests.plants.plant import Plant

LEVEL = MAKE_TEST

REFERENCES = (
    Plant(
        name="permute-forgets-weights",
        breaks="the reference of permute does not weigh rows",
        file="pmoe/kernels/permute/reference.py",
        old="index_copy_(0, into_T, x_TM if weight_TK is None else",
        new="index_copy_(0, into_T, x_TM if True else",
        tests="tests/unit/test_kernels_permute.py -k loops",
    ),
    Plant(
        name="route-normalized-gradient",
        breaks="the gradient of normalised weights lacks the inner product",
        file="pmoe/kernels/route/reference.py",
        old="            grad_weight_TK = (grad_weight_TK - inner_T1) / p_TE",
        new="            grad_weight_TK = grad_weight_TK / p_TE",
        tests="tests/unit/test_kernels_route.py -k gradient_is_that_of_differences",
    ),
    Plant(
        name="route-ties-to-the-last",
        breaks="of equal scores the last expert is taken",
        file="pmoe/kernels/route/reference.py",
        old="left_TE.max(-1, keepdim=True).indices",
        new="left_TE.shape[1] - 1 - left_TE.flip(-1).max(-1, keepdim=True).indices",
        tests="tests/unit/test_gates_selection.py",
    ),
    Plant(
        name="gemm-inner-products-weighted",
        breaks="the gradient of a routing weight has the weight in it",
        file="pmoe/kernels/grouped_gemm/reference.py",
        old="    dot_N = (value * grad_active).sum(1)\n",
        new="    dot_N = (value * grad_active * row_scale).sum(1)\n",
        tests="tests/unit/test_kernels_grouped_gemm.py -k loop or hidden or gradient",
    ),
    Plant(
        name="unmeasured-kernel-taken",
        breaks="a kernel that nobody checked or timed computes what grouped_mm refuses",
        file="pmoe/kernels/registry.py",
        old="        plain = next(name for name in willing if name != self.challenger)\n",
        new='        plain = next(name for name in willing if name != "grouped_mm")\n',
        tests="tests/unit/test_kernels_registry.py -k plain_way",
    ),
    Plant(
        name="results-that-are-no-number",
        breaks="a kernel that gives NaN passes its check",
        file="pmoe/measure/kernel_check.py",
        old="        if not error <= allowed:\n",
        new="        if error > allowed:\n",
        tests="tests/unit/test_kernel_check.py -k no_number",
    ),
)
