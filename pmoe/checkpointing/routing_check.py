"""Detects routing that changed when an activation checkpoint recomputed a layer, by comparing hashes.

The check is for activation checkpoints without `pmoe.checkpoint_contexts`, which repeats the routing by
itself. If tokens were routed differently in the recomputation, gradients would belong to another output. Each
call of a layer in a forward pass that may be recomputed stores an 8-byte hash of its routing. A call in a
recomputation computes the hash of its own routing, which must be among the stored hashes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import FrameType

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from pmoe.checkpointing.contexts import routing_is_kept
from pmoe.checkpointing.replay import hidden_from_checkpoints
from pmoe.comm.counts import Fault, FaultError
from pmoe.engine.lanes.run import is_captured
from pmoe.experts.lora import adapter_of_calls, number_of_adapter, switched_adapter
from pmoe.gates.hash import hashed
from pmoe.warn import warn_once

REMEMBERED = 4096
"""Largest number of calls of a layer whose hashes are stored.

If more calls come between a call and its recomputation, its hash is gone and the routing is reported as
changed, although it is not.
"""

REMEMBERED_AT_FIRST = 128
"""Number of hashes for which memory is allocated at first. It is doubled when full, up to `REMEMBERED`."""


class _Remembered:
    """Hashes of a layer's routing in its last forward passes, which a checkpoint may recompute.

    hashes: (capacity,) int64 on the device. When it is full, a new hash overwrites the oldest hash.
    num_tokens: number of tokens of each of these calls, on the host.
    adapters: the name of the adapter that each of these calls used (`pmoe.use_lora`); "" for none.
    is_reentrant: whether the last of these calls was inside of a checkpoint with use_reentrant=True.
    """

    def __init__(self, device: torch.device) -> None:
        self.hashes = torch.zeros(REMEMBERED_AT_FIRST, dtype=torch.int64, device=device)
        self.num_tokens: list[int] = []
        self.adapters: list[str] = []
        self.is_reentrant = False
        self._next = 0

    def add(self, num_tokens: int, adapter: str, hash_: Tensor) -> None:
        """Stores the hash of a call that may be recomputed.

        num_tokens: number of tokens of the call.
        adapter: the name of the adapter that the call used; "" for none.
        hash_: an int64 scalar on the device.
        """
        length = self.hashes.shape[0]
        if self._next == length and length < REMEMBERED:
            self.hashes = torch.cat([self.hashes, torch.zeros_like(self.hashes)])
        index = self._next % self.hashes.shape[0]
        self.hashes[index] = hash_
        self.num_tokens[index : index + 1] = [num_tokens]
        self.adapters[index : index + 1] = [adapter]
        self._next = index + 1


_remembered: weakref.WeakKeyDictionary[nn.Module, _Remembered] = weakref.WeakKeyDictionary()


def changed_routing(layer: nn.Module, num_tokens: int, *routing: Tensor | None) -> Tensor | None:
    """Checks whether a recomputed call of ``layer`` routes tokens differently than the forward pass did.

    num_tokens: number of tokens of the call.
    routing: the tensors of the routing; None in place of a tensor that the gate does not return.

    This function cannot see whether there is a checkpoint. So it distinguishes two cases:

    - The call runs outside of backward: it is a forward pass. The hash of its routing is stored, and None is
      returned. Nothing is stored in inference mode, while a CUDA graph is captured, or if the only checkpoint
      around the call repeats the routing anyway.
    - The call runs inside of backward, in training mode, with as many tokens as some stored call: it is
      treated as a recomputation. Returns an int64 scalar on the routing's device: 1 if no stored call had the
      same routing, else 0. The host does not wait for the device. (A hook may call the layer inside of
      backward with new tokens. That call is also treated as a recomputation if a stored call had as many
      tokens.)

    Raises RuntimeError if no stored call with as many tokens used the adapter that is active now.

    In all other cases None is returned. So in eval mode nothing is detected: there a checkpoint with
    use_reentrant=True leaves no sign that its forward pass may be recomputed.

    Must only be called if `pmoe.checkpointing.replay.may_run_again` is True.
    """
    is_in_backward = torch._C._current_graph_task_id() != -1
    has_grad = torch.is_grad_enabled()
    device = next(tensor.device for tensor in routing if tensor is not None)
    if (
        torch.is_inference_mode_enabled()
        or is_captured(device)
        or (has_grad and not is_in_backward and routing_is_kept())
    ):
        return None
    adapter = adapter_of_calls(layer)
    # Calls with several adapters may have the same routing, so the adapter changes the hash, too.
    number = number_of_adapter(adapter)
    with hidden_from_checkpoints():
        earlier = _remembered.get(layer)
        if earlier is None or earlier.hashes.device != device:
            earlier = _remembered[layer] = _Remembered(device)
        if not is_in_backward:
            earlier.add(num_tokens, adapter, routing_hash(num_tokens, routing) + number)
            earlier.is_reentrant = not has_grad and _is_in_function()
        elif layer.training and num_tokens in earlier.num_tokens:
            calls = zip(earlier.num_tokens, earlier.adapters, strict=True)
            adapters = {used for count, used in calls if count == num_tokens}
            if adapter not in adapters:
                raise switched_adapter(adapters, adapter)
            return (earlier.hashes != routing_hash(num_tokens, routing) + number).all().long()
    return None


def refuse_changed_routing(layer: nn.Module, num_tokens: int, *routing: Tensor | None) -> None:
    """Raises FaultError if a recomputed call of ``layer`` routes differently from the forward pass.

    num_tokens, routing: the arguments of `changed_routing`.

    In a recomputation the host waits for the device; in other calls it does not. This function is for layers
    on a single rank. On several ranks, the exchange of row counts carries the error, so that all ranks raise
    it.
    """
    changed = changed_routing(layer, num_tokens, *routing)
    with hidden_from_checkpoints():
        has_changed = changed is not None and bool(changed)
    if has_changed:
        raise FaultError(Fault.RECOMPUTED, Fault.RECOMPUTED.text)


def warn_of_lost_loss(layer: nn.Module, gate: nn.Module) -> None:
    """Warns if a reentrant checkpoint has cut a layer's auxiliary loss off from its graph.

    A checkpoint with use_reentrant=True turns gradients off in the forward pass. Only what its function
    returns gets a gradient; ``layer.l_aux``, which is read after the checkpoint, does not.

    layer: the layer. Its last auxiliary loss has no graph.
    gate: the layer's gate. If it is frozen, nothing is lost.
    """
    earlier = _remembered.get(layer)
    if earlier is not None and earlier.is_reentrant and any(p.requires_grad for p in gate.parameters()):
        warn_once(
            "layer.l_aux was read after a checkpoint with use_reentrant=True. This value has no gradient: a "
            "loss that adds it does not train the gate by it. Pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint, or return layer.l_aux from the checkpointed function and add "
            "what the checkpoint returns. To log the value, read it under torch.no_grad()"
        )


def _is_in_function() -> bool:
    """Returns whether the caller runs inside of the forward pass of a `torch.autograd.Function`.

    A checkpoint with use_reentrant=True is one, also that of Megatron, DeepSpeed or fairscale.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            return isinstance(frame.f_locals.get("ctx"), FunctionCtx)
        frame = frame.f_back
    return False


@torch.no_grad()
def routing_hash(num_tokens: int, routing: Sequence[Tensor | None]) -> Tensor:
    """Returns the hash of a routing as an int64 scalar.

    Each number is hashed together with its position, so that a permutation of the tokens gives another hash.

    num_tokens: number of tokens, which is hashed too.
    routing: the tensors of the routing, or None; at least one is a tensor.
    """
    total: Tensor | None = None
    for i, tensor in enumerate(routing):
        if tensor is not None:
            numbers = tensor.reshape(-1).long()
            place = torch.arange(numbers.numel(), device=numbers.device)
            mixed = hashed((place << 24) ^ numbers, seed=num_tokens * len(routing) + i, draws=1).sum()
            total = mixed if total is None else total + mixed
    assert total is not None
    return total
