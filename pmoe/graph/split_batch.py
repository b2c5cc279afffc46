"""Cuts ranges of a graph into parts of the batch, in the order of Lancet's pipeline (section 5.3).

A range is a run of consecutive operator calls. The sequences of the batch are divided into k parts of nearly
equal size. Inside a range, each all-to-all of rows ends a stage. Each stage runs once for each part, in the
order that `pmoe.graph.ranges.turns` gives. An example with k = 2 parts, numbered 0 and 1:

    compute        A0   A1   E0   E1   F0   F1
    communicate        S0   S1   R0   R1

The three stages are A with S, E with R, and F. A is attention and gate, S the dispatch, E the experts, R the
combine, F the operators after the layer.

The all-to-all of a part starts as soon as the rows that it sends are computed. Each part passes to the next
part how many rows every expert has so far (section 2.3). So all parts together drop the rows that the whole
batch would drop. At the end of a range, the parts of a tensor are joined if the tensor is read outside the
range, for example by backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from pmoe.graph.axes import IRREGULAR, SUM
from pmoe.graph.lower import NUMBERS, is_result, label, merge_weight_gradients
from pmoe.graph.operators import modules_of
from pmoe.graph.ranges import Range, stages, turns

aten: Any = torch.ops.aten
moe: Any = torch.ops.pmoe_graph
SIZED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
"""Operators whose second argument is the sizes of the result. One size may be -1: it follows from the
others.
"""

MADE = (aten.select_backward.default, aten.slice_backward.default, aten.new_zeros.default)
"""Operators whose second argument is the sizes of the result. No size may be -1."""

COUNTED: dict[object, int] = {
    aten.native_group_norm.default: 3,
    aten.native_group_norm_backward.default: 5,
}
"""{operator that takes the length of the batch as an argument: position of this argument}.

The length of the batch is the first size of the operator's first tensor.
"""

VIEWS = (
    *(aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default),
    *(aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.detach.default),
)
"""Operators that return a view of their first input."""


def bounds(size: int, sequences: int, part: int, k: int) -> tuple[int, int]:
    """Returns where a part of the batch begins and ends along one dimension of a tensor.

    Each part has whole sequences.

    size: length of the dimension, a multiple of ``sequences``.
    sequences: number of sequences in the batch. A dimension of tokens is longer than this number, because
        each sequence has several tokens.
    part: number of the part, from 0 to k - 1.
    k: number of parts.

    Example: 24 rows of 3 sequences in 2 parts -> (0, 8) and (8, 24).
    """
    unit = size // max(sequences, 1)
    return part * sequences // k * unit, (part + 1) * sequences // k * unit


def part_of_batch(tensor: Tensor, dim: int, sequences: int, part: int, k: int) -> Tensor:
    """Returns a view of one part of a tensor that holds the whole batch.

    tensor: (...) of any shape.
    dim: the dimension along which the tensor is cut.
    sequences: number of sequences in the batch. If the dimension has several tokens (or rows) for each
        sequence, a part has all tokens of its sequences.
    part: number of the part, from 0 to k - 1.
    k: number of parts.
    """
    begin, end = bounds(tensor.shape[dim], sequences, part, k)
    return tensor.narrow(dim, begin, end - begin)


def memory_order(tensor: Tensor) -> list[int]:
    """Returns the dimensions of a tensor by their strides, the one with the largest stride first.

    tensor: (...) of any shape. Its strides may be symbols. If the trace does not know which of two strides is
        larger, the dimensions of both keep their order.

    Example: a contiguous (4, 6, 2) tensor -> [0, 1, 2]; its transpose (4, 2, 6) -> [0, 2, 1].
    """
    strides = tensor.stride()
    ones = [dim for dim, size in enumerate(tensor.shape) if statically_known_true(size == 1)]
    order = list[int]()
    for dim, stride in enumerate(strides):
        if dim in ones:
            continue
        place = len(order)
        while place and statically_known_true(strides[order[place - 1]] < stride):
            place -= 1
        order.insert(place, dim)
    # A dimension of size 1 may have any stride: it keeps its place behind the dimension before it.
    for dim in ones:
        order.insert(order.index(dim - 1) + 1 if dim else 0, dim)
    return order


def joined_in_order(parts: Sequence[Tensor], dim: int, order: Sequence[int]) -> Tensor:
    """Joins the parts of a tensor, and keeps the order of dimensions in memory that the whole tensor has.

    A later ``view`` may depend on this order, also in the backward graph, which is traced for it.

    parts: the parts of the batch, (...) of any shape.
    dim: the dimension along which the tensor was cut.
    order: the dimensions of the whole tensor, that with the largest stride first (`memory_order`).
    """
    joined = torch.cat([part.permute(*order) for part in parts], order.index(dim))
    return joined.permute(*(order.index(dim) for dim in range(len(order))))


def joined_rows(rows: Sequence[Tensor], counts_RE: Sequence[Tensor], by_expert: bool) -> Tensor:
    """Joins the rows of all parts of the batch, in the order that the rows of the whole batch would have.

    N is the number of rows of a part, R the number of ranks that sent rows (senders), E_local the number of
    experts of one rank.

    rows: for each part a tensor (N, ...), sorted by (sender, expert); with ``by_expert`` by (expert, sender).
    counts_RE: for each part a tensor (R, E_local) on the host: the part's number of rows from each sender for
        each expert.
    by_expert: whether rows are sorted by expert first.

    In the result, rows of the same sender and expert are in the order of the parts. Example with 1 sender and
    2 parts, in which a0 and a1 are rows of expert 0, and b0 and b1 are rows of expert 1:

        part 0         a0 b0
        part 1         a1 b1
        whole batch    a0 a1 b0 b1
    """
    if len(counts_RE[0]) == 1 and counts_RE[0].shape[1] == 1:
        return torch.cat(list(rows))
    keys = []  # sort key of each row: its block of (sender, expert) first, then its part
    for part, counts in enumerate(counts_RE):
        blocks = torch.arange(counts.numel()) * len(rows) + part
        keys.append(blocks.repeat_interleave((counts.t() if by_expert else counts).flatten()))
    index = torch.cat(keys).argsort(stable=True).to(rows[0].device, non_blocking=True)
    return torch.cat(list(rows)).index_select(0, index)


def rows_of_part(rows: Tensor, counts_kRE: Sequence[Tensor], part: int) -> Tensor:
    """Returns the rows of one part of the batch, selected from the rows of the whole batch.

    The function is the reverse of `joined_rows` for rows that are sorted by expert. N is the number of rows,
    R the number of ranks that sent rows (senders), E_local the number of experts of one rank.

    rows: (N, ...), rows of the whole batch, sorted by (expert, sender).
    counts_kRE: for each of k parts a tensor (R, E_local) on the host: the part's number of rows from each
        sender for each expert.
    part: number of the part.
    """
    counts_ERk = torch.stack(list(counts_kRE), 2).transpose(0, 1)
    part_N = torch.arange(len(counts_kRE)).expand_as(counts_ERk).flatten()
    index = (part_N.repeat_interleave(counts_ERk.flatten()) == part).nonzero().flatten()
    return rows.index_select(0, index.to(rows.device, non_blocking=True))


def order_of_part(
    slot: Tensor, send_WE: Tensor, own_1E: Tensor, layer: int, sequences: int, part: int, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sorted slots of one part of the batch, from the sorted slots of the whole batch.

    A slot is one choice of one token, so a token with K experts has K slots. A backward graph in parts needs
    this function, because forward saves only the order of the whole batch. S is the number of slots, W the
    number of ranks, E_local the number of experts of one rank.

    slot: (S,), the sorted slots of the whole batch.
    send_WE: (W, E_local), the whole batch's numbers of rows that are sent to each rank's experts
        (`exchange_counts`).
    own_1E: (1, E_local), the whole batch's numbers of rows that stay on this rank.
    layer: the number that stands for the layer (`number_of`).
    sequences: number of sequences or tokens in the batch.
    part: number of the part, from 0 to k - 1. A part has the slots of its own tokens.
    k: number of parts.

    Returns (slot, position, counts), the first three results that `order` would give for the part.
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


def cut_ranges(
    module: fx.GraphModule,
    ranges: Mapping[Range, fx.Node],
    axes: Mapping[fx.Node, Any],
    uncut: Collection[fx.Node] = (),
) -> fx.GraphModule:
    """Returns a new module, in which some ranges of the old module are cut into parts of the batch.

    A range is a run of consecutive operator calls.

    module: the old module with its graph.
    ranges: {range to cut: a tensor whose first size is the length of the batch (in sequences or tokens)}.
    axes: for each node, the dimension along which it is cut (`pmoe.graph.axes.infer`).
    uncut: nodes that run once, on whole inputs (`pmoe.graph.axes.Inferred`).

    In the new graph, a call that was cut has one node for each part. Each of these nodes has the call's
    `label` in meta["origin"]. The node that joins the parts has this label in meta["joins"].
    """
    return _Cutter(module, axes, uncut).run(ranges)


@dataclass(frozen=True, eq=False)
class Route:
    """The calls of one MoELayer in a backward graph, from `pack` to the last `join`.

    pack: the call that copies the gradients of the layer's output into rows, which are then sent to the
        experts.
    last: the call that sums the gradients of each token's rows. Its result is the gradient of the layer's
        input.
    layer: the number that stands for the layer (`number_of`).
    kept: tensors of the whole batch that the forward pass saved, by the names in the table.

        "slot"       the sorted slots (choices of tokens)
        "position"   the position of each slot in the sorted order
        "send"       numbers of rows that were sent to other ranks
        "own"        numbers of rows that stayed on this rank
        "recv"       numbers of rows that were received from other ranks
        "own 1"      the rows that stayed
        "own 2"      routing weights of the rows that stayed
        "own 3"      T_M, the hidden activation of the experts, for the rows that stayed
        "recv 1"     the rows that were received
        "recv 2"     routing weights of the rows that were received
        "recv 3"     T_M for the rows that were received
    """

    pack: fx.Node
    last: fx.Node
    layer: int
    kept: Mapping[str, fx.Node]


def routes(graph: fx.Graph) -> list[Route]:
    """Finds the MoELayers of a backward graph, in order. Returns [] for a forward graph.

    The backward pass of a layer can be cut into parts only under two conditions:

    - The layer's sorted slots are an input of the backward graph, saved by forward. A slot is one choice of
      one token.
    - Gradients of rows are sent between ranks.

    If any layer does not meet both conditions, the result is [], and no layer is cut.
    """
    found_routes = []
    joins = graph.find_nodes(op="call_function", target=moe.join.default)
    for pack in graph.find_nodes(op="call_function", target=moe.pack.default):
        sends: Any = [
            user for result in pack.users for user in result.users if user.target is moe.exchange.default
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
"""Names in `Route.kept` of tensors that are no rows: the sorted slots and the row counts."""


class _Cutter:
    """Builds, node by node, a new graph in which ranges of an old graph are cut into parts of the batch.

    A range is a run of consecutive operator calls.

    module: the module with the old graph.
    axes: for each node of the old graph, the dimension along which it is cut.
    uncut: nodes of the old graph that run once, on whole inputs.
    graph: the new graph.
    whole: for a node of the old graph, the node of the new graph that has its value for the whole batch.
    sequences: length of the batch in the range that is being cut. It is a number, or a node of the new graph
        that computes the number.
    first: the name of the range that is being cut: the label of its first call.
    kept: {tensor that forward saved for a layer: the layer's `Route`, and the tensor's name in `Route.kept`}.
    routed: for the `Route` of each layer, one dict for each part. The dict has the nodes with the part's
        sorted slots, row counts and rows, by the names of `Route.kept`.
    """

    def __init__(
        self, module: fx.GraphModule, axes: Mapping[fx.Node, Any], uncut: Collection[fx.Node]
    ) -> None:
        self.module = module
        self.axes = axes
        self.uncut = uncut
        self.graph = fx.Graph()
        self.whole = dict[fx.Node, fx.Node]()
        self.sequences: Any = None
        self.first = ""
        self.kept: dict[fx.Node, tuple[Route, str]] = {}
        self.routed: dict[Route, list[dict[str, fx.Node]]] = {}

    def run(self, ranges: Mapping[Range, fx.Node]) -> fx.GraphModule:
        """Copies the old graph in its order, with ranges cut into parts. Returns the new module.

        ranges: {range (run of consecutive calls) to cut: a tensor whose first size is the length of the
            batch}.
        """
        calls = [node for node in self.module.graph.nodes if node.op == "call_function"]
        place_of = {label(node): index for index, node in enumerate(calls)}
        begins = {place_of[range_.first]: range_ for range_ in ranges}
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
            self.first = range_.first
            self._cut(calls[index:end], range_.k, range_.lag)
            index = end
        output = self.module.graph.output_node()
        self.graph.output(fx.node.map_arg(output.args[0], self.whole.__getitem__))
        merge_weight_gradients(self.graph)
        return fx.GraphModule(self.module, self.graph)

    def _size_of(self, batch: fx.Node, route: Route | None = None) -> Any:
        """Returns the length of the batch: a number, or a node that computes the length when the graph runs.

        batch: a tensor of the old graph whose first size is the length of the batch.
        route: a layer's `Route`, from which the length is computed if ``batch`` itself is not computed yet:
            forward has saved the layer's slots (choices of tokens). None if ``batch`` is already computed.
        """
        size = batch.meta["val"].shape[0]
        if isinstance(size, int):
            return size
        # The sorted slots of all parts are computed before everything else (`_route`), so ``batch`` may not
        # be computed yet. The slots of the whole batch are an input: tokens = slots / top_k.
        if route is not None and batch is route.pack.args[0]:
            slots = self._call(aten.sym_size.int, self.whole[route.kept["slot"]], 0)
            return self._call(operator.floordiv, slots, route.pack.args[5])
        return self._call(aten.sym_size.int, self.whole[batch], 0)

    def _route(self, route: Route, batch: fx.Node, k: int) -> None:
        """Adds the operator calls that compute a layer's sorted slots and row counts for every part.

        A slot is one choice of one token. The added calls come before all other calls of the graph. One of
        them is an exchange of row counts, for which the host waits. If it came later, it would have to wait
        until rows are sent.

        route: the calls of the layer in the backward graph.
        batch: a tensor of the old graph whose first size is the length of the batch.
        k: number of parts.
        """
        slot, _, send, own, _ = (self.whole[route.kept[name]] for name in ORDER)
        self.kept |= {node: (route, name) for name, node in route.kept.items()}
        parts = self.routed.setdefault(route, [])
        size = self._size_of(batch, route)
        rows: Any = route.pack.args[0]
        dtype = rows.meta["val"].dtype
        for part in range(k):

            def call(what: str, target: Any, *args: Any, part: int = part) -> fx.Node:
                """Adds a call of ``target`` to the new graph. Labels it with layer, ``what`` and part."""
                return self._call(target, *args, name=f"{label(route.pack)}, {what} of part {part}")

            order = call("order", order_of_part, slot, send, own, route.layer, size, part, k)
            slot_p, position_p, counts = (call(f"order {at}", operator.getitem, order, at) for at in range(3))
            counted = call("counts", moe.exchange_counts.default, counts, slot_p, dtype, route.layer)
            send_p, recv_p, own_p = (call(f"counts {at}", operator.getitem, counted, at) for at in range(3))
            parts.append(dict(zip(ORDER, (slot_p, position_p, send_p, own_p, recv_p), strict=True)))

    def _routed(self, node: fx.Node, part: int) -> fx.Node:
        """Returns the node of the new graph with one part's rows of a tensor that forward saved.

        The first call for a part of a tensor adds to the new graph the call that selects the rows.

        node: the saved tensor, a node of the old graph.
        part: number of the part.
        """
        route, kind = self.kept[node]
        whole = self.whole[node]
        parts = self.routed[route]
        if kind not in parts[part]:
            counts = [part_nodes[kind.partition(" ")[0]] for part_nodes in parts]
            call_name = f"{label(route.pack)}, rows {kind} of part {part}"
            parts[part][kind] = self._call(rows_of_part, whole, counts, part, name=call_name)
        return parts[part][kind]

    def _call(self, target: Callable[..., Any], *args: Any, name: str = "") -> fx.Node:
        """Adds a call to the new graph, and returns its node.

        target: the operator or function that is called.
        args: its arguments.
        name: the `label` of the call; "" for one that is made of the node's name.
        """
        call = self.graph.call_function(target, args)
        # The names of other calls do not end so, and the new graph has each name only once.
        call.meta["label"] = name or f"{call.name}, added"
        return call

    def _copy(self, node: fx.Node, value: Callable[[fx.Node], fx.Node], part: str = "") -> fx.Node:
        """Copies a node of the old graph to the new graph, and returns the copy.

        node: the node of the old graph.
        value: function that returns, for an input of ``node``, the node of the new graph that the copy reads.
        part: text that is added to the label of the copy.
        """
        copied = self.graph.node_copy(node, value)
        copied.meta = {**node.meta, "origin": label(node), "label": label(node) + part}
        return copied

    def _cut(self, body: Sequence[fx.Node], k: int, lag: int) -> None:
        """Adds one range in k parts to the new graph. Joins the parts of results that are read outside it.

        body: the calls of the range, in order.
        k: number of parts.
        lag: in each MoELayer, the second stage (experts, combine) of part p runs after the first stage (gate,
            dispatch) of part p + lag (`pmoe.graph.ranges.turns`).
        """
        parts: list[dict[fx.Node, fx.Node]] = [{} for _ in range(k)]
        inside = set[fx.Node]()
        for node in body:
            sources = node.all_input_nodes
            # A size may be that of a whole tensor from before the range, which is cut in the range.
            is_number = isinstance(node.meta.get("val"), NUMBERS)
            reads_whole = all(self.axes[source] is None for source in sources)
            if (reads_whole or is_number or node in self.uncut) and inside.isdisjoint(sources):
                self.whole[node] = self._copy(node, self.whole.__getitem__)  # computed once, for all parts
            else:
                inside.add(node)
        cut_nodes = (node for node in body if node in inside)
        stages_of_range = stages(cut_nodes, lambda node: node.target is moe.exchange.default)
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
        """Adds one part of a call to the new graph.

        In the new graph, ranges of the old graph are cut into parts of the batch.

        node: the call, a node of the old graph.
        part: number of the part.
        k: number of parts.
        parts: a dict for each part of the batch, {node of the old graph: node of the new graph that computes
            the part}. The added node is stored in the dict of its part.
        """
        new_nodes = parts[part]

        def value(old_node: fx.Node) -> fx.Node:
            """Returns the node of the new graph that holds part ``part`` of one of the call's inputs.

            old_node: the input, a node of the old graph.

            An input that was computed before the range, or once for all parts, is not cut yet. If it must be
            cut along a dimension, a call that selects the part is added to the new graph.
            """
            if old_node not in new_nodes:
                axis = self.axes.get(old_node)
                whole = self.whole[old_node]
                new_nodes[old_node] = self._routed(old_node, part) if old_node in self.kept else whole
                if isinstance(axis, int) and isinstance(old_node.meta.get("val"), Tensor):
                    # Each range cuts the tensor for itself, and no two calls may have the same name.
                    name = f"{label(old_node)}, cut for part {part} of the range from {self.first}"
                    new_nodes[old_node] = self._call(
                        part_of_batch, whole, axis, self.sequences, part, k, name=name
                    )
            return new_nodes[old_node]

        used_E = None
        if (
            node.target is moe.order.default and part
        ):  # reads how many rows each expert has from earlier parts
            used_E = self._call(operator.getitem, parts[part - 1][node], 3)
        copied = self._copy(node, value, f", part {part}")
        axis = self.axes[node]
        if node.target in SIZED and isinstance(axis, int):
            sizes: list[Any] = [*copied.args[1]]  # type: ignore[misc]
            if node.target is not aten.expand.default:  # in which -1 keeps a size
                whole = node.meta["val"].shape
                sizes = [whole[index] if size == -1 else size for index, size in enumerate(sizes)]
            sizes[axis] = -1
            copied.args = (copied.args[0], sizes)
        if node.target in MADE and isinstance(axis, int):
            source: Any = node.args[0]
            sizes = [*copied.args[1]]  # type: ignore[misc]
            with self.graph.inserting_before(copied):
                sizes[axis] = self._call(aten.sym_size.int, new_nodes[source], self.axes[source])
            copied.args = (copied.args[0], sizes, *copied.args[2:])
        if node.target in COUNTED and self.axes[node.all_input_nodes[0]] == 0:
            first = node.all_input_nodes[0]
            place = COUNTED[node.target]
            with self.graph.inserting_before(copied):
                length = self._call(aten.sym_size.int, new_nodes[first], 0)
            copied.args = (*copied.args[:place], length, *copied.args[place + 1 :])
        if used_E is not None:
            copied.args = (*copied.args[:3], used_E, *copied.args[4:])
        new_nodes[node] = copied

    # ---- joins the parts of a tensor to its value for the whole batch

    def _join(self, node: fx.Node, parts: Sequence[Mapping[fx.Node, fx.Node]]) -> fx.Node:
        """Returns a node of the new graph that joins the parts of a call's result.

        The axis along which the call was cut decides how the parts are joined:

            a dimension   the parts are concatenated
            SUM           the parts are added
            None          the value is the same in all parts, so the first part is taken
            IRREGULAR     rows are joined in the order that they would have without parts; row counts are
                          added; sorted slots are computed again for the whole batch

        node: the call, a node of the old graph.
        parts: a dict for each part of the batch, {node of the old graph: node of the new graph that computes
            the part}.
        """
        values = [part[node] for part in parts]
        axis = self.axes[node]
        # Join the tensor that is viewed, and view the result. Joining each view would take memory for each.
        if (isinstance(axis, int) or axis == SUM) and node.target in VIEWS:
            for source in node.all_input_nodes:
                if source not in self.whole:
                    self.whole[source] = self._join(source, parts)
            return self._copy(node, self.whole.__getitem__)
        if isinstance(axis, int):
            order = memory_order(node.meta["val"])
            if order == sorted(order):
                return self._call(aten.cat.default, values, axis)
            return self._call(joined_in_order, values, axis, order)
        if axis == SUM:
            return self._sum(values)
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

    def _sum(self, values: Sequence[fx.Node]) -> fx.Node:
        """Returns a node of the new graph with the sum of the summands that the parts of the batch compute.

        For example, each part of the batch computes a summand of a weight's gradient. A summand is added
        directly after the call that computes it, so that only the running sum stays in memory.

        values: the summands, nodes of the new graph in the order of the graph.
        """
        total, *others = values
        for value in others:
            with self.graph.inserting_after(value):
                total = self._call(aten.add.Tensor, total, value)
        return total

    def _order(self, node: fx.Node, place: int, parts: Sequence[Mapping[fx.Node, fx.Node]]) -> fx.Node:
        """Returns a node of the new graph that has one result of `order` for the whole batch.

        In the new graph, ranges of the old graph are cut into parts of the batch. `order` sorts slots
        (choices of tokens) by expert. Each part sorts its own slots, and these results cannot be joined. So
        the new graph also sorts the slots of the whole batch, if a call outside of the range reads them. Only
        result 3 is taken from the last part, which has counted the slots of all parts.

        node: the call of `order`, a node of the old graph.
        place: position of the result among the results of `order`.
        parts: a dict for each part of the batch, {node of the old graph: node of the new graph that computes
            the part}.
        """
        if place == 3:  # used_E: the last part has counted all before it
            return self._call(operator.getitem, parts[-1][node], 3)
        if node not in self.whole:  # sorts the whole batch once more
            for source in node.all_input_nodes:
                if source not in self.whole:
                    self.whole[source] = self._join(source, parts)
            self.whole[node] = self._copy(node, self.whole.__getitem__)
        return self._call(operator.getitem, self.whole[node], place)


def _maker(node: fx.Node, axes: Mapping[fx.Node, Any]) -> tuple[fx.Node, int]:
    """Returns the operator of a MoELayer that made an irregular tensor, and which of its results it is.

    A tensor is irregular if its size in each part depends on the routing. It holds rows, row counts or slots.
    The operators in `MAKERS` make irregular tensors. Other operators, such as pointwise operators, may have
    computed this tensor from the one that was made.

    node: the node of the tensor.
    axes: for each node, the dimension along which it is cut.

    Returns (node of the operator, position of the tensor among the operator's results).
    """
    place = 0
    while node.target not in MAKERS:
        if node.target is operator.getitem:
            place = node.args[1]  # type: ignore[assignment]
            node = node.args[0]  # type: ignore[assignment]
        else:
            node = next(source for source in node.all_input_nodes if axes[source] == IRREGULAR)
    return node, place


def _layout(node: fx.Node, place: int, axes: Mapping[fx.Node, Any]) -> tuple[fx.Node, bool]:
    """Returns (node with the row counts of routed rows, whether the rows are sorted by expert first).

    The second result is True if the rows are sorted by (expert, sender), and False if they are sorted by
    (sender, expert).

    node: the operator that made the rows (`_maker`).
    place: position of the rows among the operator's results.
    axes: for each node, the dimension along which it is cut.
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
"""Operators of a MoELayer whose results have, in each part, a length that depends on the routing."""
