"""Launches of cuda/route on the current stream: one kernel forward, one backward.

For a layer that saves what it needs by itself: no autograd, no check of tensors. The caller asks `refusal`.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.operands import address, cuda_index
from pmoe.kernels.route.routes import MAX_SLOTS, RouteGradients, Routes

USUAL_EXPERTS = 256
"""A stream's workspace holds for so many at least, so that it rarely has to be replaced."""


def refusal(logits_TE: Tensor, top_k: int, num_chunks: int = 1) -> str | None:
    """Why the kernels do not take this; None where they do. Starts CUDA only for logits that are there."""
    num_tokens, num_experts = logits_TE.shape
    if logits_TE.device.type != "cuda":
        return f"logits are on {logits_TE.device}, not on a CUDA device"
    if logits_TE.dtype != torch.float32:
        return f"logits are {logits_TE.dtype}, not torch.float32"
    if num_tokens * top_k > MAX_SLOTS:
        return f"{num_tokens} tokens of {top_k} choices are more than {MAX_SLOTS} slots"
    return _refusal_of_sizes(cuda_index(logits_TE.device), num_experts, top_k, num_chunks)


@lru_cache(maxsize=1024)
def _refusal_of_sizes(device: int, num_experts: int, top_k: int, num_chunks: int) -> str | None:
    module = extension.load()
    if module is None:
        return extension.why_missing()
    if why := module.route_refusal(0, num_experts, top_k, num_chunks):
        return str(why)
    try:
        max_chunks = module.route_most_chunks(device, num_experts, top_k)
    except RuntimeError as error:  # no code for this device, or too little shared memory
        return str(error)
    return (
        None
        if num_chunks <= max_chunks
        else f"num_chunks ({num_chunks}) must be at most {max_chunks} on this device"
    )


def launch_route(logits_TE: Tensor, out: Routes, *, normalize: bool, z_loss_weight: float = 0.0) -> None:
    """Writes all of ``out``, which comes from `empty_routes`."""
    num_chunks, num_experts = out.counts_nE.shape
    problem, stream = _problem(logits_TE, out.weight_TK.shape[1], num_chunks, normalize, z_loss_weight)
    workspace, num_bytes, owner = _workspace(cuda_index(logits_TE.device), stream, num_experts)
    addresses = [each.data_ptr() for each in (logits_TE, *out)]
    extension.module().route(problem, *addresses, workspace, num_bytes)
    del owner  # on this stream, behind the launch


def launch_route_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    counts_nE: Tensor,
    out_TE: Tensor,
    *,
    normalize: bool,
    z_loss_weight: float = 0.0,
    **given: Tensor | None,
) -> None:
    """Writes out_TE (T, E) float32, the logits' gradient; see `route_backward`. given: `RouteGradients`."""
    grad_weight_TK, grad_l_aux, partial_PN, position_TK = RouteGradients(**given)
    problem, _ = _problem(logits_TE, weight_TK.shape[1], counts_nE.shape[0], normalize, z_loss_weight)
    saved = (logits_TE, expert_TK, weight_TK, counts_nE, grad_weight_TK, partial_PN, position_TK)
    parts = 0 if partial_PN is None else partial_PN.shape[0]
    extension.module().route_backward(
        problem, *map(address, saved), parts, address(grad_l_aux), out_TE.data_ptr()
    )


def _problem(
    logits_TE: Tensor, top_k: int, num_chunks: int, normalize: bool, z_loss_weight: float
) -> tuple[Any, int]:
    """The problem, and the stream that it is launched on."""
    num_tokens, num_experts = logits_TE.shape
    device = cuda_index(logits_TE.device)
    stream = torch.cuda.current_stream(device).cuda_stream
    problem = extension.module().RouteProblem(
        device, stream, num_tokens, num_experts, top_k, num_chunks, normalize, z_loss_weight
    )
    return problem, stream


def _workspace(device: int, stream: int, num_experts: int) -> tuple[int, int, Tensor | None]:
    """Address, bytes, and the tensor that owns them, if one does.

    Zeroed once for a stream, whose launches use it one after the other and leave its barrier at zero.
    A captured graph may be replayed on any stream, so it gets one of its own, and zeroes it at each replay.
    """
    num_bytes = _workspace_bytes(device, num_experts)
    if torch.cuda.is_current_stream_capturing():
        owner = torch.zeros(num_bytes, dtype=torch.uint8, device=torch.device("cuda", device))
        return owner.data_ptr(), num_bytes, owner
    kept_bytes = max(num_bytes, _workspace_bytes(device, USUAL_EXPERTS))
    return int(extension.module().route_kept_workspace(device, stream, kept_bytes)), kept_bytes, None


@cache
def _workspace_bytes(device: int, num_experts: int) -> int:
    return int(extension.module().route_workspace_bytes(device, num_experts))
