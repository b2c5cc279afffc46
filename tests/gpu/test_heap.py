"""The symmetric heap on a GPU: zeroed memory of its own, views on it, flags between streams, and two real
processes on one device over CUDA IPC."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pmoe.comm.heap import close_heaps
from pmoe.comm.heap.providers import heap_for, process_heap, virtual_heaps
from pmoe.comm.ranks import Ranks
from pmoe.kernels import extension
from pmoe.kernels.heap import WAIT_SECONDS, DeviceMemory, Heap, HeapError, HeapShape, tensor_at
from tests.gpu.support import DEVICE, NEEDS_GPU
from tests.heap_probe import await_flag, probe_flag, raise_flag
from tests.pool import ranks

pytestmark = NEEDS_GPU

SHAPE = HeapShape(2, 4, 1000, 500, 64, torch.bfloat16)
PROBE_SECONDS = 10.0


@pytest.fixture(autouse=True)
def is_built() -> None:
    if extension.load() is None:
        reason = extension.why_missing()
        if os.environ.get("PMOE_CUDA") == "0":
            pytest.skip(f"PMOE_CUDA=0: {reason}")
        pytest.fail(f"{reason}")


@contextmanager
def made(shape: HeapShape = SHAPE) -> Iterator[list[Heap]]:
    heaps = virtual_heaps(shape, DEVICE)
    try:
        yield heaps
    finally:
        for heap in heaps:
            heap.close()


def all_bytes(heap: Heap) -> torch.Tensor:
    return tensor_at(heap.base, (heap.shape.bytes,), torch.uint8, heap.device)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_virtual_heaps_are_apart_and_zero_and_their_views_are_the_memory(dtype: torch.dtype) -> None:
    shape = replace(SHAPE, dtype=dtype)
    with made(shape) as (first, second):
        size = shape.bytes
        assert abs(first.base - second.base) >= size
        for heap in (first, second):
            assert not all_bytes(heap).any()
            assert heap.peers.tolist() == [first.base, second.base]
            assert heap.peers.device == DEVICE and heap.report.is_pinned()
        rows = torch.randn(shape.rows, 64, device=DEVICE).to(dtype)
        weight = torch.rand(shape.rows, device=DEVICE)
        # As rank 1 sees rank 0.
        inbox = second.peer_addresses[0] + shape.places["inbox"]
        tensor_at(inbox, (shape.rows, 64), dtype, DEVICE).copy_(rows)
        tensor_at(
            second.peer_addresses[0] + shape.places["weights"], (shape.rows,), torch.float32, DEVICE
        ).copy_(weight)
        got = first.rows(shape.rows)
        assert (got.data_ptr(), got.dtype, got.device, got.stride()) == (inbox, dtype, DEVICE, (64, 1))
        assert torch.equal(got, rows) and torch.equal(first.row_weight(shape.rows), weight)
        assert torch.equal(first.rows(7).float().sum(1), rows[:7].float().sum(1))
        got.zero_()
        assert not tensor_at(inbox, (shape.rows, 64), dtype, DEVICE).any()
        assert not all_bytes(second).any()
        assert first.rows(0).shape == (0, 64)


@pytest.mark.sanitize
def test_the_first_and_the_last_byte_of_a_heap_are_its_own() -> None:
    with made() as (first, second):
        all_bytes(first).fill_(0xA5)
        assert not all_bytes(second).any()
        assert (all_bytes(first) == 0xA5).all()


def test_closing_gives_the_memory_back() -> None:
    """As many heaps, one after the other, as the device could not hold at once."""
    large = HeapShape(1, 4, 1 << 17, 1 << 17, 1024, torch.bfloat16)
    free, total = torch.cuda.mem_get_info(DEVICE)
    if free < 4 * large.bytes:
        pytest.skip(f"{free} bytes are free on {DEVICE}")
    for _ in range(total // large.bytes + 2):
        (heap,) = virtual_heaps(large, DEVICE)
        heap.close()
        heap.close()


def test_a_heap_that_does_not_fit_leaves_the_process_usable() -> None:
    _, total = torch.cuda.mem_get_info(DEVICE)
    shape = HeapShape(2, 4, total // 2048, 1, 1024, torch.bfloat16)
    with pytest.raises(
        RuntimeError, match=r"rank 0: could not allocate \d+ bytes .*cudaErrorMemoryAllocation"
    ):
        virtual_heaps(shape, DEVICE)
    assert torch.ones(5, device=DEVICE).sum().item() == 5
    with made() as (first, second):
        first.check()
        second.check()


@pytest.mark.sanitize
def test_a_flag_that_a_peer_raises_is_seen_and_one_that_nobody_raises_ends_the_wait() -> None:
    with made() as (first, second):
        waiting, raising = (torch.cuda.Stream(DEVICE) for _ in range(2))
        for stream in (waiting, raising):  # loads both kernels before one waits
            raise_flag(first, 0, 0, stream)
            there = await_flag(first, 0, 1.0, stream)
            stream.synchronize()
            assert there.item() >= 0
        waited = await_flag(first, 1, 20.0, waiting)
        raise_flag(second, 0, 1, raising)
        raising.synchronize()
        waiting.synchronize()
        assert 0 <= waited.item() < 20e9
        again = await_flag(first, 1, 20.0, waiting)  # it stays raised
        never = await_flag(first, 2, 0.2, waiting)
        other = await_flag(second, 1, 0.1, waiting)  # a flag of its own
        waiting.synchronize()
        assert again.item() >= 0
        assert (never.item(), other.item()) == (-1, -1)
        assert not first.rows(SHAPE.rows)[1:].any() and not second.rows(SHAPE.rows).any()


def test_the_probe_of_one_rank_alone_comes_through() -> None:
    heap = process_heap(Ranks.single(), replace(SHAPE, num_ranks=1), DEVICE)
    for _ in range(3):
        seconds = probe_flag(heap, Ranks.single(), seconds=PROBE_SECONDS)
        assert seconds is not None and 0 <= seconds < PROBE_SECONDS
    heap.close()


@pytest.mark.sanitize
def test_what_a_kernel_reports_is_raised_behind_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAIT_SECONDS, "0.5")
    with made() as (first, second):
        first.check()
        first.next_epoch()
        words = torch.tensor([2, 1, 3, 2, 1, 0, 0, 0], dtype=torch.int32, device=DEVICE)
        first.report.copy_(words, non_blocking=True)  # the device writes what the host reads
        with pytest.raises(
            HeapError, match=r"rank 0 waited 0\.5 s in vain for rank 1: the arrival of piece 2"
        ):
            first.check()
        with pytest.raises(HeapError, match="make a new heap"):
            first.next_epoch()
        second.check()


def test_a_heap_is_shared_and_grows() -> None:
    shape = replace(SHAPE, num_ranks=1)
    torch.cuda.set_device(DEVICE)
    heap = heap_for(Ranks.single(), DEVICE, shape)
    assert heap.device == DEVICE
    assert heap_for(Ranks.single(), DEVICE, shape) is heap
    larger = heap_for(Ranks.single(), DEVICE, replace(shape, rows=5000))
    assert larger.rows(5000).shape == (5000, 64)
    close_heaps(Ranks.single())


# ---- two processes on one device


def written(rank: int, world: int) -> dict[str, Any]:
    """Each rank writes rows into every heap, its own too, through torch; then all read their own."""
    torch.cuda.set_device(DEVICE)
    shape = HeapShape(world, 4, 1000, 500, 64, torch.bfloat16)
    heap = process_heap(Ranks(), shape, DEVICE)
    zero = not all_bytes(heap).any().item()
    dist.barrier()
    for peer, address in enumerate(heap.peer_addresses):
        inbox = address + shape.places["inbox"]
        rows = tensor_at(inbox + 100 * rank * shape.row_bytes, (100, 64), torch.bfloat16, DEVICE)
        rows.copy_(torch.full((100, 64), 10.0 * rank + peer, device=DEVICE))
    torch.cuda.synchronize()
    dist.barrier()
    heap.check()
    rows = heap.rows(100 * world).view(world, -1).float()
    found = {
        "zero": zero,
        "least": rows.amin(1).tolist(),
        "most": rows.amax(1).tolist(),
        "rest": heap.rows(1000)[100 * world :].any().item(),
        "apart": len(set(heap.peer_addresses)) == world,
    }
    heap.close()
    heap = process_heap(Ranks(), shape, DEVICE)  # the process goes on
    found["again"] = heap.next_epoch()
    heap.close()
    return found


def test_two_processes_on_one_device_write_into_each_others_heap() -> None:
    for rank, found in enumerate(ranks(2).run(written)):
        expected = [float(rank), 10.0 + rank]
        assert found == {
            "zero": True,
            "least": expected,
            "most": expected,
            "rest": False,
            "apart": True,
            "again": 1,
        }


def refused(rank: int, world: int, shapes: list[HeapShape]) -> tuple[str, str]:
    torch.cuda.set_device(DEVICE)
    try:
        process_heap(Ranks(), shapes[rank], DEVICE).close()
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    finally:
        dist.barrier()
    return "", ""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rows": 999}, "rank 1: rows 999"),
        ({"dtype": torch.float16}, "rank 1: dtype float16"),
        ({"home_rows": 90000}, "rank 1: home_rows 90000, bytes "),
    ],
)
def test_processes_with_unlike_shapes_are_told_the_numbers(given: dict[str, Any], told: str) -> None:
    found = ranks(2).run(refused, [SHAPE, replace(SHAPE, **given)])
    assert found[0] == found[1]
    kind, text = found[0]
    assert kind == "ValueError" and told in text, text


def without_memory(rank: int, world: int) -> tuple[str, bool]:
    torch.cuda.set_device(DEVICE)

    class Full(DeviceMemory):
        def _allocate(self, device: torch.device, num_bytes: int) -> int:
            return super()._allocate(device, 1 << 50 if rank == 1 else num_bytes)

    free = torch.cuda.mem_get_info(DEVICE)[0]
    told = ""
    try:
        process_heap(Ranks(), SHAPE, DEVICE, memory=Full())
    except RuntimeError as error:
        told = str(error)
    usable = torch.ones(3, device=DEVICE).sum().item() == 3
    dist.barrier()
    return told, usable and free > 0


def test_a_process_that_finds_no_memory_is_an_error_on_both() -> None:
    for told, usable in ranks(2).run(without_memory):
        assert told.startswith("pmoe: no symmetric heap: rank 1: could not allocate ")
        assert "cudaErrorMemoryAllocation" in told and usable


def probed(rank: int, world: int) -> float | None:
    torch.cuda.set_device(DEVICE)
    heap = process_heap(Ranks(), SHAPE, DEVICE)
    seconds = probe_flag(heap, Ranks(), seconds=PROBE_SECONDS)
    if seconds is not None:
        seconds = max(seconds, probe_flag(heap, Ranks(), seconds=PROBE_SECONDS) or PROBE_SECONDS)
    heap.close()
    return seconds


def test_a_kernel_that_waits_sees_the_flag_of_another_process() -> None:
    """Or it does not, and no test of fused kernels can have two processes on this device."""
    first, second = ranks(2).run(probed)
    assert first == second
    if first is None:
        pytest.skip(f"kernels of two processes did not run together on {DEVICE} within {PROBE_SECONDS:g} s")
    print(f"a flag of another process on the same device came after {first:.6f} s")


def growing(rank: int, world: int) -> list[int]:
    torch.cuda.set_device(DEVICE)
    group = Ranks()
    sizes = []
    for rows in (100, 50, 4000, 4000):
        heap = heap_for(group, DEVICE, HeapShape(world, 4, rows, rows, 64, torch.bfloat16))
        peer = heap.peer_addresses[1 - rank] + heap.shape.places["inbox"]
        dist.barrier()
        tensor_at(peer, (rows, 64), torch.bfloat16, DEVICE).fill_(rank + 1)
        torch.cuda.synchronize()
        dist.barrier()
        assert (heap.rows(rows) == 2 - rank).all().item()
        sizes.append(heap.shape.rows)
    close_heaps(group)
    return sizes


def test_a_heap_of_two_processes_grows() -> None:
    assert ranks(2).run(growing) == [[100, 100, 4000, 4000]] * 2


NVSHMEM_ALONE = """
import torch
from pmoe.comm.heap.providers import nvshmem_heap
from pmoe.kernels.heap import HeapShape
from pmoe.comm.ranks import Ranks
shape = HeapShape(1, 4, 1000, 500, 64, torch.bfloat16)
try:
    heap = nvshmem_heap(Ranks.single(), shape, torch.device("cuda:0"))
except RuntimeError as error:
    print("refused:", error)
else:
    assert heap.peer_addresses == (heap.base,) and not heap.rows(1000).any()
    heap.rows(1000).fill_(3)
    heap.check()
    assert (heap.rows(1000) == 3).all()
    heap.close()
    nvshmem_heap(Ranks.single(), shape, torch.device("cuda:0")).close()
    print("done")
"""


def test_one_rank_over_nvshmem_where_it_is_built_in() -> None:
    """In a process of its own: what NVSHMEM starts cannot be undone."""
    if not hasattr(extension.load(), "NVSHMEM"):
        pytest.skip("NVSHMEM is not built in")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NVSHMEM_ALONE], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    if "refused:" in done.stdout:
        pytest.skip(f"NVSHMEM does not start here: {done.stdout}")
    assert done.stdout.splitlines()[-1] == "done"
