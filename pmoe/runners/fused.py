"""A layer by COMET's fused kernels: dispatch + first product, second product + combine, and the same two for
the gradients (arXiv 2502.19811, Sections 3.1 and 3.2).

Nothing is cut into chunks: tiles of a product start as their rows arrive, and its columns leave as they are
computed. One autograd function holds both passes. As in the pipeline engine T_DO is not saved, the routing is
never decided twice, and the restore pair says what becomes of T_DI and T_M:

    T_DI  keep         a copy of the rows that arrived, which lie in memory that all layers share
          communicate  they are dispatched again, in backward, behind the products that they would wait for
    T_M   keep         as the first kernel wrote it
          recompute    from the kept T_DI by a product alone; where T_DI is sent again, by the first kernel

The other way, "forward", leaves what the pipeline engine's backward pass needs. Whose kernels these are
`Steps` says: those of cuda/comet, or whatever a test puts in their place (`using`).

Letters: T tokens, K choices, N rows that arrive, W ranks, E experts of a rank, M = d_model, H = d_hidden,
G = H or 2H rows of w1, n chunks, m pieces, S rows that leave.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmoe.comm.counts import Shared
from pmoe.comm.heap import Heap, HeapError, HeapShape, heap_for, nvshmem_heap, process_heap
from pmoe.comm.heap_memory import host_name
from pmoe.comm.ranks import Ranks
from pmoe.engine.autograd import make_anchor
from pmoe.engine.passes import Forwarded, ForwardPass, Inputs, Kept, Unit
from pmoe.engine.plan import Plan
from pmoe.experts import Experts, FFNExperts, SwiGLUExperts
from pmoe.experts.base import Hidden
from pmoe.kernels import comet as kernels
from pmoe.kernels import grouped_gemm
from pmoe.kernels.comet import Journey, Steps
from pmoe.kernels.registry import bucket, digest
from pmoe.kernels.route import Routes
from pmoe.measure.division import agreed, agreed_layer, fused_layer_sizes
from pmoe.measure.products import agree_among
from pmoe.ordering.sorted import LocalExperts, SortedRows, sort_rows
from pmoe.planner.division import Division, FusedLayerSizes, kernel_sizes
from pmoe.schedule.restore import Restore

# ---- who computes a call, and why not


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a call asks of the fused kernels; all but ``device`` is the same on every rank.

    dtype: of the rows. activation: as `pmoe.kernels.grouped_gemm` names it. experts: of a rank. max_tokens,
    most_rows: the largest number of any rank's tokens, and of the rows that any rank receives. slack: of the
    heap's rows over the balanced share.
    """

    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    d_model: int
    d_hidden: int
    activation: str
    experts: int
    top_k: int
    max_tokens: int
    most_rows: int
    needs_grad: bool
    slack: float = 1.25


StepsFactory = Callable[[Request], Steps | str]
"""The steps of a call, or why there are none: the same on every rank."""

_instead: list[StepsFactory] = []
_agreed: dict[tuple[object, ...], bool] = {}


@contextlib.contextmanager
def using(make_steps: StepsFactory) -> Iterator[None]:
    """In the block, steps come from ``make_steps`` and not from the kernels, whose refusals are not asked."""
    _instead.append(make_steps)
    try:
        yield
    finally:
        _instead.pop()


def takes(experts: Experts) -> bool:
    """Whether these are experts that the steps compute."""
    return type(experts) in (FFNExperts, SwiGLUExperts)


def refusal(device: torch.device, dtype: torch.dtype, *, d_model: int, d_hidden: int) -> str | None:
    """Why the kernels do not take such rows on this rank, whatever others may say; None where they do."""
    if _instead:
        return None
    return _captures(device) or kernels.refusal(device, dtype, d_model=d_model, d_hidden=d_hidden)


def _captures(device: torch.device) -> str | None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is captured: rounds have numbers, which a replay would use again"
    return None


def steps_for(request: Request) -> Steps | str:
    """The steps of such a call, or why there are none: steps on every rank, or on none.

    Collective the first time for a type and sizes: a rank's kernels may be missing, or its device another.
    """
    if _instead:
        return _instead[-1](request)
    device, dtype, experts = request.device, request.dtype, request.experts
    if why := _captures(device):
        return why
    why = refusal(device, dtype, d_model=request.d_model, d_hidden=request.d_hidden)
    why = why or kernels.ranks_refusal(device, request.ranks.size, experts)
    key = ("refused", request.ranks.name, device, dtype, request.d_model, request.d_hidden, experts)
    if _any(key, request, why is not None):
        return why or "another rank refuses the fused kernels: it says why"
    return _kernel_steps(request)


def _kernel_steps(request: Request) -> Steps | str:
    """By the kernels, on the heap that all layers of this kind share. Whatever is refused is refused by
    numbers that all ranks share, or by an error that all raise."""
    ranks = request.ranks
    shape = heap_shape(request)
    if request.most_rows > shape.rows:
        return f"more rows arrive at a rank than its heap holds: {request.most_rows}, of {shape.rows}"
    make = nvshmem_heap if _spans_nodes(request) else process_heap

    def find_heap() -> Heap:
        return heap_for(ranks, request.device, shape, make=make)

    try:
        return kernels.KernelSteps(find_heap, lambda kernel, direction: _division(request, kernel, direction))
    except HeapError:
        raise
    except RuntimeError as error:
        return f"there is no heap: {error}"


def _spans_nodes(request: Request) -> bool:
    """Whether the ranks are on several nodes. Asked once for a group."""
    ranks = request.ranks
    key = ("nodes", ranks.name)
    if key not in _agreed:
        here = float(digest([host_name()]))
        most, least = agree_among(ranks, request.device)([here, -here])
        _agreed[key] = most != -least
    return _agreed[key]


def heap_shape(request: Request) -> HeapShape:
    """Of the heap that serves such a call: as many rows as the rank with most tokens may send, times the
    slack for those that arrive. In steps of an eighth of a power of two, so that it is seldom made anew."""
    step = max(bucket(request.max_tokens) // 8, 16)
    tokens = math.ceil(request.max_tokens / step) * step
    return HeapShape(
        num_ranks=request.ranks.size,
        experts=request.experts,
        rows=math.ceil(tokens * request.top_k * request.slack),
        home_rows=tokens * request.top_k,
        d_model=request.d_model,
        dtype=request.dtype,
    )


def _division(request: Request, kernel: kernels.Kind, direction: kernels.Direction) -> Division:
    return agreed(request.ranks, kernel_sizes(layer_sizes_of(request), kernel, direction), request.device)


def worth(request: Request) -> bool:
    """Whether a layer of such sizes was measured to be faster fused than in chunks; where nothing was
    measured it is not fused. The same on every rank; collective the first time that so many rows come."""
    if request.device.type != "cuda":
        return False
    sizes = layer_sizes_of(request)
    seconds = agreed_layer(request.ranks, sizes, request.device)
    return seconds is not None and seconds.fused_is_faster(training=request.needs_grad)


def layer_sizes_of(request: Request) -> FusedLayerSizes:
    """As the tables of measured divisions and layers are asked."""
    return fused_layer_sizes(
        request.device,
        d_model=request.d_model,
        d_hidden=request.d_hidden,
        num_experts=request.experts * request.ranks.size,
        tokens=request.max_tokens,
        top_k=request.top_k,
        num_ranks=request.ranks.size,
        gated=request.activation == "swiglu",
        dtype=request.dtype,
    )


def _any(key: tuple[object, ...], request: Request, here: bool) -> bool:
    """Whether it holds on any rank. Asked once for a key, which must be as new on all ranks alike."""
    if key not in _agreed:
        (most,) = agree_among(request.ranks, request.device)([float(here)])
        _agreed[key] = bool(most)
    return _agreed[key]


# ---- a call


@dataclass(frozen=True, kw_only=True)
class Call:
    """What both passes need beside tensors with gradients. restore: a pair that offloads nothing."""

    steps: Steps
    journey: Journey
    activation: str
    restore: Restore


def sort(expert_TK: Tensor, keep_TK: Tensor | None, num_experts: int) -> SortedRows:
    """The rows that a rank sends, by expert of all ranks and token; int32, and -1 where a slot is dropped."""
    rows = sort_rows(expert_TK, keep_TK, 1, num_experts, LocalExperts(0, 0), 0)
    position = rows.position.int()
    if keep_TK is not None:
        position = position.masked_fill(~keep_TK.reshape(-1), -1)
    return SortedRows(slot=rows.slot.int(), position=position)


def make_journey(
    expert_TK: Tensor, sent: SortedRows, counts_FE: Tensor, shared: Shared, rank: int
) -> Journey:
    """From the routing and the exchanged counts, without a host synchronisation. sent: of `sort`. counts_FE:
    the rows that this rank sends, by bin and expert of all ranks, on the rows' device."""
    num_ranks, num_local = shared.recv.shape[1:]
    return Journey(
        rank=rank,
        expert_TK=expert_TK.int(),
        position_TK=sent.position.view_as(expert_TK),
        slot_S=sent.slot[: int(shared.send.sum())],
        send_WE=counts_FE.sum(0).view(num_ranks, num_local).int(),
        recv_WE=shared.recv_device.sum(0).int(),
        num_received=int(shared.recv.sum()),
    )


def journey_alone(routes: Routes) -> Journey:
    """Of one rank whose routing kernel has sorted its rows: nothing is exchanged, and nothing is launched."""
    return Journey(
        rank=0,
        expert_TK=routes.expert_TK,
        position_TK=routes.position_TK,
        slot_S=routes.slot_N,
        send_WE=routes.counts_nE,
        recv_WE=routes.counts_nE,
        num_received=routes.slot_N.numel(),
    )


def run(call: Call, inputs: Inputs, *, needs_grad: bool) -> Tensor:
    """T_O (T, M), with a hand-written backward where ``needs_grad``, which must be the same on every rank:
    where one rank differentiates all take part, whatever of their own inputs needs a gradient."""
    tensors = (inputs.x_TM, inputs.weight_TK, *_named(inputs.parameters))
    if needs_grad and torch.is_grad_enabled():
        y_TM: Tensor = _Comet.apply(  # type: ignore[no-untyped-call]
            call, make_anchor(inputs.x_TM), *tensors
        )
        return y_TM
    with torch.no_grad():
        return _forward(call, *tensors, keeps_hidden=False, keeps_rows=False)[0]


def _named(parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """w1, w2, b1, b2"""
    w1, w2, *biases = parameters
    b1, b2 = biases or (None, None)
    return w1, w2, b1, b2


def _forward(
    call: Call,
    x_TM: Tensor,
    weight_TK: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    *,
    keeps_hidden: bool,
    keeps_rows: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """T_O, and T_M and T_DI where they are kept."""
    steps, journey = call.steps, call.journey
    with _whole(steps):
        hidden_NG, active_NH = steps.dispatch_hidden(
            journey, dense(x_TM), weight_TK, w1, b1, activation=call.activation, keep=keeps_hidden
        )
        rows_NM = steps.rows(journey).clone() if keeps_rows else None
        return steps.product_combine(journey, active_NH, w2, b2), hidden_NG, rows_NM


@contextlib.contextmanager
def _whole(steps: Steps) -> Iterator[None]:
    """A pass whose steps are all taken, or whose heap nobody takes another step with: memory may have run out
    between two of them, on this rank alone."""
    try:
        yield
    except BaseException as error:
        steps.give_up(f"{type(error).__name__}: {error}")
        raise


def dense(rows: Tensor) -> Tensor:
    """The same rows without gaps, and on a boundary of 16 bytes."""
    rows = rows.contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


class _Comet(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        anchor: Tensor,
        x_TM: Tensor,
        weight_TK: Tensor,
        w1: Tensor,
        w2: Tensor,
        b1: Tensor | None,
        b2: Tensor | None,
    ) -> Tensor:
        sends_again = call.restore.dispatched == "communicate"
        y_TM, hidden_NG, rows_NM = _forward(
            call, x_TM, weight_TK, w1, w2, b1, b2,
            keeps_hidden=call.restore.hidden == "keep", keeps_rows=not sends_again,
        )  # fmt: skip
        ctx.save_for_backward(x_TM if sends_again else None, weight_TK, w1, w2, b1, b2, hidden_NG, rows_NM)
        ctx.call = call
        return y_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("a MoELayer has no second derivative: create_graph (True) must be False")
        with torch.autocast(grad_TM.device.type, enabled=False), _whole(ctx.call.steps):
            return None, None, *_backward(ctx.call, ctx.saved_tensors, ctx.needs_input_grad[4:], grad_TM)


def _backward(
    call: Call, saved: Sequence[Tensor | None], needs: Sequence[bool], grad_TM: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, w1, w2, b1 and b2; needs: of which of the last four. A rank's own tensors that
    need no gradient save it products, but no step: the other ranks' tensors may."""
    x_TM, weight_TK, w1, w2, b1, b2, hidden_NG, rows_NM = saved
    assert weight_TK is not None and w1 is not None and w2 is not None
    steps, journey, ends_E, activation = call.steps, call.journey, call.journey.ends_E, call.activation
    needs_w1, needs_w2, needs_b1, needs_b2 = needs
    if hidden_NG is None and rows_NM is not None:
        hidden_NG = grouped_gemm.product(rows_NM, w1, ends_E, bias_EO=b1)
    elif hidden_NG is None:
        assert x_TM is not None
        hidden_NG, _ = steps.dispatch_hidden(
            journey, dense(x_TM), weight_TK, w1, b1, activation=activation, keep=True
        )
        rows_NM = steps.rows(journey).clone()  # the gradients come to the same place
    assert hidden_NG is not None
    # Products that only the parameters wait for come as soon as their operands can then be let go of: the
    # kernels leave no communication that they could fill the time of.
    of_w1 = of_w2 = of_b1 = of_b2 = None
    grad_hidden_NG, active_NH, dots_PN = steps.dispatch_hidden_gradient(
        journey, dense(grad_TM), weight_TK, w2, b2, hidden_NG, activation=activation
    )
    del hidden_NG
    if needs_w2:
        of_w2 = grouped_gemm.weight_gradient(steps.rows(journey), active_NH, ends_E)
    del active_NH
    if needs_b2:
        of_b2 = _weighted_sum(steps.rows(journey), steps.row_weight(journey), ends_E)
    if rows_NM is None:
        assert x_TM is not None
        steps.dispatch(journey, dense(x_TM), weight_TK)
        rows_NM = steps.rows(journey)
    if needs_w1:
        of_w1 = grouped_gemm.weight_gradient(grad_hidden_NG, rows_NM, ends_E)
    del rows_NM
    if needs_b1:
        of_b1 = grouped_gemm.sum_by_expert(grad_hidden_NG, ends_E)
    of_x, of_weight = steps.gradient_combine(journey, grad_hidden_NG, w1, dots_PN)
    return of_x, of_weight.to(weight_TK.dtype), of_w1, of_w2, of_b1, of_b2


def _weighted_sum(rows_NM: Tensor, weight_N: Tensor, ends_E: Tensor) -> Tensor:
    """(E, M): for each expert the sum of its rows times their weights, as `grouped_gemm.sum_by_expert`."""
    column = rows_NM.new_zeros(rows_NM.shape[0], 8)  # 16 bytes a row
    column[:, 0] = weight_N
    return grouped_gemm.weight_gradient(rows_NM, column, ends_E)[:, :, 0]


# ---- forward only


def forward_by(call: Call, recv_FWE: Tensor) -> ForwardPass:
    """A forward pass by the fused kernels, behind which the pipeline engine goes backward. recv_FWE: the rows
    that come to this rank, by bin, on their device. The plan's two passes must have the same chunks."""

    def forward(plan: Plan, inputs: Inputs) -> Forwarded:
        with _whole(call.steps):
            return take_steps(plan, inputs)

    def take_steps(plan: Plan, inputs: Inputs) -> Forwarded:
        steps, journey, cut = call.steps, call.journey, plan.forward
        w1, w2, b1, b2 = _named(inputs.parameters)
        hidden_NG, active_NH = steps.dispatch_hidden(
            journey, dense(inputs.x_TM), inputs.weight_TK, w1, b1,
            activation=call.activation, keep=plan.restore.hidden == "keep",
        )  # fmt: skip
        n, m = len(cut.chunks), len(cut.pieces)
        index_N = unit_index(
            recv_FWE.unflatten(0, (n, -1)).sum(1), journey.rank, num_pieces=m, num_rows=journey.num_received
        )
        received = [chunk.received.num_rows for chunk in cut.chunks]
        units: dict[Unit, int] = {(i, ""): rows for i, rows in enumerate(received)}
        units |= {(j, "_L"): piece.groups.num_rows for j, piece in enumerate(cut.pieces)}
        rows_NM = steps.rows(journey) if plan.restore.dispatched == "keep" else None
        kept: dict[Unit, Kept] = {}
        for unit, at in zip(units, index_N.split(list(units.values())), strict=True):
            kept[unit] = Kept(rows_NM=None if rows_NM is None else rows_NM.index_select(0, at))
            if hidden_NG is not None:
                kept[unit].hidden = Hidden(tensors=[hidden_NG.index_select(0, at)])
        weight_received = None
        if cut.weights is not None:
            weight_N = steps.row_weight(journey).to(inputs.weight_TK.dtype)
            weight_received = weight_N.index_select(0, index_N[: sum(received)])
        y_TM = steps.product_combine(journey, active_NH, w2, b2)
        return Forwarded(y_TM=y_TM, kept=kept, weight_received=weight_received)

    return forward


def unit_index(recv_nWE: Tensor, rank: int, *, num_pieces: int, num_rows: int) -> Tensor:
    """(N,) where the rows of a pass's units stand among those of a fused dispatch: first what each chunk
    received, by expert and source rank; then the rows that stay, by piece and expert, in token order. With no
    pieces the rows of this rank itself are received like all others.

    Example: one expert, rank 0 of two, two chunks and pieces, a row from each rank in each: the fused order
    is (rank 0, chunk 0), (0, 1), (1, 0), (1, 1), and the units' rows stand at 2, 3, 0, 1.
    """
    n, num_ranks, num_experts = recv_nWE.shape

    def along(numbers: Tensor, dim: int) -> Tensor:
        return numbers.view([-1 if at == dim else 1 for at in range(3)])

    ascending = torch.arange(max(n, num_ranks, num_experts), device=recv_nWE.device)
    expert, chunk = along(ascending[:num_experts], 0), along(ascending[:n], 2)
    source = along((ascending[:num_ranks] + rank) % num_ranks, 1)
    # Of the rows from one source for an expert in a chunk, a block in both orders: which block of the units.
    place_EWn = (chunk * num_experts + expert) * num_ranks + source
    if num_pieces:
        piece = (chunk - (n - num_pieces)).clamp(min=0)  # `pmoe.ordering.sorted.piece_of`
        stays = n * num_experts * num_ranks + (piece * num_experts + expert) * n + chunk
        place_EWn = torch.where(source == rank, stays, place_EWn)
    counts_EWn = recv_nWE.roll(-rank, 1).permute(2, 1, 0)
    place_N = place_EWn.reshape(-1).repeat_interleave(counts_EWn.reshape(-1), output_size=num_rows)
    return place_N.argsort(stable=True)
