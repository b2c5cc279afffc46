"""What cuda/route takes, and its launches on the current stream. Tensors are not checked here."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.operands import MAX_ROWS, cuda_index
from pmoe.kernels.route.routes import Routes


def refusal(logits_TE: Tensor, top_k: int, num_chunks: int = 1) -> str | None:
    """Why the kernels do not take this; None where they do. Starts CUDA only for logits that are there."""
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
    module = extension.load()
    if module is None:
        return extension.why_missing()
    if why := module.route_refusal(0, num_experts, top_k, num_chunks):
        return str(why)
    try:
        module.route_prepare(device, num_experts, top_k)
    except RuntimeError as error:  # no code for this device, or too little shared memory
        return str(error)
    return None


def launch_route(logits_TE: Tensor, out: Routes, *, normalize: bool, z_loss_weight: float = 0.0) -> None:
    """Writes all of ``out``, which comes from `empty_routes`."""
    num_chunks, num_experts = out.counts_nE.shape
    module = extension.module()
    problem = problem_of(logits_TE, out.weight_TK.shape[1], num_chunks, normalize, z_loss_weight)
    num_bytes = module.route_workspace_bytes(problem)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=logits_TE.device)
    module.route(problem, *(each.data_ptr() for each in (logits_TE, *out, workspace)), num_bytes)


def problem_of(logits_TE: Tensor, top_k: int, num_chunks: int, normalize: bool, z_loss_weight: float) -> Any:
    """What both directions' launches begin with, the current stream included."""
    num_tokens, num_experts = logits_TE.shape
    device = cuda_index(logits_TE.device)
    stream = torch.cuda.current_stream(device).cuda_stream
    return extension.module().RouteProblem(
        device, stream, num_tokens, num_experts, top_k, num_chunks, normalize, z_loss_weight
    )
