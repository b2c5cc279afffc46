"""Pass programs over CUDA and NCCL, without a GPU: calls, their order, errors, and results in the emulator.

`tests.device_programs` has the stand-ins for CUDA's runtime and for NCCL.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.bench_program import num_launches, num_pushes
from bench.recorded_program import Issue, RecordedProgram, Wait
from pmoe.comm.heap import check_program_heaps, program_heap
from pmoe.comm.ranks import Ranks
from pmoe.program.compiler import HOST_IS_READ, compile_pass
from pmoe.program.layer_shape import LayerShape
from pmoe.program.records import Base, Kernel, PassProgram
from pmoe.schedule.buffer_sizes import HiddenColumns
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES, Restore
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.tasks import Lane, Schedule, Stages
from tests import fresh
from tests.device_programs import (
    PRODUCT_NAMES,
    STREAMS,
    DeviceCall,
    Reader,
    counter_bytes,
    journal,
    load,
    nccl,
    stand_ins,
)
from tests.kit import build, loss_of, one_thread, tokens
from tests.programs import Calls, EngineCall, ProgramCall, engine_call, library, order_problem, own_counts
from tests.reference import relative_error

__all__ = ["one_thread"]

EXPERTS, TOP_K, WIDTH = 3, 2, 16
COLUMNS = HiddenColumns(hidden=2 * WIDTH, active=WIDTH, scratch=WIDTH, scratch_rows=4, staged=2 * WIDTH)
PARTS = 2
"""Partial sums of a row of HIDDEN_GRADIENT by the kernels for sm_80, for up to 128 hidden columns."""
ADDRESSES = {base: base << 32 for base in Base} | {Base.NOWHERE: 0}


@pytest.fixture
def cuda(kernels: Path) -> Iterator[ModuleType]:
    """Returns the extension over the stand-ins. Calls are only written down."""
    with stand_ins(kernels, runs=False) as module:
        yield module


def shape_of(ranks: int, stages: Stages, *, bias: bool = False) -> LayerShape:
    return LayerShape(
        ranks=ranks,
        local_experts=EXPERTS,
        top_k=TOP_K,
        d_model=WIDTH,
        columns=COLUMNS,
        bias=bias,
        keeps_own=stages.local,
        sends=stages.remote,
        weighs_active=not bias,
        places=True,
        element_bytes=2,
        weight_bytes=4,
        sum_bytes=4,
    )


def counts_of_all(ranks: int, n: int, seed: int) -> Tensor:
    """Returns rows by source rank, chunk, destination rank and expert. Some ranks and experts have none."""
    draw = random.Random(seed)
    counts = torch.zeros(ranks, n, ranks, EXPERTS, dtype=torch.int64)
    for source in range(ranks):
        if draw.random() > 0.25:
            counts[source].apply_(lambda _: draw.choice((0, 0, 1, 5)))
    return counts


@dataclass
class DevicePass:
    """One pass of one rank, which the backend over CUDA issued and the recording backend wrote down.

    counts: rows by source rank, chunk, destination rank and expert.
    calls: the calls of CUDA and NCCL, on the lanes of their streams.
    seconds: the time limit of the communicator.
    device: the number of the device.
    heaps: whether rows travel over heaps, and not by NCCL.
    """

    module: ModuleType
    counts: Tensor
    rank: int
    schedule: Schedule
    restore: Restore | None
    stages: Stages
    spare: int = 0
    seconds: float = 60.0
    device: int = 0
    heaps: bool = False
    streams: dict[Lane, int] = field(default_factory=lambda: dict(STREAMS))

    def __post_init__(self) -> None:
        ranks = self.counts.shape[0]
        self.program: PassProgram = compile_pass(self.schedule, shape_of(ranks, self.stages), self.restore)
        self.send = self.counts[self.rank].contiguous()
        self.recv = self.counts[:, :, self.rank].transpose(0, 1).contiguous()
        total = int(self.send.sum())
        self.tokens = total + len(self.send) if total else 0  # every chunk has tokens, if there are rows
        recorded = RecordedProgram(library(), self.program.words())
        flat = [each.flatten().tolist() for each in (self.send, self.recv)]
        self.arena_bytes = recorded.cut(self.tokens, self.rank, *flat)
        self.recorded = recorded.run(ADDRESSES)
        self.communicator = None
        if self.stages.remote and self.heaps:
            self.report = torch.zeros(8, dtype=torch.int32)
            self.communicator = heap_exchanger(self.module, ranks, self.rank, self.report, self.seconds)
        elif self.stages.remote:
            identity = self.module.nccl_id()
            self.communicator = self.module.Communicator(
                identity, ranks, self.rank, self.device, self.seconds
            )
        self.loaded = load(
            self.program,
            self.schedule,
            device=self.device,
            spare=self.spare,
            communicator=self.communicator,
        )

    def run(self) -> None:
        self.module.stub_reset(runs=False)
        cut = self.loaded.cut(self.tokens, self.rank, self.send, self.recv)
        assert cut.arena_bytes == self.arena_bytes
        self.loaded.run(cut, ADDRESSES, self.streams, 1 << 50)

    def free(self) -> None:
        """Destroys the program and the communicator."""
        del self.loaded, self.communicator
        gc.collect()

    def calls(self) -> Calls:
        """Runs the pass. Returns its calls on the lanes on whose streams they were made."""
        self.run()
        assert self.module.stub_refused() == []
        noted = journal(self.module)
        needs_fill = self.spare and self.needs_fill()
        fill_bytes = counter_bytes(self.program) if needs_fill else 0
        reader = Reader(noted, heaps=self.heaps, fill_bytes=fill_bytes)
        if self.communicator is not None:
            if not self.heaps:
                reader.take("ncclCommGetAsyncError")
            end = reader.noted.pop()  # the event of the end of the pass
            assert (end.what, end.stream) == ("record", self.streams[Lane.COMPUTE])
        return reader.read(self.recorded, parts=PARTS, own_rank=self.rank)

    def needs_fill(self) -> bool:
        """Returns whether a fill of memory sets the products' counters to 0.

        It does not if a launch before the first product takes numbers on the compute lane: this launch does.
        `DeviceCall` checks that it sets all of them.
        """
        issues = [call for call in self.recorded if isinstance(call, Issue)]
        is_product = [call.kernel.name in PRODUCT_NAMES for call in issues]
        before = issues[: is_product.index(True)] if any(is_product) else []
        takes = [
            call
            for call in before
            if call.kernel is Kernel.TAKE and call.operands[0].columns == 1 and call.lane is Lane.COMPUTE
        ]
        return any(is_product) and not takes


def heap_exchanger(
    module: ModuleType, ranks: int, rank: int, report: Tensor, seconds: float, arena: int = 0
) -> Any:
    """Returns an exchanger over heaps at addresses that nothing reads.

    arena: bytes of the arena.
    """
    return module.HeapExchanger(
        heaps=[(1 << 52) + (number << 44) for number in range(ranks)],
        rank=rank,
        device=0,
        bytes=module.program_heap_bytes(ranks) + arena,
        report=report.data_ptr(),
        seconds=seconds,
    )


def passes(
    module: ModuleType,
    ranks: int,
    n: int,
    *,
    local: bool = True,
    pairs: Any = (*ALL_PAIRS, None),
    heaps: bool = False,
) -> Iterator[DevicePass]:
    """Yields both passes of all restore pairs, and forward without a backward pass, of one rank each."""
    stages = Stages(local=local, remote=ranks > 1 or not local)
    for seed, restore in enumerate(pairs):
        counts = counts_of_all(ranks, n, 100 * ranks + 10 * n + seed)
        for direction in ("forward", "backward")[: 2 if restore else 1]:
            schedule = rotating(direction, n, stages, restore=restore)
            yield DevicePass(
                module, counts, seed % ranks, schedule, restore, stages, spare=seed % 2, heaps=heaps
            )


def s4(
    module: ModuleType,
    direction: str = "forward",
    ranks: int = 2,
    n: int = 4,
    seconds: float = 60.0,
    device: int = 0,
    heaps: bool = False,
) -> DevicePass:
    """Returns a pass in which every rank sends rows to every other in every chunk."""
    stages = Stages(local=True, remote=ranks > 1)
    counts = torch.ones(ranks, n, ranks, EXPERTS, dtype=torch.int64)
    restore = STRATEGIES["S4"]
    schedule = rotating(direction, n, stages, restore=restore)
    return DevicePass(
        module, counts, 0, schedule, restore, stages, seconds=seconds, device=device, heaps=heaps
    )


# ---- the order of calls


@pytest.mark.parametrize(
    "ranks, heaps", [(1, False), (2, False), (3, False), (4, False), (2, True), (3, True)]
)
def test_calls_keep_the_order_of_the_schedule(cuda: ModuleType, ranks: int, heaps: bool) -> None:
    for n in (1, 2, 4):
        for one in passes(cuda, ranks, n, local=n != 2, heaps=heaps):
            problem = order_problem(one.calls(), one.program, one.schedule)
            assert problem is None, (str(one.restore), one.schedule.direction, n, problem)


@pytest.mark.parametrize("heaps", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_launches_of_the_prediction_are_those_of_the_backend(
    cuda: ModuleType, direction: str, heaps: bool
) -> None:
    for ranks, n in ((1, 1), (1, 4), (2, 4), (3, 2)):
        one = s4(cuda, direction, ranks, n, heaps=heaps)
        one.run()
        launches = [call for call in journal(cuda) if call.what == "launch"]
        expected = num_launches(one.recorded) + heaps * num_pushes(one.recorded)
        assert len(launches) == expected, (ranks, n)


def test_a_pass_has_an_event_for_each_signal_and_two_more(cuda: ModuleType) -> None:
    """One makes the compute lane wait after an error. The communicator watches passes by the other."""
    before = cuda.stub_num_events()
    one = s4(cuda)
    assert cuda.stub_num_events() - before == one.program.num_events + 1
    one.calls()
    one.calls()
    assert one.communicator.abort_if_late() == ""
    del one.loaded
    assert cuda.stub_num_events() - before == 2, "the second pass began before anybody looked at the first"
    one.communicator = None
    gc.collect()
    assert cuda.stub_num_events() == before


@pytest.mark.parametrize("heaps", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_each_missing_wait_and_each_call_on_a_wrong_stream_is_found(
    cuda: ModuleType, direction: str, heaps: bool
) -> None:
    stages = Stages(local=True, remote=True)
    restore = STRATEGIES["S1"]
    counts = torch.ones(3, 4, 3, EXPERTS, dtype=torch.int64)
    schedule = rotating(direction, 4, stages, restore=restore)
    one = DevicePass(cuda, counts, 0, schedule, restore, stages, heaps=heaps)
    calls = one.calls()

    def is_found(changed: Calls) -> bool:
        return order_problem(changed, one.program, one.schedule) is not None

    waits = [at for at, call in enumerate(calls) if isinstance(call, Wait)]
    missed = [calls[at] for at in waits if not is_found(calls[:at] + calls[at + 1 :])]
    # Copies to the host also wait for copies of earlier passes, of which this pass knows nothing.
    of_earlier_passes = [Wait(Lane.COPY_OUT, HOST_IS_READ)] if direction == "forward" else []
    assert len(waits) > 20 and missed == of_earlier_passes
    unused = Lane.INTRA_NODE
    assert not any(call.lane is unused for call in calls)
    for at, call in enumerate(calls):
        if isinstance(call, Issue):
            moved = [*calls[:at], replace(call, lane=unused), *calls[at + 1 :]]
            assert is_found(moved), call


def test_swapped_streams_are_found(cuda: ModuleType) -> None:
    """Reading the journal by the right streams, calls of two lanes have changed places."""
    one = s4(cuda)
    for lane in (Lane.COMMUNICATE, Lane.COPY_IN):
        # The compute lane's stream is also the one on which the caller goes on.
        one.streams = STREAMS | {Lane.COMPUTE: STREAMS[lane], lane: STREAMS[Lane.COMPUTE]}
        if lane in one.schedule.lanes:
            assert order_problem(one.calls(), one.program, one.schedule) is not None


# ---- exchanges


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("local", [True, False])
def test_what_a_rank_sends_another_receives(cuda: ModuleType, ranks: int, local: bool) -> None:
    """Both ranks of a pair have the same messages in the same order, and none without rows."""
    stages = Stages(local=local, remote=True)
    for seed, restore in enumerate((STRATEGIES["S1"], STRATEGIES["S4"], KEEP)):
        counts = counts_of_all(ranks, 4, seed)
        for direction in ("forward", "backward"):
            schedule = rotating(direction, 4, stages, restore=restore)
            messages: dict[str, dict[tuple[int, int], list[int]]] = {"ncclSend": {}, "ncclRecv": {}}
            for rank in range(ranks):
                one = DevicePass(cuda, counts, rank, schedule, restore, stages)
                one.run()
                noted = journal(cuda)
                depth = 0
                for call in noted:
                    depth += (call.what == "ncclGroupStart") - (call.what == "ncclGroupEnd")
                    if call.what in messages:
                        assert depth == 1 and call.stream == STREAMS[Lane.COMMUNICATE]
                        peer, num_bytes, _ = call.numbers
                        pair = (rank, peer) if call.what == "ncclSend" else (peer, rank)
                        messages[call.what].setdefault(pair, []).append(num_bytes)
                assert depth == 0
            assert messages["ncclSend"] == messages["ncclRecv"]
            sizes = [size for each in messages["ncclSend"].values() for size in each]
            assert min(sizes) > 0


def test_rows_for_the_own_rank_are_copied_not_sent(cuda: ModuleType) -> None:
    stages = Stages(local=False, remote=True)
    counts = torch.ones(1, 2, 1, EXPERTS, dtype=torch.int64)
    one = DevicePass(cuda, counts, 0, rotating("forward", 2, stages, restore=KEEP), KEEP, stages)
    one.calls()
    assert not [call for call in journal(cuda) if call.what.startswith("ncclGroup")]


# ---- errors


FAILURES = {
    "ncclGroupStart": r"record \d+ \(S0: exchange\): ncclGroupStart: an error that a test asked for \(3\)",
    "ncclSend": r"record \d+ \(S0: exchange\): ncclSend to rank 1: an error that a test asked for \(3\)",
    "ncclRecv": r"record \d+ \(S0: exchange\): ncclRecv from rank 1: an error that a test asked for \(3\)",
    "ncclGroupEnd": r"record \d+ \(S0: exchange\): ncclGroupEnd: an error that a test asked for \(3\)",
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_of_nccl_names_the_record_and_every_group_ends(cuda: ModuleType, name: str) -> None:
    one = s4(cuda)
    nccl().stub_nccl_fail(name.encode(), 0)  # in the first exchange
    with pytest.raises(RuntimeError, match=FAILURES[name]):
        one.run()
    names = [call.what for call in journal(cuda)]
    started = names.count("ncclGroupStart") - (name == "ncclGroupStart")
    assert started == names.count("ncclGroupEnd") and nccl().stub_nccl_depth() == 0
    # The compute lane waits for all others before the caller frees memory.
    waits = [call for call in journal(cuda) if call.what == "wait"][-len(Lane) + 1 :]
    assert [call.stream for call in waits] == [STREAMS[Lane.COMPUTE]] * (len(Lane) - 1)
    one.calls()  # the next pass is whole


def test_an_error_of_an_earlier_exchange_ends_the_pass_before_its_first_call(cuda: ModuleType) -> None:
    one = s4(cuda)
    nccl().stub_nccl_async_error(6)
    with pytest.raises(RuntimeError, match=r"an earlier exchange: an error of the stand-in \(6\)"):
        one.run()
    assert [call.what for call in journal(cuda)] == ["ncclCommGetAsyncError"]
    nccl().stub_nccl_async_error(0)


# ---- a peer that never comes


def test_a_pass_that_does_not_end_in_time_aborts_the_communicator(cuda: ModuleType) -> None:
    """The device never reaches the end: another thread aborts NCCL, and later passes say why."""
    one = s4(cuda, seconds=0.02)
    one.run()
    assert one.communicator.abort_if_late() == "", "the pass has ended"
    one.run()
    cuda.stub_reach_events(False)
    assert one.communicator.abort_if_late() == "", "the pass has time left"
    time.sleep(0.05)
    reason = (
        "rank 0 of 2: a pass program has not ended within 0.02 s: another rank never came, or the device is "
        "busy. The communicator of pass programs was aborted"
    )
    assert one.communicator.abort_if_late().startswith(reason)
    assert aborted() == 1
    with pytest.raises(RuntimeError, match=reason):
        one.run()
    assert journal(cuda) == [], "nothing is issued on an aborted communicator"
    assert one.communicator.abort_if_late().startswith(reason) and aborted() == 1


def test_a_long_pass_before_it_does_not_count_against_a_pass(cuda: ModuleType) -> None:
    """A pass has its time limit after the pass before it has ended."""
    one = s4(cuda, seconds=0.2)
    one.run()
    one.run()
    time.sleep(0.25)
    assert one.communicator.abort_if_late() == ""
    one.run()
    assert one.communicator.abort_if_late() == "" and aborted() == 0


def test_an_exchange_that_waits_on_the_host_is_ended(cuda: ModuleType) -> None:
    """NCCL waits for a peer inside the first group: another thread aborts, and the record is named."""
    one = s4(cuda, seconds=0.02)
    nccl().stub_nccl_stuck(1)
    nccl().stub_nccl_fail(b"ncclGroupEnd", 0)

    def look() -> None:
        while not one.communicator.abort_if_late():
            time.sleep(0.005)

    looker = threading.Thread(target=look)
    looker.start()
    message = r"record \d+ \(S0: exchange\): rank 0 of 2: an exchange of a pass program has waited for 0.02 s"
    with pytest.raises(RuntimeError, match=message):
        one.run()
    looker.join()
    assert aborted() == 1


def test_an_exchange_that_fails_later_aborts_the_communicator(cuda: ModuleType) -> None:
    one = s4(cuda)
    one.run()
    nccl().stub_nccl_async_error(6)
    reason = "rank 0 of 2: an exchange of a pass program failed: an error of the stand-in (6)"
    assert one.communicator.abort_if_late().startswith(reason)
    assert aborted() == 1
    nccl().stub_nccl_async_error(0)


def test_a_pass_that_failed_is_watched(cuda: ModuleType) -> None:
    """Its first exchange was issued, and the device may wait for rows in it for ever."""
    one = s4(cuda, seconds=0.02)
    nccl().stub_nccl_fail(b"ncclGroupEnd", 1)  # in the second exchange
    with pytest.raises(RuntimeError, match=r"record \d+ \(P: exchange\): ncclGroupEnd"):
        one.run()
    cuda.stub_reach_events(False)
    time.sleep(0.05)
    assert one.communicator.abort_if_late().startswith(
        "rank 0 of 2: a pass program has not ended within 0.02 s"
    )
    assert aborted() == 1


def test_an_error_of_the_device_aborts_the_communicator(cuda: ModuleType) -> None:
    """An error of cudaEventQuery does not mean that the device has not reached the event yet."""
    one = s4(cuda)
    one.run()
    cuda.stub_break_device()
    reason = (
        "rank 0 of 2: the device of a pass program failed: pmoe._cuda: cudaEventQuery of a pass's end: "
        "cudaErrorIllegalAddress (700)"
    )
    assert one.communicator.abort_if_late().startswith(reason)
    assert aborted() == 1
    with pytest.raises(RuntimeError, match="the device of a pass program failed"):
        one.run()


@pytest.mark.parametrize("is_late", [False, True])
def test_threads_of_the_communicator_use_its_device_only(cuda: ModuleType, is_late: bool) -> None:
    """A thread begins with device 0. A context there would take memory from the rank whose device it is."""
    gc.collect()
    before = cuda.stub_num_events()
    one = s4(cuda, seconds=0.02 if is_late else 60.0, device=1)
    one.run()
    cuda.stub_reach_events(not is_late)
    time.sleep(0.05 * is_late)
    in_a_thread(one.communicator.abort_if_late)
    assert aborted() == is_late
    in_a_thread(one.free)
    assert cuda.stub_num_events() == before
    assert cuda.stub_contexts() == [1]


def in_a_thread(call: Callable[[], object]) -> None:
    """Calls a function in a thread that has chosen no device."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_rank_that_never_comes_to_the_communicator_is_an_error_in_time(cuda: ModuleType) -> None:
    nccl().stub_nccl_stuck(1)
    nccl().stub_nccl_fail(b"ncclCommInitRank", 0)
    message = "rank 1 of 2: ncclCommInitRank has not ended within 0.02 s: another rank never came"
    with pytest.raises(RuntimeError, match=message):
        cuda.Communicator(cuda.nccl_id(), 2, 1, 0, 0.04)
    nccl().stub_nccl_stuck(0)  # so that NCCL's thread ends


def aborted() -> int:
    """Returns how many communicators NCCL has aborted. Threads of their own do so."""
    time.sleep(0.05)
    return int(nccl().stub_nccl_aborts())


def test_an_error_of_cuda_names_the_record(cuda: ModuleType) -> None:
    one = s4(cuda)
    cuda.stub_reset(runs=False)
    cut = one.loaded.cut(one.tokens, one.rank, one.send, one.recv)
    cuda.stub_fail_after(0)
    message = r"record \d+ \(before or after all tasks: take\): pmoe._cuda: cudaEventRecord: cudaErrorInvalid"
    with pytest.raises(RuntimeError, match=message):
        one.loaded.run(cut, ADDRESSES, STREAMS, 1 << 50)


def test_each_call_that_fails_is_named_by_its_record(cuda: ModuleType) -> None:
    """Every event, wait and copy of a pass fails in turn."""
    one = s4(cuda, "backward")
    one.run()
    num_calls = len([call for call in cuda.stub_noted() if not call[0].startswith("nccl")])
    num_calls -= 1  # the event for the end of the pass, which belongs to no record
    records = []
    for calls in range(num_calls):
        cuda.stub_reset(runs=False)
        cut = one.loaded.cut(one.tokens, one.rank, one.send, one.recv)
        cuda.stub_fail_after(calls)
        with pytest.raises(
            RuntimeError, match=r"pass program: record \d+ \(.+\): pmoe._cuda: cuda\w+"
        ) as raised:
            one.loaded.run(cut, ADDRESSES, STREAMS, 1 << 50)
        records.append(int(str(raised.value).split()[3]))
    assert records == sorted(records) and len(set(records)) > 20


def test_an_error_of_copies_that_were_put_off_names_their_record(cuda: ModuleType) -> None:
    """The copies of GI and G are launched when the next call comes, so that record is named, too."""
    one = s4(cuda, "backward")
    cut = one.loaded.cut(1 << 45, one.rank, one.send, one.recv)  # more tokens than a launch can have
    message = r"record 2 \(GI3: place\): the copies of record 1: tokens \(\d+\) of 32 bytes each need"
    with pytest.raises(RuntimeError, match=message):
        one.loaded.run(cut, ADDRESSES, STREAMS, 1 << 50)
    one.calls()  # the next pass is whole


def test_an_address_that_kernels_cannot_read_is_refused_before_any_call(cuda: ModuleType) -> None:
    one = s4(cuda)
    cuda.stub_reset(runs=False)
    cut = one.loaded.cut(one.tokens, one.rank, one.send, one.recv)
    with pytest.raises(ValueError, match=r"address of base 7 \(30064771080\) must be a multiple of 16"):
        one.loaded.run(cut, {**ADDRESSES, Base.W1: (7 << 32) + 8}, STREAMS, 1 << 50)
    assert journal(cuda) == []


def load_change(**changes: Any) -> Callable[[ModuleType], object]:
    """Returns a function that loads a program of a layer that differs in some facts."""

    def change(module: ModuleType) -> object:
        ranks = changes.pop("ranks_of_communicator", None)
        stages = Stages(local=True, remote=ranks is not None)
        shape = replace(shape_of(ranks or 1, stages), **changes)
        schedule = rotating("backward", 2, stages, restore=KEEP)
        communicator = module.Communicator(module.nccl_id(), 3, 0, 0, 60) if ranks else None
        return load(compile_pass(schedule, shape, KEEP), schedule, communicator=communicator)

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (load_change(element_bytes=4), r"\(L1: hidden_gradient\) has rows whose numbers are not 16 bits"),
        (load_change(weight_bytes=2), r"\(L1: hidden_gradient\) has routing weights that are not float32"),
        (load_change(d_model=12), r"\(L1: hidden_gradient\) has rows that are not multiples of 16 bytes"),
        (load_change(ranks_of_communicator=2), "a program for 2 ranks needs a communicator of as many"),
        (
            lambda module: module.Communicator(module.nccl_id(), 2, 2, 0, 60),
            r"rank \(2\) must be below ranks \(2\)",
        ),
        (lambda module: module.Communicator(b"abc", 2, 0, 0, 60), r"id \(3 bytes\) must have 128 bytes"),
    ],
)
def test_what_has_no_kernel_is_refused_when_it_is_loaded(
    cuda: ModuleType, change: Callable[[ModuleType], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        change(cuda)


def test_counts_that_cannot_be_read_are_refused(cuda: ModuleType) -> None:
    one = s4(cuda)
    with pytest.raises(ValueError, match=r"send \(torch.int32 \(4, 2, 3\) on cpu\) must be contiguous int64"):
        one.loaded.cut(one.tokens, 0, one.send.int(), one.recv)
    with pytest.raises(ValueError, match=r"recv \(torch.int64 \(1, 2, 3\) on cpu\) must be .*\(4, 2, 3\)"):
        one.loaded.cut(one.tokens, 0, one.send, one.recv[:1])
    with pytest.raises(ValueError, match=r"rank \(1\) must be the communicator's \(0\)"):
        one.loaded.cut(one.tokens, 1, one.send, one.recv)


def test_without_nccl_in_the_process_the_message_says_so(kernels: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from tests.emulated import load_kernels\n"
        "try:\n"
        f"    load_kernels(Path({str(kernels)!r})).nccl_loaded()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert "NCCL's library (libpmoe_nccl.so) is not loaded" in fresh.run(program)


# ---- exchanges over heaps


def exchanged(exchanger: Any, stream: int = 1001, row_bytes: int = 16) -> None:
    """Issues an exchange of two ranks, of one row for each."""
    exchanger.exchange(stream, 1 << 40, 2 << 40, row_bytes, [1, 1], [1, 1])


def test_a_pass_on_another_stream_waits_for_the_end_of_the_last_one(cuda: ModuleType) -> None:
    """The event is recorded while the stream of the last pass exists. It may be destroyed afterwards."""
    report = torch.zeros(8, dtype=torch.int32)
    exchanger = heap_exchanger(cuda, 2, 0, report, seconds=1.0)
    for stream in (1001, 1001, 1002):
        exchanged(exchanger, stream)
    calls = [(call.what, call.stream) for call in journal(cuda)]
    on_first = [("launch", 1001), ("record", 1001)]
    assert calls == [*on_first, *on_first, ("wait", 1002), ("launch", 1002), ("record", 1002)]
    events = {call.numbers for call in journal(cuda) if call.what != "launch"}
    assert len(events) == 1


def test_passes_and_replays_over_a_heap_wait_for_each_other(cuda: ModuleType) -> None:
    """A graph itself waits for the last pass outside of graphs, and records an event for the next one."""
    report = torch.zeros(8, dtype=torch.int32)
    exchanger = heap_exchanger(cuda, 2, 0, report, seconds=1.0)
    for captures, stream in ((False, 1001), (True, 1002), (True, 1002), (False, 1001), (False, 1003)):
        cuda.stub_capture(captures)
        exchanged(exchanger, stream)
    noted = journal(cuda)
    in_graph = [("external wait", 1002), ("launch", 1002), ("external record", 1002)]
    assert [(call.what, call.stream) for call in noted] == [
        *[("launch", 1001), ("record", 1001)],
        *[*in_graph, *in_graph],
        *[("wait", 1001), ("launch", 1001), ("record", 1001)],
        *[("wait", 1003), ("wait", 1003), ("launch", 1003), ("record", 1003)],
    ]
    events = [call.numbers for call in noted if call.what != "launch"]
    outside, in_replay = events[0], events[2]
    assert outside != in_replay
    assert events == [
        *[outside, outside, in_replay, outside, in_replay],
        *[in_replay, outside, outside, in_replay, outside],
    ]
    assert cuda.stub_refused() == []


def test_a_graph_of_a_pass_needs_a_pass_before_and_may_outlive_the_heap(cuda: ModuleType) -> None:
    """A capture leaves out a wait for an event that was never recorded. Nodes do not own their events."""
    report = torch.zeros(8, dtype=torch.int32)
    before = cuda.stub_num_events()
    for captures, kept in ((False, 0), (True, 2)):
        exchanger = heap_exchanger(cuda, 2, 0, report, seconds=1.0)
        cuda.stub_capture(True)
        with pytest.raises(RuntimeError, match="run a pass over these heaps before a CUDA graph"):
            exchanged(exchanger)
        cuda.stub_capture(False)
        exchanged(exchanger)
        cuda.stub_capture(captures)
        exchanged(exchanger)
        cuda.stub_capture(False)
        del exchanger
        gc.collect()
        assert cuda.stub_num_events() - before == kept


def test_row_counts_on_the_device_are_refused_where_rows_travel_by_nccl(cuda: ModuleType) -> None:
    """NCCL's sends take numbers of rows from the host."""
    one = s4(cuda)
    cuda.stub_reset(runs=False)
    cut = one.loaded.cut(one.tokens, one.rank, one.send, one.recv)
    with pytest.raises(ValueError, match="row counts on the device need an exchange over heaps"):
        one.loaded.run(cut, ADDRESSES, STREAMS, 1 << 50, 1 << 51)
    assert journal(cuda) == []


def test_a_closed_heap_lends_no_memory(cuda: ModuleType) -> None:
    report = torch.zeros(8, dtype=torch.int32)
    exchanger = heap_exchanger(cuda, 2, 0, report, seconds=1.0, arena=1024)
    assert exchanger.take_arena(1024) != 0
    assert exchanger.take_arena(1024) == 0, "a pass has it"
    exchanger.give_back_arena()
    exchanger.close()
    assert exchanger.take_arena(1024) == 0


@pytest.mark.parametrize("row_bytes", [0, 6, -4])
def test_rows_that_the_kernel_cannot_copy_are_refused(cuda: ModuleType, row_bytes: int) -> None:
    report = torch.zeros(8, dtype=torch.int32)
    exchanger = heap_exchanger(cuda, 2, 0, report, seconds=1.0)
    with pytest.raises(ValueError, match=rf"row_bytes \({row_bytes}\) must be a positive multiple of 4"):
        exchanged(exchanger, row_bytes=row_bytes)
    exchanged(exchanger, row_bytes=12)
    assert len(cuda.stub_launched()) == 1


def test_a_failure_of_the_last_pass_is_raised_when_somebody_asks(
    cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass follows that could raise it."""
    report = torch.zeros(8, dtype=torch.int32)
    exchanger = heap_exchanger(cuda, 2, 0, report, seconds=1.0)
    heaps = {torch.device("cpu"): SimpleNamespace(exchanger=exchanger)}
    monkeypatch.setattr(program_heap, "_heaps", {"group": heaps})
    ranks: Any = SimpleNamespace(group="group")
    exchanged(exchanger)
    check_program_heaps(ranks)
    report[0] = 2  # Wait::kArrival
    report[1] = 1
    with pytest.raises(RuntimeError, match="in vain for rank 1: its rows have not arrived"):
        check_program_heaps(ranks)
    check_program_heaps(Ranks.single())


def test_exchanges_whose_memory_overlaps_do_not_share_a_launch(cuda: ModuleType) -> None:
    """Channels do not wait for each other between two exchanges of a launch."""
    one = s4(cuda, "forward", 2, 1, heaps=True)
    exchanges = [call for call in one.recorded if isinstance(call, Issue) and call.kernel is Kernel.EXCHANGE]
    assert num_pushes(one.recorded) == len(exchanges) - 1
    first, second = exchanges[:2]
    target, moved = first.operands[1].address, second.operands[1].address
    base = Base(moved >> 32)
    assert base != target >> 32
    launches = []
    for addresses in (ADDRESSES, ADDRESSES | {base: ADDRESSES[base] + target - moved}):
        cuda.stub_reset(runs=False)
        cut = one.loaded.cut(one.tokens, one.rank, one.send, one.recv)
        one.loaded.run(cut, addresses, STREAMS, 1 << 50)
        launches.append(len(cuda.stub_launched()))
    assert launches[1] - launches[0] == 1


# ---- results


def layer_call(
    pair: Restore, n: int, expert: str, num_tokens: int, seed: int = 3, bias: bool = False
) -> tuple[EngineCall, Tensor]:
    """Returns a call of a layer in bfloat16 by the engine on the CPU, and its row counts."""
    layer = build(
        pipeline=n, memory_reuse=pair, expert=expert, bias=bias, d_model=WIDTH, d_hidden=WIDTH,
        dtype=torch.bfloat16,
    )  # fmt: skip
    x = tokens(num_tokens, seed, torch.bfloat16, WIDTH).requires_grad_()
    call = engine_call(lambda: loss_of(layer, layer(x)).backward())
    return call, own_counts(call, layer.gate(x.detach()).expert, 4, 1)


def wide(call: EngineCall) -> EngineCall:
    """Returns the same call with tensors in float64."""
    inputs = call.inputs.like([None if each is None else each.double() for each in call.inputs.all])
    assert call.grad_TM is not None
    return EngineCall(call.plan, inputs, call.y_TM.double(), call.grad_TM.double(), call.gradients)


def check_results(device: DeviceCall, expected: ProgramCall, told: object) -> None:
    """Compares results in the emulator with those in float64, beside the error of PyTorch in bfloat16."""
    call = device.call
    got = [device.forward(), *device.backward()]
    right = [expected.forward(), *expected.backward()]
    of_torch = [call.y_TM, *call.gradients[:2], *call.gradients[3 : 3 + len(call.inputs.parameters)]]
    for number, (one, exact, plain) in enumerate(zip(got, right, of_torch, strict=True)):
        assert plain is not None
        error = relative_error(one.double(), exact)
        error_of_torch = relative_error(plain.double(), exact)
        assert error <= max(2 * error_of_torch, 2**-8), (told, number, error, error_of_torch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kernel", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
def test_launches_compute_a_layer_of_one_rank(kernels: Path, pair: Restore, kernel: str) -> None:
    for n, expert, num_tokens, bias in (
        (1, "swiglu", 11, True),
        (2, "ffn", 11, kernel == "sm_80"),
        (4, "swiglu", 5, False),
        (2, "swiglu", 0, True),
    ):
        call, counts = layer_call(pair, n, expert, num_tokens, bias=bias)

        def exchange(*_: object) -> None:
            raise AssertionError("one rank sends no rows")

        with stand_ins(kernels, runs=True) as module:
            device = DeviceCall(call, 0, counts, counts, exchange, kernels=kernel)
            expected = ProgramCall(wide(call), 0, counts, counts, exchange)
            check_results(device, expected, (str(pair), n, expert, num_tokens))
            assert module.stub_refused() == []
