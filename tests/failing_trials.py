"""Allocations that fail in trials or in measurements, on one rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pmoe.choose import trials
from pmoe.engine.buffers.arena import DevicePool

ERRORS = {
    "torch": torch.OutOfMemoryError("CUDA out of memory"),
    "the CPU's allocator": RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    ),
    "a kernel": RuntimeError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
    ),
    "pmoe's extension": RuntimeError("pmoe._cuda: cudaMalloc: cudaErrorMemoryAllocation (2): out of memory"),
    "a library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "Python": MemoryError(),
    "the system": OSError(12, "Cannot allocate memory"),
}


class Failing:
    """Lets the k-th allocation inside trials fail on one rank, or all that are larger than ``most`` bytes."""

    def __init__(self, rank: int, error: BaseException, at: int | None, most: float) -> None:
        self.rank, self.error, self.at, self.most = rank, error, at, most
        self.count = 0
        self.is_in_trial = False

    def patches(self) -> list[Any]:
        new = DevicePool.new
        runs = {name: getattr(trials.Trial, name) for name in ("run", "has_memory")}

        def failing_new(pool: DevicePool, like: torch.Tensor, *shape: int) -> torch.Tensor:
            if self.is_in_trial:
                self.count += 1
                num_bytes = like.element_size() * torch.Size(shape).numel()
                if self.rank == 1 and (self.count == self.at or num_bytes > self.most):
                    raise self.error
            return new(pool, like, *shape)

        def marked(name: str) -> Any:
            def call(*given: Any) -> Any:
                self.is_in_trial = True
                try:
                    return runs[name](*given)
                finally:
                    self.is_in_trial = False

            return mock.patch.object(trials.Trial, name, call)

        return [mock.patch.object(DevicePool, "new", failing_new), *map(marked, runs)]


class FailingOperators(TorchDispatchMode):
    """Lets operators that allocate memory on the calling thread fail.

    at: the numbers of the operators that fail, counted from 1.
    most: operators also fail if a result is larger than this many bytes.
    count: how many operators have allocated memory so far.
    """

    def __init__(self, at: range = range(0), most: float = float("inf")) -> None:
        super().__init__()
        self.at, self.most, self.count = at, most, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        results = result if isinstance(result, (tuple, list)) else [result]
        new = [
            tensor.nbytes
            for tensor in results
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known
        ]
        if new and not func.namespace.startswith("c10d"):
            self.count += 1
            if self.count in self.at or max(new) > self.most:
                raise ERRORS["torch"]
        return result
