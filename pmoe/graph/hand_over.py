"""Hands each gradient to autograd as soon as its operator has run, inside the backward graph.

Autograd calls a compiled backward graph as one node, which returns all gradients at once. A data-parallel
wrapper reduces a gradient over ranks when autograd adds the gradient to ``grad``. So without this file, no
reduction could begin before the whole graph has run.

With this file, the node of the graph returns before the graph runs. It returns placeholders for the gradients
(`PendingGradient`). Each input of the forward graph that needs a gradient has an autograd node of its own
(`HandOver`). In the backward pass, this node runs the graph until the gradient of its input exists. Example
for a model with transformer blocks and a head:

    autograd node                         what it does
    backward graph                        runs nothing; returns pending gradients
    HandOver of the head's weight         runs the graph until this weight's gradient exists
    AccumulateGrad of the head's weight   adds the gradient to ``grad``; a hook of DistributedDataParallel
                                          starts to reduce it
    HandOver of a weight of a block       runs the graph until this weight's gradient exists
    ...

Autograd runs `HandOver` nodes in the reverse of the order in which the forward pass makes them. If it can run
several nodes, AccumulateGrad nodes come first. So the hooks of a parameter run as soon as its gradient is
computed, between two operators of the graph, as in an eager backward pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from pmoe.comm.ranks import Ranks
from pmoe.experts.marks import is_expert
from pmoe.graph.buckets import bucket_limits
from pmoe.graph.operators import LAYERS
from pmoe.training import gradient_partitioning

Box = list[Tensor]
"""A list with one gradient, which is taken out when the gradient is handed over to autograd.

After that, the code of the graph has no reference to the gradient.
"""

GradientSteps = Iterator[tuple[int, Box]]
"""A backward pass as an iterator: each ``next`` runs it up to the next gradient, and returns that gradient.

The gradient is returned in a `Box`, with its number among the results of the graph.
"""


class GradientPass:
    """A backward pass that runs step by step, each time up to the gradient that autograd needs next.

    steps: the pass, as an iterator over its gradients.
    """

    def __init__(self, steps: GradientSteps) -> None:
        self._steps = steps
        self._ready: dict[int, Box] = {}
        # On a GPU, nodes for inputs on the CPU run in another thread.
        self._lock = threading.Lock()

    def run_to(self, number: int) -> Box:
        """Runs the pass until a gradient exists, and returns the one-element list (`Box`) with the gradient.

        number: the number of the gradient among the results of the graph.
        """
        with self._lock, torch.no_grad(), torch._C._DisableAutocast():
            while number not in self._ready:
                gradient, box = next(self._steps)
                self._ready[gradient] = box
            return self._ready[number]

    def finish(self) -> None:
        """Runs the rest of the pass, even if nothing reads the remaining gradients.

        The rest may contain all-to-alls, in which all ranks must take part.
        """
        with self._lock, torch.no_grad(), torch._C._DisableAutocast():
            for _ in self._steps:
                pass


class PendingGradient(Tensor):
    """A tensor in place of a gradient that is not computed yet. Reading it computes the gradient.

    running: the pass that computes the gradient, as a weak reference, so that this tensor does not keep the
        pass and its memory alive. Autograd may keep the tensor for long if an autograd node fails.
    number: the number of the gradient among the results of the graph.
    """

    running: weakref.ref[GradientPass]
    number: int

    @staticmethod
    def of(running: GradientPass, number: int, example: Tensor, sizes: Sequence[int]) -> PendingGradient:
        """Returns a tensor in place of a gradient that is not computed yet.

        running: the pass that computes the gradient.
        number: the number of the gradient among the results of the graph.
        example: a tensor with the dtype and the device of the gradient.
        sizes: the shape of the gradient.
        """
        pending: PendingGradient = Tensor._make_wrapper_subclass(
            PendingGradient, sizes, dtype=example.dtype, device=example.device
        )
        pending.running = weakref.ref(running)
        pending.number = number
        return pending

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(
            PendingGradient, lambda gradient: gradient.computed_box()[0], (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def computed_box(self) -> Box:
        """Runs the pass until the gradient exists, and returns the one-element list (`Box`) with it.

        Raises RuntimeError if the backward pass that returned this tensor has ended.
        """
        running = self.running()
        if running is None:
            raise RuntimeError(
                "a gradient of a compiled graph must be read in the backward pass that returns it"
            )
        return running.run_to(self.number)


def computed(gradient: Any) -> Any:
    """Returns the value of a gradient. For a `PendingGradient`, runs the pass until the value exists.

    The pass keeps no reference to the value. So the autograd node that adds the value to ``grad``
    (AccumulateGrad) need not copy it. A gradient that holds other tensors, as a DTensor holds a local tensor,
    is built again from their computed values.
    """
    if isinstance(gradient, PendingGradient):
        return gradient.computed_box().pop()
    if is_traceable_wrapper_subclass(gradient):
        names, context = gradient.__tensor_flatten__()
        parts = {name: getattr(gradient, name) for name in names}
        if any(isinstance(part, PendingGradient) for part in parts.values()):
            parts = {name: computed(part) for name, part in parts.items()}
            return type(gradient).__tensor_unflatten__(parts, context, gradient.size(), gradient.stride())
    return gradient


class HandOver(torch.autograd.Function):
    """An autograd function that returns its input. In backward it returns the gradient's computed value.

    If the gradient that backward receives is a `PendingGradient`, the compiled backward graph is run until
    the value of this gradient exists.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return computed(gradient)


# ---- the inputs of a compiled function


@dataclass
class GraphInputs:
    """The inputs of a compiled forward graph. The backward graph hands their gradients over to autograd.

    names: a name for each result of the backward graph, equal on all ranks that trace the same code.
    owners: for each gradient that the backward graph returns, the number of the input to which it belongs.
    may_stop: whether the backward graph may stop at a computed gradient and hand it over. False if the
        forward graph writes to an input that needs a gradient: such inputs come from a `HandOver`, and torch
        raises an error if the result of an autograd function is changed in place.
    layers: numbers of the layers in the graph that communicate; () before the backward graph is compiled.
    order: function that returns the order in which gradients will be handed over, as their numbers among the
        backward graph's results. It returns [] before the order is known.
    group: the ranks over which the gradients of the last call are reduced. If they are not reduced, a group
        of one rank.
    reduced_bytes: {name of a parameter: bytes of its gradient}, without the parameters of experts. The order
        is that in which autograd gets the gradients in the first step (`wrapped`).
    bucket_limits: the bytes at which a bucket of gradients is sent: entry i for bucket i, the last for all
        further buckets.
    """

    names: Sequence[str]
    owners: Sequence[int]
    may_stop: bool = True
    layers: Sequence[int] = ()
    order: Callable[[], Sequence[int]] = list
    group: Ranks = field(default_factory=Ranks.single)
    reduced_bytes: dict[str, int] = field(default_factory=dict)
    bucket_limits: Sequence[int] = (gradient_partitioning.PIECE_BYTES,)

    @staticmethod
    def of(module: fx.GraphModule, inputs: Sequence[Any]) -> GraphInputs:
        """Returns the record of a graph's inputs.

        module: the graph as torch.compile traced it.
        inputs: the inputs with which the graph was traced.
        """
        owners = list[int]()
        names = list[str]()
        placeholders = module.graph.find_nodes(op="placeholder")
        for number, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
            for suffix in _parts(value):
                owners.append(number)
                names.append(node.name + suffix)
        return GraphInputs(names, owners)

    def names_of(
        self, module: fx.GraphModule, layers: Sequence[int], order: Callable[[], Sequence[int]]
    ) -> dict[int, str]:
        """Returns the names of the gradients of a backward graph, by their numbers among its results.

        Returns {} if the graph must not stop at gradients, or if the inputs to which the gradients belong are
        unknown.

        module: the backward graph.
        layers: the new value of the attribute ``layers``.
        order: the new value of the attribute ``order``.
        """
        results: Any = module.graph.output_node().args[0]
        if not self.may_stop or len(results) != len(self.names):
            return {}
        self.layers = layers
        self.order = order
        return {
            number: self.names[number]
            for number, result in enumerate(results)
            if isinstance(result, fx.Node) and isinstance(result.meta.get("val"), Tensor)
        }

    def wrapped(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Returns the inputs of a call, with a `HandOver` applied to each input that needs a gradient.

        A `HandOver` returns its input. In the backward pass, it runs the compiled backward graph until the
        gradient of this input exists. Autograd runs the `HandOver` nodes in the reverse of the order in which
        this method makes them.

        The inputs are returned unchanged in two cases: if gradients are disabled, or if the forward graph
        changes an input in place (``may_stop`` is False).
        """
        if not (self.may_stop and torch.is_grad_enabled()):
            return inputs
        self._see_reductions(inputs)
        # Before the order is known, inputs that are used last come first, as in an eager backward pass.
        place_of = {self.owners[number]: place for place, number in enumerate(self.order())}
        order = sorted(range(len(inputs)), key=lambda number: (place_of.get(number, len(inputs)), -number))
        result = list(inputs)
        for number in reversed(order):
            if isinstance(inputs[number], Tensor) and inputs[number].requires_grad:
                result[number] = HandOver.apply(inputs[number])  # type: ignore[no-untyped-call]
        return result

    def _see_reductions(self, inputs: Sequence[Any]) -> None:
        """Stores over which ranks this call's gradients are reduced, and the bytes of gradients and buckets.

        `DistributedDataParallel` or `pmoe.GradientReducer` reduces the gradients. Neither of the two reduces
        gradients of experts, so these are left out.

        inputs: the inputs of the call.
        """
        wrapper = DistributedDataParallel._get_active_ddp_module()
        reducers: list[Any] = [LAYERS[layer].gradients for layer in self.layers]
        groups = (getattr(reducer, "ranks", None) for reducer in reducers)
        self.group = next(filter(None, groups), Ranks.single())
        self.bucket_limits = [gradient_partitioning.PIECE_BYTES]
        if wrapper is not None:
            self.group = Ranks(wrapper.process_group)
            self.bucket_limits = bucket_limits(wrapper)
        self.reduced_bytes = {
            name: inputs[owner].nbytes
            for name, owner in reversed(list(zip(self.names, self.owners, strict=True)))
            if isinstance(inputs[owner], nn.Parameter)
            and inputs[owner].requires_grad
            and not is_expert(inputs[owner])
        }


def _parts(value: object) -> list[str]:
    """Returns the suffixes with which the gradients of one input are named: [""] for a plain input.

    An input that holds other tensors, such as a DTensor, is passed to the graph as these tensors. It has one
    suffix for each of them, such as "._local_tensor".

    value: the input.
    """
    if not is_traceable_wrapper_subclass(value):
        return [""]
    names, _ = value.__tensor_flatten__()
    return [f".{name}{suffix}" for name in names for suffix in _parts(getattr(value, name))]


# ---- the results of a backward graph that has not run yet


def pending(module: fx.GraphModule, arguments: Sequence[Any], steps: GradientSteps) -> list[Any] | None:
    """Returns placeholders (`PendingGradient`) for the results of a backward graph that has not run yet.

    Must be called in a backward pass of autograd. The graph then runs step by step: each time autograd needs
    a gradient, the graph runs until this gradient exists. The rest of the graph runs at the end of autograd's
    backward pass.

    module: the graph.
    arguments: the arguments of the graph. Sizes that are symbols in the graph are read from them.
    steps: the graph's pass, as an iterator that yields its gradients.

    Returns None if there can be no placeholders: the size of a result does not follow from the arguments, or
    a result has an unknown type (known are tensors, arguments of the graph, and None).
    """
    inputs = dict(zip(module.graph.find_nodes(op="placeholder"), arguments, strict=True))
    running = GradientPass(steps)
    results = list[Any]()
    known: dict[Any, int] | None = None
    for number, result in enumerate(module.graph.output_node().args[0]):  # type: ignore[arg-type]
        example = result.meta.get("val") if isinstance(result, fx.Node) else None
        if isinstance(example, Tensor):
            sizes: Any = example.shape
            if any(isinstance(size, torch.SymInt) for size in sizes):
                known = _known_sizes(inputs) if known is None else known
                sizes = [_size(size, known) for size in sizes]
            if None in sizes:
                return None
            results.append(PendingGradient.of(running, number, example, sizes))
        elif result is None or result in inputs:
            results.append(inputs.get(result))
        else:
            return None
    # The callback is the only reference to the pass, until the backward pass has ended or failed.
    torch.autograd.Variable._execution_engine.queue_callback(running.finish)
    return results


def _known_sizes(inputs: Mapping[fx.Node, Any]) -> dict[Any, int]:
    """Returns the value of each symbolic size (a symbol or an expression of symbols) of a graph's inputs.

    inputs: for each input node of the graph, the argument that the call passes for it.
    """
    known: dict[Any, int] = {}
    for node, argument in inputs.items():
        example = node.meta.get("val")
        pairs = [(example, argument)]
        if isinstance(example, Tensor):
            pairs = list(zip(example.shape, argument.shape, strict=True))
        known |= {size.node.expr: int(value) for size, value in pairs if isinstance(size, torch.SymInt)}
    return known


def _size(size: int | torch.SymInt, known: Mapping[Any, int]) -> int | None:
    """Returns a size as a number; None if it is a symbol whose value is not known.

    size: a number; or a symbol or an expression of symbols, for a size that the trace does not know.
    known: values of symbols, from `_known_sizes`.
    """
    if isinstance(size, int):
        return size
    value = size.node.expr.subs(known)
    return int(value) if value.is_number else None
