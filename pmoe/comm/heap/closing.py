"""Closes all symmetric heaps of a group: those of fused kernels, and those of pass programs."""

from __future__ import annotations

from functools import partial

from pmoe.comm.heap.program_heap import close_program_heaps
from pmoe.comm.heap.providers import call_all, close_layer_heaps
from pmoe.comm.ranks import Ranks


def close_heaps(ranks: Ranks) -> None:
    """Closes all heaps that the layers of this group share. Collective.

    Call it on every rank before the group is destroyed, or after a kernel has waited too long for a rank
    (HeapError, or RuntimeError from a pass program). If heaps were refused, layers may ask for them again.

    If a heap cannot be closed, the others are closed, too. Then the first error is raised.
    """
    call_all([partial(close_layer_heaps, ranks), partial(close_program_heaps, ranks)])
