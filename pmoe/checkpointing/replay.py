"""Activation checkpointing as a layer's call sees it: a first pass, or a second pass that repeats it.

A checkpoint drops the tensors that a forward pass saves, and runs that pass again when backward needs them.
In the second pass a gate may route tokens differently, because of dropout before it, of noise in it, or of
one rounding. Then gradients would belong to another output. So a second pass replays the decision of the
first one if the checkpoint uses `pmoe.checkpoint_contexts` (`pmoe.checkpointing.contexts`):

                  gate                      exchange of counts, choices    rows and products
    first pass    runs; `route` records     run; `once` records            run
    second pass   replayed by `route`       replayed by `once`             run again

Under any other checkpoint everything runs again. `pmoe.checkpointing.routing_check` then notices if the
routing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pmoe.checkpointing.selective import hidden_from_selective_checkpoints

V = TypeVar("V")


class Replay:
    """The decisions of one call: made now, recorded, or replayed. This class makes them and records nothing.

    `replay_of` finds the object for a call.
    """

    is_replay = False
    """Whether the call is a second pass, whose decisions are those of the first."""

    def once(self, decide: Callable[[], V]) -> V:
        """Returns decide(), or in a second pass the value that decide() returned in the first.

        The caller hides it from checkpoints, because decide() runs in one of the two passes only.
        """
        return decide()

    def route(self, x_TM: Tensor, decide: Callable[[], V]) -> V:
        """Returns decide(), or in a second pass its value of the first, for tensors on the gate's graph.

        x_TM: (T, M), the layer's input rows.
        decide: runs the gate. Returns tensors in any nest of dataclasses and tuples.

        In a second pass the tensors require gradients as before, but have no graph: gradients go through the
        gate's graph of the first pass.
        """
        return decide()


FINDERS: list[Callable[[nn.Module], Replay | None]] = []
"""Functions that return the `Replay` of a call, or None if no checkpoint that they know is active.

`pmoe.checkpointing.contexts` adds its own when it is imported.
"""


def replay_of(layer: nn.Module) -> Replay:
    """Returns the `Replay` of the call of ``layer`` that begins now. Called once a call, at its start."""
    replays = (find(layer) for find in FINDERS)
    return next((replay for replay in replays if replay is not None), Replay())


def hidden_from_checkpoints() -> AbstractContextManager[None]:
    """Returns a context that hides operations, and the tensors that they save, from checkpoints.

    Checkpoints count both and expect the same in the two passes. Measuring, choosing and comparing happen in
    one of them only.
    """
    is_plain = top_hooks() is None and not torch._C._len_torch_dispatch_stack()
    return nullcontext() if is_plain else _hidden()


@contextmanager
def _hidden() -> Iterator[None]:
    """Hides the block: no selective checkpoint's mode, and no checkpoint's hooks for saved tensors."""
    with ExitStack() as hidden:
        hidden.enter_context(hidden_from_selective_checkpoints())
        if top_hooks() is not None:
            hidden.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        yield


SavedHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""The (pack, unpack) functions of torch's `torch.autograd.graph.saved_tensors_hooks`."""


def top_hooks() -> SavedHooks | None:
    """Returns the hooks that pack and unpack the tensors that autograd saves now; None if none are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def may_run_again(layer: nn.Module) -> bool:
    """Whether a checkpoint may be active: the present call may be run again, or may be the second run.

               gradients   inside backward   and
    first run  yes         no                saved tensors go through hooks
               no          no                training mode, as with use_reentrant=True
    second     yes         yes               saved tensors go through hooks, or training mode
    """
    is_in_backward = torch._C._current_graph_task_id() != -1
    has_grad = torch.is_grad_enabled()
    goes_through_hooks = has_grad and top_hooks() is not None
    return goes_through_hooks or (layer.training and is_in_backward == has_grad)
