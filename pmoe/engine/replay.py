"""What a layer asks about activation checkpointing: whether a call is a first pass, or one that runs again.

A checkpoint keeps nothing of what a forward pass saves and runs that pass again when backward wants it.
Tokens that are routed again may go elsewhere: for dropout before the gate, for noise in it, for one rounding.
Under `pmoe.checkpoint_contexts` (pmoe/engine/recompute.py) the second pass replays the first one's decision;
under any other checkpoint `pmoe.engine.rerouting` notices where the gate decides otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pmoe.engine.selective import hidden_from_selective_checkpoints

V = TypeVar("V")


class Replay:
    """How a call decides. This one decides all by itself; see `replay_of`."""

    is_replay = False
    """Whether all was decided in a first pass."""

    def once(self, decide: Callable[[], V]) -> V:
        """decide(), hidden from checkpoints, or what it gave in the first pass."""
        with hidden_from_checkpoints():
            return decide()

    def route(self, x_TM: Tensor, decide: Callable[[], V]) -> V:
        """decide(), or what it gave in the first pass, for tensors that hang on the gate's graph.

        They may be in any nest of dataclasses and tuples. In a second pass they need gradients as before, but
        have no graph: theirs is the first pass's.
        """
        return decide()


FINDERS: list[Callable[[nn.Module], Replay | None]] = []
"""Who knows of checkpoints that a call of a layer may be inside of; None where it is inside of none."""


def replay_of(layer: nn.Module) -> Replay:
    """To be asked at the start of a call of ``layer``."""
    found = (find(layer) for find in FINDERS)
    return next((replay for replay in found if replay is not None), Replay())


def hidden_from_checkpoints() -> AbstractContextManager[None]:
    """Hides operations and the tensors that they save from checkpoints, which count them and must find the
    same in both passes: measuring, choosing and comparing happen in one of them only."""
    is_plain = top_hooks() is None and not torch._C._len_torch_dispatch_stack()
    return nullcontext() if is_plain else _hidden()


@contextmanager
def _hidden() -> Iterator[None]:
    with ExitStack() as hidden:
        hidden.enter_context(hidden_from_selective_checkpoints())
        if top_hooks() is not None:
            hidden.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        yield


SavedHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def top_hooks() -> SavedHooks | None:
    """What packs the tensors that autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def may_run_again(layer: nn.Module) -> bool:
    """Whether a checkpoint may be about, so that a call may be run again or be run again now.

    A first run is one with gradients whose saved tensors go through hooks, or one in training mode without
    gradients, as the older kind of checkpoint makes it (use_reentrant=True). A second run is inside of a
    backward and with gradients, through hooks or in training mode.
    """
    again, has_grad = torch._C._current_graph_task_id() != -1, torch.is_grad_enabled()
    goes_through_hooks = has_grad and top_hooks() is not None
    return goes_through_hooks or (layer.training and again == has_grad)
