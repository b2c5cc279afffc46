"""Stages of a MoELayer as functional ``torch.library`` operators, which the backend can cut and move.

A slot is one choice of one token: a rank with T tokens and K experts for each has T * K slots.

    order                      sorts the slots of a rank by expert
    pack                       copies tokens to rows: rows for other ranks, and rows that stay on this rank
    experts                    computes the rows
    join                       sums the rows of each token
    experts_input_gradient     gradient of the rows, which is sent back to the ranks of the tokens
    experts_weight_gradient    gradient of the parameters, which no all-to-all needs (Lancet, section 4)

The gradient of `pack` is `join`, and the other way round. All-to-alls are in `pmoe.graph.messages`. Rows are
not padded: their number is a size that is known only when the graph runs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pmoe.call.modules import LayerModules
from pmoe.call.shape_run import is_shape_run
from pmoe.comm.counts import Fault
from pmoe.experts.base import ExpertRows, Hidden
from pmoe.experts.products import GradientSum, RowGroups
from pmoe.gates.capacity import within_capacity
from pmoe.ordering.sorted import count_rows, sort_rows

NUMBERS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""The number of each captured layer, by which operators name the layer (`number_of`)."""

LAYERS: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""The captured layer of each number, the reverse of `NUMBERS`."""

_NEXT = itertools.count()


def number_of(layer: nn.Module) -> int:
    """Returns the number that stands for a layer in operators, which cannot take a module as an argument.

    A layer gets its number at the first call of this function.
    """
    if layer not in NUMBERS:
        NUMBERS[layer] = next(_NEXT)
        LAYERS[NUMBERS[layer]] = layer
    return NUMBERS[layer]


def modules_of(layer: int) -> LayerModules:
    """Returns the modules and options of a layer.

    layer: the number that stands for the layer (`number_of`).
    """
    modules: LayerModules = LAYERS[layer].layer_modules  # type: ignore[assignment]
    return modules


# ---- order


@torch.library.custom_op("pmoe_graph::order", mutates_args=())
def order(
    expert_TK: Tensor,
    keep_TK: Tensor | None,
    logits: Tensor | None,
    used_E: Tensor,
    capacity: int,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts a rank's slots by expert, and drops the slots beyond the experts' capacity.

    A slot is one choice of one token. There are T tokens, K choices of each token, S = T * K slots and E
    experts of all ranks.

    expert_TK: (T, K) int64, the expert of each slot.
    keep_TK: (T, K) bool, True for the slots that the gate keeps; None if the gate keeps all slots.
    logits: the router's logits, of any shape. Logits that are not finite are a fault. None checks nothing.
    used_E: (E,) int64, the number of slots of each expert in earlier parts of the batch.
    capacity: largest number of rows of an expert; -1 for no limit. Ignored if keep_TK is not None.
    layer: the number that stands for the layer (`number_of`).

    Returns

        slot      (S,) slots in sorted order: | sent, by expert | stay on this rank, by expert | dropped |
        position  (S,) the inverse: the position of each slot in the sorted order
        counts    (E + 1,) int64: the number of rows of each expert, without dropped rows. The last element is
                  the code of a `Fault`, or 0 for no fault
        used_E    (E,) int64: the argument ``used_E`` for the next part of the batch (Lancet, section 2.3). It
                  is this call's argument, plus the slots of this part if ``capacity`` limits the rows
    """
    modules = modules_of(layer)
    used_E = used_E.clone()
    if capacity >= 0 and keep_TK is None:
        keep_TK, used_E = within_capacity(expert_TK, capacity, used_E)
    num_experts = modules.options.num_experts
    rows = sort_rows(expert_TK, keep_TK, 1, num_experts, modules.staying, 1)
    counts_E = count_rows(expert_TK, keep_TK, 1, num_experts)[0]
    fault = counts_E.new_zeros(1)
    if logits is not None and not is_shape_run():
        fault = (~logits.isfinite().all()).long().view(1) * int(Fault.NOT_FINITE)
    return rows.slot, rows.position, torch.cat([counts_E, fault]), used_E


@order.register_fake
def _(expert_TK: Tensor, keep_TK: Any, logits: Any, used_E: Tensor, *_: Any) -> tuple[Tensor, ...]:
    sizes = (expert_TK.numel(), expert_TK.numel(), used_E.shape[0] + 1)
    return *map(expert_TK.new_empty, sizes), torch.empty_like(used_E)


# ---- tokens to rows, and rows to tokens


@torch.library.custom_op("pmoe_graph::pack", mutates_args=())
def pack(
    values: Tensor, slot: Tensor, position: Tensor, send_WE: Tensor, own_1E: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """Copies each token to one row for each of its experts. Returns (rows to be sent, rows that stay).

    A row stays on this rank if its expert is on this rank. Each of the two results is a tensor (N, ...) with
    its own number of rows N. A slot is one choice of one token. S is the number of slots, W the number of
    ranks, E_local the number of experts of a rank.

    values: (S / top_k, ...), one value for every ``top_k`` slots. For tokens, ``top_k`` is the number of
        choices of a token. For values that each slot has of its own, such as routing weights, it is 1.
    slot, position: (S,), the sorted slots and the inverse, as `order` returns them.
    send_WE, own_1E: (W, E_local) and (1, E_local), numbers of rows that are sent and that stay, for each
        expert (`exchange_counts`).
    top_k: number of slots that share a value.
    """
    travel, stay = int(send_WE.sum()), int(own_1E.sum())
    source = slot[: travel + stay]
    source = source if top_k == 1 else source // top_k
    return values.index_select(0, source[:travel]), values.index_select(0, source[travel:])


@pack.register_fake
def _(values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    context = torch.library.get_ctx()
    travel, stay = context.new_dynamic_size(), context.new_dynamic_size()
    return values.new_empty(travel, *values.shape[1:]), values.new_empty(stay, *values.shape[1:])


def _pack_setup(ctx: Any, inputs: Any, output: Any) -> None:
    values, *saved, ctx.top_k = inputs
    ctx.save_for_backward(*saved)
    ctx.num_values = values.shape[0]


def _pack_backward(ctx: Any, travel: Tensor, stay: Tensor) -> Any:
    """Returns the gradients of the values that `pack` copied to rows.

    The gradient of a value is the sum of the gradients of all rows to which it was copied.
    """
    grad = join(travel, stay, *ctx.saved_tensors, ctx.top_k, ctx.num_values)
    return grad, None, None, None, None, None


pack.register_autograd(_pack_backward, setup_context=_pack_setup)


@torch.library.custom_op("pmoe_graph::join", mutates_args=())
def join(
    travelled: Tensor,
    stayed: Tensor,
    slot: Tensor,
    position: Tensor,
    send_WE: Tensor,
    own_1E: Tensor,
    top_k: int,
    num_values: int,
) -> Tensor:
    """Returns the sum of each token's rows, (num_values, ...), after experts have computed the rows.

    The function is the reverse of `pack`, which copies each token to its rows. A slot is one choice of one
    token, and S the number of slots. A dropped slot has no row and counts as zeros.

    travelled: (N, ...), the N rows that came back from other ranks.
    stayed: (N, ...), the rows that never left this rank, with their own number N.
    slot, position: (S,), the sorted slots and the inverse, as `order` returns them.
    send_WE, own_1E: row counts, (W, E_local) and (1, E_local) for W ranks and E_local experts of a rank. They
        are needed only in backward.
    top_k: number of slots of each token.
    num_values: number of tokens, S / top_k. Tracing cannot derive it from the other arguments.
    """
    rows = [travelled, stayed]
    kept = travelled.shape[0] + stayed.shape[0]
    if kept < position.shape[0]:  # one row of zeros stands for all dropped slots
        rows.append(travelled.new_zeros(1, *travelled.shape[1:]))
        position = position.clamp(max=kept)
    chosen = torch.cat(rows).index_select(0, position)
    return chosen if top_k == 1 else chosen.unflatten(0, (-1, top_k)).sum(1)


@join.register_fake
def _(travelled: Tensor, stayed: Tensor, *others: Any) -> Tensor:
    return travelled.new_empty(others[-1], *travelled.shape[1:])


def _join_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, *saved, ctx.top_k, _ = inputs
    ctx.save_for_backward(*saved)


def _join_backward(ctx: Any, grad: Tensor) -> Any:
    """Returns the gradients of the rows: each row gets the gradient of its token's sum."""
    travelled, stayed = pack(grad, *ctx.saved_tensors, ctx.top_k)
    return travelled, stayed, None, None, None, None, None, None


join.register_autograd(_join_backward, setup_context=_join_setup)


# ---- experts


def _groups(counts_RE: Tensor, rows: Tensor) -> RowGroups:
    """Returns where the rows of each expert begin and end among rows that are sorted by expert.

    counts_RE: (R, E_local) on the host, the number of rows from each of R senders for each of E_local experts
        of this rank.
    rows: (N, ...), the N sorted rows. Only their device is read.
    """
    counts_E = counts_RE.sum(0)
    ends = counts_E.cumsum(0).int().to(rows.device, non_blocking=True) if rows.is_cuda else None
    return RowGroups(counts=tuple(counts_E.tolist()), ends=ends)


@torch.library.custom_op("pmoe_graph::experts", mutates_args=())
def experts(
    rows: Tensor, weight_N: Tensor, counts_RE: Tensor, parameters: Sequence[Tensor], layer: int
) -> tuple[Tensor, Tensor]:
    """Computes rows with their experts. Returns the outputs T_DO (N, M), and T_M for backward.

    N is the number of rows, M = d_model. T_M is the hidden activation of the experts before the nonlinearity.

    rows: (N, M), the dispatched input T_DI, sorted by expert.
    weight_N: (N,), the routing weight of each row, by which the row's output is multiplied.
    counts_RE: (R, E_local), the number of rows from each of R senders for each of E_local experts.
    parameters: the experts' parameters, in the order of `Experts.operands`.
    layer: the number that stands for the layer (`number_of`).
    """
    expert_rows = ExpertRows(rows, _groups(counts_RE, rows), parameters)
    out, hidden = modules_of(layer).experts.compute(expert_rows, weight_N)
    assert hidden is not None
    return out, hidden.tensors[0]


@experts.register_fake
def _(
    rows: Tensor, weight_N: Tensor, counts_RE: Tensor, parameters: Any, layer: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), rows.new_empty(rows.shape[0], parameters[0].shape[1])


@torch.library.custom_op("pmoe_graph::experts_input_gradient", mutates_args=())
def experts_input_gradient(
    grad: Tensor,
    rows: Tensor,
    weight_N: Tensor,
    hidden: Tensor,
    counts_RE: Tensor,
    parameters: Sequence[Tensor],
    layer: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of the experts' input rows and routing weights, and three more tensors.

    T_M is the hidden activation of the experts before the nonlinearity. The last three results are inputs of
    `experts_weight_gradient`: the gradient of T_M, T_M after the nonlinearity, and ``grad`` times the routing
    weight. N is the number of rows, M = d_model.

    grad: (N, M), the gradient of the experts' output T_DO.
    rows, weight_N, counts_RE, parameters, layer: the arguments of `experts` in the forward pass.
    hidden: the hidden activation T_M, which `experts` returned.
    """
    expert_rows = ExpertRows(rows, _groups(counts_RE, rows), parameters)
    out, grad_weight_N, (_, grad_hidden, active, grad_out) = modules_of(layer).experts.input_gradient(
        grad.clone(), expert_rows, weight_N, Hidden(tensors=[hidden])
    )
    return out, grad_weight_N, grad_hidden, active, grad_out


@experts_input_gradient.register_fake
def _(grad: Tensor, rows: Tensor, weight_N: Tensor, hidden: Tensor, *others: Any) -> tuple[Tensor, ...]:
    parameters = others[1]
    active = rows.new_empty(rows.shape[0], parameters[1].shape[2])
    return tuple(torch.empty_like(tensor) for tensor in (rows, weight_N, hidden, active, grad))


@torch.library.custom_op("pmoe_graph::experts_weight_gradient", mutates_args=())
def experts_weight_gradient(
    rows: Sequence[Tensor],
    grad_hidden: Sequence[Tensor],
    active: Sequence[Tensor],
    grad_out: Sequence[Tensor],
    counts_RE: Sequence[Tensor],
    parameters: Sequence[Tensor],
    layer: int,
) -> list[Tensor]:
    """Returns the gradients of the experts' parameters, each summed over several blocks of rows.

    A block holds the rows of one call of `experts`. Rows that stayed on their rank and rows from other ranks
    are different blocks.

    rows, counts_RE: for each block, the arguments of `experts` with these names.
    grad_hidden, active, grad_out: for each block, the last three results of `experts_input_gradient`.
    parameters: the experts' parameters, in the order of `Experts.operands`.
    layer: the number that stands for the layer (`number_of`).

    If `pmoe.parallelize` has set the layer's experts to reduce their gradients over data-parallel ranks, the
    result is also scaled and summed over these ranks.
    """
    layer_experts = modules_of(layer).experts
    sums = [GradientSum(parameter, len(rows)) for parameter in parameters]
    for block in zip(rows, grad_hidden, active, grad_out, counts_RE, strict=True):
        *pending, counts = block
        layer_experts.weight_gradient(tuple(pending), _groups(counts, block[0]), sums)
    gradients = [gradient_sum.result() for gradient_sum in sums]
    if layer_experts.reduce is not None:
        layer_experts.reduce(gradients)
    return gradients


@experts_weight_gradient.register_fake
def _(*arguments: Any) -> list[Tensor]:
    return [torch.empty_like(parameter) for parameter in arguments[-2]]


def _experts_setup(ctx: Any, inputs: Any, output: Any) -> None:
    rows, weight_N, counts_RE, parameters, ctx.layer = inputs
    ctx.save_for_backward(rows, weight_N, output[1], counts_RE, *parameters)


def _experts_backward(ctx: Any, grad: Tensor, _hidden: Tensor) -> Any:
    """Returns the gradients of the arguments of `experts`. Two operators compute them.

    `experts_input_gradient` computes the gradients of the rows. They are needed at once, because they are
    sent back to other ranks. `experts_weight_gradient` computes the gradients of the parameters. It can run
    later, while an all-to-all runs.
    """
    rows, weight_N, hidden, counts_RE, *parameters = ctx.saved_tensors
    grad_rows, grad_weight_N, *pending = experts_input_gradient(
        grad, rows, weight_N, hidden, counts_RE, parameters, ctx.layer
    )
    blocks = [[tensor] for tensor in (rows, *pending, counts_RE)]
    return (
        grad_rows, grad_weight_N, None,
        experts_weight_gradient(*blocks, parameters, ctx.layer), None,
    )  # fmt: skip


experts.register_autograd(_experts_backward, setup_context=_experts_setup)
