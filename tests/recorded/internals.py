"""Every name of pmoe that the recording uses beyond `pmoe.__all__` and a layer's documented attributes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import pmoe
from bench.allocations import moment, watched
from pmoe.engine.lanes import threads as thread_lanes
from pmoe.experts import borrowed
from pmoe.runners import one_rank
from tests.plain_steps import plain_steps, using
from tests.switched import switched_layer


def build_layer(sizes: tuple[int, int, int, int], options: Mapping[str, Any], switches: Mapping[str, bool]):
    """The layer. switches: by the names of `pmoe.call.options.Switches`."""
    return switched_layer(*sizes, **options, **switches)


class OthersGradients:
    """A stand-in for `pmoe.GradientReducer`, in which one all-reduce of other layers' gradients hides."""

    def __init__(self, rank: int) -> None:
        self.total, self._rank = torch.zeros(()), rank

    def begins(self) -> None:
        self.total = torch.arange(8.0) + self._rank

    def inside(self) -> dist.Work | None:
        return dist.all_reduce(self.total, async_op=True)

    def ends(self) -> None:
        pass


def carry_gradients(layer: pmoe.MoELayer, rank: int) -> None:
    """The layer's backward pass reduces other layers' gradients."""
    layer.gradients = OthersGradients(rank)


# ---- runners whose kernels need a GPU


@contextlib.contextmanager
def fused_by_plain_steps() -> Iterator[list[str]]:
    """The fused runners by all-to-alls and plain products. Yields the names of the steps taken, in order."""
    taken: list[str] = []

    class Noted:
        def __init__(self, steps: Any) -> None:
            self._steps = steps

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._steps, name)
            if not callable(found) or name == "all_or_give_up":
                return found

            def noted(*args: Any, **options: Any) -> Any:
                taken.append(name)
                return found(*args, **options)

            return noted

    with using(lambda request: Noted(plain_steps(request))):  # type: ignore[arg-type,return-value]
        yield taken


@contextlib.contextmanager
def one_rank_by_kernels() -> Iterator[list[str]]:
    """One rank's runner, by the kernels' plain definitions."""
    with (
        mock.patch.object(one_rank, "DEVICES", ("cpu",)),
        mock.patch.object(one_rank, "kernel_refusal", lambda *_, **__: None),
    ):
        yield []


# ---- what a step does


@contextlib.contextmanager
def recorded_passes() -> Iterator[list[dict[str, str]]]:
    """Of every pass in the block: its direction, its tasks as they are issued, and a hash of its table."""
    passes: list[dict[str, str]] = []
    with pmoe.recording() as journal:
        watch = journal.watch

        def noted(schedule: Any, *rest: Any) -> Any:
            passes.append(
                {
                    "direction": schedule.direction,
                    "tasks": " ".join(task.name for task in schedule.tasks),
                    "table": hashlib.sha256(str(schedule).encode()).hexdigest()[:16],
                }
            )
            return watch(schedule, *rest)

        journal.watch = noted  # type: ignore[method-assign]
        yield passes
    for noted_pass, ran in zip(passes, journal.passes, strict=True):
        names = sorted(span.name for span in ran.spans)
        assert names == sorted(noted_pass["tasks"].split()), (names, noted_pass)


def allocated(forward: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> dict[str, int]:
    """Bytes of one step beyond those allocated before it.

    forward: the most of the forward pass. held: at its end. peak: the most of the whole step.
    """
    gc.collect()
    gc.disable()
    try:
        with _in_one_thread(), watched() as seen:
            loss = forward()
            moment("between")
            backward(loss)
    finally:
        gc.enable()
    before = [held for when, held in seen.live_bytes() if when <= seen.moments["between"]]
    return {"forward": max(before), "held": before[-1], "peak": seen.peak_bytes()}


@contextlib.contextmanager
def _in_one_thread() -> Iterator[None]:
    """Only this thread frees tensors, at the same points of every run; frees of others are not counted."""

    class AtOnce(concurrent.futures.Executor):
        def submit(self, function: Any, /, *args: Any, **options: Any) -> concurrent.futures.Future[Any]:
            future = concurrent.futures.Future[Any]()
            future.set_result(function(*args, **options))
            return future

    wait = dist.Work.wait

    def wait_and_pause(work: Any, *args: Any) -> Any:
        """Gloo's thread gives up its part in the tensors while the caller still has one."""
        ended = wait(work, *args)
        time.sleep(1e-3)
        return ended

    with mock.patch.object(thread_lanes, "_thread", lambda lane: AtOnce()):
        dist.Work.wait = wait_and_pause  # type: ignore[method-assign]
        try:
            yield
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]


def pooled(step: Callable[[], None]) -> dict[str, int]:
    """The most bytes that a step took from the pool, on the device and on the host."""
    gc.collect()
    pool = pmoe.pool("cpu")
    parts = {"device": pool.device, "host": pool.host}
    for part in parts.values():
        assert part.bytes_in_use == 0
        part.peak_bytes = 0
    step()
    return {name: part.peak_bytes for name, part in parts.items()}


# ---- experts over another module's tensors


def borrowed_swiglu(num_experts: int, d_model: int, d_hidden: int, dtype: torch.dtype) -> pmoe.Experts:
    """In-features first, as some models have them."""
    return borrowed.BorrowedSwiGLU(_stacks(num_experts, d_model, d_hidden, 2, dtype, transposed=True))


def borrowed_square(num_experts: int, d_model: int, d_hidden: int, dtype: torch.dtype) -> pmoe.Experts:
    """A nonlinearity that autograd differentiates."""
    stacks = _stacks(num_experts, d_model, d_hidden, 1, dtype)
    return borrowed.BorrowedActivation(replace(stacks, activation=lambda hidden: hidden.relu().square()))


def _stacks(
    num_experts: int, d_model: int, d_hidden: int, factor: int, dtype: torch.dtype, transposed: bool = False
) -> borrowed.Stacks:
    generator = torch.Generator().manual_seed(17)
    shapes = {
        "w1": (num_experts, factor * d_hidden, d_model),
        "w2": (num_experts, d_model, d_hidden),
        "b1": (num_experts, factor * d_hidden),
        "b2": (num_experts, d_model),
    }
    made = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).div(5).to(dtype)
        for name, shape in shapes.items()
    }
    if transposed:
        made |= {name: made[name].transpose(1, 2).contiguous() for name in ("w1", "w2")}
    for tensor in made.values():
        tensor.requires_grad_()
    return borrowed.Stacks(**made, transposed=transposed)
