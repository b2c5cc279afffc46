"""Memory reuse as a schedule: how finely chunks are cut, and which ring slot a buffer has.

Whole schedules are compared with tables that are written out here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pmoe import Restore
from pmoe.comm.counts import HEADER, Slots, cuts, num_bins, slot_rows, with_two
from pmoe.schedule.buffer_sizes import (
    MOST_LAYOUTS,
    BufferSizes,
    ChunkRows,
    HiddenColumns,
    slot_elements,
    slot_layout,
)
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES
from pmoe.schedule.ring_buffers import rotating_backward, rotating_forward
from pmoe.schedule.tasks import Schedule, Stages, link


def test_the_depth_that_a_rank_asks_for_is_the_least_that_its_slots_allow() -> None:
    generator = torch.Generator().manual_seed(0)
    for slack, top_k, n, world in itertools.product((1, 1.1, 1.25, 2.0), (1, 3), (1, 2, 3), (1, 4)):
        bins = n * 16
        counts = torch.randint(0, 40, (bins, world, 2), generator=generator)
        counts *= torch.rand(bins, world, 1, generator=generator) < 0.4
        max_tokens = int(counts.sum((0, 2)).max()) // top_k
        for own in (None, 0):
            by_bin = counts.sum(2)
            received = by_bin.sum(1) - (0 if own is None else by_bin[:, own])
            depth, m, limit = 0, n, slot_rows(slack, top_k, max_tokens, n)
            while m < bins and received.view(m, -1).sum(1).max() > limit:
                depth, m = depth + 1, m * 2
            slots = Slots(slack=slack, top_k=top_k, degrees=(n,), own_rank=own)
            (found,) = slots.depths(counts, torch.tensor(max_tokens))
            assert int(found) == depth, (slack, top_k, n, world, own)


def test_the_limit_of_a_slot_is_the_same_number_on_the_device_as_on_the_host() -> None:
    """One row more than the limit is too many, whatever floating-point type computes the product."""
    for slack, top_k, max_tokens, n in itertools.product(
        (1.1, 1.15, 1.3, 1.7), (1, 2, 3), (1000, 4097, 30_000_001), (1, 2, 4, 5)
    ):
        limit = slot_rows(slack, top_k, max_tokens, n)
        slots = Slots(slack=slack, top_k=top_k, degrees=(n,), own_rank=None)
        for rows, deeper in ((limit, 0), (limit + 1, 1)):
            counts = torch.zeros(2 * n, 1, 1, dtype=torch.int64)
            counts[0] = rows
            (depth,) = slots.depths(counts, torch.tensor(max_tokens))
            assert int(depth) == deeper, (slack, top_k, max_tokens, n, rows)


def test_chunks_are_doubled_as_long_as_possible_and_cut_into_bins_at_last() -> None:
    assert cuts(4, 48) == (4, 8, 16, 48)
    assert cuts(1, 60) == (1, 2, 4, 12, 60)
    assert cuts(7, 7) == (7,)
    for n, bins in ((3, 48), (5, 105), (16, 240)):
        finer = cuts(n, bins)
        assert (finer[0], finer[-1]) == (n, bins)
        assert all(b % a == 0 and b > a for a, b in itertools.pairwise(finer))


def test_bins_of_two_degrees_let_each_of_them_be_cut_until_all_chunks_fit() -> None:
    """3 or 4 chunks are cut in 12 bins, of which the first has all rows.

    A slot of 3 chunks holds 400 rows, one of 4 holds 300: the rows of one bin do not fit, however chunks are
    cut.
    """
    counts = torch.zeros(12, 1, 1, dtype=torch.int64)
    slots = Slots(slack=1.0, top_k=1, degrees=(3, 4), own_rank=None)
    for rows, depths in ((300, [0, 0]), (350, [0, 1]), (1200, [2, 1])):
        counts[0] = rows
        assert [int(depth) for depth in slots.depths(counts, torch.tensor(1200))] == depths
    counts[:] = 100  # as even as rows can be
    assert [int(depth) for depth in slots.depths(counts, torch.tensor(1200))] == [0, 0]


def test_with_copies_rows_that_are_sent_or_stay_must_fit_too() -> None:
    """A rank has 800 tokens in 8 bins. A slot of one chunk holds 500 rows on 2 ranks, and 750 on 4."""

    def depths(slack: float, staying: int, hosted: int, peers: int) -> list[int]:
        """Rows in each bin: that stay, of own tokens for a copy on this rank, and from other ranks."""
        slots = Slots(slack=slack, top_k=1, degrees=(1, 2), own_rank=0, num_staying=1, total_slack=1.25)
        recv_FWE = torch.tensor([[staying, hosted], [peers, 0]]).expand(8, 2, 2)
        return [int(depth) for depth in slots.depths(recv_FWE, torch.tensor(800), torch.full((8,), 100))]

    assert depths(0.625, 50, 0, 50) == [0, 0]  # even
    assert depths(0.625, 0, 0, 50) == [1, 1]  # all 800 rows are sent
    assert depths(0.625, 100, 0, 0) == [1, 1]  # all 800 rows stay
    assert depths(0.625, 40, 30, 40) == [1, 1]  # 560 rows arrive
    assert depths(0.9375, 40, 0, 85) == [0, 0]  # 320 rows stay and 680 arrive, together 1,000
    assert depths(0.9375, 40, 0, 86) == [1, 1]


def test_one_chunk_that_does_not_fit_is_cut_as_two_chunks_where_there_are_copies() -> None:
    with_copies = Slots(slack=0.625, top_k=1, degrees=(4, 1, 2), own_rank=0, total_slack=1.25)
    without = replace(with_copies, total_slack=None)
    for depths, expected in (([1, 0, 2], 0), ([1, 1, 0], 1), ([1, 1, 2], 3), ([1, 3, 2], 3)):
        assert without.agreed(depths) == {4: depths[0], 1: depths[1], 2: depths[2]}
        agreed = with_copies.agreed(depths)
        assert agreed == {4: depths[0], 1: expected, 2: depths[2]}
        if expected:
            assert cuts(1, 48)[agreed[1]] == cuts(2, 48)[agreed[2]]
    assert [with_two(degrees) for degrees in ((1,), (4, 1), (1, 2), (3,))] == [
        (1, 2),
        (4, 1, 2),
        (1, 2),
        (3,),
    ]


def test_there_are_bins_enough_to_cut_a_batch_of_one_rank_into_all_ranks_shares() -> None:
    assert [num_bins(degrees, 3, 9) for degrees in ((1,), (2,), (4, 2), (3, 2))] == [4, 8, 16, 24]
    # With copies of busy experts, slots are smaller than an even chunk on few ranks.
    assert [num_bins((4,), ranks, 9, 1.25 * (ranks - 1) / ranks) for ranks in (2, 4, 8)] == [16, 32, 32]
    assert [num_bins((4,), ranks, 2 * ranks) for ranks in (1, 2, 5, 64, 128)] == [4, 8, 32, 256, 256]


def test_on_many_ranks_there_are_fewer_bins() -> None:
    """Counts then need at most a hundredth of the bytes of 4,096 rows of 4,096 columns. Bins are no fewer
    than chunks.
    """
    assert [num_bins((4,), ranks, ranks) for ranks in (256, 257, 512, 4096, 2**20)] == [256, 128, 128, 16, 4]
    for ranks in (64, 512, 4096):
        assert (HEADER + num_bins((4,), ranks, ranks)) * ranks * 4 <= 0.01 * 4096 * 4096 * 2


ROWS = {
    "local": {"local": True, "remote": False},
    "remote": {"local": False, "remote": True},
    "both": {"local": True, "remote": True},
    "sharded": {"local": False, "remote": True, "sharded": True, "shared": True, "gradients": True},
    "hooked": {"local": False, "remote": True, "sharded": True, "hooked": True},
}


def every_schedule() -> Iterator[tuple[str, Schedule, Restore | None]]:
    for n, rows in itertools.product(range(1, 6), ROWS.values()):
        for pair in (None, *ALL_PAIRS):
            yield f"forward {n} {rows} {pair}", rotating_forward(n, Stages(**rows), restore=pair), pair
        for pair, other in itertools.product(ALL_PAIRS, (False, True)):
            name = f"backward {n} {rows} {pair} {other}"
            yield name, rotating_backward(n, Stages(**rows), restore=pair, rearranged=other), pair


def test_every_read_of_a_slot_sees_its_own_write_and_awaits_it() -> None:
    """Every write waits for the readers of what it overwrites, directly or through other tasks."""
    for name, schedule, _ in every_schedule():
        assert link(schedule.tasks, schedule.slots) == schedule.tasks
        before: dict[str, set[str]] = {}
        holds: dict[str, tuple[str, str]] = {}  # slot -> buffer, writer
        readers: dict[str, list[str]] = {}
        for task in schedule.tasks:
            behind = before[task.name] = set(task.waits).union(*(before[each] for each in task.waits))
            for buffer in task.reads:
                slot = schedule.slots.get(buffer)
                if slot is not None:
                    assert holds[slot][0] == buffer, (name, task.name, buffer)
                    assert holds[slot][1] in behind, (name, task.name, buffer)
                    readers[slot].append(task.name)
            for buffer in task.writes:
                slot = schedule.slots.get(buffer)
                if slot is not None:
                    assert set(readers.get(slot, ())) - {task.name} <= behind, (name, task.name, buffer)
                    assert slot not in holds or holds[slot][1] in behind
                    holds[slot], readers[slot] = (buffer, task.name), []


def test_every_read_that_no_task_wrote_is_an_input_or_was_left_by_forward() -> None:
    """Besides its slots, backward reads gradients, T_I, weights, and what the restore pair keeps."""
    for name, schedule, pair in every_schedule():
        written: set[str] = set()
        found: set[str] = set()
        for task in schedule.tasks:
            found |= {buffer.rpartition(".")[0] or buffer for buffer in task.reads if buffer not in written}
            written |= set(task.writes)
        allowed = {"T_I", "T_I_L", "weight"} if name.startswith("forward") else {"dT_O", "dT_O_L", "dw"}
        if not name.startswith("forward"):
            assert pair is not None
            if pair.dispatched == "communicate":
                allowed |= {"T_I"}
            for tensor, fate in (("T_DI", pair.dispatched), ("T_M", pair.hidden)):
                if fate == "keep":
                    allowed |= {tensor, f"{tensor}_L", f"{tensor}_sorted"}
                if fate == "offload":
                    allowed |= {f"host_{tensor}", f"host_{tensor}_L"}
        assert found <= allowed, (name, found - allowed)


def slots_of(schedule: Schedule, ring: str) -> list[str]:
    """Returns the slots of a ring, in the order of the tasks that write its buffers."""
    order = [buffer for task in schedule.tasks for buffer in task.writes if buffer in schedule.slots]
    slots = [schedule.slots[buffer] for buffer in dict.fromkeys(order)]
    return [slot for slot in slots if slot.partition("[")[0] == ring]


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
def test_received_rows_and_results_rotate_through_two_slots_and_hidden_through_one_or_two(
    pair: Restore,
) -> None:
    for n, rows in itertools.product(range(2, 7), ("remote", "both")):
        forward = rotating_forward(n, Stages(**ROWS[rows]), restore=pair)
        backward = rotating_backward(n, Stages(**ROWS[rows]), restore=pair)
        alternating = [i % 2 for i in range(n)]
        for schedule, ring in ((forward, "T_DI"), (forward, "T_DO"), (forward, "send"), (backward, "dT_DO")):
            assert slots_of(schedule, ring) == [f"{ring}[{i}]" for i in alternating]
        assert slots_of(backward, "dT_DI") == [f"dT_DI[{i}]" for i in alternating]
        if pair.dispatched != "keep":
            assert slots_of(backward, "T_DI") == [f"T_DI[{i}]" for i in alternating]
        units = n * (2 if rows == "both" else 1)
        used = {"keep": [], "recompute": [0] * units, "offload": alternating}[pair.hidden]
        stay = n if rows == "both" and pair.hidden == "offload" else 0
        for schedule in (forward, backward):
            assert slots_of(schedule, "T_M") == [f"T_M[{i}]" for i in used]
            assert slots_of(schedule, "T_M_L") == ["T_M_L[0]"] * stay
        for ring, count in Counter(slot.partition("[")[0] for slot in set(backward.slots.values())).items():
            assert count <= 2, ring


TABLES = {
    ("S1", "forward", "both"): """
        G0   | compute     |
        S0   | communicate | G0
        P    | communicate |
        G1   | compute     |
        S1   | communicate | G1
        L0   | compute     |
        LDI0 | copy out    | L0
        LDM0 | copy out    | L0
        C0   | compute     | S0 P L0
        DI0  | copy out    | S0 C0
        DM0  | copy out    | C0
        R0   | communicate | C0
        G2   | compute     | G0 S0
        S2   | communicate | G2 S0 C0 DI0
        L1   | compute     | L0 C0 LDM0
        LDI1 | copy out    | L1
        LDM1 | copy out    | L1
        C1   | compute     | S1 P L1 C0
        DI1  | copy out    | S1 C1
        DM1  | copy out    | C1
        R1   | communicate | C1
        O0   | compute     | L0 R0
        C2   | compute     | S2 P C0 C1 DI0 DM0 R0
        DI2  | copy out    | S2 C2
        DM2  | copy out    | C2
        R2   | communicate | C2 R0 O0
        O1   | compute     | L1 R1
        L2   | compute     | L0 L1 C2 LDI0 LDM1 O0
        LDI2 | copy out    | L2
        LDM2 | copy out    | L2
        O2   | compute     | L2 R2
    """,
    ("S1", "forward", "local"): """
        L0   | compute  |
        LDI0 | copy out | L0
        LDM0 | copy out | L0
        O0   | compute  | L0
        L1   | compute  | L0 O0
        LDI1 | copy out | L1
        LDM1 | copy out | L1
        O1   | compute  | L1
        L2   | compute  | L0 L1 LDI0 LDM0 O1
        LDI2 | copy out | L2
        LDM2 | copy out | L2
        O2   | compute  | L2
    """,
    ("S1", "backward", "both"): """
        G2   | compute     |
        S2   | communicate | G2
        G1   | compute     |
        S1   | communicate | G1
        LHI2 | copy in     |
        LHM2 | copy in     |
        HI2  | copy in     |
        HM2  | copy in     |
        L2   | compute     | LHI2 LHM2
        LW2  | compute     | LHI2 L2
        LHI1 | copy in     |
        LHM1 | copy in     | L2 LW2
        C2   | compute     | S2 HI2 HM2 L2 LW2
        R2   | communicate | C2
        W2   | compute     | HI2 C2 S2 LW2
        G0   | compute     | G2 S2
        S0   | communicate | G0 S2 C2 W2
        HI1  | copy in     |
        HM1  | copy in     |
        L1   | compute     | LHI1 LHM1 C2 L2 W2 LW2
        LW1  | compute     | LHI1 L1 W2
        HI0  | copy in     | HI2 C2 W2
        HM0  | copy in     | C2 W2
        C1   | compute     | S1 HI1 HM1 L1 C2 LW1 W2
        R1   | communicate | C1
        W1   | compute     | HI1 C1 S1 LW1
        O2   | compute     | L2 R2
        LHI0 | copy in     | LHI2 L2 LW2
        LHM0 | copy in     | L1 LW1
        C0   | compute     | S0 HI0 HM0 C1 C2 W1 R2
        R0   | communicate | C0 R2 O2
        W0   | compute     | HI0 C0 S0 W1
        O1   | compute     | L1 R1
        P    | communicate | C2 C1 C0
        L0   | compute     | LHI0 LHM0 C0 L1 L2 W0 LW1 O2
        LW0  | compute     | LHI0 L0 W0
        O0   | compute     | L0 R0
    """,
    ("S1", "backward", "local"): """
        LHI2 | copy in |
        LHM2 | copy in |
        LHI1 | copy in |
        LHM1 | copy in |
        L2   | compute | LHI2 LHM2
        LW2  | compute | LHI2 L2
        O2   | compute | L2
        LHI0 | copy in | LHI2 L2 LW2
        LHM0 | copy in | L2 LW2
        L1   | compute | LHI1 LHM1 L2 LW2 O2
        LW1  | compute | LHI1 L1 LW2
        O1   | compute | L1
        L0   | compute | LHI0 LHM0 L1 LW1 O1
        LW0  | compute | LHI0 L0 LW1
        O0   | compute | L0
    """,
    ("S4", "forward", "both"): """
        G0 | compute     |
        S0 | communicate | G0
        P  | communicate |
        G1 | compute     |
        S1 | communicate | G1
        L0 | compute     |
        C0 | compute     | S0 P L0
        R0 | communicate | C0
        G2 | compute     | G0 S0
        S2 | communicate | G2 S0 C0
        L1 | compute     | L0 C0
        C1 | compute     | S1 P C0 L1
        R1 | communicate | C1
        O0 | compute     | L0 R0
        C2 | compute     | S2 P C1 C0 R0
        R2 | communicate | C2 R0 O0
        O1 | compute     | L1 R1
        L2 | compute     | L1 C2 L0 O0
        O2 | compute     | L2 R2
    """,
    ("S4", "forward", "local"): """
        L0 | compute |
        O0 | compute | L0
        L1 | compute | L0 O0
        O1 | compute | L1
        L2 | compute | L1 O1
        O2 | compute | L2
    """,
    ("S4", "backward", "both"): """
        GI2 | compute     |
        SI2 | communicate | GI2
        G2  | compute     |
        S2  | communicate | G2
        GI1 | compute     |
        SI1 | communicate | GI1
        G1  | compute     |
        S1  | communicate | G1
        LM2 | compute     |
        L2  | compute     | LM2
        LW2 | compute     | LM2 L2
        M2  | compute     | SI2 L2 LW2
        C2  | compute     | S2 SI2 M2 L2 LW2
        R2  | communicate | C2
        W2  | compute     | SI2 M2 C2 S2 LW2
        GI0 | compute     | GI2 SI2
        SI0 | communicate | GI0 SI2 M2 C2 W2
        G0  | compute     | G2 S2
        S0  | communicate | G0 S2 C2 W2
        LM1 | compute     | LM2 C2 L2 LW2 W2
        L1  | compute     | LM1 C2 L2 W2 LW2
        LW1 | compute     | LM1 L1 W2
        M1  | compute     | SI1 M2 L1 C2 W2 LW1
        C1  | compute     | S1 SI1 M1 L1 C2 LW1 W2
        R1  | communicate | C1
        W1  | compute     | SI1 M1 C1 S1 LW1
        O2  | compute     | L2 R2
        M0  | compute     | SI0 M1 C1 W1
        C0  | compute     | S0 SI0 M0 C1 C2 W1 R2
        R0  | communicate | C0 R2 O2
        W0  | compute     | SI0 M0 C0 S0 W1
        O1  | compute     | L1 R1
        P   | communicate | C2 C1 C0
        LM0 | compute     | LM1 C0 L1 LW1 W0
        L0  | compute     | LM0 C0 L1 L2 W0 LW1 O2
        LW0 | compute     | LM0 L0 W0
        O0  | compute     | L0 R0
    """,
    ("S4", "backward", "local"): """
        LM2 | compute |
        L2  | compute | LM2
        LW2 | compute | LM2 L2
        O2  | compute | L2
        LM1 | compute | LM2 L2 LW2
        L1  | compute | LM1 L2 LW2 O2
        LW1 | compute | LM1 L1 LW2
        O1  | compute | L1
        LM0 | compute | LM1 L1 LW1
        L0  | compute | LM0 L1 LW1 O1
        LW0 | compute | LM0 L0 LW1
        O0  | compute | L0
    """,
}


def table(text: str) -> list[tuple[str, str, tuple[str, ...]]]:
    found = []
    for line in text.strip().splitlines():
        name, lane, waits = (part.strip() for part in line.split("|"))
        found.append((name, lane, tuple(waits.split())))
    return found


@pytest.mark.parametrize("strategy, direction, rows", TABLES)
def test_the_schedule_of_three_chunks_is_this_table(strategy: str, direction: str, rows: str) -> None:
    rotating = rotating_forward if direction == "forward" else rotating_backward
    schedule = rotating(3, Stages(**ROWS[rows]), restore=STRATEGIES[strategy])
    assert [(t.name, t.lane.value, t.waits) for t in schedule.tasks] == table(
        TABLES[strategy, direction, rows]
    )


# ---- slots in memory


def sizes_of(rows: tuple[int, ...]) -> BufferSizes:
    """Returns the sizes of forward's buffers with S4, where chunk i sends and receives rows[i] rows."""
    no_rows = (0,) * len(rows)
    regrouped = (False,) * len(rows)
    extent = ChunkRows(send=rows, received=rows, local=no_rows, home=rows, regrouped=regrouped)
    columns = HiddenColumns(hidden=8, scratch=8)
    return BufferSizes(
        direction="forward", extent=extent, d_model=4, columns=columns, restore=STRATEGIES["S4"]
    )


def new_schedule() -> Schedule:
    """Returns a schedule of forward with S4, without any layout."""
    return replace(rotating_forward(3, Stages(local=False, remote=True), restore=STRATEGIES["S4"]))


def test_each_buffer_has_its_shape_in_its_slot_and_slots_do_not_overlap() -> None:
    schedule = new_schedule()
    sizes = sizes_of((5, 0, 7))
    layout = slot_layout(schedule, sizes, 4)
    elements = slot_elements(schedule, sizes)
    assert layout.total == sum(layout.spans)
    assert all(span >= size for span, size in zip(layout.spans, elements.values(), strict=True))
    slots = list(elements)
    for buffer, slot in schedule.slots.items():
        rows, columns = sizes.shape(buffer)
        if not rows:
            assert buffer not in layout.view_of_buffer
            continue
        assert layout.views[layout.view_of_buffer[buffer]] == (slots.index(slot), rows, columns)


def test_a_schedule_keeps_its_layouts_by_all_numbers_on_which_they_depend() -> None:
    schedule = new_schedule()
    layout = slot_layout(schedule, sizes_of((5, 0, 7)), 4)
    assert slot_layout(schedule, sizes_of((5, 0, 7)), 4) is layout
    others = [
        slot_layout(schedule, sizes_of((5, 0, 8)), 4),
        slot_layout(schedule, sizes_of((5, 0, 7)), 8),
        slot_layout(schedule, replace(sizes_of((5, 0, 7)), d_model=6), 4),
        slot_layout(schedule, replace(sizes_of((5, 0, 7)), restore=None), 4),
    ]
    assert all(other is not layout for other in others)
    for rows in range(3 * MOST_LAYOUTS):
        slot_layout(schedule, sizes_of((rows, rows, rows)), 4)
        assert len(schedule.layouts) <= MOST_LAYOUTS
