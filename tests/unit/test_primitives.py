"""Functions of cuda/common/*_ptx.cuh against NVIDIA's own headers, by machine code; without a GPU.

tests/cuda/primitives.cu has a kernel for each function, and one for the same function of CUTLASS, libcu++ or
the runtime. Differences on purpose are listed here; such kernels are compared by kinds of instructions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.cuda.compiled import CUDA, HERE
from tests.cuda.disassembly import functions_of, opcode
from tests.kept import digest, kept
from tests.unit.test_build import find_nvcc
from tests.unit.test_cute import cutlass_headers

pytestmark = pytest.mark.usefixtures("extension_built")

SOURCE = HERE / "primitives.cu"

ON_PURPOSE = {
    "cp_async16": "the next step reads the neighbouring 128 bytes: L2::256B, CUTLASS has L2::128B",
    "mbarrier_wait": "CUTLASS adds how long a thread may sleep",
    "store_async": "16 bytes, CUTLASS has it for 4",
    "tma_load_2d_cutlass": "CUTLASS adds a hint to the L2 cache",
    "tma_load_3d_cutlass": "CUTLASS adds a hint to the L2 cache",
    "tma_load_2d_to_cutlass": "CUTLASS adds a hint to the L2 cache",
    "tma_load_3d_to_cutlass": "CUTLASS adds a hint to the L2 cache",
}
TELLING = ("UTMALDG", "SYNCS", "STAS", "LDGSTS", "PRMT", "BRA", "CALL")
"""Kinds of instructions that both sides must have, if their code differs on purpose."""

PLAIN = {
    "shared_memory": "an address",
    "shared_address": "an address",
    "shfl_xor": "one function of CUDA's own",
    "shfl": "one function of CUDA's own",
    "shfl_up": "one function of CUDA's own",
    "ballot": "one function of CUDA's own",
    "reduce_max": "one function of CUDA's own",
    "sync_warp": "one function of CUDA's own",
    "sync_block": "one function of CUDA's own",
    "make_opaque": "no instruction",
    "read": "C++",
    "write": "C++",
    "store16_shared": "store16",
    "prefetch_l2": "a hint",
    "mbarrier_arrive_remote": "compared inside mbarrier_arrive_at",
    "pin_accumulators": "no instruction; compared inside products",
    "wgmma_fence": "compared inside products",
    "wgmma_commit": "compared inside products",
    "wgmma_wait": "compared inside products",
    "mma_m16n8k16": "by element type: mma_bf16, mma_fp16",
    "wgmma_m64n128k16": "wgmma_m64n256k16 with half of the columns",
    "wgmma_m64n256k16": "by form and element type: wgmma_...",
}
"""Functions for which there is no kernel of the same name, and why."""

MISTAKES = {  # by function: what is written in the place of what
    "tma_load_2d": ("2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}]",
                    "2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%4, %3}]"),
    "tma_load_3d_to": ("{%3, %4, %5}], [%2], %6;", "{%3, %5, %4}], [%2], %6;"),
    "tma_store_2d": ("bulk_group [%0, {%2, %3}], [%1];", "bulk_group [%0, {%3, %2}], [%1];"),
    "bulk_load": ("[%0], [%1], %2, [%3];", "[%0], [%1], %3, [%2];"),
    "bulk_store": ("shared::cta.bulk_group [%0], [%1], %2;", "shared::cta.bulk_group [%0], [%1], 16;"),
    "bulk_wait_read": ("cp.async.bulk.wait_group.read %0;\"", "cp.async.bulk.wait_group.read 3;\""),
    "bulk_wait": ("cp.async.bulk.wait_group %0", "cp.async.bulk.wait_group.read %0"),
    "load_acquire_system": ("ld.acquire.sys", "ld.acquire.gpu"),
    "load_relaxed": ("ld.relaxed.gpu", "ld.acquire.gpu"),
    "store_release_system": ("st.release.sys", "st.relaxed.sys"),
    "add_acq_rel": ("atom.acq_rel", "atom.relaxed"),
    "ldmatrix_x4_trans": ("x4.trans.shared", "x4.shared"),
    "fence_proxy_async": ("fence.proxy.async.shared::cta", "fence.proxy.async.global"),
    "mbarrier_arrive_expect": ("arrive.expect_tx.shared::cta.b64 _", "arrive.shared::cta.b64 _"),
    "mbarrier_arrive_at": ("mbarrier.arrive.shared::cluster.b64 _", "mbarrier.arrive.shared::cta.b64 _"),
    "cluster_address": ("mapa.shared::cluster.u32 %0, %1, %2;", "mov.u32 %0, %1;"),
    "wgmma_weight_bf16": ("%128, %129, p, 1, 1, %131, %132;", "%128, %129, p, 1, 1, %132, 0;"),
    "mma_fp16": ("f32.f16.f16.f32", "f32.bf16.bf16.f32"),
    "pause": ("__nanosleep(64)", "__nanosleep(32)"),
}  # fmt: skip


def make(headers: Path) -> Path:
    """Compiles the kernels with a copy of cuda/ in the folder ``headers``. Returns the file with the machine
    code.

    Skips the test without nvcc or CUTLASS's headers.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc")
    theirs = cutlass_headers()
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    name = f"primitives-{digest([told, SOURCE, *sorted((headers / 'common').glob('*.*h'))])}.cubin"
    words = ["-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-DNDEBUG"]
    words += ["--expt-relaxed-constexpr", "-isystem", str(theirs), "-I", str(headers), str(SOURCE)]

    def compile_to(made: Path) -> None:
        done = subprocess.run([nvcc, *words, "-o", str(made)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "C75" not in done.stderr, done.stderr  # ptxas ignores or serialises an instruction

    return kept(name, compile_to)


def found_code(headers: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Returns (pmoe's instructions, NVIDIA's instructions) by function.

    The compiler writes an access to memory in two ways: with and without knowing that the address is in
    global memory. Both are written alike here, so they compare as equal.
    """
    code = functions_of(make(headers))
    general = re.compile(r"^(@!?U?P\d )?(LD|ST|ATOM)\.E")
    both = {name: [general.sub(r"\1\2G.E", each) for each in code[name]] for name in code}
    names = sorted(name.removeprefix("ours_") for name in both if name.startswith("ours_"))
    return {name: (both[f"ours_{name}"], both[f"theirs_{name}"]) for name in names}


@cache
def today() -> dict[str, tuple[list[str], list[str]]]:
    return found_code(CUDA)


def kinds(code: list[str]) -> set[str]:
    """Returns the kinds of instructions in code that is compared by them only (`TELLING`).

    Sizes of loads, hints and sleeps are left out.
    """
    found = {opcode(each).split(".LTC")[0].removesuffix(".128").removesuffix(".TRYWAIT") for each in code}
    return {each for each in found if each.startswith(TELLING)}


def differing(found: dict[str, tuple[list[str], list[str]]]) -> set[str]:
    return {
        name
        for name, (ours, theirs) in found.items()
        if (kinds(ours) != kinds(theirs) if name in ON_PURPOSE else ours != theirs)
    }


def test_every_function_is_compared_or_said_to_be_plain() -> None:
    names = set()
    for header in (CUDA / "common").glob("*_ptx.cuh"):
        text = header.read_text()
        names |= set(re.findall(r"^__device__ __forceinline__ \w+\*? (\w+)\(", text, re.MULTILINE))
    assert len(names) > 50
    compared = set(today())
    assert names - compared == set(PLAIN)
    assert ON_PURPOSE.keys() <= compared


def test_instructions_are_those_of_cutlass_and_libcu() -> None:
    assert differing(today()) == set()


def test_what_differs_on_purpose_differs() -> None:
    assert {name for name, (ours, theirs) in today().items() if ours != theirs} == set(ON_PURPOSE)


@pytest.mark.nightly
def test_planted_mistakes_are_found(tmp_path: Path) -> None:
    headers = tmp_path / "cuda"
    shutil.copytree(CUDA, headers)
    for old, new in MISTAKES.values():
        changed = 0
        for path in (headers / "common").glob("*_ptx.cuh"):
            text = path.read_text()
            changed += text.count(old)
            path.write_text(text.replace(old, new))
        assert changed == 1, old
    assert differing(found_code(headers)) >= set(MISTAKES)
