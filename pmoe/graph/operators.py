"""Stages of a layer as functional ``torch.library`` operators, which the passes cut and move.

    order                      sorts the T * K slots of a rank by expert
    pack                       copies tokens to rows, those that travel and those that stay
    experts                    computes the rows
    join                       sums the rows of each token
    experts_input_gradient     gradient of the rows, for which the owners of the tokens wait
    experts_weight_gradient    gradient of the parameters, for which no all-to-all waits (Lancet, section 4)

`pack` and `join` are each other's gradient. All-to-alls are in `pmoe.graph.messages`. Numbers of rows are
exact: in the graph they are sizes that are known only when it runs.
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
"""The number of each captured layer."""

LAYERS: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""The layer of each number."""

_NEXT = itertools.count()


def number_of(layer: nn.Module) -> int:
    """Returns the number that stands for a layer among an operator's arguments, which cannot be modules."""
    if layer not in NUMBERS:
        NUMBERS[layer] = next(_NEXT)
        LAYERS[NUMBERS[layer]] = layer
    return NUMBERS[layer]


def modules_of(layer: int) -> LayerModules:
    """Returns the modules and options of the layer with this number."""
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
    """Sorts the slots of a rank by expert, and drops those beyond the capacity.

    expert_TK: (T, K) int64, the expert of each slot.
    keep_TK: (T, K) bool, slots that the gate keeps; None if it keeps all.
    logits: the router's, which are checked to be finite; None checks nothing.
    used_E: (E,) int64, rows that earlier parts of the batch gave each expert.
    capacity: rows of an expert at most; -1 for no limit. Ignored if the gate gives keep_TK.
    layer: the layer's number.

    Returns

        slot      (S,) slots in sorted order: | travel, by expert | stay, by expert | dropped |
        position  (S,) its inverse: where the row of each slot stands
        counts    (E + 1,) int64, kept rows of each expert; behind them 0 or the code of a `Fault`
        used_E    (E,) with these rows added, for the next part of the batch (Lancet, section 2.3)
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
    """Copies values to rows; returns the rows that travel and the rows that stay, (N, ...) each.

    values: (S / top_k, ...), one value for every ``top_k`` slots: a token with its K choices, or, with
        top_k = 1, a slot.
    slot, position: (S,), as `order` returns them.
    send_WE, own_1E: as `exchange_counts` returns them.
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
    """Returns the gradient of a value: the sum of its rows' gradients."""
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
    """Returns (num_values, ...): for each value the sum of its slots' rows, the reverse of `pack`.

    travelled, stayed: (N, ...) each, rows that came home and rows that never left. Dropped slots have no
        rows and count as zeros.
    slot, position, send_WE, own_1E, top_k: as in `pack`.
    num_values: S / top_k, which the trace cannot derive.
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
    """Returns the gradients of the rows: each is a copy of its value's gradient."""
    travelled, stayed = pack(grad, *ctx.saved_tensors, ctx.top_k)
    return travelled, stayed, None, None, None, None, None, None


join.register_autograd(_join_backward, setup_context=_join_setup)


# ---- experts


def _groups(counts_RE: Tensor, rows: Tensor) -> RowGroups:
    """Returns where each expert's rows begin and end. counts_RE: (R, E_local), on the host."""
    counts_E = counts_RE.sum(0)
    ends = counts_E.cumsum(0).int().to(rows.device, non_blocking=True) if rows.is_cuda else None
    return RowGroups(counts=tuple(counts_E.tolist()), ends=ends)


@torch.library.custom_op("pmoe_graph::experts", mutates_args=())
def experts(
    rows: Tensor, weight_N: Tensor, counts_RE: Tensor, parameters: Sequence[Tensor], layer: int
) -> tuple[Tensor, Tensor]:
    """Computes rows that are sorted by expert; returns T_DO (N, M) and T_M, which backward needs.

    rows: (N, M), T_DI.
    weight_N: (N,), the routing weight of each row, which multiplies the output.
    counts_RE: (R, E_local), rows of each sender and expert.
    parameters: as `Experts.operands` gives them.
    layer: the layer's number.
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
    """Returns the gradients of rows and weight_N, and three tensors for `experts_weight_gradient`.

    grad: (N, M), the gradient of T_DO.
    rows, weight_N, counts_RE, parameters, layer: as in `experts`.
    hidden: T_M, as `experts` returned it.

    The three tensors are the gradient of T_M, the activated hidden, and ``grad`` times the routing weight.
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
    return tuple(torch.empty_like(each) for each in (rows, weight_N, hidden, active, grad))


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
    """Returns the parameters' gradients, summed over blocks of rows.

    rows, grad_hidden, active, grad_out, counts_RE: one tensor for each block, as `experts` took and
        `experts_input_gradient` returned them.

    Under `pmoe.parallelize` the gradients are then scaled and reduced as it says.
    """
    layer_experts = modules_of(layer).experts
    sums = [GradientSum(each, len(rows)) for each in parameters]
    for block in zip(rows, grad_hidden, active, grad_out, counts_RE, strict=True):
        *pending, counts = block
        layer_experts.weight_gradient(tuple(pending), _groups(counts, block[0]), sums)
    gradients = [each.result() for each in sums]
    if layer_experts.reduce is not None:
        layer_experts.reduce(gradients)
    return gradients


@experts_weight_gradient.register_fake
def _(*given: Any) -> list[Tensor]:
    return [torch.empty_like(each) for each in given[-2]]


def _experts_setup(ctx: Any, inputs: Any, output: Any) -> None:
    rows, weight_N, counts_RE, parameters, ctx.layer = inputs
    ctx.save_for_backward(rows, weight_N, output[1], counts_RE, *parameters)


def _experts_backward(ctx: Any, grad: Tensor, _hidden: Tensor) -> Any:
    """Returns the gradients, by two operators: the second can be moved to where an all-to-all runs."""
    rows, weight_N, hidden, counts_RE, *parameters = ctx.saved_tensors
    grad_rows, grad_weight_N, *pending = experts_input_gradient(
        grad, rows, weight_N, hidden, counts_RE, parameters, ctx.layer
    )
    blocks = [[each] for each in (rows, *pending, counts_RE)]
    return (
        grad_rows, grad_weight_N, None,
        experts_weight_gradient(*blocks, parameters, ctx.layer), None,
    )  # fmt: skip


experts.register_autograd(_experts_backward, setup_context=_experts_setup)
