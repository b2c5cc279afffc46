"""COMET's fused kernels: their source in the emulator, with every thread of every rank, and their machine
code.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.compiled import compile_and_run, compile_program, product_of, run_program
from tests.cuda.disassembly import count, declared, opcode, resources, sass


@pytest.fixture(scope="module")
def program() -> Path:
    return compile_program("comet_test.cpp", product=product_of("grouped_gemm", "comet"))


@pytest.mark.slow
def test_both_kernels_both_ways_give_what_a_plain_loop_gives(program: Path) -> None:
    assert run_program(program, timeout=250) == "ok\n"


@pytest.mark.nightly
def test_a_collective_that_fits_beside_them_holds_up_no_kernel() -> None:
    """A collective that fits beside the kernels never blocks them, even if it never ends.

    The order of launches does not matter. If it does not fit, every wait ends by its time limit.
    """
    compile_and_run("neighbours_test.cpp", product=product_of("grouped_gemm", "comet"))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_more_ranks_activations_and_sizes_give_it_too(program: Path) -> None:
    assert run_program(program, "thorough", timeout=500) == "ok\n"


@pytest.mark.slow
def test_a_wait_that_is_left_out_is_noticed(program: Path) -> None:
    told = run_program(program, "planted", timeout=250)
    assert told.count(": found") == 8 and "NOT" not in told


@pytest.mark.nightly
def test_a_bulk_read_behind_an_acquire_needs_its_proxy_fence() -> None:
    with pytest.raises(AssertionError, match="without a fence of the asynchronous proxy"):
        compile_and_run(
            "comet_test.cpp",
            flags=("-DPMOE_PLANT=kNoProxyFence",),
            product=product_of("grouped_gemm", "comet"),
        )


@pytest.mark.nightly
def test_rows_may_go_through_registers_where_bulk_copies_are_in_doubt() -> None:
    flags = ("-DPMOE_LANE_COPIES",)
    compile_and_run("comet_test.cpp", flags=flags, product=product_of("grouped_gemm", "comet"))


# ---- machine code, where there is nvcc


def fused(path: str, arch: str) -> dict[str, list[str]]:
    found = {
        name: code for name, code in sass(arch).items() if name.startswith("comet.") and f".{path}." in name
    }
    assert len(found) == 20
    return found


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
def test_hopper_code_computes_as_the_unfused_products_do() -> None:
    for name, code in fused("sm_90a", "sm_90a").items():
        assert any("64x256x16" in each for each in code if "HGMMA" in each), name
        assert count(code, "HMMA") == 0, name
        assert count(code, "UTMALDG") >= 2, name
        assert count(code, "USETMAXREG") == 2, name
    for name, code in fused("sm_90a", "sm_80").items():
        assert len([each for each in code if "NOP" not in each]) < 32, f"{name} must be empty elsewhere"


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_sm_80_path_multiplies_by_warps(arch: str) -> None:
    for name, code in fused("sm_80", arch).items():
        assert count(code, "HMMA.16816") >= 64, name


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
def test_rows_travel_in_bulk_or_16_bytes_at_a_time_several_of_them_in_flight() -> None:
    for path, arch in (("sm_90a", "sm_90a"), ("sm_80", "sm_80")):
        for name, code in fused(path, arch).items():
            if path == "sm_90a" and "dispatch" in name:
                bulk = {opcode(each) for each in code if opcode(each).startswith("UBLKCP")}
                assert bulk == {"UBLKCP.S.G", "UBLKCP.G.S"}, name
                continue
            wide = [each for each in code if opcode(each) in ("ST.E.128", "STG.E.128")]
            assert len(wide) >= 8, name
            if "dispatch" in name:  # kInFlight loads before the first store
                loads = [i for i, each in enumerate(code) if opcode(each) == "LDG.E.128"]
                assert any(b - a < 40 for a, b in zip(loads, loads[7:], strict=False)), name


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
def test_flags_are_raised_and_read_at_the_scope_of_the_system() -> None:
    for path, arch in (("sm_90a", "sm_90a"), ("sm_80", "sm_80")):
        for name, code in fused(path, arch).items():
            assert count(code, "MEMBAR.ALL.SYS") >= 1, f"{name}: what a signal announces comes before it"
            assert any(opcode(each).startswith("STG.E.STRONG.SYS") for each in code), name
            assert any(opcode(each).startswith("LDG.E.STRONG.SYS") for each in code), name
            assert count(code, "CCTL.IVALL") >= 1, f"{name}: an acquire forgets what was cached"


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
def test_bulk_reads_of_what_peers_wrote_stand_behind_a_proxy_fence() -> None:
    for name, code in fused("sm_90a", "sm_90a").items():
        fences = [each for each in code if opcode(each).startswith("FENCE.VIEW.ASYNC.G")]
        assert bool(fences) == ("dispatch" in name), f"{name}: {len(fences)}"


@pytest.mark.usefixtures("extension_built")
def test_blocks_fit_the_registers_and_the_shared_memory_that_they_declare() -> None:
    for name, kernel in declared().items():
        if not name.startswith("comet."):
            continue
        # One block a multiprocessor: 227 KiB on 9.0; 99 on 8.6 and 8.9, the least of 8.x and later.
        most, threads = (227 * 1024, 384) if kernel.hopper else (99 * 1024, 256)
        assert kernel.threads == threads and kernel.dynamic_shared_bytes <= most, (name, kernel)
        found = resources("sm_90a" if kernel.hopper else "sm_80")[name]
        assert found.registers == 168 if kernel.hopper else found.registers <= 255, f"{name}: {found}"
        assert found.shared <= 1024 and found.local == 0 and found.stack == 0, f"{name}: {found}"
