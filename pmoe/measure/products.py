"""Which kernels compute a layer's products: measured once for its sizes, agreed by its ranks.

The requests follow from the experts' sizes and from the largest number of rows, which all ranks share; so
does whether anything is measured. See `pmoe.measure.product_choices`.
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

FINEST, LARGEST = 32, 2
"""Products are measured from a 32nd of a rank's even share of rows (chunks, and rows that stay) to twice as
many (skewed routing). For fewer or more rows the unmeasured rule holds."""

FUSED_SAVES = 0.05
"""Of all products' seconds: less than what copies, sorting and activations of their own take beside them (a
quarter on an H200, with products of more than a millisecond; `bench/bench_alone.py`)."""

_measured: set[tuple[object, ...]] = set()


def measure_products(
    experts: Experts, ranks: Ranks, dtype: torch.dtype, device: torch.device, max_rows: int, needs_grad: bool
) -> None:
    """Has the products of these experts measured, the first time for so many rows.

    Collective over ``ranks`` then. Later, or for as many rows up to the next power of two, it does nothing.

    dtype: of the rows. max_rows: of the rank with most tokens, in even routing. needs_grad: whether there may
    be a backward. All of these, and the experts' sizes, must be the same on every rank. Nothing is measured
    on the CPU, in deterministic mode (which must be on for all ranks or for none), while a CUDA graph is
    captured, for modules, and for types and sizes that pmoe's kernels do not take.

    Raises ValueError on every rank where their kernels are of different architectures.
    """
    if device.type != "cuda" or not max_rows or not isinstance(experts, StackedExperts):
        return
    if torch.are_deterministic_algorithms_enabled() or torch.cuda.is_current_stream_capturing():
        return
    # The shard's index is not in the key: all shards of an expert ask for the same products.
    shapes = experts.shapes()
    sizes = (*shapes["w1"], *shapes["w2"], not experts.has_bias, experts.shard.count)
    key = (ranks.name, device, dtype, *sizes, bucket(max_rows), needs_grad)
    if key not in _measured:
        from pmoe.measure.product_choices import measure_choices

        requests = product_requests(experts, dtype, device, max_rows, needs_grad=needs_grad)
        agree = functools.partial(largest, ranks, device, stage="agreeing on kernels")
        measure_choices(PRODUCTS, requests, agree, KernelCase.of(experts, device, dtype))
        _measured.add(key)


def slower_kernels(
    experts: StackedExperts, dtype: torch.dtype, device: torch.device, rows: int, *, needs_grad: bool
) -> str | None:
    """Why one rank's kernels would be slower than the path of all layers, in words; None where they are not.

    A product may be a little slower by itself: what is launched with it makes up for `FUSED_SAVES`.
    """
    taken, fastest = 0.0, 0.0
    for name, request in _products(experts, dtype, device, rows, needs_grad):
        chosen, found = PRODUCTS.choose(request), PRODUCTS.measured.get(request)
        fixed = PRODUCTS.forced is not None or torch.are_deterministic_algorithms_enabled()
        if chosen != PMOE and (fixed or found is None or PRODUCTS.competing(request) is None):
            return f"{chosen} is chosen for the {request.form} product of {name} with {rows} rows"
        if found is not None and not fixed:
            taken, fastest = taken + found.seconds[PMOE], fastest + min(found.seconds.values())
    if taken <= (1 + FUSED_SAVES) * fastest:
        return None
    return (
        f"products of {rows} rows take {taken * 1e3:.3g} ms by {PMOE}, {fastest * 1e3:.3g} ms by the fastest"
    )


def product_requests(
    experts: StackedExperts, dtype: torch.dtype, device: torch.device, max_rows: int, *, needs_grad: bool
) -> list[ProductRequest]:
    """Every product of these experts. Empty where the kernels do not take the type or the sizes."""
    if grouped_gemm.misfit(dtype, d_model=experts.d_model, hidden=experts.num_hidden) is not None:
        return []
    max_bucket = LARGEST * bucket(max_rows)
    buckets = [rows for i in range((FINEST * LARGEST).bit_length()) if (rows := max_bucket >> i)]
    found = []
    for name, request in _products(experts, dtype, device, max_rows, needs_grad):
        # b2 is added by the first shard alone, and all shards ask for the same
        biases = {request.bias, False} if name == "w2" and experts.shard.count > 1 else {request.bias}
        found += [replace(request, rows=rows, bias=bias) for bias in sorted(biases) for rows in buckets]
    return found


def _products(
    experts: StackedExperts, dtype: torch.dtype, device: torch.device, rows: int, needs_grad: bool
) -> Iterator[tuple[str, ProductRequest]]:
    """The products of each weight, with its name."""
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
