"""The fused kernels on the CPU behind their own Python face: every thread of them in the emulator, heaps in
files that processes map. What a layer computes this way is what the kernels' source says, and no plain
definition."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bench import virtual_ranks as bench_virtual_ranks
from pmoe.comm.heap.providers import process_heap, virtual_heaps
from pmoe.comm.ranks import Ranks
from pmoe.kernels import extension, gemm
from pmoe.kernels import heap as heap_module
from pmoe.kernels.comet import launcher
from pmoe.kernels.comet.launcher import Division
from pmoe.kernels.heap import Heap, HeapShape
from pmoe.runners import fused_steps
from tests.cuda.compiled import link_module
from tests.heaps import FileMemory

BLOCKS = 3


def compile_kernels() -> Path:
    """The module, compiled once for all test runs on the same sources."""
    pybind11 = pytest.importorskip("pybind11")
    return link_module(f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}")


@functools.cache
def load_kernels(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("_cuda", str(path))
    spec = importlib.util.spec_from_file_location("_cuda", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@contextlib.contextmanager
def emulated(
    path: Path, *, hopper: bool = False, division: Division | None = None, virtual_ranks: int = 1
) -> Iterator[None]:
    """In the block the kernels run in the emulator, for tensors on the CPU, with 3 blocks a rank."""
    module, division = load_kernels(path), division or Division(1, 256)

    def of_processes(ranks: Ranks, shape: HeapShape, device: torch.device) -> Heap:
        return process_heap(ranks, shape, device, memory=FileMemory())

    def of_virtual_ranks(shape: HeapShape, device: torch.device) -> list[Heap]:
        return virtual_heaps(shape, device, memory=FileMemory())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "load", lambda: module)
        for module_with_path in (launcher, gemm):
            patch.setattr(module_with_path, "path", lambda device: ("sm_90a" if hopper else "sm_80", None))
        patch.setattr(launcher, "processors", lambda device: BLOCKS * virtual_ranks)
        patch.setattr(launcher, "SPARE", 0)
        patch.setattr(fused_steps, "_agreed", {})  # without the emulator the kernels were refused
        patch.setattr(fused_steps, "process_heap", of_processes)
        patch.setattr(fused_steps, "_division", lambda request, kernel, direction: division)
        patch.setattr(bench_virtual_ranks, "virtual_heaps", of_virtual_ranks)
        launcher.path_facts.cache_clear()
        heap_module._places.cache_clear()
        try:
            yield
        finally:
            launcher.path_facts.cache_clear()
            heap_module._places.cache_clear()
