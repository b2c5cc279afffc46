"""Heaps that layers share: one for each group, device, width, type and number of experts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from pmoe.comm.heap.device_memory import with_index
from pmoe.comm.heap.providers import process_heap
from pmoe.comm.heap.rank_heap import Heap
from pmoe.comm.heap.shape import HeapShape
from pmoe.comm.ranks import Ranks

MakeHeap = Callable[[Ranks, HeapShape, torch.device], Heap]
HeapsByKey = dict[tuple[object, ...], Heap]

_heaps: weakref.WeakKeyDictionary[dist.ProcessGroup, HeapsByKey] = weakref.WeakKeyDictionary()
_without_group: HeapsByKey = {}
"""Of a rank without a group."""


def heaps_of(ranks: Ranks) -> HeapsByKey:
    """By kind, in the order in which they were made."""
    return _without_group if ranks.group is None else _heaps.setdefault(ranks.group, {})


def heap_for(
    ranks: Ranks, device: torch.device | str | int, shape: HeapShape, *, make: MakeHeap = process_heap
) -> Heap:
    """The heap that all layers of this group, device, d_model, dtype and number of experts share.

    It has at least ``shape``'s rows. A collective where there is none yet, or one with fewer rows; no
    communication otherwise.

    Rows must follow from numbers that all ranks share: so do the collectives. A heap that is too small is
    closed before a larger one is made, on every rank; tensors on it must not be used any more.
    Raises as ``make`` does, and HeapError where the heap that is there is broken.
    """
    kept, device = heaps_of(ranks), with_index(device)
    key = (device, shape.num_ranks, shape.experts, shape.d_model, shape.dtype)
    heap = kept.get(key)
    if heap is not None:
        if heap.shape.holds(shape):
            heap.raise_if_failed()
            return heap
        old = heap.shape
        shape = replace(shape, rows=max(shape.rows, old.rows), home_rows=max(shape.home_rows, old.home_rows))
        kept.pop(key).close()
    heap = kept[key] = make(ranks, shape, device)
    return heap


def close_heaps(ranks: Ranks) -> None:
    """Closes the heaps that `heap_for` has made for this group, in the order in which they were made.

    Collective: before the group is destroyed, or after a HeapError, on every rank.
    """
    kept = heaps_of(ranks)
    while kept:
        kept.pop(next(iter(kept))).close()
