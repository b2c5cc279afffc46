"""Symmetric heaps of several processes: what must be equal on all ranks, failures of one rank, growth,
closing.

The memory is in files that the processes map, see tests/heaps.py.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pmoe.comm import agreement
from pmoe.comm.heap import close_heaps, nvshmem, providers
from pmoe.comm.heap.nvshmem import NvshmemMemory
from pmoe.comm.heap.providers import heap_for, heaps_of, nvshmem_heap, process_heap, wait_seconds
from pmoe.comm.ranks import Ranks
from pmoe.kernels import extension
from pmoe.kernels import heap as heap_module
from pmoe.kernels.comet.launcher import SPARE_BLOCKS
from pmoe.kernels.heap import WAIT_SECONDS, Heap, HeapError, HeapShape, _places, tensor_at
from tests.heap_probe import probe_flag
from tests.heaps import CPU, FileMemory, use_layout
from tests.pool import GROUP_TIMEOUT_SECONDS, SHORT_TIMEOUT_SECONDS, Pool, ranks

SHAPE = HeapShape(2, 3, 50, 20, 16, torch.bfloat16)
HOPPER, _ = FileMemory().where


def counted(patch: pytest.MonkeyPatch) -> list[object]:
    """Returns a list to which every exchange about a heap is added."""
    exchanges: list[object] = []

    def gathered(ranks: Ranks, value: object, *, stage: str) -> list[Any]:
        exchanges.append(value)
        return agreement.gathered(ranks, value, stage=stage)

    patch.setattr(providers, "gathered", gathered)
    return exchanges


def attempt(rank: int, world: int, given: list[dict[str, Any]]) -> tuple[str, str, int, int]:
    """Makes a heap from what ``given`` says of each rank.

    Returns (type of the error, its text, number of exchanges, pieces of memory that are left).
    """
    mine = given[rank]
    memory = mine.get("memory", FileMemory())
    with pytest.MonkeyPatch.context() as patch:
        use_layout(patch)
        exchanges = counted(patch)
        if "seconds" in mine:
            patch.setenv(WAIT_SECONDS, mine["seconds"])
        if "spare" in mine:
            patch.setenv(SPARE_BLOCKS, mine["spare"])
        if mine.get("built", True) is False:
            patch.setattr(extension, "_load", lambda: (None, "pmoe._cuda is not built"))
            _places.cache_clear()
        kind, text = "", ""
        try:
            heap = process_heap(
                Ranks(), mine.get("shape", replace(SHAPE, num_ranks=world)), CPU, memory=memory
            )
            heap.close()
        except (ValueError, RuntimeError) as error:
            kind, text = type(error).__name__, str(error)
    dist.barrier()  # no rank is out of step
    return kind, text, len(exchanges), len(memory.mapped)


def refused(*given: dict[str, Any]) -> tuple[str, str]:
    """Returns (type, text) of the error, which must be the same on all ranks and leave no memory."""
    found = ranks(len(given)).run(attempt, list(given))
    assert len(set(found)) == 1, found
    kind, text, _, left = found[0]
    assert left == 0
    return kind, text


# ---- peers


def written_by_peers(rank: int, world: int) -> dict[str, Any]:
    """Lets each rank write its number, and the reader's, into a row of every rank."""
    memory = FileMemory()
    with pytest.MonkeyPatch.context() as patch:
        use_layout(patch)
        shape = HeapShape(world, 2, 8, 8, 16, torch.bfloat16)
        heap = process_heap(Ranks(), shape, CPU, memory=memory)
        before = heap.rows(8).abs().sum().item()
        dist.barrier()
        for peer, address in enumerate(heap.peer_addresses):
            row = address + shape.places["inbox"] + rank * shape.row_bytes
            tensor_at(row, (16,), torch.bfloat16, CPU).fill_(10 * rank + peer)
        dist.barrier()
        found = {
            "before": before,
            "rows": heap.rows(world)[:, 5].tolist(),
            "own": heap.peer_addresses[rank] == heap.base,
            "peers": heap.peers.tolist() == list(heap.peer_addresses) and len(set(heap.peer_addresses)),
            "seconds": heap.bound_seconds,
        }
        heap.close()
    return {**found, "log": memory.log, "left": len(memory.mapped)}


@pytest.mark.parametrize("world", [2, 3])
def test_what_peers_write_is_there_and_every_heap_is_opened_once_and_its_own_never(world: int) -> None:
    for rank, found in enumerate(ranks(world).run(written_by_peers)):
        assert found == {
            "before": 0,
            "rows": [10 * writer + rank for writer in range(world)],
            "own": True,
            "peers": world,
            "seconds": GROUP_TIMEOUT_SECONDS,
            "left": 0,
            "log": [
                *("place", "allocate", "handle"),
                *["open"] * (world - 1),
                *["close"] * (world - 1),
                "free",
            ],
        }


def bounds(rank: int, world: int) -> list[float]:
    found = []
    for seconds, text in ((7, None), (7, "3"), (7, "60"), (90, None), (90, "60")):
        group = dist.new_group(list(range(world)), timeout=datetime.timedelta(seconds=seconds))
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(WAIT_SECONDS, raising=False)
            if text is not None:
                patch.setenv(WAIT_SECONDS, text)
            found.append(wait_seconds(Ranks(group)))
    return found


def test_no_wait_is_longer_than_the_groups_timeout() -> None:
    for found in ranks(2).run(bounds):
        assert found == [7, 3, 7, 90, 60]


# ---- ranks that do not fit together


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rows": 49}, "rows 50, bytes {0}; rank 1: rows 49, bytes {1}"),
        ({"home_rows": 500}, "home_rows 20, bytes {0}; rank 1: home_rows 500, bytes {1}"),
        ({"experts": 2}, "experts 3, bytes {0}; rank 1: experts 2, bytes {1}"),
        ({"d_model": 32}, "d_model 16, bytes {0}; rank 1: d_model 32, bytes {1}"),
        ({"dtype": torch.float16}, "dtype bfloat16; rank 1: dtype float16"),
        ({"num_ranks": 3}, "num_ranks 2, bytes {0}; rank 1: num_ranks 3, bytes {1}"),
    ],
)
def test_unlike_shapes_are_told_rank_by_rank_on_every_rank(given: dict[str, Any], told: str) -> None:
    other = replace(SHAPE, **given)
    with pytest.MonkeyPatch.context() as patch:
        use_layout(patch)
        sizes = [SHAPE.bytes, other.bytes]
    if sizes[0] == sizes[1]:
        told = told.replace(", bytes {0}", "").replace(", bytes {1}", "")
    assert refused({"shape": SHAPE}, {"shape": other}) == (
        "ValueError",
        "all ranks of a symmetric heap must have the same shape, dtype and loaded kernels, not rank 0: "
        + told.format(*sizes),
    )


def test_unlike_kernels_are_told_rank_by_rank() -> None:
    by_driver = "binary 90 of PTX 80 on compute capability 9.0"
    kind, text = refused({}, {"memory": FileMemory(where=(by_driver, "a"))}, {})
    assert kind == "ValueError"
    assert text.endswith(
        "not rank 0: kernels binary 90 of PTX 90 on compute capability 9.0; rank 1: kernels binary 90 of PTX "
        "80 on compute capability 9.0; rank 2: kernels binary 90 of PTX 90 on compute capability 9.0"
    )


def test_ranks_of_several_nodes_and_a_group_of_another_size_are_refused() -> None:
    elsewhere = FileMemory(where=(HOPPER, "b"))
    assert refused({}, {"memory": elsewhere}) == (
        "ValueError",
        "all ranks of a symmetric heap must be on one node (nvshmem_heap goes beyond), not rank 0: a; rank "
        "1: b",
    )
    shape = replace(SHAPE, num_ranks=3)
    told = "num_ranks (3) must be the size of the group (2)"
    assert refused({"shape": shape}, {"shape": shape}) == ("ValueError", told)


# ---- what fails on one rank


def test_a_bad_variable_on_one_rank_is_an_error_on_all() -> None:
    kind, text = refused({}, {"seconds": "soon"})
    assert kind == "ValueError"
    assert text.startswith("pmoe: no symmetric heap: rank 1: PMOE_WAIT_SECONDS ('soon') must be a number")
    kind, text = refused({}, {"spare": "many"})
    assert kind == "ValueError"
    assert text.startswith(
        "pmoe: no symmetric heap: rank 1: PMOE_SPARE_BLOCKS ('many') must be a whole number"
    )


def test_a_rank_without_the_extension_is_an_error_on_all() -> None:
    if extension.load() is None:
        pytest.skip("no rank has it")
    kind, text = refused({"built": False}, {})
    assert kind == "NoHeapError"
    assert text == (
        "pmoe: no symmetric heap: rank 0: a symmetric heap needs pmoe._cuda: pmoe._cuda is not built"
    )


@pytest.mark.parametrize("world", [2, 3])
def test_where_one_rank_finds_no_memory_all_say_who_and_how_much_and_keep_nothing(world: int) -> None:
    given: list[dict[str, Any]] = [{} for _ in range(world)]
    given[1] = {"memory": FileMemory(refuses="allocate")}
    with pytest.MonkeyPatch.context() as patch:
        use_layout(patch)
        num_bytes = replace(SHAPE, num_ranks=world).bytes
    assert refused(*given) == (
        "NoHeapError",
        f"pmoe: no symmetric heap: rank 1: could not allocate {num_bytes} bytes on cpu: cannot allocate",
    )


def test_a_heap_that_one_rank_cannot_open_is_an_error_on_all() -> None:
    kind, text = refused({"memory": FileMemory(refuses="open")}, {}, {"memory": FileMemory(refuses="open")})
    assert kind == "NoHeapError"
    assert text == (
        "pmoe: no symmetric heap: rank 0: could not open the heap of rank 1: cannot open; rank 2: could not "
        "open the heap of rank 0: cannot open"
    )


# ---- heaps that layers share


def grown(rank: int, world: int) -> dict[str, Any]:
    memory, group = FileMemory(), Ranks()
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        use_layout(patch)
        exchanges = counted(patch)

        def wanted(rows: int) -> Heap:
            shape = HeapShape(world, 2, rows, 4, 16, torch.bfloat16)
            return heap_for(group, CPU, shape, make=lambda *given: process_heap(*given, memory=memory))

        def exchanged(work: Callable[[], object]) -> int:
            before = len(exchanges)
            work()
            return len(exchanges) - before

        found["first"] = exchanged(lambda: wanted(8))
        first = wanted(8)
        found["again"] = exchanged(lambda: wanted(8)) + exchanged(lambda: wanted(3))
        memory.log.clear()
        found["larger"] = exchanged(lambda: wanted(20))
        found["log"] = list(memory.log)
        second = wanted(20)
        found["another"] = second is not first
        second.next_epoch()
        if rank == 0:  # it alone waited in vain
            second.report[:2] = torch.tensor([1, 1], dtype=torch.int32)
        try:
            wanted(20)
            found["broken"] = False
        except HeapError:
            found["broken"] = True
        found["closing"] = exchanged(lambda: close_heaps(group))
        found["left"] = len(memory.mapped)
        third = wanted(20)
        found["round"] = third.next_epoch()
        close_heaps(group)
        found["kept"] = dict(heaps_of(group))
    return found


def test_a_shared_heap_grows_on_all_ranks_and_is_made_anew_after_a_failure_of_one() -> None:
    for rank, found in enumerate(ranks(2).run(grown)):
        assert found == {
            "first": 3,
            "again": 0,
            "larger": 5,
            "log": ["close", "free", "place", "allocate", "handle", "open"],
            "another": True,
            "broken": rank == 0,
            "closing": 1,
            "left": 0,
            "round": 1,
            "kept": {},
        }


def grown_after_a_timeout(rank: int, world: int, is_in_graph: bool) -> tuple[str, bool, int]:
    """Returns the error of a larger heap, whether the next call makes it, and pieces of memory at the end.

    is_in_graph: whether a CUDA graph of rank 0 uses the smaller heap, which then stays open.
    """
    memory = FileMemory()
    group = Ranks()
    told = ""
    with pytest.MonkeyPatch.context() as patch:
        use_layout(patch)

        def wanted(rows: int) -> Heap:
            shape = HeapShape(world, 2, rows, 4, 16, torch.bfloat16)
            return heap_for(group, CPU, shape, make=lambda *given: process_heap(*given, memory=memory))

        first = wanted(8)
        first.count_on_device()
        first.is_in_graph = is_in_graph and rank == 0
        if rank == 1:  # it alone waited in vain, and has not launched anything since
            first.report[:6] = torch.tensor([1, 0, 0, 0, 3, 1], dtype=torch.int32)
        try:
            wanted(20)
        except HeapError as error:
            told = str(error)
        is_made = wanted(20).shape.rows == 20
        assert (first.release is None) != is_in_graph
        close_heaps(group)
    return told, is_made, len(memory.mapped)


@pytest.mark.parametrize("is_in_graph", [False, True])
def test_a_timeout_is_raised_on_all_ranks_before_a_larger_heap_takes_the_place(is_in_graph: bool) -> None:
    for told, is_made, left in ranks(2).run(grown_after_a_timeout, is_in_graph):
        assert told.startswith("pmoe: rank 1 waited ")
        assert "in vain for rank 0: the grant of room for rank 1's rows" in told and "in round 3." in told
        assert is_made and left == 0


def closed_by_one(rank: int, world: int) -> tuple[str, int]:
    memory = FileMemory()
    with pytest.MonkeyPatch.context() as patch:
        use_layout(patch)
        heap = process_heap(Ranks(), SHAPE, CPU, memory=memory)
    if rank == 1:
        return "", 0
    os.unlink(memory.mapped[heap.base][1])  # its peer, which is killed, leaves no file either
    os.unlink(memory.mapped[heap.peer_addresses[1]][1])
    try:
        heap.close()
    except RuntimeError as error:
        return str(error), len(memory.mapped)
    return "no error", 0


@pytest.mark.slow
def test_memory_stays_where_a_peer_does_not_come_to_close() -> None:
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        pool.start(closed_by_one)
        error, left = pool.answer(0)
    assert error.startswith(
        "pmoe: rank 0 of 2 failed in the exchange about a symmetric heap; a peer has died"
    )
    assert left == 1  # its own, which rank 1 may still write


# ---- the probe, by kernels that the host plays


class FakeStream:
    """A stream that runs what was launched when the host waits for it."""

    streams: list[FakeStream] = []

    def __init__(self, device: torch.device) -> None:
        self.cuda_stream, self.launched = len(self.streams), []
        self.streams.append(self)

    def synchronize(self) -> None:
        while self.launched:
            self.launched.pop(0)()


class FakeFlags:
    def __init__(self, silent: bool) -> None:
        self.silent = silent
        self.real = extension.load()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def heap_raise_flag(self, device: int, stream: int, flag: int, value: int) -> None:
        def write() -> None:
            if not self.silent:
                ctypes.c_uint32.from_address(flag).value = value

        FakeStream.streams[stream].launched.append(write)

    def heap_await_flag(
        self, device: int, stream: int, flag: int, wanted: int, nanoseconds: int, waited: int
    ) -> None:
        def wait() -> None:
            start = time.monotonic_ns()
            while (past := time.monotonic_ns() - start) < nanoseconds:
                if ctypes.c_uint32.from_address(flag).value >= wanted:
                    ctypes.c_int64.from_address(waited).value = past
                    return

        FakeStream.streams[stream].launched.append(wait)


PROBE_SECONDS = 20.0
"""Seconds within which a flag is seen, even on a busy machine."""


def probed(rank: int, world: int, silent: int | None) -> list[float | None]:
    with pytest.MonkeyPatch.context() as patch:
        use_layout(patch)
        heap = process_heap(Ranks(), replace(SHAPE, num_ranks=world), CPU, memory=FileMemory())
        patch.setattr(heap_module, "loaded_extension", lambda: FakeFlags(rank == silent))
        patch.setattr(torch.cuda, "Stream", FakeStream)
        calls, bound = (2, PROBE_SECONDS) if silent is None else (1, 0.5)
        found = [probe_flag(heap, Ranks(), seconds=bound) for _ in range(calls)]
        heap.close()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_the_probe_gives_the_slowest_ranks_seconds_on_all(world: int) -> None:
    first, *others = ranks(world).run(probed, None)
    assert all(isinstance(seconds, float) and 0 <= seconds < PROBE_SECONDS for seconds in first)
    assert others == [first] * (world - 1)


def test_where_one_flag_never_comes_the_probe_says_so_on_all_ranks() -> None:
    assert ranks(3).run(probed, 1) == [[None]] * 3


# ---- NVSHMEM, played by files


class FakeNvshmem:
    """Stands in for the functions of cuda/heap/nvshmem.cpp and cuda/nvshmem/start.cpp."""

    NVSHMEM = "0.0.0"

    def __init__(self, rank: int, world: int, reach: bool) -> None:
        self.files, self.started, self.reach = FileMemory(), (rank, world), reach
        self.log: list[str] = []
        self.real = extension.load()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def nvshmem_open(self, path: str) -> None:
        self.log.append(f"open {path}")

    def nvshmem_unique_id(self) -> bytes:
        return b"id"

    def nvshmem_init(self, device: int, given_id: bytes, rank: int, world: int) -> tuple[int, int]:
        self.log.append(f"init {given_id.decode()}")
        return self.started

    def nvshmem_allocate(self, device: int, num_bytes: int) -> int:
        self.log.append("allocate")
        return self.files.allocate(CPU, num_bytes)

    def nvshmem_free(self, device: int, base: int) -> None:
        self.log.append("free")
        self.files.free(CPU, base)

    def nvshmem_pointer(self, device: int, base: int, peer: int) -> int:
        return base + 4096 if self.reach else 0

    def nvshmem_start(self, device: int) -> None:
        self.log.append("start puts")


def over_nvshmem(rank: int, world: int, given: dict[str, Any]) -> tuple[str, list[str]]:
    group = Ranks()
    started = (rank, world + given.get("too_many", 0))
    fake = FakeNvshmem(rank, world, given.get("reach", True) or rank == 1)
    fake.started = started
    with pytest.MonkeyPatch.context() as patch:
        use_layout(patch)
        patch.setattr(heap_module, "loaded_extension", lambda: fake)
        patch.setattr(nvshmem, "_members", given.get("members"))
        patch.setattr(heap_module.DeviceMemory, "place", lambda self, device: (HOPPER, str(rank)))
        patch.setattr(extension, "nvshmem_library", lambda: "the library")
        patch.setattr(
            extension, "nvshmem_version", lambda path: given.get("versions", ["3.8.0"] * world)[rank]
        )
        patch.setattr(extension, "why_no_puts", lambda: "no puts here")
        told = ""
        try:
            heap = nvshmem_heap(group, SHAPE, CPU)
            assert heap.peer_addresses[rank] == heap.base
            assert heap.peer_addresses[1 - rank] == heap.base + 4096
            heap.close()
        except (RuntimeError, ValueError) as error:
            told = str(error)
    dist.barrier()
    return told, fake.log


def test_nvshmem_starts_once_from_the_first_ranks_id_and_nodes_may_differ() -> None:
    for told, log in ranks(2).run(over_nvshmem, {}):
        assert told == ""
        assert log == ["open the library", "init id", "allocate", "free"]
    assert NvshmemMemory.collective


def test_a_rank_beyond_loads_and_stores_is_refused_on_all_and_memory_goes() -> None:
    for told, log in ranks(2).run(over_nvshmem, {"reach": False}):
        assert told == (
            "pmoe: no symmetric heap: rank 0: could not open the heap of rank 1: loads and stores do "
            "not reach it (there is no NVLink), and the kernels write by stores: no puts here"
        )
        assert log[-1] == "free"


def test_ranks_with_different_versions_of_nvshmem_are_refused_before_it_starts() -> None:
    for told, log in ranks(2).run(over_nvshmem, {"versions": ["3.8.0", "3.4.5"]}):
        assert (
            f"rank 0: kernels {HOPPER} with NVSHMEM 3.8.0; rank 1: kernels {HOPPER} with NVSHMEM 3.4.5"
            in told
        )
        assert log == []


PERSISTENT = HeapShape(3, 3, 128, 20, 16, torch.bfloat16, 8)
TWO_NODES = [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def heap_of_nodes(rank: int, world: int, given: dict[str, Any]) -> tuple[list[bool], bool, list[str]] | str:
    """Which peers a rank's heap maps, whether it is staged, and what NVSHMEM was asked; or the error."""
    fake = FakeNvshmem(rank, world, True)
    mapped = given["mapped"]
    fake.nvshmem_pointer = lambda device, base, peer: base + 4096 if mapped[rank][peer] else 0
    with pytest.MonkeyPatch.context() as patch:
        use_layout(patch)
        patch.setattr(heap_module, "loaded_extension", lambda: fake)
        patch.setattr(heap_module, "has_puts", lambda: given.get("puts", [True] * world)[rank])
        patch.setattr(nvshmem, "_members", None)
        patch.setattr(heap_module.DeviceMemory, "place", lambda self, device: (HOPPER, str(rank)))
        patch.setattr(extension, "nvshmem_library", lambda: "the library")
        patch.setattr(extension, "nvshmem_version", lambda path: "3.8.0")
        patch.setattr(extension, "puts_module", lambda: fake)
        patch.setattr(extension, "why_no_puts", lambda: given.get("why"))
        try:
            heap = nvshmem_heap(Ranks(), given.get("shape", PERSISTENT), CPU)
        except (RuntimeError, ValueError) as error:
            return str(error)
        finally:
            dist.barrier()
        assert heap.shape.holds(PERSISTENT)
        heap.close()
    return [address != 0 for address in heap.peer_addresses], heap.shape.is_staged, fake.log


def test_peers_that_cannot_be_mapped_get_no_address_and_all_ranks_stage_rows() -> None:
    heaps = ranks(3).run(heap_of_nodes, {"mapped": TWO_NODES})
    assert [found[:2] for found in heaps] == [
        ([True, True, False], True),
        ([True, True, False], True),
        ([False, False, True], True),
    ]
    for _, _, log in heaps:
        assert log[-5:] == ["allocate", "free", "start puts", "allocate", "free"]  # after the probe


def test_a_pair_of_ranks_is_mapped_in_both_directions_or_in_none() -> None:
    one_way = [[1, 0, 1], [1, 1, 1], [1, 1, 1]]
    assert [found[:2] for found in ranks(3).run(heap_of_nodes, {"mapped": one_way})] == [
        ([True, False, True], True),
        ([False, True, True], True),
        ([True, True, True], True),
    ]


def test_nothing_is_staged_if_all_ranks_map_all() -> None:
    for mapped, is_staged, log in ranks(3).run(heap_of_nodes, {"mapped": [[1, 1, 1]] * 3}):
        assert mapped == [True] * 3 and not is_staged
        assert log[-4:] == ["allocate", "free", "allocate", "free"]  # the probe, and the heap


def test_comet_s_heaps_and_kernels_without_puts_refuse_peers_that_cannot_be_mapped() -> None:
    comet = HeapShape(3, 3, 50, 20, 16, torch.bfloat16)
    without: dict[str, Any] = {"mapped": TWO_NODES, "puts": [False] * 3, "why": "no puts here"}
    for given, why in (
        (without, "no puts here"),
        ({"mapped": TWO_NODES, "shape": comet}, "these kernels do not send by NVSHMEM's puts"),
    ):
        for message in ranks(3).run(heap_of_nodes, given):
            assert "rank 2: could not open the heap of rank 0" in message
            assert message.endswith(why)


def test_ranks_whose_kernels_differ_in_puts_are_refused() -> None:
    for message in ranks(3).run(heap_of_nodes, {"mapped": TWO_NODES, "puts": [True, True, False]}):
        assert "rank 1: puts True; rank 2: puts False" in message


def test_nvshmem_serves_one_group_a_process() -> None:
    for told, log in ranks(2).run(over_nvshmem, {"members": [0, 3]}):
        assert "rank 1: NVSHMEM serves ranks [0, 3] in this process; it cannot serve [0, 1], too" in told
        assert log == []
    for told, log in ranks(2).run(over_nvshmem, {"too_many": 1}):
        assert (
            "rank 1: NVSHMEM runs as rank 1 of 3 in this process, but the group has it as rank 1 of 2" in told
        )
        assert log == ["open the library", "init id"]
