"""Makes selective activation checkpoints recompute an MoE layer as a whole.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` puts a dispatch mode around each pass. The mode
of the first pass stores the results of some operators. The mode of the second pass returns the stored results
and does not run these operators. A layer's call turns both modes off:

    first pass    x @ w -> stored     layer(x): modes off           y @ v -> stored
    second pass   x @ w <- stored     layer(x): all operators run   y @ v <- stored

With the modes on, two things would break inside of a layer. Its operators write into buffers in place and by
``out=``, so stored results would be overwritten. And if one rank did not run a collective again, the other
ranks would wait for it forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
"""Dispatch modes of torch's selective checkpoints: the forward pass's mode, and the recomputation's."""


@contextmanager
def hidden_from_selective_checkpoints() -> Iterator[None]:
    """Turns off selective checkpoints' dispatch modes inside the block, so that they see no operator of it.

    Other dispatch modes (counters of flops, fake tensors, loggers) stay on, in the same order. Saved tensors
    still go through a checkpoint's saved-tensor hooks, which are not dispatch modes.
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
