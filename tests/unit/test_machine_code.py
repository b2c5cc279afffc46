"""Rules for the machine code of every kernel, and its costs, for both element types; without a GPU.

For each rule a mistake is planted in the real code of a kernel, which the rule must find.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from bench import bench_shapes
from tests.cuda import machine_code
from tests.cuda.disassembly import archs, count, declared, opcode, resources, sass

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.usefixtures("extension_built"),
]  # machine code is read for a minute

Rule = Callable[[Sequence[str]], list[str]]
WAITING = ("comet.", "flashdmoe.", "route", "permute", "unpermute")
"""Beginnings of the names of kernels that wait, or read what others write while they run."""
PRODUCTS = {"forward": 2, "backward": 4}
"""Number of products in each pass of the persistent kernels."""


def hopper(*prefixes: str) -> dict[str, list[str]]:
    """Returns the code of kernels that use instructions only Hopper has, by name.

    prefixes: beginnings of the names; none returns all.
    """
    found = {
        name: code
        for name, code in sass("sm_90a").items()
        if declared()[name].hopper and name.startswith(prefixes or ("",))
    }
    assert len(found) >= 8
    return found


def expect_none(rule: Rule, kernels: dict[str, list[str]]) -> None:
    found = {name: rule(code) for name, code in kernels.items()}
    assert not any(found.values()), {name: wrong[:3] for name, wrong in found.items() if wrong}


def test_warps_take_no_more_registers_than_their_block_has() -> None:
    for name, code in hopper().items():
        kernel, registers = declared()[name], resources("sm_90a")[name].registers
        assert not machine_code.wrong_registers(code, kernel, registers), name


def test_products_are_in_groups_of_four_of_which_one_is_under_way_beside_the_next() -> None:
    for name, code in hopper("comet.", "grouped_gemm.").items():
        assert not machine_code.wrong_products(code, of_a_group=machine_code.products_a_group(name)), name
    for name, code in hopper("flashdmoe.").items():
        assert not machine_code.wrong_products(code, PRODUCTS[name.split(".")[1]]), name


def test_warps_are_together_where_they_multiply_and_where_clusters_meet() -> None:
    expect_none(machine_code.wrong_convergence, hopper())


def test_kernels_that_wait_have_no_loads_past_the_coherent_caches() -> None:
    for arch in archs():
        expect_none(machine_code.wrong_loads, {n: c for n, c in sass(arch).items() if n.startswith(WAITING)})


def test_no_function_is_called_in_a_loop() -> None:
    """Code for sm_80 calls a few instructions at which a warp's threads meet; that for sm_90a, divisions."""
    others = {n: c for n, c in sass("sm_90a").items() if n.startswith(("route", "permute", "unpermute"))}
    assert len(others) >= 20
    expect_none(machine_code.wrong_calls, hopper("comet.", "grouped_gemm.") | others)


def test_both_element_types_have_the_same_products_loads_barriers_and_waits() -> None:
    kinds = (
        "UTMASTG",
        "HGMMA",
        "HMMA",
        "UTMALDG",
        "BAR",
        "WARPGROUP",
        "USETMAXREG",
        "UCGABAR_ARV",
        "MEMBAR",
        "CCTL",
        "LDSM",
        "STSM",
    )
    for arch in archs():
        for name, code in sass(arch).items():
            if ".bf16" in name:
                other = sass(arch)[name.replace(".bf16", ".fp16")]
                found = {kind: (count(code, kind), count(other, kind)) for kind in kinds}
                assert all(one == two for one, two in found.values()), (name, arch, found)


# ---- planted mistakes


def plant(name: str, old: str, new: str) -> list[str]:
    """Returns the code of a kernel in which the first instruction that has ``old`` has ``new`` instead."""
    code = list(sass("sm_90a")[name])
    index = next(i for i, each in enumerate(code) if old in each)
    code[index] = code[index].replace(old, new)
    return code


TURNS = "grouped_gemm.sm_90a.bf16.forward.turns"
PLAIN, FUSED = "grouped_gemm.sm_90a.bf16.forward", "comet.dispatch_gemm.sm_90a.bf16.forward.hidden.swiglu"


def test_registers_of_which_there_are_too_many_are_found() -> None:
    code = plant(PLAIN, "0xe8", "0xf0")
    assert machine_code.wrong_registers(code, declared()[PLAIN], resources("sm_90a")[PLAIN].registers)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (", gsb0", ""),  # a group that is never ended
        ("WARPGROUP.ARRIVE", "NOP"),  # a fence that is left out
        ("gsb0, 0x0", "gsb0, 0x1"),  # the end does not wait for the last group
        ("gsb0, 0x1", "gsb0, 0x2"),
    ],
)
def test_products_without_their_fence_group_or_wait_are_found(old: str, new: str) -> None:
    assert machine_code.wrong_products(plant(PLAIN, old, new))


def test_products_that_the_compiler_puts_in_a_row_are_found() -> None:
    """A place from which control does not return is planted before the first product."""
    code = sass("sm_90a")[PLAIN]
    first = next(i for i, each in enumerate(code) if opcode(each).startswith("HGMMA"))
    planted = ([*code[:i], "BSSY B0, 0x0", *code[i + 1 :]] for i in range(first, first - 20, -1))
    assert any(map(machine_code.wrong_convergence, planted))


def test_a_load_past_the_coherent_caches_is_found() -> None:
    assert machine_code.wrong_loads(plant(FUSED, "LDG.E ", "LDG.E.CONSTANT "))


def test_a_call_in_a_loop_is_found() -> None:
    assert machine_code.wrong_calls(plant(FUSED, "UTMALDG.2D", "CALL.REL.NOINC"))


def test_a_call_that_does_not_depend_on_a_floats_size_is_found() -> None:
    assert not machine_code.wrong_calls(sass("sm_90a")["route_choose.64"])
    assert machine_code.wrong_calls(plant("route_choose.64", "FCHK", "FSETP"))


# ---- costs


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("64", (215, 255)), ("128", (230, 270, 325)), ("256", (225, 265, 325))],
)
def test_a_choice_by_merged_lists_takes_no_loop_and_no_local_memory(
    name: str, lengths: tuple[int, ...]
) -> None:
    """The lists have 4, 8 and 16 entries. A search for maxima took 146 instructions a choice with 64 experts,
    and 161 with 128.
    """
    kernel = f"route_choose.{name}"
    code = sass("sm_90a")[kernel]
    for merge, most in zip(machine_code.merges(code), lengths, strict=True):
        assert 10 <= count(merge, "SHFL") <= 40
        assert count(merge, "REDUX") == count(merge, "LDL") == 0
        assert machine_code.executed(merge) <= most
    used = resources("sm_90a")[kernel]
    assert used.stack == used.local == 0


@pytest.mark.parametrize(("name", "most"), [("128.many", 24), ("256", 36), ("512", 54)])
def test_a_choice_of_an_expert_by_a_whole_warp_takes_two_reductions_and_no_shuffle(
    name: str, most: int
) -> None:
    """22, 34 and 49 instructions; by maxima over all scores it takes 80 (of one token), 175 and 218."""
    code = sass("sm_90a")[f"route_choose.{name}"]
    choice = machine_code.Code(code).innermost("REDUX")
    assert count(choice, "REDUX") == 2
    assert count(choice, "SHFL") == count(choice, "LDS") == 0
    assert machine_code.executed(choice) <= most
    found = resources("sm_90a")[f"route_choose.{name}"]
    assert found.stack == found.local == 0


def test_a_step_loads_what_the_source_tells_and_is_issued_beside_its_products() -> None:
    """A block loads 128 rows of A and 256 columns of B in each step of depth 64; 128 columns in turns.

    Of an operand that two blocks share, each loads half. The bytes are those of the accelerator.
    """
    for name, code in hopper().items():
        if not machine_code.is_of_one_product(name):
            continue
        found = machine_code.cost(name, code)
        shares_b = name.endswith(".pairs")
        columns = 128 if machine_code.is_in_turns(name) else 256
        if machine_code.gathers_b(name):
            columns = 0  # threads copy B
        assert found.l2_bytes == (128 + columns // (1 + shares_b)) * 64 * 2, name
        assert found.l2_bytes_sharing_a == (columns if shares_b else 64 + columns) * 64 * 2, name
        assert 0 < found.step_cycles < machine_code.tensor_cycles(name), (name, found)


@pytest.mark.parametrize(
    ("name", "steps"),
    [("forward", 3), ("input", 3), ("forward.hidden.swiglu", 4), ("input.hidden_gradient.swiglu", 11)],
)
def test_a_store_in_turns_is_issued_beside_so_many_steps_of_the_other_warpgroup(
    name: str, steps: int
) -> None:
    """A scheduler has one warp of each warpgroup, and issues one instruction a cycle.

    What a warp issues between two of its tiles' products fits into the cycles of that many steps, if it
    stores whole boxes. It waits for the ring there, and for no other warp of its block. It keeps nothing in
    local memory.
    """
    for element in ("bf16", "fp16"):
        kernel = f"grouped_gemm.sm_90a.{element}.{name}.turns"
        between = machine_code.between_tiles(sass("sm_90a")[kernel])
        limit = steps * machine_code.TENSOR_CYCLES_IN_TURNS
        _, most = machine_code.issued_for_boxes(sass("sm_90a")[kernel])
        assert limit / 2 < most <= limit, kernel
        assert count(between, "BAR") == count(between, "UCGABAR_ARV") == 0, kernel
        assert count(between, "LDL") == count(between, "STL") == 0, kernel
        used = resources("sm_90a")[kernel]
        assert used.stack == used.local == 0, kernel


@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("forward.boxes", bench_shapes.PLAIN),
        ("input.boxes", bench_shapes.PLAIN),
        ("weight.boxes", bench_shapes.WEIGHT),
        ("weight.boxes.pairs", bench_shapes.WEIGHT),
        ("weight.boxes.gathered", bench_shapes.WEIGHT_OF_GATHERED),
        ("forward.hidden.swiglu.boxes", bench_shapes.GATED),
    ],
)
def test_a_store_of_boxes_takes_as_many_instructions_as_are_predicted(
    name: str, store: bench_shapes.Store
) -> None:
    """The most are those with a bias. Plain products are predicted with routing weights, without a bias.

    A warp waits for no other warp of its block, and keeps nothing in local memory.
    """
    assert store.instructions is not None
    for element in ("bf16", "fp16"):
        kernel = f"grouped_gemm.sm_90a.{element}.{name}"
        code = sass("sm_90a")[kernel]
        fewest, most = machine_code.issued_for_boxes(code)
        assert fewest <= store.instructions <= most, (kernel, fewest, most)
        between = machine_code.between_tiles(code)
        assert count(between, "BAR") == count(between, "UCGABAR_ARV") == 0, kernel
        assert count(between, "LDL") == count(between, "STL") == 0, kernel
        used = resources("sm_90a")[kernel]
        assert used.stack == used.local == 0, kernel


def test_a_step_with_gathered_rows_of_b_is_issued_beside_its_products() -> None:
    """Each scheduler has one of the four loading warps beside two multiplying ones.

    What they issue in a step fits into the cycles of the step's products. A loading thread has 40 registers.
    """
    for element in ("bf16", "fp16"):
        kernel = f"grouped_gemm.sm_90a.{element}.weight.boxes.gathered"
        code = sass("sm_90a")[kernel]
        loading = machine_code.Code(code).innermost("UTMALDG", "SYNCS.PHASECHK", "LDGSTS")
        issued = machine_code.executed(loading) + machine_code.cost(kernel, code).step_cycles
        assert issued <= machine_code.TENSOR_CYCLES, (kernel, issued)
        assert count(loading, "LDGSTS") == 16, "a thread copies 4 lines of each of 4 boxes"
        registers = {int(number) for each in loading for number in re.findall(r"\bR(\d+)", each)}
        assert max(registers) < 40, kernel


def test_the_fence_comes_before_each_store_of_a_box() -> None:
    """Between the writes of a box (STSM) and its store (UTMASTG) is a fence of the asynchronous proxy."""
    boxed = {name: code for name, code in hopper("grouped_gemm.").items() if count(code, "UTMASTG")}
    assert len(boxed) == 18
    expect_none(machine_code.stores_without_fence, boxed)


def test_a_store_of_a_box_without_its_fence_is_found() -> None:
    code = list(sass("sm_90a")[TURNS])
    store = next(index for index, each in enumerate(code) if opcode(each).startswith("UTMASTG"))
    fence = max(index for index in range(store) if opcode(code[index]).startswith("FENCE"))
    code[fence] = "NOP"
    assert machine_code.stores_without_fence(code)


def test_a_wait_between_tiles_is_found() -> None:
    code = plant(TURNS, "STG.E.128", "BAR.SYNC.DEFER_BLOCKING")
    assert count(machine_code.between_tiles(code), "BAR") == 1
