"""The record of a layer's bound: which heaps it refers to, and for how long."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import torch

from pmoe.call.row_bound import CallKind, ProgramBound, RowBound
from pmoe.comm.heap.program_heap import ProgramHeap, _HeapSteps
from pmoe.comm.ranks import Ranks
from tests.heaps import CPU, FileMemory


def test_a_closed_heap_is_let_go_at_once() -> None:
    """Neither the bound nor a reference cycle keeps it until the layer's next call."""
    memory: Any = FileMemory()
    steps = _HeapSteps(Ranks.single(), CPU, memory)
    exchanger = SimpleNamespace(close=lambda: None)
    heap = ProgramHeap(exchanger, torch.zeros(8, dtype=torch.int32), steps)
    steps.heap = heap
    unused: Any = None
    agreed = ProgramBound(
        programs=unused, key=unused, bounds=unused, restore=unused, heap=weakref.ref(heap), max_tokens=1,
        needs_grad=True,
    )  # fmt: skip
    bound = RowBound(torch.zeros((), dtype=torch.int64))
    bound.agree(CallKind(dtype=torch.float32, has_grad=True), agreed, may_run_again=False)
    assert bound.open_heaps == [heap] and agreed.is_repeatable
    gc.disable()
    try:
        heap.close()
        assert bound.open_heaps == [] and not agreed.is_repeatable
        reference = weakref.ref(heap)
        del heap, steps
        assert reference() is None
    finally:
        gc.enable()
    assert bound.open_heaps == [] and not agreed.is_repeatable and list(bound.heaps) == []
