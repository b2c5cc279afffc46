"""Turns a graph with a chosen order into the module that runs. Each all-to-all becomes a start and a wait.

    order of instructions     code that runs
    exchange (dispatch)       start of the exchange
    weight gradient           weight gradient        while rows are sent
    experts                   wait for the exchange
                              experts

The start is put where the operator was. The wait is put before the first instruction that reads the result.
The code of a backward pass is a generator. It yields wherever a gradient is handed over to autograd
(`pmoe.graph.hand_over`).

A MoELayer's operators are called as plain Python functions, which saves the time of torch's dispatcher. Each
value, inputs included, is freed after its last use, as in an eager backward pass.
"""

from __future__ import annotations

import linecache
import operator
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.fx.graph import _BoxedCodeGen

from pmoe.graph import messages, operators
from pmoe.graph.reductions import Gradient

T = TypeVar("T")

OPS = torch.ops.pmoe_graph
STARTS: dict[object, tuple[Callable[..., Any], Callable[..., Any]]] = {
    OPS.exchange.default: (messages.Exchanging, messages.Exchanging.wait),
    OPS.exchange_counts.default: (messages.start_counts, messages.wait_counts),
}
"""The two functions of each operator that communicates: one starts it, one waits for it."""

CALLS: dict[object, Callable[..., Any]] = {
    getattr(OPS, name).default: getattr(operators, name)._init_fn
    for name in ("order", "pack", "join", "experts", "experts_input_gradient", "experts_weight_gradient")
}
"""The plain Python function of each MoELayer operator that computes."""


def has_shape(value: object, shape: tuple[int, ...]) -> bool:
    """Returns whether ``value`` is a tensor with this shape, for all values of its symbolic sizes.

    A size is a symbol if it is not known when the graph is traced, for example because it depends on row
    counts.
    """
    return isinstance(value, Tensor) and statically_known_true(sym_eq(tuple(value.shape), shape))


def communicates(node: fx.Node) -> bool:
    """Returns whether a node is an all-to-all, of rows or of row counts."""
    return node.op == "call_function" and node.target in STARTS


def label(node: fx.Node) -> str:
    """Returns a node's name that is equal on all ranks, such as "mm_0".

    Ranks use this name when they share decisions. There are three cases:

    - A call of an operator has the name that `name_all` gave it. Graphs with the same operators get the same
      names, although torch's own names of their nodes may differ.
    - A call that computes a size has torch's name, followed by ", unnamed".
    - An input of the graph has torch's name, followed by ", input". Without the addition, an input and a call
      could have the same name.
    """
    unnamed = f"{node.name}, unnamed" if node.op == "call_function" else f"{node.name}, input"
    name: str = node.meta.get("label", unnamed)
    return name


def name_all(graph: fx.Graph) -> None:
    """Labels each call by its operator and a running number: "mm_0", "mm_1", "experts_0".

    Calls that compute a size get no label. Only graphs for changing shapes have such calls, and the numbers
    must be the same in graphs for fixed shapes.
    """
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and not isinstance(node.meta.get("val"), NUMBERS):
            name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
            node.meta["label"] = f"{name}_{counts[name]}"
            counts[name] += 1


NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of numbers: plain numbers, and symbols for numbers that are not known when the graph is traced."""


def is_result(node: fx.Node) -> bool:
    """Returns whether a node selects one of the results of an all-to-all.

    This node counts as part of the all-to-all. It runs directly after the wait for the all-to-all.
    """
    source: Any = node.args[0] if node.target is operator.getitem else None
    return source is not None and communicates(source)


def calls_of(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the calls of a graph in order.

    Nodes that select one of the results of an all-to-all (`is_result`) are left out, because they run as part
    of the all-to-all.
    """
    return [node for node in module.graph.nodes if node.op == "call_function" and not is_result(node)]


def merge_weight_gradients(graph: fx.Graph) -> None:
    """Merges the `experts_weight_gradient` calls of each layer into one, which adds gradients in place.

    For each layer, a traced graph has one call for rows that stayed on their rank, and one for rows that came
    from other ranks. If the batch is cut, each part has these two calls. The graph then adds the gradients
    of the same parameter. Calls are merged only if nothing but these additions uses their results.
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
    """Returns {position of a parameter: node that adds its gradients from two calls}.

    first, second: two calls of `experts_weight_gradient`. The position is that of the parameter's gradient
        among the results of each call.

    Returns None if the calls cannot be merged: something besides the addition uses a gradient, or the two
    calls have gradients of different parameters.
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


def boxed(tensor: Tensor) -> list[Tensor]:
    """Returns a list with ``tensor`` as its only element, so that the tensor can be freed early.

    The generated code keeps a reference to the list, but none to the tensor. After the tensor was popped from
    the list, the code that popped it has the only reference.
    """
    return [tensor]


def hand_over(number: int, box: list[Tensor]) -> None:
    """Marks the position in a graph at which a gradient is handed over. The function is never called.

    In the generated code, `lowered` replaces the call of this function by a ``yield``, which hands the
    gradient over to autograd.

    number: position of the gradient among the results of the graph.
    box: a list with the gradient as its only element.
    """


def _yields(body: list[str]) -> list[str]:
    """Returns the lines of generated code, with a ``yield`` in place of each call of `hand_over`."""
    call = f"{hand_over.__module__}.{hand_over.__name__}".replace(".", "_")
    return [line.replace(f" = {call}(", " = yield (") for line in body]


def lowered(module: fx.GraphModule, order: Sequence[fx.Node | Gradient]) -> fx.GraphModule:
    """Returns a module that runs the calls of ``module`` in another order, and splits each all-to-all.

    An all-to-all becomes a start and a wait, so that other calls can run between them.

    module: the graph.
    order: the calls of the graph (`calls_of`) in the new order, and gradients. Each call must come after the
        calls whose results it reads. A `Gradient` in the list is handed over to autograd at its position.

    The new module takes its arguments in one list and empties the list, so that each argument can be freed
    after its last use. Without gradients in ``order``, the module returns the list of its results. With
    gradients, it returns a generator, which works in two steps:

    - For each gradient, it yields the gradient's number and a list with the gradient as its only element.
    - At the end, its return value is the list of all results. In place of each gradient, this list has the
      one-element list that was yielded with the gradient.
    """
    graph = fx.Graph()
    new = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            new[node] = graph.node_copy(node)
    started: dict[fx.Node, fx.Node] = {}

    def value(node: fx.Node) -> fx.Node:
        """Returns the node of the new graph that computes the value of a node of the old graph.

        If the value is the result of an all-to-all that is started but not waited for, the wait is added
        here: directly before the first call that reads the value.
        """
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

    results: Any = module.graph.output_node().args[0]
    boxes: dict[int, fx.Node] = {}
    for node in order:
        if isinstance(node, Gradient):
            box = boxes[node.number] = graph.call_function(boxed, (value(results[node.number]),))
            graph.call_function(hand_over, (node.number, box)).meta["label"] = node.instruction
            continue
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
    # An all-to-all whose result nobody uses must also have ended when the pass ends.
    for node in list(started):
        value(node)
    graph.output([boxes.get(at) or fx.node.map_arg(result, value) for at, result in enumerate(results)])
    graph.set_codegen(_BoxedCodeGen())
    if boxes:
        graph.on_generate_code(lambda _: _yields)
    return fx.GraphModule(module, graph)


def handed_over(module: fx.GraphModule) -> list[int]:
    """Returns the numbers of the gradients that a lowered module hands over, in the order of hand-over.

    The number of a gradient is its position among the results of the graph.
    """
    calls = module.graph.find_nodes(op="call_function", target=hand_over)
    return [node.args[0] for node in calls]


def run_whole(module: fx.GraphModule, arguments: list[Any]) -> list[Any]:
    """Runs a lowered module to its end, and returns its results.

    arguments: the module's arguments, in a list that the run empties.
    """
    results: Any = module.forward(arguments)
    if isinstance(results, Generator):
        results = _value_of(results)
    return unboxed(results)


def _value_of(steps: Generator[Any, None, T]) -> T:
    """Runs a generator to its end, and returns its return value."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            value: T = stop.value
            return value


def unboxed(results: Iterable[Any]) -> list[Any]:
    """Returns the results of a lowered module. Takes each gradient out of its one-element list (`boxed`)."""
    return [result.pop() if isinstance(result, list) else result for result in results]


def failed_at(module: fx.GraphModule, error: BaseException) -> str:
    """Returns the label of the call that raised an error; for a MoELayer's call, with the layer's number.

    The traceback of the error holds a line of the module's generated code. This line begins with the name of
    the node whose call failed. Returns "the results" if the traceback has no line of this code.

    module: a module that `lowered` returned.
    error: the error that it raised.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    for frame, line in traceback.walk_tb(error.__traceback__):
        name, *_ = linecache.getline(frame.f_code.co_filename, line).replace(":", " ").split() or [""]
        if frame.f_code is type(module).forward.__code__ and name in nodes:
            node = nodes[name]
            functions = (*CALLS.values(), *(function for pair in STARTS.values() for function in pair))
            return label(node) + (f" (layer {node.args[-1]})" if node.target in functions else "")
    return "the results"
