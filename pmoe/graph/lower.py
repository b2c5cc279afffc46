"""From a graph of operators in a chosen order to what runs: all-to-alls become a start and a wait.

A start stands where its operator stood; the wait, before the first instruction that takes the result. Layers'
operators become plain calls, without the dispatcher's cost. Values are let go after their last use, inputs
among them, as autograd would.
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
"""By operator that communicates, what starts it and what waits for it."""

CALLS: dict[object, Callable[..., Any]] = {
    getattr(OPS, name).default: getattr(operators, name)._init_fn
    for name in ("order", "pack", "join", "experts", "experts_input_gradient", "experts_weight_gradient")
}


def has_shape(value: object, shape: tuple[int, ...]) -> bool:
    """Whether it is a tensor of this shape, as far as is known where row counts are not."""
    return isinstance(value, Tensor) and statically_known_true(sym_eq(tuple(value.shape), shape))


def communicates(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in STARTS


def label(node: fx.Node) -> str:
    """The node's name, the same in graphs of the same operators for other shapes (`name_all`)."""
    unnamed = f"{node.name}, unnamed" if node.op == "call_function" else node.name
    found: str = node.meta.get("label", unnamed)
    return found


def name_all(graph: fx.Graph) -> None:
    """Labels what computes by its operator and how many such came before: sizes do not count, for only graphs
    of changing shapes compute them."""
    seen: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and not isinstance(node.meta.get("val"), NUMBERS):
            name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
            node.meta["label"] = f"{name}_{seen[name]}"
            seen[name] += 1


NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def is_result(node: fx.Node) -> bool:
    """Whether it takes a result of an all-to-all apart, which happens behind the wait."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    return source is not None and communicates(source)


def calls_of(module: fx.GraphModule) -> list[fx.Node]:
    """What it calls, in order; the results of an all-to-all are part of it."""
    return [node for node in module.graph.nodes if node.op == "call_function" and not is_result(node)]


def merge_weight_gradients(graph: fx.Graph) -> None:
    """Blocks of rows of one layer whose weight gradients are only added become one instruction, which adds in
    place."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=OPS.experts_weight_gradient.default):
        found.setdefault(node.args[-1], []).append(node)
    for first, *others in found.values():
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
            for at, total in sums.items():
                with graph.inserting_before(total):
                    part = graph.call_function(operator.getitem, (first, at))
                part.meta = dict(total.meta)
                total.replace_all_uses_with(part)
    graph.eliminate_dead_code()


def _sums(first: fx.Node, second: fx.Node) -> dict[int, fx.Node] | None:
    """By parameter, where the gradients of two blocks are added; None where somebody else wants one."""
    sums: dict[int, fx.Node] = {}
    for block in (first, second):
        for part in block.users:
            users = list(part.users)
            if len(users) != 1 or users[0].target is not torch.ops.aten.add.Tensor:
                return None
            at = part.args[1]
            if sums.setdefault(at, users[0]) is not users[0]:  # type: ignore[arg-type]
                return None
    return sums if len(first.users) == len(second.users) == len(sums) else None


def lowered(module: fx.GraphModule, order: Sequence[fx.Node]) -> fx.GraphModule:
    """A module that takes its arguments in one list, which it empties, and runs ``order``. The order holds
    the nodes that call something, without those of `is_result`."""
    graph, new = fx.Graph(), {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            new[node] = graph.node_copy(node)
    started: dict[fx.Node, fx.Node] = {}

    def value(node: fx.Node) -> fx.Node:
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
        args, kwargs = fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
        if communicates(node):
            started[node] = graph.call_function(STARTS[node.target][0], args, kwargs)
            started[node].meta = dict(node.meta)
        elif node.target in CALLS:
            new[node] = graph.call_function(CALLS[node.target], args, kwargs)
            new[node].meta = dict(node.meta)
        else:
            new[node] = graph.node_copy(node, value)
    output = module.graph.output_node()
    for node in list(started):  # nobody takes what they bring, but it must have come
        value(node)
    graph.output(fx.node.map_arg(output.args[0], value))
    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(module, graph)


def failed_at(module: fx.GraphModule, error: BaseException) -> str:
    """The instruction of a lowered module in which an error was raised, with its part and layer."""
    nodes = {node.name: node for node in module.graph.nodes}
    for frame, line in traceback.walk_tb(error.__traceback__):
        name, *_ = linecache.getline(frame.f_code.co_filename, line).replace(":", " ").split() or [""]
        if frame.f_code is type(module).forward.__code__ and name in nodes:
            node = nodes[name]
            own = (*CALLS.values(), *(each for pair in STARTS.values() for each in pair))
            return label(node) + (f" (layer {node.args[-1]})" if node.target in own else "")
    return "its results"
