"""The decisions of one layer call under activation checkpointing: made in the first pass, then repeated.

A checkpoint drops the tensors that a forward pass (the first pass) saves, and runs that pass again when
backward needs them (the second pass). In the second pass a gate could route tokens differently, because of
dropout, of noise in the gate, or of a single rounding. Gradients would then belong to another output. So with
`pmoe.checkpoint_contexts` (`pmoe.checkpointing.contexts`) the second pass repeats the decisions of the first
one:

                  routing by the gate     row counts and choices         rows and products
    first pass    runs, `route` records   exchanged, `once` records      run
    second pass   `route` returns record  `once` returns record          run again

Under any other checkpoint everything runs again, and `pmoe.checkpointing.routing_check` detects a routing
that changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pmoe.checkpointing.selective import hidden_from_selective_checkpoints
from pmoe.comm.failures import NOTHING

V = TypeVar("V")


class Replay:
    """Makes the decisions of one layer call. Subclasses record or repeat the decisions.

    This base class is for calls outside of `pmoe.checkpoint_contexts`: it makes each decision and records
    nothing. `replay_of` returns the object for a call.
    """

    is_replay = False
    """Whether the call is in a recomputation that repeats the decisions of the forward pass."""

    is_record = False
    """Whether the call's routing is kept in memory until a recomputation repeats it."""

    def once(self, decide: Callable[[], V], what: str = "choice") -> V:
        """Returns decide(), or in a recomputation the value that decide() returned in the forward pass.

        decide: makes a decision: the ranks agree on the row counts, the number of chunks and the restore
            pair.
        what: the name of the decision. A call of a layer may make several decisions; the last is "choice".

        The caller must wrap the call of this method in `hidden_from_checkpoints`. decide() runs in one of the
        two passes only, and a checkpoint would notice the difference.
        """
        return decide()

    def route(self, x_TM: Tensor, decide: Callable[[], V]) -> V:
        """Returns the routing: decide(), or in a recomputation what decide() returned in the forward pass.

        x_TM: (T, M), the layer's input: T tokens, M = d_model.
        decide: runs the gate. Returns tensors, in dataclasses and tuples nested in any way.

        The tensors of the routing may need gradients; the values of `once` never do. Gradients reach the gate
        through the graph that it made in the forward pass. In a recomputation the gate does not run, and the
        returned tensors are not connected to that graph. They only have the same requires_grad as in the
        forward pass.
        """
        return decide()


REPLAY_FINDERS: list[Callable[[nn.Module], Replay | None]] = []
"""Functions that return a `Replay` for a call of a layer; None for calls outside of their checkpoints.

`pmoe.checkpointing.contexts` appends its function when it is imported.
"""


def replay_of(layer: nn.Module) -> Replay:
    """Returns the `Replay` of the call of ``layer`` that begins now.

    A `Replay` records the decisions of one call in a checkpoint's forward pass. In the recomputation, it
    returns the recorded decisions. So this function starts a record or takes the next one, and must be called
    exactly once for each call of the layer, at the call's start.
    """
    for find in REPLAY_FINDERS:
        if (replay := find(layer)) is not None:
            return replay
    return Replay()


def hidden_from_checkpoints() -> AbstractContextManager[None]:
    """Returns a context whose operations and saved tensors no checkpoint sees.

    A checkpoint counts saved tensors, and a selective checkpoint also operators. Both raise errors if the
    counts of the two passes differ. Inside this context, code may run in only one of the passes, such as
    measurements, choices and comparisons.
    """
    is_plain = top_hooks() is None and not torch._C._len_torch_dispatch_stack()
    return NOTHING if is_plain else _hidden()


@contextmanager
def _hidden() -> Iterator[None]:
    """A context without the dispatch modes of selective checkpoints, and without saved-tensor hooks."""
    with ExitStack() as hidden:
        hidden.enter_context(hidden_from_selective_checkpoints())
        if top_hooks() is not None:
            hidden.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        yield


SavedHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""The two functions of `torch.autograd.graph.saved_tensors_hooks`: (pack, unpack)."""


def top_hooks() -> SavedHooks | None:
    """Returns the (pack, unpack) hooks that autograd uses for saved tensors now; None if none are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def may_run_again(layer: nn.Module) -> bool:
    """Whether an activation checkpoint may be around this call, in a forward pass or in a recomputation.

    torch does not tell whether there is a checkpoint, so this is a guess from the state of autograd. It may
    return True without a checkpoint. In one case it returns False in spite of a checkpoint: in eval mode with
    use_reentrant=True. It returns True in these cases, each of which is a line of the table:

                    gradients   inside backward   and this must hold
    forward pass    enabled     no                saved-tensor hooks are active
                    disabled    no                training mode (a checkpoint with use_reentrant=True)
    recomputation   enabled     yes               saved-tensor hooks are active, or training mode
    """
    is_in_backward = torch._C._current_graph_task_id() != -1
    has_grad = torch.is_grad_enabled()
    goes_through_hooks = has_grad and top_hooks() is not None
    return goes_through_hooks or (layer.training and is_in_backward == has_grad)


def is_second_pass() -> bool:
    """Whether an activation checkpoint runs its function again now: inside backward, with gradients enabled.

    It is also True if a hook of a backward pass calls a layer with gradients enabled.
    """
    return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
