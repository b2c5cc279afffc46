"""Activation checkpointing whose second pass replays the first one's decision: `pmoe.checkpoint_contexts`.

Nothing is decided twice. The first pass records what each call of a layer decided: the routing, the agreed
row counts, n, the restore pair, the runner. The second pass takes that over, in the same order. The gate is
not run again, so its graph is the first pass's and stays whole.
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

from pmoe.engine.autograd import make_anchor
from pmoe.engine.replay import FINDERS, Replay, SavedHooks, top_hooks

V = TypeVar("V")


def checkpoint_contexts(
    policy: Callable[..., Any] | list[Any] | None = None,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The ``context_fn`` of a `torch.utils.checkpoint.checkpoint` with MoE layers in it: the second pass
    routes every token as the first one did, exchanges no row counts and chooses nothing.

        y = checkpoint(block, x, use_reentrant=False, context_fn=pmoe.checkpoint_contexts)

    Gradients are those without the checkpoint, whatever is random in the block or in its gates. Between the
    passes a call of a layer keeps its indices, weights and counts, and what its gate saves: for the gates
    of pmoe nothing wider than the logits (a gate of one's own that widens the tokens, as ``x.float()`` does,
    keeps the wide ones). Gates' forward hooks, and whatever a gate counts, see one pass. A router outside of
    the layer (`pmoe.gates.ExternalGate`) is run again like all else and must decide again as it did: nothing
    compares it here.

    policy: a function or a list of operators, as torch's ``create_selective_checkpoint_contexts`` takes it.
    It says which operators around the layers are not run again; a layer runs again as a whole.

        context_fn=functools.partial(pmoe.checkpoint_contexts, [torch.ops.aten.mm.default])

    One call is for one checkpoint: give the function itself, not its result. The checkpointed function must
    call the same layers in the same order in both passes, with as many tokens, and must not go backward
    through one itself, or RuntimeError says so. Raises what torch raises for a policy that is none.
    """
    first = _First()
    second = _Second(first)
    if policy is None:
        return first, second
    selective = create_selective_checkpoint_contexts(policy)
    return _Both(first, selective[0]), _Both(second, selective[1])


class _Both(AbstractContextManager[None]):
    """Two contexts in one, to be entered any number of times."""

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
    """Of the checkpoints around a call that is about to begin.

    Raises RuntimeError in a second pass that calls other layers than the first one did.
    """
    contexts = _contexts.get()
    if not contexts or _in_another_checkpoint(contexts[-1].hooks):
        return None
    firsts = [each for each in contexts if isinstance(each, _First)]
    call: _Call | None = None
    if isinstance(contexts[0], _RunningAgain):
        call = contexts[0].next(layer)
    # A checkpoint inside of one that runs again: what is replayed outside is new inside.
    replay = _Recording(_Call(layer)) if call is None else _Replaying(call)
    for each in firsts:
        each.calls.append(replay.call)
    return replay if firsts or call is not None else None


FINDERS.append(_find)


@dataclass
class _Call:
    """What a call decided.

    decided, routing: what `Replay.once` and `Replay.route` gave, None where they raised an error.
    tokens: their number and type. tickets: how often its gate saved the layer's input.
    random: states of the random number generators before and after the gate, where it drew.
    """

    layer: nn.Module
    decided: Any = None
    routing: Any = None
    tokens: tuple[int, torch.dtype] | None = None
    tickets: int = 0
    random: tuple[list[Tensor], list[Tensor]] | None = None


class _Recording(Replay):
    def __init__(self, call: _Call) -> None:
        self.call = call

    def once(self, decide: Callable[[], V]) -> V:
        found = self.call.decided = super().once(decide)
        return found

    def route(self, x_TM: Tensor, decide: Callable[[], V]) -> V:
        call, before = self.call, _random_states(x_TM.device)
        packing = Packing(x_TM)
        with saved_tensors_hooks(packing.pack, unpack):
            found = decide()
        tickets, packing.tickets = packing.tickets, []
        for ticket in tickets:
            ticket.holder = hold(x_TM)
        after = _random_states(x_TM.device)
        call.random = None if _same(before, after) else (before, after)
        call.tokens, call.tickets = (x_TM.shape[0], x_TM.dtype), len(tickets)
        # Without the graph: a record that held it would be held by it in turn.
        call.routing = map_tensors(found, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
        return found


class _Replaying(Replay):
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
                f"x (tokens and dtype: {(x_TM.shape[0], x_TM.dtype)}) must be in recomputation what it was "
                f"in the forward pass ({call.tokens})"
            )
        for _ in range(call.tickets):
            hold(x_TM)
        # Whatever draws after the gate must draw what it drew; where the checkpoint does not keep the
        # generators' states (preserve_rng_state=False) they are none of ours.
        if call.random is not None and _same(_random_states(x_TM.device), call.random[0]):
            _set_random_states(call.random[1], x_TM.device)
        routing: V = map_tensors(call.routing, lambda tensor: as_first_pass_had(tensor, x_TM))
        return routing


_contexts: ContextVar[tuple[_First | _RunningAgain, ...]] = ContextVar("checkpoints", default=())
"""What this thread is inside of, the innermost last. A second pass stands first and alone: it begins as if
there were nothing around it."""


class _First(AbstractContextManager[None]):
    """One first pass, and its calls in their order. is_inside: whether saved tensors go through hooks around
    the checkpoint, which may be another checkpoint's."""

    def __init__(self) -> None:
        self.is_inside = top_hooks() is not None
        self.calls: list[_Call] = []
        self.hooks: SavedHooks | None = None
        self.has_begun = self.is_complete = False

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
        _contexts.set(tuple(each for each in _contexts.get() if each is not self))
        self.is_complete, self.hooks = True, None  # the hooks may hold all this in turn


class _Second(AbstractContextManager[None]):
    """Entered anew for every second pass: there is one for each backward through a retained graph."""

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
    """One second pass."""

    def __init__(self, first: _First) -> None:
        self.hooks = top_hooks()
        self._first, self._position = first, 0
        self._before: dict[nn.Module, Any] = {}

    def next(self, layer: nn.Module) -> _Call | None:
        """What the next call decided; None where the first pass has not come so far: backward runs in the
        middle of it."""
        calls, at = self._first.calls, self._position
        if at == len(calls) and not self._first.is_complete:
            return None
        self._position += 1
        if at >= len(calls) or calls[at].layer is not layer:
            before = f"the forward pass made {len(calls)}" if at >= len(calls) else "it was another layer's"
            raise RuntimeError(
                f"call {at + 1} of a MoELayer in recomputation must be the forward pass's, and {before}: a "
                "function checkpointed with pmoe.checkpoint_contexts must call the same layers in the same "
                "order when it is run again"
            )
        if calls[at].decided is None or calls[at].tokens is None:
            raise RuntimeError(
                f"call {at + 1} of a MoELayer in recomputation repeats one that raised an error: a function "
                "checkpointed with pmoe.checkpoint_contexts must not go on after that"
            )
        self._before.setdefault(layer, layer.last)
        return calls[at]

    def put_back(self) -> None:
        for layer, last in self._before.items():
            layer.last = last


def routing_is_kept() -> bool:
    """Whether the routing is recorded for the only checkpoint that may run a call again."""
    last = next(reversed(_contexts.get()), None)
    return isinstance(last, _First) and not last.is_inside and not _in_another_checkpoint(last.hooks)


def _in_another_checkpoint(own: SavedHooks | None) -> bool:
    """Whether tensors are saved by a checkpoint further in, which has its own second pass."""
    top = top_hooks()
    if top is None or (own is not None and top[0] is own[0]):
        return False
    return getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


def _random_states(device: torch.device) -> list[Tensor]:
    """Of the generators that a gate on ``device`` may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda" and not is_capturing(device):
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_random_states(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


# ---- the gate's graph: it runs once, in the first pass. Of the layer's input, which a gate saves, only a
# `Ticket` stays in it; the rows are those that the second pass makes again


class Ticket:
    """Stands in the gate's graph for the layer's input or a view of it. holder: its ``saved_tensors`` are
    that input, saved as everything around the gate is: by the checkpoint, which makes it again."""

    size: torch.Size
    stride: tuple[int, ...]
    input_stride: tuple[int, ...]
    offset: int

    def __init__(self, tensor: Tensor, input_stride: tuple[int, ...], input_offset: int) -> None:
        self.size, self.stride, self.input_stride = tensor.size(), tensor.stride(), input_stride
        self.offset = cast(int, tensor.storage_offset() - input_offset)
        self.holder: Any = None

    def tensor(self) -> Tensor:
        x_TM: Tensor
        (x_TM,) = self.holder.saved_tensors
        if x_TM.stride() != self.input_stride:  # other hooks, such as save_on_cpu's, may have changed that
            x_TM = torch.empty_strided(
                x_TM.size(), self.input_stride, dtype=x_TM.dtype, device=x_TM.device
            ).copy_(x_TM)
        return x_TM.as_strided(self.size, self.stride, x_TM.storage_offset() + self.offset)


class Packing:
    """Packs what a gate saves of x_TM. It does not hold x_TM: autograd keeps `pack` as long as the graph."""

    def __init__(self, x_TM: Tensor) -> None:
        self._storage, self._dtype = x_TM.untyped_storage()._cdata, x_TM.dtype
        self._layout = x_TM.stride(), int(x_TM.storage_offset())
        self.tickets: list[Ticket] = []

    def pack(self, tensor: Tensor) -> Ticket | tuple[Tensor, int]:
        # Also where there are no tokens: whether a rank runs again must not depend on them.
        if tensor.dtype == self._dtype and tensor.untyped_storage()._cdata == self._storage:
            self.tickets.append(Ticket(tensor, *self._layout))
            return self.tickets[-1]
        return tensor.detach(), tensor._version  # a graph that saved its own results would hold itself


def unpack(packed: Ticket | tuple[Tensor, int]) -> Tensor:
    if isinstance(packed, Ticket):
        return packed.tensor()
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that a gate needs for its gradient has been changed in "
            f"place since: it is at version {tensor._version}, and must be at version {version}"
        )
    return tensor


class _Hold(torch.autograd.Function):
    """Saves a tensor, and nothing more: nothing is computed from it, so nothing goes backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x_TM: Tensor) -> Tensor:
        ctx.save_for_backward(x_TM)
        return anchor.new_empty(0)


def hold(x_TM: Tensor) -> Any:
    held: Tensor = _Hold.apply(make_anchor(x_TM), x_TM.detach())  # type: ignore[no-untyped-call]
    return held.grad_fn


class _TakeOver(torch.autograd.Function):
    """The tensor, in a graph that knows no gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x_TM: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        raise RuntimeError(
            "a function checkpointed with pmoe.checkpoint_contexts must not go backward through a MoELayer "
            "itself (torch.autograd.grad): when it is run again, the gradient of its routing is not known"
        )


def as_first_pass_had(tensor: Tensor, x_TM: Tensor) -> Tensor:
    """As the first pass had it, as far as gradients are asked for."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor.detach()
    found: Tensor = _TakeOver.apply(make_anchor(x_TM), x_TM, tensor.detach())  # type: ignore[no-untyped-call]
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of dataclasses and tuples."""
    if isinstance(value, Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
        return dataclasses.replace(value, **{name: map_tensors(each, change) for name, each in fields})
    if isinstance(value, tuple):
        items = [map_tensors(each, change) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
