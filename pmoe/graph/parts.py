"""A graph with ranges of its instructions cut in parts, in the order of Lancet's pipeline (section 5.3).

Parts are of the batch: part p of k holds the p-th k-th of its sequences. Inside a range, instructions that
compute without an all-to-all of rows between them are a stage; stages and parts take turns
(`pmoe.graph.ranges.turns`), every part's all-to-all behind what it sends. The capacity that one part of the
batch has used travels to the next (section 2.3), so that a gate drops the rows that it drops of the whole
batch. What somebody outside a range needs, backward among them, is joined at its end.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from pmoe.graph.axes import IRREGULAR, SUM
from pmoe.graph.lower import is_result, label, merge_weight_gradients
from pmoe.graph.operators import parts_of
from pmoe.graph.ranges import Range, stages, turns

aten: Any = torch.ops.aten
moe: Any = torch.ops.pmoe_graph
SIZED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
MADE = (aten.select_backward.default, aten.slice_backward.default, aten.new_zeros.default)
"""Operators that are told the size of their result: those that may infer one dimension, and others."""
VIEWS = (
    *(aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default),
    *(aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.detach.default),
)


def bounds(size: int, sequences: int, part: int, k: int) -> tuple[int, int]:
    """Where part ``part`` of k begins and ends in a dimension of ``size``, a multiple of the sequences.

    Example: 24 rows of 3 sequences in 2 parts -> (0, 8) and (8, 24).
    """
    unit = size // max(sequences, 1)
    return part * sequences // k * unit, (part + 1) * sequences // k * unit


def part_of_batch(tensor: Tensor, dim: int, sequences: int, part: int, k: int) -> Tensor:
    begin, end = bounds(tensor.shape[dim], sequences, part, k)
    return tensor.narrow(dim, begin, end - begin)


def joined_rows(rows: Sequence[Tensor], counts_RE: Sequence[Tensor], by_expert: bool) -> Tensor:
    """Rows of parts, each by (sender, expert) or (expert, sender), as the whole batch would have them. A
    part's rows of one sender and expert follow those of the part before."""
    if len(counts_RE[0]) == 1 and counts_RE[0].shape[1] == 1:
        return torch.cat(list(rows))
    keys = []
    for part, counts in enumerate(counts_RE):
        blocks = torch.arange(counts.numel()) * len(rows) + part
        keys.append(blocks.repeat_interleave((counts.t() if by_expert else counts).flatten()))
    index = torch.cat(keys).argsort(stable=True).to(rows[0].device, non_blocking=True)
    return torch.cat(list(rows)).index_select(0, index)


def rows_of_part(rows: Tensor, counts_kRE: Sequence[Tensor], part: int) -> Tensor:
    """The rows of one part, of all that lie by (expert, sender); the way back from `joined_rows`."""
    counts_ERk = torch.stack(list(counts_kRE), 2).transpose(0, 1)
    part_N = torch.arange(len(counts_kRE)).expand_as(counts_ERk).flatten()
    index = (part_N.repeat_interleave(counts_ERk.flatten()) == part).nonzero().flatten()
    return rows.index_select(0, index.to(rows.device, non_blocking=True))


def order_of_part(
    slot: Tensor, send_WE: Tensor, own_1E: Tensor, layer: int, sequences: int, part: int, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(slot, position, counts), as of `order`, of one part of a batch whose order is known."""
    begin, end = bounds(slot.shape[0], sequences, part, k)
    is_own = (slot >= begin) & (slot < end)
    found = slot[is_own] - begin
    position = torch.empty_like(found).scatter_(0, found, torch.arange(len(found), device=found.device))
    ends = torch.cat([send_WE.flatten(), own_1E.flatten()]).cumsum(0).to(slot.device, non_blocking=True)
    up_to = F.pad(is_own.cumsum(0), (1, 0))[ends]  # this part's rows, up to the last one of each expert
    travel_E, stay_E = F.pad(up_to, (1, 0)).diff().split([send_WE.numel(), own_1E.numel()])
    travel_E.view_as(send_WE)[parts_of(layer).ranks.rank] += stay_E
    return found, position, F.pad(travel_E, (0, 1))  # without a fault


def cut(
    module: fx.GraphModule, ranges: Mapping[Range, fx.Node], axes: Mapping[fx.Node, Any]
) -> fx.GraphModule:
    """The module in parts, each of some of the sequences, or tokens, along a tensor's first dimension: the
    range's. A node that is another's part says so in meta["origin"], one that joins its parts
    in meta["joins"]: by `label`."""
    return _Cutter(module, axes).run(ranges)


@dataclass(frozen=True, eq=False)
class Route:
    """A layer's way through a backward graph, whose order the forward pass found: from ``pack`` to the last
    `join`. kept: what is left of the forward pass, by name; rows' begin with that of the counts by which they
    lie."""

    pack: fx.Node
    last: fx.Node
    layer: int
    kept: Mapping[str, fx.Node]


def routes(graph: fx.Graph) -> list[Route]:
    """Of the layers whose order is an input of the graph; none where one's gradients do not come home."""
    found = []
    joins = graph.find_nodes(op="call_function", target=moe.join.default)
    for pack in graph.find_nodes(op="call_function", target=moe.pack.default):
        sends: Any = [
            user for each in pack.users for user in each.users if user.target is moe.exchange.default
        ]
        order: Any = pack.args[1:5]
        last = [join for join in joins if join.args[2] is order[0]]
        if not sends or not last or order[0].op != "placeholder":
            return []
        kept = dict(zip(ORDER, (*order, sends[0].args[2]), strict=True))
        for node in graph.find_nodes(op="call_function", target=moe.experts_input_gradient.default):
            counts = next((name for name in ("own", "recv") if kept[name] is node.args[4]), None)
            if counts:
                kept |= {f"{counts} {at}": node.args[at] for at in (1, 2, 3)}
        found.append(Route(pack, last[-1], sends[0].args[-1], kept))
    return found


ORDER = ("slot", "position", "send", "own", "recv")
"""Of `Route.kept`, what is no rows."""


class _Cutter:
    def __init__(self, module: fx.GraphModule, axes: Mapping[fx.Node, Any]) -> None:
        self.module, self.axes = module, axes
        self.graph, self.whole = fx.Graph(), dict[fx.Node, fx.Node]()
        self.sequences: Any = None
        self.kept: dict[fx.Node, tuple[Route, str]] = {}
        self.routed: dict[Route, list[dict[str, fx.Node]]] = {}

    def run(self, ranges: Mapping[Range, fx.Node]) -> fx.GraphModule:
        calls = [node for node in self.module.graph.nodes if node.op == "call_function"]
        place = {label(node): at for at, node in enumerate(calls)}
        begins = {place[each.first]: each for each in ranges}
        for node in self.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.whole[node] = self._copy(node, self.whole.__getitem__)
        for route in routes(self.module.graph):
            for found, batch in ranges.items():
                if place[found.first] <= place[label(route.pack)] <= place[found.last]:
                    self._route(route, batch, found.k)
        at = 0
        while at < len(calls):
            if at not in begins:
                self.whole[calls[at]] = self._copy(calls[at], self.whole.__getitem__)
                at += 1
                continue
            found = begins[at]
            end = place[found.last] + 1
            while end < len(calls) and is_result(calls[end]):
                end += 1
            self.sequences = self._size_of(ranges[found])
            self._cut(calls[at:end], found.k, found.lag)
            at = end
        output = self.module.graph.output_node()
        self.graph.output(fx.node.map_arg(output.args[0], self.whole.__getitem__))
        merge_weight_gradients(self.graph)
        return fx.GraphModule(self.module, self.graph)

    def _size_of(self, batch: fx.Node, route: Route | None = None) -> Any:
        size = batch.meta["val"].shape[0]
        if isinstance(size, int):
            return size
        # Of what comes later: the tokens that the slots are of.
        if route is not None and batch is route.pack.args[0]:
            slots = self._call(aten.sym_size.int, self.whole[route.kept["slot"]], 0)
            return self._call(operator.floordiv, slots, route.pack.args[5])
        return self._call(aten.sym_size.int, self.whole[batch], 0)

    def _route(self, route: Route, batch: fx.Node, k: int) -> None:
        """What each part must know of a route comes before all rows, for which it would wait on the link."""
        slot, _, send, own, _ = (self.whole[route.kept[name]] for name in ORDER)
        self.kept |= {node: (route, name) for name, node in route.kept.items()}
        parts, size = self.routed.setdefault(route, []), self._size_of(batch, route)
        rows: Any = route.pack.args[0]
        dtype = rows.meta["val"].dtype
        for part in range(k):

            def call(what: str, target: Any, *args: Any, part: int = part) -> fx.Node:
                return self._call(target, *args, name=f"{label(route.pack)}, {what} of part {part}")

            order = call("order", order_of_part, slot, send, own, route.layer, size, part, k)
            slot_p, position_p, counts = (call(f"order {at}", operator.getitem, order, at) for at in range(3))
            counted = call("counts", moe.exchange_counts.default, counts, slot_p, dtype, route.layer)
            send_p, recv_p, own_p = (call(f"counts {at}", operator.getitem, counted, at) for at in range(3))
            parts.append(dict(zip(ORDER, (slot_p, position_p, send_p, own_p, recv_p), strict=True)))

    def _routed(self, node: fx.Node, part: int) -> fx.Node:
        (route, what), whole = self.kept[node], self.whole[node]
        parts = self.routed[route]
        if what not in parts[part]:
            counts = [each[what.partition(" ")[0]] for each in parts]
            name = f"{label(route.pack)}, rows {what} of part {part}"
            parts[part][what] = self._call(rows_of_part, whole, counts, part, name=name)
        return parts[part][what]

    def _call(self, target: Callable[..., Any], *args: Any, name: str = "") -> fx.Node:
        made = self.graph.call_function(target, args)
        if name:
            made.meta["label"] = name
        return made

    def _copy(self, node: fx.Node, value: Callable[[fx.Node], fx.Node], part: str = "") -> fx.Node:
        copied = self.graph.node_copy(node, value)
        copied.meta = {**node.meta, "origin": label(node), "label": label(node) + part}
        return copied

    def _cut(self, body: Sequence[fx.Node], k: int, lag: int) -> None:
        parts: list[dict[fx.Node, fx.Node]] = [{} for _ in range(k)]
        inside = set[fx.Node]()
        for node in body:
            if any(each in inside or self.axes[each] is not None for each in node.all_input_nodes):
                inside.add(node)
            else:  # made of nothing that is cut: once for all parts
                self.whole[node] = self._copy(node, self.whole.__getitem__)
        cut = (node for node in body if node in inside)
        found = stages(cut, lambda node: node.target is moe.exchange.default)
        for at, part in turns(len(found), k, lag):
            for node in found[at]:
                self._emit(node, part, k, parts)
        for node in body:
            is_one = not isinstance(node.meta.get("val"), (tuple, list))
            if node in inside and is_one and not inside.issuperset(node.users):
                self.whole[node] = self._join(node, parts)
                self.whole[node].meta |= {"joins": label(node), "label": f"{label(node)}, joined"}

    def _emit(self, node: fx.Node, part: int, k: int, parts: Sequence[dict[fx.Node, fx.Node]]) -> None:
        here = parts[part]

        def value(each: fx.Node) -> fx.Node:
            if each not in here:
                axis, whole = self.axes.get(each), self.whole[each]
                here[each] = self._routed(each, part) if each in self.kept else whole
                if isinstance(axis, int) and isinstance(each.meta.get("val"), Tensor):
                    name = f"{label(each)}, cut for part {part}"
                    here[each] = self._call(part_of_batch, whole, axis, self.sequences, part, k, name=name)
            return here[each]

        used = None
        if node.target is moe.order.default and part:
            used = self._call(operator.getitem, parts[part - 1][node], 3)
        copied = self._copy(node, value, f", part {part}")
        axis = self.axes[node]
        if node.target in SIZED and isinstance(axis, int):
            whole = node.meta["val"].shape
            sizes = [whole[at] if each == -1 else each for at, each in enumerate(copied.args[1])]  # type: ignore[arg-type]
            sizes[axis] = -1
            copied.args = (copied.args[0], sizes)
        if node.target in MADE and isinstance(axis, int):
            source: Any = node.args[0]
            sizes = [*copied.args[1]]  # type: ignore[misc]
            with self.graph.inserting_before(copied):
                sizes[axis] = self._call(aten.sym_size.int, here[source], self.axes[source])
            copied.args = (copied.args[0], sizes, *copied.args[2:])
        if used is not None:
            copied.args = (*copied.args[:3], used, *copied.args[4:])
        here[node] = copied

    # ---- what the whole batch would have given

    def _join(self, node: fx.Node, parts: Sequence[Mapping[fx.Node, fx.Node]]) -> fx.Node:
        found, axis = [each[node] for each in parts], self.axes[node]
        # A view is one of the whole, which is joined once.
        if (isinstance(axis, int) or axis == SUM) and node.target in VIEWS:
            source = node.all_input_nodes[0]
            if source not in self.whole:
                self.whole[source] = self._join(source, parts)
            return self._copy(node, self.whole.__getitem__)
        if isinstance(axis, int):
            return self._call(aten.cat.default, found, axis)
        if axis == SUM:
            return functools.reduce(lambda a, b: self._call(aten.add.Tensor, a, b), found)
        if axis is None:
            return found[0]
        source, place = _maker(node, self.axes)
        if source.target is moe.order.default:
            return self._order(source, place, parts)
        if source.target is moe.exchange_counts.default or not isinstance(node.meta["val"], Tensor):
            total = found[0]  # row counts, and numbers of rows
            for each in found[1:]:
                total = self._call(operator.add, total, each)
            return total
        counts, by_expert = _layout(source, place, self.axes)
        return self._call(joined_rows, found, [each[counts] for each in parts], by_expert)

    def _order(self, node: fx.Node, place: int, parts: Sequence[Mapping[fx.Node, fx.Node]]) -> fx.Node:
        if place == 3:
            return self._call(operator.getitem, parts[-1][node], 3)
        if node not in self.whole:  # sorted once more, for all
            for each in node.all_input_nodes:
                if each not in self.whole:
                    self.whole[each] = self._join(each, parts)
            self.whole[node] = self._copy(node, self.whole.__getitem__)
        return self._call(operator.getitem, self.whole[node], place)


def _maker(node: fx.Node, axes: Mapping[fx.Node, Any]) -> tuple[fx.Node, int]:
    """The layer's operator that made irregular rows, and which of its results they are."""
    place = 0
    while node.target not in MAKERS:
        if node.target is operator.getitem:
            place = node.args[1]  # type: ignore[assignment]
            node = node.args[0]  # type: ignore[assignment]
        else:
            node = next(each for each in node.all_input_nodes if axes[each] == IRREGULAR)
    return node, place


def _layout(node: fx.Node, place: int, axes: Mapping[fx.Node, Any]) -> tuple[fx.Node, bool]:
    """The counts by which its rows lie, and whether experts come first there."""
    args: Any = node.args
    if node.target is moe.pack.default:
        return args[3 + place], False
    if node.target is moe.exchange.default:
        return args[2], not args[4]
    return args[2], _layout(*_maker(args[0], axes), axes)[1]  # the experts' rows lie as those they were given


MAKERS = frozenset(
    getattr(moe, name).default for name in ("order", "exchange_counts", "pack", "exchange", "experts")
)
