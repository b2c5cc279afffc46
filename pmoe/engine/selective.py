"""Selective activation checkpointing sees a layer's call as one operator that it never saves.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` puts a dispatch mode around each pass. The first
one stores what some operators return, the second one gives that back instead of running them:

    first pass    x @ w -> stored     layer(x): hidden       y @ v -> stored
    second pass   x @ w <- stored     layer(x): runs again   y @ v <- stored

This cannot work inside of a layer. Operators write into its buffers by ``out=`` and in place, so a tensor
that a policy stored would be overwritten. And a collective that one rank does not run again leaves other
ranks waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


@contextmanager
def hidden_from_selective_checkpoints() -> Iterator[None]:
    """Hides operators of the block from the dispatch modes of selective checkpoints, and from no others.

    Other modes (counters of flops, fake tensors, loggers) keep their order. Saved tensors still go through
    the checkpoint's hooks, which are not dispatch modes.
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
