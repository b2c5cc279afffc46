"""How many calls reach the device in one pass of the layer of several ranks?

    python bench/bench_device_calls.py [--ranks 1 2 8] [--chunks 1 4 8] [--where]

It runs on the CPU, and counts what the branches for CUDA would do. pmoe's kernels are taken, and a launch is
noted in place of a kernel. Streams and events are stand-ins that count. One of W ranks exists, with a
stand-in for its group (`bench.links.alike`). The layer has 8 experts, top-2, SwiGLU without biases, bfloat16,
no capacity, and the restore pair S4.

    operators    torch operators that launch something; no views, no allocations, nothing on host tensors
    launches     launches of pmoe's kernels
    collectives  all-to-alls and reductions
    device calls the sum of these three
    contexts, records, waits
                 `torch.cuda.stream` contexts, event records, and waits of one stream for another
    syncs        copies to the host, for which the host waits
    Python, C    calls of Python functions and of C functions, as `sys.setprofile` sees them; those that the
                 stand-ins make do not count

A torch operator may be several launches on a GPU (a stable sort, for example): counts are lower bounds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench import kernels_on_cpu
from bench.links import alike
from bench.timing import counted
from pmoe.decide import route as decide_route
from pmoe.engine.lanes import run as lanes_run
from pmoe.engine.lanes.cuda import CudaLanes
from pmoe.experts import launched
from pmoe.experts.stacked import StackedExperts
from pmoe.kernels import counts as counts_kernels
from pmoe.kernels import extension, permute
from pmoe.kernels import wire as wire_kernels
from pmoe.kernels.gemm import ELEMENTS
from pmoe.kernels.grouped_gemm import products
from pmoe.kernels.permute import launches as permute_launches
from pmoe.kernels.permute import operators as permute_operators
from pmoe.kernels.registry import PMOE, PRODUCTS
from pmoe.kernels.route import launches as route_launches
from pmoe.kernels.route import operators as route_operators
from pmoe.kernels.route import reference as route_reference
from pmoe.ordering import sorted as sorted_order
from pmoe.text import table

TOKENS, D_MODEL, D_HIDDEN, EXPERTS, TOP_K = 64, 64, 64, 8, 2
SLACK = 8.0
"""How much larger a ring slot is than the rows of a chunk under even routing.

All ranks of the stand-in send the same numbers of rows to each expert, so some ranks receive more rows than
others. With smaller slots the batch would be cut into more chunks.
"""
PASSES = ("forward", "backward")
STAND_INS = str(Path(__file__).parent) + "/"
"""Beginning of the file names of the stand-ins, whose calls do not count."""
LAUNCHES_NOTHING = ("empty", "new_empty", "resize_", "_unsafe_view", "unsafe_split", "lift_fresh")
"""Beginnings of the names of operators that allocate memory, or that return views without saying so."""


@dataclass
class Calls:
    """The calls of one pass.

    where: device calls by the function of pmoe that makes them.
    """

    operators: int = 0
    launches: int = 0
    collectives: int = 0
    contexts: int = 0
    records: int = 0
    waits: int = 0
    syncs: int = 0
    python: int = 0
    c: int = 0
    where: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def device_calls(self) -> int:
        return self.operators + self.launches + self.collectives

    def row(self) -> dict[str, int]:
        """Returns the numbers by name, with the device calls first."""
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return {"device calls": self.device_calls, **numbers}


class Device(TorchDispatchMode):
    """A stand-in for CUDA that counts calls; `calls` has those of the current pass.

    It knows the storages of tensors that were copied to the host, and of what was computed from them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls()
        self.is_counting = True
        self._host: dict[int, object] = {}

    def on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def take_to_host(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._host[storage._cdata] = storage  # kept, so that no other storage gets this key

    def note(self, name: str, what: str) -> None:
        """Counts one call. name: a field of `Calls`. what: the operator or kernel."""
        setattr(self.calls, name, getattr(self.calls, name) + 1)
        if name in ("operators", "launches", "collectives"):
            self.calls.where[f"{_place(sys._getframe(2))} {what}"] += 1

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        before = self.is_counting, sys.getprofile()
        self.is_counting = False
        sys.setprofile(None)
        try:
            yield
        finally:
            self.is_counting = before[0]
            sys.setprofile(before[1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.is_counting:
            return result
        tensors = [each for each in _flat((args, kwargs or {})) if isinstance(each, Tensor)]
        whole = [each for each in tensors if each.dim()] or tensors  # a number may be a tensor of its own
        if tensors and all(map(self.on_host, whole)):
            for each in _flat(result):
                if isinstance(each, Tensor):
                    self.take_to_host(each)
            return result
        returns = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.calls.syncs += 1
        has_tensors = bool(tensors) or any(isinstance(each, Tensor) for each in _flat(result))
        launches = not is_view and not name.startswith(LAUNCHES_NOTHING)
        if has_tensors and launches and func.namespace == "aten":
            self.note("operators", name)
        return result


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _place(frame: FrameType | None) -> str:
    """Returns file and function of the innermost frame of pmoe; "autograd" if there is none."""
    package = str(Path(pmoe.__file__).parent) + "/"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(package):
            return f"{name[len(package) :]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd"


class Kernels:
    """The extension: each function notes a launch.

    computes: whether a launch also computes (`bench.kernels_on_cpu`).
    """

    def __init__(self, device: Device, computes: bool = False) -> None:
        self._device = device
        self._computes = computes

    def __getattr__(self, name: str) -> Any:
        def launch(*args: Any, **fields: Any) -> None:
            for _ in range(2 if name == "route" else 1):
                self._device.note("launches", name)
            # Counts decide the plan, so they are always computed.
            if (self._computes and name != "route") or name.startswith("counts_"):
                with self._device.quiet():
                    getattr(kernels_on_cpu, name)(*args, **fields)

        setattr(self, name, launch)
        return launch

    def row_dot_parts(self, hopper: bool, columns: int, in_turns: bool = False) -> int:
        return 1

    def Moving(self, *args: Any) -> kernels_on_cpu.Moving:
        return kernels_on_cpu.Moving(*args)

    def RouteProblem(self, *args: Any) -> None:
        return None

    def Wire(self, *args: Any) -> kernels_on_cpu.Wire:
        return kernels_on_cpu.Wire(*args)

    def route_workspace_bytes(self, problem: Any) -> int:
        return 16


class Stream:
    """A stream that counts."""

    cuda_stream = 0

    def __init__(self, device: Device) -> None:
        self._device = device

    def wait_event(self, event: object) -> None:
        self._device.calls.waits += 1

    def wait_stream(self, stream: object) -> None:
        self._device.calls.waits += 1
        self._device.calls.records += 1  # torch records an event for it


class Event:
    """An event that counts."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self, stream: Stream) -> None:
        self._device.calls.records += 1


@contextlib.contextmanager
def as_cuda(*, computes: bool = False) -> Iterator[Device]:
    """In the block layers on the CPU take the branches for CUDA, and their calls are counted.

    computes: whether PyTorch expressions compute what the kernels would. Without it only routing has values,
        and launches are counted.
    """
    device = Device()
    compute = Stream(device)

    @contextlib.contextmanager
    def stream_context(stream: Stream) -> Iterator[None]:
        device.calls.contexts += 1
        yield

    def to_host(tensor: Tensor) -> Tensor:
        device.calls.syncs += 1
        with device.quiet():
            copy = tensor.clone()
        device.take_to_host(copy)
        return copy

    make = torch.tensor

    def tensor(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            device.note("operators", "copy of a pinned tensor")
        return make(*args, **options)

    def route(logits_TE: Tensor, out: Any, **options: Any) -> None:
        kernels.route()
        with device.quiet():
            top_k, num_chunks = out.weight_TK.shape[1], out.counts_nE.shape[0]
            computed = route_reference.route(logits_TE, top_k, num_chunks=num_chunks, **options)
            for memory, value in zip(out, computed, strict=True):
                memory.copy_(value)

    def pinned(tensor: Tensor) -> Tensor:
        device.note("operators", "copy of a pinned tensor")
        with device.quiet():
            return tensor.clone()

    def collective(start: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            device.note("collectives", start.__name__)
            with device.quiet():
                return start(*args, **options)

        return noted

    def lanes(rows: Tensor, schedule: Any, ranks: Any, in_steps: bool = False) -> CudaLanes:
        return CudaLanes(schedule, ranks, rows.device)

    def product(
        x_TM: Tensor, weight_ME: Tensor, out_dtype: torch.dtype | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        device.note("operators", "mm")
        with device.quiet():
            return real_mm(*(each.to(out_dtype or x_TM.dtype) for each in (x_TM, weight_ME)), out=out)

    real_mm = torch.mm
    kernels = Kernels(device, computes)
    cuda = {
        "current_stream": lambda device=None: compute,
        "current_device": lambda: 0,
        "Stream": lambda of=None: Stream(device),
        "Event": lambda: Event(device),
        "stream": stream_context,
        "is_current_stream_capturing": lambda: False,
    }
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for target, name, value in (
            (Tensor, "is_cuda", property(lambda self: not device.on_host(self))),
            (Tensor, "cpu", to_host),
            (Tensor, "pin_memory", pinned),
            (Tensor, "record_stream", lambda self, stream: None),
            (torch, "tensor", tensor),
            (torch, "mm", product),
            (alike.AlikeGroup, "alltoall_base", collective(alike.AlikeGroup.alltoall_base)),
            (dist, "all_reduce", collective(dist.all_reduce)),
            (extension, "load", lambda: kernels),
            (permute, "refusal", lambda *args: None),
            (permute_operators, "refusal", lambda *args: None),
            (decide_route, "refusal", lambda *args: None),
            (counts_kernels, "path", lambda device: ("sm_90a", None)),
            (wire_kernels, "path", lambda device: ("sm_90a", None)),
            (route_operators, "launch_route", route),
            (route_launches, "path", lambda device: ("sm_90a", None)),
            (lanes_run, "lanes_for", lanes),
            (CudaLanes, "_streams", {}),
            (sorted_order, "MAX_INT16", -1),
            (StackedExperts, "_activates_in_place", lambda self, device_type: self.hidden_factor == 1),
        ):
            stack.enter_context(mock.patch.object(target, name, value, create=name == "is_cuda"))
        stack.enter_context(mock.patch.object(launched, "path_for", lambda *args, **columns: "sm_90a"))
        if computes:  # with float32 and float64 and rows of any width, too
            stack.enter_context(mock.patch.dict(ELEMENTS, {torch.float32: kernels_on_cpu.FLOAT32}))
            for codes in (ELEMENTS, permute_launches.TYPES):
                stack.enter_context(mock.patch.dict(codes, {torch.float64: kernels_on_cpu.FLOAT64}))
            stack.enter_context(mock.patch.object(launched, "layout_problem", lambda *args, **columns: None))
        else:
            stack.enter_context(mock.patch.object(products, "path_for", lambda *args, **columns: "sm_90a"))
            stack.enter_context(mock.patch.object(route_operators, "refusal", lambda *args: None))
        stack.enter_context(PRODUCTS.forcing(PMOE))
        yield device


def count(chunks: int, **options: Any) -> dict[str, Calls]:
    """Returns the calls of both passes of a layer in ``chunks`` chunks.

    options: other options of the layer.
    """
    torch.manual_seed(0)
    options = {"memory_reuse": "S4", "slack": SLACK, **options}
    layer = pmoe.MoELayer(
        D_MODEL, D_HIDDEN, EXPERTS, TOP_K, expert="swiglu", bias=False, dtype=torch.bfloat16,
        pipeline=chunks, **options,
    )  # fmt: skip
    x = torch.randn(TOKENS, D_MODEL, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(TOKENS, D_MODEL, dtype=torch.bfloat16)
    found: dict[str, Calls] = {}

    def step(device: Device, run: Callable[[Device, Callable[[], Any]], Any]) -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        device.calls = found["forward"] = Calls()
        y = run(device, functools.partial(layer, x))
        device.calls = found["backward"] = Calls()
        run(device, functools.partial(y.backward, dy))

    with as_cuda() as device:
        for _ in range(2):  # the first call of a layer compares options
            step(device, _counted)
        counted = found.copy()
        step(device, _profiled)
    for name, calls in found.items():
        counted[name].python = calls.python
        counted[name].c = calls.c
    ran = layer.last.ran
    assert ran is not None and (ran.path, ran.forward, ran.backward) == ("pipeline", chunks, chunks), ran
    return counted


def _counted(device: Device, run: Callable[[], Any]) -> Any:
    with device:
        return run()


def _profiled(device: Device, run: Callable[[], Any]) -> Any:
    """Counts the Python and C calls of a run, without those that the stand-ins make."""
    stand_in: FrameType | None = None  # the outermost frame of a stand-in that runs now

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal stand_in
        if stand_in is None and event == "call" and frame.f_code.co_filename.startswith(STAND_INS):
            stand_in = frame
        elif stand_in is None:
            device.calls.python += event == "call"
            device.calls.c += event == "c_call"
        elif frame is stand_in and event == "return":
            stand_in = None

    sys.setprofile(note)
    try:
        return run()
    finally:
        sys.setprofile(None)


def rows(num_ranks: int, chunks: Sequence[int], where: bool = False) -> list[dict[str, Any]]:
    """Returns the table of one number of ranks: a row for each number of chunks and pass.

    where: whether a row also has the device calls by place, as "where".
    """
    torch.set_num_threads(1)
    if num_ranks > 1:
        alike.start(num_ranks)
    found = []
    for n in counted(chunks, "number of chunks"):
        for name, calls in count(n).items():
            row: dict[str, Any] = {"ranks": num_ranks, "n": n, "pass": name, **calls.row()}
            found.append(row | ({"where": dict(calls.where.most_common())} if where else {}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--where", action="store_true", help="also print the functions that make the calls")
    parser.add_argument("--json", type=Path, help="file for the table")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for num_ranks in args.ranks:  # a process for each, because a process has one default group
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found += pool.submit(rows, num_ranks, args.chunks, args.where).result()
    for row in found:
        places = row.pop("where", {})
        if places:
            print("{ranks} ranks, n = {n}, {pass}".format(**row))
            print("\n".join(f"  {number:3} {place}" for place, number in places.items()))
    header = tuple(found[0])
    print(table([header, *(tuple(str(value) for value in row.values()) for row in found)], left=(2,)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
