"""Routing as ``torch.library`` operators, with fake functions for tracing, and with gradients.

The operators use the kernels of cuda/route if these can run, and otherwise PyTorch expressions (`reference`).
Calls on the CPU do not route by the operators, and registering them takes time. So files that every layer
needs import `pmoe.kernels.route.launches` instead of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _get_tracing_state as tracing_state
from torch._C._functorch import peek_interpreter_stack as innermost_transform
from torch.autograd.function import once_differentiable

from pmoe.kernels import extension
from pmoe.kernels.counts import Heading
from pmoe.kernels.operands import address
from pmoe.kernels.route import reference
from pmoe.kernels.route.launches import launch_route, refusal, route_problem
from pmoe.kernels.route.reference import (
    Routes,
    check_logits_memory,
    check_order,
    check_route,
    check_route_backward,
    empty_routes,
)
from pmoe.warn import warn_of_fallback


def route(
    logits_TE: Tensor,
    top_k: int,
    *,
    normalize: bool,
    num_chunks: int = 1,
    z_loss_weight: float = 0.0,
    sorted_chunks: int = 1,
    last: range = range(0),
    not_finite: int = 0,
    heading: Heading | None = None,
) -> Routes:
    """Routes each token to the top_k experts with the largest logits, with softmax weights.

    logits_TE: (T, E) float32 or float64, the gate's logits of T tokens for E experts.
    top_k: number of experts of a token. If logits are equal, the lower expert index is chosen.
    normalize: whether a token's weights are divided by their sum.
    num_chunks: n, the number of chunks of consecutive tokens. Rows are sorted by chunk before they are sorted
        by expert.
    z_loss_weight: factor of the z-loss in the auxiliary loss.
    sorted_chunks: number of neighbouring chunks whose rows are sorted as if they were one chunk; it divides
        num_chunks. Rows are still counted chunk by chunk.
    last: experts whose rows come last in each chunk, after the rows of all other experts.
    not_finite: the fault in the result (`Routes.fault`) if a logit is infinite or NaN.
    heading: the header of messages with the row counts of each chunk (`Routes.messages`); None makes no
        messages. Each rank has the same number of consecutive experts, so the heading's number of ranks must
        divide E.

    Returns the experts and weights of each token, and the order of the rows (`Routes`). Only four tensors are
    saved for backward: logits, expert, weight and counts.

    Raises ValueError if

    - logits are not contiguous (T, E), not float32 or float64, or not on a CPU or CUDA device;
    - top_k is not in 1 .. E, num_chunks is below 1, or z_loss_weight is negative;
    - there are more than 2**31 - 1 (token, choice) pairs;
    - the heading's number of ranks does not divide the number of experts.

    Example: logits [[0, 2, 1], [3, 0, 0]], top_k=2 -> expert [[1, 2], [0, 1]], position [[1, 3], [0, 2]],
    slot [2, 0, 3, 1], counts [[1, 2, 1]], ends [[1, 3, 4]].
    """
    if logits_TE.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"logits are on {logits_TE.device}, and must be on a CPU or CUDA device")
    order = (sorted_chunks, last.start, len(last))
    told = None if heading is None else [heading.num_ranks, heading.num_degrees, *heading.header]
    options = (top_k, normalize, num_chunks, z_loss_weight, True, *order, not_finite, told)
    return _routes(logits_TE, *options)


class DeferredRouting(NamedTuple):
    """The routing of a call before it is computed: tensors without values, but with their autograd graph.

    A later launch (of FlashDMoE's kernel) writes the values of weight, expert, counts and l_aux into these
    tensors. The tensors must not be read before. If no launch follows, the caller must call `keep`, which
    computes the values.

    logits_TE: (T, E), the gate's logits of T tokens for E experts. If ``product`` is set, this tensor has no
        values yet, either.
    routes: the tensors that will be written.
    options: the arguments top_k (experts of a token), normalize (whether a token's weights are divided by
        their sum) and z_loss_weight (factor of the z-loss) of `route`.
    product: the tokens (T, M), of M = d_model columns, and the gate's weight (E, M), if the launch must also
        compute the logits x weight^T; else None.
    """

    logits_TE: Tensor
    routes: Routes
    options: dict[str, Any]
    product: tuple[Tensor, Tensor] | None = None

    def keep(self) -> None:
        """Computes the routing now and writes it into the tensors. For calls that no launch will follow."""
        if self.product is not None:
            x_TM, weight_EM = self.product
            with torch.autocast(x_TM.device.type, enabled=False):
                self.logits_TE.data.copy_(x_TM.float() @ weight_EM.float().t())
        for promised, computed in zip(self.routes, route(self.logits_TE, **self.options), strict=True):
            promised.data.copy_(computed)


def deferred_routing(
    logits_TE: Tensor, top_k: int, *, normalize: bool, z_loss_weight: float
) -> DeferredRouting:
    """Returns the tensors of a routing without computing their values, which a later launch must write.

    logits_TE: (T, E), the gate's logits of T tokens for E experts.
    top_k: number of experts of a token.
    normalize: whether a token's weights are divided by their sum.
    z_loss_weight: factor of the z-loss in the auxiliary loss.
    """
    writes = False
    routes = _routes(logits_TE, top_k, normalize, 1, z_loss_weight, writes, 1, 0, 0, 0, None)
    # Users may set these to numpy numbers during training. The launch takes Python numbers only.
    options = {"top_k": int(top_k), "normalize": bool(normalize), "z_loss_weight": float(z_loss_weight)}
    return DeferredRouting(logits_TE.detach(), routes, options)


def _runs_kernel(logits_TE: Tensor, top_k: int, num_chunks: int) -> bool:
    """Returns whether the kernels of cuda/route can be used for these logits and sizes.

    If the result is False, the caller uses PyTorch expressions. If the logits are float32 on a CUDA device, a
    user expects the kernels, so this function then warns once for each reason.

    logits_TE: (T, E), the gate's logits of T tokens for E experts.
    top_k: number of experts of a token.
    num_chunks: number of chunks of consecutive tokens.
    """
    reason = refusal(logits_TE, top_k, num_chunks)
    if reason is not None and logits_TE.is_cuda and logits_TE.dtype == torch.float32:
        warn_of_fallback("tokens are routed", reason)
    return reason is None


def _routes(
    logits_TE: Tensor, top_k: int, normalize: bool, num_chunks: int, z_loss_weight: float, *others: Any
) -> Routes:
    """Returns the routes, with gradients.

    The operator ``torch.ops.pmoe.route`` is called only if torch must see one, because its dispatch takes the
    host longer than the launches: a graph is traced, a dispatch mode is on, or the logits are a subclass.

    others: all further arguments of the operator, in its order.

    The other arguments are those of `route`. Users may set them to numpy numbers during training.
    """
    options = (int(top_k), bool(normalize), num_chunks, float(z_loss_weight), *others)
    needs_operator = (
        type(logits_TE) is not Tensor
        or logits_TE.is_meta
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or tracing_state() is not None
        or innermost_transform() is not None
    )
    if needs_operator:
        return Routes(*torch.ops.pmoe.route(logits_TE, *options))
    return Routes(*_RouteDirectly.apply(logits_TE, options))  # type: ignore[no-untyped-call]


def _compute(
    logits_TE: Tensor,
    top_k: int,
    normalize: bool,
    num_chunks: int,
    z_loss_weight: float,
    writes: bool = True,
    sorted_chunks: int = 1,
    first_last: int = 0,
    num_last: int = 0,
    not_finite: int = 0,
    heading: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the fields of `Routes` by the kernels if these can run, otherwise by PyTorch expressions.

    writes: False returns uninitialised memory, which a later launch fills.
    first_last, num_last: the first of the experts whose rows come last in each chunk, and their number.
    heading: the numbers that `_heading` reads.

    The other arguments are those of `route`.
    """
    check_route(logits_TE, top_k, num_chunks, z_loss_weight)
    last = range(first_last, first_last + num_last)
    check_order(logits_TE, num_chunks, sorted_chunks, last)
    check_logits_memory(logits_TE, top_k)
    if not writes:
        return empty_routes(logits_TE, top_k)
    head = _heading(logits_TE, heading)
    options: dict[str, Any] = {
        "normalize": normalize, "z_loss_weight": z_loss_weight, "sorted_chunks": sorted_chunks, "last": last,
        "not_finite": not_finite, "heading": head,
    }  # fmt: skip
    if _runs_kernel(logits_TE, top_k, num_chunks):
        routes = empty_routes(logits_TE, top_k, num_chunks, head)
        launch_route(logits_TE, routes, **options)
        return routes
    return reference.route(logits_TE, top_k, num_chunks=num_chunks, **options)


_route = torch.library.custom_op("pmoe::route", _compute, mutates_args=(), device_types=("cpu", "cuda"))


def _heading(logits_TE: Tensor, numbers: Sequence[int] | None) -> Heading | None:
    """Returns the `Heading` (header of row-count messages) that an operator got as a list of numbers.

    logits_TE: (T, E), the gate's logits of T tokens for E experts.
    numbers: num_ranks and num_degrees, then the header; None for no heading.

    Raises ValueError if the number of ranks does not divide the number of experts.
    """
    if numbers is None:
        return None
    num_ranks, num_degrees, *header = numbers
    num_experts = logits_TE.shape[1]
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(f"num_ranks ({num_ranks}) of the heading must divide num_experts ({num_experts})")
    return Heading(num_ranks, num_degrees, tuple(header))


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
    """Returns the logits' gradient, (T, E), from the gradients of the routing weights and of the loss.

    logits_TE: (T, E), the logits of T tokens for E experts that `route` got.
    expert_TK, weight_TK, counts_nE: results of `route`: (T, K) and (T, K) for K choices of each token, and
        (n, E) for n chunks.
    normalize: whether `route` has divided a token's weights by their sum.
    z_loss_weight: factor of the z-loss in the auxiliary loss of `route`.
    grad_weight_TK: (T, K), gradient of the weights; None stands for zeros.
    grad_l_aux: scalar, gradient of the auxiliary loss; None stands for zero.

    Raises ValueError for tensors that are not contiguous, or that have other shapes, dtypes or devices than
    `Routes` says.
    """
    saved = (logits_TE, expert_TK, weight_TK, counts_nE)
    return _compute_backward(*saved, normalize, z_loss_weight, grad_weight_TK, grad_l_aux)


def _compute_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    counts_nE: Tensor,
    normalize: bool,
    z_loss_weight: float,
    grad_weight_TK: Tensor | None,
    grad_l_aux: Tensor | None,
) -> Tensor:
    """Computes what `route_backward` returns, from the same arguments, without the operator's dispatch."""
    saved = (logits_TE, expert_TK, weight_TK, counts_nE)
    gradients = (grad_weight_TK, grad_l_aux)
    check_route_backward(*saved, *gradients)
    top_k = expert_TK.shape[1]
    num_chunks = counts_nE.shape[0]
    if not _runs_kernel(logits_TE, top_k, num_chunks):
        return reference.route_backward(*saved, normalize, z_loss_weight, *gradients)
    grad_logits_TE = torch.empty_like(logits_TE)
    problem = route_problem(logits_TE, top_k, num_chunks, normalize, z_loss_weight)
    # The kernel can also add up the weights' gradient from partial sums of each row, given as (address of the
    # sums, address of the rows' positions, number of sums). That is not used here.
    in_parts = (0, 0, 0)
    places = map(address, (*saved, grad_weight_TK))
    extension.module().route_backward(
        problem, *places, *in_parts, address(grad_l_aux), grad_logits_TE.data_ptr()
    )
    return grad_logits_TE


@_route.register_fake
def _(
    logits_TE: Tensor,
    top_k: int,
    normalize: bool,
    num_chunks: int,
    z_loss_weight: float,
    writes: bool = True,
    sorted_chunks: int = 1,
    first_last: int = 0,
    num_last: int = 0,
    not_finite: int = 0,
    heading: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    check_route(logits_TE, top_k, num_chunks, z_loss_weight)
    return empty_routes(logits_TE, top_k, num_chunks, _heading(logits_TE, heading))


@route_backward.register_fake
def _(logits_TE: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(logits_TE)


def _save_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_TE, _, ctx.normalize, _, ctx.z_loss_weight, *_ = inputs
    routes = Routes(*output)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits_TE, routes.expert_TK, routes.weight_TK, routes.counts_nE)


def _differentiate_route(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradient(ctx, route_backward, *gradients), *[None] * 10


def _gradient(
    ctx: Any, backward: Callable[..., Tensor], grad_weight_TK: Tensor | None, *others: Tensor | None
) -> Tensor | None:
    """Returns the gradient of the logits, (T, E); None if neither the weights nor the loss have a gradient.

    ctx: the state that `_save_route` has kept.
    backward: the function or operator `route_backward`.
    grad_weight_TK, others: the gradients of the fields of `Routes`; the last one is that of the loss.
    """
    grad_l_aux = others[-1]
    if grad_weight_TK is None and grad_l_aux is None:
        return None
    return backward(
        *ctx.saved_tensors,
        normalize=ctx.normalize,
        z_loss_weight=ctx.z_loss_weight,
        grad_weight_TK=None if grad_weight_TK is None else grad_weight_TK.contiguous(),
        grad_l_aux=grad_l_aux,
    )


_route.register_autograd(_differentiate_route, setup_context=_save_route)


class _RouteDirectly(torch.autograd.Function):
    """The autograd function of the operator ``torch.ops.pmoe.route``, without the operator's dispatch."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, options: tuple[Any, ...]) -> tuple[Tensor, ...]:
        # The options are one argument, because torch looks at each argument in Python.
        routes = _compute(logits_TE, *options)
        _save_route(ctx, (logits_TE, *options), routes)
        return tuple(routes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        return _gradient(ctx, _compute_backward, *gradients), None
