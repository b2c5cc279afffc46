"""Routing as ``torch.library`` operators with fakes and a gradient, by the kernels or the reference."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.operands import MAX_ROWS, address, cuda_index
from pmoe.kernels.route import reference
from pmoe.kernels.route.reference import (
    Routes,
    check_logits_memory,
    check_route,
    check_route_backward,
    empty_routes,
)
from pmoe.warn import warn_once


def route(
    logits_TE: Tensor, top_k: int, *, normalize: bool, num_chunks: int = 1, z_loss_weight: float = 0.0
) -> Routes:
    """Routes each token to its top_k experts by softmax over all experts; returns `Routes`.

    logits_TE: (T, E) float32 or float64.
    top_k: experts of a token: those with the largest logits, ties as in `top_indices`.
    normalize: whether a token's weights are divided by their sum.
    num_chunks: n, the chunks that rows are sorted by.
    z_loss_weight: weight of the z-loss in l_aux.

    Backward needs logits, expert, weight and counts; nothing else is saved.

    Raises ValueError for logits that are not a contiguous (T, E) of float32 or float64 on a CPU or CUDA
    device, top_k outside 1..E, num_chunks below 1, a negative z_loss_weight, more than 2**31 - 1 slots.

    Example: logits [[0, 2, 1], [3, 0, 0]], top_k=2 -> expert [[1, 2], [0, 1]], position [[1, 3], [0, 2]],
    slot [2, 0, 3, 1], counts [[1, 2, 1]], ends [[1, 3, 4]].
    """
    if logits_TE.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"logits are on {logits_TE.device}, and must be on a CPU or CUDA device")
    return Routes(*torch.ops.pmoe.route(logits_TE, top_k, normalize, num_chunks, z_loss_weight))


class DeferredRouting(NamedTuple):
    """Routes that have their autograd graph but no values yet. A later launch writes the values.

    The caller of `deferred_routing` passes it to a launch, which writes weight, expert, counts and l_aux by
    address.
    Nothing may read these before. If there is no such launch, `keep` writes all routes.

    logits_TE: (T, E), the logits; without values too if ``product`` is given.
    routes: the tensors that are to be written.
    options: arguments of `route`.
    product: x (T, M) and the gate's weight (E, M), if the same launch also computes the logits x weight^T.
    """

    logits_TE: Tensor
    routes: Routes
    options: dict[str, Any]
    product: tuple[Tensor, Tensor] | None = None

    def keep(self) -> None:
        """Computes all routes now, for a call without a launch that writes them."""
        if self.product is not None:
            x_TM, weight_EM = self.product
            with torch.autocast(x_TM.device.type, enabled=False):
                self.logits_TE.data.copy_(x_TM.float() @ weight_EM.float().t())
        for promised, computed in zip(self.routes, route(self.logits_TE, **self.options), strict=True):
            promised.data.copy_(computed)


def deferred_routing(
    logits_TE: Tensor, top_k: int, *, normalize: bool, z_loss_weight: float
) -> DeferredRouting:
    """Returns routes that nothing has computed yet; the arguments are those of `route`."""
    routes = Routes(*torch.ops.pmoe.route(logits_TE, top_k, normalize, 1, z_loss_weight, writes=False))
    # Users' schedules may set these to numpy numbers. The launch takes Python's.
    options = {"top_k": int(top_k), "normalize": bool(normalize), "z_loss_weight": float(z_loss_weight)}
    return DeferredRouting(logits_TE.detach(), routes, options)


def refusal(logits_TE: Tensor, top_k: int, num_chunks: int = 1) -> str | None:
    """Returns why the kernels would not route these logits; None if they would.

    CUDA is started only if the logits are on a CUDA device.
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
    """Returns why the kernels would not take these sizes on a device; None if they would.

    Cached, because preparing a kernel is slow.
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


def _runs_kernel(logits_TE: Tensor, top_k: int, num_chunks: int) -> bool:
    """Returns whether the kernels run; for float32 logits on CUDA, warns once why not."""
    reason = refusal(logits_TE, top_k, num_chunks)
    if reason is not None and logits_TE.is_cuda and logits_TE.dtype == torch.float32:
        message = f"routes are computed by PyTorch instead of the kernel: {reason}"
        warn_once(message, RuntimeWarning, for_each_reason=True)
    return reason is None


@torch.library.custom_op("pmoe::route", mutates_args=(), device_types=("cpu", "cuda"))
def _route(
    logits_TE: Tensor, top_k: int, normalize: bool, num_chunks: int, z_loss_weight: float, writes: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_route(logits_TE, top_k, num_chunks, z_loss_weight)
    check_logits_memory(logits_TE, top_k)
    if not writes:
        return empty_routes(logits_TE, top_k)
    options: dict[str, Any] = {"normalize": normalize, "z_loss_weight": z_loss_weight}
    if _runs_kernel(logits_TE, top_k, num_chunks):
        routes = empty_routes(logits_TE, top_k, num_chunks)
        launch_route(logits_TE, routes, **options)
        return routes
    return reference.route(logits_TE, top_k, num_chunks=num_chunks, **options)


@torch.library.custom_op("pmoe::route_backward", mutates_args=(), device_types=("cpu", "cuda"))
def route_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    counts_nE: Tensor,
    normalize: bool,
    z_loss_weight: float = 0.0,
    grad_weight_TK: Tensor | None = None,
    grad_l_aux: Tensor | None = None,
) -> Tensor:
    """Returns the gradient of the logits (T, E) from tensors of `route` and the gradients of its results.

    normalize, z_loss_weight: as in `route`.
    grad_weight_TK: (T, K), gradient of the weights; None stands for zeros.
    grad_l_aux: scalar, gradient of the auxiliary loss; None stands for zero.

    Raises ValueError for tensors that are not contiguous, or of other shapes, dtypes or devices than `Routes`
    has.
    """
    saved = (logits_TE, expert_TK, weight_TK, counts_nE)
    gradients = (grad_weight_TK, grad_l_aux)
    check_route_backward(*saved, *gradients)
    top_k = expert_TK.shape[1]
    num_chunks = counts_nE.shape[0]
    if not _runs_kernel(logits_TE, top_k, num_chunks):
        return reference.route_backward(*saved, normalize, z_loss_weight, *gradients)
    grad_logits_TE = torch.empty_like(logits_TE)
    problem = _problem(logits_TE, top_k, num_chunks, normalize, z_loss_weight)
    # The kernel also takes the weights' gradient as partial sums by row: (sums, positions, number). Not here.
    in_parts = (0, 0, 0)
    places = map(address, (*saved, grad_weight_TK))
    extension.module().route_backward(
        problem, *places, *in_parts, address(grad_l_aux), grad_logits_TE.data_ptr()
    )
    return grad_logits_TE


@_route.register_fake
def _(
    logits_TE: Tensor, top_k: int, normalize: bool, num_chunks: int, z_loss_weight: float, *_: bool
) -> tuple[Tensor, ...]:
    check_route(logits_TE, top_k, num_chunks, z_loss_weight)
    return empty_routes(logits_TE, top_k, num_chunks)


@route_backward.register_fake
def _(logits_TE: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(logits_TE)


def _save_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_TE, _, ctx.normalize, _, ctx.z_loss_weight, _ = inputs
    routes = Routes(*output)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits_TE, routes.expert_TK, routes.weight_TK, routes.counts_nE)


def _differentiate_route(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_weight_TK, *_, grad_l_aux = gradients
    grad_logits_TE = None
    if grad_weight_TK is not None or grad_l_aux is not None:
        grad_logits_TE = route_backward(
            *ctx.saved_tensors,
            normalize=ctx.normalize,
            z_loss_weight=ctx.z_loss_weight,
            grad_weight_TK=None if grad_weight_TK is None else grad_weight_TK.contiguous(),
            grad_l_aux=grad_l_aux,
        )
    return grad_logits_TE, *[None] * 5


_route.register_autograd(_differentiate_route, setup_context=_save_route)


# ---- launches on the current stream; their tensors have been checked


def launch_route(logits_TE: Tensor, out: Routes, *, normalize: bool, z_loss_weight: float = 0.0) -> None:
    """Writes all tensors of ``out``, which must come from `empty_routes`."""
    num_chunks, num_experts = out.counts_nE.shape
    module = extension.module()
    problem = _problem(logits_TE, out.weight_TK.shape[1], num_chunks, normalize, z_loss_weight)
    num_bytes = module.route_workspace_bytes(problem)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=logits_TE.device)
    module.route(problem, *(tensor.data_ptr() for tensor in (logits_TE, *out, workspace)), num_bytes)


def _problem(logits_TE: Tensor, top_k: int, num_chunks: int, normalize: bool, z_loss_weight: float) -> Any:
    """Returns the arguments that the launches of both directions share, the current stream included."""
    num_tokens, num_experts = logits_TE.shape
    device = cuda_index(logits_TE.device)
    stream = torch.cuda.current_stream(device).cuda_stream
    return extension.module().RouteProblem(
        device, stream, num_tokens, num_experts, top_k, num_chunks, normalize, z_loss_weight
    )
