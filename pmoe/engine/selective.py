"""Selective activation checkpointing sees a layer's call as one operator that it never saves.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` puts a dispatch mode around each pass. The first
one stores what some operators return, the second one gives that back instead of running them:

    first pass    x @ w -> stored     layer(x): hidden       y @ v -> stored
    second pass   x @ w <- stored     layer(x): runs again   y @ v <- stored

Inside of a layer that cannot be. Its buffers are slots that operators write by ``out=`` and in place: what a
policy stored there would have been overwritten. And a collective that is not run again leaves other ranks
waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


@contextmanager
def hidden_from_selective_checkpoints() -> Iterator[None]:
    """Operators of the block are seen by all dispatch modes but those of selective checkpoints.

    Other modes, which count flops, fake tensors or log, keep their order. Saved tensors go through the
    checkpoint's hooks as ever: those are no dispatch modes.
    """
    stack = _get_current_dispatch_mode_stack()  # the outermost first
    is_selective = [isinstance(mode, SELECTIVE) for mode in stack]
    if not any(is_selective):
        yield
        return
    removed = [_pop_mode() for _ in stack[is_selective.index(True) :]]  # the innermost first
    others = [mode for mode in reversed(removed) if not isinstance(mode, SELECTIVE)]
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in reversed(removed):
            _push_mode(mode)
