"""Launches of the routing kernels (cuda/route) into tensors of the caller, without a torch operator.

`pmoe.kernels.route.operators` has the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.counts import HEADER, Heading, Messages
from pmoe.kernels.extension import path
from pmoe.kernels.operands import MAX_ROWS, VECTOR_BYTES, cuda_index

if TYPE_CHECKING:
    from pmoe.kernels.route.reference import Routes


def refusal(logits_TE: Tensor, top_k: int, num_chunks: int = 1) -> str | None:
    """Returns why the kernels cannot route with these logits and sizes; None if they can.

    The function starts CUDA only if the logits are on a CUDA device.

    logits_TE: (T, E), the gate's logits of T tokens for E experts.
    top_k: number of experts of a token.
    num_chunks: number of chunks of consecutive tokens.
    """
    num_tokens, num_experts = logits_TE.shape
    if logits_TE.device.type != "cuda":
        return f"logits are on {logits_TE.device}, not on a CUDA device"
    if logits_TE.dtype != torch.float32:
        return f"logits are {logits_TE.dtype}, not torch.float32"
    if num_tokens * top_k > MAX_ROWS:
        return f"{num_tokens} tokens of {top_k} choices are more than {MAX_ROWS} slots"
    return _refusal_of_sizes(cuda_index(logits_TE.device), num_experts, top_k, num_chunks)


@lru_cache(maxsize=1024)
def _refusal_of_sizes(device: int, num_experts: int, top_k: int, num_chunks: int) -> str | None:
    """Returns why the kernels do not take these sizes on a CUDA device; None if they do.

    The result is cached, because the check prepares the kernel, which is slow.

    device: number of the CUDA device.
    num_experts: number of experts of all ranks.
    top_k: number of experts of a token.
    num_chunks: number of chunks of consecutive tokens.
    """
    module = extension.load()
    if module is None:
        return extension.why_missing()
    if why := module.route_refusal(0, num_experts, top_k, num_chunks):
        return str(why)
    try:
        module.route_prepare(device, num_experts, top_k)
    except RuntimeError as error:  # the device has no code of the kernel, or too little shared memory
        return str(error)
    return None


# ---- launches on the current stream. The callers have checked the tensors


def launch_route(
    logits_TE: Tensor,
    out: Routes,
    *,
    normalize: bool,
    z_loss_weight: float = 0.0,
    sorted_chunks: int = 1,
    last: range = range(0),
    not_finite: int = 0,
    heading: Heading | None = None,
) -> None:
    """Launches the routing kernels on the current stream. They write all tensors of ``out``.

    logits_TE: (T, E), the gate's logits of T tokens for E experts, which must have been checked.
    out: the tensors to write, from `empty_routes`.
    normalize: whether a token's weights are divided by their sum.
    z_loss_weight: factor of the z-loss in the auxiliary loss.
    sorted_chunks: number of neighbouring chunks whose rows are sorted as if they were one chunk.
    last: experts whose rows come last in each chunk, after the rows of all other experts.
    not_finite: the fault if a logit is infinite or NaN.
    heading: the header of messages of row counts, which `empty_routes` got, too; None without messages.
    """
    num_chunks, num_experts = out.counts_nE.shape
    module = extension.module()
    order = (sorted_chunks, last.start, len(last))
    problem = route_problem(logits_TE, out.weight_TK.shape[1], num_chunks, normalize, z_loss_weight, *order)
    num_bytes = module.route_workspace_bytes(problem)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=logits_TE.device)
    num_ranks = 0
    header: Sequence[int] = (0,) * HEADER
    sent = 0
    if heading is not None:
        num_ranks = heading.num_ranks
        header = heading.header
        messages = Messages.new(out.counts_nE, num_ranks, heading.num_degrees, out.messages)
        sent = messages.both[0].data_ptr()
    places = [tensor.data_ptr() for tensor in (logits_TE, *out[:-2])]
    last_places = (sent, out.l_aux.data_ptr(), workspace.data_ptr())
    module.route(problem, *places, *last_places, num_bytes, not_finite, num_ranks, header)


def route_problem(
    logits_TE: Tensor, top_k: int, num_chunks: int, normalize: bool, z_loss_weight: float, *order: int
) -> Any:
    """Returns the arguments that launches of forward and backward have in common, with the current stream.

    logits_TE: (T, E), the logits of T tokens for E experts. Only sizes and device are used.
    top_k: number of experts of a token.
    num_chunks: number of chunks of consecutive tokens.
    normalize: whether a token's weights are divided by their sum.
    z_loss_weight: factor of the z-loss in the auxiliary loss.
    order: the arguments of forward that decide the order of rows; none in backward.
    """
    num_tokens, num_experts = logits_TE.shape
    device = cuda_index(logits_TE.device)
    stream = torch.cuda.current_stream(device).cuda_stream
    return extension.module().RouteProblem(
        device, stream, num_tokens, num_experts, top_k, num_chunks, normalize, z_loss_weight, *order
    )


MAX_HALVES = 1 << 30
"""The most elements of the gradient, and of the gate's weight, that the kernel of `gate_operands` takes."""


def gate_operands(grad_TE: Tensor, weight_EM: Tensor) -> tuple[Tensor, Tensor]:
    """Returns bfloat16 operands for the gate's matrix products in backward, for T tokens and E experts.

    A product with these operands sums in float32, and is as precise as a product with the float32 gradient:
    each element of the gradient is replaced by a sum of two bfloat16 numbers, which differs from the element
    by at most 2^-17 of its value.

    grad_TE: (T, E) float32, the gradient of the logits.
    weight_EM: (E, M) bfloat16, the gate's weight for M columns.

    Returns two tensors. The first is (T, 2E): the gradient rounded to bfloat16 in the first E columns, and
    the rounding errors in the other E columns. The second is (2E, M): the weight, twice. One launch writes
    both on devices that have pmoe's kernels.
    """
    num_tokens, num_experts = grad_TE.shape
    halves = weight_EM.new_empty(num_tokens, 2 * num_experts)
    fits = weight_EM.numel() % 8 == 0 and weight_EM.data_ptr() % VECTOR_BYTES == 0
    fits = fits and max(grad_TE.numel(), weight_EM.numel()) <= MAX_HALVES
    if fits and path(grad_TE.device)[0] is not None and weight_EM.is_contiguous():
        twice = weight_EM.new_empty(2 * num_experts, weight_EM.shape[1])
        device = cuda_index(grad_TE.device)
        extension.module().route_halves(
            device, torch.cuda.current_stream(device).cuda_stream, num_tokens, num_experts,
            weight_EM.shape[1], grad_TE.contiguous().data_ptr(), halves.data_ptr(), weight_EM.data_ptr(),
            twice.data_ptr(),
        )  # fmt: skip
        return halves, twice
    upper_TE, lower_TE = halves.chunk(2, 1)
    # Both operators write bfloat16, so they also round their results, and no further launch is needed for it.
    torch.sub(grad_TE, upper_TE.copy_(grad_TE), out=lower_TE)
    return halves, torch.cat([weight_EM, weight_EM])
