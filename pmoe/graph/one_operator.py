"""A layer as one operator of a compiled graph, for every backend of torch.compile but pmoe's own.

torch.compile cannot trace a MoE layer, because the host reads row counts to decide how a call runs. So in a
graph, the layer is one operator, `run_and_keep`. It runs the layer exactly as without torch.compile: with all
its options, on any number of ranks. The graph does not break at the layer (``fullgraph=True``). The backward
pass is one operator too, `run_backward`.

`run_and_keep` keeps the autograd graph of the layer's run, and `run_backward` runs this graph backward. The
kept graph has a number. `run_and_keep` returns this number in a tensor, the *ticket*, and `run_backward`
takes the ticket as an argument. The backward pass frees the kept graph. If there is no backward pass, the
kept graph is freed together with the ticket.

Several kinds of modules run like this (`pmoe.call.operator_kinds`): a MoELayer, at the end of this file, and
experts of transformers and torchtitan, in files of `pmoe.integrations`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor

from pmoe.call.decision import LastCall, LastRowCounts, RunReport
from pmoe.call.operator_kinds import KINDS, OperatorKind
from pmoe.decide.route import cast_dtype
from pmoe.experts.operands import local_part
from pmoe.graph.operators import LAYERS, number_of

if TYPE_CHECKING:
    from pmoe.layer.moe_layer import MoELayer


@dataclass
class KeptGraph:
    """The autograd graph of a module's run, kept for its backward pass.

    results: the module's results, which refer to the autograd graph.
    sources: those inputs and parameters of the module that need gradients.
    """

    results: list[Tensor]
    sources: list[Tensor]


KEPT: dict[int, KeptGraph] = {}
"""The kept graphs, by the number in the ticket."""

_NUMBERS = itertools.count(1)
_CALLS = itertools.count(1)


def run_in_graph(
    kind: str, module: nn.Module, inputs: Sequence[Tensor | None], *, communicates: bool = True
) -> list[Tensor]:
    """Runs a module as one operator of the graph, `run_and_keep`, and returns the module's results.

    torch.compile traces this function. The operator's gradients are computed by `run_backward`.

    kind: the name of the module's `OperatorKind`, such as "layer" for a MoELayer.
    module: the module.
    inputs: the module's inputs; None for an input that was not passed.
    communicates: whether the module may run on several ranks. If it is False, the operator is
        `run_and_keep_alone`, which torch.utils.checkpoint inside of the graph can run again.
    """
    grad = torch.is_grad_enabled()
    # `local_part` would cut the graph of autograd here.
    parameters = [each.to_local() if isinstance(each, DTensor) else each for each in module.parameters()]
    is_trained = [grad and each.requires_grad for each in parameters]
    given = [each for each in inputs if each is not None]
    is_given = [each is not None for each in inputs]
    needs_grad = [grad and each.requires_grad for each in given]
    device = given[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    operator = run_and_keep if communicates else run_and_keep_alone
    results: list[Tensor] = operator(
        kind, _number(module), _call(), given, is_given, parameters, is_trained, needs_grad, autocast
    )
    num_copies = len(given) if any(needs_grad) or any(is_trained) else 0
    return results[: len(results) - num_copies - 1]


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _number(module: nn.Module) -> int:
    """Returns the number that stands for a module in the graph. In the graph it is a constant."""
    return number_of(module)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _call() -> int:
    """Returns a new number for each call of a module in the traced code. In the graph it is a constant.

    Without this number, a compiler could replace two calls with equal arguments by one. Each call must stay,
    because it keeps an autograd graph of its own, which can run backward only once.
    """
    return next(_CALLS)


# ---- the operators


def _run_and_keep(
    kind: str,
    number: int,
    call: int,
    inputs: Sequence[Tensor],
    is_given: Sequence[bool],
    parameters: Sequence[Tensor],
    is_trained: Sequence[bool],
    needs_grad: Sequence[bool],
    autocast: torch.dtype | None,
) -> list[Tensor]:
    """Runs a module. Returns its results, copies of its inputs, and the ticket of the kept autograd graph.

    kind: the name of the module's `OperatorKind`, such as "layer" for a MoELayer.
    number: the number that stands for the module (`pmoe.graph.operators.number_of`).
    call: the number of the call in the traced code (`_call`).
    inputs: the module's inputs that are not None.
    is_given: for each of the module's inputs, whether it is not None.
    parameters: the module's parameters. They are arguments so that the graph knows on which parameters the
        results depend. The module reads its own attributes, which must be the same tensors.
    is_trained: for each of ``parameters``, whether it needs a gradient.
    needs_grad: for each of ``inputs``, whether it needs a gradient.
    autocast: the dtype of autocast; None if autocast is off.

    The kept autograd graph reads the copies of the inputs, because the compiler may overwrite the inputs
    before backward. If no input and no parameter needs a gradient, there are no copies. The ticket is the
    number of the kept graph, an int64 scalar on the host; 0 if no graph was kept.

    Raises RuntimeError if ``parameters`` are not the module's own, as under ``torch.func.functional_call``.
    """
    module = LAYERS[number]
    own_parameters = list(module.parameters())
    _check_own(module, own_parameters, parameters)
    wants_grad = any(needs_grad) or any(is_trained)
    copies = [each.detach().clone() for each in inputs] if wants_grad else []
    own = [
        each.detach().requires_grad_(needed)
        for each, needed in zip(copies or inputs, needs_grad, strict=True)
    ]
    device = inputs[0].device.type
    with (
        _with_autograd(),
        torch.set_grad_enabled(wants_grad),
        torch.autocast(device, dtype=autocast, enabled=autocast is not None),
    ):
        results = KINDS[kind].run(module, _all_inputs(own, is_given))
    ticket = torch.zeros((), dtype=torch.int64, device="cpu")
    if any(result.requires_grad for result in results):
        trained = [each for each, trains in zip(own_parameters, is_trained, strict=True) if trains]
        ticket.fill_(next(_NUMBERS))
        KEPT[int(ticket)] = KeptGraph(results, [each for each in (*own, *trained) if each.requires_grad])
        weakref.finalize(ticket, KEPT.pop, int(ticket), None)
    # The compiler may overwrite a result that the graph does not read again. The kept autograd graph may
    # still need the original, so copies are returned.
    return [*(result.detach().clone() for result in results), *copies, ticket]


def _check_own(module: nn.Module, own_parameters: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Raises RuntimeError if the graph's parameters are not those of the module.

    The module computes with its own parameters. ``torch.func.functional_call`` replaces them only while
    compiled code is traced, so the graph could have others.

    own_parameters: the module's parameters.
    parameters: the graph's parameters.
    """
    same = len(own_parameters) == len(parameters) and all(
        local_part(own).data_ptr() == each.data_ptr()
        for own, each in zip(own_parameters, parameters, strict=True)
    )
    if not same:
        raise RuntimeError(
            f"parameters of {type(module).__name__} in a compiled graph must be the module's own, because "
            "the graph runs the module itself: call torch.func.functional_call outside of torch.compile, "
            "with the compiled module"
        )


def _fake_run_and_keep(
    kind: str,
    number: int,
    call: int,
    inputs: Any,
    is_given: Any,
    parameters: Any,
    is_trained: Any,
    needs_grad: Any,
    autocast: Any,
) -> list[Tensor]:
    with torch.autocast(inputs[0].device.type, dtype=autocast, enabled=autocast is not None):
        results = KINDS[kind].shapes(LAYERS[number], _all_inputs(inputs, is_given))
    copies = [torch.empty_like(each) for each in inputs] if any(needs_grad) or any(is_trained) else []
    return [*results, *copies, torch.empty((), dtype=torch.int64, device="cpu")]


def _all_inputs(inputs: Sequence[Tensor], is_given: Sequence[bool]) -> list[Tensor | None]:
    """Returns the list of a module's inputs, with None for each input that was not passed.

    inputs: the inputs that were passed, in order.
    is_given: for each of the module's inputs, whether it was passed.
    """
    remaining = iter(inputs)
    return [next(remaining) if given else None for given in is_given]


def _run_backward(
    gradients: Sequence[Tensor],
    ticket: Tensor,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """Runs the backward pass for a call of `run_and_keep`. Returns gradients of inputs and parameters.

    The result has the gradients of the inputs that need a gradient, then those of all ``parameters``.

    gradients: the gradients of the module's results.
    ticket: the last result of `run_and_keep`.
    inputs: the copies of the inputs that `run_and_keep` returned.
    parameters: the parameters that need gradients, in the order of `run_and_keep`.
    needs_grad: the argument of `run_and_keep` with this name.

    Raises RuntimeError if this backward pass has run before.
    """
    kept = KEPT.pop(int(ticket), None)
    if kept is None:
        raise RuntimeError(
            "a MoE layer in a compiled graph runs backward once for each forward pass: leave "
            "retain_graph=True out, or do not compile the layer (torch.compiler.disable)"
        )
    of_results = [
        (result, gradient)
        for result, gradient in zip(kept.results, gradients, strict=True)
        if result.requires_grad
    ]
    with _with_autograd(), _without_hooks(kept.sources):
        results, given = zip(*of_results, strict=True)
        found = torch.autograd.grad(results, kept.sources, given, allow_unused=True)
    laid_out = [_laid_out(gradient, source) for gradient, source in zip(found, kept.sources, strict=True)]
    return _apart(laid_out, [*gradients, *inputs, *parameters])


def _fake_run_backward(
    gradients: Any, ticket: Any, inputs: Any, parameters: Any, needs_grad: Any
) -> list[Tensor]:
    wanted = [each for each, needed in zip(inputs, needs_grad, strict=True) if needed]
    return [torch.empty_like(each) for each in (*wanted, *parameters)]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    """Saves for `_backward` all tensors that the backward pass of `run_and_keep` needs.

    `run_and_keep` has kept the autograd graph of the module's run in `KEPT`, under a number. Two kinds of
    tensors are saved:

    - the ticket: a tensor with the number of the kept graph;
    - the tensors that the kept graph reads: copies of the module's inputs, and its trained parameters. The
      compiler does not overwrite saved tensors before backward.
    """
    _, _, _, tensors, _, parameters, ctx.is_trained, ctx.needs_grad, _ = inputs
    trained = [each for each, trains in zip(parameters, ctx.is_trained, strict=True) if trains]
    ctx.num_inputs = len(tensors)
    ctx.num_results = len(output) - len(tensors) - 1
    ctx.save_for_backward(output[-1], *output[ctx.num_results : -1], *trained)


def _backward(operator: Any, ctx: Any, gradients: Sequence[Tensor]) -> Any:
    """Returns a gradient for each argument of `run_and_keep`; None for arguments without gradient.

    operator: `run_backward`, or `run_backward_alone` after `run_and_keep_alone`.
    """
    ticket, *tensors = ctx.saved_tensors
    inputs, parameters = tensors[: ctx.num_inputs], tensors[ctx.num_inputs :]
    found = iter(operator(gradients[: ctx.num_results], ticket, inputs, parameters, ctx.needs_grad))
    of_inputs = [next(found) if needed else None for needed in ctx.needs_grad]
    of_parameters = [next(found) if trains else None for trains in ctx.is_trained]
    return None, None, None, of_inputs, None, of_parameters, None, None, None


def _defined(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines an operator in the library "pmoe_graph", and returns it.

    name: the operator's name in the library.
    function: the function that the operator runs.
    fake: a function with the same arguments, which returns tensors with the shapes of the results and without
        values. It runs while the operator is traced.
    """
    options: Any = {"mutates_args": (), "tags": (torch.Tag.cudagraph_unsafe,)}
    operator = torch.library.custom_op(f"pmoe_graph::{name}", **options)(function)
    operator.register_fake(fake)
    return operator


run_and_keep: Any = _defined("run_and_keep", _run_and_keep, _fake_run_and_keep)
run_backward: Any = _defined("run_backward", _run_backward, _fake_run_backward)
run_and_keep.register_autograd(functools.partial(_backward, run_backward), setup_context=_save)

# These operators communicate, so all ranks must run them in one order: that of the model's calls.
run_and_keep.register_effect(EffectType.ORDERED)
run_backward.register_effect(EffectType.ORDERED)

run_and_keep_alone: Any = _defined("run_and_keep_alone", _run_and_keep, _fake_run_and_keep)
"""`run_and_keep` for modules of one rank, without an order between calls.

Compilers fail if torch.utils.checkpoint runs an operator with an order again in the backward pass.
"""
run_backward_alone: Any = _defined("run_backward_alone", _run_backward, _fake_run_backward)
run_and_keep_alone.register_autograd(functools.partial(_backward, run_backward_alone), setup_context=_save)

WITHOUT_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
"""Dispatch keys that PyTorch excludes while an operator's own code runs, so that it records no graph."""


def _with_autograd() -> Any:
    """Returns a context in which operations record an autograd graph, also inside of an operator."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in WITHOUT_AUTOGRAD:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


@contextlib.contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Runs the ``with`` block without the hooks of ``tensors`` (`torch.Tensor.register_hook`).

    The ``with`` block runs the autograd graph that the operator kept (`KeptGraph`). Without this function,
    each hook would run twice: the kept graph would call it, and autograd calls it with the gradients that the
    operator returns.
    """
    hooks = [tensor._backward_hooks or {} for tensor in tensors]
    before = [dict(own) for own in hooks]
    for own in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, removed in zip(hooks, before, strict=True):
            own.update(removed)


def _laid_out(gradient: Tensor | None, source: Tensor) -> Tensor:
    """Returns a gradient with the strides of its input or parameter, as the compiled graph expects.

    gradient: the gradient. If it is None, zeros are returned.
    source: the input or parameter to which the gradient belongs.

    If the arguments are DTensors, the result is this rank's part of the gradient.
    """
    like = local_part(source)
    if gradient is None:
        return torch.zeros_like(like)
    local = local_part(gradient)
    return local if local.stride() == like.stride() else torch.empty_like(like).copy_(local)


def _apart(results: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors of which no two share memory; a copy of each result that shares memory.

    torch refuses other results of an operator. Two gradients share memory, for example, if a gate multiplies
    by several parameters at once: they are then views of one gradient.

    results: the results of an operator.
    arguments: its arguments, with which no result may share memory, either.
    """
    taken = {each.untyped_storage()._cdata for each in arguments}
    apart: list[Tensor] = []
    for result in results:
        storage = result.untyped_storage()._cdata
        apart.append(result.clone() if storage in taken else result)
        taken.add(storage)
    return apart


# ---- a MoELayer

OUTSIDE = (
    "this call of a MoELayer cannot be in a graph, so torch.compile breaks the graph around it (a warning "
    "names the option; tensor subclasses and torch.export cannot be there either): leave fullgraph=True out"
)


def _forward(
    layer: MoELayer, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    return layer.forward(x, token_ids, mask)


outside: Callable[..., Tensor] = torch._dynamo.disable(_forward, reason=OUTSIDE)
"""`MoELayer.forward` as a function at which torch.compile breaks the graph, so that it runs outside."""

LAST: weakref.WeakKeyDictionary[nn.Module, LastCall] = weakref.WeakKeyDictionary()
"""The record of each layer's last run, without its auxiliary loss."""


class LastCallInGraph(LastCall):
    """The record of a layer's call that ran in a compiled graph.

    The auxiliary loss (``l_aux``) is a result of the graph. The row counts and the report are not known when
    the graph is traced, so they are read from `LAST` when a user asks for them.

    number: the number that stands for the layer in the graph.
    """

    number: int

    def __init__(self, l_aux: Tensor, number: int) -> None:
        object.__setattr__(self, "l_aux", l_aux)
        object.__setattr__(self, "number", number)

    @property
    def counts(self) -> LastRowCounts | None:
        """The row counts of the layer's last run."""
        return LAST[LAYERS[self.number]].counts

    @property
    def ran(self) -> RunReport | None:
        """The report on how the layer's last run was computed."""
        return LAST[LAYERS[self.number]].ran

    def with_loss(self, l_aux: Tensor | None) -> LastCall:
        """Returns a copy of this record with the auxiliary loss ``l_aux``."""
        return LastCall(l_aux=l_aux, counts=self.counts, ran=self.ran)


def forward_in_graph(
    layer: MoELayer, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Computes `MoELayer.forward` by the operators of this file. torch.compile traces this function.

    layer: the layer.
    x, token_ids, mask: as in `MoELayer.forward`.

    Returns the layer's output, in the shape of x.

    The graph breaks at the layer in two cases:

    - x is of a tensor subclass, which the layer first converts;
    - in torch.export, because the graph has a number for the layer, which another process does not know.
    """
    if type(x) is not Tensor or torch.compiler.is_exporting():
        return outside(layer, x, token_ids, mask)
    y, l_aux = run_in_graph("layer", layer, [x, token_ids, mask])
    object.__setattr__(layer, "last", LastCallInGraph(l_aux, _number(layer)))
    return y


def _run_layer(layer: MoELayer, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Runs a layer. Returns its output and its auxiliary loss."""
    x, token_ids, mask = inputs
    assert x is not None
    y = layer.forward(x, token_ids, mask)
    l_aux = layer.l_aux
    LAST[layer] = layer.last.with_loss(None)
    return [y, l_aux]


def _shapes_of_layer(layer: MoELayer, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns empty tensors with the shapes and dtypes of a layer's output and its auxiliary loss."""
    x = inputs[0]
    assert x is not None
    modules = layer.layer_modules
    with unset_fake_temporarily():
        loss_dtype = modules.no_loss().dtype
    dtype = cast_dtype(modules, x) or x.dtype
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return [y, x.new_empty((), dtype=loss_dtype)]


KINDS["layer"] = OperatorKind(_run_layer, _shapes_of_layer)
