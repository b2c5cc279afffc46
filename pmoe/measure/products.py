"""Which kernels compute a layer's products: measured once for sizes like the layer's, agreed by its ranks.

What is asked for follows from the experts' sizes and from the largest number of rows, which all ranks share;
so does whether anything is asked. See `pmoe.kernels.registry`.

Letters: E experts of this rank, M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""

from __future__ import annotations

from functools import partial

import torch

from pmoe.comm.agree import largest
from pmoe.comm.ranks import Ranks
from pmoe.experts.base import Experts
from pmoe.experts.products import PRODUCTS, make_request
from pmoe.experts.stacked import StackedExperts
from pmoe.kernels import grouped_gemm
from pmoe.kernels.registry import Form, Request, bucket

FINEST, LARGEST = 32, 2
"""Products are measured from a 32nd of a rank's even share of rows (chunks, and rows that stay) to twice as
many (skewed routing). For fewer or more rows the unmeasured rule holds."""

_settled: set[tuple[object, ...]] = set()


def settle_products(
    experts: Experts,
    ranks: Ranks,
    dtype: torch.dtype,
    device: torch.device,
    max_rows: int,
    *,
    needs_grad: bool = True,
) -> None:
    """Has the products of these experts measured, or finds them in the file, the first time that so many rows
    come. Collective over ``ranks`` then; later, or for as many rows up to the next power of two, nothing.

    dtype: of the rows. max_rows: of the rank with most tokens, in even routing. needs_grad: whether a
    backward may follow. All of these, and the experts' sizes, must be the same on every rank. On the CPU, in
    deterministic mode (which must be on for all ranks or for none), while a CUDA graph is captured, for
    modules, and for types and sizes that pmoe's kernels do not take, there is nothing to settle.

    Raises ValueError on every rank where their kernels are of different architectures.
    """
    if device.type != "cuda" or not max_rows or not isinstance(experts, StackedExperts):
        return
    if torch.are_deterministic_algorithms_enabled() or torch.cuda.is_current_stream_capturing():
        return
    # The shard's index is not among them: all shards of an expert ask alike.
    shapes = experts.shapes()
    sizes = (*shapes["w1"], *shapes["w2"], experts.b1 is None, experts.shard.count)
    key = (ranks.name, device, dtype, *sizes, bucket(max_rows), needs_grad)
    if key not in _settled:
        requests = product_requests(experts, dtype, device, max_rows, needs_grad=needs_grad)
        PRODUCTS.settle(requests, partial(largest, ranks, device, stage="agreeing on kernels"))
        _settled.add(key)


def slower_kernels(
    experts: StackedExperts, dtype: torch.dtype, device: torch.device, rows: int, *, needs_grad: bool
) -> str | None:
    """Which product of these experts pmoe's kernels are not chosen for, and what is; None where they are for
    all."""
    forms: list[Form] = ["forward", "input", "weight"] if needs_grad else ["forward"]
    for (name, shape), bias in zip(experts.shapes().items(), (experts.b1, experts.b2), strict=True):
        num_experts, num_out, num_in = shape
        for form in forms:
            biased = form == "forward" and bias is not None
            request = make_request(form, device, dtype, num_experts, rows, num_in, num_out, bias=biased)
            chosen = PRODUCTS.choose(request)
            if chosen != "pmoe":
                return f"{chosen} is chosen for the {form} product of {name} with {rows} rows"
    return None


def product_requests(
    experts: StackedExperts,
    dtype: torch.dtype,
    device: torch.device,
    max_rows: int,
    *,
    needs_grad: bool = True,
) -> list[Request]:
    """Every product of these experts that more than one way may compute: those with a bias only pmoe's
    kernels do in one launch. Empty where the kernels do not take the type or the sizes."""
    if grouped_gemm.misfit(dtype, d_model=experts.w1.shape[2], hidden=experts.num_hidden) is not None:
        return []
    forms: list[Form] = ["forward", "input", "weight"] if needs_grad else ["forward"]
    most = LARGEST * bucket(max_rows)
    buckets = [rows for i in range((FINEST * LARGEST).bit_length()) if (rows := most >> i)]
    found = []
    for name, (num_experts, num_out, num_in) in experts.shapes().items():
        # b2 is added by the first shard alone.
        plain = experts.b1 is None or (name == "w2" and experts.shard.count > 1)
        for form in forms:
            if form == "forward" and not plain:
                continue
            for rows in buckets:
                found.append(make_request(form, device, dtype, num_experts, rows, num_in, num_out))
    return found
