"""The symmetric heap in one process: its shape, its views, the error after a wait in vain, and closing.

The memory is in files. Several ranks have their tests in tests/gloo/test_heap.py; here W = 1.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pmoe
from pmoe.comm.heap import close_heaps
from pmoe.comm.heap.providers import (
    _without_group,
    heap_for,
    nvshmem_heap,
    process_heap,
    virtual_heaps,
    wait_seconds,
)
from pmoe.comm.ranks import Ranks
from pmoe.kernels import extension
from pmoe.kernels import heap as heap_module
from pmoe.kernels.comet import launcher
from pmoe.kernels.comet.launcher import MAX_EXPERTS, MAX_RANKS, MAX_VIRTUAL, Launcher
from pmoe.kernels.heap import (
    MAX_EPOCHS,
    PERSISTENT_WAITS,
    WAIT_SECONDS,
    Heap,
    HeapError,
    HeapShape,
    _places,
    awaited,
    open_heaps,
    tensor_at,
)
from pmoe.training import bounded_steps
from tests.faults import WAITS
from tests.heaps import CPU, FileMemory, use_layout

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {
    "num_ranks": 2,
    "experts": 3,
    "rows": 50,
    "home_rows": 20,
    "d_model": 16,
    "dtype": torch.bfloat16,
}
SHAPE = HeapShape(**SIZES)
ALONE = HeapShape(**{**SIZES, "num_ranks": 1})


@pytest.fixture(autouse=True)
def layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WAIT_SECONDS, raising=False)
    use_layout(monkeypatch)
    yield
    _without_group.clear()


def report(heap: Heap, wait: int, peer: int, expert: int, part: int, epoch: int) -> None:
    """Writes into a heap that a kernel has waited in vain, as a kernel does."""
    heap.report[:] = torch.tensor([wait, peer, expert, part, epoch, heap.rank, 0, 0], dtype=torch.int32)


# ---- shapes


def test_a_row_that_is_no_multiple_of_a_load_is_refused_with_the_numbers() -> None:
    told = r"d_model \(12\): a row's bytes \(12 x 2 = 24\) must be a multiple of 16"
    with pytest.raises(ValueError, match=told):
        HeapShape(**{**SIZES, "d_model": 12})


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_the_regions_lie_apart_inside_the_heap(ranks: int, rows: int) -> None:
    shape = HeapShape(**{**SIZES, "num_ranks": ranks, "rows": rows, "home_rows": 7})
    sizes = {
        "counters": 4,
        "weights": 4 * rows,
        "links": 16 * rows,
        "dots": 4 * 7,
        "inbox": rows * shape.row_bytes,
        "home": 7 * shape.row_bytes,
    }
    end = 0
    for begin, size in sorted((shape.places[name], size) for name, size in sizes.items()):
        assert begin >= end and begin % 1024 == 0
        end = begin + size
    assert end <= shape.bytes and shape.bytes % 1024 == 0


@pytest.mark.usefixtures("extension_built")
def test_the_layout_has_room_for_as_many_as_a_launch_takes() -> None:
    cuda: Any = extension.load()
    limits = {"ranks": MAX_RANKS, "experts": MAX_EXPERTS, "virtual": MAX_VIRTUAL}
    assert limits.items() <= cuda.comet_limits.items()


def test_without_the_extension_the_sentence_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(extension, "_load", lambda: (None, "pmoe._cuda is not built; do this"))
    _places.cache_clear()
    told = r"a symmetric heap needs pmoe\._cuda: pmoe\._cuda is not built; do this"
    with pytest.raises(RuntimeError, match=told):
        _ = SHAPE.places
    with pytest.raises(RuntimeError, match=told):
        process_heap(Ranks.single(), ALONE, CPU, memory=FileMemory())


def test_a_heap_serves_every_shape_that_differs_in_fewer_rows() -> None:
    assert SHAPE.holds(SHAPE)
    assert SHAPE.holds(HeapShape(**{**SIZES, "rows": 1, "home_rows": 0}))
    for name, value in {
        "rows": 51,
        "home_rows": 21,
        "experts": 2,
        "d_model": 8,
        "dtype": torch.float16,
    }.items():
        assert not SHAPE.holds(HeapShape(**{**SIZES, name: value})), name


# ---- views


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_heaps_are_apart_and_zero_and_rows_are_the_memory_itself(dtype: torch.dtype) -> None:
    memory, shape = FileMemory(), HeapShape(**{**SIZES, "dtype": dtype})
    heaps = virtual_heaps(shape, CPU, memory=memory)
    assert [heap.rank for heap in heaps] == [0, 1]
    assert len({heap.base for heap in heaps}) == 2
    for heap in heaps:
        assert heap.peers.tolist() == list(heap.peer_addresses) == [each.base for each in heaps]
        assert (heap.epoch, heap.report.tolist()) == (0, [0] * 8)
        assert not tensor_at(heap.base, (shape.bytes,), torch.uint8, CPU).any()
        assert heap.rows(50).shape == (50, 16) and heap.rows(50).dtype == dtype
        assert heap.row_weight(50).shape == (50,) and heap.row_weight(50).dtype == torch.float32
    first, second = heaps
    place = second.peer_addresses[0] + shape.places["inbox"] + 3 * shape.row_bytes  # as rank 1 sees rank 0
    tensor_at(place, (16,), dtype, CPU).copy_(torch.arange(16))
    first.row_weight(50)[7] = 0.5
    assert first.rows(4)[3].tolist() == list(range(16))
    assert ctypes.c_float.from_address(first.base + shape.places["weights"] + 28).value == 0.5
    assert first.rows(5).data_ptr() == first.base + shape.places["inbox"]
    assert not second.rows(50).any() and not second.row_weight(50).any()
    assert first.rows(0).shape == (0, 16)
    for count in (-1, 51):
        with pytest.raises(ValueError, match=rf"count \({count}\) must be from 0 to the heap's 50 rows"):
            first.rows(count)
    for heap in heaps:
        heap.close()
    assert memory.mapped == {}


def test_a_heap_of_no_rows_is_one() -> None:
    (heap,) = virtual_heaps(
        HeapShape(**{**SIZES, "num_ranks": 1, "rows": 0, "home_rows": 0}), CPU, memory=FileMemory()
    )
    assert heap.rows(0).shape == (0, 16) and heap.row_weight(0).shape == (0,)
    heap.close()


def test_where_memory_ends_all_virtual_heaps_go_and_rank_and_bytes_are_told() -> None:
    class Small(FileMemory):
        def allocate(self, device: torch.device, num_bytes: int) -> int:
            if len(self.mapped) == 1:
                raise RuntimeError("no memory")
            return super().allocate(device, num_bytes)

    memory = Small()
    told = rf"of 2 virtual ranks: rank 1: could not allocate {SHAPE.bytes} bytes on cpu: no memory"
    with pytest.raises(RuntimeError, match=told):
        virtual_heaps(SHAPE, CPU, memory=memory)
    assert memory.mapped == {}


# ---- waits


@pytest.mark.parametrize(("text", "seconds"), [(None, 600.0), ("0.25", 0.25), ("86400", 86400.0)])
def test_the_bound_of_waits_is_the_variables(
    monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: float
) -> None:
    if text is not None:
        monkeypatch.setenv(WAIT_SECONDS, text)
    assert wait_seconds(Ranks.single()) == seconds
    (heap,) = virtual_heaps(ALONE, CPU, memory=FileMemory())
    assert heap.bound_nanoseconds == round(seconds * 1e9)
    heap.close()


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "86401", "30 s"])
def test_a_bound_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(WAIT_SECONDS, text)
    with pytest.raises(ValueError, match=rf"PMOE_WAIT_SECONDS \('{text}'\) must be a number of seconds"):
        wait_seconds(Ranks.single())
    with pytest.raises(ValueError, match=r"rank 0: PMOE_WAIT_SECONDS"):
        process_heap(Ranks.single(), ALONE, CPU, memory=FileMemory())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((1, 1, 0, 0), "rank 1: the grant of room for rank 0's rows for its experts"),
        ((2, 1, 3, 2), "rank 1: the arrival of piece 2 of its rows for expert 3 of rank 0"),
        ((3, 0, 0, 5), "rank 0 itself: the tiles of column chunk 5"),
        ((4, 1, 0, 4), "rank 1: the return of column chunk 4 of the rows of rank 0's tokens"),
        ((5, 1, 0, 0), "rank 1: the numbers of its rows for the experts of rank 0"),
    ],
)
def test_a_report_becomes_a_sentence(words: tuple[int, ...], told: str) -> None:
    assert awaited([*words, 7, 0, 0, 0]) == f"{told}, in round 7"


def test_a_report_of_a_persistent_kernel_names_the_task() -> None:
    told = "rank 1: the product tasks of tile 2 of rank 0's rows for its expert 3, in round 7"
    assert awaited([4, 1, 3, 2, 7, 0, 0, 0], PERSISTENT_WAITS) == told
    assert PERSISTENT_WAITS[6].format(peer=1) == "rank 1 itself: processors that place its tokens' rows"


def test_reports_are_read_as_the_kernels_write_them() -> None:
    text = (ROOT / "cuda" / "peers" / "watch.h").read_text(encoding="utf-8")
    waits = re.search(r"enum class Wait : int \{([^}]*)\}", text)
    fields = re.search(r"struct Report \{(.*?)\n\};", text, re.DOTALL)
    assert waits is not None and fields is not None
    names = ["kNone", "kGrant", "kArrival", "kDone", "kReturn", "kAnnounced", "kRouted", "kPlaced", "kRoom"]
    assert re.findall(r"\w+", waits[1]) == names and len(PERSISTENT_WAITS) == len(names)
    assert WAITS == ("nothing", "grant", "arrival", "tiles", "returned")
    code = re.sub(r"//.*", "", fields[1])
    declared = [name for line in re.findall(r"u?int32_t ([^;]*);", code) for name in line.split(", ")]
    assert declared == ["wait", "peer", "expert", "part", "epoch", "rank"]


def test_rounds_are_unsigned() -> None:
    assert awaited([2, 1, 0, 0, -1, 0, 0, 0]).endswith(f", in round {2**32 - 1}")


def test_a_wait_in_vain_is_told_before_the_next_launch_and_breaks_that_heap_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(WAIT_SECONDS, "2.5")
    memory = FileMemory()
    first, second = virtual_heaps(SHAPE, CPU, memory=memory)
    assert [first.next_epoch() for _ in range(7)] == list(range(1, 8))
    first.check()
    report(first, 2, 1, 3, 2, 9)  # a graph has repeated two rounds
    with pytest.raises(HeapError) as raised:
        first.next_epoch()
    told = str(raised.value)
    assert told.startswith(
        "pmoe: rank 0 waited 2.5 s in vain for rank 1: the arrival of piece 2 of its rows for expert 3 of "
        "rank 0, in round 9."
    )
    assert "process stays usable" in told and "make a new heap on every rank" in told
    first.report.zero_()
    for use in (
        first.next_epoch,
        first.raise_if_failed,
        first.check,
        lambda: first.rows(1),
        lambda: first.row_weight(1),
    ):
        with pytest.raises(HeapError, match=r"heap of rank 0 is broken since round 9; make a new heap"):
            use()
    assert second.next_epoch() == 1  # another heap of the process
    second.check()
    for heap in (first, second):
        heap.close()
    assert memory.mapped == {}
    for heap in virtual_heaps(SHAPE, CPU, memory=memory):
        heap.check()
        heap.close()


def test_check_tells_what_was_awaited() -> None:
    (heap,) = virtual_heaps(ALONE, CPU, memory=FileMemory())
    report(heap, 3, 0, 0, 1, 1)
    with pytest.raises(
        HeapError, match=r"waited 600 s in vain for rank 0 itself: the tiles of column chunk 1"
    ):
        heap.check()
    heap.close()


def test_a_lost_device_means_that_the_process_must_end(monkeypatch: pytest.MonkeyPatch) -> None:
    (heap,) = virtual_heaps(ALONE, CPU, memory=FileMemory())

    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(heap_module, "synchronize", lost)
    with pytest.raises(HeapError, match=r"cpu failed in round 0 .* it must end \(CUDA error: an illegal"):
        heap.check()
    with pytest.raises(HeapError, match=r"is on a device that is lost; this process must end"):
        heap.next_epoch()
    with pytest.warns(UserWarning, match="could not close a heap: CUDA error"):
        heap.close()


def test_rounds_begin_again_after_the_last_number() -> None:
    (heap,) = virtual_heaps(ALONE, CPU, memory=FileMemory())
    heap.epoch = MAX_EPOCHS - 2
    assert heap.next_epoch() == MAX_EPOCHS - 1
    with pytest.raises(HeapError, match=f"has had {MAX_EPOCHS - 1} rounds, which is the limit"):
        heap.next_epoch()
    with pytest.raises(HeapError, match="make a new heap"):
        heap.rows(0)
    heap.close()


# ---- closing


def test_a_closed_heap_is_closed_once_and_refuses_use() -> None:
    memory = FileMemory()
    (heap,) = virtual_heaps(ALONE, CPU, memory=memory)
    assert heap in open_heaps  # its report may be written, even if nobody holds it
    heap.close()
    heap.close()
    assert heap not in open_heaps
    assert memory.log == ["allocate", "free"]
    for use in (heap.next_epoch, heap.check, lambda: heap.rows(1)):
        with pytest.raises(HeapError, match="this heap of rank 0 is closed; make a new heap"):
            use()


def test_what_fails_while_closing_is_a_warning() -> None:
    memory = FileMemory(refuses="free")
    (heap,) = virtual_heaps(ALONE, CPU, memory=memory)  # whose file goes nevertheless
    with pytest.warns(UserWarning, match="pmoe: could not close a heap: cannot free"):
        heap.close()


@pytest.mark.slow
def test_a_process_may_end_with_open_heaps() -> None:
    program = (
        "import pytest, torch\n"
        "from pmoe.comm.heap.providers import heap_for, process_heap, virtual_heaps\n"
        "from pmoe.kernels.heap import HeapShape\n"
        "from pmoe.comm.ranks import Ranks\n"
        "from tests.heaps import CPU, FileMemory, use_layout\n"
        "use_layout(pytest.MonkeyPatch())\n"
        "memory = FileMemory()\n"
        "shape = HeapShape(1, 2, 8, 8, 16, torch.bfloat16)\n"
        "heaps = virtual_heaps(shape, CPU, memory=memory)\n"
        "kept = heap_for(Ranks.single(), CPU, shape, make=lambda *a: process_heap(*a, memory=memory))\n"
        "import os; [os.unlink(path) for _, path in memory.mapped.values()]\n"
        "print('done')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# ---- one rank without a group


def test_one_rank_alone_needs_no_peer() -> None:
    memory = FileMemory()
    heap = process_heap(Ranks.single(), ALONE, CPU, memory=memory)
    assert heap.peer_addresses == (heap.base,)
    heap.close()
    assert memory.log == ["place", "allocate", "free"]
    with pytest.raises(ValueError, match=r"num_ranks \(2\) must be the size of the group \(1\)"):
        process_heap(Ranks.single(), SHAPE, CPU, memory=memory)


def test_layers_share_a_heap_that_grows() -> None:
    memory, ranks = FileMemory(), Ranks.single()

    def wanted(**sizes: Any) -> Heap:
        shape = HeapShape(**{**SIZES, "num_ranks": 1, **sizes})
        return heap_for(ranks, CPU, shape, make=lambda *given: process_heap(*given, memory=memory))

    first = wanted(rows=10, home_rows=30)
    assert wanted(rows=9, home_rows=30) is wanted(rows=10, home_rows=1) is first
    other = wanted(d_model=32)
    assert other is not first
    memory.log.clear()
    second = wanted(rows=11, home_rows=1)
    assert memory.log == ["free", "place", "allocate"]  # never both at once
    assert second is not first and (second.shape.rows, second.shape.home_rows) == (11, 30)
    with pytest.raises(HeapError, match="closed"):
        first.next_epoch()
    report(second, 1, 0, 0, 0, 1)
    with pytest.raises(HeapError, match="in vain for rank 0: the grant"):
        wanted(rows=11)
    with pytest.raises(HeapError, match="broken"):
        wanted(rows=11)
    assert wanted(d_model=32) is other  # the others stay usable
    close_heaps(ranks)
    assert memory.mapped == {}
    third = wanted(rows=5)
    assert third.shape.rows == 5
    report(third, 1, 0, 0, 0, 1)
    with pytest.raises(HeapError, match="^pmoe: rank 0 waited 600 s in vain for rank 0: the grant"):
        wanted(rows=6)
    assert wanted(rows=6).next_epoch() == 1  # the larger one is new
    close_heaps(ranks)
    assert memory.mapped == {}


@pytest.mark.parametrize("is_in_graph", [False, True])
def test_a_heap_stays_beside_a_larger_one_only_if_a_graph_has_captured_a_launch(is_in_graph: bool) -> None:
    memory = FileMemory()
    ranks = Ranks.single()

    def wanted(rows: int) -> Heap:
        shape = HeapShape(**{**SIZES, "num_ranks": 1, "rows": rows})
        return heap_for(ranks, CPU, shape, make=lambda *given: process_heap(*given, memory=memory))

    first = wanted(10)
    first.next_epoch()
    first.count_on_device()
    first.count_on_device()
    round_of_first = first.round
    first.is_in_graph = is_in_graph
    second = wanted(11)
    assert second is wanted(10) is not first
    assert not second.is_in_graph
    assert (first.release is not None) == is_in_graph
    assert len(memory.mapped) == 1 + is_in_graph
    for heap, last in ((first, 1), (second, 0)):
        if heap.release is None:
            continue
        assert heap.round is not None and heap.round.item() == last
        heap.round.add_(3)  # as replays do
        heap.next_epoch()
        assert heap.round.item() == last + 4
    assert first.round is round_of_first
    close_heaps(ranks)
    assert memory.mapped == {}


def test_a_launch_in_a_capture_marks_its_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    (heap,) = virtual_heaps(ALONE, CPU, memory=FileMemory())
    made = object.__new__(Launcher)  # without the checks that need the extension
    made.heaps = (heap,)
    made.device = CPU
    made.blocks = 2
    heap.count_on_device()
    marks = []
    for is_captured in (False, True, False):
        monkeypatch.setattr(launcher, "records_graph", lambda _, answer=is_captured: answer)
        with made.launching():
            marks.append(heap.is_in_graph)
    assert marks == [False, True, True]
    heap.close()


def test_a_capture_cannot_hold_rounds_that_the_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    (heap,) = virtual_heaps(ALONE, CPU, memory=FileMemory())
    made = object.__new__(Launcher)
    made.heaps = (heap,)
    made.device = CPU
    made.blocks = 2
    for _ in range(3):
        heap.next_epoch()
    with monkeypatch.context() as patch:
        for module in (launcher, heap_module):
            patch.setattr(module, "records_graph", lambda _: True)
        told = r"a launch on rank 0's heap: .* would use round 4 again: call Heap.count_on_device"
        with pytest.raises(RuntimeError, match=told), made.launching():
            pytest.fail("launched")
        with pytest.raises(RuntimeError, match=r"rank 0's heap are counted on the host \(round 3\)"):
            heap.count_on_device()
    assert heap.round is None and heap.epoch == 3 and not heap.is_in_graph
    heap.count_on_device()
    with monkeypatch.context() as patch:
        patch.setattr(heap_module, "records_graph", lambda _: True)
        heap.count_on_device()  # in a capture, as bounded calls do
    assert heap.round is not None and heap.round.item() == 3
    heap.close()


def test_the_failure_counter_is_the_first_counter_of_the_heap() -> None:
    first, second = virtual_heaps(SHAPE, CPU, memory=FileMemory())
    assert first.failures == 0
    ctypes.c_int32.from_address(first.base + SHAPE.places["counters"]).value = 1
    assert first.failures == 1
    assert second.failures == 0
    for heap in (first, second):
        heap.close()


def watch(layer: pmoe.MoELayer, heap: Heap) -> None:
    """Lets the steps of a bounded layer read the reports of a heap, as if its calls had used it."""
    bound = layer.cache.row_bound
    assert bound is not None
    bound.heaps.add(heap)


def test_the_optimizer_skips_a_step_in_which_a_kernel_waited_in_vain() -> None:
    heap, other = virtual_heaps(SHAPE, CPU, memory=FileMemory())
    layer = pmoe.MoELayer(16, 8, 4, 2, fused="persistent", slack=2.0)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    before = {name: value.clone() for name, value in layer.named_parameters()}

    def run(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(x).sum().backward()
        report(heap, 2, 1, 3, 2, 7)  # as a kernel does
        ctypes.c_int32.from_address(heap.counters).value = 1

    steps = pmoe.BoundedSteps(layer, optimizer, run)
    watch(layer, heap)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps.step(torch.ones(5, 16))
    for name, value in layer.named_parameters():
        assert torch.equal(value, before[name]), name
    with pytest.raises(HeapError, match="rank 0 waited 600 s in vain for rank 1: the arrival"):
        steps.finish()
    steps.remove()
    for each in (heap, other):
        each.close()


def test_a_wait_in_vain_is_raised_although_the_device_never_ends_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank has ended, so the collectives after the kernel that waited for it never end."""
    heap, other = virtual_heaps(SHAPE, CPU, memory=FileMemory())
    layer = pmoe.MoELayer(16, 8, 4, 2, fused="persistent", slack=2.0)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    queries: list[bool] = []

    def is_done() -> bool:
        queries.append(False)
        if len(queries) == 3:
            report(heap, 2, 1, 3, 2, 7)  # as a kernel does
        assert len(queries) < 20, "the host waits on"
        return False

    def note(step: Any, skips: torch.Tensor, unseen: torch.Tensor) -> None:
        step.answer = torch.stack([skips, unseen])
        step.was_copied = SimpleNamespace(query=is_done)

    monkeypatch.setattr(bounded_steps._Step, "note", note)
    steps = pmoe.BoundedSteps(layer, optimizer, lambda x: layer(x).sum().backward())
    watch(layer, heap)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps.step(torch.ones(5, 16))
    with pytest.raises(HeapError, match="rank 0 waited 600 s in vain for rank 1: the arrival"):
        steps.finish()
    assert len(queries) == 3
    steps.remove()
    for each in (heap, other):
        each.close()


def test_a_wait_in_vain_ends_a_step_that_also_replaces_the_heap() -> None:
    memory = FileMemory()

    def wanted(rows: int) -> Heap:
        shape = HeapShape(**{**SIZES, "num_ranks": 1, "rows": rows})
        return heap_for(Ranks.single(), CPU, shape, make=lambda *given: process_heap(*given, memory=memory))

    layer = pmoe.MoELayer(16, 8, 4, 2, fused="persistent", slack=2.0)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    before = {name: value.clone() for name, value in layer.named_parameters()}
    heap = wanted(10)
    heap.count_on_device()

    def run(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(x).sum().backward()
        report(heap, 2, 1, 3, 2, 7)  # as a kernel does
        ctypes.c_int32.from_address(heap.counters).value = 1
        wanted(20)  # as another layer of the same sizes does, which has more tokens

    steps = pmoe.BoundedSteps(layer, optimizer, run)
    watch(layer, heap)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(HeapError, match=r"rank 0 waited 600 s in vain for rank 1: .* in round 7\."):
            steps.step(torch.ones(5, 16))
    for name, value in layer.named_parameters():
        assert torch.equal(value, before[name]), name
    steps.remove()
    close_heaps(Ranks.single())
    assert memory.mapped == {}


# ---- the extension without a device


@pytest.mark.usefixtures("extension_built")
def test_the_extension_refuses_in_sentences_where_there_is_no_device() -> None:
    cuda: Any = extension.load()
    with pytest.raises(ValueError, match="a handle must have 64 bytes, not 3"):
        cuda.heap_open(0, b"abc")
    with pytest.raises(ValueError, match=r"bytes \(0\) must be at least 1"):
        cuda.heap_allocate(0, 0)
    if cuda.device_count():
        pytest.skip("there is a device")
    for call in (
        lambda: cuda.heap_allocate(0, 1),
        lambda: cuda.heap_handle(0, 1 << 40),
        lambda: cuda.heap_open(0, bytes(64)),
        lambda: cuda.heap_free(0, 1 << 40),
        lambda: cuda.heap_close(0, 1 << 40),
        lambda: cuda.heap_raise_flag(0, 0, 1 << 40, 1),
    ):
        with pytest.raises(RuntimeError, match=r"pmoe\._cuda: .*(no CUDA driver|no CUDA device)"):
            call()


def test_without_nvshmem_its_provider_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(extension.load(), "NVSHMEM"):
        pytest.skip("NVSHMEM is built in")
    told = "NVSHMEM is not built in|needs pmoe._cuda"
    with pytest.raises(RuntimeError, match=told):
        nvshmem_heap(Ranks.single(), ALONE, CPU)
