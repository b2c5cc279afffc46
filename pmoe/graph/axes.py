"""Partition axes (Lancet, section 5.2): the dimension along which each tensor of a graph is cut.

A graph is cut into k parts of the batch. An operator can be cut if running it on part p of its inputs gives
part p of its result. Each operator has a rule that lists the axes for which this holds. For the product
y = x @ w they are:

    axis of x     axis of w     axis of y
    0 (rows)      None          0
    None          1 (columns)   1
    1             0             SUM: each part gives a tensor of the whole shape, and y is their sum

`infer` applies the rules to the nodes of a graph in order. It gives each tensor one axis. If an operator has
no rule, or its rule does not allow the axes of its inputs, the operator runs once, on the whole batch. To add
a rule for an operator of your own, write ``RULES[torch.ops.my.op.default] = rule``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from pmoe.graph.lower import NUMBERS, has_shape

aten: Any = torch.ops.aten
moe: Any = torch.ops.pmoe_graph

IRREGULAR = "irregular"
"""The axis of routed rows. The routing decides how many rows each part has (the paper's A_irr)."""

SUM = "sum"
"""The axis of a parameter's gradient. Each part gives a summand of the whole shape; all are added."""

Axis = int | str | None
"""Type of a tensor's axis, along which the tensor is cut into parts of the batch.

An axis is a dimension, `IRREGULAR`, `SUM`, or None if every part uses the whole tensor."""


@dataclass(frozen=True)
class Combination:
    """One way to cut an operator into parts of the batch: the axes of its inputs and of its result.

    inputs: the axis of each tensor among the operator's arguments, in order.
    result: the axis of the result. An operator with several results has a tuple with one axis for each.

    Example: the product x @ w, cut along the rows of x, is ``Combination((0, None), 0)``.
    """

    inputs: tuple[Axis, ...]
    result: Axis | tuple[Axis, ...]


Rule = Callable[[fx.Node], Iterable[Combination]]
"""Type of a rule: a function from a call of an operator to the axes with which that call can be cut.

The rule may read the shapes and arguments of the call. If several combinations suit the axes of the inputs,
the first is taken."""

RULES: dict[object, Rule] = {}
"""The rule of each operator: how its inputs and its result can be cut into parts of the batch.

Pointwise operators need no entry: torch marks them with a tag.
"""


def rule_of(*targets: object) -> Callable[[Rule], Rule]:
    """Returns a decorator that stores a rule in `RULES` for each of the operators ``targets``."""

    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, rule))
        return rule

    return add


def tensors(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes of all tensors among a node's arguments, in order.

    A tensor that is passed twice is listed twice. Numbers, such as sizes, are left out.
    """
    nodes: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda source: nodes.append(source) or source)  # type: ignore[func-returns-value]
    return [source for source in nodes if not _is_number(source)]


def _is_number(node: fx.Node) -> bool:
    """Returns whether a node computes a number, such as a tensor's size, instead of a tensor."""
    return isinstance(node.meta.get("val"), NUMBERS)


class Inferred(NamedTuple):
    """The axes of a graph's nodes, and the nodes that run once, on the whole batch.

    axes: the axis of each node; None if all parts use the node's whole result. A node with several results
        has a tuple.
    refused: for each node that cannot be cut, the reason. It runs once, on the whole batch. Its result can
        still be cut into parts, which later nodes read.
    uncut: nodes of which no input was cut when their axis was found. They run once, on whole inputs, although
        a later node may have decided the axis of an input (`_Inference`).
    """

    axes: dict[fx.Node, Any]
    refused: dict[fx.Node, str]
    uncut: set[fx.Node]


def infer(
    graph: fx.Graph, known_axes: Mapping[fx.Node, Axis], free: Iterable[fx.Node] = (), sequences: Any = None
) -> Inferred:
    """Returns the axis along which each node of the graph is cut, and the nodes that cannot be cut.

    An axis is the dimension along which a tensor is cut into parts of the batch.

    graph: the graph.
    known_axes: {input of the graph: its axis}.
    free: inputs of the graph whose axis is still undecided. The first operator that reads such an input and
        is cut decides the axis. All inputs that are neither here nor in ``known_axes``, such as parameters,
        are not cut: each part uses them whole.
    sequences: number of sequences or tokens in the batch. It is an int, or a symbol if it is not known when
        the graph is traced. A tensor is cut only along dimensions whose size is a multiple of this number.
        None allows all dimensions.
    """
    inference = _Inference(known_axes, free, sequences)
    for node in graph.nodes:
        inference.add(node)
    return Inferred(inference.axes, inference.refused, inference.uncut)


def follow(
    body: Iterable[fx.Node], known_axes: Mapping[fx.Node, Axis], free: Iterable[fx.Node], sequences: Any
) -> Inferred:
    """Returns the axes of the results and the inputs of some calls of a graph, if all calls can be cut.

    An axis is the dimension along which a tensor is cut into parts of the batch.

    body: the calls, in order.
    known_axes: {tensor that is computed before ``body``: its axis}.
    free: tensors that are computed before ``body``, and whose axis is still undecided. The first call that
        reads such a tensor and is cut decides the axis. All tensors that are computed before ``body``, and
        are neither here nor in ``known_axes``, are not cut: each part uses them whole.
    sequences: number of sequences or tokens in the batch. A tensor is cut only along dimensions whose size is
        a multiple of this number.

    Raises RefusedError if a call cannot be cut.
    """
    inference = _Inference(known_axes, free, sequences)
    for node in body:
        for source in node.all_input_nodes:
            inference.axes.setdefault(source, known_axes.get(source))
        inference.axes[node] = inference.axis(node)
    return Inferred(inference.axes, {}, inference.uncut)


class RefusedError(Exception):
    """An operator cannot run on parts of the batch, because of its kind or of the axes of its inputs."""


class _Inference:
    """Finds the axes of a graph's nodes, one node after the other, and stores them.

    An axis is the dimension along which a tensor is cut into parts of the batch.

    axes: the axis of each node that was added so far; a tuple for a node with several results.
    refused: for each node that cannot be cut, the reason.
    uncut: nodes that read no cut tensor when they were added. They run once, on the whole batch.

    A tensor is free while its axis is undecided. The first operator that reads a free tensor and is cut
    decides the axis. These tensors are free:

    - inputs that the caller passes as ``free``,
    - results of operators that cannot be cut, if `_behind` finds no axis for them,
    - results of operators that take no tensor,
    - results of operators with at least one free input and no input that is cut.

    A free tensor may have readers on both sides of the one that decides its axis. Example: ``positions`` is
    free, and x is cut along dimension 0.

        positions.flip(0)    no input is cut: reads all positions (``uncut``)
        x * positions        is cut: each part of x needs its part of the positions. Their axis is now 0
        positions + 1        reads a tensor with axis 0: is cut
    """

    def __init__(self, known_axes: Mapping[fx.Node, Axis], free: Iterable[fx.Node], sequences: Any) -> None:
        self._known_axes = known_axes
        self._sequences = sequences
        self._free = {node for node in free if known_axes.get(node) is None}
        self.axes: dict[fx.Node, Any] = {}
        self.refused: dict[fx.Node, str] = {}
        self.uncut = set[fx.Node]()
        self._cut = set[fx.Node]()  # calls that run on parts of the batch, so that no whole result exists

    def add(self, node: fx.Node) -> None:
        """Finds and stores the axis of a node. All nodes that the node reads must have been added before.

        If the node cannot be cut, the reason is stored in ``refused``, and the node computes its whole
        result. The result gets the axis that `_behind` returns, along which later operators may cut it. If
        `_behind` returns None, the result is free: the first operator that reads it and is cut decides the
        axis.
        """
        if node.op != "call_function":
            self.axes[node] = self._known_axes.get(node)
            return
        try:
            self.axes[node] = self.axis(node)
        except RefusedError as error:
            self.axes[node] = self._behind(node)
            self.refused[node] = str(error)
            self._free.add(node)

    def _behind(self, node: fx.Node) -> Any:
        """Returns the axis of the result of an operator that cannot be cut; a tuple for several results.

        The operator runs once and computes its whole result. Operators that read the result may cut it into
        parts of the batch along the axis. The axis is found in these steps:

        1. Take the first of the operator's inputs that is cut along a dimension.
        2. If the result has the shape of this input, the axis is this dimension.
        3. If there is no such input, or the shapes differ, the axis is None.
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
        """Returns the axis along which a node's result is cut; a tuple for several results.

        The rule of the node's operator lists the ways to cut the operator (`Combination`): an axis for each
        input, and the axis of the result. The first combination that fits the axes of the node's inputs is
        taken. An input whose axis is undecided fits every axis except `SUM`. It gets its axis from the
        combination that is taken.

        Raises RefusedError if the node's operator has no rule, or if no combination fits.
        """
        inputs = tensors(node)
        axes = self.axes
        if _is_number(node):
            if any(axes[source] == IRREGULAR for source in node.all_input_nodes):
                return IRREGULAR
            # A size that a call reads must be that of the whole batch: ``x / x.shape[0]`` divides each part
            # of x by the length of the batch.
            if not self._cut.isdisjoint(node.all_input_nodes):
                raise RefusedError(f"{node.target} reads the size of {node.args[0]}, which is cut")
            return None
        if not inputs:
            self._free.add(node)
        if node.target is operator.getitem:
            if inputs[0] in self._free:
                self._free.add(node)
            for nodes in (self._cut, self.uncut):
                if inputs[0] in nodes:
                    nodes.add(node)
            axis_of_source = axes[inputs[0]]
            index = _number(node, 1)
            return axis_of_source[index] if isinstance(axis_of_source, tuple) else axis_of_source
        # If no input is cut, the operator runs once, on the whole batch. `order` is excepted, because the
        # sorted slots of the whole batch could not be cut into the sorted slots of its parts: either its rule
        # cuts its inputs, which may be free, or it cannot be cut.
        if all(axes[source] is None for source in inputs) and node.target is not moe.order.default:
            if not self._free.isdisjoint(inputs):
                self._free.add(node)
            self.uncut.add(node)
            return None
        for combination in self._rule(node)(node):
            if all(map(self._fits, inputs, combination.inputs)) and self._has_parts(node, combination):
                for source, axis in zip(inputs, combination.inputs, strict=True):
                    axes[source] = axis
                    self._free.discard(source)  # a tensor keeps the axis of its first use
                self._cut.add(node)
                return combination.result
        raise RefusedError(f"{node.target} cannot be cut along {[axes[source] for source in inputs]}")

    def _rule(self, node: fx.Node) -> Rule:
        """Returns the rule of a node's operator. Raises RefusedError if the operator has none."""
        rule = RULES.get(node.target) or (_pointwise if _is_pointwise(node.target) else None)
        if rule is None:
            raise RefusedError(f"{node.target} has no rule")
        return rule

    def _has_parts(self, node: fx.Node, combination: Combination) -> bool:
        """Returns whether all tensors of a call can be cut so that each part has whole sequences.

        This is possible if the size of each dimension that is cut is a multiple of the number of sequences
        in the batch. Example: a batch of 4 sequences, (4, 6), is viewed as (2, 2, 6). The first dimension of
        the view has size 2, which is no multiple of 4, so it cannot be cut. If the number of sequences is
        None, the result is True.

        node: the call of an operator.
        combination: the axes along which the inputs and the result of the call would be cut.
        """
        results = combination.result if isinstance(combination.result, tuple) else (combination.result,)
        values = node.meta["val"]
        values = values if isinstance(values, (tuple, list)) else [values]
        pairs = [
            *zip(values, results, strict=False),
            *(
                (source.meta["val"], axis)
                for source, axis in zip(tensors(node), combination.inputs, strict=True)
            ),
        ]
        return self._sequences is None or all(
            _divides(self._sequences, value.shape[axis])
            for value, axis in pairs
            if isinstance(axis, int) and isinstance(value, Tensor)
        )

    def _fits(self, node: fx.Node, axis: Axis) -> bool:
        """Returns whether a tensor already has this axis, or has no axis yet and may get it.

        A tensor without an axis was computed as a whole, and may still be cut along a dimension. It must not
        get the axis `SUM`, which means that each part has computed a summand of the tensor.

        node: the node of the tensor.
        axis: the dimension along which the tensor would be cut; or `IRREGULAR`, `SUM` or None.
        """
        known = self.axes[node]
        return known == axis or (known is None and node in self._free and axis != SUM)


# ---- shapes


def shape(node: fx.Node) -> tuple[int, ...]:
    """Returns the shape of a node's tensor. A size that the trace does not know is a symbol (SymInt)."""
    value: Tensor = node.meta["val"]
    return tuple(value.shape)


def _divides(divisor: int | torch.SymInt, size: int | torch.SymInt) -> bool:
    """Returns whether ``size`` is a multiple of ``divisor`` for all values of their symbols.

    A symbol (SymInt) stands for a number that is not known when the graph is traced.
    """
    if isinstance(divisor, int) and isinstance(size, int):
        return size % max(divisor, 1) == 0
    rest: Any = torch.SymInt.__mod__(size, divisor) if isinstance(size, torch.SymInt) else divisor
    return statically_known_true(rest == 0)


def _dims(node: fx.Node) -> range:
    """Returns the indices of the dimensions of a node's tensor: range(number of dimensions)."""
    return range(len(shape(node)))


def _counted(dim: int, rank: int) -> int:
    """Returns a dimension counted from the first one. A negative ``dim`` counts from the last one.

    rank: number of dimensions of the tensor. torch counts a tensor without dimensions as if it had one.
    """
    return dim % max(rank, 1)


def _same_size(first: fx.Node, second: fx.Node, dim: int) -> bool:
    """Returns whether two tensors have the same size in a dimension, for all values of symbolic sizes."""
    sizes = shape(second)
    return dim < len(sizes) and statically_known_true(sym_eq(shape(first)[dim], sizes[dim]))


def _number(node: fx.Node, place: int, default: Any = None) -> Any:
    """Returns a call's argument at position ``place``, or ``default`` if the call has fewer arguments."""
    return node.args[place] if len(node.args) > place else default


def _argument(node: fx.Node, name: str) -> Any:
    """Returns the argument ``name`` of a call, or its default in the operator's schema."""
    schema = node.target._schema  # type: ignore[union-attr]
    index, argument = next(
        (index, parameter) for index, parameter in enumerate(schema.arguments) if parameter.name == name
    )
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, argument.default_value)


def _alike(node: fx.Node, but: Iterable[int]) -> Iterator[Combination]:
    """Yields the ways to cut an operator along the same dimension of all its inputs and results.

    Inputs may have different sizes. For example, the index of ``gather`` may be shorter than its source. Then
    element i of one input belongs to element i of the other, so parts of both would not belong together. The
    operator can be cut only along dimensions in which all inputs have the same size.

    node: the call of the operator.
    but: dimensions along which the operator cannot be cut, because it works along them. Softmax works along
        one dimension, for example. Negative numbers count from the last dimension.
    """
    first, *others = inputs = tensors(node)
    rank = len(shape(first))
    results = node.meta["val"]
    without = {_counted(index, rank) for index in but}
    for dim in range(rank):
        if dim not in without and all(_same_size(first, other, dim) for other in others):
            result = (dim,) * len(results) if isinstance(results, (list, tuple)) else dim
            yield Combination((dim,) * len(inputs), result)


# ---- rules: the ways to cut each operator. The decorator of a rule names its operators


def _is_pointwise(target: object) -> bool:
    """Returns whether an operator is pointwise, has one result and draws no random numbers.

    torch marks pointwise operators. An operator that draws random numbers cannot be cut. For example, a
    dropout in parts would draw other numbers than the dropout of the whole batch. `_pointwise` does not know
    operators with several results, such as ``frexp``.
    """
    if not isinstance(target, torch._ops.OpOverload) or len(target._schema.returns) != 1:
        return False
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


def _pointwise(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut a pointwise operator into parts: along each dimension of its result.

    The operator broadcasts its inputs. All parts use the whole of an input that does not have the dimension,
    or has size 1 in it. If the first size of an input is not known when the graph is traced, the input may
    consist of routed rows. Then the operator can also be cut by these rows (`IRREGULAR`).
    """
    operands = tensors(node)
    if any(isinstance(shape(operand)[0] if shape(operand) else 1, torch.SymInt) for operand in operands):
        yield Combination((IRREGULAR,) * len(operands), IRREGULAR)
    size = shape(node)
    for dim in _dims(node):
        inputs = []
        for operand in operands:
            own_dim = dim - (len(size) - len(shape(operand)))
            inputs.append(own_dim if own_dim >= 0 and shape(operand)[own_dim] != 1 else None)
        if any(input_dim is not None for input_dim in inputs):
            yield Combination(tuple(inputs), dim)


RULES[aten.copy.default] = _pointwise  # torch does not mark it


@rule_of(aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default)
def _copied(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut a copy or conversion into parts: along each dimension, or as summands.

    Summands (`SUM`) are tensors of the whole shape, one for each part, that add up to the input. The copies
    of the summands add up to the copy of the input. This does not hold for conversions to integers or to
    bool: int(0.5) + int(0.5) is 0, but int(0.5 + 0.5) is 1.
    """
    yield from _pointwise(node)
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == tensors(node)[0].meta["val"].dtype:
        yield Combination((SUM,), SUM)


ALWAYS: dict[object, list[Combination]] = {
    aten.mm.default: [Combination((0, None), 0), Combination((None, 1), 1), Combination((1, 0), SUM)],
    aten.bmm.default: [Combination((0, 0), 0), Combination((1, None), 1), Combination((None, 2), 2)],
    moe.exchange_counts.default: [Combination((IRREGULAR,) * 2, (IRREGULAR,) * 4)],
    moe.pack.default: [Combination((0, *(IRREGULAR,) * 4), (IRREGULAR,) * 2)],
    moe.join.default: [Combination((IRREGULAR,) * 6, 0)],
}
"""How some operators can be cut into parts of the batch, whatever their shapes and arguments are."""
RULES.update(
    {target: lambda _, ways=combinations: ways for target, combinations in ALWAYS.items()}  # type: ignore[misc]
)


@rule_of(aten.addmm.default)
def _addmm(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut bias + x @ w into parts: along the rows or the columns of the product.

    The product cannot be cut into summands, because each part would add the bias again.
    """
    bias = len(shape(tensors(node)[0]))
    yield Combination((0 if bias == 2 else None, 0, None), 0)
    yield Combination((bias - 1, None, 1), 1)


@rule_of(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _norm(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut a layer norm or RMS norm into parts: along dimensions that are not normalized.

    All parts use the whole weight and bias. The normalized dimensions are the last ones.
    """
    operands = tensors(node)
    normalized = len(_number(node, 1))
    for dim in range(len(shape(operands[0])) - normalized):
        yield Combination((dim, *(None for _ in operands[1:])), (dim,) * len(node.meta["val"]))


@rule_of(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def _norm_backward(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut the gradient of a norm into parts: along dimensions that are not normalized.

    Dimensions after the first one that has a size above 1 cannot be cut, because the kernels need contiguous
    means and standard deviations. Each part gives summands (`SUM`) of the gradients of weight and bias.
    """
    operands = tensors(node)
    normalized = len(_number(node, 2))
    rank = len(shape(operands[0]))
    for dim in range(rank - normalized):
        if any(size != 1 for size in shape(operands[0])[:dim]):
            break  # the kernels read mean and rstd as contiguous, which they are not if cut here
        inputs = tuple(dim if len(shape(operand)) == rank else None for operand in operands)
        yield Combination(inputs, (dim, *(SUM for _ in node.meta["val"][1:])))


@rule_of(aten.convolution.default)
def _convolution(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut a convolution into parts: along the batch, or the channels of the result.

    If the batch is cut, all parts use the whole weight and bias. If the channels are cut, all parts use the
    whole input; this needs a convolution of one group. The channels of the result are dimension 0 of the
    weight (dimension 1 in a transposed convolution).
    """
    _, _, *bias = tensors(node)
    yield Combination((0, None, *(None for _ in bias)), 0)
    if _argument(node, "groups") == 1:
        yield Combination((None, int(_argument(node, "transposed")), *(0 for _ in bias)), 1)


@rule_of(aten.convolution_backward.default)
def _convolution_backward(node: fx.Node) -> Iterator[Combination]:
    """Yields the one way to cut the gradient of a convolution into parts: along the batch.

    Each part gives summands (`SUM`) of the gradients of weight and bias.
    """
    yield Combination((0, 0, None), (0, SUM, SUM))


@rule_of(aten.native_group_norm.default)
def _group_norm(node: fx.Node) -> Iterator[Combination]:
    """Yields the one way to cut a group norm into parts: along the batch.

    All parts use the whole weight and bias. One argument of the call is the size of the batch.
    `pmoe.graph.split_batch` replaces it by the size of a part.
    """
    _, *weights = tensors(node)
    yield Combination((0, *(None for _ in weights)), (0, 0, 0))


@rule_of(aten.native_group_norm_backward.default)
def _group_norm_backward(node: fx.Node) -> Iterator[Combination]:
    """Yields the one way to cut the gradient of a group norm into parts: along the batch.

    The result's gradient, the input, mean and rstd are cut. Each part gives summands (`SUM`) of the gradients
    of weight and bias.
    """
    _, _, _, _, *weight = tensors(node)
    yield Combination((0, 0, 0, 0, *(None for _ in weight)), (0, SUM, SUM))


@rule_of(aten.embedding.default)
def _embedding(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut an embedding into parts: along each dimension of its indices.

    All parts use the whole table.
    """
    for dim in _dims(tensors(node)[1]):
        yield Combination((None, dim), dim)


@rule_of(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)
def _attention(node: fx.Node) -> Iterator[Combination]:
    """Yields the one way to cut attention into parts: along the sequences.

    The heads are not cut, although each is computed by itself. If a rank has fewer sequences than parts, some
    parts are empty, and the kernels divide by the number of heads: 0 would end the process.

    Yields nothing in two cases:

    - if there is dropout, because its random numbers would depend on the cut;
    - if the call has more tensors than queries, keys and values, such as a mask.

    The first two results are cut: the output, and the logsumexp of each query. The other results are not cut.
    They belong to the random numbers of dropout.
    """
    if len(tensors(node)) == 3 and _argument(node, "dropout_p") == 0.0:
        yield Combination((0,) * 3, (0, 0, *(None for _ in node.meta["val"][2:])))


@rule_of(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
def _attention_backward(node: fx.Node) -> Iterator[Combination]:
    """Yields the one way to cut the gradient of attention into parts: along the sequences.

    If the attention has dropout, nothing is yielded. Six tensors are cut: the output's gradient, queries,
    keys, values, the output, and the logsumexp of each query. Two more tensors may follow. They belong to
    dropout, and all parts use them whole.
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
    """Yields the ways to cut an operator that works along one dimension: along each other dimension.

    Examples of these operators are softmax, sort, cumsum and gather.
    """
    yield from _alike(node, [_argument(node, "dim")])


@rule_of(aten.flip.default)
def _flip(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut a ``flip`` into parts: along each dimension that it does not reverse."""
    yield from _alike(node, _argument(node, "dims"))


@rule_of(aten.index_select.default)
def _index_select(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut an ``index_select`` into parts: along each dimension of its source.

    If the cut is along the indexed dimension, the indices are cut, and all parts use the whole source.
    Otherwise the source is cut, and all parts use all indices.
    """
    source = tensors(node)[0]
    selected = _counted(_argument(node, "dim"), len(shape(source)))
    for dim in _dims(source):
        yield Combination((None, 0) if dim == selected else (dim, None), dim)


@rule_of(aten.index_add.default)
def _index_add(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut an ``index_add`` into parts: along each dimension that is not indexed.

    ``index_add`` adds slices to a tensor at indices, as in the gradient of ``index_select``. All parts use
    all indices.
    """
    source = tensors(node)[0]
    indexed = _counted(_argument(node, "dim"), len(shape(source)))
    for dim in _dims(source):
        if dim != indexed:
            yield Combination((dim, None, dim), dim)


@rule_of(aten.repeat.default)
def _repeat(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut a ``repeat`` into parts: along each dimension that it does not repeat.

    The result may have more dimensions than the source. The new dimensions come first.
    """
    source = tensors(node)[0]
    repeats = _number(node, 1)
    offset = len(repeats) - len(shape(source))
    for dim in _dims(source):
        if isinstance(repeats[dim + offset], int) and repeats[dim + offset] == 1:
            yield Combination((dim,), dim + offset)


@rule_of(
    *(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default),
    *(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction),
    *(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim),
)
def _reduce(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut a reduction into parts: along each dimension that it does not reduce.

    A sum can also be cut along a dimension that it reduces. Each part then gives a summand (`SUM`) of the
    result. If an operator has several results, such as values and indices, all are cut along the same
    dimension.
    """
    values = node.meta["val"]
    rank = len(shape(tensors(node)[0]))
    dims = _argument(node, "dim")
    listed = [dims] if isinstance(dims, int) else dims
    removed = {_counted(listed_dim, rank) for listed_dim in listed} if listed else set(range(rank))
    for combination in _alike(node, removed):
        dim = int(combination.inputs[0])  # type: ignore[arg-type]
        num_removed = 0 if _argument(node, "keepdim") else sum(removed_dim < dim for removed_dim in removed)
        result = dim - num_removed
        is_tuple = isinstance(values, (tuple, list))
        yield Combination(combination.inputs, (result,) * len(values) if is_tuple else result)
    if node.target is aten.sum.dim_IntList and rank:
        for dim in removed:
            yield Combination((dim,), SUM)


@rule_of(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
def _view(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut a view into parts: pairs (dimension of the source, dimension of the result).

    Dimension i of the source and dimension j of the result are a pair if source[:i] and result[:j] have the
    same product. Example: (4, 6) viewed as (2, 2, 6) has two pairs: (0, 0), and (1, 2) because 4 = 2 * 2.

    The view of part p of the source must be part p of the result. So the sizes of both dimensions must also
    be multiples of the number of sequences in the batch, which `infer` checks later.

    - A dimension of size 1 cannot be cut.
    - ``expand`` can be cut along every dimension whose size stays the same.
    - All other views can also be cut into summands (`SUM`): the views of the summands add up to the view of
      their sum.
    - In a part, the size of the cut dimension is left out (-1), because it follows from the part's number of
      elements. If the call leaves out another size, that size must be known when the graph is traced.

    node: the call of the view.
    """
    source, result = shape(tensors(node)[0]), shape(node)
    if node.target is aten.expand.default:
        offset = len(result) - len(source)
        for dim, size in enumerate(source):
            if size == result[dim + offset] and size != 1:
                yield Combination((dim,), dim + offset)
        return
    sizes = _number(node, 1)
    left_out = {dim for dim, size in enumerate(result) if sizes[dim] == -1 and not isinstance(size, int)}
    for dim, size in enumerate(source):
        before = math.prod(source[:dim])
        for other, other_size in enumerate(result):
            if size != 1 and other_size != 1 and math.prod(result[:other]) == before:
                if left_out <= {other}:
                    yield Combination((dim,), other)
                break
    yield Combination((SUM,), SUM)


@rule_of(aten.new_zeros.default)
def _new(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut a call of ``new_zeros`` into parts of the batch.

    ``x.new_zeros(sizes)`` makes a tensor of zeros. It can be cut along dimension i if x and the result have
    the same size in dimension i. Both are then cut along it.
    """
    for dim, sizes in enumerate(zip(shape(tensors(node)[0]), shape(node), strict=False)):
        if sizes[0] == sizes[1]:
            yield Combination((dim,), dim)


@rule_of(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut a permutation of dimensions into parts: along each dimension, or as summands.

    If dimension i of the input becomes dimension j of the result, the result is cut along j if the input is
    cut along i. Summands (`SUM`) are tensors of the whole shape, one for each part, that add up to the input.
    The permuted summands add up to the result.
    """
    rank = len(shape(node))
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [_counted(index, rank) for index in _number(node, 1)]
    elif rank:  # "t" and "transpose" leave a tensor without dimensions as it is
        first = _counted(_number(node, 1, 0), rank)
        second = _counted(_number(node, 2, rank - 1), rank)
        order[first], order[second] = order[second], order[first]
    for dim in range(rank):
        yield Combination((dim,), order.index(dim))
    yield Combination((SUM,), SUM)


@rule_of(
    *(aten.unsqueeze.default, aten.stack.default, aten.squeeze.dim, aten.select.int),
    aten.select_backward.default,
)
def _one_more_or_less(node: fx.Node) -> Iterator[Combination]:
    """Yields the ways to cut an operator that inserts or removes a dimension: along each other dimension.

    Dimensions after the inserted or removed one have a different index in the result than in the source.
    ``squeeze`` removes only a dimension of size 1. If its dimension has another size, nothing changes: a cut
    along any other dimension stays where it is.
    """
    operands = tensors(node)
    before, after = len(shape(operands[0])), len(shape(node))
    changed = _counted(_argument(node, "dim"), max(before, after))
    for dim in range(before):
        if after > before or dim != changed:
            moved = dim
            if after > before:
                moved = dim + (dim >= changed)
            elif after < before:
                moved = dim - (dim > changed)
            yield Combination((dim,) * len(operands), moved)


# ---- operators of a MoELayer: tokens are cut along the batch; rows, which experts get, are IRREGULAR


@rule_of(moe.order.default)
def _order(node: fx.Node) -> Iterator[Combination]:
    """Yields the one way to cut a call of `order` into parts: along the tokens.

    `order` sorts the slots (choices of tokens) of a layer by expert. Its last input and its last result are
    not cut: they count, for each expert, the slots in earlier parts. Each part passes these counts to the
    next part, so that all parts together respect the experts' capacity.
    """
    operands = tensors(node)
    yield Combination((*(0 for _ in operands[:-1]), None), (IRREGULAR,) * 3 + (None,))


@rule_of(moe.exchange.default)
def _rows(node: fx.Node) -> Iterator[Combination]:
    """Yields the one way to cut an all-to-all into parts: each part sends its own rows.

    How many rows a part sends and receives follows from the routing. Rows and row counts therefore have the
    axis `IRREGULAR`.
    """
    yield Combination((IRREGULAR,) * len(tensors(node)), IRREGULAR)


@rule_of(moe.experts.default)
def _experts(node: fx.Node) -> Iterator[Combination]:
    """Yields the only way to cut the experts' computation into parts: by rows.

    The routing decides how many rows each part has. So rows, routing weights and row counts have the axis
    `IRREGULAR`. The parameters are not cut: each part uses all of them.
    """
    parameters: Sequence[object] = node.args[3]  # type: ignore[assignment]
    yield Combination((*(IRREGULAR,) * 3, *(None for _ in parameters)), (IRREGULAR, IRREGULAR))


@rule_of(moe.experts_input_gradient.default, moe.experts_weight_gradient.default)
def _experts_gradient(node: fx.Node) -> Iterator[Combination]:
    """Yields the one way to cut the experts' gradients into parts: each part has its own rows (`IRREGULAR`).

    All parts use the whole parameters. Each part of `experts_input_gradient` gives the gradients of its own
    rows. Each part of `experts_weight_gradient` gives summands (`SUM`) of the parameters' gradients.
    """
    parameters: Sequence[object] = node.args[5]  # type: ignore[assignment]
    rows = len(tensors(node)) - len(parameters)
    result = SUM if node.target is moe.experts_weight_gradient.default else IRREGULAR
    yield Combination((*(IRREGULAR,) * rows, *(None for _ in parameters)), (result,) * len(node.meta["val"]))
