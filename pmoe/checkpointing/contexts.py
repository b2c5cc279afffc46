"""Activation checkpoints that recompute MoE layers with the same routing: `pmoe.checkpoint_contexts`.

An activation checkpoint runs a function in the forward pass (the first pass) without saving its tensors, and
runs it again in backward (the second pass). In the first pass, each call of a layer records its decisions:
the routing, the row counts, the number of chunks n, the restore pair and the choice of kernels. In the second
pass, the i-th call of a layer reads the i-th record, so nothing is decided twice:

    first pass    _FirstPass      a call of a layer gets a _Recording; its _Call is appended to `calls`
    second pass   _RunningAgain   the i-th call of a layer gets a _Replaying of _FirstPass.calls[i]

The gate runs in the first pass only, so gradients go through the autograd graph that the gate made in the
first pass. If this graph held the layer's input, the checkpoint would save no memory. So the graph saves a
placeholder (`Ticket`) instead of the input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from pmoe.checkpointing.replay import REPLAY_FINDERS, Replay, SavedHooks, top_hooks
from pmoe.engine.autograd import make_anchor
from pmoe.engine.lanes.run import is_captured
from pmoe.experts.lora import adapter_of_calls, switched_adapter

V = TypeVar("V")


def checkpoint_contexts(
    policy: Callable[..., Any] | list[Any] | None = None,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of an activation checkpoint that recomputes MoE layers with the same routing.

    Pass this function as ``context_fn`` of `torch.utils.checkpoint.checkpoint`:

        y = checkpoint(block, x, use_reentrant=False, context_fn=pmoe.checkpoint_contexts)

    In the recomputation every token goes to the same experts as in the forward pass. The ranks exchange no
    row counts. The number of chunks and the restore pair (how backward gets saved rows) stay the same.
    Without these contexts, dropout or noise before the gate could change the routing, and gradients would
    belong to another output.

    Pass the function itself, not its result: each checkpoint needs contexts of its own.

    policy: which operators outside of the layers have their results saved instead of recomputed. It is a
        function or a list of operators, the argument of torch's ``create_selective_checkpoint_contexts``. MoE
        layers are always recomputed as a whole. A context_fn with a policy:

        context_fn=functools.partial(pmoe.checkpoint_contexts, [torch.ops.aten.mm.default])

    Gradients equal those without the checkpoint, even if the block or its gates draw random numbers. The gate
    runs in the forward pass only, so its forward hooks are called once.

    From the forward pass to the recomputation, each call of a layer keeps its expert indices, routing weights
    and row counts, and the tensors that its gate saves for backward. pmoe's gates save nothing wider than the
    logits. A gate of your own that copies the tokens to a wider dtype, for example by ``x.float()``, makes
    autograd save that copy.

    A router outside of the layer (`pmoe.gates.ExternalGate`) is recomputed and must return the same routing.
    Nothing checks that.

    Raises RuntimeError in the recomputation if the checkpointed function calls other layers than before, in
    another order, with another number of tokens or with another adapter (`pmoe.use_lora`). Raises it, too, if
    the function calls `torch.autograd.grad` through a layer. Raises torch's errors for a policy that torch
    does not take.
    """
    first = _FirstPass()
    second = _Second(first)
    if policy is None:
        return first, second
    selective = create_selective_checkpoint_contexts(policy)
    return _Both(first, selective[0]), _Both(second, selective[1])


class _Both(AbstractContextManager[None]):
    """Two context managers combined into one that enters ``outer`` first and leaves it last.

    It may be entered any number of times: with retain_graph=True, backward may run, and recompute, several
    times.
    """

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._contexts = outer, inner
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as entering:
            for context in self._contexts:
                entering.enter_context(context)
            self._entered.append(entering.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _find(layer: nn.Module) -> Replay | None:
    """Returns an object for the call of ``layer`` that begins now: it records or repeats decisions.

    Returns None if the innermost checkpoint around the call does not use `checkpoint_contexts`, or if there
    is no checkpoint.

    Raises RuntimeError in a recomputation that calls other layers than the forward pass did.
    """
    contexts = _contexts.get()
    if not contexts or _in_another_checkpoint(contexts[-1].hooks):
        return None
    firsts = [context for context in contexts if isinstance(context, _FirstPass)]
    call: _Call | None = None
    if isinstance(contexts[0], _RunningAgain):
        call = contexts[0].next(layer)
    # A recomputed function may itself contain checkpoints. A call inside these inner checkpoints repeats its
    # record of the outer checkpoint. The record is also stored in the inner ones, for their recomputations.
    replay = _Recording(_Call(layer, adapter_of_calls(layer))) if call is None else _Replaying(call)
    for context in firsts:
        context.calls.append(replay.call)
    return replay if firsts or call is not None else None


REPLAY_FINDERS.append(_find)


@dataclass
class _Call:
    """The record of one layer call in a checkpoint's forward pass, from which the recomputation repeats it.

    layer: the layer that was called.
    adapter: the name of the adapter that the call used (`pmoe.use_lora`); "" for none.
    decided: the decisions on which the ranks agreed (the values that `Replay.once` returned), by name. The
        last decision, "choice", is missing if the call raised an error.
    routing: the value that `Replay.route` returned, detached from its graph. None if `Replay.route` raised an
        error.
    tokens: (number of tokens, dtype of the layer's input); None until the gate has run.
    tickets: how many times the gate's graph saved the layer's input or a view of it.
    random: the states of the random number generators, (before the gate ran, after it ran); None if the gate
        drew no random numbers.
    """

    layer: nn.Module
    adapter: str
    decided: dict[str, Any] = field(default_factory=dict)
    routing: Any = None
    tokens: tuple[int, torch.dtype] | None = None
    tickets: int = 0
    random: tuple[list[Tensor], list[Tensor]] | None = None


class _Recording(Replay):
    """Makes the decisions of a layer's call in a checkpoint's forward pass, and records them.

    call: the record (`_Call`) in which the decisions are stored.
    """

    is_record = True

    def __init__(self, call: _Call) -> None:
        self.call = call

    def once(self, decide: Callable[[], V], what: str = "choice") -> V:
        decided = self.call.decided[what] = super().once(decide, what)
        return decided

    def route(self, x_TM: Tensor, decide: Callable[[], V]) -> V:
        call = self.call
        before = random_states(x_TM.device)
        packing = Packing(x_TM)
        with saved_tensors_hooks(packing.pack, unpack):
            routing = decide()
        # Autograd holds `packing` as long as the gate's graph, so `packing` must not keep the tickets and
        # their nodes alive.
        tickets, packing.tickets = packing.tickets, []
        for ticket in tickets:
            ticket.holder = hold(x_TM)
        after = random_states(x_TM.device)
        call.random = None if _same(before, after) else (before, after)
        call.tokens = (x_TM.shape[0], x_TM.dtype)
        call.tickets = len(tickets)
        # Detached, because the graph would make a reference cycle: its saved tensors refer to the checkpoint,
        # and the checkpoint refers to this record.
        call.routing = map_tensors(
            routing, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad)
        )
        return routing


class _Replaying(Replay):
    """Returns the recorded decisions of a layer's call when a checkpoint recomputes the call.

    call: the record (`_Call`) of the same call in the forward pass.
    """

    is_replay = True

    def __init__(self, call: _Call) -> None:
        self.call = call

    def once(self, decide: Callable[[], V], what: str = "choice") -> V:
        decided: V = self.call.decided[what]
        return decided

    def route(self, x_TM: Tensor, decide: Callable[[], V]) -> V:
        call = self.call
        if call.tokens != (x_TM.shape[0], x_TM.dtype):
            raise RuntimeError(
                f"x (tokens and dtype: {(x_TM.shape[0], x_TM.dtype)}) must have as many tokens and the same "
                f"dtype in recomputation as in the forward pass ({call.tokens})"
            )
        # The first pass saved x_TM once for each ticket. The checkpoint matches the saved tensors of the two
        # passes by their order, so this pass saves x_TM as many times, at the same point of the order.
        for _ in range(call.tickets):
            hold(x_TM)
        # Operations after the gate must draw the same random numbers as in the forward pass, but the gate
        # does not run now and draws none. So the generators are set to the states that they had after the
        # gate. If they do not have the states from before the gate now, the checkpoint did not restore them
        # (preserve_rng_state=False), and they are left alone.
        if call.random is not None and _same(random_states(x_TM.device), call.random[0]):
            set_random_states(call.random[1], x_TM.device)
        routing: V = map_tensors(call.routing, lambda tensor: replayed_tensor(tensor, x_TM))
        return routing


_contexts: ContextVar[tuple[_FirstPass | _RunningAgain, ...]] = ContextVar("checkpoints", default=())
"""The checkpoint passes that are running in this thread, the outermost first.

A recomputation is always the first entry, because it replaces the entries of all passes around it. Any
further entries are forward passes of checkpoints that the recomputed function itself opens.
"""


class _FirstPass(AbstractContextManager[None]):
    """The context of a checkpoint's forward pass. It collects a record of each call of a layer.

    is_inside: whether the forward pass itself runs under other saved-tensor hooks, perhaps those of an outer
        checkpoint.
    calls: the records, in the order of the calls.
    hooks: the saved-tensor hooks of this checkpoint while the pass runs; otherwise None.
    has_begun, is_complete: whether the context was entered, and whether it was left.
    """

    def __init__(self) -> None:
        self.is_inside = top_hooks() is not None
        self.calls: list[_Call] = []
        self.hooks: SavedHooks | None = None
        self.has_begun = False
        self.is_complete = False

    def __enter__(self) -> None:
        if self.has_begun:
            raise RuntimeError(
                "context_fn must be pmoe.checkpoint_contexts itself, which makes new contexts for each "
                "checkpoint: these have seen a forward pass already"
            )
        self.has_begun = True
        self.hooks = top_hooks()
        _contexts.set((*_contexts.get(), self))

    def __exit__(self, *_: object) -> None:
        _contexts.set(tuple(context for context in _contexts.get() if context is not self))
        self.is_complete = True
        self.hooks = None  # the hooks may refer to this object, which would make a reference cycle


class _Second(AbstractContextManager[None]):
    """The context of a checkpoint's recomputation, in which layer calls repeat their recorded decisions.

    The i-th call of a layer uses the routing and the other decisions of the i-th call in the forward pass.

    With retain_graph=True, backward may run several times. Each backward pass enters this context again and
    reads the records from the first record on.
    """

    def __init__(self, first: _FirstPass) -> None:
        self._first = first
        self._outer: list[Token[tuple[_FirstPass | _RunningAgain, ...]]] = []

    def __enter__(self) -> None:
        self._outer.append(_contexts.set((_RunningAgain(self._first),)))

    def __exit__(self, *_: object) -> None:
        replay = _contexts.get()[0]
        assert isinstance(replay, _RunningAgain)
        replay.put_back()
        _contexts.reset(self._outer.pop())


class _RunningAgain:
    """The state of one recomputation: the records of the forward pass, and the index of the next record.

    hooks: the checkpoint's own saved-tensor hooks during this recomputation.
    """

    def __init__(self, first: _FirstPass) -> None:
        self.hooks = top_hooks()
        self._first = first
        self._position = 0
        self._before: dict[nn.Module, Any] = {}

    def next(self, layer: nn.Module) -> _Call | None:
        """Returns the record of the next layer call in the forward pass, which must be a call of ``layer``.

        Returns None if there is no record yet because the forward pass still runs: a backward pass in the
        middle of it can start a recomputation.

        Raises RuntimeError if the next recorded call is of another layer, used another adapter or raised an
        error, or if no call is left.
        """
        calls = self._first.calls
        position = self._position
        if position == len(calls) and not self._first.is_complete:
            return None
        self._position += 1
        if position >= len(calls) or calls[position].layer is not layer:
            before = (
                f"the forward pass made {len(calls)}" if position >= len(calls) else "it was another layer's"
            )
            raise RuntimeError(
                f"call {position + 1} of a MoELayer in recomputation must repeat that of the forward pass, "
                f"but {before}: a function checkpointed with pmoe.checkpoint_contexts must call the same "
                "layers in the same order when it runs again"
            )
        if "choice" not in calls[position].decided or calls[position].tokens is None:
            raise RuntimeError(
                f"call {position + 1} of a MoELayer in recomputation repeats a call that raised an error in "
                "the forward pass: a function checkpointed with pmoe.checkpoint_contexts must not catch that "
                "error and go on"
            )
        if calls[position].adapter != adapter_of_calls(layer):
            raise switched_adapter({calls[position].adapter}, adapter_of_calls(layer))
        self._before.setdefault(layer, layer.last)
        return calls[position]

    def put_back(self) -> None:
        """Resets ``layer.last``, the report of a layer's last call, to its value before this recomputation.

        Otherwise statistics would show a recomputed call as the layer's last call.
        """
        for layer, last in self._before.items():
            layer.last = last


def routing_is_kept() -> bool:
    """Whether the current call's routing need not be checked, because its recomputation will repeat it.

    The result is True if three things hold: the innermost checkpoint uses `checkpoint_contexts`, it is in its
    forward pass, and no other checkpoint is around or inside of it, because that one would recompute the
    routing. Any saved-tensor hooks around it count as another checkpoint.
    """
    last = next(reversed(_contexts.get()), None)
    return isinstance(last, _FirstPass) and not last.is_inside and not _in_another_checkpoint(last.hooks)


def _in_another_checkpoint(own: SavedHooks | None) -> bool:
    """Whether the innermost saved-tensor hooks belong to another checkpoint, with its own recomputation.

    own: the (pack, unpack) hooks of the checkpoint with `checkpoint_contexts`; None if they are not active.
    """
    top = top_hooks()
    if top is None or (own is not None and top[0] is own[0]):
        return False
    return getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


def random_states(device: torch.device) -> list[Tensor]:
    """Returns the states of the random number generators from which a gate on ``device`` may draw.

    The CPU's state comes first. A CUDA device's state follows, unless a CUDA graph is being captured.
    """
    states = [torch.get_rng_state()]
    if device.type == "cuda" and not is_captured(device):
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_states(states: Sequence[Tensor], device: torch.device) -> None:
    """Sets the random number generators of the CPU and of ``device`` to states from `random_states`."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two lists have the same number of tensors, with equal values."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


# ---- The gate's graph is in memory from the first pass to backward, but the layer's input x must not be.
# Wherever the gate would save x for its backward, its graph saves a `Ticket` instead:
#
#     first pass    gate(x)           its graph saves a ticket; ticket.holder is a node that saves x through
#                                     the checkpoint's hooks, and these drop x
#     backward      ticket.tensor()   reads the node's saved tensor; the checkpoint's hooks then run the
#                                     second pass, which computes x again


class Ticket:
    """A placeholder that the gate's autograd graph saves instead of the layer's input or a view of it.

    A ticket occupies no device memory. In backward it gets the input from ``holder``, whose saved tensor the
    checkpoint drops and recomputes.

    size, stride: size and stride of the tensor that the graph wanted to save.
    input_stride: stride of the layer's input.
    offset: number of elements from the start of the input to the start of that tensor.
    holder: an autograd node that saved the layer's input through the checkpoint's saved-tensor hooks.
    """

    size: torch.Size
    stride: tuple[int, ...]
    input_stride: tuple[int, ...]
    offset: int

    def __init__(self, tensor: Tensor, input_stride: tuple[int, ...], input_offset: int) -> None:
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.input_stride = input_stride
        self.offset = cast(int, tensor.storage_offset() - input_offset)
        self.holder: Any = None

    def tensor(self) -> Tensor:
        """Returns the tensor that the ticket replaces: a view of the layer's input from the recomputation.

        Reading the holder's saved tensor starts the recomputation, if it has not run yet.
        """
        x_TM: Tensor
        (x_TM,) = self.holder.saved_tensors
        if x_TM.stride() != self.input_stride:  # other hooks, such as save_on_cpu's, may change the stride
            x_TM = torch.empty_strided(
                x_TM.size(), self.input_stride, dtype=x_TM.dtype, device=x_TM.device
            ).copy_(x_TM)
        return x_TM.as_strided(self.size, self.stride, x_TM.storage_offset() + self.offset)


class Packing:
    """A saved-tensor hook for the gate's autograd graph, which saves no copy of the layer's input.

    It saves a `Ticket` in place of the input and of each view of the input. The constructor takes the input
    x_TM (T, M): T tokens, M = d_model. The object holds no reference to x_TM, because autograd keeps `pack`
    as long as the graph.

    tickets: the tickets that were made so far.
    """

    def __init__(self, x_TM: Tensor) -> None:
        self._storage = x_TM.untyped_storage()._cdata
        self._dtype = x_TM.dtype
        self._layout = x_TM.stride(), int(x_TM.storage_offset())
        self.tickets: list[Ticket] = []

    def pack(self, tensor: Tensor) -> Ticket | tuple[Tensor, int]:
        """Returns the object that autograd saves in place of ``tensor``.

        If ``tensor`` shares memory with the layer's input, the object is a `Ticket`, which uses no device
        memory. Any other tensor is returned detached, with its version number. `unpack` compares the number
        to detect changes in place.
        """
        # An input without tokens gets a ticket too: its rank must recompute, because the other ranks do and
        # communicate with it.
        if tensor.dtype == self._dtype and tensor.untyped_storage()._cdata == self._storage:
            self.tickets.append(Ticket(tensor, *self._layout))
            return self.tickets[-1]
        return tensor.detach(), tensor._version  # detached, because a result would keep its graph alive


def unpack(packed: Ticket | tuple[Tensor, int]) -> Tensor:
    """Returns the tensor for which `Packing.pack` returned ``packed``.

    Raises RuntimeError if a tensor was changed in place after it was packed.
    """
    if isinstance(packed, Ticket):
        return packed.tensor()
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that a gate needs for its gradient was changed in "
            f"place after the gate ran: it is at version {tensor._version}, and must be at version {version}"
        )
    return tensor


class _Hold(torch.autograd.Function):
    """An autograd function that only saves a tensor: the layer's input, for the gate's backward (`Ticket`).

    Activation checkpointing drops the saved tensor. It recomputes the tensor when `Ticket.tensor` reads it
    from this function's node in the autograd graph. No backward is defined, because the function's result is
    empty and is never used.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x_TM: Tensor) -> Tensor:
        ctx.save_for_backward(x_TM)
        return anchor.new_empty(0)


def hold(x_TM: Tensor) -> Any:
    """Returns an autograd node that has saved x_TM, the layer's input (T, M): T tokens, M = d_model.

    The tensor is saved through the saved-tensor hooks that are active now, such as a checkpoint's. So the
    node does not keep the tensor in memory, but can give it back in backward.
    """
    empty: Tensor = _Hold.apply(make_anchor(x_TM), x_TM.detach())  # type: ignore[no-untyped-call]
    return empty.grad_fn


class _TakeOver(torch.autograd.Function):
    """An autograd function that returns a tensor of the recorded routing with requires_grad=True.

    It is used in the recomputation, in which the gate does not run. Its backward raises RuntimeError, because
    gradients must go through the graph that the gate made in the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x_TM: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        raise RuntimeError(
            "a function checkpointed with pmoe.checkpoint_contexts must not go backward through a MoELayer "
            "itself (torch.autograd.grad), nor be compiled: when it runs again, its routing has no graph. "
            "Call backward outside of the checkpointed function, and compile the model around the checkpoint"
        )


def replayed_tensor(tensor: Tensor, x_TM: Tensor) -> Tensor:
    """Returns ``tensor``, a part of the forward pass's routing, for use in the recomputation.

    tensor: detached from its graph, with the requires_grad that it had in the forward pass.
    x_TM: (T, M), the layer's input in the recomputation: T tokens, M = d_model.

    The result has the same values and the same requires_grad. If gradients are disabled now, or the tensor
    needs none, the result is ``tensor.detach()``.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor.detach()
    taken: Tensor = _TakeOver.apply(make_anchor(x_TM), x_TM, tensor.detach())  # type: ignore[no-untyped-call]
    return taken


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns ``value`` with each tensor replaced by ``change(tensor)``.

    value: a tensor, or dataclasses, tuples and named tuples nested in any way. Values that are not tensors do
        not change.
    """
    if isinstance(value, Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value))
        return dataclasses.replace(value, **{name: map_tensors(item, change) for name, item in fields})
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
