"""A CUDA graph's stand-in on the CPU: repeats operators, collectives and kernels with the same arguments.

A replay reads and writes the memory of the capture, and runs no Python of the captured function, as a replay
of a graph does. So a value that the host has read during the capture, such as a row count, stays what it was.
The capture itself runs the function, which the capture of a graph does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pmoe.decide import begin
from pmoe.kernels import flashdmoe, heap
from pmoe.kernels.comet import launcher
from pmoe.program.on_cuda import LoadedProgram
from tests import programs

READ = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
"""Operators with which the host reads values of the device, so that no graph can hold them."""


class Graph:
    """Captures what a function does, and repeats it.

    kernels: the module whose launches run in the emulator; None where no kernel is launched.
    """

    def __init__(self, kernels: ModuleType | None = None) -> None:
        self._kernels = kernels
        self._work: list[Callable[[], object]] = []

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Captures what the block does. Layers take their calls for those of a graph."""
        kernels = self._kernels
        compute = programs.issue

        def captured(launch: Callable[..., None]) -> Callable[..., None]:
            """Returns a function that captures the launches of another one."""

            def captured_launch(*arguments: Any) -> None:
                assert kernels is not None
                first = kernels.stub_num_captured()
                kernels.stub_capture(True)
                launch(*arguments)
                kernels.stub_capture(False)
                launches = range(first, kernels.stub_num_captured())
                self._work += [partial(kernels.stub_replay, number) for number in launches]

            return captured_launch

        def captured_compute(*arguments: Any) -> None:
            """Captures the recorded calls of a pass program, which are not operators of the graph."""
            with _disable_current_modes():
                compute(*arguments)
            self._work.append(partial(compute, *arguments))

        with pytest.MonkeyPatch.context() as patch, _Operators(self._work):
            patch.setattr(flashdmoe, "launch_pass", captured(flashdmoe.launch_pass))
            patch.setattr(LoadedProgram, "run", captured(LoadedProgram.run))
            patch.setattr(programs, "issue", captured_compute)
            patch.setattr(begin, "is_for_graph", lambda _: True)
            for module in (launcher, heap):
                patch.setattr(module, "records_graph", lambda _: True)
            yield

    def replay(self, *, leaves_out: Callable[[object], bool] = lambda _: False) -> None:
        """Does everything again, in the same order.

        leaves_out: is asked about each piece of work, and returns whether it is left out: for tests in which
            a rank fails.
        """
        with torch.no_grad():
            for work in self._work:
                if not leaves_out(work):
                    work()


def is_launch(work: object) -> bool:
    """Returns whether a piece of a graph's work launches a kernel."""
    return isinstance(work, partial) and work.func is not _again


class _Operators(TorchDispatchMode):
    """Writes down the operators of its block, with those of autograd's backward and collectives."""

    def __init__(self, work: list[Callable[[], object]]) -> None:
        super().__init__()
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READ, f"the host waits for the device in a capture: {func}"
        result = func(*args, **(kwargs or {}))
        self._work.append(partial(_again, func, args, kwargs or {}, result))
        return result


def _again(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Calls an operator again, and writes what it returns to where it was."""
    for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
        if not isinstance(old, Tensor):
            if hasattr(new, "wait"):
                new.wait()  # a collective
        elif old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.copy_(new)
