"""Detects routing that changed when a checkpoint ran a layer again, by comparing hashes.

Only for checkpoints that do not keep the routing (`pmoe.checkpointing.contexts`). If tokens were routed
differently the second time, gradients would belong to another output. Each first run leaves a hash of 8
bytes; a second run must have the hash of some first run.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pmoe.checkpointing.contexts import routing_is_kept
from pmoe.checkpointing.replay import hidden_from_checkpoints
from pmoe.comm.counts import Fault, FaultError
from pmoe.engine.lanes.run import is_captured
from pmoe.gates.hash import hashed

REMEMBERED = 4096
"""Number of calls of a layer that have a hash. A checkpoint that runs again after more calls than these would
be reported as changed, although it is not."""

REMEMBERED_AT_FIRST = 128
"""Number of hashes for which there is memory at first; it doubles up to `REMEMBERED`."""


class _Remembered:
    """The hashes of a layer's routing in its last calls that may be run again.

    hashes: (capacity,) int64 on the device; the oldest is overwritten first.
    num_tokens: the number of tokens of each of these calls, on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.hashes = torch.zeros(REMEMBERED_AT_FIRST, dtype=torch.int64, device=device)
        self.num_tokens: list[int] = []
        self._next = 0

    def add(self, num_tokens: int, hash_: Tensor) -> None:
        """Stores the hash (an int64 scalar on the device) of a first run."""
        length = self.hashes.shape[0]
        if self._next == length and length < REMEMBERED:
            self.hashes = torch.cat([self.hashes, torch.zeros_like(self.hashes)])
        index = self._next % self.hashes.shape[0]
        self.hashes[index] = hash_
        self.num_tokens[index : index + 1] = [num_tokens]
        self._next = index + 1


_remembered: weakref.WeakKeyDictionary[nn.Module, _Remembered] = weakref.WeakKeyDictionary()


def changed_routing(layer: nn.Module, num_tokens: int, *routing: Tensor | None) -> Tensor | None:
    """Whether a second run of ``layer`` routes differently from every first run, found without waiting.

    num_tokens: T.
    routing: the tensors of the routing; None for those that a gate does not return.
    Returns an int64 scalar where these tensors are, 1 if the routing changed, else 0. None if the call is not
    a second run.

    Called only if `pmoe.checkpointing.replay.may_run_again`. Then:

    - a first run is a call outside of backward, unless its routing is kept for the only checkpoint around it;
    - a second run is a call inside of backward, in training mode, with as many tokens as some first run. So a
      layer that a hook calls inside of backward with new tokens is mistaken for a second run only if some
      first run had as many.

    In eval mode a checkpoint with use_reentrant=True leaves no trace of its first run, and nothing is found.
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
    with hidden_from_checkpoints():
        earlier = _remembered.get(layer)
        if earlier is None or earlier.hashes.device != device:
            earlier = _remembered[layer] = _Remembered(device)
        if not is_in_backward:
            earlier.add(num_tokens, _hash(num_tokens, routing))
        elif layer.training and num_tokens in earlier.num_tokens:
            return (earlier.hashes != _hash(num_tokens, routing)).all().long()
    return None


def refuse_changed_routing(layer: nn.Module, num_tokens: int, *routing: Tensor | None) -> None:
    """Raises FaultError if `changed_routing` is 1. Waits for the device, but only in a second run.

    For a single rank, which has no exchange of counts in which a fault would travel.
    """
    changed = changed_routing(layer, num_tokens, *routing)
    with hidden_from_checkpoints():
        has_changed = changed is not None and bool(changed)
    if has_changed:
        raise FaultError(Fault.RECOMPUTED, Fault.RECOMPUTED.text)


@torch.no_grad()
def _hash(num_tokens: int, routing: Sequence[Tensor | None]) -> Tensor:
    """Returns an int64 scalar, the hash of the routing. It depends on the place of each number."""
    total: Tensor | None = None
    for i, tensor in enumerate(routing):
        if tensor is not None:
            numbers = tensor.reshape(-1).long()
            place = torch.arange(numbers.numel(), device=numbers.device)
            mixed = hashed((place << 24) ^ numbers, seed=num_tokens * len(routing) + i, draws=1).sum()
            total = mixed if total is None else total + mixed
    assert total is not None
    return total
