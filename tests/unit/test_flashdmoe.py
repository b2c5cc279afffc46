"""FlashDMoE's layout, actors and kernels on the CPU.

The layout satisfies the paper's theorem; the actors run as threads under ThreadSanitizer; the kernels' source
runs in the emulator, beside a plain loop.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cuda.compiled import (
    HERE,
    RACE_FOUND,
    SANITIZED,
    THREADS,
    compile_and_run,
    compile_program,
    product_of,
    run_program,
    run_sanitized,
)
from tests.cuda.disassembly import count, declared, opcode, resources, sass

pytestmark = pytest.mark.slow  # programs are compiled

RANKS = (1, 2, 4)
ARCHS = ("sm_80", "sm_90a")
# Each wait left out, signals that order nothing, flags that are not new in each round, and sums over an
# expert's rows before they are complete.
MISTAKES = (
    "no_grant_wait",
    "no_announcement_wait",
    "no_arrival_wait",
    "no_done_wait",
    "no_return_wait",
    "no_routing_wait",
    "choice_of_some_scores",
    "places_of_some_counts",
    "relaxed_signal",
    "reused_flags",
    "sums_of_some_rows",
    "no_wait_for_offsets",
    "offsets_before_they_are_chosen",
)
# The network breaks a promise: a flag arrives before its bytes, bytes arrive in any order, and the bytes of a
# put are written again before it has left.
BROKEN_PUTS = ("flag_before_its_bytes", "puts_in_any_order", "staging_used_again_too_early")


@pytest.fixture(scope="module")
def sanitized() -> Path:
    return compile_program("flashdmoe_protocol_test.cpp", *SANITIZED)


@pytest.fixture(scope="module")
def threads() -> Path:
    return compile_program("flashdmoe_protocol_test.cpp", *THREADS)


@pytest.fixture(scope="module")
def kernel() -> Path:
    return compile_program("flashdmoe_test.cpp", product=product_of("grouped_gemm", "flashdmoe"))


@pytest.fixture(scope="module")
def kernel_with_puts() -> Path:
    # The test has rows of bfloat16 only, and brings what the other files would define.
    product = [name for name in product_of("flashdmoe") if not name.endswith("_fp16.cu")]
    shared = product_of("grouped_gemm")
    return compile_program("flashdmoe_test.cpp", "-DPMOE_LATE_PUTS", product=product, without_flags=shared)


def test_the_layout_is_that_of_table_6_2_and_free_of_conflicts() -> None:
    assert compile_and_run("flashdmoe_layout_test.cpp") == "0 failures\n"


@pytest.mark.parametrize("ranks", RANKS)
def test_rounds_are_right_and_free_of_races(sanitized: Path, ranks: int) -> None:
    ran = run_sanitized(sanitized, "rounds", str(ranks))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(sanitized: Path, mistake: str) -> None:
    ran = run_sanitized(sanitized, "rounds", "2", mistake)
    told = f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
    assert ran.returncode == RACE_FOUND and "data race" in ran.stderr, f"not caught: {told}"


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_puts_between_nodes_give_right_rounds_free_of_races(sanitized: Path, ranks: int) -> None:
    ran = run_sanitized(sanitized, "apart", str(ranks))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("broken", BROKEN_PUTS[:2])
def test_a_promise_about_order_that_puts_break_is_caught(sanitized: Path, broken: str) -> None:
    ran = run_sanitized(sanitized, "apart", "2", broken)
    message = f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
    assert ran.returncode == RACE_FOUND and "data race" in ran.stderr, f"not caught: {message}"


@pytest.mark.nightly
def test_staging_that_is_used_again_before_its_put_has_left_is_caught(sanitized: Path) -> None:
    # With two ranks it is no mistake: a rank's outgoing rows are for one peer, whose grant it awaits.
    ran = run_sanitized(sanitized, "apart", "4", BROKEN_PUTS[2])
    message = f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
    assert ran.returncode == RACE_FOUND or re.search(r"[1-9]\d* failures", ran.stdout), (
        f"not caught: {message}"
    )


def test_puts_call_nvshmem_s_functions_in_order() -> None:
    flags = ("-std=c++20", f"-I{HERE / 'nvshmem'}")
    assert compile_and_run("nvshmem_puts_test.cpp", flags=flags) == "0 failures\n"


@pytest.mark.parametrize("ranks", RANKS)
def test_one_processor_at_a_time_is_enough(threads: Path, ranks: int) -> None:
    run_program(threads, "room", str(ranks))


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_every_write_is_valid_and_no_word_has_two_authors(threads: Path, ranks: int) -> None:
    told = run_program(threads, "writes", str(ranks))
    assert told.endswith("\n0 failures\n") and "a write that is not valid" in told  # the planted one alone


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_waits_for_a_rank_that_does_not_come_end_and_name_it(threads: Path, ranks: int) -> None:
    run_program(threads, "absent", str(ranks))


@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernel_gives_what_a_plain_loop_gives(kernel: Path, arch: str) -> None:
    assert run_program(kernel, arch) == "0 failures\n"


@pytest.mark.parametrize("arch", ARCHS)
def test_backward_gives_the_plain_loop_s_gradients_and_repeats_to_the_bit(kernel: Path, arch: str) -> None:
    assert run_program(kernel, arch, "backward") == "0 failures\n"


@pytest.mark.nightly
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("arch", ARCHS)
def test_ranks_of_several_nodes_get_by_puts_what_ranks_of_one_node_get(
    kernel_with_puts: Path, arch: str
) -> None:
    assert run_program(kernel_with_puts, arch, "apart") == "0 failures\n"


# All ranks of the emulator are in one launch, which ends when all results have arrived. So only threads show
# that staging is used again too early.
@pytest.mark.nightly
@pytest.mark.parametrize("broken", BROKEN_PUTS[:2])
def test_kernels_get_wrong_results_if_puts_break_a_promise(kernel_with_puts: Path, broken: str) -> None:
    with pytest.raises(AssertionError, match=r"\d failures"):
        run_program(kernel_with_puts, "sm_80", "apart", broken)


@pytest.mark.nightly
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("arch", ARCHS)
def test_four_ranks_of_several_nodes_get_the_same(kernel_with_puts: Path, arch: str) -> None:
    assert run_program(kernel_with_puts, arch, "apart thoroughly", timeout=900) == "0 failures\n"


@pytest.mark.nightly
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("arch", ARCHS)
def test_four_ranks_and_every_activation_give_it_too(kernel: Path, arch: str) -> None:
    assert run_program(kernel, arch, "thorough", timeout=900) == "0 failures\n"


@pytest.mark.nightly
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("arch", ARCHS)
def test_backward_of_four_ranks_and_every_activation(kernel: Path, arch: str) -> None:
    assert run_program(kernel, arch, "backward thoroughly", timeout=900) == "0 failures\n"


@pytest.mark.nightly
def test_what_the_accelerator_reads_of_others_needs_its_proxy_fence() -> None:
    flags, product = ("-DPMOE_PLANT=kNoProxyFence",), product_of("grouped_gemm", "flashdmoe")
    with pytest.raises(AssertionError, match="without a fence of the asynchronous proxy"):
        compile_and_run("flashdmoe_test.cpp", "sm_90a", flags=flags, product=product)


# ---- machine code, where there is nvcc


def persistent(path: str, arch: str) -> dict[str, list[str]]:
    found = {name: code for name, code in sass(arch).items() if name.startswith("flashdmoe.")}
    return {name: code for name, code in found.items() if f".{path}." in name}


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
def test_products_of_hopper_s_passes_are_of_warpgroups_behind_loads_by_the_accelerator() -> None:
    found = persistent("sm_90a", "sm_90a")
    assert len(found) == 16
    for name, code in found.items():
        assert any("64x256x16" in each for each in code if "HGMMA" in each), name
        assert count(code, "HMMA") == 0 and count(code, "USETMAXREG") == 2, name
        assert count(code, "UTMALDG") >= 4, name
        fences = [each for each in code if opcode(each).startswith("FENCE.VIEW.ASYNC.G")]
        assert len(fences) == (4 if ".backward." in name else 2), f"{name}: one before each product's loads"
        kernel, resource = declared()[name], resources("sm_90a")[name]
        assert kernel.threads == 384 and kernel.dynamic_shared_bytes <= 227 * 1024, (name, kernel)
        assert resource.registers == 168 and resource.stack == resource.local == 0, (name, resource)
