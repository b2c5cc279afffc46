"""The agreed ranges of a program, and what they mean for each graph of it.

A program's graphs differ by shapes. Where one has the instructions of rank 0's first one, the ranges hold as
they stand. Where it has not, or holds fewer sequences than can be told apart (a rank with none, or one), each
layer alone is cut, by its tokens, in as many parts as there: the messages are the same, in the same order.
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
from pmoe.graph.parts import cut, routes
from pmoe.graph.ranges import Cuttable, Range


@dataclass(frozen=True)
class RangePlan:
    """names: of the instructions of the graph that the ranges are of. seconds: predicted for all of them."""

    names: tuple[str, ...] = ()
    ranges: tuple[Range, ...] = ()
    seconds: float = 0.0

    def ranges_of_layers(self) -> list[Range | None]:
        """That of each layer, in order; None where it is not cut."""
        found, now = list[Range | None](), None
        opens = "order_" if "order_0" in self.names else "pack_"  # backward, of the gradients
        begins = {each.first: each for each in self.ranges}
        for name in self.names:
            now = begins.get(name, now)
            if name.startswith(opens):
                found.append(now)
            now = None if now and name == now.last else now
        return found


class Cutting:
    """One graph, and how it is cut."""

    size: str
    calls: list[fx.Node]
    names: tuple[str, ...]

    def __init__(self, module: fx.GraphModule, cut: Mapping[fx.Node, Axis], sequences: object) -> None:
        """cut: the axes of inputs. sequences: how many there are, as the graph has it."""
        self._module, self.size = module, f"{sequences}"
        held = (
            each for each, axis in cut.items() if axis == 0 and f"{each.meta['val'].shape[0]}" == self.size
        )
        self._batch = batch = next(held, None)
        self._routes = routes(module.graph)
        free = module.graph.find_nodes(op="placeholder") if self._routes else []
        self._axes, self._refused = infer(module.graph, cut, free)
        if batch:
            _put_last(module.graph, self._refused)
        elif self._routes:
            self._gather()
        self.calls = calls_of(module)
        self.names = tuple(map(label, self.calls))

    def _gather(self) -> None:
        """Moves what only happens to stand in a layer's body behind it: all else there is of routed rows."""
        for route in self._routes:
            nodes = list(self._module.graph.nodes)
            body = nodes[nodes.index(route.pack) : nodes.index(route.last)]
            weights, needed = OPS.experts_weight_gradient.default, {route.last}
            for node in reversed(body):
                if node.target is weights or not needed.isdisjoint(node.users):
                    needed.add(node)
            for node in reversed(body):
                if node not in needed:
                    source: Any = node.args[0]
                    is_result_of = node.target is operator.getitem and source in needed
                    (source if is_result_of else route.last).append(node)

    def saved(self) -> dict[str, int]:
        """Of results that are cut along the batch the axis, by name and by shape."""
        found: dict[str, int] = {}
        for node in self._module.graph.output_node().all_input_nodes if self.sequences > 1 else ():
            if isinstance(self._axes[node], int):
                found[node.name] = self._axes[node]
                found.setdefault(_text(node), self._axes[node])
        return found

    @property
    def sequences(self) -> int:
        """How many there are; 0 where nothing can be cut."""
        return int(self._batch.meta["val"].shape[0]) if self._batch else 0

    def cuttable(self, instructions: Sequence[Instruction]) -> Cuttable:
        """No routed rows cross the end of a range, and no results are taken from their operator there."""
        place = {node: at for at, node in enumerate(self.calls)}
        ends = [True] * (len(self.calls) + 1)
        for node in self.calls:
            users = [user for each in (node, *filter(is_result, node.users)) for user in each.users]
            last = max((place[user] for user in users if user in place), default=place[node])
            if self._axes[node] == IRREGULAR or isinstance(node.meta.get("val"), (tuple, list)):
                ends[place[node] + 1 : last + 1] = [False] * (last - place[node])
        return Cuttable(instructions, ends, [node not in self._refused for node in self.calls])

    def cut(self, plan: RangePlan) -> fx.GraphModule:
        """The module with the plan's ranges in parts."""
        if not plan.ranges:
            return self._module
        if self.names == plan.names and self._batch and self.sequences > 1:
            return cut(self._module, dict.fromkeys(plan.ranges, self._batch), self._axes)
        axes, ranges = dict[fx.Node, Any](), dict[Range, fx.Node]()
        free = [node for each in self._routes for node in each.kept.values()]
        for (begin, end), found in zip(self._layers(), plan.ranges_of_layers(), strict=True):
            if found:
                body = self.calls[begin : end + 1]
                with_results = [each for node in body for each in (node, *filter(is_result, node.users))]
                axes |= follow(with_results, _tokens(body), free)
                own = replace(found, first=label(body[0]), last=label(body[-1]))
                ranges[own] = body[0].args[0]  # type: ignore[assignment]
        return cut(self._module, ranges, axes)

    def _layers(self) -> list[tuple[int, int]]:
        """Where each layer's body begins, and its last instruction."""
        place = {node: at for at, node in enumerate(self.calls)}
        if self._routes:
            return [(place[each.pack], place[each.last]) for each in self._routes]
        orders = [place[node] for node in self.calls if node.target is OPS.order.default]
        joins = [place[node] for node in self.calls if node.target is OPS.join.default]
        return list(zip(orders, joins, strict=True))


NUM_SOURCES: dict[Any, int] = {OPS.order.default: 3, OPS.pack.default: 1}
"""By operator, how many of its first arguments have a row a token, or a choice."""


def _tokens(body: Sequence[fx.Node]) -> Mapping[fx.Node, Axis]:
    """The inputs of a layer's body that have a row a token, or a choice."""
    inside, found = set(body), dict[fx.Node, Axis]()
    for node in body:
        for source in node.args[: NUM_SOURCES.get(node.target, 0)]:
            while source in inside:
                source = source.all_input_nodes[0]  # type: ignore[union-attr]
            if isinstance(source, fx.Node):
                found[source] = 0
    return found


def backward_axes(forward: Cutting, graph: fx.Graph) -> dict[fx.Node, Axis]:
    """Of a backward graph's inputs: those of the forward pass's results, which have the same names, and of
    the gradients of results."""
    saved, found = forward.saved(), dict[fx.Node, Axis]()
    for node in graph.find_nodes(op="placeholder"):
        axis = saved.get(_text(node) if node.name.startswith("tangents") else node.name)
        if axis is not None:
            found[node] = axis
    return found


def _text(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f"{tuple(value.shape)}" if isinstance(value, Tensor) else ""


def _put_last(graph: fx.Graph, refused: Mapping[fx.Node, str]) -> None:
    """Moves what cannot be cut, and what follows from it, behind everything else, where no all-to-all waits
    for it: so auxiliary losses, which are of the whole batch, end no range."""
    needed, last = set[fx.Node](), set[fx.Node]()
    for node in reversed(graph.nodes):
        if communicates(node) or node in needed:
            needed.update(node.all_input_nodes)
    for node in list(graph.nodes):
        may = node.op == "call_function" and node not in needed and not communicates(node)
        if may and (node in refused or not last.isdisjoint(node.all_input_nodes)):
            last.add(node)
    output = graph.output_node()
    for node in [each for each in graph.nodes if each in last]:
        output.prepend(node)
