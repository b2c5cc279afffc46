"""Measures once which kernels compute the matrix products of a layer's experts fastest.

The products to measure follow from the experts' sizes and from the largest number of rows, which are the same
on all ranks. So all ranks measure the same products, or none (`pmoe.measure.product_choices`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from pmoe.comm.agreement import largest
from pmoe.comm.ranks import Ranks
from pmoe.experts.base import Experts
from pmoe.experts.stacked import StackedExperts
from pmoe.kernels import grouped_gemm
from pmoe.kernels.registry import PMOE, PRODUCTS, Form, ProductRequest, bucket
from pmoe.measure.kernel_check import KernelCase
from pmoe.measure.product_choices import measure_choices
from pmoe.warn import warn_once

FINEST = 32
"""The smallest number of measured rows is 1 / FINEST of the rows of a rank under even routing.

A product may have only the rows of one chunk, or only the rows that stay on their rank. For products with
still fewer rows, a fixed rule chooses the kernel without a measurement.
"""

LARGEST = 2
"""The largest number of measured rows is LARGEST times the rows of a rank under even routing.

Under skewed routing a rank receives more rows than under even routing.
"""

FUSED_SAVES = 0.05
"""Time that fusing saves outside the products on a single rank, as a fraction of the products' seconds.

Without fusing, copies, sorting and activations are separate kernels. They take a quarter of the time on an
H200, with products of more than a millisecond (`bench/bench_alone.py`). This number is a safe lower bound.
"""

_measured: set[tuple[object, ...]] = set()
"""Keys of the products that this process has measured."""


def measure_products(
    experts: Experts, ranks: Ranks, dtype: torch.dtype, device: torch.device, max_rows: int, needs_grad: bool
) -> None:
    """Measures, for each product of these experts, whether pmoe's kernels or plain PyTorch is faster.

    ``max_rows`` is rounded up to a power of two. The first call with this power of two (and with the same
    sizes, dtype, device and ranks) measures. It is collective over ``ranks``. Later calls do nothing.

    Args:
        experts: the experts of this rank.
        ranks: the ranks of the layer.
        dtype: dtype of the rows.
        device: the device that computes.
        max_rows: rows that the rank with the most tokens would receive under even routing.
        needs_grad: whether a backward pass may follow. If so, its products are measured, too.

    The experts' sizes and all other arguments must be the same on every rank. Nothing is measured

    - on the CPU, or while a CUDA graph is captured;
    - in deterministic mode, which must be on for all ranks or for none;
    - for experts that are a user's modules, and for dtypes and sizes that pmoe's kernels refuse.

    Raises ValueError on every rank if the ranks' kernels are for different architectures.
    """
    if device.type != "cuda" or not max_rows or not isinstance(experts, StackedExperts):
        return
    if not may_measure():
        return
    # The shard's index is not in the key: all shards of an expert ask for the same products.
    shapes = experts.shapes()
    sizes = (*shapes["w1"], *shapes["w2"], not experts.has_bias, experts.shard.count)
    key = (ranks.name, device, dtype, *sizes, bucket(max_rows), needs_grad)
    if key not in _measured:
        requests = product_requests(experts, dtype, device, max_rows, needs_grad=needs_grad)
        agree = functools.partial(largest, ranks, device, stage="agreeing on kernels")
        measure_choices(PRODUCTS, requests, agree, KernelCase.of(experts, device, dtype))
        _measured.add(key)


def may_measure() -> bool:
    """Returns whether products may be measured on a GPU now.

    False in deterministic mode, and while a CUDA graph is captured.
    """
    return not (torch.are_deterministic_algorithms_enabled() or torch.cuda.is_current_stream_capturing())


def slower_kernels(
    experts: StackedExperts, dtype: torch.dtype, device: torch.device, rows: int, *, needs_grad: bool
) -> str | None:
    """Returns why the fused kernels of a single rank would be slower than separate kernels; None if not.

    Fused kernels must compute every product by pmoe's kernels. Separate kernels may use for each product the
    fastest implementation. So two sums of the measured seconds of all products are compared:

        with pmoe's kernels   >   (1 + FUSED_SAVES) * with the fastest implementation of each product

    If this is true, fused kernels are slower, and the function warns once in a process. `FUSED_SAVES` is the
    fraction of time that fusing saves elsewhere. If a product was not measured, and the implementation chosen
    for it is not pmoe's, the result names that product.

    experts: the experts of this rank.
    dtype: dtype of the rows.
    device: the device.
    rows: number of rows of the products.
    needs_grad: whether a backward pass may follow.
    """
    taken = 0.0
    fastest = 0.0
    for name, request in _products(experts, dtype, device, rows, needs_grad):
        chosen = PRODUCTS.choose(request)
        measured = PRODUCTS.measured.get(request)
        is_fixed = PRODUCTS.forced is not None or torch.are_deterministic_algorithms_enabled()
        if chosen != PMOE and (is_fixed or measured is None or PRODUCTS.competing(request) is None):
            return f"{chosen} is chosen for the {request.form} product of {name} with {rows} rows"
        if measured is not None and not is_fixed:
            taken = taken + measured.seconds[PMOE]
            fastest = fastest + min(measured.seconds.values())
    if taken <= (1 + FUSED_SAVES) * fastest:
        return None
    why = (
        f"products of {rows} rows take {taken * 1e3:.3g} ms by {PMOE}, {fastest * 1e3:.3g} ms by the fastest"
    )
    warn_once(f"one rank's kernels are not used where they are slower: {why}")
    return why


def product_requests(
    experts: StackedExperts, dtype: torch.dtype, device: torch.device, max_rows: int, *, needs_grad: bool
) -> list[ProductRequest]:
    """Returns the experts' products to measure; an empty list if pmoe's kernels refuse the dtype or sizes.

    Each product is measured with several numbers of rows: powers of two below and above ``max_rows``.

    max_rows: rows that the rank with the most tokens would receive under even routing.
    needs_grad: whether a backward pass may follow. If so, its products are measured, too.
    """
    if grouped_gemm.layout_problem(dtype, d_model=experts.d_model, hidden=experts.num_hidden) is not None:
        return []
    max_bucket = LARGEST * bucket(max_rows)
    buckets = [rows for i in range((FINEST * LARGEST).bit_length()) if (rows := max_bucket >> i)]
    requests = []
    for name, request in _products(experts, dtype, device, max_rows, needs_grad):
        # Only the first shard adds b2, but the requests of all shards must be the same: both are measured.
        biases = {request.bias, False} if name == "w2" and experts.shard.count > 1 else {request.bias}
        requests += [replace(request, rows=rows, bias=bias) for bias in sorted(biases) for rows in buckets]
    return requests


def _products(
    experts: StackedExperts, dtype: torch.dtype, device: torch.device, rows: int, needs_grad: bool
) -> Iterator[tuple[str, ProductRequest]]:
    """Yields (name of a weight, product) for every matrix product of the experts.

    dtype: dtype of the rows.
    device: the device that computes.
    rows: number of rows of each product.
    needs_grad: whether the products of a backward pass are included.
    """
    forms: tuple[Form, ...] = ("forward", "input", "weight") if needs_grad else ("forward",)
    for name, (num_experts, num_out, num_in) in experts.shapes().items():
        for form in forms:
            yield (
                name,
                ProductRequest(
                    form=form,
                    device=device,
                    dtype=dtype,
                    experts=num_experts,
                    rows=rows,
                    in_features=num_in,
                    out_features=num_out,
                    bias=form == "forward" and experts.has_bias,
                ),
            )
