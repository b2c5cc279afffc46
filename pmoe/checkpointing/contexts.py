"""Activation checkpointing that replays the first pass's decisions: `pmoe.checkpoint_contexts`.

The first pass records the decisions of each call of a layer: the routing, the agreed row counts, n, the
restore pair, the runner. The second pass takes them over, in the same order, so nothing is decided twice:

    first pass    _First          a call of a layer gets a _Recording; its _Call is appended to _First.calls
    second pass   _RunningAgain   the i-th call of a layer gets a _Replaying of _First.calls[i]

The gate does not run again, so its graph of the first pass is the one through which gradients go. That graph
must not keep the layer's input, or the checkpoint would save no memory: see `Ticket`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from pmoe.checkpointing.replay import FINDERS, Replay, SavedHooks, top_hooks
from pmoe.engine.autograd import make_anchor
from pmoe.engine.lanes.run import is_captured

V = TypeVar("V")


def checkpoint_contexts(
    policy: Callable[..., Any] | list[Any] | None = None,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the two contexts of an activation checkpoint in which MoE layers keep their routing.

    It is the ``context_fn`` of `torch.utils.checkpoint.checkpoint`. In the second pass every token is routed
    as in the first one; no row counts are exchanged and nothing is chosen.

        y = checkpoint(block, x, use_reentrant=False, context_fn=pmoe.checkpoint_contexts)

    Pass the function itself, not its result: each checkpoint needs contexts of its own.

    policy: which operators around the layers are not run again: a function or a list of operators, as torch's
        ``create_selective_checkpoint_contexts`` takes it. A layer always runs again as a whole.

        context_fn=functools.partial(pmoe.checkpoint_contexts, [torch.ops.aten.mm.default])

    Gradients are those without the checkpoint, even if the block or its gates draw random numbers. Forward
    hooks of a gate, and anything that a gate counts, see one pass only.

    Between the passes each call of a layer keeps its indices, weights and counts, and the tensors that its
    gate saves. pmoe's gates save nothing wider than the logits. A gate of your own that widens the tokens, by
    ``x.float()`` say, keeps the wide ones.

    A router outside of the layer (`pmoe.gates.ExternalGate`) is run again and must return the same routing.
    Nothing checks that.

    Raises RuntimeError in the second pass if the checkpointed function calls other layers, in another order
    or with another number of tokens, or goes backward through a layer itself. Raises torch's errors for a
    policy that torch does not take.
    """
    first = _First()
    second = _Second(first)
    if policy is None:
        return first, second
    selective = create_selective_checkpoint_contexts(policy)
    return _Both(first, selective[0]), _Both(second, selective[1])


class _Both(AbstractContextManager[None]):
    """Two contexts as one, the outer entered first. It may be entered any number of times."""

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
    """Returns the `Replay` of a call that begins now; None if no checkpoint of this kind is around it.

    Raises RuntimeError in a second pass that calls other layers than the first one did.
    """
    contexts = _contexts.get()
    if not contexts or _in_another_checkpoint(contexts[-1].hooks):
        return None
    firsts = [context for context in contexts if isinstance(context, _First)]
    call: _Call | None = None
    if isinstance(contexts[0], _RunningAgain):
        call = contexts[0].next(layer)
    # With checkpoints inside of one that runs again, the call both replays a record of the outer one and is
    # a new record for the inner ones.
    replay = _Recording(_Call(layer)) if call is None else _Replaying(call)
    for context in firsts:
        context.calls.append(replay.call)
    return replay if firsts or call is not None else None


FINDERS.append(_find)


@dataclass
class _Call:
    """The record of one call of a layer in the first pass.

    layer: the layer that was called.
    decided: the value of `Replay.once`; None if it raised an error.
    routing: the value of `Replay.route`, without its graph; None if it raised an error.
    tokens: (number of tokens, dtype of the rows); None until the gate has run.
    tickets: how often the gate's graph saved the layer's input (`Ticket`).
    random: the states of the random number generators before and after the gate; None if it drew nothing.
    """

    layer: nn.Module
    decided: Any = None
    routing: Any = None
    tokens: tuple[int, torch.dtype] | None = None
    tickets: int = 0
    random: tuple[list[Tensor], list[Tensor]] | None = None


class _Recording(Replay):
    """A call in a first pass: decides, and records its decisions in ``call``."""

    def __init__(self, call: _Call) -> None:
        self.call = call

    def once(self, decide: Callable[[], V]) -> V:
        decided = self.call.decided = super().once(decide)
        return decided

    def route(self, x_TM: Tensor, decide: Callable[[], V]) -> V:
        call = self.call
        before = _random_states(x_TM.device)
        packing = Packing(x_TM)
        with saved_tensors_hooks(packing.pack, unpack):
            routing = decide()
        # Autograd keeps packing as long as the graph: it must not keep tickets and their nodes alive.
        tickets, packing.tickets = packing.tickets, []
        for ticket in tickets:
            ticket.holder = hold(x_TM)
        after = _random_states(x_TM.device)
        call.random = None if _same(before, after) else (before, after)
        call.tokens = (x_TM.shape[0], x_TM.dtype)
        call.tickets = len(tickets)
        # Without the graph, which would make a cycle: its saved tensors lead to the checkpoint, and that to
        # this record.
        call.routing = map_tensors(
            routing, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad)
        )
        return routing


class _Replaying(Replay):
    """A call in a second pass: returns the decisions recorded in ``call``."""

    is_replay = True

    def __init__(self, call: _Call) -> None:
        self.call = call

    def once(self, decide: Callable[[], V]) -> V:
        decided: V = self.call.decided
        return decided

    def route(self, x_TM: Tensor, decide: Callable[[], V]) -> V:
        call = self.call
        if call.tokens != (x_TM.shape[0], x_TM.dtype):
            raise RuntimeError(
                f"x (tokens and dtype: {(x_TM.shape[0], x_TM.dtype)}) must have as many tokens and the same "
                f"dtype in recomputation as in the forward pass ({call.tokens})"
            )
        # The first pass saved x_TM once for each ticket. The checkpoint matches the saved tensors of the two
        # passes by their order, so this pass saves it as often, in the same place.
        for _ in range(call.tickets):
            hold(x_TM)
        # Operations after the gate must draw the same random numbers as before, though the gate draws none
        # now. If the generators are not as they were before the gate, the checkpoint did not restore them
        # (preserve_rng_state=False), and they are left alone.
        if call.random is not None and _same(_random_states(x_TM.device), call.random[0]):
            _set_random_states(call.random[1], x_TM.device)
        routing: V = map_tensors(call.routing, lambda tensor: as_first_pass_had(tensor, x_TM))
        return routing


_contexts: ContextVar[tuple[_First | _RunningAgain, ...]] = ContextVar("checkpoints", default=())
"""The passes that this thread is inside of, the innermost last.

A second pass is always the first entry: it begins as if nothing were around it. Only first passes of
checkpoints inside of it follow.
"""


class _First(AbstractContextManager[None]):
    """The context of a first pass, which records its calls in order.

    is_inside: whether saved-tensor hooks were active around the checkpoint, maybe those of another one.
    calls: the records of calls of layers, in order.
    hooks: the checkpoint's own saved-tensor hooks while the pass runs.
    has_begun, is_complete: whether the pass was entered, and left.
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
        self.hooks = None  # hooks may refer to this object: a cycle


class _Second(AbstractContextManager[None]):
    """The context of second passes. Entered for each: a retained graph may go backward several times."""

    def __init__(self, first: _First) -> None:
        self._first = first
        self._outer: list[Token[tuple[_First | _RunningAgain, ...]]] = []

    def __enter__(self) -> None:
        self._outer.append(_contexts.set((_RunningAgain(self._first),)))

    def __exit__(self, *_: object) -> None:
        replay = _contexts.get()[0]
        assert isinstance(replay, _RunningAgain)
        replay.put_back()
        _contexts.reset(self._outer.pop())


class _RunningAgain:
    """One second pass: hands out the records of the first pass in order.

    hooks: the checkpoint's own saved-tensor hooks.
    """

    def __init__(self, first: _First) -> None:
        self.hooks = top_hooks()
        self._first = first
        self._position = 0
        self._before: dict[nn.Module, Any] = {}

    def next(self, layer: nn.Module) -> _Call | None:
        """Returns the record of the next call, which must be one of ``layer``.

        None if the first pass has not come to that call yet, because backward runs in the middle of it.

        Raises RuntimeError if the first pass called another layer, or none, at this place.
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
        if calls[position].decided is None or calls[position].tokens is None:
            raise RuntimeError(
                f"call {position + 1} of a MoELayer in recomputation repeats a call that raised an error in "
                "the forward pass: a function checkpointed with pmoe.checkpoint_contexts must not catch that "
                "error and go on"
            )
        self._before.setdefault(layer, layer.last)
        return calls[position]

    def put_back(self) -> None:
        """Gives each layer the ``last`` call back that it had before this pass."""
        for layer, last in self._before.items():
            layer.last = last


def routing_is_kept() -> bool:
    """Whether the innermost checkpoint records the routing and no other may run the call again."""
    last = next(reversed(_contexts.get()), None)
    return isinstance(last, _First) and not last.is_inside and not _in_another_checkpoint(last.hooks)


def _in_another_checkpoint(own: SavedHooks | None) -> bool:
    """Whether another checkpoint further in saves tensors now; it has its own second pass.

    own: the hooks of the checkpoint that asks.
    """
    top = top_hooks()
    if top is None or (own is not None and top[0] is own[0]):
        return False
    return getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


def _random_states(device: torch.device) -> list[Tensor]:
    """Returns the states of the random number generators from which a gate on ``device`` may draw."""
    states = [torch.get_rng_state()]
    if device.type == "cuda" and not is_captured(device):
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_random_states(states: Sequence[Tensor], device: torch.device) -> None:
    """Restores states that `_random_states` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors have equal values."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


# ---- The gate's graph lives from the first pass to backward, but the layer's input must not live so long.
# Wherever the gate saves the input, its graph gets a `Ticket` instead:
#
#     first pass    gate(x)    graph saves ticket     ticket.holder = a node that saves x
#                              the node saves x through the checkpoint's hooks, which drop it
#     backward      graph asks ticket.tensor()        reads the node's saved tensor
#                              the checkpoint's hooks run the second pass, which makes x again


class Ticket:
    """A placeholder in the gate's graph for the layer's input or a view of it.

    size, stride: those of the saved tensor.
    input_stride: the stride of the layer's input.
    offset: elements from the start of the input to the start of the saved tensor.
    holder: an autograd node, whose saved tensor is the input. The checkpoint's hooks dropped it and make it
        again when it is read.
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
        """Returns the saved tensor, a view of the input that the second pass made."""
        x_TM: Tensor
        (x_TM,) = self.holder.saved_tensors
        if x_TM.stride() != self.input_stride:  # hooks of others, of save_on_cpu say, may change the stride
            x_TM = torch.empty_strided(
                x_TM.size(), self.input_stride, dtype=x_TM.dtype, device=x_TM.device
            ).copy_(x_TM)
        return x_TM.as_strided(self.size, self.stride, x_TM.storage_offset() + self.offset)


class Packing:
    """The saved-tensor hook of a gate's graph: replaces the input x_TM (T, M) and its views by tickets.

    It keeps no reference to x_TM, because autograd keeps `pack` as long as the graph.

    tickets: those made so far.
    """

    def __init__(self, x_TM: Tensor) -> None:
        self._storage = x_TM.untyped_storage()._cdata
        self._dtype = x_TM.dtype
        self._layout = x_TM.stride(), int(x_TM.storage_offset())
        self.tickets: list[Ticket] = []

    def pack(self, tensor: Tensor) -> Ticket | tuple[Tensor, int]:
        """Returns a ticket for the input or a view of it; any other tensor with its version."""
        # Without a check of the number of tokens: a rank without tokens must run again as the others do.
        if tensor.dtype == self._dtype and tensor.untyped_storage()._cdata == self._storage:
            self.tickets.append(Ticket(tensor, *self._layout))
            return self.tickets[-1]
        return tensor.detach(), tensor._version  # detached: a result of the graph would keep the graph alive


def unpack(packed: Ticket | tuple[Tensor, int]) -> Tensor:
    """Returns the tensor that `Packing.pack` packed. Raises RuntimeError if it was changed in place since."""
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
    """A node that saves a tensor. Nothing is computed from it, so its backward never runs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x_TM: Tensor) -> Tensor:
        ctx.save_for_backward(x_TM)
        return anchor.new_empty(0)


def hold(x_TM: Tensor) -> Any:
    """Returns an autograd node that has saved x_TM (T, M) through the saved-tensor hooks active now."""
    empty: Tensor = _Hold.apply(make_anchor(x_TM), x_TM.detach())  # type: ignore[no-untyped-call]
    return empty.grad_fn


class _TakeOver(torch.autograd.Function):
    """A node that returns a tensor of the first pass, so that it requires a gradient in the second.

    Its backward raises RuntimeError: the gradient belongs to the first pass's graph.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x_TM: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        raise RuntimeError(
            "a function checkpointed with pmoe.checkpoint_contexts must not go backward through a MoELayer "
            "itself (torch.autograd.grad): when it runs again, its routing has no graph. Call backward "
            "outside of the checkpointed function"
        )


def as_first_pass_had(tensor: Tensor, x_TM: Tensor) -> Tensor:
    """Returns a tensor of the first pass, without its graph, that requires a gradient as it did then."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor.detach()
    taken: Tensor = _TakeOver.apply(make_anchor(x_TM), x_TM, tensor.detach())  # type: ignore[no-untyped-call]
    return taken


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a nest of dataclasses and tuples with ``change`` applied to each tensor in it."""
    if isinstance(value, Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value))
        return dataclasses.replace(value, **{name: map_tensors(item, change) for name, item in fields})
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
