"""Partition axes (Lancet, section 5.2): the dimension along which each tensor of a graph is cut.

Each operator has a rule. It lists combinations of axes, of the inputs and of the result, for which the
operator on part p of its inputs gives part p of its result. For the product y = x @ w they are:

    axis of x     axis of w     axis of y
    0 (rows)      None          0
    None          1 (columns)   1
    1             0             SUM: each part gives a tensor of the whole shape, and y is their sum

`infer` follows the rules through a graph; a tensor has one axis. A user's operator gets its rule by
``RULES[torch.ops.my.op.default] = rule``. An operator is not cut if it has no rule, or if no combination
of its rule fits the axes of its inputs. It then ends a range.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pmoe.graph.lower import NUMBERS, has_shape

aten: Any = torch.ops.aten
moe: Any = torch.ops.pmoe_graph

IRREGULAR = "irregular"
"""The axis of routed rows: a part has as many rows as the routing gives it (the paper's A_irr)."""

SUM = "sum"
"""The axis of parameters' gradients: each part gives a tensor of the whole shape, and these are added."""

Axis = int | str | None
"""The axis of a tensor: a dimension, `IRREGULAR`, `SUM`, or None if every part takes the whole tensor."""


@dataclass(frozen=True)
class Combination:
    """Axes of an operator's inputs and of its result that belong together.

    inputs: the axis of each tensor among the arguments, in order.
    result: the axis of the result; a tuple with one axis for each result if there are several.
    """

    inputs: tuple[Axis, ...]
    result: Axis | tuple[Axis, ...]


Rule = Callable[[fx.Node], Iterable[Combination]]
"""A function from a node to its combinations, by its shapes and arguments. The first that fits holds."""

RULES: dict[object, Rule] = {}
"""The rule of each operator. Pointwise operators need none: they are recognised by their tag."""


def rule_of(*targets: object) -> Callable[[Rule], Rule]:
    """Returns a decorator that enters a rule in `RULES` for these operators."""

    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, rule))
        return rule

    return add


def tensors(node: fx.Node) -> list[fx.Node]:
    """Returns the tensors among a node's arguments, in order; one that is passed twice is listed twice."""
    nodes: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda source: nodes.append(source) or source)  # type: ignore[func-returns-value]
    return [source for source in nodes if not _is_number(source)]


def _is_number(node: fx.Node) -> bool:
    """Returns whether the node's value is a number, such as a size, and no tensor."""
    return isinstance(node.meta.get("val"), NUMBERS)


def infer(
    graph: fx.Graph, cut: Mapping[fx.Node, Axis], free: Iterable[fx.Node] = ()
) -> tuple[dict[fx.Node, Any], dict[fx.Node, str]]:
    """Returns the axis of each node, and for each node that cannot be cut the reason.

    cut: the axes of the graph's inputs. Inputs that it leaves out, such as parameters, are whole.
    free: inputs without a known axis. Each takes the axis that its first user asks for.

    The result of an operator that cannot be cut is whole, but may be cut behind it: a new range begins there.
    """
    inference = _Inference(cut, free)
    for node in graph.nodes:
        inference.add(node)
    return inference.axes, inference.refused


def follow(
    body: Iterable[fx.Node], cut: Mapping[fx.Node, Axis], free: Iterable[fx.Node] = ()
) -> dict[fx.Node, Any]:
    """Returns the axes of the instructions ``body``, all of which must be cut, and of their inputs.

    cut, free: as in `infer`, for tensors that are computed before the body.

    Raises RefusedError if an instruction cannot be cut.
    """
    inference = _Inference(cut, free)
    for node in body:
        for source in node.all_input_nodes:
            inference.axes.setdefault(source, cut.get(source))
        inference.axes[node] = inference.axis(node)
    return inference.axes


class RefusedError(Exception):
    """An instruction cannot be cut as its inputs are."""


class _Inference:
    """The axes of a graph's nodes, found one node after the other.

    axes: the axis of each node; for a node with several results a tuple.
    refused: the reason for each node that cannot be cut.

    A tensor is free while its axis is open: it keeps the first that an operator asks for. Free are

    - inputs that the caller names,
    - results of operators that could not be cut, and of operators that take no tensor,
    - results of operators on whole tensors, some of which are free.
    """

    def __init__(self, cut: Mapping[fx.Node, Axis], free: Iterable[fx.Node]) -> None:
        self._cut = cut
        self._free = {node for node in free if cut.get(node) is None}
        self.axes: dict[fx.Node, Any] = {}
        self.refused: dict[fx.Node, str] = {}

    def add(self, node: fx.Node) -> None:
        """Stores the node's axis. A node that cannot be cut is stored with the reason, and becomes free."""
        if node.op != "call_function":
            self.axes[node] = self._cut.get(node)
            return
        try:
            self.axes[node] = self.axis(node)
        except RefusedError as error:
            self.axes[node] = self._behind(node)
            self.refused[node] = str(error)
            self._free.add(node)

    def _behind(self, node: fx.Node) -> Any:
        """Returns the axis along which the result of an operator that cannot be cut is cut behind it.

        It is the axis of the first input that is cut along a dimension, if the result has that input's shape;
        None otherwise.
        """
        source = next((tensor for tensor in tensors(node) if isinstance(self.axes[tensor], int)), None)
        if source is None:
            return None
        results = node.meta["val"]
        axes = [
            self.axes[source] if has_shape(tensor, shape(source)) else None
            for tensor in (results if isinstance(results, (tuple, list)) else [results])
        ]
        return tuple(axes) if isinstance(results, (tuple, list)) else axes[0]

    def axis(self, node: fx.Node) -> Any:
        """Returns the axis of a node's result; a tuple for several. Raises RefusedError if it is not cut."""
        inputs = tensors(node)
        axes = self.axes
        if _is_number(node):
            return IRREGULAR if any(axes[source] == IRREGULAR for source in node.all_input_nodes) else None
        if not inputs:
            self._free.add(node)
        if node.target is operator.getitem:
            if inputs[0] in self._free:
                self._free.add(node)
            axis_of_source = axes[inputs[0]]
            index = _number(node, 1)
            return axis_of_source[index] if isinstance(axis_of_source, tuple) else axis_of_source
        # An operator on whole tensors is computed once, whole. Not `order`, whose inputs may be free: its
        # results could not be cut into those of parts, so its rule must cut the inputs, or refuse.
        if all(axes[source] is None for source in inputs) and node.target is not moe.order.default:
            if not self._free.isdisjoint(inputs):
                self._free.add(node)
            return None
        for combination in self._rule(node)(node):
            if all(map(self._fits, inputs, combination.inputs)):
                for source, axis in zip(inputs, combination.inputs, strict=True):
                    axes[source] = axis
                    self._free.discard(source)  # a tensor keeps the axis of its first use
                return combination.result
        raise RefusedError(f"{node.target} cannot be cut along {[axes[source] for source in inputs]}")

    def _rule(self, node: fx.Node) -> Rule:
        """Returns the rule of a node's operator. Raises RefusedError if it has none."""
        rule = RULES.get(node.target) or (_pointwise if _is_pointwise(node.target) else None)
        if rule is None:
            raise RefusedError(f"{node.target} has no rule")
        return rule

    def _fits(self, node: fx.Node, axis: Axis) -> bool:
        """Returns whether a tensor has this axis, or is free to take it.

        A free tensor cannot become a `SUM`: it exists whole, not as summands.
        """
        known = self.axes[node]
        return known == axis or (known is None and node in self._free and axis != SUM)


# ---- shapes


def shape(node: fx.Node) -> tuple[int, ...]:
    """Returns the shape of a node's tensor. Sizes may be symbols."""
    value: Tensor = node.meta["val"]
    return tuple(value.shape)


def _dims(node: fx.Node) -> range:
    """Returns the dimensions of a node's tensor, from 0."""
    return range(len(shape(node)))


def _number(node: fx.Node, place: int, default: Any = None) -> Any:
    """Returns the argument at position ``place``, or ``default`` if the call has fewer."""
    return node.args[place] if len(node.args) > place else default


def _argument(node: fx.Node, name: str) -> Any:
    """Returns an operator's argument by its name: the value in the call, or the schema's default."""
    schema = node.target._schema  # type: ignore[union-attr]
    index, argument = next((index, each) for index, each in enumerate(schema.arguments) if each.name == name)
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, argument.default_value)


def _alike(node: fx.Node, but: Iterable[int]) -> Iterator[Combination]:
    """Yields combinations that cut all tensors and all results along the same dimension.

    but: dimensions that are left out, because the operator works along them. They may be negative.
    """
    first, *_ = inputs = tensors(node)
    rank = len(shape(first))
    results = node.meta["val"]
    without = {index % rank for index in but}
    for dim in range(rank):
        if dim not in without:
            result = (dim,) * len(results) if isinstance(results, (list, tuple)) else dim
            yield Combination((dim,) * len(inputs), result)


# ---- rules. Each is for the operators that its decorator names


def _is_pointwise(target: object) -> bool:
    """Returns whether torch says that an operator is pointwise. One that draws random numbers does not count.

    A dropout in parts would draw other numbers than the dropout of the whole batch.
    """
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else []
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _pointwise(node: fx.Node) -> Iterator[Combination]:
    """Yields combinations of an operator that broadcasts its inputs.

    An input that is broadcast along the dimension, because it has size 1 there or lacks it, stays whole.
    """
    operands = tensors(node)
    if any(isinstance(shape(each)[0] if shape(each) else 1, torch.SymInt) for each in operands):
        yield Combination((IRREGULAR,) * len(operands), IRREGULAR)
    size = shape(node)
    for dim in _dims(node):
        inputs = []
        for each in operands:
            own_dim = dim - (len(size) - len(shape(each)))
            inputs.append(own_dim if own_dim >= 0 and shape(each)[own_dim] != 1 else None)
        if any(each is not None for each in inputs):
            yield Combination(tuple(inputs), dim)


@rule_of(
    aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.copy.default
)
def _copied(node: fx.Node) -> Iterator[Combination]:
    """Yields combinations of an operator that copies or converts. Copies of summands are summands."""
    yield from _pointwise(node)
    yield Combination((SUM,), SUM)


ALWAYS: dict[object, list[Combination]] = {
    aten.mm.default: [Combination((0, None), 0), Combination((None, 1), 1), Combination((1, 0), SUM)],
    aten.bmm.default: [Combination((0, 0), 0), Combination((1, None), 1), Combination((None, 2), 2)],
    moe.exchange_counts.default: [Combination((IRREGULAR,) * 2, (IRREGULAR,) * 4)],
    moe.pack.default: [Combination((0, *(IRREGULAR,) * 4), (IRREGULAR,) * 2)],
    moe.join.default: [Combination((IRREGULAR,) * 6, 0)],
}
"""Combinations of operators whose combinations do not depend on shapes or arguments."""
RULES.update({target: lambda _, found=found: found for target, found in ALWAYS.items()})  # type: ignore[misc]


@rule_of(aten.addmm.default)
def _addmm(node: fx.Node) -> Iterator[Combination]:
    """Yields rows or columns of the product. Not a sum: each part would add the bias."""
    bias = len(shape(tensors(node)[0]))
    yield Combination((0 if bias == 2 else None, 0, None), 0)
    yield Combination((bias - 1, None, 1), 1)


@rule_of(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _norm(node: fx.Node) -> Iterator[Combination]:
    """Yields the dimensions before those that are normalized. Weight and bias stay whole."""
    operands = tensors(node)
    normalized = len(_number(node, 1))
    for dim in range(len(shape(operands[0])) - normalized):
        yield Combination((dim, *(None for _ in operands[1:])), (dim,) * len(node.meta["val"]))


@rule_of(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def _norm_backward(node: fx.Node) -> Iterator[Combination]:
    """Yields the dimensions before those that are normalized. Gradients of weight and bias are sums."""
    operands = tensors(node)
    normalized = len(_number(node, 2))
    rank = len(shape(operands[0]))
    for dim in range(rank - normalized):
        if any(size != 1 for size in shape(operands[0])[:dim]):
            break  # the kernels read mean and rstd as contiguous, which they are not if cut here
        inputs = tuple(dim if len(shape(operand)) == rank else None for operand in operands)
        yield Combination(inputs, (dim, *(SUM for _ in node.meta["val"][1:])))


@rule_of(aten.embedding.default)
def _embedding(node: fx.Node) -> Iterator[Combination]:
    """Yields the dimensions of the indices. The table stays whole."""
    for dim in _dims(tensors(node)[1]):
        yield Combination((None, dim), dim)


@rule_of(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)
def _attention(node: fx.Node) -> Iterator[Combination]:
    """Yields sequences and heads, if there are only queries, keys and values, and no dropout.

    The first two results are the output and the logarithms of sums; the others hold random states.
    """
    dropout = _number(node, 3, 0.0)
    if len(tensors(node)) == 3 and isinstance(dropout, float) and dropout == 0.0:
        results = len(node.meta["val"])
        for dim in (0, 1):  # dimension 0 is the sequences, 1 the heads
            yield Combination((dim,) * 3, (dim, dim, *(None for _ in range(results - 2))))


@rule_of(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
def _attention_backward(node: fx.Node) -> Iterator[Combination]:
    """Yields sequences, if there is no dropout.

    The first six tensors are cut: the output's gradient, queries, keys, values, the output, and the
    logarithms of its sums. The two that may follow belong to dropout and stay whole.
    """
    count = len(tensors(node))
    if _argument(node, "dropout_p") == 0.0 and count in (6, 8):
        inputs = (*(0 for _ in range(6)), *(None for _ in range(count - 6)))
        yield Combination(inputs, (0,) * len(node.meta["val"]))


@rule_of(
    *(aten._softmax.default, aten._log_softmax.default, aten.cumsum.default, aten.topk.default),
    *(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
    *(aten.sort.default, aten.sort.stable, aten.gather.default, aten.scatter.src, aten.scatter.value),
    *(aten.scatter_add.default, aten.slice.Tensor, aten.slice_scatter.default, aten.slice_backward.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.cat.default),
)
def _along(node: fx.Node) -> Iterator[Combination]:
    """Yields every dimension but the one along which the operator works."""
    yield from _alike(node, [_argument(node, "dim")])


@rule_of(
    *(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.logsumexp.default, aten.var.correction),
    aten.argmax.default,
)
def _reduce(node: fx.Node) -> Iterator[Combination]:
    """Yields the dimensions that are kept. A sum may also be cut along one that it removes, as a `SUM`."""
    rank = len(shape(tensors(node)[0]))
    dims = _argument(node, "dim")
    listed = [dims] if isinstance(dims, int) else dims
    removed = {each % rank for each in listed} if listed else set(range(rank))
    for each in _alike(node, removed):
        dim = int(each.inputs[0])  # type: ignore[arg-type]
        num_removed = 0 if _argument(node, "keepdim") else sum(removed_dim < dim for removed_dim in removed)
        yield Combination(each.inputs, dim - num_removed)
    if node.target is aten.sum.dim_IntList:
        for dim in removed:
            yield Combination((dim,), SUM)


@rule_of(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
def _view(node: fx.Node) -> Iterator[Combination]:
    """Yields pairs of a dimension of the source and one of the result whose parts are the same elements.

    They are a pair if the sizes before them have the same product: for (4, 6) viewed as (2, 2, 6), 0 and 0,
    1 and 2. A dimension of size 1 has no parts. ``expand`` keeps every dimension that it does not expand.
    """
    source, result = shape(tensors(node)[0]), shape(node)
    if node.target is aten.expand.default:
        offset = len(result) - len(source)
        for dim, size in enumerate(source):
            if size == result[dim + offset] and size != 1:
                yield Combination((dim,), dim + offset)
        return
    for dim, size in enumerate(source):
        before = math.prod(source[:dim])
        for other, other_size in enumerate(result):
            if size != 1 and other_size != 1 and math.prod(result[:other]) == before:
                yield Combination((dim,), other)
                break
    yield Combination((SUM,), SUM)


@rule_of(aten.new_zeros.default)
def _new(node: fx.Node) -> Iterator[Combination]:
    """Yields the dimensions whose size the new tensor shares with its source."""
    for dim, sizes in enumerate(zip(shape(tensors(node)[0]), shape(node), strict=False)):
        if sizes[0] == sizes[1]:
            yield Combination((dim,), dim)


@rule_of(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(node: fx.Node) -> Iterator[Combination]:
    """Yields every dimension, with its place in the result."""
    rank = len(shape(node))
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [index % rank for index in _number(node, 1)]
    else:
        first, second = _number(node, 1, 0) % rank, _number(node, 2, rank - 1) % rank
        order[first], order[second] = order[second], order[first]
    for dim in range(rank):
        yield Combination((dim,), order.index(dim))
    yield Combination((SUM,), SUM)


@rule_of(
    *(aten.unsqueeze.default, aten.stack.default, aten.squeeze.dim, aten.select.int),
    aten.select_backward.default,
)
def _one_more_or_less(node: fx.Node) -> Iterator[Combination]:
    """Yields every dimension but the one that the operator inserts or removes; those behind it shift by 1."""
    operands = tensors(node)
    before, after = len(shape(operands[0])), len(shape(node))
    changed = _argument(node, "dim") % max(before, after)
    for dim in range(before):
        if after > before or dim != changed:
            moved = dim + (dim >= changed) if after > before else dim - (dim > changed)
            yield Combination((dim,) * len(operands), moved)


# ---- a layer's operators: tokens are cut with the batch, and the rows that they are routed as are irregular


@rule_of(moe.order.default)
def _order(node: fx.Node) -> Iterator[Combination]:
    """Yields a cut of the gate's results along the tokens.

    The last input and the last result, the rows that each expert was given so far, stay whole: each part
    passes them to the next.
    """
    operands = tensors(node)
    yield Combination((*(0 for _ in operands[:-1]), None), (IRREGULAR,) * 3 + (None,))


@rule_of(moe.exchange.default)
def _rows(node: fx.Node) -> Iterator[Combination]:
    """Yields one combination: rows and counts are irregular, and so are the rows that come."""
    yield Combination((IRREGULAR,) * len(tensors(node)), IRREGULAR)


@rule_of(moe.experts.default)
def _experts(node: fx.Node) -> Iterator[Combination]:
    """Yields one combination: rows, weights and counts are irregular, parameters stay whole."""
    parameters: Sequence[object] = node.args[3]  # type: ignore[assignment]
    yield Combination((*(IRREGULAR,) * 3, *(None for _ in parameters)), (IRREGULAR, IRREGULAR))


@rule_of(moe.experts_input_gradient.default, moe.experts_weight_gradient.default)
def _experts_gradient(node: fx.Node) -> Iterator[Combination]:
    """Yields one combination: rows are irregular, parameters stay whole, and their gradients are sums."""
    parameters: Sequence[object] = node.args[5]  # type: ignore[assignment]
    rows = len(tensors(node)) - len(parameters)
    result = SUM if node.target is moe.experts_weight_gradient.default else IRREGULAR
    yield Combination((*(IRREGULAR,) * rows, *(None for _ in parameters)), (result,) * len(node.meta["val"]))
