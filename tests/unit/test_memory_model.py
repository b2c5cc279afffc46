"""The memory model: lifetimes of buffers by hand, and MPipeMoE's Eq. 2-6 from the paper's schedules.

Letters: B rows, M = d_model, H = d_hidden, n chunks. An element counts as one byte: every tensor has B x M or
    B x
H elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from pmoe.papers import mpipemoe_memory
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.memory import predict
from pmoe.planner.rows_per_pass import PassRows
from pmoe.schedule.buffer_sizes import BufferSizes, ChunkRows, HiddenColumns, slot_elements
from pmoe.schedule.restore import KEEP, STRATEGIES
from pmoe.schedule.ring_buffers import rotating_backward, rotating_forward
from pmoe.schedule.tasks import Kind, Schedule, Stages, Task, link, make_task
from tests.paper_memory import (
    Held,
    held,
    paper_backward,
    paper_forward,
    paper_sequential_backward,
)


def made(text: str) -> list[Task]:
    """Returns tasks from a text with one task in each line, as "KIND: buffers that it reads -> buffers that
    it writes".

    KIND is the value of the task's `Kind`, which is also its name.
    """
    tasks = []
    for line in text.strip().splitlines():
        name, _, work = line.partition(":")
        reads, _, writes = work.partition("->")
        tasks.append(make_task(Kind(name.strip()), -1, reads.split(), writes.split()))
    return tasks


BYTES = {"x": 2, "y": 3, "z": 5, "w": 7}
CHAIN = made("""
    S:   -> x
    L: x -> y
    C: y -> z
    R: z ->
""")

# ---- lifetimes by hand


def test_a_buffer_lives_from_its_first_writer_to_its_last_user() -> None:
    assert held(CHAIN, BYTES.__getitem__) == Held(
        peak_bytes=8,  # y and z, in C
        during=({"x": 2}, {"x": 2, "y": 3}, {"y": 3, "z": 5}, {"z": 5}),
        after=({"x": 2}, {"y": 3}, {"z": 5}, {}),
    )


def test_a_late_reader_keeps_a_buffer_and_a_second_writer_does_too() -> None:
    tasks = made("""
        S:   -> x
        L:   -> y
        C: y -> z
        R: x -> y
    """)
    found = held(tasks, BYTES.__getitem__)
    assert found.peak_bytes == 10
    assert found.after == ({"x": 2}, {"x": 2, "y": 3}, {"x": 2, "y": 3}, {})


def test_what_nobody_reads_lives_while_it_is_written() -> None:
    found = held(made("S: -> w"), BYTES.__getitem__)
    assert (found.peak_bytes, found.during, found.after) == (7, ({"w": 7},), ({},))


def test_what_was_there_before_lives_from_the_start_and_what_must_outlive_to_the_end() -> None:
    found = held(CHAIN, BYTES.__getitem__, before=["w"], after=["y"])
    assert found.peak_bytes == 8  # w dies at once, for nobody uses it; y is held to the end
    assert found.after == ({"x": 2}, {"y": 3}, {"y": 3, "z": 5}, {"y": 3})
    found = held(CHAIN, BYTES.__getitem__, before=["w"], after=["w"])
    assert [sum(memories.values()) for memories in found.after] == [9, 10, 12, 7]
    assert found.peak_bytes == 15


def test_the_peak_may_be_before_the_first_task() -> None:
    found = held(made("S: -> x"), BYTES.__getitem__, before=["z", "w"])
    assert found.peak_bytes == 12


def test_buffers_of_one_slot_are_one_memory_as_large_as_the_largest() -> None:
    found = held(CHAIN, BYTES.__getitem__, {"x": "slot", "z": "slot"})
    assert found.peak_bytes == 8
    assert found.during == (
        {"slot": 5},
        {"slot": 5, "y": 3},
        {"y": 3, "slot": 5},
        {"slot": 5},
    )


def test_a_slot_is_held_between_its_buffers_where_buffers_of_their_own_would_not_be() -> None:
    tasks = made("""
        S:   -> x
        L: x ->
        C:   -> w
        R: w ->
        O:   -> y
    """)
    assert held(tasks, BYTES.__getitem__).peak_bytes == 7
    assert held(tasks, BYTES.__getitem__, {"x": "slot", "y": "slot"}).peak_bytes == 10


def test_no_tasks_hold_what_was_there() -> None:
    assert held([], BYTES.__getitem__) == Held(peak_bytes=0, during=(), after=())
    assert held([], BYTES.__getitem__, before=["x"], after=["x"]).peak_bytes == 2


def test_what_never_was_written_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="L reads y"):
        held(made("S: -> x\nL: y -> y"), BYTES.__getitem__)
    with pytest.raises(ValueError, match="after: q"):
        held(CHAIN, BYTES.__getitem__, after=["q"])


# ---- MPipeMoE's formulas

SIZES = [
    (n * chunk, M, H, n)
    for n, chunk, (M, H) in itertools.product(
        (2, 3, 4, 5, 8, 16), (1, 6, 1024), ((1, 4), (768, 3072), (2048, 8192), (5, 3), (7, 7))
    )
]
"""(B, M, H, n), in which n divides B. Two of the sizes have H <= M."""


def elements(B: int, M: int, H: int, n: int) -> Callable[[str], int]:
    """Returns a function from the name of a buffer to its number of elements: those of one of n chunks."""
    return lambda buffer: B * (H if "T_M" in buffer else M) // n


def chunks(schedule: Schedule, *tensors: str) -> list[str]:
    """Returns the names of the buffers that belong to these tensors."""
    used = dict.fromkeys(buffer for task in schedule.tasks for buffer in (*task.reads, *task.writes))
    return [buffer for buffer in used if buffer.partition(".")[0] in tensors]


ACTIVATIONS = ("T_I", "T_DI", "T_M", "T_DO", "T_O")
GRADIENTS = ("dT_I", "dT_DI", "dT_M", "dT_DO", "dT_O")


def of_forward(B: int, M: int, H: int, n: int, *, reuse: bool) -> Held:
    """Returns what the paper's forward pass holds, if all activations stay: each in its ring slot if it has
    one.
    """
    schedule = paper_forward(n, reuse=reuse)
    kept = chunks(schedule, *ACTIVATIONS)
    return held(
        schedule.tasks, elements(B, M, H, n), schedule.slots, before=chunks(schedule, "T_I"), after=kept
    )


def of_backward(B: int, M: int, H: int, n: int, *, reuse: bool) -> Held:
    """Returns what the gradients of activations hold in the paper's backward pass, its temporary buffers.

    None of them is freed before the pass ends.
    """
    schedule = paper_backward(n, reuse=reuse)
    size = elements(B, M, H, n)
    return held(
        schedule.tasks,
        lambda buffer: size(buffer) * buffer.startswith("d"),
        schedule.slots,
        before=chunks(schedule, "dT_O", *ACTIVATIONS),
        after=chunks(schedule, *GRADIENTS),
    )


@pytest.mark.parametrize("B, M, H, n", [*SIZES, (64, 3, 12, 1), (1, 1, 1, 1)])
def test_a_pipeline_without_reuse_holds_equations_2_and_4(B: int, M: int, H: int, n: int) -> None:
    forward = of_forward(B, M, H, n, reuse=False)
    assert sum(forward.after[-1].values()) == mpipemoe_memory.activations(B, M, H)
    assert forward.peak_bytes == mpipemoe_memory.activations(B, M, H)
    assert of_backward(B, M, H, n, reuse=False).peak_bytes == mpipemoe_memory.activations(B, M, H)


@pytest.mark.parametrize("B, M, H, n", SIZES)
def test_running_in_sequence_holds_two_neighbouring_gradients(B: int, M: int, H: int, n: int) -> None:
    """Eq. 3 holds for H >= M, as in the paper. With fewer hidden columns, two tensors of B x M are the larger
    pair.
    """
    schedule = paper_sequential_backward()
    size = elements(B, M, H, 1)
    found = held(
        schedule.tasks,
        lambda buffer: size(buffer) * buffer.startswith("d"),
        before=["dT_O.0", "T_DI.0", "T_M.0"],
        after=["dT_I.0"],
    )
    assert found.peak_bytes == (mpipemoe_memory.buffers(B, M, H) if H >= M else 2 * B * M)
    assert all(len([b for b in memories if b.startswith("d")]) == 2 for memories in found.during)


@pytest.mark.parametrize("B, M, H, n", SIZES)
def test_reuse_saves_equation_5_of_the_activations_and_again_of_the_gradients(
    B: int, M: int, H: int, n: int
) -> None:
    saved = mpipemoe_memory.saved_each(B, M, H, n)
    pipelined = mpipemoe_memory.activations(B, M, H)
    assert pipelined - of_forward(B, M, H, n, reuse=True).peak_bytes == saved
    assert pipelined - of_backward(B, M, H, n, reuse=True).peak_bytes == saved


@pytest.mark.parametrize("B, M, H, n", SIZES)
def test_the_share_that_reuse_saves_is_equation_6(B: int, M: int, H: int, n: int) -> None:
    E = 64
    took, takes = (
        sum(each(B, M, H, n, reuse=reuse).peak_bytes for each in (of_forward, of_backward))
        for reuse in (False, True)
    )
    share = (took - takes) / (mpipemoe_memory.model_states(M, H, E) + took)
    assert share == pytest.approx(mpipemoe_memory.saving_ratio(B, M, H, E, n), rel=1e-15)


def whole(schedule: Schedule) -> dict[str, str]:
    """Returns the memory of each buffer: its ring slot, or, without one, the memory of its whole tensor."""
    used = chunks(schedule, *ACTIVATIONS, *GRADIENTS)
    return {buffer: schedule.slots.get(buffer, buffer.partition(".")[0]) for buffer in used}


@pytest.mark.parametrize("B, M, H, n", [sizes for sizes in SIZES if sizes[-1] > 2])
@pytest.mark.parametrize("reuse", [False, True], ids=["without reuse", "with reuse"])
def test_from_three_chunks_on_the_formulas_are_what_is_alive_at_once(
    B: int, M: int, H: int, n: int, reuse: bool
) -> None:
    """The formulas are the number of elements in use at one moment, not only of all memory that is taken.

    In the middle of the pipeline every tensor and every slot is in use, even if each is freed after its last
    reader.
    """
    saved = mpipemoe_memory.saved_each(B, M, H, n) * reuse
    size = elements(B, M, H, n)
    forward, backward = paper_forward(n, reuse=reuse), paper_backward(n, reuse=reuse)

    def alive(schedule: Schedule, tensors: tuple[str, ...], given: str, result: str) -> int:
        def bytes_of(buffer: str) -> int:
            chunk = size(buffer) * (buffer.partition(".")[0] in tensors)
            return chunk if buffer in schedule.slots else chunk * n

        caller = chunks(schedule, given)
        others = chunks(schedule, *ACTIVATIONS) if given == "dT_O" else []
        return held(
            schedule.tasks,
            bytes_of,
            whole(schedule),
            before=[*caller, *others],
            after=[*caller, *chunks(schedule, result)],
        ).peak_bytes

    assert alive(forward, ACTIVATIONS, "T_I", "T_O") == mpipemoe_memory.activations(B, M, H) - saved
    assert alive(backward, GRADIENTS, "dT_O", "dT_I") == mpipemoe_memory.activations(B, M, H) - saved


@pytest.mark.parametrize("n", range(1, 9))
def test_the_papers_schedules_never_read_a_slot_that_was_taken(n: int) -> None:
    for build, reuse in itertools.product((paper_forward, paper_backward), (False, True)):
        schedule = build(n, reuse=reuse)
        assert link(schedule.tasks, schedule.slots) == schedule.tasks
        assert len({task.name for task in schedule.tasks}) == len(schedule.tasks)


def test_the_paper_s_forward_is_figure_7a() -> None:
    names = " ".join(task.name for task in paper_forward(4, reuse=True).tasks)
    assert names == "S0 S1 C0 R0 S2 C1 R1 S3 C2 R2 C3 R3"


# ---- this layer's own schedules


def extents(B: int, n: int) -> ChunkRows:
    """Returns the rows of n equal chunks that are all sent, and arrive sorted by expert."""
    rows = (B // n,) * n
    return ChunkRows(send=rows, received=rows, local=(0,) * n, home=rows, regrouped=(False,) * n)


@pytest.mark.parametrize("B, M, H, n", SIZES)
def test_our_slots_are_the_papers_under_its_assumptions(B: int, M: int, H: int, n: int) -> None:
    """Forward has T_DI, T_DO and T_M, and backward their gradients, with S4: 2 (2 B M / n) + B H / n each."""
    pair = STRATEGIES["S4"]
    reduced = 2 * (2 * B * M // n) + B * H // n
    assert (
        reduced == mpipemoe_memory.activations(B, M, H) - mpipemoe_memory.saved_each(B, M, H, n) - 2 * B * M
    )

    def slots(schedule: Schedule) -> dict[str, int]:
        columns = HiddenColumns(hidden=H, active=0, scratch=H, scratch_rows=B)
        sizes = BufferSizes(
            direction=schedule.direction, extent=extents(B, n), d_model=M, columns=columns, restore=pair
        )
        return slot_elements(schedule, sizes)

    def of(tensors: tuple[str, ...], found: dict[str, int]) -> int:
        return sum(size for slot, size in found.items() if slot.partition("[")[0] in tensors)

    where = Stages(local=False, remote=True)
    forward = slots(rotating_forward(n, where, restore=pair))
    backward = slots(rotating_backward(n, where, restore=pair))
    assert of(("T_DI", "T_DO", "T_M"), forward) == reduced
    assert of(("dT_DI", "dT_DO", "dT_M"), backward) == reduced
    assert of(("T_DI", "T_M"), backward) == reduced - 2 * B * M // n  # restored, without T_DO
    assert of(("T_DI_sorted", "T_DO_sorted"), forward) == of(("dT_DO_sorted", "dT_DI_sorted"), backward) == 0


@pytest.mark.parametrize("B", [4096, 16384])
@pytest.mark.parametrize("M", [1024, 2048])
@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("travel", [False, True], ids=["rows stay", "rows travel"])
def test_keep_keep_saves_less_than_equation_2_and_its_peak_is_the_papers_with_what_it_leaves_out(
    B: int, M: int, factor: int, travel: bool
) -> None:
    """The case is n = 1, with the input and the incoming gradient, which the caller holds for `predict`.

    pmoe does not save T_DO between the passes. The paper lets the nonlinearity work in place. pmoe keeps T_M
    and so needs memory for the activated hidden rows in backward; and it arranges rows before and after they
    are sent. So the peak is not below Eq. 2 and 4 together, although less is held between the passes.
    """
    H, size = factor * M, 4
    shape = sizes_from_options(M, H, 8, num_ranks=8 if travel else 1)
    there, none = (B,), (0,)
    extent = ChunkRows(
        send=there if travel else none,
        received=there if travel else none,
        local=none if travel else there,
        home=there,
        regrouped=(False,),
    )
    rows = PassRows(extent=extent, received=B * travel, local=B * (not travel), sent=B * travel, exact=True)
    found = predict(shape, shape.call(B), rows, rows, KEEP)
    between = found.saved / size + B * M  # T_I
    assert between < mpipemoe_memory.activations(B, M, H)
    assert between == pytest.approx(mpipemoe_memory.activations(B, M, H) - B * M, rel=0.02)

    papers = 2 * mpipemoe_memory.activations(B, M, H)
    expected = papers - B * M + B * H + (2 * B * M if travel else 0)
    assert found.promised / size + 2 * B * M == pytest.approx(expected, rel=0.02)
