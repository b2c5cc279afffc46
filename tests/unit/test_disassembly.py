"""Rules for the machine code of every kernel and architecture; they need no GPU.

Rules for one kernel (its matrix instructions, its widest loads) are in that kernel's other tests.
"""

from __future__ import annotations

import pytest

from tests.cuda.disassembly import archs, count, declared, opcode, resources, sass

REGISTERS = 65536  # of a multiprocessor, 8.0 to 12.0; a block's threads share them
LARGEST_BLOCK = 1024

pytestmark = pytest.mark.usefixtures("extension_built")


@pytest.mark.nightly
def test_what_is_declared_is_in_the_file_for_every_architecture_and_nothing_else_is() -> None:
    assert len(archs()) >= 1
    for arch in archs():
        assert set(sass(arch)) == set(resources(arch)) == set(declared()), arch


STACK_BYTES = {("route_backward", "sm_100"): 40}
"""Bytes of stack that nvcc 13.0 takes beside 64 registers, by (beginning of the name, architecture).

For Blackwell it spills ten registers of the routing's gradient, which is not timed there. Everywhere else
nothing is spilled.
"""


def allowed_stack(name: str, arch: str) -> int:
    """Returns the most bytes of stack that a kernel may have."""
    return STACK_BYTES.get((name.split(".")[0], arch), 0)


def test_no_kernel_has_a_stack() -> None:
    wrong = []
    for arch in archs():
        for name, found in resources(arch).items():
            if found.stack > allowed_stack(name, arch) or found.local:
                wrong.append(f"{name}, {arch}: {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
def test_no_kernel_spills_registers() -> None:
    wrong = []
    for arch in archs():
        for name, code in sass(arch).items():
            spills = [each for each in code if opcode(each).split(".")[0] in ("LDL", "STL")]
            if spills and not allowed_stack(name, arch):
                wrong.append(f"{name}, {arch}: {len(spills)} accesses of local memory, as {spills[0]}")
    assert not wrong, "\n".join(wrong)


def test_a_block_of_every_kernel_finds_its_registers() -> None:
    wrong = []
    for arch in archs():
        for name, kernel in declared().items():
            assert 0 < kernel.threads <= LARGEST_BLOCK, name
            # The hardware gives registers to warps, by eights a thread.
            registers = resources(arch)[name].registers
            if -(-registers // 8) * 8 * -(-kernel.threads // 32) * 32 > REGISTERS:
                wrong.append(f"{name}, {arch}: {registers} registers, {kernel.threads} threads")
    assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
def test_every_kernel_ends() -> None:
    """The code that reads cuobjdump's output finds whole functions."""
    for arch in archs():
        for name, code in sass(arch).items():
            assert count(code, "EXIT") >= 1, f"{name}, {arch}"


def test_the_counter_of_instructions_knows_predicates_and_modifiers() -> None:
    code = ["LDG.E.128 R4, desc[UR4][R2.64]", "@!P0 LDG.E R4, [R2]", "LDGSTS.E R1, [R2]", "@P0 EXIT"]
    assert count(code, "LDG") == 2
    assert count(code, "LDG.E") == 2
    assert count(code, "LDG.E.128") == 1
    assert count(code, "EXIT") == 1
    assert [opcode(each) for each in code] == ["LDG.E.128", "LDG.E", "LDGSTS.E", "EXIT"]
