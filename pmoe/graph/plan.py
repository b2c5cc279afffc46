"""Cuts each graph of a program into parts of the batch, by ranges on which all ranks agreed.

A range is a run of consecutive instructions (operator calls) that is cut into parts of the batch.

torch.compile may make several graphs of the same layers, for different input shapes. All graphs of the same
layers in the same direction, forward or backward, form a program. Ranges are chosen on the first graph of
rank 0. Each other graph of the program is compared with that first graph:

- If it has the same instructions, and its batch has two or more sequences, then the same ranges are cut,
  along the sequences.
- If it has other instructions, or a batch of one sequence, or no input with the batch as first dimension,
  then only the MoE layers of the ranges are cut, one by one, each along its tokens.

In both cases each layer has the same number of parts. So all ranks send the same messages in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from pmoe.graph.axes import IRREGULAR, Axis, follow, infer
from pmoe.graph.instructions import Instruction
from pmoe.graph.lower import OPS, calls_of, communicates, is_result, label
from pmoe.graph.ranges import Cuttable, Range
from pmoe.graph.split_batch import cut_ranges, routes


@dataclass(frozen=True)
class RangePlan:
    """The runs of consecutive instructions (ranges) of a graph that are cut into parts of the batch.

    names: the names of all instructions of the graph on which the ranges were chosen, in order.
    ranges: the ranges, in order; () if nothing is cut.
    seconds: predicted seconds of that graph with these ranges cut.
    """

    names: tuple[str, ...] = ()
    ranges: tuple[Range, ...] = ()
    seconds: float = 0.0

    def ranges_of_layers(self) -> list[Range | None]:
        """Returns for each MoELayer, in order, the range that holds it; None for a layer that is not cut."""
        ranges = list[Range | None]()
        current = None
        # A layer begins with `order`. A backward graph has no `order`. Its layers begin with `pack`, which
        # packs the gradient of the layer's output.
        opens = "order_" if "order_0" in self.names else "pack_"
        begins = {range_.first: range_ for range_ in self.ranges}
        for name in self.names:
            current = begins.get(name, current)
            if name.startswith(opens):
                ranges.append(current)
            current = None if current and name == current.last else current
        return ranges


class GraphSplit:
    """A graph, and the dimensions along which its tensors can be cut into parts of the batch.

    size: the number of sequences in the batch, as text. It is the name of a symbol if the trace does not know
        the number.
    calls: the operator calls of the graph, in order.
    names: the names of the calls, equal in graphs of the same operators (`pmoe.graph.lower.label`).
    """

    size: str
    calls: list[fx.Node]
    names: tuple[str, ...]

    def __init__(self, module: fx.GraphModule, input_axes: Mapping[fx.Node, Axis], sequences: object) -> None:
        """Finds the dimension along which each tensor can be cut. Moves calls that would interrupt a range.

        A range is a run of consecutive calls that is cut into parts of the batch. A call that cannot be cut
        is moved to the end of the graph, if no all-to-all needs its result.

        module: the graph. The order of its calls may change.
        input_axes: for each input of the graph that is cut, the dimension along which it is cut.
        sequences: number of sequences in the batch: an int, or a symbol if the trace does not know it.
        """
        self._module = module
        self.size = f"{sequences}"
        batches = (
            node
            for node, axis in input_axes.items()
            if axis == 0 and f"{node.meta['val'].shape[0]}" == self.size
        )
        self._batch = batch = next(batches, None)
        self._routes = routes(module.graph)
        free = module.graph.find_nodes(op="placeholder") if self._routes else []
        num_sequences = batch.meta["val"].shape[0] if batch else None
        self._axes, self._refused, self._uncut = infer(module.graph, input_axes, free, num_sequences)
        if batch:
            _put_last(module.graph, self._refused)
        elif self._routes:
            self._gather()
        self.calls = calls_of(module)
        self.names = tuple(map(label, self.calls))

    def _gather(self) -> None:
        """Makes the calls of each MoELayer consecutive: moves other calls between them behind the last one.

        The method is for backward graphs whose inputs do not have the batch as first dimension. In these
        graphs each layer is cut along its tokens, which is possible only if its calls are consecutive.
        """
        for route in self._routes:
            nodes = list(self._module.graph.nodes)
            body = nodes[nodes.index(route.pack) : nodes.index(route.last)]
            weight_gradient = OPS.experts_weight_gradient.default
            needed = {route.last}
            for node in reversed(body):
                if node.target is weight_gradient or not needed.isdisjoint(node.users):
                    needed.add(node)
            for node in reversed(body):
                if node not in needed:
                    source: Any = node.args[0]
                    is_result_of = node.target is operator.getitem and source in needed
                    (source if is_result_of else route.last).append(node)

    def saved(self) -> dict[str, int]:
        """Returns {name or shape of a result of a forward graph: dimension along which it is cut}.

        Each result has two keys, its name and its shape as text. `backward_axes` uses this dict to find the
        axes of the backward graph's inputs. There are two kinds of inputs:

        - tensors that forward saved, found by the name of the forward graph's result;
        - gradients of forward's results, found by the shape of the result.

        Results that are not cut along a dimension are left out.
        """
        axes: dict[str, int] = {}
        for node in self._module.graph.output_node().all_input_nodes if self.sequences > 1 else ():
            if isinstance(self._axes[node], int):
                axes[node.name] = self._axes[node]
                axes.setdefault(_text(node), self._axes[node])
        return axes

    @property
    def sequences(self) -> int:
        """Number of sequences in the batch; 0 if no input of the graph has the batch as first dimension."""
        return int(self._batch.meta["val"].shape[0]) if self._batch else 0

    def cuttable(self, instructions: Sequence[Instruction]) -> Cuttable:
        """Returns where ranges of the graph may end, and which instructions can be cut into parts.

        A range is a run of consecutive instructions that is cut. A range must not end at these positions:

        - between a call that makes routed rows and the last call that reads them, because routed rows can be
          assigned to parts only inside a range;
        - between a call with several results and the nodes that select one of them, because only single
          tensors can be joined.

        instructions: the instructions of the graph, with their costs.
        """
        place_of = {node: at for at, node in enumerate(self.calls)}
        ends = [True] * (len(self.calls) + 1)
        for node in self.calls:
            users = [user for call in (node, *filter(is_result, node.users)) for user in call.users]
            last = max((place_of[user] for user in users if user in place_of), default=place_of[node])
            if self._axes[node] == IRREGULAR or isinstance(node.meta.get("val"), (tuple, list)):
                ends[place_of[node] + 1 : last + 1] = [False] * (last - place_of[node])
        return Cuttable(instructions, ends, [node not in self._refused for node in self.calls])

    def apply(self, plan: RangePlan) -> fx.GraphModule:
        """Returns the graph with the ranges of ``plan`` cut into parts of the batch.

        A range is a run of consecutive instructions. It may hold several MoE layers and the operators between
        them. The whole range is cut along the sequences of the batch if both conditions hold:

        - the batch has two or more sequences;
        - this graph has the same instructions as the graph on which the ranges were chosen.

        Otherwise only the MoE layers of each range are cut, one by one, along their tokens.

        plan: the ranges, which may have been chosen on a graph for another batch.
        """
        if not plan.ranges:
            return self._module
        if self.names == plan.names and self._batch and self.sequences > 1:
            batches = dict.fromkeys(plan.ranges, self._batch)
            return cut_ranges(self._module, batches, self._axes, self._uncut)
        axes = dict[fx.Node, Any]()
        uncut = set[fx.Node]()
        ranges = dict[Range, fx.Node]()
        free = [node for route in self._routes for node in route.kept.values()]
        for (begin, end), range_ in zip(self._layers(), plan.ranges_of_layers(), strict=True):
            if range_:
                body = self.calls[begin : end + 1]
                with_results = [call for node in body for call in (node, *filter(is_result, node.users))]
                tokens: Any = body[0].args[0]
                inferred = follow(with_results, _tokens(body), free, tokens.meta["val"].shape[0])
                axes |= inferred.axes
                uncut |= inferred.uncut
                own_range = replace(range_, first=label(body[0]), last=label(body[-1]))
                ranges[own_range] = tokens
        return cut_ranges(self._module, ranges, axes, uncut)

    def _layers(self) -> list[tuple[int, int]]:
        """Returns for each MoELayer the positions of its first and last instruction in ``calls``."""
        place_of = {node: at for at, node in enumerate(self.calls)}
        if self._routes:
            return [(place_of[route.pack], place_of[route.last]) for route in self._routes]
        orders = [place_of[node] for node in self.calls if node.target is OPS.order.default]
        joins = [place_of[node] for node in self.calls if node.target is OPS.join.default]
        return list(zip(orders, joins, strict=True))


NUM_SOURCES: dict[Any, int] = {OPS.order.default: 3, OPS.pack.default: 1}
"""Number of an operator's first arguments that have one entry for each token, or choice of a token."""


def _tokens(body: Sequence[fx.Node]) -> Mapping[fx.Node, Axis]:
    """Returns {tensor: 0} for the tensors with tokens that a layer reads from the rest of the graph.

    These tensors have one entry in dimension 0 for each token, or for each choice of a token. 0 is the
    dimension along which they are cut into parts of the batch.

    body: the calls of the layer.
    """
    inside = set(body)
    axes = dict[fx.Node, Axis]()
    for node in body:
        for source in node.args[: NUM_SOURCES.get(node.target, 0)]:
            while source in inside:
                source = source.all_input_nodes[0]  # type: ignore[union-attr]
            if isinstance(source, fx.Node):
                axes[source] = 0
    return axes


def backward_axes(forward: GraphSplit, graph: fx.Graph) -> dict[fx.Node, Axis]:
    """Returns the axes of a backward graph's inputs: the dimensions along which they are cut into parts.

    Each input belongs to a result of the forward graph, and has the axis of this result. A tensor that was
    saved for backward has the same name as its result. A gradient ("tangents_...") has the same shape as its
    result.

    forward: the forward graph.
    graph: the backward graph.
    """
    saved = forward.saved()
    axes = dict[fx.Node, Axis]()
    for node in graph.find_nodes(op="placeholder"):
        axis = saved.get(_text(node) if node.name.startswith("tangents") else node.name)
        if axis is not None:
            axes[node] = axis
    return axes


def _text(node: fx.Node) -> str:
    """Returns the shape of a node's tensor as text; "" if the node has no tensor."""
    value = node.meta.get("val")
    return f"{tuple(value.shape)}" if isinstance(value, Tensor) else ""


def _put_last(graph: fx.Graph, refused: Mapping[fx.Node, str]) -> None:
    """Moves calls that cannot be cut to the end of the graph, if no all-to-all needs their results.

    Calls that read the results of moved calls are moved too. An example is the auxiliary loss, which needs
    the whole batch. In the middle of the graph it would interrupt the calls that are cut.

    refused: the calls that cannot be cut, with reasons.
    """
    needed = set[fx.Node]()
    moved = set[fx.Node]()
    for node in reversed(graph.nodes):
        if communicates(node) or node in needed:
            needed.update(node.all_input_nodes)
    for node in list(graph.nodes):
        is_movable = node.op == "call_function" and node not in needed and not communicates(node)
        if is_movable and (node in refused or not moved.isdisjoint(node.all_input_nodes)):
            moved.add(node)
    output = graph.output_node()
    for node in [call for call in graph.nodes if call in moved]:
        output.prepend(node)
