"""A layer's experts in blocks, in the backward pass: their all-to-alls overlap with each other's products.

The last layer of a model comes first in the backward pass, where few weight gradients have been reached that
could hide its all-to-alls. Here the gradients of some experts' rows travel, are computed and travel back
while those of the others are under way, as micro-batches are in MPipeMoE, but with whole products.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pmoe.graph.lower import OPS, label
from pmoe.graph.operators import add_weight_gradient
from pmoe.graph.parts import joined_rows

BLOCKS = 2


@dataclass(frozen=True)
class BackwardExperts:
    """A layer's way through a backward graph: gradients arrive, are computed, and go home; and the weight
    gradients' instruction."""

    arrive: fx.Node
    compute: fx.Node
    leave: fx.Node
    weights: fx.Node

    @property
    def layer(self) -> int:
        return int(self.arrive.args[-1])  # type: ignore[arg-type]


def found_in(graph: fx.Graph) -> Iterator[BackwardExperts]:
    """The layers whose experts can be computed in blocks, in the graph's order."""
    for compute in graph.find_nodes(op="call_function", target=OPS.experts_input_gradient.default):
        arrived = compute.args[0]
        results = {user.args[1]: user for user in compute.users}
        arrive = arrived.args[0] if arrived.target is operator.getitem else None
        leave = next(iter(results[0].users), None) if 0 in results else None
        weights = next(iter(results[2].users), None) if 2 in results else None
        if not (_is(OPS.exchange, arrive) and _is(OPS.exchange, leave)):
            continue
        adds = weights is not None and weights.target is add_weight_gradient
        if not adds or compute.args[4].meta["val"].shape[1] < BLOCKS:
            continue
        is_plain = [*leave.args[0]] == [results[0], results.get(1)] and len(arrive.args[0]) == 1  # type: ignore
        if is_plain and len(arrived.users) == len(results[0].users) == len(results[1].users) == 1:
            yield BackwardExperts(arrive, compute, leave, weights)  # type: ignore[arg-type]


def _is(operation: Any, node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is operation.default


def counts_of_block(counts_RE: Tensor, block: int) -> Tensor:
    """The counts of a block's experts, those of others 0."""
    first, last = _experts(counts_RE, block)
    found = torch.zeros_like(counts_RE)
    found[:, first:last] = counts_RE[:, first:last]
    return found


def _experts(counts_RE: Tensor, block: int) -> tuple[int, int]:
    experts = counts_RE.shape[1]
    return block * experts // BLOCKS, (block + 1) * experts // BLOCKS


def rows_of_block(rows: Tensor, counts_RE: Tensor, block: int, by_expert: bool) -> Tensor:
    """The rows (N, ...) of a block's experts, of all that lie by expert, or by (rank, expert)."""
    first, last = _experts(counts_RE, block)
    if by_expert or int((counts_RE.sum(1) > 0).sum()) < 2:
        return rows.narrow(0, int(counts_RE[:, :first].sum()), int(counts_RE[:, first:last].sum()))
    chosen = torch.zeros_like(counts_RE, dtype=torch.bool)
    chosen[:, first:last] = True
    index = chosen.flatten().repeat_interleave(counts_RE.flatten()).nonzero().flatten()
    return rows.index_select(0, index.to(rows.device, non_blocking=True))


def in_blocks(module: fx.GraphModule, layers: Collection[int]) -> fx.GraphModule:
    """The backward graph with the experts of these layers in blocks."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for found in list(found_in(graph)):
        if found.layer in layers:
            _split(graph, found)
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


def _split(graph: fx.Graph, found: BackwardExperts) -> None:
    (grad,), send_WE, recv_WE = found.arrive.args[:3]  # type: ignore[misc]
    _, *kept, _, parameters, layer = found.compute.args
    sums = found.weights.args[0]

    def call(before: fx.Node, what: str, target: Any, *args: Any) -> fx.Node:
        with graph.inserting_before(before):
            made = graph.call_function(target, args)
        made.meta["label"] = f"{label(before)}, {what} of block {block}"
        return made

    arrived, homes = [], []
    for block in range(BLOCKS):
        send = call(found.arrive, "what it sends", counts_of_block, send_WE, block)
        recv = call(found.arrive, "what it gets", counts_of_block, recv_WE, block)
        rows = call(found.arrive, "rows", rows_of_block, grad, send_WE, block, False)
        message = call(found.arrive, "message", OPS.exchange.default, [rows], send, recv, None, False, layer)
        arrived.append((send, recv, call(found.arrive, "gradients", operator.getitem, message, 0)))
    for block, (send, recv, came) in enumerate(arrived):
        own = [
            call(found.compute, f"kept {at}", rows_of_block, each, recv_WE, block, True)
            for at, each in enumerate(kept)
        ]
        operation = OPS.experts_input_gradient.default
        done = call(found.compute, "gradients", operation, came, *own, recv, parameters, layer)
        results = [call(found.compute, f"result {at}", operator.getitem, done, at) for at in range(5)]
        home = call(
            found.compute, "way home", OPS.exchange.default, results[:2], recv, send, None, True, layer
        )
        homes.append([call(found.compute, f"home {at}", operator.getitem, home, at) for at in range(2)])
        given = (sums, own[0], *results[2:], recv, *found.weights.args[6:])
        sums = call(found.weights, "weight gradients", add_weight_gradient, *given)
    for taken in list(found.leave.users):
        which: Any = taken.args[1]
        sent = [send for send, _, _ in arrived]
        whole = call(
            found.leave, f"result {which}", joined_rows, [each[which] for each in homes], sent, False
        )
        taken.replace_all_uses_with(whole)
    found.weights.replace_all_uses_with(sums)
