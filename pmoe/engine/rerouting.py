"""Routing that is decided again under a checkpoint: whether it is what it was, known by hashes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pmoe.comm.counts import Fault, FaultError
from pmoe.engine.recompute import is_capturing, routing_is_kept
from pmoe.engine.replay import hidden_from_checkpoints
from pmoe.gates.hash import hashed

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

    Of calls for which `pmoe.engine.replay.may_run_again`: a first run is one whose routing is not kept for
    the only checkpoint around it, a second run is one in training mode of as many tokens as some first run.
    So a layer that is called inside of a backward with new tokens, by a hook maybe, is taken for one only if
    their number is known. (In eval mode the older kind of checkpoint leaves no trace of its first run.)
    """
    again, has_grad = torch._C._current_graph_task_id() != -1, torch.is_grad_enabled()
    device = next(tensor.device for tensor in routing if tensor is not None)
    if (
        torch.is_inference_mode_enabled()
        or is_capturing(device)
        or (has_grad and not again and routing_is_kept())
    ):
        return None
    with hidden_from_checkpoints():
        earlier = _remembered.get(layer)
        if earlier is None or earlier.hashes.device != device:
            earlier = _remembered[layer] = _Remembered(device)
        if not again:
            earlier.add(num_tokens, _hash(num_tokens, routing))
        elif layer.training and num_tokens in earlier.num_tokens:
            return (earlier.hashes != _hash(num_tokens, routing)).all().long()
    return None


def refuse_changed_routing(layer: nn.Module, num_tokens: int, *routing: Tensor | None) -> None:
    """Raises FaultError where `changed_routing` is 1. Waits for the device, but only in a second run: for one
    rank, which has no exchange to tell it by."""
    changed = changed_routing(layer, num_tokens, *routing)
    with hidden_from_checkpoints():
        has_changed = changed is not None and bool(changed)
    if has_changed:
        raise FaultError(Fault.RECOMPUTED, Fault.RECOMPUTED.text)


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
