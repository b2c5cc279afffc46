"""Cuts ranges of a graph into parts of the batch, in the order of Lancet's pipeline (section 5.3).

Part p of k holds the p-th of k nearly equal runs of sequences. Inside a range, the instructions between two
all-to-alls of rows are a stage. Stages and parts take turns (`pmoe.graph.ranges.turns`): with k = 2 and
stages A (attention, gate), E (experts) and F (what follows),

    compute        A0   A1   E0   E1   F0   F1
    communicate        S0   S1   R0   R1            S dispatch, R combine

Each part's all-to-all starts as soon as the rows that it sends are computed. A part passes to the next how
much of every expert's capacity it has used (section 2.3), so that parts drop the rows that the whole batch
would drop. Tensors that are needed outside the range, for example by backward, are joined at its end.
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
from pmoe.graph.operators import modules_of
from pmoe.graph.ranges import Range, stages, turns

aten: Any = torch.ops.aten
moe: Any = torch.ops.pmoe_graph
SIZED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
"""Operators whose second argument is the result's sizes, of which one may be -1."""

MADE = (aten.select_backward.default, aten.slice_backward.default, aten.new_zeros.default)
"""Operators whose second argument is the result's sizes, all of which must be given."""

VIEWS = (
    *(aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default),
    *(aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.detach.default),
)
"""Operators whose result is a view of their first input."""


def bounds(size: int, sequences: int, part: int, k: int) -> tuple[int, int]:
    """Returns where a part begins and ends along a dimension of ``size``, a multiple of ``sequences``.

    part: from 0 to k - 1.

    Example: 24 rows of 3 sequences in 2 parts -> (0, 8) and (8, 24).
    """
    unit = size // max(sequences, 1)
    return part * sequences // k * unit, (part + 1) * sequences // k * unit


def part_of_batch(tensor: Tensor, dim: int, sequences: int, part: int, k: int) -> Tensor:
    """Returns a view of one part of a tensor of the whole batch, along ``dim``; see `bounds`."""
    begin, end = bounds(tensor.shape[dim], sequences, part, k)
    return tensor.narrow(dim, begin, end - begin)


def joined_rows(rows: Sequence[Tensor], counts_RE: Sequence[Tensor], by_expert: bool) -> Tensor:
    """Joins the rows of all parts in the order that the rows of the whole batch would have.

    rows: k tensors (N, ...), each by (sender, expert), or, with ``by_expert``, by (expert, sender).
    counts_RE: k tensors (R, E_local) on the host, rows of each sender and expert in the part.

    Rows of one sender and expert lie in the order of the parts. Example with 1 sender, 2 experts and 2 parts:

        part 0         a0 b0       (a rows of expert 0, b rows of expert 1)
        part 1         a1 b1
        whole batch    a0 a1 b0 b1
    """
    if len(counts_RE[0]) == 1 and counts_RE[0].shape[1] == 1:
        return torch.cat(list(rows))
    keys = []  # each row's place: block of (sender, expert) first, then part
    for part, counts in enumerate(counts_RE):
        blocks = torch.arange(counts.numel()) * len(rows) + part
        keys.append(blocks.repeat_interleave((counts.t() if by_expert else counts).flatten()))
    index = torch.cat(keys).argsort(stable=True).to(rows[0].device, non_blocking=True)
    return torch.cat(list(rows)).index_select(0, index)


def rows_of_part(rows: Tensor, counts_kRE: Sequence[Tensor], part: int) -> Tensor:
    """Returns the rows of one part of the whole batch's rows: the reverse of `joined_rows` by expert.

    rows: (N, ...), by (expert, sender).
    counts_kRE: k tensors (R, E_local) on the host, rows of each sender and expert in each part.
    """
    counts_ERk = torch.stack(list(counts_kRE), 2).transpose(0, 1)
    part_N = torch.arange(len(counts_kRE)).expand_as(counts_ERk).flatten()
    index = (part_N.repeat_interleave(counts_ERk.flatten()) == part).nonzero().flatten()
    return rows.index_select(0, index.to(rows.device, non_blocking=True))


def order_of_part(
    slot: Tensor, send_WE: Tensor, own_1E: Tensor, layer: int, sequences: int, part: int, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (slot, position, counts) of one part, as `order` does, from the order of the whole batch.

    slot: (S,), the slots of the whole batch in sorted order.
    send_WE, own_1E: the row counts of the whole batch, as `exchange_counts` returns them.
    layer: the layer's number.
    sequences, part, k: as in `bounds`. A part is a run of slots: those of its tokens.

    Backward needs it: the order of the whole batch is saved from the forward pass, that of a part is not.
    """
    begin, end = bounds(slot.shape[0], sequences, part, k)
    is_in_part = (slot >= begin) & (slot < end)
    slots_of_part = slot[is_in_part] - begin
    position = torch.empty_like(slots_of_part).scatter_(
        0, slots_of_part, torch.arange(len(slots_of_part), device=slots_of_part.device)
    )
    ends = torch.cat([send_WE.flatten(), own_1E.flatten()]).cumsum(0).to(slot.device, non_blocking=True)
    # This part's rows up to the end of each expert's block; the differences are its rows of each expert.
    rows_before = F.pad(is_in_part.cumsum(0), (1, 0))[ends]
    travel_E, stay_E = F.pad(rows_before, (1, 0)).diff().split([send_WE.numel(), own_1E.numel()])
    travel_E.view_as(send_WE)[modules_of(layer).ranks.rank] += stay_E
    # The last count is 0, no fault: the forward pass has checked the routing.
    return slots_of_part, position, F.pad(travel_E, (0, 1))


def cut(
    module: fx.GraphModule, ranges: Mapping[Range, fx.Node], axes: Mapping[fx.Node, Any]
) -> fx.GraphModule:
    """Returns the module with these ranges cut into parts.

    ranges: each range with the tensor whose first dimension is its batch: sequences, or tokens.
    axes: the axis of each node, as `infer` finds them.

    In the new graph, a part of a node has that node's `label` in meta["origin"]. A node that joins the parts
    has it in meta["joins"].
    """
    return _Cutter(module, axes).run(ranges)


@dataclass(frozen=True, eq=False)
class Route:
    """A layer in a backward graph: its instructions from `pack` to the last `join`.

    pack: packs the gradients of the layer's output, which then travel.
    last: sums the gradients of the layer's input.
    layer: the layer's number.
    kept: tensors saved by the forward pass, of the whole batch, by name. `ORDER` has the names of those that
        hold no rows. Rows, routing weights and T_M are "own 1", "own 2" and "own 3" for rows that stayed, and
        "recv 1", "recv 2" and "recv 3" for rows that came; "own" and "recv" are the counts by which they lie.
    """

    pack: fx.Node
    last: fx.Node
    layer: int
    kept: Mapping[str, fx.Node]


def routes(graph: fx.Graph) -> list[Route]:
    """Returns the routes of a backward graph's layers, in order; none for a forward graph.

    In a backward graph the order of the slots is an input. If that does not hold for one layer, or if its
    gradients do not travel, the result is empty: then no layer can be cut.
    """
    found_routes = []
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
        found_routes.append(Route(pack, last[-1], sends[0].args[-1], kept))
    return found_routes


ORDER = ("slot", "position", "send", "own", "recv")
"""Names in `Route.kept` of the order of the slots and of the row counts; all others are rows."""


class _Cutter:
    """Builds the graph in parts, node by node.

    graph: the new graph.
    whole: for a node of the old graph, the node of the new one with the value of the whole batch.
    sequences: node or number, the length of the batch in the range that is being cut.
    kept: for a saved tensor of a route, the route and the tensor's name in `Route.kept`.
    routed: for each route, one dict for each part: its order, counts and rows, by the same names.
    """

    def __init__(self, module: fx.GraphModule, axes: Mapping[fx.Node, Any]) -> None:
        self.module = module
        self.axes = axes
        self.graph = fx.Graph()
        self.whole = dict[fx.Node, fx.Node]()
        self.sequences: Any = None
        self.kept: dict[fx.Node, tuple[Route, str]] = {}
        self.routed: dict[Route, list[dict[str, fx.Node]]] = {}

    def run(self, ranges: Mapping[Range, fx.Node]) -> fx.GraphModule:
        """Copies the graph in its order, ranges in parts. Arguments and result are those of `cut`."""
        calls = [node for node in self.module.graph.nodes if node.op == "call_function"]
        place_of = {label(node): index for index, node in enumerate(calls)}
        begins = {place_of[each.first]: each for each in ranges}
        for node in self.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.whole[node] = self._copy(node, self.whole.__getitem__)
        for route in routes(self.module.graph):
            for range_, batch in ranges.items():
                if place_of[range_.first] <= place_of[label(route.pack)] <= place_of[range_.last]:
                    self._route(route, batch, range_.k)
        index = 0
        while index < len(calls):
            if index not in begins:
                self.whole[calls[index]] = self._copy(calls[index], self.whole.__getitem__)
                index += 1
                continue
            range_ = begins[index]
            end = place_of[range_.last] + 1
            while end < len(calls) and is_result(calls[end]):
                end += 1
            self.sequences = self._size_of(ranges[range_])
            self._cut(calls[index:end], range_.k, range_.lag)
            index = end
        output = self.module.graph.output_node()
        self.graph.output(fx.node.map_arg(output.args[0], self.whole.__getitem__))
        merge_weight_gradients(self.graph)
        return fx.GraphModule(self.module, self.graph)

    def _size_of(self, batch: fx.Node, route: Route | None = None) -> Any:
        """Returns the length of the batch: a number, or a node that computes it when the graph runs."""
        size = batch.meta["val"].shape[0]
        if isinstance(size, int):
            return size
        # The orders of parts are computed before everything else (`_route`), so the batch may not exist yet.
        # The slots do: tokens = slots / top_k.
        if route is not None and batch is route.pack.args[0]:
            slots = self._call(aten.sym_size.int, self.whole[route.kept["slot"]], 0)
            return self._call(operator.floordiv, slots, route.pack.args[5])
        return self._call(aten.sym_size.int, self.whole[batch], 0)

    def _route(self, route: Route, batch: fx.Node, k: int) -> None:
        """Computes the order and the row counts of every part of a route, before any rows of the pass travel.

        Later, an exchange of counts would queue behind rows on the link, and the host would wait for both.
        """
        slot, _, send, own, _ = (self.whole[route.kept[name]] for name in ORDER)
        self.kept |= {node: (route, name) for name, node in route.kept.items()}
        parts = self.routed.setdefault(route, [])
        size = self._size_of(batch, route)
        rows: Any = route.pack.args[0]
        dtype = rows.meta["val"].dtype
        for part in range(k):

            def call(what: str, target: Any, *args: Any, part: int = part) -> fx.Node:
                """Adds a call that is labelled by the route's pack, ``what`` and the part."""
                return self._call(target, *args, name=f"{label(route.pack)}, {what} of part {part}")

            order = call("order", order_of_part, slot, send, own, route.layer, size, part, k)
            slot_p, position_p, counts = (call(f"order {at}", operator.getitem, order, at) for at in range(3))
            counted = call("counts", moe.exchange_counts.default, counts, slot_p, dtype, route.layer)
            send_p, recv_p, own_p = (call(f"counts {at}", operator.getitem, counted, at) for at in range(3))
            parts.append(dict(zip(ORDER, (slot_p, position_p, send_p, own_p, recv_p), strict=True)))

    def _routed(self, node: fx.Node, part: int) -> fx.Node:
        """Returns one part of a tensor that a route has saved from the forward pass."""
        route, kind = self.kept[node]
        whole = self.whole[node]
        parts = self.routed[route]
        if kind not in parts[part]:
            counts = [each[kind.partition(" ")[0]] for each in parts]
            call_name = f"{label(route.pack)}, rows {kind} of part {part}"
            parts[part][kind] = self._call(rows_of_part, whole, counts, part, name=call_name)
        return parts[part][kind]

    def _call(self, target: Callable[..., Any], *args: Any, name: str = "") -> fx.Node:
        """Adds a call to the new graph. name: its `label`, if it needs one."""
        call = self.graph.call_function(target, args)
        if name:
            call.meta["label"] = name
        return call

    def _copy(self, node: fx.Node, value: Callable[[fx.Node], fx.Node], part: str = "") -> fx.Node:
        """Copies a node to the new graph. value: gives the new node of each input. part: ends the label."""
        copied = self.graph.node_copy(node, value)
        copied.meta = {**node.meta, "origin": label(node), "label": label(node) + part}
        return copied

    def _cut(self, body: Sequence[fx.Node], k: int, lag: int) -> None:
        """Adds one range in k parts, in the order of `turns`, and joins the results that others need."""
        parts: list[dict[fx.Node, fx.Node]] = [{} for _ in range(k)]
        inside = set[fx.Node]()
        for node in body:
            if any(source in inside or self.axes[source] is not None for source in node.all_input_nodes):
                inside.add(node)
            else:  # no input is cut: computed once, for all parts
                self.whole[node] = self._copy(node, self.whole.__getitem__)
        cut = (node for node in body if node in inside)
        stages_of_range = stages(cut, lambda node: node.target is moe.exchange.default)
        for stage, part in turns(len(stages_of_range), k, lag):
            for node in stages_of_range[stage]:
                self._emit(node, part, k, parts)
        for node in body:
            # A tuple is not joined: the nodes that take its elements are.
            is_one = not isinstance(node.meta.get("val"), (tuple, list))
            if node in inside and is_one and not inside.issuperset(node.users):
                self.whole[node] = self._join(node, parts)
                self.whole[node].meta |= {"joins": label(node), "label": f"{label(node)}, joined"}

    def _emit(self, node: fx.Node, part: int, k: int, parts: Sequence[dict[fx.Node, fx.Node]]) -> None:
        """Adds one part of a node, and enters it in ``parts``: by part, the new nodes of the old ones."""
        new_nodes = parts[part]

        def value(each: fx.Node) -> fx.Node:
            """Returns this part of an input; an input from outside the range is cut at its first use."""
            if each not in new_nodes:
                axis = self.axes.get(each)
                whole = self.whole[each]
                new_nodes[each] = self._routed(each, part) if each in self.kept else whole
                if isinstance(axis, int) and isinstance(each.meta.get("val"), Tensor):
                    name = f"{label(each)}, cut for part {part}"
                    new_nodes[each] = self._call(
                        part_of_batch, whole, axis, self.sequences, part, k, name=name
                    )
            return new_nodes[each]

        used_E = None
        if node.target is moe.order.default and part:  # takes the capacity that the part before has used
            used_E = self._call(operator.getitem, parts[part - 1][node], 3)
        copied = self._copy(node, value, f", part {part}")
        axis = self.axes[node]
        if node.target in SIZED and isinstance(axis, int):
            whole = node.meta["val"].shape
            sizes = [whole[index] if each == -1 else each for index, each in enumerate(copied.args[1])]  # type: ignore[arg-type]
            sizes[axis] = -1
            copied.args = (copied.args[0], sizes)
        if node.target in MADE and isinstance(axis, int):
            source: Any = node.args[0]
            sizes = [*copied.args[1]]  # type: ignore[misc]
            with self.graph.inserting_before(copied):
                sizes[axis] = self._call(aten.sym_size.int, new_nodes[source], self.axes[source])
            copied.args = (copied.args[0], sizes, *copied.args[2:])
        if used_E is not None:
            copied.args = (*copied.args[:3], used_E, *copied.args[4:])
        new_nodes[node] = copied

    # ---- values of the whole batch, from its parts

    def _join(self, node: fx.Node, parts: Sequence[Mapping[fx.Node, fx.Node]]) -> fx.Node:
        """Returns the node's value for the whole batch. How parts are joined follows from the node's axis:

        a dimension   concatenated
        SUM           added
        None          the same in all parts: the first is taken
        IRREGULAR     rows are put in the order of the whole batch, counts added, an order computed again
        """
        values = [part[node] for part in parts]
        axis = self.axes[node]
        # Views of one tensor share its joined copy: each joined by itself would need memory of its own.
        if (isinstance(axis, int) or axis == SUM) and node.target in VIEWS:
            source = node.all_input_nodes[0]
            if source not in self.whole:
                self.whole[source] = self._join(source, parts)
            return self._copy(node, self.whole.__getitem__)
        if isinstance(axis, int):
            return self._call(aten.cat.default, values, axis)
        if axis == SUM:
            return functools.reduce(lambda a, b: self._call(aten.add.Tensor, a, b), values)
        if axis is None:
            return values[0]
        source, place = _maker(node, self.axes)
        if source.target is moe.order.default:
            return self._order(source, place, parts)
        if source.target is moe.exchange_counts.default or not isinstance(node.meta["val"], Tensor):
            total = values[0]  # row counts, or a number of rows
            for part in values[1:]:
                total = self._call(operator.add, total, part)
            return total
        counts, by_expert = _layout(source, place, self.axes)
        return self._call(joined_rows, values, [part[counts] for part in parts], by_expert)

    def _order(self, node: fx.Node, place: int, parts: Sequence[Mapping[fx.Node, fx.Node]]) -> fx.Node:
        """Returns a result of `order` for the whole batch. place: which of its results."""
        if place == 3:  # used_E: the last part has counted all before it
            return self._call(operator.getitem, parts[-1][node], 3)
        if node not in self.whole:  # sorts the whole batch once more
            for each in node.all_input_nodes:
                if each not in self.whole:
                    self.whole[each] = self._join(each, parts)
            self.whole[node] = self._copy(node, self.whole.__getitem__)
        return self._call(operator.getitem, self.whole[node], place)


def _maker(node: fx.Node, axes: Mapping[fx.Node, Any]) -> tuple[fx.Node, int]:
    """Returns the layer's operator from which an irregular tensor comes, and the position of its result."""
    place = 0
    while node.target not in MAKERS:
        if node.target is operator.getitem:
            place = node.args[1]  # type: ignore[assignment]
            node = node.args[0]  # type: ignore[assignment]
        else:
            node = next(each for each in node.all_input_nodes if axes[each] == IRREGULAR)
    return node, place


def _layout(node: fx.Node, place: int, axes: Mapping[fx.Node, Any]) -> tuple[fx.Node, bool]:
    """Returns the node of the counts of an operator's rows, and whether they lie by (expert, sender).

    node, place: the operator and the position of its result, as `_maker` returns them.
    """
    args: Any = node.args
    if node.target is moe.pack.default:
        return args[3 + place], False
    if node.target is moe.exchange.default:
        return args[2], not args[4]
    return args[2], _layout(*_maker(args[0], axes), axes)[1]  # the experts' results lie as their rows do


MAKERS = frozenset(
    getattr(moe, name).default for name in ("order", "exchange_counts", "pack", "exchange", "experts")
)
"""Operators of a layer that make irregular tensors."""
