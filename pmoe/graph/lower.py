"""Turns a graph and a chosen order into the module that runs; all-to-alls become a start and a wait.

    order of instructions     what runs
    exchange (dispatch)       start of the exchange
    weight gradient           weight gradient        while rows travel
    experts                   wait for the exchange
                              experts

The start takes the operator's place. The wait comes before the first instruction that takes the result.
Operators of a layer become plain calls of their Python functions, which saves the cost of torch's dispatcher.
Values, including inputs, are freed after their last use, as autograd does.
"""

from __future__ import annotations

import linecache
import operator
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.fx.graph import _BoxedCodeGen

from pmoe.graph import messages, operators

OPS = torch.ops.pmoe_graph
STARTS: dict[object, tuple[Callable[..., Any], Callable[..., Any]]] = {
    OPS.exchange.default: (messages.Exchanging, messages.Exchanging.wait),
    OPS.exchange_counts.default: (messages.start_counts, messages.wait_counts),
}
"""The functions that start and that wait for each operator that communicates."""

CALLS: dict[object, Callable[..., Any]] = {
    getattr(OPS, name).default: getattr(operators, name)._init_fn
    for name in ("order", "pack", "join", "experts", "experts_input_gradient", "experts_weight_gradient")
}
"""The plain Python function of each operator of a layer that computes."""


def has_shape(value: object, shape: tuple[int, ...]) -> bool:
    """Returns whether a value is a tensor that has this shape for any row counts, which may be symbols."""
    return isinstance(value, Tensor) and statically_known_true(sym_eq(tuple(value.shape), shape))


def communicates(node: fx.Node) -> bool:
    """Returns whether a node is an all-to-all, of rows or of counts."""
    return node.op == "call_function" and node.target in STARTS


def label(node: fx.Node) -> str:
    """Returns the node's name in plans: the same in graphs of the same operators for other shapes.

    `name_all` gives the names. A call without one, such as the computation of a size, is marked as unnamed.
    """
    unnamed = f"{node.name}, unnamed" if node.op == "call_function" else node.name
    name: str = node.meta.get("label", unnamed)
    return name


def name_all(graph: fx.Graph) -> None:
    """Labels each call by its operator and a running number: "mm_0", "mm_1", "experts_0".

    Nodes that compute a size are left out. Only graphs of changing shapes have them, and their numbers would
    shift the others.
    """
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and not isinstance(node.meta.get("val"), NUMBERS):
            name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
            node.meta["label"] = f"{name}_{counts[name]}"
            counts[name] += 1


NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of values that are numbers, known when the graph is traced or symbols."""


def is_result(node: fx.Node) -> bool:
    """Returns whether a node takes one result out of those of an all-to-all. It runs right after the wait."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    return source is not None and communicates(source)


def calls_of(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the module's calls in order, without nodes of `is_result`, which belong to the all-to-all."""
    return [node for node in module.graph.nodes if node.op == "call_function" and not is_result(node)]


def merge_weight_gradients(graph: fx.Graph) -> None:
    """Merges the weight gradients of a layer's blocks of rows into one instruction, which adds in place.

    A graph has one `experts_weight_gradient` for each block (rows that stayed, rows that came; once for each
    part), and an addition for each parameter. Two blocks are merged only if their gradients have no other use
    than this addition.
    """
    nodes_of_layer: dict[int, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=OPS.experts_weight_gradient.default):
        nodes_of_layer.setdefault(node.args[-1], []).append(node)
    for first, *others in nodes_of_layer.values():
        for second in others:
            sums = _sums(first, second)
            if sums is None:
                first = second
                continue
            pairs: Any = zip(first.args[:5], second.args[:5], strict=True)
            joined = [[*ahead, *behind] for ahead, behind in pairs]
            with graph.inserting_after(second):
                first = graph.call_function(second.target, (*joined, *second.args[5:]))  # type: ignore[arg-type]
            first.meta = dict(second.meta)
            for index, total in sums.items():
                with graph.inserting_before(total):
                    part = graph.call_function(operator.getitem, (first, index))
                part.meta = dict(total.meta)
                total.replace_all_uses_with(part)
    graph.eliminate_dead_code()


def _sums(first: fx.Node, second: fx.Node) -> dict[int, fx.Node] | None:
    """Returns, for each parameter's position, the node that adds the gradients of two blocks.

    None if a gradient has another user, or the two blocks have gradients of different parameters.
    """
    sums: dict[int, fx.Node] = {}
    for block in (first, second):
        for part in block.users:
            users = list(part.users)
            if len(users) != 1 or users[0].target is not torch.ops.aten.add.Tensor:
                return None
            index = part.args[1]
            if sums.setdefault(index, users[0]) is not users[0]:  # type: ignore[arg-type]
                return None
    return sums if len(first.users) == len(second.users) == len(sums) else None


def lowered(module: fx.GraphModule, order: Sequence[fx.Node]) -> fx.GraphModule:
    """Returns a module that runs the calls of ``module`` in the given order.

    order: the nodes of `calls_of`, in any order in which each stands behind its inputs.

    The new module takes its arguments in one list, which it empties, so that they can be freed early.
    """
    graph = fx.Graph()
    new = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            new[node] = graph.node_copy(node)
    started: dict[fx.Node, fx.Node] = {}

    def value(node: fx.Node) -> fx.Node:
        """Returns the new node of a result. The first use of an all-to-all's result makes its wait."""
        if node not in new:
            if node in started:
                wait = STARTS[node.target][1]
                layer = node.args[-1]
                new[node] = graph.call_function(wait, (started.pop(node), layer))
                new[node].meta = dict(node.meta)
            else:
                assert is_result(node)
                new[node] = graph.call_function(operator.getitem, (value(node.args[0]), node.args[1]))  # type: ignore[arg-type]
        return new[node]

    for node in order:
        args = fx.node.map_arg(node.args, value)
        kwargs = fx.node.map_arg(node.kwargs, value)
        if communicates(node):
            started[node] = graph.call_function(STARTS[node.target][0], args, kwargs)
            started[node].meta = dict(node.meta)
        elif node.target in CALLS:
            new[node] = graph.call_function(CALLS[node.target], args, kwargs)
            new[node].meta = dict(node.meta)
        else:
            new[node] = graph.node_copy(node, value)
    output = module.graph.output_node()
    # An all-to-all whose result nobody uses must also have ended when the pass ends.
    for node in list(started):
        value(node)
    graph.output(fx.node.map_arg(output.args[0], value))
    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(module, graph)


def failed_at(module: fx.GraphModule, error: BaseException) -> str:
    """Returns the label of the instruction in which a lowered module raised an error, with its layer.

    The traceback holds a line of the module's generated code, which begins with the name of a node.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    for frame, line in traceback.walk_tb(error.__traceback__):
        name, *_ = linecache.getline(frame.f_code.co_filename, line).replace(":", " ").split() or [""]
        if frame.f_code is type(module).forward.__code__ and name in nodes:
            node = nodes[name]
            functions = (*CALLS.values(), *(each for pair in STARTS.values() for each in pair))
            return label(node) + (f" (layer {node.args[-1]})" if node.target in functions else "")
    return "the results"
