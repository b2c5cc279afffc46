"""Mistakes in pass programs: waits, memory, and conditions of records."""

from __future__ import annotations

from tests.levels import MAKE_TEST
from tests.plants.plant import Plant

LEVEL = MAKE_TEST

COMPILER = "pmoe/program/compiler.py"
OPERANDS = "pmoe/program/operands.py"
CUT = "cuda/program/cut.h"
PROGRAM_TESTS = "tests/unit/test_program.py"

PROGRAM = (
    Plant(
        name="program-wait-skipped",
        breaks="the interpreter leaves out the first wait of each record",
        file="cuda/program/interpreter.h",
        old="for (int64_t w = 0; w < record.waits; ++w)",
        new="for (int64_t w = 1; w < record.waits; ++w)",
        tests=f"{PROGRAM_TESTS} -k calls_keep",
    ),
    Plant(
        name="program-begins-too-early",
        breaks="lanes do not wait until the compute lane has reached the pass",
        file=COMPILER,
        old="needed = waits or [BEGIN]",
        new="needed = waits",
        tests=f"{PROGRAM_TESTS} -k calls_keep",
    ),
    Plant(
        name="program-host-memory-while-it-is-read",
        breaks="copies out overwrite host memory that an earlier pass still reads",
        file=COMPILER,
        old="return [HOST_IS_READ, *needed] if lane is Lane.COPY_OUT else needed",
        new="return needed",
        tests=f"{PROGRAM_TESTS} -k copies_to_the_host",
    ),
    Plant(
        name="program-sum-never-overwritten",
        breaks="the first gradient of a parameter is added to memory that nothing has written",
        file=COMPILER,
        old="adds = int(self.num_weight_gradients > 0)",
        new="adds = 1",
        tests=f"{PROGRAM_TESTS} -k without_tokens",
    ),
    Plant(
        name="program-slots-not-aligned",
        breaks="ring slots begin where the one before ends",
        file=CUT,
        old="arena_bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;",
        new="arena_bytes += bytes;",
        tests=f"{PROGRAM_TESTS} -k ring_slots_lie",
    ),
    Plant(
        name="program-received-rows-of-the-own-rank",
        breaks="rows that stay also count as received",
        file=CUT,
        old="const bool stays = header.keeps_own && rank == counts.rank;",
        new="const bool stays = false;",
        tests=f"{PROGRAM_TESTS} -k the_cut_gives",
    ),
    Plant(
        name="program-results-of-the-wrong-rows",
        breaks="results stay sorted by expert in the buffer that is sent back",
        file=OPERANDS,
        old="return self.buffer(name, unit.chunk), self.regroup(unit.chunk)",
        new="return self.buffer(name, unit.chunk), self.nowhere",
        tests="tests/gloo/test_program.py -k engine_does",
    ),
    Plant(
        name="program-two-events-for-one-copy",
        breaks="a task whose rows an earlier task has copied does not share that task's event",
        file=COMPILER,
        old="if self.records[last].signal < 0:",
        new="if True:",
        tests=f"{PROGRAM_TESTS} -k calls_keep",
    ),
    Plant(
        name="program-home-of-rows-that-stay",
        breaks="results of rows that stay are written over results that return",
        file=OPERANDS,
        old=", row=chunk_number(ChunkNumber.SENT, i))",
        new=")",
        tests="tests/gloo/test_program.py -k engine_does",
    ),
    Plant(
        name="bounded-weights-of-all-chunks-together",
        breaks="routing weights of a bounded pass begin at the same place for all chunks",
        file=COMPILER,
        old="sent=(chunk_number(ChunkNumber.SENT, i), chunk_number(ChunkNumber.SENT_BEGIN, i)),",
        new="sent=(chunk_number(ChunkNumber.SENT, i), CallNumber.ZERO),",
        tests="tests/gloo/test_bounded_programs.py -k engine_does",
    ),
    Plant(
        name="bounded-rows-that-exist-though-they-do-not-fit",
        breaks="a rank whose rows do not fit computes the others",
        file="pmoe/program/bounded.py",
        old="    counts_WnWL = counts_WnWL * fits\n",
        new="",
        tests="tests/unit/test_program_bounded.py",
    ),
)
