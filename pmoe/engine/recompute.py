"""Activation checkpointing: a layer that is run again for backward routes its tokens as it did before.

A checkpoint keeps nothing of what a forward pass saves and runs that pass again when backward wants it.
Tokens that are routed again may go elsewhere: for dropout before the gate, for noise in it, for one rounding.

Under `checkpoint_contexts` nothing is decided twice. The first pass records what each call of a layer
decided: the routing, the agreed row counts, n, the restore pair, who computes. The second pass takes that
over, in the same order. The gate is not run again, so its graph is the first pass's and stays whole: what it
saves is kept, logits and smaller. Of the layer's input, which it saves too, only a `_Ticket` stays; the rows
are those that the second pass makes again.

Under any other checkpoint the gate decides again, and `changed_routing` notices where it decides otherwise.

Letters: T tokens, K choices, M = d_model.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from pmoe.comm.counts import FAULTS, Fault, FaultError
from pmoe.engine.autograd import make_anchor
from pmoe.gates.hash import hashed

V = TypeVar("V")


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The ``context_fn`` of a `torch.utils.checkpoint.checkpoint` with MoE layers in it: the second pass
    routes every token as the first one did, exchanges no row counts and chooses nothing.

        y = checkpoint(block, x, use_reentrant=False, context_fn=pmoe.checkpoint_contexts)

    Gradients are those without the checkpoint, whatever is random in the block or in its gates. Between the
    passes a call of a layer keeps its indices, weights and counts, and what its gate saves: for the gates
    of pmoe nothing wider than the logits (a gate of one's own that widens the tokens, as ``x.float()`` does,
    keeps the wide ones). Gates' forward hooks, and whatever a gate counts, see one pass. A router outside of
    the layer (`pmoe.gates.GivenGate`) is run again like all else and must decide again as it did: nothing
    compares it here.

    One call is for one checkpoint: give the function itself, not its result. The checkpointed function must
    call the same layers in the same order in both passes, with as many tokens, and must not go backward
    through one itself, or RuntimeError says so. Not to be joined with selective checkpointing's contexts,
    which expect the gate's operations in both passes.
    """
    record = _Record(is_inside=_top_hooks() is not None)
    return _First(record), _Second(record)


# ---- what a layer asks


class Decisions:
    """What one call of a layer decides. This one decides everything itself; see `decisions_of`."""

    taken_over = False
    """Whether all was decided in a first pass."""

    def once(self, name: str, decide: Callable[[], V]) -> V:
        """decide(), `unseen`, or what it gave in the first pass, where that is recorded."""
        with unseen():
            return decide()

    def route(self, x_TM: Tensor, decide: Callable[[], V]) -> V:
        """The same for tensors that hang on the graph of x_TM and the gate's parameters, in any nest of
        dataclasses and tuples. In a second pass they need gradients as before, but have no graph: theirs is
        the first pass's."""
        return decide()


def unseen() -> AbstractContextManager[Any]:
    """Hides operations from selective checkpointing, which counts them and must find the same ones in both
    passes: what is measured, chosen or compared is done in one of them only."""
    selective = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
    if any(isinstance(mode, selective) for mode in _get_current_dispatch_mode_stack()):
        return _disable_current_modes()
    return nullcontext()


def decisions_of(layer: nn.Module, of_last_call: Sequence[str]) -> Decisions:
    """To be asked at the start of a call of ``layer``.

    of_last_call: attributes that describe the layer's last call. A second pass puts them back as it ends.
    Raises RuntimeError in a second pass that calls other layers than the first one did.
    """
    contexts = _active.contexts
    if not contexts or _in_another_checkpoint(contexts[-1].hooks):
        return Decisions()
    firsts = [each for each in contexts if isinstance(each, _First)]
    call: _Call | None = None
    if isinstance(contexts[0], _Replay):
        call = contexts[0].next(layer, of_last_call)
    # A checkpoint inside of one that runs again: what is taken over outside is new inside.
    decisions = _Recorded(_Call(layer)) if call is None else _TakenOver(call)
    for each in firsts:
        each.record.calls.append(decisions.call)
    return decisions if firsts or call is not None else Decisions()


# ---- records


@dataclass
class _Call:
    """What a call decided. tokens: how many, and their type. tickets: how often its gate saved the layer's
    input. random: states of the random number generators before and after the gate, where it drew.
    has_failed: whether ranks agreed on an error, which each of them raised."""

    layer: nn.Module
    made: dict[str, Any] = field(default_factory=dict)
    routing: Any = None
    tokens: tuple[int, torch.dtype] | None = None
    tickets: int = 0
    random: tuple[list[Tensor], list[Tensor]] | None = None
    has_failed: bool = False


@dataclass
class _Record:
    """The calls of one first pass in their order, and whether it has begun and ended. is_inside: whether
    saved tensors go through hooks around the checkpoint, which may be another checkpoint's."""

    is_inside: bool
    calls: list[_Call] = field(default_factory=list)
    has_begun: bool = False
    is_complete: bool = False


class _Recorded(Decisions):
    def __init__(self, call: _Call) -> None:
        self.call = call

    def once(self, name: str, decide: Callable[[], V]) -> V:
        try:
            found = self.call.made[name] = super().once(name, decide)
        except Exception:
            self.call.has_failed = True
            raise
        return found

    def route(self, x_TM: Tensor, decide: Callable[[], V]) -> V:
        call, before = self.call, _random_states(x_TM.device)
        packing = _Packing(x_TM)
        with saved_tensors_hooks(packing.pack, _unpack):
            found = decide()
        tickets = packing.take_tickets()
        for ticket in tickets:
            ticket.holder = _hold(x_TM)
        after = _random_states(x_TM.device)
        call.random = None if _same(before, after) else (before, after)
        call.tokens, call.tickets = (x_TM.shape[0], x_TM.dtype), len(tickets)
        # Without the graph: a record that held it would be held by it in turn.
        call.routing = _map_tensors(
            found, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad)
        )
        return found


class _TakenOver(Decisions):
    taken_over = True

    def __init__(self, call: _Call) -> None:
        self.call = call

    def once(self, name: str, decide: Callable[[], V]) -> V:
        made: V = self.call.made[name]
        return made

    def route(self, x_TM: Tensor, decide: Callable[[], V]) -> V:
        call = self.call
        if call.tokens != (x_TM.shape[0], x_TM.dtype):
            raise RuntimeError(
                f"x (tokens and dtype: {(x_TM.shape[0], x_TM.dtype)}) must be in recomputation what it was "
                f"in the forward pass ({call.tokens})"
            )
        for _ in range(call.tickets):
            _hold(x_TM)
        # Whatever draws after the gate must draw what it drew; where the checkpoint does not keep the
        # generators' states (preserve_rng_state=False) they are none of ours.
        if call.random is not None and _same(_random_states(x_TM.device), call.random[0]):
            _set_random_states(call.random[1], x_TM.device)
        routing: V = _map_tensors(call.routing, lambda tensor: _taken_over(tensor, x_TM))
        return routing


# ---- the two contexts


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _Active(threading.local):
    """What this thread is inside of, the innermost last. A second pass stands first and alone: it begins as
    if there were nothing around it."""

    def __init__(self) -> None:
        self.contexts: list[_First | _Replay] = []


_active = _Active()


class _First(AbstractContextManager[None]):
    def __init__(self, record: _Record) -> None:
        self.record = record
        self.hooks: Hooks | None = None

    def __enter__(self) -> None:
        if self.record.has_begun:
            raise RuntimeError(
                "context_fn must be pmoe.checkpoint_contexts itself, which makes new contexts for each "
                "checkpoint: these have seen a forward pass already"
            )
        self.record.has_begun = True
        self.hooks = _top_hooks()
        _active.contexts.append(self)

    def __exit__(self, *_: object) -> None:
        _active.contexts.remove(self)
        self.record.is_complete = True


class _Second(AbstractContextManager[None]):
    """Entered anew for every second pass: there is one for each backward through a retained graph."""

    def __init__(self, record: _Record) -> None:
        self._record = record
        self._outer: list[list[_First | _Replay]] = []

    def __enter__(self) -> None:
        self._outer.append(_active.contexts)
        _active.contexts = [_Replay(self._record)]

    def __exit__(self, *_: object) -> None:
        replay = _active.contexts[0]
        assert isinstance(replay, _Replay)
        replay.put_back()
        _active.contexts = self._outer.pop()


class _Replay:
    """One second pass."""

    def __init__(self, record: _Record) -> None:
        self.hooks = _top_hooks()
        self._record, self._position = record, 0
        self._before: dict[int, tuple[nn.Module, dict[str, Any]]] = {}

    def next(self, layer: nn.Module, of_last_call: Sequence[str]) -> _Call | None:
        """What the next call decided; None where the first pass has not come so far: backward runs in the
        middle of it."""
        calls, at = self._record.calls, self._position
        if at == len(calls) and not self._record.is_complete:
            return None
        self._position += 1
        if at >= len(calls) or calls[at].layer is not layer:
            before = f"the forward pass made {len(calls)}" if at >= len(calls) else "it was another layer's"
            raise RuntimeError(
                f"call {at + 1} of a MoELayer in recomputation must be the forward pass's, and {before}: a "
                "function checkpointed with pmoe.checkpoint_contexts must call the same layers in the same "
                "order when it is run again"
            )
        if calls[at].has_failed or calls[at].tokens is None:
            raise RuntimeError(
                f"call {at + 1} of a MoELayer in recomputation repeats one that raised an error: a function "
                "checkpointed with pmoe.checkpoint_contexts must not go on after that"
            )
        if id(layer) not in self._before:
            self._before[id(layer)] = (layer, {name: getattr(layer, name) for name in of_last_call})
        return calls[at]

    def put_back(self) -> None:
        for layer, attributes in self._before.values():
            for name, value in attributes.items():
                setattr(layer, name, value)


def _top_hooks() -> Hooks | None:
    """What packs the tensors that autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _is_kept() -> bool:
    """Whether the routing is recorded for the only checkpoint that may run a call again."""
    last = _active.contexts[-1] if _active.contexts else None
    return isinstance(last, _First) and not last.record.is_inside and not _in_another_checkpoint(last.hooks)


def _in_another_checkpoint(own: Hooks | None) -> bool:
    """Whether tensors are saved by a checkpoint further in, which has its own second pass."""
    top = _top_hooks()
    if top is None or (own is not None and top[0] is own[0]):
        return False
    return getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


# ---- the gate's graph


class _Ticket:
    """Stands in the gate's graph for the layer's input or a view of it. holder: its ``saved_tensors`` are
    that input, saved as everything around the gate is: by the checkpoint, which makes it again."""

    def __init__(self, tensor: Tensor, input_stride: tuple[int, ...], input_offset: int) -> None:
        self.size, self.stride, self.input_stride = tensor.size(), tensor.stride(), input_stride
        self.offset = tensor.storage_offset() - input_offset
        self.holder: Any = None

    def tensor(self) -> Tensor:
        x_TM: Tensor
        (x_TM,) = self.holder.saved_tensors
        if x_TM.stride() != self.input_stride:  # other hooks, such as save_on_cpu's, may have changed that
            x_TM = torch.empty_strided(
                x_TM.size(), self.input_stride, dtype=x_TM.dtype, device=x_TM.device
            ).copy_(x_TM)
        return x_TM.as_strided(self.size, self.stride, x_TM.storage_offset() + self.offset)


class _Packing:
    """Packs what a gate saves of x_TM. It does not hold x_TM: autograd keeps `pack` as long as the graph."""

    def __init__(self, x_TM: Tensor) -> None:
        self._storage, self._dtype = x_TM.untyped_storage()._cdata, x_TM.dtype
        self._layout = x_TM.stride(), int(x_TM.storage_offset())
        self._tickets: list[_Ticket] = []

    def pack(self, tensor: Tensor) -> _Ticket | tuple[Tensor, int]:
        # Also where there are no tokens: whether a rank runs again must not depend on them.
        if tensor.dtype == self._dtype and tensor.untyped_storage()._cdata == self._storage:
            self._tickets.append(_Ticket(tensor, *self._layout))
            return self._tickets[-1]
        return tensor.detach(), tensor._version  # a graph that saved its own results would hold itself

    def take_tickets(self) -> list[_Ticket]:
        tickets, self._tickets = self._tickets, []
        return tickets


def _unpack(packed: _Ticket | tuple[Tensor, int]) -> Tensor:
    if isinstance(packed, _Ticket):
        return packed.tensor()
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that a gate needs for its gradient has been changed in "
            f"place since: it is at version {tensor._version}, and must be at version {version}"
        )
    return tensor


class _Hold(torch.autograd.Function):
    """Saves a tensor, and nothing more."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x_TM: Tensor) -> Tensor:
        ctx.save_for_backward(x_TM)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        raise AssertionError("nothing is computed from it")


def _hold(x_TM: Tensor) -> Any:
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


def _taken_over(tensor: Tensor, x_TM: Tensor) -> Tensor:
    """As the first pass had it, as far as gradients are asked for."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor.detach()
    found: Tensor = _TakeOver.apply(make_anchor(x_TM), x_TM, tensor.detach())  # type: ignore[no-untyped-call]
    return found


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of dataclasses and tuples."""
    if isinstance(value, Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
        return dataclasses.replace(value, **{name: _map_tensors(each, change) for name, each in fields})
    if isinstance(value, tuple):
        items = [_map_tensors(each, change) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _random_states(device: torch.device) -> list[Tensor]:
    """Of the generators that a gate on ``device`` may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda" and not _is_capturing(device):
        states.append(torch.cuda.get_rng_state(device))
    return states


def _is_capturing(device: torch.device) -> bool:
    """Whether what is launched becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _set_random_states(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


# ---- routing that is decided again


REMEMBERED = 4096
"""Calls of a layer whose routing is known by a hash of 8 bytes. A checkpoint that is run again after more
calls of its layer than these would be told that its routing changed."""

REMEMBERED_AT_FIRST = 128


class _Remembered:
    """Hashes of how a layer routed in its last calls that may be run again, and their numbers of tokens."""

    def __init__(self, device: torch.device) -> None:
        self.hashes = torch.zeros(REMEMBERED_AT_FIRST, dtype=torch.int64, device=device)
        self.num_tokens: list[int] = []
        self._next = 0

    def add(self, num_tokens: int, hash_: Tensor) -> None:
        length = self.hashes.shape[0]
        if self._next == length and length < REMEMBERED:
            self.hashes = torch.cat([self.hashes, torch.zeros_like(self.hashes)])
        at = self._next % self.hashes.shape[0]
        self.hashes[at] = hash_
        self.num_tokens[at : at + 1] = [num_tokens]
        self._next = at + 1


_remembered: weakref.WeakKeyDictionary[nn.Module, _Remembered] = weakref.WeakKeyDictionary()


def changed_routing(layer: nn.Module, num_tokens: int, *routing: Tensor | None) -> Tensor | None:
    """Whether a call of ``layer`` that is run again routes otherwise than the call that it repeats: an int64
    scalar, 1 or 0, where the tensors of ``routing`` are; None where nothing is run again. Nothing is waited
    for, and where no checkpoint is about nothing is computed.

    A first run is one with gradients whose saved tensors go through hooks, or one in training mode without
    gradients, as the older kind of checkpoint makes it (use_reentrant=True); not one whose routing is kept
    for the only checkpoint around it. A second run is inside of a backward and with gradients, through hooks
    or in training mode, of as many tokens as some first run. So a layer that is called inside of a backward
    with new tokens, by a hook maybe, is taken for one only if their number is known.
    """
    again, has_grad = torch._C._current_graph_task_id() != -1, torch.is_grad_enabled()
    goes_through_hooks = has_grad and _top_hooks() is not None
    if not (goes_through_hooks or (layer.training and again == has_grad)):
        return None
    device = next(tensor.device for tensor in routing if tensor is not None)
    if torch.is_inference_mode_enabled() or _is_capturing(device) or (has_grad and not again and _is_kept()):
        return None
    with unseen():
        earlier = _remembered.get(layer)
        if earlier is None or earlier.hashes.device != device:
            earlier = _remembered[layer] = _Remembered(device)
        if not again:
            earlier.add(num_tokens, _hash(num_tokens, routing))
        elif num_tokens in earlier.num_tokens:
            return (earlier.hashes != _hash(num_tokens, routing)).all().long()
    return None


def refuse_changed_routing(layer: nn.Module, num_tokens: int, *routing: Tensor | None) -> None:
    """Raises FaultError where `changed_routing` is 1. Waits for the device, but only in a second run: for one
    rank, which has no exchange to tell it by."""
    changed = changed_routing(layer, num_tokens, *routing)
    with unseen():
        has_changed = changed is not None and bool(changed)
    if has_changed:
        raise FaultError(Fault.RECOMPUTED, FAULTS[Fault.RECOMPUTED])


@torch.no_grad()
def _hash(num_tokens: int, routing: Sequence[Tensor | None]) -> Tensor:
    """Of 64 bits, as a scalar. It depends on where each number stands."""
    total: Tensor | None = None
    for i, tensor in enumerate(routing):
        if tensor is not None:
            numbers = tensor.reshape(-1).long()
            place = torch.arange(numbers.numel(), device=numbers.device)
            mixed = hashed((place << 24) ^ numbers, seed=num_tokens * len(routing) + i, draws=1).sum()
            total = mixed if total is None else total + mixed
    assert total is not None
    return total
