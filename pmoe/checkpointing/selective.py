"""Hides a layer's call from selective activation checkpointing, so that it runs again as a whole.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` puts a dispatch mode around each pass. The mode
of the first pass stores the results of some operators; that of the second returns them and runs nothing:

    first pass    x @ w -> stored     layer(x): hidden       y @ v -> stored
    second pass   x @ w <- stored     layer(x): runs again   y @ v <- stored

Inside of a layer that would break. Operators write into buffers by ``out=`` and in place, so a stored tensor
would be overwritten. And a collective that one rank does not run again would leave the other ranks waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
"""torch's dispatch modes of a selective checkpoint, of its first and of its second pass."""


@contextmanager
def hidden_from_selective_checkpoints() -> Iterator[None]:
    """Hides operators of the block from the dispatch modes of selective checkpoints.

    Other modes (counters of flops, fake tensors, loggers) still see them, in the same order. Saved tensors
    still go through the checkpoint's hooks, which are not dispatch modes.
    """
    stack = _get_current_dispatch_mode_stack()  # the outermost first
    is_selective = [isinstance(mode, SELECTIVE) for mode in stack]
    if not any(is_selective):
        yield
        return
    removed = [_pop_mode() for _ in stack[is_selective.index(True) :]]  # the innermost first
    other_modes = [mode for mode in reversed(removed) if not isinstance(mode, SELECTIVE)]
    for mode in other_modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in other_modes:
            _pop_mode()
        for mode in reversed(removed):
            _push_mode(mode)
