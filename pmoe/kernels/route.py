"""Routing in one launch: softmax, top-k, rows by chunk and expert, places in sorted order, auxiliary loss.

``torch.ops.pmoe.route`` and ``torch.ops.pmoe.route_backward`` are the kernels of cuda/route on CUDA, and the
PyTorch expressions of this file elsewhere, for float64, and for what `refusal` names. No host
synchronisation in either. Forward is one kernel and backward is one kernel; each gives the same bits every
time on one device.

Letters: T tokens, K choices, E experts, N = T*K slots, n chunks, P tiles.
"""

from __future__ import annotations

import math
import warnings
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmoe.kernels import extension

ROUNDS = 16
"""Up to so many choices, as many searches for a maximum are faster than sorting all experts."""

USUAL_EXPERTS = 256
"""A stream's workspace holds for so many at least, so that it rarely has to be replaced."""

MOST_SLOTS = 2**31 - 1
"""Places are int32."""


class Routes(NamedTuple):
    """Where each token goes and with what weight, and where each slot's row stands.

    A slot is one of the T*K (token, choice) pairs. Rows are the slots sorted by (chunk, expert), in token
    order within; chunk c holds the tokens from floor(c T / n) to floor((c + 1) T / n). None is dropped.

    weight_TK: float32 (float64 for float64 logits), carries the gradient of the logits, as l_aux does.
    expert_TK: int32, best first.
    position_TK: int32, the row of each slot.
    slot_N: int32, the slot of each row: position's inverse.
    counts_nE: int32, rows by chunk and expert.
    ends_nE: int32, where they end: the running sum of counts over all chunks and experts. With n = 1 it is
        what a grouped product takes.
    l_aux: scalar, E * sum_e f_e P_e + z_loss_weight * mean_t logsumexp(logits_t)^2, where f_e is the share
        of the slots that fell on e and P_e its mean probability; 0 without tokens.
    """

    weight_TK: Tensor
    expert_TK: Tensor
    position_TK: Tensor
    slot_N: Tensor
    counts_nE: Tensor
    ends_nE: Tensor
    l_aux: Tensor


def route(
    logits_TE: Tensor, top_k: int, *, normalize: bool, num_chunks: int = 1, z_loss_weight: float = 0.0
) -> Routes:
    """Softmax over all experts, the top_k largest logits as `largest` picks them; see `Routes`.

    normalize: a token's weights are divided by their sum.
    For backward logits, expert, weight and counts are saved, nothing else.

    Raises ValueError for logits that are not a contiguous (T, E) of float32 or float64 on a CPU or CUDA
    device, top_k outside 1..E, num_chunks below 1, a negative z_loss_weight, more than 2**31 - 1 slots.
    Example: logits [[0, 2, 1], [3, 0, 0]], top_k=2 -> expert [[1, 2], [0, 1]], position [[1, 3], [0, 2]],
    slot [2, 0, 3, 1], counts [[1, 2, 1]], ends [[1, 3, 4]].
    """
    if logits_TE.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"logits are on {logits_TE.device}, and must be on a CPU or CUDA device")
    return Routes(*torch.ops.pmoe.route(logits_TE, top_k, normalize, num_chunks, z_loss_weight))


def route_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    counts_nE: Tensor,
    *,
    normalize: bool,
    z_loss_weight: float = 0.0,
    grad_weight_TK: Tensor | None = None,
    grad_l_aux: Tensor | None = None,
    partial_PN: Tensor | None = None,
    position_TK: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits (T, E), from what `route` took and gave and the gradients of its results;
    None stands for zeros.

    partial_PN: the weights' gradient in P parts by row, instead of grad_weight_TK: that of slot (t, k) is
    sum_p partial[p, position[t, k]], added from p = 0 upwards.

    Raises ValueError for tensors of other shapes, types or devices than `Routes` has, and that are not
    contiguous; where both gradients of the weights are given, or partial without position.
    """
    grad_logits_TE: Tensor = torch.ops.pmoe.route_backward(
        logits_TE,
        expert_TK,
        weight_TK,
        counts_nE,
        normalize,
        z_loss_weight,
        grad_weight_TK,
        grad_l_aux,
        partial_PN,
        position_TK,
    )
    return grad_logits_TE


def largest(score_TE: Tensor, top_k: int) -> Tensor:
    """Indices of the top_k largest scores, (T, K), best first, ties to the lowest index; NaN is the largest.

    torch.topk promises nothing on ties. Distinct whatever the scores are; negative infinity counts as the
    lowest finite number.
    """
    left_TE = score_TE.detach().clamp(
        min=torch.finfo(score_TE.dtype).min
    )  # a copy; what is taken becomes -inf
    if top_k == 1:
        return left_TE.argmax(-1, keepdim=True)
    if top_k > ROUNDS:
        return left_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    chosen_TK = torch.empty(score_TE.shape[0], top_k, dtype=torch.int64, device=score_TE.device)
    for choice in range(top_k):
        best_T1 = left_TE.argmax(-1, keepdim=True)
        left_TE.scatter_(-1, best_T1, -math.inf)
        chosen_TK[:, choice : choice + 1] = best_T1
    return chosen_TK


# ---- without the kernel


def reference_route(
    logits_TE: Tensor, top_k: int, *, normalize: bool, num_chunks: int = 1, z_loss_weight: float = 0.0
) -> Routes:
    """What `route` computes, in PyTorch; differentiable by PyTorch too."""
    num_tokens, num_experts = logits_TE.shape
    probability_TE = logits_TE.softmax(-1)
    expert_TK = largest(logits_TE, top_k)
    weight_TK = probability_TE.gather(-1, expert_TK)
    if normalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)

    token_T = torch.arange(num_tokens, device=logits_TE.device)
    chunk_T = ((token_T + 1) * num_chunks - 1) // max(num_tokens, 1)
    key_N = (chunk_T.unsqueeze(1) * num_experts + expert_TK).reshape(-1)
    counts = torch.zeros(num_chunks * num_experts, dtype=torch.int64, device=logits_TE.device)
    counts.scatter_add_(0, key_N, torch.ones_like(key_N))
    slot_N = key_N.argsort(stable=True)
    position_N = torch.empty_like(slot_N)
    position_N[slot_N] = torch.arange(slot_N.numel(), device=logits_TE.device)

    counts_nE, ends_nE = counts.view(num_chunks, -1), counts.cumsum(0).view(num_chunks, -1)
    share_E = counts_nE.sum(0).to(probability_TE.dtype)
    l_aux = _balance_scale(num_tokens, num_experts, top_k) * (probability_TE.sum(0) * share_E).sum()
    if z_loss_weight:
        l_aux = l_aux + z_loss_weight * (logits_TE.logsumexp(-1).square().sum() / max(num_tokens, 1))
    places = (expert_TK, position_N.view(num_tokens, top_k), slot_N, counts_nE, ends_nE)
    expert, position, slot, counts, ends = (each.to(torch.int32) for each in places)
    return Routes(weight_TK, expert, position, slot, counts, ends, l_aux)


def reference_route_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    counts_nE: Tensor,
    *,
    normalize: bool,
    z_loss_weight: float = 0.0,
    grad_weight_TK: Tensor | None = None,
    grad_l_aux: Tensor | None = None,
    partial_PN: Tensor | None = None,
    position_TK: Tensor | None = None,
) -> Tensor:
    """What `route_backward` computes, in PyTorch."""
    num_tokens, num_experts = logits_TE.shape
    p_TE = logits_TE.softmax(-1)
    grad_p_TE = torch.zeros_like(p_TE)
    if partial_PN is not None and position_TK is not None:
        grad_weight_TK = partial_PN.index_select(1, position_TK.reshape(-1)).sum(0).view_as(weight_TK)
    if grad_weight_TK is not None:
        chosen_TK = expert_TK.long()
        if normalize:
            inner_T1 = (grad_weight_TK * weight_TK).sum(-1, keepdim=True)
            grad_weight_TK = (grad_weight_TK - inner_T1) / p_TE.gather(-1, chosen_TK).sum(-1, keepdim=True)
        grad_p_TE.scatter_(-1, chosen_TK, grad_weight_TK)
    log_T1: Tensor | float = 0.0
    if grad_l_aux is not None:
        load_E = counts_nE.sum(0).to(p_TE.dtype)
        grad_p_TE += grad_l_aux * _balance_scale(num_tokens, num_experts, weight_TK.shape[1]) * load_E
        if z_loss_weight:
            scale = 2 * z_loss_weight / max(num_tokens, 1)
            log_T1 = grad_l_aux * scale * logits_TE.logsumexp(-1, keepdim=True)
    return p_TE * (grad_p_TE - (p_TE * grad_p_TE).sum(-1, keepdim=True) + log_T1)


def _balance_scale(num_tokens: int, num_experts: int, top_k: int) -> float:
    return num_experts / (max(num_tokens * top_k, 1) * max(num_tokens, 1))


# ---- with the kernel


def refusal(logits_TE: Tensor, top_k: int, num_chunks: int = 1) -> str | None:
    """Why the kernels do not take this; None where they do. Starts CUDA only for logits that are there."""
    num_tokens, num_experts = logits_TE.shape
    if logits_TE.device.type != "cuda":
        return f"logits are on {logits_TE.device}, not on a CUDA device"
    if logits_TE.dtype != torch.float32:
        return f"logits are {logits_TE.dtype}, not torch.float32"
    if num_tokens * top_k > MOST_SLOTS:
        return f"{num_tokens} tokens of {top_k} choices are more than {MOST_SLOTS} slots"
    return _refusal_of_sizes(_index(logits_TE), num_experts, top_k, num_chunks)


@lru_cache(maxsize=1024)
def _refusal_of_sizes(device: int, num_experts: int, top_k: int, num_chunks: int) -> str | None:
    module = extension.load()
    if module is None:
        return extension.status().reason
    if why := module.route_refusal(0, num_experts, top_k, num_chunks):
        return str(why)
    try:
        most = module.route_most_chunks(device, num_experts, top_k)
    except RuntimeError as error:  # no code for this device, or too little shared memory
        return str(error)
    return None if num_chunks <= most else f"num_chunks ({num_chunks}) must be at most {most} on this device"


def empty_routes(logits_TE: Tensor, top_k: int, num_chunks: int = 1) -> Routes:
    """Routes for a launch to write, not initialised."""
    num_tokens, num_experts = logits_TE.shape

    def ints(*shape: int) -> Tensor:
        return logits_TE.new_empty(shape, dtype=torch.int32)

    return Routes(
        weight_TK=logits_TE.new_empty(num_tokens, top_k),
        expert_TK=ints(num_tokens, top_k),
        position_TK=ints(num_tokens, top_k),
        slot_N=ints(num_tokens * top_k),
        counts_nE=ints(num_chunks, num_experts),
        ends_nE=ints(num_chunks, num_experts),
        l_aux=logits_TE.new_empty(()),
    )


def launch_route(logits_TE: Tensor, out: Routes, *, normalize: bool, z_loss_weight: float = 0.0) -> None:
    """One kernel on the current stream, which writes all of ``out`` (from `empty_routes`), for a layer that
    saves what it needs by itself: no autograd, no check of tensors. The caller has asked `refusal`."""
    num_chunks, num_experts = out.counts_nE.shape
    problem, stream = _problem(logits_TE, out.weight_TK.shape[1], num_chunks, normalize, z_loss_weight)
    address, num_bytes, owner = _workspace(_index(logits_TE), stream, num_experts)
    _module().route(
        problem,
        logits_TE.data_ptr(),
        *(each.data_ptr() for each in out),
        address,
        num_bytes,
    )
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
    grad_weight_TK: Tensor | None = None,
    grad_l_aux: Tensor | None = None,
    partial_PN: Tensor | None = None,
    position_TK: Tensor | None = None,
) -> None:
    """One kernel on the current stream, which writes out_TE (T, E) float32; see `launch_route`."""
    problem, _ = _problem(logits_TE, weight_TK.shape[1], counts_nE.shape[0], normalize, z_loss_weight)
    _module().route_backward(
        problem,
        logits_TE.data_ptr(),
        expert_TK.data_ptr(),
        weight_TK.data_ptr(),
        counts_nE.data_ptr(),
        _address(grad_weight_TK),
        _address(partial_PN),
        _address(position_TK),
        0 if partial_PN is None else partial_PN.shape[0],
        _address(grad_l_aux),
        out_TE.data_ptr(),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _index(tensor: Tensor) -> int:
    index = tensor.device.index
    return torch.cuda.current_device() if index is None else index


def _module() -> Any:
    module = extension.load()
    assert module is not None, "refusal() was not asked"
    return module


def _problem(
    logits_TE: Tensor, top_k: int, num_chunks: int, normalize: bool, z_loss_weight: float
) -> tuple[Any, int]:
    """The problem, and the stream that it is launched on."""
    num_tokens, num_experts = logits_TE.shape
    device = _index(logits_TE)
    stream = torch.cuda.current_stream(device).cuda_stream
    problem = _module().RouteProblem(
        device, stream, num_tokens, num_experts, top_k, num_chunks, normalize, z_loss_weight
    )
    return problem, stream


def _workspace(device: int, stream: int, num_experts: int) -> tuple[int, int, Tensor | None]:
    """Address, bytes, and who owns them. Zeroed once for a stream, whose launches use it one after the other
    and leave its barrier at zero.

    A captured graph may be replayed on any stream, so it gets one of its own, and zeroes it at each replay.
    """
    num_bytes = _workspace_bytes(device, num_experts)
    if torch.cuda.is_current_stream_capturing():
        owner = torch.zeros(num_bytes, dtype=torch.uint8, device=torch.device("cuda", device))
        return owner.data_ptr(), num_bytes, owner
    most = max(num_bytes, _workspace_bytes(device, USUAL_EXPERTS))
    return int(_module().route_kept_workspace(device, stream, most)), most, None


@cache
def _workspace_bytes(device: int, num_experts: int) -> int:
    return int(_module().route_workspace_bytes(device, num_experts))


def _takes(logits_TE: Tensor, top_k: int, num_chunks: int) -> bool:
    """Whether the kernels do; says why not, where they might have."""
    reason = refusal(logits_TE, top_k, num_chunks)
    if reason is not None and logits_TE.is_cuda and logits_TE.dtype == torch.float32:
        _tell(reason)
    return reason is None


@cache  # told once
def _tell(reason: str) -> None:
    warnings.warn(f"pmoe routes with PyTorch instead of its kernel: {reason}", RuntimeWarning, stacklevel=2)


# ---- what may be asked for


def _check_route(logits_TE: Tensor, top_k: int, num_chunks: int, z_loss_weight: float) -> None:
    """All but what depends on the number of tokens, which may be unknown while a graph is traced."""
    if logits_TE.dim() != 2 or logits_TE.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"logits are {logits_TE.dtype} of shape {tuple(logits_TE.shape)}, and must be (T, E) of "
            "torch.float32 or torch.float64"
        )
    num_experts = logits_TE.shape[1]
    if num_experts < 1:
        raise ValueError(f"num_experts ({num_experts}), the second size of logits, must be at least 1")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be 1 to num_experts ({num_experts})")
    if num_chunks < 1 or num_chunks * num_experts > MOST_SLOTS:
        raise ValueError(
            f"num_chunks ({num_chunks}) must be at least 1, and times num_experts ({num_experts}) at most "
            f"{MOST_SLOTS}"
        )
    if not 0 <= z_loss_weight < math.inf:
        raise ValueError(f"z_loss_weight ({z_loss_weight}) must be a number of at least 0")


def _check_memory(logits_TE: Tensor, top_k: int) -> None:
    if not logits_TE.is_contiguous():
        raise ValueError(
            f"logits of shape {tuple(logits_TE.shape)} have strides {logits_TE.stride()}, and must be "
            "contiguous"
        )
    if logits_TE.shape[0] * top_k > MOST_SLOTS:
        raise ValueError(
            f"num_tokens ({logits_TE.shape[0]}) * top_k ({top_k}) must be at most {MOST_SLOTS}: places are "
            "int32"
        )


def _check_like(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, and must be "
            f"{dtype} of shape {shape} on {like.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} of shape {shape} has strides {tensor.stride()}, and must be contiguous")


def _check_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    counts_nE: Tensor,
    grad_weight_TK: Tensor | None,
    grad_l_aux: Tensor | None,
    partial_PN: Tensor | None,
    position_TK: Tensor | None,
) -> None:
    for name, tensor in {"expert": expert_TK, "counts": counts_nE}.items():
        if tensor.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, and must have 2 dimensions")
    top_k, num_chunks = expert_TK.shape[1], counts_nE.shape[0]
    _check_route(logits_TE, top_k, num_chunks, 0.0)
    _check_memory(logits_TE, top_k)
    slots, dtype = (logits_TE.shape[0], top_k), logits_TE.dtype
    _check_like("expert", expert_TK, slots, torch.int32, logits_TE)
    _check_like("weight", weight_TK, slots, dtype, logits_TE)
    _check_like("counts", counts_nE, (num_chunks, logits_TE.shape[1]), torch.int32, logits_TE)
    if grad_weight_TK is not None:
        _check_like("grad_weight", grad_weight_TK, slots, dtype, logits_TE)
    if grad_l_aux is not None:
        _check_like("grad_l_aux", grad_l_aux, (), dtype, logits_TE)
    if (partial_PN is None) != (position_TK is None) or (
        partial_PN is not None and grad_weight_TK is not None
    ):
        raise ValueError("partial and position must be given together, and without grad_weight")
    if partial_PN is not None and position_TK is not None:
        tiles = partial_PN.shape[0] if partial_PN.dim() == 2 else 0
        if tiles < 1:
            raise ValueError(
                f"partial has shape {tuple(partial_PN.shape)}, and must be (P, N) with P at least 1"
            )
        _check_like("partial", partial_PN, (tiles, slots[0] * top_k), dtype, logits_TE)
        _check_like("position", position_TK, slots, torch.int32, logits_TE)


# ---- the operations


@torch.library.custom_op(
    "pmoe::route",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor logits_TE, int top_k, bool normalize, int num_chunks, float z_loss_weight)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _route(
    logits_TE: Tensor, top_k: int, normalize: bool, num_chunks: int, z_loss_weight: float
) -> tuple[Tensor, ...]:
    _check_route(logits_TE, top_k, num_chunks, z_loss_weight)
    _check_memory(logits_TE, top_k)
    options: dict[str, Any] = {"normalize": normalize, "z_loss_weight": z_loss_weight}
    if _takes(logits_TE, top_k, num_chunks):
        routes = empty_routes(logits_TE, top_k, num_chunks)
        launch_route(logits_TE, routes, **options)
        return routes
    return reference_route(logits_TE, top_k, num_chunks=num_chunks, **options)


@torch.library.custom_op(
    "pmoe::route_backward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor logits_TE, Tensor expert_TK, Tensor weight_TK, Tensor counts_nE, bool normalize,"
    " float z_loss_weight, Tensor? grad_weight_TK=None, Tensor? grad_l_aux=None, Tensor? partial_PN=None,"
    " Tensor? position_TK=None) -> Tensor",
)
def _route_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    counts_nE: Tensor,
    normalize: bool,
    z_loss_weight: float,
    grad_weight_TK: Tensor | None = None,
    grad_l_aux: Tensor | None = None,
    partial_PN: Tensor | None = None,
    position_TK: Tensor | None = None,
) -> Tensor:
    tensors = (logits_TE, expert_TK, weight_TK, counts_nE)
    gradients: dict[str, Any] = {
        "grad_weight_TK": grad_weight_TK,
        "grad_l_aux": grad_l_aux,
        "partial_PN": partial_PN,
        "position_TK": position_TK,
    }
    _check_backward(*tensors, **gradients)
    options: dict[str, Any] = {"normalize": normalize, "z_loss_weight": z_loss_weight, **gradients}
    if _takes(logits_TE, expert_TK.shape[1], counts_nE.shape[0]):
        grad_logits_TE = torch.empty_like(logits_TE)
        launch_route_backward(*tensors, grad_logits_TE, **options)
        return grad_logits_TE
    return reference_route_backward(*tensors, **options)


@_route.register_fake
def _(
    logits_TE: Tensor, top_k: int, normalize: bool, num_chunks: int, z_loss_weight: float
) -> tuple[Tensor, ...]:
    _check_route(logits_TE, top_k, num_chunks, z_loss_weight)
    return empty_routes(logits_TE, top_k, num_chunks)


@_route_backward.register_fake
def _(logits_TE: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(logits_TE)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_TE, _, ctx.normalize, _, ctx.z_loss_weight = inputs
    routes = Routes(*output)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits_TE, routes.expert_TK, routes.weight_TK, routes.counts_nE)


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
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
    return grad_logits_TE, None, None, None, None


_route.register_autograd(_backward, setup_context=_save)
