"""The agreed ranges of a program, and what they mean for each graph of it.

A program's graphs differ by shapes. Where one has the instructions of rank 0's first one, the ranges hold as
they stand. Where it has not, or holds fewer sequences than can be told apart (a rank with none, or one), each
layer alone is cut, by its tokens, in as many parts as there: the messages are the same, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from pmoe.graph.axes import IRREGULAR, Axis, follow, infer
from pmoe.graph.blocks import in_blocks
from pmoe.graph.instructions import Instruction
from pmoe.graph.lower import OPS, calls_of, communicates, is_result, label
from pmoe.graph.parts import cut
from pmoe.graph.ranges import Cuttable, Range


@dataclass(frozen=True)
class RangePlan:
    """names: of the instructions of the graph that the ranges are of. seconds: predicted for all of them.
    blocks: layers whose experts are computed in blocks, in a backward graph."""

    names: tuple[str, ...] = ()
    ranges: tuple[Range, ...] = ()
    seconds: float = 0.0
    blocks: tuple[int, ...] = ()

    def ranges_of_layers(self) -> list[Range | None]:
        """That of each layer, in order; None where it is not cut."""
        found, now = list[Range | None](), None
        begins = {each.first: each for each in self.ranges}
        for name in self.names:
            now = begins.get(name, now)
            if name.startswith("order_"):
                found.append(now)
            now = None if now and name == now.last else now
        return found


class Cutting:
    """One graph, and how it is cut. batch: its inputs that hold sequences, along their first dimension."""

    def __init__(self, module: fx.GraphModule, batch: Sequence[fx.Node]) -> None:
        self._module, self._batch = module, batch
        self._axes, self._refused = infer(module.graph, dict.fromkeys(batch, 0))
        if batch:
            _put_last(module.graph, self._refused)
        self.calls = calls_of(module)
        self.names = tuple(map(label, self.calls))

    @property
    def sequences(self) -> int:
        """How many there are; 0 where nothing can be cut."""
        return int(self._batch[0].meta["val"].shape[0]) if self._batch else 0

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
        """The module with the plan's ranges in parts, and its layers' experts in blocks."""
        if plan.blocks:
            return in_blocks(self._module, plan.blocks)
        if not plan.ranges:
            return self._module
        if self.names == plan.names and self.sequences > 1:
            return cut(self._module, dict.fromkeys(plan.ranges, self._batch[0]), self._axes)
        axes, ranges = dict[fx.Node, Any](), dict[Range, fx.Node]()
        orders = [node for node in self.calls if node.target is OPS.order.default]
        joins = [node for node in self.calls if node.target is OPS.join.default]
        for order, join, found in zip(orders, joins, plan.ranges_of_layers(), strict=True):
            if found:
                begin, end = self.calls.index(order), self.calls.index(join) + 1
                body = self.calls[begin:end]
                with_results = [each for node in body for each in (node, *filter(is_result, node.users))]
                axes |= follow(with_results, _tokens(body))
                own = replace(found, first=label(order), last=label(join))
                ranges[own] = order.args[0]  # type: ignore[assignment]
        return cut(self._module, ranges, axes)


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
