"""Pass programs: records, the numbers of a call, the order and the addresses of calls, and results.

The interpreter in C++ runs over a backend that writes its calls down (`tests.programs`).
"""

from __future__ import annotations

import itertools
import random
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.recorded_program import Issue, Memory, RecordedProgram, Signal, Wait
from pmoe import warn
from pmoe.kernels import extension
from pmoe.program import on_cuda
from pmoe.program.compiler import HOST_IS_READ, compile_pass
from pmoe.program.layer_shape import LayerShape
from pmoe.program.on_cuda import CudaBackend
from pmoe.program.records import (
    LANES,
    MAX_OPERANDS,
    VERSION,
    Base,
    CallNumber,
    ChunkNumber,
    Kernel,
    chunk_number,
)
from pmoe.schedule.buffer_sizes import (
    ALIGNMENT,
    SORTED_RESULTS,
    BufferSizes,
    ChunkRows,
    HiddenColumns,
    arena_elements,
    slot_elements,
)
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES, Restore
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.tasks import Lane, Schedule, Stages, Task, sequential
from tests import programs
from tests.kit import TOKENS, build, loss_of, one_thread, tokens
from tests.programs import (
    Calls,
    ProgramCall,
    check_against_engine,
    engine_call,
    in_some_order,
    library,
    order_problem,
    own_counts,
)
from tests.reference import relative_error

__all__ = ["one_thread"]

LAYOUT = (Path(__file__).resolve().parents[2] / "cuda" / "program" / "layout.h").read_text(encoding="utf-8")
EXPERTS, TOP_K = 3, 2
ON_CPU = HiddenColumns(hidden=10, active=0, scratch=5, scratch_rows=4)
"""A gated layer as on the CPU: the activated hidden lies in T_M where T_M may be overwritten."""
ON_GPU = HiddenColumns(hidden=10, active=5, scratch=5, scratch_rows=4, staged=10)


@dataclass(frozen=True)
class Counted:
    """A call of one rank: its tokens, and its row counts by chunk, rank and expert.

    stages: whether rows stay, and whether rows are sent.
    """

    tokens: int
    rank: int
    ranks: int
    send: list[list[list[int]]]
    recv: list[list[list[int]]]
    stages: Stages

    @property
    def flat(self) -> tuple[list[int], list[int]]:
        send, recv = (
            [count for chunk in counts for rank in chunk for count in rank]
            for counts in (self.send, self.recv)
        )
        return send, recv

    def travels(self, rank: int) -> bool:
        return rank != self.rank or not self.stages.local

    def rows(self, counts: list[list[list[int]]], i: int) -> list[int]:
        """Returns the rows of chunk i that are sent to each rank, or that come from each."""
        return [sum(line) if self.travels(rank) else 0 for rank, line in enumerate(counts[i])]

    def local(self, i: int) -> int:
        return 0 if self.travels(self.rank) else sum(self.send[i][self.rank])

    @property
    def chunk_rows(self) -> ChunkRows:
        chunks = range(len(self.send))
        sent = [sum(self.rows(self.send, i)) for i in chunks]
        local = [self.local(i) for i in chunks]
        return ChunkRows(
            send=sent,
            received=[sum(self.rows(self.recv, i)) for i in chunks],
            local=local,
            home=[one + other for one, other in zip(sent, local, strict=True)],
            regrouped=[sum(rows > 0 for rows in self.rows(self.recv, i)) > 1 for i in chunks],
        )


def counted(ranks: int, n: int, seed: int, *, local: bool = True) -> Counted:
    """Returns a call with random counts. Some experts get no rows, and some ranks have no tokens."""
    draw = random.Random(seed)
    no_tokens = {rank for rank in range(ranks) if draw.random() < 0.25}
    rank = draw.randrange(ranks)

    def rows(source: int, i: int) -> list[int]:
        return [0 if source in no_tokens else draw.choice((0, 0, 1, 5)) for _ in range(EXPERTS)]

    send = [[rows(rank, i) for _ in range(ranks)] for i in range(n)]
    recv = [[rows(source, i) for source in range(ranks)] for i in range(n)]
    for sent, received in zip(send, recv, strict=True):
        received[rank] = sent[rank]
    num_tokens = sum(count for chunk in send for line in chunk for count in line) // TOP_K
    stages = Stages(local=local, remote=ranks > 1 or not local)
    return Counted(num_tokens, rank, ranks, send, recv, stages)


def shape_of(call: Counted, columns: HiddenColumns = ON_CPU, *, bias: bool = True) -> LayerShape:
    return LayerShape(
        ranks=call.ranks,
        local_experts=EXPERTS,
        top_k=TOP_K,
        d_model=6,
        columns=columns,
        bias=bias,
        keeps_own=call.stages.local,
        sends=call.stages.remote,
        weighs_active=columns is ON_GPU and not bias,
        places=columns is ON_GPU,
        element_bytes=8,
        weight_bytes=4,
        sum_bytes=8,
    )


ADDRESSES = {base: base << 32 for base in Base} | {Base.NOWHERE: 0}
"""An address for each memory, far from all others. The interpreter itself reads and writes none of it."""


@dataclass
class Pass:
    """A pass that was compiled, cut and run over the recording backend."""

    call: Counted
    schedule: Schedule
    restore: Restore | None
    columns: HiddenColumns = ON_CPU
    bias: bool = True

    def __post_init__(self) -> None:
        shape = shape_of(self.call, self.columns, bias=self.bias)
        self.program = compile_pass(self.schedule, shape, self.restore)
        self.recorded = RecordedProgram(library(), self.program.words())
        self.arena_bytes = self.recorded.cut(self.call.tokens, self.call.rank, *self.call.flat)
        self.numbers = self.recorded.numbers()
        self.calls = self.recorded.run(ADDRESSES)

    @property
    def issues(self) -> list[Issue]:
        return [call for call in self.calls if isinstance(call, Issue)]

    @property
    def sizes(self) -> BufferSizes:
        return BufferSizes(
            direction=self.schedule.direction,
            extent=self.call.chunk_rows,
            d_model=6,
            columns=self.columns,
            restore=self.restore,
            places=self.columns is ON_GPU,
        )


def passes(ranks: int, n: int, *, local: bool = True, columns: HiddenColumns = ON_CPU) -> list[Pass]:
    """Returns both passes of all nine restore pairs, and forward without a backward pass."""
    found = []
    for seed, restore in enumerate((*ALL_PAIRS, None)):
        call = counted(ranks, n, 100 * ranks + 10 * n + seed, local=local)
        for direction in ("forward", "backward")[: 2 if restore else 1]:
            schedule = rotating(direction, n, call.stages, restore=restore)
            found.append(Pass(call, schedule, restore, columns, bias=seed % 2 == 0))
    return found


def s4(n: int = 4, ranks: int = 2, direction: str = "forward") -> Pass:
    call = counted(ranks, n, 5)
    restore = STRATEGIES["S4"]
    return Pass(call, rotating(direction, n, call.stages, restore=restore), restore)


# ---- words ----------------------------------------------------------------------------------------


def members(enum: str) -> list[str]:
    """Returns the names in an enum of layout.h, without their k, as Python writes them."""
    (body,) = re.findall(rf"enum {enum}[^{{]*{{(.*?)}};", LAYOUT, re.DOTALL)
    names = re.findall(r"^\s*k(\w+)", body, re.MULTILINE)
    return [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper() for name in names]


def test_both_languages_have_the_same_numbers_lanes_and_limits() -> None:
    assert members("Whole") == [*CallNumber.__members__, "NUM_WHOLE"]
    assert members("OfChunk") == [*ChunkNumber.__members__, "NUM_OF_CHUNK"]
    assert members("Kernel") == [kernel.name for kernel in list(Kernel)[:3]]
    assert members("Base") == [base.name for base in list(Base)[:1]]
    for name, value in (("Version", VERSION), ("MaxOperands", MAX_OPERANDS), ("NumLanes", len(LANES))):
        assert re.search(rf"k{name} = {value};", LAYOUT), name
    assert f"kAlignment = {ALIGNMENT};" in LAYOUT


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda words: words[:5], "too few words"),
        (lambda words: [VERSION + 1, *words[1:]], "another version of records"),
        (lambda words: [*words, 0], "another number of words"),
        (lambda words: [*words[:-1], 10**6], "an awaited event"),
        (lambda words: [*words[:4], 2, *words[5:]], "a flag that is not 0 or 1"),
        (lambda words: [*words[:7], -1, *words[8:]], "a length"),
        (lambda words: [*words[:6], 2**62, *words[7:]], "a length"),
    ],
)
def test_words_that_are_no_program_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"not a program: {message}"):
        RecordedProgram(library(), change(s4().program.words()))


# ---- the numbers of a call ------------------------------------------------------------------------


def expected_numbers(call: Counted) -> list[int]:
    """Returns the numbers of a call before those of ring slots, from a loop over its rows in their order."""
    rows = call.chunk_rows
    n = len(call.send)
    by_source = [sum(call.rows(call.recv, i)[rank] for i in range(n)) for rank in range(call.ranks)]
    is_sorted = int(sum(count > 0 for count in by_source) > 1)
    totals = [sum(rows.home), sum(rows.send), sum(rows.received)]
    numbers = [0, 1, *totals, is_sorted, 1 - is_sorted]
    for i in range(n):
        first, end = i * call.tokens // n, (i + 1) * call.tokens // n
        begin, local_begin = sum(rows.home[:i]), sum(rows.local[:i])
        numbers += [first, end - first, begin, rows.send[i], rows.local[i], rows.home[i]]
        numbers += [begin + rows.send[i], local_begin, sum(rows.send) + local_begin, sum(rows.received[:i])]
        received, regrouped = rows.received[i], rows.regrouped[i]
        numbers += [received, received * regrouped, received * (not regrouped), regrouped, not regrouped]
        numbers.append(sum(rows.send[:i]))
    return numbers


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_cut_gives_the_rows_of_each_chunk(ranks: int) -> None:
    for n in (1, 2, 4, 8):
        for seed, local in enumerate((True, False, True)):
            call = counted(ranks, n, 31 * n + seed, local=local)
            one = Pass(call, rotating("forward", n, call.stages, restore=KEEP), KEEP)
            assert one.numbers[: chunk_number(ChunkNumber(0), n)] == expected_numbers(call), (n, local)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ring_slots_lie_where_the_engine_puts_them(ranks: int) -> None:
    for n in (1, 4):
        for one in passes(ranks, n):
            spans, total = arena_elements(slot_elements(one.schedule, one.sizes), 8)
            assert one.program.slots == tuple(spans)
            begins = [8 * sum(list(spans.values())[:slot]) for slot in range(len(spans))]
            assert one.numbers[chunk_number(ChunkNumber(0), n) :] == begins
            assert one.arena_bytes == 8 * total


def test_addresses_of_many_rows_do_not_overflow() -> None:
    """Almost 2^28 rows in a chunk, of 6 numbers of 8 bytes, take more than 2^33 bytes."""
    rows = (1 << 28) - 1
    many = [[[rows, 0, 0]] * 2] * 4
    call = replace(counted(2, 4, 5), rank=1, send=many, recv=many, tokens=1 << 30)
    one = Pass(call, rotating("forward", 4, call.stages, restore=KEEP), KEEP)
    assert slot_problem(one) is None
    assert one.arena_bytes > 1 << 34
    assert one.numbers[chunk_number(ChunkNumber.LOCAL_WEIGHT, 3)] == 7 * rows


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rank": 2}, r"rank \(2\) must be below 2"),
        ({"tokens": -1}, r"tokens \(-1\) must not be negative"),
        ({"send": [[[-3, 0, 0]] * 2] * 4}, r"chunk 0 \(-3\) must be from 0 to 2147483647"),
        ({"recv": [[[1 << 30, 1 << 30, 0]] * 2] * 4}, r"chunk 0 \(2147483648\) must be from 0"),
        ({"recv": [[[1 << 29, 0, 0]] * 2] * 4}, r"rows of all chunks \(2147483648\) must be at most 214748"),
    ],
)
def test_counts_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    one = s4()
    call = replace(one.call, **change)
    with pytest.raises(ValueError, match=message):
        one.recorded.cut(call.tokens, call.rank, *call.flat)


# ---- the order of calls ---------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_calls_keep_the_order_of_the_schedule(ranks: int, n: int) -> None:
    for one in passes(ranks, n, local=n != 2):
        problem = order_problem(one.calls, one.program, one.schedule)
        assert problem is None, (str(one.restore), one.schedule.direction, problem)


def test_no_event_stands_for_two_tasks() -> None:
    """A wait for a shared event could be met by the wrong task, and collectives then start out of order."""
    for one in (s4(), s4(direction="backward")):
        signals = [call.event for call in one.calls if isinstance(call, Signal)]
        assert len(set(signals)) == len(signals)
        for at, call in enumerate(one.calls):
            before = [each.event for each in one.calls[:at] if isinstance(each, Signal)]
            assert not isinstance(call, Wait) or call.event in before


def test_a_sequential_schedule_stays_sequential() -> None:
    call = counted(2, 4, 5)
    restore = STRATEGIES["S1"]
    one = Pass(call, sequential(rotating("backward", 4, call.stages, restore=restore)), restore)
    assert order_problem(one.calls, one.program, one.schedule) is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_wait_is_needed_and_a_missing_one_is_found(direction: str) -> None:
    """Each wait that is left out leaves two calls without the order that the schedule asks for."""
    full = counted(3, 4, 5)
    full = replace(full, send=[[[1] * 3] * 3] * 4, recv=[[[1] * 3] * 3] * 4, tokens=54)
    restore = STRATEGIES["S1"]
    one = Pass(full, rotating(direction, 4, full.stages, restore=restore), restore)
    waits = [at for at, call in enumerate(one.calls) if isinstance(call, Wait)]
    found = [order_problem(one.calls[:at] + one.calls[at + 1 :], one.program, one.schedule) for at in waits]
    # Copies to the host also wait for copies of earlier passes, of which this pass knows nothing.
    of_earlier_passes = [Wait(Lane.COPY_OUT, HOST_IS_READ)] if direction == "forward" else []
    assert len(waits) > 20
    assert [
        one.calls[at] for at, problem in zip(waits, found, strict=True) if problem is None
    ] == of_earlier_passes


def test_copies_to_the_host_wait_for_copies_of_earlier_passes() -> None:
    call = counted(2, 2, 5)
    restore = STRATEGIES["S1"]
    one = Pass(call, rotating("forward", 2, call.stages, restore=restore), restore)
    of_copies = [each for each in one.calls if each.lane in (Lane.COPY_IN, Lane.COPY_OUT)]
    assert of_copies[:2] == [Signal(Lane.COPY_IN, HOST_IS_READ), Wait(Lane.COPY_OUT, HOST_IS_READ)]


def test_all_ranks_exchange_the_same_number_of_times_whatever_their_rows() -> None:
    """Rows that are sorted on one rank and not on another, or no rows at all, change no collective."""
    for restore in (STRATEGIES["S1"], STRATEGIES["S4"], KEEP):
        for direction in ("forward", "backward"):
            stages = Stages(local=True, remote=True)
            schedule = rotating(direction, 4, stages, restore=restore)
            exchanges = set()
            for seed in range(4):
                one = Pass(counted(4, 4, seed), schedule, restore)
                tasks = [one.program.records[issue.record].task for issue in one.issues if issue.send]
                exchanges.add(tuple(tasks))
            nothing = Counted(0, 0, 4, [[[0] * 3] * 4] * 4, [[[0] * 3] * 4] * 4, stages)
            one = Pass(nothing, schedule, restore)
            exchanges.add(tuple(one.program.records[issue.record].task for issue in one.issues if issue.send))
            communicate = [task for task in schedule.tasks if task.lane is Lane.COMMUNICATE]
            assert exchanges == {tuple(schedule.tasks.index(task) for task in communicate)}


# ---- addresses ------------------------------------------------------------------------------------


def bytes_of(memory: Memory, item_bytes: int) -> range:
    if not memory.rows * memory.columns:
        return range(memory.address, memory.address)
    return range(
        memory.address,
        memory.address + (memory.rows - 1) * memory.row_bytes + memory.columns * item_bytes,
    )


def names_of(schedule: Schedule, task: Task) -> set[str]:
    """Returns the buffers that a task reads and writes, with those whose copies it makes for later tasks.

    A task GI copies for the tasks G and LM that may join it, and LM for the task L of its chunk.
    """
    joint = schedule.joint_copies.get(task.name, ()) if schedule.direction == "backward" else ()
    names = {name for each in (task, *joint) for name in (*each.reads, *each.writes)}
    return names | {name.replace("T_DI_L.", "dT_DO_L.") for name in names if name.startswith("T_DI_L.")}


def slot_problem(one: Pass) -> str | None:
    """Returns an operand outside the ring slots that its task names; None if there is none."""
    spans, _ = arena_elements(slot_elements(one.schedule, one.sizes), 8)
    begin = ADDRESSES[Base.ARENA]
    of_slot = {}
    for slot, elements in spans.items():
        of_slot[slot] = range(begin, begin + 8 * elements)
        begin += 8 * elements
    slots = one.schedule.slots
    for issue in one.issues:
        record = one.program.records[issue.record]
        for operand, memory in zip(record.operands, issue.operands, strict=True):
            if operand.base is not Base.ARENA:
                continue
            task = one.schedule.tasks[record.task]
            # "home_L.i", the results of rows that stay, is a part of the memory of "home.i".
            named = {name.replace("home_L.", "home.") for name in names_of(one.schedule, task)}
            if operand.name not in named:
                return f"{task.name} does not name {operand.name}"
            inside = bytes_of(memory, 8)
            slot = of_slot[slots[operand.name]]
            if len(inside) and not (slot.start <= inside.start and inside.stop <= slot.stop):
                return f"{task.name}: {operand.name} at {inside} lies outside {slot}"
    return None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("columns", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_operands_lie_in_the_ring_slots_that_their_task_names(ranks: int, columns: HiddenColumns) -> None:
    for n in (1, 2, 4, 8):
        for one in passes(ranks, n, local=n != 2, columns=columns):
            problem = slot_problem(one)
            assert problem is None, (str(one.restore), one.schedule.direction, n, problem)


def test_an_operand_outside_its_slot_is_found() -> None:
    one = s4(ranks=3)
    at = next(
        at for at, call in enumerate(one.calls) if isinstance(call, Issue) and call.kernel is Kernel.HIDDEN
    )
    issue = one.calls[at]
    assert isinstance(issue, Issue)
    operands = [replace(memory, address=memory.address + 8 * 10**6) for memory in issue.operands]
    one.calls[at] = replace(issue, operands=tuple(operands))
    assert "lies outside" in str(slot_problem(one))


def test_other_operands_lie_within_their_memory() -> None:
    """No operand reaches beyond the rows of all chunks, and saved rows of two chunks do not overlap."""
    for ranks in (1, 2, 4):
        for one in passes(ranks, 4):
            rows = one.call.chunk_rows
            received, local, sent = (sum(each) for each in (rows.received, rows.local, rows.send))
            num_bytes = {
                **dict.fromkeys((Base.T_I, Base.T_O, Base.DT_O, Base.DT_I), one.call.tokens * 6 * 8),
                Base.POSITION: one.call.tokens * TOP_K * 4,
                **dict.fromkeys((Base.REGROUP, Base.REGROUP_WEIGHTS), received * 4),
                Base.PAIR_BY_NUMBER: (sent + local) * 4,
                Base.SAVED_T_DI: received * 6 * 8,
                Base.SAVED_T_DI_L: local * 6 * 8,
                Base.SAVED_T_M: received * 10 * 8,
                Base.SAVED_T_M_L: local * 10 * 8,
            }
            for issue in one.issues:
                record = one.program.records[issue.record]
                for operand, memory in zip(record.operands, issue.operands, strict=True):
                    if operand.base in num_bytes:
                        item = 4 if operand.base.name in ("POSITION", "PAIR_BY_NUMBER") else 8
                        item = 4 if operand.base.name.startswith("REGROUP") else item
                        inside = bytes_of(memory, item)
                        begin = ADDRESSES[operand.base]
                        end = begin + num_bytes[operand.base]
                        assert begin <= inside.start and inside.stop <= end, (operand, memory)


def test_forward_writes_the_hidden_activation_only_if_something_reads_it() -> None:
    """T_M has no address if backward recomputes it; on a CPU the activated hidden is a part of it."""
    for columns in (ON_GPU, ON_CPU):
        for one in passes(2, 2, columns=columns):
            for issue in one.issues:
                if issue.kernel is Kernel.HIDDEN:
                    is_read = one.restore is not None and one.restore.hidden != "recompute"
                    assert (issue.operands[3].address > 0) == (is_read or columns is ON_CPU), str(one.restore)


def test_copies_of_several_tasks_follow_one_another() -> None:
    """S4 on two ranks: a launch sends tokens and gradients of a chunk, and copies those that stay."""
    one = s4(direction="backward")
    kernels = [issue.kernel for issue in one.issues]
    joined = sum(kernel is before is Kernel.PLACE for before, kernel in itertools.pairwise(kernels))
    assert kernels.count(Kernel.PLACE) - joined < kernels.count(Kernel.PLACE) / 2


def test_results_are_stored_in_the_order_of_arrival_on_a_device() -> None:
    """Three ranks, whose rows must be sorted: nothing copies results, and they have no sorted form."""
    for columns in (ON_GPU, ON_CPU):
        for one in passes(3, 2, columns=columns):
            is_sorted = any(one.call.chunk_rows.regrouped)
            of_rows = [
                issue for issue in one.issues if issue.kernel in (Kernel.OUTPUT, Kernel.INPUT_GRADIENT)
            ]
            placed = [issue for issue in of_rows if issue.operands[-3].address]
            copied = [
                issue for issue in one.issues if issue.kernel is Kernel.PUT and issue.operands[0].columns > 1
            ]
            assert (len(placed) > 0) == (is_sorted and columns is ON_GPU)
            assert (len(copied) > 0) == (is_sorted and columns is ON_CPU)
            sorted_results = [turn for turn in one.schedule.turns if turn in SORTED_RESULTS]
            num_bytes = {name: sum(one.sizes.of(name)[0]) for name in sorted_results}
            assert (sum(num_bytes.values()) > 0) == (is_sorted and columns is ON_CPU)


def test_a_bias_that_experts_do_not_have_has_no_address() -> None:
    call = counted(1, 1, 7)
    one = Pass(call, rotating("forward", 1, call.stages, restore=KEEP), KEEP, bias=False)
    (hidden,) = [issue for issue in one.issues if issue.kernel is Kernel.HIDDEN]
    assert hidden.operands[2].address == 0 and hidden.operands[1].address == ADDRESSES[Base.W1]


# ---- errors and refusals --------------------------------------------------------------------------


def test_an_error_of_the_backend_ends_the_pass_and_names_the_record() -> None:
    one = s4()
    record = next(i for i, each in enumerate(one.program.records) if each.kernel is Kernel.EXCHANGE)
    with pytest.raises(ValueError, match=f"error 7 at record {record}"):
        one.recorded.run(ADDRESSES, fails_at=record)


@pytest.mark.parametrize(
    "stages, task",
    [
        (Stages(local=True, remote=True, shared=True), r"X \(shared\)"),
        (Stages(local=False, remote=True, sharded=True), r"AG1 \(all_gather\)"),
        (Stages(local=True, remote=True, copies="keep"), r"KW1 \(copy_wgrad\)"),
        (Stages(local=True, remote=True, gradients=True), r"GAR \(gradients\)"),
    ],
)
def test_the_compiler_names_a_task_that_it_does_not_take(stages: Stages, task: str) -> None:
    shape = shape_of(counted(2, 2, 1))
    schedule = rotating("backward", 2, stages, restore=KEEP)
    with pytest.raises(ValueError, match=f"a pass program does not take task ({task})"):
        compile_pass(schedule, shape, KEEP)


@pytest.mark.parametrize(
    "changes, dtype, reason",
    [
        ({}, torch.bfloat16, None),
        ({"bias": True}, torch.bfloat16, None),
        ({"weight_bytes": 2}, torch.bfloat16, "routing weights have 2 bytes, and kernels read float32"),
        ({}, torch.float32, "dtype torch.float32: the kernels take bfloat16 and float16"),
        (
            {"d_model": 12},
            torch.float16,
            r"d_model (12) must be a multiple of 8 and at least 8: kernels load",
        ),
    ],
)
def test_layers_that_a_device_cannot_run_as_programs_are_refused_by_reason(
    changes: dict[str, Any], dtype: torch.dtype, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = HiddenColumns(hidden=32, active=16, scratch=16, scratch_rows=4)
    facts = {"d_model": 16, **changes}
    shape = replace(shape_of(counted(2, 2, 1), columns, bias=False), **facts)
    monkeypatch.setattr(extension, "path", lambda device: ("sm_80", None))
    rows = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=dtype)
    found = CudaBackend().refusal(shape, rows)  # type: ignore[arg-type]
    assert found == reason or (reason is not None and found is not None and found.startswith(reason))


class Looked:
    """A communicator that answers whether it was aborted."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def abort_if_late(self) -> str:
        return self.answers.pop(0)


def test_the_thread_that_looks_at_passes_warns_once_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cuda, "LOOK_SECONDS", 0)
    warn.GIVEN.clear()
    communicator = Looked("", "", "rank 0 of 2: a pass program has not ended within 600 s")
    with pytest.warns(UserWarning, match="rank 0 of 2: a pass program has not ended within 600 s"):
        on_cuda._watch(weakref.ref(communicator))
    assert communicator.answers == []
    gone = weakref.ref(Looked())
    on_cuda._watch(gone)  # ends without asking


# ---- frozen parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [("w1", "w2", "b1", "b2"), ("w1",), ("b2", "w2"), ()])
def test_gradients_of_frozen_parameters_are_not_computed(trained: tuple[str, ...]) -> None:
    call = counted(2, 2, 1)
    shape = replace(shape_of(call), trained=frozenset(trained))
    for restore in (KEEP, STRATEGIES["S4"]):
        schedule = rotating("backward", 2, call.stages, restore=restore)
        program = compile_pass(schedule, shape, restore)
        bases = {operand.base.name for record in program.records for operand in record.operands}
        of_gradients = {name for name in ("DW1", "DW2", "DB1", "DB2") if name in bases}
        assert of_gradients == {f"D{name.upper()}" for name in trained}
        recorded = RecordedProgram(library(), program.words())
        recorded.cut(call.tokens, call.rank, *call.flat)
        assert order_problem(recorded.run(ADDRESSES), program, schedule) is None


def test_a_schedule_for_frozen_experts_has_a_program_without_their_gradients() -> None:
    call = counted(2, 4, 1)
    restore = STRATEGIES["S4"]
    schedule = rotating("backward", 4, call.stages, restore=restore).frozen
    one = Pass(call, schedule, restore)
    assert order_problem(one.calls, one.program, schedule) is None and slot_problem(one) is None
    kernels = {record.kernel for record in one.program.records}
    assert not kernels & {Kernel.WEIGHT_GRADIENT, Kernel.BIAS_GRADIENT}


# ---- results --------------------------------------------------------------------------------------


def program_call(
    restore: Restore, n: int, expert: str, seed: int = 0, num_tokens: int = TOKENS, bias: bool = True
) -> ProgramCall:
    layer = build(pipeline=n, memory_reuse=restore, expert=expert, bias=bias)
    x = tokens(num_tokens).requires_grad_()
    call = engine_call(lambda: loss_of(layer, layer(x)).backward())
    send = own_counts(call, layer.gate(x.detach()).expert, 4, 1)

    def exchange(*_: object) -> None:
        raise AssertionError("one rank sends no rows")

    return ProgramCall(call, 0, send, send, exchange, seed=seed)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("restore", ALL_PAIRS, ids=str)
def test_calls_compute_what_the_engine_does_on_one_rank(restore: Restore, n: int, expert: str) -> None:
    check_against_engine(program_call(restore, n, expert, seed=n), (str(restore), n, expert))


def test_calls_as_on_a_gpu_compute_the_same_gradients() -> None:
    """The activated hidden has a buffer of its own, and is multiplied by the routing weights."""
    for restore in ALL_PAIRS:
        program = program_call(restore, 2, "swiglu", bias=False)
        columns = program.shape.columns._replace(active=program.shape.columns.scratch)
        program.shape = replace(program.shape, columns=columns, weighs_active=True)
        assert torch.equal(program.forward(), program.call.y_TM)
        got = program.backward()
        kernels = {call.kernel for call in program.calls if isinstance(call, Issue)}
        assert Kernel.SCALE not in kernels
        expected = [gradient for gradient in program.call.gradients if gradient is not None]
        for gradient, wanted in zip(got, expected, strict=True):
            assert relative_error(gradient, wanted) <= 1e-12, str(restore)


def test_a_rank_without_tokens_gets_zeros_as_gradients_of_parameters() -> None:
    for restore in ALL_PAIRS:
        check_against_engine(program_call(restore, 2, "ffn", num_tokens=0), str(restore))


def test_a_missing_wait_spoils_results_in_some_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1 on one rank: if T_M is copied to the host before it is computed, NaN reach the gradients."""

    def without_wait(calls: Calls, generator: random.Random) -> Iterator[Issue]:
        left = [call for call in calls if not (isinstance(call, Wait) and call.lane is Lane.COPY_OUT)]
        return in_some_order(left, generator)

    monkeypatch.setattr(programs, "in_some_order", without_wait)
    spoilt = 0
    for seed in range(4):
        try:
            check_against_engine(program_call(STRATEGIES["S1"], 2, "ffn", seed=seed), seed)
        except AssertionError:
            spoilt += 1
    assert spoilt > 0
